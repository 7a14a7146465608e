"""Text-to-image: draw images from prompts, and fine-tune Stable Diffusion 1.x, 2.x and XL on images and captions.

One device:    python recipes/text_to_image/run.py --gaudi_config gaudi_configs/stable_diffusion.json
Eight devices: python gaudi_spawn.py --world_size 8 recipes/text_to_image/run.py --gaudi_config stable_diffusion

Without a model and data it learns to draw the handwritten digits that scikit-learn brings, as a whole small pipeline.
Expected: a judge that knows other digits only recognises 95 % or more of 300 drawn ones, in two minutes on two cores.
"""

# --- Bootstrap and imports --------------------------------------------------------------------------------------------
# torch and what builds on it are imported inside functions: the execution mode has to be in the environment before
# torch loads the Gaudi bridge, and --help answers at once.

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

for folder in Path(__file__).resolve().parents:  # a copy beside this folder finds core; elsewhere it is installed
    if (folder / "core" / "engine.py").is_file():
        sys.path.insert(0, str(folder))
        break

from core import hub, prompts, splits
from core.arguments import flag, parse_arguments
from core.errors import UserError, exit_with_one_line
from core.mixed_precision import prepare_environment
from core.noise import Noise, NoiseArguments

if TYPE_CHECKING:
    import torch

    from core.data import Batch, BatchLoader
    from core.ema import Ema
    from core.encoders import Encoders, Origin
    from core.engine import Engine
    from core.pictures import Pictures
    from core.run import Run

BUILT_IN = Path(__file__).with_name("built_in.json")  # flags of the run without a model and data

# --- Arguments --------------------------------------------------------------------------------------------------------


@dataclass
class TextToImageArguments:
    """Which pipeline, which images and captions, and how they are learned."""

    _argument_group_name = "model and data"
    do_generate: bool = flag(False, "draw images from prompts")
    model_name_or_path: str | None = flag(None, "a hub's pipeline, or a folder (default: a small one, built here)")
    pretrained_vae_model_name_or_path: str | None = flag(None, "another autoencoder than the pipeline's")
    controlnet_model_name_or_path: str | None = flag(None, "a ControlNet, which needs --control_image")
    clip_model_name_or_path: str | None = flag(None, "a CLIP model that scores how well images fit their prompts")
    train_dir: str | None = flag(None, "folder of images with metadata.csv or .jsonl, or a .txt beside each")
    validation_dir: str | None = flag(None, "the same to evaluate")
    test_dir: str | None = flag(None, "the same for --do_predict")
    train_val_split: float = flag(0.0, "share of the training rows to evaluate on, where no split is there")
    image_column_name: str | None = flag(None, "column of the images (default: image)")
    caption_column_name: str | None = flag(None, "of the captions (default: text)")
    on_bad_image: Literal["skip", "fail"] = flag("skip", "an image that cannot be read: leave it out, or stop")
    resolution: int | None = flag(None, "pixels of an image's shorter side (default: the pipeline's own)")
    crop_resolution: int | None = flag(None, "pixels of the square that is cut out (default: --resolution)")
    center_crop: bool = flag(False, "cut it out of the middle, not at a random place")
    random_flip: bool = flag(False, "mirror half of the images", needs="do_train")
    proportion_empty_prompts: float = flag(0.0, "share of the images that lose their caption, drawn in each epoch")
    cache_latents: bool = flag(False, "find latents and text embeddings once, and keep them on disk")
    latents_dir: str | None = flag(None, "where they are kept (default: <output_dir>/latents)", needs="cache_latents")
    use_ema: bool = flag(False, "average the weights over the steps, to evaluate and save", needs="do_train")
    ema_decay: float = flag(0.9999, "how much of the average a step keeps", below=1, needs="use_ema")
    scale_lr: bool = flag(False, "multiply --learning_rate by the rows of a step", needs="do_train")
    validation_prompt: str | None = flag(None, "draw images from it while training", needs="do_train")
    num_validation_images: int = flag(4, "how many", needs="validation_prompt")
    validation_steps: int | None = flag(None, "steps between them (default: epochs)", needs="validation_prompt")
    validation_epochs: int = flag(1, "epochs between them", needs="validation_prompt")
    autoencoder_steps: int = flag(150, "steps in which a small pipeline's autoencoder learns the images")


GROUPS = (TextToImageArguments, prompts.DrawingArguments, NoiseArguments, hub.LoraArguments, hub.HubArguments)
# What the published scripts have otherwise: names of shared flags, their defaults, and no --do_... flags.
PUBLISHED = {
    "aliases": {
        "train_batch_size": "per_device_train_batch_size", "max_train_steps": "max_steps", "rank": "lora_rank",
        "checkpointing_steps": "save_steps", "checkpoints_total_limit": "save_total_limit",
        "lr_scheduler": "lr_scheduler_type", "lr_warmup_steps": "warmup_steps", "logging_step": "logging_steps",
        "adam_weight_decay": "weight_decay", "pretrained_model_name_or_path": "model_name_or_path",
        "train_data_dir": "train_dir", "image_column": "image_column_name", "caption_column": "caption_column_name",
    },
    "defaults": {"per_device_train_batch_size": 16, "num_train_epochs": 100.0, "learning_rate": 1e-4,
                 "lr_scheduler_type": "constant", "weight_decay": 0.01, "adam_epsilon": 1e-8},
    "implied": {"do_generate": ("prompts", "prompts_file"), "do_train": ("dataset_name", "train_dir", "train_file")},
}  # fmt: skip


def check(args: Namespace) -> None:
    """Refuse what cannot work, before anything is loaded."""
    prompts.check(args)
    side = args.crop_resolution or args.resolution or 32
    learns, averages = args.do_train or args.do_eval or args.do_predict, args.use_ema and args.load_best_model_at_end
    demands = {
        "--proportion_empty_prompts must be at most 1": args.proportion_empty_prompts <= 1,
        "--use_ema ends with the last averages, --load_best_model_at_end with other weights; give one": not averages,
        "--config_name: a pipeline brings its own configurations; leave it out": not args.config_name,
        "LoRA's other flags need --lora_rank": args.lora_rank or not hub.lora_flags(args),
        "--crop_resolution needs as large a --resolution": (args.crop_resolution or 0) <= (args.resolution or 0),
        "--resolution must be a multiple of 8": args.model_name_or_path or side % 8 == 0,
        "--model_name_or_path: name a pipeline to draw with": args.model_name_or_path or learns,
        "--pipeline_save_dir: a trained pipeline is in --output_dir": not (args.pipeline_save_dir and args.do_train),
        "--controlnet_model_name_or_path and --base_image are for drawing alone": not learns
        or not (args.controlnet_model_name_or_path or args.base_image),
    }
    if not all(demands.values()):
        raise UserError("; ".join(demand for demand, met in demands.items() if not met))


# --- Data -------------------------------------------------------------------------------------------------------------


def load_data(args: Namespace) -> tuple[dict[str, Pictures], dict[str, dict]]:
    """Return the splits that the flags ask for, images whose rows have a ``text``, and how many had none, a metric."""
    from core.captions import load_captioned
    from core.data import chosen_rows
    from core.digits import captioned_digits
    from core.pictures import Pictures

    if not (args.do_train or args.do_eval or args.do_predict):
        return {}, {}
    found, missing = load_captioned(args)
    found = found or captioned_digits()
    splits.hold_out_validation(found, args)
    data = {split: chosen_rows(found[split], split, args) for split in splits.needed_splits(args, found)}
    data = {split: Pictures(rows, None, split, args) for split, rows in data.items()}
    return data, {split: {f"{splits.PHASES[split]}_missing_captions": missing.get(split, 0)} for split in data}


def make_loader(args: Namespace, run: Run, pictures: Pictures, encoders: Encoders, noise: Noise) -> BatchLoader:
    """Batches of a split: random crops to train on, the middle of each image to evaluate; noise is drawn by row."""
    from core.augment import CropView
    from core.data import BatchLoader
    from core.examples import Examples, collate_examples

    train, crop = pictures.split == "train", args.crop_resolution or args.resolution
    view = CropView(args.resolution, crop, args.center_crop or not train, 0.5 * (train and args.random_flip))
    examples = Examples(pictures, view, encoders, noise, args.proportion_empty_prompts * train)
    if args.cache_latents:
        examples.keep(args, run.device, run.output_dir / "latents")
    args = Namespace(**{**vars(args), "pad_to_max_length": True})  # all images have one size, and captions one length
    lengths, how = [(0, 0)] * len(pictures), (train, examples, pictures.unreadable.found)
    return BatchLoader.from_arguments(args, pictures, collate_examples, lengths, (crop, crop), *how)


# --- Model ------------------------------------------------------------------------------------------------------------


def small_pipeline(captions: Iterable[str | list[str]], side: int) -> Any:
    """A pipeline with Stable Diffusion's parts in small, for squares of ``side`` pixels; tokens are captions' words."""
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    from core.prose import word_tokenizer

    texts = ("\n".join([text] if isinstance(text, str) else text) for text in captions)
    tokenizer = word_tokenizer(texts, vocab_size=1000, length=16)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": len(tokenizer)}
    how = {"max_position_embeddings": 16, "initializer_factor": 5.0}  # untrained: its words must differ as drawn
    text_encoder = CLIPTextModel(CLIPTextConfig(**sizes, **ids, **how))
    sizes = {"block_out_channels": [16, 32, 32], "latent_channels": 4, "norm_num_groups": 8, "sample_size": side}
    vae = AutoencoderKL(down_block_types=["DownEncoderBlock2D"] * 3, up_block_types=["UpDecoderBlock2D"] * 3, **sizes)
    down, up = ["DownBlock2D", "CrossAttnDownBlock2D"], ["CrossAttnUpBlock2D", "UpBlock2D"]
    sizes = {"block_out_channels": [32, 64], "layers_per_block": 1, "attention_head_dim": 4, "norm_num_groups": 8}
    unet = UNet2DConditionModel(side // 4, down_block_types=down, up_block_types=up, cross_attention_dim=64, **sizes)
    how = {"beta_schedule": "squaredcos_cap_v2", "prediction_type": "v_prediction"}  # which heeds captions far sooner
    scheduler = DDIMScheduler(**how, steps_offset=1, clip_sample=False, set_alpha_to_one=False)
    parts = {"vae": vae, "unet": unet, "tokenizer": tokenizer, "text_encoder": text_encoder, "scheduler": scheduler}
    return StableDiffusionPipeline(**parts, safety_checker=None, feature_extractor=None, requires_safety_checker=False)


def build_pipeline(args: Namespace, run: Run, data: dict[str, Pictures]) -> Any:
    """Load the named pipeline, or make a small one whose autoencoder learns the images; add adapters if asked to."""
    from core import adapters, autoencoder, drawing, pipelines, placing

    if args.model_name_or_path:
        pipe = pipelines.load_pipeline(args)
    else:
        pictures = data.get("train") or next(iter(data.values()))
        pipe = small_pipeline(pictures.rows["text"], args.crop_resolution or args.resolution or 32)
        if run.resume_from:
            pipe = pipelines.load_others(pipe, run.resume_from)
        else:
            autoencoder.learn_pictures(pipe.vae, pictures, args, run.device)
    drawing.adapt(pipe, args)
    pipelines.set_scheduler(pipe, args)
    placing.place(pipe, args, run.device)
    if args.lora_rank:
        model, layers = pipelines.denoiser(pipe), args.lora_target_modules or ["to_k", "to_q", "to_v", "to_out.0"]
        adapters.add_lora(model, args.lora_rank, args.lora_alpha, args.lora_dropout, layers, args.seed)
    return pipe


def frozen_parts(args: Namespace, run: Run, pipe: Any) -> tuple[Encoders, Noise, Origin]:
    """What the denoiser learns from: the pipeline's frozen parts and the noise of its scheduler, on the device."""
    from core.distributed import world_size
    from core.encoders import Encoders

    encoders, noise = Encoders(pipe, run.device), Noise(pipe.scheduler.config, args)
    noise.place(run.device.torch_device)
    args.resolution = args.resolution or encoders.resolution
    if args.scale_lr:
        args.learning_rate *= args.per_device_train_batch_size * args.gradient_accumulation_steps * world_size()
    return encoders, noise, encoders.origin(run.resume_from)


# --- Task functions: loss ---------------------------------------------------------------------------------------------


def loss_sum(model: Any, batch: Batch, encoders: Encoders, noise: Noise) -> torch.Tensor:
    """Sum of the rows' losses, a scalar in fp32: how well the noise in noisy latents is foretold, given captions."""
    import torch

    moments = batch["moments"] if "moments" in batch else encoders.moments(batch["pixel_values"])
    mean, deviation = moments.chunk(2, dim=1)
    latents = torch.addcmul(mean, deviation, batch["posterior"])  # in fp32: autocast may halve a product alone
    text = batch if "encoder_hidden_states" in batch else encoders.embed(batch)
    sizes = {"text_embeds": text["text_embeds"], "time_ids": batch["time_ids"]} if "time_ids" in batch else None
    noisy = noise.add(latents, batch["noise"], batch["timesteps"])
    dtype = next(model.parameters()).dtype  # evaluated alone it may be bf16, without autocast
    inputs = {"encoder_hidden_states": text["encoder_hidden_states"].to(dtype), "added_cond_kwargs": sizes}
    noisy = noisy.to(dtype, memory_format=encoders.layout)
    predicted = model(noisy, batch["timesteps"], **inputs, return_dict=False)[0]
    return noise.losses(predicted, latents, batch["noise"], batch["timesteps"], batch["row_weights"]).sum()


# --- Train ------------------------------------------------------------------------------------------------------------


def train(
    engine: Engine, loss_of: Callable, averages: Ema | None, evaluation: Callable, show: Callable, companions: list[Any]
) -> dict[str, Any]:
    """The loop: one window is one optimiser step; the engine owns normalisation, clipping and step boundaries."""
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_of(engine.model, batch)
            engine.backward(loss)
        if engine.step(window) and averages:
            averages.step()
        if engine.due("log"):
            engine.log()
        if engine.due("eval"):
            engine.evaluate(evaluation)
        if engine.due("images"):
            show()
        if engine.due("save"):
            engine.save(*companions)
    metrics = engine.finish_training()
    return metrics and metrics | {"train_unreadable_images": len(engine.loader.dataset.unreadable.rows)}


# --- Evaluate ---------------------------------------------------------------------------------------------------------


def evaluate(run: Run, loss_of: Callable, averages: Ema | None, loader: BatchLoader, phase: str) -> dict[str, Any]:
    """Return loss and speed of a split, with the same noise at each evaluation."""
    with averages.applied() if averages else nullcontext():
        metrics, _ = run.evaluate(loader, lambda batch: (loss_of(run.inference_model(), batch), None), phase)
    return metrics | {f"{phase}_unreadable_images": len(loader.dataset.unreadable.rows)}


def generate(run: Run, pipe: Any, averages: Ema | None) -> dict[str, Any]:
    """Draw the images of the prompts, write them and a contact sheet, and return speed and quality."""
    from core import checkpoint, clip_score, digits, drawing, pipelines

    args, wanted = run.args, prompts.wanted_images(run.args)
    texts, folder = [one.prompt for one in wanted], Path(args.image_save_dir or run.output_dir / "images")
    clip_score.look_at(args.clip_model_name_or_path, args)
    if (args.do_eval or args.do_predict) and not args.do_train:
        pipe.to(pipe.unet.dtype)  # all parts that of the one that was evaluated
    with averages.applied() if averages else nullcontext():
        images, metrics = drawing.draw(run, pipe, wanted, folder=folder)
    drawing.keep(run, pipe, images, wanted, folder)
    if name := args.clip_model_name_or_path:
        metrics["generate_clip_score"] = clip_score.clip_score(name, images, texts, args, run.device)
    if not any(getattr(args, name, None) for name in hub.NAMED):
        metrics |= digits.judge(images, texts, "generate")
    if args.pipeline_save_dir:
        main = checkpoint.OnMain()
        main(pipelines.save_pipeline, pipe, Path(args.pipeline_save_dir), leave_out=())
        main.agree("--pipeline_save_dir: the pipeline cannot be written: {}")
    return metrics


def describe(run: Run) -> None:
    """Write the model card."""
    from core.model_card import write_model_card

    usage = f'import diffusers\n\npipe = diffusers.DiffusionPipeline.from_pretrained("{run.output_dir.name}")'
    about = {"task": "text-to-image", "library": "diffusers", "usage": usage, "facts": run.facts}
    write_model_card(run.output_dir, metrics=run.metrics, groups=GROUPS, **about)


# --- Main -------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run what the flags ask for, write ``all_results.json``, and return its metrics."""
    args = parse_arguments(argv, *GROUPS, description=__doc__, built_in=(BUILT_IN, hub.NAMED), **PUBLISHED)
    gaudi_config = prepare_environment(args)
    from core.drawing import show_progress
    from core.ema import Ema
    from core.engine import Engine
    from core.run import Run

    check(args)
    run = Run(args, gaudi_config, Path(__file__).parent.name)
    data, missing = load_data(args)
    pipe, averages = build_pipeline(args, run, data), None
    encoders, noise, origin = frozen_parts(args, run, pipe) if data else (None, None, None)
    loaders = {split: make_loader(args, run, pictures, encoders, noise) for split, pictures in data.items()}
    loss_of = partial(loss_sum, encoders=encoders, noise=noise)
    if args.do_train:
        engine = Engine(run, pipe.unet, loaders["train"])
        averages = Ema.of(run)
        evaluation = partial(evaluate, run, loss_of, averages, loaders.get("validation"), "eval")
        companions = [origin, *filter(None, [averages, None if args.model_name_or_path else encoders])]
        show = partial(show_progress, engine, pipe, averages)
        trained = train(engine, loss_of, averages, evaluation, show, companions)
        run.save_model(run.output_dir, encoders, part="unet", override=averages and averages.weights())
        run.report("train", trained and trained | missing["train"])
    elif data:
        run.place(pipe.unet)
    for split, phase in (("validation", "eval"), ("test", "predict")):
        if getattr(args, f"do_{phase}"):
            run.report(phase, evaluate(run, loss_of, averages, loaders[split], phase) | missing[split])
    if args.do_generate:
        run.report("generate", generate(run, pipe, averages))
    if args.do_train:
        run.by_product(partial(describe, run))
    return run.finish()


if __name__ == "__main__":
    exit_with_one_line(main, preemptible=True)
