"""DDP and fast DDP on two real ranks: the steps, checkpoints and evaluations of one device; and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from core import distributed, errors, strategies
from core.device import Device
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.core import toy, trials
from tests.core.ranks import PROGRAMS, results, start_ranks
from tests.hpu_simulator import simulator

NAMES = ("ddp", "fast_ddp")
CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("strategies")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """The same trials on one device, in this process."""
    return trials.common([], folder / "one") | {"straight": trials.cross([], folder / "plain")}


@pytest.fixture(scope="module")
def ranks(folder: Path, plain: dict[str, Any]) -> list[dict[str, Any]]:
    return results(start_ranks(2, "training", str(folder), *NAMES, PYTHONWARNINGS="ignore"))


def check_steps(found: dict[str, Any], expected: dict[str, Any], case: str, has_weights: bool = True) -> None:
    """Losses, norms and rates of each step, and the weights after it: under ZeRO rank 0 alone has them."""
    for what in ("losses", "norms", "rates"):
        assert found[case][what] == pytest.approx(expected[case][what], abs=1e-6), what
    assert len(found[case]["weights"]) == len(expected[case]["weights"])
    for after, right in zip(found[case]["weights"], expected[case]["weights"], strict=True):
        assert after == (pytest.approx(right, abs=1e-6, rel=0) if has_weights else [])


def check_the_rest(ranks: list[dict[str, Any]], name: str, plain: dict[str, Any]) -> None:
    """Clipping, rates, evaluation and checkpoints of one strategy on all ranks."""
    for rank, found in enumerate(one[name] for one in ranks):
        for limit, moved in ((1.0, 1), (0.0, 10), (None, 10)):
            clip = found[f"clip {limit}"]
            has_weights = rank == 0 or not name.startswith("zero")
            assert clip["moved"] == (pytest.approx(moved, rel=1e-5) if has_weights else 0)
            assert clip["norm"] == pytest.approx(10, rel=1e-5)  # the one before clipping
            if rank == 0:
                assert (clip["logged"], clip["clipped"]) == (pytest.approx(10, rel=1e-5), int(limit == 1.0))
        assert found["rates 1"] == found["rates 3"] == plain["rates 1"] == plain["rates 3"]
        for case in ("eval 13", "eval 1"):
            assert found[case]["loss"] == pytest.approx(plain[case]["loss"], abs=1e-6)
            assert found[case]["outputs"] == plain[case]["outputs"]
        if rank == 0:
            assert found["straight"] == pytest.approx(plain["straight"], abs=1e-6)
            assert found["from plain"] == pytest.approx(plain["straight"], abs=1e-6)
        check_resumed(found["resume"])
    assert ranks[0][name]["resume"]["drawn"] != ranks[1][name]["resume"]["drawn"]


def check_resumed(found: dict[str, Any]) -> None:
    """Steps, weights and the next random numbers are the straight run's, bit for bit."""
    assert found["steps"] == 12
    stops = {key: same for key, same in found.items() if key.startswith("from")}
    assert stops
    assert all(same == [True, True, True] for same in stops.values()), stops


@pytest.mark.processes
@pytest.mark.parametrize("case", trials.SPLITS)
@pytest.mark.parametrize("name", NAMES)
def test_a_window_is_the_same_step_on_two_ranks(ranks, plain, name: str, case: str) -> None:
    for found in ranks:
        check_steps(found[name], plain, case)
    assert ranks[0][name][case]["weights"] == ranks[1][name][case]["weights"]


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_clipping_rates_evaluation_and_checkpoints(ranks, plain, name: str) -> None:
    check_the_rest(ranks, name, plain)


@pytest.mark.processes
def test_ddp_resumes_from_every_step(ranks) -> None:
    assert [f"from {stop}" in ranks[1]["ddp"]["resume"] for stop in range(1, 12)] == [True] * 11


@pytest.mark.processes
@pytest.mark.parametrize("name", NAMES)
def test_a_checkpoint_of_two_ranks_goes_on_on_one(ranks, plain, folder: Path, tmp_path: Path, name: str) -> None:
    found = trials.cross([], tmp_path, folder / name / "saved")
    assert found == pytest.approx(plain["straight"], abs=1e-6)


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_forgets_the_gradients_or_leaves_zeros_where_they_are(tmp_path: Path, graphs: bool) -> None:
    """Recorded graphs write into the same memory again."""
    args = toy.arguments(tmp_path, "--use_hpu_graphs_for_training", str(graphs), "--learning_rate", "0.1")
    model = toy.Model()
    model.position.requires_grad_(False)
    strategy = strategies.Replicated(model, args, GaudiConfig(), CPU)
    batch = toy.collate([0, 1], (8, 8))
    with strategy.micro_batch(last=True):
        strategy.backward(toy.loss_sum(strategy.model, batch), torch.tensor(1.0))
    before = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all(gradient.any() for gradient in before.values())
    assert strategy.step() > 0
    for name, parameter in model.named_parameters():
        assert parameter.grad is (before.get(name) if graphs else None)
        assert parameter.grad is None or not parameter.grad.any()


def check_failures(ranks: list[dict[str, Any]], strategy: str) -> None:
    """All ranks end at once, each with the reason; what was saved before stays."""
    for rank, found in enumerate(ranks):
        kind, text, done = found["nan"]
        assert (kind, done) == ("UserError", 2)
        assert "the loss became nan in step 3 (2 x cpu" in text
        assert strategy in text
        right = ["ValueError", "no such picture"] if rank else ["UserError", "rank 1: ValueError: no such picture"]
        assert found["unreadable"] == right
        kind, text = found["unsaved"]["error"]
        assert kind == "UserError"
        assert "checkpoint-2 cannot be written: " in text
        assert "File too large" in text
        assert found["unsaved"]["left"] == ["checkpoint-1"]
        assert found["unsaved"]["newest"] == "checkpoint-1"


@pytest.mark.processes
def test_what_fails_on_one_rank_ends_all(ranks) -> None:
    check_failures(ranks, "fast DDP")


@pytest.mark.processes
def test_the_banner_tells_two_devices_from_one(ranks, tmp_path: Path) -> None:
    one, two = trials.banner([], tmp_path), ranks[0]["banner"]
    assert (one["global batch"], two["global batch"]) == ("4 rows (4 x 1 x 1)", "8 rows (4 x 1 x 2)")
    assert (one["optimiser steps"], two["optimiser steps"]) == ("24 (6 an epoch)", "12 (3 an epoch)")
    assert one["optimiser"] == two["optimiser"] == "AdamW, learning rate 5e-05, linear"
    assert two["device"].endswith(" x 2")


FAST = ["--distribution_strategy", "fast_ddp"]


@pytest.mark.parametrize(
    ("world", "flags", "message"),
    [
        (1, ["--deepspeed", "zero2", *FAST], "--deepspeed and --distribution_strategy fast_ddp both average"),
        (1, ["--deepspeed", "zero2", "--use_hpu_graphs_for_training"], "--deepspeed and --use_hpu_graphs_for_training"),
        (2, ["--use_hpu_graphs_for_training"], "graphs_for_training on 2 devices needs --distribution_strategy fast"),
        (2, ["--reduction_dtype", "bf16"], "--reduction_dtype bf16 needs --distribution_strategy fast_ddp"),
    ],
)
def test_what_does_not_go_together_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, world: int, flags: list[str], message: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("RANK", "0")
    args = toy.arguments(tmp_path, *flags)
    with pytest.raises(UserError, match=message) as error:
        strategies.check(args)
    assert "\n" not in str(error.value)


def test_a_run_asks_before_it_does_anything_else(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="both average"):
        Run(toy.arguments(tmp_path / "run", "--deepspeed", "zero2", *FAST), GaudiConfig(), "toy")
    distributed.stop()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--ddp_bucket_cap_mb", "7"], "ddp_bucket_cap_mb"),
        (["--ddp_find_unused_parameters", "True"], "ddp_find_unused_parameters"),
        (FAST, "distribution_strategy"),
        (["--reduction_dtype", "bf16"], "reduction_dtype"),
    ],
)
def test_flags_of_several_devices_say_that_they_have_no_effect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, flags: list[str], name: str
) -> None:
    strategies.check(toy.arguments(tmp_path, *flags))
    assert caplog.messages == [f"--{name} has no effect here: there is one device"]
    caplog.clear()
    if name != "distribution_strategy":
        strategies.check(toy.arguments(tmp_path, *flags, "--deepspeed", "zero2"))
        assert caplog.messages == [f"--{name} has no effect here: the DeepSpeed configuration decides"]
    caplog.clear()
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    strategies.check(toy.arguments(tmp_path, *flags, *FAST))
    assert [name in text for text in caplog.messages] == [True] * (name == "ddp_find_unused_parameters")


@pytest.mark.processes
def test_what_is_saved_are_the_buffers_of_all_ranks(tmp_path: Path) -> None:
    """Statistics that each rank keeps of its own rows would else be one rank's in the file and others' in a metric."""
    names = ("ddp", "fast_ddp", "zero2")
    one, other = results(start_ranks(2, "observing", str(tmp_path), *names, PYTHONWARNINGS="ignore"))
    for name in names:
        assert one[name]["here"] == other[name]["here"] == one[name]["saved"] != [0, 0, 0]


def check_left_out(ranks: list[dict[str, Any]], counters: list[int] | None = None) -> None:
    """The step with bad gradients on one rank was never made, on any: weights, state and the later steps say so."""
    assert all(found.pop("warned") == [] for found in ranks)
    for case, first in ranks[0].items():
        missing = 1 if case.endswith("first") else 2
        for found in (one[case] for one in ranks):
            assert found["same"] == [True, True], case
            assert found["rates"], case
            assert [math.isfinite(norm) for norm in found["norms"]] == [step != missing for step in range(1, 5)], case
            assert found["norms"] == pytest.approx(first["norms"], nan_ok=True, rel=0, abs=0), case
            assert (found["own"], found["counters"]) == (first["own"], counters), case
            assert found["entries"], case


@pytest.mark.slow
@pytest.mark.processes
def test_bad_gradients_on_one_rank_leave_the_update_out_on_all(tmp_path: Path) -> None:
    check_left_out(results(start_ranks(2, "leaving_out", str(tmp_path), "ddp", "fast_ddp bf16 sums")))


@pytest.mark.compiles
@pytest.mark.processes
def test_a_device_leaves_an_update_out_without_being_waited_for() -> None:
    done = simulator.run(PROGRAMS / "leaving_out_on_card.py", mode="lazy")
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.strip().splitlines()[-1])
    assert found.pop("kept") == [1, 0.0, True]  # gradients that a recorded graph writes stay where they are
    bf16, fp32 = found.pop("decayed")
    assert (bf16, fp32) == (1, pytest.approx(0.999, abs=1e-5))  # which is why `Run.train` warns of bf16
    assert len(found) == 7 * 3
    for case, one in found.items():
        if case.endswith(" close"):
            assert one <= (1e-8 if case == "Lamb close" else 0)
            continue
        exact = case.startswith(("torch's fused", "Lamb"))
        assert one == {
            "finite": True,
            "like": ["none" if exact else "zeros"],
            "syncs": [True, 0],
            "weights": [True, False],  # and with "stop" they are not finite: who reads the norms stops
        }, case


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_trainable_parameters_that_are_not_fp32_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(errors, "_warned", set())
    run = Run(toy.arguments(tmp_path / "run"), GaudiConfig(), "toy")
    model = toy.Model()
    model.head.to(dtype)
    run.train(model, 1)
    said = "trainable parameters are not fp32: updates smaller than their rounding are lost" in caplog.text
    assert said is (dtype != torch.float32)
    caplog.clear()
    errors._warned.clear()
    model.head.requires_grad_(False)  # as below adapters
    run.train(model, 1)
    assert not caplog.messages
