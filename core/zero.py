"""DeepSpeed's ZeRO behind the same calls as `core.strategies.Replicated`."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch import nn

from core import deepspeed_config, distributed, optimizers
from core.device import Device
from core.errors import UserError, is_main_process
from core.gaudi_config import GaudiConfig
from core.graphs import repeated_blocks
from core.group_norms import GroupNorms


class Zero:
    """DeepSpeed's ZeRO: each rank holds a share of the optimiser's state (1), the gradients (2), the parameters (3).

    Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", 2020.

    Args:
        model: on the device, or sharded as it was built (stage 3).
        config: as `deepspeed_config.resolve` returned it before the model was known.
        total_steps: optimiser steps of the run; None to evaluate only, which needs stage 3.

    Attributes:
        model: DeepSpeed's engine, which the training loop calls like the model.
        optimizer: the one that steps the shares.
        schedule: DeepSpeed's own, if its configuration has one, stepped by `step`; else None.

    Raises:
        UserError: DeepSpeed is not installed, or refuses the configuration.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Namespace,
        gaudi_config: GaudiConfig,
        device: Device,
        config: dict[str, Any],
        total_steps: int | None = None,
    ) -> None:
        deepspeed = load_deepspeed()
        self.module = model
        width = getattr(getattr(model, "config", None), "hidden_size", None)
        config = deepspeed_config.resolve(config, args, distributed.world_size(), width, total_steps, gaudi_config)
        # Any optimiser whose update of an element needs that element alone is right on shares of flat tensors.
        config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
        # `step` looks at the norm that DeepSpeed computes anyway. Its own look would be, at each step, a collective of
        # bytes, which HCCL may not have, and a wait for the device.
        config["bf16"].setdefault("check_grad_overflow", False)
        self.stage = config["zero_optimization"]["stage"]
        if args.use_zero3_leaf_promotion:
            deepspeed.utils.set_z3_leaf_modules(model, list({type(block) for block in repeated_blocks(model)}))
        given: dict[str, Any] = {}
        if total_steps is None:
            config = {key: value for key, value in config.items() if key not in ("optimizer", "scheduler")}
        elif "optimizer" in config:
            given = {"model_parameters": optimizers.parameter_groups(model, args.weight_decay)}
        else:
            given = {"optimizer": optimizers.create_optimizer(model, args, gaudi_config, device)}
        with refusals(args):
            self.model, wrapper, _, schedule = deepspeed.initialize(
                model=model, config=config, dist_init_required=False, **given
            )
        self.zero, self.schedule = wrapper, schedule if "scheduler" in config else None
        self.optimizer = getattr(wrapper, "optimizer", None)
        if self.optimizer:
            self._norms, plain, skip = GroupNorms(wrapper), self.optimizer.step, args.on_nonfinite == "skip"

            def step(optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
                if optimizers.update(optimizer, self._norms.whole(), skip, plain):
                    self.zero.overflow = True  # DeepSpeed's word for it: the step is counted as skipped

            self.optimizer.step = MethodType(step, self.optimizer)  # which DeepSpeed calls for each group

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """The context of one micro-batch's passes; the window's ``last`` one is followed by a step."""
        self.model.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def backward(self, loss: torch.Tensor, scale: torch.Tensor) -> None:
        """Add the gradients of ``scale`` times ``loss``, scalars, and share them out as the stage says."""
        self.model.backward(loss * scale, scale_wrt_gas=False)  # the loss is of the window already

    def step(self) -> torch.Tensor:
        """Clip, update and forget the gradients; returns their norm before clipping, a scalar, or not a number.

        No update, or next to none, is then made: see `optimizers.update`. DeepSpeed 0.19 leaves it out by itself, for
        which it waits for the device at each step, except in bf16 under stages 1 and 2.
        """
        self._norms.forget()
        self.zero.overflow = False
        self.model.step()
        if self.zero.overflow:
            self.optimizer._opt_called = True  # else torch's schedules warn that they are stepped first
            if self.schedule:
                self.schedule.step()  # DeepSpeed left this out, too
        return self._norms.whole()

    def weights(self, only: Collection[str] | None = None) -> dict[str, torch.Tensor]:
        """Gather weights on rank 0's host, trained ones in fp32; the other ranks get none. All ranks call it.

        Args:
            only: names of the parameters that are needed; None for the whole model, buffers included.
        """
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_get_full_fp32_param

        weights = {}
        for name, parameter in self.module.named_parameters():
            if only is not None and name not in only:
                continue
            full = safe_get_full_fp32_param(parameter) if self.optimizer and parameter.requires_grad else None
            with GatheredParameters([parameter], enabled=full is None and self.stage == 3):
                if is_main_process():
                    weights[name] = (parameter if full is None else full).detach().cpu().clone()
        if is_main_process() and only is None:
            tied = dict(self.module.named_parameters(remove_duplicate=False))
            weights |= {name: t.cpu() for name, t in self.module.state_dict().items() if name not in tied}
        return weights

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimiser's state, whole and named as `optimizers.named_state` names it. All ranks read it to its end."""
        from deepspeed.utils import safe_get_full_optimizer_state

        state = self.optimizer.state.get(self._shares()[0])
        if not state:
            return  # no step has been made
        self._link()
        shape = self._shares()[0].shape
        for name, parameter in self.module.named_parameters():
            if not parameter.requires_grad:
                continue
            for key, value in state.items():
                if not isinstance(value, torch.Tensor) or value.shape != shape:
                    yield f"{name}/{key}", torch.as_tensor(value, dtype=torch.float32)
                else:
                    yield f"{name}/{key}", safe_get_full_optimizer_state(parameter, key)

    def _shares(self) -> list[torch.Tensor]:
        """This rank's flat parts of the fp32 parameters: what the optimiser steps."""
        return self.zero.fp32_partitioned_groups_flat if self.stage == 3 else self.zero.single_partition_of_fp32_groups

    def _link(self) -> None:
        """Let DeepSpeed find each parameter's part of the state (stages 1 and 2).

        Version 0.19 does so after the first group's first step: too late for a state that is put back, and too early
        for the other groups, which have none yet.
        """
        if self.stage < 3:
            self.zero._hp_optimizer_states_linked = False
            self.zero._lazy_init_hp_params_optimizer_state()

    def put(self, own: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter, in the working dtype and in this rank's share of the fp32 ones, or a buffer."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        value, trained = value.to(self.model.device), self.optimizer and own.requires_grad
        if not hasattr(own, "ds_id"):
            own.data.copy_(value)
            if trained:
                safe_set_full_fp32_param(own, value.float())
            return
        with GatheredParameters([own], modifier_rank=0):
            if is_main_process():
                own.data.copy_(value)
        if trained:
            safe_set_local_fp32_param(own, _own_part(own, value.float()))

    def load_named_state(self, named: Mapping[str, torch.Tensor], family: str) -> None:
        """Put back a whole state, of this class or of `Replicated`, at any number of ranks.

        Raises:
            UserError: it is of another optimiser, or its parameters have different step counts: a share has one.
        """
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        optimizers.require_family(self.optimizer, family)
        keys = {name.rpartition("/")[2] for name in named} - {"step"}
        steps = {float(named[name]) for name in named if name.endswith("/step")}
        if len(steps) > 1:
            raise UserError(f"the checkpoint's step counts {sorted(steps)} differ; go on without --deepspeed")
        for share in self._shares() if named else []:
            self.optimizer.state[share] = {key: torch.zeros_like(share) for key in sorted(keys)}
            if steps:
                count = torch.tensor(max(steps))
                torchs = type(self.optimizer).__module__.startswith("torch.")
                self.optimizer.state[share]["step"] = count if torchs else int(count)
        if named:
            self._link()
        for name, parameter in self.module.named_parameters():
            for key in keys if parameter.requires_grad else ():
                value = named.get(f"{name}/{key}")
                if value is None:
                    continue
                value = value.to(self.model.device)
                if hasattr(parameter, "ds_id"):
                    safe_set_local_optimizer_state(parameter, _own_part(parameter, value), key)
                else:
                    safe_set_full_optimizer_state(parameter, value, key)

    def close(self) -> None:
        """Take DeepSpeed's hooks off."""
        self.model.destroy()


def _own_part(parameter: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """This rank's part of a whole tensor as stage 3 cuts it: equal parts, the last one filled up with zeros."""
    size = parameter.ds_tensor.numel()
    part = value.flatten()[distributed.rank() * size :][:size]
    return nn.functional.pad(part, (0, size - part.numel()))


def load_deepspeed() -> Any:
    """Import DeepSpeed, which takes the device that `core.run.Run` has chosen.

    Raises:
        UserError: it is not installed.
    """
    os.environ.setdefault("LOCAL_RANK", str(distributed.local_rank()))  # one process without a launcher
    try:
        import deepspeed
    except ImportError as error:
        hint = "on a Gaudi: Habana's fork, else pip install deepspeed"
        raise UserError(f"--deepspeed needs DeepSpeed ({hint}): {error}") from None
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)  # at each collective
    # It would compile an operator of its own for host tensors, for a minute and without a word; gloo is there.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_init_required=False)
    return deepspeed


def keeps_groups() -> bool:
    """Whether DeepSpeed has been at work in this process: it keeps groups of the ranks, and needs them again."""
    comm = sys.modules.get("deepspeed.comm")
    return comm is not None and comm.is_initialized()


@contextmanager
def refusals(args: Namespace) -> Iterator[None]:
    """What DeepSpeed has against its configuration is a `UserError`: it has many kinds of errors for that."""
    try:
        yield
    except (UserError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        raise UserError(f"--deepspeed {args.deepspeed}: DeepSpeed refuses it: {reason}") from error


def announce(args: Namespace, config: dict[str, Any]) -> Any:
    """Make transformers build models sharded from the start, as long as the caller keeps what is returned."""
    load_deepspeed()
    from transformers.integrations import HfDeepSpeedConfig

    with refusals(args):
        return HfDeepSpeedConfig(config)


@contextmanager
def whole_models() -> Iterator[None]:
    """In this block models are built and loaded whole on each rank, also under ZeRO-3, which shards them later.

    For models that are small enough: of sharded ones transformers can neither leave a part of a checkpoint out nor
    draw every kind of weight anew.
    """
    from transformers.integrations import deepspeed

    reference = deepspeed._hf_deepspeed_config_weak_ref
    announced = reference and reference()
    deepspeed.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if announced is not None:
            deepspeed.set_hf_deepspeed_config(announced)
