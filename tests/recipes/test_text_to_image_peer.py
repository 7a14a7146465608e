"""The text-to-image recipe beside others: a plain loop of diffusers, unmodified pipelines, published commands."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, DiffusionPipeline
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel, compute_snr
from PIL import Image
from safetensors.torch import load_file
from torch.nn import functional

from core.arguments import parse_arguments
from core.errors import UserError
from tests.conftest import load_recipe, small_vae
from tests.test_run_files import asked_by

QUIET = "--disable_tqdm --report_to none --save_strategy no --logging_steps 1 --overwrite_output_dir".split()
SEED, STEPS, BATCH, PARTS = 42, 4, 2, 2  # rows of a forward pass, and forward passes of an optimiser step
ROWS = 7  # a step of four rows and one of three: an epoch
RATE, DECAY, CLIP, WARMUP = 1e-2, 0.05, 0.01, 1


@pytest.fixture(scope="module")
def text_to_image() -> ModuleType:
    return load_recipe("text_to_image")


@pytest.fixture(scope="module")
def captioned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of pictures whose shorter side is 16 pixels, of one 32; and their captions."""
    folder, draw = tmp_path_factory.mktemp("captioned"), np.random.default_rng(0)
    sizes = [(16, 20), (20, 16), (32, 40), (16, 16), (16, 22), (18, 16), (16, 20)]
    lines = []
    for number, size in enumerate(sizes):
        Image.fromarray(draw.integers(0, 256, (*size, 3), np.uint8)).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": f"alpha {number} beta"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


# ------------------------------------------------------------------------------------------------------------ training


def square(path: Path) -> tuple[np.ndarray, tuple[int, int], tuple[int, int]]:
    """The middle of a picture (3, 16, 16) from -1 to 1, its size before, and where the square begins in the resized."""
    image = Image.open(path)
    width, height = (16 * side // min(image.size) for side in image.size)
    top, left = (height - 16) // 2, (width - 16) // 2
    resized = image.resize((width, height), Image.Resampling.BILINEAR).crop((left, top, left + 16, top + 16))
    return np.asarray(resized, np.float32).transpose(2, 0, 1) / 127.5 - 1, image.size[::-1], (top, left)


def batch_of(pipe: Any, folder: Path, epoch: int, numbers: list[int], empty: float, offset: float) -> SimpleNamespace:
    """Rows as diffusers encodes them, with what the recipe draws by seed, epoch and row number, in its order."""
    latents, noises, timesteps, texts, pooled, times = [], [], [], [], [], []
    for number in numbers:
        rng = np.random.default_rng([SEED, epoch, number])
        rng.random()  # which caption: there is one
        caption = "" if rng.random() < empty else f"alpha {number} beta"
        timesteps.append(int(rng.random() * 1000))
        posterior, noise = (rng.standard_normal((4, 8, 8), dtype=np.float32) for _ in range(2))
        noises.append(torch.from_numpy(noise + offset * rng.standard_normal((4, 1, 1), dtype=np.float32)))
        pixels, size, corner = square(folder / f"{number}.png")
        found = pipe.vae.encode(torch.from_numpy(pixels)[None]).latent_dist
        latents.append((found.mean + found.std * torch.from_numpy(posterior)) * pipe.vae.config.scaling_factor)
        encoded = pipe.encode_prompt(caption, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True)
        encoded = encoded[::2] if caption else encoded[1::2]  # without a caption: what guidance draws away from
        texts.append(encoded[0])
        if len(encoded) == 2:
            pooled.append(encoded[1])
            sizes = {"dtype": torch.float32, "text_encoder_projection_dim": encoded[1].shape[-1]}
            times.append(pipe._get_add_time_ids(size, corner, (16, 16), **sizes))
    told = {"text_embeds": torch.cat(pooled), "time_ids": torch.cat(times)} if pooled else None
    rows = {"latents": torch.cat(latents), "noise": torch.stack(noises), "timesteps": torch.tensor(timesteps)}
    return SimpleNamespace(**rows, texts=torch.cat(texts), told=told)


def losses_of(unet: Any, scheduler: Any, batch: SimpleNamespace, gamma: float | None) -> torch.Tensor:
    """Each row's loss, as in diffusers' training scripts."""
    noisy = scheduler.add_noise(batch.latents, batch.noise, batch.timesteps)
    predicted = unet(noisy, batch.timesteps, batch.texts, added_cond_kwargs=batch.told).sample
    velocity, kind = scheduler.config.prediction_type == "v_prediction", batch.noise
    target = scheduler.get_velocity(batch.latents, batch.noise, batch.timesteps) if velocity else kind
    losses = functional.mse_loss(predicted, target, reduction="none").mean(dim=(1, 2, 3))
    if gamma is None:
        return losses
    snr = compute_snr(scheduler, batch.timesteps)
    return losses * snr.clamp(max=gamma) / (snr + 1 if velocity else snr)


def trained_by_peer(
    model: Path,
    folder: Path,
    windows: list[tuple[int, list[int]]],
    prediction: str = "epsilon",
    gamma: float | None = None,
    empty: float = 0.0,
    offset: float = 0.0,
    rank: int = 0,
    decay: float | None = None,
) -> tuple[list[float], Any]:
    """Train a pipeline's UNet in a plain loop; returns the losses of its steps, and the UNet, with averages if any."""
    pipe = DiffusionPipeline.from_pretrained(model)
    scheduler, unet = DDPMScheduler.from_config(pipe.scheduler.config, prediction_type=prediction), pipe.unet.train()
    if rank:
        from peft import LoraConfig

        unet.requires_grad_(False)
        torch.manual_seed(SEED)
        layers = ["to_q", "to_k", "to_v", "to_out.0"]
        unet.add_adapter(LoraConfig(r=rank, lora_alpha=8, lora_dropout=0.0, target_modules=layers))
    weights = [weight for weight in unet.parameters() if weight.requires_grad]
    groups = [{"params": [weight for weight in weights if weight.ndim > 1], "weight_decay": DECAY}]
    groups += [{"params": [weight for weight in weights if weight.ndim == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=RATE, eps=1e-8)
    schedule = get_scheduler("cosine", optimizer, num_warmup_steps=WARMUP, num_training_steps=STEPS)
    average = EMAModel(unet.parameters(), decay=decay) if decay else None
    history = []
    for epoch, numbers in windows:
        total = 0.0
        for first in range(0, len(numbers), BATCH):
            with torch.no_grad():
                batch = batch_of(pipe, folder, epoch, numbers[first : first + BATCH], empty, offset)
            loss = losses_of(unet, scheduler, batch, gamma).sum() / len(numbers)
            loss.backward()
            total += loss.item()
        assert torch.nn.utils.clip_grad_norm_(weights, CLIP) > CLIP, "there is something to clip"
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if average:
            average.step(unet.parameters())
        history.append(total)
    if average:
        average.copy_to(unet.parameters())
    return history, unet


def watched(recipe: ModuleType, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The loaders that the recipe makes, by split."""
    found, make = {}, recipe.make_loader

    def watch(*given: Any) -> Any:
        found[given[2].split] = make(*given)
        return found[given[2].split]

    monkeypatch.setattr(recipe, "make_loader", watch)
    return found


def trained_here(
    recipe: ModuleType, model: Path, folder: Path, output: Path, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[list[float], list[tuple[int, list[int]]]]:
    """Run the recipe; returns the losses of its steps, and each step's epoch and rows."""
    loaders = watched(recipe, monkeypatch)
    given = ["--model_name_or_path", str(model), "--train_dir", str(folder), "--output_dir", str(output), *QUIET]
    given += f"--max_steps {STEPS} --per_device_train_batch_size {BATCH} --center_crop --seed {SEED}".split()
    given += f"--gradient_accumulation_steps {PARTS} --learning_rate {RATE} --weight_decay {DECAY}".split()
    given += f"--max_grad_norm {CLIP} --lr_scheduler_type cosine --warmup_steps {WARMUP}".split()
    recipe.main(["--do_train", *given, *flags])
    rows = csv.DictReader((output / "logs" / "metrics.csv").open())
    windows = [(epoch, window.row_ids) for epoch in range(2) for window in loaders["train"].windows(epoch)]
    return [float(row["loss"]) for row in rows if row["loss"]], windows


WAYS = {
    "sd": ("sd", "", {}),
    "sd-offset-empty": ("sd", "--noise_offset 0.1 --proportion_empty_prompts 0.4", {"offset": 0.1, "empty": 0.4}),
    "sd-snr": ("sd", "--snr_gamma 5", {"gamma": 5.0}),
    "sd-velocity-snr": (
        "sd",
        "--prediction_type v_prediction --snr_gamma 5",
        {"prediction": "v_prediction", "gamma": 5.0},
    ),
    "sd-averages": ("sd", "--use_ema --ema_decay 0.9", {"decay": 0.9}),
    "sdxl": ("sdxl", "--proportion_empty_prompts 0.4", {"empty": 0.4}),
    "sdxl-kept": ("sdxl", "--cache_latents --proportion_empty_prompts 0.4", {"empty": 0.4}),
}


def far(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The distance of two sets of weights, relative to their size."""
    assert found.keys() == expected.keys()
    pairs = [(found[name].detach().double(), one.detach().double()) for name, one in expected.items()]
    apart, size = sum((one - two).square().sum() for one, two in pairs), sum(two.square().sum() for _, two in pairs)
    return float((apart / size).sqrt())


@pytest.mark.parametrize("way", WAYS)
def test_a_plain_loop_of_diffusers_learns_the_same(
    request: pytest.FixtureRequest, text_to_image: ModuleType, captioned: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, way: str,
) -> None:  # fmt: skip
    kind, flags, options = WAYS[way]
    model = request.getfixturevalue(f"tiny_{kind}")
    losses, windows = trained_here(text_to_image, model, captioned, tmp_path, flags.split(), monkeypatch)
    assert [len(rows) for _, rows in windows] == [4, 3, 4, 3]
    expected, unet = trained_by_peer(model, captioned, windows, **options)
    start, saved = (load_file(folder / "unet" / "diffusion_pytorch_model.safetensors") for folder in (model, tmp_path))
    assert losses == pytest.approx(expected, rel=1e-6)
    assert far(saved, unet.state_dict()) < 1e-6
    assert far(saved, start) > 0.05, "it has gone some way"


def test_the_loop_with_peft_learns_the_same_adapter(
    text_to_image: ModuleType, tiny_sd: Path, captioned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `trained_here` with ``unet.add_adapter``; and what is saved is what diffusers loads."""
    from peft import get_peft_model_state_dict

    flags = "--lora_rank 4 --lora_alpha 8 --lora_dropout 0".split()
    losses, windows = trained_here(text_to_image, tiny_sd, captioned, tmp_path, flags, monkeypatch)
    expected, unet = trained_by_peer(tiny_sd, captioned, windows, rank=4)
    assert losses == pytest.approx(expected, rel=1e-6)
    adapter = get_peft_model_state_dict(unet)
    saved = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    found = {name.removeprefix("base_model.model."): weight for name, weight in saved.items()}
    # Of gradients near zero AdamW makes steps as large as of others, and so of their rounding.
    assert far(found, adapter) < 2e-6
    pipe = DiffusionPipeline.from_pretrained(tiny_sd)
    pipe.load_lora_weights(tmp_path / "adapter")
    assert far(get_peft_model_state_dict(pipe.unet, adapter_name=pipe.get_active_adapters()[0]), adapter) < 2e-6
    unet.fuse_lora()
    unet.unload_lora()
    merged = load_file(tmp_path / "unet" / "diffusion_pytorch_model.safetensors")
    assert far(merged, unet.state_dict()) < 1e-6


# ------------------------------------------------------------------------------------------------------------- drawing


@pytest.fixture(scope="module")
def drawn_flags() -> list[str]:
    flags = ["--prompts", "alpha 1", "beta", "--num_images_per_prompt", "2", "--negative_prompts", "gamma"]
    return [*flags, *"--num_inference_steps 4 --height 16 --width 16 --seed 7 --output_type np".split(), *QUIET]


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
def test_an_unmodified_pipeline_draws_the_same_prompt_by_prompt(
    request: pytest.FixtureRequest, text_to_image: ModuleType, tmp_path: Path, drawn_flags: list[str], kind: str
) -> None:
    """At batch 1 the same pixels, at batch 3 all but: the order of sums is another."""
    model = request.getfixturevalue(f"tiny_{kind}")
    given = ["--model_name_or_path", str(model), "--output_dir", str(tmp_path), "--scheduler", "default", *drawn_flags]
    pipe, images = DiffusionPipeline.from_pretrained(model), []
    pipe.set_progress_bar_config(disable=True)
    guided = {} if kind == "flux" else {"negative_prompt": "gamma"}
    for number, prompt in enumerate(["alpha 1", "alpha 1", "beta", "beta"]):
        how = {"num_inference_steps": 4, "guidance_scale": 7.5, "height": 16, "width": 16, "output_type": "np"}
        image = pipe(prompt, **how, **guided, generator=torch.Generator().manual_seed(7 + number)).images[0]
        images.append((image * 255).round().astype(np.uint8))
    for batch in (1, 3):
        text_to_image.main([*given, "--batch_size", str(batch)])
        found = np.load(tmp_path / "images" / "images.npy")
        assert np.abs(found.astype(int) - np.stack(images)).max() <= batch // 2
        shown = [np.asarray(Image.open(tmp_path / "images" / f"{number:04d}.png")) for number in range(4)]
        assert np.array_equal(found, np.stack(shown))


# --------------------------------------------------------------------------------------------------- published commands

ON_GAUDI = "--use_habana --use_hpu_graphs --gaudi_config Habana/stable-diffusion --sdp_on_bf16 --bf16"
# As they are published, but for names, which are folders here, and sizes; and the folder of the output.
PUBLISHED = {
    "sdxl": f'''--model_name_or_path {{sdxl}} --prompts "Sailing ship painting by Van Gogh" --num_images_per_prompt 28
        --batch_size 7 --num_inference_steps 3 --image_save_dir {{images}} --scheduler euler_discrete {ON_GAUDI}''',
    "sd3": f'''--model_name_or_path {{sd3}} --prompts "Sailing ship painting by Van Gogh" --num_images_per_prompt 10
        --batch_size 1 --num_inference_steps 2 --image_save_dir {{images}} --scheduler default {ON_GAUDI}''',
    "flux": f'''--model_name_or_path {{flux}} --prompts "A cat holding a sign that says hello world"
        --num_images_per_prompt 10 --batch_size 1 --num_inference_steps 3 --image_save_dir {{images}}
        --scheduler flow_match_euler_discrete {ON_GAUDI} --height 16 --width 16''',
    "controlnet": f'''--model_name_or_path {{sd}} --controlnet_model_name_or_path {{controlnet}}
        --prompts "futuristic-looking woman" --control_image {{picture}} --num_images_per_prompt 28 --batch_size 7
        --image_save_dir {{images}} {ON_GAUDI} --num_inference_steps 2''',
    "inpaint": f'''--model_name_or_path {{inpaint}} --base_image {{picture}} --mask_image {{mask}}
        --prompts "concept art digital painting of an elven castle, inspired by lord of the rings, highly detailed, 8k"
        --seed 0 --num_images_per_prompt 12 --batch_size 4 --image_save_dir {{images}} {ON_GAUDI}
        --num_inference_steps 2''',
    "refiner": f'''--model_name_or_path {{refiner}} --src_image_path {{picture}} --prompts "turn him into cyborg"
        --num_images_per_prompt 20 --batch_size 4 --guidance_scale 7.5 --num_inference_steps 10
        --image_save_dir {{images}} {ON_GAUDI}''',
    "brightness": '''--model_name_or_path {velocity} --prompts "A lion in galaxies, spirals, nebulae, stars, smoke"
        --num_images_per_prompt 1 --batch_size 1 --use_habana --use_hpu_graphs --image_save_dir {images} --seed 33
        --use_zero_snr --guidance_scale 0.7 --timestep_spacing trailing --num_inference_steps 3''',
    "quality": '''--model_name_or_path {sdxl} --prompts "A squirrel eating a burger" --num_images_per_prompt 4
        --batch_size 4 --use_habana --image_save_dir {images} --seed 33 --use_freeu --sdp_on_bf16 --bf16
        --num_inference_steps 3''',
}  # fmt: skip
# The images, and the scheduler that draws them: where none is named, the published script takes DDIM.
EXPECTED = {
    "sdxl": (28, "EulerDiscreteScheduler"),
    "sd3": (10, "FlowMatchEulerDiscreteScheduler"),
    "flux": (10, "FlowMatchEulerDiscreteScheduler"),
    "controlnet": (28, "DDIMScheduler"),
    "inpaint": (12, "DDIMScheduler"),
    "refiner": (20, "DDIMScheduler"),
    "brightness": (1, "DDIMScheduler"),
    "quality": (4, "DDIMScheduler"),
}
FINE_TUNE = """--pretrained_model_name_or_path {sdxl} --pretrained_vae_model_name_or_path {vae} --dataset_name {data}
    --resolution 16 --crop_resolution 16 --center_crop --random_flip --proportion_empty_prompts=0.2
    --train_batch_size 4 --max_train_steps 5 --learning_rate 1e-05 --max_grad_norm 1 --lr_scheduler constant
    --lr_warmup_steps 0 --output_dir {output} --gaudi_config_name Habana/stable-diffusion --throughput_warmup_steps 3
    --dataloader_num_workers 2 --sdp_on_bf16 --bf16 --use_hpu_graphs_for_training --use_hpu_graphs_for_inference
    --validation_prompt="a cute naruto creature" --validation_epochs 48 --checkpointing_steps 5 --logging_step 2
    --adjust_throughput"""
FINE_TUNED = f"""--model_name_or_path {{output}} --prompts "a cute naruto creature" --num_images_per_prompt 5
    --batch_size 1 --image_save_dir {{images}} --scheduler euler_discrete {ON_GAUDI} --num_inference_steps 3"""


def other_pipelines(sd: Path, sdxl: Path, folder: Path) -> dict[str, Path]:
    """As the published ones: with another scheduler, a ControlNet, one that fills in, one that refines, a VAE."""
    import diffusers

    torch.manual_seed(0)
    paths = {name: folder / name for name in ("sd", "velocity", "controlnet", "inpaint", "refiner", "vae")}
    plain, whole = (DiffusionPipeline.from_pretrained(path) for path in (sd, sdxl))
    plain.scheduler = diffusers.PNDMScheduler.from_config(plain.scheduler.config, skip_prk_steps=True)  # as the first's
    plain.save_pretrained(paths["sd"])
    own = plain.scheduler
    plain.scheduler = type(own).from_config(own.config, prediction_type="v_prediction")  # as ptx0/pseudo-journey-v2
    plain.save_pretrained(paths["velocity"])
    diffusers.ControlNetModel.from_unet(plain.unet, conditioning_embedding_out_channels=(8, 16)).save_pretrained(
        paths["controlnet"]
    )
    small_vae(sample_size=16).save_pretrained(paths["vae"])
    parts = whole.components
    unet = type(whole.unet).from_config(whole.unet.config, in_channels=9)
    diffusers.StableDiffusionXLInpaintPipeline(**parts | {"unet": unet}).save_pretrained(paths["inpaint"])
    size = {"cross_attention_dim": 24, "projection_class_embeddings_input_dim": 24 + 5 * 4}
    parts |= {"unet": type(whole.unet).from_config(whole.unet.config, **size), "tokenizer": None, "text_encoder": None}
    refiner = diffusers.StableDiffusionXLImg2ImgPipeline(**parts, requires_aesthetics_score=True)
    refiner.save_pretrained(paths["refiner"])
    return paths


@pytest.fixture(scope="module")
def names(
    tiny_sd: Path, tiny_sdxl: Path, tiny_sd3: Path, tiny_flux: Path, captioned: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:  # fmt: skip
    """What stands for the names of the published commands."""
    from datasets import Dataset, Features, Value
    from datasets import Image as Picture

    folder = tmp_path_factory.mktemp("names")
    found: dict[str, Any] = {"sdxl": tiny_sdxl, "sd3": tiny_sd3, "flux": tiny_flux}
    found |= other_pipelines(tiny_sd, tiny_sdxl, folder)
    found |= {"picture": folder / "picture.png", "mask": folder / "mask.png", "data": folder / "data"}
    picture = np.random.default_rng(1).integers(0, 256, (16, 16, 3), np.uint8)
    Image.fromarray(picture).save(found["picture"])
    Image.fromarray((np.arange(256).reshape(16, 16) % 16 < 8).astype(np.uint8) * 255).save(found["mask"])
    rows = {"image": [str(path) for path in sorted(captioned.glob("*.png"))], "text": list("abcdefg")}
    data = Dataset.from_dict(rows, features=Features({"image": Picture(), "text": Value("string")}))
    found["data"].mkdir()
    data.to_parquet(found["data"] / "train.parquet")
    return {name: str(path) for name, path in found.items()}


def published(recipe: ModuleType, command: str, folder: Path, **named: str) -> dict[str, Any]:
    words = shlex.split(command.format(images=folder / "images", output=folder / "out", **named))
    rest = ["--cache_dir", str(folder / "cache"), "--disable_tqdm", "--report_to", "none"]
    rest += [] if "--output_dir" in words else ["--output_dir", str(folder / "run")]
    return recipe.main([*words, *rest])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_command_draws_with_only_the_path_changed(
    text_to_image: ModuleType, names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "1")
    metrics = published(text_to_image, PUBLISHED[name], tmp_path, **names)
    count, scheduler = EXPECTED[name]
    files = sorted((tmp_path / "images").glob("[0-9]*.png"))
    assert (metrics["generate_images"], len(files)) == (count, count)
    images = [Image.open(file) for file in files]
    assert {image.size for image in images} == {(16, 16)}
    assert {image.text["scheduler"] for image in images} == {scheduler}
    assert len({image.tobytes() for image in images}) == count, "no two are alike"
    batches = count // int(PUBLISHED[name].split("--batch_size ")[1].split()[0])
    assert (metrics["generate_images_per_second"] is not None) == (batches > 2)
    run = json.loads((tmp_path / "run" / "all_results.json").read_text())["run"]
    assert run["device"]["precision"].startswith("bf16") is ("--bf16" in PUBLISHED[name])


def test_the_published_fine_tuning_runs_with_only_the_path_changed(
    text_to_image: ModuleType, names: dict[str, str], tmp_path: Path
) -> None:
    """And what it leaves draws with the command that is published for it."""
    metrics = published(text_to_image, FINE_TUNE, tmp_path, **names)
    output = tmp_path / "out"
    assert metrics["train_steps"] == 5
    assert metrics["train_samples_per_second"] > 0
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-5"]
    assert [path.name for path in output.glob("validation_images/*")] == ["step-000005.png"]
    steps = [int(row["step"]) for row in csv.DictReader((output / "logs" / "metrics.csv").open()) if row["loss"]]
    assert steps == [2, 4, 5]
    vae, own, given = (
        load_file(f"{folder}/diffusion_pytorch_model.safetensors")
        for folder in (output / "vae", f"{names['sdxl']}/vae", names["vae"])
    )
    assert far(vae, given) == 0 < far(vae, own)
    drawn = published(text_to_image, FINE_TUNED, tmp_path, **names)
    assert drawn["generate_images"] == len(list((tmp_path / "images").glob("[0-9]*.png"))) == 5


# ------------------------------------------------------------------------------------------------------ published flags

# Of the published script that draws. After a flag and its value: what it needs beside it.
GENERATION = """
    --model_name_or_path x
    --controlnet_model_name_or_path x --control_image y
    --scheduler default
    --scheduler euler_discrete
    --scheduler euler_ancestral_discrete
    --scheduler ddim
    --scheduler flow_match_euler_discrete
    --timestep_spacing linspace
    --prompts_2 x
    --prompts_3 x
    --negative_prompts x
    --negative_prompts_2 x
    --negative_prompts_3 x
    --base_image x
    --src_image_path x
    --mask_image x --base_image y
    --control_image x
    --num_images_per_prompt 3
    --batch_size 3
    --height 512 --width 512
    --width 512 --height 512
    --num_inference_steps 3
    --guidance_scale 3.5
    --eta 0.5
    --output_type np
    --pipeline_save_dir x
    --image_save_dir x
    --seed 3
    --use_habana
    --use_hpu_graphs
    --gaudi_config_name Habana/stable-diffusion
    --gaudi_config Habana/stable-diffusion
    --bf16
    --sdp_on_bf16
    --throughput_warmup_steps 3
    --profiling_warmup_steps 3
    --profiling_steps 3
    --distributed
    --unet_adapter_name_or_path x
    --text_encoder_adapter_name_or_path x
    --lora_id x
    --lora_scale 0.5
    --use_cpu_rng
    --use_compel
    --use_freeu
    --use_zero_snr
    --optimize
    --quant_mode measure
    --quant_mode quantize
    --quant_mode quantize-mixed
    --use_distributed_cfg
"""
# Of the one that fine-tunes SDXL.
TRAINING = """
    --pretrained_model_name_or_path x
    --pretrained_vae_model_name_or_path x
    --train_data_dir x
    --image_column x
    --caption_column x
    --validation_prompt x
    --num_validation_images 3
    --validation_epochs 3
    --max_train_samples 3
    --proportion_empty_prompts 0.2
    --output_dir x
    --seed 3
    --resolution 512
    --crop_resolution 256 --resolution 512
    --center_crop
    --random_flip
    --train_batch_size 3
    --num_train_epochs 3
    --max_train_steps 3
    --checkpointing_steps 3
    --checkpoints_total_limit 3
    --resume_from_checkpoint x
    --gradient_accumulation_steps 3
    --learning_rate 1e-5
    --scale_lr
    --lr_scheduler cosine
    --lr_warmup_steps 3
    --timestep_bias_strategy earlier
    --timestep_bias_strategy later
    --timestep_bias_strategy range
    --timestep_bias_multiplier 2 --timestep_bias_strategy range
    --timestep_bias_begin 3 --timestep_bias_strategy range
    --timestep_bias_end 3 --timestep_bias_strategy range
    --timestep_bias_portion 0.5 --timestep_bias_strategy later
    --snr_gamma 5
    --use_ema
    --dataloader_num_workers 3
    --adam_beta1 0.8
    --adam_beta2 0.9
    --adam_weight_decay 0.1
    --adam_epsilon 1e-6
    --max_grad_norm 0.5
    --prediction_type v_prediction
    --noise_offset 0.1
    --bf16
    --sdp_on_bf16
    --gaudi_config_name Habana/stable-diffusion
    --throughput_warmup_steps 3
    --use_hpu_graphs_for_training
    --use_hpu_graphs_for_inference
    --image_save_dir x
    --output_type np
    --profiling_warmup_steps 3
    --profiling_steps 3
    --profiling_record_shapes False
    --profiling_with_stack
    --logging_step 3
    --mediapipe ""
    --mediapipe x
    --adjust_throughput
    --scheduler euler_discrete
    --scheduler euler_ancestral_discrete
    --scheduler ddim
    --scheduler ddpm
"""
OWN_NAMES = {
    "train_batch_size": "per_device_train_batch_size", "max_train_steps": "max_steps", "logging_step": "logging_steps",
    "checkpointing_steps": "save_steps", "checkpoints_total_limit": "save_total_limit", "image_column":
    "image_column_name", "caption_column": "caption_column_name", "lr_scheduler": "lr_scheduler_type",
    "lr_warmup_steps": "warmup_steps", "adam_weight_decay": "weight_decay", "train_data_dir": "train_dir",
    "pretrained_model_name_or_path": "model_name_or_path", "gaudi_config_name": "gaudi_config",
    "src_image_path": "base_image",
}  # fmt: skip


def parsed(recipe: ModuleType, *words: str) -> Any:
    groups, options = asked_by("text_to_image")
    args = parse_arguments(list(words), *groups, **options)
    recipe.check(args)
    return args


def lines_of(text: str, work: str) -> list[Any]:
    return [pytest.param(work, shlex.split(line), id=f"{work} {line.strip()}") for line in text.strip().splitlines()]


@pytest.mark.parametrize(("work", "words"), lines_of(GENERATION, "draw") + lines_of(TRAINING, "train"))
def test_a_published_flag_is_there_under_its_name(text_to_image: ModuleType, work: str, words: list[str]) -> None:
    name, *values = words[: next((at for at, word in enumerate(words) if at and word.startswith("--")), None)]
    given = {"draw": ["--prompts", "a", "--model_name_or_path", "m"], "train": ["--dataset_name", "d"]}[work]
    given = given[:2] if name == "--model_name_or_path" else [] if name == "--train_data_dir" else given
    args = parsed(text_to_image, *words, *given)
    assert (args.do_generate, args.do_train) == (work == "draw", work == "train"), "what it does needs no flag"
    found = getattr(args, OWN_NAMES.get(name[2:], name[2:]))
    kind = type(found[0] if isinstance(found, list) else found)
    value = True if not values else values[0] != "False" if kind is bool else kind(values[0])
    assert found == ([value] if isinstance(found, list) else value)


def test_a_published_flag_that_is_not_followed_is_refused_in_one_line(text_to_image: ModuleType) -> None:
    with pytest.raises(UserError, match=r"^--ldm3d: no depth is drawn here; leave it out$"):
        parsed(text_to_image, "--prompts", "a", "--model_name_or_path", "m", "--ldm3d")


def test_defaults_are_the_published_ones(text_to_image: ModuleType) -> None:
    """But for sizes, which are the pipeline's own, warm-up and records; `EXPECTED` has the default scheduler."""
    drawing = {"num_images_per_prompt": 1, "batch_size": 1, "height": None, "width": None, "num_inference_steps": 50}
    drawing |= {"guidance_scale": 7.5, "eta": 0.0, "output_type": "pil", "seed": 42, "lora_scale": 1.0, "bf16": False}
    training = {"num_validation_images": 4, "validation_epochs": 1, "proportion_empty_prompts": 0.0, "snr_gamma": None}
    training |= {"center_crop": False, "random_flip": False, "use_ema": False, "scale_lr": False, "noise_offset": 0.0}
    training |= {"per_device_train_batch_size": 16, "num_train_epochs": 100.0, "learning_rate": 1e-4, "max_steps": -1}
    training |= {"lr_scheduler_type": "constant", "weight_decay": 1e-2, "adam_epsilon": 1e-8, "max_grad_norm": 1.0}
    training |= {"adam_beta1": 0.9, "adam_beta2": 0.999, "gradient_accumulation_steps": 1, "save_steps": 500}
    training |= {"dataloader_num_workers": 0, "throughput_warmup_steps": 0, "prediction_type": None}
    bias = {"strategy": "none", "multiplier": 1.0, "begin": 0, "end": 1000, "portion": 0.25}
    training |= {f"timestep_bias_{name}": value for name, value in bias.items()}
    draws, trains = ["--prompts", "a", "--model_name_or_path", "m"], ["--dataset_name", "d"]
    for words, expected in ((draws, drawing), (trains, training)):
        args = parsed(text_to_image, *words)
        assert {name: getattr(args, name) for name in expected} == expected
