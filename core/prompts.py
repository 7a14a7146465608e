"""What is to be drawn: flags, the plan of images with a prompt and a seed each, and what of it a pipeline takes.

Torch is not imported here.
"""

from __future__ import annotations

import inspect
import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from traceback import extract_tb
from typing import Any, Literal

from core.arguments import flag
from core.errors import UserError, make_folder, warn_once
from core.untrusted import read_text

NO_EFFECT = {
    "use_cpu_rng": "images are always drawn from the host's generators",
    "distributed": "images are shared out over as many devices as the launcher starts",
    "use_distributed_cfg": "each device draws whole images",
    "mediapipe": "Pillow reads the images that are trained on",
}
REFUSED = {"ldm3d": "no depth is drawn here; leave it out"}
# How diffusers refuses what it is given: the function that raises, and what it looks at.
REFUSALS = {"check_inputs": "--height, --width, --prompts and images", "set_timesteps": "--num_inference_steps {}"}
SUBSTITUTES = {  # what is used instead
    "optimize": "the pipeline as it is",
    "quant_mode": "bf16 with --bf16 or --bf16_full_eval, else fp32",
    "use_compel": "prompts as they are written, without weights of words",
}


class Pixels(int):
    """Pixels of a side; 0 stands for the pipeline's own."""


@dataclass
class DrawingArguments:
    """Which images are drawn, how, and where they go."""

    _argument_group_name = "drawing images from prompts"
    prompts: list[str] | None = flag(None, "what is drawn", nargs="+")
    prompts_file: str | None = flag(None, "the same from a text file, one prompt a line")
    prompts_2: list[str] | None = flag(None, "other prompts for the second text encoder", nargs="+")
    prompts_3: list[str] | None = flag(None, "other prompts for the third text encoder", nargs="+")
    negative_prompts: list[str] | None = flag(None, "what is avoided: one for each prompt, or one for all", nargs="+")
    negative_prompts_2: list[str] | None = flag(None, "the same for the second text encoder", nargs="+")
    negative_prompts_3: list[str] | None = flag(None, "the same for the third text encoder", nargs="+")
    num_images_per_prompt: int = flag(1, "images of each prompt; image i has the seed --seed + i")
    batch_size: int = flag(1, "images that a device draws at once")
    height: Pixels | None = flag(None, "pixels (default, or 0: the pipeline's own)")
    width: Pixels | None = flag(None, "pixels (default, or 0: the pipeline's own)")
    num_inference_steps: int = flag(50, "steps from noise to image")
    guidance_scale: float = flag(7.5, "how closely an image follows its prompt; up to 1, nothing is avoided")
    eta: float = flag(0.0, "noise of DDIM's steps: 0 none, 1 as much as DDPM's")
    scheduler: Literal[
        "default", "euler_discrete", "euler_ancestral_discrete", "ddim", "ddpm", "flow_match_euler_discrete", "pndm",
        "dpmsolver_multistep", "unipc_multistep",
    ] | None = flag(
        None,
        "how steps lead from noise to image; 'default' is the pipeline's own (if not given: ddim; the pipeline's own "
        "in a run that trains, and for flow matching)",
    )  # fmt: skip
    timestep_spacing: Literal["linspace", "leading", "trailing"] | None = flag(
        None,
        "how steps are spread over those of training (if not given: linspace; the scheduler's own in a run that "
        "trains, and with --scheduler default)",
    )
    output_type: Literal["pil", "np"] = flag("pil", "pil: PNG files; np: the arrays, too, in images.npy")
    image_save_dir: str | None = flag(None, "folder of the images (default: <output_dir>/images)")
    pipeline_save_dir: str | None = flag(None, "save the pipeline that has drawn them here, too")
    base_image: str | None = flag(None, "file or address of an image to start from", aliases=["--src_image_path"])
    mask_image: str | None = flag(None, "the same of a mask: its white parts are drawn anew")
    control_image: str | None = flag(None, "the same of what the ControlNet follows, e.g. edges; it is not changed")
    lora_id: str | None = flag(None, "LoRA adapters: a hub's name, a folder or a file of safetensors")
    lora_scale: float = flag(1.0, "how strongly they act")
    unet_adapter_name_or_path: str | None = flag(None, "adapters of the UNet in peft's files: a folder or a hub's name")
    text_encoder_adapter_name_or_path: str | None = flag(None, "the same of the text encoder")
    strength: float | None = flag(None, "how much of the base image is drawn anew (default: the pipeline's own)")
    use_freeu: bool = flag(False, "weigh skip connections as FreeU does")
    use_cpu_rng: bool = flag(False, f"has no effect: {NO_EFFECT['use_cpu_rng']}")
    distributed: bool = flag(False, f"has no effect: {NO_EFFECT['distributed']}")
    mediapipe: str | None = flag(None, f"has no effect: {NO_EFFECT['mediapipe']}")
    use_distributed_cfg: bool = flag(False, f"has no effect: {NO_EFFECT['use_distributed_cfg']}")
    optimize: bool = flag(False, f"used instead: {SUBSTITUTES['optimize']}")
    quant_mode: Literal["disable", "measure", "quantize", "quantize-mixed"] = flag(
        "disable", f"used instead: {SUBSTITUTES['quant_mode']}"
    )
    ldm3d: bool = flag(False, f"refused: {REFUSED['ldm3d']}")
    use_compel: bool = flag(False, f"used instead: {SUBSTITUTES['use_compel']}")


PROMPTS = ("prompts", "prompts_2", "prompts_3", "negative_prompts", "negative_prompts_2", "negative_prompts_3")


@dataclass
class Wanted:
    """One image of the plan: its number, its seed, and its texts by the pipeline's name of each."""

    number: int
    seed: int
    texts: dict[str, str]

    @property
    def prompt(self) -> str:
        return self.texts["prompt"]


def check(args: Namespace) -> None:
    """Refuse what cannot work, before anything is loaded; say which flags change nothing.

    Raises:
        UserError: a flag that is not followed here, a combination that cannot be, or a folder to write to.
    """
    given = {
        name for name in (*NO_EFFECT, *REFUSED, *SUBSTITUTES) if getattr(args, name) not in (None, "", False, "disable")
    }
    args.height, args.width = args.height or None, args.width or None
    demands = {f"--{name}: {reason}": name not in given for name, reason in REFUSED.items()}
    demands |= {
        "--prompts and --prompts_file exclude each other; give one": not (args.prompts and args.prompts_file),
        "--height and --width go together; give both": (args.height is None) == (args.width is None),
        "--mask_image needs the --base_image that it is laid over": not args.mask_image or args.base_image,
        "--eta must be at most 1": args.eta <= 1,
        "--strength must be at most 1": (args.strength or 0) <= 1,
        "--lora_rank trains adapters; to draw with some give --lora_id": args.do_train
        or not getattr(args, "lora_rank", None),
    }
    if not all(demands.values()):
        raise UserError("; ".join(demand for demand, met in demands.items() if not met))
    for name in sorted(given & SUBSTITUTES.keys()):
        warn_once(f"--{name}: not available here; used instead: {SUBSTITUTES[name]}")
    for name in sorted(given & NO_EFFECT.keys()):
        warn_once(f"--{name} has no effect here: {NO_EFFECT[name]}")
    if args.do_generate:
        wanted_images(args)
    elif args.prompts or args.prompts_file:
        warn_once("--prompts: nothing is drawn without --do_generate")
    for name, used in (("image_save_dir", args.do_generate or args.do_train), ("pipeline_save_dir", args.do_generate)):
        if used and getattr(args, name):
            make_folder(Path(getattr(args, name)), f"--{name}")


def wanted_images(args: Namespace) -> list[Wanted]:
    """Return the plan: all images of the first prompt, then those of the second, and so on.

    Raises:
        UserError: there is no prompt, there are not as many others as prompts, or the file cannot be read as UTF-8.
    """
    given = {name: getattr(args, name) for name in PROMPTS}
    given["prompts"] = args.prompts or _lines(args.prompts_file)
    count, texts = len(given["prompts"]), {}
    for name, values in given.items():
        if values is None:
            continue
        if len(values) not in (1, count):
            raise UserError(f"--{name} has {len(values)} texts for {count} prompts; give one for each, or one for all")
        if any(value.encode(errors="replace").decode() != value for value in values):
            raise UserError(f"--{name}: a text is not UTF-8")
        texts[name.replace("prompts", "prompt")] = values if len(values) == count else values * count
    each = args.num_images_per_prompt
    return [
        Wanted(number, args.seed + number, {name: values[number // each] for name, values in texts.items()})
        for number in range(count * each)
    ]


def flags_for(pipe: Any, takes: Mapping[str, Any], args: Namespace) -> dict[str, Any]:
    """The options that a pipeline gets for flags; one that it does not take is said to have no effect.

    Args:
        takes: parameters that it takes, by name.
    """
    names = ("num_inference_steps", "guidance_scale", "height", "width", "strength")
    options = {name: getattr(args, name) for name in names}
    options |= {"eta": args.eta or None, "output_type": "pt"}
    if args.eta and "eta" not in inspect.signature(pipe.scheduler.step).parameters:
        warn_once(f"--eta has no effect: it is DDIM's, and this is {type(pipe.scheduler).__name__}")
        options["eta"] = None
    for name in ("height", "width", "eta", "guidance_scale", "strength"):
        if options[name] is not None and name not in takes:
            warn_once(f"--{name} has no effect: {type(pipe).__name__} does not take it")
    return {name: value for name, value in options.items() if value is not None and name in takes}


def check_steps(pipe: Any, args: Namespace, strength: float) -> None:
    """Refuse a number of steps that the scheduler cannot spread, and steps of which the first divides by zero."""
    scheduler, kind = pipe.scheduler, type(pipe.scheduler).__name__
    if not hasattr(scheduler, "alphas_cumprod"):
        return  # flow matching: the pipeline itself says where its steps lie
    try:
        scheduler.set_timesteps(args.num_inference_steps)
    except ValueError as error:
        reason = f"{kind} needs more" if "broadcast" in str(error) else f"{type(pipe).__name__} refuses it: {error}"
        raise UserError(f"--num_inference_steps {args.num_inference_steps}: {reason}") from error
    whole = strength == 1 and scheduler.config.get("prediction_type") == "epsilon"
    if whole and scheduler.alphas_cumprod[int(scheduler.timesteps.max())] == 0:
        raise UserError(
            "with zero terminal SNR (--use_zero_snr, or the scheduler's own) the first step sees noise alone, of which "
            "a model that foretells noise says nothing: leave it out, or give the model's own --prediction_type"
        )


def refusal(pipe: Any, args: Namespace, error: Exception) -> UserError | None:
    """One line for what a pipeline's own checks have refused; None for another error."""
    found = [REFUSALS[frame.name] for frame in extract_tb(error.__traceback__) if frame.name in REFUSALS]
    what = found and found[0].format(args.num_inference_steps)
    return UserError(f"{what}: {type(pipe).__name__} refuses it: {error}") if found else None


def check_size(pipe: Any, options: Mapping[str, Any], images: Any) -> None:
    """Say if images, (batch, 3, height, width), have another size than was asked for."""
    asked, drawn = (options.get("height"), options.get("width")), tuple(images.shape[-2:])
    if all(asked) and asked != drawn:
        kind, sizes = type(pipe).__name__, f"{drawn[0]} x {drawn[1]} pixels"
        warn_once(f"--height {asked[0]} and --width {asked[1]}: {kind} draws {sizes} instead")


def taken(kind: str, takes: Mapping[str, Any], texts: Mapping[str, str], args: Namespace) -> list[str]:
    """Names of the texts that a pipeline gets: negative ones only where there is guidance away from them.

    Args:
        kind: the pipeline's class.
        takes: parameters that it takes, by name.

    Raises:
        UserError: there is a text for an encoder that it does not have.
    """
    guided = args.guidance_scale > 1 and "true_cfg_scale" not in takes  # which asks for guidance of another kind
    names = []
    for name in texts:
        option = f"--{name.replace('prompt', 'prompts')}"
        if name not in takes and not name.startswith("negative"):
            raise UserError(f"{option}: {kind} has no such text encoder; leave it out")
        if name.startswith("negative") and not (guided and name in takes):
            warn_once(f"{option} has no effect: {kind} is not guided away from texts here")
        else:
            names.append(name)
    return names


def warn_of_cut(pipe: Any, takes: Mapping[str, Any], wanted: Sequence[Wanted], names: Sequence[str]) -> None:
    """Say how many texts are longer than every tokenizer that reads them allows; the library's own lines are left out.

    Args:
        takes: parameters that the pipeline takes, by name.
        names: of the texts that it gets, of `taken`.
    """
    most = getattr(takes.get("max_sequence_length"), "default", None)
    most = most if isinstance(most, int) else math.inf
    fits: dict[str, bool] = {}
    limits = []
    for end in ("", "_2", "_3"):
        tokenizer = getattr(pipe, f"tokenizer{end}", None)
        if not hasattr(tokenizer, "model_max_length"):
            continue
        tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        limits.append(min(tokenizer.model_max_length, most))
        read = [name + end if name + end in names else name for name in ("prompt", "negative_prompt") if name in names]
        for text in sorted({one.texts[name] for one in wanted for name in read}):
            fits[text] = fits.get(text, False) or len(tokenizer(text).input_ids) <= limits[-1]
    if cut := sum(not fit for fit in fits.values()):
        warn_once(f"{cut} of {len(fits)} prompts are cut: a text encoder reads at most {max(limits)} tokens of each")


def _lines(path: str | None) -> list[str]:
    if path is None:
        raise UserError("there is nothing to draw: give --prompts or --prompts_file")
    lines = read_text(path, "--prompts_file").splitlines()
    if not any(line.strip() for line in lines):
        raise UserError(f"--prompts_file: {path} has no prompt; write one a line")
    return [line.strip() for line in lines if line.strip()]
