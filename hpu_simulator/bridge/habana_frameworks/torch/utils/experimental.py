"""Which generation of the card this is."""

from __future__ import annotations

from enum import IntEnum

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime
from habana_frameworks.torch import hpu

__all__ = ["hpu", "synDeviceType"]
__getattr__ = _lacking.attribute(__name__)

synDeviceType = IntEnum(  # noqa: N816
    "synDeviceType", {"synDeviceGaudi": 1, "synDeviceGaudi2": 4, "synDeviceGaudi3": 5}
)
_BY_GENERATION = {
    "gaudi": synDeviceType.synDeviceGaudi,
    "gaudi2": synDeviceType.synDeviceGaudi2,
    "gaudi3": synDeviceType.synDeviceGaudi3,
}


def _get_device_type() -> synDeviceType:
    return _BY_GENERATION[runtime.settings.generation.name]


def _is_fp16_supported() -> bool:
    """The first generation computes in fp32 and bf16 only."""
    return runtime.settings.generation.name != "gaudi"
