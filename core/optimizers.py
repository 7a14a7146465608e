"""AdamW, LAMB, Adafactor and SGD, their schedules and gradient clipping; fused where the device has it."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any

import torch
from torch import nn

from core.device import Device
from core.errors import UserError, did_you_mean, warn_once
from core.gaudi_config import GaudiConfig
from core.lamb import Lamb


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Split trainable parameters into those with decay and those without (biases, norms). No group is empty.

    Raises:
        UserError: nothing is trainable.
    """
    norms = tuple(kind for name, kind in vars(nn).items() if isinstance(kind, type) and "Norm" in name)
    undecayed = {
        id(parameter)
        for path, module in model.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if "bias" in f"{path}.{name}" or isinstance(module, norms) or "norm" in type(module).__name__.lower()
    }
    decayed, rest = [], []
    for parameter in model.parameters():
        if parameter.requires_grad:
            (rest if id(parameter) in undecayed else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise UserError("the model has no trainable parameter")
    return groups


def parse_optim_args(text: str | None, known: Iterable[str]) -> dict[str, Any]:
    """Parse ``key=value,key=value``; values are True, False, None, numbers or words.

    Raises:
        UserError: a part without ``=``, or a key that the optimiser does not have.
    """
    options: dict[str, Any] = {}
    known = list(known)
    for part in filter(None, (text or "").replace(" ", "").split(",")):
        key, equals, value = part.partition("=")
        if not equals or key not in known:
            hint = did_you_mean(key, known) or f"; it has: {', '.join(known)}"
            problem = f"the optimiser has no such option{hint}" if equals else "write key=value"
            raise UserError(f"--optim_args {part}: {problem}")
        words = {"true": True, "false": False, "none": None}
        try:
            options[key] = words[value.lower()] if value.lower() in words else float(value)
        except ValueError:
            options[key] = value
    return options


def create_optimizer(
    model: nn.Module, args: Namespace, gaudi_config: GaudiConfig, device: Device
) -> torch.optim.Optimizer:
    """Build the optimiser of ``--optim`` over the model's trainable parameters.

    AdamW and LAMB take Habana's fused kernels on a Gaudi, AdamW torch's fused kernel elsewhere, if the Gaudi
    configuration says ``use_fused_adam`` (or ``--optim adamw_torch_fused``); none under DeepSpeed. Epsilon, betas and
    decay are always passed: the implementations' own defaults differ.

    Raises:
        UserError: an option does not exist.
    """
    fused = (gaudi_config.use_fused_adam or args.optim == "adamw_torch_fused") and not args.deepspeed
    if gaudi_config.use_fused_adam and not args.optim.startswith("adamw"):
        warn_once(f"the Gaudi configuration's use_fused_adam has no effect with --optim {args.optim}")
    groups = parameter_groups(model, args.weight_decay)
    adam = {"lr": args.learning_rate, "betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optim == "adafactor":
        from transformers.optimization import Adafactor

        known = ["clip_threshold", "decay_rate", "beta1", "scale_parameter"]
        fixed = {"lr": args.learning_rate, "scale_parameter": False, "relative_step": False, "warmup_init": False}
        optimizer = _at_construction(Adafactor, groups, **{**fixed, **parse_optim_args(args.optim_args, known)})
        optimizer._get_lr = _adafactor_rate
        return optimizer
    if args.optim == "sgd":
        options = parse_optim_args(args.optim_args, ["momentum", "nesterov", "dampening"])
        return _at_construction(torch.optim.SGD, groups, lr=args.learning_rate, **options)
    if args.optim == "lamb":
        parse_optim_args(args.optim_args, [])
        if device.has_habana_kernels:
            # Its own clipping is off: by default it would clip at 1.0, whatever --max_grad_norm says.
            return device.bridge("hpex.optimizers").FusedLamb(groups, **adam, max_grad_norm=None)
        return Lamb(groups, **adam)
    if fused and device.has_habana_kernels:
        parse_optim_args(args.optim_args, [])
        return device.bridge("hpex.optimizers").FusedAdamW(groups, **adam)
    options = parse_optim_args(args.optim_args, ["amsgrad", "foreach", "capturable"])
    return _at_construction(torch.optim.AdamW, groups, **adam, **({"fused": True} if fused else {}), **options)


def _adafactor_rate(group: dict[str, Any], state: dict[str, Any]) -> float | torch.Tensor:
    """The class's own choice of the rate compares on the host, which waits for the device at every parameter."""
    return group["lr"] * (state["RMS"].clamp(min=group["eps"][1]) if group["scale_parameter"] else 1.0)


def _at_construction(build: Callable[..., torch.optim.Optimizer], *args: Any, **options: Any) -> torch.optim.Optimizer:
    """Build an optimiser; what it says against its options becomes a `UserError`."""
    try:
        return build(*args, **options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(f"--optim_args: {error}") from None


def create_schedule(
    optimizer: torch.optim.Optimizer, args: Namespace, total_steps: int
) -> torch.optim.lr_scheduler.LRScheduler:
    """Build the learning-rate schedule; warm-up and total are counted in optimiser steps.

    Raises:
        UserError: transformers has no schedule of this name, or the schedule needs options that no flag gives.
    """
    from transformers import SchedulerType, get_scheduler

    names = [kind.value for kind in SchedulerType]
    if args.lr_scheduler_type not in names:
        hint = did_you_mean(args.lr_scheduler_type, names) or f"; one of: {', '.join(names)}"
        raise UserError(f"--lr_scheduler_type: no schedule {args.lr_scheduler_type!r}{hint}")
    warmup = args.warmup_steps or math.ceil(args.warmup_ratio * total_steps)
    if warmup and args.lr_scheduler_type == "constant":
        warn_once("--lr_scheduler_type constant has no warm-up; constant_with_warmup has")
    try:
        schedule = get_scheduler(
            args.lr_scheduler_type, optimizer, num_warmup_steps=warmup, num_training_steps=total_steps
        )
        if "metrics" in signature(schedule.step).parameters:
            raise ValueError("it steps by a metric, not by the optimiser's steps")
        return schedule
    except (TypeError, ValueError) as error:
        raise UserError(f"--lr_scheduler_type {args.lr_scheduler_type} cannot be used here: {error}") from None


class Clipper:
    """Clips the gradients' L2 norm, and tells the norm before clipping.

    Habana's fused clip on a Gaudi if the configuration says ``use_fused_clip_norm``, torch's multi-tensor one
    elsewhere. 0 or None means off: the norm is still measured, nothing is scaled.
    """

    def __init__(self, model: nn.Module, max_norm: float | None, gaudi_config: GaudiConfig, device: Device) -> None:
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.max_norm = max_norm or 0.0
        self.fused = None
        if self.max_norm and gaudi_config.use_fused_clip_norm and device.has_habana_kernels:
            fused = device.bridge("hpex.normalization").FusedClipNorm
            self.fused = fused(self.parameters, self.max_norm)  # the limit is fixed when it is made

    def clip(self) -> torch.Tensor:
        """Clip in place; returns the norm before clipping, a scalar tensor on the device."""
        if self.fused is not None:
            return self.fused.clip_norm(self.parameters).reshape(())  # it has one axis
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if self.max_norm:
            nn.utils.clip_grads_with_norm_(self.parameters, self.max_norm, norm)
        return norm


def update(
    optimizer: torch.optim.Optimizer, norm: torch.Tensor, skip: bool, step: Callable[[], Any] | None = None
) -> bool:
    """Step the optimiser, unless the norm of its gradients is not finite; returns whether that was seen here.

    A norm on the host is read, and the update is left out: neither weights nor state change. On a device that queues
    work, reading would wait for it at each step, so without ``skip`` the update is made as it is, and whoever reads the
    norms later stops. With ``skip`` the device decides: torch's fused kernels and `Lamb` leave the update out as
    exactly. To all others (Habana's kernels, Adafactor, SGD, AdamW that is not fused) the gradients become zeros: all
    stays finite, but the step counts, the moments fade as at any step, and the weights move by momentum and decay.

    Args:
        norm: a scalar, of the gradients before clipping.
        step: in place of the optimiser's own.
    """
    if norm.is_cpu:
        if bad := not math.isfinite(norm.item()):
            optimizer._opt_called = True  # else torch's schedules warn that they are stepped first
        else:
            (step or optimizer.step)()
        return bad
    if skip:
        _leave_out_if(~torch.isfinite(norm), optimizer)
    (step or optimizer.step)()
    return False


@torch.no_grad()
def _leave_out_if(bad: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    """Let the next step do nothing, or little, where ``bad`` is true: a scalar on the device, which stays there."""
    if getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = bad.float()  # as torch's GradScaler tells it
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                parameter.grad.masked_fill_(bad, 0)  # zero times not a number is no number


def named_state(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, torch.Tensor]:
    """Return the optimiser's state as tensors named ``<parameter>/<key>``, the same for fused and plain kernels.

    Habana's kernels count steps per group, torch's per parameter: the count is stored per parameter.

    Args:
        optimizer: any of `create_optimizer`.
        names: the parameters' names by ``id``.
    """
    named: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = dict(optimizer.state.get(parameter, {}))
            if state and "step" in group:
                state["step"] = group["step"]
            for key in [key for key, value in state.items() if value is not None]:
                tensor = state[key] if isinstance(state[key], torch.Tensor) else torch.tensor(state[key])
                named[f"{names[id(parameter)]}/{key}"] = tensor.detach()
    return named


def load_named_state(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], named: Mapping[str, torch.Tensor], saved_family: str
) -> None:
    """Put back what `named_state` returned, converting the step count between fused and plain kernels.

    Args:
        optimizer: any of `create_optimizer`, of the same family as the saved one.
        names: the parameters' names by ``id``.
        named: the saved tensors.
        saved_family: `family` of the optimiser that was saved.

    Raises:
        UserError: the state belongs to another family, or parameters of one group of a kernel that counts steps per
            group have different counts (the conversion would change their bias correction).
    """
    require_family(optimizer, saved_family)
    by_parameter: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in named.items():
        parameter, _, key = name.rpartition("/")
        by_parameter.setdefault(parameter, {})[key] = tensor
    for group in optimizer.param_groups:
        steps = set()
        for parameter in group["params"]:
            state: dict[str, Any] = dict(by_parameter.get(names[id(parameter)], {}))
            if not state:
                optimizer.state.pop(parameter, None)
                continue
            whole = [state[key] for key in ("exp_avg", "exp_avg_sq", "momentum_buffer") if key in state]
            strange = any(tensor.shape != parameter.shape or not tensor.is_floating_point() for tensor in whole)
            if strange or (saved_family in ("adamw", "lamb") and len(whole) < 2):
                raise UserError(f"the checkpoint's {saved_family} state of {names[id(parameter)]} is of another form")
            step = state.pop("step", None)
            optimizer.state[parameter] = {key: value.to(parameter.device) for key, value in state.items()}
            if step is not None and _counts_per_group(optimizer):
                steps.add(int(step.item()))
            elif step is not None:
                optimizer.state[parameter]["step"] = _step_as_kept(optimizer, group, step, parameter)
        if len(steps) > 1:
            counts = f"the checkpoint's step counts {sorted(steps)} differ in a group"
            raise UserError(f"{counts}; set use_fused_adam to false")
        if steps:
            group["step"] = steps.pop()


def require_family(optimizer: torch.optim.Optimizer, saved: str) -> None:
    """Raise a `UserError` unless ``saved`` is the optimiser's own `family`."""
    if saved != family(optimizer):
        raise UserError(f"the checkpoint has a state of {saved}, --optim is {family(optimizer)}; resume with the same")


def family(optimizer: torch.optim.Optimizer) -> str:
    """Name of the algorithm, whichever kernel runs it: state moves within a family only."""
    name = type(optimizer).__name__.lower().removeprefix("deepspeedcpu").removeprefix("fused")
    decoupled = getattr(optimizer, "adam_w_mode", False)  # DeepSpeed's Adam is both
    return "adamw" if name == "adam" and decoupled else name


def _counts_per_group(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__name__.startswith("Fused")


def _step_as_kept(optimizer: torch.optim.Optimizer, group: dict[str, Any], step: torch.Tensor, parameter: Any) -> Any:
    """Torch's kernels keep a count as fp32, beside the parameter if they read it there; Adafactor as an int."""
    if family(optimizer) == "adafactor":
        return int(step.item())
    on_device = group.get("fused") or group.get("capturable")
    return step.to(device=parameter.device if on_device else "cpu", dtype=torch.float32).clone()
