"""Memory: peaks survive the resets of phases, GB is 1e9 bytes, gaps in the counters are None."""

from __future__ import annotations

from pathlib import Path

import pytest

from core import memory
from core.memory import MemoryTracker


class FakeDevice:
    """An allocator that counts live and peak bytes."""

    def __init__(self, missing: tuple[str, ...] = (), limit: int = 96_000_000_000) -> None:
        self.live = self.peak = 0
        self.missing, self.limit = missing, limit

    def use(self, size: int) -> None:
        """Allocate and free again: only the peak remembers."""
        self.peak = max(self.peak, self.live + size)

    def memory_stats(self) -> dict[str, int]:
        stats = {"InUse": self.live, "MaxInUse": self.peak, "Limit": self.limit, "NumAllocs": 1}
        return {key: value for key, value in stats.items() if key not in self.missing}

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.live


def test_record_names_units_and_divides_by_a_billion():
    device = FakeDevice()
    device.live = 2_000_000_000
    device.use(1_073_741_824)
    assert MemoryTracker(device).record() == {
        "memory_allocated (GB)": 2.0,
        "max_memory_allocated (GB)": 3.074,
        "total_memory_available (GB)": 96.0,
    }


def test_a_small_run_is_not_zero():
    device = FakeDevice()
    device.use(3_400_000)
    assert MemoryTracker(device).record()["max_memory_allocated (GB)"] == 0.003


def test_the_runs_peak_survives_the_phases():
    device = FakeDevice()
    tracker = MemoryTracker(device)
    device.use(7_000_000_000)  # before any phase, while the model is built
    with tracker.phase("train"):
        device.use(5_000_000_000)
    with tracker.phase("eval"):
        device.use(2_000_000_000)
    device.use(1_000_000_000)
    assert tracker.peaks() == {"train": 5.0, "eval": 2.0}
    assert tracker.record()["max_memory_allocated (GB)"] == 7.0


def test_a_phase_that_comes_again_keeps_its_maximum():
    device = FakeDevice()
    tracker = MemoryTracker(device)
    for size in (1, 4, 2):
        with tracker.phase("eval"):
            device.use(size * 1_000_000_000)
    assert tracker.peaks() == {"eval": 4.0}


def test_an_outer_phase_includes_its_inner_ones():
    device = FakeDevice()
    tracker = MemoryTracker(device)
    with tracker.phase("train"):
        device.use(5_000_000_000)
        with tracker.phase("eval"):
            with tracker.phase("generate"):
                device.use(6_000_000_000)
            with tracker.phase("score"):
                device.use(2_000_000_000)
        device.use(3_000_000_000)
    assert tracker.peaks() == {"train": 6.0, "eval": 6.0, "generate": 6.0, "score": 2.0}


def test_peaks_can_be_read_within_a_phase():
    device = FakeDevice()
    tracker = MemoryTracker(device)
    with tracker.phase("train"):
        device.use(5_000_000_000)
        assert tracker.peaks() == {"train": 5.0}


def test_a_phase_that_fails_is_closed():
    device = FakeDevice()
    tracker = MemoryTracker(device)

    def evaluate() -> None:
        with tracker.phase("eval"):
            device.use(8_000_000_000)
            raise MemoryError

    with pytest.raises(MemoryError):
        evaluate()
    with tracker.phase("train"):
        device.use(1_000_000_000)
    device.use(9_000_000_000)
    assert tracker.peaks() == {"eval": 8.0, "train": 1.0}


def test_missing_counters_are_none():
    tracker = MemoryTracker(FakeDevice(missing=("InUse", "MaxInUse", "Limit")))
    with tracker.phase("train"):
        pass
    assert set(tracker.record().values()) == {None}
    assert tracker.peaks() == {}


def test_a_limit_of_zero_is_unknown():
    assert MemoryTracker(FakeDevice(limit=0)).record()["total_memory_available (GB)"] is None


def test_on_the_cpu():
    device_module = pytest.importorskip("core.device")
    import torch

    tracker = MemoryTracker(device_module.Device("cpu", "cpu", "eager", torch.device("cpu")))
    with tracker.phase("train"):
        block = torch.ones(25_000_000)  # 100 MB
        del block
    record = tracker.record()
    assert 0 < record["memory_allocated (GB)"] <= record["max_memory_allocated (GB)"]
    assert tracker.peaks()["train"] <= record["max_memory_allocated (GB)"] < record["total_memory_available (GB)"]


@pytest.mark.parametrize(("limit", "left"), [("1000000000", 100_000_000), ("max", None), (None, None)])
def test_free_memory_is_what_a_container_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str | None, left: int | None
) -> None:
    """Without a limit it is the machine's, which has more than a tenth of a GB here."""
    monkeypatch.setattr(memory, "ROOT", tmp_path)
    group = tmp_path / "sys/fs/cgroup/job"
    group.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (group / "memory.current").write_text("900000000\n")
    if limit:
        (group / "memory.max").write_text(f"{limit}\n")
    free = memory.free_host_memory()
    assert free == left if left else free > 100_000_000
