"""Trains with torch's own data parallelism, on a Gaudi if there is one, else on the CPU."""

import contextlib
import json

import task
import torch
import torch.distributed as dist

on_gaudi = hasattr(torch, "hpu") and torch.hpu.is_available()
if on_gaudi:
    import habana_frameworks.torch.core as htcore
    import habana_frameworks.torch.distributed.hccl  # noqa: F401

device = torch.device("hpu" if on_gaudi else "cpu")
dist.init_process_group("hccl" if on_gaudi else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = task.make_model()
with torch.no_grad():
    for value in (*model.parameters(), model[1].running_mean):
        value.add_(rank)  # the first rank's count
model = torch.nn.parallel.DistributedDataParallel(model.to(device), bucket_cap_mb=0.01)
optimizer = torch.optim.AdamW(model.parameters(), lr=task.LEARNING_RATE, eps=task.EPSILON, weight_decay=0.01)
losses = []
for at, (words, labels) in enumerate(task.batches(rank, ranks), 1):
    ends = at % task.MICRO_BATCHES == 0
    with contextlib.nullcontext() if ends else model.no_sync():
        loss = torch.nn.functional.cross_entropy(model(words.to(device)), labels.to(device))
        (loss / task.MICRO_BATCHES).backward()
    if on_gaudi:
        htcore.mark_step()
    if ends:
        torch.nn.utils.clip_grad_norm_(model.parameters(), task.CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if on_gaudi:
            htcore.mark_step()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG if on_gaudi else dist.ReduceOp.SUM)
    losses.append(total if on_gaudi else total / ranks)

every = [torch.empty(8, device=device) for _ in range(ranks)]
dist.all_gather(every, model.module[1].running_mean)
names = [None] * ranks
dist.all_gather_object(names, f"{device.type} {rank}")
part = torch.empty(3, device=device)
dist.reduce_scatter_tensor(part, torch.arange(3.0 * ranks, device=device))
swapped = torch.empty(ranks, device=device)
dist.all_to_all_single(swapped, torch.arange(float(ranks), device=device) + 10 * rank)
if rank == 1:
    dist.send(part, 0)
elif rank == 0:
    dist.recv(part, 1)
dist.barrier()
found = {
    "backend": dist.get_backend(),
    "names": names,
    "losses": torch.stack(losses).tolist(),
    "buffers": [buffer.tolist() for buffer in every],
    "part": part.tolist(),
    "swapped": swapped.tolist(),
}
if rank == 0:
    print(json.dumps(found))
dist.destroy_process_group()
model = optimizer = loss = None
task.leave()
