"""HPU graphs for inference: recorded once per shape of the inputs, then replayed. Lazy mode only.

Replay runs what was recorded on the recorded memory; Python does not run. So, as on the card:

- an input has to be copied into the tensor that was recorded; `wrap_in_hpu_graph` does that;
- an output is the recorded tensor, which the next replay overwrites: clone what has to last;
- which graph is replayed is decided by the tensors' shapes and the values of everything else, an object being its
  identity: what happens inside an object that the module changes, as a key-value cache, is not repeated.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from habana_frameworks import _lacking
from habana_frameworks.torch.hpu.module_cacher import ModuleCacher
from habana_frameworks.torch.hpu.recording import (
    HPUGraph,
    buffers_for,
    copy_leaves,
    copy_to,
    graph,
    input_hash,
    key_of,
    require_lazy,
)
from habana_frameworks.torch.hpu.training_graphs import make_graphed_callables

__all__ = [
    "CachedParams",
    "HPUGraph",
    "ModuleCacher",
    "copy_to",
    "graph",
    "input_hash",
    "make_graphed_callables",
    "wrap_in_hpu_graph",
    "wrap_in_hpu_graph_func",
]
__getattr__ = _lacking.attribute(__name__)


class CachedParams:
    """A graph with the tensors that it reads and writes."""

    def __init__(
        self, graph_inputs: Any, graph_outputs: Any, graph: HPUGraph | None = None, asynchronous: bool = False
    ) -> None:
        self.graph_inputs = graph_inputs
        self.graph_outputs = graph_outputs
        self.graph = graph
        self.asynchronous = asynchronous


def wrap_in_hpu_graph(
    module: torch.nn.Module,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
    free_inplace: bool = False,
    verbose: bool = False,
    log_frequency: int = 100,
) -> torch.nn.Module:
    """Let ``module.forward`` record a graph the first time that it meets a shape, and replay it from then on.

    For inference: outputs have no gradient. The module itself is changed and returned, so that its other methods, as
    ``generate``, come to the graphs too.

    Args:
        module: the module; a function is wrapped as by `wrap_in_hpu_graph_func`.
        asynchronous, disable_tensor_cache, dry_run, free_inplace, verbose, log_frequency: change when a card works,
            how much it keeps and what it prints; not the results. Without effect here.
        max_graphs: shapes beyond that many run without a graph; None: no limit.

    Raises:
        RuntimeError: the bridge is not in lazy mode.
    """
    options = {"max_graphs": max_graphs}
    if not isinstance(module, torch.nn.Module):
        return wrap_in_hpu_graph_func(module, **options)
    module.forward = wrap_in_hpu_graph_func(module.forward, **options)
    return module


def wrap_in_hpu_graph_func(
    func: Callable[..., Any],
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
    max_graphs: int | None = None,
    free_inplace: bool = False,
    verbose: bool = False,
    log_frequency: int = 100,
) -> Callable[..., Any]:
    """Return ``func`` with graphs; see `wrap_in_hpu_graph`."""
    require_lazy()
    recorded: dict[Hashable, CachedParams] = {}

    @functools.wraps(func)
    def replayed(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        key = key_of(leaves, structure)
        if key not in recorded:
            if max_graphs is not None and len(recorded) >= max_graphs:
                return func(*args, **kwargs)
            recorded[key] = _record(func, leaves, structure)
        else:
            copy_leaves(recorded[key].graph_inputs, leaves)
            recorded[key].graph.replay()
        return tree_unflatten(*recorded[key].graph_outputs)

    return replayed


def _record(func: Callable[..., Any], leaves: list[Any], structure: TreeSpec) -> CachedParams:
    with torch.inference_mode(False), torch.no_grad():
        inputs = buffers_for(leaves)
        args, kwargs = tree_unflatten(inputs, structure)
        hpu_graph = HPUGraph()
        with graph(hpu_graph):
            outputs = func(*args, **kwargs)
    return CachedParams(inputs, tree_flatten(outputs), hpu_graph)
