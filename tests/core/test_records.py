"""The log stays well-formed whatever happens to a record: cut off, glued, damaged, or without room."""

from __future__ import annotations

import csv
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from core.errors import UserError
from core.records import CSVTracker, read_csv


@contextmanager
def at_most(size: int) -> Iterator[None]:
    """No file may get larger: the system takes what fits of a write, and refuses the rest, as on a full disk."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, unlimited[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)


def steps(path) -> list[str]:
    """Of all lines but the first, as any reader of csv files reads them."""
    with open(path, newline="") as file:
        header, *rows = csv.reader(file)
    assert all(len(row) == len(header) for row in rows)
    return [row[0] for row in rows]


def test_a_record_that_does_not_fit_leaves_nothing_and_the_next_is_whole(tmp_path):
    tracker = CSVTracker("", tmp_path)
    tracker.log({"loss": 1.5}, 1)
    before = tracker.path.read_bytes()
    with (
        at_most(len(before) + 4),
        pytest.raises(UserError, match=r"metrics\.csv cannot be written: File too large; make"),
    ):
        tracker.log({"loss": 2.5}, 2)
    assert tracker.path.read_bytes() == before
    tracker.log({"loss": 3.5}, 3)
    assert steps(tracker.path) == ["1", "3"]


def test_a_new_column_that_does_not_fit_comes_with_the_next_record(tmp_path):
    tracker = CSVTracker("", tmp_path)
    tracker.log({"loss": 1.5}, 1)
    before = tracker.path.read_bytes()
    with at_most(len(before)), pytest.raises(UserError, match="cannot be written"):
        tracker.log({"eval_loss": 2.5}, 1)
    assert (tracker.path.read_bytes(), os.listdir(tmp_path)) == (before, ["metrics.csv"])
    tracker.log({"loss": 1.25}, 2)  # of the columns that there are
    tracker.log({"eval_loss": 2.25}, 2)
    assert read_csv(tracker.path)[1:] == [
        {"step": "2", "loss": "1.25", "eval_loss": ""},
        {"step": "2", "loss": "", "eval_loss": "2.25"},
    ]


def test_a_file_that_was_removed_begins_again(tmp_path):
    tracker = CSVTracker("", tmp_path)
    tracker.log({"loss": 1.5}, 1)
    tracker.path.unlink()
    tracker.log({"loss": 2.5}, 2)
    assert read_csv(tracker.path) == [{"step": "2", "loss": "2.5"}]


@pytest.mark.parametrize(
    "damage",
    [
        "3,1.",
        "3,1.0,2.0,7\n",
        "3\n",
        "\0\0\0\0\n",
        "x,1.0,2.0\n",
        "\u00b2,1.0,2.0\n",
        f"{'9' * 5000},1,1\n",
        f"3,{'1' * 200_000},\n",
    ],
    ids=["cut", "glued", "short", "zeros", "text", "superscript", "many digits", "long"],
)
def test_damaged_rows_are_left_out(tmp_path, damage):
    path = tmp_path / "metrics.csv"
    path.write_text(f"step,loss,eval_loss\n1,2.0,\n{damage}", encoding="utf-8")
    assert read_csv(path) == [{"step": "1", "loss": "2.0", "eval_loss": ""}]
    tracker = CSVTracker("", tmp_path, start_step=9)
    tracker.log({"loss": 0.5}, 10)
    assert steps(path) == ["1", "10"]


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    for name in (".metrics.csv.123", ".hyperparameters.json.123", ".mine"):
        (tmp_path / name).touch()
    CSVTracker("", tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".mine", "metrics.csv"]


def test_configuration_of_any_text(tmp_path):
    tracker = CSVTracker("", tmp_path)
    tracker.store_init_configuration({"name": "\udcff é"})
    assert "? é" in (tmp_path / "hyperparameters.json").read_text(encoding="utf-8")
