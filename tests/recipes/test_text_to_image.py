"""The recipe end to end on small real pipelines: data, losses, resume, saved pipelines, drawing, bad input, copies."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core.augment import CropView
from core.errors import UserError
from tests.conftest import REPOSITORY, save_captioned, write_jsonl

SCRIPT = REPOSITORY / "recipes" / "text_to_image" / "run.py"
QUIET = ["--disable_tqdm", "--report_to", "none", "--use_cpu"]
# Two epochs of three optimiser steps of six rows, the last of an epoch of one row.
SIX_STEPS = "--do_train --num_train_epochs 2 --per_device_train_batch_size 3 --gradient_accumulation_steps 2".split()
SIX_STEPS += "--learning_rate 0.01 --logging_steps 1 --random_flip".split()
ONE_STEP = "--do_train --max_steps 1 --learning_rate 0 --per_device_train_batch_size 13 --save_strategy no".split()
DRAW = "--do_generate --num_inference_steps 2 --prompts alpha beta".split()
WEIGHTS = "unet/diffusion_pytorch_model.safetensors"


class Recipe:
    """The recipe's ``main`` with a new output folder for each run."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.module, self.folder, self.runs = module, folder, 0

    def __call__(self, *flags: Any, model: Path | None = None, data: dict[str, Any] | None = None) -> dict[str, Any]:
        self.runs += 1
        self.output = self.folder / f"run{self.runs}"
        named = ["--model_name_or_path", model] if model else []
        named += [word for item in (data or {}).items() for word in item]
        named += ["--output_dir", self.output, "--cache_dir", self.folder / "cache"]
        return self.module.main(list(map(str, [*named, *QUIET, *flags])))

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "all_results.json").read_text())

    @property
    def images(self) -> list[np.ndarray]:
        return drawn(self.output / "images")

    def losses(self, after: int = 0) -> dict[str, str]:
        rows = csv.DictReader((self.output / "logs" / "metrics.csv").open())
        return {row["step"]: row["loss"] for row in rows if row["loss"] and int(row["step"]) > after}


def drawn(folder: Path) -> list[np.ndarray]:
    return [np.asarray(Image.open(path)) for path in sorted(folder.glob("[0-9]*.png"))]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(path)


def same(first: Path, second: Path) -> None:
    """Two files of tensors have the same, bit for bit."""
    found, expected = tensors(first), tensors(second)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), f"{first}: {name}"


def near(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], most: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], rtol=0, atol=most, msg=lambda text, name=name: name + text)


def distance(first: list[np.ndarray], second: list[np.ndarray]) -> int:
    """The greatest difference of a point, in levels of 255."""
    return max(int(np.abs(a.astype(int) - b).max()) for a, b in zip(first, second, strict=True))


def load(folder: Path) -> Any:
    """A pipeline as anybody loads it."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.fixture
def recipe(text_to_image: ModuleType, tmp_path: Path) -> Recipe:
    return Recipe(text_to_image, tmp_path)


@pytest.fixture
def made(text_to_image: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the next run makes: its loaders, by split."""
    found, make = SimpleNamespace(loaders={}), text_to_image.make_loader

    def watch(args: Any, run: Any, pictures: Any, *others: Any) -> Any:
        found.loaders[pictures.split] = make(args, run, pictures, *others)
        return found.loaders[pictures.split]

    monkeypatch.setattr(text_to_image, "make_loader", watch)
    return found


def only(folders: dict[str, str], *splits: str) -> dict[str, str]:
    return {flag: path for flag, path in folders.items() if flag[2:].rpartition("_")[0] in splits}


def as_program(*flags: Any, script: Path = SCRIPT, **options: Any) -> subprocess.CompletedProcess:
    command = [sys.executable, *map(str, [script, *flags])]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


# ------------------------------------------------------------------------------------------------------ whole, resumed

WAYS = {
    "full": "--use_ema --ema_decay 0.6 --cache_latents --prediction_type v_prediction "
    "--proportion_empty_prompts 0.3 --lr_scheduler cosine --noise_offset 0.1".split(),
    "adapters": "--lora_rank 2 --lora_dropout 0.3 --learning_rate 0.05 --snr_gamma 5 --max_grad_norm 0.5".split(),
}
MODELS = {"full": "tiny_sd", "adapters": "tiny_sdxl"}


def run_whole(way: str, recipe: Recipe, model: Path, data: dict[str, str], *more: Any) -> dict[str, Any]:
    return recipe(*SIX_STEPS, *WAYS[way], "--save_steps", 1, *more, model=model, data=data)


@pytest.fixture(scope="module")
def full(
    text_to_image: ModuleType, tiny_sd: Path, captioned_folders: dict[str, str], tmp_path_factory: Any
) -> tuple[Recipe, dict[str, Any]]:
    """All weights are trained and averaged, latents are kept; images are drawn on the way and in the end."""
    recipe = Recipe(text_to_image, tmp_path_factory.mktemp("full"))
    shown = "--validation_prompt alpha --num_validation_images 2 --validation_steps 4 --report_to tensorboard".split()
    more = ["--do_eval", "--eval_strategy", "epoch", *shown, *DRAW, "--latents_dir", recipe.folder / "kept"]
    return recipe, run_whole("full", recipe, tiny_sd, captioned_folders, *more)


@pytest.fixture(scope="module")
def adapted(
    text_to_image: ModuleType, tiny_sdxl: Path, captioned_folders: dict[str, str], tmp_path_factory: Any
) -> tuple[Recipe, dict[str, Any]]:
    """Adapters are trained, views of the images are new in each epoch."""
    recipe = Recipe(text_to_image, tmp_path_factory.mktemp("adapted"))
    return recipe, run_whole("adapters", recipe, tiny_sdxl, captioned_folders, "--do_eval")


@pytest.fixture(scope="module")
def built_in(text_to_image: ModuleType, tmp_path_factory: Any) -> tuple[Recipe, dict[str, Any]]:
    """Four steps of what runs without a model and data."""
    recipe = Recipe(text_to_image, tmp_path_factory.mktemp("built_in"))
    return recipe, recipe(*BUILT_IN, "--save_steps", 1)


BUILT_IN = "--max_steps 4 --autoencoder_steps 4 --max_train_samples 96 --max_eval_samples 12 --logging_steps 1".split()
BUILT_IN += "--per_device_train_batch_size 32 --per_device_eval_batch_size 8 --learning_rate 0.001".split()
BUILT_IN += "--lr_scheduler_type constant --proportion_empty_prompts 0.1 --ema_decay 0.5 --batch_size 3".split()
BUILT_IN += "--num_images_per_prompt 2 --num_inference_steps 2 --seed 42 --save_total_limit 9".split()
BUILT_IN += ["--prompts", "a handwritten one", "somebody wrote a two"]


def test_train_evaluate_generate_writes_everything(full: tuple[Recipe, dict[str, Any]]) -> None:
    recipe, metrics = full
    written = recipe.results
    for key, value in metrics.items():
        assert written[key] == pytest.approx(value) if isinstance(value, float) else written[key] == value
    keys = {"train_loss", "train_runtime", "train_samples_per_second", "generate_images", "generate_runtime"}
    names = ("loss", "samples_per_second", "unreadable_images", "missing_captions")
    assert keys | {f"{phase}_{name}" for phase in ("train", "eval") for name in names} <= written.keys()
    assert (metrics["train_unreadable_images"], metrics["eval_unreadable_images"]) == (1, 0)
    assert (metrics["train_steps"], metrics["generate_images"]) == (6, 2)
    assert {"train", "eval", "generate", "validation", "save"} <= set(written["run"]["peak_memory (GB)"])
    assert [len(shapes) for shapes in written["run"]["batch_shapes"].values()] == [1, 1, 1, 1]
    for name in (WEIGHTS, "model_index.json", "vae/config.json", "images/contact_sheet.png", "loss_curve.png"):
        assert (recipe.output / name).is_file()
    card = (recipe.output / "README.md").read_text()
    assert "pipeline_tag: text-to-image" in card
    assert "library_name: diffusers" in card
    assert f'DiffusionPipeline.from_pretrained("{recipe.output.name}")' in card
    assert str(recipe.folder) not in card
    for key in ("train_loss", "eval_loss", "generate_images"):
        assert key.replace("_", "\\_") in card or key in card


def test_the_saved_pipeline_has_the_averages(full: tuple[Recipe, dict[str, Any]], tiny_sd: Path) -> None:
    """Loaded by diffusers alone, it draws the run's images; what was not trained is as it was."""
    import diffusers

    recipe, _ = full
    pipe, before = diffusers.StableDiffusionPipeline.from_pretrained(recipe.output), load(tiny_sd)
    averages = tensors(recipe.output / "checkpoint-6" / "ema.safetensors")
    averages.pop("/steps")
    found = pipe.unet.state_dict()
    near(found, averages, most=0)
    last = tensors(recipe.output / "checkpoint-6" / "model.safetensors")
    assert max((last[name] - found[name]).abs().max() for name in found) > 1e-4
    for part in ("vae", "text_encoder"):
        near(getattr(pipe, part).state_dict(), getattr(before, part).state_dict(), most=0)
    assert pipe.scheduler.config.prediction_type == "v_prediction"
    assert before.scheduler.config.prediction_type == "epsilon"
    pipe.set_progress_bar_config(disable=True)
    peers = []
    for number, prompt in enumerate(("alpha", "beta")):
        how = {"generator": torch.Generator().manual_seed(42 + number), "num_inference_steps": 2}
        peers.append(np.asarray(pipe(prompt, **how, guidance_scale=7.5).images[0]))
    assert distance(recipe.images, peers) <= 1


def test_saved_adapters_and_the_merged_unet_are_the_same(
    adapted: tuple[Recipe, dict[str, Any]], tiny_sdxl: Path
) -> None:
    import diffusers

    recipe, _ = adapted
    merged, base = diffusers.StableDiffusionXLPipeline.from_pretrained(recipe.output), load(tiny_sdxl)
    before = {name: tensor.clone() for name, tensor in base.unet.state_dict().items()}
    base.load_lora_weights(recipe.output / "adapter", weight_name="pytorch_lora_weights.safetensors")
    base.fuse_lora()
    base.unload_lora_weights()
    near(merged.unet.state_dict(), base.unet.state_dict(), most=1e-6)
    changed = {name for name, tensor in merged.unet.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if re.search(r"\.to_(q|k|v|out\.0)\.weight$", name)}
    same(recipe.output / "adapter/adapter_model.safetensors", recipe.output / "checkpoint-6/adapter_model.safetensors")


@pytest.mark.parametrize("step", range(1, 6))
@pytest.mark.parametrize("way", WAYS)
def test_resume_equals_the_straight_run_at_every_step(
    request: pytest.FixtureRequest, recipe: Recipe, captioned_folders: dict[str, str], way: str, step: int
) -> None:
    """Epochs end after steps 3 and 6. What is drawn and evaluated on the way changes nothing."""
    straight, metrics = request.getfixturevalue("full" if way == "full" else "adapted")
    folder = recipe.folder / "resumed"
    shutil.copytree(straight.output / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    more = ["--output_dir", folder, "--resume_from_checkpoint", "auto", "--save_steps", 100]
    more += ["--latents_dir", straight.folder / "kept"] if way == "full" else []
    model = request.getfixturevalue(MODELS[way])
    again = run_whole(way, recipe, model, only(captioned_folders, "train"), *more)
    recipe.output = folder
    assert again["train_loss"] == pytest.approx(metrics["train_loss"], abs=1e-12)
    assert recipe.losses() == straight.losses(after=step)
    assert len(set(straight.losses().values())) == 6
    same(folder / WEIGHTS, straight.output / WEIGHTS)
    files = [path.name for path in (straight.output / "checkpoint-6").glob("*.safetensors")]
    assert {"optimizer.safetensors", {"full": "ema.safetensors"}.get(way, "adapter_model.safetensors")} <= set(files)
    for name in files:
        same(folder / "checkpoint-6" / name, straight.output / "checkpoint-6" / name)


def test_golden_losses(built_in: tuple[Recipe, dict[str, Any]], request: pytest.FixtureRequest) -> None:
    """Four recorded losses: a refactoring must not move them. ``--rebase`` records this machine's."""
    losses = [float(loss) for loss in built_in[0].losses().values()]
    path, name = REPOSITORY / "tests" / "baselines" / "cpu.json", "text_to_image"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if request.config.getoption("--rebase"):
        path.write_text(json.dumps({**recorded, name: losses}, indent=2) + "\n")
        return
    assert losses == pytest.approx(recorded[name], abs=1e-5)


def test_without_a_model_and_data_it_draws_digits(built_in: tuple[Recipe, dict[str, Any]]) -> None:
    """A short run; `test_built_in.py` runs it to its end."""
    recipe, metrics = built_in
    assert [image.shape for image in recipe.images] == [(32, 32, 3)] * 4
    assert 0 <= metrics["generate_recognised"] <= 1
    assert metrics["generate_recognised_real"] > 0.9
    assert metrics["train_missing_captions"] == metrics["eval_missing_captions"] == 0
    pipe = load(recipe.output)
    assert type(pipe).__name__ == "StableDiffusionPipeline"
    how = {"generator": torch.Generator().manual_seed(42), "num_inference_steps": 2, "output_type": "np"}
    again = pipe("a handwritten one", **how, guidance_scale=recipe.results["run"]["arguments"]["guidance_scale"])
    assert distance(recipe.images[:1], [(again.images[0] * 255).round()]) <= 1


def test_the_built_in_pipeline_goes_on_with_the_parts_of_its_checkpoint(
    recipe: Recipe, built_in: tuple[Recipe, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from core import autoencoder

    straight, folder = built_in[0], recipe.folder / "resumed"
    shutil.copytree(straight.output / "checkpoint-2", folder / "checkpoint-2")
    monkeypatch.setattr(autoencoder, "learn_pictures", lambda *_: pytest.fail("an autoencoder was trained"))
    more = ["--output_dir", folder, "--resume_from_checkpoint", "auto", "--latents_dir", straight.output / "latents"]
    kept = {path: path.stat().st_mtime_ns for path in (straight.output / "latents").iterdir()}
    recipe(*BUILT_IN, "--save_steps", 100, *more)
    recipe.output = folder
    assert recipe.losses() == straight.losses(after=2)
    for name in (WEIGHTS, "vae/diffusion_pytorch_model.safetensors", "text_encoder/model.safetensors"):
        same(folder / name, straight.output / name)
    for name in ("vae/config.json", "scheduler/scheduler_config.json"):
        settings = [json.loads((each / name).read_text()) for each in (folder, straight.output)]
        assert settings[0] | {"_name_or_path": ""} == settings[1] | {"_name_or_path": ""}
    assert {path: path.stat().st_mtime_ns for path in (straight.output / "latents").iterdir()} == kept
    assert distance(recipe.images, straight.images) == 0


def test_without_a_model_it_learns_ones_own_images(recipe: Recipe, captioned_folders: dict[str, str]) -> None:
    """Of another size than the digits, which the pipeline then draws by itself."""
    given = ["--max_steps", "1", "--autoencoder_steps", "2", "--resolution", "24", "--num_inference_steps", "2"]
    metrics = recipe(*given, "--prompts", "alpha bee", data=only(captioned_folders, "train"))
    assert metrics["train_unreadable_images"] == 1
    assert "generate_recognised" not in metrics
    assert [image.shape for image in recipe.images] == [(24, 24, 3)]
    vocabulary = load(recipe.output).tokenizer.get_vocab()
    assert {"alpha", "bee", "dog"} <= {word.strip("Ġ▁") for word in vocabulary}


def test_weights_go_on_with_what_they_learned_from(
    recipe: Recipe, full: tuple[Recipe, dict[str, Any]], tiny_sd: Path, captioned_folders: dict[str, str]
) -> None:
    """Another objective, other latents or no averages would go on in silence, worse."""
    folder, other = recipe.folder / "resumed", recipe.folder / "vae"
    for step in (2, 4):
        shutil.copytree(full[0].output / f"checkpoint-{step}", folder / f"checkpoint-{step}")
    vae = load(tiny_sd).vae
    vae.decoder.conv_in.bias.data.add_(1e-3)
    vae.save_pretrained(other)
    how = ["--resume_from_checkpoint", folder / "checkpoint-2", "--output_dir", folder]
    for changes, message in (
        (["--prediction_type", "epsilon"], "was trained with --prediction_type v_prediction, not epsilon; give that"),
        (["--pretrained_vae_model_name_or_path", other], "was trained with another vae; name that one, or start anew"),
        ([], "checkpoint-2 has averages, ema.safetensors, which would be lost; give --use_ema"),
    ):
        # Nothing is put away or computed before it is sure to start.
        assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == ["checkpoint-2", "checkpoint-4"]
        given = [*SIX_STEPS, *(["--cache_latents"] if changes else []), "--prediction_type", "v_prediction", *changes]
        with pytest.raises(UserError, match=message):
            recipe(*given, *how, model=tiny_sd, data=only(captioned_folders, "train"))


# -------------------------------------------------------------------------------------------------------------- losses


def test_ragged_rows_give_the_same_however_they_are_split(
    recipe: Recipe, tiny_sd: Path, captioned_folders: dict[str, str]
) -> None:
    """13 rows, one of them unreadable: windows of 8 and 5 rows, also by workers, and evaluated in other batches."""
    given = "--do_train --do_eval --num_train_epochs 2 --optim sgd --learning_rate 0.3 --save_strategy no".split()
    given += ["--random_flip", "--proportion_empty_prompts", "0.2", "--resolution", "20", "--crop_resolution", "16"]
    found = {}
    for batch, accumulation, evaluated, workers in ((8, 1, 5, 0), (4, 2, 2, 0), (4, 2, 2, 2), (1, 8, 3, 0)):
        how = ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]
        how += ["--per_device_eval_batch_size", evaluated, "--dataloader_num_workers", workers]
        metrics = recipe(*given, *how, model=tiny_sd, data=captioned_folders)
        assert (metrics["train_steps"], metrics["train_unreadable_images"]) == (4, 1)
        weights = tensors(recipe.output / WEIGHTS)
        found[batch, workers] = ([metrics["train_loss"], metrics["eval_loss"]], weights)
    losses, weights = found[8, 0]
    moved = load(tiny_sd).unet.state_dict()
    assert max((weights[name] - moved[name]).abs().max() for name in weights) > 1e-2
    for others, other in found.values():
        assert others == pytest.approx(losses, abs=1e-5)
        near(other, weights)
    assert found[4, 0][0] == found[4, 2][0]
    near(found[4, 0][1], found[4, 2][1], most=0)


# Name: the pipeline, and flags. Each changes the loss, see below.
LOSSES = {
    "plain": ("tiny_sd", []),
    "xl": ("tiny_sdxl", ["--resolution", "20", "--crop_resolution", "16"]),
    "velocity": ("tiny_sd", ["--prediction_type", "v_prediction"]),
    "image": ("tiny_sd", ["--prediction_type", "sample", "--cache_latents"]),
    "offset": ("tiny_sd", ["--noise_offset", "0.5"]),
    "weighed": ("tiny_sd", ["--snr_gamma", "2"]),
    "no captions": ("tiny_sdxl", ["--proportion_empty_prompts", "1"]),
    "late": ("tiny_sd", "--timestep_bias_strategy later --timestep_bias_multiplier 9 --use_zero_snr "
             "--prediction_type v_prediction".split()),
    "recomputed": ("tiny_sd", ["--gradient_checkpointing"]),
}  # fmt: skip


@pytest.fixture(scope="module")
def found_losses() -> dict[str, float]:
    return {}


@pytest.mark.parametrize("way", LOSSES)
def test_the_loss_is_that_of_the_formula(
    recipe: Recipe, made: SimpleNamespace, captioned_folders: dict[str, str], request: pytest.FixtureRequest,
    found_losses: dict[str, float], way: str,
) -> None:  # fmt: skip
    """By diffusers' scheduler and models, on the draws that the run made."""
    import diffusers

    fixture, flags = LOSSES[way]
    model = request.getfixturevalue(fixture)
    found_losses[way] = recipe(*ONE_STEP, *flags, model=model, data=only(captioned_folders, "train"))["train_loss"]
    window = next(made.loaders["train"].windows())
    batch, pipe = window.batches[0], load(model)
    rows = batch["row_weights"].bool()
    assert rows.sum() == 12
    sides = (20, 16) if "--resolution" in flags else (16, 16)  # by itself the pipeline's own
    assert (made.loaders["train"].augment.view.resolution, made.loaders["train"].augment.view.crop) == sides
    changes = {"rescale_betas_zero_snr": True} if "--use_zero_snr" in flags else {}
    scheduler = diffusers.DDPMScheduler.from_config(pipe.scheduler.config, **changes)
    kind = flags[flags.index("--prediction_type") + 1] if "--prediction_type" in flags else "epsilon"
    with torch.no_grad():
        if "moments" in batch:
            mean, deviation = batch["moments"].chunk(2, dim=1)
            latents = mean + deviation * batch["posterior"]
        else:
            posterior = pipe.vae.encode(batch["pixel_values"] / 127.5 - 1).latent_dist
            latents = (posterior.mean + posterior.std * batch["posterior"]) * pipe.vae.config.scaling_factor
        texts = captions_of(made.loaders["train"], window.row_ids, empty=way == "no captions", batch=batch, pipe=pipe)
        times = batch["timesteps"]
        noisy = scheduler.add_noise(latents, batch["noise"], times)
        predicted = pipe.unet(noisy, times, **texts).sample
    velocity = scheduler.get_velocity(latents, batch["noise"], times)
    target = {"epsilon": batch["noise"], "sample": latents, "v_prediction": velocity}[kind]
    losses = (predicted - target).square().mean((1, 2, 3))
    if way == "weighed":
        snr = scheduler.alphas_cumprod[times] / (1 - scheduler.alphas_cumprod[times])
        losses = losses * snr.clamp(max=2) / snr
    assert found_losses[way] == pytest.approx(losses[rows].mean().item(), rel=1e-5)
    if "plain" in found_losses:
        equal = way in ("plain", "recomputed")
        assert (found_losses[way] == pytest.approx(found_losses["plain"], abs=1e-7)) is equal


def captions_of(loader: Any, numbers: list[int], empty: bool, batch: dict[str, Any], pipe: Any) -> dict[str, Any]:
    """What the network is told of the rows' captions, by the pipeline's own ``encode_prompt``."""
    if "encoder_hidden_states" in batch:
        return {"encoder_hidden_states": batch["encoder_hidden_states"]}
    said = [loader.dataset.rows["text"][number] for number in numbers]
    known = [[""] if empty else text if isinstance(text, list) else [text] for text in said]
    encoded = {text: pipe.tokenizer(text, padding="max_length")["input_ids"] for texts in known for text in texts}
    ids = batch["input_ids"].tolist()
    texts = [next(text for text in texts if encoded[text] == row) for texts, row in zip(known, ids, strict=True)]
    found = pipe.encode_prompt(texts, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=empty)
    if empty:  # what it draws against where no negative prompt is given: zeros
        found = (found[1], None, found[3])
    if "time_ids" not in batch:
        return {"encoder_hidden_states": found[0]}
    return {
        "encoder_hidden_states": found[0],
        "added_cond_kwargs": {"text_embeds": found[2], "time_ids": batch["time_ids"]},
    }


def test_recomputing_changes_nothing(recipe: Recipe, tiny_sd: Path, captioned_folders: dict[str, str]) -> None:
    given = [*SIX_STEPS, "--max_steps", "2", "--save_strategy", "no", "--optim", "sgd", "--learning_rate", "0.3"]
    found = []
    for flags in ([], ["--gradient_checkpointing"], ["--attn_implementation", "eager"]):
        loss = recipe(*given, *flags, model=tiny_sd, data=only(captioned_folders, "train"))["train_loss"]
        found.append((loss, tensors(recipe.output / WEIGHTS)))
    for loss, weights in found[1:]:
        assert loss == pytest.approx(found[0][0], abs=1e-6)
        near(weights, found[0][1])


def test_the_rate_grows_with_the_rows_of_a_step(
    recipe: Recipe, tiny_sd: Path, captioned_folders: dict[str, str]
) -> None:
    recipe(*SIX_STEPS, "--scale_lr", "--max_steps", "1", model=tiny_sd, data=only(captioned_folders, "train"))
    rows = list(csv.DictReader((recipe.output / "logs" / "metrics.csv").open()))
    assert float(rows[0]["learning_rate"]) == pytest.approx(0.01 * 3 * 2)


# ---------------------------------------------------------------------------------------------------------- evaluation


def test_evaluation_alone_is_that_of_the_run_that_trained(
    recipe: Recipe, full: tuple[Recipe, dict[str, Any]], captioned_folders: dict[str, str]
) -> None:
    """At another batch size, without kept latents, and also under another name of the split."""
    trained, metrics = full
    evaluated = ["--do_eval", "--noise_offset", "0.1"]
    data = only(captioned_folders, "validation")
    found = recipe(*evaluated, "--per_device_eval_batch_size", 2, model=trained.output, data=data)
    assert found["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-6)
    assert found["eval_missing_captions"] == 0
    assert not (recipe.output / "README.md").exists()
    assert not (recipe.output / "unet").exists()
    tested = {"--test_dir": data["--validation_dir"]}
    found = recipe("--do_predict", *evaluated[1:], model=trained.output, data=tested)
    assert found["predict_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-6)
    rows = list(csv.DictReader((trained.output / "logs" / "metrics.csv").open()))
    assert [int(row["step"]) for row in rows if row["eval_loss"]] == [3, 6]
    assert float(rows[-1]["eval_loss"]) == pytest.approx(metrics["eval_loss"], abs=1e-6)


def test_evaluation_of_merged_adapters_is_that_of_the_run_that_trained(
    recipe: Recipe, adapted: tuple[Recipe, dict[str, Any]], captioned_folders: dict[str, str]
) -> None:
    trained, metrics = adapted
    given = ["--do_eval", "--snr_gamma", "5", "--cache_latents"]
    found = recipe(*given, model=trained.output, data=only(captioned_folders, "validation"))
    assert found["eval_loss"] == pytest.approx(metrics["eval_loss"], abs=1e-5)


@pytest.mark.parametrize("kind", ["tiny_sd", "tiny_sdxl"])
def test_evaluation_alone_in_bf16(
    recipe: Recipe, captioned_folders: dict[str, str], request: pytest.FixtureRequest, kind: str
) -> None:
    """And what is drawn then, is drawn in bf16."""
    named = {"model": request.getfixturevalue(kind), "data": only(captioned_folders, "validation")}
    full, low = (recipe("--do_eval", *flags, **named)["eval_loss"] for flags in ([], ["--bf16_full_eval", *DRAW]))
    assert low != full
    assert low == pytest.approx(full, rel=0.02)
    images = recipe.images
    recipe(*DRAW, model=named["model"])
    apart = np.abs(np.stack(images).astype(int) - recipe.images)
    assert apart.max() > 0
    assert apart.mean() < 20


# ------------------------------------------------------------------------------------------------------------- drawing


def test_images_are_drawn_while_training(full: tuple[Recipe, dict[str, Any]]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = full[0].output
    sheets = sorted((folder / "validation_images").iterdir())
    assert [path.name for path in sheets] == ["step-000004.png", "step-000006.png"]
    assert Image.open(sheets[1]).text["0001.png"] == "seed 43 alpha"
    accumulator = EventAccumulator(str(folder / "logs" / folder.name))
    accumulator.Reload()
    shown = {name: [event.step for event in accumulator.Images(name)] for name in accumulator.Tags()["images"]}
    assert shown == {"validation": [4, 6]}


@pytest.fixture(scope="module")
def alone(text_to_image: ModuleType, tiny_sd: Path, tmp_path_factory: Any) -> Recipe:
    """Five images of three prompts, one at a time."""
    recipe = Recipe(text_to_image, tmp_path_factory.mktemp("alone"))
    recipe.metrics = recipe(*FIVE, "--output_type", "np", "--pipeline_save_dir", recipe.folder / "kept", model=tiny_sd)
    return recipe


FIVE = "--num_inference_steps 2 --prompts alpha beta gamma delta eta --seed 9".split()  # --do_generate is implied


@pytest.mark.parametrize("batch", [2, 3])
def test_images_are_the_same_at_any_batch_size(recipe: Recipe, alone: Recipe, tiny_sd: Path, batch: int) -> None:
    """The last batch is filled; filler is neither written nor counted."""
    metrics = recipe(*FIVE, "--batch_size", batch, model=tiny_sd)
    assert metrics["generate_images"] == len(recipe.images) == 5
    assert distance(recipe.images, alone.images) <= 1
    assert recipe.results["run"]["batch_shapes"] == {
        "generate": [{"batches": -(-5 // batch), "images": [batch, 3, 16, 16]}]
    }


def test_files_say_what_they_are(alone: Recipe, tiny_sd: Path) -> None:
    folder = alone.output / "images"
    names = [f"{number:04d}.png" for number in range(5)]
    assert sorted(path.name for path in folder.iterdir()) == [*names, "contact_sheet.png", "images.npy"]
    said = Image.open(folder / "0001.png").text
    assert said == {"prompt": "beta", "seed": "10", "model": str(tiny_sd), "scheduler": "DDIMScheduler", "steps": "2",
                    "guidance": "7.5"}  # fmt: skip
    assert Image.open(folder / "contact_sheet.png").text["0004.png"] == "seed 13 eta"
    assert np.array_equal(np.load(folder / "images.npy", allow_pickle=False), np.stack(alone.images))
    rate = alone.metrics["generate_images_per_second"]
    assert alone.metrics["generate_seconds_per_image"] == pytest.approx(1 / rate, rel=1e-4)
    same(alone.folder / "kept" / WEIGHTS, tiny_sd / WEIGHTS)


def test_a_pipeline_that_is_saved_beside_its_images_draws_them(recipe: Recipe, alone: Recipe) -> None:
    recipe(*FIVE, "--image_save_dir", recipe.folder / "there", model=alone.folder / "kept")
    assert distance(drawn(recipe.folder / "there"), alone.images) == 0
    assert not (recipe.output / "images").exists()


# Flags that change the images, each in its way: the pipelines of core/ have tests of what exactly.
CHANGES = {
    "negative": ["--negative_prompts", "zeta"],
    "guidance": ["--guidance_scale", "2"],
    "steps": ["--num_inference_steps", "3"],
    "seed": ["--seed", "10"],
    "eta": ["--eta", "1"],
    "bf16": ["--bf16"],
    "freeu": ["--use_freeu"],
    "spacing": ["--timestep_spacing", "trailing"],
    "image": ["--base_image", "{picture}"],
    "mask": ["--base_image", "{picture}", "--mask_image", "{mask}"],
    "by pndm": ["--scheduler", "pndm", "--num_inference_steps", "5"],  # two are too few for its own
    **{f"by {name}": ["--scheduler", name] for name in (
        "euler_discrete", "euler_ancestral_discrete", "ddpm", "dpmsolver_multistep", "unipc_multistep")},
}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_each_flag_of_drawing_changes_the_images(recipe: Recipe, alone: Recipe, tiny_sd: Path, name: str) -> None:
    draw = np.random.default_rng(0)
    paths = {"picture": recipe.folder / "picture.png", "mask": recipe.folder / "mask.png"}
    Image.fromarray(draw.integers(0, 256, (16, 16, 3), np.uint8)).save(paths["picture"])
    Image.fromarray(np.uint8([[0] * 8 + [255] * 8] * 16)).save(paths["mask"])
    recipe(*FIVE, *(word.format(**paths) for word in CHANGES[name]), model=tiny_sd)
    assert distance(recipe.images, alone.images) > 2
    assert min(distance([image], [recipe.images[0]]) for image in recipe.images[1:]) > 0


def test_ddim_by_name_is_its_own(recipe: Recipe, alone: Recipe, tiny_sd: Path) -> None:
    recipe(*FIVE, "--scheduler", "ddim", model=tiny_sd)
    assert distance(recipe.images, alone.images) == 0


def test_prompts_of_a_file_and_a_clip_score(recipe: Recipe, alone: Recipe, tiny_sd: Path) -> None:
    from tests.core.drawings import save_clip

    (recipe.folder / "prompts.txt").write_text("alpha\n\nbeta\ngamma\ndelta\neta\n")
    given = ["--prompts_file", recipe.folder / "prompts.txt", "--num_inference_steps", 2, "--seed", 9]
    metrics = recipe(*given, "--clip_model_name_or_path", save_clip(recipe.folder / "clip"), model=tiny_sd)
    assert distance(recipe.images, alone.images) == 0
    assert 0 <= metrics["generate_clip_score"] <= 100
    assert "generate_clip_score" not in alone.metrics
    assert "generate_recognised" not in metrics


@pytest.mark.parametrize("kind", ["tiny_sd3", "tiny_flux"])
def test_other_pipelines_draw(recipe: Recipe, request: pytest.FixtureRequest, kind: str) -> None:
    model = request.getfixturevalue(kind)
    metrics = recipe(*DRAW, "--bf16", "--batch_size", "2", "--height", "16", "--width", "32", model=model)
    assert [image.shape for image in recipe.images] == [(16, 32, 3)] * 2
    assert metrics["generate_images"] == 2
    assert distance(recipe.images[:1], recipe.images[1:]) > 0


def test_parameters_are_bf16_where_only_is_drawn(
    recipe: Recipe, tiny_sd: Path, captioned_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, build = [], recipe.module.build_pipeline
    monkeypatch.setattr(recipe.module, "build_pipeline", lambda *args: seen.append(build(*args)) or seen[-1])
    recipe(*DRAW, "--bf16", model=tiny_sd)
    recipe(*ONE_STEP, "--bf16", *DRAW, model=tiny_sd, data=only(captioned_folders, "train"))
    parts = ("unet", "vae", "text_encoder")
    dtypes = [{parameter.dtype for part in parts for parameter in getattr(pipe, part).parameters()} for pipe in seen]
    assert dtypes == [{torch.bfloat16}, {torch.float32}]


def test_adapters_of_a_run_draw_what_the_run_would(
    recipe: Recipe, adapted: tuple[Recipe, dict[str, Any]], tiny_sdxl: Path
) -> None:
    found = []
    for model, flags in (
        (tiny_sdxl, []),
        (tiny_sdxl, ["--lora_id", adapted[0].output / "adapter"]),
        (tiny_sdxl, ["--lora_id", adapted[0].output / "adapter", "--lora_scale", "0"]),
        (adapted[0].output, []),
    ):
        recipe(*DRAW, *flags, model=model)
        found.append(recipe.images)
    assert distance(found[1], found[0]) > 3
    assert distance(found[2], found[0]) <= 1
    assert distance(found[3], found[1]) <= 1


# ---------------------------------------------------------------------------------------------------------------- data


def test_what_captions_and_images_lack_is_counted_and_said(
    recipe: Recipe, tiny_sd: Path, caplog: pytest.LogCaptureFixture
) -> None:
    counts = {"train": 10, "validation": 6}
    for split, count in counts.items():
        path = save_captioned(recipe.folder / split, count) / "metadata.jsonl"
        rows = [json.loads(line) | {"text": [f"bee {at}"]} for at, line in enumerate(path.read_text().splitlines())]
        for row, text in zip(rows, ([""], None, [" \n"], ["a " * 30]), strict=False):
            row["text"] = text
        del rows[0]["text"]
        write_jsonl(path, rows)
    data = {f"--{split}_dir": recipe.folder / split for split in counts}
    given = [*ONE_STEP, "--per_device_train_batch_size", 4, "--do_eval", "--resolution", 24]
    metrics = recipe(*given, model=tiny_sd, data=data)
    assert (metrics["train_missing_captions"], metrics["eval_missing_captions"]) == (3, 3)
    assert "3 of 10 images (30.0%) of the train split have no caption and are left out" in caplog.text
    for split, count in counts.items():
        assert f"{split}: 1 of {count - 3} captions are longer than 16 tokens: their ends are lost" in caplog.text
        assert re.search(rf"{split}: \d of {count - 3} images have sides below 24 pixels", caplog.text)
    alone = recipe("--do_eval", "--resolution", 24, model=tiny_sd, data=only(data, "validation"))
    assert alone["eval_missing_captions"] == 3
    assert "train_missing_captions" not in alone


def test_rows_of_a_csv_and_a_share_held_out(recipe: Recipe, made: SimpleNamespace, tiny_sd: Path) -> None:
    """Columns are named, paths begin where the file lies; held-out rows are the same in a later evaluation.

    These are seen in the middle and with their captions, whatever is done to those that are trained on.
    """
    folder = save_captioned(recipe.folder / "data", 10)
    with (folder / "rows.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerows([["img", "said"], *([f"{at:02d}.png", f"bee {at}"] for at in range(10))])
    data = {"--train_file": folder / "rows.csv"}
    given = ["--image_column", "img", "--caption_column", "said", "--train_val_split", "0.3", "--do_eval"]
    changed = ["--random_flip", "--proportion_empty_prompts", "0.5", "--resolution", "20", "--crop_resolution", "16"]
    first = recipe(*ONE_STEP, *given, *changed, model=tiny_sd, data=data)
    examples = {split: loader.augment for split, loader in made.loaders.items()}
    assert {split: (len(each.pictures), each.empty, each.view) for split, each in examples.items()} == {
        "train": (7, 0.5, CropView(20, 16, center=False, flip=0.5)),
        "validation": (3, 0.0, CropView(20, 16, center=True, flip=0.0)),
    }
    again = recipe(*given, *changed[3:], model=tiny_sd, data=data)
    assert again["eval_loss"] == pytest.approx(first["eval_loss"], abs=1e-6)


@pytest.mark.parametrize("way", [[], ["--cache_latents"], ["--dataloader_num_workers", "2"]], ids=["", "kept", "ahead"])
def test_an_unreadable_image_ends_the_run_if_that_is_asked_for(
    recipe: Recipe, tiny_sd: Path, captioned_folders: dict[str, str], way: list[str]
) -> None:
    data = only(captioned_folders, "train")
    with pytest.raises(UserError, match=r"01\.png cannot be read.*--on_bad_image skip") as caught:
        recipe(*ONE_STEP, "--on_bad_image", "fail", *way, model=tiny_sd, data=data)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- bad input

LEARN = ["--do_train", "--train_dir", "{good}"]
# Name: flags, and what the one line must say, before a pipeline is loaded.
BAD = {
    "no captions": (["--do_train", "--train_dir", "{bare}"], "of 4 images of the train split none has a caption"),
    "empty captions": (["--train_dir", "{hollow}"], "of 4 images .* none has a caption; write them into metadata.csv"),
    "null captions": (["--train_file", "{null}"], "of 4 images .* none has a caption; give --caption_column_name"),
    "caption column": ([*LEARN, "--caption_column", "txet"], "no column 'txet' .did you mean 'text'"),
    "missing folder": (["--train_dir", "{good}/absent"], "--train_dir.*absent is not there; give a folder"),
    "crop": ([*LEARN, "--resolution", "16", "--crop_resolution", "32"], "--crop_resolution needs as large a --resol"),
    "crop alone": ([*LEARN, "--crop_resolution", "16"], "--crop_resolution needs as large a --resolution"),
    "own pipeline's size": (["--resolution", "30", "{none}"], "--resolution must be a multiple of 8"),
    "no prompts": ([*LEARN, "--do_generate"], "there is nothing to draw: give --prompts or --prompts_file"),
    "no pipeline": (["--do_generate", "--prompts", "a", "--train_dir", "{good}", "{none}"], "name a pipeline to draw"),
    "no such prompts": (["--prompts_file", "{good}/absent"], "--prompts_file: .*absent cannot be read: No such file"),
    "empty prompts": (["--prompts_file", "{empty}"], "--prompts_file: .*empty.txt has no prompt; write one a line"),
    "other bytes": (["--prompts_file", "{latin}"], "--prompts_file: .*latin.txt is not UTF-8 text"),
    "two sources of prompts": ([*DRAW, "--prompts_file", "{empty}"], "--prompts and --prompts_file exclude each oth"),
    "number of negatives": ([*DRAW, "--negative_prompts", "a", "b", "c"], "--negative_prompts has 3 texts for 2 prom"),
    "averages and best": ([*LEARN, "--use_ema", "--load_best_model_at_end"], "--use_ema ends with the last averages"),
    "decay": ([*LEARN, "--use_ema", "--ema_decay", "1"], "--ema_decay must be at least 0 and below 1"),
    "folder and data set": ([*LEARN, "--dataset_name", "x"], "--train_dir and --dataset_name exclude each other"),
    "folder and file": ([*LEARN, "--validation_file", "x.csv"], "--train_dir and --validation_file exclude each oth"),
    "no validation split": ([*LEARN, "--do_eval"], "--do_eval needs a validation split: give .*--validation_dir"),
    "adapters": ([*LEARN, "--lora_alpha", "4"], "LoRA's other flags need --lora_rank"),
    "untrained adapters": ([*DRAW, "--lora_rank", "2"], "--lora_rank trains adapters; to draw with some give --lora_"),
    "images' folder": ([*DRAW, "--image_save_dir", "{empty}"], "--image_save_dir: .*empty.txt is a file; give a fold"),
    "configuration": ([*LEARN, "--config_name", "x"], "--config_name: a pipeline brings its own"),
    "controlled training": ([*LEARN, "--controlnet_model_name_or_path", "x"], "--controlnet.* are for drawing alone"),
    "saved twice": ([*LEARN, "--pipeline_save_dir", "x"], "--pipeline_save_dir: a trained pipeline is in --output_dir"),
    "share": ([*LEARN, "--proportion_empty_prompts", "1.5"], "--proportion_empty_prompts must be at most 1"),
    "negative share": ([*LEARN, "--proportion_empty_prompts", "-1"], "--proportion_empty_prompts must be at least 0"),
    "no validation images": ([*LEARN, "--num_validation_images", "0"], "--num_validation_images must be at least 1"),
    "one side": ([*DRAW, "--height", "16"], "--height and --width go together; give both"),
    "mask": ([*DRAW, "--mask_image", "x.png"], "--mask_image needs the --base_image"),
    "depth": ([*DRAW, "--ldm3d"], "--ldm3d: no depth is drawn here"),
    "scheduler": ([*DRAW, "--scheduler", "euler"], "--scheduler: invalid choice: 'euler'"),
    "two names": ([*LEARN, "--rank", "2", "--lora_rank", "3"], "--rank .2. and --lora_rank .3. contradict each other"),
    "flag": ([*LEARN, "--use_em"], "unknown flag --use_em.*did you mean '--use_ema'"),
    "nothing to do": ([], "nothing to do: give --do_train"),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("places")
    for name in ("good", "bare", "hollow"):
        save_captioned(root / name, 4)
    (root / "bare" / "metadata.jsonl").unlink()
    rows = [{"file_name": f"{number:02d}.png", "text": " " * number} for number in range(4)]
    write_jsonl(root / "hollow" / "metadata.jsonl", rows)
    rows = [{"image": f"good/{number:02d}.png", "text": None} for number in range(4)]
    write_jsonl(root / "null.jsonl", rows)
    (root / "empty.txt").write_text(" \n\n")
    (root / "latin.txt").write_bytes("é\n".encode("latin-1"))
    files = {"null": "null.jsonl", "empty": "empty.txt", "latin": "latin.txt"}
    return {name: str(root / files.get(name, name)) for name in ("good", "bare", "hollow", *files)}


def refused(recipe: Recipe, flags: list[str], message: str, model: Path | None, **names: str) -> None:
    given = [word.format(**names, none="") for word in flags]
    with pytest.raises(UserError) as caught:
        recipe(*filter(None, given), model=None if "{none}" in flags else model)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(
    recipe: Recipe, tiny_sd: Path, places: dict[str, str], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before any pipeline is loaded: that would fail here."""
    monkeypatch.setattr(recipe.module, "build_pipeline", lambda *_: pytest.fail("a pipeline was loaded"))
    refused(recipe, *BAD[name], model=tiny_sd, **places)


# Name: the pipeline, flags, and what the one line must say once it is there.
UNFIT = {
    "sd3": ("sd3", LEARN, "StableDiffusion3Pipeline cannot be fine-tuned here: .*or leave out --do_train"),
    "flux": ("flux", LEARN, "FluxPipeline cannot be fine-tuned here"),
    "adapters of sd3": ("sd3", [*LEARN, "--lora_rank", "2"], "StableDiffusion3Pipeline cannot be fine-tuned here"),
    "size": ("sd", [*LEARN, "--resolution", "18"], "pictures of 18 pixels do not fit.* give 16 or 20"),
    "crop's size": ("sd", [*LEARN, "--resolution", "20", "--crop_resolution", "18"], "pictures of 18 pixels do not"),
    "layers": ("sd", [*LEARN, "--lora_rank", "2", "--lora_target_modules", "q_proj"], "no linear layer is .*'q_proj'"),
    "zero snr": ("sd", [*LEARN, "--use_zero_snr"], "give --prediction_type v_prediction"),
    "timesteps": ("sd", [*LEARN, "--snr_gamma", "0"], "--snr_gamma must be above 0"),
    "scheduler": ("sd3", [*DRAW, "--scheduler", "ddim"], "--scheduler ddim does not fit StableDiffusion3Pipeline"),
    "texts": ("sd", [*DRAW, "--prompts_2", "a"], "--prompts_2: StableDiffusionPipeline has no such text encoder"),
    "adapter": ("sd", [*DRAW, "--lora_id", "/no/such"], "--lora_id /no/such cannot be loaded: there is no /no/such"),
    "score": ("sd", [*DRAW, "--clip_model_name_or_path", "/no/such"], "scores images cannot be loaded: there is no"),
    "no pipeline": ("good", DRAW, "good is no pipeline of diffusers: it has no model_index.json"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_the_pipeline_is_one_clear_line(
    recipe: Recipe, places: dict[str, str], request: pytest.FixtureRequest, name: str
) -> None:
    kind, *how = UNFIT[name]
    model = Path(places[kind]) if kind in places else request.getfixturevalue(f"tiny_{kind}")
    refused(recipe, *how, model=model, **places)
    assert not list(recipe.output.glob("images/*"))


def test_what_is_drawn_is_kept_before_it_is_scored(recipe: Recipe, tiny_sd: Path) -> None:
    """With a model whose configuration alone is there."""
    (recipe.folder / "clip").mkdir()
    (recipe.folder / "clip" / "config.json").write_text('{"model_type": "clip"}')
    score = ["--clip_model_name_or_path", str(recipe.folder / "clip")]
    refused(recipe, [*DRAW, *score], "clip that scores images cannot be loaded", tiny_sd)
    assert len(recipe.images) == 2


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (["--model_name_or_path", "CompVis/some-name", *DRAW], "the pipeline CompVis/some-name"),
        (["--dataset_name", "x/y", "--model_name_or_path", "{sd}"], "--dataset_name x/y"),
        (["--lora_id", "x/y", *DRAW, "--model_name_or_path", "{sd}"], "--lora_id x/y"),
        (["--pretrained_vae_model_name_or_path", "x/y", *DRAW, "--model_name_or_path", "{sd}"], "the model x/y"),
    ],
    ids=["pipeline", "data", "adapters", "autoencoder"],
)
def test_without_a_hub_names_fail_at_once(recipe: Recipe, tiny_sd: Path, flags: list[str], what: str) -> None:
    start = time.monotonic()
    refused(recipe, flags, f"{what} cannot be loaded: .*the hub was not reachable", None, sd=str(tiny_sd))
    assert time.monotonic() - start < 10


# ---------------------------------------------------------------------------------------------------- help, flags, copy


def test_help_answers_at_once_without_torch() -> None:
    code = f"import runpy, sys; sys.argv = ['run.py', '--help']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    heavy = "sorted({'torch', 'diffusers', 'datasets', 'sklearn'} & set(sys.modules))"
    ended = f"try:\n    {code}\nfinally:\n    print({heavy}, file=sys.stderr)"
    seconds = []
    for _ in range(2):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", ended], capture_output=True, text=True, cwd=REPOSITORY)
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
    assert done.stderr.strip() == "[]"
    assert min(seconds) < 3
    for group in ("model and data", "drawing images", "noise and loss", "LoRA", "hub", "run", "training", "device"):
        assert re.search(f"^{group}", done.stdout, re.MULTILINE)
    for alias in ("train_batch_size", "max_train_steps", "rank", "checkpointing_steps", "checkpoints_total_limit",
                  "lr_scheduler", "lr_warmup_steps", "train_data_dir", "image_column", "caption_column",
                  "pretrained_model_name_or_path"):  # fmt: skip
        assert re.search(rf"--{alias}\b", done.stdout), alias


def test_every_flag_is_read_somewhere(text_to_image: ModuleType) -> None:
    """Beside its definition and the list of those that change nothing."""
    from core.noise import NoiseArguments
    from core.prompts import DrawingArguments

    sources = [SCRIPT, *sorted((REPOSITORY / "core").glob("*.py"))]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    text = re.sub(r"(?m)^    \w+: .* = flag\(.*$", "", text)
    known = [one.name for kind in (text_to_image.TextToImageArguments, NoiseArguments, DrawingArguments)
             for one in fields(kind)]  # fmt: skip
    named = {f"timestep_bias_{name}" for name in ("multiplier", "portion", "begin", "end")}  # by their beginnings
    ends = {name for name in known if any(f"}}{name[at:]}" in text for at, sign in enumerate(name) if sign == "_")}
    unread = {name for name in known if not re.search(rf"\b{name}\b", text)}
    assert unread - named - ends <= {"mediapipe"}


def test_work_is_implied_by_what_it_needs(recipe: Recipe, tiny_sd: Path, captioned_folders: dict[str, str]) -> None:
    """As the published programs have it, which know no --do_...; named, it is that alone."""
    data = only(captioned_folders, "train")
    shorter = ["--max_train_steps", "1", "--train_batch_size", "2", "--checkpointing_steps", "9"]
    draws = ["--prompts", "alpha", "--num_inference_steps", "1"]
    metrics = recipe("--train_data_dir", data["--train_dir"], *shorter, *draws, model=tiny_sd)
    assert {"train_loss", "generate_images"} <= metrics.keys()
    assert "eval_loss" not in metrics
    metrics = recipe("--do_generate", "--train_data_dir", data["--train_dir"], *draws, model=tiny_sd)
    assert metrics.keys() >= {"generate_images"}
    assert "train_loss" not in metrics


@pytest.mark.processes
def test_a_copy_beside_the_recipe_runs(tiny_sd: Path, captioned_folders: dict[str, str], tmp_path: Path) -> None:
    """A command as published, but for names; its data set is a folder, as hubs store it."""
    root = tmp_path / "repository"
    for folder in ("core", "gaudi_configs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SCRIPT.parent, root / "recipes" / "mine")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    flags = f"--pretrained_model_name_or_path {tiny_sd} --pretrained_vae_model_name_or_path {tiny_sd / 'vae'} "
    flags += f"--dataset_name {captioned_folders['--validation_dir']} --resolution 16 --crop_resolution 16 "
    flags += "--center_crop --random_flip --proportion_empty_prompts=0.2 --train_batch_size 2 --max_train_steps 2 "
    flags += "--learning_rate 1e-05 --max_grad_norm 1 --lr_scheduler constant --lr_warmup_steps 0 --use_ema "
    flags += "--gaudi_config_name Habana/stable-diffusion --throughput_warmup_steps 1 --dataloader_num_workers 1 "
    flags += "--use_hpu_graphs_for_training --use_hpu_graphs_for_inference --bf16 --adjust_throughput "
    flags += "--checkpointing_steps 2500 --logging_step 10 --validation_epochs 48 --num_validation_images 1 "
    given = [*flags.split(), "--validation_prompt", "a cute bee", "--cache_dir", tmp_path / "cache", *QUIET]
    done = as_program(*given, script=root / "recipes" / "mine" / "run.py", cwd=tmp_path, env=clean)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("runs/mine/*/all_results.json")
    assert json.loads(written.read_text())["train_steps"] == 2
    assert (written.parent / "validation_images" / "step-000002.png").is_file()


def test_bad_input_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    done = as_program("--do_train", "--trian_dir", "x", *QUIET, "--output_dir", tmp_path / "run")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: unknown flag --trian_dir")
