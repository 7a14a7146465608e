"""What the simulator does not have raises an error that says so: missing names, missing modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

PACKAGE = __name__.partition(".")[0]


def attribute(module: str) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a module: an `AttributeError` for what the simulator lacks, so `hasattr` works."""
    # With a search path, even an empty one, "from module import name" asks the import system for a name that is
    # missing, and so finds the message below instead of Python's own.
    sys.modules[module].__dict__.setdefault("__path__", [])

    def missing(name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        raise AttributeError(f"the HPU simulator has no {module}.{name}")

    return missing


class _Finder(MetaPathFinder):
    """The last finder, asked when all others found nothing."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Only where a module is being imported: "is there such a module" (importlib.util.find_spec) is answered no.
        # No `name` in the error: Python drops one that names a part of "from package import part".
        if name.startswith(PACKAGE + ".") and sys._getframe(2).f_code.co_name == "_find_and_load_unlocked":
            raise ModuleNotFoundError(f"the HPU simulator has no {name}")
        return None


sys.meta_path.append(_Finder())
