"""Collectives: ``import habana_frameworks.torch.distributed.hccl`` makes torch know the backend ``hccl``."""

from __future__ import annotations

from habana_frameworks import _lacking

__getattr__ = _lacking.attribute(__name__)
