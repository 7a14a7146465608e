"""Embeddings and latents against diffusers' own; sizes; captions that are cut; pipelines that are refused."""

from __future__ import annotations

import copy
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor

from core.device import Device
from core.encoders import Encoders
from core.errors import UserError

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))
CAPTIONS = ["alpha beta", "", "a picture of the number 7, in grey and very small", "tau"]


@pytest.fixture(params=["sd", "sdxl"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return DiffusionPipeline.from_pretrained(request.getfixturevalue(f"tiny_{request.param}"))


def stacked(encoders: Encoders, captions: list[str] = CAPTIONS) -> dict[str, torch.Tensor]:
    rows = [encoders.tokenize(caption) for caption in captions]
    return {key: torch.from_numpy(np.stack([row[key] for row in rows])) for key in rows[0]}


def test_embeddings_are_those_of_the_pipeline(pipe: Any) -> None:
    if hasattr(pipe, "tokenizer_2"):
        pipe.text_encoder_2.double()  # `Encoders` puts them in fp32
        pipe.text_encoder_2.requires_grad_(True)
    encoders = Encoders(pipe, CPU)
    expected = pipe.encode_prompt(CAPTIONS, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoders.embed(stacked(encoders))
    if encoders.needs_time_ids:  # without a text it is drawn against zeros
        expected = [None if value is None else value * torch.tensor([bool(text) for text in CAPTIONS]).view(
            -1, *[1] * (value.dim() - 1)) for value in expected]  # fmt: skip
    assert torch.equal(found["encoder_hidden_states"], expected[0])
    assert not found["encoder_hidden_states"].requires_grad
    assert encoders.needs_time_ids == hasattr(pipe, "tokenizer_2")
    if encoders.needs_time_ids:
        assert torch.equal(found["text_embeds"], expected[2])
    assert found.keys() == {"encoder_hidden_states", *(["text_embeds"] if encoders.needs_time_ids else [])}


def test_each_text_encoder_has_its_own_tokenizer(tiny_sdxl: Path) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_sdxl)
    pipe.tokenizer_2.pad_token = "a</w>"
    row = Encoders(pipe, CPU).tokenize("beta")
    assert {key: (value.shape, value.dtype) for key, value in row.items()} == dict.fromkeys(
        ("input_ids", "input_ids_2"), ((16,), np.dtype(np.int64))
    )
    assert row["input_ids"][:3].tolist() == row["input_ids_2"][:3].tolist()
    assert row["input_ids"][-1] != row["input_ids_2"][-1]


@pytest.mark.parametrize("settings", ["plain", "shift", "mean"])
def test_latents_are_those_of_diffusers(pipe: Any, settings: str) -> None:
    more = {"shift": {"shift_factor": 0.3}, "mean": {"latents_mean": [1.0, 2, 3, 4], "latents_std": [2.0, 3, 4, 5]}}
    pipe.vae.register_to_config(**more.get(settings, {}))
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 256, (2, 3, 16, 32), dtype=np.uint8)
    encoders = Encoders(pipe, CPU)
    mean, deviation = encoders.moments(torch.from_numpy(pixels)).chunk(2, dim=1)
    assert mean.dtype == torch.float32
    assert mean.shape == (2, 4, 8, 16)
    images = VaeImageProcessor(vae_scale_factor=2).preprocess(pixels.transpose(0, 2, 3, 1) / 255.0)
    with torch.no_grad():
        posterior = pipe.vae.encode(images.float()).latent_dist
    noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(3))
    latents, scale = posterior.sample(torch.Generator().manual_seed(3)), pipe.vae.config.scaling_factor
    if settings == "mean":  # as diffusers' training scripts have it
        means, spreads = (torch.tensor(more["mean"][f"latents_{name}"]).view(1, 4, 1, 1) for name in ("mean", "std"))
        latents = (latents - means) / spreads
    expected = (latents - (0.3 if settings == "shift" else 0)) * scale
    torch.testing.assert_close(mean + deviation * noise, expected, rtol=1e-5, atol=1e-5)


def test_products_are_halved_by_autocast(pipe: Any) -> None:
    """But nothing else: moments are fp32, and as close as bf16 can be. What is kept is made without autocast."""
    pixels = torch.randint(0, 256, (2, 3, 16, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    encoders = Encoders(pipe, CPU)
    exact = encoders.moments(pixels)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = encoders.moments(pixels)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    torch.testing.assert_close(found, exact, rtol=0.02, atol=0.02 * float(exact.abs().mean()))


def test_sizes_that_fit(pipe: Any) -> None:
    encoders = Encoders(pipe, CPU)
    assert encoders.resolution == pipe.unet.config.sample_size * pipe.vae_scale_factor == 16
    assert encoders.latent_shape(16) == (4, 8, 8)
    with torch.no_grad():
        assert encoders.moments(torch.zeros(1, 3, 20, 20, dtype=torch.uint8)).shape[1:] == (
            8,
            *encoders.latent_shape(20)[1:],
        )
    for side, near in ((18, "give 16 or 20"), (2, "give 4"), (21, "give 20 or 24")):
        with pytest.raises(UserError, match=f"^--resolution, .*{side} pixels .*multiple of 4; {near}$"):
            encoders.latent_shape(side)


def test_time_ids_are_those_of_the_pipeline(tiny_sdxl: Path) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_sdxl)
    expected = pipe._get_add_time_ids((40, 30), (5, 6), (16, 16), torch.float32, 24)
    found = Encoders(pipe, CPU).time_ids((40, 30, 5, 6), 16)
    assert found.dtype == np.float32
    assert found.tolist() == expected[0].tolist()


def test_captions_that_are_cut(pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
    encoders = Encoders(pipe, CPU)
    exactly = "a " * 14  # and the two tokens around it
    assert encoders.count_cut([exactly, "beta", ""]) == 0
    captions = ["a " * 15, *[exactly] * 1500, "long words", "a " * 40]
    assert encoders.count_cut(captions) == 2
    encoders.report_cut([captions[:3], *captions[3:]], "train")
    assert [record.message for record in caplog.records] == [
        "train: 2 of 1503 captions are longer than 16 tokens: their ends are lost"
    ]
    encoders.report_cut(["beta"], "validation")
    assert len(caplog.records) == 1


@pytest.mark.parametrize("name", ["", "_2"])
def test_a_caption_is_cut_if_either_tokenizer_cuts_it(tiny_sdxl: Path, name: str) -> None:
    pipe = DiffusionPipeline.from_pretrained(tiny_sdxl)
    getattr(pipe, f"tokenizer{name}").model_max_length = 5
    encoders = Encoders(pipe, CPU)
    assert encoders.count_cut(["a a a", "a a a a"]) == 1
    assert encoders.tokenize("a a a a")[f"input_ids{name}"].shape == (5,)


def test_the_fingerprint_is_of_weights_and_settings(pipe: Any) -> None:
    before = Encoders(pipe, CPU).fingerprint()
    assert Encoders(copy.deepcopy(pipe), CPU).fingerprint() == before
    changes = [
        lambda: pipe.vae.encoder.conv_in.bias.data.add_(1e-3),
        lambda: pipe.text_encoder.final_layer_norm.bias.data.add_(1e-3),
        lambda: pipe.vae.register_to_config(scaling_factor=0.5),
        lambda: pipe.tokenizer.add_tokens(["new"]),
    ]
    seen = {before}
    for change in changes:
        change()
        seen.add(Encoders(pipe, CPU).fingerprint())
    assert len(seen) == 5


def test_a_checkpoint_goes_on_with_what_it_learned_from(pipe: Any, tmp_path: Path) -> None:
    Encoders(pipe, CPU).origin(None).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "learned_from.json").read_text())
    assert written.keys() == {"prediction_type", "vae"} | {name for name in pipe.components if "text_encoder" in name}
    Encoders(copy.deepcopy(pipe), CPU).origin(tmp_path)
    other = copy.deepcopy(pipe)
    other.scheduler.register_to_config(prediction_type="v_prediction")
    with pytest.raises(UserError, match="was trained with --prediction_type epsilon, not v_prediction; give that"):
        Encoders(other, CPU).origin(tmp_path)
    pipe.vae.decoder.conv_in.bias.data.add_(1e-3)
    with pytest.raises(UserError, match="was trained with another vae; name that one, or start anew"):
        Encoders(pipe, CPU).origin(tmp_path)
    pipe.text_encoder.final_layer_norm.bias.data.add_(1e-3)
    with pytest.raises(UserError, match="was trained with another text_encoder and vae; name that one"):
        Encoders(pipe, CPU).origin(tmp_path)


def test_a_worker_gets_no_models(pipe: Any) -> None:
    encoders = Encoders(pipe, CPU)
    sent = ForkingPickler.dumps(encoders)
    assert len(sent) < 40_000
    there = ForkingPickler.loads(sent)
    assert np.array_equal(there.tokenize("beta")["input_ids"], encoders.tokenize("beta")["input_ids"])
    assert there.latent_shape(16) == (4, 8, 8)


@pytest.mark.parametrize("kind", ["sd3", "flux"])
def test_pipelines_of_other_kinds_are_refused(request: pytest.FixtureRequest, kind: str) -> None:
    pipe = DiffusionPipeline.from_pretrained(request.getfixturevalue(f"tiny_{kind}"))
    with pytest.raises(UserError, match="cannot be fine-tuned here: training is for pipelines with a UNet2DCond"):
        Encoders(pipe, CPU)


@pytest.mark.parametrize(
    ("name", "value"), [("in_channels", 9), ("time_cond_proj_dim", 256), ("cross_attention_dim", 7)]
)
def test_a_unet_that_is_told_something_else_is_refused(pipe: Any, name: str, value: int) -> None:
    pipe.unet.register_to_config(**{name: value})
    with pytest.raises(UserError, match=f"its UNet's {name} is {value}, and would have to be"):
        Encoders(pipe, CPU)
