"""The report's counts, of scripts as a user writes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.hpu_simulator import simulator

pytestmark = pytest.mark.compiles

TRAIN = """
import habana_frameworks.torch.core as htcore
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).to("hpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for size in SIZES:
    batch = torch.ones(size, 8).to("hpu")
    out = model(batch)  # forward
    out.square().mean().backward()  # backward
    htcore.mark_step()
    optimizer.step()
    optimizer.zero_grad()
    htcore.mark_step()  # end of the step
"""
STEPS = 8


def place(code: str, mark: str) -> str:
    """Return ``script.py:<line>`` of the line with ``# mark``."""
    found = [number for number, line in enumerate(code.splitlines(), 1) if line.endswith(f"# {mark}")]
    assert len(found) == 1, mark
    return f"script.py:{found[0]}"


def train(folder: Path, sizes: list[int], **options: str) -> dict[str, Any]:
    _, report = simulator.rehearse(folder, TRAIN.replace("SIZES", str(sizes)), **options)
    assert report["steps"] == len(sizes)
    return report


def test_one_odd_batch_is_one_more_graph_and_names_the_line(tmp_path: Path) -> None:
    steady = train(tmp_path, [6] * STEPS)
    graphs = steady["graphs"]
    assert [(graph["phase"], graph["compiled"] + graph["reused"], graph["step"]) for graph in graphs] == [
        ("forward+backward", STEPS, 0),
        ("optimizer", STEPS, 1),
    ]
    assert [graph["cut_by"] for graph in graphs] == ["mark_step", "mark_step"]
    assert graphs[0]["line"] == place(TRAIN, "forward")
    assert graphs[1]["cut_at"] == place(TRAIN, "end of the step")
    assert steady["syncs"] == []
    assert not any("recompiles" in finding["title"] for finding in steady["findings"])

    odd = train(tmp_path, [6] * (STEPS - 1) + [5])
    *before, last = odd["graphs"]
    assert len(odd["graphs"]) == len(graphs) + 1
    assert [graph["ops"] for graph in before] == [graph["ops"] for graph in graphs]
    assert last["line"] == place(TRAIN, "forward")
    assert last["inputs"] == ["float32[5, 8]"]
    assert (last["step"], last["reused"], last["phase"]) == (STEPS - 1, 0, "forward+backward")
    assert odd["syncs"] == []
    assert [finding["title"] for finding in odd["findings"] if "recompiles" in finding["title"]]


PADDED = """
import habana_frameworks.torch.core as htcore
import torch
from torch.utils.data import DataLoader

def collate(rows):  # 21 rows in batches of 4: the last batch is filled up
    rows = rows + rows[:1] * (4 - len(rows))
    longest = 16
    ids = torch.zeros(4, longest, dtype=torch.long)
    for at, row in enumerate(rows):
        ids[at, : len(row)] = row
    return ids

data = [torch.full((3 + number % 10,), number) for number in range(21)]
model = torch.nn.Sequential(torch.nn.Embedding(32, 8), torch.nn.Linear(8, 4)).to("hpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(2):
    for ids in DataLoader(data, batch_size=4, shuffle=True, collate_fn=collate, num_workers=1):
        model(ids.to("hpu", non_blocking=True)).square().mean().backward()
        htcore.mark_step()
        optimizer.step()
        optimizer.zero_grad()
        htcore.mark_step()
"""


def test_a_padded_last_batch_is_no_new_graph(tmp_path: Path) -> None:
    """Also: what a loader's worker processes do at their end leaves this process's report alone."""
    _, report = simulator.rehearse(tmp_path, PADDED)
    assert report["steps"] == 12
    assert [(graph["step"], graph["reused"]) for graph in report["graphs"]] == [(0, 11), (1, 11)]
    assert report["graphs"][0]["inputs"] == ["int64[4, 16]"]
    assert report["out_of_int32"] == report["syncs"] == report["findings"] == []


SYNCS = """
import helper
import habana_frameworks.torch.core as htcore
import torch

x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
large = torch.tensor([1, 2**31 - 1, 3_000_000_000])
small = torch.tensor([-(2**31), 2**31 - 1])
d = x.to("hpu")
big = large.to("hpu")  # too large
small = small.to("hpu")
for step in range(5):
    total = (d * 2).sum()
    total.item()  # item
    host = (d + 1).cpu()  # cpu
    float(total)  # float
    if total > 0:  # if
        pass
for step in range(2):
    print(d)  # print
    chosen = d[d > 3]  # boolean index
    d[d > 100] = 0  # assignment by mask
    d.nonzero()  # nonzero
helper.look(d)  # in a helper
wide = torch.zeros(3, dtype=torch.long, device="hpu")
wide += 2**40  # added
x.copy_(d)  # copied into
d.tolist()  # list
htcore.mark_step()
"""
HELPER = """
def look(tensor):
    return tensor.sum().item()
"""


def test_syncs_copies_and_large_values_are_found_with_their_lines(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text(HELPER)
    said, report = simulator.rehearse(tmp_path, SYNCS)
    assert "8.,  9., 10., 11." in said
    found = {(sync["line"], sync["kind"]): (sync["count"], sync["bytes"]) for sync in report["syncs"]}
    printed = {key: found.pop(key) for key in list(found) if key[0] == place(SYNCS, "print")}
    assert printed
    matrix, vector = 12 * 4, 3 * 8
    assert found == {
        (place(SYNCS, "item"), "item"): (5, 20),
        (place(SYNCS, "cpu"), "copy to host"): (5, 5 * matrix),
        (place(SYNCS, "float"), "item"): (5, 20),
        (place(SYNCS, "if"), "item"): (5, 5),
        (place(SYNCS, "boolean index"), "shape depends on data"): (2, 0),
        (place(SYNCS, "nonzero"), "shape depends on data"): (2, 0),
        ("helper.py:3 from " + place(SYNCS, "in a helper"), "item"): (1, 4),
        (place(SYNCS, "copied into"), "copy to host"): (1, matrix),
        (place(SYNCS, "list"), "copy to host"): (1, matrix),
    }
    to_host = (
        5 * matrix + matrix + matrix + sum(size for (_, kind), (_, size) in printed.items() if kind == "copy to host")
    )
    assert report["copies"]["to_host"]["bytes"] == to_host
    assert report["copies"]["to_device"] == {"count": 3, "bytes": matrix + vector + 2 * 8}
    assert [(note["line"], note["value"], note["count"]) for note in report["out_of_int32"]] == [
        (place(SYNCS, "too large"), 3_000_000_000, 1),
        (place(SYNCS, "added"), 2**40, 1),
    ]
    assert report["steps"] == 0


ACCUMULATED = """
import torch

torch.manual_seed(0)
model = torch.nn.Linear(4, 2, device="hpu")
first = torch.optim.AdamW(model.parameters(), lr=0.1)
with torch.no_grad():
    model(torch.ones(3, 4, device="hpu"))
for step in range(6):
    for micro in range(2):
        (model(torch.ones(3, 4, device="hpu")).sum() / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    first.step()
    first.zero_grad()
"""


def test_steps_phases_and_flops(tmp_path: Path) -> None:
    _, report = simulator.rehearse(tmp_path, ACCUMULATED)
    assert report["steps"] == 6
    assert [step for step, _, _ in report["memory"]["by_step"]] == [1, 2, 3, 4, 5, 6]
    one = 2 * 3 * 4 * 2  # a forward product; the backward pass has one more, for the weights
    flops = {name: phase["flops"] for name, phase in report["phases"].items()}
    assert flops == {"setup": 0, "inference": one, "forward": 12 * one, "backward": 12 * one, "optimizer": 0}
    assert report["phases"]["optimizer"]["ops"] > 6
    assert report["flops_per_step"] == 2 * 2 * one


EAGER = """
import torch

a = torch.ones(4, device="hpu")  # a fill
a + a  # a sum
a + a
b = torch.ones(5, device="hpu")  # another fill
b + b  # another sum
b.add(b, alpha=3)  # the number is fed to it
b + b.to(torch.bfloat16).float()  # two casts more
"""


def test_eager_mode_counts_operators_and_no_graph(tmp_path: Path) -> None:
    _, report = simulator.rehearse(tmp_path, EAGER, mode="eager")
    assert report["graphs"] == []
    assert report["op_compilations"] == 6
    assert (report["lazy"], report["steps"]) == (False, 0)
    assert report["ops"]["aten::add"]["count"] == 5
    report = train(tmp_path, [6] * 3, mode="eager")
    odd = train(tmp_path, [6, 6, 5], mode="eager")
    assert report["graphs"] == odd["graphs"] == []
    assert odd["op_compilations"] > report["op_compilations"] > 0


TRANSFORMER = """
import json
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

def step(model, images):
    out = model(images)
    out.square().mean().backward()

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 32, 4, stride=2, padding=1)
        self.layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.up = torch.nn.ConvTranspose1d(32, 6, 3, stride=2)

    def forward(self, images):
        patches = self.patches(images).flatten(2).transpose(1, 2)
        return self.up(self.layer(patches).transpose(1, 2))

torch.manual_seed(0)
model, images = Model(), torch.randn(2, 3, 8, 8)
with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
    step(model, images)
flops = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
print(json.dumps({"total": counter.get_total_flops(), "flops": flops}))
step(model.to("hpu"), images.to("hpu"))
"""


def test_flops_are_those_of_torchs_counter(tmp_path: Path) -> None:
    said, report = simulator.rehearse(tmp_path, TRANSFORMER)
    counted = json.loads(said)
    assert sum(op["flops"] for op in report["ops"].values()) == counted["total"], (report["ops"], counted)
    assert sum(phase["flops"] for phase in report["phases"].values()) == counted["total"]
