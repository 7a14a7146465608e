"""Both sides do the same work on the same rows, and write the same texts."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from benchmarks import summarization
from benchmarks.contests import Settings, compare

CONTESTS = {contest.name: contest for contest in summarization.CONTESTS}


def test_rows_have_the_lengths_that_are_said() -> None:
    made = summarization.LARGE_SIZES
    rows = summarization.draw_rows(made, 640, seed=0)
    assert rows == summarization.draw_rows(made, 640, seed=0)
    for key, middle, most in zip(("text", "summary"), made["median"], made["longest"], strict=True):
        lengths = [len(row[key]) for row in rows]
        assert abs(statistics.median(lengths) / middle - 1) < 0.1
        assert max(lengths) <= most
        assert all(row[key][-1] == 1 and 1 not in row[key][:-1] for row in rows)


def test_a_word_is_a_token() -> None:
    tokenizer = summarization.make_tokenizer(50)
    assert tokenizer(["w3 w49", "w7"])["input_ids"] == [[3, 49, 1], [7, 1]]
    assert tokenizer.batch_decode([[3, 49, 1, 0]], skip_special_tokens=True) == ["w3 w49"]


@pytest.mark.slow
@pytest.mark.processes
def test_all_sides_train_on_the_same_rows(tmp_path: Path) -> None:
    contest = CONTESTS["summarization"]
    found = contest.measure(Settings(tmp_path, rounds=1, small=True))
    for row in contest.rows:
        assert compare(contest, row, found)["rounds"] == 1
    turns = [found.facts[f"samples and tokens of a turn, {side}"] for side in ("ours", "trainer", "grouped")]
    assert turns[0][0][0] == summarization.SMALL_SIZES["rows"]["train"]
    assert turns[0] == turns[1] == turns[2]


@pytest.mark.slow
@pytest.mark.processes
def test_both_sides_generate_the_same_texts_of_several_lengths(tmp_path: Path) -> None:
    contest = CONTESTS["summarization_evaluation"]
    found = contest.measure(Settings(tmp_path, rounds=1, small=True))
    assert compare(contest, contest.rows[0], found)["rounds"] == 1
    assert found.facts["same texts"] == 1
    low, _, high = found.facts["words of a text, quartiles"]
    assert 0 < low < high < summarization.SMALL_SIZES["longest"][1]
    ours, theirs = found.facts["ROUGE-L"]
    assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.processes
def test_memory_is_that_of_whole_runs(tmp_path: Path) -> None:
    contest = CONTESTS["summarization_memory"]
    found = contest.measure(Settings(tmp_path, rounds=1, small=True))
    assert all(100 < value < 10_000 for values in found.values.values() for value in values)  # MB
    assert (tmp_path / "ours_0" / "eval_results.json").is_file()
    assert (tmp_path / "script_0" / "eval_results.json").is_file()
