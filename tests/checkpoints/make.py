"""Write one small checkpoint of each kind that this version saves: ``python -m tests.checkpoints.make FOLDER``.

It was run once with each format of `core.checkpoint`, into ``format_<number>``, and what it wrote is never made again:
later versions must load it, see `tests.test_old_checkpoints`. It has folders of a model to start from with data, and
folders of a run: the checkpoint of step 2 as it was saved, and ``expected.json`` of the straight run of four steps, its
flags (names are relative to FOLDER), losses, and two numbers for each tensor of its weights.
"""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.conftest import (
    REPOSITORY,
    build_tokenizer,
    clip_tokenizer,
    pairs,
    save_captioned,
    save_pictures,
    save_text_model,
    texts,
    write_jsonl,
)
from tests.core.ranks import free_port

STEPS = "--do_train --max_steps 4 --save_steps 2 --logging_steps 1 --learning_rate 0.01 --warmup_steps 1".split()
STEPS += "--lr_scheduler_type linear --per_device_train_batch_size 2 --disable_tqdm --report_to none --use_cpu".split()
TWICE = ["--gradient_accumulation_steps", "2"]
PAIRS = "--model_name_or_path t5/model --train_file t5/train.jsonl --max_source_length 16 --max_target_length 8".split()
BLOCKS = "--model_name_or_path gpt2/model --train_file gpt2/train.jsonl --block_size 8".split()
PICTURES = "--model_name_or_path vit/model --train_dir vit/train --random_flip 0.5".split()
DRAWINGS = "--model_name_or_path sd/model --train_dir sd/train --resolution 8 --random_flip".split()
LORA = "--lora_rank 2 --lora_alpha 4 --lora_dropout 0.1".split()
EMA = "--use_ema --ema_decay 0.5".split()


def t5(folder: Path) -> None:
    import torch
    from transformers import T5Config, T5ForConditionalGeneration

    write_jsonl(folder / "train.jsonl", pairs(10, longest=12))
    build_tokenizer(folder / "model")
    torch.manual_seed(0)
    sizes = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 1, "num_heads": 2}
    special = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    T5ForConditionalGeneration(T5Config(**sizes, **special)).save_pretrained(folder / "model")


def gpt2(folder: Path) -> None:
    from transformers import GPT2Config

    write_jsonl(folder / "train.jsonl", texts(20, longest=10))
    sizes = {"vocab_size": 27, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 2}
    config = GPT2Config(**sizes, eos_token_id=1, bos_token_id=1)
    save_text_model(folder / "model", config, "GPT2LMHeadModel", eos_token="<eos>")


def vit(folder: Path) -> None:
    import torch
    from transformers import ViTConfig, ViTImageProcessorPil, ViTModel

    save_pictures(folder / "train", 14, kinds=("png",))
    shrink(folder / "train")
    sizes = {"size": {"height": 8, "width": 8}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    ViTImageProcessorPil(**sizes).save_pretrained(folder / "model")
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = ViTConfig(image_size=8, patch_size=4, **sizes, initializer_range=0.2, hidden_dropout_prob=0.1)
    ViTModel(config).save_pretrained(folder / "model")


def sd(folder: Path) -> None:
    import diffusers
    import torch
    from transformers import CLIPTextConfig, CLIPTextModel

    save_captioned(folder / "train", 8)
    shrink(folder / "train")
    torch.manual_seed(0)
    tokenizer = clip_tokenizer(folder)
    for name in ("vocab.json", "merges.txt"):
        (folder / name).unlink()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text_config = CLIPTextConfig(vocab_size=len(tokenizer), **sizes, **ids, max_position_embeddings=16)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    sizes = {"block_out_channels": (2, 2), "norm_num_groups": 1, "latent_channels": 2, "sample_size": 8}
    vae = diffusers.AutoencoderKL(**blocks, **sizes)
    blocks = {"down_block_types": ("CrossAttnDownBlock2D",), "mid_block_type": None, "up_block_types": ("UpBlock2D",)}
    sizes = {"block_out_channels": (4,), "norm_num_groups": 2, "layers_per_block": 1, "sample_size": 4}
    sizes |= {"in_channels": 2, "out_channels": 2, "cross_attention_dim": 8, "attention_head_dim": 2}
    unet = diffusers.UNet2DConditionModel(**blocks, **sizes)
    scheduler = diffusers.DDIMScheduler(steps_offset=1, clip_sample=False, set_alpha_to_one=False)
    parts = {"tokenizer": tokenizer, "text_encoder": CLIPTextModel(text_config), "vae": vae, "unet": unet}
    parts |= {"scheduler": scheduler, "safety_checker": None, "feature_extractor": None}
    diffusers.StableDiffusionPipeline(**parts, requires_safety_checker=False).save_pretrained(folder / "model")


def shrink(folder: Path) -> None:
    """Cut every picture to 8 x 8."""
    from PIL import Image

    for path in folder.rglob("*.png"):
        Image.open(path).resize((8, 8)).save(path)


# Folder: recipe, ranks, flags.
CASES = {
    "summarization": ("summarization", 1, [*PAIRS, *TWICE, "--optim", "adafactor"]),
    "language_modeling_lora": ("language_modeling", 1, [*BLOCKS, *TWICE, *LORA]),
    "language_modeling_two_ranks": ("language_modeling", 2, BLOCKS),
    "image_classification": ("image_classification", 1, [*PICTURES, *TWICE]),
    "text_to_image_ema": ("text_to_image", 1, [*DRAWINGS, *TWICE, *EMA]),
}


def losses(output: Path) -> dict[str, float]:
    """What the run recorded, by step."""
    with (output / "logs" / "metrics.csv").open() as file:
        return {row["step"]: float(row["loss"]) for row in csv.DictReader(file) if row["loss"]}


def weights(output: Path) -> dict[str, list[float]]:
    """For each tensor of the trained weights its L2 norm, and its product with cos(0), cos(1), cos(2) and so on."""
    import torch
    from safetensors.torch import load_file

    path = output / "unet" / "diffusion_pytorch_model.safetensors"
    numbers = {}
    for name, tensor in load_file(path if path.exists() else output / "model.safetensors").items():
        flat = tensor.double().flatten()
        product = (flat * torch.arange(len(flat)).double().cos()).sum()
        numbers[name] = [round(number.item(), 7) for number in (flat.norm(), product)]
    return numbers


def start(script: Path, ranks: int, flags: list[str], folder: Path) -> None:
    """Run a recipe's script in ``folder``, on so many processes."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1"}
    common["MASTER_PORT"] = str(free_port())
    command = [sys.executable, str(script), *flags]
    own = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    started = [subprocess.Popen(command, env=environment, cwd=folder) for environment in own]
    try:
        codes = [process.wait(300) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"{script}: its ranks ended with {codes}")


def make(folder: Path, name: str, recipe: str, ranks: int, flags: list[str]) -> None:
    """Train four steps, and keep the checkpoint of the second and what the run came to."""
    flags = [*STEPS, *flags]
    start(REPOSITORY / "recipes" / recipe / "run.py", ranks, [*flags, "--output_dir", name], folder)
    run, kept = folder / name, folder / f"{name}.kept"
    kept.mkdir()
    (run / "checkpoint-2").rename(kept / "checkpoint-2")
    loss = json.loads((run / "all_results.json").read_text())["train_loss"]
    expected: dict[str, Any] = {"recipe": recipe, "ranks": ranks, "flags": flags, "train_loss": loss}
    expected |= {"losses": losses(run), "weights": weights(run)}
    assert all(math.isfinite(number) for pair in expected["weights"].values() for number in pair)
    (kept / "expected.json").write_text(json.dumps(expected) + "\n", encoding="utf-8")
    shutil.rmtree(run)
    kept.rename(run)


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    for build in (t5, gpt2, vit, sd):
        (target / build.__name__ / "model").mkdir(parents=True)
        build(target / build.__name__)
    for case, details in CASES.items():
        make(target, case, *details)
