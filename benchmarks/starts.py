"""How long one waits: from the command to the first optimiser step, and for ``--help``."""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.contests import OURS, Contest, Measured, Row, Settings
from benchmarks.turns import REPOSITORY, Finished, run_command

RECIPE = ["recipes/summarization/run.py"]
SCRIPT = ["-m", "benchmarks.seq2seq_script"]
STEPS = 1500
FIRST_STEP = f" 1/{STEPS} ["  # both show tqdm's bar: the line ends when the bar is drawn again, after the second step
EACH_STEP = {"TQDM_MININTERVAL": "0"}  # a bar that is drawn ten times a second may leave the first step out


def built_in_run(folder: Path) -> Finished:
    """The README's first command: reads the sources of this machine, trains a tokenizer, builds a small model."""
    flags = ["--gaudi_config", "gaudi_configs/t5.json", "--use_cpu", "--max_steps", STEPS, "--output_dir", folder]
    return run_command(
        [sys.executable, *RECIPE, *flags], EACH_STEP | {"HF_HOME": str(folder.with_suffix(".hf"))}, FIRST_STEP
    )


def script_run(folder: Path, data: Path) -> Finished:
    """The same data, which it finds in files, a tokenizer trained on them, the same model, batch and optimiser."""
    built_in = json.loads((REPOSITORY / "recipes" / "summarization" / "built_in.json").read_text())["args"]
    same = ("max_source_length", "max_target_length", "per_device_train_batch_size", "per_device_eval_batch_size")
    same += ("learning_rate", "lr_scheduler_type", "warmup_steps", "label_smoothing_factor")
    flags: list[Any] = list(itertools.chain(*((f"--{name}", built_in[name]) for name in same)))
    flags += ["--train_file", data / "train.jsonl", "--validation_file", data / "validation.jsonl", "--do_train"]
    flags += ["--optim", "adafactor", "--max_steps", STEPS, "--use_cpu", "--report_to", "none", "--output_dir", folder]
    environ = EACH_STEP | {"HF_HOME": str(folder.with_suffix(".hf")), "OMP_NUM_THREADS": str(built_in["cpu_threads"])}
    return run_command([sys.executable, *SCRIPT, *flags], environ, FIRST_STEP)


def measure_first_step(settings: Settings) -> Measured:
    """Seconds from the command to the first step's end, each in new folders: nothing is cached but the files' pages."""
    values: dict[str, list[float]] = {OURS: [], "script": []}
    built_in_run(settings.folder / "first")  # warms up, and leaves the data
    data = settings.folder / "first" / "data"
    script_run(settings.folder / "warm", data)
    for number in range(settings.rounds):
        values[OURS].append(built_in_run(settings.folder / f"ours_{number}").seconds)
        values["script"].append(script_run(settings.folder / f"script_{number}", data).seconds)
    facts = {path.name: sum(1 for _ in path.open("rb")) for path in sorted(data.glob("*.jsonl"))}
    facts |= {"ours does besides": "reads these rows from the installed sources; the script finds them in files"}
    shutil.rmtree(settings.folder / "first")
    return Measured(values, facts)


def measure_help(settings: Settings) -> Measured:
    """Seconds of ``--help``, of the second start and later ones."""
    commands = {OURS: [sys.executable, *RECIPE, "--help"], "script": [sys.executable, *SCRIPT, "--help"]}
    values: dict[str, list[float]] = {name: [] for name in commands}
    for number in range(settings.rounds + 1):
        for name, words in commands.items():
            found = run_command(words)
            if number:
                values[name].append(found.seconds)
    return Measured(values, {"the script imports": "datasets, numpy, rouge_score, transformers"})


CONTESTS = [
    Contest(
        "first_step",
        "s",
        [Row("from command to first step", "script", "a script on Seq2SeqTrainer", 0.8, at_most=True)],
        measure_first_step,
        devices=("cpu",),
    ),
    Contest(
        "help",
        "s",
        [Row("--help of a recipe", "script", "a script on Seq2SeqTrainer", 0.5, at_most=True)],
        measure_help,
        devices=("cpu",),
    ),
]
