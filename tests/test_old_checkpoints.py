"""Checkpoints of every released format load for ever: runs go on from them and end where the straight run ended."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from core import checkpoint
from core.device import Device
from tests.checkpoints import make
from tests.conftest import REPOSITORY, load_recipe

KEPT = Path(__file__).with_name("checkpoints")
RUNS = sorted(path.parent.relative_to(KEPT).as_posix() for path in KEPT.glob("format_*/*/expected.json"))
OF_ONE = [name for name in RUNS if "two_ranks" not in name]
OF_TWO = [name for name in RUNS if "two_ranks" in name]


@pytest.fixture
def copied(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a run in a copy of all of its format; we are in the latter."""
    kind, name = request.param.split("/")
    shutil.copytree(KEPT / kind, tmp_path / kind)
    monkeypatch.chdir(tmp_path / kind)
    return tmp_path / kind / name


def expected_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "expected.json").read_text(encoding="utf-8"))


def resuming(folder: Path) -> list[str]:
    return [
        *expected_of(folder)["flags"],
        "--output_dir",
        "again",
        "--resume_from_checkpoint",
        f"{folder.name}/checkpoint-2",
    ]


def assert_same_end(folder: Path) -> None:
    """The run in ``again`` made steps 3 and 4, with the losses of the straight run, and has its weights."""
    expected = expected_of(folder)
    losses, weights = make.losses(Path("again")), make.weights(Path("again"))
    assert losses == pytest.approx({step: expected["losses"][step] for step in ("3", "4")}, abs=1e-4)
    assert weights.keys() == expected["weights"].keys()
    for name, numbers in weights.items():
        assert numbers == pytest.approx(expected["weights"][name], abs=1e-4), name
    assert (Path("again") / "checkpoint-4" / checkpoint.MARKER).is_file()


@pytest.mark.parametrize("copied", OF_ONE, indirect=True)
def test_a_run_goes_on_from_it(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, if masks of dropout are drawn as they were then: by torch."""
    monkeypatch.setattr(Device, "draws_masks_on_host", False)
    metrics = load_recipe(expected_of(copied)["recipe"]).main(resuming(copied))
    assert metrics["train_steps"] == 4
    assert_same_end(copied)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("copied", OF_TWO, indirect=True)
def test_two_ranks_go_on_from_it(copied: Path) -> None:
    """Each with its own random generator, which draws the dropout: as it was then, by torch."""
    recipe = REPOSITORY / "recipes" / expected_of(copied)["recipe"] / "run.py"
    then = copied.parent / "then.py"
    then.write_text(
        f"import runpy, sys\nsys.path.insert(0, {str(REPOSITORY)!r})\nfrom core.device import Device\n"
        f"Device.draws_masks_on_host = False\nrunpy.run_path({str(recipe)!r}, run_name='__main__')\n"
    )
    make.start(then, 2, resuming(copied), copied.parent)
    assert_same_end(copied)


@pytest.mark.parametrize("copied", OF_TWO, indirect=True)
def test_one_process_goes_on_from_one_of_two(copied: Path) -> None:
    """Without the other rank's generator its dropout is another one."""
    metrics = load_recipe(expected_of(copied)["recipe"]).main([*resuming(copied), "--gradient_accumulation_steps", "2"])
    assert metrics["train_steps"] == 4
    expected = {step: loss for step, loss in expected_of(copied)["losses"].items() if int(step) > 2}
    assert make.losses(Path("again")) == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("name", RUNS)
def test_it_is_as_it_was_saved(name: str) -> None:
    folder = KEPT / name / "checkpoint-2"
    assert checkpoint.problem(folder) is None
    marker = json.loads((folder / checkpoint.MARKER).read_text())
    assert f"format_{marker['format']}" == name.partition("/")[0]
    assert {path.name for path in folder.iterdir()} == {*marker["files"], checkpoint.MARKER}


def test_there_is_one_of_each_recipe_and_format() -> None:
    """A new format comes with ``python -m tests.checkpoints.make tests/checkpoints/format_<number>``."""
    for number in range(1, checkpoint.FORMAT + 1):
        runs = [path.parent for path in KEPT.glob(f"format_{number}/*/expected.json")]
        recipes = {expected_of(run)["recipe"] for run in runs}
        assert recipes == {path.parent.name for path in (REPOSITORY / "recipes").glob("*/run.py")}, f"format {number}"
        assert any((run / "checkpoint-2" / "rank-1.json").is_file() for run in runs)
        assert any((run / "checkpoint-2" / "adapter_config.json").is_file() for run in runs)
        assert any((run / "checkpoint-2" / "ema.safetensors").is_file() for run in runs)


def test_git_gives_every_byte_back(tmp_path: Path) -> None:
    """Also to users whose git writes lines as Windows has them."""
    shutil.copytree(KEPT, tmp_path / "one" / "checkpoints", ignore=shutil.ignore_patterns("__pycache__"))
    git = ["git", "-c", "core.autocrlf=true", "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "--quiet"], ["add", "--all"], ["commit", "--quiet", "--message", "all"]):
        subprocess.run([*git, "-C", str(tmp_path / "one"), *command], check=True, capture_output=True)
    subprocess.run([*git, "clone", "--quiet", str(tmp_path / "one"), str(tmp_path / "two")], check=True)
    for path in (path for path in KEPT.rglob("*") if path.is_file() and re.search("/format_", path.as_posix())):
        assert (tmp_path / "two" / "checkpoints" / path.relative_to(KEPT)).read_bytes() == path.read_bytes(), path
