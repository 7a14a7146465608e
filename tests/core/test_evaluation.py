"""Evaluation: every row counts once, in its place; what is cut off leaves nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.buckets import make_buckets
from core.data import IGNORE_INDEX, BatchLoader
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core.toy import LENGTHS, Model, Rows, arguments, collate, loader_of, loss_sum


@pytest.mark.parametrize("batch", [1, 2, 5, 13])
def test_eval_loss_and_order_do_not_depend_on_the_batch(tmp_path: Path, batch: int) -> None:
    args = arguments(tmp_path / "run")
    args.do_train = False
    whole = Run(args, GaudiConfig(), "toy")
    model = whole.place(Model())
    expected = sum(loss_sum(model, collate([row], LENGTHS[row])).item() for row in range(13))
    expected /= sum(target for _, target in LENGTHS[:13])

    def forward(rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_sum(model, rows), rows["mask"].sum(1)

    metrics, outputs = whole.evaluate(loader_of(args, 13, train=False, batch=batch), forward, "eval")
    assert metrics["eval_loss"] == pytest.approx(expected, abs=1e-6)
    assert [int(output) for output in outputs] == [source for source, _ in LENGTHS[:13]]


def test_an_unreadable_rows_output_keeps_its_place(tmp_path: Path) -> None:
    """Training takes rates from the rows that could be read; evaluation returns an output of every row."""
    args = arguments(tmp_path / "run")
    args.do_train = False
    whole = Run(args, GaudiConfig(), "toy")
    model, told = whole.place(Model()), []
    loader = loader_of(args, 13, train=False, batch=4)
    rows, bad = loader.collate, (0, 6, 12)

    def marked(numbers: list[int], shape: tuple[int, ...]) -> dict[str, torch.Tensor]:
        marks = torch.tensor([number in bad for number in numbers])
        batch = rows(numbers, shape)
        batch["labels"][marks] = IGNORE_INDEX
        return batch | {"unreadable": marks}

    loader.collate, loader.on_unreadable = marked, told.extend

    def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        assert "unreadable" not in batch
        return loss_sum(model, batch), batch["mask"].sum(1)

    metrics, outputs = whole.evaluate(loader, forward, "eval")
    assert [int(output) for output in outputs] == [source for source, _ in LENGTHS[:13]]
    assert sorted(told) == list(bad)
    good = [row for row in range(13) if row not in bad]
    expected = sum(loss_sum(model, collate([row], LENGTHS[row])).item() for row in good)
    assert metrics["eval_loss"] == pytest.approx(expected / sum(LENGTHS[row][1] for row in good), abs=1e-6)
    steady = metrics["eval_runtime"] * metrics["eval_samples_per_second"]
    assert steady == pytest.approx(len(good), rel=1e-3)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_trimmed_evaluation_is_one_of_declared_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, batch: int
) -> None:
    """The same loss, and the outputs in the rows' order."""
    lengths = [(1 + (row * 37) % 30, 1 + (row * 3) % 8) for row in range(60)]
    args = arguments(tmp_path / "run")
    args.do_train = False
    whole = Run(args, GaudiConfig(), "toy")
    model, found = whole.place(Model()), []

    def forward(rows: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return loss_sum(model, rows), rows["mask"].sum(1)

    for phase, trims in (("eval", True), ("predict", False)):
        monkeypatch.setattr("core.graphs.takes_any_shape", lambda args, device, trims=trims: trims)
        loader = BatchLoader(range(60), Rows(lengths), lengths, make_buckets(lengths, (30, 8), 2), batch)
        metrics, outputs = whole.evaluate(loader, forward, phase)
        assert [int(output) for output in outputs] == [source for source, _ in lengths]
        found.append(metrics[f"{phase}_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    assert len(whole.ledger.met["predict"]) <= 2 < len(whole.ledger.met["eval"])
    assert "beyond" not in caplog.text
