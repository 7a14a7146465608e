"""Loading, refusing and saving pipelines of diffusers; schedulers against an unchanged pipeline, image by image."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline

from core.arguments import parse_arguments
from core.errors import UserError
from core.hub import HubArguments
from core.noise import NoiseArguments
from core.pipelines import (
    SCHEDULERS,
    denoiser,
    denoiser_name,
    load_others,
    load_pipeline,
    save_pipeline,
    set_scheduler,
)
from core.prompts import DrawingArguments
from tests.conftest import small_vae

OWN = {"model_name_or_path": None, "pretrained_vae_model_name_or_path": None, "controlnet_model_name_or_path": None}
KINDS = ("sd", "sdxl", "sd3", "flux")
OF_NOISE = sorted(SCHEDULERS.keys() - {"flow_match_euler_discrete"})


def arguments(folder: Path | str | None = None, *flags: str, **own: Any) -> Namespace:
    groups = (DrawingArguments, NoiseArguments, HubArguments)
    args = parse_arguments(["--do_eval", *flags], *groups, description="")
    args.do_eval = False
    return Namespace(**{**vars(args), **OWN, "model_name_or_path": folder and str(folder), **own})


def folder_of(request: pytest.FixtureRequest, kind: str) -> Path:
    return request.getfixturevalue(f"tiny_{kind}")


def images(pipe: Any, steps: int = 4, **more: Any) -> np.ndarray:
    pipe.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": steps, "output_type": "np", "height": 16, "width": 16, **more}
    options = {name: value for name, value in options.items() if value is not None}
    return pipe(["alpha", "beta 7"], **options, generator=torch.Generator().manual_seed(1)).images


@pytest.mark.parametrize("kind", KINDS)
def test_a_loaded_pipeline_draws_as_diffusers_has_it(request: pytest.FixtureRequest, kind: str) -> None:
    folder = folder_of(request, kind)
    pipe, plain = load_pipeline(arguments(folder)), DiffusionPipeline.from_pretrained(folder)
    set_scheduler(pipe, arguments(folder, "--scheduler", "default"))
    assert type(pipe) is type(plain)
    assert denoiser_name(pipe) == ("unet" if kind in ("sd", "sdxl") else "transformer")
    assert denoiser(pipe) is getattr(pipe, denoiser_name(pipe))
    assert np.array_equal(images(pipe), images(plain))


@pytest.mark.parametrize(
    ("flags", "own", "dtype"),
    [
        (["--bf16"], {"do_generate": True}, torch.bfloat16),
        (["--bf16_full_eval"], {"do_generate": True}, torch.bfloat16),
        ([], {"do_generate": True}, torch.float32),
        (["--bf16"], {"do_train": True}, torch.float32),
        (["--bf16_full_eval"], {"do_eval": True}, torch.float32),
    ],
)
def test_parameters_are_bf16_where_the_run_only_draws(tiny_sd: Path, flags: list, own: dict, dtype: Any) -> None:
    pipe = load_pipeline(arguments(tiny_sd, *flags, **own))
    assert {part.dtype for part in (pipe.unet, pipe.vae, pipe.text_encoder)} == {dtype}


def test_another_autoencoder(tiny_sd: Path, tmp_path: Path) -> None:
    torch.manual_seed(5)
    small_vae(sample_size=16).save_pretrained(tmp_path / "vae")
    pipe = load_pipeline(arguments(tiny_sd, pretrained_vae_model_name_or_path=str(tmp_path / "vae")))
    plain = DiffusionPipeline.from_pretrained(tiny_sd, vae=diffusers.AutoencoderKL.from_pretrained(tmp_path / "vae"))
    assert np.array_equal(images(pipe), images(plain))
    assert not np.array_equal(images(pipe), images(DiffusionPipeline.from_pretrained(tiny_sd)))


def test_an_autoencoder_that_does_not_fit(tiny_sd: Path, tmp_path: Path) -> None:
    vae = diffusers.AutoencoderKL(latent_channels=3, block_out_channels=(8,), norm_num_groups=4)
    vae.save_pretrained(tmp_path / "vae")
    with pytest.raises(UserError, match="the UNet takes 4 channels, the autoencoder has 3; name another --pretrained"):
        load_pipeline(arguments(tiny_sd, pretrained_vae_model_name_or_path=str(tmp_path / "vae")))


@pytest.mark.parametrize("kind", ["sd", "flux"])
@pytest.mark.parametrize("given", [("base_image",), ("base_image", "mask_image")], ids="-".join)
def test_images_that_are_given_choose_the_pipeline(request: pytest.FixtureRequest, kind: str, given: tuple) -> None:
    args = arguments(folder_of(request, kind), **dict.fromkeys(given, "a.png"))
    end = "Inpaint" if "mask_image" in given else "Img2Img"
    plain = type(load_pipeline(arguments(folder_of(request, kind)))).__name__
    assert type(load_pipeline(args)).__name__ == plain.replace("Pipeline", f"{end}Pipeline")


@pytest.mark.parametrize(
    ("kind", "given"), [("sd", ()), ("sdxl", ("base_image",)), ("sd", ("base_image", "mask_image"))]
)
def test_a_controlnet(request: pytest.FixtureRequest, kind: str, given: tuple, tmp_path: Path) -> None:
    folder = folder_of(request, kind)
    control = diffusers.ControlNetModel.from_unet(
        diffusers.UNet2DConditionModel.from_pretrained(folder / "unet"), conditioning_embedding_out_channels=(8, 8)
    )
    control.save_pretrained(tmp_path / "control")
    args = arguments(folder, controlnet_model_name_or_path=str(tmp_path / "control"), control_image="c.png")
    for name in given:
        setattr(args, name, "a.png")
    pipe = load_pipeline(args)
    assert type(pipe.controlnet) is diffusers.ControlNetModel
    ends = {0: "", 1: "Img2Img", 2: "Inpaint"}
    family = "StableDiffusion" if kind == "sd" else "StableDiffusionXL"
    assert type(pipe).__name__ == f"{family}ControlNet{ends[len(given)]}Pipeline"


def write_index(folder: Path, kind: Any) -> Path:
    (folder / "model_index.json").write_text(json.dumps({"_class_name": kind, "_diffusers_version": "0.30.0"}))
    return folder


def adapter(folder: Path) -> Path:
    (folder / "pytorch_lora_weights.safetensors").write_bytes(b"")
    return folder


def peft_adapter(folder: Path) -> Path:
    (folder / "adapter_config.json").write_text("{}")
    return folder


def single_file(folder: Path) -> Path:
    (folder / "model.safetensors").write_bytes(b"")
    return folder / "model.safetensors"


REFUSED = {
    "nothing": (lambda folder: folder, "is no pipeline of diffusers: it has no model_index.json"),
    "missing": (lambda folder: folder / "gone", "cannot be loaded: there is no "),
    "lora": (adapter, "is a LoRA adapter, no whole pipeline; give it as --lora_id"),
    "peft": (peft_adapter, "is a LoRA adapter, no whole pipeline; give it as --lora_id"),
    "file": (single_file, "is a single file; turn it into a pipeline's folder"),
    "video": (lambda folder: write_index(folder, "WanPipeline"), "is a WanPipeline, which draws no images from text"),
    "audio": (
        lambda folder: write_index(folder, "StableAudioPipeline"),
        "is a StableAudioPipeline, which draws no images from text",
    ),
    "code": (lambda folder: write_index(folder, ["pipeline", "Mine"]), "which draws no images from text$"),
    "broken": (
        lambda folder: (folder / "model_index.json").write_text("{") and folder,
        "^the pipeline .* cannot be loaded: ",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_pipeline_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    make, message = REFUSED[case]
    with pytest.raises(UserError, match=message) as caught:
        load_pipeline(arguments(make(tmp_path)))
    assert len(str(caught.value)) < 800


def test_a_name_without_a_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"^the pipeline no/such cannot be loaded: .*hub was not reachable"):
        load_pipeline(arguments("no/such"))


def test_a_pipeline_that_lacks_the_pictures_kind(tmp_path: Path) -> None:
    folder = write_index(tmp_path, "PixArtSigmaPipeline")
    with pytest.raises(
        UserError, match=r"is a PixArtSigmaPipeline, which draws no images from text with --base_image$"
    ):
        load_pipeline(arguments(folder, base_image="a.png"))


def test_a_pipeline_without_a_denoiser_of_its_own() -> None:
    with pytest.raises(UserError, match=r"^Namespace has no unet and no transformer of its own"):
        denoiser(Namespace(unet=None))


@pytest.mark.parametrize(("kind", "name"), [*(("sd", name) for name in OF_NOISE), ("sdxl", "euler_discrete")])
def test_each_scheduler_draws_as_in_an_unchanged_pipeline(request: pytest.FixtureRequest, kind: str, name: str) -> None:
    folder, changes = folder_of(request, kind), {"timestep_spacing": "trailing"}
    pipe, plain = load_pipeline(arguments(folder)), DiffusionPipeline.from_pretrained(folder)
    set_scheduler(pipe, arguments(folder, "--scheduler", name, "--timestep_spacing", "trailing"))
    plain.scheduler = getattr(diffusers, SCHEDULERS[name]).from_config(plain.scheduler.config, **changes)
    assert type(pipe.scheduler) is type(plain.scheduler)
    assert dict(pipe.scheduler.config) == dict(plain.scheduler.config)
    assert np.array_equal(images(pipe), images(plain))


def test_a_run_that_draws_takes_ddim_from_the_first_timestep_to_the_last(
    tiny_sd: Path, capsys: pytest.CaptureFixture
) -> None:
    """The published defaults are ddim and linspace; a scheduler that is named is spread so, too."""
    euler, changes = diffusers.EulerDiscreteScheduler, {"timestep_spacing": "linspace"}
    pipe, plain = (load_pipeline(arguments(tiny_sd)) for _ in range(2))
    own = euler.from_config(plain.scheduler.config, timestep_spacing="trailing")
    for name, kind in ((None, diffusers.DDIMScheduler), ("euler_ancestral_discrete", None), ("euler_discrete", euler)):
        pipe.scheduler = euler.from_config(own.config)
        set_scheduler(pipe, arguments(tiny_sd, *(["--scheduler", name] if name else [])))
        kind = kind or diffusers.EulerAncestralDiscreteScheduler
        assert type(pipe.scheduler) is kind
        assert dict(pipe.scheduler.config) == dict(kind.from_config(own.config, **changes).config)
        plain.scheduler = kind.from_config(own.config, **changes)
        assert np.array_equal(images(pipe), images(plain))
    assert capsys.readouterr().out.count("--scheduler default takes the pipeline's own, EulerDiscreteScheduler") == 1


@pytest.mark.parametrize("own", ["default", "train", "lcm"])
def test_where_the_pipelines_own_scheduler_stays(tiny_sd: Path, own: str) -> None:
    pipe = load_pipeline(arguments(tiny_sd))
    kind = diffusers.LCMScheduler if own == "lcm" else diffusers.EulerDiscreteScheduler
    pipe.scheduler = kind.from_config(pipe.scheduler.config, timestep_spacing="trailing")
    before = dict(pipe.scheduler.config)
    set_scheduler(
        pipe, arguments(*{"default": (tiny_sd, "--scheduler", "default")}.get(own, (tiny_sd,)), do_train=own == "train")
    )
    assert type(pipe.scheduler) is kind
    assert dict(pipe.scheduler.config) == before
    set_scheduler(pipe, arguments(tiny_sd, "--scheduler", "ddim", do_train=True))
    assert (type(pipe.scheduler), pipe.scheduler.config.timestep_spacing) == (diffusers.DDIMScheduler, "trailing")


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_flow_matching_has_one_scheduler(request: pytest.FixtureRequest, kind: str) -> None:
    folder = folder_of(request, kind)
    pipe, plain = load_pipeline(arguments(folder)), DiffusionPipeline.from_pretrained(folder)
    set_scheduler(pipe, arguments(folder, "--scheduler", "flow_match_euler_discrete"))
    assert np.array_equal(images(pipe), images(plain))
    with pytest.raises(UserError, match=r"^--scheduler ddim does not fit .* takes steps of flow matching; use default"):
        set_scheduler(pipe, arguments(folder, "--scheduler", "ddim"))
    with pytest.raises(UserError, match=r"^--timestep_spacing: FlowMatchEulerDiscreteScheduler has no such option"):
        set_scheduler(pipe, arguments(folder, "--timestep_spacing", "trailing"))


def test_schedulers_of_flow_matching_do_not_fit_noise(tiny_sd: Path) -> None:
    pipe = load_pipeline(arguments(tiny_sd))
    with pytest.raises(UserError, match=r"^--scheduler flow_match_euler_discrete does not fit StableDiffusionPipeline"):
        set_scheduler(pipe, arguments(tiny_sd, "--scheduler", "flow_match_euler_discrete"))
    with pytest.raises(UserError, match=r"^--use_zero_snr: PNDMScheduler has no such option"):
        set_scheduler(pipe, arguments(tiny_sd, "--scheduler", "pndm", "--use_zero_snr"))


def test_what_training_changes_in_the_scheduler(tiny_sd: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = load_pipeline(arguments(tiny_sd))
    set_scheduler(pipe, arguments(tiny_sd, "--use_zero_snr", "--prediction_type", "v_prediction"))
    config = pipe.scheduler.config
    assert (config.prediction_type, config.timestep_spacing) == ("v_prediction", "trailing")
    assert float(pipe.scheduler.alphas_cumprod[-1]) == 0
    assert np.isfinite(images(pipe)).all()
    assert not caplog.records
    set_scheduler(pipe, arguments(tiny_sd, "--use_zero_snr", "--prediction_type", "epsilon"))
    assert "give --prediction_type v_prediction" in caplog.text
    set_scheduler(pipe, arguments(tiny_sd, "--use_zero_snr", "--timestep_spacing", "leading"))
    assert pipe.scheduler.config.timestep_spacing == "leading"


@pytest.mark.parametrize("name", [*OF_NOISE, "flow_match_euler_discrete"])
def test_tables_stay_on_the_host(tiny_sd: Path, tiny_sd3: Path, name: str) -> None:
    flows = name.startswith("flow")
    folder = tiny_sd3 if flows else tiny_sd
    pipe = load_pipeline(arguments(folder))
    set_scheduler(pipe, arguments(folder, "--scheduler", name))
    scheduler = pipe.scheduler
    scheduler.set_timesteps(4, device="meta")
    latents = torch.zeros(1, 4, 2, 2, device="meta")
    if hasattr(scheduler, "set_begin_index"):  # as pipelines do: without, some look the timestep up on the device
        scheduler.set_begin_index(0)
    if not flows:  # of pictures that are given
        scheduler.add_noise(latents, latents, scheduler.timesteps[:1])
    tensors = [value for value in vars(scheduler).values() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 1
    assert {tensor.device.type for tensor in tensors} == {"cpu"}


def test_saved_it_is_a_whole_pipeline_once_the_unet_is_beside_it(tiny_sd: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(arguments(tiny_sd))
    set_scheduler(pipe, arguments(tiny_sd, "--scheduler", "euler_discrete"))
    save_pipeline(pipe, tmp_path)
    assert not (tmp_path / "unet").exists()
    with pytest.raises(OSError, match=r"config\.json"):
        DiffusionPipeline.from_pretrained(tmp_path)
    pipe.unet.save_pretrained(tmp_path / "unet")
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(again) is type(pipe)
    assert np.array_equal(images(again), images(pipe))
    index = json.loads((tmp_path / "model_index.json").read_text())
    assert index["unet"] == ["diffusers", "UNet2DConditionModel"]
    assert index["scheduler"] == ["diffusers", "EulerDiscreteScheduler"]


def test_all_but_the_unet_comes_from_a_checkpoint(tiny_sd: Path, tmp_path: Path) -> None:
    pipe, other = load_pipeline(arguments(tiny_sd)), load_pipeline(arguments(tiny_sd))
    for part in (other.text_encoder, other.vae):
        for parameter in part.parameters():
            torch.nn.init.zeros_(parameter)
    save_pipeline(pipe, tmp_path)
    again = load_others(other, tmp_path)
    assert again.unet is other.unet
    assert np.array_equal(images(again), images(pipe))
    with pytest.raises(UserError, match=r"gone is of a run whose pipeline has a name; give that as --model_name_or_pa"):
        load_others(other, tmp_path / "gone")


def test_shares_of_weights_are_not_written(tiny_sd: Path, tmp_path: Path) -> None:
    pipe = load_pipeline(arguments(tiny_sd))
    pipe.unet.conv_in.weight.ds_id = 0  # as ZeRO-3 marks them
    with pytest.raises(UserError, match=r"^the unet is shared out by ZeRO-3; leave out --deepspeed$"):
        save_pipeline(pipe, tmp_path, leave_out=())
    assert not list(tmp_path.iterdir())
    save_pipeline(pipe, tmp_path)


@pytest.mark.parametrize("kind", ["sdxl", "flux"])
def test_any_pipeline_is_saved_whole(request: pytest.FixtureRequest, kind: str, tmp_path: Path) -> None:
    pipe = load_pipeline(arguments(folder_of(request, kind)))
    set_scheduler(pipe, arguments(None, "--scheduler", "default"))
    save_pipeline(pipe, tmp_path, leave_out=())
    assert np.array_equal(images(DiffusionPipeline.from_pretrained(tmp_path)), images(pipe))


@pytest.mark.parametrize("part", ["unet", "text_encoder"])
def test_adapters_in_pefts_files_are_merged_as_peft_does_it(tiny_sd: Path, tmp_path: Path, part: str) -> None:
    from peft import LoHaConfig, LoraConfig, get_peft_model

    plain = DiffusionPipeline.from_pretrained(tiny_sd)
    config = {
        "unet": LoHaConfig(r=2, alpha=4, init_weights=False, target_modules=["to_q", "to_v"]),
        "text_encoder": LoraConfig(r=2, lora_alpha=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]),
    }[part]
    before = images(plain)
    model = get_peft_model(getattr(plain, part), config)
    model.save_pretrained(tmp_path)
    setattr(plain, part, model)
    flags = [f"--{part}_adapter_name_or_path", str(tmp_path), "--scheduler", "default"]
    pipe = load_pipeline(arguments(tiny_sd, *flags))
    assert type(getattr(pipe, part)).__name__ == {"unet": "UNet2DConditionModel", "text_encoder": "CLIPTextModel"}[part]
    np.testing.assert_allclose(images(pipe), images(plain), atol=1e-5)
    assert np.abs(images(pipe) - before).max() > 1e-3
    save_pipeline(pipe, tmp_path / "whole", leave_out=())
    assert np.array_equal(images(DiffusionPipeline.from_pretrained(tmp_path / "whole")), images(pipe))


def test_adapters_that_cannot_be_merged_are_one_line(tiny_sd: Path, tiny_sd3: Path, tmp_path: Path) -> None:
    flags = ["--unet_adapter_name_or_path", str(tmp_path)]
    with pytest.raises(UserError, match=r"^--unet_adapter_name_or_path: .* has no adapter_config\.json; .* --lora_id$"):
        load_pipeline(arguments(tiny_sd, *flags))
    with pytest.raises(UserError, match=r"^--unet_adapter_name_or_path: StableDiffusion3Pipeline has no unet"):
        load_pipeline(arguments(tiny_sd3, *flags))
    with pytest.raises(UserError, match=r"there is no .*/none; give a folder, or a hub's name$"):
        load_pipeline(arguments(tiny_sd, flags[0], str(tmp_path / "none")))
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"none")
    with pytest.raises(UserError, match=r"^--unet_adapter_name_or_path .* cannot be loaded: "):
        load_pipeline(arguments(tiny_sd, *flags))
