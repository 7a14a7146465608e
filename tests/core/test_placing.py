"""A pipeline that is ready to draw: what stands for its models, what is left afterwards, and compiled models.

What is a Gaudi's own is tested on the simulated one: `tests/hpu_simulator/on_device/test_core_pipelines.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, UNet2DConditionModel

from core.device import Device
from core.dropout import SHORT
from core.pipelines import load_pipeline, save_pipeline, set_scheduler
from core.placing import attend_to_few, place, ready
from tests.core.test_pipelines import arguments, folder_of, images

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))


def prepared(folder: Path, *flags: str, device: Device = CPU, **own: Any) -> tuple[Any, Any]:
    args = arguments(folder, "--scheduler", "default", *flags, **own)  # a later one wins
    pipe = load_pipeline(args)
    set_scheduler(pipe, args)
    place(pipe, args, device)
    return pipe, args


@pytest.mark.parametrize("kind", ["sd", "sdxl", "sd3", "flux"])
@pytest.mark.parametrize("flags", [(), ("--attn_implementation", "eager")], ids=["own", "eager"])
def test_it_draws_what_an_unchanged_pipeline_draws(
    request: pytest.FixtureRequest, kind: str, flags: tuple, caplog: pytest.LogCaptureFixture
) -> None:
    folder = folder_of(request, kind)
    pipe, args = prepared(folder, *flags)
    expected = images(DiffusionPipeline.from_pretrained(folder))
    with ready(pipe, args, CPU):
        np.testing.assert_allclose(images(pipe), expected, atol=0 if not flags else 1e-4)
    if kind in ("sd", "sdxl"):
        kinds = {type(processor).__name__ for processor in pipe.unet.attn_processors.values()}
        assert kinds == {"AttnProcessor" if flags else "AttnProcessor2_0"}
    assert ("does not have it; sdpa is used" in caplog.text) == (bool(flags) and kind in ("sd3", "flux"))


@pytest.mark.parametrize("keys", [9, 24])
@pytest.mark.parametrize("how", ["bf16", "autocast"])
def test_few_tokens_are_attended_to_as_torch_does(how: str, keys: int) -> None:
    """Forth and back, within what bf16 rounds."""
    draw, found = torch.Generator().manual_seed(0), []
    shapes = [(2, 4, length, 8) for length in (24, keys, keys)]
    drawn = [torch.randn(shape, generator=draw).bfloat16() for shape in shapes]
    inputs = [each.float().requires_grad_() for each in drawn]
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs, scale=0.3).transpose(1, 2)
    found = [each.clone().to(torch.bfloat16 if how == "bf16" else torch.float32).requires_grad_() for each in drawn]
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=how == "autocast"):
        out, _ = attend_to_few(None, *found, scale=0.3)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=0.02, atol=0.02)
    weights = torch.randn(expected.shape, generator=draw)
    (expected * weights).sum().backward()
    (out.float() * weights).sum().backward()
    for mine, theirs in zip(found, inputs, strict=True):
        torch.testing.assert_close(mine.grad.float(), theirs.grad, rtol=0.03, atol=0.03)


@pytest.mark.parametrize("case", ["fp32", "mask", "many", "causal", "groups"])
def test_all_other_attention_is_torchs(case: str) -> None:
    length, heads = (513 if case == "many" else 8), (2 if case == "groups" else 4)
    assert (length**2 > SHORT) == (case == "many")
    dtype = torch.float32 if case == "fp32" else torch.bfloat16
    query, key, value = (torch.randn(1, number, length, 8, dtype=dtype) for number in (4, heads, heads))
    mask = torch.ones(length, length, dtype=torch.bool).tril() if case == "mask" else None
    found, _ = attend_to_few(None, query, key, value, mask, 0.0, None, case == "causal")
    options = {"attn_mask": mask, "is_causal": case == "causal", "enable_gqa": case == "groups"}
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, **options)
    assert torch.equal(found, expected.transpose(1, 2))


def test_a_cpu_has_the_shorter_way_unless_another_is_asked_for(tiny_sd: Path) -> None:
    for flags in ((), ("--attn_implementation", "sdpa"), ("--attn_implementation", "eager")):
        pipe, _ = prepared(tiny_sd, *flags)
        ways = {getattr(each, "attend", None) for each in pipe.unet.attn_processors.values()}
        assert ways == {None if flags else attend_to_few}


def test_nothing_but_a_trained_denoiser_has_gradients(tiny_sd: Path) -> None:
    """Also after adapters were merged into it."""
    for trains in (True, False):
        pipe, args = prepared(tiny_sd, do_train=trains)
        pipe.unet.requires_grad_(False)
        place(pipe, args, CPU)
        for name, part in pipe.components.items():
            if isinstance(part, torch.nn.Module):
                assert {parameter.requires_grad for parameter in part.parameters()} == {trains and name == "unet"}
                assert not part.training


def test_models_are_themselves_again(tiny_sd: Path, tmp_path: Path) -> None:
    pipe, args = prepared(tiny_sd)
    unet, before = pipe.unet.train(), dict(pipe.config)
    forward = unet.forward
    with ready(pipe, args, CPU):
        assert pipe.unet is not unet
        assert isinstance(pipe.unet, UNet2DConditionModel)
        assert pipe.unet.config is unet.config
        assert not unet.training
        assert unet.forward == forward
        assert dict(pipe.config) == before
    assert pipe.unet is unet
    with pytest.raises(ZeroDivisionError), ready(pipe, args, CPU):
        _ = 1 / 0
    assert pipe.unet is unet
    assert unet.training
    save_pipeline(pipe, tmp_path, leave_out=())
    DiffusionPipeline.from_pretrained(tmp_path)


def test_what_a_model_returns_under_autocast_has_its_own_dtype(tiny_sd: Path) -> None:
    pipe, args = prepared(tiny_sd)
    inputs = {"encoder_hidden_states": torch.ones(1, 16, 16), "return_dict": False}
    with torch.no_grad(), ready(pipe, args, CPU), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = pipe.unet._model(torch.ones(1, 4, 8, 8), 1, **inputs)[0]
        found = pipe.unet(torch.ones(1, 4, 8, 8), 1, **inputs)[0]
    assert (inside.dtype, found.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found, inside.float())


def test_compiled_models_draw_the_same(tiny_flux: Path) -> None:
    device = Device("cpu", "cpu", "compile", torch.device("cpu"))
    pipe, args = prepared(tiny_flux, "--torch_compile_backend", "eager", device=device)
    with ready(pipe, args, device):
        found = images(pipe)
        assert pipe.transformer._compiled_call_impl is not None
    np.testing.assert_allclose(found, images(DiffusionPipeline.from_pretrained(tiny_flux)), atol=1e-5)
