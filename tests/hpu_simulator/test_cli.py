"""The command: strict options, and a program that runs as Python itself would run it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from hpu_simulator import __main__ as cli
from hpu_simulator import build, settings
from tests.conftest import REPOSITORY

SHOW = """
import os, sys
print(sys.argv, __name__, sys.path[0], os.path.abspath(__file__), sys.flags.optimize)
print({name: value for name, value in sorted(os.environ.items()) if name.startswith("HPU_SIMULATOR")})
print(os.environ["PYTHONPATH"].split(os.pathsep)[0] if "PYTHONPATH" in os.environ else None)
"""


def run(*words: str, cwd: Path, python: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HPU_")}
    clean |= {"PYTHONPATH": str(REPOSITORY)} | environ
    command = [sys.executable, *python, "-m", "hpu_simulator", *words]
    return subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=100)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "no script given"),
        (["--mode", "compute"], "no script given"),
        (["missing.py"], "no file 'missing.py', and no program of that name on PATH"),
        (["./missing.py"], "no file './missing.py'"),
        (["-m"], "-m needs the name of a module"),
        (["--gen", "gaudi", "show.py"], "unrecognized arguments: --gen"),
        (["--unknown", "show.py"], "unrecognized arguments: --unknown"),
        (["--generation", "gaudi4", "show.py"], "choose from"),
        (["--generation", "show.py"], "choose from"),
        (["--mode"], "expected one argument"),
        (["--devices", "0", "show.py"], "1 to 127"),
        (["--install", "--uninstall"], "stand alone"),
        (["--install", "show.py"], "stand alone"),
        (["sh"], "is not a Python program"),
    ],
)
def test_what_is_wrong_is_one_line_and_2(words: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    done = run(*words, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("hpu_simulator: ")
    assert said in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.processes
def test_a_script_is_run_as_python_runs_it(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "show.py").write_text(SHOW)
    words = ["folder/show.py", "--mode", "its own", "-m", ""]
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    plain = [sys.executable, "-O", *words]
    alone = subprocess.run(plain, cwd=tmp_path, env=clean, capture_output=True, text=True).stdout.splitlines()
    done = run("--generation", "gaudi3", "--devices=8", "--json", "a.json", *words, cwd=tmp_path, python=("-O",))
    assert done.stderr == ""
    first, variables, path = done.stdout.splitlines()
    assert first == alone[0]
    assert eval(variables) == {
        "HPU_SIMULATOR": "gaudi3",
        "HPU_SIMULATOR_DEVICES": "8",
        "HPU_SIMULATOR_JSON": str(tmp_path / "a.json"),
        "HPU_SIMULATOR_MODE": "compute",
    }
    assert path == str(settings.BRIDGE)


@pytest.mark.processes
def test_modules_programs_on_path_and_folders_run_too(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    assert run("-m", "show", "x", cwd=tmp_path).stdout.startswith(f"['{tmp_path / 'show.py'}', 'x'] __main__")
    (tmp_path / "bin").mkdir()
    for name, head in (
        ("direct", "#!/usr/bin/env python3\n"),
        ("longpath", "#!/bin/sh\n'''exec' python \"$0\" \"$@\"\n' '''\n"),
    ):
        program = tmp_path / "bin" / name
        program.write_text(head + SHOW)
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        done = run(name, "--flag", cwd=tmp_path, PATH=f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        assert done.stdout.startswith(f"['{program}', '--flag'] __main__"), done.stderr
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "__main__.py").write_text(SHOW)
    assert run("folder", cwd=tmp_path).stdout.startswith("['folder'] __main__")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("body", "status", "err"),
    [
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('mine')", 1, "mine\n"),
        ("import os; os.kill(os.getpid(), 15)", -15, ""),
    ],
)
def test_the_exit_status_is_the_programs(body: str, status: int, err: str, tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text(body)
    done = run("end.py", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (status, err)


@pytest.mark.processes
def test_a_traceback_shows_no_frame_of_the_simulator(tmp_path: Path) -> None:
    (tmp_path / "end.py").write_text("raise ValueError('mine')")
    done = run("end.py", cwd=tmp_path)
    alone = subprocess.run([sys.executable, "end.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.stderr == alone.stderr
    assert done.returncode == 1


@pytest.mark.processes
def test_the_environment_gives_what_the_options_do_not(tmp_path: Path) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    given = {"HPU_SIMULATOR": "gaudi", "HPU_SIMULATOR_DEVICES": "4", "HPU_SIMULATOR_MODE": ""}
    variables = eval(run("--devices", "2", "show.py", cwd=tmp_path, **given).stdout.splitlines()[1])
    assert variables == {"HPU_SIMULATOR": "gaudi", "HPU_SIMULATOR_DEVICES": "2", "HPU_SIMULATOR_MODE": "compute"}
    assert "gaudi4" in run("show.py", cwd=tmp_path, HPU_SIMULATOR="gaudi4").stderr
    assert "'HPU_SIMULATOR': 'gaudi2'" in run("show.py", cwd=tmp_path, HPU_SIMULATOR="").stdout


@pytest.mark.processes
def test_without_a_compiler_one_line_says_how_to_get_it(tmp_path: Path) -> None:
    """Nothing is built in an empty folder, and PATH has no compiler; a device that is built needs none."""
    (tmp_path / "show.py").write_text(SHOW)
    empty = {"TORCH_EXTENSIONS_DIR": str(tmp_path / "extensions"), "PATH": str(tmp_path)}
    done = run("show.py", cwd=tmp_path, **empty)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("hpu_simulator: ")
    assert "apt-get install" in done.stderr


def test_a_device_that_is_built_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise build.CompilerMissingError("no compiler")

    seen = []
    monkeypatch.setattr(build, "check_compiler", missing)
    monkeypatch.setattr(build, "load", lambda: seen.append(os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"]))
    before = dict(os.environ)
    cli.check_device()
    assert seen == ["0"]
    assert dict(os.environ) == before


def start_site(folder: Path, **environ: str) -> list[str]:
    """The path of a Python that reads the .pth files of a folder as it reads those of site-packages."""
    code = f"import site, sys; site.addsitedir({str(folder)!r}); print(sys.path)"
    clean = {name: value for name, value in os.environ.items() if not name.startswith("HPU_")} | environ
    done = subprocess.run([sys.executable, "-c", code], env=clean, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return eval(done.stdout)


def test_what_is_installed_works_with_the_variable_only(tmp_path: Path) -> None:
    before = start_site(tmp_path)
    assert str(tmp_path / cli.PTH) in cli.install(tmp_path, remove=False)
    assert start_site(tmp_path) == before
    assert start_site(tmp_path, HPU_SIMULATOR="") == before
    assert start_site(tmp_path, HPU_SIMULATOR="gaudi2") == [str(settings.BRIDGE), *before]
    assert "removed" in cli.install(tmp_path, remove=True)
    assert list(tmp_path.iterdir()) == []
    assert "not installed" in cli.install(tmp_path, remove=True)


def test_what_is_installed_imports_nothing(tmp_path: Path) -> None:
    cli.install(tmp_path, remove=False)
    (line,) = (tmp_path / cli.PTH).read_text().splitlines()
    code = f"import os, site, sys; before = set(sys.modules); exec({line!r}); print(set(sys.modules) - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


TRAIN = """import torch
import habana_frameworks.torch.core as htcore

model = torch.nn.Linear(16, 4).to("hpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(8):
    rows = 7 if step == 5 else 8
    loss = model(torch.ones(rows, 16).to("hpu")).sum()
    loss.backward()
    htcore.mark_step()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    htcore.mark_step()
    print(f"{loss.item():.3f}")
"""


@pytest.mark.compiles
@pytest.mark.processes
def test_an_odd_batch_and_a_read_in_every_step_are_reported_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    done = run("--json", "run.json", "--html", "run.html", "train.py", cwd=tmp_path, PT_HPU_LAZY_MODE="1")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 8, "stdout is the program's"
    written = json.loads((tmp_path / "run.json").read_text())
    assert written["steps"] == 8
    late, reads = written["findings"]
    assert late["title"] == "recompiles later: 1 new graph from new shapes after step 2"
    assert late["places"][0].startswith("train.py:8: step 5")
    assert "float32[7, 16]" in late["places"][0]
    assert reads["places"] == ["train.py:14: 1 per step"]
    assert (tmp_path / "run.html").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.compiles
@pytest.mark.processes
def test_started_by_a_launcher_each_rank_writes_and_the_first_one_prints(tmp_path: Path) -> None:
    """The launcher is found beside the interpreter, and does not report: nothing ran in it."""
    (tmp_path / "train.py").write_text(TRAIN)
    done = run("--json", "run.json", "torchrun", "--nproc_per_node", "2", "train.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("HPU simulator: gaudi2") == 1
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["run-rank0.json", "run-rank1.json"]


def test_the_help_says_where_the_report_goes(tmp_path: Path) -> None:
    done = run("--help", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    for word in ("stderr", "--install", "torchrun", "HPU_SIMULATOR=gaudi2", "--batch_flag", "FILE-rank<N>"):
        assert word in done.stdout.replace("FILE-\n                        rank<N>", "FILE-rank<N>")
