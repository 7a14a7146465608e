"""An exponential moving average of the weights that are trained: it draws steadier than the weights of any one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from core.checkpoint import OnMain
from core.errors import UserError
from core.state import TensorFiles, save_tensors

FILE = "ema.safetensors"
STEPS = "/steps"  # beside the parameters in the file; no parameter has such a name


class Ema:
    """Averages of a model's trained parameters, in fp32 whatever their own type is, and on their device.

    After step n each average moves to its parameter by ``1 - min(decay, n / (n + 9))`` of the way: the first step
    copies the parameters, and early ones are soon forgotten. The numbers are those of diffusers' ``EMAModel``.

    Args:
        model: the plain module, in its place, its untrained parameters frozen. Averages begin as its weights.
        decay: how much of an average stays at a step once it is warm, from 0 to below 1, such as 0.9999.

    Raises:
        UserError: the decay is out of range, or the parameters are in shares.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        from diffusers.training_utils import EMAModel

        if not 0 <= decay < 1:
            raise UserError(f"the decay of the averaged weights is {decay}; it must be 0 or more, below 1")
        if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
            raise UserError(
                "--use_ema needs whole parameters on each device, and ZeRO-3 shares them out: use ZeRO-2, or leave out"
                " --use_ema"
            )
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._names, self._parameters = list(trained), list(trained.values())
        self._average = EMAModel(self._parameters, decay=decay)
        self._average.to(dtype=torch.float32)

    @classmethod
    def of(cls, run: Any) -> Ema | None:
        """Averages of a run's placed model, with ``--ema_decay``; those of the checkpoint that the run goes on from.

        Raises:
            UserError: they cannot be made or loaded; or there are some, and ``--use_ema``, without which None is
                returned, is not given.
        """
        if not run.args.use_ema:
            if run.resume_from and (run.resume_from / FILE).is_file():
                raise UserError(f"{run.resume_from} has averages, {FILE}, which would be lost; give --use_ema")
            return None
        averages = cls(run.model, run.args.ema_decay)
        if run.resume_from:
            averages.load(run.resume_from)
        return averages

    @torch.no_grad()
    def step(self) -> None:
        """Take the weights in, after an optimiser step. Waits for nothing; takes memory for one parameter at a time.

        Not ``EMAModel.step``: the share is new at each step, and as a Python number it may be a constant of a graph.
        """
        self._average.optimization_step += 1
        share = torch.tensor(1 - self._average.get_decay(self._average.optimization_step), dtype=torch.float32)
        share = share.to(self._parameters[0].device, non_blocking=True)
        for average, parameter in zip(self._average.shadow_params, self._parameters, strict=True):
            average.sub_((average - parameter).mul_(share))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """In this block the model has the averages; its own weights wait on the host. No training in it."""
        self._average.store(self._parameters)
        try:
            self._average.copy_to(self._parameters)
            yield
        finally:
            self._average.restore(self._parameters)

    def weights(self) -> dict[str, torch.Tensor]:
        """The averages by their parameters' names in the model: not copies, the next step changes them."""
        return dict(zip(self._names, self._average.shadow_params, strict=True))

    def save_pretrained(self, folder: Path) -> None:
        """Write ``ema.safetensors`` for `load`: averages by name, and how many steps they have taken in."""
        steps = torch.tensor(self._average.optimization_step)
        save_tensors({**self.weights(), STEPS: steps}, folder / FILE)

    def save_through(self, main: OnMain, folder: Path) -> None:
        """The same, when ``main`` gets to it, with copies of today's averages."""
        tensors = {**self.weights(), STEPS: torch.tensor(self._average.optimization_step)}
        main.later(save_file, {name: main.copy(tensor) for name, tensor in tensors.items()}, folder / FILE)

    def load(self, folder: Path) -> None:
        """Put back, bit for bit, what `save_pretrained` wrote. The decay stays today's.

        Raises:
            UserError: the file is missing, cannot be read, or is of another model.
        """
        path = folder / FILE
        if not path.is_file():
            raise UserError(
                f"{folder} has no {FILE}: the checkpoint was made without --use_ema; leave it out here, too"
            )
        steps = torch.tensor(0)
        saved, own = TensorFiles(path), {**self.weights(), STEPS: steps}
        if saved.keys() != own.keys():
            differ = sorted(saved.keys() ^ own.keys())[:3]
            raise UserError(f"{path} has other weights than those trained here ({differ}): name its model and adapters")
        for name, tensor in own.items():
            value = saved[name]
            if value.shape != tensor.shape:
                shapes = f"{list(value.shape)} there, {list(tensor.shape)} here"
                raise UserError(f"{path} is of another model: {name} is {shapes}; name that model")
            tensor.copy_(value)
        self._average.optimization_step = int(steps)
