"""Two thousand steps of each recipe: memory, open files, threads and the time of a step stay what they were."""

from __future__ import annotations

import csv
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY, pairs, save_captioned, save_pictures, texts, write_jsonl

pytestmark = [
    pytest.mark.slow,
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="it looks into /proc"),
]
STEPS, EVERY_S = 2000, 0.1
FLAGS = f"--do_train --do_eval --max_steps {STEPS} --logging_steps 20 --eval_strategy steps --eval_steps 100".split()
FLAGS += "--save_steps 250 --save_total_limit 2 --per_device_train_batch_size 2 --per_device_eval_batch_size 4".split()
FLAGS += "--learning_rate 0.001 --use_cpu --cpu_threads 1 --disable_tqdm --report_to none".split()
SPEED = "samples_per_second"
SIZES = {"train": 200, "validation": 14}  # of images
MB = 1_000_000


@dataclass
class Soak:
    """A run, and what it was like every `EVERY_S` seconds: lists of (step, number)."""

    output: Path
    memory: list[tuple[int, float]] = field(default_factory=list)  # bytes that are not of files
    files: list[tuple[int, float]] = field(default_factory=list)  # open ones
    threads: list[tuple[int, float]] = field(default_factory=list)
    children: list[tuple[int, float]] = field(default_factory=list)
    seconds: list[tuple[int, float]] = field(default_factory=list)  # of some clock, without those without a core
    busy: float = 0.0  # share of its time in which it waited for a core, which other processes had
    left: list[str] = field(default_factory=list)  # in /dev/shm and the temporary folder, once it had ended

    def records(self) -> list[dict[str, str]]:
        log = self.output / "logs" / "metrics.csv"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return list(csv.DictReader(line for line in lines if line.endswith("\n")))

    def sample(self, process: Path) -> None:
        """Look at a process by its folder in /proc. Memory counts pages that it shares with those it has forked."""
        step = max((int(row["step"]) for row in self.records()), default=0)
        waited = int((process / "schedstat").read_text().split()[1]) / 1e9
        self.busy = waited / max(time.time() - psutil.Process(int(process.name)).create_time(), 1)
        if step > (self.seconds[-1][0] if self.seconds else 0):
            self.seconds.append((step, (self.output / "logs" / "metrics.csv").stat().st_mtime - waited))
        status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
        pages = sum(int(status[name].split()[0]) for name in ("RssAnon", "RssShmem", "VmSwap"))  # kB
        self.memory.append((step, 1024 * pages))
        self.files.append((step, sum("torch_" not in target for target in targets(process / "fd"))))
        self.threads.append((step, int(status["Threads"])))
        self.children.append((step, len(psutil.Process(int(process.name)).children())))

    @property
    def speeds(self) -> list[tuple[int, float]]:
        return [(int(row["step"]), float(row[SPEED])) for row in self.records() if row[SPEED]]


def targets(descriptors: Path) -> Iterator[str]:
    """What a process has open; a tensor that a worker hands over is a file ``torch_...`` for a moment."""
    for name in os.listdir(descriptors):
        with suppress(OSError):  # closed since
            yield os.readlink(descriptors / name)


def quarter(numbers: list[tuple[int, float]], number: int) -> list[float]:
    """Those of a quarter of the steps, the first is number 1."""
    found = [value for step, value in numbers if number - 1 <= 4 * step / STEPS < number]
    assert len(found) >= 5, f"{len(found)} samples in quarter {number}; the run is too short to tell"
    return found


def soak(folder: Path, recipe: str, *flags: str | Path) -> Soak:
    """Train `STEPS` steps in a process of its own, and watch it."""
    watched, temporary = Soak(folder / "run"), folder / "tmp"
    temporary.mkdir()
    shared = set(os.listdir("/dev/shm"))
    script = REPOSITORY / "recipes" / recipe / "run.py"
    command = [sys.executable, script, *FLAGS, *flags, "--output_dir", watched.output]
    variables = {"TMPDIR": str(temporary), "HF_DATASETS_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen(list(map(str, command)), env=os.environ | variables, stdout=said, stderr=said)
    try:
        until = time.monotonic() + 900
        with suppress(FileNotFoundError, ProcessLookupError, KeyError, psutil.Error):  # it has just ended
            while process.poll() is None and time.monotonic() < until:
                watched.sample(Path("/proc", str(process.pid)))
                time.sleep(EVERY_S)
        assert process.wait(60) == 0, (folder / "said").read_text()[-3000:]
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + 10
    while set(os.listdir("/dev/shm")) - shared and time.monotonic() < until:
        time.sleep(0.1)
    watched.left = sorted({*os.listdir(temporary), *(set(os.listdir("/dev/shm")) - shared)})
    return watched


def step_ms(run: Soak, number: int) -> float:
    """Milliseconds of a step in the fastest hundred, an evaluation included, of those that begin in a quarter.

    What else the machine does makes steps slower, never faster.
    """
    found = []
    for first, begin in run.seconds:
        last, end = next((later for later in run.seconds if later[0] >= first + 100), (0, 0))
        if number - 1 <= 4 * first / STEPS < number and last:
            found.append(1000 * (end - begin) / (last - first))
    return min(found)


def changes(run: Soak) -> list[str]:
    """What of the second quarter, when everything has happened several times, is not like that in the last one."""
    report(run)
    found = []
    before, after = (statistics.median(quarter(run.memory, number)) for number in (2, 4))
    if after - before >= 4 * MB:  # 4 kB a step; runs without a leak had at most 1.1 MB
        found.append(f"memory grows from {before / MB:.1f} to {after / MB:.1f} MB")
    # One left by each checkpoint would be three more; one is spare. Worker processes and their pipes come and go.
    for kind in ("files", "threads", "children"):
        if min(quarter(getattr(run, kind), 4)) > max(quarter(getattr(run, kind), 2)) + 1:
            found.append(f"{kind} pile up")
    before, after = (step_ms(run, number) for number in (2, 4))
    if run.busy > 0.1:  # then it shares caches and clock, too: the same step takes 7 ms or 10 ms
        warnings.warn(f"the machine was busy: {before:.2f} ms a step, later {after:.2f} ms, not judged", stacklevel=2)
    elif after >= 1.1 * before:
        found.append(f"steps become slower: {before:.2f} ms, later {after:.2f} ms")
    return found


def assert_steady(folder: Path, recipe: str, *flags: str | Path) -> None:
    """A leak or a drift is there in each of five runs; what another program did meanwhile is not."""
    for attempt in range(5):
        (folder / f"{attempt}").mkdir()
        run = soak(folder / f"{attempt}", recipe, *flags)
        kept = sorted(path.name for path in run.output.glob("*checkpoint-*"))
        kept += sorted(path.name for path in run.output.glob(".*") if path.name != ".lock")
        assert kept == [f"checkpoint-{STEPS - 250}", f"checkpoint-{STEPS}"]
        assert run.left == []
        if not (found := changes(run)):
            return
    pytest.fail(", ".join(found))


def report(run: Soak) -> None:
    """Print what was measured, by quarter; pytest shows it if an assertion fails (and with ``-s``)."""
    for number in (1, 2, 3, 4):
        memory, speeds = quarter(run.memory, number), quarter(run.speeds, number)
        least = {kind: min(quarter(getattr(run, kind), number)) for kind in ("files", "threads", "children")}
        most = {kind: max(quarter(getattr(run, kind), number)) for kind in ("files", "threads", "children")}
        print(
            f"{run.output.parents[1].name} quarter {number}: {len(memory)} samples, memory {min(memory) / MB:.1f} to"
            f" {max(memory) / MB:.1f}, median {statistics.median(memory) / MB:.1f} MB; {least} to {most};"
            f" {step_ms(run, number):.2f} ms a step, the log's median is {statistics.median(speeds):.1f} rows a second"
        )


def test_summarization(tmp_path: Path, tiny_t5: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", pairs(400))
    validation = write_jsonl(tmp_path / "validation.jsonl", pairs(16, 1))
    flags = ["--predict_with_generate", "--max_source_length", "32", "--max_target_length", "12"]
    files = ["--train_file", train, "--validation_file", validation]
    assert_steady(tmp_path, "summarization", "--model_name_or_path", tiny_t5, *files, *flags)


def test_language_modeling(tmp_path: Path, tiny_gpt2: Path) -> None:
    train = write_jsonl(tmp_path / "train.jsonl", texts(400))
    validation = write_jsonl(tmp_path / "validation.jsonl", texts(40, 1))
    files = ["--train_file", train, "--validation_file", validation, "--block_size", "16"]
    files += ["--per_device_train_batch_size", "16"]
    assert_steady(tmp_path, "language_modeling", "--model_name_or_path", tiny_gpt2, *files)


def test_image_classification(tmp_path: Path, tiny_vit: Path) -> None:
    """Two worker processes are forked in each epoch, of 100 steps."""
    folders = {f"--{split}_dir": save_pictures(tmp_path / split, size) for split, size in SIZES.items()}
    flags = ["--dataloader_num_workers", "2", "--ignore_mismatched_sizes"]
    named = [word for item in folders.items() for word in item]
    assert_steady(tmp_path, "image_classification", "--model_name_or_path", tiny_vit, *named, *flags)


def test_text_to_image(tmp_path: Path, tiny_sd: Path) -> None:
    """With averages of the weights, and an image drawn every 100 steps."""
    folders = {f"--{split}_dir": save_captioned(tmp_path / split, size) for split, size in SIZES.items()}
    flags = "--use_ema --validation_prompt alpha --num_validation_images 1 --validation_steps 100".split()
    flags += "--num_inference_steps 2 --resolution 16".split()
    named = [word for item in folders.items() for word in item]
    assert_steady(tmp_path, "text_to_image", "--model_name_or_path", tiny_sd, *named, *flags)
