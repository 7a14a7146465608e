"""How an optimiser step runs over devices that each hold the whole model: one device, DDP, fast DDP.

`Replicated` here and `core.zero.Zero` both average gradients over the ranks, and both have what the engine and its
checkpoints call: `model` to run, `micro_batch` around each forward and backward pass, `backward`, `step`, and the state
by the parameters' names. That state is the whole of it, whichever rank holds which part: a checkpoint goes on at any
number of devices and under either class.
"""

from __future__ import annotations

import warnings
from argparse import Namespace
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core import distributed, host_memory, kernels, optimizers
from core.device import Device
from core.errors import UserError, warn_once
from core.gaudi_config import GaudiConfig
from core.gradients import GradientReducer, synchronize_state

REDUCTION = {"fp32": torch.float32, "bf16": torch.bfloat16}


def check(args: Namespace) -> None:
    """Refuse what does not work together over several devices; say which flags change nothing.

    Raises:
        UserError: names the flags.
    """
    fast, world = args.distribution_strategy == "fast_ddp", distributed.world_size()
    if args.deepspeed and fast:
        raise UserError("--deepspeed and --distribution_strategy fast_ddp both average the gradients; give one")
    if args.deepspeed and args.use_hpu_graphs_for_training:
        raise UserError("--deepspeed and --use_hpu_graphs_for_training: losses became NaN; leave one out")
    if world > 1 and args.use_hpu_graphs_for_training and not fast:
        raise UserError(
            f"--use_hpu_graphs_for_training on {world} devices needs --distribution_strategy fast_ddp:"
            " DDP's hooks do not run when a graph is replayed"
        )
    if args.use_zero3_leaf_promotion and not args.deepspeed:
        raise UserError("--use_zero3_leaf_promotion needs --deepspeed with ZeRO-3")
    given = {
        "ddp_bucket_cap_mb": args.ddp_bucket_cap_mb is not None,
        "ddp_find_unused_parameters": args.ddp_find_unused_parameters,
        "distribution_strategy": fast,
        "reduction_dtype": args.reduction_dtype != "fp32",
    }
    for name in (name for name, is_given in given.items() if is_given):
        if world == 1 or args.deepspeed:
            reason = "the DeepSpeed configuration decides" if args.deepspeed else "there is one device"
            warn_once(f"--{name} has no effect here: {reason}")
    if world > 1 and fast and args.ddp_find_unused_parameters:
        warn_once(
            "--ddp_find_unused_parameters: fast DDP needs no such search, a parameter may lack a gradient at any step"
        )
    if world > 1 and args.reduction_dtype != "fp32" and not (fast or args.deepspeed):
        raise UserError(f"--reduction_dtype {args.reduction_dtype} needs --distribution_strategy fast_ddp")


class Ddp(DistributedDataParallel):
    """Torch's DDP; what it does not have itself is the wrapped model's."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class Replicated:
    """Every rank holds the whole model; gradients are averaged by DDP or fast DDP, or by nobody on one device.

    Args:
        model: on the device. Parameters and buffers of rank 0 are copied to the others.

    Attributes:
        model: what the training loop calls.
        optimizer: as `optimizers.create_optimizer` makes it.
        schedule: None; the engine owns it.
    """

    schedule = None

    def __init__(self, model: nn.Module, args: Namespace, gaudi_config: GaudiConfig, device: Device) -> None:
        self.module = self.model = model
        kernels.place(model, device)
        host_memory.keep(device)
        self.optimizer = optimizers.create_optimizer(model, args, gaudi_config, device)
        self.clipper = optimizers.Clipper(model, args.max_grad_norm, gaudi_config, device)
        self.skip = args.on_nonfinite == "skip"
        self.names = {id(parameter): name for name, parameter in model.named_parameters()}
        # Recorded graphs write into the same gradients again, so those must stay where they are.
        self.forget = not args.use_hpu_graphs_for_training
        self.reducer, self._unlearned = None, False
        if distributed.world_size() == 1:
            return
        synchronize_state(model)
        cap, unused = args.ddp_bucket_cap_mb or device.bucket_cap_mb, args.ddp_find_unused_parameters
        if args.distribution_strategy == "fast_ddp":
            # A recorded graph writes into gradients that stay where they are, and no hook runs in it.
            how = {"overlap": self.forget, "as_views": self.forget}
            self.reducer = GradientReducer(model, device, cap, REDUCTION[args.reduction_dtype], **how)
            return
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # its heir is new in torch 2.13
            self.model = Ddp(
                model,
                bucket_cap_mb=cap,
                find_unused_parameters=unused,
                static_graph=not unused,
                gradient_as_bucket_view=True,
                broadcast_buffers=False,  # at each forward pass; HCCL has not all of their dtypes
                init_sync=False,  # nor at the start: done above
            )
        self._unlearned = not unused

    def micro_batch(self, last: bool) -> AbstractContextManager:
        """The context of one micro-batch's passes: gradients travel with the window's ``last`` one only."""
        self._last = last
        alone = not (last or self._unlearned) and self.model is not self.module
        return self.model.no_sync() if alone else nullcontext()

    def backward(self, loss: torch.Tensor, scale: torch.Tensor) -> None:
        """Add the gradients of ``scale`` times ``loss``, scalars; with the window's last micro-batch they become the
        average over the ranks. Given as a gradient the scale costs no product in either direction.
        """
        if self.reducer and self._last:
            self.reducer.arm()
        try:
            self._learn(loss, scale) if self._unlearned and not self._last else loss.backward(scale)
        except RuntimeError as error:
            if "static_graph" not in str(error):
                raise
            raise UserError(
                "a parameter had a gradient at some steps and none at others: pass --ddp_find_unused_parameters True"
            ) from error
        self._unlearned = False
        if self.reducer and self._last:
            self.reducer.finish()

    def _learn(self, loss: torch.Tensor, scale: torch.Tensor) -> None:
        """DDP learns a static graph from the run's first backward pass, and averages after it: that is undone here.

        Else the window would be rounded in another way than in a run that does not begin, or go on, with it. For this
        one pass the gradients are in memory twice.
        """
        own: dict[nn.Parameter, torch.Tensor] = {}
        parameters = [parameter for parameter in self.module.parameters() if parameter.requires_grad]

        def keep(parameter: nn.Parameter) -> None:
            own[parameter] = parameter.grad.clone()

        hooks = [parameter.register_post_accumulate_grad_hook(keep) for parameter in parameters]
        loss.backward(scale)
        for hook, parameter in zip(hooks, parameters, strict=True):
            hook.remove()
            if parameter in own:
                parameter.grad.copy_(own[parameter])
            else:
                parameter.grad = None

    def step(self) -> torch.Tensor:
        """Clip, update and forget the gradients; returns their norm before clipping, a scalar.

        If it is not finite, no update is made, or one that waits for nothing: see `optimizers.update`. All ranks decide
        alike: it is the norm of the gradients' average.
        """
        norm = self.clipper.clip()
        optimizers.update(self.optimizer, norm, self.skip)
        if not self.forget:
            self.module.zero_grad(set_to_none=False)
            return norm
        for parameter in self.clipper.parameters:  # all that learn; `zero_grad` would walk through every module
            parameter.grad = None
        return norm

    def weights(self, only: Collection[str] | None = None) -> None:
        """Rank 0's module has them all."""

    def named_state(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The optimiser's state, see `optimizers.named_state`."""
        yield from optimizers.named_state(self.optimizer, self.names).items()

    def put(self, own: torch.Tensor, value: torch.Tensor) -> None:
        """Set a parameter or buffer."""
        own.data.copy_(value)

    def load_named_state(self, named: Mapping[str, torch.Tensor], family: str) -> None:
        """Put back what `named_state` gave."""
        optimizers.load_named_state(self.optimizer, self.names, named, family)

    def close(self) -> None:
        """Give back the memory that steps have kept."""
        host_memory.release()
