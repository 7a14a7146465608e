"""ModuleCacher: a training graph for each combination of inputs."""

from __future__ import annotations

import copy
import functools
import logging
from collections import Counter
from collections.abc import Hashable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

from habana_frameworks import _lacking
from habana_frameworks.torch.hpu.recording import key_of, require_lazy
from habana_frameworks.torch.hpu.training_graphs import TrainingGraph

__getattr__ = _lacking.attribute(__name__)
logger = logging.getLogger(__name__)


class ModuleCacher:
    """Caches training graphs of a module: ``ModuleCacher(max_graphs=10)(model=model)``.

    Args:
        max_graphs: combinations of inputs beyond that many run without a graph.
    """

    def __init__(self, max_graphs: int = 10) -> None:
        require_lazy()
        self.max_graphs = max_graphs

    def __call__(
        self,
        model: torch.nn.Module,
        use_lfu: bool = False,
        inplace: bool = True,
        allow_unused_input: bool = False,
        asynchronous: bool = False,
        have_grad_accumulation: bool = False,
        log_frequency: int = 100,
        verbose: bool = False,
        disable_tensor_cache: bool = False,
        dry_run: bool = False,
    ) -> torch.nn.Module:
        """Let ``model.forward`` record a graph for each combination of inputs, and replay it from then on.

        Besides the inputs (shapes of tensors, values of the rest), training or evaluation mode, gradients, autocast
        and which parameters train make graphs differ.

        Args:
            model: changed itself, or with ``inplace`` False a copy of it with parameters of its own.
            use_lfu: record the most frequent combinations, counted between ``model.capture_start()`` and
                ``model.capture_end()``, in place of the first ones.
            allow_unused_input: parameters that the result does not depend on get zeros as gradients, not an error.
            have_grad_accumulation: separate graphs for passes right after gradients were zeroed, which the caller
                announces by ``model.set_iteration_count(0)``, and for later ones.
            log_frequency, verbose: log the numbers of graphs and replays, once every so many calls.
            asynchronous, disable_tensor_cache, dry_run: see `wrap_in_hpu_graph`.
        """
        if not inplace:
            model = copy.deepcopy(model)
        cache = _Cache(model, self.max_graphs, use_lfu, allow_unused_input, log_frequency if verbose else 0)

        @functools.wraps(model.forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return cache.forward(*args, **kwargs)

        model.forward = forward
        if have_grad_accumulation:
            model.set_iteration_count = cache.set_iteration_count
        if use_lfu:
            model.capture_start, model.capture_end = cache.capture_start, cache.capture_end
        return model


class _Cache:
    def __init__(
        self, model: torch.nn.Module, max_graphs: int, use_lfu: bool, allow_unused: bool, log_frequency: int
    ) -> None:
        self.model, self.func = model, model.forward
        self.max_graphs, self.allow_unused, self.log_frequency = max_graphs, allow_unused, log_frequency
        self.recorded: dict[Hashable, TrainingGraph] = {}
        self.counted: Counter[Hashable] = Counter()
        self.chosen: set[Hashable] | None = set() if use_lfu else None  # None: the first ones
        self.iteration = 0
        self.calls = self.replays = 0

    def set_iteration_count(self, count: int) -> None:
        """Say how many passes there were since the gradients were zeroed."""
        self.iteration = count

    def capture_start(self) -> None:
        """Start to count combinations of inputs; nothing is recorded meanwhile."""
        self.counted.clear()
        self.chosen = set()

    def capture_end(self) -> None:
        """Choose the most frequent combinations."""
        self.chosen = {key for key, _ in self.counted.most_common(self.max_graphs)}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        key = (key_of(leaves, structure), self._surroundings(leaves, parameters))
        self._count(key)
        if key not in self.recorded:
            full = len(self.recorded) >= self.max_graphs if self.chosen is None else key not in self.chosen
            if full:
                return self.func(*args, **kwargs)
            recorded = TrainingGraph(self.func, parameters, leaves, structure, self.allow_unused)
            result = recorded(leaves)
            self.recorded[key] = recorded
            return result
        self.replays += 1
        return self.recorded[key](leaves)

    def _surroundings(self, leaves: list[Any], parameters: list[torch.Tensor]) -> Hashable:
        """What decides about the operators that run, besides the arguments."""
        autocast = torch.is_autocast_enabled("hpu"), torch.get_autocast_dtype("hpu")
        trains = tuple(leaf.requires_grad for leaf in leaves if isinstance(leaf, torch.Tensor))
        modes = self.model.training, torch.is_grad_enabled(), self.iteration == 0
        return autocast, trains, modes, tuple(map(id, parameters))

    def _count(self, key: Hashable) -> None:
        self.calls += 1
        if self.chosen is not None:
            self.counted[key] += 1
        if self.log_frequency and self.calls % self.log_frequency == 0:
            logger.warning("%d calls: %d graphs, %d replays", self.calls, len(self.recorded), self.replays)
