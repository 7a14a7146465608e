"""Where the ranks meet, before any collective: what cannot be reached is named, with host, port and interface.

A collective that cannot connect says only, after minutes, that it timed out. So the ranks first try the connections
that they are going to need, with short timeouts, over plain TCP.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import json
import math
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
REFUSED_S = 300.0  # a cold file system can hold up rank 0's imports for minutes
TRIES_AT_ONCE = 64
_meetings = itertools.count()


def meet(rank: int, world_size: int, timeout_s: float, reach_s: float = REACH_S) -> dist.Store:
    """Return the store in which all ranks have met, after each machine was reached from each other one.

    Who answers nothing for ``reach_s`` seconds at ``MASTER_ADDR:MASTER_PORT``, or between two machines, is an error. A
    rank that has merely not come yet may still be importing: it is waited for, ``timeout_s`` seconds, with a warning
    on rank 0 that names it before half a minute is over. So is a rank 0 whose machine refuses the connection, with a
    warning on the rank that waits; one of another machine for ``REFUSED_S`` seconds at most. Unless the environment
    chooses one, gloo is told to use the interface that leads to the master, or on the master's own machine to the
    others: its own choice, by this machine's name, is often the loopback.

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
    interface, address = (named, _addresses()[named][0]) if named else _way_to(host, int(port))
    mine = {"host": socket.gethostname(), "interface": interface, "address": address}
    # A second meeting of the same processes must not find the first one's entries.
    store = dist.PrefixStore(f"gaudi_recipes/{next(_meetings)}", tcp)
    try:
        store.set(f"from/{rank}", json.dumps(mine))
        everyone = _wait_for_all(store, "from", rank, world_size, timeout_s)
        if not named:
            mine = _seen_from_outside(mine, everyone)
        with _listen(rank, mine) as server:
            store.set(f"at/{rank}", json.dumps({**mine, "port": server.getsockname()[1]}))
            _reach_each_other(store, rank, _wait_for_all(store, "at", rank, world_size, timeout_s))
    except RuntimeError as error:  # the store's own: rank 0, or the launcher that hosts it, has ended
        lost = f"{host}:{port} (interface {mine['interface']}) was lost"
        raise UserError(f"{lost}: {_first_line(error)}; see rank 0") from None
    if mine["interface"] in _addresses() and not os.environ.get("GLOO_SOCKET_IFNAME"):
        os.environ["GLOO_SOCKET_IFNAME"] = mine["interface"]
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
    """Connect once. A refusal comes from a machine that is there, where rank 0 may still be importing: it is awaited.

    Raises:
        UserError: no answer for ``reach_s`` seconds; or refusals only, for ``timeout_s``, from elsewhere `REFUSED_S`.
    """
    began = answered = warned = time.monotonic()
    while True:
        failure = _connect(host, port, max(reach_s - (time.monotonic() - answered), 1.0))
        if failure is None:
            return
        now, since, patience = time.monotonic(), answered, reach_s
        refused = isinstance(failure, ConnectionRefusedError)
        if refused:
            answered, since = now, began
            patience = timeout_s if _is_here(host, port) else min(timeout_s, REFUSED_S)
        why = f"{_reason(failure)}, for {now - since:.0f} s"
        if now - since >= patience:
            mend = "start rank 0 there, open the port, or correct MASTER_ADDR and MASTER_PORT"
            raise UserError(f"rank {rank} cannot reach rank 0 at {_place(host, port)}: {why}; {mend}")
        if refused and now - warned >= WARN_S:
            logger.warning(f"rank {rank} waits for rank 0 to open {_place(host, port)}: {why} so far")
            warned = now
        time.sleep(0.1)


def _wait_for_all(store: dist.Store, entry: str, rank: int, world_size: int, timeout_s: float) -> list[dict]:
    """What every rank, by number, has set as ``entry``."""
    began = time.monotonic()
    names = [f"{entry}/{number}" for number in range(world_size)]
    while True:
        left = timeout_s - (time.monotonic() - began)
        try:
            store.wait(names, timedelta(seconds=max(min(WARN_S, left), 0.01)))
            return [json.loads(text) for text in store.multi_get(names)]
        except RuntimeError:
            absent = [number for number, name in enumerate(names) if not store.check([name])]
        said = f"{len(absent)} of {world_size} ranks not here yet: {', '.join(map(str, absent[:20]))}"
        if absent and time.monotonic() - began >= timeout_s:
            raise UserError(
                f"{said}{' ...' * (len(absent) > 20)}, after --ddp_timeout {timeout_s:.0f} s; see their output"
            )
        if absent and rank == 0:
            logger.warning(f"{said}; waiting, {time.monotonic() - began:.0f} s so far")


def _seen_from_outside(mine: dict, everyone: list[dict]) -> dict:
    """This rank's entry, with an address that the other machines know.

    The master's own name often leads its machine to the loopback (Debian's /etc/hosts has it as 127.0.1.1), whatever it
    is elsewhere. Host names do not tell machines apart, as containers may share one; an address that is not the
    loopback does.
    """
    outside = [one["address"] for one in everyone if not _is_loopback(one["address"])]
    if not outside or not _is_loopback(mine["address"]):
        return mine
    interface, address = _way_to(outside[0], 1)  # any port: nothing is sent
    return {**mine, "interface": interface, "address": address}


def _listen(rank: int, mine: dict) -> socket.socket:
    try:
        return socket.create_server((mine["address"], 0), family=_family(mine["address"]), backlog=1024)
    except OSError as error:
        here = f"{mine['host']} (interface {mine['interface']}, {mine['address']})"
        raise UserError(f"rank {rank} cannot listen on {here}: {_reason(error)}; set GLOO_SOCKET_IFNAME") from None


def _reach_each_other(store: dist.Store, rank: int, everyone: list[dict]) -> None:
    """Let the first rank of each machine connect to those of all others, and all ranks know how that went."""
    first: dict[tuple[str, str], int] = {}
    for number, one in enumerate(everyone):
        first.setdefault((one["host"], one["address"]), number)
    leaders, mine = list(first.values()), everyone[rank]
    if len(leaders) == 1:
        return
    if rank in leaders:
        store.set(f"said/{rank}", _first_blocked(rank, mine, {n: everyone[n] for n in leaders if n != rank}))
    turns = math.ceil(len(leaders) / TRIES_AT_ONCE)
    store.wait([f"said/{number}" for number in leaders], timedelta(seconds=(turns + 2) * PEER_S))
    said = [store.get(f"said/{number}").decode() for number in leaders]
    if any(said):
        store.set(f"read/{rank}", "")
        if rank == 0:  # serves the store, which the others still have to read
            _linger(store, len(everyone))
        raise UserError(next(filter(None, said)))


def _first_blocked(rank: int, mine: dict, others: dict[int, dict]) -> str:
    """Try all at once, from this rank's own address; the line that names the first that fails, or an empty text."""
    with ThreadPoolExecutor(min(len(others), TRIES_AT_ONCE)) as pool:
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
    with contextlib.suppress(OSError):  # the name is unknown
        for family, _, _, _, target in socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(target)
                own = probe.getsockname()[0]
                return next((name for name, mine in _addresses().items() if own in mine), "unknown"), own
    return f"none of {', '.join(_addresses())}", "no route"


def _is_here(host: str, port: int) -> bool:
    own = _way_to(host, port)[1]
    with contextlib.suppress(OSError):  # the name is no longer known
        return _is_loopback(own) or own in {entry[4][0] for entry in socket.getaddrinfo(host, port)}
    return False


def _is_loopback(address: str) -> bool:
    with contextlib.suppress(ValueError):  # no address
        return ipaddress.ip_address(address).is_loopback
    return False


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
