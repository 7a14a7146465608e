"""The reducer's gradients are DDP's, in every way it can run, on the CPU and on the simulated device."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from core.device import Device
from core.gradients import GradientReducer, _fill_buckets, all_reduce_gradients, synchronize_state
from tests.core.ranks import results, start_ranks

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))
EXACT = ["by_hand", "plain", "kept", "overlap", "views", "views_kept", "views_overlap"]
KEPT = ["kept", "views_kept", "bf16_overlap_kept"]
SETTINGS = [
    pytest.param(None, id="cpu"),
    *(pytest.param(mode, marks=pytest.mark.compiles) for mode in ("lazy", "eager")),
]


@pytest.fixture(scope="module", params=SETTINGS)
def setting(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str | None, list[dict], Path]:
    report = tmp_path_factory.mktemp("report") / "report.json"
    return (
        request.param,
        results(start_ranks(2, "gradients", mode=request.param, HPU_SIMULATOR_JSON=str(report))),
        report,
    )


@pytest.fixture
def found(setting) -> list[dict[str, Any]]:
    return setting[1]


@pytest.mark.processes
@pytest.mark.parametrize("way", EXACT)
def test_gradients_are_those_of_ddp(found, way):
    """Among them: of a parameter that one rank uses, that is used in one step, by nobody, and in another order."""
    for one in found:
        assert one[way]["worst"] <= 1e-6
        # A gradient that is set to zero, not to None, remains; DDP's run forgot it.
        assert one[way]["odd"] == (["sometimes.bias", "sometimes.weight"] if way in KEPT else [])


@pytest.mark.processes
@pytest.mark.parametrize("way", ["bf16", "bf16_overlap_kept"])
def test_bf16_rounds_and_no_more(found, way):
    for one in found:
        assert 1e-4 < one[way]["worst"] < 2 * 2**-8


@pytest.mark.processes
@pytest.mark.parametrize("way", KEPT)
def test_gradients_that_are_kept_stay_where_they_are(found, way):
    assert [one[way]["moved"] for one in found] == [[], []]


@pytest.mark.processes
def test_overlap_begins_while_backward_runs(found):
    for way in ("overlap", "views_overlap", "bf16_overlap_kept"):
        assert found[0][way]["begun"] >= 3  # one in each step; the other rank waits for `first`, then sends all
    assert found[0]["plain"]["begun"] == found[0]["views"]["begun"] == 0


@pytest.mark.processes
def test_state_of_rank_0_reaches_all(found):
    first, other = (one["synchronized"] for one in found)
    assert first["before"] != other["before"]
    assert first["before"] == first["after"] == other["after"]
    assert first["conv"] == other["conv"]
    assert first["tied"]
    assert other["tied"]
    for one in found:
        assert one["unlike"].startswith("UserError: the ranks built different models")


@pytest.mark.processes
def test_a_gradient_that_comes_twice_is_refused(found):
    assert all(one["twice"].startswith("UserError: a gradient came twice") for one in found)


@pytest.mark.processes
def test_no_sum_is_narrower_than_the_gradient(found, setting):
    if setting[0]:
        pytest.skip("the device has no float64")
    for one in found:
        assert one["wide"] == [128.5 + 2.0**-41] * 3


@pytest.mark.processes
def test_the_device_sends_only_what_its_backend_carries(setting):
    mode, _, report = setting
    if mode is None:
        pytest.skip("gloo carries all of them")
    for rank in range(2):
        text = report.with_name(f"report-rank{rank}.json").read_text(encoding="utf-8")
        kinds = {entry["dtype"] for entry in json.loads(text)["collectives"]}
        assert kinds == {"float32", "bfloat16", "int32", "int64"}  # the integers are DDP's own


def test_buckets_are_bounded_and_go_backwards():
    model = nn.Sequential(*[nn.Linear(10, 10, bias=False) for _ in range(5)], nn.Linear(100, 10))
    model[1].requires_grad_(False)
    model.append(model[0])  # tied: once
    buckets = _fill_buckets(model, cap=4 * 250, reduction_dtype=torch.float32)
    sizes = [[one.numel() for one in bucket.parameters] for bucket in buckets]
    assert sizes == [[10], [1000], [100, 100], [100, 100]]
    assert buckets[-1].parameters == [model[2].weight, model[0].weight]
    assert [bucket.flat.numel() for bucket in buckets] == [11, 1001, 202, 202]
    halves = _fill_buckets(model, cap=4 * 250, reduction_dtype=torch.bfloat16)
    assert [len(bucket.parameters) for bucket in halves] == [1, 1, 4]


@pytest.mark.parametrize(
    ("parameter", "asked", "got"),
    [
        (torch.bfloat16, torch.float32, torch.float32),
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.bfloat16, torch.bfloat16),
    ],
)
def test_a_bucket_is_narrower_than_its_gradients_only_if_asked(parameter, asked, got):
    (bucket,) = _fill_buckets(nn.Linear(2, 2).to(parameter), cap=1000, reduction_dtype=asked)
    assert bucket.flat.dtype == got


def test_one_process_leaves_everything_as_it_is():
    model = nn.Linear(2, 2)
    reducer = GradientReducer(model, CPU, overlap=True)
    synchronize_state(model)
    reducer.arm()
    model(torch.ones(1, 2)).sum().backward()
    gradient = model.weight.grad
    reducer.finish()
    all_reduce_gradients(model, CPU)
    assert model.weight.grad is gradient
    assert gradient.tolist() == [[1, 1], [1, 1]]
