"""Text-to-image: fine-tuning beside a plain loop over diffusers' parts, and drawing beside its pipeline.

The pipeline has Stable Diffusion's parts at a quarter of their widths, without the UNet's lowest level, for squares of
128 pixels. Files, weights, schedule of the noise, batch and precision are the same on all sides.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.contests import Contest, Measured, Row, Settings
from benchmarks.ours import common_flags, load_recipe, train_in_turns
from benchmarks.turns import Turns, rates, take_turns

WORDS = "a red green blue white black small large round square thing beside under over the and of in light".split()
GUIDANCE, STEPS = 7.5, 10


def plan(settings: Settings) -> dict[str, int]:
    """Training files, rows of a step, pixels of a square, what widths are divided by, prompts, rows drawn at once."""
    if settings.small:
        return {"files": 4, "batch": 2, "side": 32, "narrow": 32, "prompts": 4, "drawn": 2}
    return {"files": 32, "batch": 8, "side": 128, "narrow": 4, "prompts": 32, "drawn": 8}


# --- What all sides have in common -----------------------------------------------------------------------------------


def pipeline(side: int, narrow: int) -> Any:
    """A pipeline of diffusers, in fp32."""
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast

    torch.manual_seed(0)
    words = ["<pad>", "<start>", "<end>", "<unk>", *WORDS]
    plain = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<unk>"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.post_processor = processors.TemplateProcessing(
        single="<start> $A <end>", special_tokens=[("<start>", 1), ("<end>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, model_max_length=77, **names)
    text = {"hidden_size": 768 // narrow, "intermediate_size": 3072 // narrow}
    text |= {"num_attention_heads": 12 // min(narrow, 12), "num_hidden_layers": 12 // min(narrow, 12)}
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    widths = [width // narrow for width in (128, 256, 512, 512)]
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4}
    groups = max(32 // narrow, 2)
    vae = AutoencoderKL(
        **kinds, block_out_channels=widths, layers_per_block=2, norm_num_groups=groups, sample_size=side
    )
    unet = UNet2DConditionModel(
        side // 8,
        down_block_types=["CrossAttnDownBlock2D"] * 2 + ["DownBlock2D"],
        up_block_types=["UpBlock2D"] + ["CrossAttnUpBlock2D"] * 2,
        block_out_channels=[max(width // narrow, 2 * groups) // groups * groups for width in (320, 640, 1280)],
        attention_head_dim=max(8 // narrow, 1),  # so many heads, each as wide as there
        norm_num_groups=groups,
        cross_attention_dim=text["hidden_size"],
    )
    betas = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
    scheduler = DDIMScheduler(**betas, clip_sample=False, set_alpha_to_one=False, steps_offset=1)
    parts = {"vae": vae, "unet": unet, "tokenizer": tokenizer, "scheduler": scheduler}
    parts["text_encoder"] = CLIPTextModel(CLIPTextConfig(**text, **ids))
    return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def caption(rng: random.Random) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(6, 20)))


def prepare(settings: Settings) -> dict[str, Any]:
    """Write pipeline, images with captions, and prompts; returns facts."""
    import numpy as np
    import torch
    from PIL import Image

    sizes, rng, folder = plan(settings), random.Random(0), settings.folder
    pipe = pipeline(sizes["side"], sizes["narrow"])
    pipe.save_pretrained(folder / "pipeline")
    (folder / "images").mkdir()
    rows, side = [], sizes["side"]
    for number in range(sizes["files"]):
        coarse = np.random.default_rng(number).integers(256, size=(12, 16, 3), dtype=np.uint8)
        image = Image.fromarray(coarse).resize((side * 2, side * 3 // 2), Image.Resampling.BICUBIC)
        image.save(folder / "images" / f"{number}.jpg", quality=90)
        rows.append({"file_name": f"{number}.jpg", "text": caption(rng)})
    (folder / "images" / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    texts = [caption(rng) for _ in range(sizes["prompts"])]
    (folder / "prompts.txt").write_text("\n".join(texts), encoding="utf-8")
    counts = {
        name: sum(parameter.numel() for parameter in getattr(pipe, name).parameters())
        for name in ("unet", "vae", "text_encoder")
    }
    return {"parameters": counts, "side": side, "threads": torch.get_num_threads()}


# --- Training --------------------------------------------------------------------------------------------------------


def train_flags(settings: Settings) -> list[Any]:
    """Our flags, as the published scripts have them."""
    shared, sizes = settings.folder.parent, plan(settings)
    flags = ["--model_name_or_path", shared / "pipeline", "--train_dir", shared / "images", "--bf16"]
    flags += ["--gaudi_config", "stable_diffusion", "--per_device_train_batch_size", sizes["batch"]]
    return [*flags, "--resolution", sizes["side"], "--random_flip", "--learning_rate", "1e-5"]


def ours(settings: Settings, turns: Turns) -> None:
    """The recipe: autoencoder and text encoder run in each step."""
    train_in_turns("text_to_image", train_flags(settings), settings, turns)


def ours_cached(settings: Settings, turns: Turns) -> None:
    """The recipe, which has found latents and embeddings once, before the first step."""
    train_in_turns("text_to_image", [*train_flags(settings), "--cache_latents"], settings, turns)


def examples(folder: Path, tokenizer: Any, sizes: dict[str, int]) -> Callable[[list[int]], dict[str, Any]]:
    """What makes a batch of row numbers: random crops and mirrors as Pillow's users have them, and tokens."""
    import numpy as np
    import torch
    from PIL import Image

    rows = [json.loads(line) for line in (folder / "metadata.jsonl").read_text(encoding="utf-8").splitlines()]
    side = sizes["side"]

    def one(name: str) -> Any:
        with Image.open(folder / name) as file:
            image = file.convert("RGB")
        scale = side / min(image.size)
        image = image.resize([round(length * scale) for length in image.size], Image.Resampling.BILINEAR)
        left, top = (random.randint(0, length - side) for length in image.size)
        image = image.crop((left, top, left + side, top + side))
        if random.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float().div(127.5).sub(1)

    def batch(numbers: list[int]) -> dict[str, Any]:
        chosen = [rows[number] for number in numbers]
        options = {"padding": "max_length", "max_length": 77, "truncation": True, "return_tensors": "pt"}
        tokens = tokenizer([row["text"] for row in chosen], **options)
        return {
            "pixels": torch.stack([one(row["file_name"]) for row in chosen]).contiguous(),
            "tokens": tokens["input_ids"],
        }

    return batch


def loop(settings: Settings, turns: Turns) -> None:
    """A plain loop over diffusers' parts: the frozen ones in bf16, the UNet in fp32 under autocast, fused AdamW."""
    import torch
    from diffusers import DDPMScheduler, StableDiffusionPipeline
    from torch.nn import functional

    shared, sizes, device = settings.folder.parent, plan(settings), device_of(settings)
    pipe = StableDiffusionPipeline.from_pretrained(shared / "pipeline")
    noises, unet = DDPMScheduler.from_config(pipe.scheduler.config), pipe.unet.to(device).train()
    vae, text_encoder = pipe.vae.to(device, torch.bfloat16), pipe.text_encoder.to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5, weight_decay=0.01, fused=True)
    rows = list(range(sizes["files"]))
    loader = torch.utils.data.DataLoader(
        rows,
        batch_size=sizes["batch"],
        shuffle=True,
        collate_fn=examples(shared / "images", pipe.tokenizer, sizes),
    )
    while True:
        for batch in loader:
            with torch.no_grad():
                pixels = batch["pixels"].to(device, torch.bfloat16)
                latents = vae.encode(pixels).latent_dist.sample() * vae.config.scaling_factor
                hidden = text_encoder(batch["tokens"].to(device))[0]
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, noises.config.num_train_timesteps, (len(latents),), device=device)
            noisy = noises.add_noise(latents, noise, timesteps)
            with torch.autocast(device.type, torch.bfloat16):
                predicted = unet(noisy, timesteps, hidden, return_dict=False)[0]
            functional.mse_loss(predicted.float(), noise.float()).backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if device.type != "cpu":
            torch.accelerator.synchronize()
        turns.over(samples=len(rows))


def device_of(settings: Settings) -> Any:
    """The device of a peer."""
    import torch

    found = torch.accelerator.current_accelerator() if settings.device != "cpu" else None
    return found or torch.device("cpu")


def measure_training(settings: Settings) -> Measured:
    """Ours and the loop, doing the same in each step."""
    return _measured(settings, ["ours", "loop"])


def measure_cached(settings: Settings) -> Measured:
    """Ours with what does not change found once, before time is taken, and the loop."""
    measured = _measured(settings, ["ours_cached", "loop"])
    measured.values["ours"] = measured.values.pop("ours_cached")
    return measured


def _measured(settings: Settings, sides: list[str]) -> Measured:
    facts, sizes = prepare(settings), plan(settings)
    facts |= {"rows": sizes["files"], "batch": sizes["batch"], "optimiser": "torch's fused AdamW"}
    facts["precision"] = "UNet in fp32 under bf16 autocast"
    reports = take_turns(__name__, sides, settings)
    known = all(each["flops"] for each in reports[sides[0]])
    flops = [each["flops"] / each["seconds"] for each in reports[sides[0]]] if known else []
    facts["samples in a turn"] = {side: [each["samples"] for each in own] for side, own in reports.items()}
    return Measured(rates(reports, "samples"), facts, flops)


# --- Drawing ---------------------------------------------------------------------------------------------------------


def drawing(settings: Settings, turns: Turns) -> None:
    """The recipe's generation: a turn draws all prompts, and writes the images and a sheet of them."""
    recipe, shared, sizes = load_recipe("text_to_image"), settings.folder.parent, plan(settings)
    generate = recipe.generate

    def repeated(*args: Any) -> Any:
        while True:
            found = generate(*args)
            turns.over(samples=found["generate_images"])

    recipe.generate = repeated
    flags = ["--model_name_or_path", shared / "pipeline", "--prompts_file", shared / "prompts.txt", "--bf16"]
    flags += ["--batch_size", sizes["drawn"], "--num_inference_steps", STEPS, "--guidance_scale", GUIDANCE]
    recipe.main([str(flag) for flag in (*flags, *common_flags(settings, settings.folder / "run"))])


def one_by_one(settings: Settings, turns: Turns) -> None:
    """diffusers' pipeline, called with one prompt after the other."""
    _pipeline_in_turns(settings, turns, 1)


def in_batches(settings: Settings, turns: Turns) -> None:
    """diffusers' pipeline, called with as many prompts at once as we draw."""
    _pipeline_in_turns(settings, turns, plan(settings)["drawn"])


def _pipeline_in_turns(settings: Settings, turns: Turns, rows: int) -> None:
    import torch
    from diffusers import DDIMScheduler, StableDiffusionPipeline

    shared, device, folder = settings.folder.parent, device_of(settings), settings.folder / "images"
    pipe = StableDiffusionPipeline.from_pretrained(shared / "pipeline", torch_dtype=torch.bfloat16).to(device)
    pipe.scheduler = DDIMScheduler.from_config(pipe.scheduler.config, timestep_spacing="linspace")
    pipe.set_progress_bar_config(disable=True)
    prompts = (shared / "prompts.txt").read_text(encoding="utf-8").splitlines()
    folder.mkdir()
    while True:
        for first in range(0, len(prompts), rows):
            texts = prompts[first : first + rows]
            for at, image in enumerate(pipe(texts, num_inference_steps=STEPS, guidance_scale=GUIDANCE).images):
                image.save(folder / f"{first + at:04d}.png")
        turns.over(samples=len(prompts))


def measure_drawing(settings: Settings) -> Measured:
    """Ours, and diffusers' pipeline in two ways."""
    facts, sizes = prepare(settings), plan(settings)
    facts |= {"prompts": sizes["prompts"], "batch": sizes["drawn"], "steps": STEPS, "guidance": GUIDANCE}
    facts |= {"precision": "bf16 weights", "scheduler": "DDIM", "written": "a PNG of each image"}
    reports = take_turns(__name__, ["drawing", "one_by_one", "in_batches"], settings)
    facts["samples in a turn"] = {side: [each["samples"] for each in own] for side, own in reports.items()}
    values = rates(reports, "samples")
    return Measured({"ours": values.pop("drawing"), **values}, facts)


SIDES: dict[str, Callable[[Settings, Turns], None]] = {
    "ours": ours,
    "ours_cached": ours_cached,
    "loop": loop,
    "drawing": drawing,
    "one_by_one": one_by_one,
    "in_batches": in_batches,
}
CONTESTS = [
    Contest(
        "text_to_image",
        "samples/s",
        [Row("text-to-image, fine-tuning", "loop", "plain diffusers loop", 1.2)],
        measure_training,
    ),
    Contest(
        "text_to_image_cached",
        "samples/s",
        [Row("text-to-image, fine-tuning, latents kept", "loop", "plain diffusers loop", 1.2)],
        measure_cached,
    ),
    Contest(
        "text_to_image_drawing",
        "images/s",
        [
            Row("text-to-image, 32 prompts", "one_by_one", "diffusers pipeline, prompt by prompt", 1.5),
            Row("text-to-image, 32 prompts", "in_batches", "diffusers pipeline, the same batches", 1.05),
        ],
        measure_drawing,
    ),
]
