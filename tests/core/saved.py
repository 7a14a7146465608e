"""A checkpoint that is written while its caller waits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from core import checkpoint
from core.checkpoint import OnMain


def save(output_dir: Path, step: int, write: Callable[[OnMain, Path], None]) -> Path:
    """Return ``checkpoint-<step>``, which ``write`` has filled; see `checkpoint.begin` and `checkpoint.complete`."""
    main = OnMain()
    checkpoint.complete(main, checkpoint.begin(main, output_dir, step, write), step)
    main.agree(checkpoint.UNWRITTEN.format(output_dir / f"checkpoint-{step}"))
    return output_dir / f"checkpoint-{step}"
