"""What cannot be reached is named with host, port and interface: on this machine, and between network namespaces."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator

import pytest

from core import preflight
from core.errors import UserError
from tests.core.ranks import free_port, start_ranks


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in (
        "MASTER_ADDR",
        "MASTER_PORT",
        "GLOO_SOCKET_IFNAME",
        "HCCL_SOCKET_IFNAME",
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def port(monkeypatch) -> int:
    number = free_port()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(number))
    return number


def refusal(*arguments: float) -> str:
    """The line that `preflight.meet` ends with."""
    with pytest.raises(UserError) as error:
        preflight.meet(*arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_no_error_takes_longer_than_half_a_minute():
    """A resolver or the rest of a start may take another five seconds; a missing rank is warned of at 25."""
    assert preflight.REACH_S + preflight.PEER_S <= 25
    assert 3 * preflight.PEER_S <= 25


@pytest.mark.parametrize("missing", ["MASTER_ADDR", "MASTER_PORT"])
def test_an_incomplete_environment(port, monkeypatch, missing):
    monkeypatch.delenv(missing)
    assert f"{missing} not set" in refusal(0, 2, 5)


@pytest.mark.parametrize("value", ["http", "0", "65536", "-1"])
def test_a_port_that_is_none(port, monkeypatch, value):
    monkeypatch.setenv("MASTER_PORT", value)
    assert f"MASTER_PORT={value}" in refusal(0, 2, 5)


def test_a_port_that_is_taken(port):
    with socket.create_server(("", port)):
        line = refusal(0, 2, 5)
    assert f"127.0.0.1:{port}" in line
    assert "interface lo" in line
    assert "choose another MASTER_PORT" in line


def test_a_name_that_nobody_knows(port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "no-such-host.invalid")
    line = refusal(1, 2, 60, 0.5)
    assert f"rank 1 cannot reach rank 0 at no-such-host.invalid:{port}" in line
    assert f"from {socket.gethostname()}" in line
    assert "interface" in line


def test_a_rank_0_of_this_machine_that_is_late_is_waited_for_until_the_timeout(port):
    began = time.monotonic()
    line = refusal(1, 2, 2, 0.1)
    assert 2 <= time.monotonic() - began < 8
    assert f"127.0.0.1:{port} (from {socket.gethostname()}, interface lo, 127.0.0.1)" in line
    assert "connection refused" in line


def test_something_else_that_listens_there_is_no_rank_0(port):
    with socket.create_server(("127.0.0.1", port)):
        line = refusal(1, 2, 60, 1)
    assert f"127.0.0.1:{port}" in line


@pytest.mark.processes
def test_a_rank_that_does_not_come_is_named(caplog, monkeypatch):
    monkeypatch.setattr(preflight, "WARN_S", 0.3)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    with caplog.at_level(logging.WARNING, logger="gaudi_recipes"):
        line = refusal(0, 4, 1)
    assert "3 of 4 ranks not here yet: 1, 2, 3" in line
    assert "--ddp_timeout 1 s" in line
    assert "3 of 4 ranks not here yet: 1, 2, 3; waiting, 0 s so far" in caplog.text


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME"])
def test_an_interface_that_this_machine_lacks(port, monkeypatch, variable):
    monkeypatch.setenv(variable, "eth77,eth78")
    line = refusal(0, 2, 5)
    assert f"{variable}=eth77,eth78" in line
    assert "lo" in line.partition(" are ")[2]


def test_an_interface_is_chosen_by_name_or_for_hccl_by_its_beginning(monkeypatch):
    monkeypatch.setattr(
        preflight, "_addresses", lambda: {"lo": ["127.0.0.1"], "ens1": ["10.0.0.1"], "ens10": ["10.0.0.2"]}
    )
    assert preflight._named_interface() is None
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "eth,ens")
    assert preflight._named_interface() == "ens1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ens10")
    assert preflight._named_interface() == "ens10"
    monkeypatch.setenv("HCCL_SOCKET_IFNAME", "^docker")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert preflight._named_interface() is None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@pytest.fixture
def machines() -> Iterator[Callable[..., list]]:
    """Three network namespaces on one switch, 10.231.7.1 to .3; call it to start a rank in each."""
    if not shutil.which("ip"):
        pytest.skip("needs the program ip")
    base = f"gr{os.getpid() % 100_000}"
    names = [f"{base}-{number}" for number in range(3)]
    try:
        ip("netns", "add", names[0])
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces are not permitted: {error.stderr.strip()}")
    inside = [("-n", name) for name in names]
    try:
        for name in names[1:]:
            ip("netns", "add", name)
        ip(*inside[0], "link", "add", "switch", "type", "bridge")
        ip(*inside[0], "address", "add", "10.231.7.1/24", "dev", "switch")
        ip(*inside[0], "link", "set", "switch", "up")
        for number in (1, 2):
            cable = (
                "link",
                "add",
                f"to{number}",
                "type",
                "veth",
                "peer",
                "name",
                f"port{number}",
                "netns",
                names[number],
            )
            ip(*inside[0], *cable)
            ip(*inside[0], "link", "set", f"to{number}", "master", "switch", "up")
            ip(*inside[number], "address", "add", f"10.231.7.{number + 1}/24", "dev", f"port{number}")
            ip(*inside[number], "link", "set", f"port{number}", "up")
        for one in inside:
            ip(*one, "link", "set", "lo", "up")
        prefixes = [("ip", "netns", "exec", name) for name in names]

        def start(size: int, *arguments: str, **options) -> list:
            return start_ranks(size, "meeting", *arguments, prefixes=prefixes, master="10.231.7.1", **options)

        start.names = names
        yield start
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def seconds(one: subprocess.CompletedProcess[str]) -> float:
    return float(one.stdout.split()[-1])


@pytest.mark.processes
def test_machines_that_reach_each_other_start(machines):
    """Gloo's own choice would be the address of this machine's name, which the other namespaces cannot reach."""
    ended = machines(3, "60", "20")
    for one, interface in zip(ended, ["switch", "port1", "port2"], strict=True):
        assert one.returncode == 0, one.stderr
        assert one.stdout.splitlines()[0] == f"[3.0] {interface}"


@pytest.mark.processes
def test_two_machines_that_reach_the_first_but_not_each_other(machines):
    ip("-n", machines.names[1], "route", "add", "blackhole", "10.231.7.3/32")
    ended = machines(3, "60", "20")
    for one in ended:  # each of them knows, the first too
        assert one.returncode == 2, one.stderr
        lines = [line for line in one.stderr.splitlines() if line.startswith("error: ")]
        assert len(lines) == 1
        assert "10.231.7.3:" in lines[0]
        assert "(interface port1, 10.231.7.2)" in lines[0]
        assert "(interface port2)" in lines[0]
        assert seconds(one) < 25


@pytest.mark.processes
@pytest.mark.parametrize("how", ["silent", "refused"])
def test_a_first_machine_that_does_not_answer(machines, how):
    if how == "silent":
        ip("-n", machines.names[0], "link", "set", "to1", "down")
    (one,) = machines(2, "60", "3", only=[1])
    assert one.returncode == 2, one.stderr
    assert one.stderr.count("error: ") == 1
    assert "rank 1 cannot reach rank 0 at 10.231.7.1:" in one.stderr
    assert f"(from {socket.gethostname()}, interface port1, 10.231.7.2)" in one.stderr
    assert 3 <= seconds(one) < 10
