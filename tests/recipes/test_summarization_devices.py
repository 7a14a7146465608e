"""The recipe over several devices: the numbers of one, whatever the strategy and size; and nothing that hangs."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conftest import REPOSITORY, pairs, write_jsonl
from tests.recipes.devices import (
    PROGRAMS,
    QUIET,
    STRATEGIES,
    Ended,
    Plan,
    Ran,
    assert_said_once,
    assert_same,
    assert_same_losses,
    assert_same_weights,
    assert_steady,
    at_size,
    launch,
    made_once,
    own_lines,
    restored_environment,
    shared_folder,
    without_dropout,
)

pytestmark = pytest.mark.processes
RECIPE = REPOSITORY / "recipes" / "summarization" / "run.py"
LENGTHS = ["--max_source_length", "32", "--max_target_length", "12"]
GRAPHS = {"fast_ddp_graphs": [*STRATEGIES["fast_ddp"], "--use_hpu_graphs_for_training"]}  # on cards in lazy mode
ON_CARDS = (*STRATEGIES, *GRAPHS)
AT = {
    1: ("zero1", "zero2", "zero3"),
    2: ("ddp", "fast_ddp", "zero1", "zero2", "zero3"),
    4: ("ddp", "fast_ddp", "zero2", "zero3"),
}
DROPPING = ("ddp", "fast_ddp", "zero2")
STEPS, STOP = 6, 4  # two epochs of 16, 16 and 3 rows; the checkpoint is one step into the second epoch


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_folder(tmp_path_factory, "summarization")


@pytest.fixture(scope="module")
def still(tiny_t5: Path, folder: Path) -> Path:
    return without_dropout(tiny_t5, folder / "still")


@pytest.fixture(scope="module")
def files(folder: Path) -> list[str]:
    """35 ragged rows to train on, which leave 3 for an epoch's last step; 7 to evaluate and 3 to test."""
    sizes = {"train": 35, "validation": 7, "test": 3}
    paths = {name: folder / f"{name}.jsonl" for name in sizes}
    with made_once(folder / "files") as made:
        for at, (name, rows) in enumerate(sizes.items()):
            if not made:
                write_jsonl(paths[name], pairs(rows, seed=10 + at))
    return [word for name, path in paths.items() for word in (f"--{name}_file", str(path))]


@pytest.fixture(scope="module")
def base(still: Path, files: list[str]) -> list[str]:
    """Flags of a run that trains with large steps, evaluates and generates."""
    phases = ["--do_train", "--do_eval", "--do_predict", "--predict_with_generate", "--val_max_target_length", "8"]
    steps = ["--num_train_epochs", "2", "--learning_rate", "0.02", "--lr_scheduler_type", "cosine", "--warmup_steps"]
    steps += ["1", "--weight_decay", "0.01", "--max_grad_norm", "0.7", "--per_device_eval_batch_size", "3"]
    return ["--model_name_or_path", str(still), *files, *phases, *steps, *LENGTHS, *QUIET, "--num_beams", "2"]


@pytest.fixture(scope="module")
def alone(summarization: ModuleType, base: list[str], folder: Path) -> Ran:
    """One process, in this one."""
    flags = [*base, *at_size(1), "--use_cpu", "--eval_strategy", "epoch", "--output_dir", str(folder / "alone")]
    with made_once(folder / "alone") as made, restored_environment():
        if not made:
            summarization.main(flags)
    return Ran(folder / "alone")


@pytest.fixture(scope="module")
def uneven(folder: Path, tiny_t5: Path) -> dict[str, Any]:
    """A model and four texts: of the first two its summaries end at once, of the other two never.

    The model is untrained and wild, so that its summaries differ; its end token is one that only some of them have.
    """
    from transformers import AutoTokenizer, T5Config, T5ForConditionalGeneration

    config = T5Config.from_pretrained(tiny_t5, dropout_rate=0.0, initializer_factor=4.0)
    torch.manual_seed(0)
    model, tokenizer = T5ForConditionalGeneration(config).eval(), AutoTokenizer.from_pretrained(tiny_t5)
    rows = pairs(40, seed=5)
    batch = tokenizer([row["text"] for row in rows], return_tensors="pt", padding="max_length", max_length=32)
    batch = {key: value[:, :32] for key, value in batch.items() if key != "token_type_ids"}

    def summaries(end: int, **inputs: torch.Tensor) -> list[list[int]]:
        return model.generate(**inputs, max_length=12, num_beams=1, do_sample=False, eos_token_id=end).tolist()

    free = summaries(-1, **batch)
    for end in range(2, 32):
        early = [at for at, tokens in enumerate(free) if end in tokens[1:3]][:2]
        never = [at for at, tokens in enumerate(free) if end not in tokens][:2]
        if len(early) == len(never) == 2:
            break
    else:
        pytest.fail("no token ends two of the summaries only")
    chosen = [*early, *never]
    ended = summaries(end, **{key: value[chosen] for key, value in batch.items()})
    with made_once(folder / "wild") as made:
        if not made:
            model.generation_config.eos_token_id = end
            model.save_pretrained(folder / "wild")
            tokenizer.save_pretrained(folder / "wild")
            write_jsonl(folder / "uneven.jsonl", [rows[at] for at in chosen])
    lengths = [tokens.index(end) if end in tokens else len(tokens) for tokens in ended]
    return {"model": str(folder / "wild"), "file": str(folder / "uneven.jsonl"), "lengths": lengths}


def generating(uneven: dict[str, Any], *flags: str) -> list[str]:
    """Flags of a run that only generates, two rows to a rank."""
    named = ["--model_name_or_path", uneven["model"], "--test_file", uneven["file"], "--use_cpu", "--pad_to_max_length"]
    return [*named, "--do_predict", "--predict_with_generate", "--num_beams", "1", *LENGTHS, *QUIET, *flags]


def resuming(base: list[str], size: int, two: Path) -> list[str]:
    """Flags of a run that goes on from where two ranks under ZeRO-2 were stopped."""
    return [*base, *at_size(size), "--use_cpu", "--resume_from_checkpoint", str(two / "zero2" / f"checkpoint-{STOP}")]


@pytest.fixture(scope="module")
def one(base: list[str], folder: Path) -> dict[str, Ran]:
    plan = Plan("summarization", folder / "one")
    for name in AT[1]:
        plan.add(name, [*base, *at_size(1), "--use_cpu", *STRATEGIES[name]])
    return plan.run(1)


@pytest.fixture(scope="module")
def two(base: list[str], folder: Path, tiny_t5: Path, uneven: dict[str, Any]) -> dict[str, Ran]:
    plan, flags, here = Plan("summarization", folder / "two"), [*base, *at_size(2), "--use_cpu"], folder / "two"
    saving = ["--save_strategy", "steps", "--save_steps", str(STOP)]
    on_the_way = {"zero2": saving, "ddp": ["--eval_strategy", "epoch"], "zero3": ["--eval_strategy", "epoch"]}
    for name in AT[2]:
        plan.add(name, [*flags, *STRATEGIES[name], *on_the_way.get(name, [])])
    plan.add("zero3_resumed", [*resuming(base, 2, here), *STRATEGIES["zero3"]])
    dropping = [*flags, "--model_name_or_path", str(tiny_t5), "--do_eval", "False", "--do_predict", "False"]
    for name in DROPPING:
        stopped = str(here / f"{name}_dropout" / f"checkpoint-{STOP}")
        plan.add(f"{name}_dropout", [*dropping, *STRATEGIES[name], *saving])
        plan.add(f"{name}_dropout_resumed", [*dropping, *STRATEGIES[name], "--resume_from_checkpoint", stopped])
    plan.add("uneven", [*generating(uneven), "--per_device_eval_batch_size", "2", *STRATEGIES["zero3"]])
    plan.add("one_row", [*generating(uneven, "--max_predict_samples", "1"), *STRATEGIES["zero3"]])
    return plan.run(2)


@pytest.fixture(scope="module")
def four(base: list[str], folder: Path, two: dict[str, Ran]) -> dict[str, Ran]:
    plan = Plan("summarization", folder / "four")
    for name in AT[4]:
        plan.add(name, [*base, *at_size(4), "--use_cpu", *STRATEGIES[name]])
    for name in ("ddp", "zero3"):
        plan.add(f"{name}_resumed", [*resuming(base, 4, folder / "two"), *STRATEGIES[name]])
    return plan.run(4)


# --- The same numbers -------------------------------------------------------------------------------------------------


def test_the_run_is_one_that_shows_a_difference(alone: Ran, still: Path) -> None:
    """Weights move, some steps are clipped and some are not, and the last step of an epoch is short."""
    before, after = load_file(still / "model.safetensors"), alone.weights()
    assert min((after[name] - before[name]).abs().max() for name in after) > 0.01
    assert set(alone.column("grad_clipped")) == {0, 1}
    assert len(alone.column("loss")) == STEPS
    assert len(set(alone.column("learning_rate"))) == STEPS
    assert all(alone.texts)
    assert alone.metrics["eval_rouge1"] > 0


@pytest.mark.parametrize("name", AT[1])
def test_sharding_over_one_rank_changes_no_number(name: str, one: dict[str, Ran], alone: Ran) -> None:
    assert_same(one[name], alone)


@pytest.mark.parametrize("name", AT[2])
def test_two_ranks_have_the_numbers_of_one(name: str, two: dict[str, Ran], alone: Ran) -> None:
    assert_same(two[name], alone)


@pytest.mark.slow
@pytest.mark.parametrize("name", AT[4])
def test_four_ranks_have_the_numbers_of_one(name: str, four: dict[str, Ran], alone: Ran) -> None:
    """Micro-batches of one row, and fewer rows than ranks in the last step and in the test split."""
    assert_same(four[name], alone)


# --- Resume -----------------------------------------------------------------------------------------------------------


def test_one_process_goes_on_where_two_ranks_stopped(
    summarization: ModuleType, base: list[str], two: dict[str, Ran], alone: Ran, folder: Path, tmp_path: Path
) -> None:
    summarization.main([*resuming(base, 1, folder / "two"), "--output_dir", str(tmp_path / "run")])
    assert_same(Ran(tmp_path / "run"), alone, last=STEPS - STOP)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero3"])
def test_four_ranks_go_on_where_two_stopped(name: str, four: dict[str, Ran], alone: Ran) -> None:
    assert_same(four[f"{name}_resumed"], alone, last=STEPS - STOP)


def test_stage_3_goes_on_where_stage_2_stopped(two: dict[str, Ran], alone: Ran) -> None:
    assert_same(two["zero3_resumed"], alone, last=STEPS - STOP)


@pytest.mark.parametrize("name", DROPPING)
def test_a_resumed_run_with_dropout_is_the_straight_one_bit_for_bit(name: str, two: dict[str, Ran]) -> None:
    straight, resumed = two[f"{name}_dropout"], two[f"{name}_dropout_resumed"]
    for column in ("loss", "grad_norm"):
        assert resumed.column(column) == straight.column(column)[STOP:]
    assert_same_weights(resumed, straight, 0)
    assert straight.column("loss") != pytest.approx(two[name].column("loss"), abs=1e-3), "there was no dropout"


# --- Generation under ZeRO-3 ------------------------------------------------------------------------------------------


def test_ranks_that_stop_at_different_lengths_generate_together(
    summarization: ModuleType, two: dict[str, Ran], uneven: dict[str, Any], tmp_path: Path
) -> None:
    """Rank 0 is done after two tokens and rank 1 goes to the limit: a pass without the other would wait for ever."""
    assert max(uneven["lengths"][:2]) <= 2
    assert uneven["lengths"][2:] == [12, 12]
    summarization.main([*generating(uneven), "--output_dir", str(tmp_path / "run")])
    expected = Ran(tmp_path / "run")
    assert two["uneven"].texts == expected.texts
    assert two["uneven"].figures() == pytest.approx(expected.figures(), abs=1e-5)
    assert two["one_row"].texts == expected.texts[:1]


# --- On the simulated device ------------------------------------------------------------------------------------------


def on_cards(folder: Path, base: list[str], mode: str, names: Sequence[str], watched: Sequence[str]) -> dict[str, Ran]:
    plan = Plan("summarization", folder / mode)
    cards = {"HPU_SIMULATOR_DEVICES": "2", "HPU_SIMULATOR_JSON": str(folder / mode / "report.json")}
    flags = [*base, "--do_eval", "False", "--do_predict", "False", *at_size(2)]
    for name in watched:  # before DeepSpeed, which has collectives of its own
        longer = ["--logging_steps", "1000", "--num_train_epochs", "6", "--length_buckets", "2"]
        plan.add(f"{name}_watched", [*flags, *STRATEGIES[name], *longer], watch=True)
    for name in names:
        plan.add(name, [*flags, *(STRATEGIES | GRAPHS)[name]])
    return plan.run(2, mode=mode, **cards)


@pytest.fixture(scope="module")
def lazy(folder: Path, base: list[str]) -> dict[str, Ran]:
    return on_cards(folder, base, "lazy", ON_CARDS, ("ddp", "fast_ddp"))


@pytest.fixture(scope="module")
def eager(folder: Path, base: list[str]) -> dict[str, Ran]:
    return on_cards(folder, base, "eager", ("ddp", "zero2"), ())


@pytest.mark.compiles
@pytest.mark.parametrize("name", ON_CARDS)
def test_two_cards_have_the_numbers_of_one_cpu(name: str, lazy: dict[str, Ran], alone: Ran) -> None:
    assert_same_losses(lazy[name], alone)
    facts = lazy[name].metrics["run"]["device"]
    assert (facts["name"], facts["execution_mode"], facts["world_size"]) == ("gaudi2", "lazy", 2)


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["ddp", "zero2"])
def test_so_they_have_in_eager_mode(name: str, eager: dict[str, Ran], alone: Ran) -> None:
    assert_same_losses(eager[name], alone)
    assert eager[name].metrics["run"]["device"]["execution_mode"] == "eager"


@pytest.mark.compiles
@pytest.mark.parametrize("name", ["ddp", "fast_ddp"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_steady_step_on_two_cards_compiles_nothing_and_waits_for_nothing(
    rank: int, name: str, lazy: dict[str, Ran]
) -> None:
    assert_steady(lazy[f"{name}_watched"], rank, steps=18)


@pytest.mark.compiles
def test_the_cards_report_what_travelled_between_them(lazy: dict[str, Ran]) -> None:
    for rank in range(2):
        report = json.loads((lazy["ddp"].folder.parent / f"report-rank{rank}.json").read_text())
        assert (report["devices"], report["steps"]) == (2, STEPS * len(ON_CARDS) + 2 * 18)
        assert {"allreduce", "allgather", "broadcast", "reduce_scatter"} <= {one["op"] for one in report["collectives"]}


# --- Nothing hangs ----------------------------------------------------------------------------------------------------

FAULTS = {  # fault: flags, exit code, how the first rank to fail ended, and what it said last
    "raise": (STRATEGIES["zero2"], 1, "exit code 1", "RuntimeError: this rank's own fault"),
    "kill": (STRATEGIES["ddp"], 137, "killed by SIGKILL", ""),
    "memory": (STRATEGIES["fast_ddp"], 1, "exit code 1", "allocate memory"),
    "row": (STRATEGIES["ddp"], None, "exit code", "row 7 cannot be read"),
    "file": (STRATEGIES["ddp"], 2, "exit code 2", "--train_file: rows.jsonl does not exist"),
}


@pytest.fixture
def training(still: Path, tmp_path: Path) -> list[str]:
    """Flags of a run long enough to be broken off."""
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(40))
    named = ["--model_name_or_path", str(still), "--train_file", str(path), "--output_dir", str(tmp_path / "run")]
    return [*named, "--do_train", "--num_train_epochs", "50", *LENGTHS, *QUIET]


def assert_ended_at_once(ended: Ended, notes: Path, code: int | None, how: str, said: str) -> None:
    """In seconds, with the code and the words of the rank whose fault it was."""
    assert ended.code == code if code else ended.code in (1, 2), ended.err[-4000:]
    assert ended.at - float(notes.read_text()) < 30
    *_, last = ended.err.rstrip().splitlines()
    report = ended.err[ended.err.rindex("failed first (") :]
    assert report.startswith(f"failed first ({how}"), report
    assert said in last, report


@pytest.mark.parametrize("fault", FAULTS)
def test_a_rank_that_fails_ends_the_others(fault: str, training: list[str], tmp_path: Path) -> None:
    flags, code, how, said = FAULTS[fault]
    if fault == "file":
        at = training.index("--train_file") + 1
        training[at] = "rows.jsonl"
    command = [fault, tmp_path / "notes", *training, *flags, "--use_cpu"]
    ended = launch(2, PROGRAMS / "faulty.py", "summarization", *command, cwd=tmp_path)
    assert_ended_at_once(ended, tmp_path / "notes", code, how, said)
    if fault != "row":  # which all ranks learn of, each first
        assert "rank 1 failed first" in ended.err


@pytest.mark.compiles
def test_a_card_without_memory_ends_the_others(training: list[str], tmp_path: Path) -> None:
    command = ["memory", tmp_path / "notes", *training]
    ended = launch(2, PROGRAMS / "faulty.py", "summarization", *command, mode="lazy", HPU_SIMULATOR_DEVICES="2")
    assert_ended_at_once(ended, tmp_path / "notes", 1, "exit code 1", "")
    report = ended.err[ended.err.rindex("rank 1 failed first") :]
    assert re.search(r"out of memory.* hpu:\d has", report), report


# --- Preparing the data, and what is said -----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_slow_tokenizer_runs_once_and_no_rank_gives_up(training: list[str], files: list[str], tmp_path: Path) -> None:
    """A cold cache, two splits, and twelve seconds of work where a collective gives up after five."""
    evaluated = files[files.index("--validation_file") :][:2]
    flags = [*training, *evaluated, "--use_cpu", "--do_eval", "--max_steps", "2", "--ddp_timeout", "5"]
    cache = {"HF_DATASETS_CACHE": str(tmp_path / "cache"), "TOKENIZER_SECONDS": "3"}
    ended = launch(4, PROGRAMS / "faulty.py", "summarization", "slow", tmp_path / "notes", *flags, **cache)
    assert ended.code == 0, ended.err[-4000:]
    calls = (tmp_path / "notes").read_text().splitlines()
    assert len(calls) == 4, calls  # texts and summaries of each split
    assert_said_once(ended.out, 4)
    assert re.search(r"global batch +32 rows \(8 x 1 x 4\)", ended.out), ended.out
    assert "it/s" not in ended.err
    assert "examples/s" not in ended.err


def test_the_command_itself_says_everything_once_and_whole(
    training: list[str], files: list[str], tmp_path: Path
) -> None:
    """The recipe as the README starts it, with a progress bar, until its group is gone."""
    evaluated = files[files.index("--validation_file") :][:2]
    flags = [word for word in training if word != "--disable_tqdm"]
    ended = launch(2, RECIPE, *flags, *evaluated, "--use_cpu", "--do_eval", "--num_train_epochs", "2")
    assert ended.code == 0, ended.err[-4000:]
    assert_said_once(ended.out, 2)
    for line in (
        r"global batch +16 rows \(8 x 1 x 2\)",
        r"optimiser steps +6 \(3 an epoch\)",
        "optimiser .* 5e-05, linear",
    ):
        assert re.search(line, ended.out), ended.out
    bars = [line for line in own_lines(ended.err) if "step/s" in line or "s/step" in line]
    assert re.search(r"6/6 \[.*loss=", bars[-1]), ended.err
    assert not [line for line in ended.err.splitlines() if "[rank 1]" in line and "/6" in line]
