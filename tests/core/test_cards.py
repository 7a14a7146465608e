"""Gaudis as the system shows them: machines laid out as files and links, processes that are real."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from core import cards
from core.cards import Finding, count, explain, find, holders, look, nodes, translated
from core.errors import UserError, exit_with_one_line
from tests import fake_bridge

ACQUIRE = "synStatus=26 [Generic failure] Device acquire failed."
BRIDGE = "1.23.0.695"


def write(path: Path, text: str = "") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def link(path: Path, target: str | Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def add_device(root: Path, address: str, vendor: str, number: str, entry: str = "", status: str = "") -> None:
    """A PCI device as sysfs shows it; ``entry`` is its driver's, as ``accel/accel0``."""
    device = root / "sys/devices/pci0000:00" / address
    write(device / "vendor", f"{vendor}\n")
    write(device / "device", f"{number}\n")
    link(root / "sys/bus/pci/devices" / address, f"../../../devices/pci0000:00/{address}")
    if entry:
        link(device / entry / "device", "../..")
        link(root / "sys/class" / entry, f"../../devices/pci0000:00/{address}/{entry}")
    if status:
        write(device / "status", f"{status}\n")


def machine(
    root: Path,
    number: int = 8,
    kind: str = "0x1020",
    driver: str = "1.23.0-a1b2c3d",
    given: int | None = None,
    status: str = "operational",
    held: int = 0,
    uverbs: bool = True,
    docker: bool = False,
) -> Path:
    """Lay out a machine of ``number`` cards, whose first ``given`` nodes are there; process 700 + n holds card n."""
    add_device(root, "0000:00:1f.6", "0x8086", "0x15fb")  # a network card
    for index in range(number):
        entry = f"accel/accel{index}" if driver else ""
        add_device(root, f"0000:{0x19 + index:02x}:00.0", "0x1da3", kind, entry, status if driver else "")
    if driver:
        write(root / "sys/module/habanalabs/version", f"{driver}\n")
    for index in range(number if given is None else given):
        write(root / f"dev/accel/accel{index}")
        write(root / f"dev/accel/accel_controlD{index}")
    if uverbs:
        write(root / "dev/infiniband/uverbs0")
    if docker:
        write(root / ".dockerenv")
    for index in range(held):
        write(root / f"proc/{700 + index}/cmdline", f"python\0train{index}.py\0")
        link(root / f"proc/{700 + index}/fd/0", "/dev/null")
        for descriptor in (3, 4):
            link(root / f"proc/{700 + index}/fd/{descriptor}", f"/dev/accel/accel{index}")
    write(root / "proc/1/cmdline", "init\0")  # of another user: its descriptors are not shown
    return root


def by_name(findings: list[Finding]) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


@contextmanager
def as_nobody() -> Iterator[None]:
    """Let root be asked about access, as another user: by its real id, which reading and writing do not heed."""
    user = os.getuid()
    try:
        if user == 0:
            os.setresuid(65534, -1, -1)
        yield
    finally:
        if user == 0:
            os.setresuid(0, -1, -1)


@pytest.fixture(autouse=True)
def outside_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBERNETES_SERVICE_HOST", "LOCAL_WORLD_SIZE", "HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"):
        monkeypatch.delenv(name, raising=False)


# --------------------------------------------------------------------------------------------------------- what is here


def test_the_cards_are_those_of_the_vendor_with_their_kind_node_and_state(tmp_path):
    found = find(machine(tmp_path, number=11, kind="0x1063"))
    assert len(found) == count(tmp_path) == 11
    assert found[0] == ("0000:19:00.0", "gaudi3", "/dev/accel/accel0", "operational")
    assert [card.node for card in found] == nodes(tmp_path) == [f"/dev/accel/accel{index}" for index in range(11)]


@pytest.mark.parametrize(
    ("number", "kind"),
    [("0x1000", "gaudi"), ("0x1010", "gaudi"), ("0x1020", "gaudi2"), ("0x1060", "gaudi3"), ("0x2000", "unknown")],
)
def test_the_kind_is_read_from_the_device_id(tmp_path, number, kind):
    assert find(machine(tmp_path, number=1, kind=number))[0].kind.startswith(kind)


def test_another_vendors_accelerator_is_no_gaudi(tmp_path):
    add_device(tmp_path, "0000:00:0b.0", "0x8086", "0x7d1d", "accel/accel0")  # the NPU of a laptop
    write(tmp_path / "dev/accel/accel0")
    assert (find(tmp_path), nodes(tmp_path), count(tmp_path)) == ([], [], 0)
    link(tmp_path / "proc/9/fd/3", "/dev/accel/accel0")
    assert holders(tmp_path) == []


def test_an_older_driver_names_its_nodes_otherwise(tmp_path):
    add_device(tmp_path, "0000:19:00.0", "0x1da3", "0x1000", "habanalabs/hl0")
    write(tmp_path / "dev/hl0")
    write(tmp_path / "dev/hl_controlD0")
    assert nodes(tmp_path) == ["/dev/hl0"]
    assert find(tmp_path)[0][1:3] == ("gaudi", "/dev/hl0")


def test_where_the_bus_is_hidden_the_nodes_are_counted(tmp_path):
    write(tmp_path / "dev/accel/accel3")
    assert (find(tmp_path), count(tmp_path)) == ([], 1)
    assert by_name(look(tmp_path, {}, BRIDGE))["Gaudi"].value == "1 x card of unknown kind"


@pytest.mark.processes
def test_who_holds_a_card_is_a_process_that_has_its_node_open(tmp_path):
    machine(tmp_path, number=2).joinpath("proc/1/cmdline").unlink()
    os.rmdir(tmp_path / "proc/1")
    os.rmdir(tmp_path / "proc")
    link(tmp_path / "proc", "/proc")
    command = [sys.executable, "-c", "import time; time.sleep(60)", "--token", "s3cret", "--name=hf_alsosecret"]
    with open(tmp_path / "dev/accel/accel1") as node, open(tmp_path / "dev/accel/accel_controlD0") as control:
        process = subprocess.Popen(command, stdin=node, stdout=subprocess.DEVNULL, pass_fds=[control.fileno()])
        try:
            (holder,) = holders(tmp_path)  # not this process, which has it open as well, nor a monitor's control node
            assert holder[::2] == (process.pid, "/dev/accel/accel1")
            assert "s3cret" not in holder.command
            assert "hf_also" not in holder.command
            assert "time.sleep(60) --token ***" in holder.command  # what follows may be beyond what is shown
            assert cards.user_of(process.pid) == cards.user_of(os.getpid()) != ""
            finding = by_name(look(tmp_path, {}, BRIDGE))["held"]
            assert (finding.state, finding.advice.endswith(f"kill {process.pid}")) == ("note", True)
        finally:
            process.kill()
            process.wait()
    assert holders(tmp_path) == []


# -------------------------------------------------------------------------------------------------------- what is wrong

WRONG = {
    "no driver": ({"driver": "", "given": 0}, {}, "driver", "problem", "modprobe habanalabs"),
    "no nodes": ({"given": 0}, {}, "nodes", "problem", "dmesg"),
    "no nodes in docker": ({"given": 0, "docker": True}, {}, "nodes", "problem", "--runtime=habana"),
    "no nodes in a pod": ({"given": 0}, {"KUBERNETES_SERVICE_HOST": "1"}, "nodes", "problem", "runtimeClassName:"),
    "one node missing": ({"given": 7}, {}, "nodes", "problem", "none for /dev/accel/accel7;"),
    "a share of the cards": ({"given": 2, "docker": True}, {}, "nodes", "ok", "2 of 8 cards"),
    "one card busy": ({"held": 1}, {}, "held", "note", "accel0 by pid 700 (*: python train0.py);*: kill 700"),
    "all cards busy": ({"number": 2, "held": 2}, {}, "held", "problem", "kill 700 701"),
    "an older driver": ({"driver": "1.22.1-x"}, {}, "driver", "problem", "1.22.1-x, but the bridge is 1.23.0.695"),
    "a newer driver": ({"driver": "1.24.0-x"}, {}, "driver", "problem", "take the image of release 1.24.0"),
    "a driver's patch": ({"driver": "1.23.1-x"}, {}, "driver", "note", "take the image of release 1.23.1"),
    "the kernel's own driver": ({"driver": "6.8.0-45-generic"}, {}, "driver", "ok", "6.8.0-45-generic"),
    "a card in reset": ({"status": "in reset"}, {}, "state", "problem", "/dev/accel/accel0 is in reset"),
    "no network in docker": ({"uverbs": False, "docker": True}, {}, "network", "problem", "--runtime=habana"),
    "no network": ({"uverbs": False}, {}, "network", "note", "habanalabs_ib"),
    "modules of no form": ({}, {"HABANA_VISIBLE_MODULES": "0;1"}, "HABANA_VISIBLE_MODULES", "problem", "'0;1'"),
    "modules": ({}, {"HABANA_VISIBLE_MODULES": "0,1"}, "HABANA_VISIBLE_MODULES", "ok", "0,1"),
    "all devices": ({}, {"HABANA_VISIBLE_DEVICES": "all"}, "HABANA_VISIBLE_DEVICES", "ok", "all"),
    "devices of no form": ({}, {"HABANA_VISIBLE_DEVICES": "none"}, "HABANA_VISIBLE_DEVICES", "problem", "'none'"),
    "more ranks than cards": ({"number": 4}, {"LOCAL_WORLD_SIZE": "8"}, "ranks", "problem", "8 processes, 4 cards"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_what_to_do(tmp_path, case):
    options, environ, name, state, told = WRONG[case]
    finding = by_name(look(machine(tmp_path, **options), environ, BRIDGE))[name]
    assert finding.state == state
    text = f"{finding.value}; {finding.advice}"
    assert all(part in text for part in told.split("*"))
    assert (finding.advice == "") == (state == "ok")


@pytest.mark.parametrize("kind", ["0x1000", "0x1020", "0x1060"])
def test_nothing_is_wrong_with_a_machine_that_fits(tmp_path, kind):
    findings = look(machine(tmp_path, kind=kind, uverbs=kind != "0x1000"), {}, BRIDGE)
    assert {finding.state for finding in findings} == {"ok"}
    assert findings[0].value == f"8 x {find(tmp_path)[0].kind}"


@pytest.mark.parametrize(
    ("bridge", "state", "told"),
    [
        (None, "note", "training runs on the CPU; rehearse with python -m hpu_simulator"),
        ("1.24.0+simulator", "note", "training runs on the CPU"),
        ("1.23.0", "problem", "though the bridge is installed; look for them with lspci"),
    ],
)
def test_a_machine_without_a_gaudi_is_a_problem_only_where_one_was_prepared_for(tmp_path, bridge, state, told):
    (finding,) = look(tmp_path, {}, bridge)
    assert finding.state == state
    assert told in f"{finding.value}; {finding.advice}"


def test_a_node_that_this_user_may_not_open_is_a_problem():
    with tempfile.TemporaryDirectory() as name:  # pytest's own folders are closed to other users
        folder = machine(Path(name), number=2)
        folder.chmod(0o755)
        (folder / "dev/accel/accel0").chmod(0o666)
        (folder / "dev/accel/accel1").chmod(0o600 if os.getuid() == 0 else 0)
        with as_nobody():
            finding = by_name(look(folder, {}, BRIDGE))["nodes"]
    assert finding.state == "problem"
    assert finding.value == "/dev/accel/accel1 not to be opened by this user"


# ------------------------------------------------------------------------------------------------- the bridge's errors

ERRORS = [
    ACQUIRE,
    "synStatus=8 [Device not found] Device acquire failed.",
    "Initialization failed\nsynStatus=8 [Device not found] .",
    "synStatus 20 [Device already acquired]",
    "Device acquire failed.",
]


@pytest.mark.parametrize("text", ERRORS)
def test_an_error_of_a_busy_card_becomes_one_line_that_says_who_holds_it(tmp_path, text):
    line = explain(RuntimeError(text), machine(tmp_path, number=2, held=2))
    assert line.startswith(f"no Gaudi could be opened ({text.splitlines()[-1].split(' .')[0].rstrip('.')}")
    assert "/dev/accel/accel1 by pid 701 (" in line
    assert "train1.py" in line
    assert line.endswith("run python -m core.doctor")
    assert "\n" not in line


@pytest.mark.parametrize(
    "text",
    [
        "",
        "synStatus=26 [Generic failure] Graph compile failed.",
        "synStatus=14 [Failed to allocate device memory]",
        "Failed to acquire the lock of the tokenizer",
        "expected scalar type Float but found BFloat16",
    ],
)
def test_an_error_of_another_kind_stays_what_it_is(tmp_path, text):
    error = RuntimeError(text)
    assert explain(error, machine(tmp_path, held=8)) is None
    with pytest.raises(RuntimeError) as raised, translated(tmp_path):
        raise error
    assert raised.value is error


def test_a_container_without_nodes_and_a_driver_of_another_release_are_both_told(tmp_path, monkeypatch):
    root = machine(tmp_path / "machine", given=0, docker=True, driver="1.21.0-x")
    write(
        tmp_path / "site/habana_torch_plugin-1.23.0.dist-info/METADATA", "Name: habana-torch-plugin\nVersion: 1.23.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "site")
    line = explain(RuntimeError(ACQUIRE), root)
    assert "driver: 1.21.0-x, but the bridge is 1.23.0 (take the image of release 1.21.0" in line
    assert (
        "nodes: 8 on the PCI bus, no /dev/accel/accel* or /dev/hl* (start the container with --runtime=habana" in line
    )


def test_where_nothing_is_seen_the_line_says_where_else_to_look(tmp_path):
    line = explain(RuntimeError(ACQUIRE), machine(tmp_path))
    assert "another user's or container's process may hold it: see hl-smi" in line


def test_a_simulated_or_missing_card_is_told_as_missing(tmp_path, monkeypatch):
    write(tmp_path / "site/habana_frameworks/__init__.py")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert "none here, though the bridge is installed" in explain(RuntimeError(ACQUIRE), tmp_path / "empty")


def test_the_context_raises_one_line_and_keeps_the_cause(tmp_path):
    with pytest.raises(UserError, match="by pid 700") as raised, translated(machine(tmp_path, held=1)):
        raise RuntimeError(ACQUIRE)
    assert str(raised.value.__cause__) == ACQUIRE
    with pytest.raises(ValueError, match="acquire failed"), translated(tmp_path):
        raise ValueError("Device acquire failed")


@pytest.mark.parametrize("opens", ["experimental._get_device_type", "hpu.is_available", "import"])
def test_a_run_whose_card_is_busy_ends_with_one_line(tmp_path, monkeypatch, capsys, opens):
    """The device is selected as a recipe does it, by the real bridge's order of calls; what opens the card fails."""
    from core import device
    from core.arguments import parse_arguments

    def fail(*args: object) -> None:
        raise RuntimeError(f"Initialization failed\n{ACQUIRE}")

    monkeypatch.setattr(device, "translated", partial(translated, machine(tmp_path / "machine", held=1)))
    with fake_bridge.installed(tmp_path / "bridge"):
        if opens == "import":
            monkeypatch.setattr(importlib, "import_module", fail)
        else:
            module, name = opens.rsplit(".", 1)
            where = f"utils.{module}" if module == "experimental" else module
            monkeypatch.setattr(importlib.import_module(f"habana_frameworks.torch.{where}"), name, fail)
        args = parse_arguments(["--do_eval"], description="test")
        with pytest.raises(SystemExit) as ended:
            exit_with_one_line(lambda: device.select_device(args, "lazy"))
        monkeypatch.undo()
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: no Gaudi could be opened ({ACQUIRE.rstrip('.')}): held: /dev/accel/accel0 by pid 700"
    )
