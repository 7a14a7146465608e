"""Trains a small autoencoder of pictures, for a run that names no trained one.

Source: Rombach et al., 2022, arXiv 2112.10752, section 3.1 and appendix G: a very small weight keeps the latents near
a standard normal distribution, and they are then divided by their standard deviation. Theirs learns from a perceptual
and an adversarial loss too; small and plain pictures do without.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from core.augment import CropView
from core.device import Device
from core.errors import UserError, say
from core.gradients import synchronize_state
from core.pictures import Pictures

MOST = 2000  # pictures that a small autoencoder learns from


def learn_pictures(model: Any, pictures: Pictures, args: Namespace, device: Device) -> None:
    """Train diffusers' ``AutoencoderKL`` on the middles of pictures; all ranks call it, and it is alike on them.

    Args:
        args: ``resolution`` is the side of the middles, in pixels (None: the model's own), with ``autoencoder_steps``
            and ``seed``.

    Raises:
        UserError: none of the pictures can be read.
    """
    side = args.resolution or model.config.sample_size
    view, nothing = CropView(side, side, center=True, flip=0.0), np.random.default_rng(0)
    seen = (pictures.view(number, view, nothing) for number in range(min(len(pictures), MOST)))
    found = [made[0] for made in seen if made is not None]
    if not found:
        raise UserError(f"of the first {min(len(pictures), MOST):,} images none can be read; mend them or name others")
    images = torch.from_numpy(np.stack(found))
    error = train_autoencoder(model, images, device, args.autoencoder_steps, seed=args.seed)
    say(f"the autoencoder restores {len(images):,} images with a mean square error of {error:.4f} (pixels: -1 to 1)")


def train_autoencoder(
    model: Any,
    images: torch.Tensor,
    device: Device,
    steps: int,
    batch_size: int = 64,
    learning_rate: float = 5e-3,
    seed: int = 42,
    kl_weight: float = 1e-6,
) -> float:
    """Train diffusers' ``AutoencoderKL`` in fp32, and write the ``scaling_factor`` of its latents into its config.

    The loss is the mean square error of pixels from -1 to 1, and ``kl_weight`` times the divergence of a picture's
    latents, all together, from the standard normal distribution. AdamW's rate rises for a tenth of the steps and falls
    along a cosine to 0; gradients are clipped to a norm of 1. All draws are made on the host by a generator of
    ``seed``, from which nobody else draws. Every rank calls this with the same arguments, and then has rank 0's model.

    Args:
        model: its weights as they were drawn. It stays on the device, without gradients.
        images: (n, channels, height, width), uint8, on the host.

    Returns:
        The mean square error of the pictures that it restores from the means of their latents.
    """
    model.to(device.torch_device).train()
    optimizer = _optimizer(model, learning_rate, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(_rate, steps=steps))
    generator = torch.Generator().manual_seed(seed)
    rows = _endless_rows(len(images), batch_size, generator)
    for _ in range(steps):
        pixels = device.move(images[next(rows)]).float() / 127.5 - 1
        posterior = model.encode(pixels).latent_dist
        noise = torch.randn(posterior.mean.shape, generator=generator)
        restored = model.decode(posterior.mean + posterior.std * device.move(noise)).sample
        loss = functional.mse_loss(restored, pixels) + kl_weight * posterior.kl().mean()
        loss.backward()
        device.step_boundary()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        device.step_boundary()
    synchronize_state(model)
    return _measure(model.eval(), images, batch_size, device)


def _optimizer(model: Any, learning_rate: float, device: Device) -> torch.optim.Optimizer:
    """The bridge's kernel takes the rate and the count of steps as tensors: new ones are no new graph."""
    options = {"lr": learning_rate, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
    kernel = device.bridge("hpex.optimizers").FusedAdamW if device.has_habana_kernels else torch.optim.AdamW
    return kernel(model.parameters(), **options)


def _rate(step: int, steps: int) -> float:
    """The share of the learning rate in a step, counted from 0."""
    return min((step + 1) / (0.1 * steps), 1) * (1 + math.cos(math.pi * step / steps)) / 2


def _endless_rows(count: int, batch_size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Row numbers for batch after batch, all of one size: each row once, in a new order, before any comes again."""
    rest = torch.empty(0, dtype=torch.int64)
    while True:
        while len(rest) < batch_size:
            rest = torch.cat([rest, torch.randperm(count, generator=generator)])
        yield rest[:batch_size]
        rest = rest[batch_size:]


@torch.no_grad()
def _measure(model: Any, images: torch.Tensor, batch_size: int, device: Device) -> float:
    """Set the scaling factor, and return the error of restored pictures; the host waits at the end."""
    errors, means, variances = [], [], []
    for batch in images.split(batch_size):
        pixels = device.move(batch).float() / 127.5 - 1
        posterior = model.encode(pixels).latent_dist
        errors.append(functional.mse_loss(model.decode(posterior.mean).sample, pixels) * len(batch))
        means.append(posterior.mean)
        variances.append(posterior.var)
        device.step_boundary()
    variance = torch.cat(means).var(correction=0) + torch.cat(variances).mean()  # of means and of draws around them
    model.register_to_config(scaling_factor=float(variance.rsqrt()))
    return float(torch.stack(errors).sum() / len(images))
