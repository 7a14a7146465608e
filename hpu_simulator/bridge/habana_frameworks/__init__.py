"""The HPU simulator under the name of Habana's bridge: its interface, on a simulated device. No code of Habana's."""

from __future__ import annotations

import os

from habana_frameworks import _lacking

SWITCH = "HPU_SIMULATOR"  # the environment variable that asks for it

__getattr__ = _lacking.attribute(__name__)


def __autoload() -> None:
    """Start the simulated device; torch calls this at the end of its own import. Does nothing while it is not asked."""
    if not os.environ.get(SWITCH):
        return
    try:
        import habana_frameworks.torch  # noqa: F401
    except (ValueError, RuntimeError) as error:
        if type(error).__module__.startswith("hpu_simulator."):  # a wrong setting, no compiler
            raise SystemExit(f"error: {error}") from None  # torch would make two tracebacks of it
        raise
