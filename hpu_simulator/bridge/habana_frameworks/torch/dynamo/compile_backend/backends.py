"""``hpu_backend``: traces forward and backward ahead of time and runs both graphs on the device.

torch finds it by an entry point when somebody asks for it by name, so that a run without `torch.compile` does not pay
for importing the compiler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)


def _compile(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
    runtime.note_compilation()
    return make_boxed_func(graph.forward)


def hpu_backend(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
    """Compile ``graph`` for the device; each forward and each backward graph counts as one compilation.

    Raises:
        RuntimeError: the bridge is in lazy mode, which torch.compile does not work with.
    """
    if runtime.lazy:
        raise RuntimeError("torch.compile(backend='hpu_backend') needs eager mode: start with PT_HPU_LAZY_MODE=0")
    return aot_autograd(fw_compiler=_compile, bw_compiler=_compile)(graph, inputs)
