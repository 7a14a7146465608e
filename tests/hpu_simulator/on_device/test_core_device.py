"""The core's device, memory, precision, optimisers and clipping on the simulated card, in the mode of this process."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch
from torch import nn

from core.arguments import parse_arguments
from core.device import LAZY_VARIABLE, Device, decide_execution_mode, select_device
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.memory import MemoryTracker
from core.mixed_precision import effective_op_lists, resolve_precision
from core.optimizers import Clipper, create_optimizer, load_named_state, named_state
from hpu_simulator import runtime

LAZY = os.environ[LAZY_VARIABLE] == "1"
MODE = "lazy" if LAZY else "eager"
CPU = Device("cpu", "cpu (test)", "eager", torch.device("cpu"))
PLAIN, FUSED = GaudiConfig(), GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True)


def flags(*argv: str) -> Namespace:
    args = parse_arguments(["--do_eval", *argv], description="test")
    args.execution_mode = decide_execution_mode(args)
    return args


@pytest.fixture
def device() -> Device:
    args = flags()
    found = select_device(args, args.execution_mode)
    found.check_mode()
    found.synchronize()
    return found


@contextmanager
def no_sync() -> Iterator[None]:
    """Fail if the host reads anything from the device in this block."""
    before = runtime.snapshot()["syncs"]
    yield
    assert runtime.snapshot()["syncs"] == before


# -------------------------------------------------------------------------------------------------------------- device


def test_it_is_chosen_in_the_mode_that_the_bridge_read(device: Device) -> None:
    assert (device.kind, device.name, device.mode) == ("hpu", "gaudi2", MODE)
    assert device.runtime is torch.hpu
    assert device.has_step_boundaries is device.has_hpu_graphs is device.compiles is LAZY
    assert device.queues_work
    assert device.has_habana_kernels
    assert device.has_fused_attention
    assert device.has_op_lists
    assert device.has_fast_bf16
    assert not device.has_cuda_graphs
    assert device.compile_backend == "hpu_backend"


def test_the_cpu_can_be_asked_for(device: Device) -> None:
    for name in ("--use_cpu", "--use_habana=False"):
        assert select_device(flags(name), MODE).kind == "cpu"


def test_a_batch_moves_to_it(device: Device) -> None:
    moved = device.move({"a": [torch.ones(2), (torch.zeros(3), "text")]}, non_blocking=True)
    assert moved["a"][0].device == torch.device("hpu:0")
    assert moved["a"][1][0].device.type == "hpu"
    assert moved["a"][1][1] == "text"
    assert torch.equal(moved["a"][0].cpu(), torch.ones(2))


def test_a_variable_that_changed_after_the_start_is_found(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    other = "0" if LAZY else "1"
    monkeypatch.setenv(LAZY_VARIABLE, other)
    with pytest.raises(UserError, match=f"became {other}, but the bridge read {1 - int(other)}"):
        device.check_mode()
    late = select_device(flags(), "eager" if LAZY else "lazy")  # the whole run follows the variable: still wrong
    with pytest.raises(UserError, match=f"became {other}, but the bridge read {1 - int(other)}"):
        late.check_mode()
    monkeypatch.delenv(LAZY_VARIABLE)
    with pytest.raises(UserError, match=f"became None.*read {int(LAZY)}"):
        device.check_mode()
    with pytest.raises(UserError, match="the bridge was imported before"):
        flags()


def test_the_other_mode_is_refused_by_flag(device: Device) -> None:
    with pytest.raises(UserError, match=f"{LAZY_VARIABLE}={int(LAZY)}"):
        flags("--execution_mode", "eager" if LAZY else "lazy")


def multiply(size: int) -> None:
    torch.ones(size, size, device="hpu").mm(torch.ones(size, size, device="hpu"))


@pytest.mark.parametrize(("ends", "size"), [("step_boundary", 11), ("synchronize", 12)])
def test_what_ends_a_graph_does_so_in_lazy_mode_only(device: Device, ends: str, size: int) -> None:
    counts = [device.graph_compilations()]
    for _ in range(2):
        multiply(size)
        counts.append(device.graph_compilations())
        getattr(device, ends)()
        counts.append(device.graph_compilations())
    assert (counts[1] > counts[0]) is not LAZY  # operators compile one by one
    assert counts[2] == counts[1] + LAZY
    assert counts[2:] == counts[2:3] * 3


def test_compilations_are_counted_once_a_shape(device: Device) -> None:
    counts = [device.graph_compilations()]
    for size in (13, 13, 14, 13):
        multiply(size)
        device.step_boundary()
        counts.append(device.graph_compilations())
    grown = [after > before for before, after in pairwise(counts)]
    assert grown == [True, False, True, False]
    if LAZY:
        assert counts[-1] - counts[0] == 2


def test_a_bridge_without_the_counter_counts_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device.bridge("hpu.metrics"), "NAME", "gc")  # as it once was called
    assert device.graph_compilations() is None


def test_dynamic_shapes_are_switched_in_lazy_mode_only(device: Device, recwarn: pytest.WarningsRecorder) -> None:
    device.set_dynamic_shapes(False)
    assert not recwarn.list
    device.set_dynamic_shapes(True)  # the simulator says that it counts as without
    assert [str(warning.message).split()[0] for warning in recwarn.list] == ["the"] * LAZY


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_the_cards_to_the_byte(device: Device) -> None:
    before = device.memory_stats()
    assert before["Limit"] == 96 * 2**30
    device.reset_peak_memory_stats()
    block = torch.ones(2_500_000, device="hpu")
    during = device.memory_stats()
    size = during["InUse"] - before["InUse"]
    assert 10_000_000 <= size < 10_001_000
    del block
    after = device.memory_stats()
    assert after["InUse"] == before["InUse"]
    assert after["MaxInUse"] == before["InUse"] + size
    device.reset_peak_memory_stats()
    assert device.memory_stats()["MaxInUse"] == before["InUse"]


def test_each_phase_has_its_peak_and_the_run_the_largest(device: Device) -> None:
    tracker = MemoryTracker(device)
    base = device.memory_stats()["InUse"] / 1e9
    sizes = {"train": 40_000_000, "eval": 20_000_000}
    with tracker.phase("train"):
        torch.empty(sizes["train"] // 4, device="hpu")
        with tracker.phase("eval"):
            torch.empty(sizes["eval"] // 4, device="hpu")
    assert tracker.peaks() == {name: pytest.approx(base + size / 1e9, abs=2e-3) for name, size in sizes.items()}
    record = tracker.record()
    assert record["max_memory_allocated (GB)"] == pytest.approx(base + 0.04, abs=2e-3)
    assert record["memory_allocated (GB)"] == pytest.approx(base, abs=2e-3)
    assert record["total_memory_available (GB)"] == 103.079


# -------------------------------------------------------------------------------------------------------------- random


def draw() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.rand(8, device="hpu").cpu(), torch.rand(8)


def test_the_seed_reaches_both_generators(device: Device) -> None:
    numbers = []
    for seed in (3, 3, 4):
        device.manual_seed(seed)
        numbers.append(draw())
    for of_three, again, of_four in zip(*numbers, strict=True):
        assert torch.equal(of_three, again)
        assert not torch.equal(of_three, of_four)


def test_the_random_state_comes_back(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    state = {name: value.clone() for name, value in device.rng_state().items()}
    assert set(state) == {"cpu", "hpu"}
    assert all(value.device.type == "cpu" and value.dtype == torch.uint8 for value in state.values())
    first = draw()
    assert not torch.equal(first[0], draw()[0])
    device.set_rng_state(state)
    assert all(torch.equal(one, other) for one, other in zip(first, draw(), strict=True))
    assert not caplog.messages
    device.set_rng_state({"cpu": state["cpu"]})
    assert "no hpu random state" in caplog.text


# ----------------------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize(("argv", "config"), [(["--bf16"], PLAIN), ([], GaudiConfig(use_torch_autocast=True))])
def test_autocast_follows_the_cards_own_lists(device: Device, argv: list[str], config: GaudiConfig) -> None:
    """bf16 for products and, unlike on a GPU, softmax; fp32 for losses; parameters and gradients stay fp32."""
    precision = resolve_precision(flags(*argv), config, device)
    assert (precision.enabled, precision.device_type) == (True, "hpu")
    layer, x = nn.Linear(8, 8).to("hpu"), torch.randn(4, 8, device="hpu")
    with precision.autocast():
        y = layer(x)
        assert (y.dtype, (x @ x.T).dtype, x.softmax(-1).dtype) == (torch.bfloat16,) * 3
        loss = nn.functional.cross_entropy(y, torch.zeros(4, dtype=torch.long, device="hpu"))
        assert (loss.dtype, x.exp().dtype, (x + x).dtype) == (torch.float32,) * 3
    loss.backward()
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32
    assert effective_op_lists(config, device) == {}


def test_without_bf16_everything_is_fp32(device: Device) -> None:
    x = torch.randn(4, 4, device="hpu")
    with resolve_precision(flags(), PLAIN, device).autocast():
        assert (x @ x).dtype == torch.float32


def test_autocast_of_the_cpu_leaves_the_cards_operators_alone(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    precision = resolve_precision(flags("--bf16", "--half_precision_backend", "cpu_amp"), PLAIN, device)
    x = torch.randn(4, 4, device="hpu")
    with precision.autocast():
        assert (x @ x).dtype == torch.float32
    assert "operators on hpu stay in fp32" in caplog.text


# ---------------------------------------------------------------------------------------------- optimisers and clipping


class Small(nn.Module):
    """Parameters with and without decay."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.first, self.second, self.norm = nn.Linear(4, 3), nn.Linear(3, 2, bias=False), nn.LayerNorm(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))


def give_gradients(model: nn.Module, step: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = (torch.randn(parameter.shape, generator=generator) * scale).to(parameter.device)


def weights(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).cpu()


OPTIMIZERS = [
    ("adamw_torch", FUSED, "", "FusedAdamW"),
    ("adamw_torch_fused", PLAIN, "", "FusedAdamW"),
    ("adamw_torch", PLAIN, "", "AdamW"),
    ("lamb", PLAIN, "", "FusedLamb"),
    ("sgd", PLAIN, "momentum=0.9", "SGD"),
    ("adafactor", PLAIN, "", "Adafactor"),
    ("adafactor", PLAIN, "scale_parameter=True", "Adafactor"),
]


@pytest.mark.parametrize(("optim", "config", "options", "kind"), OPTIMIZERS)
def test_every_optimiser_steps_as_the_cpus_without_a_sync(
    device: Device, optim: str, config: GaudiConfig, options: str, kind: str
) -> None:
    """Gradients of norm 12: a fused LAMB that clipped by itself would show."""
    decay = "0" if "scale" in options else "0.1"
    args = flags("--optim", optim, "--learning_rate", "0.01", "--weight_decay", decay, "--optim_args", options)
    host, card = Small(), Small().to("hpu")
    optimizers = [create_optimizer(model, args, config, of) for model, of in ((host, CPU), (card, device))]
    assert type(optimizers[1]).__name__ == kind
    for step in range(5):
        for model, optimizer in zip((host, card), optimizers, strict=True):
            give_gradients(model, step, scale=3)
            with no_sync():
                optimizer.step()
    torch.testing.assert_close(weights(card), weights(host), rtol=1e-5, atol=1e-5)


def test_state_moves_between_the_card_and_the_cpu(device: Device) -> None:
    """Three steps there, three here, and back: as nine steps of torch's."""
    args, straight = flags("--learning_rate", "0.01"), Small()
    reference = create_optimizer(straight, args, PLAIN, CPU)
    model, state = Small(), {}
    for turn, (where, config) in enumerate(((device, FUSED), (CPU, PLAIN), (device, FUSED))):
        model = model.to(where.torch_device)
        optimizer = create_optimizer(model, args, config, where)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if state:
            load_named_state(optimizer, names, state, "adamw")
        for step in range(3 * turn, 3 * turn + 3):
            for each, stepped in ((model, optimizer), (straight, reference)):
                give_gradients(each, step)
                stepped.step()
        state = {name: tensor.cpu() for name, tensor in named_state(optimizer, names).items()}
        assert state["first.weight/step"] == 3 * turn + 3
    torch.testing.assert_close(weights(model), weights(straight), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [0.01, 3.0])
@pytest.mark.parametrize("limit", [1.0, 0.0])
@pytest.mark.parametrize("config", [PLAIN, FUSED], ids=["plain", "fused"])
def test_clipping_is_torchs(device: Device, config: GaudiConfig, limit: float, scale: float) -> None:
    host, card = Small(), Small().to("hpu")
    clipper = Clipper(card, limit, config, device)
    assert (clipper.fused is not None) is (config is FUSED and limit > 0)
    for step in range(2):
        for model in (host, card):
            give_gradients(model, step, scale)
        expected = nn.utils.clip_grad_norm_(host.parameters(), limit or 1e9)
        with no_sync():
            norm = clipper.clip()
        assert norm.shape == ()
        assert norm.device.type == "hpu"
        assert float(norm) == pytest.approx(float(expected), rel=1e-6)
        for one, other in zip(card.parameters(), host.parameters(), strict=True):
            torch.testing.assert_close(one.grad.cpu(), other.grad, rtol=1e-5, atol=1e-7)
