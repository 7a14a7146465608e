"""ZeRO on two real ranks: the steps, checkpoints and evaluations of one device; its exports; and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core import deepspeed_config, distributed
from core.errors import UserError
from core.export import export
from core.gaudi_config import GaudiConfig
from core.run import Run
from tests.conftest import REPOSITORY
from tests.core import toy, trials
from tests.core.ranks import results, start_ranks
from tests.core.test_strategies import check_failures, check_left_out, check_resumed, check_steps, check_the_rest

STAGES = ("zero1", "zero3", "zero2")  # the last one meets what fails
RESUMED = ("zero1 bf16", "zero2 bf16", "zero3 bf16", "zero2_offload", "zero3_offload")


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    """One process has a group under DeepSpeed, from the first check of a run on."""
    yield
    distributed.stop()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zero")


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """The same trials on one device without DeepSpeed, in this process."""
    return trials.common([], folder / "one") | {"straight": trials.cross([], folder / "plain")}


def write_own_schedule(folder: Path) -> None:
    """A configuration with a schedule in it."""
    names = ("total_num_steps", "warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    scheduler = {"type": "WarmupDecayLR", "params": dict.fromkeys(names, "auto") | {"warmup_type": "linear"}}
    config = {"zero_optimization": {"stage": 1}, "scheduler": scheduler}
    (folder / "own_schedule.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def ranks(folder: Path, plain: dict[str, Any], tiny_t5: Path) -> list[dict[str, Any]]:
    (folder / "model").symlink_to(tiny_t5)
    write_own_schedule(folder)
    return results(start_ranks(2, "training", str(folder), *RESUMED, *STAGES, PYTHONWARNINGS="ignore"))


@pytest.mark.processes
@pytest.mark.parametrize("case", trials.SPLITS)
@pytest.mark.parametrize("name", STAGES)
def test_a_window_is_the_same_step_on_two_ranks(ranks, plain, name: str, case: str) -> None:
    for rank, found in enumerate(ranks):
        check_steps(found[name], plain, case, has_weights=rank == 0)


@pytest.mark.processes
@pytest.mark.parametrize("name", STAGES)
def test_clipping_rates_evaluation_and_checkpoints(ranks, plain, name: str) -> None:
    check_the_rest(ranks, name, plain)


@pytest.mark.processes
@pytest.mark.parametrize("name", RESUMED)
def test_resume_is_exact_in_bf16_and_with_state_on_the_host(ranks, name: str) -> None:
    for found in ranks:
        check_resumed(found[name]["resume"])
    fp32 = ranks[0]["zero2"]["resume"]["losses"]
    assert ranks[0][name]["resume"]["losses"] == pytest.approx(fp32, rel=0.01 if "bf16" in name else 1e-6)


@pytest.mark.processes
@pytest.mark.parametrize("name", STAGES)
def test_a_checkpoint_of_two_ranks_goes_on_on_one_without_deepspeed(
    ranks, plain, folder: Path, tmp_path: Path, name: str
) -> None:
    found = trials.cross([], tmp_path, folder / name / "saved")
    assert found == pytest.approx(plain["straight"], abs=1e-6)


@pytest.mark.processes
def test_a_checkpoint_goes_from_one_stage_to_another_and_to_another_number_of_ranks(
    ranks, plain, folder: Path, tmp_path: Path
) -> None:
    trips = {"zero2": folder / "zero3" / "saved", "zero3": folder / "zero1" / "saved"}
    given = [word for name, source in trips.items() for word in (name, str(source))]
    for name, weights in results(start_ranks(1, "going_on", str(tmp_path), *given, PYTHONWARNINGS="ignore"))[0].items():
        assert weights == pytest.approx(plain["straight"], abs=1e-6), name


@pytest.mark.processes
def test_deepspeeds_own_schedule_advances_without_targets_and_goes_on(ranks) -> None:
    found = ranks[0]["own schedule"]
    # Its first two rates are the first one's; then one a step, over the third and fourth, which have no target.
    assert found["straight"] == pytest.approx([0, 0, 0.005, 0.01, 0.0075, 0.005])
    assert found["again"] == found["straight"][4:]


@pytest.mark.processes
def test_stage_3_evaluates_by_itself(ranks, plain) -> None:
    for found in ranks:
        assert found["alone"]["loss"] == pytest.approx(plain["eval 13"]["loss"], abs=1e-6)
        assert found["alone"]["outputs"] == plain["eval 13"]["outputs"]


@pytest.mark.processes
def test_what_fails_on_one_rank_ends_all(ranks) -> None:
    check_failures(ranks, "ZeRO-2 (zero2)")


@pytest.mark.processes
@pytest.mark.parametrize("trained", ["zero3", "zero3--bf16"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_checkpoint_of_stage_3_is_exported(ranks, folder: Path, tmp_path: Path, trained: str, dtype: str) -> None:
    from transformers import T5ForConditionalGeneration

    before = T5ForConditionalGeneration.from_pretrained(folder / "model", dtype=torch.float32)
    source = folder / trained / "checkpoint-1"
    resumed = T5ForConditionalGeneration.from_pretrained(source)
    assert resumed.dtype == torch.float32, "what the optimiser stepped, not its copy in bf16"
    export(source, tmp_path / "out", dtype)
    model = T5ForConditionalGeneration.from_pretrained(tmp_path / "out")
    assert model.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()
    moved = (model.shared.weight.float() - before.shared.weight).abs().max().item()
    assert 0 < moved < 0.01
    torch.testing.assert_close(model.shared.weight.float(), resumed.shared.weight.to(model.dtype).float())


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        (2, ["--optim", "lamb"], "--optim lamb measures whole tensors"),
        (2, ["--optim", "adafactor"], "--optim adafactor measures whole tensors"),
        (0, [], r"zero_optimization.stage is 0 \(integer\); it must be 1, 2 or 3"),
        (None, [], "no zero_optimization block; DDP needs no --deepspeed"),
        (2, ["--use_hpu_graphs_for_training"], "losses became NaN; leave one out"),
    ],
)
def test_what_zero_cannot_do_is_refused_before_anything_loads(
    tmp_path: Path, config: int | None, flags: list[str], message: str
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({} if config is None else {"zero_optimization": {"stage": config}}))
    args = toy.arguments(tmp_path / "run", "--deepspeed", str(path), *flags)
    with pytest.raises(UserError, match=message) as error:
        Run(args, GaudiConfig(), "toy")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


def test_the_fused_optimiser_gives_way_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(toy.arguments(tmp_path, "--deepspeed", "zero2"), GaudiConfig(use_fused_adam=True), "toy")
    assert "use_fused_adam does not work under DeepSpeed: torch's AdamW runs instead" in caplog.text


@pytest.mark.parametrize("limit", ["0", "None"])
def test_no_limit_is_no_clipping_for_deepspeed_too(tmp_path: Path, limit: str) -> None:
    args = toy.arguments(tmp_path, "--deepspeed", "zero2", "--max_grad_norm", "0")
    args.max_grad_norm = {"0": 0.0, "None": None}[limit]
    config = deepspeed_config.resolve(deepspeed_config.load("zero2"), args, 2, gaudi_config=GaudiConfig())
    assert config["gradient_clipping"] == 0


@pytest.mark.processes
def test_stage_3_builds_and_loads_models_in_shares(tmp_path: Path, tiny_t5: Path) -> None:
    """Half of each parameter on each of two ranks, rounded up, and nothing whole, before any engine is made."""
    for found in results(start_ranks(2, "sharded", str(tmp_path), str(tiny_t5), PYTHONWARNINGS="ignore")):
        for held in found.values():
            assert held["whole"] / 2 <= held["here"] < held["whole"] / 2 + 100
            assert held["gathered"] == 0


@pytest.mark.processes
def test_a_checkpoint_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """Also where DeepSpeed has put all weights into one storage: that does not make them one weight."""
    (found,) = results(start_ranks(1, "lacking", str(tmp_path), "zero1", "zero2", "zero3", PYTHONWARNINGS="ignore"))
    for text in found.values():
        assert "is of another model: missing ['head.weight']" in text


def test_graphs_for_inference_give_way_under_stage_3(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--deepspeed", "zero3", "--use_hpu_graphs_for_inference"]
    run = Run(toy.arguments(tmp_path, *flags), GaudiConfig(), "toy")
    assert not run.args.use_hpu_graphs_for_inference
    assert "no effect under ZeRO-3" in caplog.text


SHIPPED = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 2])
def test_bad_gradients_on_one_rank_leave_the_update_out_on_all(tmp_path: Path, size: int) -> None:
    """In fp32 and under stage 3 DeepSpeed leaves it out, else this project; the schedule goes on with both."""
    names = [*(SHIPPED if size > 1 else ()), *(f"{name} bf16" for name in SHIPPED), "own schedule", "own schedule bf16"]
    write_own_schedule(tmp_path)
    check_left_out(results(start_ranks(size, "leaving_out", str(tmp_path), *names, timeout=240)), counters=[4, 1])


@pytest.mark.slow
@pytest.mark.compiles
@pytest.mark.processes
def test_a_device_leaves_an_update_out(tmp_path: Path) -> None:
    """Under stages 1 and 2 in bf16 it gets gradients of zero, unless it is told to stop."""
    variables = {"mode": "lazy", "HPU_SIMULATOR_DEVICES": "2", "PYTHONWARNINGS": "ignore"}
    exact, zeros = ["zero2", "zero3 bf16", "zero2_offload bf16"], "zero1 bf16"
    ranks = results(start_ranks(2, "leaving_out", str(tmp_path), *exact, zeros, timeout=240, **variables))
    for found in ranks:
        for kind, missing in (("nan", 2), ("inf", 2), ("first", 1)):
            skipped, stopped = found.pop(f"{zeros} skip {kind}"), found.pop(f"{zeros} stop {kind}")
            assert [one["finite"] for one in (skipped, stopped)] == [True, False]
            assert [math.isfinite(norm) for norm in skipped["norms"]] == [step != missing for step in range(1, 5)]
            assert not math.isfinite(stopped["norms"][missing - 1])
            assert skipped["rates"]
            assert skipped["own"] == ranks[0].get(f"{zeros} skip {kind}", skipped)["own"]
            assert skipped["counters"] == [4, 0]
    check_left_out(ranks, counters=[4, 1])


@pytest.mark.slow
@pytest.mark.processes
def test_steps_below_bf16s_rounding_are_kept_in_fp32(tmp_path: Path) -> None:
    """A weight of 1 and steps of 1e-5: in bf16 each is lost, which is why `Run.train` warns, but not under ZeRO."""
    ways = ["--distribution_strategy ddp", "--deepspeed zero1", "--deepspeed zero2 --bf16", "--deepspeed zero3 --bf16"]
    (ended,) = start_ranks(1, "small_updates", str(tmp_path), *ways)
    (found,) = results([ended])
    plain, *zero = (found[way] for way in ways)
    assert plain == ["torch.bfloat16", 0]
    for dtype, moved in zero:
        assert (dtype, moved) == ("torch.float32", pytest.approx(-1e-3, rel=0.01))
    assert ended.stderr.count("trainable parameters are not fp32") == 1


IN_TURN = """
import sys
from pathlib import Path
from tests.core import toy
for number, flags in enumerate((["--deepspeed", "zero2"], [], ["--deepspeed", "zero3"])):
    given = ["--max_steps", "2", "--save_strategy", "no", *flags]
    engine, _, steps = toy.run(Path(sys.argv[1]) / str(number), *given)
    engine.run.close()
    print("loss", steps[-1][-1])
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_run_with_deepspeed_follows_one_without_in_the_same_process(tmp_path: Path) -> None:
    """It keeps groups of the ranks, and would find them gone."""
    command = [sys.executable, "-c", IN_TURN, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss")]
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6), done.stderr[-3000:]
    assert len(losses) == 3
