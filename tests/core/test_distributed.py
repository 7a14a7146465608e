"""One process: a launch on several is refused in one line, and sums are what went in."""

from __future__ import annotations

import pytest

from core import distributed
from core.errors import UserError


@pytest.mark.parametrize("size", [None, "", "1"])
def test_one_process_passes(monkeypatch, size):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    distributed.require_single_process()
    assert distributed.world_size() == 1


def test_several_processes_are_refused_in_one_line(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError) as error:
        distributed.require_single_process()
    assert "WORLD_SIZE is 8" in str(error.value)
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="WORLD_SIZE is 8"):
        distributed.sum_over_ranks([1.0])  # never a sum of one rank's share


def test_rank_comes_from_the_environment(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    assert distributed.rank() == 0
    monkeypatch.setenv("RANK", "3")
    assert distributed.rank() == 3


def test_sums_are_exact(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    values = [2.0**53, 0.1, 16_777_217, -0.0]  # the third is no fp32 number
    assert distributed.sum_over_ranks(values) == values
    assert all(type(value) is float for value in distributed.sum_over_ranks(values))
