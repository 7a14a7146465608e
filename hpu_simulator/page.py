"""The report as one HTML file that needs nothing else: no script, no font, no picture from anywhere."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Any

from hpu_simulator import charts, findings
from hpu_simulator.units import gigabytes, per_step, plural, quantity, seconds, share, short

SHOWN = 100  # rows of a table
STYLE = """
:root { color-scheme: light dark; --back: #f6f7f9; --card: #fff; --text: #1c2430; --soft: #5a6675; --line: #d9dee5;
  --a: #1f6fd0; --b: #d9730d; --limit: #c4262e; --error: #b3202a; --warning: #8f5300; --note: #2c5f8a; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --card: #1b2129; --text: #e6eaf0; --soft: #9aa7b6;
  --line: #343d49; --a: #62a5f5; --b: #f0a04b; --limit: #ff6b70; --error: #ff8086; --warning: #f0b25e;
  --note: #8ac0ee; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--text); font: 15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width: 1240px; margin: 0 auto; padding: 20px 16px 48px; }
h1 { font-size: 24px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 18px; margin: 32px 0 10px; }
.soft { color: var(--soft); } p { margin: 4px 0; overflow-wrap: anywhere; }
.cards { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 150px), 1fr)); }
.charts { display: grid; gap: 12px; grid-template-columns: repeat(auto-fit, minmax(min(100%, 340px), 1fr));
  align-items: start; margin-top: 12px; }
.card, .finding { background: var(--card); border: 1px solid var(--line); border-radius: 8px; padding: 12px;
  min-width: 0; }
.card b { display: block; font-size: 20px; line-height: 1.3; overflow-wrap: anywhere; }
.finding { border-left: 4px solid var(--kind); margin-bottom: 10px; }
.finding strong { color: var(--kind); text-transform: uppercase; font-size: 13px; margin-right: 6px; }
.finding ul { margin: 6px 0; padding-left: 20px; } li, code, .place { overflow-wrap: anywhere; }
td { overflow-wrap: break-word; }
.error { --kind: var(--error); } .warning { --kind: var(--warning); } .note { --kind: var(--note); }
code { font: 13px/1.5 ui-monospace, "DejaVu Sans Mono", monospace; }
svg { display: block; width: 100%; height: auto; } svg text { font-size: 11px; fill: var(--soft); }
svg .title { font-size: 13px; font-weight: 600; fill: var(--text); }
.grid { stroke: var(--line); } .axis { stroke: var(--soft); }
polyline { fill: none; stroke-width: 1.8; stroke-linejoin: round; }
polyline.peak { stroke: var(--b); } polyline.used { stroke: var(--a); }
rect.peak, circle.peak, rect.compiled { fill: var(--b); } rect.used, circle.used, rect.reused { fill: var(--a); }
line.limit { stroke: var(--limit); stroke-width: 1.6; stroke-dasharray: 6 4; } rect.limit { fill: var(--limit); }
table { width: 100%; border-collapse: collapse; background: var(--card); border: 1px solid var(--line); }
th, td { padding: 6px 10px; text-align: left; vertical-align: top; border-top: 1px solid var(--line); }
th { font-size: 13px; color: var(--soft); font-weight: 600; } td.number, th.number { text-align: right; }
@media (max-width: 720px) { thead { display: none; } tr, td { display: block; } td, td.number { text-align: left;
  border: 0; padding: 2px 10px; } tr { border-top: 1px solid var(--line); padding: 6px 0; }
  td::before { content: attr(data-label) ": "; color: var(--soft); font-size: 13px; } }
"""


def render(snapshot: dict[str, Any]) -> str:
    """Return the page for a snapshot. Whatever the snapshot names is escaped; a part it lacks says so."""
    mode = "lazy" if snapshot.get("lazy") else "eager"
    steps = snapshot.get("steps") or 0
    title = f"HPU simulator: {snapshot['generation']}"
    about = f"{mode} mode, {snapshot['mode']}, {plural(snapshot.get('devices', 1), 'device')}"
    if snapshot.get("rank") is not None:
        about += f", rank {snapshot['rank']} of {snapshot['world_size']}"
    memory = snapshot.get("memory") or {}
    drawn = [
        charts.memory(memory.get("by_step") or [], memory.get("limit")),
        charts.graphs(findings.graphs_by_phase(snapshot))
        if snapshot.get("lazy")
        else charts.nothing(
            "Graphs by phase", f"eager: {plural(snapshot.get('op_compilations', 0), 'operator shape')} compiled"
        ),
        charts.operators(snapshot.get("ops") or {}),
    ]
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(about)}, {escape(plural(steps, "optimiser step"))}</p>',
        f'<div class="cards">{"".join(_cards(snapshot))}</div>',
        f'<div class="charts">{"".join(f"<div class=card>{chart}</div>" for chart in drawn)}</div>',
        "<h2>Findings</h2>",
        *(map(_finding, findings.find(snapshot)) if findings.find(snapshot) else ["<p>None.</p>"]),
        *_tables(snapshot),
        f'<p class="soft" style="margin-top:32px">{escape(findings.HONEST)}</p>',
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n"
        + "\n".join(body)
        + "\n</main></body></html>\n"
    )


def _cards(snapshot: dict[str, Any]) -> Iterable[str]:
    memory, steps = snapshot.get("memory") or {}, snapshot.get("steps")
    phases = findings.graphs_by_phase(snapshot).values()
    flops, floor = findings.flops_per_step(snapshot), findings.floor_seconds_per_step(snapshot)
    syncs = sum(item["count"] for item in snapshot.get("syncs") or [])
    copies = snapshot.get("copies") or {}
    peak, limit = memory.get("peak"), memory.get("limit")
    facts = [
        ("peak memory", gigabytes(peak), f"{share(peak, limit)} of {gigabytes(limit)}" if peak and limit else ""),
        ("graphs compiled", f"{sum(one for one, _ in phases):,}", f"{sum(two for _, two in phases):,} reused")
        if snapshot.get("lazy")
        else ("operator shapes compiled", f"{snapshot.get('op_compilations', 0):,}", "eager mode"),
        (
            "host syncs",
            per_step(syncs, steps) if syncs else "none",
            f"from {plural(len(snapshot.get('syncs') or []), 'line')}",
        ),
        ("copied to the device", gigabytes((copies.get("to_device") or {}).get("bytes")), ""),
        ("copied to the host", gigabytes((copies.get("to_host") or {}).get("bytes")), ""),
        ("FLOPs per step", quantity(flops).strip() if flops else "n/a", f"floor {seconds(floor)}" if floor else ""),
    ]
    for name, value, more in facts:
        yield f'<div class="card"><span class="soft">{escape(name)}</span><b>{escape(value)}</b>{escape(more)}</div>'


def _finding(item: dict[str, Any]) -> str:
    places = "".join(f"<li><code>{escape(place)}</code></li>" for place in item["places"][:SHOWN])
    kind = escape(item["severity"])
    return (
        f'<div class="finding {kind}"><strong>{kind}</strong>{escape(item["title"])}'
        f"{f'<ul>{places}</ul>' if places else ''}<p>{escape(item['advice'])}</p></div>"
    )


def _tables(snapshot: dict[str, Any]) -> Iterable[str]:
    steps, limit = snapshot.get("steps"), (snapshot.get("memory") or {}).get("limit")
    phases = [
        (name, f"{item['ops']:,}", gigabytes(item["peak_bytes"]), share(item["peak_bytes"], limit))
        for name, item in (snapshot.get("phases") or {}).items()
    ]
    yield from _table("Phases", ("phase", "#operators", "#peak memory", "#of the limit"), phases)
    syncs = [
        (findings.how_often(item, steps), item["kind"], gigabytes(item["bytes"]), short(item["line"]))
        for item in sorted(snapshot.get("syncs") or [], key=lambda item: -item["count"])
    ]
    yield from _table("Host syncs", ("how often", "kind", "#bytes", "@line"), syncs)
    graphs = [
        (
            str(graph["step"]),
            graph["phase"],
            f"{graph['ops']:,}",
            f"{graph['reused']:,}",
            ", ".join(graph["inputs"]) or "none",
            findings.new_from(graph),
            graph["cut_by"] + (f" at {short(graph['cut_at'])}" if graph.get("cut_at") else ""),
        )
        for graph in snapshot.get("graphs") or []
    ]
    header = ("#first in step", "phase", "#operators", "#reused", "@inputs", "@new from", "@cut by")
    yield from _table("Graphs", header, graphs)
    values = [
        (str(item["value"]), str(item["count"]), item["op"], short(item["line"]))
        for item in snapshot.get("out_of_int32") or []
    ]
    yield from _table("Values outside int32", ("#value", "#times", "operator", "@line"), values)
    calls = [
        (
            item["op"],
            item["dtype"],
            str(item["count"]),
            gigabytes(item["bytes"]),
            {True: "yes", False: "no"}.get(item.get("supported"), "n/a"),
        )
        for item in snapshot.get("collectives") or []
    ]
    yield from _table("Collectives", ("collective", "dtype", "#times", "#bytes", "in HCCL"), calls)


def _table(title: str, header: tuple[str, ...], rows: list[tuple[str, ...]]) -> Iterable[str]:
    """A table, nothing without rows. A column whose name starts with # is of numbers, with @ of places."""
    if not rows:
        return
    names = [name.lstrip("#@") for name in header]
    kinds = [{"#": ' class="number"', "@": ' class="place"'}.get(name[0], "") for name in header]
    yield f"<h2>{escape(title)}</h2><table><thead><tr>"
    yield "".join(f"<th{kind}>{escape(name)}</th>" for name, kind in zip(names, kinds, strict=True))
    yield "</tr></thead><tbody>"
    for row in rows[:SHOWN]:
        cells = zip(names, kinds, row, strict=True)
        yield "<tr>" + "".join(f'<td{k} data-label="{escape(n)}">{escape(c)}</td>' for n, k, c in cells) + "</tr>"
    yield "</tbody></table>"
    if len(rows) > SHOWN:
        yield f'<p class="soft">... {len(rows) - SHOWN} more</p>'
