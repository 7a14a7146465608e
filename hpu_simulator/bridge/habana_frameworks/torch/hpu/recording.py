"""Recording operators and replaying them; what the graphs for inference and for training share."""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from contextlib import suppress
from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)
PLAIN = (torch.Tensor, str, bytes, int, float, complex, torch.dtype, torch.device, type(None))


class HPUGraph:
    """Operators of the device, recorded between `capture_begin` and `capture_end`, which `replay` runs again.

    Raises:
        RuntimeError: the bridge is not in lazy mode.
    """

    def __init__(self) -> None:
        require_lazy()
        self._graph = runtime.Graph()

    def capture_begin(self) -> None:
        """Record from here on; operators still run. Inputs are the tensors that exist now."""
        self._graph.capture_begin()

    def capture_end(self) -> None:
        """Record no more. The memory of what was recorded stays where it is."""
        self._graph.capture_end()

    def replay(self, asynchronous: bool = False) -> None:
        """Run what was recorded, on what the recorded tensors hold now.

        Args:
            asynchronous: without effect; the host always waits for the simulated device.
        """
        self._graph.replay()

    def reset(self) -> None:
        """Forget what was recorded, and free its memory."""
        self._graph.reset()


class graph:  # noqa: N801
    """Context manager: records its block into ``hpu_graph``, in ``stream`` if one is given."""

    def __init__(self, hpu_graph: HPUGraph, stream: torch.Stream | None = None) -> None:
        self.hpu_graph = hpu_graph
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is not None:
            self.stream.__enter__()
        self.hpu_graph.capture_begin()

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if error is None:
            self.hpu_graph.capture_end()
        else:
            abandon(self.hpu_graph)
        if self.stream is not None:
            self.stream.__exit__(kind, error, traceback)


def require_lazy() -> None:
    """Raise `RuntimeError` outside lazy mode."""
    if not runtime.lazy:
        raise RuntimeError("HPU graphs exist in lazy mode only: start with PT_HPU_LAZY_MODE=1")


def abandon(hpu_graph: HPUGraph) -> None:
    """End a recording that failed; whatever is wrong with it now matters less than the error that there was."""
    with suppress(RuntimeError):
        hpu_graph.capture_end()
    hpu_graph.reset()


def key_of(leaves: list[Any], structure: TreeSpec) -> Hashable:
    """Return what inputs with the same graph have in common: shapes of tensors, values of the rest."""
    return str(structure), tuple(map(_part, leaves))


def _part(leaf: Any) -> Hashable:
    if isinstance(leaf, torch.Tensor):
        return tuple(leaf.shape)
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return leaf


def input_hash(obj: Any) -> int:
    """Return a hash of nested inputs: of the tensors' shapes and of the other values."""
    return hash(key_of(*tree_flatten(obj)))


def copy_to(dst: Any, src: Any) -> None:
    """Copy the tensors in ``src`` into those at the same places in ``dst``.

    Raises:
        ValueError: the nesting differs.
    """
    (targets, structure), (sources, other) = tree_flatten(dst), tree_flatten(src)
    if structure != other:
        raise ValueError(f"cannot copy inputs of structure {other} into recorded ones of structure {structure}")
    copy_leaves(targets, sources)


def copy_leaves(targets: list[Any], sources: list[Any]) -> None:
    """Copy flat inputs into the recorded ones."""
    with torch.inference_mode(False), torch.no_grad():
        for target, source in zip(targets, sources, strict=True):
            if isinstance(target, torch.Tensor) and target is not source:
                target.copy_(source, non_blocking=True)


def buffers_for(leaves: list[Any]) -> list[Any]:
    """Return the inputs with every tensor in memory of its own, for a graph to read; warns of what it will not see."""
    for kind in {type(leaf).__name__ for leaf in leaves if not isinstance(leaf, PLAIN)}:
        warnings.warn(
            f"a graph was recorded with an object of class {kind} among its inputs; a replay neither sees changes "
            "inside it nor makes any",
            stacklevel=4,
        )
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
