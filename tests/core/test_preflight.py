"""What cannot be reached is named with host, port and interface: on this machine, and between network namespaces."""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

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
        monkeypatch.setenv(name, "")  # so that what a meeting sets is undone, too
        monkeypatch.delenv(name)


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
    assert preflight.WARN_S <= 25
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


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1"])
def test_a_rank_0_of_this_machine_that_is_late_is_waited_for_until_the_timeout(port, monkeypatch, address):
    monkeypatch.setattr(preflight, "REFUSED_S", 0.1)
    monkeypatch.setenv("MASTER_ADDR", address)
    began = time.monotonic()
    line = refusal(1, 2, 2, 0.1)
    assert 2 <= time.monotonic() - began < 8
    assert f"{address}:{port} (from {socket.gethostname()}, interface lo, 127.0.0.1)" in line
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


@pytest.mark.parametrize("found", ["unknown", "none of lo, eth0"])
def test_gloo_is_told_of_no_interface_that_there_is_not(port, monkeypatch, found):
    monkeypatch.setattr(preflight, "_way_to", lambda host, port: (found, "127.0.0.1"))
    preflight.meet(0, 1, 5)
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.parametrize(("chosen", "told"), [(None, "lo"), ("", "lo"), ("eth77,lo", "eth77,lo")])
def test_gloo_is_told_of_the_interface_unless_one_is_chosen(port, monkeypatch, chosen, told):
    if chosen is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", chosen)
    preflight.meet(0, 1, 5)
    assert os.environ["GLOO_SOCKET_IFNAME"] == told


def test_only_a_loopback_address_is_exchanged_and_only_if_another_rank_has_a_better_one(monkeypatch):
    inside, other = {"host": "a", "interface": "lo", "address": "127.0.0.1"}, {"address": "10.0.0.2"}
    outside = {"host": "a", "interface": "eth0", "address": "10.0.0.1"}
    monkeypatch.setattr(preflight, "_way_to", lambda host, port: {"10.0.0.2": ("eth0", "10.0.0.1")}[host])
    assert preflight._seen_from_outside(inside, [inside, inside | {"address": "::1"}]) == inside
    assert preflight._seen_from_outside(outside, [inside, outside, other]) == outside
    assert preflight._seen_from_outside(inside, [inside, other]) == outside


def test_the_first_address_of_a_name_to_which_there_is_a_way(monkeypatch):
    """The connection itself tries all of them in turn, too."""
    found = [(socket.AF_INET, 0, 0, "", (address, 1)) for address in ("255.255.255.255", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    assert preflight._way_to("both", 1) == ("lo", "127.0.0.1")


def test_with_more_machines_than_are_tried_at_once_the_others_are_waited_for_longer(monkeypatch):
    monkeypatch.setattr(preflight, "PEER_S", 0.2)
    monkeypatch.setattr(preflight, "TRIES_AT_ONCE", 1)
    # Rank 0 is done at once; every other one needs its full time for each of its seven tries.
    monkeypatch.setattr(preflight, "_connect", lambda *given: time.sleep(0.2 * (given[3] != "10.0.0.0")))
    everyone = [{"host": "h", "interface": "i", "address": f"10.0.0.{number}", "port": 1} for number in range(8)]
    store, reach = dist.HashStore(), preflight._reach_each_other
    others = [threading.Thread(target=reach, args=(store, rank, everyone)) for rank in range(1, 8)]
    for one in others:
        one.start()
    try:
        reach(store, 0, everyone)
    finally:
        for one in others:
            one.join()


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
            cable = f"link add to{number} type veth peer name port{number} netns {names[number]}".split()
            ip(*inside[0], *cable)
            ip(*inside[0], "link", "set", f"to{number}", "master", "switch", "up")
            ip(*inside[number], "address", "add", f"10.231.7.{number + 1}/24", "dev", f"port{number}")
            ip(*inside[number], "link", "set", f"port{number}", "up")
        for one in inside:
            ip(*one, "link", "set", "lo", "up")

        def start(size: int, *arguments: str, at: tuple = (0, 1, 2), before: tuple = ((),) * 3, **options) -> list:
            """``at``: the machine of each rank; ``before``: what its command is preceded by."""
            prefixes = [("ip", "netns", "exec", names[there], *words) for there, words in zip(at, before, strict=True)]
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
def test_a_master_whose_own_name_leads_to_its_loopback(machines):
    """As /etc/hosts has it on Debian. Two ranks are there, and one on another machine, which shares the host name."""
    own = ("env", "MASTER_ADDR=127.0.1.1")
    ended = machines(3, "60", "20", at=(0, 0, 1), before=(own, own, ()))
    for one, interface in zip(ended, ["switch", "switch", "port1"], strict=True):
        assert one.returncode == 0, one.stderr
        assert one.stdout.splitlines()[0] == f"[3.0] {interface}"


@pytest.mark.slow
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
@pytest.mark.parametrize(
    ("how", "reach", "refused"), [pytest.param("silent", 3, 60, marks=pytest.mark.slow), ("refused", 1, 3)]
)
def test_a_first_machine_that_does_not_answer(machines, how, reach, refused):
    if how == "silent":
        ip("-n", machines.names[0], "link", "set", "to1", "down")
    (one,) = machines(2, "60", str(reach), "0.5", str(refused), only=[1])
    assert one.returncode == 2, one.stderr
    assert one.stderr.count("error: ") == 1
    assert "rank 1 cannot reach rank 0 at 10.231.7.1:" in one.stderr
    assert f"(from {socket.gethostname()}, interface port1, 10.231.7.2)" in one.stderr
    assert ("connection refused" in one.stderr) == (how == "refused")
    assert 3 <= seconds(one) < 10


@pytest.mark.processes
def test_a_first_machine_that_refuses_until_its_rank_has_come(machines, tmp_path: Path):
    """Rank 0 starts only once rank 1 has warned, and its imports take longer than the second in which to answer."""
    said = str(tmp_path / "said")
    late = ("sh", "-c", 'until grep -qs refused "$0"; do sleep 0.1; done; exec "$@"', said)
    waits = ("sh", "-c", 'exec "$@" 2> "$0"', said)
    ended = machines(2, "30", "1", "1", "300", before=(late, waits, ()))
    warning = Path(said).read_text()
    for one in ended:
        assert one.returncode == 0, one.stderr + warning
    assert "rank 1 waits for rank 0 to open 10.231.7.1:" in warning
    assert f"(from {socket.gethostname()}, interface port1, 10.231.7.2): connection refused, for 1 s so far" in warning
