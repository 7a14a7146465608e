"""Starts one process per device, on one machine or several: whole lines, signals passed on, nothing left behind."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path

if __name__ == "__main__":  # started by its path, under mpirun or deepspeed: the modules beside it are no packages
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from core.errors import UserError, warn_once
from core.processes import ENGINE_SIGNALS, KEEPER_SIGNALS, SAVING, SETTLE, Processes
from core.untrusted import read_text

# What the ranks on other machines get of this environment, unless they have their own. Tokens and keys are never among
# it, for it travels on a command line.
TRAVELS = ("DEEPSPEED_", "GC_", "GLOO_", "HABANA_", "HCCL_", "HPU_", "NCCL_", "OMP_", "PT_", "PYTHON", "TORCH")
# What mpirun, or else DeepSpeed's launcher, calls what recipes read.
ENGINE_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "LOCAL_SIZE"),
}


class _Unset(int):
    """The published default of a port that nobody asked for."""


DEFAULT_PORT = _Unset(29500)


class DistributedRunner:
    """Runs training scripts, one after the other, each as one process per device.

    Args:
        command_list: a string (``"train.py --flag value"``, split like a shell does but seen by none) or a list of
            arguments per script.
        world_size: processes; with a hostfile the sum of its slots.
        hostfile: lines ``host slots=N``; needs ``use_deepspeed`` (over pdsh) or ``use_mpi``.
        use_mpi: start and bind the processes by ``mpirun``.
        use_deepspeed: the scripts use DeepSpeed.
        master_port: port of the rendezvous. One that is not given is free on one machine, 29500 if possible on several.
        use_env: without effect: rank and world size are always in the environment.
        map_by: ``mpirun --map-by``, its first part.
        multi_hls: deprecated and without effect.
        grace_seconds: from SIGTERM, or the first rank's exit code 75, until ranks that still run are killed.

    Raises:
        UserError: what cannot work, before anything is started.
    """

    def __init__(
        self,
        command_list: Sequence[str | Sequence[str]] = (),
        world_size: int = 1,
        hostfile: str | os.PathLike | None = None,
        use_mpi: bool = False,
        use_deepspeed: bool = False,
        master_port: int = DEFAULT_PORT,
        use_env: bool = False,
        map_by: str = "socket",
        multi_hls: bool | None = None,
        grace_seconds: float = SAVING,
    ) -> None:
        if multi_hls is not None:
            warn_once("multi_hls is deprecated and has no effect; use hostfile")
        if use_mpi and use_deepspeed:
            raise UserError("--use_mpi and --use_deepspeed are two launchers; give one of them")
        if hostfile and not (use_mpi or use_deepspeed):
            raise UserError("--hostfile needs --use_deepspeed or --use_mpi; or start torchrun on every machine")
        if use_deepspeed and importlib.util.find_spec("deepspeed") is None:
            raise UserError("--use_deepspeed: DeepSpeed is not installed; pip install deepspeed (Gaudi: Habana's fork)")
        tool = "mpirun" if use_mpi else "pdsh" if hostfile else None
        if tool and shutil.which(tool) is None:
            package = "OpenMPI (openmpi-bin)" if use_mpi else "pdsh"
            raise UserError(f"{tool} is not on the PATH; install {package} on every machine")
        self.hosts = read_hostfile(hostfile) if hostfile else {}
        slots = sum(self.hosts.values())
        if world_size < 1 or (self.hosts and world_size not in (1, slots)):
            known = f"--hostfile {hostfile} has {slots} slots; leave it out" if self.hosts else "it is 1 or more"
            raise UserError(f"--world_size is {world_size}, but {known}")
        if not 1 <= master_port <= 65535:
            raise UserError(f"--master_port is {master_port}; give 1 to 65535, or leave it out for a free one")
        if not 0 <= grace_seconds < float("inf"):
            raise UserError(
                f"--grace_seconds is {grace_seconds}; give the seconds that ranks may need to save, 0 or more"
            )
        commands = [command_list] if isinstance(command_list, str) else command_list
        self.commands = [words(command) for command in commands]
        self.world_size, self.hostfile, self.master_port = slots or world_size, hostfile, master_port
        self.use_mpi, self.use_deepspeed, self.map_by, self.grace = use_mpi, use_deepspeed, map_by, grace_seconds

    def run(self) -> int:
        """Run the scripts until one fails; return the exit code of its first failing rank (128 + signal), else 0.

        Raises:
            UserError: the port asked for is in use.
        """
        port, lock = self.claim_port()
        with closing(lock):  # other launchers leave the port alone while this one runs
            for command in self.commands:
                if code := self.run_command(command, port):
                    return code
        return 0

    def claim_port(self) -> tuple[int, socket.socket]:
        """Return a port and what keeps other launchers off it. Whether a port is free elsewhere is not known here."""
        if not isinstance(self.master_port, _Unset):
            lock = socket.socket() if self.hosts else claim(self.master_port)
            if lock is None:
                raise UserError(
                    f"--master_port {self.master_port} is in use by {owner_of(self.master_port)}; "
                    "give another, or leave it out for a free one"
                )
            return self.master_port, lock
        # Below what the kernel gives to outgoing connections, and in no order that another program would try, so that
        # nothing takes the port between this probe and the moment when rank 0 listens, seconds later.
        likely = [DEFAULT_PORT] if self.hosts else []  # the one that firewalls between machines may know
        for port in [*likely, *random.SystemRandom().sample(range(20_000, 29_400), 500)]:
            if (lock := claim(port)) is not None:
                return int(port), lock
        raise UserError("no free port from 20000 to 29400; give --master_port")

    def run_command(self, command: list[str], port: int) -> int:
        """Run one script on all ranks, and return the exit code."""
        here = max(self.hosts.values(), default=self.world_size)
        threads = str(max(1, cores() // here))
        master = {"MASTER_ADDR": next(iter(self.hosts), "127.0.0.1"), "MASTER_PORT": str(port)}
        if self.use_mpi or self.hosts:
            travelling = {name: value for name, value in os.environ.items() if name.startswith(TRAVELS)}
            secret = re.compile("(?i)token|key|secret|passw|passph|credential")
            variables = {name: value for name, value in travelling.items() if not secret.search(name)}
            rank = keeper(command, master | {"OMP_NUM_THREADS": threads} | variables, self.grace)
            engine = self.mpirun(here) if self.use_mpi else self.deepspeed(master)
            signals = ENGINE_SIGNALS["mpirun" if self.use_mpi else "deepspeed"]
            job = Processes("engine", self.world_size, signals, grace=self.grace)
            return job.run([([*engine, *rank], dict(os.environ))])
        common = {"OMP_NUM_THREADS": threads, **os.environ, **master}
        size = str(self.world_size)
        common |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "LOCAL_SIZE": size}
        ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(self.world_size)]
        argv = [sys.executable, "-u", *command]
        return Processes("ranks", self.world_size, grace=self.grace).run([(argv, variables) for variables in ranks])

    def mpirun(self, here: int) -> list[str]:
        """The command that starts the ranks' keepers by MPI, bound to cores where there are enough."""
        sockets = cores(sockets=True) if self.map_by == "socket" else 1
        elements = cores() // sockets // -(-here // sockets)  # of the fullest socket: a rank does not span two
        bound = ["--bind-to", "core", "--map-by", f"{self.map_by}:PE={elements}", "--rank-by", "slot"]
        where = ["--hostfile", os.fspath(self.hostfile)] if self.hosts else []
        binding = [*bound, "--report-bindings"] if elements else ["--bind-to", "none", "--oversubscribe"]
        # A rank that fails does not end the others here: `Processes` does, after the grace that they may need.
        ends = ["--mca", "orte_abort_on_non_zero_status", "0", "--mca", "odls_base_sigkill_timeout", "2"]
        size = str(self.world_size)
        return ["mpirun", *where, "-n", size, *binding, *ends, "--allow-run-as-root", sys.executable]

    def deepspeed(self, master: dict[str, str]) -> list[str]:
        """The command that starts the ranks' keepers on the hosts by DeepSpeed's launcher."""
        options = ["--hostfile", os.fspath(self.hostfile), "--force_multi", "--no_local_rank"]
        options += ["--master_addr", master["MASTER_ADDR"], "--master_port", master["MASTER_PORT"]]
        # pdsh: no names of hosts before lines, and no questions on a signal
        return [sys.executable, "-m", "deepspeed.launcher.runner", *options, "--launcher_args=-N -b"]


def words(command: str | Sequence[str]) -> list[str]:
    """Split a command into arguments, the first of them a script that is there.

    Raises:
        UserError: it is empty, its quotes are open, or there is no such file.
    """
    try:
        argv = shlex.split(command) if isinstance(command, str) else [os.fspath(word) for word in command]
    except ValueError as error:
        raise UserError(f"the command {command!r} cannot be split: {error}") from None
    if not argv or not os.path.isfile(argv[0]):
        raise UserError(f"no training script {argv[0] if argv else ''!r} in {os.getcwd()}; give a Python file")
    return argv


def read_hostfile(path: str | os.PathLike) -> dict[str, int]:
    """Return each host's slots, in the order of the file: lines ``host slots=N``; empty ones and # comments are fine.

    Raises:
        UserError: a line is something else, names a host again, or there is none.
    """
    lines = read_text(path, "--hostfile").splitlines()
    hosts: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        match = re.fullmatch(r"([^\s=]+)\s+slots=([1-9]\d{0,5})", text)
        if text and not match:
            raise UserError(f"--hostfile {path}, line {number}: {line!r:.200} is not 'host slots=N'")
        if match and match[1] in hosts:
            raise UserError(f"--hostfile {path}, line {number}: {match[1]} is there already; add its slots up")
        if match:
            hosts[match[1]] = int(match[2])
    if not hosts:
        raise UserError(f"--hostfile {path} names no host; write lines 'host slots=N'")
    return hosts


def cores(sockets: bool = False) -> int:
    """Number of physical cores (or of their sockets) that this process may use."""
    found = set()
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    for cpu in usable:
        topology = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology")
        with suppress(OSError):
            package = (topology / "physical_package_id").read_text()
            found.add((package,) if sockets else (package, (topology / "core_id").read_text()))
    return len(found) or (1 if sockets else len(usable))


def claim(port: int) -> socket.socket | None:
    """Return a lock on a port that nothing listens on, or None. It ends with this process, however that ends."""
    lock = socket.socket(socket.AF_UNIX)
    try:
        if sys.platform == "linux":
            lock.bind(f"\0gaudi-recipes-port-{int(port)}")  # abstract: no file, and one per network, like the port
        for family in (socket.AF_INET, socket.AF_INET6):
            probe_port(family, port)
    except OSError:
        lock.close()
        return None
    return lock


def probe_port(family: int, port: int) -> None:
    """Listen on a port for a moment, as rank 0 will: an ended run's connections do not count.

    Raises:
        OSError: it is in use, or not for this user. A machine without IPv6 is fine.
    """
    try:
        probe = socket.socket(family)
    except OSError:
        return
    with probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        probe.bind(("", port))
        probe.listen()


def owner_of(port: int) -> str:
    """Name who holds a port, as far as this user may see it."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with suppress(OSError):
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
            inodes |= {f"socket:[{row[9]}]" for row in rows if row[1].endswith(f":{port:04X}") and row[3] == "0A"}
    for descriptor in Path("/proc").glob("[0-9]*/fd/*") if inodes else ():
        with suppress(OSError):
            if os.readlink(descriptor) in inodes:
                program = descriptor.parents[1].joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                return f"pid {descriptor.parents[1].name} ({program[:80]})"
    return "a process of another user, or by a run that is about to start"


def keeper(command: list[str], variables: dict[str, str], grace: float = SAVING) -> list[str]:
    """Arguments of Python that run one rank under mpirun or deepspeed: words that every shell leaves alone."""
    job = base64.urlsafe_b64encode(json.dumps([command, variables, grace]).encode()).decode()
    return [os.path.abspath(__file__), job]


def keep(job: str) -> int:
    """Run one rank with the environment that recipes read, whatever the engine calls it, and tell the launcher."""
    command, variables, grace = json.loads(base64.urlsafe_b64decode(job))
    env = variables | os.environ | {name: variables[name] for name in ("MASTER_ADDR", "MASTER_PORT")}
    for name, theirs in ENGINE_NAMES.items():
        env[name] = next(env[one] for one in (*theirs, name) if one in env)
    env["LOCAL_SIZE"] = env["LOCAL_WORLD_SIZE"]
    rank = Processes("keeper", int(env["WORLD_SIZE"]), KEEPER_SIGNALS, int(env["RANK"]), grace)
    code = rank.run([([sys.executable, "-u", *command], env)])
    if code and "OMPI_COMM_WORLD_RANK" not in env:
        time.sleep(SETTLE)  # DeepSpeed ends the others when this process ends: let them first end by themselves
    return code


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1]))
