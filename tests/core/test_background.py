"""Checkpoints in the background: what is written is the state at the save, and training hardly waits."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from core import background, checkpoint
from core.background import SMALL, Later, Writer
from core.checkpoint import OnMain
from core.device import Device
from core.engine import Engine
from core.errors import UserError
from tests.core.toy import Model, run, weights

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))
LARGE = SMALL // 2  # numbers of a tensor that is copied later


class Gate:
    """Holds the thread that writes until it is told to go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.reached.set()
        assert self.open.wait(20)


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open.set()


@pytest.mark.parametrize("at_once", [False, True])
def test_copies_are_equal_and_their_own(at_once: bool) -> None:
    later = Later(at_once)
    numbers = torch.randn(2, LARGE)
    given = {
        "large": numbers[0], "small": torch.arange(5), "scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4),
        "bf16": numbers.bfloat16(), "strided": numbers.t(), "parameter": nn.Parameter(numbers.clone()),
    }  # fmt: skip
    before = {name: tensor.detach().clone() for name, tensor in given.items()}
    made = {name: later.copy(tensor) for name, tensor in given.items()}
    later.fill()
    for tensor in given.values():
        tensor.detach().zero_()
    for name, tensor in made.items():
        assert torch.equal(tensor, before[name]), name
        assert tensor.dtype == before[name].dtype
        assert tensor.is_contiguous()
        assert not tensor.requires_grad
    assert made["large"].untyped_storage().nbytes() == 4 * LARGE


def test_buffers_are_copied_at_once_and_large_tensors_before_they_may_change() -> None:
    """A forward pass changes buffers; the optimiser, for which `settle` waits, the rest."""
    later, small, large = Later(at_once=False), torch.zeros(100), torch.zeros(LARGE)
    copies = later.copy(small), later.copy(large)
    small += 1
    assert copies[0].sum() == 0
    later.fill()
    large += 1
    assert copies[1].sum() == 0


def write_of(tensor: torch.Tensor, *work: Any) -> Any:
    def write(main: OnMain, folder: Path) -> None:
        for one in work:
            main.later(one)
        main.later(save_file, {"x": main.copy(tensor)}, folder / "x.safetensors")

    return write


def test_training_goes_on_while_the_thread_writes(tmp_path: Path, gate: Gate) -> None:
    writer, tensor = Writer(CPU, stop=True), torch.ones(LARGE)
    writer.save(tmp_path, 1, write_of(tensor, gate))
    assert gate.reached.wait(20)
    writer.settle()
    tensor += 1  # a step, before the file is written
    assert not (tmp_path / "checkpoint-1").exists()
    gate.open.set()
    writer.finish()
    assert checkpoint.problem(tmp_path / "checkpoint-1") is None
    assert load_file(tmp_path / "checkpoint-1" / "x.safetensors")["x"].unique().tolist() == [1.0]
    assert len(writer.lost) == len(writer.writing) == 1
    assert writer.lost[0] < writer.writing[0]


def test_the_next_save_waits_for_the_one_before(tmp_path: Path, gate: Gate) -> None:
    writer, tensor = Writer(CPU, stop=True), torch.ones(4)
    writer.save(tmp_path, 1, write_of(tensor, gate))
    threading.Timer(0.3, gate.open.set).start()
    writer.save(tmp_path, 2, write_of(tensor))
    assert writer.lost[0] >= 0.2  # which is the first one's fault
    writer.finish()
    assert [step for step, _ in checkpoint.all_steps(tmp_path)] == [2, 1]


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_save_that_fails_is_told_when_it_is_waited_for(tmp_path: Path) -> None:
    writer, tensor = Writer(CPU, stop=True), torch.ones(4)
    writer.save(tmp_path, 1, write_of(tensor))
    writer.save(tmp_path, 2, write_of(tensor, full))
    writer.join()
    assert writer.failed()
    with pytest.raises(UserError, match=r"checkpoint-2 cannot be written: .*No space left.*; earlier checkpoints"):
        writer.finish()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-1"]
    writer.finish()  # it is told once


def test_or_it_is_a_warning_and_the_next_one_is_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    writer, tensor = Writer(CPU, stop=False), torch.ones(4)
    writer.save(tmp_path, 1, write_of(tensor, full))
    writer.save(tmp_path, 2, write_of(tensor))
    writer.finish()
    assert "--on_save_error continue: " in caplog.text
    assert "checkpoint-1 cannot be written" in caplog.text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2"]


def test_a_bug_in_the_thread_is_not_hidden(tmp_path: Path) -> None:
    writer = Writer(CPU, stop=False)
    writer.save(tmp_path, 1, write_of(torch.ones(4), lambda: {}["a bug"]))
    with pytest.raises(KeyError, match="a bug"):
        writer.finish()
    assert not list(tmp_path.iterdir())


def test_a_state_that_is_too_large_is_written_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    writer, seen = Writer(CPU, stop=True), []
    half = psutil.virtual_memory().available / 2
    monkeypatch.setattr(background.Later, "__init__", lambda later, at_once: pytest.fail("it was to be copied"))
    writer.save(tmp_path, 1, lambda main, folder: seen.append(main.puts_off), size=int(2 * half))
    assert seen == [False]
    assert (tmp_path / "checkpoint-1").is_dir()
    assert "training waits for saves" in caplog.text


def test_what_is_saved_is_the_state_at_the_save(tmp_path: Path) -> None:
    """Large weights, steps at once after each save, and a slow disk: the files hold what there was."""

    class Wide(Model):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.Parameter(torch.randn(LARGE))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return super().forward(batch) + self.wide.mean()

    kept: dict[int, torch.Tensor] = {}

    def each(engine: Engine) -> None:
        kept[engine.step_count] = weights(engine.run.model).clone()

    torch.manual_seed(0)
    flags = ["--max_steps", "6", "--save_steps", "1", "--optim", "sgd", "--learning_rate", "1"]
    engine, model, _ = run(tmp_path, *flags, model=Wide(), each=each)
    for step, before in kept.items():
        saved = load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")
        names = [name for name, _ in model.named_parameters()]
        assert torch.equal(torch.cat([saved[name].flatten() for name in names]), before), step
    assert len(engine.writer.lost) == 6


def test_a_step_waits_until_the_state_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy is slow; without `settle` it would hold the next step's weights."""
    fill, began = Later.fill, []

    def slow(later: Later) -> None:
        time.sleep(0.2)
        began.append(len(steps))
        fill(later)

    monkeypatch.setattr(Later, "fill", slow)
    steps: list[int] = []
    engine, *_ = run(
        tmp_path, "--max_steps", "3", "--save_steps", "1", each=lambda engine: steps.append(engine.step_count)
    )
    engine.writer.finish()
    assert began == [1, 2, 3]
    assert min(engine.writer.lost[:2]) > 0.1


def test_the_loop_ends_when_the_checkpoint_is_complete(tmp_path: Path) -> None:
    """Also where it is left early: a killed run has what it has, and no other run is to find a half of it."""
    for stop in (2, None):
        folder = tmp_path / str(stop)
        run(folder, "--max_steps", "4", "--save_steps", "2", stop=stop)
        assert checkpoint.problem(folder / f"checkpoint-{stop or 4}") is None
        assert not list(folder.glob(".checkpoint-*"))


def test_a_library_that_raises_a_bare_error_of_the_system_is_trouble_too(tmp_path: Path) -> None:
    """As tokenizers does: it is written in Rust."""

    def rust() -> None:
        raise Exception("No space left on device (os error 28)")

    writer = Writer(CPU, stop=True)
    writer.save(tmp_path, 1, lambda main, folder: main(rust))
    with pytest.raises(UserError, match="checkpoint-1 cannot be written: No space left"):
        writer.finish()


def test_ranks_that_write_nothing_copy_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    later, tensor = Later(at_once=False), torch.ones(LARGE)
    assert later.copy(tensor).data_ptr() == tensor.data_ptr()


def test_a_large_buffer_is_copied_at_once(tmp_path: Path) -> None:
    """The next forward pass changes it, before any step."""

    class Counting(Model):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(2 * LARGE))

        def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            self.seen += 1
            return super().forward(batch)

    run(tmp_path, "--max_steps", "4", "--save_steps", "1", model=Counting())
    for step in range(1, 5):
        assert load_file(tmp_path / f"checkpoint-{step}" / "model.safetensors")["seen"].unique().tolist() == [step]


def test_an_old_checkpoint_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(*_: Any) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(checkpoint, "_remove", busy)
    engine, *_ = run(tmp_path, "--max_steps", "2", "--save_steps", "1", "--save_total_limit", "1")
    engine.writer.finish()
    assert "an old checkpoint cannot be removed" in caplog.text
    assert engine.writer.complete == 2
    assert checkpoint.problem(tmp_path / "checkpoint-2") is None


def test_a_checkpoint_that_failed_is_not_complete(tmp_path: Path) -> None:
    writer = Writer(CPU, stop=False)
    writer.save(tmp_path, 1, write_of(torch.ones(4)))
    writer.finish()
    writer.save(tmp_path, 2, write_of(torch.ones(4), full))
    writer.finish()
    assert writer.complete == 1
    assert len(writer.writing) == 1
