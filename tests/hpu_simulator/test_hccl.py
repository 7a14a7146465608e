"""The backend ``hccl`` between two processes: what arrives, what fails and when, and beside gloo in one group."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.hpu_simulator import programs, simulator

pytestmark = [pytest.mark.compiles, pytest.mark.processes]

START = """
import json, os, signal, sys, time
from datetime import timedelta
import habana_frameworks.torch.distributed.hccl
import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,hpu:hccl", timeout=timedelta(seconds=int(sys.argv[1])))
rank, ranks = dist.get_rank(), dist.get_world_size()
other, found = 1 - rank, {}

def tensor(*values):
    return torch.tensor(values, dtype=torch.float32).to("hpu")
"""
END = """
with open(f"found{rank}.json", "w") as file:
    json.dump(found, file)
"""


def run(folder: Path, body: str, timeout_s: int = 60) -> tuple[list[Any], str]:
    """Run ``body`` in two processes in a group of that timeout; returns what each found, and what was said."""
    (folder / "script.py").write_text(START + body + END)
    options = {"HPU_SIMULATOR_DEVICES": "2", "HPU_SIMULATOR_JSON": str(folder / "report.json")}
    done = simulator.run(*programs.TORCHRUN, "script.py", str(timeout_s), cwd=folder, timeout=120, **options)
    files = [folder / f"found{rank}.json" for rank in range(2)]
    return [json.loads(file.read_text()) if file.exists() else None for file in files], done.stderr


COLLECTIVES = """
alone = [dist.new_group([0]), dist.new_group([1])]
both, device_only = dist.new_group([0, 1]), dist.new_group(backend="hccl")
mine, ours = tensor(rank + 1), tensor(rank + 1)
dist.all_reduce(mine, group=alone[rank])
dist.all_reduce(ours, group=both)
found["groups"] = [mine.item(), ours.item()]

names, sent, got = [None] * ranks, [rank, "x"], [None]
dist.all_gather_object(names, {"rank": rank}, group=device_only)
dist.broadcast_object_list(sent, 0, group=device_only, device=torch.device("hpu"))
dist.scatter_object_list(got, ["a", "b"] if rank == 0 else None, src=0, group=device_only)
found["objects"] = [names, sent, got]

for name in ("SUM", "AVG", "MAX"):
    op, reduced, share, listed = getattr(dist.ReduceOp, name), tensor(rank + 1, 3), tensor(0), tensor(0)
    dist.reduce(reduced, 1, op)
    dist.reduce_scatter_tensor(share, tensor(1 + rank, 2 + rank), op)
    dist.reduce_scatter(listed, [tensor(1 + rank), tensor(5 + rank)], op)
    found[name] = [reduced.tolist() if rank == 1 else None, share.item(), listed.item()]

parts, whole = [tensor(0), tensor(0, 0)], torch.empty(3, device="hpu")
dist.all_to_all(parts, [tensor(1), tensor(9)] if rank == 0 else [tensor(2, 3), tensor(4, 5)])
sizes = [1, 2] if rank == 0 else [2, 1]
dist.all_to_all_single(whole, tensor(*range(10 * rank, 10 * rank + 3)), sizes, sizes)
found["exchanged"] = [[part.tolist() for part in parts], whole.tolist()]

numbers, gathered = [tensor(1 + rank), tensor(2 + rank)], [torch.empty(2, device="hpu") for _ in range(2)]
together = dist.distributed_c10d._coalescing_manager
with together(device=torch.device("hpu")):
    for number in numbers:
        dist.all_reduce(number)
with together(device=torch.device("hpu"), async_ops=True) as waiting:
    for number, target in zip(numbers, gathered):
        dist.all_gather_into_tensor(target, number)
waiting.wait()
found["coalesced"] = [value.tolist() for value in numbers + gathered]

values = [tensor(number + rank) for number in range(4)]
works = [dist.all_reduce(value, async_op=True) for value in values]
for work in reversed(works):
    work.wait()
found["any order"] = [value.item() for value in values]

taken = [torch.zeros(1000, device="hpu") for _ in range(3)]
receiving = [dist.irecv(target, other, tag=tag) for tag, target in enumerate(taken)]
sending = [dist.isend(torch.full((1000,), 10.0 * rank + tag, device="hpu"), other, tag=tag) for tag in range(3)]
noise = [torch.full((1000,), -7.0, device="hpu") for _ in range(100)]  # would lie where the sent ones lay
for work in [*reversed(receiving), *sending]:
    work.wait()
found["messages"] = [target.unique().tolist() for target in taken]

view = torch.zeros(4, 4).to("hpu").t()[1:3]  # with gaps between its elements
view += rank + 1
dist.all_reduce(view)
seen = view.sum().item()
view.fill_(rank + 1)
dist.broadcast(view, 1)
found["view"] = [seen, view.sum().item()]
"""


def test_what_arrives(tmp_path: Path) -> None:
    found, said = run(tmp_path, COLLECTIVES)
    assert None not in found, said[-3000:]
    for rank, mine in enumerate(found):
        assert mine["groups"] == [rank + 1, 3]
        assert mine["objects"] == [[{"rank": 0}, {"rank": 1}], [0, "x"], ["ab"[rank]]]
        assert mine["SUM"] == [[3, 6] if rank else None, [3, 5][rank], [3, 11][rank]]
        assert mine["AVG"] == [[1.5, 3] if rank else None, [1.5, 2.5][rank], [1.5, 5.5][rank]]
        assert mine["MAX"] == [[2, 3] if rank else None, [2, 3][rank], [2, 6][rank]]
        assert mine["exchanged"] == [[[[1], [2, 3]], [0, 10, 11]], [[[9], [4, 5]], [1, 2, 12]]][rank]
        assert mine["coalesced"] == [[3], [5], [3, 3], [5, 5]]
        assert mine["any order"] == [1, 3, 5, 7]
        assert mine["messages"] == [[10.0 * (1 - rank) + tag] for tag in range(3)]
        assert mine["view"] == [24, 16]


DTYPES = """
for dtype in ("bool", "uint8", "int8", "int32", "int64", "float16", "bfloat16", "float64"):
    flags = torch.ones(2, dtype=getattr(torch, dtype), device="hpu")
    dist.broadcast(flags, 0)
"""


def test_dtypes_that_hccl_lacks_are_reported(tmp_path: Path) -> None:
    found, said = run(tmp_path, DTYPES)
    assert None not in found, said[-3000:]
    report = json.loads((tmp_path / "report-rank0.json").read_text())
    refused = {item["dtype"] for item in report["collectives"] if not item["supported"]}
    assert refused == {"bool", "uint8", "int8", "float64"}
    places = next(item["places"] for item in report["findings"] if "HCCL" in item["title"])
    assert len(places) == 4
    assert all("script.py:" in place for place in places)


TIMEOUTS = """
brief, calls = timedelta(seconds=2), {
    "allreduce": lambda group: dist.all_reduce(tensor(1), group=group),
    "reduce_scatter": lambda group: dist.reduce_scatter_tensor(tensor(1), tensor(1, 2), group=group),
    "allgather": lambda group: dist.all_gather_into_tensor(tensor(1, 2), tensor(1), group=group),
    "barrier": lambda group: dist.barrier(group),
    "recv": lambda group: dist.recv(tensor(1), other, group=group),
}
groups = [dist.new_group(backend="hccl", timeout=brief) for _ in calls]  # one that failed is of no more use
for (name, call), group in zip(calls.items(), groups):
    if rank == 0:
        start = time.monotonic()
        try:
            call(group)
        except RuntimeError as error:
            found[name] = [time.monotonic() - start, str(error)]
dist.barrier()  # of the whole group, over the host: it still works
"""


@pytest.mark.slow
def test_a_rank_that_never_comes_is_an_error_within_the_groups_timeout(tmp_path: Path) -> None:
    (found, _), said = run(tmp_path, TIMEOUTS)
    assert found is not None, said[-3000:]
    assert list(found) == ["allreduce", "reduce_scatter", "allgather", "barrier", "recv"]
    for name, (seconds, message) in found.items():
        assert 1.5 < seconds < 6, (name, seconds)
        if name != "recv":
            assert message.startswith(f"hccl: {name} on rank 0 of 2 at script.py:"), message


DEATH = """
dist.all_reduce(tensor(1))
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
start = time.monotonic()
try:
    dist.all_reduce(tensor(1))
except RuntimeError as error:
    found = [time.monotonic() - start, type(error).__name__, str(error)]
"""


def test_a_rank_that_dies_is_an_error_for_the_others_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    # The launcher ends the other rank as soon as it sees the first one's death.
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + DEATH
    (found, dead), said = run(tmp_path, body, timeout_s=600)
    assert time.monotonic() - start < 90
    assert dead is None
    assert found is not None, said[-3000:]
    seconds, kind, message = found
    assert seconds < 20
    assert kind == "DistBackendError"
    assert "hccl: allreduce on rank 0 of 2 at script.py:" in message


def configurations(folder: Path) -> list[str]:
    for stage in (1, 2, 3):
        adam = {"type": "AdamW", "params": {"lr": 0.005, "eps": 1e-12, "weight_decay": 0.01}}
        zero = {"stage": stage, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000}
        content = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
        content |= {"steps_per_print": 1000, "optimizer": adam, "zero_optimization": zero}
        (folder / f"zero{stage}.json").write_text(json.dumps(content))
    return [str(folder / f"zero{stage}.json") for stage in (1, 2, 3)]


def counted(report: dict[str, Any]) -> dict[str, Any]:
    """What a rank counts alike, with another one and alone: memory to the byte, steps, operators and collectives."""
    calls = [(item["op"], item["dtype"], item["count"], item["bytes"]) for item in report["collectives"]]
    phases = {name: dict(values) for name, values in report["phases"].items()}
    for name in ("setup", "optimizer"):  # DeepSpeed prints a tensor, which in shapes mode is read on the host
        phases[name].pop("ops")
    return {"memory": report["memory"], "steps": report["steps"], "phases": phases, "collectives": sorted(calls)}


def test_a_mixed_group_trains_on_both_and_a_lone_rank_of_it_counts_the_same(tmp_path: Path) -> None:
    command = [programs.SCRIPTS / "with_mixed.py", *configurations(tmp_path)]
    found, real, _ = programs.on_hpu(tmp_path / "real", *programs.TORCHRUN, *command, HPU_SIMULATOR_DEVICES="2")
    assert found["sums"] == [[3, 3], [3, 3]]
    assert found["kept"], "DeepSpeed takes the group that is there"
    names = ["cpu", "hpu", "DeepSpeedZeroOptimizer2", "DeepSpeedZeroOptimizer3", "DeepSpeedZeroOptimizer_Stage34"]
    assert list(found["losses"]) == names
    assert len(set(found["losses"]["cpu"])) == 12
    for name, losses in found["losses"].items():
        assert losses == pytest.approx(found["losses"]["cpu"], abs=1e-5), name
    options = {"HPU_SIMULATOR_DEVICES": "2", "HPU_SIMULATOR_MODE": "shapes"}
    _, lone, _ = programs.on_hpu(tmp_path / "lone", *command, **options)
    assert (len(real), len(lone)) == (2, 1)
    first, second = counted(real[0]), counted(lone[0])
    assert first["memory"]["peak"] > 10_000
    assert first == second
