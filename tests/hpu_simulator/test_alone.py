"""One rank of many in `shapes` mode needs no other. That it counts what it counts among real ones: `test_hccl`."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from hpu_simulator import alone
from tests.hpu_simulator import programs, simulator

VALUES = """
import json
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("cpu:gloo,hpu:hccl", timeout=timedelta(seconds=20))
rank, ranks = dist.get_rank(), dist.get_world_size()
found = {"ranks": [rank, ranks]}
for device in ("cpu", "hpu"):
    def tensor(*values):
        return torch.tensor(values).to(device)

    mine = {name: tensor(3, 4) for name in ("SUM", "MAX", "PRODUCT", "BXOR")}
    for name, value in mine.items():
        dist.all_reduce(value, getattr(dist.ReduceOp, name))
    mine["broadcast"] = tensor(5)
    dist.broadcast(mine["broadcast"], 2)
    parts = [tensor(0, 0) for _ in range(ranks)]
    dist.all_gather(parts, tensor(7, 8))
    mine["gathered"] = torch.stack([part.cpu() for part in parts])
    mine["whole"] = tensor(*[0] * 2 * ranks)
    dist.all_gather_into_tensor(mine["whole"], tensor(7, 8))
    mine["share"], mine["listed"] = tensor(0, 0), tensor(0)
    dist.reduce_scatter_tensor(mine["share"], tensor(*range(2 * ranks)))
    dist.reduce_scatter(mine["listed"], [tensor(number) for number in range(ranks)])
    mine["exchanged"] = tensor(*[0] * ranks)
    dist.all_to_all_single(mine["exchanged"], tensor(*range(ranks)))
    mine["flag"] = torch.tensor(1.0).to(device)
    dist.all_reduce(mine["flag"])
    found[device] = {name: value.tolist() for name, value in mine.items()}
pair = dist.new_group([rank, (rank + 1) % ranks])
of_pair = torch.tensor(1).to("hpu")
dist.all_reduce(of_pair, group=pair)
device_only, names = dist.new_group(backend="hccl"), [None] * ranks
dist.all_gather_object(names, {"from": rank}, group=device_only)
sent = ["a", {"b": rank}]
dist.broadcast_object_list(sent, rank, group=device_only, device=torch.device("hpu"))
dist.barrier()
dist.monitored_barrier(dist.new_group(backend="gloo"))
late = dist.irecv(torch.empty(2, device="hpu"), (rank + 1) % ranks)
dist.send(torch.ones(2, device="hpu"), (rank + 1) % ranks)
late.wait()
share, parts = torch.empty(1000, device="hpu"), [torch.empty(1000, device="hpu") for _ in range(ranks)]
before = torch.hpu.memory_allocated()
torch.hpu.reset_peak_memory_stats()
dist.all_gather(parts, share)
found["buffer"] = torch.hpu.max_memory_allocated() - before
found |= {"pair": of_pair.item(), "names": names, "sent": sent}
print(json.dumps(found))
"""


@pytest.mark.compiles
@pytest.mark.parametrize("rank", [0, 3])
def test_every_collective_acts_as_if_all_ranks_had_this_ones_values(rank: int, tmp_path: Path) -> None:
    options = {"HPU_SIMULATOR_MODE": "shapes", "HPU_SIMULATOR_DEVICES": "8"} | ({"RANK": "3"} if rank else {})
    said, report = simulator.rehearse(tmp_path, VALUES, timeout=60, **options)
    found = json.loads(said)
    assert found["ranks"] == [rank, 8]
    expected = {
        "SUM": [24, 32],
        "MAX": [3, 4],
        "PRODUCT": [3**8, 4**8],
        "BXOR": [0, 0],
        "broadcast": [5],
        "gathered": [[7, 8]] * 8,
        "whole": [7, 8] * 8,
        "share": [8 * 2 * rank, 8 * (2 * rank + 1)],
        "listed": [8 * rank],
        "exchanged": [rank] * 8,
        "flag": 8.0,
    }
    assert found["cpu"] == found["hpu"] == expected
    assert found["pair"] == 2
    assert found["buffer"] == 8 * 4000, "a list goes through one flat tensor"
    assert found["names"] == [{"from": rank}] * 8
    assert found["sent"] == ["a", {"b": rank}]
    assert (report["rank"], report["world_size"]) == (rank, 8)
    counted = {item["op"]: item["count"] for item in report["collectives"]}
    assert counted["send"] == counted["recv"] == 1


@pytest.mark.compiles
@pytest.mark.parametrize(("options", "rank"), [([], 0), (["--rank", "5"], 5)])
def test_the_command_says_which_rank_it_shows(options: list[str], rank: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, torch; torch.ones(2, device='hpu'); print(os.environ['LOCAL_RANK'])")
    command = ["-m", "hpu_simulator", "--mode", "shapes", "--devices", "4", *options, "--batch_flag", "none"]
    done = simulator.run(*command, script, PYTHONPATH=str(simulator.REPOSITORY), WORLD_SIZE="8")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(rank % 4)], "of a machine's devices"
    assert f"4 devices, rank {rank} of 8" in done.stderr


@pytest.mark.compiles
@pytest.mark.processes
def test_under_a_launcher_each_rank_is_rehearsed_by_itself(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('hccl')\n"
        "if dist.get_rank():\n    dist.all_reduce(torch.ones(2, device='hpu'))\n"
        "torch.ones(2, device='hpu') * 2\n"
    )
    environ = {"HPU_SIMULATOR_MODE": "shapes", "HPU_SIMULATOR_DEVICES": "2"}
    done = simulator.run(*programs.TORCHRUN, script, HPU_SIMULATOR_JSON=str(tmp_path / "report.json"), **environ)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr.count("HPU simulator: gaudi2") == 1
    assert {path.name for path in tmp_path.glob("*.json")} == {"report.json", "report-rank1.json"}


def test_the_store_waits_for_nobody() -> None:
    store = dist.PrefixStore("a", alone.Store("host", 1234, 8, False, timeout=timedelta(seconds=1)))
    store.set("key", "value")
    assert store.get("key") == b"value"
    store.set("address/0", "here")
    assert store.get("address/3") == b"here", "another rank's is this one's"
    assert (store.add("count", 2), store.add("count", 3)) == (2, 5)
    assert store.check(["of another rank"])
    store.wait(["of another rank"], timedelta(hours=1))
    with pytest.raises(RuntimeError, match=r"rehearsed alone.*'a/of another rank'"):
        store.get("of another rank")


def test_nothing_is_replaced_before_it_is_asked_for() -> None:
    code = "import torch.distributed as d; from hpu_simulator import alone; assert d.TCPStore is not alone.Store"
    subprocess.run([sys.executable, "-c", code], cwd=simulator.REPOSITORY, check=True)
