"""Random generators go to JSON and back bit for bit."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch

from core import generators
from core.device import Device
from core.preemption import Preempted

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))


def drawn() -> list[float]:
    return [random.gauss(0, 1), float(np.random.standard_normal()), *torch.randn(3).tolist()]


def test_all_generators_go_on_where_they_were() -> None:
    drawn()  # Python's and NumPy's hold half a pair now
    saved = json.loads(json.dumps(generators.as_json(CPU)))
    expected = drawn()
    assert drawn() != expected
    generators.put_back(CPU, saved)
    assert drawn() == expected
    generators.put_back(
        CPU, saved, {"cpu": torch.tensor(list(bytes.fromhex(saved["device_random"]["cpu"])), dtype=torch.uint8)}
    )
    assert drawn() == expected


@pytest.mark.parametrize("error", [Preempted("enough"), KeyError("a bug")], ids=["preempted", "another"])
def test_a_block_that_is_cut_off_has_drawn_nothing(error: BaseException) -> None:
    saved = generators.as_json(CPU)
    expected = drawn()
    generators.put_back(CPU, saved)

    def work() -> None:
        with generators.unless_preempted(CPU):
            drawn()
            raise error

    with pytest.raises(type(error)):
        work()
    assert (drawn() == expected) == isinstance(error, Preempted)
