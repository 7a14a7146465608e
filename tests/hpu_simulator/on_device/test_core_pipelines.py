"""Pipelines of diffusers on the simulated card: the CPU's images, fused attention, recorded graphs, and no waiting."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import ControlNetModel, DiffusionPipeline
from habana_frameworks.torch.hpex import kernels
from peft import LoraConfig
from transformers import AttentionInterface, AttentionMaskInterface

from core.attention import FUSED
from core.clip_score import clip_score
from core.device import LAZY_VARIABLE, Device, select_device
from core.drawing import adapt, draw
from core.encoders import Encoders
from core.pipelines import denoiser, save_pipeline, set_scheduler
from core.placing import place, ready
from core.run import Run
from hpu_simulator import runtime
from tests.core.drawings import distance, load, plan, run_of, save_clip
from tests.core.test_encoders import stacked
from tests.core.test_pipelines import arguments, folder_of, images
from tests.core.test_placing import CPU, prepared

LAZY = os.environ[LAZY_VARIABLE] == "1"
lazy_only = pytest.mark.skipif(not LAZY, reason="HPU graphs exist in lazy mode only")
KINDS = ("sd", "sdxl", "sd3", "flux")
GRAPHS = ["--use_hpu_graphs_for_inference"]
MODES = [pytest.param([], id="plain"), pytest.param(GRAPHS, id="graphs", marks=lazy_only)]
BEST = GRAPHS if LAZY else []
SMALL = ["--height", "16", "--width", "16", "--negative_prompts", "be"]
OPTIONS = {
    "ancestral": ["--scheduler", "euler_ancestral_discrete"],
    "eta": ["--scheduler", "ddim", "--eta", "1"],
    "ddpm": ["--scheduler", "ddpm"],
    "pndm": ["--scheduler", "pndm", "--num_inference_steps", "5"],
    "euler": ["--scheduler", "euler_discrete"],
    "dpmsolver": ["--scheduler", "dpmsolver_multistep"],
    "unipc": ["--scheduler", "unipc_multistep"],
    "freeu": ["--use_freeu"],
}


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    found = select_device(arguments(), "lazy" if LAZY else "eager")
    yield found
    found.synchronize()
    AttentionInterface._global_mapping.pop(FUSED, None)
    AttentionMaskInterface._global_mapping.pop(FUSED, None)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of every call of the kernel; made before `place`, which looks the kernel up."""
    made: list[tuple] = []

    class Watched:
        @staticmethod
        def apply(*given):
            made.append(given)
            return kernel.apply(*given)

    kernel = kernels.FusedSDPA
    monkeypatch.setattr(kernels, "FusedSDPA", Watched)
    return made


def waits() -> int:
    """How often the host has waited for the device so far."""
    return sum(sync["count"] for sync in runtime.snapshot()["syncs"])


def counted(model: torch.nn.Module) -> list[None]:
    """One entry for each time that Python runs the model."""
    runs: list[None] = []
    model.register_forward_hook(lambda *_: runs.append(None))
    return runs


def made(folder: Path, run: Run) -> Any:
    """A pipeline as the recipe makes it of the run's flags."""
    pipe = load(folder)
    adapt(pipe, run.args)
    set_scheduler(pipe, run.args)
    place(pipe, run.args, run.device)
    return pipe


def on_the_host(folder: Path, out: Path, *flags: str) -> list[np.ndarray]:
    run = run_of(out, *SMALL, "--use_cpu", *flags)
    return draw(run, made(folder, run), plan(run))[0]


@pytest.mark.parametrize("flags", MODES)
@pytest.mark.parametrize("kind", KINDS)
def test_it_draws_the_cpus_images_and_no_step_waits_for_the_host(
    request: pytest.FixtureRequest, calls: list, tmp_path: Path, kind: str, flags: list
) -> None:
    """As many waits in 7 steps as in 3, and in a batch as in the one before; and no batch but the first compiles."""
    folder, counts = folder_of(request, kind), {}
    run = run_of(tmp_path, *SMALL, *flags)
    pipe = made(folder, run)
    runs = counted(denoiser(pipe))
    found, metrics = draw(run, pipe, plan(run))
    assert distance(found, on_the_host(folder, tmp_path / "host")) <= 1
    assert (run.device.kind, run.device.mode, pipe.device.type) == ("hpu", "lazy" if LAZY else "eager", "hpu")
    assert metrics["generate_images"] == 3
    assert calls[0][0].device.type == "hpu"
    assert len(runs) == (1 if flags else 9)
    compiled = runtime.graph_compilations()
    for steps, drawn in ((3, 1), (3, 3), (7, 3)):
        run.args.num_inference_steps, before = steps, waits()
        draw(run, pipe, plan(run)[:drawn])
        counts[steps, drawn] = waits() - before
    assert runtime.graph_compilations() == compiled
    assert counts[3, 3] == counts[7, 3] == 3 * counts[3, 1]


@pytest.mark.parametrize("name", OPTIONS)
def test_so_do_schedulers_and_options(tiny_sd: Path, tmp_path: Path, name: str) -> None:
    """With UniPC a step waits: it solves two equations on the device."""
    flags, waited = OPTIONS[name], []
    run = run_of(tmp_path, *SMALL, "--batch_size", "3", *flags)
    pipe = made(tiny_sd, run)
    found, _ = draw(run, pipe, plan(run))
    assert distance(found, on_the_host(tiny_sd, tmp_path / "host", "--batch_size", "3", *flags)) <= 1
    for steps in (5, 7):
        run.args.num_inference_steps, before = steps, waits()
        draw(run, pipe, plan(run))
        waited.append(waits() - before)
    assert waited[1] - waited[0] == (2 if name == "unipc" else 0)


def test_bf16_changes_little(tiny_sd: Path, tmp_path: Path) -> None:
    run = run_of(tmp_path, *SMALL, "--bf16", *BEST)
    narrow, _ = draw(run, made(tiny_sd, run), plan(run))
    assert 0 < distance(narrow, on_the_host(tiny_sd, tmp_path / "host")) < 40


@lazy_only
def test_the_denoiser_is_one_graph(tiny_sd: Path, device: Device) -> None:
    """Not one with what comes before the first step, and another with the scheduler's."""
    pipe, args = prepared(tiny_sd, device=device)
    before = len(runtime.snapshot()["graphs"])
    with ready(pipe, args, device):
        images(pipe, 4, height=24, width=24)  # of a size that no other test has compiled
    new = runtime.snapshot()["graphs"][before:]
    assert len([graph for graph in new if graph["ops"] > 200]) == 1


@pytest.mark.parametrize("scheduler", ["pndm", "dpmsolver_multistep"])
@lazy_only
def test_outputs_that_a_scheduler_keeps_last(tiny_sd: Path, device: Device, scheduler: str) -> None:
    pipe, args = prepared(tiny_sd, "--scheduler", scheduler, *GRAPHS, device=device)
    plain, _ = prepared(tiny_sd, "--scheduler", scheduler)
    with ready(pipe, args, device):  # without guidance nothing copies them on the way
        found = images(pipe, 6, guidance_scale=1.0)
    np.testing.assert_allclose(found, images(plain, 6, guidance_scale=1.0), atol=2e-5)


def drawn(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@lazy_only
def test_a_replay_sees_every_input(tiny_sdxl: Path, device: Device) -> None:
    pipe, args = prepared(tiny_sdxl, *GRAPHS, device=device)
    plain, _ = prepared(tiny_sdxl)
    for each in (pipe, plain):
        torch.manual_seed(7)
        each.unet.add_adapter(LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False))
    pipe.unet.to(device.torch_device)
    inputs = {
        "sample": drawn((2, 4, 8, 8), 0),
        "timestep": torch.tensor(7.0),
        "encoder_hidden_states": drawn((2, 16, 40), 1),
        "added_cond_kwargs": {"text_embeds": drawn((2, 24), 2), "time_ids": drawn((2, 6), 3)},
        "down_block_additional_residuals": [
            drawn((2, size, side, side), 4) for size, side in ((8, 8), (8, 8), (8, 4), (16, 4))
        ],
        "mid_block_additional_residual": drawn((2, 16, 4, 4), 5),
        "cross_attention_kwargs": {"scale": 0.5},
    }
    changes: list[dict[str, Any]] = [
        {"sample": drawn((2, 4, 8, 8), 10)},
        {"timestep": torch.tensor(900.0)},
        {"encoder_hidden_states": drawn((2, 16, 40), 11)},
        {"added_cond_kwargs": {**inputs["added_cond_kwargs"], "text_embeds": drawn((2, 24), 12)}},
        {"added_cond_kwargs": {**inputs["added_cond_kwargs"], "time_ids": drawn((2, 6), 13)}},
        {"mid_block_additional_residual": drawn((2, 16, 4, 4), 14)},
        {"down_block_additional_residuals": [value + 1 for value in inputs["down_block_additional_residuals"]]},
        {"cross_attention_kwargs": {"scale": 3.0}},
        {},
    ]
    runs, seen = counted(pipe.unet), []
    with torch.no_grad(), ready(pipe, args, device):
        for change in [{}, *changes]:
            given = {**inputs, **change}
            found = pipe.unet(**device.move(given), return_dict=False)[0].cpu()
            torch.testing.assert_close(found, plain.unet(**given, return_dict=False)[0], rtol=1e-4, atol=1e-4)
            seen.append(found)
    assert len(runs) == 2  # another scale, which is no tensor, is another graph
    assert all(not torch.equal(seen[0], found) for found in seen[1:-1])
    assert torch.equal(seen[0], seen[-1])


def test_a_controlnet_draws_what_the_cpu_draws(tiny_sd: Path, tmp_path: Path, device: Device) -> None:
    torch.manual_seed(3)
    unet = DiffusionPipeline.from_pretrained(tiny_sd).unet
    control = ControlNetModel.from_unet(unet, conditioning_embedding_out_channels=(8, 8))
    for parameter in control.parameters():
        parameter.data += 0.02 * torch.randn(parameter.shape)
    control.save_pretrained(tmp_path)
    own = {"controlnet_model_name_or_path": str(tmp_path), "control_image": "given.png"}
    pipe, args = prepared(tiny_sd, *BEST, device=device, **own)
    plain, _ = prepared(tiny_sd, **own)
    runs = counted(pipe.controlnet)
    with ready(pipe, args, device):
        found = [images(pipe, image=drawn((2, 3, 16, 16), seed).sigmoid()) for seed in range(2)]
    expected = [images(plain, image=drawn((2, 3, 16, 16), seed).sigmoid()) for seed in range(2)]
    np.testing.assert_allclose(np.stack(found), np.stack(expected), atol=2e-5)
    assert not np.allclose(*found)
    assert len(runs) == (1 if LAZY else 8)


@pytest.mark.parametrize(
    ("given", "scheduler"),
    [(("base_image",), "euler_discrete"), (("base_image", "mask_image"), "ddim")],
    ids=["base", "mask"],
)
def test_given_images_are_drawn_on_as_on_the_cpu(tiny_sd: Path, device: Device, given: tuple, scheduler: str) -> None:
    own = dict.fromkeys(given, "given.png")
    pipe, args = prepared(tiny_sd, "--scheduler", scheduler, device=device, **own)
    plain, _ = prepared(tiny_sd, "--scheduler", scheduler, **own)
    inputs = {"image": drawn((2, 3, 16, 16), 0).sigmoid()}
    if "mask_image" in given:
        inputs["mask_image"] = (drawn((2, 1, 16, 16), 1) > 0).float()
    else:
        inputs |= {"height": None, "width": None}
    waited = []
    with ready(pipe, args, device):
        for steps in (4, 9, 4):
            before = waits()
            found = images(pipe, steps, **inputs)
            waited.append(waits() - before)
    np.testing.assert_allclose(found, images(plain, 4, **inputs), atol=5e-5)
    assert waited[0] == waited[1]


@pytest.mark.parametrize(("kind", "checkpointing"), [("sd", True), ("flux", False)])
def test_the_denoiser_learns_the_same(
    request: pytest.FixtureRequest, device: Device, calls: list, kind: str, checkpointing: bool
) -> None:
    gradients = []
    for each in (device, CPU):
        pipe, _ = prepared(folder_of(request, kind), device=each, do_train=True)
        model = denoiser(pipe).train()
        if checkpointing:
            model.enable_gradient_checkpointing()
        if kind == "sd":
            given = (drawn((2, 4, 8, 8), 0), torch.tensor([3, 500]), drawn((2, 16, 16), 1))
        else:
            ids = torch.zeros(16, 3)
            texts = (drawn((2, 16, 16), 1), drawn((2, 16), 2), torch.tensor([0.1, 0.9]), ids, ids, torch.ones(2))
            given = (drawn((2, 16, 16), 0), *texts)
        model(*each.move(given), return_dict=False)[0].square().mean().backward()
        gradients.append({name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None})
    layers = {"sd": 8, "flux": 2}[kind]
    assert len(calls) == (2 * layers if checkpointing else layers)
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", ["sd", "sdxl"])
def test_encoders(request: pytest.FixtureRequest, device: Device, kind: str) -> None:
    pipe, plain = (DiffusionPipeline.from_pretrained(folder_of(request, kind)) for _ in range(2))
    on_card, on_host = Encoders(pipe, device), Encoders(plain, CPU)
    ids = stacked(on_host)
    pixels = torch.randint(0, 256, (2, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    there = device.move((ids, pixels))
    device.synchronize()
    before = waits()
    found, moments = on_card.embed(there[0]), on_card.moments(there[1])
    device.step_boundary()
    assert waits() == before
    for name, expected in on_host.embed(ids).items():
        torch.testing.assert_close(found[name].cpu(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(moments.cpu(), on_host.moments(pixels), rtol=1e-4, atol=1e-5)
    assert on_card.fingerprint() == on_host.fingerprint()


def test_it_is_saved_from_the_device(tiny_sd: Path, tmp_path: Path, device: Device) -> None:
    variables = dict(os.environ)
    pipe, args = prepared(tiny_sd, device=device)
    place(pipe, args, device)  # twice is once
    assert dict(os.environ) == variables
    save_pipeline(pipe, tmp_path, leave_out=())
    again = DiffusionPipeline.from_pretrained(tmp_path)
    assert np.array_equal(images(again), images(DiffusionPipeline.from_pretrained(tiny_sd)))


def test_the_score_is_the_cpus(tmp_path: Path) -> None:
    folder = save_clip(tmp_path / "clip")
    found = list(np.random.default_rng(0).integers(0, 256, (5, 16, 16, 3), np.uint8))
    run = run_of(tmp_path / "run")
    scores = [clip_score(str(folder), found, [*"abcde"], run.args, device) for device in (run.device, CPU)]
    assert scores[0] == pytest.approx(scores[1], abs=1e-4)
