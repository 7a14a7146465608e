"""Ranks compute rows together, in one FOLDER after the other: ``features.py FOLDER...``; each prints what it found.

In a folder's name, RANK becomes the rank's number; in one that is called failing, rank 1 cannot compute a row.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from setting import this_device

from core import distributed
from core.errors import UserError
from core.feature_cache import cached


def one(folder: Path) -> dict[str, object]:
    asked: list[list[int]] = []

    def compute(rows: list[int]) -> dict[str, np.ndarray]:
        asked.append(rows)
        if folder.name == "failing" and rows[0] == 4:
            raise UserError("row 4 cannot be computed")
        numbers = np.array(rows)
        return {"squares": numbers**2, "latents": np.repeat(numbers[:, None], 3, 1).astype(np.float32)}

    try:
        for _ in range(2):
            found = {name: array.tolist() for name, array in cached(folder, "toy", "key", 11, compute, 4).items()}
    except UserError as error:
        found = {"said": str(error)}
    return {"asked": asked, **found}


distributed.start(this_device(), timeout_s=60)
done = [one(Path(name.replace("RANK", str(distributed.rank())))) for name in sys.argv[1:]]
distributed.stop()
print(json.dumps(done))
