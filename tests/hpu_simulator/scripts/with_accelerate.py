"""Trains with accelerate: prepared objects, accumulation, clipping, gathered metrics, a saved state that is resumed."""

import argparse
import gc
import json
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--mixed_precision", default="no")
parser.add_argument("--folder", required=True)
args = parser.parse_args()

accelerator = Accelerator(mixed_precision=args.mixed_precision, gradient_accumulation_steps=2)
set_seed(0)
rows = TensorDataset(torch.randn(48, 6), torch.randint(0, 3, (48,)))
model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.BatchNorm1d(16), torch.nn.GELU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=20)
loader = DataLoader(rows, batch_size=4, pin_memory=True)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)


def epoch() -> list[float]:
    model.train()
    losses = []
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                out = model(inputs)
                loss = torch.nn.functional.cross_entropy(out, labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()).mean())
    return torch.stack(losses).tolist()


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    right = [accelerator.gather_for_metrics(model(inputs).argmax(-1) == labels) for inputs, labels in loader]
    return torch.cat(right).float().mean().item()


losses = epoch()
accelerator.save_state(args.folder)
first = epoch()
accelerator.load_state(args.folder)
again = epoch()
with accelerator.autocast():
    first_layer = accelerator.unwrap_model(model)[0](torch.ones(2, 6, device=accelerator.device))
buffers = [accelerator.gather(buffer.float()[None]).tolist() for buffer in accelerator.unwrap_model(model).buffers()]
result = {
    "device": accelerator.device.type,
    "ranks": accelerator.num_processes,
    "dtype": str(first_layer.dtype),
    "losses": losses,
    "first": first,
    "again": again,
    "accuracy": accuracy(),
    "buffers": buffers,
    "total": accelerator.reduce(torch.tensor(float(accelerator.process_index), device=accelerator.device)).item(),
}
if accelerator.is_main_process:
    print(json.dumps(result))
accelerator.end_training()
# A thread of gloo's that lets go of its last tensors while the interpreter ends would abort the process.
model = optimizer = None
gc.collect()
time.sleep(0.2)
