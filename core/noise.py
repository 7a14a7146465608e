"""Training on noise: what is drawn for a row, how it is mixed into the row's latents, and the loss of a prediction.

Torch is imported inside functions: a recipe imports the flags before the execution mode is decided.

A row is mixed with Gaussian noise, more at later timesteps: ``sqrt(a) * latents + sqrt(1 - a) * noise``, where ``a``
falls from about 1 to about 0 as the scheduler's betas say (Ho et al., 2020, arXiv:2006.11239). ``a / (1 - a)`` is the
signal-to-noise ratio, SNR below.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from core.arguments import flag
from core.errors import UserError, warn_once

if TYPE_CHECKING:
    import torch

Prediction = Literal["epsilon", "v_prediction", "sample"]
# Of a scheduler's config: all that says how much noise there is at a timestep.
BETAS = ("num_train_timesteps", "beta_start", "beta_end", "beta_schedule", "trained_betas", "rescale_betas_zero_snr")
BIAS = "timestep_bias_"
BIAS_FLAGS = {
    "none": (),
    "earlier": ("multiplier", "portion"),
    "later": ("multiplier", "portion"),
    "range": ("multiplier", "begin", "end"),
}


@dataclass
class NoiseArguments:
    _argument_group_name = "noise and loss"
    prediction_type: Prediction | None = flag(
        None, "train the network to say the noise, the velocity or the image (default: the scheduler's own)"
    )
    noise_offset: float = flag(0.0, "strength of noise that is one number per channel: darker and brighter images")
    snr_gamma: float | None = flag(None, "weigh timesteps by min-SNR with this gamma, 5 in the paper (default: evenly)")
    timestep_bias_strategy: Literal["none", "earlier", "later", "range"] = flag(
        "none", "draw some timesteps more often: those with less noise, with more, or a range"
    )
    timestep_bias_multiplier: float = flag(1.0, "how much more often")
    timestep_bias_begin: int = flag(0, "range: the first timestep", least=0)
    timestep_bias_end: int = flag(1000, "range: the timestep after the last")
    timestep_bias_portion: float = flag(0.25, "earlier, later: their share of all timesteps")
    use_zero_snr: bool = flag(False, "nothing but noise at the last timestep, in training and drawing")


def scheduler_changes(args: Namespace) -> dict[str, Any]:
    """What the flags change in a scheduler's config, in training, for drawing and in what is saved.

    Zero terminal SNR also needs steps that begin at the last timestep (Lin et al., 2023, arXiv:2305.08891). Give these
    to ``from_config`` as keywords: it overlooks them in a config that lists them as left at their defaults.
    """
    changes: dict[str, Any] = {}
    if args.prediction_type:
        changes["prediction_type"] = args.prediction_type
    if args.use_zero_snr:
        changes |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return changes


class Noise:
    """Draws noise and timesteps on the host; adds the noise, and compares predictions, on the device.

    Args:
        config: ``scheduler.config`` of any scheduler of diffusers that has betas; it is not changed.
        args: `NoiseArguments`.

    Attributes:
        prediction_type: what the network says of noisy latents: ``epsilon`` (their noise), ``sample`` (what they were
            without it) or ``v_prediction`` (``sqrt(a) * noise - sqrt(1 - a) * latents``; Salimans and Ho, 2022,
            arXiv:2202.00512).

    Raises:
        UserError: the scheduler mixes noise in another way, or a flag does not fit it or the other flags.
    """

    def __init__(self, config: Mapping[str, Any], args: Namespace) -> None:
        config = {**config, **scheduler_changes(args)}
        shares = _signal_shares(config)
        self.prediction_type: str = config.get("prediction_type", "epsilon")
        _check(args, self.prediction_type, shares)
        self._offset = np.float32(args.noise_offset)
        chances = np.cumsum(_timestep_weights(len(shares), args))
        self._chances = chances / chances[-1]
        self._signal, self._noise = shares.sqrt(), (1 - shares).sqrt()
        weights = _min_snr_weights(shares, self.prediction_type, args.snr_gamma).float()
        self._weights = None if args.snr_gamma is None else weights  # all are 1

    def draw(self, shape: tuple[int, ...], rng: np.random.Generator) -> dict[str, np.ndarray | np.int64]:
        """Draw what a row of latents of this shape, (channels, height, width), is trained with.

        Four draws in this order, whatever the flags are, so that none of them moves another one's draws: one uniform
        number for the timestep, the posterior's noise, the noise, one number per channel for ``--noise_offset``.

        Returns:
            ``timesteps``: from 0, int64 scalar. ``posterior``: standard normal, fp32, to draw the latents with.
            ``noise``: standard normal plus the offset, fp32. Both have the shape that was asked for.
        """
        timestep = np.searchsorted(self._chances, rng.random(), side="right")
        posterior = rng.standard_normal(shape, dtype=np.float32)
        noise = rng.standard_normal(shape, dtype=np.float32)
        level = rng.standard_normal((shape[0], *[1] * (len(shape) - 1)), dtype=np.float32)
        return {"timesteps": np.int64(timestep), "posterior": posterior, "noise": noise + self._offset * level}

    def place(self, torch_device: torch.device) -> None:
        """Move the tables of all timesteps to the device: what follows then waits for nothing and looks at no value."""
        self._signal, self._noise = self._signal.to(torch_device), self._noise.to(torch_device)
        self._weights = None if self._weights is None else self._weights.to(torch_device)

    def add(self, latents: torch.Tensor, noise: torch.Tensor, timesteps: torch.Tensor) -> torch.Tensor:
        """Return noisy latents, in fp32 under autocast too.

        Args:
            latents: (rows, channels, height, width), a floating type.
            noise: of the same shape.
            timesteps: (rows,), int64, on the same device.
        """
        import torch

        with torch.autocast(latents.device.type, enabled=False):  # operator lists may name bf16 for any of these
            signal, amount = _rows(self._signal, timesteps, latents), _rows(self._noise, timesteps, latents)
            return signal * latents + amount * noise

    def losses(
        self,
        prediction: torch.Tensor,
        latents: torch.Tensor,
        noise: torch.Tensor,
        timesteps: torch.Tensor,
        row_weights: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return each row's mean squared error, times its timestep's and its own weight: fp32 (rows,), autocast or not.

        Args:
            prediction: what the network says of `add`'s latents, of their shape.
            latents: without noise; with ``noise`` and ``timesteps`` as `add` had them.
            row_weights: fp32 (rows,); None for ones.
        """
        import torch
        from torch.nn import functional

        with torch.autocast(latents.device.type, enabled=False):
            target = {"epsilon": noise, "sample": latents}.get(self.prediction_type)
            if target is None:
                signal, amount = _rows(self._signal, timesteps, latents), _rows(self._noise, timesteps, latents)
                target = signal * noise - amount * latents
            losses = functional.mse_loss(prediction.float(), target.float(), reduction="none").flatten(1).mean(1)
            if self._weights is not None:
                losses = losses * self._weights.index_select(0, timesteps)
            return losses if row_weights is None else losses * row_weights


def _rows(table: torch.Tensor, timesteps: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Each row's entry, shaped to be broadcast over it."""
    return table.index_select(0, timesteps).view(-1, *[1] * (like.dim() - 1))


def _signal_shares(config: Mapping[str, Any]) -> torch.Tensor:
    """``a`` of all timesteps, fp32 (timesteps,), as diffusers makes it.

    Not by ``from_config``: it replaces betas that are their own scheduler's defaults by those of another's.

    Raises:
        UserError: the scheduler has no betas, or impossible ones.
    """
    from diffusers import DDPMScheduler

    betas = {key: config[key] for key in BETAS if config.get(key) is not None}
    if not betas.keys() & {"beta_start", "trained_betas"} or config.get("use_flow_sigmas"):
        raise UserError("the pipeline's scheduler has no betas (flow matching?): it is not trained here; name another")
    try:
        shares = DDPMScheduler(**betas).alphas_cumprod
    except (NotImplementedError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the pipeline's scheduler cannot be used for training: {error}; mend its configuration"
        ) from None
    if not ((shares >= 0) & (shares <= 1)).all():  # nan is neither
        raise UserError("the pipeline's scheduler has impossible betas; mend its configuration")
    return shares


def _check(args: Namespace, prediction: str, shares: torch.Tensor) -> None:
    """Refuse flags that do not fit the scheduler or each other, all at once; say which change nothing."""
    strategy, count, problems = args.timestep_bias_strategy, len(shares), []
    if prediction not in Prediction.__args__:
        problems.append(f"the scheduler's prediction_type {prediction!r} is not trained here: give --prediction_type")
    if prediction == "epsilon" and shares[-1] == 0:
        problems.append(
            "with zero terminal SNR (--use_zero_snr, or the scheduler's own) the last timestep is all noise, of which"
            " epsilon says nothing: give --prediction_type v_prediction or sample"
        )
    if args.snr_gamma is not None and not args.snr_gamma > 0:
        problems.append(f"--snr_gamma must be above 0, not {args.snr_gamma}; leave it out to weigh timesteps evenly")
    if strategy != "none" and not args.timestep_bias_multiplier > 0:
        problems.append(f"--timestep_bias_multiplier must be above 0, not {args.timestep_bias_multiplier}")
    if strategy in ("earlier", "later") and not 1 / count <= args.timestep_bias_portion <= 1:
        problems.append(
            f"--timestep_bias_portion must be at most 1, and at least one of {count} timesteps,"
            f" not {args.timestep_bias_portion}"
        )
    begin, end = args.timestep_bias_begin, args.timestep_bias_end
    if strategy == "range" and not 0 <= begin < end <= count:
        problems.append(
            f"--timestep_bias_begin {begin} and --timestep_bias_end {end} must be 0 <= begin < end <= {count}"
        )
    if problems:
        raise UserError("; ".join(problems))
    if args.snr_gamma is not None and shares[-1] == 0:
        warn_once("--snr_gamma gives the last timestep no weight at zero terminal SNR, where drawing begins")
    for field in fields(NoiseArguments):
        name = field.name.removeprefix(BIAS)
        of_bias = name not in ("strategy", field.name) and name not in BIAS_FLAGS[strategy]
        if of_bias and getattr(args, field.name) != field.default:
            warn_once(f"--{field.name} has no effect here: --timestep_bias_strategy is {strategy}")


def _timestep_weights(count: int, args: Namespace) -> np.ndarray:
    """How often each timestep is drawn, fp64 (count,), any sum: as in diffusers' script that trains SDXL."""
    share = int(args.timestep_bias_portion * count)
    begin, end = {
        "none": (0, 0),
        "earlier": (0, share),
        "later": (count - share, count),
        "range": (args.timestep_bias_begin, args.timestep_bias_end),
    }[args.timestep_bias_strategy]
    weights = np.ones(count)
    weights[begin:end] *= args.timestep_bias_multiplier
    return weights


def _min_snr_weights(shares: torch.Tensor, prediction: str, gamma: float | None) -> torch.Tensor:
    """The weight of each timestep's loss, fp64 (timesteps,) (Hang et al., 2023, arXiv:2303.09556).

    In terms of the error of ``sample`` it is ``min(SNR, gamma)``; the other two errors are that error times SNR
    and SNR + 1. An SNR of 0 gives no nan: there is no ``epsilon`` then.
    """
    import torch

    if gamma is None:
        return torch.ones(len(shares), dtype=torch.float64)
    snr = shares.double() / (1 - shares.double())
    return snr.clamp(max=gamma) / {"epsilon": snr, "v_prediction": snr + 1, "sample": 1}[prediction]
