"""Ranks from the environment; sums, rows, texts and errors over real processes; a killed rank ends the others."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from core import distributed
from core.errors import UserError
from tests.conftest import REPOSITORY
from tests.core.ranks import results, start_ranks


@pytest.fixture(autouse=True)
def _one_process(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("value", [None, ""])
def test_without_a_launcher_there_is_one_process(monkeypatch, value):
    if value is not None:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (0, 1, 0)


def test_ranks_come_from_the_environment(monkeypatch):
    for name, value in {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (distributed.rank(), distributed.world_size(), distributed.local_rank()) == (9, 16, 1)


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK is not set"),
        ({"WORLD_SIZE": "two", "RANK": "0"}, "WORLD_SIZE=two"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK=-1"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2"),
        ({"WORLD_SIZE": "0", "RANK": "0"}, "RANK is 0 and WORLD_SIZE is 0"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "²"}, "LOCAL_RANK=²"),
        ({"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "2"}, "LOCAL_RANK is 2"),
    ],
)
def test_an_environment_that_contradicts_itself_is_one_line(monkeypatch, variables, named):
    monkeypatch.setenv("RANK", "0")  # what is kept of an environment that was right says nothing of the next
    assert distributed.world_size() == 1
    monkeypatch.delenv("RANK")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as error:
        distributed.world_size()
    assert named in str(error.value)


def test_one_process_needs_no_group(tmp_path):
    import torch

    values = [2.0**53, 0.1, 16_777_217, -0.0]  # the third is no fp32 number
    assert distributed.sum_over_ranks(values) == values
    assert all(type(value) is float for value in distributed.sum_over_ranks(values))
    assert distributed.gather_rows(torch.tensor([[1, 2]]))[0].tolist() == [[1, 2]]
    assert distributed.gather_texts("ä") == ["ä"]
    assert distributed.on_main(lambda: "made") == "made"
    assert distributed.together(lambda: 3) == 3
    with pytest.raises(KeyError):
        distributed.together(lambda: {}["x"])
    with distributed.once_per_machine("test", tmp_path):
        assert not any(tmp_path.iterdir())
    distributed.stop()
    assert not torch.distributed.is_initialized()


@pytest.fixture(scope="module")
def on_three(tmp_path_factory) -> list[dict[str, Any]]:
    return results(start_ranks(3, "collectives", str(tmp_path_factory.mktemp("locks"))))


@pytest.mark.processes
def test_numbers_are_added_up_exactly(on_three):
    for found in on_three:
        assert found["backend"] == "gloo"
        assert found["on_device"] == [6.0, 6.0, 6.0]
        assert found["sum"] == [3 * 2.0**53, 6.0, 1.0, 2.0**53 + 2]  # in pairs, the third is 0
        assert math.isnan(found["nan"][0])
        assert found["nan"][1] == math.inf


@pytest.mark.processes
def test_rows_and_texts_of_every_rank_arrive_everywhere(on_three):
    for found in on_three:
        assert found["rows"] == [[], [[0, 1]], [[0, 1], [2, 3]]]
        assert found["flags"] == [[], [True], [True, False]]
        assert found["wide"] == [[[2, 2, 3], 0.0], [[1, 2, 3], 6.0], [[0, 2, 3], 0.0]]
        assert found["none"] == [[], [], []]
        assert found["unlike"].startswith("ValueError: rows of [4, 8, 12] bytes")
        assert found["texts"] == ["", "zwölf 1\n", "zwölf 2\n"]


@pytest.mark.processes
def test_an_error_on_one_rank_ends_all(on_three):
    others = on_three[1:]
    assert [found["on_main"] for found in on_three] == ["from 0"] * 3
    assert {found["on_main_user"] for found in on_three} == {"UserError: mend --it"}
    assert on_three[0]["on_main_bug"] == "KeyError: 'it'"
    assert {found["on_main_bug"] for found in others} == {"UserError: rank 0: KeyError: 'it'"}
    assert [found["together"] for found in on_three] == [0, 1, 2]
    assert [found["together_user"] for found in on_three] == [
        *["UserError: rank 2: mend --it"] * 2,
        "UserError: mend --it",
    ]
    assert [found["together_bug"] for found in on_three] == [*["UserError: rank 2: ValueError: "] * 2, "ValueError: "]


@pytest.mark.processes
def test_the_processes_of_a_machine_take_turns(on_three):
    turns = sorted(found["in_turn"] for found in on_three)
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(turns))


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.compiles
@pytest.mark.parametrize("mode", [None, "lazy", "eager"])
def test_libraries_that_come_later_keep_the_group(tmp_path, mode):
    backend = "cpu:gloo,hpu:hccl" if mode else "gloo"
    for rank, found in enumerate(results(start_ranks(2, "collectives", str(tmp_path), "third", mode=mode))):
        assert found["backend"] == found["kept"] == backend
        assert found["on_device"] == [3.0] * 3
        kind, *numbers, where = found["accelerate"]
        assert kind == f"DistributedType.MULTI_{'HPU' if mode else 'CPU'}"
        assert numbers == [rank, 2]
        assert where.startswith("hpu" if mode else "cpu")
        assert found["deepspeed"] == [rank, 2, [6.0] * 3]


@pytest.mark.processes
def test_a_group_of_one_needs_no_launcher_and_no_port():
    code = """
from setting import this_device
from core import distributed
import torch, torch.distributed as dist
distributed.start(this_device(), 60)
assert not dist.is_initialized()
distributed.start(this_device(), 60, always=True)
value = torch.ones(2)
dist.all_reduce(value)
assert value.tolist() == [1, 1] and dist.get_world_size() == 1
distributed.stop()
assert not dist.is_initialized()
distributed.stop()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
distributed.start(this_device(), 60, always=True)
distributed.stop()
assert dist.is_initialized(), "the group was somebody else's"
"""
    command = [sys.executable, "-c", code]
    folders = f"{REPOSITORY}:{Path(__file__).parent / 'programs'}"
    done = subprocess.run(command, env={"PYTHONPATH": folders, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.processes
def test_a_killed_rank_ends_the_others_in_seconds():
    began = time.monotonic()
    ended = start_ranks(3, "killed")
    assert ended[1].returncode == -9
    for one in (ended[0], ended[2]):
        assert one.returncode == 1
        assert "RuntimeError" in one.stderr
        seconds = float(one.stdout.split()[-1])
        assert seconds < 10, one.stdout
    assert time.monotonic() - began < 60
