"""A bf16 weight of 1 and a hundred steps of 1e-5: ``small_updates.py FOLDER [FLAG]...``; prints where each way ends.

A way is a line of flags; it ends at the moved weight, as what is saved has it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

from core import distributed
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core import toy

folder, *ways = sys.argv[1:]
found = {}
for number, way in enumerate(ways):
    given = ["--learning_rate", "1e-5", "--max_grad_norm", "0", *way.split()]
    args = toy.arguments(Path(folder) / str(number), *given)
    run = Run(args, GaudiConfig(), "toy")
    model = nn.Linear(2, 2, bias=False).to(torch.bfloat16)
    nn.init.ones_(model.weight)
    strategy = run.train(model, 100)
    for _ in range(100):
        with strategy.micro_batch(True):
            loss = strategy.model(torch.ones(1, 2, dtype=torch.bfloat16)).float().sum()
            strategy.backward(loss, torch.ones_like(loss))
        strategy.step()
    weight = (strategy.weights() or dict(model.named_parameters()))["weight"]
    found[way] = [str(weight.dtype), float(weight.detach().flatten()[0]) - 1]
    strategy.close()
distributed.stop()
print(json.dumps(found))
