"""Tracking: the CSV is complete at any time, a resume continues it, nothing is left running."""

from __future__ import annotations

import multiprocessing
import re
import threading
from argparse import Namespace
from contextlib import AbstractContextManager
from io import BytesIO

import numpy as np
import pytest
from accelerate import PartialState
from accelerate.tracking import GeneralTracker
from PIL import Image

from core import errors, tracking
from core.errors import UserError
from core.records import CSVTracker, read_csv
from core.tracking import Tracker, banner, check, flat
from tests.core.test_records import at_most


def arguments(**changes) -> Namespace:
    defaults = {
        "report_to": ["none"],
        "logging_dir": None,
        "run_name": None,
        "disable_tqdm": True,
        "on_save_error": "stop",
    }
    return Namespace(**{**defaults, **changes})


def events(folder) -> dict[str, list[int]]:
    """Scalars that TensorBoard shows for a folder: name and steps."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return {name: [event.step for event in accumulator.Scalars(name)] for name in accumulator.Tags()["scalars"]}


def test_banner_aligns_and_keeps_the_order():
    text = banner({"device": "gaudi2 x 8", "global batch": "64 rows", "unknown": None, "learning rate": 1e-4})
    assert text == "device         gaudi2 x 8\nglobal batch   64 rows\nlearning rate  0.0001"
    assert banner({}) == ""


def test_flat_makes_scalars():
    import torch

    values = {"a": {"b": 1, "c": {"d": True}}, "none": None, "list": [1, 2], "tensor": torch.tensor(0.5), "text": "x"}
    assert flat(values) == {"a/b": 1, "a/c/d": True, "list": "[1, 2]", "tensor": 0.5, "text": "x"}


def test_csv_grows_new_columns_and_leaves_none_out(tmp_path):
    tracker = Tracker(arguments(), tmp_path, total_steps=3)
    tracker.log({"loss": 2.5, "rate": None}, 1)
    tracker.log({"eval_loss": 2.25, "note": 'a "quoted", text\u2028'}, 1)
    tracker.log({"loss": 1.5}, 2)
    rows = read_csv(tmp_path / "logs" / "metrics.csv")
    assert rows == [
        {"step": "1", "loss": "2.5", "eval_loss": "", "note": ""},
        {"step": "1", "loss": "", "eval_loss": "2.25", "note": 'a "quoted", text\u2028'},
        {"step": "2", "loss": "1.5", "eval_loss": "", "note": ""},
    ]


def test_a_resume_drops_the_steps_that_run_again(tmp_path):
    first = Tracker(arguments(), tmp_path, total_steps=6)
    for step in range(1, 6):
        first.log({"loss": float(step)}, step)
    path = tmp_path / "logs" / "metrics.csv"
    with open(path, "a") as file:
        file.write("6,")  # killed while it wrote
    second = Tracker(arguments(), tmp_path, total_steps=6, start_step=3)
    second.log({"loss": 40.0, "new": 1}, 4)
    assert [(row["step"], row["loss"]) for row in read_csv(path)] == [
        ("1", "1.0"),
        ("2", "2.0"),
        ("3", "3.0"),
        ("4", "40.0"),
    ]


def test_a_fresh_run_starts_an_empty_file(tmp_path):
    Tracker(arguments(), tmp_path, total_steps=2).log({"loss": 1.0}, 0)
    Tracker(arguments(), tmp_path, total_steps=2)
    assert read_csv(tmp_path / "logs" / "metrics.csv") == []


def test_a_torn_last_line_is_no_row(tmp_path):
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss\n1,2.0\n12,3.")
    assert read_csv(path) == [{"step": "1", "loss": "2.0"}]
    path.write_text("other,columns\n1,2\n")
    assert read_csv(path) == []


def test_all_is_tensorboard_and_csv(tmp_path):
    tracker = Tracker(arguments(report_to=["all"], run_name="run"), tmp_path, total_steps=3)
    tracker.store_init_configuration({"learning_rate": 1e-4, "none": None, "list": ["a"]})
    for step in (1, 2):
        tracker.log({"loss": 1.0, "none": None}, step)
    tracker.finish()
    assert events(tmp_path / "logs" / "run") == {"loss": [1, 2]}
    assert '"learning_rate": 0.0001' in (tmp_path / "logs" / "hyperparameters.json").read_text()
    assert len(read_csv(tmp_path / "logs" / "metrics.csv")) == 2


def test_trackers_leave_the_accelerator_alone(tmp_path):
    """accelerate's trackers ask for the process state, and the first to ask decides about the device."""
    PartialState._reset_state()
    tracker = Tracker(arguments(report_to=["tensorboard"]), tmp_path, total_steps=1)
    tracker.finish()
    assert PartialState()._cpu is True


def test_tensorboard_hides_the_steps_that_run_again(tmp_path):
    args = arguments(report_to=["tensorboard"], run_name="run", logging_dir=str(tmp_path / "elsewhere"))
    first = Tracker(args, tmp_path, total_steps=5)
    for step in (1, 2, 3, 4):
        first.log({"loss": 1.0}, step)
    first.finish()
    second = Tracker(args, tmp_path, total_steps=5, start_step=2)
    for step in (3, 4, 5):
        second.log({"loss": 1.0}, step)
    second.finish()
    assert events(tmp_path / "elsewhere" / "run") == {"loss": [1, 2, 3, 4, 5]}
    assert not (tmp_path / "logs").exists()


def test_none_is_csv_only(tmp_path):
    tracker = Tracker(arguments(), tmp_path, total_steps=1)
    tracker.log({"loss": 1.0}, 1)
    tracker.finish()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["logs", "loss_curve.png", "metrics.csv"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["tensorbord"], r"--report_to tensorbord is no tracker \(did you mean 'tensorboard'\?\); here: .*all, none"),
        (["comet_ml"], r"--report_to comet_ml is not installed; here: .*tensorboard"),
        (["none", "tensorboard"], r"'none' excludes the others"),
    ],
)
def test_wrong_trackers_are_refused(tmp_path, monkeypatch, names, message):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["tensorboard"])
    with pytest.raises(UserError, match=message):
        Tracker(arguments(report_to=names), tmp_path, total_steps=1)
    assert list(tmp_path.iterdir()) == []


def test_all_without_tensorboard_is_csv_only(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["wandb"])  # a service: never without its name
    tracker = Tracker(arguments(report_to=["all"]), tmp_path, total_steps=1)
    assert [type(one) for one in tracker.trackers] == [CSVTracker]


class Failing(GeneralTracker):
    name = "failing"
    requires_logging_directory = False
    tracker = None
    calls = 0

    def __init__(self, run_name: str) -> None:
        super().__init__()

    def log(self, values, step=None, **kwargs):
        Failing.calls += 1
        raise ConnectionError("no route")


def test_a_service_that_fails_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["failing"])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "failing", Failing)
    monkeypatch.setattr(errors, "_warned", set())
    tracker = Tracker(arguments(report_to=["failing"]), tmp_path, total_steps=2)
    tracker.log({"loss": 1.0}, 1)
    tracker.log({"loss": 0.5}, 2)
    assert len(read_csv(tmp_path / "logs" / "metrics.csv")) == 2
    assert Failing.calls == 1
    assert [record.getMessage() for record in caplog.records] == [
        "--report_to failing stopped (ConnectionError('no route')); metrics.csv has all records"
    ]


def test_the_bar_shows_the_run(tmp_path, capsys):
    tracker = Tracker(arguments(disable_tqdm=False), tmp_path, total_steps=10, start_step=4)
    assert "4/10" in capsys.readouterr().err
    tracker.advance(5, loss=2.34567, learning_rate=1e-4, samples_per_second=12.3456, memory=1.5)
    tracker.advance(8, loss=2.0)
    tracker.bar.refresh()
    shown = capsys.readouterr().err
    assert "8/10" in shown
    for part in ("loss=2", "lr=0.0001", "samples/s=12.35", "GB=1.50"):
        assert part in shown.rsplit("\r", 1)[-1]
    tracker.finish()


def test_no_bar_where_none_is_wanted(tmp_path, capsys, monkeypatch):
    Tracker(arguments(), tmp_path, total_steps=10).advance(3, loss=1.0)
    monkeypatch.setenv("RANK", "1")
    other = Tracker(arguments(disable_tqdm=False, report_to=["all"]), tmp_path / "rank1", total_steps=10)
    other.advance(3, loss=1.0)
    other.log({"loss": 1.0}, 3)
    other.finish()
    assert capsys.readouterr().err == ""
    assert not (tmp_path / "rank1").exists()


def test_finish_leaves_nothing_running(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking._Bar, "monitor", None)  # an earlier bar may have left one
    before = set(threading.enumerate())
    tracker = Tracker(arguments(report_to=["all"], disable_tqdm=False), tmp_path, total_steps=2)
    tracker.store_init_configuration({"a": 1})
    tracker.log({"loss": 1.0}, 1)
    assert len(set(threading.enumerate()) - before) == 1  # TensorBoard's writer, and no watcher of the bar
    tracker.finish()
    assert tracker.bar.disable  # what a closed bar says of itself
    (tmp_path / "loss_curve.png").unlink()
    tracker.finish()
    assert not (tmp_path / "loss_curve.png").exists()
    assert set(threading.enumerate()) == before
    assert multiprocessing.active_children() == []


def test_loss_curve(tmp_path, monkeypatch):
    import matplotlib.axes

    drawn = []
    plot = matplotlib.axes.Axes.plot
    monkeypatch.setattr(
        matplotlib.axes.Axes,
        "plot",
        lambda self, x, y, *rest, **options: (
            drawn.append((options["label"], x, y)) or plot(self, x, y, *rest, **options)
        ),
    )
    tracker = Tracker(arguments(), tmp_path, total_steps=4)
    for step, loss in ((2, 2.0), (4, float("nan"))):
        tracker.log({"loss": loss}, step)
    tracker.log({"eval_loss": 1.75}, 4)
    tracker.finish()
    assert drawn[0][:2] == ("training", (2, 4))
    assert drawn[0][2][0] == 2.0
    assert drawn[1] == ("evaluation", (4,), (1.75,))
    assert (tmp_path / "loss_curve.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_no_loss_no_curve(tmp_path):
    tracker = Tracker(arguments(), tmp_path, total_steps=1)
    tracker.log({"accuracy": 1.0}, 1)
    tracker.finish()
    assert not (tmp_path / "loss_curve.png").exists()


def squares(number: int) -> list[np.ndarray]:
    return [np.full((4, 6, 3), 40 * (at + 1), dtype=np.uint8) for at in range(number)]


def test_images_are_shown_in_tensorboard_and_not_in_the_csv(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = Tracker(arguments(report_to=["tensorboard"], run_name="run"), tmp_path, total_steps=4)
    for step in (2, 4):
        tracker.log_images("validation", squares(3), step)
    tracker.finish()
    accumulator = EventAccumulator(str(tmp_path / "logs" / "run"))
    accumulator.Reload()
    shown = accumulator.Images("validation")
    assert [event.step for event in shown] == [2, 4]
    pixels = np.asarray(Image.open(BytesIO(shown[0].encoded_image_string)))
    assert sorted(set(pixels.ravel().tolist()) - {0}) == [40, 80, 120]  # side by side, as they are
    assert read_csv(tmp_path / "logs" / "metrics.csv") == []


class Showing(GeneralTracker):
    name = "showing"
    requires_logging_directory = False
    tracker = None

    def __init__(self, run_name: str) -> None:
        super().__init__()
        self.seen: list[tuple[dict, int]] = []

    def log(self, values, step=None, **kwargs):
        pass

    def log_images(self, values, step=None):
        if step == 2:
            raise ConnectionError("no route")
        self.seen.append((values, step))


@pytest.mark.parametrize(("name", "keys"), [("wandb", ["draw"]), ("aim", ["draw_1", "draw_2"])])
def test_other_trackers_take_images_as_they_can(tmp_path, monkeypatch, caplog, name, keys):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: [name])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, name, type("Named", (Showing,), {"name": name}))
    monkeypatch.setattr(errors, "_warned", set())
    tracker = Tracker(arguments(report_to=[name]), tmp_path, total_steps=2)
    service = tracker.trackers[1]
    for step in (1, 2, 3):
        tracker.log_images("draw", squares(2), step)
    (values, step), *more = service.seen
    assert (list(values), step, more) == (keys, 1, [])
    assert np.array_equal(np.stack(values["draw"] if keys == ["draw"] else list(values.values())), squares(2))
    assert caplog.messages == [f"--report_to {name} stopped (ConnectionError('no route')); metrics.csv has all records"]


def test_a_tracker_without_images_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["failing"])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "failing", Failing)
    tracker = Tracker(arguments(report_to=["failing"]), tmp_path, total_steps=2)
    tracker.log_images("draw", squares(1), 1)
    assert len(tracker.trackers) == 2


@pytest.mark.parametrize("name", ["../elsewhere", "..", ".", "/tmp/x", "a/b", "a\\b", "a\0"])
def test_a_name_that_is_a_path_is_refused(tmp_path, name):
    with pytest.raises(UserError, match=r"--run_name .* is a path; give a name"):
        Tracker(arguments(run_name=name, report_to=["tensorboard"]), tmp_path, total_steps=1)
    assert list(tmp_path.iterdir()) == []
    assert check(arguments(run_name="a run: 1e-4..3")) == []


def full(folder) -> AbstractContextManager[None]:
    """TensorBoard's file cannot get larger, the others can."""
    (path,) = (folder / "logs" / "run").glob("events*")
    return at_most(path.stat().st_size + 3)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's own thread
def test_a_full_disk_stops_tensorboard_and_the_run(tmp_path):
    tracker = Tracker(arguments(report_to=["tensorboard"], run_name="run"), tmp_path, total_steps=3)
    tracker.log({"loss": 1.0}, 1)
    with full(tmp_path), pytest.raises(UserError, match=r"logs/run cannot be written: File too large.* continue$"):
        tracker.log({"loss": 1.0}, 2)
    tracker.finish()
    assert events(tmp_path / "logs" / "run")["loss"] == [1]


def test_tensorboard_starts_again_when_there_is_room(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    args = arguments(report_to=["tensorboard"], run_name="run", on_save_error="continue")
    tracker = Tracker(args, tmp_path, total_steps=6)
    tracker.log({"loss": 1.0}, 1)
    with full(tmp_path):
        tracker.log({"loss": 1.0}, 2)
    with at_most(tracking.ROOM - 1):
        tracker.log({"loss": 1.0}, 3)
    for step in (4, 5):
        tracker.log({"loss": 1.0}, step)
    tracker.finish()
    assert sorted(events(tmp_path / "logs" / "run")["loss"]) == [1, 4, 5]  # two files, of one second here
    assert [row["step"] for row in read_csv(tmp_path / "logs" / "metrics.csv")] == ["1", "2", "3", "4", "5"]
    (warning,) = caplog.messages
    assert "logs/run cannot be written: File too large" in warning
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["metrics.csv", "run"]


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")  # the writer's own thread
def test_a_run_starts_without_room_for_logs_and_has_them_later(tmp_path, caplog, monkeypatch, capsys):
    """Also when it goes on after step 2, from where the log of another process has steps that run again."""
    monkeypatch.setattr(errors, "_warned", set())
    folder, logs = tmp_path / "new", tmp_path / "logs"
    first = Tracker(arguments(logging_dir=str(logs)), folder, total_steps=6)
    for step in (1, 2, 3):
        first.log({"loss": 1.0}, step)
    args = arguments(report_to=["tensorboard"], run_name="run", on_save_error="continue", logging_dir=str(logs))
    with at_most(0):
        tracker = Tracker(args, folder, total_steps=6, start_step=2)
        tracker.store_init_configuration({"learning_rate": 0.5})
        tracker.log({"loss": 2.0}, 3)
    assert len(caplog.messages) == 2
    for kind, message in zip(
        (r"metrics\.csv cannot be written", "tensorboard cannot start"), caplog.messages, strict=True
    ):
        assert re.search(f"{kind}: .*File too large.*; the run goes on without it$", message)
    for step in (4, 5):
        tracker.log({"loss": 2.0}, step)
    tracker.finish()
    rows = [(row["step"], row["loss"]) for row in read_csv(logs / "metrics.csv")]
    assert rows == [("1", "1.0"), ("2", "1.0"), ("4", "2.0"), ("5", "2.0")]
    assert '"learning_rate": 0.5' in (logs / "hyperparameters.json").read_text()
    assert events(logs / "run")["loss"] == [4, 5]
    assert (folder / "loss_curve.png").is_file()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("place", ["a file", "no room"])
def test_without_a_place_for_logs_a_run_stops_or_has_none(tmp_path, caplog, monkeypatch, place):
    monkeypatch.setattr(errors, "_warned", set())
    logs, size = tmp_path / "logs", 0 if place == "no room" else 10_000
    logs.mkdir() if place == "no room" else logs.touch()
    with at_most(size):
        with pytest.raises(UserError, match=r"logs.*, or --on_save_error continue$"):
            Tracker(arguments(), tmp_path, total_steps=1)
        tracker = Tracker(arguments(on_save_error="continue"), tmp_path, total_steps=1)
        tracker.log({"loss": 2.0}, 1)
        tracker.finish()
    assert len(caplog.messages) == 1
    assert not list(tmp_path.rglob("metrics.csv"))


def test_what_else_ends_a_thread_is_told(tmp_path, capsys):
    """Only a full disk under TensorBoard's own thread is told elsewhere."""
    told = []
    hook = tracking._Threads(told.append)

    class Writer(threading.Thread):
        __module__ = "tensorboard.summary.writer.event_file_writer"

    for kind, thread in ((OSError, Writer()), (ValueError, Writer()), (OSError, threading.Thread())):
        hook(threading.ExceptHookArgs((kind, kind(), None, thread)))
    assert len(told) == 2


def test_a_service_that_cannot_start_is_one_line(tmp_path, monkeypatch):
    def start(self):
        raise RuntimeError("no login:\nlog in first")

    monkeypatch.setattr(tracking, "get_available_trackers", lambda: ["failing"])
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "failing", type("NoLogin", (Failing,), {"start": start}))
    with pytest.raises(UserError, match="--report_to failing cannot start: no login: log in first"):
        Tracker(arguments(report_to=["failing"]), tmp_path, total_steps=1)


def test_the_end_costs_no_trained_model(tmp_path, caplog, monkeypatch):
    """No room for the curve and the last of TensorBoard: warnings, although the policy is to stop."""
    monkeypatch.setattr(errors, "_warned", set())
    tracker = Tracker(arguments(report_to=["tensorboard"], run_name="run"), tmp_path, total_steps=1)
    tracker.log({"loss": 1.0}, 1)
    with full(tmp_path):
        tracker.trackers[1].writer.add_scalar("loss", 1.0, 2)
        tracker.finish()
    assert any("logs/run cannot be written: File too large" in message for message in caplog.messages)
    assert any("no loss curve: " in message and "File too large" in message for message in caplog.messages)


def test_a_damaged_number_is_not_drawn(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,loss,eval_loss\n1,2.x,\n2,1.5,\n")
    tracking.plot_losses(tmp_path / "metrics.csv", tmp_path / "curve.png", "", "loss")
    assert (tmp_path / "curve.png").is_file()


def test_a_trace_that_cannot_be_written_is_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    (tmp_path / "profile").touch()
    args = Namespace(
        profiling_steps=1, profiling_warmup_steps=1, profiling_record_shapes=False, profiling_with_stack=False
    )
    profile = tracking.profiler(args, Namespace(torch_device=Namespace(type="cpu")), tmp_path)
    profile.on_trace_ready(profile)
    (warning,) = caplog.messages
    assert warning.startswith("--profiling_steps: no trace in")
