"""``python -m core.doctor``: does this machine fit, and what to do if not. It needs neither a Gaudi nor torch."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, build_opener, getproxies

from core.cards import ROOT, Finding, bridge_version, count, judged, look, read, release, torch_version, version_of
from core.errors import UserError, exit_with_one_line
from core.memory import group_limit

SECONDS = 1.8  # for the hub to answer, as in training
LOADING_S = 120  # for torch and the bridge to be imported from a cold file system
REQUIREMENTS = Path(__file__).resolve().parents[1] / "requirements-gaudi.txt"
# Gaudi software and its torch: Habana's support matrix up to 1.23, then what users' images hold.
TORCH_OF = {
    (1, 14): (2, 1), (1, 15): (2, 2), (1, 16): (2, 2), (1, 17): (2, 3), (1, 18): (2, 4), (1, 19): (2, 5),
    (1, 20): (2, 6), (1, 21): (2, 6), (1, 22): (2, 7), (1, 23): (2, 9), (1, 24, 0): (2, 10), (1, 24, 1): (2, 11),
}  # fmt: skip
CACHE = "PT_HPU_RECIPE_CACHE_CONFIG"
OF_CACHE = "path,delete,size_mb[,on_nfs], as in /tmp/cache,false,1024"
NEVER = "(?!)"  # no bridge reads these now; the first two stop a run of this project
# What a variable may be, what becomes of other values, and what to give.
FORMS = {
    "PT_HPU_LAZY_MODE": ("[01]", "problem", "1 (lazy) or 0 (eager, compile)"),
    "LOWER_LIST": (NEVER, "problem", "autocast_bf16_ops in --gaudi_config"),
    "FP32_LIST": (NEVER, "problem", "autocast_fp32_ops in --gaudi_config"),
    "PT_RECIPE_CACHE_PATH": (NEVER, "note", f"{CACHE}={OF_CACHE}"),
    "PT_CACHE_FOLDER_DELETE": (NEVER, "note", f"{CACHE}={OF_CACHE}"),
    CACHE: (r"(?i)[^,]*,(true|false),\d+(,(true|false))?", "problem", OF_CACHE),
    "PT_HPU_METRICS_DUMP_TRIGGERS": ("(?!.*metric_change).*", "problem", "process_exit: metric_change was removed"),
    "PT_HPU_METRICS_FILE": (".*/.+", "problem", "a path with a folder, as in ./metrics.json"),
}
GIB = 2**30


def fit(torch: str | None, bridge: str | None, cards: int) -> list[Finding]:
    """Judge whether torch and the bridge belong together, from their versions."""
    if bridge is None or "simulator" in bridge:
        advice, bad = "use Habana's PyTorch image: nothing else reaches the cards", bridge is None and cards > 0
        found = judged("bridge", bridge or "not installed; only a Gaudi needs it", bad, advice, "problem")
        return [judged("torch", torch or "none", torch is None, "pip install -r requirements.txt", "problem"), found]
    value, state, advice = torch or "none", "problem", "reinstall it from Habana's image; install no torch by pip"
    wanted = TORCH_OF.get(release(bridge)[:3]) or TORCH_OF.get(release(bridge)[:2])
    if re.search(r"\+(cpu|cu\d+|rocm|xpu)", value):
        value = f"{torch}: pip has replaced Habana's build"
    elif torch and not wanted:
        value = f"{torch}; which one belongs to bridge {bridge} is not known"
        state, advice = "note", "compare with the image's"
    elif torch and release(torch)[:2] == wanted:
        state = advice = ""
    elif torch:
        value = f"{torch}, but bridge {bridge} is built for {wanted[0]}.{wanted[1]}"
    return [Finding("torch", state or "ok", value, advice), Finding("bridge", "ok", bridge)]


def loads() -> Finding:
    """Import torch and the bridge in another process: a replaced library shows only then. No card is opened."""
    command = [sys.executable, "-c", "import torch, habana_frameworks.torch.core"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=LOADING_S)
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]
    except subprocess.TimeoutExpired:
        return Finding("import", "note", f"torch and the bridge take over {LOADING_S} s", "look at the file system")
    advice = "torch, bridge and system libraries must be of one image: reinstall from it"
    value = "torch and the bridge load" if done.returncode == 0 else said
    return judged("import", value, done.returncode != 0, advice, "problem")


def packages(requirements: str, version: Callable[[str], str | None]) -> list[Finding]:
    """Compare what is installed with lines of ``name>=minimum``."""
    findings = []
    for name, least in re.findall(r"^([\w.-]+)>=([\w.]+)", requirements, re.MULTILINE):
        found = version(name)
        bad = found is None or release(found) < release(least)
        value = f"{found or 'none'}, needs {least} or newer" if bad else found
        findings.append(judged(name, value, bad, "pip install -r requirements-gaudi.txt", "problem"))
    return findings


def versions(cards: int) -> list[Finding]:
    """Python, torch, bridge and packages, side by side."""
    python, bridge, deepspeed = sys.version.split()[0], bridge_version(), version_of("deepspeed")
    fits = (3, 10) <= sys.version_info[:2] <= (3, 12)
    findings = [judged("Python", python, not fits, "take 3.10, 3.11 or 3.12", "problem")]
    findings += fit(torch_version(), bridge, cards)
    if bridge and "simulator" not in bridge:
        findings += [loads(), Finding("habana-pyhlml", "ok", version_of("habana-pyhlml") or "not installed")]
    whose = "Habana's" if re.search("hpu|synapse", deepspeed or "") else "upstream's"
    value = f"{deepspeed} ({whose})" if deepspeed else "not installed; only --deepspeed needs it"
    return [*findings, Finding("deepspeed", "ok", value), *packages(read(REQUIREMENTS), version_of)]


def devices(root: Path, environ: Mapping[str, str]) -> list[Finding]:
    """Gaudis, and GPUs where there is a sign of one: only then is torch imported."""
    findings, names, reason = look(root, environ, bridge_version()), [], "sees none"
    if not any((root / "dev" / name).exists() for name in ("nvidiactl", "kfd", "dxg")):
        return findings
    try:
        import torch

        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    except Exception as error:  # it is not installed, or broken in any way
        reason = f"fails with {type(error).__name__}"
    for finding in findings if names else ():
        finding.value = finding.value.replace("runs on the CPU", "runs on the GPU")
    value = ", ".join(names) or f"a driver is here, but torch {reason}"
    return [*findings, judged("GPU", value, not names, "install the torch that is built for it")]


def environment(environ: Mapping[str, str], cores: int) -> list[Finding]:
    """Look for variables that stop a run, or that nothing reads any more."""
    wrong = []
    for name, (pattern, state, instead) in FORMS.items():
        if name in environ and not re.fullmatch(pattern, environ[name]):
            value = "no bridge reads it now" if pattern == NEVER else repr(environ[name])
            wrong.append(Finding(name, state, value, f"unset it, or give {instead}"))
    for name in (f"PT_HPU_AUTOCAST_{kind}_OPS_LIST" for kind in ("LOWER_PRECISION", "FP32")):
        if name in environ and not os.path.isfile(environ[name]):
            wrong.append(Finding(name, "problem", f"there is no file {environ[name]!r}", "name a file, or unset it"))
    threads = environ.get("OMP_NUM_THREADS", "1")
    if not re.fullmatch(r"\d+(,\d+)*", threads) or not 1 <= int(threads.partition(",")[0]) <= cores:
        wrong.append(Finding("OMP_NUM_THREADS", "note", repr(threads), f"give 1 to {cores}, or unset it"))
    given = ", ".join(f"{name}={environ[name]}" for name in ("PT_HPU_LAZY_MODE", "OMP_NUM_THREADS") if name in environ)
    return wrong or [Finding("variables", "ok", given or "none is set that matters")]


def memory(root: Path) -> list[Finding]:
    """Host memory, what a container leaves of it, and the shared memory that data loaders' workers pass batches in."""
    findings = []
    found = re.findall(r"^(MemTotal|MemAvailable):\s+(\d+) kB", read(root / "proc/meminfo"), re.MULTILINE)
    if len(found) == 2:
        total, free = (int(number) * 1024 for _, number in found)
        limit = min(total, int(group_limit(root, "memory.max", "memory/memory.limit_in_bytes") or total))
        value = f"{free / GIB:.1f} GiB available of {total / GIB:.1f}"
        value += f", this container's limit is {limit / GIB:.1f}" if limit < total else ""
        advice = "end other programs, or train with smaller batches"
        findings.append(judged("memory", value, min(free, limit) < 4 * GIB, advice))
    if (root / "dev/shm").is_dir():
        size = shutil.disk_usage(root / "dev/shm").total
        advice = "--ipc=host or --shm-size=16g for the container; else --dataloader_num_workers 0"
        findings.append(judged("/dev/shm", f"{size / GIB:.2f} GiB", size < GIB, advice))
    return findings


def room(name: str, folder: Path) -> Finding:
    """What is free where ``folder`` is, or would be made, and whether this user may write there."""
    try:
        folder = folder.absolute()
    except OSError:
        return Finding(f"disk, {name}", "note", "the working folder was removed", "cd to one that is there")
    while not os.path.exists(folder) and folder != folder.parent:
        folder = folder.parent
    free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    value = f"{free / GIB:.1f} GiB free in {folder}" + ("" if writable else ", which this user may not write to")
    return judged(f"disk, {name}", value, free < 10 * GIB or not writable, "make room, or name another folder")


def cores_of(root: Path = ROOT) -> int:
    """Return how many cores this process may use, by its affinity and its container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = group_limit(root, "cpu.max", "-").partition(" ")
    return max(1, min(usable, round(int(quota) / int(period)))) if quota and period.isdigit() else usable


def limits(several: bool, cores: int) -> list[Finding]:
    """What the system lets one process have: ``several`` cards need locked memory."""
    try:
        from resource import RLIM_INFINITY, RLIMIT_CORE, RLIMIT_MEMLOCK, RLIMIT_NOFILE, getrlimit
    except ImportError:  # not a POSIX system
        return []
    files, locked, core = (getrlimit(kind)[0] for kind in (RLIMIT_NOFILE, RLIMIT_MEMLOCK, RLIMIT_CORE))
    said = ["unlimited" if number == RLIM_INFINITY else str(number) for number in (files, locked, core)]
    return [
        judged("open files", said[0], files != RLIM_INFINITY and files < 4096, "ulimit -n 65536"),
        judged("locked memory", said[1], several and locked != RLIM_INFINITY, "ulimit -l unlimited"),
        Finding("core dumps", "ok", said[2]),
        Finding("CPU cores", "ok", f"{cores} usable of {os.cpu_count()}"),
    ]


def tools(which: Callable[[str], str | None]) -> list[Finding]:
    """Programs that a part of this project needs."""
    header = sysconfig.get_path("include") + "/Python.h"
    needed = "for torch.compile on a CPU and for the simulator: apt-get install"
    rows = [
        ("compiler", which("g++") or which("clang++"), f"{needed} g++"),
        ("ninja", which("ninja") or which(str(Path(sys.executable).with_name("ninja"))), f"{needed} ninja-build"),
        ("Python.h", header if os.path.isfile(header) else None, f"{needed} python3-dev"),
        ("git", which("git"), "apt-get install git"),
    ]
    far = [name for name in ("mpirun", "pdsh", "ssh") if not which(name)]
    value = f"no {', '.join(far)}" if far else "mpirun, pdsh, ssh"
    findings = [judged(name, path or "none", path is None, advice) for name, path, advice in rows]
    return [*findings, judged("several machines", value, bool(far), "apt-get install openmpi-bin pdsh openssh-client")]


def hub_home(environ: Mapping[str, str]) -> Path:
    """Return the folder in which the hub's library keeps models, data sets and the token."""
    cache = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(environ.get("HF_HOME") or f"{cache}/huggingface"))


def answer(url: str) -> str:
    """Ask a server for anything; return why there was no answer, or an empty text."""
    said = [f"no answer within {SECONDS} s"]

    def probe() -> None:
        try:
            build_opener().open(Request(url, method="HEAD"), timeout=SECONDS).close()
            said[0] = ""
        except HTTPError as error:  # it is there, whatever it thinks of the page; unless that was a proxy
            said[0] = f"HTTP {error.code}" if error.code == 407 or error.code >= 500 else ""
        except (OSError, HTTPException, ValueError) as error:
            said[0] = str(getattr(error, "reason", error))[:120]

    # In a thread: a name server that drops packets blocks the look-up itself, which no timeout covers.
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return said[0]


def hub(environ: Mapping[str, str]) -> list[Finding]:
    """Whether named models can be had, and as whom; no secret is shown."""
    file = Path(os.path.expanduser(environ.get("HF_TOKEN_PATH") or hub_home(environ) / "token"))
    stored = environ.get("HF_TOKEN") or environ.get("HUGGING_FACE_HUB_TOKEN") or read(file)
    token = Finding("token", "ok", "yes" if stored else "no")
    offline = environ.get("HF_HUB_OFFLINE") or environ.get("TRANSFORMERS_OFFLINE") or ""
    if offline.upper() in ("1", "ON", "YES", "TRUE"):
        return [Finding("hub", "ok", "switched off by the environment: only what is in the cache"), token]
    url = environ.get("HF_ENDPOINT") or "https://huggingface.co"
    parts = re.fullmatch(r"(https?)://(?:[^/@]*@)?([^/\s]+)(?:/\S*)?", url)  # a name and password are not shown
    if not parts:
        return [Finding("hub", "problem", "HF_ENDPOINT is no address", "https://host, or unset it"), token]
    why, way = answer(f"{parts[1]}://{parts[2]}"), " (there is a proxy)" if parts[1] in getproxies() else ""
    return [judged("hub", f"{parts[2]}{way}: {why or 'answers'}", bool(why), "name local folders"), token]


def examine() -> dict[str, list[Finding]]:
    """Look at this machine; returns the findings by group."""
    cards, cores, temporary = count(), cores_of(), os.environ.get("TMPDIR")
    places = {"here": Path(), "temporary": Path(temporary or "/tmp"), "hub's cache": hub_home(os.environ)}
    rooms = [room(name, folder) for name, folder in places.items()]
    if temporary and not os.path.isdir(temporary):  # Python takes /tmp then, others do not
        rooms[1] = Finding("disk, temporary", "note", f"TMPDIR is {temporary}, which is no folder", "make or unset it")
    return {
        "versions": versions(cards),
        "devices": devices(ROOT, os.environ),
        "environment": environment(os.environ, cores),
        "machine": [*memory(ROOT), *rooms, *limits(cards > 1, cores), *tools(shutil.which)],
        "hub": hub(os.environ),
    }


def shown(groups: Mapping[str, list[Finding]]) -> str:
    """Return the findings as aligned lines: name, state, value, and what to do."""
    lines, width = [], max(len(finding.name) for findings in groups.values() for finding in findings)
    for group, findings in groups.items():
        rows = [(f.name.ljust(width), f.state.ljust(7), "; ".join(filter(None, (f.value, f.advice)))) for f in findings]
        lines += [group, *(f"  {'  '.join(row)}" for row in rows)]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    about = "Does this machine fit, and what to do if not. Exit code 1 if something is a problem."
    parser = argparse.ArgumentParser(prog="python -m core.doctor", description=about, allow_abbrev=False)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    as_json, groups = parser.parse_args(argv).json, examine()
    states = [finding.state for findings in groups.values() for finding in findings]
    counts = {"problems": states.count("problem"), "notes": states.count("note")}
    if as_json:
        found = {group: [asdict(finding) for finding in findings] for group, findings in groups.items()}
        text = json.dumps({"fits": not counts["problems"], **counts, "findings": found}, indent=2)
    else:
        text = f"{shown(groups)}\nproblems: {counts['problems']}, notes: {counts['notes']}"
    try:
        print(text, flush=True)
    except OSError as error:  # a reader that has gone, as head has, wants no more
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is left in its buffer
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"the findings cannot be written: {error.strerror}; send them elsewhere") from None
    sys.exit(1 if counts["problems"] else 0)


if __name__ == "__main__":
    exit_with_one_line(main)
