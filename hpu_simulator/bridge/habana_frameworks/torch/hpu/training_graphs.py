"""HPU graphs for training: forward and backward pass are recorded, and replayed inside torch's autograd.

As with graphs for inference, what a replay writes lies in fixed memory: two forward passes of one shape before a
backward pass leave the activations of the second for both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from habana_frameworks import _lacking
from habana_frameworks.torch.hpu.recording import (
    HPUGraph,
    buffers_for,
    copy_leaves,
    graph,
    require_lazy,
)

__getattr__ = _lacking.attribute(__name__)


class TrainingGraph:
    """One forward pass and its backward passes: one for each set of outputs that ever got a gradient.

    Args:
        func: what runs while it is recorded.
        parameters: tensors beside the inputs that get gradients.
        allow_unused: a tensor that no output depends on gets a gradient of zeros; else that is an error.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        parameters: Sequence[torch.Tensor],
        leaves: list[Any],
        structure: TreeSpec,
        allow_unused: bool,
    ) -> None:
        self.func = func
        self.parameters = list(parameters)
        self.allow_unused = allow_unused
        self.differentiates = torch.is_grad_enabled()
        self.structure = structure
        with torch.inference_mode(False):
            self.inputs = [
                new.requires_grad_(old.requires_grad) if isinstance(new, torch.Tensor) else new
                for new, old in zip(buffers_for(leaves), leaves, strict=True)
            ]
        self.forward_graph: HPUGraph | None = None
        self.backward_graphs: dict[tuple[bool, ...], tuple[HPUGraph, list[torch.Tensor], list[Any]]] = {}
        self.outputs: list[Any] = []

    def __call__(self, leaves: list[Any]) -> Any:
        """Return the outputs for these inputs, which have a gradient function."""
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        results = iter(_Replay.apply(self, leaves, *given, *self.parameters))
        outputs = [next(results) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.outputs]
        return tree_unflatten(outputs, self.output_structure)

    def differentiable(self) -> list[torch.Tensor]:
        """The recorded inputs that are tensors, then the parameters."""
        return [leaf for leaf in self.inputs if isinstance(leaf, torch.Tensor)] + self.parameters

    def run_forward(self, leaves: list[Any]) -> list[torch.Tensor]:
        """Record the forward pass, or replay it; returns the recorded outputs that are tensors."""
        copy_leaves(self.inputs, leaves)
        if self.forward_graph is None:
            args, kwargs = tree_unflatten(self.inputs, self.structure)
            self.forward_graph = HPUGraph()
            with (
                torch.inference_mode(False),
                torch.set_grad_enabled(self.differentiates),
                graph(self.forward_graph),
            ):
                self.outputs, self.output_structure = tree_flatten(self.func(*args, **kwargs))
            self.versions = [tensor._version for tensor in self.differentiable()]
        else:
            self.forward_graph.replay()
        return [output for output in self.outputs if isinstance(output, torch.Tensor)]

    def run_backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Record the backward pass for these gradients, or replay it; returns one gradient per input and parameter."""
        present = tuple(gradient is not None for gradient in gradients)
        given = [gradient for gradient in gradients if gradient is not None]
        if present in self.backward_graphs:
            hpu_graph, buffers, results = self.backward_graphs[present]
            copy_leaves(buffers, given)
            hpu_graph.replay()
            return results
        tensors = [output for output in self.outputs if isinstance(output, torch.Tensor)]
        roots = [output for output, has in zip(tensors, present, strict=True) if has]
        inputs = self.differentiable()
        wanted = [tensor for tensor in inputs if tensor.requires_grad]
        buffers = [gradient.clone() for gradient in given]
        # Inputs and weights have changed since the forward pass was recorded, but not since it was replayed: torch has
        # no reason to refuse this.
        now = [tensor._version for tensor in inputs]
        _set_versions(inputs, self.versions)
        hpu_graph = HPUGraph()
        with graph(hpu_graph):
            found = iter(
                torch.autograd.grad(
                    roots,
                    wanted,
                    buffers,
                    retain_graph=True,  # the replays read what it holds
                    allow_unused=self.allow_unused,
                    materialize_grads=self.allow_unused,
                )
            )
        _set_versions(inputs, now)
        results = [next(found) if tensor.requires_grad else None for tensor in inputs]
        self.backward_graphs[present] = (hpu_graph, buffers, results)
        return results


def _set_versions(tensors: list[torch.Tensor], versions: list[int]) -> None:
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


class _Replay(torch.autograd.Function):
    """Forward and backward of a `TrainingGraph`, in torch's autograd.

    The gradients are returned as the very tensors that the graph holds, not as views of them: torch then copies them
    into ``parameter.grad`` instead of keeping them, and the next replay cannot overwrite what has been accumulated.
    """

    @staticmethod
    def forward(ctx: Any, recorded: TrainingGraph, leaves: list[Any], *_: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.recorded = recorded
        ctx.set_materialize_grads(False)
        outputs = recorded.run_forward(leaves)
        results = tuple(output.detach() for output in outputs)
        ctx.mark_non_differentiable(
            *(result for result, output in zip(results, outputs, strict=True) if not output.requires_grad)
        )
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        return None, None, *ctx.recorded.run_backward(gradients)


def make_graphed_callables(
    callables: Any,
    sample_args: tuple[Any, ...],
    warmup: int = 0,
    allow_unused_input: bool = False,
    asynchronous: bool = False,
    disable_tensor_cache: bool = False,
    dry_run: bool = False,
) -> Any:
    """Return modules or functions that replay graphs; a module is changed itself.

    Arguments and results are tensors, the arguments always of the shapes of the samples.

    Args:
        callables: a module or function, or a tuple of them.
        sample_args: its arguments, or a tuple of arguments for each.
        warmup: how many passes run before the recording.
        allow_unused_input: see `TrainingGraph`.
        asynchronous, disable_tensor_cache, dry_run: see `wrap_in_hpu_graph`.

    Raises:
        RuntimeError: the bridge is not in lazy mode.
        TypeError: an argument is no tensor.
    """
    require_lazy()
    if isinstance(callables, tuple):
        options = {"warmup": warmup, "allow_unused_input": allow_unused_input}
        pairs = zip(callables, sample_args, strict=True)
        return tuple(make_graphed_callables(func, args, **options) for func, args in pairs)
    if not all(isinstance(argument, torch.Tensor) for argument in sample_args):
        raise TypeError("make_graphed_callables takes tensors only; ModuleCacher takes other arguments too")
    module = callables if isinstance(callables, torch.nn.Module) else None
    func = callables if module is None else module.forward
    parameters = [] if module is None else [each for each in module.parameters() if each.requires_grad]
    for _ in range(warmup):
        func(*sample_args)
    leaves, structure = tree_flatten((tuple(sample_args), {}))
    recorded = TrainingGraph(func, parameters, leaves, structure, allow_unused_input)

    @functools.wraps(func)
    def graphed(*args: torch.Tensor) -> Any:
        return recorded(list(args))

    if module is None:
        return graphed
    module.forward = graphed
    return module
