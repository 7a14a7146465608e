"""hpu, cuda or cpu: which one, in which execution mode, and what it can do. The only file that imports the bridge."""

from __future__ import annotations

import importlib.util
import os
import platform
import sys
from argparse import Namespace
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from core.cards import translated
from core.errors import UserError, warn_once

LAZY_VARIABLE = "PT_HPU_LAZY_MODE"
BRIDGE = "habana_frameworks.torch"


def bridge_is_installed() -> bool:
    """Whether the Gaudi bridge is installed; nothing is imported."""
    return importlib.util.find_spec(BRIDGE.partition(".")[0]) is not None


def decide_execution_mode(args: Namespace, environ: MutableMapping[str, str] = os.environ) -> str:
    """Decide ``lazy``, ``eager`` or ``compile`` from all places that can ask for one, and tell the bridge.

    The bridge reads ``PT_HPU_LAZY_MODE`` once, when it is imported, and torch imports it: call this before torch.

    ==============  ===========  ==========  =============================
    variable        auto         lazy        eager, compile
    ==============  ===========  ==========  =============================
    unset           lazy, eager  lazy        as asked
                    without a
                    bridge
    1               lazy         lazy        error
    0               eager        error       as asked
    ==============  ===========  ==========  =============================

    Raises:
        UserError: two places disagree, the variable is neither 0 nor 1, or the bridge was imported in another mode.
    """
    asked: dict[str, str] = {}
    if args.execution_mode != "auto":
        asked[f"--execution_mode {args.execution_mode}"] = args.execution_mode
    for name in ("torch_compile", "torch_compile_backend", "torch_compile_mode"):
        if getattr(args, name):
            asked[f"--{name} {getattr(args, name)}"] = "compile"
    if args.use_lazy_mode is not None:
        not_lazy = "compile" if "compile" in asked.values() else "eager"
        asked[f"--use_lazy_mode {args.use_lazy_mode}"] = "lazy" if args.use_lazy_mode else not_lazy
    variable = environ.get(LAZY_VARIABLE)
    if variable not in (None, "0", "1"):
        raise UserError(f"the environment has {LAZY_VARIABLE}={variable}; it can be 1 (lazy) or 0 (eager, compile)")
    modes = set(asked.values())
    if len(modes) > 1:
        raise UserError(f"{' and '.join(asked)} contradict each other; give one execution mode")
    if modes and variable is not None and ("lazy" in modes) != (variable == "1"):
        raise UserError(f"{next(iter(asked))} and {LAZY_VARIABLE}={variable} in the environment contradict; mend one")
    default_lazy = variable == "1" if variable is not None else bridge_is_installed()
    mode = modes.pop() if modes else ("lazy" if default_lazy else "eager")
    needed = "1" if mode == "lazy" else "0"
    if BRIDGE in sys.modules and variable != needed:  # unset: it took a default, and those differ
        raise UserError(f"the bridge was imported before {mode} mode was set; export {LAZY_VARIABLE}={needed} first")
    if bridge_is_installed():
        environ[LAZY_VARIABLE] = needed
    return mode


@dataclass
class Device:
    """The device of this process. Code elsewhere asks it for capabilities and never compares its kind.

    Attributes:
        kind: ``hpu``, ``cuda`` or ``cpu``.
        name: what it is, e.g. ``gaudi2``.
        mode: ``lazy``, ``eager`` or ``compile``.
        torch_device: the ``torch.device`` that tensors go to.
        runtime: ``torch.hpu`` or ``torch.cuda``; None on the CPU.
    """

    kind: str
    name: str
    mode: str
    torch_device: Any
    runtime: ModuleType | None = None

    @property
    def has_step_boundaries(self) -> bool:
        """Operations wait for a boundary before they run: lazy mode on a Gaudi."""
        return self.kind == "hpu" and self.mode == "lazy"

    has_hpu_graphs = has_step_boundaries

    @property
    def compiles(self) -> bool:
        """A batch of a new shape costs a compilation."""
        return self.mode == "compile" or self.has_step_boundaries

    @property
    def queues_work(self) -> bool:
        """Calls return before the device has done the work."""
        return self.runtime is not None

    @property
    def has_cuda_graphs(self) -> bool:
        return self.kind == "cuda"

    @property
    def has_habana_kernels(self) -> bool:
        """The bridge's fused optimisers, clipping and attention exist, and autocast reads its two operator lists."""
        return self.kind == "hpu"

    has_fused_attention = has_op_lists = has_habana_kernels

    @property
    def has_fast_bf16(self) -> bool:
        """Matrix products in bf16 are faster than in fp32; a CPU without such instructions emulates them."""
        import torch

        has = torch.backends.mkldnn.is_available
        return self.kind != "cpu" or bool(has() and torch.ops.mkldnn._is_mkldnn_bf16_supported())

    @property
    def draws_masks_on_host(self) -> bool:
        """Dropout masks come from the host's generator, and are no part of a compiled graph."""
        return self.kind == "cpu" and self.mode != "compile"

    @property
    def bucket_cap_mb(self) -> int:
        """Size of the buckets in which gradients travel, unless a flag says otherwise."""
        return 230 if self.kind == "hpu" else 25

    @property
    def compile_backend(self) -> str:
        return "hpu_backend" if self.kind == "hpu" else "inductor"

    def bridge(self, submodule: str) -> ModuleType:
        """Import ``habana_frameworks.torch.<submodule>``. Only where `has_habana_kernels`."""
        return importlib.import_module(f"{BRIDGE}.{submodule}")

    def step_boundary(self) -> None:
        """Let the device start on what has been queued; nothing to do outside lazy mode."""
        if self.has_step_boundaries:
            self.bridge("core").mark_step()

    def synchronize(self) -> None:
        """Wait until the device has finished all queued work."""
        if self.runtime is not None:
            self.step_boundary()
            self.runtime.synchronize()

    def event(self) -> Any:
        """Put an event here in the queue, for ``elapsed_time`` once both are over; None where nothing is queued."""
        if self.runtime is None:
            return None
        (event := self.runtime.Event(enable_timing=True)).record()
        return event

    def check_mode(self) -> None:
        """Raise `UserError` if somebody changed the mode's variable after the bridge had read it."""
        if self.kind != "hpu":
            return
        value, needed = os.environ.get(LAZY_VARIABLE), "1" if self.mode == "lazy" else "0"
        read = "1" if self.bridge("utils.internal").is_lazy() else "0"
        if not value == needed == read:
            raise UserError(f"{LAZY_VARIABLE} became {value}, but the bridge read {read} at its start; undo it")

    def set_dynamic_shapes(self, enabled: bool) -> None:
        """Let the lazy compiler plan for shapes that change, or not; only lazy mode has the switch."""
        if self.has_step_boundaries:
            hpu = self.bridge("hpu")
            (hpu.enable_dynamic_shape if enabled else hpu.disable_dynamic_shape)()

    def memory_stats(self) -> dict[str, int]:
        """Bytes ``InUse``, ``MaxInUse`` and ``Limit`` from the device's own counters (CPU: of this process)."""
        if self.kind == "hpu":
            return self.runtime.memory_stats()
        if self.kind == "cuda":
            used, peak = self.runtime.memory_allocated(), self.runtime.max_memory_allocated()
            return {"InUse": used, "MaxInUse": peak, "Limit": self.runtime.mem_get_info()[1]}
        return _process_memory()

    def reset_peak_memory_stats(self) -> None:
        """Start a new peak."""
        if self.runtime is not None:
            return self.runtime.reset_peak_memory_stats()
        with suppress(OSError), open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # not Linux, or not allowed: it stays the process's own peak

    def manual_seed(self, seed: int) -> None:
        """Seed torch's generator and the device's own, which ``torch.manual_seed`` does not reach on a Gaudi."""
        import torch

        torch.manual_seed(seed)
        if self.kind == "hpu":
            self.bridge("hpu.random").manual_seed_all(seed)

    def rng_state(self) -> dict[str, Any]:
        """State of the random generators that device code draws from: uint8 tensors by name."""
        import torch

        state = {"cpu": torch.get_rng_state()}
        if self.kind == "hpu":
            state["hpu"] = self.bridge("hpu.random").get_rng_state()
        elif self.kind == "cuda":
            state["cuda"] = self.runtime.get_rng_state()
        return state

    def set_rng_state(self, state: dict[str, Any]) -> None:
        """Restore what `rng_state` returned; a state of another kind of device is left out with a warning."""
        import torch

        torch.set_rng_state(state["cpu"].cpu())
        if self.kind != "cpu" and self.kind not in state:
            warn_once(f"the checkpoint has no {self.kind} random state: dropout masks differ from the first run's")
        elif self.kind == "hpu":
            self.bridge("hpu.random").set_rng_state(state["hpu"].cpu())
        elif self.kind == "cuda":
            self.runtime.set_rng_state(state["cuda"].cpu())

    def graph_compilations(self) -> int | None:
        """Graphs that the bridge has compiled so far; None where there is no such counter."""
        metric = self.bridge("hpu.metrics").metric_global("graph_compilation") if self.kind == "hpu" else None
        if metric is None:  # the name differs between bridge versions, too
            return None
        return int(dict(stat[:2] for stat in metric.stats()).get("TotalNumber", 0))

    def move(self, batch: Any, non_blocking: bool = False) -> Any:
        """Copy every tensor of a (nested) batch to the device."""
        if isinstance(batch, dict):
            return {key: self.move(value, non_blocking) for key, value in batch.items()}
        if isinstance(batch, list | tuple):
            moved = [self.move(value, non_blocking) for value in batch]
            return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)
        return batch.to(self.torch_device, non_blocking=non_blocking) if hasattr(batch, "to") else batch


def select_device(args: Namespace, mode: str) -> Device:
    """Take the Gaudi if there is one, else the GPU, else the CPU; ``--use_cpu`` and ``--use_habana`` decide first.

    Raises:
        UserError: ``--use_habana`` and ``--use_cpu`` are given together, or no card can be opened.
    """
    import torch

    if args.cpu_threads:
        torch.set_num_threads(args.cpu_threads)
    if args.use_habana and args.use_cpu:
        raise UserError("--use_habana and --use_cpu contradict each other; give one")
    if not args.use_cpu and args.use_habana is not False and bridge_is_installed():
        with translated():
            importlib.import_module(f"{BRIDGE}.core")
            if int(os.environ.get("WORLD_SIZE") or 1) > 1:  # before anything opens a card: the rank decides which one
                importlib.import_module(f"{BRIDGE}.distributed.hccl").initialize_distributed_hpu()
            if hasattr(torch, "hpu") and torch.hpu.is_available():
                return Device("hpu", _gaudi_name(), mode, torch.device("hpu"), torch.hpu)
    if torch.cuda.is_available() and not args.use_cpu:
        device = Device("cuda", torch.cuda.get_device_name(), mode, torch.device("cuda"), torch.cuda)
    else:
        device = Device("cpu", f"cpu ({_cpu_name()})", mode, torch.device("cpu"))
    if args.use_habana:
        warn_once(f"--use_habana: no Gaudi was found; this run uses {device.name}")
    if mode == "lazy":
        warn_once(f"lazy mode is a Gaudi's own; {device.name} runs in eager mode")
        device.mode = "eager"
    return device


def _gaudi_name() -> str:
    experimental = importlib.import_module(f"{BRIDGE}.utils.experimental")
    kinds, found = experimental.synDeviceType, experimental._get_device_type()
    names = {"synDeviceGaudi": "gaudi", "synDeviceGaudi2": "gaudi2", "synDeviceGaudi3": "gaudi3"}
    return next((name for kind, name in names.items() if getattr(kinds, kind, None) == found), f"hpu ({found})")


def _cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _process_memory() -> dict[str, int]:
    import psutil

    stats = {"InUse": psutil.Process().memory_info().rss, "Limit": psutil.virtual_memory().total}
    try:
        with open("/proc/self/status") as file:
            stats["MaxInUse"] = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM"))
    except (OSError, StopIteration):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        stats["MaxInUse"] = peak if sys.platform == "darwin" else peak * 1024
    return stats
