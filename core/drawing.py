"""Images of a plan, drawn with any text-to-image pipeline of diffusers: batches of one shape, time, PNG files.

An image depends on its prompt and its seed alone, not on what is drawn beside it: every row of a batch has a generator
of its own, on the host, from which its first latents and the noise of all its steps come.
"""

from __future__ import annotations

import inspect
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from io import BytesIO
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from core import pages
from core.distributed import gather_rows, on_main, rank, sum_over_ranks, together, world_size
from core.errors import UserError, if_interrupted, is_main_process, make_folder, say, warn_once
from core.files import write_file
from core.hub import go_offline_if_unreachable, loading
from core.pipelines import denoiser
from core.placing import ready
from core.prompts import Wanted, check_size, check_steps, flags_for, refusal, taken, warn_of_cut

WARMUP = 2  # batches that throughput leaves out, if --throughput_warmup_steps does not say
ON_SHEET = 100  # images of a contact sheet
BF16 = "try without --bf16 or --bf16_full_eval"
FP32 = "the weights or the autoencoder are not finite (--pretrained_vae_model_name_or_path)"
BLACK = {  # why an image is, in whole or in part
    "not_finite": "they have numbers that are none; {}",
    "blanked": "the pipeline's safety checker has blanked them",
}


def adapt(pipe: Any, args: Namespace) -> None:
    """Merge ``--lora_id`` into the pipeline's weights, and apply ``--use_freeu``: before it is placed.

    FreeU (Si et al., 2023) with the numbers that its authors give for most models.

    Raises:
        UserError: the pipeline can do neither, or the adapters cannot be loaded or do not fit.
    """
    for name, method in (("lora_id", "load_lora_weights"), ("use_freeu", "enable_freeu")):
        if getattr(args, name) and not hasattr(pipe, method):
            raise UserError(f"--{name}: {type(pipe).__name__} cannot do it; leave it out")
    if args.lora_id:
        path = Path(args.lora_id)
        source, file = (str(path.parent), {"weight_name": path.name}) if path.is_file() else (args.lora_id, {})
        with loading(f"--lora_id {args.lora_id}", source):
            file |= {"cache_dir": args.cache_dir, "token": args.token, "use_safetensors": True}  # nothing is unpickled
            if not go_offline_if_unreachable(source):  # diffusers looks for files of an unknown name at the hub alone
                reason = "the hub was not reachable; name a folder or a file of adapters"
                raise UserError(f"--lora_id {source} cannot be loaded: {reason}")
            pipe.load_lora_weights(source, **file)
            if not any(pipe.get_list_adapters().values()):
                raise UserError(f"nothing of --lora_id {args.lora_id} fits {type(pipe).__name__}; name adapters of it")
            pipe.fuse_lora(lora_scale=args.lora_scale)
            pipe.unload_lora_weights()  # what is merged stays
    if args.use_freeu:
        pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)


def draw(
    run: Any, pipe: Any, wanted: Sequence[Wanted], phase: str = "generate", folder: Path | None = None
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """Draw all images of a plan, on all ranks together; the last batch is filled with repeats, which count nowhere.

    Args:
        run: of `core.run.Run`.
        pipe: a pipeline of diffusers after `core.placing.place`.
        phase: prefix of the metrics.
        folder: each rank writes its images there as they come, outside the measured time; for `keep` afterwards.

    Returns:
        The images, (height, width, 3) of uint8, in the order of the plan on all ranks alike, and metrics:
        ``_images``, ``_images_per_second`` of all devices and ``_seconds_per_image`` (None: too few batches),
        ``_runtime`` and ``_excluded_seconds``; ``_not_finite_images`` and ``_blanked_images`` where there are any.

    Raises:
        UserError: the pipeline cannot do what the flags ask for, or a file cannot be written (on its rank alone).
    """
    ranks, device, meter = world_size(), run.device, run.meter()
    rows = min(run.args.batch_size, -(-len(wanted) // ranks))
    firsts = range(0, len(wanted), rows * ranks)
    meter.warmup_steps = meter.warmup_steps or WARMUP
    call, found, about = _caller(run, pipe, wanted), [], _about(run, pipe)
    if folder:
        on_main(partial(_begin, folder, wanted, run.args.do_train))
    run.ledger.declare(phase, 1)
    with run.memory.phase(phase), ready(pipe, run.args, device), _progress(run, len(firsts), phase) as bar:
        meter.start()
        for first in firsts:
            places = range(len(wanted))[first + rank() * rows :][:rows]
            own = places or range(1)  # a rank without images of its own takes part: weights may have to be gathered
            output = call([wanted[own[at % len(own)]] for at in range(rows)])
            run.ledger.see(phase, {"images": output.images})
            finite = output.images.isfinite().flatten(1).all(1)
            cells = (output.images.float().nan_to_num() * 255).round().to(torch.uint8).permute(0, 2, 3, 1)
            device.step_boundary()
            blanked = getattr(output, "nsfw_content_detected", None) or [False] * rows
            facts = torch.stack([finite.cpu().logical_not(), torch.tensor(blanked, dtype=torch.bool)], dim=1)
            found.append((torch.tensor(places, dtype=torch.int64), cells.cpu()[: len(places)], facts[: len(places)]))
            meter.step(min(rows * ranks, len(wanted) - first))
            bar.update()
            if folder:
                with meter.excluded("files"):
                    write_images(folder, found[-1][1].numpy(), [wanted[place] for place in places], about)
        sum_over_ranks([0.0])  # all wait for the slowest one: the rate is of all
        measured = meter.metrics(phase)
    places, cells, facts = (torch.cat(gather_rows(torch.cat(part))) for part in zip(*found, strict=True))
    if phase == "generate" and len(firsts) <= meter.warmup_steps:
        warn_once(f"{phase}: no throughput: the first {meter.warmup_steps} batches do not count, and there are no more")
    metrics = _metrics(phase, measured, facts, run.precision.name.startswith("bf16") or pipe.dtype == torch.bfloat16)
    return list(cells[places.argsort()].numpy()), {f"{phase}_{name}": value for name, value in metrics.items()}


def _metrics(phase: str, measured: Mapping[str, Any], facts: torch.Tensor, halved: bool) -> dict[str, Any]:
    """Of all images, with ``facts`` (images, 2): whether each is not finite, and blanked."""
    rate = measured[f"{phase}_samples_per_second"]
    metrics = {"images": len(facts), "images_per_second": rate, "seconds_per_image": rate and float(f"{1 / rate:.6g}")}
    metrics |= {name: measured[f"{phase}_{name}"] for name in ("runtime", "excluded_seconds")}
    for name, count in zip(BLACK, facts.sum(0).tolist(), strict=True):
        if count:
            why = BLACK[name].format(BF16 if halved else FP32)
            warn_once(f"{phase}: {count} of {len(facts)} images are black, in whole or in part: {why}")
            metrics[f"{name}_images"] = count
    return metrics


def _progress(run: Any, batches: int, phase: str) -> Any:
    from tqdm import tqdm

    return tqdm(total=batches, desc=phase, unit="batch", disable=run.args.disable_tqdm or not is_main_process())


def _caller(run: Any, pipe: Any, wanted: Sequence[Wanted]) -> Callable[[Sequence[Wanted]], Any]:
    """Return what draws a batch: it calls the pipeline with what its signature takes, of texts and flags."""
    args, takes = run.args, inspect.signature(pipe.__call__).parameters
    options = flags_for(pipe, takes, args)
    names, images = taken(type(pipe).__name__, takes, wanted[0].texts, args), _images(args, pipe, takes)
    warn_of_cut(pipe, takes, wanted, names)
    check_steps(pipe, args, options.get("strength", getattr(takes.get("strength"), "default", 1)))
    pipe.set_progress_bar_config(disable=True)  # one bar, over batches, is enough
    own, autocast = denoiser(pipe).dtype, run.autocast if pipe.dtype == torch.float32 else nullcontext
    if own != pipe.dtype:  # DeepSpeed has made it bf16, and has no autocast
        autocast = partial(torch.autocast, run.device.torch_device.type, dtype=own)

    def call(batch: Sequence[Wanted]) -> Any:
        texts = {name: [one.texts[name] for one in batch] for name in names}
        repeated = {name: [image] * len(batch) for name, image in images.items()}
        generators = [torch.Generator().manual_seed(one.seed) for one in batch]
        try:
            with autocast():
                output = pipe(**texts, **repeated, **options, generator=generators)
        except ValueError as error:
            if line := refusal(pipe, args, error):
                raise line from error
            raise
        check_size(pipe, options, output.images)
        return output

    return call


def _images(args: Namespace, pipe: Any, takes: Mapping[str, Any]) -> dict[str, Any]:
    """The images that are given, by the pipeline's names: where one has no other name, ``image`` is the control."""
    # Signatures do not tell which images are needed: where these two are not, one is a choice beside none.
    controlled, from_image = hasattr(pipe, "controlnet"), "strength" in takes
    names = {"base_image": "image", "mask_image": "mask_image", "control_image": "control_image"}
    if controlled and "control_image" not in takes:
        names |= {"base_image": "", "control_image": "image"}
    kind, images = type(pipe).__name__, {}
    for option, name in names.items():
        path = getattr(args, option)
        if path and name not in takes:
            raise UserError(f"--{option}: {kind} takes no such image; name a model for it, or leave it out")
        if path:
            from diffusers.utils import load_image

            with loading(f"--{option} {path}"):
                images[name] = load_image(path)
        elif name in takes and (controlled or from_image or name != "image"):
            raise UserError(f"{kind} needs an image; give --{option}")
    return images


def show_progress(engine: Any, pipe: Any, averages: Any = None) -> None:
    """Draw ``--validation_prompt`` while training, outside the measured time: into the trackers, and onto a sheet.

    Args:
        engine: of `core.engine.Engine`; the pipeline has its model.
        averages: of `core.ema.Ema`; None draws with the weights as they are.

    Raises:
        UserError: the file cannot be written; all ranks raise it.
    """
    args, step, texts = engine.args, engine.step_count, {"prompt": engine.args.validation_prompt}
    wanted = [Wanted(number, args.seed + number, texts) for number in range(args.num_validation_images)]
    with engine.throughput.excluded("images"), averages.applied() if averages else nullcontext():
        images, _ = draw(engine.run, pipe, wanted, "validation")
        together(partial(engine.tracker.log_images, "validation", images, step))
        path = Path(args.image_save_dir or engine.run.output_dir) / "validation_images" / f"step-{step:06d}.png"
        engine.run.by_product(partial(contact_sheet, path, images, wanted))


def keep(run: Any, pipe: Any, images: Sequence[np.ndarray], wanted: Sequence[Wanted], folder: Path) -> None:
    """Finish what `draw` has begun in its folder, with what drew them in each file. For all ranks.

    Raises:
        UserError: a file cannot be written; all ranks raise it.
    """
    together(partial(save_images, folder, images, wanted, _about(run, pipe), arrays=run.args.output_type == "np"))
    say(f"drawn images ({len(images)}) and their contact_sheet.png are in {folder}")


def _about(run: Any, pipe: Any) -> dict[str, Any]:
    args = run.args
    about = {"model": args.model_name_or_path or "built here", "scheduler": type(pipe.scheduler).__name__}
    return about | {"steps": args.num_inference_steps, "guidance": args.guidance_scale}


def _begin(folder: Path, wanted: Sequence[Wanted], trains: bool) -> str:
    """Remove earlier images of the same names: an interrupted run must not leave theirs among its own."""
    make_folder(folder, "--image_save_dir")
    for name in (*map(_file_name, wanted), "contact_sheet.png", "images.npy"):
        (folder / name).unlink(missing_ok=True)
    if not trains:
        if_interrupted(f"the images drawn so far are in {folder}")
    return ""


def save_images(
    folder: Path, images: Sequence[np.ndarray], wanted: Sequence[Wanted], about: Mapping[str, Any], arrays: bool = False
) -> None:
    """Write what `write_images` has not written yet, where a folder is not shared, and a sheet, on the main process.

    Args:
        arrays: write them all to ``images.npy``, too, uint8 (images, height, width, 3).

    Raises:
        UserError: a file cannot be written.
    """
    if not is_main_process():
        return
    missing = [place for place, one in enumerate(wanted) if not (folder / _file_name(one)).exists()]
    write_images(folder, [images[place] for place in missing], [wanted[place] for place in missing], about)
    if arrays:
        np.save(file := BytesIO(), np.stack(images), allow_pickle=False)
        write_file(folder / "images.npy", file.getvalue(), "--image_save_dir")
    contact_sheet(folder / "contact_sheet.png", images, wanted, about)


def write_images(
    folder: Path, images: Sequence[np.ndarray], wanted: Sequence[Wanted], about: Mapping[str, Any]
) -> None:
    """Write each image as PNG with its prompt, its seed and ``about`` in it: texts by keyword (Latin-1).

    Raises:
        UserError: a file cannot be written.
    """
    from PIL import Image
    from PIL.PngImagePlugin import PngInfo

    for image, one in zip(images, wanted, strict=True):
        texts = PngInfo()
        own = {key.replace("_", " "): text for key, text in one.texts.items()}
        for key, text in {**own, "seed": one.seed, **about}.items():
            texts.add_text(key, str(text))  # as UTF-8 where it is not Latin-1
        Image.fromarray(image).save(file := BytesIO(), "png", pnginfo=texts)
        write_file(folder / _file_name(one), file.getvalue(), "--image_save_dir")


def contact_sheet(
    path: str | Path, images: Sequence[np.ndarray], wanted: Sequence[Wanted], about: Mapping[str, Any] | None = None
) -> None:
    """Draw images with their seeds and prompts, which are also texts of the file, as is ``about``; at most `ON_SHEET`.

    Of more images every second, or third, and so on is drawn.

    Raises:
        UserError: the file cannot be written.
    """
    places = range(0, len(wanted), -(-len(wanted) // ON_SHEET))
    shown = [wanted[place] for place in places]
    captions = [f"seed {one.seed}\n{one.prompt}" for one in shown]
    several = sum(1 for _ in takewhile(lambda one: one.prompt == shown[0].prompt, shown))
    columns = several if 1 < several <= 10 else 5  # a prompt's images in a row
    texts = {**(about or {}), **dict(zip(map(_file_name, shown), captions, strict=True))}
    title = f"{len(shown)} of {len(wanted)} images" if len(shown) < len(wanted) else ""
    pages.grid(path, [images[place] for place in places], captions, columns, title, texts)


def _file_name(one: Wanted) -> str:
    return f"{one.number:04d}.png"
