"""The simulated device behind this package: `runtime` of the ``hpu_simulator`` package. Importing this starts it."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from pathlib import Path

from habana_frameworks import SWITCH

SIMULATOR = "hpu_simulator"


def _find() -> None:
    """Make the ``hpu_simulator`` that this bridge lies in importable: only the bridge's folder is on the path."""
    if SIMULATOR in sys.modules:
        return
    folder = Path(__file__).resolve().parents[2]
    location = folder / "__init__.py"
    spec = importlib.util.spec_from_file_location(SIMULATOR, location, submodule_search_locations=[str(folder)])
    sys.modules[SIMULATOR] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[SIMULATOR])


if not os.environ.get(SWITCH):
    raise ImportError(
        "this is the HPU simulator's bridge, and nobody asked for it: start the program with "
        f"'python -m hpu_simulator program.py', or set {SWITCH}=gaudi2 in the environment"
    )
_find()
runtime = importlib.import_module(f"{SIMULATOR}.runtime")
