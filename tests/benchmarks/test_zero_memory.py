"""The tables of `deepspeed_configs/README.md` are what the benchmark counts, and the formulas are the paper's."""

from __future__ import annotations

import pytest

from benchmarks import zero_memory
from tests.conftest import REPOSITORY


def test_the_formulas_give_the_papers_own_numbers() -> None:
    """Figure 1: 7.5 billion parameters on 64 devices."""
    found = [zero_memory.formula(strategy, 7.5e9, 64) / 1e9 for strategy in ("ddp", "zero1", "zero2", "zero3")]
    assert [round(number, 1) for number in found] == [120.0, 31.4, 16.6, 1.9]
    assert zero_memory.formula("zero3_offload", 1) == zero_memory.formula("zero3", 1) == 2


@pytest.mark.slow
@pytest.mark.compiles
def test_the_table_of_the_middle_sized_model_is_what_is_counted() -> None:
    assert zero_memory.stored("states") == zero_memory.states_table()


@pytest.mark.slow
@pytest.mark.compiles
def test_rows_of_the_large_models_are_what_is_counted() -> None:
    """Those of stage 3; the others come from the same command."""
    stored = zero_memory.stored("large").splitlines()
    for row in zero_memory.large_rows([(model, "zero3") for model in zero_memory.LARGE]):
        assert row in stored


def test_every_row_is_there_and_fits_where_it_says() -> None:
    *_, states = zero_memory.stored("states").partition("|---|---|---|---|---|---|\n")
    files = {f"{row.split('`')[1]}" for row in states.splitlines() if "`" in row}
    assert files == {path.name for path in (REPOSITORY / "deepspeed_configs").glob("*.json")}
    rows = [row.strip("| ").split(" | ") for row in zero_memory.stored("large").splitlines()[2:]]
    assert len(rows) == 3 * len(zero_memory.LARGE)
    for *_, peak, gaudi, gaudi2 in rows:
        fits = ["yes" if float(peak) * 1e9 <= limit else "no" for limit in zero_memory.CARDS.values()]
        assert [gaudi, gaudi2] == fits


def test_a_table_is_written_in_its_place_only() -> None:
    before = zero_memory.README.read_text(encoding="utf-8")
    assert zero_memory.stored("states", zero_memory.stored("states")) == before
    changed = zero_memory.stored("large", "| new |")
    assert "| new |\n<!-- end -->" in changed
    assert zero_memory.stored("states") in changed
