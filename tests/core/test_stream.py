"""A stream's windows are those of the same documents on disk, on any number of ranks, and after a resume."""

from __future__ import annotations

import math
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch

from core import distributed
from core.data import BatchLoader
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.packing import Blocks
from core.run import Run
from core.stream import StreamLoader
from tests.core import toy
from tests.core.ranks import results, start_ranks
from tests.core.streams import DOCUMENTS, LENGTH, Broken, Listed, collate, loader_of, seen


def on_disk(batch: int = 4, limit: int | None = None, **options: Any) -> BatchLoader:
    """The same, of documents that lie in a table, in order."""
    blocks = Blocks(datasets.Dataset.from_dict({"input_ids": DOCUMENTS}), LENGTH, limit)
    return BatchLoader(blocks, collate, blocks.lengths, [(LENGTH,)], batch, **options)


def noisy(row: dict[str, np.ndarray], draw: np.random.Generator) -> dict[str, np.ndarray]:
    return row | {"input_ids": draw.integers(0, 32, len(row["input_ids"]))}


@pytest.mark.parametrize("size", [{}, {"accumulation": 3}, {"batch": 1}, {"batch": 64}])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_stream_has_the_windows_of_the_documents_on_disk(
    size: dict, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = []
    monkeypatch.setattr(distributed, "world_size", lambda: world)
    monkeypatch.setattr(distributed, "sum_over_ranks", lambda values: values)
    for rank in range(world):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        options = {**size, "augment": noisy, "augment_seed": 3}
        stream, disk = loader_of(DOCUMENTS, **options), on_disk(**options)
        assert stream.windows_per_epoch == math.inf
        windows = list(stream.windows(1))
        assert seen(windows) == seen(disk.windows(1))
        assert stream.windows_per_epoch == disk.windows_per_epoch
        assert stream.buckets == disk.buckets
        rows += [row for window in windows for row in window.row_ids]
    assert sorted(rows) == list(range(23))


@pytest.mark.parametrize(
    "options", [{"drop_last": True}, {"drop_last": True, "batch": 23}, {"limit": 8}, {"limit": 90}]
)
def test_the_end_of_an_epoch_is_that_of_the_documents_on_disk(options: dict) -> None:
    rows = options.pop("limit", None)
    stream, disk = loader_of(DOCUMENTS, max_rows=rows, **options), on_disk(limit=rows, **options)
    for _ in range(2):
        assert seen(stream.windows()) == seen(disk.windows())
        assert stream.windows_per_epoch == disk.windows_per_epoch


def test_every_start_goes_on_as_the_whole_epoch_does() -> None:
    """With a shuffled stream, in an epoch other than the first."""
    rows = datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_iterable_dataset(num_shards=4)
    rows = rows.shuffle(seed=5, buffer_size=10)
    whole = seen(loader_of(rows).windows(1))
    assert len(whole) == 6
    assert whole != seen(loader_of(rows).windows(0))
    for start in range(7):
        loader, random = loader_of(rows), torch.get_rng_state()
        assert seen(loader.windows(1, start)) == whole[start:]
        assert loader.windows_per_epoch == 6
        assert torch.equal(torch.get_rng_state(), random)


def test_a_stream_of_which_the_first_blocks_are_asked_for_is_read_in_order(tmp_path: Path) -> None:
    """Shuffled, the first ones would be others in each epoch."""
    args, rows = toy.arguments(tmp_path), datasets.Dataset.from_dict({"input_ids": DOCUMENTS})
    stream = partial(StreamLoader.from_arguments, args, rows.to_iterable_dataset(), collate, LENGTH, train=True)
    blocks = [{str(row) for window in stream(max_rows=limit).windows(epoch) for batch in window.batches
               for row in batch["inputs"].tolist()} for limit in (9, None) for epoch in (0, 1)]  # fmt: skip
    assert blocks[0] == blocks[1]
    assert blocks[2] != blocks[3]


def test_a_missing_document_is_an_empty_one() -> None:
    assert seen(loader_of([None, *DOCUMENTS]).windows()) == seen(loader_of(DOCUMENTS).windows())


def test_skipped_windows_are_not_made() -> None:
    made = []

    def watched(rows: list[Any], shape: tuple[int]) -> dict[str, torch.Tensor]:
        made.append(len(rows))
        return collate(rows, shape)

    list(StreamLoader(Listed(DOCUMENTS), watched, LENGTH, 4).windows(0, 4))
    assert made == [4, 3]


@pytest.mark.parametrize(
    ("documents", "options", "said"),
    [
        ([], {}, "^stream: there are no documents"),
        ([[1, 2], [3]], {}, "^stream: 3 tokens make no block of 7; give more text"),
        (DOCUMENTS[:9], {"drop_last": True, "batch": 8}, "^6 rows make no optimiser step of 8 rows"),
        (Broken(DOCUMENTS, 12), {}, "^the stream of documents broke off: OSError: connection lost; mend it"),
        ([[1, "two"]], {}, "^the stream of documents broke off: ValueError: "),
    ],
)
def test_a_stream_that_gives_no_window_is_an_error_of_one_line(documents: Any, options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        list(loader_of(documents, **options).windows())


@pytest.mark.processes
def test_ranks_share_a_stream_and_end_together() -> None:
    first, second = results(start_ranks(2, "streaming"))
    whole = seen(on_disk(batch=8).windows())
    for mine, other, one in zip(first["found"], second["found"], whole, strict=True):
        assert mine[1:4] == other[1:4] == one[1:4]
        assert sorted(mine[4] + other[4]) == one[4]
        assert mine[5] == other[5] == one[5]
    assert first["read"] == second["read"] > 0
    assert second["error"].startswith("the stream of documents broke off: OSError: connection lost")
    assert first["error"] == f"rank 1: {second['error']}"


def make_loader(args: Namespace, rows: int) -> StreamLoader:
    stream = datasets.Dataset.from_dict({"input_ids": DOCUMENTS}).to_iterable_dataset(num_shards=4)
    stream = stream.shuffle(seed=args.seed, buffer_size=10)
    return StreamLoader.from_arguments(args, stream, collate, LENGTH, train=True, augment=noisy)


stream_run = partial(toy.run, make_loader=make_loader)


def test_training_on_a_stream_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """8 steps of 6 an epoch; from the middle of the first one, and from its end."""
    flags = ["--max_steps", "8", "--per_device_train_batch_size", "4", "--save_steps", "3", "--logging_steps", "1"]
    engine, straight, steps = stream_run(tmp_path / "straight", *flags, dropout=0.5)
    assert engine.loader.windows_per_epoch == 6
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=2)[2] for line in lines if line.startswith("optimiser steps")] == ["8"]
    log = (tmp_path / "straight" / "logs" / "metrics.csv").read_text().splitlines()
    at = log[0].split(",").index("epoch")
    epochs = [float(line.split(",")[at]) for line in log[1:]]
    assert epochs == [0.0] * 5 + [round(step / 6, 4) for step in range(6, 9)]
    for k in (3, 6):
        _, _, first = stream_run(tmp_path / str(k), *flags, dropout=0.5, stop=k)
        torch.manual_seed(999)
        _, model, rest = stream_run(tmp_path / str(k), *flags, "--resume_from_checkpoint", "auto", dropout=0.5)
        assert first + rest == steps
        assert torch.equal(toy.weights(model), toy.weights(straight))


def test_a_resume_at_an_epochs_end_that_skips_no_data_goes_to_the_next(tmp_path: Path) -> None:
    flags = ["--max_steps", "9", "--per_device_train_batch_size", "4", "--save_steps", "6"]
    _, _, steps = stream_run(tmp_path / "run", *flags)
    again = [*flags, "--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-6"), "--ignore_data_skip"]
    engine, _, rest = stream_run(tmp_path / "run", *again)
    assert [loss for *_, loss in rest] == [loss for *_, loss in steps[6:]]
    assert engine.epoch == 1


def test_a_stream_needs_a_number_of_steps_and_its_own_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stream needs --max_steps"):
        stream_run(tmp_path / "endless")
    toy.run(tmp_path / "run", "--max_steps", "1")
    with pytest.raises(UserError, match="stream None, not True"):
        stream_run(tmp_path / "run", "--max_steps", "2", "--resume_from_checkpoint", "auto")


def test_evaluation_returns_a_streams_rows_in_their_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    args = toy.arguments(tmp_path, "--per_device_eval_batch_size", "3", "--dataloader_num_workers", "2")
    run, model = Run(args, GaudiConfig(), "toy"), toy.Model()
    run.place(model)
    stream = StreamLoader.from_arguments(args, Listed(DOCUMENTS), collate, LENGTH, train=False, augment=noisy)
    assert (stream.window, stream.seed) == (3, None)
    assert "--dataloader_num_workers has no effect on a stream" in caplog.text

    def forward(batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return toy.loss_sum(model, batch), batch["inputs"]

    (metrics, rows), (again, _) = (run.evaluate(stream, forward, "eval") for _ in range(2))
    assert metrics["eval_loss"] == again["eval_loss"]
    disk = on_disk(batch=3, augment=noisy, augment_seed=args.seed + 1)
    expected = [row for window in disk.windows() for row in window.batches[0]["inputs"][: window.rows]]
    assert torch.equal(torch.stack(rows), torch.stack(expected))
