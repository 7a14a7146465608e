"""Evaluation of a run's model over a whole data set, on however many devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from core import distributed, graphs
from core.data import Batch
from core.gradients import broadcast_buffers
from core.preemption import Preempted
from core.stream import Loader


def evaluate(
    run: Any, loader: Loader, forward: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | None]], phase: str
) -> tuple[dict[str, Any], list[torch.Tensor]]:
    """Run ``forward`` over a whole data set: every row counts once, at any batch size and on any number of ranks.

    Args:
        loader: the data set, in order or not.
        forward: returns the sum of the batch's token losses, and per-row outputs (batch, ...) or None.
        phase: ``eval`` or ``predict``; prefix of the metrics.

    Returns:
        Metrics (loss per token, speed), and the rows' outputs on the host, in the order of the data set, on all
        ranks alike.
    """
    if run._strategy:
        broadcast_buffers(run.model)  # such as running statistics: rank 0's are what is saved
    meter, ids, outputs, losses, targets = run.meter(), [], [], [], 0
    run.ledger.declare(phase, loader.declare(graphs.takes_any_shape(run.args, run.device)))
    with run.memory.phase(phase), torch.no_grad(), _evaluating(run.model):
        meter.start()
        for window in meter.received(loader.windows()):
            if window.asked_to_end:
                raise Preempted("an evaluation was cut off; nothing of it was kept")
            batch = run.device.move(window.batches[0], run.args.non_blocking_data_copy)
            new = run.ledger.see(phase, batch)[1] and run.device.compiles
            if new:
                meter.edge()
            with run.autocast():
                loss_sum, rows = forward(batch)
            run.device.step_boundary()
            losses.append(loss_sum)
            targets += window.targets
            if rows is not None:
                ids += window.row_ids
                outputs.append(rows[: len(window.row_ids)].cpu())  # filler comes last
            meter.step(window.rows, window.tokens, cold=new)
        total = torch.stack(losses).cpu().double().sum().item() if losses else 0.0
        total = distributed.sum_over_ranks([total])[0]
    metrics = {f"{phase}_loss": total / targets if targets else math.nan, **meter.metrics(phase)}
    if not outputs:
        return metrics, []
    numbers = torch.cat(distributed.gather_rows(torch.tensor(ids, dtype=torch.int64)))
    gathered = torch.cat(distributed.gather_rows(torch.cat(outputs)))
    whole = torch.empty_like(gathered)  # which holds every row once
    whole[numbers] = gathered
    return metrics, list(whole)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
