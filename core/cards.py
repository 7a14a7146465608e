"""What the system shows of the Gaudis in this machine, without the bridge: cards, nodes, driver, and who holds them.

Everything is read below ``root``, in Linux's layout of /sys, /dev and /proc. Names and numbers are those of the kernel
driver habanalabs (Documentation/ABI/testing/sysfs-driver-habanalabs) and of the status codes of Habana's runtime.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from core.errors import UserError

ROOT = Path("/")
PLUGIN = "habana-torch-plugin"  # the bridge, as pip calls it
VENDOR = "0x1da3"
KINDS = {"0x100": "gaudi", "0x101": "gaudi", "0x102": "gaudi2", "0x106": "gaudi3"}  # by the head of a PCI device id
NO_CARD = (8, 16, 20)  # status codes: no device found, not enough of them, already acquired
# What one process at a time can open. The control nodes beside them are for monitors, of which there may be many.
NODE = re.compile(r"/dev/(?:accel/accel|hl)\d+")
SECRET = re.compile(r"(?i)(\S*(?:token(?!i)|secret|passw|credential|api_?key)\S*?[ =])\S+")


@dataclass
class Finding:
    """One thing that was looked at: ``state`` is ok, note or problem; where it is not ok, ``advice`` is one phrase."""

    name: str
    state: str
    value: str
    advice: str = ""


def judged(name: str, value: str, bad: bool, advice: str, state: str = "note") -> Finding:
    """Return a finding of that state, with its advice, if something is ``bad``; else that it is fine."""
    return Finding(name, state, value, advice) if bad else Finding(name, "ok", value)


class Card(NamedTuple):
    """A Gaudi: its PCI address, kind, the node that its driver made for it, and what the driver says of its state.

    ``node`` and ``status`` are empty where there is no driver; the node need not be given to this container.
    """

    address: str
    kind: str
    node: str
    status: str


class Holder(NamedTuple):
    """A process that has a card open."""

    pid: int
    command: str
    node: str


def read(path: Path) -> str:
    """Return a small file's text without the blanks around it; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except (OSError, ValueError):
        return ""


def version_of(distribution: str) -> str | None:
    """Return the version that pip knows, None if it is not installed; nothing is imported."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def torch_version() -> str | None:
    """Return what ``torch.__version__`` would be, without an import: pip's own number may lack the ``+cu128``."""
    with suppress(ImportError, ValueError):
        spec = find_spec("torch")
        text = read(Path(spec.origin).with_name("version.py")) if spec and spec.origin else ""
        said = re.search(r"__version__[^=\n]*=\s*['\"]([^'\"]+)", text)
        if said:
            return said[1]
    return version_of("torch")


def bridge_version() -> str | None:
    """Return the bridge's version; ``?`` where it was installed without pip."""
    return version_of(PLUGIN) or ("?" if find_spec("habana_frameworks") else None)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers that a version starts with: ``2.10.0a0+git`` is (2, 10, 0)."""
    return tuple(map(int, re.match(r"(?:\d+\.)*\d+|", version.strip())[0].split("."))) if version[:1].isdigit() else ()


def _entries(root: Path) -> dict[str, Path]:
    """The drivers' entries by the device node that each stands for. Other vendors' accelerators have such, too."""
    found = [*(root / "sys/class/accel").glob("accel*"), *(root / "sys/class/habanalabs").glob("hl*")]
    named = {f"/dev/{'accel/' if path.name.startswith('accel') else ''}{path.name}": path for path in found}
    return {node: path for node, path in named.items() if NODE.fullmatch(node)}


def find(root: Path = ROOT) -> list[Card]:
    """Return the Gaudis on the PCI bus, by address: in a container also those that were not given to it."""
    nodes = {(path / "device").resolve(): node for node, path in _entries(root).items()}
    devices = {path.resolve() for path in (root / "sys/bus/pci/devices").glob("*")} | set(nodes)
    cards = []
    for device in sorted(devices, key=lambda path: path.name):
        if read(device / "vendor") == VENDOR:
            number, node = read(device / "device"), nodes.get(device, "")
            kind = KINDS.get(number[:5], f"unknown Habana device {number}")
            cards.append(Card(device.name, kind, node, read(device / "status") if node else ""))
    return cards


def nodes(root: Path = ROOT) -> list[str]:
    """Return the device nodes of Gaudis that are here, as ``/dev/accel/accel0`` (older drivers: ``/dev/hl0``)."""
    others = {node for node, path in _entries(root).items() if read(path / "device/vendor") not in ("", VENDOR)}
    paths = [*(root / "dev/accel").glob("accel*"), *(root / "dev").glob("hl*")]
    here = {f"/{path.relative_to(root)}" for path in paths} - others
    return sorted(filter(NODE.fullmatch, here), key=lambda node: (len(node), node))


def count(root: Path = ROOT) -> int:
    """Return the number of Gaudis in this machine; where its PCI bus is hidden, of their device nodes."""
    return len(find(root)) or len(nodes(root))


def holders(root: Path = ROOT) -> list[Holder]:
    """Return which other processes have which card open, as far as this user may see."""
    ours, prefix = set(nodes(root)) | {card.node for card in find(root)}, str(root).rstrip("/")
    held = []
    for process in (root / "proc").glob("[0-9]*"):
        opened = set()
        with suppress(OSError):  # it ended, or belongs to another user
            for link in (process / "fd").iterdir():
                with suppress(OSError):
                    opened.add(os.readlink(link).removeprefix(prefix))
        if opened & ours and process.name != str(os.getpid()):
            held += [Holder(int(process.name), _command(process), node) for node in opened & ours]
    return sorted(held)


def _command(process: Path) -> str:
    words = read(process / "cmdline")[:1000].replace("\0", " ").strip() or read(process / "comm") or "?"
    words = re.sub(r"\bhf_\w+", "***", SECRET.sub(r"\1***", words))
    return words if len(words) <= 80 else f"{words[:80]}..."


def user_of(pid: int, root: Path = ROOT) -> str:
    """Return the name of a process's user, or its number; empty if the process has ended."""
    try:
        number = (root / "proc" / str(pid)).stat().st_uid
    except OSError:
        return ""
    with suppress(ImportError, KeyError):  # no such module, or a user of the host's
        import pwd

        return pwd.getpwuid(number).pw_name
    return str(number)


def driver_version(root: Path = ROOT) -> str:
    """Return the version of the loaded driver; empty if it is not known."""
    said = [read(root / "sys/module/habanalabs/version")]
    said += [read(path / "device/driver_ver") for path in _entries(root).values()]
    return next(filter(None, said), "")


def container(root: Path = ROOT, environ: Mapping[str, str] = os.environ) -> str:
    """Return how a container is given the cards, for the kind of container that this is; empty outside of one."""
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "give the pod runtimeClassName: habana and a limit of habana.ai/gaudi"
    marks = (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()
    if marks or re.search("docker|kubepods|containerd|libpod", read(root / "proc/1/cgroup")):
        return "start the container with --runtime=habana -e HABANA_VISIBLE_DEVICES=all"
    return ""


def look(root: Path, environ: Mapping[str, str], bridge: str | None) -> list[Finding]:
    """Look at everything that has to be there before a Gaudi can be opened; ``bridge`` is the installed version."""
    cards, here, how = find(root), nodes(root), container(root, environ)
    if not cards and not here:
        if bridge and "simulator" not in bridge:
            where = how or "look for them with lspci -d 1da3: and hl-smi"
            return [Finding("Gaudi", "problem", "none here, though the bridge is installed", where)]
        return [
            Finding("Gaudi", "note", "no Gaudi here: training runs on the CPU", "rehearse with python -m hpu_simulator")
        ]
    kinds = Counter(card.kind for card in cards) or {"card of unknown kind": len(here)}
    findings = [Finding("Gaudi", "ok", ", ".join(f"{number} x {kind}" for kind, number in kinds.items()))]
    findings += [_look_at_driver(root, bridge, bool(here)), *_look_at_nodes(root, cards, here, how)]
    sick = [f"{card.node} is {card.status}" for card in cards if card.status.lower() not in ("", "operational")]
    if sick:
        findings.append(
            Finding("state", "problem", ", ".join(sick), "wait and see hl-smi; restart the machine if it stays")
        )
    if here:
        findings += [_look_at_holders(root, here), *_look_at_choice(environ, here)]
    if set(kinds) != {"gaudi"} and not list((root / "dev/infiniband").glob("uverbs*")):
        state, advice = ("problem", how) if how else ("note", "several cards need it: load the driver habanalabs_ib")
        findings.append(Finding("network", state, "no /dev/infiniband/uverbs*", advice))
    return findings


def _look_at_driver(root: Path, bridge: str | None, works: bool) -> Finding:
    version, loaded = driver_version(root), (root / "sys/module/habanalabs").is_dir()
    if not version and not loaded and not works:
        advice = "install habanalabs-dkms on the machine itself, then modprobe habanalabs"
        return Finding("driver", "problem", "the kernel module habanalabs is not loaded", advice)
    ours, theirs = release(bridge or ""), release(version)
    if not ours or not theirs or theirs[0] != ours[0] or ours[:3] == theirs[:3]:  # the kernel's own has its numbers
        return Finding("driver", "ok", version or "version unknown")
    advice = f"take the image of release {'.'.join(map(str, theirs[:3]))}, or that driver for the machine"
    state = "note" if ours[:2] == theirs[:2] else "problem"
    return Finding("driver", state, f"{version}, but the bridge is {bridge}", advice)


def _look_at_nodes(root: Path, cards: list[Card], here: list[str], how: str) -> list[Finding]:
    if not here:
        advice = how or "see what dmesg says of habanalabs"
        return [Finding("nodes", "problem", f"{len(cards)} on the PCI bus, no /dev/accel/accel* or /dev/hl*", advice)]
    closed = [node for node in here if not os.access(root / node[1:], os.R_OK | os.W_OK)]
    if closed:
        advice = "let this user read and write them: group and mode of the nodes, or the container's devices"
        return [Finding("nodes", "problem", f"{', '.join(closed)} not to be opened by this user", advice)]
    missing = [card.node or card.address for card in cards if card.node not in here]
    if missing and not how:
        return [Finding("nodes", "problem", f"none for {', '.join(missing)}", "see what dmesg says of habanalabs")]
    share = f" of {len(cards)} cards, the others are not this container's" if missing else ""
    return [Finding("nodes", "ok", f"{here[0]} and on: {len(here)}{share}")]


def _look_at_holders(root: Path, here: list[str]) -> Finding:
    held = holders(root)
    if not held:
        return Finding("held", "ok", "by no process that this user may see")
    by = ", ".join(f"{h.node} by pid {h.pid} ({user_of(h.pid, root)}: {h.command})" for h in held)
    pids = " ".join(str(pid) for pid in sorted({holder.pid for holder in held}))
    state = "note" if set(here) - {holder.node for holder in held} else "problem"
    return Finding("held", state, by, f"wait for it, or end what a crashed run left: kill {pids}")


def _look_at_choice(environ: Mapping[str, str], here: list[str]) -> list[Finding]:
    findings = []
    for name in ("HABANA_VISIBLE_DEVICES", "HABANA_VISIBLE_MODULES"):
        value = environ.get(name)
        numbers = re.fullmatch(r"\d+(,\d+)*", value or "")
        if value is not None and not numbers and (name.endswith("MODULES") or value != "all"):
            findings.append(Finding(name, "problem", repr(value), "numbers with commas between them, or unset it"))
        elif value is not None:
            findings.append(Finding(name, "ok", value))
    ranks = environ.get("LOCAL_WORLD_SIZE", "")
    if ranks.isdigit() and int(ranks) > len(here):
        findings.append(Finding("ranks", "problem", f"{ranks} processes, {len(here)} cards", "start one for each card"))
    return findings


def explain(error: BaseException, root: Path = ROOT) -> str | None:
    """Say in one line why no Gaudi could be opened, if that is what the bridge's ``error`` is about, else None."""
    text = str(error)
    code = re.search(r"synStatus[\s=:]*(\d+)", text)
    if not (code and int(code[1]) in NO_CARD) and not re.search("(?i)acquire failed|synDeviceAcquire", text):
        return None
    said = (re.search(r"synStatus.*", text) or re.search(r".*(?i:acquire).*", text))[0].strip().rstrip(".")[:160]
    findings = [finding for finding in look(root, os.environ, bridge_version()) if finding.state != "ok"]
    chosen = [finding for finding in findings if finding.state == "problem"] or findings
    why = "; ".join(f"{finding.name}: {finding.value} ({finding.advice})" for finding in chosen)
    why = why or "another user's or container's process may hold it: see hl-smi, or ps on the machine itself"
    return f"no Gaudi could be opened ({said}): {why}; run python -m core.doctor"


@contextmanager
def translated(root: Path = ROOT) -> Iterator[None]:
    """Around what may open a card for the first time.

    Raises:
        UserError: the bridge could not open one; the line is `explain`'s.
    """
    try:
        yield
    except RuntimeError as error:
        line = explain(error, root)
        if line is None:
            raise
        raise UserError(line) from error
