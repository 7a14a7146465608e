"""What guards against files of others; `tests/test_hostile.py` has whole models and data that do harm."""

from __future__ import annotations

import ast
import json
import shlex
from pathlib import Path

import pytest
import torch

from core.errors import UserError
from core.hub import loading
from core.untrusted import (
    CODE,
    PICKLED,
    Pickled,
    inside,
    look_at_rows,
    nothing_unpickled,
    read_text,
    reason,
    require_own_shards,
    wrong_place,
)


def test_nothing_is_unpickled_within_and_all_is_as_before_afterwards(tmp_path):
    path, ordinary = tmp_path / "x.bin", vars(torch)["load"]
    torch.save({"a": torch.ones(2)}, path)
    with nothing_unpickled(), nothing_unpickled():
        for file in (path, str(path), path.open("rb")):
            with pytest.raises(Pickled, match="pickled ones"):
                vars(torch)["load"](file, weights_only=True)
    assert vars(torch)["load"] is ordinary
    with pytest.raises(UserError, match=r"^what cannot be loaded: its weights are in no file of"), loading("what"):
        vars(torch)["load"](path, weights_only=True)
    assert ordinary(path, weights_only=True)["a"].sum() == 2


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architectures": ["T5Model"]}, "import transformers as x; x.T5Model.from_pretrained("),
        ({"_class_name": "AutoencoderKL"}, "import diffusers as x; x.AutoencoderKL.from_pretrained("),
        ({"architectures": ["T5Model(); import os"]}, None),
        ({"architectures": 3}, None),
        ({"_class_name": ["a", "b"]}, None),
        ([], None),
        (None, None),
    ],
)
def test_how_weights_are_converted(config, told, tmp_path):
    folder = tmp_path / 'a "model"; \'$(ls)'
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    said = reason(OSError(f"Error no file named model.safetensors found in directory {folder}."))
    assert said.startswith(PICKLED)
    if told is None:
        assert said.endswith("load it with the library that wrote it and save it again with save_pretrained")
        return
    python, flag, code = shlex.split(said.partition("convert it once: ")[2])
    assert (python, flag) == ("python", "-c")
    assert told in code
    names = [node.value for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Constant)]
    assert names == [str(folder)] * 2


def test_the_reason_of_an_error():
    first = ValueError("first")
    first.__cause__ = OSError("the cause\nof it")
    assert reason(first) == "the cause"
    assert reason(KeyError("name")) == "KeyError: 'name'"
    assert reason(RuntimeError()) == "RuntimeError"
    assert len(reason(RuntimeError("x" * 9000))) == 500
    assert reason(ValueError("Please pass the argument `trust_remote_code=True`")) == CODE
    swallowed = OSError("Unable to load weights")
    swallowed.__context__ = UserError("ours")
    assert reason(swallowed) == "ours"
    loop = ValueError("again")
    loop.__cause__ = ValueError("and again")
    loop.__cause__.__context__ = loop
    assert reason(loop) == "and again"


def test_the_file_that_is_damaged_is_named(tmp_path):
    assert reason(ValueError("why"), str(tmp_path), None, "nobody/none") == "why"
    (tmp_path / "part").mkdir()
    (tmp_path / "part" / "config.json").write_text("[]")
    assert reason(ValueError("why"), str(tmp_path)) == f"{tmp_path / 'part' / 'config.json'} holds no JSON object"
    (tmp_path / "model.safetensors").write_bytes(b"x")
    assert f"{tmp_path / 'model.safetensors'} is no sound file" in reason(ValueError("why"), str(tmp_path))


@pytest.mark.parametrize(
    ("names", "other"),
    [
        (["a.safetensors", "b.safetensors"], None),
        (["a.safetensors", "../b.safetensors"], "'../b.safetensors'"),
        (["/b.safetensors"], "'/b.safetensors'"),
        (["x/b.safetensors"], "'x/b.safetensors'"),
        ([3], "3"),
    ],
)
def test_shards_lie_beside_their_index(names, other, tmp_path):
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{at}": name for at, name in enumerate(names)}}))
    if other is None:
        require_own_shards(str(tmp_path))
        return
    with pytest.raises(UserError, match=f"{index} names {other}, which is not in its folder"):
        require_own_shards(str(tmp_path))


@pytest.mark.parametrize("content", ["[]", "{}", '{"weight_map": 3}', "{", "[" * 100_000])
def test_an_index_that_is_none_is_left_to_the_library(content, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(content)
    require_own_shards(str(tmp_path))


def test_a_small_text(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"\xef\xbb\xbfa\xc3\xa4")
    assert read_text(str(path), "--flag") == "aä"
    for name, problem in (
        ("a\0b", "is no file's name: embedded null byte"),
        ("y" * 300, "File name too long"),
        ("none", "No such file"),
    ):
        with pytest.raises(UserError, match=f"^--flag: .*{problem}"):
            read_text(name, "--flag")


def test_rows_are_looked_at_by_kind(tmp_path):
    path = tmp_path / "x"
    path.write_bytes(b"null\n\xff\n")
    look_at_rows(str(path), "parquet")
    with pytest.raises(UserError, match="x, line 1: a row is null"):
        look_at_rows(str(path), "json")
    with pytest.raises(UserError, match=r"x, line 2, byte 0: .*: this is not UTF-8"):
        look_at_rows(str(path), "csv")


@pytest.mark.parametrize(
    ("path", "is_inside"),
    [("/a/b/c", True), ("/a/b/../b/c", True), ("/a/b/../c", False), ("/a/bc", False), ("/a/b\\..\\..\\c", False)],
)
def test_paths_within_a_folder(path, is_inside):
    assert inside("/a/b", path) is is_inside
    assert Path(path).is_absolute()


FORM = {"step": 0, "total": {"loss": 0.0}, "done": True, "name": "", "pairs": [[0]], "more?": [""], "any": None}
RIGHT = {"step": 3, "total": {"loss": -1, "x": 1}, "done": False, "name": "a", "pairs": [[1, 2], []], "any": {"a": []}}


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({}, None),
        ({"more": ["a"], "else": 3}, None),
        ({"more": "a"}, "more"),
        ({"more": [3]}, "more.0"),
        ({"step": -1}, "step"),
        ({"step": 1.5}, "step"),
        ({"step": True}, "step"),
        ({"step": 10**25}, "step"),
        ({"step": None}, "step"),
        ({"total": {}}, "total.loss"),
        ({"total": []}, "total"),
        ({"total": {"loss": 1e300}}, "total.loss"),
        ({"done": 1}, "done"),
        ({"name": []}, "name"),
        ({"pairs": {}}, "pairs"),
        ({"pairs": [[1], [2, "x"]]}, "pairs.1.1"),
    ],
)
def test_where_json_has_another_form(changes, place):
    assert wrong_place(RIGHT | changes, FORM) == place
    assert wrong_place([], FORM) == "all of it"
    assert wrong_place({name: value for name, value in RIGHT.items() if name != "any"}, FORM) is None
