"""Run files: what one may hold, and how it becomes flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.errors import UserError
from core.run_files import RUN_FILE_KEYS, read_run_file, run_file_flags


def write(folder: Path, content: object) -> Path:
    path = folder / "run.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def test_what_a_file_leaves_out_is_empty(tmp_path: Path) -> None:
    content = {"description": "d", "args": {"seed": 1}}
    empty = {"description": "", "command": "", "args": {}, "published": [], "caveats": []}
    assert empty.keys() == RUN_FILE_KEYS.keys()
    assert read_run_file(write(tmp_path, content)) == empty | content
    assert read_run_file(str(write(tmp_path, {}))) == empty


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"arg": {}}, "unknown key 'arg' (did you mean 'args'?)"),
        ({"args": [1]}, "'args' must be a JSON object"),
        ({"args": None}, "'args' must be a JSON object"),
        ({"published": {}}, "'published' must be a JSON array"),
        ({"description": None}, "'description' must be a JSON string"),
        ({"caveats": "one"}, "'caveats' must be a JSON array"),
        ([1], "holds a JSON array"),
        ('{"args": {"seed": 1, "seed": 2}}', "says 'seed' twice"),
        ('{"args": ', "is not valid JSON"),
    ],
)
def test_a_file_of_another_form_is_refused(tmp_path: Path, content: object, message: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError) as error:
        read_run_file(path)
    assert message in str(error.value)
    assert str(error.value).startswith("--config")
    assert str(path) in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_paths_that_are_no_run_file(tmp_path: Path) -> None:
    (tmp_path / "latin.json").write_bytes('{"description": "ü"}'.encode("latin-1"))
    for name, reason in (("gone.json", "not a file"), (".", "a directory"), ("latin.json", "not UTF-8")):
        with pytest.raises(UserError, match=reason):
            read_run_file(tmp_path / name)


def test_values_become_flags() -> None:
    values = {"do_train": True, "seed": 1, "learning_rate": 1e-8, "run_name": "--a b", "report_to": ["a", 2], "x": None}
    assert run_file_flags(values) == [
        *("--do_train=True", "--seed=1", "--learning_rate=1e-08", "--run_name=--a b", "--report_to", "a", "2")
    ]
    assert run_file_flags({"optim-args": "", "report_to": [], "metric": ["-1"]}) == [
        *("--optim-args=", "--report_to", "--metric", "-1")
    ]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": {"a": 1}}, "--data: {'a': 1} is no value of a flag"),
        ({"report_to": [["a"]]}, "--report_to: [['a']] is no value of a flag"),
        ({"report_to": [{"a": 1}]}, "is no value of a flag"),
        ({"report_to": ["a", "--do_train"]}, "is no value of a flag"),
        ({"report_to": ["a", "-h"]}, "is no value of a flag"),
        ({"data=x": "y"}, "'data=x' is no flag that a run file can set"),
        ({"-data": "y"}, "'-data' is no flag that a run file can set"),
        ({"config": "x.json"}, "'config' is no flag that a run file can set"),
        ({"help": []}, "'help' is no flag that a run file can set"),
        ({"": 1}, "'' is no flag that a run file can set"),
    ],
)
def test_nothing_passes_as_another_flag(values: dict, message: str) -> None:
    with pytest.raises(UserError) as error:
        run_file_flags(values)
    assert message in str(error.value)
