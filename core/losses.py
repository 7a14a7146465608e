"""Cross-entropy over many classes, without a second copy of the logits in fp32.

Torch's own needs the logits, their logarithmic softmax and two gradients of that size in fp32: with a vocabulary of
50,000 classes that is most of the memory of a small model's step. Here rows are taken in chunks, and the gradient is
written over the logits where nobody else can see them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

CHUNK = 2**21  # logits at a time, 8 MiB in fp32: a CPU's cache likes fewer, an accelerator more
IGNORED = -100  # labels that bear no loss: torch's own choice


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return the sum of the cross-entropies of all labels but -100, as a scalar in fp32, under autocast too.

    Value and gradient are those of ``torch.nn.functional.cross_entropy(logits.float(), ..., reduction="sum")``. Of the
    size of the logits nothing is kept but the logits, in the type they came in. A linear layer does not need its output
    to be differentiated, so the backward pass puts the gradient into that memory, if nothing else refers to it;
    otherwise (a variable still names the logits, the operator that made them needs them, as tanh does, or
    ``retain_graph``) into a new tensor of their size and type. So let go of the logits and of the model's output before
    ``backward``: return the loss from a function.

    Only logits whose rows lie one after another are not copied. To predict the next token do not cut the logits
    (``logits[:, :-1]`` is copied); move the labels: ``functional.pad(labels[:, 1:], (0, 1), value=-100)``.

    Args:
        logits: (..., classes), a floating type.
        labels: (...), int64, from 0 to classes - 1, or -100.
        label_smoothing: share of the target that is spread evenly over all classes, 0 to 1.

    Raises:
        IndexError: a label is out of range (looked at on a CPU only: elsewhere it would wait for the device).
        RuntimeError: ``label_smoothing`` is out of range; from ``backward``: the logits were changed, ``create_graph``.
        ValueError: the shapes do not fit.
    """
    if logits.shape[:-1] != labels.shape:
        raise ValueError(f"logits of shape {tuple(logits.shape)} need labels of shape {tuple(logits.shape[:-1])}")
    return _CrossEntropySum.apply(logits, labels, label_smoothing)


def cross_entropies(logits: torch.Tensor, labels: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
    """Return each row's cross-entropy, fp32 (rows,), under autocast too; 0 where the label is -100.

    For few classes, where rows have weights of their own: it keeps a copy of the logits in fp32.

    Args:
        logits: (rows, classes), a floating type.
        labels: (rows,), int64, from 0 to classes - 1, or -100.
        label_smoothing: share of the target that is spread evenly over all classes, 0 to 1.
    """
    options = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": label_smoothing}
    with torch.autocast(logits.device.type, enabled=False):  # operator lists may name bf16 for any of these
        return functional.cross_entropy(logits.float(), labels, **options)


class _CrossEntropySum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, logits: torch.Tensor, labels: torch.Tensor, smoothing: float) -> torch.Tensor:
        # Detached, it has the memory and the version counter of the logits, but does not keep their own object alive:
        # what else refers to the memory in the backward pass is then somebody else's.
        rows, labels = logits.reshape(-1, logits.shape[-1]).detach(), labels.reshape(-1)
        ctx.save_for_backward(rows, labels)
        ctx.shape, ctx.smoothing = logits.shape, smoothing
        options = {"ignore_index": IGNORED, "reduction": "none", "label_smoothing": smoothing}
        with torch.autocast(logits.device.type, enabled=False):  # operator lists may name bf16 for any of these
            wide = torch.promote_types(rows.dtype, torch.float32)
            losses = [functional.cross_entropy(part.to(wide), own, **options) for part, own in _chunks(rows, labels)]
            return (torch.cat(losses) if len(losses) > 1 else losses[0]).sum()

    @staticmethod
    def backward(ctx: object, scale: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError("cross_entropy_sum has no second derivative; differentiate it without create_graph")
        rows, labels = ctx.saved_tensors
        # Should somebody who needs the logits be overlooked, autograd sees that they changed, and raises.
        gradient = rows if _is_ours_alone(rows) else torch.empty_like(rows, memory_format=torch.contiguous_format)
        scales = torch.mul(labels != IGNORED, scale).unsqueeze(1)
        at, hit = labels.clamp(min=0).unsqueeze(1), torch.full_like(scales, ctx.smoothing - 1)
        for out, *chunk in _chunks(gradient, rows, at, hit, scales):
            _gradient(out, *chunk, ctx.smoothing / rows.shape[1])
        return gradient.view(ctx.shape), None, None


def _gradient(
    out: torch.Tensor, rows: torch.Tensor, at: torch.Tensor, hit: torch.Tensor, scales: torch.Tensor, spread: float
) -> None:
    """Softmax minus target, times each row's scale: (rows, classes), from columns ``at``, ``hit`` and ``scales``."""
    difference = torch.softmax(rows, dim=-1, dtype=scales.dtype).scatter_add_(1, at, hit)
    if spread:
        difference.sub_(spread)
    if out.dtype == scales.dtype:
        torch.mul(difference, scales, out=out)
    else:  # in one pass it would be many times slower on a CPU
        out.copy_(difference.mul_(scales))


def _chunks(rows: torch.Tensor, *others: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of the same rows of each. Their number comes from the shape alone, as compiled graphs need."""
    count = max(CHUNK // max(rows.shape[1], 1), 1)
    return zip(*(each.split(count) for each in (rows, *others)), strict=True)


def _is_ours_alone(rows: torch.Tensor) -> bool:
    """Whether nothing but the graph's one saved tensor refers to the memory, and no second backward pass will read it.

    Counts the references to the storage, as torch does for its CUDA graphs. A torch without these functions says no.
    """
    if torch.compiler.is_compiling():  # there the compiler decides what is written where
        return False
    count = getattr(torch._C, "_storage_Use_Count", None)
    kept = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    if count is None or kept is None or kept() or not rows.is_contiguous():
        return False
    alone = torch.empty(0)
    return count(rows.untyped_storage()._cdata) == count(alone.untyped_storage()._cdata)
