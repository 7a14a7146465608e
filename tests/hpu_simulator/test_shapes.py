"""`shapes` mode: models of any size step through, and what is counted equals what `compute` counts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.hpu_simulator import simulator

pytestmark = pytest.mark.compiles
SCRIPTS = Path(__file__).with_name("scripts")
T5_3B = {"d_model": 1024, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "d_kv": 128, "vocab_size": 32128}


def shapes(folder: Path, code: str, **options: str) -> tuple[str, dict[str, Any]]:
    return simulator.rehearse(folder, code, **{"HPU_SIMULATOR_MODE": "shapes", **options})


def step_of(folder: Path, name: str, **options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    out, report = shapes(folder, (SCRIPTS / f"{name}.py").read_text(encoding="utf-8"), **options)
    return json.loads(out.splitlines()[-1]), report


def test_a_training_step_of_t5_3b_fits_gaudi2_in_seconds(tmp_path: Path) -> None:
    found, report = step_of(tmp_path, "t5_3b_step")
    assert found["parameters"] == 2_851_598_336
    assert max(found["seconds"]) < 10
    assert found["host"] < 2e9
    # Weights, gradients and two moments, in fp32.
    assert 16 * found["parameters"] <= report["memory"]["peak"] < report["memory"]["limit"] == 96 * 2**30
    assert report["steps"] == 2
    assert report["out_of_memory"] is None


def test_a_training_step_of_t5_3b_does_not_fit_the_first_gaudi(tmp_path: Path) -> None:
    done = simulator.run(SCRIPTS / "t5_3b_step.py", cwd=tmp_path, generation="gaudi", HPU_SIMULATOR_MODE="shapes")
    assert done.returncode == 1
    assert "torch.OutOfMemoryError: HPU out of memory" in done.stderr
    assert f"hpu:0 has {32 * 2**30} bytes" in done.stderr


def test_stable_diffusion_generates_and_trains(tmp_path: Path) -> None:
    found, report = step_of(tmp_path, "stable_diffusion", mode="eager")
    assert found["shape"] == [1, 512, 512, 3]
    assert found["parameters"] == 859_520_964
    assert found["host"] < 2e9
    assert found["generation_peak"] < 16 * found["parameters"] < report["memory"]["peak"] < 32 * 2**30
    assert set(report["phases"]) >= {"inference", "forward", "backward", "optimizer"}


def test_llama_7b_with_lora(tmp_path: Path) -> None:
    found, report = step_of(tmp_path, "llama_7b_lora", mode="eager")
    assert found["parameters"] - found["trained"] == 6_738_415_616
    assert found["host"] < 2e9
    assert 2 * found["parameters"] < report["memory"]["peak"] < 96 * 2**30
    # Forward and backward of the frozen weights: 2 for each, less the look-up table, which multiplies nothing.
    multiplied = found["parameters"] - 32000 * 4096
    assert report["phases"]["forward"]["flops"] >= 2 * multiplied * 8 * 512


RECIPE = "recipes/summarization/run.py --gaudi_config t5 --do_train --do_eval --max_steps 4 --save_strategy no"
SIZES = "--per_device_train_batch_size 8 --per_device_eval_batch_size 8 --optim adafactor --max_source_length 64"


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_both_modes_count_the_summarization_recipe_alike(mode: str, tmp_path: Path) -> None:
    """Training and evaluation by the loss; generated lengths depend on values, which shapes mode has none of."""
    words = "the quick brown fox jumps over the lazy dog and runs through the green forest".split()
    rows = [{"text": " ".join(words[: 3 + n % 12] * (1 + n % 4)), "summary": words[n % 15]} for n in range(60)]
    data = tmp_path / "rows.json"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    counted = {}
    for kind in ("compute", "shapes"):
        report = tmp_path / f"{kind}.json"
        command = [*RECIPE.split(), *SIZES.split(), "--train_file", data, "--validation_file", data]
        more = {"HPU_SIMULATOR_MODE": kind, "HPU_SIMULATOR_JSON": str(report)}
        done = simulator.run(*command, "--output_dir", tmp_path / kind, mode=mode, **more)
        assert done.returncode == 0, done.stderr[-3000:]
        counted[kind] = json.loads(report.read_text(encoding="utf-8"))
    first, second = counted.values()
    assert first["steps"] == 4
    assert first["memory"]["peak"] == second["memory"]["peak"] > 1e7
    assert first["phases"] == second["phases"]
    assert {"forward", "backward", "optimizer", "inference"} <= set(first["phases"])
    assert [graph["ops"] for graph in first["graphs"]] == [graph["ops"] for graph in second["graphs"]]
    assert first["op_compilations"] == second["op_compilations"]


def folder_of_t5_3b(folder: Path) -> Path:
    """A model folder as a hub would give it, without weights."""
    from transformers import T5Config

    from core.sample_data import train_tokenizer

    train_tokenizer(["the quick brown fox jumps over the lazy dog"] * 10, vocab_size=300).save_pretrained(folder)
    T5Config(**T5_3B, decoder_start_token_id=0).save_pretrained(folder)
    return folder


def test_the_recipe_runs_unchanged_with_the_published_run_file_of_t5_3b(tmp_path: Path) -> None:
    rows = [{"article": "the quick brown fox " * 9, "highlights": "the lazy dog"}] * 8
    (tmp_path / "rows.json").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    model = folder_of_t5_3b(tmp_path / "t5-3b")
    command = ["-m", "hpu_simulator", "--mode", "shapes", "--generation", "gaudi2", "--batch_flag", "none"]
    command += ["recipes/summarization/run.py", "--config", "recipes/summarization/t5_3b_gaudi2_8x1.json"]
    command += ["--model_name_or_path", str(model), "--dataset_name", "", "--train_file", str(tmp_path / "rows.json")]
    done = simulator.run(
        *command, "--max_steps", "1", "--save_strategy", "no", "--output_dir", str(tmp_path / "out"), PYTHONPATH=""
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "1 optimiser step" in done.stderr
    weights = tmp_path / "out" / "model.safetensors"
    assert weights.stat().st_size > 11e9  # complete in its header
    assert weights.stat().st_blocks * 512 < 1e6  # and a hole on the disk


SEARCH = """
import argparse, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=1)
batch = parser.parse_args().batch
layer = torch.nn.Linear(2**15, 2**15).to("hpu")
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
layer(torch.ones(batch, 2**20, 1).expand(-1, -1, 2**15)[:, : 2**11].to("hpu")).sum().backward()
optimizer.step()
"""


@pytest.mark.slow
def test_the_largest_batch_that_fits_is_found_and_the_next_does_not_fit(tmp_path: Path) -> None:
    """One row is 2**11 vectors of 2**15 numbers: 256 MiB in and out of the layer."""
    script = tmp_path / "script.py"
    script.write_text(SEARCH, encoding="utf-8")
    start = ["-m", "hpu_simulator", "--mode", "shapes", "--generation", "gaudi", "--batch_flag", "batch"]
    done = simulator.run(*start, script, "--batch", "3", PYTHONPATH="")
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stderr.splitlines() if line.startswith("largest batch that fits gaudi:"))
    best = int(line.split(":")[1].split()[0])
    for batch, fits in ((best, True), (best + 1, False)):
        done = simulator.run(script, "--batch", str(batch), generation="gaudi", HPU_SIMULATOR_MODE="shapes")
        assert ("OutOfMemoryError" not in done.stderr) == fits, batch


def test_values_read_back_are_one_and_known_numbers_are_kept(tmp_path: Path) -> None:
    code = """
    import torch
    x = torch.randn(4, device="hpu")
    print(x.sum().item(), x.cpu().tolist(), bool(x.any()), (x.max() == 0).item())
    done = torch.zeros(4, dtype=torch.bool, device="hpu")
    print(done.any().item(), (done | True).all().item(), (~done).all().item(), (done & x.bool()).any().item())
    done[1] = True
    print(done.any().item(), torch.full((3,), 7, device="hpu").clone().tolist())
    """
    out, report = shapes(tmp_path, "\n".join(line[4:] for line in code.splitlines()))
    assert out.splitlines() == ["1.0 [1.0, 1.0, 1.0, 1.0] True False", "False True True False", "True [7, 7, 7]"]
    assert sum(sync["count"] for sync in report["syncs"]) == 10


def test_integers_of_the_host_are_remembered_and_nothing_is_nan(tmp_path: Path) -> None:
    code = """
    import torch
    x = torch.tensor([[3, 5], [7, 9]]).to("hpu")
    print(x.tolist(), x[1, 0].item(), x.t().clone().to(torch.int32).tolist(), (x + 1).tolist())
    x[0] = torch.tensor([1, 2])
    print(x.tolist(), torch.tensor(4.0).to("hpu").item(), torch.tensor([4.0, 4.0]).to("hpu").tolist())
    y = torch.randn(3, device="hpu")
    bad = torch.zeros(1, device="hpu")
    bad += (y.isnan() | y.isinf()).float().max()
    print(bad.item(), y.isnan().any().item(), y)
    x.add_(1)
    print(x.tolist())
    """
    out, _ = shapes(tmp_path, "\n".join(line[4:] for line in code.splitlines()))
    assert out.splitlines() == [
        "[[3, 5], [7, 9]] 7 [[3, 7], [5, 9]] [[1, 1], [1, 1]]",
        "[[1, 2], [7, 9]] 4.0 [1.0, 1.0]",
        "0.0 False tensor([1., 1., 1.], device='hpu:0')",
        "[[1, 1], [1, 1]]",
    ]


def test_generation_goes_on_to_its_longest(tmp_path: Path) -> None:
    code = """
import torch
from transformers import T5Config, T5ForConditionalGeneration
sizes = {"d_model": 64, "d_ff": 128, "num_layers": 2, "num_heads": 4, "d_kv": 16, "vocab_size": 100}
model = T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).eval().to("hpu")
ids = torch.full((2, 10), 5).to("hpu")
for beams in (1, 4):
    calls = []
    hook = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    model.generate(ids, attention_mask=torch.ones_like(ids), max_length=20, num_beams=beams)
    hook.remove()
    print(len(calls))
"""
    assert shapes(tmp_path, code)[0].split() == ["19", "19"]


@pytest.mark.parametrize("operation", ["x.nonzero()", "x[x > 0]", "torch.unique(x)"])
def test_a_shape_that_depends_on_data_is_said_with_its_line(operation: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f'import torch\nx = torch.ones(4, device="hpu")\n{operation}\n', encoding="utf-8")
    done = simulator.run(script, cwd=tmp_path, HPU_SIMULATOR_MODE="shapes")
    assert done.returncode == 1
    last = next(line for line in done.stderr.splitlines() if line.startswith("RuntimeError"))
    assert "depends on data, at script.py:3" in last
    assert "--mode compute" in last


def test_models_load_without_their_weights_and_save_without_their_bytes(tmp_path: Path) -> None:
    code = f"""
import torch
from diffusers import AutoencoderKL
from transformers import AutoModelForSeq2SeqLM
model = AutoModelForSeq2SeqLM.from_pretrained({str(folder_of_t5_3b(tmp_path / "t5"))!r}, dtype="bfloat16")
print(type(model).__name__, model.dtype, model.training, model.generation_config.decoder_start_token_id)
print(model.shared.weight is model.lm_head.weight)
torch.manual_seed(0)
small, large = torch.nn.Linear(8, 8).weight, torch.nn.Linear(1024, 1024).weight
print(small.std() > 0, large.shape)
AutoencoderKL(block_out_channels=(32,), norm_num_groups=8).save_pretrained("vae")
print(type(AutoencoderKL.from_pretrained("vae")).__name__)
"""
    lines = shapes(tmp_path, code + 'torch.ones(1, device="hpu")\n')[0].splitlines()
    assert lines[0] == "T5ForConditionalGeneration torch.bfloat16 False 0"
    assert lines[1] == "True"
    assert lines[2].startswith("tensor(True)")
    assert lines[3] == "AutoencoderKL"
    file = tmp_path / "vae" / "diffusion_pytorch_model.safetensors"
    with file.open("rb") as opened:
        header = json.loads(opened.read(struct.unpack("<Q", opened.read(8))[0]))
    ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    assert file.stat().st_size == 8 + len(json.dumps(header)) + (-len(json.dumps(header)) % 8) + max(ends)
