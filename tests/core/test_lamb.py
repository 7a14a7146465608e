"""LAMB against its formula, and what it leaves out."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from core.lamb import Lamb
from tests.core.test_optimizers import Small, assert_close, lamb_rule, make, reference, run, weights

FLAGS = ("--learning_rate", "0.02", "--weight_decay", "0.1", "--adam_epsilon", "1e-3")
OPTIONS = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-3, "weight_decay": 0.1}


def test_it_is_the_papers() -> None:
    expected = reference(Small(), 20, 1.0, lamb_rule(0.02, 1e-3), decay=0.1)
    model = Small()
    optimizer = make("lamb", model, *FLAGS)
    assert type(optimizer) is Lamb
    assert_close(run(model, optimizer, 20, 1.0), expected, 1e-5)


def test_its_ratio_is_one_where_a_norm_is_zero() -> None:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    model.weight.grad = torch.ones(2, 2)
    make("lamb", model, "--learning_rate", "0.5", "--weight_decay", "0.1").step()
    assert torch.allclose(model.weight, torch.full((2, 2), -0.5), atol=1e-5)  # Adam's first step has length one
    model.weight.grad, before = torch.zeros(2, 2), model.weight.detach().clone()
    make("lamb", model, "--learning_rate", "0.5", "--weight_decay", "0").step()
    assert torch.equal(model.weight, before)


def five_steps(optimizer: Lamb, model: nn.Module, told: bool, bad: tuple[int, ...] = (), missing: bool = False) -> None:
    for step in range(1, 6):
        if step in bad and missing:
            continue
        draw = torch.Generator().manual_seed(step)
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=draw).to(parameter.dtype)
            if step in bad:
                parameter.grad.view(-1)[0] = math.nan
        if told:
            optimizer.found_inf = torch.tensor(float(step in bad))
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.0, 0.9)], ids=str)
@pytest.mark.parametrize("bad", [(1,), (2, 3), (5,)], ids=str)
def test_what_is_left_out_was_never_there(bad: tuple[int, ...], betas: tuple[float, float], dtype: torch.dtype) -> None:
    one, other = Small().to(dtype), Small().to(dtype)
    optimizers = [Lamb(model.parameters(), **OPTIONS | {"betas": betas}) for model in (one, other)]
    five_steps(optimizers[0], one, told=True, bad=bad)
    five_steps(optimizers[1], other, told=True, bad=bad, missing=True)
    for mine, its in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, its)
        states = [optimizer.state[p] for optimizer, p in zip(optimizers, (mine, its), strict=True)]
        assert all(torch.equal(states[0][key], states[1][key]) for key in states[1])
        assert states[0]["step"].item() == 5 - len(bad)


def test_being_told_that_all_is_well_changes_next_to_nothing() -> None:
    """The bias corrections are computed in fp32 then, where powers of 0.999 and 1 differ by few digits."""
    plain, told = Small(), Small()
    for model in (plain, told):
        optimizer = Lamb(model.parameters(), **OPTIONS | {"lr": 1.0, "weight_decay": 0.0})
        five_steps(optimizer, model, told=model is told)
    assert_close(weights(told), weights(plain), 2e-6)
