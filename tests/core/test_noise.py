"""Noise against diffusers' own scheduler, min-SNR against its helper, draws by their statistics and their order."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.training_utils import compute_snr
from torch.nn import functional

from core.arguments import parse_arguments
from core.errors import UserError
from core.noise import Noise, NoiseArguments, scheduler_changes
from tests.hpu_simulator import simulator

# Of published pipelines: https://huggingface.co/stable-diffusion-v1-5/stable-diffusion-v1-5, scheduler_config.json.
PUBLISHED = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear", "num_train_timesteps": 1000}
SHAPE = (4, 6, 5)
PREDICTIONS = ["epsilon", "v_prediction", "sample"]
ZERO_SNR = {"use_zero_snr": True, "prediction_type": "v_prediction"}


def given(**changed: Any) -> Namespace:
    """The flags as the command line gives them."""
    words = [f"--{name}={value}" for name, value in changed.items()]
    return parse_arguments(["--do_train", *words], NoiseArguments, description="")


def peer(**changed: Any) -> diffusers.DDPMScheduler:
    return diffusers.DDPMScheduler(**PUBLISHED, **changed)


def made(config: dict[str, Any] | None = None, **changed: Any) -> Noise:
    return Noise(config or peer().config, given(**changed))


def batch(rows: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Latents, noise and timesteps, the first and the last among them."""
    generator = torch.Generator().manual_seed(0)
    latents, noise = (torch.randn(rows, *SHAPE, generator=generator) for _ in range(2))
    return latents, noise, torch.cat([torch.tensor([0, 999]), torch.randint(1000, (rows - 2,), generator=generator)])


def draw(noise: Noise, seed: int = 3) -> dict[str, Any]:
    return noise.draw(SHAPE, np.random.default_rng(seed))


def timesteps(noise: Noise, count: int = 20_000) -> np.ndarray:
    rng = np.random.default_rng(1)
    return np.array([noise.draw((1, 1, 1), rng)["timesteps"] for _ in range(count)])


# --- Adding noise -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_snr", [False, True])
def test_noise_is_added_as_the_scheduler_does(zero_snr: bool) -> None:
    flags = ZERO_SNR if zero_snr else {}
    found = made(**flags).add(*batch())
    assert torch.equal(found, peer(rescale_betas_zero_snr=zero_snr).add_noise(*batch()))
    last = torch.equal(found[1], batch()[1][1])
    assert last == zero_snr, "then the last timestep is nothing but noise"


def test_noise_is_added_in_fp32() -> None:
    latents, noise, at = batch()
    with torch.autocast("cpu", torch.bfloat16):
        found = made().add(latents.bfloat16(), noise, at)
    assert found.dtype == torch.float32
    assert torch.equal(found, peer().add_noise(latents.bfloat16().float(), noise, at))


# Some of them list in their config what was not given, and their defaults differ from one to the next.
OTHERS = [
    "DDIMScheduler", "DPMSolverMultistepScheduler", "EulerAncestralDiscreteScheduler", "EulerDiscreteScheduler",
    "HeunDiscreteScheduler", "LCMScheduler", "LMSDiscreteScheduler", "PNDMScheduler", "TCDScheduler",
    "UniPCMultistepScheduler",
]  # fmt: skip


@pytest.mark.parametrize("betas", [{}, PUBLISHED], ids=["its own", "published"])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in diffusers, with numpy 2
def test_any_schedulers_betas_are_taken(name: str, betas: dict[str, Any]) -> None:
    scheduler = getattr(diffusers, name)(**betas)
    latents, noise, at = batch()
    shares = scheduler.alphas_cumprod[at][:, None, None, None]
    expected = shares.sqrt() * latents + (1 - shares).sqrt() * noise
    torch.testing.assert_close(made(scheduler.config).add(latents, noise, at), expected)
    config = scheduler.config
    assert made(config, **ZERO_SNR).add(latents, noise, at)[1].equal(noise[1]), "whatever its config lists"


def test_trained_betas_decide_how_many_timesteps_there_are() -> None:
    noise = made(diffusers.DDPMScheduler(trained_betas=[0.1, 0.2, 0.3]).config)
    assert set(timesteps(noise, 50).tolist()) == {0, 1, 2}
    latents, added, _ = batch(1 + 2)
    share = 0.9 * 0.8 * 0.7
    found = noise.add(latents, added, torch.tensor([2, 2, 2]))
    torch.testing.assert_close(found, share**0.5 * latents + (1 - share) ** 0.5 * added)


# --- Loss -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_flag", [True, False])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_a_rows_loss_is_the_error_of_what_it_should_say(prediction: str, by_flag: bool) -> None:
    flags = {"prediction_type": prediction} if by_flag else {}
    noise = made(None if by_flag else peer(prediction_type=prediction).config, **flags)
    latents, added, at = batch()
    said = torch.randn(latents.shape, generator=torch.Generator().manual_seed(5)).requires_grad_()
    target = {"epsilon": added, "sample": latents, "v_prediction": peer().get_velocity(latents, added, at)}[prediction]
    found = noise.losses(said, latents, added, at)
    assert found.dtype == torch.float32
    assert noise.prediction_type == prediction
    expected = torch.stack([functional.mse_loss(*each) for each in zip(said, target, strict=True)])
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    (gradient,) = torch.autograd.grad(found.sum(), said)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.sum(), said)[0], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("gamma", [0.5, 5])
@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weights_are_those_of_diffusers(prediction: str, gamma: float) -> None:
    latents, added, _ = batch(2)
    at = torch.arange(1000)
    rows = [each[:1].expand(1000, -1, -1, -1) for each in (torch.zeros_like(latents), latents, added)]
    plain, weighted = (made(prediction_type=prediction, **more) for more in ({}, {"snr_gamma": gamma}))
    found = weighted.losses(*rows, at) / plain.losses(*rows, at)
    snr = compute_snr(peer(), at)
    over = {"epsilon": snr, "v_prediction": snr + 1, "sample": 1}[prediction]
    torch.testing.assert_close(found, snr.clamp(max=gamma) / over, rtol=1e-4, atol=0)


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_min_snr_at_an_snr_of_zero_is_no_nan(prediction: str, caplog: pytest.LogCaptureFixture) -> None:
    noise = made(use_zero_snr=True, prediction_type=prediction, snr_gamma=5)
    latents, added, at = batch()
    said = torch.zeros_like(latents).requires_grad_()
    found = noise.losses(said, latents, added, at)
    found.sum().backward()
    assert found.isfinite().all()
    assert said.grad.isfinite().all()
    assert found[1] == 0
    assert "--snr_gamma gives the last timestep no weight" in caplog.text


def test_the_loss_is_in_fp32_whatever_autocast_says() -> None:
    latents, added, at = batch()
    noise, said = made(prediction_type="v_prediction"), torch.randn_like(latents).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        found = noise.losses(said, latents, added, at)
    assert found.dtype == torch.float32
    assert torch.equal(found, noise.losses(said.float(), latents, added, at))


# --- Draws ------------------------------------------------------------------------------------------------------------


def test_what_is_drawn_has_the_declared_kinds() -> None:
    found = draw(made(noise_offset=0.1))
    assert {name: (value.dtype, value.shape) for name, value in found.items()} == {
        "posterior": (np.float32, SHAPE),
        "noise": (np.float32, SHAPE),
        "timesteps": (np.int64, ()),
    }


def test_draws_are_independent_and_standard_normal() -> None:
    found = made().draw((4, 64, 64), np.random.default_rng(0))
    for name in ("posterior", "noise"):
        assert abs(found[name].mean()) < 0.03
        assert abs(found[name].std() - 1) < 0.03
    assert abs((found["posterior"] * found["noise"]).mean()) < 0.03


def test_the_offset_is_one_number_per_channel() -> None:
    plain, offset, more = (draw(made(noise_offset=strength)) for strength in (0, 0.1, 0.2))
    added = offset["noise"] - plain["noise"]
    np.testing.assert_allclose(added, np.broadcast_to(added[:, :1, :1], SHAPE), atol=1e-6)
    np.testing.assert_allclose(more["noise"] - plain["noise"], 2 * added, atol=1e-6)
    levels = [made(noise_offset=0.1).draw((1000, 1, 1), np.random.default_rng(seed)) for seed in range(4)]
    plain = [made().draw((1000, 1, 1), np.random.default_rng(seed)) for seed in range(4)]
    spread = np.concatenate([a["noise"] - b["noise"] for a, b in zip(levels, plain, strict=True)]).std()
    assert spread == pytest.approx(0.1, rel=0.05)


BIASED = {"timestep_bias_strategy": "later", "timestep_bias_multiplier": 9.0}


@pytest.mark.parametrize("flags", [{}, {"noise_offset": 0.1}, {"snr_gamma": 5}, ZERO_SNR, BIASED], ids=str)
def test_a_flag_moves_no_other_draw(flags: dict[str, Any]) -> None:
    """Nor what the row's generator gives afterwards."""
    generators = [np.random.default_rng(7) for _ in range(2)]
    plain, found = (made(**each).draw(SHAPE, rng) for each, rng in zip(({}, flags), generators, strict=True))
    same = {name for name in plain if np.array_equal(plain[name], found[name])}
    assert same >= {"posterior", "noise", "timesteps"} - ({"noise"} if "noise_offset" in flags else set()) - (
        {"timesteps"} if flags == BIASED else set()
    )
    assert generators[0].random() == generators[1].random()


def test_timesteps_do_not_depend_on_the_size() -> None:
    small, large = (made().draw(shape, np.random.default_rng(2)) for shape in ((4, 2, 2), (4, 32, 32)))
    assert small["timesteps"] == large["timesteps"]


def test_timesteps_are_drawn_evenly() -> None:
    found = timesteps(made())
    assert found.min() == 0
    assert found.max() == 999
    counts = np.bincount(found // 100, minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 2000).max() < 200


@pytest.mark.parametrize(
    ("flags", "begin", "end"),
    [
        ({"timestep_bias_strategy": "earlier"}, 0, 250),
        ({"timestep_bias_strategy": "later", "timestep_bias_portion": 0.1}, 900, 1000),
        ({"timestep_bias_strategy": "range", "timestep_bias_begin": 300, "timestep_bias_end": 350}, 300, 350),
        ({"timestep_bias_strategy": "range", "timestep_bias_begin": 0}, 0, 1000),
    ],
    ids=["earlier", "later", "range", "all"],
)
@pytest.mark.parametrize("multiplier", [6.0, 0.25])
def test_a_bias_draws_some_timesteps_more_often(flags: dict, begin: int, end: int, multiplier: float) -> None:
    found = timesteps(made(timestep_bias_multiplier=multiplier, **flags), 5000)
    inside = (found >= begin) & (found < end)
    weight = multiplier * (end - begin)
    assert inside.mean() == pytest.approx(weight / (weight + 1000 - (end - begin)), abs=0.015)
    assert {begin, end - 1} <= set(timesteps(made(timestep_bias_multiplier=1e9, **flags), 10_000).tolist())


# --- Flags ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"snr_gamma": 0}, "--snr_gamma must be above 0, not 0.0"),
        ({**BIASED, "timestep_bias_multiplier": 0}, "--timestep_bias_multiplier must be above 0"),
        ({**BIASED, "timestep_bias_portion": 1.1}, "--timestep_bias_portion must be at most 1"),
        ({**BIASED, "timestep_bias_portion": 0.0009}, "at least one of 1000 timesteps, not 0.0009"),
        ({"timestep_bias_strategy": "range", "timestep_bias_end": 1001}, "0 <= begin < end <= 1000"),
        ({"timestep_bias_strategy": "range", "timestep_bias_begin": 7, "timestep_bias_end": 7}, "begin 7 and"),
        ({"timestep_bias_begin": -1}, "--timestep_bias_begin must be at least 0"),
        ({"use_zero_snr": True}, "give --prediction_type v_prediction or sample"),
    ],
    ids=lambda value: " ".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_flags_that_cannot_work_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(**flags)


def test_all_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(UserError) as error:
        made(snr_gamma=0, use_zero_snr=True, **{**BIASED, "timestep_bias_portion": 0, "timestep_bias_multiplier": 0})
    assert str(error.value).count(";") == 4  # one of them within a message


WITHOUT = [
    diffusers.FlowMatchEulerDiscreteScheduler().config,
    diffusers.EDMEulerScheduler().config,
    diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True).config,
]
CONFIGS = [
    ({**PUBLISHED, "beta_schedule": "steep"}, "scheduler cannot be used for training: steep is not implemented"),
    ({**PUBLISHED, "beta_end": "high"}, "scheduler cannot be used for training"),
    ({"trained_betas": [0.1, 1.5]}, "scheduler has impossible betas"),
    ({**PUBLISHED, "beta_end": float("nan")}, "scheduler has impossible betas"),
    ({**PUBLISHED, "prediction_type": "flow_prediction"}, "prediction_type 'flow_prediction' is not trained here"),
    ({**PUBLISHED, "rescale_betas_zero_snr": True}, "or the scheduler's own"),
]


@pytest.mark.parametrize(
    ("config", "message"), [*((config, "scheduler has no betas") for config in WITHOUT), *CONFIGS], ids=lambda _: ""
)
def test_a_scheduler_that_cannot_be_trained_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        made(config)


def test_flags_of_another_strategy_are_said_to_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    made(timestep_bias_portion=0.5, timestep_bias_strategy="range")
    made(timestep_bias_multiplier=2)
    made(**BIASED)
    assert [record.getMessage() for record in caplog.records] == [
        "--timestep_bias_portion has no effect here: --timestep_bias_strategy is range",
        "--timestep_bias_multiplier has no effect here: --timestep_bias_strategy is none",
    ]


def test_the_scheduler_is_changed_by_what_is_given() -> None:
    assert scheduler_changes(given()) == {}
    changes = scheduler_changes(given(**ZERO_SNR))
    assert changes == {
        "prediction_type": "v_prediction",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    scheduler = diffusers.DDIMScheduler.from_config(diffusers.DDIMScheduler(**PUBLISHED).config, **changes)
    assert scheduler.alphas_cumprod[-1] == 0
    scheduler.set_timesteps(4)
    assert scheduler.timesteps[0] == 999
    own = peer().config
    before = dict(own)
    made(own, **ZERO_SNR)
    assert own == before


# --- On the device ----------------------------------------------------------------------------------------------------

ON_DEVICE = """
import json
import habana_frameworks.torch.core as htcore
import torch
from argparse import Namespace
from core.noise import Noise, NoiseArguments
from hpu_simulator import runtime

config = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
noise = Noise(config, Namespace(**vars(NoiseArguments(prediction_type="v_prediction", snr_gamma=5))))
torch.manual_seed(0)
batches = [(torch.randn(3, 4, 6, 5), torch.randn(3, 4, 6, 5), torch.randint(1000, (3,))) for _ in range(4)]
found = {}
for kind in ("cpu", "hpu"):
    noise.place(torch.device(kind))
    kept, counted = [], []
    for latents, added, at in ([each.to(kind) for each in batch] for batch in batches):
        said = (latents / 2).requires_grad_()
        with torch.autocast(kind, torch.bfloat16):
            noisy = noise.add(latents, added, at)
            losses = noise.losses(said, latents, added, at)
        losses.sum().backward()
        kept += [losses.detach(), noisy.flatten(), said.grad.flatten()]
        htcore.mark_step()
        seen = runtime.snapshot()
        counted.append([len(seen["graphs"]), len(seen["syncs"])])
    found[kind] = {"numbers": torch.cat(kept).tolist(), "counted": counted}
print(json.dumps(found))
"""


@pytest.mark.compiles
def test_on_a_card_it_is_the_same_in_one_graph_without_a_wait(tmp_path: Path) -> None:
    (low := tmp_path / "low.txt").write_text("mul\nadd\nsub\nmean\nsquare\npow\nsqrt\nindex_select\n")
    lists = {"PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": str(low)}
    output, report = simulator.rehearse(tmp_path, ON_DEVICE, **lists)
    found = json.loads(output.splitlines()[0])
    assert found["hpu"]["numbers"] == pytest.approx(found["cpu"]["numbers"], rel=1e-5, abs=1e-6)
    graphs, syncs = zip(*found["hpu"]["counted"], strict=True)
    assert graphs[0] == graphs[-1] > 0
    assert syncs[0] == syncs[-1]
    assert report["graphs"]
