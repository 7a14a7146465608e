"""A real run with the flags of a recipe that draws, and pipelines as they come from a folder."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from core.arguments import flag, parse_arguments
from core.hub import HubArguments
from core.mixed_precision import prepare_environment
from core.noise import NoiseArguments
from core.prompts import DrawingArguments, Wanted, check, wanted_images
from core.run import Run
from tests.conftest import clip_tokenizer

PROMPTS = ["alpha", "beta 1", "alpha beta 2"]


@dataclass
class Task:
    model_name_or_path: str | None = flag(None, "the pipeline")
    do_generate: bool = flag(False, "draw")


def arguments(*flags: str) -> Namespace:
    groups = (Task, DrawingArguments, NoiseArguments, HubArguments)
    draws = any(flag.startswith("--prompts") for flag in flags)
    args = parse_arguments(["--do_generate" if draws else "--do_eval", *flags], *groups, description="")
    check(args)
    return args


def run_of(folder: Path, *flags: str) -> Run:
    """A run that draws `PROMPTS` in three steps, unless ``flags`` say otherwise."""
    quiet = ["--output_dir", str(folder), "--disable_tqdm", "--report_to", "none", "--num_inference_steps", "3"]
    prompts = [] if "--prompts" in flags else ["--prompts", *PROMPTS]
    args = arguments(*quiet, *prompts, *flags)
    return Run(args, prepare_environment(args), "drawing")


def load(folder: Path, scheduler: str | None = None, **settings: Any) -> Any:
    """The pipeline of a folder, with another scheduler of diffusers if one is named."""
    import diffusers

    pipe = diffusers.DiffusionPipeline.from_pretrained(folder)
    if scheduler or settings:
        kind = getattr(diffusers, scheduler) if scheduler else type(pipe.scheduler)
        pipe.scheduler = kind.from_config(pipe.scheduler.config, **settings)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def drawn_alone(pipe: Any, one: Wanted, **options: Any) -> np.ndarray:
    """What diffusers itself makes of one image of a plan, (height, width, 3) of uint8."""
    import torch

    given = {"num_inference_steps": 3, "guidance_scale": 7.5, "output_type": "np"} | one.texts | options
    image = pipe(**given, generator=torch.Generator().manual_seed(one.seed)).images[0]
    return (image * 255).round().astype(np.uint8)


def plan(run: Run) -> list[Wanted]:
    return wanted_images(run.args)


def distance(some: Any, others: Any) -> int:
    """The greatest difference of two lists of images, in levels of 255."""
    return int(np.abs(np.stack(list(some)).astype(int) - np.stack(list(others)).astype(int)).max())


def save_clip(folder: Path) -> Path:
    """A CLIP model of random weights for pictures of 16 x 16, with its tokenizer and image processor."""
    import torch
    from transformers import CLIPConfig, CLIPImageProcessorPil, CLIPModel

    (folder / "words").mkdir(parents=True)
    tokenizer = clip_tokenizer(folder / "words")
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    text = sizes | special | {"vocab_size": len(tokenizer), "max_position_embeddings": 16}
    vision = sizes | {"image_size": 16, "patch_size": 4}
    CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    side = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    CLIPImageProcessorPil(**side).save_pretrained(folder)
    return folder
