"""Two hosts, here two network namespaces joined by a cable: torchrun, DeepSpeed's launcher and mpirun over both."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.conftest import REPOSITORY

TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "mpirun", "pdsh")
PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
MISSING = [tool for tool in TOOLS if shutil.which(tool, path=PATH) is None]
FLAGS = ["--use_deepspeed", "--use_mpi"]
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PROGRAM = """
import os, signal, sys, time
import torch
import torch.distributed as dist

here = os.popen("ip -4 -o addr show scope global").read().split()[3].partition("/")[0]
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank)])
dist.all_reduce(total)
stop = []
if sys.argv[1:] == ["save"]:
    signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
text = f"host {here} rank {rank} local {os.environ['LOCAL_RANK']} sum {total.item():g} {sys.argv[1:]}"
os.write(1, f"{text}\\n".encode())  # at once: torchrun's ranks share a pipe, and print sends the end of a line later
if sys.argv[1:] == ["fail"] and rank == 3:
    raise RuntimeError("the cause")
if sys.argv[1:] in (["fail"], ["wait"]):
    time.sleep(300)
if sys.argv[1:] == ["save"]:
    while not stop:
        time.sleep(0.1)
    time.sleep(2)
    open(f"saved-{rank}", "w").close()
    os._exit(75)  # a thread of gloo's may abort an interpreter that ends in the usual way
for number in range(0 if sys.argv[1:] == ["short"] else 20):
    print(str(rank) * 20_000)
dist.barrier()
dist.destroy_process_group()
"""
SSHD = """
Port 22
HostKey {folder}/host_key
PidFile none
AuthorizedKeysFile {folder}/user_key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
"""
SSH = """
IdentityFile {folder}/user_key
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
GlobalKnownHostsFile /dev/null
LogLevel ERROR
BatchMode yes
"""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(bool(MISSING), reason=f"not on the PATH: {' '.join(MISSING)}"),
    pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="network namespaces need root"),
]


class Hosts(NamedTuple):
    """Two namespaces, a folder that both see, and the environment in which ssh reaches either."""

    names: tuple[str, str]
    folder: Path
    environment: dict[str, str]

    def start(self, host: int, *command: str | Path) -> subprocess.Popen:
        argv = ["ip", "netns", "exec", self.names[host], *map(str, command)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(argv, env=self.environment, cwd=self.folder, **pipes)

    def spawn(self, *flags: str) -> subprocess.Popen:
        """Start the program on two ranks per host, from the first host."""
        hostfile = ["--hostfile", str(self.folder / "hostfile")]
        return self.start(0, sys.executable, REPOSITORY / "gaudi_spawn.py", *hostfile, *flags)

    def ranks(self) -> list[psutil.Process]:
        """Processes of the program that run on either host."""
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if str(self.folder / "program.py") in (process.info["cmdline"] or []):
                found.append(process)
        return found

    def are_idle_within(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while self.ranks() and time.monotonic() < end:
            time.sleep(0.2)
        return not self.ranks()


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, env={"PATH": PATH})


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    folder, names = tmp_path_factory.mktemp("hosts"), (f"gr{os.getpid()}a", f"gr{os.getpid()}b")
    servers: list[subprocess.Popen] = []
    try:
        try:
            for name in names:
                ip("netns", "add", name)
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip("link", "add", "cable", "netns", names[0], "type", "veth", "peer", "name", "cable", "netns", names[1])
        prepare(folder)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            for device in ("cable", "lo"):
                ip("-n", name, "link", "set", device, "up")
            own = 'mount -t tmpfs tmpfs /run && mkdir -m 755 /run/sshd && exec "$0" -D -e -f "$1"'  # seen by sshd only
            sshd = ["sh", "-c", own, shutil.which("sshd", path=PATH), str(folder / "sshd_config")]
            servers.append(subprocess.Popen(["ip", "netns", "exec", name, *sshd], stderr=subprocess.DEVNULL))
            answers = ["bash", "-c", f"until (exec 3<>/dev/tcp/{address}/22) 2>/dev/null; do sleep 0.1; done"]
            subprocess.run(["ip", "netns", "exec", name, *answers], check=True, timeout=20)
        environment = {
            **os.environ, "PATH": f"{folder}:{PATH}", "GLOO_SOCKET_IFNAME": "cable", "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        yield Hosts(names, folder, environment)
    finally:
        for server in servers:
            server.kill()
            server.wait()
        for name in names:
            ip("netns", "del", name, check=False)  # and the cable with it


def prepare(folder: Path) -> None:
    """Write keys, configurations, the program, and an ``ssh`` that uses them and not the user's."""
    for key in ("host_key", "user_key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    (folder / "sshd_config").write_text(SSHD.format(folder=folder))
    (folder / "ssh_config").write_text(SSH.format(folder=folder))
    (folder / "program.py").write_text(PROGRAM)
    (folder / "hostfile").write_text("# both\n" + "".join(f"{address} slots=2\n" for address in ADDRESSES))
    (folder / "ssh").write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/ssh_config "$@"\n')
    (folder / "ssh").chmod(0o755)


@pytest.fixture(autouse=True)
def _nothing_left(hosts: Hosts) -> Iterator[None]:
    yield
    left = hosts.ranks()
    for process in left:
        process.kill()
    assert not left


def finish(process: subprocess.Popen, seconds: float) -> tuple[int, str, str]:
    """Wait for a launcher; one that does not end in time is killed, and the test fails with what it said."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as error:
        process.kill()
        pytest.fail(f"still running after {seconds} s:\n{error.stdout}\n{error.stderr}")
    return process.returncode, out, err


def wait_for_ranks(launcher: subprocess.Popen) -> None:
    """Read until all four ranks have met."""
    met = 0
    while met < 4:
        line = launcher.stdout.readline()
        assert line, launcher.stderr.read()
        met += "host 10.77" in line


def lines_of(out: str) -> list[str]:
    return sorted(line.partition("host ")[2] for line in out.splitlines() if "host 10.77" in line)


def expected(arguments: list[str]) -> list[str]:
    return [f"{ADDRESSES[rank // 2]} rank {rank} local {rank % 2} sum 6 {arguments}" for rank in range(4)]


def test_torchrun_on_each_host(hosts):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "2"]
    meet = ["--master_addr", ADDRESSES[0], "--master_port", "29500"]
    program = hosts.folder / "program.py"
    nodes = [hosts.start(node, *torchrun, *meet, "--node_rank", str(node), program, "short") for node in (0, 1)]
    done = [finish(node, 90) for node in nodes]
    assert [code for code, _, _ in done] == [0, 0], done
    assert lines_of(done[0][1] + done[1][1]) == expected(["short"])


@pytest.mark.parametrize("flag", FLAGS)
def test_a_hostfile(hosts, flag):
    """Four ranks meet; arguments arrive unchanged through ssh and its shell; lines are whole, long ones too."""
    arguments = ["two words", 'it\'s "$HOME" `x`; *', "", "line\nbreak", "--world_size=3"]
    code, out, err = finish(hosts.spawn(flag, str(hosts.folder / "program.py"), *arguments), 120)
    assert code == 0, err
    assert lines_of(out) == expected(arguments)
    for rank in range(4):
        assert out.splitlines().count(f"[rank {rank}] " + str(rank) * 20_000) == 20


@pytest.mark.parametrize("flag", FLAGS)
def test_a_rank_that_fails_ends_both_hosts(hosts, flag):
    code, _, err = finish(hosts.spawn(flag, str(hosts.folder / "program.py"), "fail"), 120)
    assert code != 0
    assert "rank 3 failed first" in err
    assert "RuntimeError: the cause" in err[err.index("rank 3 failed first") :]


@pytest.mark.parametrize("flag", FLAGS)
def test_ranks_on_both_hosts_may_save_after_a_signal(hosts, flag):
    launcher = hosts.spawn(flag, str(hosts.folder / "program.py"), "save")
    wait_for_ranks(launcher)
    launcher.terminate()
    code, _, err = finish(launcher, 40)
    assert code == (75 if flag == "--use_mpi" else 128 + signal.SIGTERM), err
    assert hosts.are_idle_within(20)
    for rank in range(4):
        (hosts.folder / f"saved-{rank}").unlink()


@pytest.mark.parametrize("flag", FLAGS)
def test_a_launcher_that_is_killed_leaves_nothing_on_either_host(hosts, flag):
    launcher = hosts.spawn(flag, str(hosts.folder / "program.py"), "wait")
    wait_for_ranks(launcher)
    assert len(hosts.ranks()) >= 4
    launcher.kill()
    assert hosts.are_idle_within(30)
    finish(launcher, 10)
