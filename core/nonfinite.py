"""The loss since the last record, and what of it is not finite: noticed without a wait of the host at each step."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from core import distributed
from core.data import Window
from core.device import Device
from core.errors import UserError, is_main_process, logger

FILE = "nonfinite.jsonl"
UNREAD = 64  # steps that a device may be ahead of what the host knows of them
IN_A_ROW = 20  # steps without an update, after which it is no matter of single rows


@dataclass
class Step:
    """What is known of a step before its numbers are, and these: loss and norm, scalars on the device."""

    number: int
    epoch: int
    targets: int
    row_ids: list[int]
    numbers: tuple[torch.Tensor, torch.Tensor]


class Losses:
    """Sums token losses on the device, and judges each step by the norm of its gradients, which all ranks share.

    A loss that is not finite makes the gradients not finite, so that its rank need not tell the others; the strategy
    leaves out the update of such a step. Losses and norms wait on the device, `UNREAD` steps at most, until a record
    or a checkpoint is due; a step does nothing with them, so that it costs no operators. On a CPU, whose numbers are
    there at once, they are looked at in the step itself.

    Args:
        args: ``on_nonfinite``; with ``stop`` such a step ends the run, with ``skip`` its rows are left out.
        folder: gets ``nonfinite.jsonl``, a line per such step with the rows of all ranks.
        run: what it is, in a few words.
        advice: what to do about a step that ends the run.

    Attributes:
        sum, targets: of the steps since the last record that were looked at and whose update was made; the sum is this
            rank's.
        norm: of the gradients of the last step that was looked at, before clipping.
        skipped: steps whose update was left out.
    """

    def __init__(self, args: Namespace, device: Device, folder: Path, run: str, advice: Callable[[int], str]) -> None:
        self.skips, self.folder, self.run, self.advice = args.on_nonfinite == "skip", folder, run, advice
        self.waits = device.queues_work
        self.sum = self.norm = 0.0
        self._zero = torch.zeros((), device=device.torch_device)
        self._of_step: torch.Tensor | None = None
        self._unread: list[Step] = []
        self.targets = self.skipped = self._in_a_row = 0

    def add(self, loss_sum: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Add a micro-batch's sum of token losses; return its gradient in what is backpropagated, ``scale``.

        Of a sum that is not finite, the gradients are not either: 0 times it is no number.
        """
        own = loss_sum.detach().to(self._zero.dtype)
        self._of_step = own if self._of_step is None else self._of_step + own
        return torch.addcmul(scale, own, self._zero).to(loss_sum.dtype)

    def step(self, number: int, epoch: int, window: Window, norm: torch.Tensor) -> None:
        """Take a step's numbers in.

        Raises:
            UserError: as `look` does, where the numbers are there at once.
        """
        norm = norm.to(self._zero.device, self._zero.dtype).reshape(())
        numbers, self._of_step = (self._of_step, norm), None
        self.targets += window.targets
        self._unread.append(Step(number, epoch, window.targets, window.row_ids, numbers))
        if not self.waits or len(self._unread) == UNREAD:
            self.look()

    def look(self) -> None:
        """Read the numbers of all steps since the last look, in one wait.

        Raises:
            UserError: one is not finite, under ``stop``; or too many in a row, under ``skip``. All ranks raise it.
        """
        steps, self._unread = self._unread, []
        for step, (loss, norm) in zip(steps, self._read(steps), strict=True):
            self._in_a_row, self.norm = self._in_a_row + 1, norm
            if math.isfinite(norm):
                self._in_a_row = 0
                self.sum += loss
                continue
            self.targets -= step.targets
            self.skipped += 1
            self._judge(step, loss, norm)

    def _read(self, steps: list[Step]) -> list[list[float]]:
        """Loss and norm of each step. Always as many are read: another number of them would be another graph."""
        if not steps:
            return []
        missing = UNREAD - len(steps) if self.waits else 0
        numbers = [number for step in steps for number in step.numbers] + [self._zero] * 2 * missing
        return torch.stack(numbers).view(-1, 2).tolist()[: len(steps)]

    def _judge(self, step: Step, loss: float, norm: float) -> None:
        """Save the rows of a step that is not finite, and stop or go on. All ranks come here alike."""
        mine = {"loss": loss, "rows": step.row_ids}
        ranks = [json.loads(text) for text in distributed.gather_texts(json.dumps(mine))]
        guilty = [one for one in ranks if not math.isfinite(one["loss"])]
        rows = [row for one in guilty or ranks for row in one["rows"]]
        shown = ", ".join([*map(str, rows[:16]), *["..."] * (len(rows) > 16)])
        what = f"the loss became {guilty[0]['loss']}" if guilty else f"the gradients' norm became {norm}"
        line = {"step": step.number, "epoch": step.epoch, "what": what, "rows": rows}
        kept = distributed.on_main(lambda: self._keep(line))
        at = f"{what} in step {step.number} ({self.run}; its rows, from 0: {shown}{kept})"
        if not self.skips:
            raise UserError(f"{at}; nothing was saved after it; {self.advice(step.number)}")
        if self._in_a_row == IN_A_ROW:
            raise UserError(f"{at}, as in the {IN_A_ROW - 1} before it, all skipped; {self.advice(step.number)}")
        if is_main_process():
            logger.warning(f"{at}: skipped")

    def _keep(self, line: dict[str, Any]) -> str:
        try:
            with open(self.folder / FILE, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError:  # the error at hand says them, too
            return ""
        return f"; all in {FILE}"

    def total(self) -> float:
        """Sum of the losses since the last record over all ranks; looks first."""
        self.look()
        return distributed.sum_over_ranks([self.sum])[0]

    def restart(self) -> None:
        """Begin the next record."""
        self.sum, self.targets = 0.0, 0
