"""A language model's head on the positions that bear loss alone, instead of on all of them.

Hidden tokens are a seventh of the positions, answers a part of their rows, and padding bears no loss at all; but the
product of every position with the whole vocabulary is most of the work of a small model's step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from core.losses import IGNORED

NARROWING = "_narrowing"  # a model's attribute
ENOUGH = 0.95  # of all positions: leaving so few out costs more than it saves
ALIKE = 0.01  # how much logits may differ by rounding, as a share: another position's are quite different ones


class Narrowing:
    """A hook behind the body of a model, which hands only ``positions`` on to the head, if there are any.

    Attributes:
        positions: int64 (n,), of the flattened (rows, length); None: all.
    """

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None

    def before(self, _head: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The same in front of a head: replace its input, (rows, length, width)."""
        return inputs if self.positions is None else (self._chosen(inputs[0]), *inputs[1:])

    def _chosen(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.flatten(0, 1).index_select(0, self.positions).unsqueeze(0)

    def __call__(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Replace the hidden states of a body's output, (rows, length, width), by those chosen: (1, n, width)."""
        if self.positions is None:
            return output
        chosen = self._chosen(output[0])
        if isinstance(output, tuple):
            return (chosen, *output[1:])
        output[next(iter(output))] = chosen  # an output of transformers
        return output


def narrow(model: nn.Module, device: Any) -> bool:
    """Let the head of a model of transformers see only the targets, within `targets_only`; returns whether it does.

    Not where the number of targets, which differs from batch to batch, costs something: the host would wait for it on a
    device that queues work, and each number would be a new shape to compile. Nor where a model in shards cannot be
    tried, or the trial shows other logits: the head then mixes positions, or does more than the head.
    """
    body = getattr(model, "base_model", model)
    sharded = any(hasattr(parameter, "ds_id") for parameter in model.parameters())
    head = model.get_output_embeddings() if body is model and hasattr(model, "get_output_embeddings") else None
    if device.compiles or device.queues_work or sharded or (body is model and head is None):
        return False
    narrowing = Narrowing()
    # Where the whole is the body, as with an encoder and a decoder, the hook is in front of the head.
    behind = head is None
    handle = (body.register_forward_hook if behind else head.register_forward_pre_hook)(
        narrowing if behind else narrowing.before
    )
    if not _gives_the_same(model, narrowing):
        handle.remove()
        return False
    setattr(model, NARROWING, narrowing)
    return True


def _gives_the_same(model: nn.Module, narrowing: Narrowing) -> bool:
    """Whether the logits of some positions are the same with and without the others; nothing random is drawn."""
    where, training = next(model.parameters()).device, model.training
    chosen = torch.tensor([1, 4, 6], device=where)
    model.eval()
    try:
        words = model.get_input_embeddings().num_embeddings
        ids = torch.arange(1, 9, device=where).remainder(words).view(2, 4)
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if getattr(model.config, "is_encoder_decoder", False):
            inputs["decoder_input_ids"] = ids
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            wanted = model(**inputs).logits.flatten(0, 1)[chosen].float()
            narrowing.positions = chosen
            found = model(**inputs).logits.float()
        return found.shape == (1, *wanted.shape) and bool((found[0] - wanted).norm() <= ALIKE * wanted.norm())
    except Exception:  # whatever a model of any kind says to rows that are not its own
        return False
    finally:
        narrowing.positions = None
        model.train(training)


@contextmanager
def targets_only(model: nn.Module, labels: torch.Tensor) -> Iterator[torch.Tensor]:
    """In this block a model that `narrow` has prepared returns the logits of the targets; yields their labels.

    Args:
        model: or a wrapper that has the attributes of what it wraps.
        labels: (rows, length), -100 where there is no loss.

    Yields:
        Labels for the logits in this block: (1, n), or ``labels`` themselves where the model does as ever.
    """
    narrowing = getattr(model, NARROWING, None)
    if narrowing is None:
        yield labels
        return
    flat = labels.flatten()
    positions = (flat != IGNORED).nonzero().flatten()
    if len(positions) > ENOUGH * len(flat):
        yield labels
        return
    if not len(positions):
        positions = positions.new_zeros(1)  # no layer has to bear an empty batch
    narrowing.positions = positions
    try:
        yield flat[positions].unsqueeze(0)
    finally:
        narrowing.positions = None
