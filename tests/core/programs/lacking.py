"""Goes on from a checkpoint that lacks a weight: ``lacking.py FOLDER STRATEGY...``; prints each one's error."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from core import distributed, state
from tests.core import toy, trials
from tests.core.programs.setting import outcome

folder, *names = sys.argv[1:]
found = {}
for name in names:
    here, flags = Path(folder) / name, ["--max_steps", "1", *trials.flags_of(name)]
    toy.run(here, *flags, "--save_steps", "1")
    file = here / "checkpoint-1" / "model.safetensors"
    kept = dict(state.TensorFiles(file))
    if distributed.rank() == 0:
        del kept["head.weight"]
        state.save_tensors(kept, file)
    distributed.sum_over_ranks([0.0])
    engine, model, _ = toy.run(here / "other", *flags, "--save_strategy", "no")
    found[name] = outcome(
        lambda model=model, file=file, put=engine.strategy.put: state.load_model(model, file.parent, put)
    )
distributed.stop()
print(json.dumps(found))
