"""Progress bar, log records in CSV and through accelerate's trackers, the loss curve, the start banner."""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from accelerate import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from tqdm import tqdm

from core.device import Device
from core.errors import UserError, did_you_mean, is_main_process, make_folder, warn_once
from core.files import by_product, not_written, write_file
from core.pages import curves
from core.records import CSV_NAME, CSVTracker, read_csv

ROOM = 100_000  # bytes that must find a place before a tracker starts anew on a disk that was full
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


class Tracker:
    """Shows and records a run; on ranks other than 0 it does nothing.

    CSV is always written. ``--report_to`` adds trackers: "all" is TensorBoard if it is installed, "none" is none;
    those that send data to a service run only if they are named.

    What cannot be written stops the run, or with ``--on_save_error continue`` is a warning, from the start on: that
    record is lost, later ones are written when there is room.

    Args:
        args: ``report_to``, ``logging_dir``, ``run_name``, ``disable_tqdm`` and ``on_save_error``.
        output_dir: gets ``loss_curve.png``, and ``logs/`` if there is no ``--logging_dir``.
        total_steps: optimiser steps of the whole run.
        start_step: optimiser steps that an earlier process has done; records of later steps are dropped.
        loss_label: axis label of the loss curve.

    Raises:
        UserError: see `check`; or a tracker cannot start, or a file cannot be written; that on rank 0 alone.
    """

    def __init__(
        self,
        args: Namespace,
        output_dir: str | os.PathLike,
        total_steps: int,
        start_step: int = 0,
        loss_label: str = "loss (nats, mean over targets)",
    ) -> None:
        names = check(args)  # on every rank: all stop on a wrong name
        self.trackers: list[GeneralTracker] = []
        self.stopped: list[str] = []  # by a full disk, or not yet started
        self.start_step, self.configuration = start_step, {}
        self.on_save_error = args.on_save_error
        self.output_dir, self.loss_label = Path(output_dir), loss_label
        self.logging_dir = Path(args.logging_dir or self.output_dir / "logs")
        self.run_name = args.run_name or self.output_dir.resolve().name
        if is_main_process():
            for name in (CSVTracker.name, *names):
                self._start(name, start_step)
        off = args.disable_tqdm or not is_main_process()
        self.bar = _Bar(total=total_steps, initial=start_step, disable=off, unit="step", dynamic_ncols=True)

    def _start(self, name: str, start_step: int) -> None:
        kind = CSVTracker if name == CSVTracker.name else LOGGER_TYPE_TO_CLASS[name]
        if not kind.requires_logging_directory:  # a service: whoever named it wants to know that it takes nothing
            self.trackers.append(self._made(kind, self.run_name))
            return
        # TensorBoard hides what an earlier process wrote about the steps that run again; the CSV drops it.
        options = {"purge_step": start_step + 1} if name == "tensorboard" and start_step else {}
        options |= {"start_step": self.start_step} if kind is CSVTracker else {}
        with by_product(self.on_save_error):
            try:
                make_folder(self.logging_dir, "--logging_dir")
                self.trackers.append(self._made(kind, self.run_name, self.logging_dir, **options))
            except UserError:
                self.stopped.append(name)
                raise

    def _made(self, kind: type[GeneralTracker], *where: Any, **options: Any) -> GeneralTracker:
        if kind is not CSVTracker:
            PartialState(cpu=True)  # the trackers make one if there is none, and that would open the accelerator
        if kind.name == "tensorboard" and not isinstance(threading.excepthook, _Threads):
            threading.excepthook = _Threads(threading.excepthook)
        try:
            tracker = kind(*where, **options)
            tracker.start()
        except UserError:  # the CSV's own
            raise
        except Exception as error:  # no room for its files, no login
            raise UserError(f"--report_to {kind.name} cannot start: {error}") from error
        return tracker

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        """Record the hyper-parameters: scalars, flattened."""
        self.configuration = flat(values)
        self._each("store_init_configuration", self.configuration)

    def log(self, values: dict[str, Any], step: int) -> None:
        """Record ``values`` of optimiser step ``step``; values of None are left out.

        Raises:
            UserError: a file cannot be written, on rank 0 alone.
        """
        self._start_again(step)
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
        with by_product(self.on_save_error):
            try:
                getattr(tracker, method)(*values, **options)
            except Exception as error:  # a service that is down must not end a run of hours
                if isinstance(tracker, CSVTracker):
                    raise
                self.trackers.remove(tracker)
                if isinstance(error, OSError) and tracker.requires_logging_directory:
                    self.stopped.append(tracker.name)
                    raise not_written(self.logging_dir / self.run_name, error, "--logging_dir") from None
                warn_once(f"--report_to {tracker.name} stopped ({error!r}); {CSV_NAME} has all records")

    def _start_again(self, step: int) -> None:
        """Start (anew) what a full disk has stopped, once there is room: its own writer is of no more use."""
        with suppress(UserError):
            for name in list(self.stopped):
                write_file(probe := self.logging_dir / ".room", bytes(ROOM))
                probe.unlink()
                self.stopped.remove(name)
                self._start(name, step - 1)
                if name == CSVTracker.name and name not in self.stopped:
                    self._call(self.trackers[-1], "store_init_configuration", self.configuration)

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
        """Close the bar and all trackers, draw ``loss_curve.png``. A second call does nothing.

        What cannot be written is a warning: the trained model is not yet saved.
        """
        self.bar.close()
        self.on_save_error = "continue"
        if self.trackers:
            self._each("finish")
            curve = self.output_dir / "loss_curve.png"
            try:
                plot_losses(self.logging_dir / CSV_NAME, curve, self.run_name, self.loss_label)
            except Exception as error:  # a picture must not cost the model
                warn_once(f"no loss curve: {error}")
        self.trackers = []


class _Threads:
    """``threading.excepthook`` without a full disk that has ended TensorBoard's own thread: its next call tells it."""

    def __init__(self, others: Callable[[threading.ExceptHookArgs], Any]) -> None:
        self.others = others

    def __call__(self, ended: threading.ExceptHookArgs) -> None:
        if not (issubclass(ended.exc_type, OSError) and type(ended.thread).__module__.startswith("tensorboard")):
            self.others(ended)


class _Bar(tqdm):
    monitor_interval = 0  # tqdm's watching thread would outlive the run

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.shown: dict[str, str] = {}


def check(args: Namespace) -> list[str]:
    """Return the names of the trackers beside CSV.

    Raises:
        UserError: ``--report_to`` names an unknown tracker, or one that is not installed, or ``--run_name`` is a path.
    """
    name = args.run_name or ""
    if name in (".", "..") or "\0" in name or "/" in name or "\\" in name:
        raise UserError(f"--run_name {name} is a path; give a name: trackers make a folder of it in --logging_dir")
    return tracker_names(args.report_to)


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

    def write(profile: Any) -> None:
        try:
            torch_profiler.tensorboard_trace_handler(str(output_dir / "profile"))(profile)
        except (OSError, RuntimeError) as error:  # each rank writes its own: one without room must not leave the others
            warn_once(f"--profiling_steps: no trace in {output_dir / 'profile'}: {error}")

    kinds = torch_profiler.ProfilerActivity
    own = getattr(kinds, device.torch_device.type.upper(), None)
    warmup, active = args.profiling_warmup_steps, args.profiling_steps
    return torch_profiler.profile(
        activities=sorted({kinds.CPU, own} - {None}, key=str),
        schedule=torch_profiler.schedule(wait=0, warmup=warmup, active=active, repeat=1),
        on_trace_ready=write,
        record_shapes=args.profiling_record_shapes,
        with_stack=args.profiling_with_stack,
    )


def plot_losses(csv_path: Path, png_path: Path, title: str, loss_label: str) -> None:
    """Draw training and evaluation loss (columns ``loss``, ``eval_loss``) over optimiser steps, if there is any.

    Raises:
        UserError: the file cannot be written.
    """
    rows, found = read_csv(csv_path), {"training": [], "evaluation": []}
    for column, label in (("loss", "training"), ("eval_loss", "evaluation")):
        for row in rows:
            with suppress(KeyError, ValueError):  # most records have one of the two
                found[label].append((int(row["step"]), float(row[column])))
    if any(found.values()):
        curves(png_path, found, title, "optimiser steps", loss_label)
