"""The one autocast context, and the operator lists that a Gaudi applies in it."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from core.device import BRIDGE, Device, bridge_is_installed, decide_execution_mode
from core.errors import UserError, did_you_mean, warn_once
from core.gaudi_config import GaudiConfig

OP_LIST_VARIABLES = {
    "autocast_bf16_ops": "PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST",
    "autocast_fp32_ops": "PT_HPU_AUTOCAST_FP32_OPS_LIST",
}
OLD_VARIABLES = {"LOWER_LIST": "autocast_bf16_ops", "FP32_LIST": "autocast_fp32_ops"}
# Operators that the bridge names otherwise than torch does.
BRIDGE_OPS = frozenset({"iadd", "truediv"})


@dataclass(frozen=True)
class Precision:
    """What autocast does: on operators of which device type, in which dtype, or nothing."""

    enabled: bool
    device_type: str
    name: str

    def autocast(self) -> AbstractContextManager:
        """The context for forward passes and losses; parameters stay fp32."""
        if not self.enabled:
            return nullcontext()
        import torch

        return torch.autocast(device_type=self.device_type, dtype=torch.bfloat16)


def prepare_environment(args: Namespace) -> GaudiConfig:
    """Do all that must happen before torch is imported, for torch loads the bridge, which then reads the environment.

    Loads the Gaudi configuration, writes the operator lists, decides ``args.execution_mode`` (never ``auto`` after).

    Raises:
        UserError: see `GaudiConfig.from_pretrained`, `announce_op_lists` and `decide_execution_mode`.
    """
    gaudi_config = GaudiConfig.from_pretrained(args.gaudi_config)
    announce_op_lists(gaudi_config)
    args.execution_mode = decide_execution_mode(args)
    return gaudi_config


def announce_op_lists(gaudi_config: GaudiConfig) -> None:
    """Write the configuration's operator lists where the bridge looks for them.

    Each list goes into a private temporary folder that only this process uses and that is removed at its end.

    Raises:
        UserError: a variable of old guides is set, a variable is set and the configuration says otherwise, or the
            bridge was imported already and would not see the lists.
    """
    for name, key in OLD_VARIABLES.items():
        if name in os.environ:
            raise UserError(f"the environment sets {name}, which no bridge reads now; use {key!r} in --gaudi_config")
    lists = {key: getattr(gaudi_config, key) for key in OP_LIST_VARIABLES if getattr(gaudi_config, key) is not None}
    for key, ops in list(lists.items()):
        variable = OP_LIST_VARIABLES[key]
        if variable in os.environ:
            path = Path(os.environ[variable])
            if not path.is_file() or path.read_text(encoding="utf-8").split() != ops:
                raise UserError(f"{variable}={path} and {key!r} in --gaudi_config differ; keep one")
            del lists[key]  # said twice, and the same: an earlier run in this process, or the user
    if not lists:
        return
    if BRIDGE + ".core" in sys.modules:
        raise UserError("the bridge was imported before the operator lists of --gaudi_config could be announced")
    if not bridge_is_installed():
        return
    folder = tempfile.mkdtemp(prefix="gaudi-recipes-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for key, ops in lists.items():
        path = Path(folder) / f"{key}.txt"
        path.write_text("".join(f"{op}\n" for op in ops), encoding="utf-8")
        os.environ[OP_LIST_VARIABLES[key]] = str(path)


def effective_op_lists(gaudi_config: GaudiConfig, device: Device) -> dict[str, list[str]]:
    """Return the lists that autocast applies in place of the bridge's own, by their key in the configuration.

    Raises:
        UserError: a list's file is missing, or a name is no operator of torch or the bridge.
    """
    lists: dict[str, list[str]] = {}
    for key, variable in OP_LIST_VARIABLES.items():
        if getattr(gaudi_config, key) is not None:
            lists[key] = list(getattr(gaudi_config, key))
        elif variable in os.environ:
            path = Path(os.environ[variable])
            if not path.is_file():
                raise UserError(f"{variable} names {path}, which is not a file")
            lists[key] = path.read_text(encoding="utf-8").split()
    known = known_ops() if lists else set()
    unknown = [op for ops in lists.values() for op in ops if op not in known]
    if unknown:
        hint = did_you_mean(unknown[0], known)
        raise UserError(f"autocast operator lists: no such operator: {', '.join(unknown)}{hint}")
    if lists and not device.has_op_lists:
        warn_once(f"{' and '.join(lists)} apply to a Gaudi; on {device.name} autocast keeps torch's own lists")
        return {}
    return lists


def known_ops() -> set[str]:
    """Names of the operators that a list may hold: torch's with and without overload, and the bridge's own."""
    import torch

    names = {name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names()}
    return BRIDGE_OPS | names | {name.partition(".")[0] for name in names}


def resolve_precision(args: Namespace, gaudi_config: GaudiConfig, device: Device, deepspeed: bool = False) -> Precision:
    """Decide autocast from ``--bf16``, the Gaudi configuration and ``--half_precision_backend``.

    DeepSpeed does without: it keeps the parameters in bf16 itself, and fp32 ones for the optimiser.
    """
    if not (args.bf16 or gaudi_config.use_torch_autocast):
        if args.half_precision_backend != "auto":
            warn_once(f"--half_precision_backend {args.half_precision_backend} has no effect without --bf16")
        return Precision(False, device.kind, "fp32")
    if not args.bf16:
        warn_once("the Gaudi configuration's use_torch_autocast switches bf16 autocast on although --bf16 is not given")
    if deepspeed:
        return Precision(False, device.kind, "bf16 (DeepSpeed's parameters, its optimiser has them in fp32)")
    wanted = {"auto": device.kind, "hpu_amp": "hpu", "cpu_amp": "cpu"}[args.half_precision_backend]
    if wanted not in (device.kind, "cpu"):
        warn_once(f"--half_precision_backend {args.half_precision_backend}: there is none; it acts on {device.kind}")
        wanted = device.kind
    if wanted != device.kind:
        warn_once(f"--half_precision_backend {args.half_precision_backend}: operators on {device.kind} stay in fp32")
    if not device.has_fast_bf16:
        warn_once(f"--bf16: {device.name} has no bf16 instructions; this run is slower than in fp32")
    return Precision(True, wanted, f"bf16 autocast ({wanted})")
