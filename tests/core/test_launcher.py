"""The launcher before anything starts: hostfiles, ports, commands, contradictions, and each engine's command line."""

from __future__ import annotations

import inspect
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from core import launcher
from core.errors import UserError
from core.launcher import DistributedRunner, claim, read_hostfile


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train script.py"
    path.write_text("import os, sys\nprint(os.environ['RANK'], os.environ['MASTER_PORT'], sys.argv[1:])\n")
    return str(path)


def hostfile(folder: Path, text: str) -> Path:
    path = folder / "hosts"
    path.write_text(text)
    return path


@pytest.fixture
def busy_port():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken.getsockname()[1]


def refusal(*args, **kwargs) -> str:
    with pytest.raises(UserError) as error:
        DistributedRunner(*args, **kwargs).run()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_published_constructor():
    names = "command_list world_size hostfile use_mpi use_deepspeed master_port use_env map_by multi_hls".split()
    parameters = inspect.signature(DistributedRunner).parameters
    assert list(parameters) == [*names, "grace_seconds"]
    assert parameters["master_port"].default == 29500
    assert parameters["map_by"].default == "socket"
    assert DistributedRunner().run() == 0  # nothing to do


def test_the_published_use(script, tmp_path, monkeypatch, capfd):
    """One string per command, split; commands run one after the other."""
    monkeypatch.chdir(tmp_path)
    os.rename(script, "train.py")
    commands = ["train.py --arg '1 2' --deepspeed x.json", ["train.py", "a b", ""]]
    assert DistributedRunner(command_list=commands, world_size=1, use_deepspeed=True, use_env=True).run() == 0
    out = [re.sub(r" \d{5} ", " ", line) for line in capfd.readouterr().out.splitlines()]
    assert out == ["0 ['--arg', '1 2', '--deepspeed', 'x.json']", "0 ['a b', '']"]


def test_the_first_command_that_fails_is_the_last(tmp_path, capfd):
    path = tmp_path / "fail.py"
    path.write_text("import sys; print('ran'); sys.exit(7)")
    assert DistributedRunner([[str(path)], [str(path)]]).run() == 7
    assert capfd.readouterr().out == "ran\n"


def test_multi_hls_is_said_to_be_deprecated_once(caplog):
    for _ in range(2):
        DistributedRunner(multi_hls=True)
    assert [record.message for record in caplog.records] == ["multi_hls is deprecated and has no effect; use hostfile"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a slots=2\nb\n", r"line 2: 'b' is not 'host slots=N'"),
        ("a slots=0\n", r"line 1: 'a slots=0' is not"),
        ("a slots=two\n", r"line 1"),
        ("a slots=2 max_slots=4\n", r"line 1"),
        ("a slots=2\n\n# c\na slots=3\n", r"line 4: a is there already"),
        ("# nothing\n\n", r"names no host"),
    ],
)
def test_a_bad_hostfile_is_one_error_with_the_line(tmp_path, text, message):
    assert re.search(message, refusal([], hostfile=hostfile(tmp_path, text), use_deepspeed=True))


def test_a_hostfile(tmp_path):
    path = hostfile(tmp_path, "# two\n\n10.0.0.1  slots=8\n worker-1\tslots=4  # half\n")
    assert read_hostfile(path) == {"10.0.0.1": 8, "worker-1": 4}
    assert "cannot be read" in refusal([], hostfile=tmp_path / "none", use_deepspeed=True)


def test_contradictions(tmp_path, monkeypatch):
    path = hostfile(tmp_path, "a slots=2\nb slots=2\n")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    assert "--use_mpi and --use_deepspeed" in refusal(use_mpi=True, use_deepspeed=True)
    assert "torchrun" in refusal(hostfile=path)
    text = refusal(hostfile=path, use_mpi=True, world_size=3)
    assert "--world_size is 3" in text
    assert "has 4 slots" in text
    assert DistributedRunner(hostfile=path, use_mpi=True).world_size == 4
    assert DistributedRunner(hostfile=path, use_mpi=True, world_size=4).world_size == 4
    assert "--world_size is 0" in refusal(world_size=0)
    assert "--master_port is 70000" in refusal(master_port=70000)
    for seconds in (-1, float("inf"), float("nan")):
        assert f"--grace_seconds is {seconds}" in refusal(grace_seconds=seconds)


def test_missing_tools_are_named(monkeypatch, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "install OpenMPI" in refusal(use_mpi=True)
    assert "install pdsh" in refusal(use_deepspeed=True, hostfile=hostfile(tmp_path, "a slots=2\n"))
    monkeypatch.setattr(launcher.importlib.util, "find_spec", lambda _: None)
    assert "DeepSpeed is not installed" in refusal(use_deepspeed=True)


@pytest.mark.parametrize("command", ["no_such.py --x", "", [], ["."], "'open"])
def test_a_command_without_a_script(command):
    assert re.search("no training script|cannot be split", refusal([command]))


def test_an_explicit_port_is_honoured(script, capfd):
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    assert DistributedRunner([[script]], master_port=port).run() == 0
    assert f"0 {port} []" in capfd.readouterr().out


def test_an_explicit_port_in_use_is_refused_with_its_owner(script, busy_port):
    message = refusal([[script]], master_port=busy_port)
    assert f"--master_port {busy_port} is in use by pid {os.getpid()} (" in message
    assert Path(sys.executable).name in message or "python" in message


def test_a_port_that_another_launcher_has_claimed_is_left_alone():
    """Its rank 0 does not listen yet: probing alone would not see it."""
    port, lock = DistributedRunner().claim_port()
    with lock:
        assert 20_000 <= port < 29_400
        assert claim(port) is None
        assert "about to start" in refusal([], master_port=port)
    again = claim(port)
    assert again is not None
    again.close()


def test_over_machines_the_published_port_is_taken_if_it_is_free(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    runner = DistributedRunner(hostfile=hostfile(tmp_path, "a slots=2\nb slots=2\n"), use_mpi=True)
    monkeypatch.setattr(launcher, "claim", lambda port: socket.socket())
    port, lock = runner.claim_port()
    lock.close()
    assert port == 29500
    monkeypatch.setattr(launcher, "claim", lambda port: None if port == 29500 else socket.socket())
    port, lock = runner.claim_port()
    lock.close()
    assert port < 29_400


def test_an_ended_runs_connections_do_not_hold_a_port():
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        server.accept()[0].close()  # closed first on this side: it waits for stray packets for a minute
        client.close()
    lock = claim(port)
    assert lock is not None
    lock.close()


def built(monkeypatch, runner: DistributedRunner) -> tuple[list[str], dict[str, str]]:
    """The engine's command line and environment, instead of running it."""
    seen = []

    class Recorded:
        def __init__(self, *_, **options): ...

        def run(self, commands):
            seen.extend(commands)
            return 0

    monkeypatch.setattr(launcher, "Processes", Recorded)
    assert runner.run() == 0
    return seen[0]


@pytest.mark.parametrize(
    ("usable", "sockets", "ranks", "elements"), [(80, 2, 8, 10), (20, 2, 3, 5), (16, 1, 8, 2), (8, 2, 8, 1)]
)
def test_mpirun_binds_ranks_to_cores(monkeypatch, script, usable, sockets, ranks, elements):
    monkeypatch.setattr(launcher, "cores", lambda sockets_only=False, **k: sockets if k else usable)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    argv, _ = built(monkeypatch, DistributedRunner([[script]], world_size=ranks, use_mpi=True))
    text = " ".join(argv)
    options = f"--bind-to core --map-by socket:PE={elements} --rank-by slot --report-bindings"
    assert argv[0] == "mpirun"
    assert f"-n {ranks} {options}" in text
    assert "--allow-run-as-root" in argv


def test_mpirun_with_too_few_cores_or_another_mapping(monkeypatch, script):
    monkeypatch.setattr(launcher, "cores", lambda **k: 1 if k else 4)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    argv, _ = built(monkeypatch, DistributedRunner([[script]], world_size=8, use_mpi=True))
    assert "--bind-to none --oversubscribe" in " ".join(argv)
    argv, _ = built(monkeypatch, DistributedRunner([[script]], world_size=2, use_mpi=True, map_by="slot"))
    assert "--map-by slot:PE=2" in " ".join(argv)


def test_deepspeeds_launcher_is_told_the_hosts_and_the_first_of_them(monkeypatch, script, tmp_path):
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    path = hostfile(tmp_path, "first slots=2\nsecond slots=2\n")
    runner = DistributedRunner([[script, "a b"]], hostfile=path, use_deepspeed=True, master_port=23456)
    argv, _ = built(monkeypatch, runner)
    assert argv[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert f"--hostfile {path} --force_multi --no_local_rank --master_addr first --master_port 23456" in " ".join(argv)
    assert not re.search(r"[\s'\"$;&|<>*?]", "".join(argv[-2:])), "a remote shell would read it"


def test_what_travels_to_other_machines_is_no_secret(monkeypatch, script, tmp_path):
    import base64
    import json

    for name in ("PT_HPU_MAX_COMPOUND_OP_SIZE", "HABANA_API_TOKEN", "HF_TOKEN", "HCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "5")
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}")
    path = hostfile(tmp_path, "first slots=2\nsecond slots=2\n")
    argv, _ = built(monkeypatch, DistributedRunner([[script]], hostfile=path, use_mpi=True, grace_seconds=120))
    command, variables, grace = json.loads(base64.urlsafe_b64decode(argv[-1]))
    assert (command, grace) == ([script], 120)
    assert variables["MASTER_ADDR"] == "first"
    assert {name for name, value in variables.items() if value == "5"} == {
        "PT_HPU_MAX_COMPOUND_OP_SIZE", "HCCL_SOCKET_IFNAME"
    }  # fmt: skip


def test_importing_it_loads_the_standard_library_only():
    code = (
        "import sys; before = set(sys.modules); import core.launcher; "
        "new = {name.partition('.')[0] for name in set(sys.modules) - before}; "
        "print(new - set(sys.stdlib_module_names))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'core'}"
