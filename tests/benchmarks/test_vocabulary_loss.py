"""The figures are what was measured, and the loss holds one tensor of the logits where torch's holds three."""

from __future__ import annotations

import pytest

from benchmarks import vocabulary_loss


@pytest.mark.slow
@pytest.mark.processes
def test_the_loss_needs_a_third_of_the_memory() -> None:
    """Of a narrow head, so that the weight's gradient is small. One copy more would be a unit, in bf16 a half."""
    found = vocabulary_loss.measure_all(1, (16, 1024, 50257))
    units = {name: one["units"] for name, (one,) in found.items()}
    assert units["torch fp32"] > 2.5
    assert units["torch bf16"] > 2.5
    assert 1.0 < units["ours fp32"] < 1.5
    assert 0.5 < units["ours bf16"] < 1.0


def test_a_line_has_the_medians_and_the_ratio_to_torch_in_the_same_precision() -> None:
    times = {"torch fp32": (4, 2, 3), "ours fp32": (1, 2, 3), "torch bf16": (2, 2, 2), "ours bf16": (1, 1, 9)}
    found = {name: [{"seconds": s, "units": s / 2} for s in seconds] for name, seconds in times.items()}
    assert [line.split() for line in vocabulary_loss.table(found)] == [
        ["torch", "fp32", "1.50", "units", "3.00", "s", "1.00"],
        ["ours", "fp32", "1.00", "units", "2.00", "s", "1.00"],
        ["torch", "bf16", "1.00", "units", "2.00", "s", "1.00"],
        ["ours", "bf16", "0.50", "units", "1.00", "s", "0.50"],
    ]
