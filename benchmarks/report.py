"""The table of a report, for the terminal and for the README: both from the report's JSON alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"


def number(value: float) -> str:
    """Three digits, without an exponent."""
    if value >= 1e9:
        return f"{value / 1e9:.3g} G"
    return f"{value:.0f}" if value >= 100 else f"{value:#.3g}"


def cells(row: Mapping[str, Any]) -> list[str]:
    """What a line of the table says: what, peer, ours, theirs, ratio with its quartiles, target, whether it is met."""
    low, high = row["quartiles"]
    target = f"{'at most' if row['at_most'] else 'at least'} {row['target']}"
    return [
        row["what"],
        row["peer"],
        f"{number(row['ours'])} {row['unit']}",
        f"{number(row['theirs'])} {row['unit']}",
        f"{row['ratio']:.2f} ({low:.2f} to {high:.2f})",
        target,
        "yes" if row["reached"] else "**no**",
    ]


def title(entry: Mapping[str, Any]) -> str:
    """A contest's name in words."""
    return entry["contest"].replace("_", " ")


HEAD = ["what", "beside", "ours", "theirs", "ours / theirs", "target", "reached"]


def table(report: Mapping[str, Any]) -> str:
    """All rows, aligned, for a terminal; what could not be measured follows."""
    lines = [HEAD, *(cells(row) for row in report["rows"])]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text += [f"{each['contest']}: model FLOPs utilisation {each['mfu']:.1%}" for each in report["mfu"]]
    return "\n".join(text + [f"{each['contest']}: not measured: {each['why']}" for each in report["missing"]])


def markdown(report: Mapping[str, Any], path: str) -> str:
    """The same for the README: a table for each device, with date, commit, machine and versions.

    Args:
        path: of the report, as the README names it.
    """
    machine, versions = report["machine"], report["versions"]
    parts = []
    for device in dict.fromkeys(row["device"] for row in report["rows"]):
        parts += ["| " + " | ".join(HEAD) + " |", "|" + " --- |" * len(HEAD)]
        parts += ["| " + " | ".join(cells(row)) + " |" for row in report["rows"] if row["device"] == device]
        peaks = [f"{rate / 1e9:.0f} GFLOP/s in {name}" for name, rate in report["matmul"][device].items()]
        shares = [f"{title(each)} {each['mfu']:.0%}" for each in report["mfu"] if each["device"] == device]
        used = f" Training uses of it: {', '.join(shares)}." if shares else ""
        parts += ["", f"Matrix products of {device}: {', '.join(peaks)}.{used}", ""]
    missing = [f"Not measured: {title(each)}: {each['why']}." for each in report["missing"]]
    names = ("torch", "transformers", "diffusers", "timm")
    known = ", ".join(f"{name} {versions[name]}" for name in names if name in versions)
    made = (
        f"Medians and quartiles of {report['rounds']} rounds, {report['date'][:10]}, commit {report['commit'][:10]}, "
        f"{machine['cores']} cores ({machine['processor']}), {known}. All figures: [{path}]({path})."
    )
    return "\n".join([*parts, *missing, "", made])


def write_into(readme: Path, report: Mapping[str, Any], path: str) -> None:
    """Put the report's table between the README's two marks.

    Raises:
        ValueError: the README lacks them.
    """
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{readme} has no lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{markdown(report, path)}\n{END}{after}", encoding="utf-8")
