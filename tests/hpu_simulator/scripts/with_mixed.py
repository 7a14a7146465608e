"""Trains over one group, gloo for the host's tensors and hccl for the device's: with DDP on both, with DeepSpeed."""

import json
import sys

import deepspeed
import habana_frameworks.torch.distributed.hccl  # noqa: F401
import task
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,hpu:hccl")
group, rank, ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
found = {"sums": [], "losses": {}, "optimizers": []}
for device in ("cpu", "hpu"):
    number = torch.full((2,), 1.0 + rank, device=device)
    dist.all_reduce(number)
    found["sums"].append(number.tolist())


def average(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / ranks


for device in ("cpu", "hpu"):
    model = torch.nn.parallel.DistributedDataParallel(task.make_model().to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LEARNING_RATE, eps=task.EPSILON, weight_decay=0.01)
    losses = []
    for at, (words, labels) in enumerate(task.batches(rank, ranks), 1):
        loss = torch.nn.functional.cross_entropy(model(words.to(device)), labels.to(device))
        (loss / task.MICRO_BATCHES).backward()
        if at % task.MICRO_BATCHES == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(average(loss))
    found["losses"][device] = losses

deepspeed.init_distributed()
found["kept"] = dist.group.WORLD is group and deepspeed.comm.get_world_size() == ranks
for config in sys.argv[1:]:
    model = task.make_model()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for words, labels in task.batches(rank, ranks):
        loss = torch.nn.functional.cross_entropy(engine(words.to(engine.device)), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        losses.append(average(loss))
    found["losses"][type(optimizer).__name__ + str(len(found["losses"]))] = losses
    engine.destroy()
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
engine = optimizer = loss = None
task.leave()
