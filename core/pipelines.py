"""Pipelines of diffusers: loaded by name, given another scheduler, and saved. `core.placing` puts them on a device."""

from __future__ import annotations

import functools
import inspect
import logging
import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core.errors import UserError, say, warn_once
from core.files import share
from core.hub import is_local, loading, model_options
from core.noise import scheduler_changes
from core.zero import whole_models

# Of every processor that diffusers imports it says that torchvision would be better; it is not used here.
logging.getLogger("transformers.utils.import_utils").setLevel(logging.ERROR)
DENOISERS = ("unet", "transformer")
ADAPTED, ADAPTER_FILES = ("unet", "text_encoder"), ("adapter_config.json", "adapter_model.safetensors")
SCHEDULERS = {
    "euler_discrete": "EulerDiscreteScheduler",
    "euler_ancestral_discrete": "EulerAncestralDiscreteScheduler",
    "ddim": "DDIMScheduler",
    "ddpm": "DDPMScheduler",
    "flow_match_euler_discrete": "FlowMatchEulerDiscreteScheduler",
    "pndm": "PNDMScheduler",
    "dpmsolver_multistep": "DPMSolverMultistepScheduler",
    "unipc_multistep": "UniPCMultistepScheduler",
}
FLAGS = {"rescale_betas_zero_snr": "use_zero_snr"}  # that are named otherwise than what they change in a scheduler


@whole_models()  # its text encoders are never trained: nothing would gather them
def load_pipeline(args: Namespace) -> Any:
    """Load ``args.model_name_or_path`` on the host: from text to image, or from the images that other flags give.

    Parameters are fp32; in a run that only draws they are bf16 with ``--bf16`` or ``--bf16_full_eval``.

    Args:
        args: with ``pretrained_vae_model_name_or_path``, ``controlnet_model_name_or_path`` and ``..._image``, too.

    Raises:
        UserError: there is no such pipeline, it is of another kind, or its parts do not fit each other.
    """
    diffusers = _quiet()
    name, vae, control = (getattr(args, f"{part}model_name_or_path") for part in ("", "pretrained_vae_", "controlnet_"))
    _look_at(Path(name))
    bf16 = (args.bf16 or args.bf16_full_eval) and not _learns(args)
    options = {"dtype": torch.bfloat16 if bf16 else torch.float32, "use_safetensors": True}
    at_hub = {key: value for key, value in model_options(args).items() if key != "trust_remote_code"}
    others = {key: value for key, value in at_hub.items() if key != "revision"}  # which is the pipeline's
    parts = {key: path for key, path in (("vae", vae), ("controlnet", control)) if path}
    loaded = {}
    for key, path in parts.items():
        with loading(f"the model {path}", path):
            loaded[key] = diffusers.AutoModel.from_pretrained(path, **options, **others)
    with loading(f"the pipeline {name}", name):
        config = diffusers.DiffusionPipeline.load_config(name, **at_hub)
        auto = diffusers.AutoPipelineForText2Image
        if args.base_image:
            auto = diffusers.AutoPipelineForInpainting if args.mask_image else diffusers.AutoPipelineForImage2Image
        try:
            pipe = auto.from_pretrained(name, **loaded, **options, **at_hub, trust_remote_code=args.trust_remote_code)
        except (ValueError, AttributeError) as error:  # the latter: a class that the repository brings
            kind = config.get("_class_name")
            if isinstance(kind, str) and "can't find a pipeline" not in str(error):
                raise
            images = " and ".join(f"--{key}" for key in (*_images(args), *loaded) if key != "vae")
            raise UserError(
                f"{name} is a {kind}, which draws no images from text{f' with {images}' if images else ''}"
            ) from None
    pipe.set_progress_bar_config(disable=True)
    _check_channels(pipe, args)
    for part in ADAPTED:
        if getattr(args, f"{part}_adapter_name_or_path"):
            _merge_adapters(pipe, part, args)
    return pipe


def load_others(pipe: Any, folder: Path) -> Any:
    """Return the pipeline with all parts but its UNet as `save_pipeline` has written them to a checkpoint.

    Raises:
        UserError: they are not there, or cannot be read.
    """
    if not (folder / "model_index.json").is_file():
        raise UserError(
            f"{folder} is of a run whose pipeline has a name; give that as --model_name_or_path to go on, or another "
            "--output_dir, without --resume_from_checkpoint, to begin anew"
        )
    _quiet()
    with loading(f"the pipeline in {folder}", str(folder)), whole_models():
        return type(pipe).from_pretrained(folder, unet=pipe.unet, use_safetensors=True)


def _quiet() -> Any:
    import diffusers

    diffusers.utils.logging.set_verbosity_error()
    diffusers.utils.logging.disable_progress_bar()  # one bar, the run's, is enough
    return diffusers


def _learns(args: Namespace) -> bool:
    return args.do_train or args.do_eval or args.do_predict


def _images(args: Namespace) -> list[str]:
    return [key for key in ("base_image", "mask_image", "control_image") if getattr(args, key)]


def _look_at(path: Path) -> None:
    """Refuse what is on this machine, and no pipeline."""
    if os.path.isfile(path):  # unlike Path.is_file, false for a name that is no path
        raise UserError(
            f"{path} is a single file; turn it into a pipeline's folder with diffusers' from_single_file and "
            "save_pretrained, and name that"
        )
    if not os.path.isdir(path) or (path / "model_index.json").is_file():
        return
    if (path / "adapter_config.json").is_file() or list(path.glob("*lora*.safetensors")):
        raise UserError(f"{path} is a LoRA adapter, no whole pipeline; give it as --lora_id, beside the pipeline")
    raise UserError(f"{path} is no pipeline of diffusers: it has no model_index.json")


def _merge_adapters(pipe: Any, part: str, args: Namespace) -> None:
    """Merge adapters in peft's files, of any kind that peft has, into a part of the pipeline."""
    from huggingface_hub import snapshot_download
    from peft import PeftModel

    option, name = f"--{part}_adapter_name_or_path", getattr(args, f"{part}_adapter_name_or_path")
    if getattr(pipe, part, None) is None:
        raise UserError(f"{option}: {type(pipe).__name__} has no {part}; leave it out")
    with loading(f"{option} {name}", name):
        wanted = {"allow_patterns": list(ADAPTER_FILES), "cache_dir": args.cache_dir, "token": args.token}
        folder = Path(name if is_local(name) else snapshot_download(name, **wanted))
        if missing := [file for file in ADAPTER_FILES if not (folder / file).is_file()]:
            raise UserError(f"{option}: {name} has no {missing[0]}; adapters in diffusers' files are for --lora_id")
        setattr(
            pipe, part, PeftModel.from_pretrained(getattr(pipe, part), folder, torch_device="cpu").merge_and_unload()
        )


def _check_channels(pipe: Any, args: Namespace) -> None:
    unet, vae = getattr(pipe, "unet", None), getattr(pipe, "vae", None)
    if unet is None or vae is None or args.mask_image:
        return
    takes, gives = unet.config.in_channels, vae.config.latent_channels
    if takes != gives:
        raise UserError(
            f"{args.model_name_or_path}: the UNet takes {takes} channels, the autoencoder has {gives}; name another "
            "--pretrained_vae_model_name_or_path, or, for a pipeline that fills in, --base_image and --mask_image"
        )


def denoiser_name(pipe: Any) -> str:
    """Return ``unet`` or ``transformer``.

    Raises:
        UserError: the pipeline has neither.
    """
    for name in DENOISERS:
        if getattr(pipe, name, None) is not None:
            return name
    raise UserError(f"{type(pipe).__name__} has no {' and no '.join(DENOISERS)} of its own; name another pipeline")


def denoiser(pipe: Any) -> nn.Module:
    """The network that is called at each step."""
    return getattr(pipe, denoiser_name(pipe))


def set_scheduler(pipe: Any, args: Namespace) -> None:
    """Put in what ``--scheduler``, ``--timestep_spacing`` and `scheduler_changes` ask for; its tables stay on the host.

    What is not asked for: a run that only draws takes DDIM, and spreads its steps, or those of a scheduler that is
    named, from the first timestep to the last. The pipeline's own scheduler stays as it is if ``default`` is named, in
    a run that trains, and where DDIM cannot take its place: for flow matching, and for models of few steps.

    Tables on a device would be looked up there: the host would wait for it at each step. (With UniPC it does all the
    same, once a step, for what is solved there.)

    Raises:
        UserError: the pipeline's steps are of another kind, or the scheduler has no such option.
    """
    import diffusers

    own, draws = pipe.scheduler, not _learns(args)
    flows = own.config.get("prediction_type") == "flow_prediction" or own.config.get("use_flow_sigmas")
    flows = flows or type(own).__name__.startswith("FlowMatch")
    ddim = draws and not flows and diffusers.DDIMScheduler in own.compatibles
    name = args.scheduler or ("ddim" if ddim else "default")
    kind = type(own) if name == "default" else getattr(diffusers, SCHEDULERS[name])
    if kind is not type(own) and flows != kind.__name__.startswith("FlowMatch"):
        steps = "flow matching" if flows else "noise"
        raise UserError(
            f"--scheduler {name} does not fit {type(pipe).__name__}, whose {type(own).__name__} takes steps of {steps};"
            " use default"
        )
    spread = "linspace" if draws and name != "default" and not flows else None
    changes = {"timestep_spacing": spread} if spread else {}
    changes |= scheduler_changes(args)
    if args.timestep_spacing:
        changes["timestep_spacing"] = args.timestep_spacing
    for option in changes.keys() - inspect.signature(kind).parameters.keys():
        raise UserError(f"--{FLAGS.get(option, option)}: {kind.__name__} has no such option; leave it out")
    if changes or kind is not type(own):
        pipe.scheduler = kind.from_config(own.config, **changes)
    if args.scheduler is None and kind is not type(own):
        say(f"images are drawn with DDIM's steps; --scheduler default takes the pipeline's own, {type(own).__name__}")
    if changes.get("rescale_betas_zero_snr") and pipe.scheduler.config.prediction_type == "epsilon":
        warn_once("--use_zero_snr: at the last timestep there is noise alone, of which a model that foretells noise "
                  "learns nothing; give --prediction_type v_prediction")  # fmt: skip
    _keep_on_host(pipe.scheduler)


def _keep_on_host(scheduler: Any) -> None:
    """Let a scheduler leave its tables where they are, whatever device a pipeline names."""
    spread = scheduler.set_timesteps
    signature = inspect.signature(spread)

    @functools.wraps(spread)  # pipelines look at what it takes
    def set_timesteps(*args: Any, **kwargs: Any) -> None:
        bound = signature.bind(*args, **kwargs)
        if "device" in signature.parameters:
            bound.arguments["device"] = "cpu"
        spread(*bound.args, **bound.kwargs)

    scheduler.set_timesteps = set_timesteps
    if not hasattr(scheduler, "add_noise") or not hasattr(scheduler, "alphas_cumprod"):
        return
    mix = scheduler.add_noise

    @functools.wraps(mix)
    def add_noise(*args: Any, **kwargs: Any) -> torch.Tensor:
        table = scheduler.alphas_cumprod
        try:
            return mix(*args, **kwargs)
        finally:
            scheduler.alphas_cumprod = table  # it has moved it to the samples

    scheduler.add_noise = add_noise


def save_pipeline(pipe: Any, folder: Path, leave_out: Sequence[str] = ("unet",)) -> None:
    """Write ``model_index.json`` and the folder of each part, but those that are written otherwise, such as by `State`.

    With these beside them, ``DiffusionPipeline.from_pretrained(folder)`` loads it all.

    Raises:
        UserError: a part is in shares, of which this process has one.
    """
    parts = {name: part for name, part in pipe.components.items() if name not in leave_out}
    for name, part in parts.items():
        if any(hasattr(parameter, "ds_id") for parameter in getattr(part, "parameters", list)()):
            raise UserError(f"the {name} is shared out by ZeRO-3; leave out --deepspeed")
    for name, part in parts.items():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained(folder / name)
            share(folder / name, (folder / name).glob("*.safetensors"))
    pipe.save_config(folder)
