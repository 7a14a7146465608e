"""Files are whole or absent, and a run goes on without one that it can do without."""

from __future__ import annotations

import json
import os

import pytest

from core import errors
from core.errors import UserError
from core.files import by_product, model_files, share, write_file, write_json


def test_a_crash_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    write_json(tmp_path / "x.json", {"a": 1})
    seen = []

    def fail(descriptor):
        seen.append((sorted(os.listdir(tmp_path)), json.loads((tmp_path / "x.json").read_text())))
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "x.json", {"a": 2})
    assert seen == [([f".x.json.{os.getpid()}", "x.json"], {"a": 1})], "written beside it, complete, before the rename"
    assert os.listdir(tmp_path) == ["x.json"]
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": 1}


def test_a_full_disk_is_one_line(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"x\.json cannot be written: No space left on device; make room"):
        write_json(tmp_path / "x.json", {})
    assert os.listdir(tmp_path) == []


def test_a_file_comes_with_its_folder_and_replaces_an_older_one(tmp_path):
    for content in (b"older", b"new"):
        write_file(tmp_path / "a" / "b" / "x", content)
    assert (tmp_path / "a" / "b" / "x").read_bytes() == b"new"
    assert os.listdir(tmp_path / "a" / "b") == ["x"]


def unwritable(tmp_path) -> None:
    (tmp_path / "file").touch()
    write_file(tmp_path / "file" / "x", b"", "--logging_dir")


def test_what_a_run_can_do_without_ends_it_or_is_one_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(errors, "_warned", set())
    line = f"{tmp_path}/file/x cannot be written: File exists; make room or give another --logging_dir"
    with pytest.raises(UserError, match=f"^{line}, or --on_save_error continue$"), by_product("stop"):
        unwritable(tmp_path)
    for _ in range(2):
        with by_product("continue"):
            unwritable(tmp_path)
    assert caplog.messages == [f"{line}; the run goes on without it"]
    with pytest.raises(KeyError), by_product("continue"):
        raise KeyError("a bug")


def test_a_file_gets_the_mode_of_a_new_one(tmp_path):
    (tmp_path / "x").touch(0o600)
    before = os.umask(0o027)
    try:
        share(tmp_path, [tmp_path / "x"])
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o640
    assert os.listdir(tmp_path) == ["x"]


def test_files_of_a_model_are_all_there_or_none_is_new(tmp_path):
    (tmp_path / "old").touch()

    def fail() -> None:
        (tmp_path / "new").touch()
        (tmp_path / "folder").mkdir()
        raise OSError("full")

    with pytest.raises(OSError, match="full"), model_files(tmp_path):
        fail()
    assert sorted(os.listdir(tmp_path)) == ["folder", "old"]
