"""Reading ahead: a worker that is killed is one line; the rest is tested with the loader, in `test_data`."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from torch.utils.data import Dataset

from core.errors import UserError
from core.workers import read_ahead


class Deadly(Dataset):
    """Item 2 kills the process that makes it, as a system without memory does; item 7 is a bug."""

    def __len__(self) -> int:
        return 9

    def __getitem__(self, number: int) -> torch.Tensor:
        if number == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(number)


class Faulty(Deadly):
    def __getitem__(self, number: int) -> torch.Tensor:
        raise RuntimeError("a bug")


def test_a_killed_worker_is_one_line() -> None:
    with pytest.raises(UserError, match=r"a process of --dataloader_num_workers 1 ended \(.*\); .*give fewer"):
        list(read_ahead(Deadly(), workers=1, pin_memory=False))


def test_a_bug_in_a_worker_keeps_its_traceback() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)Original Traceback.*a bug"):
        list(read_ahead(Faulty(), workers=1, pin_memory=False))
