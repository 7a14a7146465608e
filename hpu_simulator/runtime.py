"""The simulated device of this process. Importing this module loads it, and starts its record."""

from __future__ import annotations

import atexit
import os
import sys
import sysconfig
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hpu_simulator import build, report
from hpu_simulator import settings as _settings
from hpu_simulator.units import FOLDER

settings = _settings.read(os.environ)
if settings is None:
    raise ImportError("the HPU simulator is off: start it with python -m hpu_simulator, or set HPU_SIMULATOR=gaudi2")
LAZY_VARIABLE = "PT_HPU_LAZY_MODE"
# uint8 and bool were seen to fail on cards (huggingface/optimum-habana#318, #350). int64 is what torch's own DDP sends
# there, although one report says that it fails (HabanaAI/vllm-fork#1495).
HCCL_DTYPES = frozenset({"float32", "bfloat16", "float16", "int32", "int64"})
lazy: bool = os.environ.get(LAZY_VARIABLE, "0") == "1"  # read once, as the bridge does
device = build.load()

Graph = device.Graph
current_device = device.current_device
set_device = device.set_device
device_count = device.device_count
default_generator = device.default_generator
graph_compilations = device.compilations
note_compilation = device.note_compilation
memory_stats = device.memory_stats
reset_peak_memory_stats = device.reset_peak_memory_stats
reset_accumulated_memory_stats = device.reset_accumulated_memory_stats
set_autocast_lists = device.set_autocast_lists

_LIBRARIES = tuple(
    {
        str(Path(folder).resolve()) + os.sep
        for folder in (
            *(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")),
            Path(torch.__file__).parents[1],
            Path(__file__).parent,
        )
    }
)


def mark_step() -> None:
    """End the lazy graph that is being gathered; nothing to do in eager mode."""
    device.boundary("mark_step")


def synchronize(index: int | None = None) -> None:
    """Wait for the device, which ends a lazy graph; here everything has run already."""
    device.boundary("synchronize")


def make_backend(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Return torch's backend ``hccl``: gloo between processes over the device's memory; in shapes mode a lone rank."""
    if settings.mode == "shapes":
        return device.lone_backend("hccl", rank, size)
    return device.wrap_backend(torch.distributed.ProcessGroupGloo(store, rank, size, timeout))


def user_line() -> str:
    """Return ``file:line`` of the innermost frame that is not a library's, and the script's own if that is another."""
    # No frame is kept in a name here: one that refers to itself would keep its callers' tensors alive.
    inner = _first_user_frame(sys._getframe())  # this one is a library's
    if inner is None:  # a backward pass runs in a thread without Python: the caller waits in it
        inner = _first_user_frame(sys._current_frames().get(threading.main_thread().ident))
    if inner is None:
        return "?"
    place, script = _place(inner), _script()
    while inner is not None and inner.f_code.co_filename != script:
        inner = inner.f_back
    return place if inner is None or _place(inner) == place else f"{place} from {_place(inner)}"


def snapshot() -> dict[str, Any]:
    """Everything that was counted so far, as plain JSON types: what the report is made of."""
    changed, counted = os.environ.get(LAZY_VARIABLE, "0"), device.snapshot()
    for collective in counted["collectives"]:
        collective["supported"] = collective["dtype"] in HCCL_DTYPES
    return {
        "mode": settings.mode,
        "lazy": lazy,
        "lazy_variable_changed": None if changed == str(int(lazy)) else changed,
        "generation": settings.generation.name,
        "devices": settings.devices,
        "rank": settings.rank,
        "world_size": int(os.environ["WORLD_SIZE"]) if settings.rank is not None else None,
        **counted,
    }


def _first_user_frame(frame: Any) -> Any:
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _is_library(name: str, known: dict[str, bool] = {}) -> bool:  # noqa: B006 - a cache
    if name not in known:
        known[name] = name.startswith("<frozen") or os.path.realpath(name).startswith(_LIBRARIES)
    return known[name]


def _script() -> str | None:
    return getattr(sys.modules.get("__main__"), "__file__", None)


def _place(frame: Any) -> str:
    name = frame.f_code.co_filename
    relative = os.path.relpath(name, FOLDER) if os.path.isabs(name) else name
    return f"{name if relative.startswith('..') else relative}:{frame.f_lineno}"


def _start() -> None:
    device.initialize(
        lazy, settings.mode == "shapes", settings.devices, settings.generation.memory_bytes, _settings.LARGE
    )
    device.set_line_callback(user_line)
    register_optimizer_step_pre_hook(lambda *_: device.in_optimizer(True))
    register_optimizer_step_post_hook(lambda *_: device.in_optimizer(False))
    if settings.mode == "shapes":
        from hpu_simulator import alone, shapes

        _settings.launch(settings)  # nobody has, where the environment alone started this
        shapes.start()
        alone.start(device.lone_backend)
    # Python runs these in reverse order: the report first, then no more questions about lines. Then the thread of the
    # last backward pass lets go of its Python objects, which it must not do while Python ends.
    atexit.register(time.sleep, 0.1)
    atexit.register(device.set_line_callback, None)
    report.at_exit(snapshot, settings)


_start()
