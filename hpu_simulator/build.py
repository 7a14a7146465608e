"""Compile the simulated device once, and find it again afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import shutil
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

SOURCES = Path(__file__).with_name("csrc")
NAME = "hpu_simulator_device"


class CompilerMissingError(RuntimeError):
    """There is no C++ compiler or no ninja."""


def load() -> ModuleType:
    """Return the compiled device, building it if this source was never built for this torch and Python.

    Built in the folder that torch uses for its extensions (``TORCH_EXTENSIONS_DIR``, else ``~/.cache``). Processes that
    start at the same time build once: the others wait for the lock, which a killed process leaves free.

    Raises:
        CompilerMissingError: it has to be built, and ``g++`` or ``ninja`` is missing.
    """
    import torch

    sources = sorted(SOURCES.iterdir())
    facts = [torch.__version__, sys.version, sysconfig.get_platform()]
    digest = hashlib.sha256("".join(facts).encode() + b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions")
    folder = root / f"{NAME}_{digest}"
    library = folder / f"{NAME}.so"
    if not library.exists():
        check_compiler()
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "build.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not library.exists():
                _compile([str(path) for path in sources if path.suffix == ".cpp"], folder, library)
    spec = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def check_compiler() -> None:
    """Raise `CompilerMissingError` with what to install if the device cannot be built here."""
    compiler = os.environ.get("CXX", "c++")  # what torch calls
    missing = [name for name in (compiler, "ninja") if shutil.which(name) is None]
    if missing:
        advice = "on Debian or Ubuntu: apt-get install g++ ninja-build (or pip install ninja)"
        raise CompilerMissingError(
            f"the HPU simulator compiles its device once and needs {' and '.join(missing)}; {advice}"
        )


def _compile(sources: list[str], folder: Path, library: Path) -> None:
    from torch.utils import cpp_extension

    for left in folder.glob("build-*"):  # by a killed process: whoever builds now has the lock
        shutil.rmtree(left, ignore_errors=True)
    work = folder / f"build-{os.getpid()}"
    work.mkdir()
    try:
        print("building the simulated HPU, once ...", file=sys.stderr, flush=True)
        os.environ.setdefault("MAX_JOBS", str(max(len(os.sched_getaffinity(0)), 1)))
        cpp_extension.load(
            NAME, sources, extra_cflags=["-O1"], build_directory=str(work), is_python_module=False, verbose=False
        )
        os.replace(work / f"{NAME}.so", library)  # complete, or not there
    finally:
        shutil.rmtree(work, ignore_errors=True)
