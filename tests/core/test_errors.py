"""One-line errors, one-time warnings, nearest matches, and JSON files that people write by hand."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tqdm import tqdm

from core import errors
from core.errors import UserError
from tests.conftest import REPOSITORY


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())


def test_a_message_is_one_line():
    assert str(UserError("--seed: bad\nvalue\r\nhere")) == "--seed: bad value here"


def test_say_and_warn_are_for_the_first_rank_only(monkeypatch, capsys, caplog):
    monkeypatch.setenv("RANK", "1")
    errors.say("hello")
    errors.warn_once("careful")
    assert (capsys.readouterr().out, caplog.records) == ("", [])
    monkeypatch.setenv("RANK", "0")
    errors.say("hello")
    errors.warn_once("careful")
    assert capsys.readouterr().out == "hello\n"
    assert caplog.messages == ["careful"]


def test_a_warning_is_said_once_and_another_one_still_is(caplog):
    for message in ("a", "a", "b", "a"):
        errors.warn_once(message)
    assert caplog.messages == ["a", "b"]
    assert all(record.levelno == logging.WARNING for record in caplog.records)


@pytest.mark.parametrize(("name", "hint"), [("gaudi_confg", " (did you mean 'gaudi_config'?)"), ("zzz", "")])
def test_nearest_match(name, hint):
    assert errors.did_you_mean(name, ["gaudi_config", "seed"]) == hint


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({}, "object"),
        ([], "array"),
        ("8", "string"),
        (True, "boolean"),
        (8, "integer"),
        (8.0, "number"),
        (None, "null"),
    ],
)
def test_json_kinds(value, kind):
    assert errors.json_kind(value) == kind


BAD_FILES = {
    "missing": (None, "is not a file"),
    "empty": (b"", "is not valid JSON"),
    "truncated": (b'{"a": ', "is not valid JSON"),
    "trailing comma": (b'{"a": 1,}', "is not valid JSON"),
    "array": (b"[1]", "holds a JSON array"),
    "string": (b'"a"', "holds a JSON string"),
    "null": (b"null", "holds a JSON null"),
    "latin-1": ('{"a": "ü"}'.encode("latin-1"), "is not UTF-8 text"),
    "key twice": (b'{"a": 1, "a": 1}', "says 'a' twice"),
    "key twice, deep": (b'{"a": {"b": 1, "b": 2}}', "says 'b' twice"),
    "NaN": (b'{"a": NaN}', "holds NaN"),
    "infinity": (b'{"a": -Infinity}', "holds -Infinity"),
    "long integer": (b'{"a": ' + b"9" * 5000 + b"}", "is not valid JSON"),
    "deep": (b"[" * 100_000, "is not valid JSON"),
    "large": (b'{"a": "' + b"x" * 4_000_000 + b'"}', "at most 4 MB"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_bad_json_names_flag_and_file(tmp_path, case):
    content, reason = BAD_FILES[case]
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=reason) as error:
        errors.read_json_object(path, "--config")
    assert str(error.value).startswith("--config: ")
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize("name", ["", ".", "x" * 300, "a\0b", "a/" * 3000])
def test_a_name_that_is_no_file(name):
    with pytest.raises(UserError, match="give a JSON file"):
        errors.read_json_object(name, "--config")


def test_an_unreadable_file_is_the_users_to_mend(tmp_path, monkeypatch):
    path = tmp_path / "x.json"
    path.write_text("{}")

    def refuse(*args, **options):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    with pytest.raises(UserError, match="cannot be read: Permission denied"):
        errors.read_json_object(path, "--config")


def test_many_keys_take_no_quadratic_time(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("{" + ", ".join(f'"k{n}": {n}' for n in range(100_000)) + "}")
    assert len(errors.read_json_object(path, "--config")) == 100_000


JSON_LIKE = st.text(alphabet='{}[]":,0123456789.eE-+ truefalsnN"\\u', max_size=60).map(str.encode)


@given(content=st.binary(max_size=200) | JSON_LIKE)
def test_no_content_escapes_as_another_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.json"
    path.write_bytes(content)
    try:
        assert isinstance(errors.read_json_object(path, "--config"), dict)
    except UserError as error:
        said = str(error)
    else:
        return
    assert str(path) in said


def test_a_shipped_file_is_found_from_anywhere(tmp_path, monkeypatch):
    shipped, elsewhere = tmp_path / "gaudi_configs", tmp_path / "elsewhere"
    shipped.mkdir()
    elsewhere.mkdir()
    (shipped / "t5.json").write_text("{}")
    (shipped / "roberta.json").write_text("{}")
    monkeypatch.chdir(elsewhere)
    for name in ("t5", "gaudi_configs/t5.json", "./gaudi_configs/t5.json"):
        assert errors.find_shipped(name, shipped, "--gaudi_config") == shipped / "t5.json"
    with pytest.raises(UserError, match=r"--gaudi_config: no configuration 'robert' \(did you mean 'roberta'\?\)"):
        errors.find_shipped("robert", shipped, "--gaudi_config")


def test_the_users_own_file_comes_before_the_shipped_one(tmp_path, monkeypatch):
    shipped = tmp_path / "repository" / "gaudi_configs"
    own = tmp_path / "gaudi_configs"
    for folder in (shipped, own):
        folder.mkdir(parents=True)
        (folder / "t5.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    assert errors.find_shipped("gaudi_configs/t5.json", shipped, "--x").resolve() == own / "t5.json"
    assert errors.find_shipped("other/t5.json", shipped, "--x") == Path("other/t5.json"), "left to the reader"


def test_a_program_ends_with_one_line_and_code_2(capsys):
    def main():
        raise UserError("--seed: no")

    with pytest.raises(SystemExit) as stop:
        errors.exit_with_one_line(main)
    assert (stop.value.code, capsys.readouterr().err) == (2, "error: --seed: no\n")
    with pytest.raises(ZeroDivisionError):
        errors.exit_with_one_line(lambda: 1 / 0)


def test_the_line_stands_below_a_progress_bar(capsys):
    def main():
        bar = tqdm(total=2, leave=True)
        bar.update(1)
        raise UserError("the disk is full")

    with pytest.raises(SystemExit):
        errors.exit_with_one_line(main)
    assert capsys.readouterr().err.splitlines()[-1] == "error: the disk is full"


PROGRAM = """
import os, signal, sys, time
from core.errors import exit_with_one_line, if_interrupted
def main():
    if_interrupted("go on so")
    print("up", flush=True)
    try:
        time.sleep(60)
    finally:
        os.kill(os.getpid(), signal.SIGUSR1)
exit_with_one_line(main, preemptible=sys.argv[1] == "True")
"""


@pytest.mark.processes
@pytest.mark.parametrize(("preemptible", "rank"), [(True, "0"), (True, "1"), (False, "0")])
def test_a_program_that_a_signal_ends(monkeypatch, preemptible, rank):
    """The second signal, while it ends, changes nothing; the other ranks say nothing, and do not wait to say it."""
    monkeypatch.setenv("RANK", rank)
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": REPOSITORY}
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(preemptible)], **options) as process:
        assert process.stdout.readline() == "up\n"
        process.terminate()
        said = process.communicate(timeout=8)[1]
    line = "stopped by SIGTERM: training had not begun; go on so\n"
    assert (process.returncode, said) == ((75, line if rank == "0" else "") if preemptible else (-15, ""))


SAVING = """
import sys, time
from core import preemption
from core.errors import exit_with_one_line
def main():
    preemption.hold()
    print("up", flush=True)
    while not preemption.asked():
        print("a line", flush=True)
        print("another one", file=sys.stderr)
        time.sleep(0.01)
    print("saved", file=open(sys.argv[1], "w"))
    preemption.release("all is saved")
exit_with_one_line(main, preemptible=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize("reader", ["pipe", "terminal", "full"])
def test_a_run_that_nobody_hears_goes_on_until_a_signal_and_saves(tmp_path, reader):
    """As with ``| tee log``, which gets the signal too, a connection that ended, a log on a full disk."""
    ours, theirs = os.openpty() if reader == "terminal" else os.pipe()
    if reader == "full":
        os.dup2(os.open("/dev/full", os.O_WRONLY), theirs)
    command = [sys.executable, "-c", SAVING, str(tmp_path / "saved")]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, cwd=REPOSITORY, start_new_session=True)
    os.close(theirs)
    if reader != "full":
        assert os.read(ours, 2) == b"up"
    os.close(ours)
    time.sleep(0.3)
    if process.poll() is None:
        process.terminate()
    assert process.wait(8) == 75
    assert (tmp_path / "saved").read_text() == "saved\n"


ENDING = """
import atexit, io, os, signal, subprocess, sys, threading
from core import preemption
from core.errors import exit_with_one_line
def myself(number):
    os.kill(os.getpid(), number)
class Interrupted(io.StringIO):
    def write(self, text):
        myself(signal.SIGINT)
def hangs():
    try:
        myself(signal.SIGTERM)
    finally:
        print(subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL).pid, flush=True)
        lock = threading.Lock()
        lock.acquire() and lock.acquire()
def is_asked_at_its_end():
    preemption.over()
    myself(signal.SIGTERM)
    atexit.register(myself, signal.SIGUSR1)
def is_asked_after_its_end():
    atexit.register(myself, signal.SIGTERM)
def is_interrupted_at_its_last_line():
    sys.stderr = Interrupted()
    myself(signal.SIGTERM)
preemption.LIMIT = 0.4
exit_with_one_line(globals()[sys.argv[1]], preemptible=True)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "code"),
    [("is_asked_at_its_end", 0), ("is_asked_after_its_end", 0), ("is_interrupted_at_its_last_line", 75), ("hangs", 75)],
)
def test_what_comes_at_a_programs_end_does_not_change_its_exit_code(program, code):
    """A library that hangs, as a pool does one of whose idle processes was killed, is ended with what it started."""
    process = subprocess.run(
        [sys.executable, "-c", ENDING, program], capture_output=True, text=True, cwd=REPOSITORY, timeout=8
    )
    assert process.returncode == code, process.stderr
    if program == "hangs":
        line = "stopped by SIGTERM: training had not begun (and killed: it had not ended after 0.4 s)"
        assert process.stderr.strip() == line
        with suppress(FileNotFoundError):  # else nobody has reaped it yet
            until = time.monotonic() + 5  # a killed process dies when it is its turn
            while Path(f"/proc/{int(process.stdout)}/stat").read_text().split()[2] != "Z":
                assert time.monotonic() < until
                time.sleep(0.02)
