"""Settings: what the environment asks for, one-line errors, and an environment that children inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpu_simulator import settings
from tests.conftest import REPOSITORY


def test_unset_and_empty_are_off() -> None:
    assert settings.read({}) is None
    assert settings.read({"HPU_SIMULATOR": "", "HPU_SIMULATOR_MODE": "nonsense"}) is None


def test_the_generations_have_the_cards_memory() -> None:
    assert {name: card.memory_bytes for name, card in settings.GENERATIONS.items()} == {
        "gaudi": 32 * 2**30,
        "gaudi2": 96 * 2**30,
        "gaudi3": 128 * 2**30,
    }
    assert all(name == card.name for name, card in settings.GENERATIONS.items())


def test_defaults_and_paths() -> None:
    read = settings.read({"HPU_SIMULATOR": "gaudi3", "HPU_SIMULATOR_JSON": "a.json", "HPU_SIMULATOR_HTML": ""})
    assert read == settings.Settings(settings.GENERATIONS["gaudi3"], "compute", 1, str(Path("a.json").absolute()), None)


@pytest.mark.parametrize(
    ("variable", "value", "valid"),
    [
        ("HPU_SIMULATOR", "gaudi4", "gaudi, gaudi2, gaudi3"),
        ("HPU_SIMULATOR", "1", "gaudi, gaudi2, gaudi3"),
        ("HPU_SIMULATOR_MODE", "shape", "compute, shapes"),
        ("HPU_SIMULATOR_DEVICES", "0", "1 to 127"),
        ("HPU_SIMULATOR_DEVICES", "128", "1 to 127"),
        ("HPU_SIMULATOR_DEVICES", "-1", "1 to 127"),
        ("HPU_SIMULATOR_DEVICES", "two", "1 to 127"),
        ("HPU_SIMULATOR_DEVICES", "\N{SUPERSCRIPT TWO}", "1 to 127"),
    ],
)
def test_a_value_that_does_not_exist_is_one_line_with_those_that_do(variable: str, value: str, valid: str) -> None:
    with pytest.raises(settings.SettingsError) as caught:
        settings.read({"HPU_SIMULATOR": "gaudi"} | {variable: value})
    message = str(caught.value)
    assert variable in message
    assert repr(value) in message
    assert valid in message
    assert "\n" not in message


def test_written_settings_are_read_back_by_a_child_elsewhere(tmp_path: Path) -> None:
    given = settings.Settings(settings.GENERATIONS["gaudi"], "shapes", 4, "report.json", "page.html", rank=2)
    environ = dict(os.environ) | {"PYTHONPATH": "/some/where"}
    settings.write(given, environ)
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(settings.BRIDGE), "/some/where"]
    code = (
        f"import sys; sys.path.append({str(REPOSITORY)!r}); from hpu_simulator import settings; print(settings.read())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, capture_output=True, text=True)
    absolute = replace(given, json=str(Path("report.json").absolute()), html=str(Path("page.html").absolute()))
    assert done.stdout.strip() == str(absolute), done.stderr


def test_a_lone_rank_gets_what_a_launcher_would_give_and_keeps_what_one_gave() -> None:
    asked = {"HPU_SIMULATOR": "gaudi2", "HPU_SIMULATOR_MODE": "shapes", "HPU_SIMULATOR_DEVICES": "8"}
    environ = dict(asked)
    settings.launch(settings.read(environ), environ)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [environ[name] for name in names] == ["0", "0", "8", "8", "localhost", "29500"]
    environ = asked | {"RANK": "11", "WORLD_SIZE": "16", "MASTER_PORT": "1"}
    settings.launch(settings.read(environ), environ)
    assert [environ[name] for name in names] == ["11", "3", "16", "8", "localhost", "1"]
    assert settings.read(environ | {"RANK": "5"}).rank == 11, "a launcher's child is another one"


@pytest.mark.parametrize("more", [{"HPU_SIMULATOR_DEVICES": "1"}, {"HPU_SIMULATOR_MODE": "compute"}])
def test_there_is_no_lone_rank_of_one_device_nor_in_compute(more: dict[str, str]) -> None:
    environ = {"HPU_SIMULATOR": "gaudi2", "HPU_SIMULATOR_MODE": "shapes", "HPU_SIMULATOR_DEVICES": "8"} | more
    settings.launch(settings.read(environ), environ)
    assert not {"RANK", "WORLD_SIZE", "HPU_SIMULATOR_RANK"} & set(environ)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"RANK": "8"}, "RANK='8'"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "WORLD_SIZE of '1'"),
        ({"HPU_SIMULATOR_RANK": "-1"}, "HPU_SIMULATOR_RANK='-1'"),
        ({"WORLD_SIZE": "many"}, "WORLD_SIZE of 'many'"),
    ],
)
def test_a_rank_that_does_not_exist_is_one_line(given: dict[str, str], name: str) -> None:
    environ = {"HPU_SIMULATOR": "gaudi2", "HPU_SIMULATOR_MODE": "shapes", "HPU_SIMULATOR_DEVICES": "8"} | given
    with pytest.raises(settings.SettingsError, match=name) as caught:
        settings.read(environ)
    assert "\n" not in str(caught.value)


def test_writing_twice_changes_nothing_and_drops_old_files() -> None:
    environ = {"HPU_SIMULATOR_JSON": "/old.json"}
    given = settings.Settings(settings.GENERATIONS["gaudi2"])
    settings.write(given, environ)
    once = dict(environ)
    settings.write(given, environ)
    assert environ == once
    assert "HPU_SIMULATOR_JSON" not in environ


def test_an_empty_part_of_pythonpath_stays() -> None:
    """It stands for the working folder."""
    environ = {"PYTHONPATH": f"/one{os.pathsep}"}
    settings.write(settings.Settings(settings.GENERATIONS["gaudi2"]), environ)
    assert environ["PYTHONPATH"].split(os.pathsep) == [str(settings.BRIDGE), "/one", ""]


def test_settings_import_no_torch() -> None:
    code = "import sys, hpu_simulator.settings, hpu_simulator.report; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
