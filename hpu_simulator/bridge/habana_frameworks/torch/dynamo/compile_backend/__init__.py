"""``torch.compile(backend="hpu_backend")``; `backends` has it, which imports torch's compiler: only when asked."""

from __future__ import annotations

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)
