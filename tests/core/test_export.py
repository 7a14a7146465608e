"""A checkpoint's model as others load it; what is no whole checkpoint, and a folder in use, are refused."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, T5ForConditionalGeneration

from core import export, state
from core.checkpoint import OnMain
from core.errors import UserError
from tests.conftest import REPOSITORY
from tests.core.saved import save


@pytest.fixture(scope="module")
def trained(tiny_t5: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as the engine writes one, of weights that are not those of the model before."""
    model, tokenizer = T5ForConditionalGeneration.from_pretrained(tiny_t5), AutoTokenizer.from_pretrained(tiny_t5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1 / 3

    def write(main: OnMain, folder: Path) -> None:
        main(state.save_model, model, folder)
        main(tokenizer.save_pretrained, folder)
        for name in ("optimizer", "optimizer-1", "rng"):
            main(state.save_tensors, {"a/exp_avg": torch.zeros(2)}, folder / f"{name}.safetensors")
        for name in ("state.json", "rank-1.json"):
            main((folder / name).write_text, "{}")

    return save(tmp_path_factory.mktemp("trained"), 7, write)


@pytest.mark.parametrize(("dtype", "wanted"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_from_pretrained_loads_it(trained: Path, tmp_path: Path, dtype: str, wanted: torch.dtype) -> None:
    export.export(trained, tmp_path / "a" / "model", dtype)
    folder = tmp_path / "a" / "model"
    model, saved = (
        T5ForConditionalGeneration.from_pretrained(folder),
        T5ForConditionalGeneration.from_pretrained(trained),
    )
    assert model.dtype == wanted
    assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()
    for (name, one), other in zip(model.named_parameters(), saved.parameters(), strict=True):
        assert torch.equal(one, other.to(wanted)), name
    names = {path.name for path in folder.iterdir()}
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= names
    assert not names & {"checkpoint.json", "state.json", "rank-1.json", "rng.safetensors", "optimizer.safetensors"}
    assert not any(name.startswith("optimizer") for name in names)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(trained))
    size = (folder / "model.safetensors").stat().st_size
    assert size < (trained / "model.safetensors").stat().st_size * (0.75 if dtype == "bf16" else 1.1)


def damaged(trained: Path, tmp_path: Path, name: str, content: bytes | None) -> Path:
    """A copy of the checkpoint in which one file is altered, or gone."""
    folder = tmp_path / "checkpoint-7"
    folder.mkdir()
    for path in trained.iterdir():
        if path.name != name:
            (folder / path.name).write_bytes(path.read_bytes())
        elif content is not None:
            (folder / name).write_bytes(path.read_bytes() + content)
    return folder


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", b"x", "truncated or altered"),
        ("model.safetensors", None, "is missing"),
        ("checkpoint.json", None, "is not complete"),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_refused(
    trained: Path, tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    with pytest.raises(UserError, match=f"{message}.*; give a complete checkpoint folder"):
        export.export(damaged(trained, tmp_path, name, content), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_in_use_is_refused_and_an_empty_one_is_not(trained: Path, tmp_path: Path) -> None:
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "mine.txt").write_text("")
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("used", "file"):
        with pytest.raises(UserError, match="exists and is not an empty folder"):
            export.export(trained, tmp_path / name)
    assert [path.name for path in (tmp_path / "used").iterdir()] == ["mine.txt"]
    export.export(trained, tmp_path / "empty")
    with pytest.raises(UserError, match="cannot be written"):
        export.export(trained, tmp_path / "file" / "below")


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_00_optim_states.pt", "global_step10"])
def test_deepspeeds_own_checkpoint_is_refused_with_a_hint(tmp_path: Path, name: str) -> None:
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1" / name).write_text("")
    with pytest.raises(UserError, match=r"DeepSpeed's own checkpoint.*zero_to_fp32\.py"):
        export.export(tmp_path / "checkpoint-1", tmp_path / "out")


def test_a_model_without_configuration_keeps_its_numbers(tmp_path: Path) -> None:
    """Buffers of whole numbers keep their type, in bf16 as well."""
    model = torch.nn.BatchNorm1d(2)
    folder = save(tmp_path, 1, lambda main, folder: main(state.save_model, model, folder))
    export.export(folder, tmp_path / "out", "bf16")
    found = state.TensorFiles(*(tmp_path / "out").glob("*.safetensors"))
    assert found["num_batches_tracked"].dtype == torch.int64
    assert found["weight"].dtype == torch.bfloat16


def test_the_command_says_what_it_did_or_one_line(trained: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "core.export", str(trained), str(tmp_path / "out"), "--dtype", "bf16"]
    done, again = (subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True) for _ in range(2))
    assert done.returncode == 0, done.stderr
    assert f"numbers in bf16: {tmp_path / 'out'}" in done.stdout
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "bfloat16"
    assert again.returncode != 0
    assert len(again.stderr.strip().splitlines()) == 1
    assert "is not an empty folder" in again.stderr


def test_a_folder_within_the_checkpoint_is_refused(trained: Path) -> None:
    for folder in (trained, trained / "inside"):
        with pytest.raises(UserError, match="is within the checkpoint"):
            export.export(trained, folder)
    assert not (trained / "inside").exists()


def test_nothing_half_written_is_left(trained: Path, tmp_path: Path) -> None:
    """A limit of the file's size stands for a full disk: the error is the system's own."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    try:
        with pytest.raises(UserError, match="cannot be written"):
            export.export(trained, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def changed_unet(pipeline: Path) -> torch.nn.Module:
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel.from_pretrained(pipeline / "unet")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1 / 3
    return model


@pytest.mark.parametrize("averaged", [False, True])
def test_a_pipelines_trained_part_goes_to_its_place(tiny_sd: Path, tmp_path: Path, averaged: bool) -> None:
    """A checkpoint beside the pipeline's other parts becomes a pipeline; averaged weights are those that draw."""
    from diffusers import StableDiffusionPipeline

    model = changed_unet(tiny_sd)
    averages = {name: parameter + 1 for name, parameter in model.named_parameters()}

    def write(main: OnMain, folder: Path) -> None:
        main(state.save_model, model, folder)
        for part in ("model_index.json", "scheduler", "vae", "text_encoder", "tokenizer"):
            path = tiny_sd / part
            (shutil.copytree if path.is_dir() else shutil.copy)(path, folder / part)
        (folder / "learned_from.json").write_text("{}")
        if averaged:
            main(state.save_tensors, averages | {"/steps": torch.tensor(3)}, folder / "ema.safetensors")

    export.export(save(tmp_path, 1, write), tmp_path / "out", "bf16")
    training = {"config.json", "ema.safetensors", "learned_from.json", "model.safetensors"}
    assert not training & {path.name for path in (tmp_path / "out").iterdir()}
    loaded = StableDiffusionPipeline.from_pretrained(tmp_path / "out").unet.state_dict()
    for name, tensor in (averages if averaged else model.state_dict()).items():
        assert torch.equal(loaded[name], tensor.detach().bfloat16().float()), name


def test_a_lone_part_of_a_pipeline_loads_by_itself(tiny_sd: Path, tmp_path: Path) -> None:
    model = changed_unet(tiny_sd)
    folder = save(tmp_path, 1, lambda main, at: main(state.save_model, model, at))
    export.export(folder, tmp_path / "out")
    loaded = type(model).from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in model.state_dict().items())
