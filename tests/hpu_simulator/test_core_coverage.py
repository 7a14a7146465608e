"""What the core decides before torch starts, on the simulated card: a process for each case."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, pairs, write_jsonl
from tests.hpu_simulator import simulator

pytestmark = [pytest.mark.compiles, pytest.mark.processes]

# Which type each operator computes in, under the configuration's lists.
LISTS = """
import json
from core.arguments import parse_arguments
from core.errors import exit_with_one_line
from core.mixed_precision import effective_op_lists, prepare_environment, resolve_precision

def main():
    args = parse_arguments(["--do_eval", "--bf16", "--gaudi_config", "config.json"], description="")
    config = prepare_environment(args)
    import torch
    from core.device import select_device
    device = select_device(args, args.execution_mode)
    device.check_mode()
    x = torch.randn(4, 4, device="hpu")
    with resolve_precision(args, config, device).autocast():
        linear = torch.nn.functional.linear(x, x, x[0])
        found = {"mm": x.mm(x), "linear": linear, "softmax": x.softmax(-1), "exp": x.exp()}
    lists = effective_op_lists(config, device)
    print(json.dumps([{name: str(y.dtype)[6:] for name, y in found.items()}, lists]))

exit_with_one_line(main)
"""
LOWER, WIDE = "bfloat16", "float32"


@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize(
    ("config", "types"),
    [
        ({}, (LOWER, LOWER, LOWER, WIDE)),
        ({"autocast_bf16_ops": ["mm", "exp"]}, (LOWER, WIDE, WIDE, LOWER)),
        ({"autocast_fp32_ops": ["softmax", "mm"]}, (WIDE, LOWER, WIDE, WIDE)),
        ({"autocast_bf16_ops": ["linear"], "autocast_fp32_ops": ["mm"]}, (WIDE, LOWER, WIDE, WIDE)),
    ],
    ids=["none", "bf16", "fp32", "both"],
)
def test_operator_lists_decide_what_runs_in_bf16(tmp_path: Path, mode: str, config: dict, types: tuple) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    done = simulator.run("-c", LISTS, cwd=tmp_path, mode=mode)
    assert done.returncode == 0, done.stderr[-2000:]
    found, lists = json.loads(done.stdout)
    assert tuple(found.values()) == types, found
    assert lists == config


def test_lists_after_torch_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"autocast_bf16_ops": ["mm"]}))
    done = simulator.run("-c", "import torch\n" + LISTS, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: the bridge was imported before the operator lists")


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_a_variable_changed_after_torch_is_one_line(tmp_path: Path, mode: str) -> None:
    """The run follows the variable, the bridge what it had read: neither would end a graph."""
    (tmp_path / "config.json").write_text("{}")
    other = "0" if mode == "lazy" else "1"
    code = f"import os, torch\nos.environ['PT_HPU_LAZY_MODE'] = '{other}'\n" + LISTS
    done = simulator.run("-c", code, cwd=tmp_path, mode=mode)
    assert done.returncode == 2
    line = done.stderr.splitlines()[0]
    assert line.startswith(f"error: PT_HPU_LAZY_MODE became {other}, but the bridge read {1 - int(other)}")


@pytest.mark.parametrize(("generation", "name"), [("gaudi", "gaudi"), ("gaudi2", "gaudi2"), ("gaudi3", "gaudi3")])
def test_the_card_is_named_and_has_its_memory(generation: str, name: str) -> None:
    code = """
from core.arguments import parse_arguments
from core.mixed_precision import prepare_environment
args = parse_arguments(["--do_eval"], description="")
prepare_environment(args)
from core.device import select_device
device = select_device(args, args.execution_mode)
print(device.name, device.memory_stats()["Limit"] // 2**30)
"""
    done = simulator.run("-c", code, generation=generation)
    assert done.stdout.split() == [name, {"gaudi": "32", "gaudi2": "96", "gaudi3": "128"}[generation]], done.stderr


@pytest.mark.parametrize("mode", ["lazy", pytest.param("eager", marks=pytest.mark.slow)])
def test_a_run_by_its_command_loses_the_same_as_on_a_machine_without_a_card(tmp_path: Path, mode: str) -> None:
    """20 steps of the built-in model in fp32; the texts are few, or reading them would take longer than training."""
    file = write_jsonl(tmp_path / "rows.jsonl", pairs(200, seed=5))
    script = REPOSITORY / "recipes" / "summarization" / "run.py"
    flags = [script, "--config", script.with_name("built_in.json"), "--train_file", file, "--gaudi_config", "t5"]
    flags += ["--do_eval", "False", "--do_predict", "False", "--max_steps", "20", "--logging_steps", "1"]
    flags += ["--save_strategy", "no", "--report_to", "none", "--disable_tqdm", "--per_device_train_batch_size", "8"]
    flags += ["--learning_rate", "0.01"]  # the built-in rate makes a last bit of a gradient's norm a thousandfold
    report = tmp_path / "report.json"
    done = simulator.run(*flags, "--output_dir", "card", cwd=tmp_path, mode=mode, HPU_SIMULATOR_JSON=str(report))
    assert done.returncode == 0, done.stderr[-3000:]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HPU_", "PT_HPU_"))}
    kept |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, *map(str, flags), "--output_dir", "host"]
    subprocess.run(command, cwd=tmp_path, env=kept, check=True, capture_output=True, timeout=300)
    card, host = (
        [float(row["loss"]) for row in csv.DictReader((tmp_path / name / "logs" / "metrics.csv").open())]
        for name in ("card", "host")
    )
    assert len(card) == 20
    assert card == pytest.approx(host, abs=1e-5)
    facts = {name: json.loads((tmp_path / name / "all_results.json").read_text())["run"] for name in ("card", "host")}
    assert facts["card"]["device"]["name"] == "gaudi2"
    assert facts["host"]["device"]["name"].startswith("cpu")
    counted = json.loads(report.read_text())
    assert counted["steps"] == 20
    in_the_loop = [sync for sync in counted["syncs"] if "optimizers.py" in sync["line"] or sync["count"] >= 19]
    assert sum(sync["count"] for sync in in_the_loop if "nonfinite.py" in sync["line"]) == 20  # one read a record
    if mode == "lazy":
        forward = [graph for graph in counted["graphs"] if "forward" in graph["phase"]]
        updates = [graph for graph in counted["graphs"] if graph["phase"] == "optimizer" and graph["ops"] > 1]
        shapes = facts["card"]["batch_shapes"]["train"]
        assert len(forward) == len(shapes)
        assert len(updates) == 2  # the first makes the optimiser's state; logging clears one sum
