"""One-line errors, one-time warnings, nearest matches, and JSON files that people write by hand."""

from __future__ import annotations

import logging
import subprocess
import sys
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
