"""Graph caching: HPU graphs, CUDA graphs, torch.compile; the ledger of batch shapes; compile counts."""

from __future__ import annotations

import functools
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import combinations_with_replacement
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from core.device import Device
from core.errors import UserError, warn_once

COMPILE_FLAGS = (
    "compile_dynamic",
    "cache_size_limit",
    "use_regional_compilation",
    "compile_from_sec_iteration",
    "inline_inbuilt_nn_modules",
    "allow_unspec_int_on_nn_module",
    "use_compiled_autograd",
)
REPLAYABLE = (torch.Tensor, bool, int, float, str, type(None))  # arguments that a recorded graph takes as they are
Shape = tuple[tuple[str, tuple[int, ...]], ...]


class ShapeLedger:
    """Which batch shapes each phase has met. A shape beyond the declared ones costs a graph, and is said.

    Attributes:
        met: per phase, how often each shape came.
    """

    def __init__(self) -> None:
        self.met: dict[str, Counter[Shape]] = {}
        self._declared: dict[str, int | None] = {}

    def declare(self, phase: str, number: int | None) -> None:
        """Say how many shapes ``phase`` will have at most; None: any number, since none costs a graph."""
        self._declared[phase] = number

    def see(self, phase: str, batch: dict[str, Any]) -> tuple[Shape, bool]:
        """Record one batch; returns its shape, and whether this phase meets it for the first time."""
        shape = tuple(sorted((key, tuple(value.shape)) for key, value in batch.items() if hasattr(value, "shape")))
        met = self.met.setdefault(phase, Counter())
        met[shape] += 1
        new = met[shape] == 1
        if new and len(met) > (self._declared.get(phase) or len(met)):
            described = ", ".join(f"{key} {list(size)}" for key, size in shape)
            warn_once(f"{phase}: a batch shape beyond the {self._declared[phase]} declared ones: {described}")
        return shape, new

    def report(self) -> dict[str, list[dict[str, Any]]]:
        """Per phase, each shape with the number of its batches, for ``all_results.json``."""
        return {
            phase: [{"batches": count, **{key: list(size) for key, size in shape}} for shape, count in met.items()]
            for phase, met in self.met.items()
        }


def must_count(shape: Shape, known: dict[Shape, int | None], interpolate: bool) -> bool:
    """Whether a new shape's FLOPs must be counted; not if some are not to be had, or if those of others tell them.

    Those that are told are then ``known``.
    """
    if interpolate and (flops := interpolated(shape, known)):
        known[shape] = flops
    return shape not in known and None not in known.values()


def interpolated(shape: Shape, known: dict[Shape, int | None]) -> int | None:
    """FLOPs of a batch of this shape from those of other shapes: exactly, or None.

    Those of layers and of attention are a polynomial of second degree of the sizes. It is taken for one if two shapes
    more than it needs agree with it; only shapes between those that are known are found.
    """
    alike = {other: flops for other, flops in known.items() if flops and [*dict(other)] == [*dict(shape)]}
    points = [[size for _, sizes in one for size in sizes] for one in (*alike, shape)]
    if len({len(point) for point in points}) > 1 or len(points) < 4:
        return None
    columns = [column for column in dict.fromkeys(zip(*points, strict=True)) if len(set(column)) > 1]
    if any(not min(column[:-1]) <= column[-1] <= max(column[:-1]) for column in columns):
        return None
    terms = [[1] * len(points), *columns]
    terms += [[a * b for a, b in zip(*pair, strict=True)] for pair in combinations_with_replacement(columns, 2)]
    *rows, wanted = [[Fraction(term[at]) for term in terms] for at in range(len(points))]
    solved: list[tuple[int, list[Fraction]]] = []  # the place of each row's leading 1, and the row with its FLOPs
    for row, flops in zip(rows, alike.values(), strict=True):
        row = _reduced([*row, Fraction(flops)], solved)
        place = next((at for at, value in enumerate(row) if value), None)
        if place == len(terms):
            return None  # it is no such polynomial
        if place is not None:
            solved.append((place, [value / row[place] for value in row]))
    *rest, flops = _reduced([*wanted, Fraction(0)], solved)
    return None if any(rest) or len(rows) < len(solved) + 2 else int(-flops)


def _reduced(row: list[Fraction], solved: list[tuple[int, list[Fraction]]]) -> list[Fraction]:
    for place, other in solved:
        if factor := row[place]:
            row = [value - factor * of_other for value, of_other in zip(row, other, strict=True)]
    return row


def takes_any_shape(args: Namespace, device: Device) -> bool:
    """Whether a batch of a new shape costs nothing: no graph is compiled or recorded for it, and no operation is.

    A Gaudi compiles each operation for each shape in eager mode, too.
    """
    records = args.use_hpu_graphs_for_training or args.use_hpu_graphs_for_inference
    return not (device.compiles or device.has_habana_kernels or (records and device.has_cuda_graphs))


def check(args: Namespace, device: Device) -> None:
    """Refuse HPU graphs where the bridge has none; say which compile options change nothing.

    Raises:
        UserError: HPU graphs are asked for on a Gaudi outside lazy mode, or together with torch.compile; or
            torch.compile does not know the backend or the mode.
    """
    for name in ("use_hpu_graphs_for_training", "use_hpu_graphs_for_inference"):
        if not getattr(args, name):
            continue
        if device.mode == "compile":
            raise UserError(f"--{name} and --execution_mode compile exclude each other; give one")
        if device.has_habana_kernels and not device.has_hpu_graphs:
            raise UserError(f"--{name} needs --execution_mode lazy: a Gaudi records graphs in lazy mode only")
        if not device.has_hpu_graphs and not device.has_cuda_graphs:
            warn_once(f"--{name} has no effect on {device.name}: it has no graphs to record")
    if device.mode != "compile":
        for name in COMPILE_FLAGS:
            if getattr(args, name):
                warn_once(f"--{name} has no effect in {device.mode} mode; it is an option of --execution_mode compile")
    elif (options := compile_options(args, device))["backend"] != "hpu_backend":  # that one is made for this bridge
        try:
            torch.compile(nn.Identity(), **options)  # looks both up, and compiles when it is called: never
        except RuntimeError as error:
            raise UserError(f"--torch_compile_backend, --torch_compile_mode: {error}") from None


def compile_options(args: Namespace, device: Device) -> dict[str, Any]:
    """What torch.compile is told. Habana's backend, which published commands name, is the usual one elsewhere."""
    backend = args.torch_compile_backend or device.compile_backend
    if backend == "hpu_backend" and not device.has_habana_kernels:
        backend = device.compile_backend
        warn_once(f"--torch_compile_backend hpu_backend is a Gaudi's own; {device.name} uses {backend}")
    mode = {"mode": args.torch_compile_mode} if args.torch_compile_mode else {}
    return {"backend": backend, "dynamic": args.compile_dynamic, **mode}


def compile_in_place(model: nn.Module, args: Namespace, device: Device) -> None:
    """Compile the model's forward, or its repeated blocks one by one. Names of parameters stay as they are."""
    config = torch._dynamo.config
    if args.cache_size_limit:
        config.cache_size_limit = args.cache_size_limit
    for name in ("inline_inbuilt_nn_modules", "allow_unspec_int_on_nn_module"):
        if getattr(args, name) is not None:
            setattr(config, name, getattr(args, name))
    if args.use_compiled_autograd:
        config.compiled_autograd = True
    options = compile_options(args, device)
    for module in repeated_blocks(model) if args.use_regional_compilation else [model]:
        module.compile(**options)


def repeated_blocks(model: nn.Module) -> Iterable[nn.Module]:
    """The entries of every list of modules of one class; the model itself if it has no such list."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) > 1]
    blocks = [block for blocks in lists if len({type(block) for block in blocks}) == 1 for block in blocks]
    return blocks or [model]


def apply_mode(model: nn.Module, args: Namespace, device: Device) -> None:
    """Apply the execution mode, and ``--use_hpu_graphs_for_training`` if the run trains, to a placed model."""
    record = args.use_hpu_graphs_for_training and args.do_train
    if device.mode == "compile":
        compile_in_place(model, args, device)
    elif record and device.has_hpu_graphs:
        plain = model.forward
        device.bridge("hpu").ModuleCacher()(model=model, inplace=True)
        model.forward = _where_replay_suffices(model, plain, model.forward, training=True)
    elif record and device.has_cuda_graphs:
        model.compile(mode="reduce-overhead")


def _where_replay_suffices(
    model: nn.Module, plain: Callable[..., Any], recorded: Callable[..., Any], training: bool
) -> Callable[..., Any]:
    """Return a forward that replays, or runs in full where the mode is another or an argument is an object.

    A replay repeats the device's work and no Python: a cache of keys and values would not grow in it.
    """

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        replayable = all(isinstance(leaf, REPLAYABLE) for leaf in tree_leaves((args, kwargs)))
        return (recorded if model.training is training and replayable else plain)(*args, **kwargs)

    return forward


def cache_inference_graphs(model: nn.Module, args: Namespace, device: Device) -> nn.Module:
    """Apply ``--use_hpu_graphs_for_inference``: the same object or a wrapper with the same weights and methods.

    Only for evaluation: recording detaches gradients.
    """
    if not args.use_hpu_graphs_for_inference:
        return model
    if device.has_hpu_graphs:
        options = {"disable_tensor_cache": args.disable_tensor_cache_hpu_graphs}
        if args.max_hpu_graphs is not None:
            options["max_graphs"] = args.max_hpu_graphs
        plain = model.forward
        model = device.bridge("hpu").wrap_in_hpu_graph(model, **options)
        model.forward = _where_replay_suffices(model, plain, model.forward, training=False)
    if device.has_cuda_graphs:
        model.compile(mode="reduce-overhead")
    return model


def compile_count(device: Device) -> int | None:
    """Graphs compiled so far, by the bridge or by torch.compile; None where nothing compiles."""
    if device.mode == "compile" and "torch._dynamo.utils" in sys.modules:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return device.graph_compilations()
