"""Runs a program for the search of the largest batch: once as it is, then with other batch sizes, unseen."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpu_simulator.fit import RUNS, Trial, search, summary
from hpu_simulator.settings import Settings, write
from hpu_simulator.units import WIDTH, gigabytes, share

DEFAULT_FLAG = "per_device_train_batch_size"


def supervise(command: list[str], flag: str | None, settings: Settings) -> int:
    """Run a program, then search, and say what was found on stderr. The program's own reports are untouched.

    Args:
        command: the interpreter and all its arguments.
        flag: the option that takes the batch size; None for `DEFAULT_FLAG` where the command names it.
        settings: already in the environment.

    Returns:
        The exit status of the first run, as a shell gives it.
    """
    with tempfile.TemporaryDirectory(prefix="hpu_simulator_") as folder:
        settings = replace(settings, json=settings.json or str(Path(folder) / "run.json"))
        write(settings)
        started = time.time()
        status = _wait(subprocess.Popen(command))
        files = [path for path in _reports(Path(settings.json)) if path.stat().st_mtime > started - 1]
        named, batch = named_batch(command, flag or DEFAULT_FLAG)
        first = _trial(batch, status, files, "the program failed")
    if first.failed:
        if not status:
            _say(f"largest batch: not searched, {first.failed}")
        return status  # the program has said why
    if not (named or flag):
        _say(f"largest batch: not searched, the command does not name {DEFAULT_FLAG}; --batch_flag names another flag")
        return status
    measure = Rerun(command, flag or DEFAULT_FLAG, settings, first)
    limit = settings.generation.memory_bytes
    _say(f"largest batch: runs again with other values of {_option(measure.flag)}, {RUNS} times at most")
    if first.batch:
        measure.say(first)
    found = search(first, measure, limit)
    for line in summary(found, settings.generation.name, limit):
        _say(line)
    return status


def named_batch(command: list[str], flag: str) -> tuple[bool, int | None]:
    """Return whether a command names the flag, and the value if it gives one.

    Looked at in this order: the arguments, JSON files among them, Python files among them.
    """
    option, value = _option(flag), None
    for word, following in zip(command, [*command[1:], ""], strict=True):
        given = following if word == option else word.removeprefix(option + "=") if "=" in word else ""
        value = int(given) if given.isdecimal() else value
    if value:
        return True, value
    files = [Path(word.rpartition("=")[2]) for word in command]
    texts = {path: _read(path) for path in files if path.suffix in (".json", ".py") and path.is_file()}
    for path, text in texts.items():
        value = _value_in(text, flag) if path.suffix == ".json" else None
        if value:
            return True, value
    return option in command or any(re.search(rf"\b{re.escape(flag)}\b", text) for text in texts.values()), None


class Rerun:
    """Runs the program with another batch and an output folder of its own, unseen, and says one line about it."""

    def __init__(self, command: list[str], flag: str, settings: Settings, first: Trial) -> None:
        self.command, self.flag, self.settings, self.first = command, flag, settings, first
        self.own_folder = flag == DEFAULT_FLAG or named_batch(command, "output_dir")[0]

    def __call__(self, batch: int) -> Trial:
        trial = self._run(batch)
        if self.own_folder and trial.failed and "output_dir" in trial.failed:
            self.own_folder = False  # the program has no such flag
            trial = self._run(batch)
        if trial.fits and self.first.steps and not trial.steps:
            trial = replace(trial, fits=False, failed="no optimiser step ended (fewer rows than the batch?)")
        self.say(trial)
        return trial if not trial.failed else replace(trial, failed=f"batch {batch}: {trial.failed}")

    def say(self, trial: Trial) -> None:
        """Print what a trial showed."""
        peak = f"peak {gigabytes(trial.peak)} ({share(trial.peak, self.settings.generation.memory_bytes)})"
        seen = peak if trial.fits else f"does not fit (out of memory in {trial.where})"
        _say(f"  batch {trial.batch}: {trial.failed or seen}")

    def _run(self, batch: int) -> Trial:
        with tempfile.TemporaryDirectory(prefix="hpu_simulator_") as folder:
            report, output = Path(folder) / "run.json", Path(folder) / "output.txt"
            environ = dict(os.environ)
            write(replace(self.settings, json=str(report), html=None), environ)
            words = [*self.command, _option(self.flag), str(batch)]
            words += ["--output_dir", str(Path(folder) / "output")] if self.own_folder else []
            with output.open("wb") as sink:
                run = subprocess.Popen(words, env=environ, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink)
                status = _wait(run)
            # The report comes last, after the program's own message.
            text = output.read_text(encoding="utf-8", errors="replace").partition(f"{'-' * WIDTH}\nHPU simulator")[0]
            last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
            return _trial(batch, status, _reports(report), last or f"exit status {status}")


def _trial(batch: int | None, status: int, files: list[Path], message: str) -> Trial:
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in files]
    failures = [run["out_of_memory"] for run in runs if run.get("out_of_memory")]
    if not failures and (status or not runs):
        return Trial(batch, failed=message[:200] if status else "nothing ran on the device")
    phases: dict[str, int] = {}
    for run in runs:
        for name, values in run["phases"].items():
            phases[name] = max(values["peak_bytes"], phases.get(name, 0))
    peak = max(run["memory"]["peak"] for run in runs)
    where = failures[0]["phase"] if failures else None
    return Trial(batch, not failures, peak, phases, max(run["steps"] for run in runs), where=where)


def _wait(process: subprocess.Popen) -> int:
    """Wait for a child whatever comes: an interrupt reaches it too, and it may have something to say at its end."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        status = process.wait()
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
    return status if status >= 0 else 128 - status


def _reports(path: Path) -> list[Path]:
    """The JSON reports that are there: of the only rank, or of each."""
    return [file for file in (path, *path.parent.glob(f"{path.stem}-rank*{path.suffix}")) if file.is_file()]


def _option(flag: str) -> str:
    return flag if flag.startswith("-") else f"--{flag}"


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _value_in(text: str, key: str) -> int | None:
    """The first positive integer under that key in JSON, the outermost first; None if there is none."""
    try:
        level: list[Any] = [json.loads(text)]
    except ValueError:
        return None
    while level:
        objects = [item for item in level if isinstance(item, dict)]
        for item in objects:
            if type(item.get(key)) is int and item[key] > 0:
                return item[key]
        inner = [value for item in objects for value in item.values()]
        level = inner + [value for item in level if isinstance(item, list) for value in item]
    return None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
