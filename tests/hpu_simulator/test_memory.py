"""Memory is counted to the byte, and ends where the card's ends. Mostly in shapes mode: nothing is really allocated."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.hpu_simulator import simulator

pytestmark = pytest.mark.compiles
GIGABYTES_32 = 32 * 2**30

LIMIT = """
import torch

def attempt(make):
    try:
        return make()
    except torch.OutOfMemoryError as error:
        print(str(error).splitlines()[0])

total = torch.hpu.mem_get_info()[1]
held = torch.empty(total - 64, dtype=torch.uint8, device="hpu")
fits = torch.empty(64, dtype=torch.uint8, device="hpu")
print(total, torch.hpu.mem_get_info()[0])
del fits
attempt(lambda: torch.empty(65, dtype=torch.uint8, device="hpu"))
attempt(lambda: held[:65] + 1)
attempt(lambda: torch.cat([held[:33], held[:32]]))
attempt(lambda: held[:65].clone())
attempt(lambda: torch.ones(17).to("hpu"))
print(torch.hpu.mem_get_info()[0])
held[:64] + 1
"""
TEXT = re.compile(
    r"HPU out of memory: (\S+) tried to allocate (\d+) bytes in the (\w+) phase at (\S+); "
    r"hpu:0 has (\d+) bytes, of which (\d+) are in use"
)


def test_the_last_byte_can_be_had_and_one_more_cannot(tmp_path: Path) -> None:
    said, report = simulator.rehearse(tmp_path, LIMIT, generation="gaudi", HPU_SIMULATOR_MODE="shapes")
    first, *errors, last = said.splitlines()
    assert (first, last) == (f"{GIGABYTES_32} 0", "64")
    full = (str(GIGABYTES_32), str(GIGABYTES_32 - 64))
    assert [TEXT.fullmatch(error).groups() for error in errors] == [
        ("aten::empty", "65", "setup", "script.py:15", *full),
        ("aten::add", "65", "setup", "script.py:16", *full),
        ("aten::cat", "65", "setup", "script.py:17", *full),
        ("aten::empty_strided", "65", "setup", "script.py:18", *full),
        ("aten::empty_strided", "68", "setup", "script.py:19", *full),
    ]
    assert report["out_of_memory"] == {"bytes": 65, "op": "aten::empty", "phase": "setup", "line": "script.py:15"}
    memory = report["memory"]
    assert (memory["limit"], memory["peak"]) == (GIGABYTES_32, GIGABYTES_32)
    assert [finding["severity"] for finding in report["findings"]] == ["error"]


PHASES = """
import json
import torch

def forward(model, batch, optimizer):
    model(batch)  # forward

def backward(model, batch, optimizer):
    model(batch).square().mean().backward()  # backward

def optimizer(model, batch, optimizer):
    model(batch).square().mean().backward()
    optimizer.step()  # optimizer

def train(part, rows, room=None):
    '''Return the bytes that two steps needed, or the error where `room` bytes were not enough.'''
    layers = torch.nn.Linear(256, 1024), torch.nn.GELU(), torch.nn.Linear(1024, 256)
    model = torch.nn.Sequential(*layers).to("hpu")
    batch = torch.ones(rows, 256, device="hpu")
    adam = torch.optim.AdamW(model.parameters(), foreach=False)
    free, _ = torch.hpu.mem_get_info()
    held = torch.empty(0 if room is None else free - room, dtype=torch.uint8, device="hpu")
    before = torch.hpu.memory_allocated()
    torch.hpu.reset_peak_memory_stats()
    try:
        for _ in range(2):
            part(model, batch, adam)
            adam.zero_grad()
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0]
    return torch.hpu.max_memory_allocated() - before

found = {}
for part, rows in ((forward, 40_000), (backward, 30_000), (optimizer, 2)):
    need = train(part, rows)
    found[part.__name__] = [need, train(part, rows, need), train(part, rows, need - 1)]
    assert torch.hpu.memory_allocated() == 0
print(json.dumps(found))
part(torch.nn.Linear(2, 2, device="hpu"), torch.ones(2**25, 2, device="hpu").expand(2**6, 2**25, 2), None)
"""


def test_training_fits_to_the_byte_and_fails_in_the_phase_that_needs_most(tmp_path: Path) -> None:
    """The peak that is counted with room enough is exactly the room that training needs."""
    (tmp_path / "script.py").write_text(PHASES)
    options = {"generation": "gaudi", "HPU_SIMULATOR_MODE": "shapes", "HPU_SIMULATOR_JSON": str(tmp_path / "a.json")}
    done = simulator.run("script.py", cwd=tmp_path, timeout=100, **options)
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"forward", "backward", "optimizer"}
    for name, (need, given, error) in found.items():
        assert need == given
        op, size, phase, line, total, used = TEXT.fullmatch(error).groups()
        assert phase == name
        assert PHASES.splitlines()[int(line.rpartition(":")[2]) - 1].endswith(f"# {name}")
        assert int(used) + int(size) == int(total) + 1, "the allocation that needs the one byte that is missing"
        if name == "forward":
            assert op in ("aten::addmm", "aten::gelu")
            out = {"bytes": int(size), "op": op, "phase": phase, "line": line}
            assert json.loads((tmp_path / "a.json").read_text())["out_of_memory"] == out, "the first"
    assert "torch.OutOfMemoryError: HPU out of memory: aten::" in done.stderr, "it ends the program as on a card"
    assert "out of memory in forward" in done.stderr


COUNTERS = """
import json
import torch

def used(device=0):
    stats = torch.hpu.memory_stats(device)
    return stats["InUse"], stats["MaxInUse"]

seen = {"keys": sorted(torch.hpu.memory_stats()), "limit": torch.hpu.memory_stats()["Limit"]}
seen["start"] = used()
a = torch.empty(1000, device="hpu")
b = torch.empty(3, 5, dtype=torch.bfloat16, device="hpu")
seen["made"] = used()
views = a[10:], a.view(10, 100).t(), a.detach(), b.expand(7, 3, 5), a.reshape(-1), a.as_strided((2, 2), (1, 1))
a.add_(1)
a[:5].fill_(2)
seen["views"] = used()
c = a * 2
seen["result"] = used()
del c
seen["freed"] = used()
torch.hpu.reset_peak_memory_stats()
seen["reset"] = used()
del a
seen["kept by its views"] = used()
del views
seen["gone"] = used()
empty = torch.empty(0, device="hpu")
seen["empty"] = used()
b.resize_(30)
seen["resized"] = used()
b.data = torch.empty(2, dtype=torch.bfloat16, device="hpu")
seen["replaced"] = used()
seen["stats"] = torch.hpu.memory_stats()
other = torch.ones(4, 4, device="hpu:1")
with torch.hpu.device(1):
    another = torch.ones(2, device="hpu")
moved = other.to("hpu:0")
seen["other"] = used(1)
seen["first"] = used(0)
print(json.dumps(seen))
"""


@pytest.mark.parametrize("kind", ["compute", "shapes"])
def test_counters_are_exact(kind: str, tmp_path: Path) -> None:
    said, report = simulator.rehearse(tmp_path, COUNTERS, HPU_SIMULATOR_DEVICES="2", HPU_SIMULATOR_MODE=kind)
    seen = {name: tuple(value) if isinstance(value, list) else value for name, value in json.loads(said).items()}
    names = "Limit InUse MaxInUse NumAllocs NumFrees ActiveAllocs MaxAllocSize TotalSystemAllocs TotalSystemFrees"
    assert seen["keys"] == tuple(sorted([*names.split(), "TotalActiveAllocs"]))
    assert seen["limit"] == 96 * 2**30
    assert seen["start"] == (0, 0)
    assert seen["made"] == seen["views"] == (4030, 4030)
    assert seen["result"] == (8030, 8030)
    assert seen["freed"] == (4030, 8030)
    assert seen["reset"] == seen["kept by its views"] == (4030, 4030)
    assert seen["gone"] == seen["empty"] == (30, 4030)
    assert seen["resized"][0] == 60
    assert seen["replaced"][0] == 4
    stats = seen["stats"]
    assert (stats["MaxAllocSize"], stats["InUse"]) == (4000, 4)
    assert stats["ActiveAllocs"] == stats["NumAllocs"] - stats["NumFrees"] == stats["TotalActiveAllocs"] == 1
    assert stats["NumAllocs"] == stats["TotalSystemAllocs"]
    assert seen["other"] == (64 + 8, 64 + 8)
    assert seen["first"] == (4 + 64, 4030)
    assert report["devices"] == 2
    assert report["memory"]["limit"] == 96 * 2**30
