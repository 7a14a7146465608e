"""Trains a model whose buffers depend on a rank's own rows: ``observing.py FOLDER STRATEGY...``; prints the buffers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from core import distributed, state
from tests.core import toy, trials


class Observing(toy.Model):
    """Keeps sums of what it has seen, in dtypes that a backend may lack."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(1))
        self.register_buffer("rows", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("odd", torch.zeros(1, dtype=torch.bool))

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen += batch["inputs"].sum()
        self.rows += int(batch["inputs"].sum())
        self.odd ^= bool(batch["inputs"].sum() % 2)
        return super().forward(batch)


folder, *names = sys.argv[1:]
found = {}
for name in names:
    flags = ["--per_device_train_batch_size", "4", "--max_steps", "2", "--save_steps", "2", *trials.flags_of(name)]
    engine, model, _ = toy.run(Path(folder) / name, *flags, model=Observing())
    engine.writer.finish()  # ranks other than 0 do not wait for the file else
    saved = state.TensorFiles(Path(folder) / name / "checkpoint-2" / "model.safetensors")
    found[name] = {
        "here": [float(getattr(model, buffer)) for buffer in ("seen", "rows", "odd")],
        "saved": [float(saved[buffer]) for buffer in ("seen", "rows", "odd")],
    }
    engine.strategy.close()
distributed.stop()
print(json.dumps(found))
