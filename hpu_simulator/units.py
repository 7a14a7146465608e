"""How numbers and places are written: bytes, rates, times, counts, lines of files, tables."""

from __future__ import annotations

import os
import site
import sysconfig
from collections.abc import Iterable
from pathlib import Path
from typing import Any

GB = 1e9
WIDTH = 100  # columns of text
try:
    FOLDER = os.getcwd()  # places are told relative to where the program was started
except FileNotFoundError:  # it was removed
    FOLDER = os.sep
_FOLDERS = {FOLDER, sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages()}


def gigabytes(count: float | None) -> str:
    """Return bytes as e.g. ``12.3 GB`` (1e9), small counts in MB or bytes, None as ``n/a``."""
    if count is None:
        return "n/a"
    for unit, size in (("GB", GB), ("MB", 1e6), ("kB", 1e3)):
        if count >= size or (unit == "GB" and count >= 0.05 * GB):
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} B"


def quantity(number: float) -> str:
    """Return a large number with a prefix, e.g. ``1.23 T``."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {prefix}"
    return f"{number:,.0f} "


def seconds(duration: float) -> str:
    """Return seconds as e.g. ``12 ms``."""
    for unit, size in (("s", 1), ("ms", 1e-3)):
        if duration >= size:
            return f"{duration / size:.3g} {unit}"
    return f"{duration * 1e6:.3g} us"


def share(part: float, whole: float | None) -> str:
    """Return a percentage; ``n/a`` of nothing."""
    return f"{part / whole:.1%}" if whole else "n/a"


def plural(count: int, one: str, many: str | None = None) -> str:
    """Return e.g. ``1 graph`` or ``2,000 graphs``."""
    return f"{count:,} {one if count == 1 else many or one + 's'}"


def per_step(count: int, steps: int | None, seen: int | None = None) -> str:
    """Return e.g. ``1 per step`` or ``3 in 20 steps``; without steps ``3 times``.

    Args:
        seen: in how many of the steps it happened, None if that is not known: what happened in few of them (a
            checkpoint) has no rate, it is e.g. ``26 in 1 of 20 steps``.
    """
    if not steps:
        return f"{count} times" if count != 1 else "once"
    if seen is not None and seen < min(count, steps):
        return f"{count} in {seen} of {steps} steps"
    return f"{count / steps:.4g} per step" if count >= steps else f"{count} in {steps} steps"


def short(line: str) -> str:
    """Return ``file:number`` relative to the working folder or to the packages' folder, where it is inside one.

    Two places, ``file:number from file:number``, are both shortened.
    """
    inner, between, outer = line.partition(" from ")
    return _relative(inner) + between + (_relative(outer) if between else "")


def _relative(line: str) -> str:
    path, colon, number = line.rpartition(":")
    for folder in sorted(_FOLDERS, key=len, reverse=True):
        if colon and Path(path).is_relative_to(folder):
            return f"{Path(path).relative_to(folder)}:{number}"
    return line


def table(header: Iterable[str], rows: Iterable[Iterable[Any]], left: tuple[int, ...] = (0,)) -> list[str]:
    """Lines with aligned columns: those in ``left`` from the left, the others from the right."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    aligned = [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in cells
    ]
    return [shorten(f"  {line}").rstrip() for line in aligned]


def shorten(line: str, width: int = WIDTH) -> str:
    """Cut the middle of a line that is too long: its end names a file and a number."""
    if len(line) <= width:
        return line
    tail = width // 2
    return line[: width - tail - 3] + "..." + line[-tail:]
