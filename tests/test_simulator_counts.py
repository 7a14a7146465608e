"""What a training step of each recipe asks of a Gaudi, counted on the simulated one: a baseline, and a bare loop.

`tests.counting` counts. What it found is in ``baselines/simulator_counts.json``; a count that grows fails a test, and
so does one that falls, so that the baseline stays true. To write it anew::

    pytest tests/test_simulator_counts.py --numprocesses 0 --rebase
"""

from __future__ import annotations

import json
from importlib.metadata import version
from typing import Any

import pytest

from tests.conftest import REPOSITORY
from tests.hpu_simulator import simulator
from tests.recipes.devices import made_once, shared_folder

pytestmark = [pytest.mark.compiles, pytest.mark.processes]
BASELINE = REPOSITORY / "tests" / "baselines" / "simulator_counts.json"
LIBRARIES = ("torch", "transformers", "diffusers")  # the models' operators are theirs
SHARED = "--bf16 --do_train --max_steps 6 --per_device_train_batch_size 4 --pad_to_max_length --logging_steps 1000"
SHARED += " --save_strategy no --report_to none --disable_tqdm"
DRAW = "--do_generate --prompts alpha --num_inference_steps 6 --resolution 16"
RUNS = {  # the recipe, the model, the data, and what else there is
    "summarization": (
        *("summarization", "tiny_t5", "pair_files", "--gaudi_config t5 --do_eval --predict_with_generate"),
        "--max_source_length 32 --max_target_length 12 --per_device_eval_batch_size 13 --num_beams 1",
    ),
    "language_modeling_causal": ("language_modeling", "tiny_gpt2", "text_files", "--gaudi_config gpt2 --block_size 16"),
    "language_modeling_masked": ("language_modeling", "tiny_bert", "text_files", "--gaudi_config bert --block_size 16"),
    "image_classification": ("image_classification", "tiny_vit", "picture_folders", "--gaudi_config vit"),
    "text_to_image": ("text_to_image", "tiny_sd", "captioned_folders", f"--gaudi_config stable_diffusion {DRAW}"),
}
SCALE = 4  # bytes: what the losses of a window are divided by


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `tests.counting` finds, by name of the run: one process for all of them."""
    folder = shared_folder(tmp_path_factory, "simulator_counts")
    path = folder / "found.json"
    with made_once(folder / "counted") as made:
        if not made:
            plan = {}
            for name, (recipe, model, data, *flags) in RUNS.items():
                files = [word for pair in request.getfixturevalue(data).items() for word in pair]
                given = ["--model_name_or_path", str(request.getfixturevalue(model)), *files, *SHARED.split()]
                plan[name] = recipe, [*given, *" ".join(flags).split(), "--output_dir", str(folder / name)]
            (folder / "plan.json").write_text(json.dumps(plan))
            done = simulator.run("-m", "tests.counting", folder / "plan.json", path)
            assert done.returncode == 0, done.stderr.partition("HPU simulator: ")[0][-6000:]  # without its report
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def recorded(found: dict[str, Any], request: pytest.FixtureRequest) -> dict[str, Any]:
    """The baseline, written anew with ``--rebase``; the reasons in it stay."""
    before = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    if not request.config.getoption("--rebase"):
        return before
    made = {"recorded with": {name: version(name) for name in LIBRARIES}}
    for name, one in found.items():
        made[name] = {key: one[key] for key in ("step", "batch", "generation") if key in one}
        made[name]["bare loop"] = {key: value for key, value in one["bare loop"].items() if "name" not in key}
        why = before.get(name, {}).get("more than the bare loop", {}).get("why")
        if more := more_than_bare(one):
            made[name]["more than the bare loop"] = {**more, "why": why}
    BASELINE.write_text(json.dumps(made, indent=1) + "\n")
    return made


def more_than_bare(counts: dict[str, Any]) -> dict[str, Any]:
    """Operators that a recipe's step has beyond the bare loop's, and by which names both differ; {} if not more."""
    ours, bare = counts["step"], counts["bare loop"]
    names = sorted(ours["operators by name"] | bare["operators by name"])
    differ = {name: ours["operators by name"].get(name, 0) - bare["operators by name"].get(name, 0) for name in names}
    more = ours["operators"] - bare["operators"]
    return {"operators": more, "by name": {name: count for name, count in differ.items() if count}} if more > 0 else {}


def flat(counts: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested counts as one level: ``step, operators``."""
    found = {}
    for name, value in counts.items():
        inner = isinstance(value, dict)
        found |= flat(value, f"{prefix}{name}, ") if inner else {f"{prefix}{name}": value}
    return found


def differences(was: dict[str, Any], now: dict[str, Any], leave_out: str = "why") -> list[str]:
    """A line for each count that is not what it was."""
    was, now = flat(was), flat(now)
    changed = [name for name in was | now if was.get(name, 0) != now.get(name, 0) and leave_out not in name]
    return [f"{name}: was {was.get(name, 0)}, is {now.get(name, 0)}" for name in changed]


@pytest.mark.parametrize("name", RUNS)
def test_a_step_asks_for_what_is_recorded(name: str, found: dict[str, Any], recorded: dict[str, Any]) -> None:
    """In each count: a growth costs time on a card, and what falls is written down, see above."""
    made_with = {library: version(library) for library in LIBRARIES}
    same = recorded["recorded with"] == made_with
    now = {key: found[name][key] for key in ("step", "batch", "generation") if key in found[name]}
    changed = differences({key: recorded[name].get(key, {}) for key in now}, now)
    if not same:  # the models may have other operators: what is ours is then told by the bare loop alone
        changed = [line for line in changed if "operators" not in line]
    assert not changed, f"{name} (rewrite {BASELINE.name} if it is meant):\n" + "\n".join(changed)


@pytest.mark.parametrize("name", RUNS)
def test_a_steady_step_compiles_nothing_and_waits_for_nothing(name: str, found: dict[str, Any]) -> None:
    step, bare = found[name]["step"], found[name]["bare loop"]
    assert (step["graphs compiled"], step["host syncs"]) == (0, 0)
    assert step["graphs run"] == 2 <= bare["graphs run"]


@pytest.mark.parametrize("name", RUNS)
def test_a_step_has_no_more_operators_than_a_bare_loop(
    name: str, found: dict[str, Any], recorded: dict[str, Any]
) -> None:
    """Or those that the baseline lists, and says why."""
    reason = recorded[name].get("more than the bare loop", {})
    changed = differences(reason, more_than_bare(found[name]))
    told = f"{name}, more than the bare loop (rewrite {BASELINE.name} if it is meant):\n"
    assert not changed, told + "\n".join(changed)
    assert not reason or reason["why"], f"{name}: say in {BASELINE.name} why a step has more than the bare loop"


@pytest.mark.parametrize("name", RUNS)
def test_what_travels_to_the_device_is_the_batch(name: str, found: dict[str, Any]) -> None:
    """And the window's scale; and what the optimiser itself sends, as in the bare loop."""
    one = found[name]
    needed = sum(one["batch"][key] for key in one["needed"])
    optimiser = one["bare loop"]["bytes to the device"] - needed
    assert optimiser == 2 * 2 * 4  # of each group of parameters: step size and decay
    assert one["step"]["bytes to the device"] == sum(one["batch"].values()) + SCALE + optimiser


@pytest.mark.parametrize("name", RUNS)
def test_a_loss_is_in_fp32_under_autocast(name: str, found: dict[str, Any]) -> None:
    """On a Gaudi its lists have products and means in bf16, on other devices matrix products alone."""
    assert found[name]["loss"] == "torch.float32"


def test_drawing_waits_for_nothing_between_denoising_steps(found: dict[str, Any]) -> None:
    assert found["text_to_image"]["generation"] == {"host syncs": 0}


def test_generating_waits_once_a_token(found: dict[str, Any]) -> None:
    """For whether all rows have ended."""
    assert found["summarization"]["generation"] == {"host syncs": 1}


def test_a_count_that_changed_is_named() -> None:
    was = {"step": {"operators": 7, "host syncs": 0, "operators by name": {"add": 3}}, "why": "a"}
    now = {"step": {"operators": 8, "host syncs": 0, "operators by name": {"add": 3, "mul": 1}}, "why": "b"}
    assert differences(was, was) == []
    assert differences(was, now) == ["step, operators: was 7, is 8", "step, operators by name, mul: was 0, is 1"]
    assert differences(now, was) == ["step, operators: was 8, is 7", "step, operators by name, mul: was 1, is 0"]
