"""Averages against diffusers' own, bit for bit; what they survive; files that are not theirs."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file
from torch import nn

from core import adapters
from core.ema import FILE, Ema
from core.errors import UserError
from tests.hpu_simulator import simulator

DTYPES = [torch.float32, torch.bfloat16]


def build(dtype: torch.dtype = torch.float32, width: int = 5) -> nn.Module:
    """Two layers with one tied weight, a frozen one, and a buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.Linear(width, width), nn.Linear(width, 2))
    model[2].weight = model[0].weight
    model[3].requires_grad_(False)
    return model.to(dtype)


def move(model: nn.Module, step: int) -> None:
    """What an optimiser step would do, the same for the same number."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn(parameter.shape, generator=generator).to(parameter.dtype) / 10


def train(model: nn.Module, ema: Ema, steps: range) -> None:
    for step in steps:
        move(model, step)
        ema.step()


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


# --- Averages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.3, 0.9999])
def test_averages_are_those_of_diffusers(decay: float) -> None:
    model, other = build(), build()
    ema, peer = Ema(model, decay), EMAModel(trained(other).values(), decay=decay)
    for step in range(12):
        train(model, ema, range(step, step + 1))
        move(other, step)
        peer.step(trained(other).values())
        assert same(ema.weights(), dict(zip(trained(other), peer.shadow_params, strict=True)))


def test_averages_are_those_of_a_plain_loop() -> None:
    model = build()
    ema = Ema(model, 0.5)
    expected = {name: parameter.detach().double() for name, parameter in trained(model).items()}
    assert same(ema.weights(), trained(model))
    for number in range(1, 20):
        move(model, number)
        ema.step()
        decay = 0.0 if number == 1 else min(0.5, number / (number + 9))
        for name, parameter in trained(model).items():
            expected[name] = decay * expected[name] + (1 - decay) * parameter.detach().double()
            torch.testing.assert_close(ema.weights()[name].double(), expected[name], rtol=1e-5, atol=1e-6)


def test_of_low_precision_weights_there_are_averages_in_fp32() -> None:
    model = build(torch.bfloat16)
    ema = Ema(model, 0.999)
    train(model, ema, range(1))
    before = {name: average.clone() for name, average in ema.weights().items()}
    for parameter in trained(model).values():
        parameter.data += parameter.data * 2**-7  # one unit in the last place, or two
    for _ in range(4):
        ema._average.optimization_step = 10**6  # warm
        ema.step()
    for name, average in ema.weights().items():
        assert average.dtype == torch.float32
        share = 1 - 0.999**4
        torch.testing.assert_close(
            average, before[name].lerp(trained(model)[name].float(), share), rtol=1e-6, atol=1e-6
        )
        assert not torch.equal(average, before[name]), "in bf16 it would stay where it is"


def test_only_what_is_trained_is_averaged() -> None:
    model = build()
    ema = Ema(model, 0.9)
    assert list(ema.weights()) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.bias"]
    train(model, ema, range(2))
    assert not any(average.requires_grad for average in ema.weights().values())
    assert all(average.data_ptr() != trained(model)[name].data_ptr() for name, average in ema.weights().items())


def test_adapters_are_averaged_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    adapters.add_lora(model, 2, 4, 0.0, ["0"], seed=0)
    ema = Ema(model, 0.9)
    assert sorted(ema.weights()) == sorted(adapters.names(model))
    before, inputs = state(model), torch.ones(1, 6)
    train(model, ema, range(3))
    own = model(inputs)
    with ema.applied():
        averaged = model(inputs)
        base = {name: tensor for name, tensor in model.state_dict().items() if "lora" not in name}
        assert all(torch.equal(before[name], tensor) for name, tensor in base.items())
    assert not torch.equal(own, averaged)
    assert torch.equal(own, model(inputs))


# --- In the model -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_model_has_the_averages_for_a_block(dtype: torch.dtype) -> None:
    model = build(dtype)
    ema = Ema(model, 0.9)
    train(model, ema, range(5))
    own, averages = state(model), {name: average.clone() for name, average in ema.weights().items()}
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    with ema.applied():
        inside = state(model)
        assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places
    assert all(torch.equal(inside[name], average.to(dtype)) for name, average in averages.items())
    assert all(torch.equal(inside[name], own[name]) for name in own.keys() - averages.keys() - {"2.weight"})
    assert same(state(model), own)
    assert same(ema.weights(), averages)


def test_its_own_weights_come_back_after_an_error() -> None:
    model = build()
    ema = Ema(model, 0.9)
    train(model, ema, range(5))
    own = state(model)
    with pytest.raises(KeyboardInterrupt), ema.applied():
        raise KeyboardInterrupt
    assert same(state(model), own)


# --- Files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stop", [0, 1, 4])
def test_a_resumed_run_has_the_same_averages(tmp_path: Path, stop: int, dtype: torch.dtype) -> None:
    whole = build(dtype)
    expected = Ema(whole, 0.6)
    train(whole, expected, range(9))
    first = build(dtype)
    ema = Ema(first, 0.6)
    train(first, ema, range(stop))
    ema.save_pretrained(tmp_path)
    again = build(dtype)
    again.load_state_dict(state(first))
    move(again, 100)  # averages begin elsewhere
    ema = Ema(again, 0.6)
    again.load_state_dict(state(first))
    ema.load(tmp_path)
    train(again, ema, range(stop, 9))
    assert same(ema.weights(), expected.weights())
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_the_file_has_averages_by_name_in_fp32(tmp_path: Path) -> None:
    model = build(torch.bfloat16)
    ema = Ema(model, 0.9)
    train(model, ema, range(3))
    ema.save_pretrained(tmp_path)
    found = load_file(tmp_path / FILE)
    assert int(found.pop("/steps")) == 3
    assert same(found, ema.weights())
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}


def test_files_of_others_are_refused(tmp_path: Path) -> None:
    model = build()
    ema = Ema(model, 0.9)
    with pytest.raises(UserError, match=r"has no ema.safetensors: the checkpoint was made without --use_ema"):
        ema.load(tmp_path)
    ema.save_pretrained(tmp_path)
    whole = load_file(path := tmp_path / FILE)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"ema.safetensors cannot be read"):
        ema.load(tmp_path)
    for changed in (
        {name: tensor for name, tensor in whole.items() if name != "0.bias"},
        {**whole, "other.bias": torch.zeros(2)},
        {name: tensor for name, tensor in whole.items() if name != "/steps"},
    ):
        save_file(changed, path)
        with pytest.raises(UserError, match=r"has other weights than those trained here \(\['(0.b|oth|/st)"):
            ema.load(tmp_path)
    save_file({**whole, "/steps": torch.tensor([1, 2])}, path)
    with pytest.raises(UserError, match=r"is of another model: /steps is \[2\] there, \[\] here"):
        ema.load(tmp_path)
    save_file(whole, path)
    with pytest.raises(UserError, match=r"0.weight is \[5, 5\] there, \[4, 4\] here"):
        Ema(build(width=4), 0.9).load(tmp_path)
    ema.load(tmp_path)


def test_a_checkpoint_with_averages_is_not_gone_on_with_without_them(tmp_path: Path) -> None:
    run = Namespace(model=build(), resume_from=None, args=Namespace(use_ema=False, ema_decay=0.9))
    assert Ema.of(run) is None
    run.resume_from = tmp_path
    assert Ema.of(run) is None
    Ema(run.model, 0.9).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has averages, ema.safetensors, which would be lost; give --use_ema"):
        Ema.of(run)
    run.args.use_ema = True
    assert Ema.of(run).weights().keys() == trained(run.model).keys()


# --- Refused ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_impossible_decays_are_refused(decay: float) -> None:
    with pytest.raises(UserError, match="the decay of the averaged weights is"):
        Ema(build(), decay)


def test_shared_out_parameters_are_refused() -> None:
    model = build()
    model[3].weight.ds_id = 0  # as ZeRO-3 marks them
    with pytest.raises(UserError, match="--use_ema needs whole parameters on each device, and ZeRO-3 shares them out"):
        Ema(model, 0.9)


# --- On the device ----------------------------------------------------------------------------------------------------

ON_DEVICE = """
import json
import habana_frameworks.torch.core as htcore
import torch
from core.ema import Ema
from hpu_simulator import runtime

found = {}
for kind in ("cpu", "hpu"):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8).to(kind)
    ema, counted = Ema(model, 0.99), []
    for step in range(5):
        with torch.no_grad():
            model.weight.mul_(1.1)
        htcore.mark_step()
        before = runtime.snapshot()
        ema.step()
        htcore.mark_step()
        seen = runtime.snapshot()
        counted.append([len(seen["graphs"]) - len(before["graphs"]), len(seen["syncs"]) - len(before["syncs"])])
    assert ema.weights()["weight"].device.type == kind
    own = model.weight.clone()
    with ema.applied():
        inside = model.weight.clone()
    assert torch.equal(model.weight, own)
    found[kind] = {"numbers": inside.flatten().tolist(), "counted": counted}
print(json.dumps(found))
"""


@pytest.mark.compiles
def test_on_a_card_it_is_the_same_in_one_graph_without_a_wait(tmp_path: Path) -> None:
    output, _ = simulator.rehearse(tmp_path, ON_DEVICE)
    found = json.loads(output.splitlines()[0])
    assert found["hpu"]["numbers"] == pytest.approx(found["cpu"]["numbers"], rel=1e-6, abs=1e-7)
    assert found["hpu"]["counted"] == [[1, 0]] + [[0, 0]] * 4
