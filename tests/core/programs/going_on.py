"""Goes on from others' checkpoints: ``going_on.py FOLDER (STRATEGY SOURCE)...``; prints the weights by strategy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from core import distributed
from tests.core import trials

folder, *given = sys.argv[1:]
found = {}
for name, source in zip(given[::2], given[1::2], strict=True):
    found[name] = trials.cross(trials.flags_of(name), Path(folder) / name, Path(source))
distributed.stop()
print(json.dumps(found))
