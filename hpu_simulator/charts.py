"""Charts of the HTML report as inline SVG. Drawn 380 units wide: that is a phone's width and a third of a desktop's,
so that text is as large as the page's own on both. Colours come from the page's style sheet, by class."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape

from hpu_simulator.units import gigabytes, plural

WIDTH = 380
POINTS = 300  # drawn at most; of more, each drawn point is the largest of its neighbours
CHARACTER = 6.4  # width of one character at the charts' text size, on the safe side
_NEAR = 0.2  # a peak below this share of the limit would be a flat line at the bottom


def memory(by_step: Sequence[Sequence[float]], limit: float | None) -> str:
    """Memory over steps, from rows (step, bytes in use at its end, peak bytes in it), with the limit as a line."""
    title = "Device memory by step"
    if not by_step:
        return nothing(title, "no optimiser step ended")
    rows = _thinned(by_step)
    highest = max(max(row[1], row[2]) for row in rows)
    shown = limit and highest >= _NEAR * limit
    top = max(highest, limit if shown else 0) * 1.08 or 1
    left, right, height, head = 58, WIDTH - 12, 250, 44
    bottom = height - 40
    first, last = rows[0][0], rows[-1][0]
    unit, size = _unit(top)

    def x(step: float) -> float:
        return left + (right - left) * ((step - first) / (last - first) if last > first else 0.5)

    def y(count: float) -> float:
        return bottom - (bottom - head) * count / top

    marks = _y_axis(top / size, unit, left, right, lambda tick: y(tick * size))
    steps = sorted({first, last} if last - first < 2 else {first, (first + last) // 2, last})
    anchors = ["middle"] * (len(steps) - 1) + ["end" if len(steps) > 1 else "middle"]
    marks += [_text(x(step), bottom + 15, f"{step:g}", anchor) for step, anchor in zip(steps, anchors, strict=True)]
    marks.append(_text((left + right) / 2, height - 6, "optimiser step", "middle"))
    for column, name in ((2, "peak"), (1, "used")):
        points = " ".join(f"{x(row[0]):.1f},{y(row[column]):.1f}" for row in rows)
        marks.append(f'<polyline class="{name}" points="{points}"/>')
        if len(rows) == 1:
            marks.append(f'<circle class="{name}" cx="{x(first):.1f}" cy="{y(rows[0][column]):.1f}" r="3"/>')
    if shown:
        marks.append(f'<line class="limit" x1="{left}" x2="{right}" y1="{y(limit):.1f}" y2="{y(limit):.1f}"/>')
    legend = [("peak", "peak"), ("used", "in use after the step")]
    if limit:
        legend.append(("limit", f"limit {gigabytes(limit)}" + ("" if shown else ": above")))
    marks.append(_legend(legend))
    peak = f"Peak {gigabytes(highest)}" + (f" of a limit of {gigabytes(limit)}" if limit else "")
    return _svg(title, f"{title}, in {unit}. {peak}.", height, marks)


def graphs(phases: dict[str, tuple[int, int]]) -> str:
    """Graphs compiled and reused, two bars for each phase."""
    title = "Graphs by phase"
    if not phases:
        return nothing(title, "no graph ended")
    rows = [
        (phase if kind == "compiled" else "", f"{number:,}", number, kind)
        for phase, (compiled, reused) in phases.items()
        for kind, number in (("compiled", compiled), ("reused", reused))
    ]
    about = "; ".join(f"{phase}: {compiled} compiled, {reused} reused" for phase, (compiled, reused) in phases.items())
    return _bars(title, about, rows, "graph", [("compiled", "compiled (slow)"), ("reused", "reused")])


def operators(ops: dict[str, dict[str, int]], shown: int = 12) -> str:
    """Calls by operator, the most frequent ones."""
    title = f"Operators by kind, top {min(shown, len(ops))} of {len(ops)}"
    if not ops:
        return nothing("Operators by kind", "no operator ran")
    largest = sorted(ops.items(), key=lambda item: (-item[1]["count"], item[0]))[:shown]
    rows = [(name, f"{item['count']:,}", item["count"], "reused") for name, item in largest]
    about = ", ".join(plural(item["count"], name, name) for name, item in largest)
    return _bars(title, about, rows, "call", [])


def nothing(title: str, why: str) -> str:
    """A chart that has nothing to show, and why."""
    return _svg(title, f"{title}: {why}", 84, [_text(0, 56, why)])


def _bars(title: str, about: str, rows: list[tuple[str, str, int, str]], unit: str, legend: list) -> str:
    """Horizontal bars, rows of (name, value as text, value, class): the name stands above its bar and has all the
    width. A row without a name belongs to the one before it."""
    left, right, at = 2, WIDTH - 8, 46 if legend else 28
    room = max(len(text) for _, text, _, _ in rows) * CHARACTER + 8
    most = max(value for _, _, value, _ in rows) or 1
    marks = [_legend(legend)] if legend else []
    for name, text, value, kind in rows:
        if name:
            marks.append(_text(left, at + 11, _cut(name, right - left)))
            at += 18
        length = (right - left - room) * value / most
        marks.append(f'<rect class="{kind}" x="{left}" y="{at}" width="{max(length, 1):.1f}" height="12" rx="2"/>')
        marks.append(_text(left + max(length, 1) + 5, at + 10, text))
        at += 19
    marks.append(f'<line class="axis" x1="{left}" x2="{right - room:.1f}" y1="{at + 2}" y2="{at + 2}"/>')
    marks += [_text(left, at + 17, "0"), _text(right - room, at + 17, plural(most, unit), "end")]
    return _svg(title, f"{title}: {about}", at + 24, marks)


def _y_axis(top: float, unit: str, left: float, right: float, y: Callable[[float], float]) -> list[str]:
    step = _round_step(top)
    ticks = [float(f"{step * number:.6g}") for number in range(int(top / step) + 1)]
    lines = [f'<line class="grid" x1="{left}" x2="{right}" y1="{y(tick):.1f}" y2="{y(tick):.1f}"/>' for tick in ticks]
    return lines + [_text(left - 6, y(tick) + 4, f"{tick:g} {unit}", "end") for tick in ticks]


def _round_step(top: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides ``top`` into two to five parts."""
    power = 10 ** math.floor(math.log10(top))
    step = next(times * power for times in (0.2, 0.5, 1, 2) if top / (times * power) <= 5)
    return float(f"{step:.1g}")


def _unit(top: float) -> tuple[str, float]:
    return next(((name, size) for name, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if top >= size), ("B", 1))


def _thinned(rows: Sequence[Sequence[float]]) -> list[tuple[float, float, float]]:
    group = math.ceil(len(rows) / POINTS)
    parts = [rows[at : at + group] for at in range(0, len(rows), group)]
    return [(part[-1][0], max(row[1] for row in part), max(row[2] for row in part)) for part in parts]


def _legend(entries: list[tuple[str, str]]) -> str:
    at, marks = 2.0, []
    for kind, name in entries:
        marks.append(f'<rect class="{kind}" x="{at:.1f}" y="20" width="10" height="10" rx="2"/>')
        marks.append(_text(at + 14, 29, name))
        at += 26 + len(name) * CHARACTER
    return "".join(marks)


def _text(x: float, y: float, content: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(content)}</text>'


def _cut(name: str, room: float) -> str:
    most = int(room / CHARACTER)
    return name if len(name) <= most else name[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _svg(title: str, about: str, height: float, marks: list[str]) -> str:
    head = f'<text class="title" x="0" y="12">{escape(title)}</text>'
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(about)}">'
        f"<title>{escape(about)}</title>{head}{''.join(marks)}</svg>"
    )
