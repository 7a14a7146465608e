"""Progress bar, log records in CSV and through accelerate's trackers, the loss curve, the start banner."""

from __future__ import annotations

import csv
import json
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from tqdm import tqdm

from core.device import Device
from core.errors import UserError, did_you_mean, is_main_process, warn_once

CSV_NAME = "metrics.csv"
SEVERAL_IMAGES = ("wandb", "swanlab")  # trackers that take a list of images under one name


def banner(lines: dict[str, Any]) -> str:
    """Return aligned ``key  value`` lines, in the order given; entries of value None are left out."""
    shown = {key: value for key, value in lines.items() if value is not None}
    width = max(map(len, shown), default=0)
    return "\n".join(f"{key:<{width}}  {value}" for key, value in shown.items())


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values as one level of scalars, ``outer/inner``; lists become text, None is left out."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}/")
        elif value is not None:
            value = value.item() if hasattr(value, "item") else value
            result[f"{prefix}{key}"] = value if isinstance(value, bool | int | float | str) else str(value)
    return result


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the complete rows of a log file that `CSVTracker` wrote; a last line without an end is not one."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    return [row for row in csv.DictReader(f"{line}\n" for line in lines) if (row.get("step") or "").isdigit()]


class CSVTracker(GeneralTracker):
    """One row per log record in ``metrics.csv``. A column that appears later is added to the earlier rows, empty.

    Args:
        run_name: not used; accelerate gives it to every tracker.
        logging_dir: folder of the file.
        start_step: rows of later steps are dropped, the others kept: those steps run again. 0 drops all.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike, start_step: int = 0) -> None:
        super().__init__()
        self.path = Path(logging_dir, CSV_NAME)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = [row for row in read_csv(self.path) if 0 < start_step >= int(row["step"])]
        self.columns = list(kept[0]) if kept else ["step"]
        self._write(kept)

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, ensure_ascii=False)
        self.path.with_name("hyperparameters.json").write_text(text + "\n", encoding="utf-8")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        row = {"step": step, **values}
        new = [key for key in row if key not in self.columns]
        if new:
            self.columns += new
            self._write(read_csv(self.path))
        with open(self.path, "a", encoding="utf-8", newline="") as file:
            csv.DictWriter(file, self.columns, lineterminator="\n").writerow(row)

    def _write(self, rows: list[dict[str, Any]]) -> None:
        scratch = self.path.with_suffix(".new")
        with open(scratch, "w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, self.columns, extrasaction="ignore", lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(scratch, self.path)  # a run that is killed here keeps its old log


class Tracker:
    """Shows and records a run; on ranks other than 0 it does nothing.

    CSV is always written. ``--report_to`` adds trackers: "all" is TensorBoard if it is installed, "none" is none;
    those that send data to a service run only if they are named.

    Args:
        args: ``report_to``, ``logging_dir``, ``run_name`` and ``disable_tqdm``.
        output_dir: gets ``loss_curve.png``, and ``logs/`` if there is no ``--logging_dir``.
        total_steps: optimiser steps of the whole run.
        start_step: optimiser steps that an earlier process has done; records of later steps are dropped.
        loss_label: axis label of the loss curve.

    Raises:
        UserError: ``--report_to`` names an unknown tracker, or one that is not installed.
    """

    def __init__(
        self,
        args: Namespace,
        output_dir: str | os.PathLike,
        total_steps: int,
        start_step: int = 0,
        loss_label: str = "loss (nats, mean over targets)",
    ) -> None:
        names = tracker_names(args.report_to)  # on every rank: all stop on a wrong name
        self.trackers: list[GeneralTracker] = []
        self.output_dir, self.loss_label = Path(output_dir), loss_label
        self.logging_dir = Path(args.logging_dir or self.output_dir / "logs")
        self.run_name = args.run_name or self.output_dir.resolve().name
        if is_main_process():
            try:
                self.trackers = [CSVTracker(self.run_name, self.logging_dir, start_step)]
            except OSError as error:
                raise UserError(f"--logging_dir: {self.logging_dir} cannot be written to: {error.strerror}") from None
            self.trackers += [self._start(name, start_step) for name in names]
        off = args.disable_tqdm or not self.trackers
        self.bar = _Bar(total=total_steps, initial=start_step, disable=off, unit="step", dynamic_ncols=True)

    def _start(self, name: str, start_step: int) -> GeneralTracker:
        kind = LOGGER_TYPE_TO_CLASS[name]
        where = (self.run_name, self.logging_dir) if kind.requires_logging_directory else (self.run_name,)
        # TensorBoard hides what an earlier process wrote about the steps that run again.
        purge = {"purge_step": start_step + 1} if name == "tensorboard" and start_step else {}
        PartialState(cpu=True)  # the trackers make one if there is none, and that would open the accelerator
        tracker = kind(*where, **purge)
        tracker.start()
        return tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyper-parameters: scalars, flattened."""
        self._each("store_init_configuration", flat(values))

    def log(self, values: dict[str, Any], step: int) -> None:
        """Record ``values`` of optimiser step ``step``; values of None are left out."""
        self._each("log", flat(values), step=step)

    def log_images(self, name: str, images: Sequence[np.ndarray], step: int) -> None:
        """Show images, (height, width, 3) of uint8 and all of one size, in those trackers that can."""
        for tracker in list(self.trackers):
            values: dict[str, Any] = {}
            if tracker.name == "tensorboard":
                values, how = {name: np.stack(images)}, {"dataformats": "NHWC"}
            elif tracker.name in SEVERAL_IMAGES:
                values, how = {name: list(images)}, {}
            elif hasattr(tracker, "log_images"):  # one image under each name
                values, how = {f"{name}_{number}": image for number, image in enumerate(images, start=1)}, {}
            if values:
                self._call(tracker, "log_images", values, step=step, **how)

    def _each(self, method: str, *values: Any, **options: Any) -> None:
        for tracker in list(self.trackers):
            self._call(tracker, method, *values, **options)

    def _call(self, tracker: GeneralTracker, method: str, *values: Any, **options: Any) -> None:
        try:
            getattr(tracker, method)(*values, **options)
        except Exception as error:  # a service that is down must not end a run of hours
            if isinstance(tracker, CSVTracker):
                raise
            self.trackers.remove(tracker)
            warn_once(f"--report_to {tracker.name} stopped ({error!r}); {CSV_NAME} has all records")

    def advance(
        self,
        step: int,
        loss: float | None = None,
        learning_rate: float | None = None,
        samples_per_second: float | None = None,
        memory: float | None = None,
    ) -> None:
        """Move the bar to optimiser step ``step``; memory in GB. What is None keeps what it showed."""
        new = {"loss": (loss, "{:.4g}"), "lr": (learning_rate, "{:.3g}")}
        new |= {"samples/s": (samples_per_second, "{:.4g}"), "GB": (memory, "{:.2f}")}
        self.bar.shown |= {key: form.format(value) for key, (value, form) in new.items() if value is not None}
        self.bar.set_postfix(self.bar.shown, refresh=False)
        self.bar.update(step - self.bar.n)

    def finish(self) -> None:
        """Close the bar and all trackers, draw ``loss_curve.png``. A second call does nothing."""
        self.bar.close()
        if self.trackers:
            self._each("finish")
            plot_losses(self.logging_dir / CSV_NAME, self.output_dir / "loss_curve.png", self.run_name, self.loss_label)
        self.trackers = []


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's watching thread would outlive the run

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shown: dict[str, str] = {}


def tracker_names(asked: list[str]) -> list[str]:
    available = [str(name) for name in get_available_trackers()]
    choices = [*available, "all", "none"]
    for name in asked:
        if name not in choices:
            missing = "is not installed" if name in LOGGER_TYPE_TO_CLASS else "is no tracker"
            raise UserError(f"--report_to {name} {missing}{did_you_mean(name, choices)}; here: {', '.join(choices)}")
    if "none" in asked and len(set(asked)) > 1:
        raise UserError(f"--report_to {' '.join(asked)}: 'none' excludes the others; give one or the other")
    names = [("tensorboard" if name == "all" else name) for name in asked]
    return [name for name in dict.fromkeys(names) if name in available]


def profiler(args: Namespace, device: Device, output_dir: Path) -> Any:
    """Return torch's profiler over ``--profiling_steps`` forward passes, or None without them.

    It lets ``--profiling_warmup_steps`` passes by, wants ``step()`` after each, and writes ``profile/``.
    """
    if not args.profiling_steps:
        return None
    from torch import profiler as torch_profiler

    kinds = torch_profiler.ProfilerActivity
    own = getattr(kinds, device.torch_device.type.upper(), None)
    warmup, active = args.profiling_warmup_steps, args.profiling_steps
    return torch_profiler.profile(
        activities=sorted({kinds.CPU, own} - {None}, key=str),
        schedule=torch_profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
        on_trace_ready=torch_profiler.tensorboard_trace_handler(str(output_dir / "profile")),
        record_shapes=args.profiling_record_shapes,
        with_stack=args.profiling_with_stack,
    )


def plot_losses(csv_path: Path, png_path: Path, title: str, loss_label: str) -> None:
    """Draw training and evaluation loss (columns ``loss``, ``eval_loss``) over optimiser steps, if there is any."""
    rows, curves = read_csv(csv_path), {}
    for column, label in (("loss", "training"), ("eval_loss", "evaluation")):
        curves[label] = [(int(row["step"]), float(row[column])) for row in rows if row.get(column)]
    if not any(curves.values()):
        return
    try:
        from matplotlib.figure import Figure  # without pyplot there is no window and no global state; it draws with Agg
    except ImportError:
        warn_once("matplotlib is not installed: no loss_curve.png")
        return
    figure = Figure(figsize=(8, 4.5), layout="constrained", dpi=120)
    axes = figure.add_subplot()
    for label, points in curves.items():
        if points:
            dense = label == "training" and len(points) > 40
            axes.plot(*zip(*points, strict=True), "-" if dense else "o-", markersize=4, linewidth=1.4, label=label)
    axes.set(xlabel="optimiser steps", ylabel=loss_label)
    axes.set_title(title, parse_math=False)  # a run's name may hold a $
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(png_path)
