"""Throughput: a fake clock makes every expected number exact."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from core.throughput import FlopCounter, FlopsByShape, Throughput, flop_counter, peak_flops


class FakeEvent:
    """A point in the queue of a device that has ``queued`` seconds of work before it."""

    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at = device, device.now + device.queued

    def elapsed_time(self, end: FakeEvent) -> float:
        assert max(self.at, end.at) <= self.device.now + 1e-9, "read before it is over"
        return 1000 * (end.at - self.at)


class FakeDevice:
    """A clock, and a device that may queue its work: host time passes in `host`, device time in `synchronize`."""

    def __init__(self, name: str = "gaudi2", queues_work: bool = True) -> None:
        self.name, self.queues_work = name, queues_work
        self.now = self.queued = 0.0
        self.syncs = 0

    def clock(self) -> float:
        return self.now

    def synchronize(self) -> None:
        self.syncs += 1
        self.now += self.queued
        self.queued = 0.0

    def event(self) -> FakeEvent | None:
        return FakeEvent(self) if self.queues_work else None

    def work(self, seconds: float) -> None:
        """Give the device work; one without a queue does it at once."""
        if self.queues_work:
            self.queued += seconds
        else:
            self.now += seconds

    def host(self, seconds: float) -> None:
        """Spend host time; the device works on its queue meanwhile."""
        self.now += seconds
        self.queued = max(self.queued - seconds, 0.0)


def meter(device: FakeDevice, **options) -> Throughput:
    throughput = Throughput(device, clock=device.clock, **options)
    throughput.start()
    return throughput


def run(device: FakeDevice, throughput: Throughput, steps: range) -> None:
    """The loop of the requirement: 10 ms a step, 500 ms on 0-2, 300 ms evaluation every 10, 200 ms save every 7."""
    for step in steps:
        device.host(0.5 if step < 3 else 0.01)
        throughput.step(rows=8, tokens=100)
        if step % 10 == 9:
            with throughput.excluded("eval"):
                device.host(0.3)
        if step % 7 == 6:
            with throughput.excluded("save"):
                device.host(0.2)


def test_only_steady_steps_count():
    device = FakeDevice()
    throughput = meter(device, warmup_steps=3)
    run(device, throughput, range(60))
    metrics = throughput.metrics("train")
    assert metrics["train_samples_per_second"] == pytest.approx(800, rel=1e-5)
    assert metrics["train_steps_per_second"] == pytest.approx(100, rel=1e-5)
    assert metrics["train_tokens_per_second"] == pytest.approx(10_000, rel=1e-5)
    assert metrics["train_excluded_seconds"] == pytest.approx({"warmup": 1.5, "eval": 1.8, "save": 1.6})
    assert metrics["train_runtime"] == pytest.approx(1.5 + 57 * 0.01 + 1.8 + 1.6)


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_too_few_steps_are_not_a_number(steps):
    device = FakeDevice()
    throughput = meter(device, warmup_steps=3)
    run(device, throughput, range(steps))
    metrics = throughput.metrics("train")
    assert [value for key, value in metrics.items() if "per_second" in key] == [None] * 5
    assert metrics["train_mfu"] is None
    assert metrics["train_runtime"] == pytest.approx(0.5 * steps)


def test_after_a_resume_only_this_process_counts():
    device = FakeDevice()
    throughput = meter(device)
    run(device, throughput, range(50, 60))
    metrics = throughput.metrics()
    assert throughput._counted["steps"] == 10
    assert metrics["train_samples_per_second"] == pytest.approx(800, rel=1e-5)


def test_logging_within_the_warm_up_is_subtracted_once():
    device = FakeDevice()
    throughput = meter(device, warmup_steps=2)
    for _ in range(4):
        device.host(1.0)
        throughput.step(rows=1)
        with throughput.excluded("log"):
            device.host(5.0)
    metrics = throughput.metrics()
    assert metrics["train_excluded_seconds"] == {"warmup": 2.0, "log": 20.0}
    assert metrics["train_samples_per_second"] == 1.0
    assert metrics["train_tokens_per_second"] is None  # nobody gave tokens


def test_nested_blocks_take_the_time_once_and_metrics_can_be_read_inside():
    device = FakeDevice()
    throughput = meter(device)
    device.host(1.0)
    throughput.step(rows=4)
    with throughput.excluded("log"):
        device.host(1.0)
        with throughput.excluded("save"):
            device.host(2.0)
        assert throughput.metrics()["train_samples_per_second"] == 4.0
        device.host(3.0)
    assert throughput.metrics()["train_excluded_seconds"] == {"log": 6.0}
    assert throughput.metrics()["train_samples_per_second"] == 4.0


# ---------------------------------------------------------------------------------------------------- waiting for data


def loading(device: FakeDevice, seconds: float, count: int) -> Iterator[int]:
    for number in range(count):
        device.host(seconds)
        yield number


@pytest.mark.parametrize(
    ("queues_work", "loader", "waited"),
    [
        (False, 0.030, 0.030),
        (False, 0.005, 0.005),
        (True, 0.030, 0.020),  # 10 ms of work were still queued when the loader was asked
        (True, 0.010, 0.0),
        (True, 0.004, 0.0),  # the queue grows
    ],
)
def test_waiting_for_data_is_the_time_in_which_the_device_stands_idle_for_it(queues_work, loader, waited):
    """Steps of 10 ms of device time; the first one finds an idle device. Nothing synchronises for it."""
    device = FakeDevice(queues_work=queues_work)
    throughput = meter(device)
    for _ in throughput.received(loading(device, loader, 50)):
        device.work(0.010)
        throughput.step(rows=1)
    assert device.syncs == 1
    metrics = throughput.metrics()
    assert metrics["train_data_wait_seconds"] == pytest.approx(loader + 49 * waited)
    assert throughput.data_wait() == metrics["train_data_wait_seconds"]
    assert throughput.data_wait() is None


def test_nothing_is_waited_for_in_what_is_left_out():
    """Two steps of warm-up, a cold step, and an evaluation that has a loader and a meter of its own."""
    device = FakeDevice()
    throughput = meter(device, warmup_steps=2)
    records, cold = [], 5
    for number in throughput.received(loading(device, 0.030, 12)):
        if number == cold:
            throughput.edge()  # the wait before it belongs to the steps before
        device.work(0.010)
        throughput.step(rows=1, cold=number == cold)
        if number == 8:
            with throughput.excluded("eval"):
                own = meter(device)
                for _ in own.received(loading(device, 0.5, 3)):
                    device.work(0.1)
                    own.step(rows=1)
                evaluated = own.metrics("eval")
        if number in (1, 4, 11):
            with throughput.excluded("log"):
                device.host(0.2)
                records.append(throughput.data_wait())
    metrics = throughput.metrics()
    assert evaluated["eval_data_wait_seconds"] == pytest.approx(0.5 + 2 * 0.4)
    # After a synchronised block the device is idle at once: its loader's whole 30 ms count.
    assert records == [None, pytest.approx(0.030 + 2 * 0.020), pytest.approx(0.030 + 2 * 0.030 + 4 * 0.020)]
    assert metrics["train_data_wait_seconds"] == pytest.approx(records[1] + records[2])


def test_a_wait_before_an_unannounced_cold_step_is_compilation():
    device = FakeDevice(queues_work=False)
    throughput = meter(device)
    for number in throughput.received(loading(device, 1.0, 4)):
        throughput.step(rows=1, cold=number == 2)
    assert throughput.metrics()["train_data_wait_seconds"] == 3.0
    assert throughput.metrics()["train_excluded_seconds"] == {"compile": 1.0}


def test_no_event_of_the_warm_up_is_read_before_it_is_over():
    device = FakeDevice()
    throughput = meter(device, warmup_steps=3)
    for number in throughput.received(loading(device, 0.001, 6)):
        device.work(1.0)
        throughput.step(rows=1, cold=number == 2)
    assert throughput.metrics()["train_data_wait_seconds"] == pytest.approx(0.001)  # the warm-up left an idle device


def test_no_step_no_waiting():
    device = FakeDevice()
    throughput = meter(device, warmup_steps=3)
    for _ in throughput.received(loading(device, 1.0, 3)):
        throughput.step(rows=1)
    assert throughput.data_wait() is None
    assert throughput.metrics()["train_data_wait_seconds"] is None


def test_a_run_without_records_holds_few_events():
    device, held = FakeDevice(), 0
    throughput = meter(device)
    for _ in throughput.received(loading(device, 0.03, 2500)):
        device.work(0.01)
        throughput.step(rows=1)
        held = max(held, len(throughput._waits))
    assert (held, device.syncs) == (999, 3)
    assert throughput.metrics()["train_data_wait_seconds"] == pytest.approx(2500 * 0.02, rel=1e-3)


def test_an_error_within_a_block_does_not_swallow_the_time():
    device = FakeDevice()
    throughput = meter(device)

    def evaluate() -> None:
        with throughput.excluded("eval"):
            device.host(1.0)
            raise KeyError

    with pytest.raises(KeyError):
        evaluate()
    device.host(2.0)
    throughput.step(rows=2)
    assert throughput.metrics()["train_samples_per_second"] == 1.0


def test_work_in_a_queue_counts_as_training():
    """The host takes 1 ms a step, the device 10 ms: evaluation must not pay for the queue, nor the rate lose it."""
    device = FakeDevice()
    throughput = meter(device, warmup_steps=2)
    for step in range(22):
        device.host(0.001)
        device.queued += 0.010
        throughput.step(rows=8)
        if step % 5 == 4:
            with throughput.excluded("eval"):
                device.host(0.001)
                device.queued += 0.05
    metrics = throughput.metrics()
    # A window of five steps costs the host's first millisecond and 5 x 10 ms of device time.
    assert metrics["train_samples_per_second"] == pytest.approx(8 / 0.010, rel=0.05)
    assert metrics["train_excluded_seconds"]["eval"] == pytest.approx(4 * 0.051)
    assert device.syncs < 12  # start, end of warm-up, two per evaluation, metrics: never one per step


def test_a_cold_step_is_left_out_and_its_window_stays_true():
    device = FakeDevice()
    throughput = meter(device)
    for step in range(30):
        cold = step in (0, 10, 20)
        if cold:
            throughput.edge()
        device.host(0.5 if cold else 0.001)
        device.queued += 0.010
        throughput.step(rows=8, cold=cold)
    metrics = throughput.metrics()
    assert (throughput._counted["steps"], throughput._counted["rows"]) == (27, 216)
    assert metrics["train_excluded_seconds"]["compile"] == pytest.approx(3 * 0.51)
    assert metrics["train_samples_per_second"] == pytest.approx(800, rel=0.02)


def test_an_unannounced_cold_step_never_flatters_the_rate():
    """Nobody synchronised before it, so the queue of the steps before drained within it."""
    device = FakeDevice()
    throughput = meter(device)
    for step in range(20):
        device.host(0.5 if step == 10 else 0.001)
        device.queued += 0.010
        throughput.step(rows=8, cold=step == 10)
    assert throughput.metrics()["train_samples_per_second"] == pytest.approx(800, rel=0.02)
    assert throughput._counted["steps"] == 9

    immediate = FakeDevice(queues_work=False)
    throughput = meter(immediate)
    for step in range(20):
        immediate.host(0.5 if step == 10 else 0.01)
        throughput.step(rows=8, cold=step == 10)
    assert throughput.metrics()["train_samples_per_second"] == pytest.approx(800, rel=1e-5)
    assert throughput._counted["steps"] == 19
    assert throughput.metrics()["train_excluded_seconds"] == {"compile": 0.5}


def test_a_cold_step_within_the_warm_up():
    device = FakeDevice()
    throughput = meter(device, warmup_steps=2)
    for seconds, cold in ((1.0, False), (5.0, True), (2.0, False)):
        device.host(seconds)
        throughput.step(rows=2, cold=cold)
    assert throughput.metrics()["train_excluded_seconds"] == {"warmup": 1.0, "compile": 5.0}
    assert throughput.metrics()["train_samples_per_second"] == 1.0


def test_per_device_and_utilisation():
    device = FakeDevice("gaudi2")
    throughput = meter(device, world_size=8, precision="bf16")
    for _ in range(10):
        device.host(1.0)
        throughput.step(rows=16, tokens=800, flops=8 * 216e12)
    metrics = throughput.metrics("x")
    assert metrics["x_samples_per_second"] == 16
    assert metrics["x_samples_per_second_per_device"] == 2
    assert metrics["x_tokens_per_second_per_device"] == 100
    assert metrics["x_mfu"] == 0.5

    device.host(1.0)
    throughput.step(rows=16)  # one step of unknown FLOPs: the sum is unknown
    assert throughput.metrics("x")["x_mfu"] is None
    assert throughput.metrics("x")["x_samples_per_second"] == 16


@pytest.mark.parametrize(
    ("name", "precision", "peak"),
    [
        ("gaudi", "bf16", 60e12),
        ("gaudi2", "bf16", 432e12),
        ("gaudi3", "bf16", 1835e12),
        ("gaudi2", "fp32", None),
        ("NVIDIA A100-SXM4-80GB", "bf16", 312e12),
        ("NVIDIA A100-SXM4-80GB", "fp32", 19.5e12),
        ("NVIDIA H100 80GB HBM3", "bf16", 989e12),
        ("NVIDIA H100 PCIe", "bf16", 756e12),
        ("NVIDIA H200", "bf16", 989e12),
        ("NVIDIA H200 NVL", "bf16", 835e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "bf16", None),
        ("NVIDIA A10G", "bf16", None),
        ("Tesla T4", "bf16", None),
        ("NVIDIA GeForce RTX 4090", "bf16", None),
        ("cpu (AMD EPYC 9B14)", "bf16", None),
    ],
)
def test_peaks(name, precision, peak):
    assert peak_flops(name, precision) == peak


def test_no_fp32_peak_while_tf32_is_on():
    try:
        torch.set_float32_matmul_precision("high")
        assert peak_flops("NVIDIA A100-SXM4-80GB", "fp32") is None
    finally:
        torch.set_float32_matmul_precision("highest")


def test_a_utilisation_above_one_is_not_shown():
    device = FakeDevice("Tesla T4")
    throughput = meter(device)
    device.host(1.0)
    throughput.step(rows=1, flops=20e12)
    assert throughput.metrics()["train_mfu"] is None


def test_recent_rate_costs_no_synchronisation():
    device = FakeDevice()
    throughput = meter(device)
    assert throughput.recent_rate() is None
    for step in range(30):
        device.host(1.0 if step < 10 else 0.5)
        throughput.step(rows=8)
        with throughput.excluded("log"):
            device.host(10.0)
    before = device.syncs
    assert throughput.recent_rate() == 16
    assert device.syncs == before


def test_what_was_queued_before_the_start_does_not_count():
    device = FakeDevice()
    device.queued = 5.0
    throughput = meter(device)
    device.host(1.0)
    throughput.step(rows=1)
    assert throughput.metrics()["train_runtime"] == 1.0
    assert throughput.metrics()["train_samples_per_second"] == 1.0


def test_use_before_start():
    device = FakeDevice()
    throughput = Throughput(device, clock=device.clock)
    with throughput.excluded("eval"):
        device.host(1.0)
    assert throughput.metrics()["train_samples_per_second"] is None
    with pytest.raises(RuntimeError, match="start"):
        throughput.step(rows=1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(32, 96)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor, fused: bool = True) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.project(x).chunk(3, -1))
        if fused:
            return self.dropout(nn.functional.scaled_dot_product_attention(query, key, value)).square().sum()
        weights = (query @ key.transpose(-1, -2) * 8**-0.5).softmax(-1)
        return self.dropout(weights @ value).square().sum()


def loss_and_gradients(model: nn.Module, compute, counted: bool):
    model.zero_grad()
    torch.manual_seed(3)
    counter = None
    if counted:
        with flop_counter() as counter:
            loss = compute(model)
            loss.backward()
    else:
        loss = compute(model)
        loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return loss.detach(), gradients, counter


def assert_counting_changes_nothing(model: nn.Module, compute) -> FlopCounter:
    loss, gradients, _ = loss_and_gradients(model, compute, counted=False)
    counted_loss, counted_gradients, counter = loss_and_gradients(model, compute, counted=True)
    assert torch.equal(loss, counted_loss)
    assert gradients
    assert all(map(torch.equal, gradients, counted_gradients))
    return counter


def test_counted_step_is_bit_identical_and_counts_attention():
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 16, 32)
    counter = assert_counting_changes_nothing(model, lambda model: model(x))
    linear = 2 * (2 * 16) * 32 * 96  # forward, and the weight's gradient; x has none
    attention = 2 * 2 * 2 * 4 * 16 * 16 * 8  # two products of 2 x batch x heads x length x length x size
    assert counter.total == 2 * linear + 3 * attention
    plain = assert_counting_changes_nothing(model, lambda model: model(x, fused=False))
    assert plain.total == counter.total  # the same model has the same FLOPs, whatever kernel


def test_counted_step_of_a_t5_is_bit_identical():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=50, d_model=16, d_kv=4, d_ff=32, num_layers=1, num_heads=4, decoder_start_token_id=0)
    model = T5ForConditionalGeneration(config).train()
    ids, labels = torch.randint(1, 50, (2, 12)), torch.randint(1, 50, (2, 5))
    counter = assert_counting_changes_nothing(model, lambda model: model(input_ids=ids, labels=labels).loss)
    parameters = sum(p.numel() for p in model.parameters())
    assert counter.total > 6 * (parameters - 50 * 16) * 10  # about 6 FLOPs per parameter and token, and attention


def test_an_unknown_kernel_of_products_has_no_total():
    library = torch.library.Library("throughput_test", "DEF")
    library.define("my_attention(Tensor x) -> Tensor")
    library.impl("my_attention", lambda x: x.clone(), "CPU")
    with flop_counter() as counter:
        torch.ones(2, 2) @ torch.ones(2, 2)
        torch.ops.throughput_test.my_attention(torch.ones(2))
    assert counter.total is None
    assert counter.unknown == {"throughput_test.my_attention"}


def test_nothing_counted_has_no_total():
    with flop_counter() as counter:
        torch.ones(2) + 1
    assert counter.total is None


def test_every_attention_kernel_of_this_torch_has_the_same_formula():
    names = {name.removeprefix("aten::").partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    kernels = {name for name in names if name.startswith("_scaled_dot_product") and "math" not in name}
    assert "_scaled_dot_product_flash_attention_for_cpu" in kernels
    registry = FlopCounter().flop_registry
    query, key = torch.empty(2, 4, 16, 8), torch.empty(2, 2, 10, 8)  # grouped: the keys have half the heads
    forward = 2 * 2 * 2 * 4 * 16 * 10 * 8
    for name in kernels:
        formula = registry[getattr(torch.ops.aten, name)]
        if name.endswith("backward"):
            assert formula(query, query, key, key, out_val=None) == 2 * forward, name
        else:
            assert formula(query, key, key, out_val=None) == forward, name


@pytest.mark.parametrize("recomputes", [True, False])
def test_recomputed_activations_are_no_progress(recomputes):
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    model, x = Attention(), torch.randn(2, 16, 32, requires_grad=True)
    flops = FlopsByShape()
    with flops.counting("shape"):
        loss = checkpoint(model, x, use_reentrant=False) if recomputes else model(x)
        flops.forward_ends()
        loss.backward()
    flops.forward_ends()  # of a micro-batch that is not counted: nothing happens
    forward = 2 * (2 * 16) * 32 * 96 + 2 * 2 * 2 * 4 * 16 * 16 * 8
    assert flops.known == {"shape": 3 * forward}


def test_a_counted_backward_pass_is_bit_for_bit_an_uncounted_one():
    """Watched, a sum of three gradients would be added up in another order."""
    torch.manual_seed(0)
    x = torch.randn(64, 64, requires_grad=True)
    weights = [torch.randn(64, 64) for _ in range(5)]
    gradients = []
    for counts in (True, False):
        x.grad, flops = None, FlopsByShape()
        with flops.counting("shape") if counts else nullcontext():
            loss = sum((x @ weight).sin().sum() for weight in weights)
            flops.forward_ends()
            loss.backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_frozen_weights_cost_no_gradients():
    flops = FlopsByShape(backward=1)
    with flops.counting("shape"):
        torch.randn(4, 8) @ torch.randn(8, 2)
        flops.forward_ends()
    assert flops.known == {"shape": 2 * (2 * 4 * 8 * 2)}
