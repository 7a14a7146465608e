"""Trials under the strategies that are named: ``training.py FOLDER NAME...``; each rank prints what it found."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from core import distributed
from tests.core import trials

folder, names = Path(sys.argv[1]), sys.argv[2:]
if any("zero" in name for name in names):
    import deepspeed  # noqa: F401
found: dict[str, Any] = {}
for name in names:
    gc.freeze()  # DeepSpeed collects at each start, and would walk through every library again
    flags, at = trials.flags_of(name), folder / name
    if "offload" in name or "bf16" in name:
        found[name] = {"resume": trials.resume(flags, at / "resume", [5])}
        continue
    one = found[name] = trials.common(flags, at)
    one["resume"] = trials.resume(flags, at / "resume", list(range(1, 12)) if name == "ddp" else [5])
    one["straight"] = trials.cross(flags, at / "saved")
    one["from plain"] = trials.cross(flags, at / "from_plain", folder / "plain")
last, at = trials.flags_of(names[-1]), folder / "failing"
if "zero" in names[-1]:
    found["own schedule"] = trials.own_schedule(folder / "own_schedule.json", folder / "own_schedule")
    found["alone"] = trials.evaluate(trials.flags_of("zero3"), folder / "alone", 13, train=False)
    for precision in ([], ["--bf16"]):
        trials.pretrained(precision, folder)
found["banner"] = trials.banner(last, at / "banner")
found["nan"] = trials.nan(last, at / "nan")
found["unreadable"] = trials.unreadable(last, at / "unreadable")
found["unsaved"] = trials.unsaved(last, at / "unsaved")
distributed.stop()
print(json.dumps(found))
