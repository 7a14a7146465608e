"""Where the ranks meet, before any collective: what cannot be reached is named, with host, port and interface.

A collective that cannot connect says only, after minutes, that it timed out. So the ranks first try the connections
that they are going to need, with short timeouts, over plain TCP.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import torch.distributed as dist

from core.errors import UserError, logger

REACH_S = 20.0  # a slow resolver comes on top; an error is due within 30 s
PEER_S = 5.0
WARN_S = 25.0
_meetings = itertools.count()


def meet(rank: int, world_size: int, timeout_s: float, reach_s: float = REACH_S) -> dist.Store:
    """Return the store in which all ranks have met, after each machine was reached from each other one.

    Who answers nothing for ``reach_s`` seconds at ``MASTER_ADDR:MASTER_PORT``, or between two machines, is an error. A
    rank that has merely not come yet may still be importing: it is waited for, ``timeout_s`` seconds, with a warning
    on rank 0 that names it before half a minute is over. Unless the environment chooses one, gloo is told to use the
    interface that leads to the master: its own choice, by this machine's name, is often the loopback.

    Raises:
        UserError: one line with host, port and interface of what could not be reached.
    """
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if missing:
        raise UserError(
            f"WORLD_SIZE is {world_size}, but {' and '.join(missing)} not set; use gaudi_spawn.py or torchrun"
        )
    host, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise UserError(f"the environment has MASTER_PORT={port}, which is no port; give one from 1 to 65535")
    named = _named_interface()
    tcp = _open_store(rank, host, int(port), timeout_s, reach_s)
    interface, address = _way_to(host, int(port))
    if named:
        interface, address = named, _addresses()[named][0]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    # A second meeting of the same processes must not find the first one's entries.
    store = dist.PrefixStore(f"gaudi_recipes/{next(_meetings)}", tcp)
    try:
        with socket.create_server((address, 0), family=_family(address), backlog=1024) as server:
            mine = {"host": socket.gethostname(), "address": address, "port": server.getsockname()[1]}
            store.set(f"at/{rank}", json.dumps({**mine, "interface": interface}))
            _wait_for_all(store, rank, world_size, timeout_s)
            _reach_each_other(store, rank, world_size)
    except RuntimeError as error:  # the store's own: rank 0, or the launcher that hosts it, has ended
        raise UserError(f"{host}:{port} (interface {interface}) was lost: {_first_line(error)}; see rank 0") from None
    return store


def _open_store(rank: int, host: str, port: int, timeout_s: float, reach_s: float) -> dist.TCPStore:
    serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun serves it itself
    if not serves:
        _reach_master(rank, host, port, timeout_s, min(reach_s, timeout_s))
    patience = min(reach_s, timeout_s)
    made: list[dist.TCPStore | RuntimeError] = []

    def open_it() -> None:
        try:
            seconds = timedelta(seconds=patience)
            made.append(dist.TCPStore(host, port, None, serves, seconds, wait_for_workers=False, multi_tenant=True))
        except RuntimeError as error:
            made.append(error)

    # In a thread: talking to a program that accepts and says nothing, the store waits without a limit.
    opener = threading.Thread(target=open_it, daemon=True)
    opener.start()
    opener.join(patience + 1)
    if made and isinstance(made[0], dist.TCPStore):
        made[0].set_timeout(timedelta(seconds=timeout_s))
        return made[0]
    cause = _first_line(made[0]) if made else "something answers there, but not as rank 0 does"
    if "EADDRINUSE" in cause or "in use" in cause:
        cause = "another program uses the port; choose another MASTER_PORT"
    raise UserError(f"rank {rank} cannot meet the others at {_place(host, port)}: {cause}")


def _reach_master(rank: int, host: str, port: int, timeout_s: float, reach_s: float) -> None:
    """Connect once; a refusal is no answer, unless it is this machine's own, where rank 0 may still be importing."""
    began = time.monotonic()
    while True:
        left = reach_s - (time.monotonic() - began)
        failure = _connect(host, port, max(left, 1.0))
        if failure is None:
            return
        patience = timeout_s if isinstance(failure, ConnectionRefusedError) and _is_here(host, port) else reach_s
        if time.monotonic() - began >= patience:
            why = f"{_reason(failure)}, for {time.monotonic() - began:.0f} s"
            mend = "start rank 0 there, open the port, or correct MASTER_ADDR and MASTER_PORT"
            raise UserError(f"rank {rank} cannot reach rank 0 at {_place(host, port)}: {why}; {mend}")
        time.sleep(0.1)


def _wait_for_all(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    began = time.monotonic()
    names = [f"at/{number}" for number in range(world_size)]
    while True:
        left = timeout_s - (time.monotonic() - began)
        try:
            store.wait(names, timedelta(seconds=max(min(WARN_S, left), 0.01)))
            return
        except RuntimeError:
            absent = [number for number, name in enumerate(names) if not store.check([name])]
        said = f"{len(absent)} of {world_size} ranks not here yet: {', '.join(map(str, absent[:20]))}"
        if absent and time.monotonic() - began >= timeout_s:
            raise UserError(
                f"{said}{' ...' * (len(absent) > 20)}, after --ddp_timeout {timeout_s:.0f} s; see their output"
            )
        if absent and rank == 0:
            logger.warning(f"{said}; waiting, {time.monotonic() - began:.0f} s so far")


def _reach_each_other(store: dist.Store, rank: int, world_size: int) -> None:
    """Let the first rank of each machine connect to those of all others, and all ranks know how that went."""
    everyone = [json.loads(store.get(f"at/{number}")) for number in range(world_size)]
    first: dict[tuple[str, str], int] = {}
    for number, one in enumerate(everyone):
        first.setdefault((one["host"], one["address"]), number)
    leaders, mine = list(first.values()), everyone[rank]
    if len(leaders) == 1:
        return
    if rank in leaders:
        store.set(f"said/{rank}", _first_blocked(rank, mine, {n: everyone[n] for n in leaders if n != rank}))
    store.wait([f"said/{number}" for number in leaders], timedelta(seconds=3 * PEER_S))
    said = [store.get(f"said/{number}").decode() for number in leaders]
    if any(said):
        store.set(f"read/{rank}", "")
        if rank == 0:  # serves the store, which the others still have to read
            _linger(store, world_size)
        raise UserError(next(filter(None, said)))


def _first_blocked(rank: int, mine: dict, others: dict[int, dict]) -> str:
    """Try all at once, from this rank's own address; the line that names the first that fails, or an empty text."""
    with ThreadPoolExecutor(min(len(others), 64)) as pool:
        tries = {
            number: pool.submit(_connect, one["address"], one["port"], PEER_S, mine["address"])
            for number, one in others.items()
        }
    for number, one in others.items():
        failure = tries[number].result()
        if failure is not None:
            here = f"{mine['host']} (interface {mine['interface']}, {mine['address']})"
            there = f"{one['host']} at {one['address']}:{one['port']} (interface {one['interface']})"
            mend = "open the network between them, or name another interface in GLOO_SOCKET_IFNAME, HCCL_SOCKET_IFNAME"
            return f"rank {rank} on {here} cannot reach rank {number} on {there}: {_reason(failure)}; {mend}"
    return ""


def _linger(store: dist.Store, world_size: int) -> None:
    with contextlib.suppress(RuntimeError):  # one that has ended knows enough
        store.wait([f"read/{number}" for number in range(world_size)], timedelta(seconds=PEER_S))


def _connect(host: str, port: int, seconds: float, source: str | None = None) -> OSError | None:
    """Connect and hang up; returns what went wrong, if anything did."""
    try:
        socket.create_connection((host, port), seconds, source and (source, 0)).close()
    except OSError as error:  # gaierror and TimeoutError are among them
        return error
    return None


def _named_interface() -> str | None:
    """The interface that the environment chooses: gloo's by its name, or else HCCL's, by the beginnings of names.

    Raises:
        UserError: this machine has no such interface with an address.
    """
    here = list(_addresses())
    matching = []
    for variable, exact in (("GLOO_SOCKET_IFNAME", True), ("HCCL_SOCKET_IFNAME", False)):
        asked = tuple(part for part in os.environ.get(variable, "").split(",") if part and part[0] not in "^=")
        found = [name for name in here if (name in asked if exact else name.startswith(asked))] if asked else []
        if asked and not found:
            value = os.environ[variable]
            raise UserError(f"{variable}={value}: this machine's interfaces with an address are {', '.join(here)}")
        matching += found
    return matching[0] if matching else None


def _addresses() -> dict[str, list[str]]:
    """IP addresses of this machine's interfaces, by name; those of version 4 first."""
    import psutil

    kinds = (socket.AF_INET, socket.AF_INET6)
    found = {
        name: [one.address for kind in kinds for one in all_of_them if one.family == kind]
        for name, all_of_them in psutil.net_if_addrs().items()
    }
    return {name: addresses for name, addresses in found.items() if addresses}


def _way_to(host: str, port: int) -> tuple[str, str]:
    """Interface and own address that packets to ``host`` leave by: connecting a UDP socket sends none, but decides."""
    try:
        family, _, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            own = probe.getsockname()[0]
    except OSError:
        return f"none of {', '.join(_addresses())}", "no route"
    return next((name for name, mine in _addresses().items() if own in mine), "unknown"), own


def _is_here(host: str, port: int) -> bool:
    return _way_to(host, port)[1] in {entry[4][0] for entry in socket.getaddrinfo(host, port)}


def _place(host: str, port: int) -> str:
    interface, own = _way_to(host, port)
    return f"{host}:{port} (from {socket.gethostname()}, interface {interface}, {own})"


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _reason(error: OSError) -> str:
    if isinstance(error, TimeoutError):
        return "no answer"
    return (error.strerror or str(error)).lower()


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
