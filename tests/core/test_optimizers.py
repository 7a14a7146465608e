"""Optimisers against their formulas, schedules, clipping, and states that move between fused and plain kernels."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from transformers.optimization import Adafactor

from core import errors
from core.arguments import parse_arguments
from core.device import Device
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.optimizers import (
    Clipper,
    create_optimizer,
    create_schedule,
    family,
    load_named_state,
    named_state,
    parameter_groups,
    parse_optim_args,
    update,
)
from tests import fake_bridge

PLAIN, FUSED = GaudiConfig(), GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True)


@pytest.fixture(autouse=True)
def first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning was given yet."""
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def bridge(tmp_path) -> Iterator[ModuleType]:
    with fake_bridge.installed(tmp_path) as package:
        yield package


def gaudi() -> Device:
    """A Gaudi whose tensors stay on the CPU; only with the fixture `bridge`."""
    return Device("hpu", "gaudi2", "lazy", torch.device("cpu"), torch.hpu)


def cpu() -> Device:
    return Device("cpu", "cpu (test)", "eager", torch.device("cpu"))


def flags(*argv: str) -> Namespace:
    return parse_arguments(["--do_eval", *argv], description="test")


class Small(nn.Module):
    """Two decayed tensors, and of what has no decay: a bias and a norm."""

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(1)
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 2, bias=False)
        self.norm = nn.LayerNorm(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=draw))


def make(optim: str, model: nn.Module, *argv: str, config: GaudiConfig = PLAIN, device: Device | None = None):
    return create_optimizer(model, flags("--optim", optim, *argv), config, device or cpu())


def gradients(model: nn.Module, step: int, scale: float = 1.0, skip: tuple[str, ...] = ()) -> None:
    """Set gradients that depend on the step alone; parameters of ``skip`` have none."""
    draw = torch.Generator().manual_seed(1000 + step)
    for name, parameter in model.named_parameters():
        gradient = torch.randn(parameter.shape, generator=draw) * scale
        parameter.grad = None if name in skip else gradient


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, skip: tuple[str, ...] = ()) -> None:
    for step in steps:
        gradients(model, step, skip=skip)
        optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def names_of(model: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in model.named_parameters()}


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.allclose(tensor.double(), right[name].double(), rtol=tolerance, atol=tolerance), name


# ------------------------------------------------------------------------------------------------------------ formulas


def reference(
    model: nn.Module, steps: int, scale: float, rule: Callable[..., np.ndarray], decay: float
) -> dict[str, torch.Tensor]:
    """Run ``rule(weight, m, v, decay)`` in float64 over the steps of `gradients`; m, v: moments, bias-corrected."""
    undecayed = ("first.bias", "norm.weight", "norm.bias")
    start = weights(model)
    w = {name: tensor.double().numpy() for name, tensor in start.items()}
    m = {name: np.zeros_like(array) for name, array in w.items()}
    v = {name: np.zeros_like(array) for name, array in w.items()}
    shadow = Small()
    for t in range(1, steps + 1):
        gradients(shadow, t, scale)
        for name, parameter in shadow.named_parameters():
            g = parameter.grad.double().numpy()
            m[name] = 0.9 * m[name] + 0.1 * g
            v[name] = 0.999 * v[name] + 0.001 * g * g
            corrected = m[name] / (1 - 0.9**t), v[name] / (1 - 0.999**t)
            w[name] = rule(w[name], *corrected, 0.0 if name in undecayed else decay)
    return {name: torch.from_numpy(array) for name, array in w.items()}


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, scale: float) -> dict[str, torch.Tensor]:
    for t in range(1, steps + 1):
        gradients(model, t, scale)
        optimizer.step()
    return weights(model)


def lamb_rule(rate: float, epsilon: float) -> Callable[..., np.ndarray]:
    """You et al. 2020, algorithm 2, with phi the identity; no decay, no ratio."""

    def rule(w, m, v, decay):
        r = m / (np.sqrt(v) + epsilon) + decay * w
        norms = np.sqrt((w * w).sum()), np.sqrt((r * r).sum())
        ratio = norms[0] / norms[1] if decay and min(norms) > 0 else 1.0
        return w - rate * ratio * r

    return rule


def adam_rule(rate: float, epsilon: float) -> Callable[..., np.ndarray]:
    """Loshchilov and Hutter 2019: decay apart from the moments."""
    return lambda w, m, v, decay: w - rate * (m / (np.sqrt(v) + epsilon) + decay * w)


@pytest.mark.parametrize("kernel", ["plain", "torch's fused", "habana's fused"])
def test_adam_is_the_formula_at_epsilon_1e_6(kernel, bridge):
    scale = 1e-6  # gradients as small as epsilon: 1e-8, torch's default, would move the weights twice as far
    expected = reference(Small(), 50, scale, adam_rule(1e-3, 1e-6), decay=0.1)
    model, argv = Small(), ("--learning_rate", "1e-3", "--weight_decay", "0.1")
    config, device = (PLAIN if kernel == "plain" else FUSED), (gaudi() if kernel == "habana's fused" else cpu())
    optimizer = make("adamw_torch", model, *argv, config=config, device=device)
    got = run(model, optimizer, 50, scale)
    assert_close(got, expected, 2e-6)
    other = reference(Small(), 50, scale, adam_rule(1e-3, 1e-8), decay=0.1)
    assert (got["second.weight"].double() - other["second.weight"]).abs().max() > 1e-3


@pytest.mark.parametrize("argv", [("--optim", "adamw_torch_fused"), ("--optim", "adamw_torch")])
def test_torchs_fused_adam_is_the_plain_one(argv):
    plain, fused = Small(), Small()
    config = PLAIN if argv[1] == "adamw_torch_fused" else FUSED
    one = make("adamw_torch", plain, "--weight_decay", "0.1", "--learning_rate", "0.01")
    two = make(argv[1], fused, "--weight_decay", "0.1", "--learning_rate", "0.01", config=config)
    assert not one.param_groups[0]["fused"]
    assert two.param_groups[0]["fused"] is True
    assert_close(run(plain, one, 20, 1.0), run(fused, two, 20, 1.0), 1e-6)


def test_habanas_lamb_is_the_papers_and_does_not_clip(bridge):
    """By default that kernel clips at 1.0 itself; gradients of norm 30 would show it in the moments' epsilon."""
    expected = reference(Small(), 20, 10.0, lamb_rule(0.02, 5.0), decay=0.1)
    model = Small()
    argv = ("--learning_rate", "0.02", "--weight_decay", "0.1", "--adam_epsilon", "5", "--max_grad_norm", "0")
    optimizer = make("lamb", model, *argv, device=gaudi())
    assert type(optimizer).__name__ == "FusedLamb"
    assert_close(run(model, optimizer, 20, 10.0), expected, 1e-5)


# ------------------------------------------------------------------------------------------- what reaches the optimiser


OPTIONS = ("--adam_epsilon", "3e-5", "--adam_beta1", "0.8", "--adam_beta2", "0.95", "--weight_decay", "0.3")


@pytest.mark.parametrize("optim", ["adamw_torch", "adamw_torch_fused", "lamb"])
@pytest.mark.parametrize("on_gaudi", [False, True])
@pytest.mark.parametrize("config", [PLAIN, FUSED], ids=["plain", "fused"])
def test_epsilon_betas_and_decay_are_always_passed(bridge, optim, on_gaudi, config):
    device = gaudi() if on_gaudi else cpu()
    optimizer = make(optim, Small(), *OPTIONS, "--learning_rate", "0.7", config=config, device=device)
    for group in optimizer.param_groups:
        assert (group["lr"], group["eps"], group["betas"]) == (0.7, 3e-5, (0.8, 0.95))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    fused_adam = optim == "adamw_torch_fused" or (optim == "adamw_torch" and config is FUSED)
    expected = {"FusedLamb"} if optim == "lamb" else {"FusedAdamW"} if fused_adam else set()
    made = {name: options for name, options in bridge.calls if name.startswith("Fused")}
    assert set(made) == (expected if on_gaudi else set())
    for options in made.values():
        assert (options["eps"], options["betas"], options["lr"]) == (3e-5, (0.8, 0.95), 0.7)


def test_defaults_are_habanas():
    group = make("adamw_torch", Small()).param_groups[0]
    assert (group["eps"], group["weight_decay"], group["lr"]) == (1e-6, 0.0, 5e-5)


def test_rates_and_decay_of_the_others():
    argv = ("--learning_rate", "0.7", "--weight_decay", "0.3")
    for optimizer in (make("sgd", Small(), *argv), make("adafactor", Small(), *argv)):
        assert [group["lr"] for group in optimizer.param_groups] == [0.7, 0.7]
        assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.0]
    assert type(optimizer) is Adafactor
    assert not any(optimizer.defaults[name] for name in ("relative_step", "warmup_init", "scale_parameter"))


def test_optim_args_reach_the_optimiser(bridge):
    group = make("sgd", Small(), "--optim_args", "momentum=0.9, nesterov=True").param_groups[0]
    assert (group["momentum"], group["nesterov"]) == (0.9, True)
    assert make("adamw_torch", Small(), "--optim_args", "amsgrad=true").defaults["amsgrad"] is True
    group = make("adafactor", Small(), "--optim_args", "beta1=0.5,scale_parameter=True").param_groups[0]
    assert (group["beta1"], group["scale_parameter"]) == (0.5, True)


@pytest.mark.parametrize(
    ("optim", "text", "message"),
    [
        ("sgd", "momentun=0.9", "momentun=0.9.*did you mean 'momentum'"),
        ("sgd", "momentum", "write key=value"),
        ("sgd", "betas=0.9", "it has: momentum, nesterov, dampening"),
        ("adamw_torch", "amsgrd=True", "did you mean 'amsgrad'"),
        ("adamw_torch", "fused=True", "no such option"),
        ("adafactor", "decay=0.1", "did you mean 'decay_rate'"),
        ("lamb", "amsgrad=True", "no such option"),
        ("sgd", "nesterov=True", "Nesterov momentum requires a momentum"),
        ("sgd", "momentum=-1", "Invalid momentum"),
        ("sgd", "momentum=much", "--optim_args"),
        ("adamw_torch_fused", "foreach=True", "foreach"),
    ],
)
def test_optim_args_errors(optim, text, message):
    with pytest.raises(UserError, match=message) as error:
        make(optim, Small(), "--optim_args", text)
    assert str(error.value).startswith("--optim_args")


@pytest.mark.parametrize("optim", ["adamw_torch", "lamb"])
def test_optim_args_of_habanas_kernels(bridge, optim):
    with pytest.raises(UserError, match="no such option"):
        make(optim, Small(), "--optim_args", "amsgrad=True", config=FUSED, device=gaudi())


def test_parse_optim_args_values():
    known = ["a", "b", "c", "d", "e"]
    parsed = parse_optim_args(" a=1e-3, b=True,c=none,d=word,, e=-2", known)
    assert parsed == {"a": 1e-3, "b": True, "c": None, "d": "word", "e": -2.0}
    assert parse_optim_args(None, known) == parse_optim_args("", known) == {}


@pytest.mark.parametrize("argv", [("--optim", "adamw_torch_fused"), ()])
def test_fused_adam_gives_way_to_deepspeed(argv):
    made = create_optimizer(Small(), flags("--deepspeed", "zero1.json", *argv), PLAIN if argv else FUSED, cpu())
    assert type(made) is torch.optim.AdamW
    assert not made.defaults["fused"]


def test_fused_adam_beside_another_optimiser_is_said(caplog):
    make("sgd", Small(), config=FUSED)
    assert "use_fused_adam has no effect with --optim sgd" in caplog.text
    make("adamw_torch", Small(), config=FUSED)
    assert len(caplog.messages) == 1


# -------------------------------------------------------------------------------------------------------------- groups


def grouped(model: nn.Module) -> tuple[set[str], set[str]]:
    """Names of the parameters with decay, and of those without."""
    names, groups = names_of(model), parameter_groups(model, 0.1)
    members: dict[float, list[str]] = {0.1: [], 0.0: []}
    for group in groups:
        members[group["weight_decay"]] += [names[id(parameter)] for parameter in group["params"]]
    assert len(members[0.1] + members[0]) == len({*members[0.1], *members[0]})
    return set(members[0.1]), set(members[0])


def test_biases_and_norms_have_no_decay():
    class T5LayerNorm(nn.Module):  # no torch norm, as in transformers
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    class Renamed(nn.LayerNorm):
        pass

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.convolution = nn.Linear(4, 4), nn.Conv1d(4, 4, 1)
            self.norms = nn.ModuleList([nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4)])
            self.own, self.attention, self.recurrent = T5LayerNorm(), nn.MultiheadAttention(4, 2), nn.LSTM(4, 4)
            self.renamed = Renamed(4)
            self.scale = nn.Parameter(torch.ones(4))

    decayed, rest = grouped(Model())
    assert decayed == {
        "linear.weight", "convolution.weight", "attention.in_proj_weight", "attention.out_proj.weight",
        "recurrent.weight_ih_l0", "recurrent.weight_hh_l0", "scale",
    }  # fmt: skip
    assert {"attention.in_proj_bias", "recurrent.bias_hh_l0", "linear.bias"} <= rest
    assert {"own.weight", "renamed.weight", "norms.1.weight"} <= rest


def test_t5s_norms_position_biases_and_tied_parameters():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=2, num_heads=2)
    model = T5ForConditionalGeneration(config)
    decayed, rest = grouped(model)
    assert decayed | rest == {name for name, _ in model.named_parameters()}
    assert "shared.weight" in decayed
    assert "lm_head.weight" not in decayed | rest  # the same tensor, once
    assert len([name for name in rest if "layer_norm" in name]) == 2 * 2 + 2 * 3 + 2
    position = {name for name in rest if "layer_norm" not in name}
    assert position == {name for name, _ in model.named_parameters() if "relative_attention_bias" in name}
    assert len(position) == 2  # of encoder and decoder


@pytest.mark.parametrize("on_gaudi", [False, True])
@pytest.mark.parametrize("module", [nn.Linear(2, 2, bias=False), nn.LayerNorm(2)], ids=["weights only", "norms only"])
def test_no_group_is_empty(bridge, module, on_gaudi):
    (group,) = parameter_groups(module, 0.1)
    assert group["params"]
    assert group["weight_decay"] == (0.1 if isinstance(module, nn.Linear) else 0.0)
    make("adamw_torch", module, config=FUSED, device=gaudi() if on_gaudi else cpu())  # Habana's fails on an empty one


def test_frozen_parameters_are_left_out_and_all_frozen_is_an_error():
    model = Small()
    model.first.requires_grad_(False)
    assert grouped(model) == ({"second.weight"}, {"norm.weight", "norm.bias"})
    model.requires_grad_(False)
    for optim in ("adamw_torch", "lamb", "sgd", "adafactor"):
        with pytest.raises(UserError, match="no trainable parameter"):
            make(optim, model)


# -------------------------------------------------------------------------------------------------------------- states

ADAM, LAMB = ("--learning_rate", "0.05", "--weight_decay", "0.1"), ("--learning_rate", "0.05", "--weight_decay", "0.1")
ROUND_TRIPS = [
    ("adamw_torch", ADAM, PLAIN),
    ("adamw_torch", (*ADAM, "--optim_args", "amsgrad=True"), PLAIN),
    ("adamw_torch_fused", ADAM, PLAIN),
    ("lamb", LAMB, PLAIN),
    ("sgd", ("--learning_rate", "0.05", "--optim_args", "momentum=0.9"), PLAIN),
    ("sgd", ("--learning_rate", "0.05"), PLAIN),
    ("adafactor", ("--learning_rate", "0.05"), PLAIN),
    ("adafactor", ("--learning_rate", "0.05", "--optim_args", "beta1=0.9,scale_parameter=True"), PLAIN),
]


def transfer(model: nn.Module, optimizer: torch.optim.Optimizer, target: Callable[[nn.Module], torch.optim.Optimizer]):
    """A copy of the model with an optimiser of ``target`` that has this one's state, as a checkpoint would give it."""
    named = {name: tensor.clone() for name, tensor in named_state(optimizer, names_of(model)).items()}
    copy = Small()
    copy.load_state_dict(model.state_dict())
    other = target(copy)
    load_named_state(other, names_of(copy), named, family(optimizer))
    return copy, other


def kinds(state: dict) -> dict:
    """What each entry of a parameter's state is, as its optimiser keeps it."""
    return {key: (type(value), getattr(value, "dtype", None)) for key, value in state.items() if value is not None}


@pytest.mark.parametrize(("optim", "argv", "config"), ROUND_TRIPS)
def test_round_trips_are_exact(optim, argv, config):
    model = Small()
    optimizer = make(optim, model, *argv, config=config)
    train(model, optimizer, range(5))
    copy, other = transfer(model, optimizer, lambda m: make(optim, m, *argv, config=config))
    for one, two in zip(model.parameters(), copy.parameters(), strict=True):
        assert kinds(optimizer.state[one]) == kinds(other.state[two])
    for step in range(5, 8):
        train(model, optimizer, range(step, step + 1))
        train(copy, other, range(step, step + 1))
        for name, tensor in weights(model).items():
            assert torch.equal(tensor, weights(copy)[name]), (step, name)


@pytest.mark.parametrize("optim", ["adamw_torch", "lamb"])
def test_round_trips_of_habanas_kernels_are_exact(bridge, optim):
    model = Small()
    optimizer = make(optim, model, *ADAM, config=FUSED, device=gaudi())
    train(model, optimizer, range(5))
    copy, other = transfer(model, optimizer, lambda m: make(optim, m, *ADAM, config=FUSED, device=gaudi()))
    assert [group["step"] for group in other.param_groups] == [5, 5]
    train(model, optimizer, range(5, 8))
    train(copy, other, range(5, 8))
    assert all(torch.equal(tensor, weights(copy)[name]) for name, tensor in weights(model).items())


@pytest.mark.parametrize("optim", ["adamw_torch", "lamb"])
def test_plain_to_fused_to_plain_goes_on_as_if_nothing_had_been(bridge, optim):
    straight = Small()
    train(straight, make(optim, straight, *ADAM), range(9))
    model = Small()
    optimizer = make(optim, model, *ADAM)
    train(model, optimizer, range(3))
    model, optimizer = transfer(model, optimizer, lambda m: make(optim, m, *ADAM, config=FUSED, device=gaudi()))
    assert type(optimizer).__name__.startswith("Fused")
    assert [group["step"] for group in optimizer.param_groups] == [3, 3]
    assert all("step" not in state for state in optimizer.state.values())
    train(model, optimizer, range(3, 6))
    model, optimizer = transfer(model, optimizer, lambda m: make(optim, m, *ADAM))
    for state in optimizer.state.values():
        assert state["step"].dtype == torch.float32
        assert state["step"].item() == 6  # the count, and with it the bias correction, exactly
    train(model, optimizer, range(6, 9))
    assert_close(weights(model), weights(straight), 1e-6)


def test_the_first_step_after_resume_has_no_jump(bridge):
    """A count that started again at 0 would make Adam's next step of the first moment some ten times as long."""
    model = Small()
    optimizer = make("adamw_torch", model, *ADAM)
    train(model, optimizer, range(3))
    copy, fused = transfer(model, optimizer, lambda m: make("adamw_torch", m, *ADAM, config=FUSED, device=gaudi()))
    train(model, optimizer, range(3, 4))
    train(copy, fused, range(3, 4))
    assert_close(weights(model), weights(copy), 1e-6)


LATE = ("second.weight",)


def test_unequal_step_counts_are_refused(bridge):
    model = Small()
    optimizer = make("adamw_torch", model, *ADAM)
    train(model, optimizer, range(3), skip=LATE)
    train(model, optimizer, range(3, 5))
    with pytest.raises(UserError, match=r"\[2, 5\].*use_fused_adam"):
        transfer(model, optimizer, lambda m: make("adamw_torch", m, *ADAM, config=FUSED, device=gaudi()))


def test_freeze_then_unfreeze_keeps_each_parameters_count():
    model, straight = Small(), Small()
    optimizer, reference_one = make("adamw_torch", model, *ADAM), make("adamw_torch", straight, *ADAM)
    train(straight, reference_one, range(3), skip=LATE)
    train(straight, reference_one, range(3, 8))
    train(model, optimizer, range(3), skip=LATE)
    model, optimizer = transfer(model, optimizer, lambda m: make("adamw_torch", m, *ADAM))  # it has no state yet
    assert optimizer.state[model.second.weight] == {}
    train(model, optimizer, range(3, 5))
    model, optimizer = transfer(model, optimizer, lambda m: make("adamw_torch", m, *ADAM))
    assert optimizer.state[model.second.weight]["step"].item() == 2
    assert optimizer.state[model.first.weight]["step"].item() == 5
    train(model, optimizer, range(5, 8))
    assert all(torch.equal(tensor, weights(model)[name]) for name, tensor in weights(straight).items())


def test_habanas_kernel_counts_late_parameters_with_their_group(bridge):
    straight, model = Small(), Small()
    optimizers = [make("adamw_torch", m, *ADAM, config=FUSED, device=gaudi()) for m in (straight, model)]
    for m, optimizer in zip((straight, model), optimizers, strict=True):
        train(m, optimizer, range(3), skip=LATE)
        train(m, optimizer, range(3, 5))
    train(straight, optimizers[0], range(5, 8))
    copy, plain = transfer(model, optimizers[1], lambda m: make("adamw_torch", m, *ADAM))
    assert plain.state[copy.second.weight]["step"].item() == 5
    train(copy, plain, range(5, 8))
    assert_close(weights(copy), weights(straight), 1e-6)


def test_a_state_of_another_family_is_refused():
    model = Small()
    optimizer = make("adamw_torch", model)
    train(model, optimizer, range(2))
    for optim in ("lamb", "sgd", "adafactor"):
        with pytest.raises(UserError, match=f"adamw.*{optim}"):
            transfer(model, optimizer, lambda m, optim=optim: make(optim, m))


def test_loading_nothing_clears_what_was_there():
    model = Small()
    optimizer = make("adamw_torch", model)
    train(model, optimizer, range(2))
    load_named_state(optimizer, names_of(model), {}, "adamw")
    assert not any(optimizer.state.values())


# ---------------------------------------------------------------------------------------------------- left-out updates

SPOILED = [
    ("adamw_torch", (*ADAM, "--optim_args", "amsgrad=True"), PLAIN),
    ("adamw_torch_fused", ADAM, PLAIN),
    ("lamb", LAMB, PLAIN),
    ("sgd", ("--learning_rate", "0.05", "--optim_args", "momentum=0.9"), PLAIN),
    ("adafactor", ("--learning_rate", "0.05", "--optim_args", "beta1=0.9"), PLAIN),
    ("adamw_torch", ADAM, FUSED),
    ("lamb", LAMB, FUSED),
]


def four_steps(
    model: nn.Module, optim: str, argv: tuple[str, ...], config: GaudiConfig, value: float | None, skip: bool
):
    """The second step's gradients have ``value`` in one place; without one it is not made. The rate goes on falling."""
    optimizer = make(optim, model, *argv, config=config, device=gaudi())
    schedule = create_schedule(optimizer, flags(), 4)
    clipper, norms = Clipper(model, 1.0, config, gaudi()), []
    for step in range(1, 5):
        gradients(model, step)
        if step != 2:
            assert not update(optimizer, clipper.clip(), skip)
        elif value is not None:
            model.second.weight.grad[1, 2] = value
            norms.append(clipper.clip())
            assert update(optimizer, norms[-1], skip)
        schedule.step()
    assert not any(math.isfinite(norm) for norm in norms)
    return weights(model), named_state(optimizer, names_of(model))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("skip", [False, True], ids=["stop", "skip"])
@pytest.mark.parametrize(("optim", "argv", "config"), SPOILED)
def test_an_update_by_no_finite_number_is_left_out_on_the_host(bridge, optim, argv, config, skip, value):
    left_out, never_made = (four_steps(Small(), optim, argv, config, one, skip) for one in (value, None))
    for one, other in zip(left_out, never_made, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_a_norm_that_only_overflows_is_left_out_too():
    model = Small()
    gradients(model, 1, scale=1e30)
    before, norm = weights(model), Clipper(model, 1.0, PLAIN, cpu()).clip()
    assert norm.item() == math.inf
    assert update(make("adamw_torch", model), norm, skip=True)
    assert all(torch.equal(tensor, weights(model)[name]) for name, tensor in before.items())


@pytest.mark.filterwarnings("error")
def test_a_first_update_that_is_left_out_is_no_wrong_order_of_steps():
    model = Small()
    optimizer = make("adamw_torch", model)
    schedule = create_schedule(optimizer, flags(), 4)
    assert update(optimizer, torch.tensor(math.nan), skip=False)
    schedule.step()


# ----------------------------------------------------------------------------------------------------------- schedules


def rates(total: int, *argv: str) -> list[float]:
    """The rate of every step, and the one that is left at the end."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = create_schedule(optimizer, flags(*argv), total)
    seen = []
    for _ in range(total):
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_linear_falls_to_zero_at_the_last_step():
    assert rates(4) == pytest.approx([1, 0.75, 0.5, 0.25, 0])
    assert rates(4, "--warmup_steps", "2") == pytest.approx([0, 0.5, 1, 0.5, 0])


@pytest.mark.parametrize(("ratio", "total", "steps"), [("0.5", 4, 2), ("0.3", 10, 3), ("0.05", 10, 1), ("0.25", 10, 3)])
def test_warmup_ratio_is_a_share_of_all_steps_rounded_up(ratio, total, steps):
    expected = rates(total, "--warmup_steps", str(steps))
    assert rates(total, "--warmup_ratio", ratio) == expected
    assert expected != rates(total)


@pytest.mark.parametrize(
    ("name", "last"),
    [
        ("linear", 0),
        ("cosine", 0),
        ("cosine_with_restarts", 0),
        ("polynomial", 1e-7),
        ("constant", 1),
        ("constant_with_warmup", 1),
        ("inverse_sqrt", math.sqrt(2 / 10)),
    ],
)
def test_the_last_rate_is_the_schedules_end(name, last):
    warmup = () if name == "constant" else ("--warmup_steps", "2")
    seen = rates(10, "--lr_scheduler_type", name, *warmup)
    assert seen[-1] == pytest.approx(last, abs=1e-9)
    assert max(seen) == 1.0
    assert seen[0] == (1.0 if name == "constant" else 0.0)


@pytest.mark.parametrize(("name", "nearest"), [("cosin", "cosine"), ("liner", "linear"), ("Linear", "linear")])
def test_a_wrong_schedule_names_the_nearest(name, nearest):
    with pytest.raises(UserError, match=f"--lr_scheduler_type.*'{name}'.*did you mean '{nearest}'"):
        rates(4, "--lr_scheduler_type", name)
    with pytest.raises(UserError, match="one of: linear, cosine"):
        rates(4, "--lr_scheduler_type", "zzz")


@pytest.mark.parametrize("name", ["cosine_with_min_lr", "warmup_stable_decay", "reduce_lr_on_plateau"])
def test_schedules_that_no_flag_can_complete_are_refused(name):
    with pytest.raises(UserError, match=f"--lr_scheduler_type {name} cannot be used here"):
        rates(4, "--lr_scheduler_type", name)


def test_a_constant_rate_without_its_warmup_is_said(caplog):
    rates(4, "--lr_scheduler_type", "constant")
    assert not caplog.messages
    rates(4, "--lr_scheduler_type", "constant", "--warmup_steps", "2")
    assert "constant_with_warmup" in caplog.text


# ------------------------------------------------------------------------------------------------------------ clipping


def model_with_gradient(norm: float) -> nn.Module:
    model = nn.Linear(4, 4)
    nn.init.zeros_(model.weight)
    nn.init.zeros_(model.bias)
    draw = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=draw)
    scale = norm / nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for parameter in model.parameters():
        parameter.grad *= scale
    return model


def moved(model: nn.Module) -> float:
    """How far SGD with rate 1 moves the weights, which are zero."""
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).norm().item()


@pytest.mark.parametrize("on_gaudi", [False, True])
@pytest.mark.parametrize("config", [PLAIN, FUSED], ids=["plain", "fused"])
@pytest.mark.parametrize(("limit", "length"), [(1.0, 1.0), (2.5, 2.5), (0, 10.0), (None, 10.0), (20.0, 10.0)])
def test_clipping_bounds_the_update_and_tells_the_norm_before(bridge, on_gaudi, config, limit, length):
    model = model_with_gradient(10.0)
    clipper = Clipper(model, limit, config, gaudi() if on_gaudi else cpu())
    norm = clipper.clip()
    assert isinstance(norm, torch.Tensor)
    assert norm.shape == ()
    assert norm.item() == pytest.approx(10.0, rel=1e-5)
    assert moved(model) == pytest.approx(length, rel=1e-5)
    made = [given for name, given in bridge.calls if name == "FusedClipNorm"]
    if on_gaudi and config is FUSED and limit:
        assert [given["max_norm"] for given in made] == [limit]
        assert [id(p) for p in made[0]["parameters"]] == [id(p) for p in model.parameters()]
        assert bridge.count("clip_norm") == 1
    else:
        assert made == []


def test_frozen_and_unused_parameters_do_not_count():
    model = model_with_gradient(10.0)
    model.register_parameter("frozen", nn.Parameter(torch.zeros(3), requires_grad=False))
    model.register_parameter("unused", nn.Parameter(torch.zeros(3)))
    assert Clipper(model, 1.0, PLAIN, cpu()).clip().item() == pytest.approx(10.0, rel=1e-5)
    model.zero_grad()
    assert Clipper(model, 1.0, PLAIN, cpu()).clip().item() == 0.0


def test_habanas_clip_gets_the_trainable_parameters_only(bridge):
    model = model_with_gradient(10.0)
    model.bias.requires_grad_(False)
    Clipper(model, 1.0, FUSED, gaudi())
    assert [given["parameters"] for _, given in bridge.calls] == [[model.weight]]
