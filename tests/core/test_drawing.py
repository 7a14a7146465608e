"""Drawing: every image is diffusers' own for its prompt and seed, whatever is beside it.

On several ranks: `tests/recipes/test_text_to_image_devices.py`.
"""

from __future__ import annotations

import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from core import drawing
from core.drawing import adapt, draw, keep, save_images
from core.errors import UserError, exit_with_one_line
from core.prompts import Wanted
from core.results import claim_output_dir
from tests.core.drawings import distance, drawn_alone, load, plan, run_of

SEVEN = ["--prompts", *"abcdefg"]


# -------------------------------------------------------------------------------------------------------------- images


@pytest.mark.parametrize("batch", ["1", "2", "3", "5"])
def test_images_are_the_same_at_any_batch_size(tiny_sd: Path, tmp_path: Path, batch: str) -> None:
    """Also with a batch that is filled, and prompts of several lengths beside each other."""
    run, pipe = run_of(tmp_path, "--batch_size", batch, "--seed", "3", "--negative_prompts", "be"), load(tiny_sd)
    images, metrics = draw(run, pipe, wanted := plan(run))
    assert [(image.shape, image.dtype) for image in images] == [((16, 16, 3), np.uint8)] * 3
    peers = [drawn_alone(pipe, one) for one in wanted]
    assert distance(images, peers) == 0 if batch == "1" else distance(images, peers) <= 1
    assert min(distance([images[0]], [other]) for other in images[1:]) > 20
    assert metrics["generate_images"] == 3
    rows = min(int(batch), 3)
    assert run.ledger.report() == {"generate": [{"batches": -(-3 // rows), "images": [rows, 3, 16, 16]}]}


@pytest.mark.parametrize(
    ("scheduler", "eta"),
    [("DDIMScheduler", 1.0), ("EulerAncestralDiscreteScheduler", 0.0), ("DDPMScheduler", 0.0)],
    ids=["ddim", "euler_ancestral", "ddpm"],
)
def test_the_noise_of_every_step_is_the_rows_own(tiny_sd: Path, tmp_path: Path, scheduler: str, eta: float) -> None:
    pipe = load(tiny_sd, scheduler)
    found = []
    for batch in ("1", "2", "3"):
        run = run_of(tmp_path, "--batch_size", batch, "--eta", str(eta))
        found.append(draw(run, pipe, plan(run))[0])
    assert distance(found[0], found[1]) <= 1
    assert distance(found[0], found[2]) <= 1
    assert distance(found[0], [drawn_alone(pipe, one, eta=eta) for one in plan(run)]) == 0
    if eta:
        assert distance(found[0], [drawn_alone(pipe, one) for one in plan(run)]) > 20


@pytest.mark.parametrize("kind", ["sdxl", "sd3", "flux"])
def test_other_pipelines_draw_what_diffusers_draws(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = load(request.getfixturevalue(f"tiny_{kind}"))
    texts = ["--prompts_2", "beta", "--negative_prompts", "be", "--negative_prompts_2", "al"]
    run = run_of(tmp_path, "--batch_size", "2", *texts, "--height", "32", "--width", "16", "--guidance_scale", "3")
    images, _ = draw(run, pipe, wanted := plan(run))
    sizes = {"guidance_scale": 3.0, "height": 32, "width": 16}
    peers = [drawn_alone(pipe, one, **sizes) for one in wanted]
    assert peers[0].shape == (32, 16, 3)
    assert distance(images, peers) <= 1
    unguided = [line for line in caplog.messages if "is not guided away from texts here" in line]
    assert len(unguided) == (2 if kind == "flux" else 0)


def test_without_guidance_nothing_is_avoided(tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = load(tiny_sd)
    run = run_of(tmp_path, "--guidance_scale", "1", "--negative_prompts", "be")
    images, _ = draw(run, pipe, wanted := plan(run))
    for one in wanted:
        del one.texts["negative_prompt"]
    assert distance(images, [drawn_alone(pipe, one, guidance_scale=1.0) for one in wanted]) == 0
    assert [line for line in caplog.messages if "--negative_prompts has no effect" in line]


def test_bf16_is_autocast(tiny_sd: Path, tmp_path: Path) -> None:
    pipe = load(tiny_sd)
    run = run_of(tmp_path, "--bf16")
    images, _ = draw(run, pipe, wanted := plan(run))
    with torch.autocast("cpu", torch.bfloat16):
        peers = [drawn_alone(pipe, one) for one in wanted]
    assert distance(images, peers) <= 12  # here guidance and steps are in fp32
    assert distance(images, [drawn_alone(pipe, one) for one in wanted]) > 0
    pipe.to(torch.bfloat16)
    images, _ = draw(run, pipe, wanted)
    assert distance(images, [drawn_alone(pipe, one) for one in wanted]) == 0


@pytest.fixture(scope="module")
def picture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Flags that name a picture and a mask, and both as they are read."""
    folder, draw = tmp_path_factory.mktemp("picture"), np.random.default_rng(0)
    pixels = draw.integers(0, 256, (16, 16, 3), np.uint8)
    mask = np.zeros((16, 16, 3), np.uint8)
    mask[:, 8:] = 255
    found = {}
    for name, array in (("base", pixels), ("mask", mask), ("control", pixels[::-1].copy())):
        Image.fromarray(array).save(folder / f"{name}.png")
        found[name] = Image.fromarray(array)
    return found | {"flag": lambda name: [f"--{name}_image", str(folder / f"{name}.png")]}


def of_kind(folder: Path, kind: str) -> Any:
    """A pipeline of another kind, of the parts of a plain one."""
    import diffusers

    parts = load(folder).components
    if "ControlNet" in kind:
        torch.manual_seed(1)
        net = diffusers.ControlNetModel.from_unet(parts["unet"], conditioning_embedding_out_channels=(8, 16))
        for layer in (*net.controlnet_down_blocks, net.controlnet_cond_embedding.conv_out):  # a new one adds nothing
            torch.nn.init.normal_(layer.weight)
        parts["controlnet"] = net
    pipe = getattr(diffusers, kind)(**parts, requires_safety_checker=False)
    pipe.set_progress_bar_config(disable=True)
    return pipe


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        ("StableDiffusionImg2ImgPipeline", {"base": "image"}),
        ("StableDiffusionInpaintPipeline", {"base": "image", "mask": "mask_image"}),
        ("StableDiffusionControlNetPipeline", {"control": "image"}),
        ("StableDiffusionControlNetImg2ImgPipeline", {"base": "image", "control": "control_image"}),
    ],
    ids=["from_image", "inpainted", "controlled", "both"],
)
def test_pictures_that_are_given_go_to_every_row(
    tiny_sd: Path, tmp_path: Path, picture: dict[str, Any], kind: str, given: dict[str, str]
) -> None:
    pipe = of_kind(tiny_sd, kind)
    files = [word for name in given for word in picture["flag"](name)]
    sizes = {} if kind == "StableDiffusionImg2ImgPipeline" else {"height": 16, "width": 16}
    flags = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    run = run_of(tmp_path, "--batch_size", "2", *files, *flags)
    images, _ = draw(run, pipe, wanted := plan(run))
    options = {name: picture[option] for option, name in given.items()} | sizes
    assert distance(images, [drawn_alone(pipe, one, **options) for one in wanted]) <= 1


@pytest.mark.parametrize(
    ("kind", "flags", "reason"),
    [
        ("StableDiffusionPipeline", ["--prompts_2", "a"], "--prompts_2: StableDiffusionPipeline has no such text"),
        ("StableDiffusionPipeline", ["--height", "20", "--width", "21"], "have to be divisible by 8 but are 20 and 21"),
        (
            "StableDiffusionPipeline",
            ["--num_inference_steps", "2000"],
            "--num_inference_steps 2000: StableDiffusionPip",
        ),
        ("StableDiffusionPipeline", ["base"], "--base_image: StableDiffusionPipeline takes no such image"),
        ("StableDiffusionImg2ImgPipeline", ["base", "mask"], "--mask_image: StableDiffusionImg2ImgPipeline takes no"),
        ("StableDiffusionImg2ImgPipeline", ["--base_image", "/no/such.png"], "--base_image /no/such.png cannot be"),
        ("StableDiffusionInpaintPipeline", ["base"], "needs an image; give --mask_image"),
        ("StableDiffusionImg2ImgPipeline", [], "needs an image; give --base_image"),
        ("StableDiffusionControlNetPipeline", [], "needs an image; give --control_image"),
    ],
    ids=[
        "second_prompt",
        "size",
        "steps",
        "image",
        "mask",
        "missing",
        "without_mask",
        "without_image",
        "without_control",
    ],
)
def test_what_a_pipeline_cannot_do_is_one_line(
    tiny_sd: Path, tmp_path: Path, picture: dict[str, Any], caplog: Any, kind: str, flags: list[str], reason: str
) -> None:
    """And the only one: what else a run with few images is told comes after it."""
    words = [word for flag in flags for word in (picture["flag"](flag) if flag in picture else [flag])]
    run = run_of(tmp_path, *words)
    with pytest.raises(UserError) as error:
        draw(run, of_kind(tiny_sd, kind), plan(run))
    assert reason in str(error.value)
    assert not [line for line in caplog.messages if "throughput" in line]


def test_steps_that_a_scheduler_cannot_take_are_one_line(tiny_sd: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path)
    with pytest.raises(UserError, match="--num_inference_steps 3: PNDMScheduler needs more"):
        draw(run, load(tiny_sd, "PNDMScheduler", skip_prk_steps=False), plan(run))
    noise = {"rescale_betas_zero_snr": True, "prediction_type": "epsilon"}
    with pytest.raises(UserError, match=r"--use_zero_snr.* the first step sees noise alone"):
        draw(run, load(tiny_sd, "DDIMScheduler", **noise, timestep_spacing="trailing"), plan(run))
    _, metrics = draw(run, load(tiny_sd, "DDIMScheduler", **noise, timestep_spacing="leading"), plan(run))
    assert "generate_not_finite_images" not in metrics  # it begins earlier


def test_texts_that_are_cut_are_counted(
    tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    run = run_of(tmp_path, "--prompts", "alpha", "beta " * 20, "beta " * 30, "--negative_prompts", "be " * 20)
    draw(run, load(tiny_sd), plan(run))
    assert [line for line in caplog.messages if "cut" in line or "indices" in line] == [
        "3 of 4 prompts are cut: a text encoder reads at most 16 tokens of each"
    ]


def test_what_has_no_effect_is_said(tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe = load(tiny_sd, "EulerDiscreteScheduler")
    run = run_of(tmp_path, "--eta", "0.5")
    draw(run, pipe, plan(run))
    assert "--eta has no effect: it is DDIM's, and this is EulerDiscreteScheduler" in caplog.messages


def test_what_a_pipeline_does_instead_is_said_once(tiny_flux: Path, tmp_path: Path, caplog: Any) -> None:
    run = run_of(tmp_path, "--eta", "0.5", "--height", "18", "--width", "18")
    draw(run, load(tiny_flux), plan(run))
    assert [line for line in caplog.messages if line.startswith("--")] == [
        "--eta has no effect: it is DDIM's, and this is FlowMatchEulerDiscreteScheduler",
        "--height 18 and --width 18: FluxPipeline draws 16 x 16 pixels instead",
    ]


# ------------------------------------------------------------------------------------------------- adapters, and FreeU


def save_lora(folder: Path, out: Path) -> None:
    from diffusers import StableDiffusionPipeline
    from diffusers.utils import convert_state_dict_to_diffusers
    from peft import LoraConfig
    from peft.utils import get_peft_model_state_dict

    pipe = load(folder)
    torch.manual_seed(5)
    pipe.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights="gaussian"))
    for name, weight in pipe.unet.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(weight)
    layers = convert_state_dict_to_diffusers(get_peft_model_state_dict(pipe.unet))
    StableDiffusionPipeline.save_lora_weights(out, unet_lora_layers=layers)


@pytest.mark.parametrize("named", ["folder", "file"])
def test_adapters_are_merged_as_strongly_as_asked_for(tiny_sd: Path, tmp_path: Path, named: str) -> None:
    save_lora(tiny_sd, tmp_path / "lora")
    (file,) = (tmp_path / "lora").iterdir()
    run = run_of(tmp_path, "--lora_id", str(file if named == "file" else file.parent), "--lora_scale", "0.5")
    pipe, peer = load(tiny_sd), load(tiny_sd)
    adapt(pipe, run.args)
    assert not any("lora" in name for name in pipe.unet.state_dict())
    images, _ = draw(run, pipe, wanted := plan(run))
    plain = [drawn_alone(peer, one) for one in wanted]
    peer.load_lora_weights(tmp_path / "lora")
    half = [drawn_alone(peer, one, cross_attention_kwargs={"scale": 0.5}) for one in wanted]
    assert distance(images, half) <= 1
    assert distance(images, plain) > 5


@pytest.mark.parametrize("problem", ["missing", "pickled"])
def test_adapters_that_cannot_be_loaded_are_one_line(tiny_sd: Path, tmp_path: Path, problem: str) -> None:
    folder = tmp_path / "lora"
    if problem == "pickled":
        save_lora(tiny_sd, folder)
        (file,) = folder.iterdir()
        torch.save(load_file(file), folder / "pytorch_lora_weights.bin")
        file.unlink()
    with pytest.raises(UserError) as error:
        adapt(load(tiny_sd), run_of(tmp_path, "--lora_id", str(folder)).args)
    assert str(error.value).startswith(f"--lora_id {folder} cannot be loaded")


def test_adapters_of_a_hub_that_is_not_there_are_one_line(
    tiny_sd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"--lora_id x/y cannot be loaded: the hub was not .* name a folder or a file"):
        adapt(load(tiny_sd), run_of(tmp_path, "--lora_id", "x/y").args)


def test_freeu(tiny_sd: Path, tiny_flux: Path, tmp_path: Path) -> None:
    run, pipe = run_of(tmp_path, "--use_freeu"), load(tiny_sd)
    plain, _ = draw(run, pipe, plan(run))
    adapt(pipe, run.args)
    weighed, _ = draw(run, pipe, plan(run))
    pipe.enable_freeu(s1=0.9, s2=0.2, b1=1.3, b2=1.4)
    assert distance(weighed, [drawn_alone(pipe, one) for one in plan(run)]) == 0
    assert distance(weighed, plain) > 0
    with pytest.raises(UserError, match="--use_freeu: FluxPipeline cannot do it"):
        adapt(load(tiny_flux), run.args)


# ------------------------------------------------------------------------------------------------------- time, metrics


def test_only_real_images_of_steady_batches_are_measured(tiny_sd: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, *SEVEN, "--batch_size", "2")  # four batches: two of warm-up, two and one image
    _, metrics = draw(run, load(tiny_sd), plan(run))
    measured = metrics["generate_runtime"] - metrics["generate_excluded_seconds"]["warmup"]
    assert metrics["generate_images_per_second"] * measured == pytest.approx(3, rel=1e-3)
    assert metrics["generate_seconds_per_image"] == pytest.approx(1 / metrics["generate_images_per_second"], rel=1e-4)
    assert metrics["generate_images"] == 7
    assert set(metrics["generate_excluded_seconds"]) == {"warmup"}
    assert run.memory.peaks()["generate"] > 0


def test_the_warm_up_is_as_long_as_asked_for(tiny_sd: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, *SEVEN, "--batch_size", "2", "--throughput_warmup_steps", "3")
    _, metrics = draw(run, load(tiny_sd), plan(run), "eval")
    measured = metrics["eval_runtime"] - metrics["eval_excluded_seconds"]["warmup"]
    assert metrics["eval_images_per_second"] * measured == pytest.approx(1, rel=1e-3)


def test_too_few_batches_have_no_throughput(tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_of(tmp_path, "--batch_size", "2")
    _, metrics = draw(run, load(tiny_sd), plan(run))
    assert metrics["generate_images_per_second"] is metrics["generate_seconds_per_image"] is None
    assert [line for line in caplog.messages if "the first 2 batches do not count" in line]


def test_black_images_are_counted_and_filler_is_not(
    tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run, pipe = run_of(tmp_path, "--batch_size", "2"), load(tiny_sd)
    _, metrics = draw(run, pipe, plan(run))
    assert not [name for name in metrics if "finite" in name or "blanked" in name]
    torch.nn.init.constant_(pipe.vae.decoder.conv_out.bias, torch.nan)
    images, metrics = draw(run, pipe, plan(run))
    assert metrics["generate_not_finite_images"] == 3
    assert not np.any(images)
    (line,) = [line for line in caplog.messages if "3 of 3 images are black" in line]
    assert "--pretrained_vae_model_name_or_path" in line
    assert "--bf16" not in line
    caplog.clear()
    draw(run_of(tmp_path, "--bf16"), pipe, plan(run))
    assert [line for line in caplog.messages if "3 of 3 images are black" in line and "try without --bf16" in line]


def test_the_safety_checker_stays(tiny_sd: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from diffusers.pipelines.stable_diffusion import StableDiffusionSafetyChecker
    from transformers import CLIPConfig, CLIPImageProcessorPil

    run, pipe = run_of(tmp_path, "--batch_size", "2"), load(tiny_sd)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = CLIPConfig(text_config=sizes, vision_config=sizes | {"image_size": 16, "patch_size": 8}, projection_dim=8)
    checker = StableDiffusionSafetyChecker(config)
    torch.nn.init.constant_(checker.concept_embeds_weights, -2.0)
    size = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    pipe.register_modules(safety_checker=checker, feature_extractor=CLIPImageProcessorPil(**size))
    images, metrics = draw(run, pipe, plan(run))
    assert metrics["generate_blanked_images"] == 3
    assert not np.any(images)
    assert [line for line in caplog.messages if "3 of 3 images are black" in line and "safety checker" in line]


# --------------------------------------------------------------------------------------------------------------- files


def texts_of(path: Path) -> dict[str, str]:
    with Image.open(path) as image:
        image.load()
        return dict(image.text)


@pytest.mark.parametrize("how", ["interrupted", "full"])
def test_what_is_drawn_stays_when_the_rest_is_not(
    tiny_sd: Path, tmp_path: Path, capsys: pytest.CaptureFixture, how: str
) -> None:
    """And nothing of an earlier run is among it."""
    run, pipe, folder, calls = run_of(tmp_path), load(tiny_sd), tmp_path / "pictures", []
    folder.mkdir()
    for name in ("0000.png", "0002.png", "contact_sheet.png"):
        (folder / name).write_bytes(b"old")

    def at_the_third(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3 and how == "interrupted":
            raise KeyboardInterrupt
        if len(calls) == 3:
            (folder / "0002.png").mkdir()

    pipe.vae.decoder.register_forward_hook(at_the_third)
    with pytest.raises(SystemExit):
        exit_with_one_line(lambda: draw(run, pipe, plan(run), folder=folder))
    line = capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in sorted(folder.iterdir()) if path.is_file()] == ["0000.png", "0001.png"]
    peers = [drawn_alone(load(tiny_sd), one) for one in plan(run)[:2]]
    assert distance([np.asarray(Image.open(folder / f"000{at}.png")) for at in (0, 1)], peers) == 0
    if how == "interrupted":
        assert line == f"interrupted; the images drawn so far are in {folder}"
    else:
        assert "0002.png cannot be written" in line
        assert line.endswith("another --image_save_dir")


def test_files_are_written_outside_the_measured_time_and_completed(tiny_sd: Path, tmp_path: Path) -> None:
    """Where machines do not share a folder, the first one gets what the others have drawn."""
    run, pipe, folder = run_of(tmp_path), load(tiny_sd), tmp_path / "pictures"
    images, metrics = draw(run, pipe, wanted := plan(run), folder=folder)
    assert sorted(path.name for path in folder.iterdir()) == ["0000.png", "0001.png", "0002.png"]
    parts = metrics["generate_excluded_seconds"]
    assert set(parts) == {"warmup", "files"}
    measured = metrics["generate_runtime"] - sum(parts.values())
    assert metrics["generate_images_per_second"] * measured == pytest.approx(1, rel=1e-3)
    (folder / "0001.png").unlink()
    keep(run, pipe, images, wanted, folder)
    for number, image in enumerate(images):
        assert np.array_equal(np.asarray(Image.open(folder / f"000{number}.png")), image)
    assert (folder / "contact_sheet.png").is_file()


def test_an_interruption_says_how_to_go_on_where_there_is_a_way(tmp_path: Path, capsys: Any) -> None:
    args = run_of(tmp_path).args

    def interrupted(do_train: bool) -> str:
        claim_output_dir(Namespace(**{**vars(args), "do_train": do_train}), "drawing")
        with pytest.raises(SystemExit):
            exit_with_one_line(lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
        return capsys.readouterr().err.splitlines()[-1]

    assert interrupted(False) == "interrupted"
    assert interrupted(True) == "interrupted; nothing is saved yet: start it anew, with --overwrite_output_dir"


def test_files_say_what_they_are(tmp_path: Path) -> None:
    images = [np.random.default_rng(seed).integers(0, 256, (9, 8, 3), np.uint8) for seed in range(3)]
    prompts = ["a fox", "ein Fuchs über Brücken", "猫と犬"]
    wanted = [Wanted(at, 40 + at, {"prompt": text, "negative_prompt": "blur, 雨"}) for at, text in enumerate(prompts)]
    save_images(tmp_path / "new" / "images", images, wanted, {"model": "tiny", "steps": 30}, arrays=True)
    folder = tmp_path / "new" / "images"
    names = [f"{at:04d}.png" for at in range(3)]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "contact_sheet.png", "images.npy"])
    for name, image, one in zip(names, images, wanted, strict=True):
        about = {"prompt": one.prompt, "negative prompt": "blur, 雨", "seed": str(one.seed)}
        assert texts_of(folder / name) == about | {"model": "tiny", "steps": "30"}
        assert np.array_equal(np.asarray(Image.open(folder / name)), image)
    assert np.array_equal(np.load(folder / "images.npy"), np.stack(images))
    sheet = texts_of(folder / "contact_sheet.png")
    assert sheet["model"] == "tiny"
    assert [sheet[name] for name in names] == [f"seed {one.seed} {one.prompt}" for one in wanted]


def test_no_rank_but_the_first_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    save_images(tmp_path / "images", [np.zeros((8, 8, 3), np.uint8)], [Wanted(0, 0, {"prompt": "a"})], {})
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "images").write_text("a file")
    with pytest.raises(UserError, match=r"0000\.png cannot be written"):
        save_images(tmp_path / "images", [np.zeros((8, 8, 3), np.uint8)], [Wanted(0, 0, {"prompt": "a"})], {})


def test_a_sheet_of_many_images_shows_some_of_each_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawing, "ON_SHEET", 4)
    images = [np.full((4, 4, 3), at, np.uint8) for at in range(7)]
    save_images(tmp_path, images, [Wanted(at, at, {"prompt": f"prompt {at // 2}"}) for at in range(7)], {})
    assert len(list(tmp_path.glob("0*.png"))) == 7
    shown = texts_of(tmp_path / "contact_sheet.png")
    assert {name: text for name, text in shown.items() if name.startswith("0")} == {
        f"000{at}.png": f"seed {at} prompt {at // 2}" for at in (0, 2, 4, 6)
    }
