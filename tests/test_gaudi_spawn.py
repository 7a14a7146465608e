"""The command line: arguments arrive unchanged, errors are one line, help is quick."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import gaudi_spawn
from core.errors import UserError
from tests.conftest import REPOSITORY

SPAWN = str(REPOSITORY / "gaudi_spawn.py")
OWN = ["--world_size", "--world_size=4", "--use_mpi", "--hostfile", "-h", "--help", "--", "-", "", " ", "a b", "3"]


def spawn(*argv: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SPAWN, *argv], capture_output=True, text=True, cwd=cwd, timeout=60)


@pytest.fixture
def echo(tmp_path: Path) -> str:
    (tmp_path / "echo.py").write_text("import json, os, sys\nprint(json.dumps([os.environ['RANK'], *sys.argv[1:]]))\n")
    return str(tmp_path / "echo.py")


def test_arguments_arrive_unchanged(echo):
    """Spaces, quotes, line breaks, nothing at all, shells' and the launcher's own words."""
    argv = ["two words", "it's", '"quoted"', "line\nbreak", "$HOME `x` ; | *", "\\", "é", *OWN]
    done = spawn("--world_size", "1", echo, *argv)
    assert json.loads(done.stdout) == ["0", *argv], done.stderr


@settings(max_examples=60, deadline=None)
@given(argv=st.lists(st.sampled_from(OWN) | st.text(max_size=8), max_size=6))
@example(argv=["--", "--"])
@example(argv=["x", "--", "--world_size", "2"])
def test_any_arguments_reach_the_runner(argv):
    seen = {}

    class Runner:
        def __init__(self, commands, **options):
            seen.update(options, commands=commands)

        def run(self):
            return 5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gaudi_spawn, "DistributedRunner", Runner)
        with pytest.raises(SystemExit) as left:
            gaudi_spawn.main(["--use_deepspeed", "--world_size", "8", "--grace_seconds", "90", "train.py", *argv])
    assert left.value.code == 5
    assert seen.pop("commands") == [["train.py", *argv]]
    assert seen == {
        "world_size": 8, "hostfile": None, "use_mpi": False, "use_deepspeed": True, "master_port": 29500,
        "grace_seconds": 90.0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "training_script"),
        (["--world_size", "x", "a.py"], "--world_size"),
        (["--world", "2", "a.py"], "--world"),
        (["--world_size", "0", SPAWN], "--world_size is 0"),
        (["--grace_seconds", "nan", SPAWN], "--grace_seconds is nan"),
        (["no_such_script.py", "--x"], "no training script 'no_such_script.py'"),
        (["--hostfile", "nowhere", "--use_deepspeed", SPAWN], "--hostfile: nowhere cannot be read"),
        (["--use_mpi", "--use_deepspeed", SPAWN], "two launchers"),
    ],
)
def test_an_error_is_one_line(argv, message, tmp_path):
    done = spawn(*argv, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""


def test_help_is_quick_and_loads_no_torch():
    started = time.monotonic()
    assert "--use_deepspeed" in spawn("--help").stdout
    assert time.monotonic() - started < 1
    code = "import sys, gaudi_spawn; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.stdout == "False\n"


def test_help_names_every_flag():
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(SystemExit):
        gaudi_spawn.main(["--help"])
    for flag in ("--world_size", "--hostfile", "--use_mpi", "--use_deepspeed", "--master_port", "--grace_seconds"):
        assert flag in out.getvalue()


@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_published_command_starts_a_recipe(elsewhere, tmp_path):
    """From this repository's folder, and from another one by absolute paths; the recipe's own line comes through."""
    script = "recipes/summarization/run.py"
    argv = [str(REPOSITORY / script) if elsewhere else script, "--gaudi_config", "gaudi_configs/t5.json", "--no_such"]
    done = spawn("--world_size", "1", "--use_deepspeed", *argv, cwd=tmp_path if elsewhere else REPOSITORY)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown flag --no_such")


def test_an_exit_code_is_the_scripts(tmp_path):
    (tmp_path / "fail.py").write_text("import sys; sys.exit(75)")
    assert spawn("fail.py", cwd=tmp_path).returncode == 75
    with pytest.raises(UserError):
        gaudi_spawn.main([])
