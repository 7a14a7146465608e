"""Trains with DeepSpeed, once for each configuration file given; DeepSpeed finds the device by itself."""

import argparse
import json

import deepspeed
import task
import torch
from deepspeed.accelerator import get_accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("configs", nargs="+")
args = parser.parse_args()

deepspeed.init_distributed()
rank, ranks = deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()
found = {
    "device": get_accelerator().device_name(),
    "backend": torch.distributed.get_backend(),
    "losses": [],
    "optimizers": [],
}
for config in args.configs:
    model = task.make_model()
    engine, optimizer, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    losses = []
    for words, labels in task.batches(rank, ranks):
        out = engine(words.to(engine.device))
        loss = torch.nn.functional.cross_entropy(out.float(), labels.to(engine.device))
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        deepspeed.comm.all_reduce(total)
        losses.append(total / ranks)
    found["losses"].append(torch.stack(losses).tolist())
    found["optimizers"].append([type(optimizer).__name__, type(engine.basic_optimizer).__name__])
    engine.destroy()
if rank == 0:
    print(json.dumps(found))
deepspeed.comm.destroy_process_group()
engine = optimizer = loss = None
task.leave()
