"""The small autoencoder: the same model from the same seed, latents of one size, and nobody else's draws."""

from __future__ import annotations

import json
import math
from argparse import Namespace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn import functional

from core.autoencoder import _endless_rows, _rate, learn_pictures, train_autoencoder
from core.device import Device
from core.digits import enlarge, handwritten_digits, png
from core.errors import UserError
from core.pictures import Pictures
from tests.hpu_simulator import simulator

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))
ARGS = Namespace(resolution=None, autoencoder_steps=2, seed=3)


def build() -> Any:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    return AutoencoderKL(**blocks, block_out_channels=[8, 8], norm_num_groups=4, latent_channels=2, sample_size=16)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    digits = handwritten_digits()["validation"][0][:70]
    return torch.from_numpy(np.stack([enlarge(digit, 16) for digit in digits])).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def trained(images: torch.Tensor) -> tuple[Any, float]:
    model = build()
    return model, train_autoencoder(model, images, CPU, steps=40, batch_size=8, learning_rate=1e-2)


def same(one: Any, other: Any) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(left, right) for left, right in pairs)


def pixels_of(images: torch.Tensor) -> torch.Tensor:
    return images.float() / 127.5 - 1


@torch.no_grad()
def error_of(model: Any, images: torch.Tensor) -> float:
    return float(functional.mse_loss(model(pixels_of(images)).sample, pixels_of(images)))


def test_it_learns_to_restore_pictures_and_tells_how_well(trained, images) -> None:
    model, error = trained
    assert error == pytest.approx(error_of(model, images), rel=1e-5)
    assert error < 0.25 * float(pixels_of(images).var())  # of a plain grey picture
    assert error < 0.25 * error_of(build(), images)


def test_scaled_latents_have_a_standard_deviation_of_one(trained, images) -> None:
    model, _ = trained
    with torch.no_grad():
        posterior = model.encode(pixels_of(images)).latent_dist
        drawn = posterior.sample(torch.Generator().manual_seed(1)) * model.config.scaling_factor
    assert float(drawn.std()) == pytest.approx(1, abs=0.01)
    assert isinstance(model.config.scaling_factor, float)


def test_the_scaling_factor_is_saved_with_the_model(trained, tmp_path: Path) -> None:
    model, _ = trained
    model.save_pretrained(tmp_path)
    saved = type(model).from_pretrained(tmp_path)
    assert saved.config.scaling_factor == model.config.scaling_factor != 0.18215
    assert same(saved, model)


def test_it_is_left_for_use(trained) -> None:
    model, _ = trained
    assert not model.training
    assert all(parameter.grad is None for parameter in model.parameters())


def test_it_is_the_papers_loss_and_a_plain_loop(images) -> None:
    """With diffusers' own posterior, and a cosine written out: the same weights to the bit."""
    model, peer = build(), build()
    train_autoencoder(model, images, CPU, steps=4, batch_size=16, learning_rate=1e-2, seed=7, kl_weight=1e-2)
    optimizer = torch.optim.AdamW(peer.parameters(), lr=1e-2, weight_decay=0.01)
    generator = torch.Generator().manual_seed(7)
    rows = torch.randperm(70, generator=generator)
    for step, share in enumerate([1, 0.5 + 2**0.5 / 4, 0.5, 0.5 - 2**0.5 / 4]):
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 + math.cos(math.pi * step / 4)) / 2
        assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * share)
        pixels = pixels_of(images[rows[16 * step : 16 * step + 16]])
        posterior = peer.encode(pixels).latent_dist
        loss = functional.mse_loss(peer.decode(posterior.sample(generator)).sample, pixels)
        (loss + 1e-2 * posterior.kl().mean()).backward()
        torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert same(model, peer)


def test_the_rate_rises_and_falls() -> None:
    rates = [_rate(step, 40) for step in range(40)]
    assert rates[:4] == pytest.approx([0.25, 0.5, 0.75, 1], abs=0.02)
    assert sorted(rates[3:], reverse=True) == rates[3:]
    assert rates[20] == pytest.approx(0.5)
    assert 0 < rates[-1] < 0.01
    assert _rate(0, 1) == 1


def test_its_draws_are_its_own_and_of_the_seed(images) -> None:
    def train(seed: int, others: int) -> Any:
        model = build()
        torch.manual_seed(others)
        before = torch.get_rng_state()
        train_autoencoder(model, images[:20], CPU, 2, batch_size=4, seed=seed)
        assert torch.equal(torch.get_rng_state(), before)
        return model

    assert same(train(1, others=5), train(1, others=6))
    assert not same(train(1, others=5), train(2, others=5))


def test_each_picture_comes_once_before_any_comes_again() -> None:
    batches = list(islice(_endless_rows(10, 4, torch.Generator().manual_seed(0)), 5))
    assert [len(batch) for batch in batches] == [4] * 5  # one shape is one graph
    first, second = torch.cat(batches).split(10)
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(10))
    assert first.tolist() != second.tolist()


def test_a_batch_may_be_larger_than_all_pictures() -> None:
    (batch,) = islice(_endless_rows(3, 8, torch.Generator().manual_seed(0)), 1)
    assert sorted(batch.tolist()) in ([0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 1, 1, 2, 2, 2], [0, 0, 1, 1, 1, 2, 2, 2])


def of_files(rows: list[bytes], on_bad_image: str = "skip") -> Pictures:
    from datasets import Dataset

    args = dict.fromkeys(["train_file", "train_dir", "test_dir", "dataset_name"]) | {"on_bad_image": on_bad_image}
    files = [{"bytes": row, "path": f"{at}.png"} for at, row in enumerate(rows)]
    return Pictures(Dataset.from_dict({"image": files}), None, "train", Namespace(**args))


def test_pictures_of_any_size_are_learnt_and_unreadable_ones_left_out(capsys) -> None:
    pictures = [Image.fromarray(enlarge(digit, 24)) for digit in handwritten_digits()["validation"][0][:6]]
    wide = Image.new("RGB", (48, 24))
    wide.paste(pictures[0], (12, 0))
    files = [png(np.asarray(picture)) for picture in (wide, *pictures[1:])]
    model, peer = build(), build()
    learn_pictures(model, of_files([files[0], b"no picture", *files[1:]]), ARGS, CPU)
    assert "restores 6 images with a mean square error of 0." in capsys.readouterr().out
    small = [wide.resize((32, 16), 2).crop((8, 0, 24, 16)), *(picture.resize((16, 16), 2) for picture in pictures[1:])]
    train_autoencoder(peer, torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2).contiguous(), CPU, 2, seed=3)
    assert same(model, peer)
    assert model.config.scaling_factor == peer.config.scaling_factor


def test_pictures_that_cannot_be_read_are_one_line() -> None:
    with pytest.raises(UserError, match="of the first 2 images none can be read; mend them or name others"):
        learn_pictures(build(), of_files([b"no", b"picture"]), ARGS, CPU)


ON_DEVICE = """
import copy, json
import habana_frameworks.torch.core as htcore
import torch
from core.autoencoder import train_autoencoder
from core.device import Device
from hpu_simulator import runtime
from tests.core.test_autoencoder import CPU, build

images = torch.randint(256, (12, 3, 16, 16), generator=torch.Generator().manual_seed(3)).byte()
card = Device("hpu", "gaudi2", MODE, torch.device("hpu"), torch.hpu)
found = {"syncs": [], "graphs": []}


def counted():
    seen = runtime.snapshot()
    return sum(item["count"] for item in seen["syncs"]), len(seen["graphs"])


for device, runs in ((CPU, [4]), (card, [2, 4])):
    for steps in runs:
        model, before = build(), counted()
        error = train_autoencoder(model, images, device, steps, batch_size=4)
        found["syncs"].append(counted()[0] - before[0])
        found["graphs"].append(counted()[1] - before[1])
        found[device.kind] = [error, model.config.scaling_factor]
print(json.dumps(found))
"""


@pytest.mark.compiles
def test_on_a_card_it_is_the_same_and_no_step_waits_or_is_a_new_graph(tmp_path: Path) -> None:
    output, _ = simulator.rehearse(tmp_path, ON_DEVICE.replace("MODE", "'lazy'"), mode="lazy")
    found = json.loads(output.splitlines()[-1])
    assert found["hpu"] == pytest.approx(found["cpu"], rel=1e-4)
    assert found["syncs"] == [0, 2, 2]  # the scaling factor and the error, however many steps
    assert found["graphs"][2] == 0
