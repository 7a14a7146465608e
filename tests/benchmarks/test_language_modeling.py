"""Both sides get the same documents, and train on each of them once a turn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks.contests import Contest, Settings, compare
from benchmarks.language_modeling import CONTESTS, EOS, SEP, SPECIAL, TASKS, blocks_of, documents


@pytest.mark.parametrize("name", TASKS)
def test_documents_are_ragged_and_of_the_size_that_is_said(name: str) -> None:
    task, found = TASKS[name], documents(TASKS[name])
    lengths = np.array([len(tokens) for tokens in found])
    assert documents(task) == found
    assert lengths.max() <= task.length
    assert 0.85 < np.median(lengths) / task.median < 1.15
    assert lengths.std() > 0.4 * lengths.mean()
    assert {tokens[-1] for tokens in found} == {EOS if task.causal else SEP}
    assert all(len(SPECIAL) <= token < task.vocabulary for tokens in found for token in tokens[:-1])
    assert task.rows % task.batch == 0, "no side has a step of fewer rows"
    assert task.blocks or len(found) == task.rows


@pytest.mark.parametrize("name", [name for name, task in TASKS.items() if task.blocks])
def test_both_cut_the_same_blocks_and_drop_nothing(name: str) -> None:
    from datasets import Dataset

    from core.packing import Blocks

    task = TASKS[name]
    rows = {"input_ids": documents(task)}
    ours = Blocks(Dataset.from_dict(rows), task.length)
    theirs = blocks_of(rows, task.length)["input_ids"]
    assert [block["input_ids"].tolist() for block in ours] == theirs
    assert len(theirs) == task.rows
    assert sum(map(len, theirs)) == sum(map(len, rows["input_ids"]))


@pytest.mark.slow
@pytest.mark.parametrize("contest", CONTESTS, ids=lambda contest: contest.name)
def test_both_sides_do_the_same_work_in_a_turn(contest: Contest, tmp_path: Path) -> None:
    measured = contest.measure(Settings(tmp_path, rounds=2, small=True))
    facts = measured.facts
    assert facts["samples of a turn"] == {"ours": [10, 10], "trainer": [10, 10]}
    assert facts["tokens of a turn"]["ours"] == facts["tokens of a turn"]["trainer"] == [facts["tokens"]] * 2
    assert facts["steps of a turn"] == {"ours": [3, 3], "trainer": [3, 3]}
    assert {"parameters", "batch", "precision", "threads", "optimiser, trainer", "dropout"} <= facts.keys()
    (row,) = contest.rows
    assert compare(contest, row, measured)["ratio"] > 0
    assert len(measured.flops_per_second) in (0, 2), "known of all turns or of none"
