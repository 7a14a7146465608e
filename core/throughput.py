"""Samples and tokens per second of steady training, and how much of the device's peak they use.

Only steady steps count. Warm-up, compilation, evaluation, saving and logging are left out and shown, the device is
synchronised at both edges of what is measured, and a figure that cannot be known is None ("n/a").
"""

from __future__ import annotations

import re
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from math import nan, prod
from typing import Any, TypeVar

import torch
from torch.utils.flop_counter import FlopCounterMode

# Dense peaks of one device in TFLOP/s, (bf16, fp32 without TF32); the first match wins, None is a figure that the
# maker does not give. Sources: for Gaudi the table of generations in Intel's talk on Gaudi 3 at Hot Chips 2024, for
# the others NVIDIA's data sheets (half of the figure where a sheet gives the rate with sparsity).
PEAKS = (
    (r"^gaudi$", 60, None),
    (r"^gaudi2", 432, None),
    (r"^gaudi3", 1835, None),
    (r"\bB200\b", 2250, 75),
    (r"\b(H100|H200) NVL\b", 835, 60),
    (r"\bH100 PCIe\b", 756, 51),
    (r"\b(H100|H200|GH200)\b", 989, 67),
    (r"\b(A100|A800)\b", 312, 19.5),
    (r"\bA10\b", 125, 31.2),
    (r"\bL40S\b", 362, 91.6),
    (r"\bL4\b", 121, 30.3),
    (r"\bT4\b", None, 8.1),
)
# Forward kernels take (query, key, value, ...), backward ones (gradient, query, key, value, ...). torch has formulas
# for some only, and none for its own CPU kernel, whose FLOPs would silently be 0.
KERNELS = "flash_attention flash_attention_for_cpu efficient_attention cudnn_attention fused_attention_overrideable"
ATTENTION = [("hpu", "sdpa_fwd", "sdpa_bwd"), ("hpu", "sdpa_recomp_fwd", "sdpa_recomp_bwd")]
ATTENTION += [("aten", f"_scaled_dot_product_{k}", f"_scaled_dot_product_{k}_backward") for k in KERNELS.split()]
COUNTABLE = re.compile("attention|sdpa|convolution|gemm|matmul")
T = TypeVar("T")


def peak_flops(name: str, precision: str) -> float | None:
    """Return the dense peak of one device in FLOP/s for ``precision`` ("bf16" or "fp32"), None if it is not known."""
    tf32 = precision == "fp32" and torch.get_float32_matmul_precision() != "highest"
    if "MIG" in name or tf32:  # a slice has a share of the card's peak, which its name does not say; TF32 is unlisted
        return None
    found = next(((bf16, fp32) for pattern, bf16, fp32 in PEAKS if re.search(pattern, name)), (None, None))
    peak = found[("bf16", "fp32").index(precision)]
    return peak and peak * 1e12


class Throughput:
    """Measures steady steps. Every moment belongs to training or to one reason why it is left out.

    Args:
        device: has ``synchronize()``, ``event()``, ``name``; ``queues_work``: calls return before work is done.
        warmup_steps: the first optimiser steps of this process that do not count.
        world_size: devices that train together.
        clock: returns seconds.
        precision: "bf16" or "fp32", of matrix products; it decides the peak behind the utilisation.
    """

    def __init__(
        self,
        device: Any,
        warmup_steps: int = 0,
        world_size: int = 1,
        clock: Callable[[], float] = time.perf_counter,
        precision: str = "fp32",
    ) -> None:
        self.device, self.warmup_steps, self.world_size = device, warmup_steps, world_size
        self.clock, self.precision = clock, precision
        self._begin: float | None = None
        self._edge = self._last = 0.0  # the last synchronised moment; the end of the last step or block
        self._cause: str | None = None  # of the excluded block that we are in
        self._steps = 0
        self._train_seconds = 0.0
        self._excluded: Counter[str] = Counter()  # seconds by cause
        self._counted: Counter[str] = Counter()  # steps, rows, tokens, flops, waited in the seconds of training
        self._open: Counter[str] = Counter()  # the same, since the last edge
        self._recorded: Counter[str] = Counter()  # what was counted at the last `data_wait`
        self._waits: deque[tuple[float, Any, Any]] = deque()  # host time, and the moments before and after a wait
        self._recent: deque[tuple[float, float]] = deque(maxlen=20)  # rows and host seconds of the last steps

    def start(self) -> None:
        """Begin: what was queued on the device before does not count."""
        self.device.synchronize()
        self._begin = self._edge = self._last = self.clock()

    def edge(self) -> None:
        """Synchronise and close what was measured so far. Call it before a step that is known to be cold."""
        self._close(self._cause or ("warmup" if self._steps < self.warmup_steps else None))

    def _close(self, cause: str | None) -> None:
        self.device.synchronize()
        self._assign(cause, self.clock())

    def _assign(self, cause: str | None, until: float) -> None:
        while self._waits and self._waits[0][0] <= until:
            _, asked, given = self._waits.popleft()
            if cause is None:
                on_host = isinstance(asked, float)
                self._open["waited"] += given - asked if on_host else asked.elapsed_time(given) / 1000
        if cause is None:
            self._train_seconds += until - self._edge
            self._counted.update(self._open)
        elif until > self._edge:
            self._excluded[cause] += until - self._edge
        self._open.clear()
        self._edge = self._last = until

    @contextmanager
    def excluded(self, cause: str) -> Iterator[None]:
        """Leave the block out of training time, as ``cause``. Inside another such block the outer cause stays."""
        if self._begin is None or self._cause is not None:
            yield
            return
        self.edge()
        self._cause = cause
        try:
            yield
        finally:
            self._cause = None
            self._close(cause)

    def received(self, source: Iterable[T]) -> Iterator[T]:
        """Yield what a loader gives. Time in which the device stands idle for it is waiting for data.

        A device that queues its work may be busy while the host is in the loader: its time is that between two
        events in the queue, one when the loader is asked and one when it has given. They are read at the next edge.
        """
        loader, missing = iter(source), object()
        while True:
            asked = self._moment()
            item = next(loader, missing)
            self._waits.append((self.clock(), asked, self._moment()))
            if len(self._waits) >= 1000:
                self.edge()  # a run that never logs must not hold ever more events
            if item is missing:
                return
            yield item

    def _moment(self) -> Any:
        """Now: an event in the device's queue, or the host's time where there is no queue."""
        event = self.device.event()
        return float(self.clock()) if event is None else event

    def step(self, rows: float, tokens: float = 0, cold: bool = False, flops: float | None = None) -> None:
        """Record one optimiser step of all devices, when it is over. Synchronises only where a window ends.

        Args:
            rows, tokens: real ones of all ranks; filler rows and padding are not part of them.
            cold: the step met a new shape or compiled: it does not count, its time is shown as "compile". Where a
                device queues work and nobody called `edge` before the step, the queue's share in that time is
                unknown, so the steps since the last edge are left out with it: fewer steps, but a true rate.
            flops: floating point operations of the step on all devices, None if unknown.

        Raises:
            RuntimeError: `start` was not called.
        """
        if self._begin is None:
            raise RuntimeError("call Throughput.start() before the first step")
        warm = self._steps >= self.warmup_steps
        self._steps += 1
        if cold:
            if not warm or not getattr(self.device, "queues_work", True):
                self._assign(None if warm else "warmup", self._last)
            self._close("compile")
            return
        now = self.clock()
        self._recent.append((rows, now - self._last))
        self._last = now
        if warm:
            self._open.update(steps=1, rows=rows, tokens=tokens, flops=nan if flops is None else flops)
        elif self._steps == self.warmup_steps:
            self._close("warmup")

    def recent_rate(self) -> float | None:
        """Return samples per second of the last 20 steps, without synchronising: for a progress bar, not a result."""
        seconds = sum(seconds for _, seconds in self._recent)
        return sum(rows for rows, _ in self._recent) / seconds if seconds > 0 else None

    def data_wait(self) -> float | None:
        """Seconds of waiting for data up to the last edge since the last figure; None if no step has counted since."""
        new = self._counted - self._recorded
        if not new["steps"]:
            return None
        self._recorded = self._counted.copy()
        return _six_digits(new["waited"])

    def metrics(self, prefix: str = "train") -> dict[str, Any]:
        """Return what was measured so far; synchronises.

        Returns:
            ``{prefix}_runtime`` (seconds, nothing left out), ``_samples_per_second``, ``_steps_per_second`` and
            ``_tokens_per_second`` of all devices, samples and tokens also ``_per_device`` (at any world size: the
            keys are always the same), ``_mfu`` (share of the devices' peak), ``_data_wait_seconds`` (of what is not
            excluded, this rank's device stood idle for data; ranks meet in each window: it has the slowest loader in
            it), ``_excluded_seconds`` (by cause). Six digits; None: no step counted, no tokens, FLOPs or peak unknown.
        """
        if self._begin is not None:
            self.edge()
        values = {f"{name}_per_second": self._rate(key) for name, key in (("samples", "rows"), ("steps", "steps"))}
        values["tokens_per_second"] = self._rate("tokens")
        for name in ("samples_per_second", "tokens_per_second"):
            values[f"{name}_per_device"] = values[name] and values[name] / self.world_size
        values |= {"mfu": self._utilisation(), "runtime": self._edge - (self._begin or 0.0)}
        values["data_wait_seconds"] = self._counted["waited"] if self._counted["steps"] else None
        seconds = {cause: _six_digits(value) for cause, value in self._excluded.items()}
        rounded = {f"{prefix}_{name}": value and _six_digits(value) for name, value in values.items()}
        return {**rounded, f"{prefix}_excluded_seconds": seconds}

    def _rate(self, what: str) -> float | None:
        measured = self._train_seconds > 0 and self._counted[what] > 0
        return self._counted[what] / self._train_seconds if measured else None

    def _utilisation(self) -> float | None:
        rate, peak = self._rate("flops"), peak_flops(self.device.name, self.precision)
        share = rate / (peak * self.world_size) if rate and peak else None
        return share if share and share <= 1 else None  # a peak that was exceeded is not this device's peak


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


class FlopCounter(FlopCounterMode):
    """Counts FLOPs; see `flop_counter`. ``unknown`` names kernels of matrix products that have no formula."""

    def __init__(self) -> None:
        formulas = {}
        for space, *names in ATTENTION:
            for name, formula in zip(names, (_attention_flops, _attention_backward_flops), strict=True):
                if hasattr(getattr(torch.ops, space), name):
                    formulas[getattr(getattr(torch.ops, space), name)] = formula
        super().__init__(display=False, custom_mapping=formulas)
        self.unknown: set[str] = set()

    def _count_flops(self, kernel: Any, *rest: Any) -> Any:
        if kernel not in self.flop_registry and COUNTABLE.search(str(kernel)):
            self.unknown.add(str(kernel))
        return super()._count_flops(kernel, *rest)

    @property
    def total(self) -> int | None:
        """FLOPs of this process so far; None if a kernel is unknown or nothing was counted."""
        return None if self.unknown else self.get_total_flops() or None


def flop_counter() -> FlopCounter:
    """Return a context that counts the FLOPs of forward and backward passes in it and changes no result.

    A product and a sum are two. Attention counts as its plain form (backward twice forward, masked scores too), so
    that every kernel has the same figure. What gradient checkpointing repeats is counted: count a step without it.
    A function under ``torch.compile`` runs eagerly in here.
    """
    return FlopCounter()


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products per head, from shapes (..., heads, length, size); keys may have fewer heads."""
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward_flops(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * _attention_flops(query, key, value)


class FlopsByShape:
    """FLOPs of a micro-batch by its shape: the first of each shape is counted while it runs.

    Only the forward pass is: watched, autograd adds gradients up in another order, and a run that goes on from a
    checkpoint, where other micro-batches are the first, would end with other weights.

    Args:
        backward: what the backward pass costs, in forward passes: 2, or 1 where most weights are frozen and only
            gradients of activations pass through their layers.
    """

    def __init__(self, backward: int = 2) -> None:
        self.backward, self.known = backward, {}
        self._watching = ExitStack()
        self._counter: FlopCounter | None = None

    @contextmanager
    def counting(self, shape: Any) -> Iterator[None]:
        """Count this block's forward pass, which `forward_ends` ends, for a micro-batch of this shape."""
        with self._watching:
            self._counter = self._watching.enter_context(FlopCounter())
            yield
        total, self._counter = self._counter.total, None
        self.known[shape] = total and (1 + self.backward) * total

    def forward_ends(self) -> None:
        """Say that backward comes next."""
        self._watching.close()
