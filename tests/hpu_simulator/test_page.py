"""The page: one file that needs nothing, every part of the report in it, all names escaped, no overflow."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import Counter
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hpu_simulator import charts, findings, page
from tests.hpu_simulator.snapshots import LIMIT, clean, empty, full, graph, sync

VOID = {"meta", "br", "wbr", "line", "rect", "circle", "polyline"}
EVIL = '<script>alert("x")</script>&\'"'
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")


class Elements(HTMLParser):
    """All elements with their attributes, and the text; fails where tags do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def crowded() -> dict[str, Any]:
    """Long names everywhere, and many of everything."""
    name = "a_very_long_name_that_nobody_would_ever_give_to_anything_" * 3
    graphs = [
        graph(n, "forward+backward", n, 0, [f"bfloat16[{n}, 1024, 1024]"] * 9, line=f"/{name}.py:{n}")
        for n in range(150)
    ]
    snapshot = full() | {"graphs": graphs, "syncs": [sync(f"/{name}/{name}.py:{n}", "item", 20) for n in range(30)]}
    snapshot["ops"] = {f"aten::{name}{n}": {"count": 10**9 - n, "flops": 0} for n in range(40)}
    snapshot["memory"] = clean()["memory"] | {"by_step": [[n, n * 10**6, 10**11 - n] for n in range(5000)]}
    return snapshot


RUNS = {
    "clean": clean(),
    "full": full(),
    "empty": empty(),
    "crowded": crowded(),
    "bare": {"mode": "compute", "lazy": True, "generation": "gaudi3", "ops": {"aten::mm": {"count": 1, "flops": 1}}},
    "one step": clean(steps=1, memory=clean()["memory"] | {"by_step": [[0, 1, 2]]}),
    "eager": clean(lazy=False, graphs=[], op_compilations=57),
}


@pytest.fixture(params=RUNS)
def snapshot(request: pytest.FixtureRequest) -> dict[str, Any]:
    return RUNS[request.param]


def test_the_page_nests_and_needs_nothing_from_outside(snapshot: dict[str, Any]) -> None:
    text = page.render(snapshot)
    found = Elements(text)
    names = {name for name, _ in found.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "base", "use", "image"}
    used = {key for _, attributes in found.elements for key in attributes}
    assert not used & {"href", "src", "srcset", "action"}
    assert not any(key.startswith("on") for key in used)
    assert not re.search(r"url\(|@import|https?://", text)


def test_the_page_is_for_phones_and_for_both_colour_schemes() -> None:
    text = page.render(clean())
    metas = [attributes for name, attributes in Elements(text).elements if name == "meta"]
    assert {"name": "viewport", "content": "width=device-width, initial-scale=1"} in metas
    assert "prefers-color-scheme: dark" in text
    assert "color-scheme: light dark" in text


def test_every_colour_has_a_light_and_a_dark_value() -> None:
    light, dark = (set(re.findall(r"(--[\w-]+):", part)) for part in page.STYLE.partition("@media")[::2])
    used = set(re.findall(r"var\((--[\w-]+)\)", page.STYLE))
    assert used - {"--kind"} <= light
    assert light <= dark


def test_every_class_that_is_drawn_has_a_style() -> None:
    drawn = {a["class"] for name, a in Elements(page.render(full())).elements if "class" in a and name != "td"}
    for names in drawn - {"number", "place"}:
        for name in names.split():
            assert f".{name}" in page.STYLE, name


def test_all_findings_tables_and_the_last_word_are_there() -> None:
    text = Elements(page.render(full())).text
    for item in findings.find(full()):
        assert " ".join(item["title"].split()) in text
        assert item["advice"] in text
        assert all(place in text for place in item["places"])
    for heading in ("Findings", "Phases", "Host syncs", "Graphs", "Values outside int32", "Collectives"):
        assert heading in text
    assert findings.HONEST in text
    assert "150 T floor 347 ms" in text
    assert Elements(page.render(clean())).text.count("Values outside int32") == 0


def test_every_name_is_escaped() -> None:
    evil = full()
    evil["ops"] = {EVIL: {"count": 3, "flops": 0}}
    evil["phases"] = {EVIL: {"ops": 1, "flops": 1, "peak_bytes": 5}}
    evil["graphs"] = [graph(1, EVIL, 9, 0, [EVIL], line=EVIL, first_new_op=EVIL, cut_by=EVIL, cut_at=EVIL)]
    evil["syncs"] = [sync(EVIL, "item", 20)]
    evil["out_of_int32"] = [{"line": EVIL, "op": EVIL, "value": 2**40, "count": 2}]
    evil["collectives"] = [{"op": EVIL, "dtype": EVIL, "count": 1, "bytes": 1, "supported": False, "line": EVIL}]
    evil["out_of_memory"] = {"bytes": 1, "op": EVIL, "phase": EVIL, "line": EVIL}
    text = page.render(evil)
    assert "<script" not in text
    assert text.count(escape("<script>")) > 15
    assert EVIL in Elements(text).text


def test_long_tables_are_cut_with_their_count() -> None:
    text = page.render(crowded())
    assert "... 50 more" in Elements(text).text
    graphs = text.partition("<h2>Graphs</h2>")[2].partition("</table>")[0]
    assert graphs.count("<tr>") == 1 + 100


def svg(text: str) -> list[tuple[str, dict[str, str | None]]]:
    return Elements(text).elements


def test_the_memory_chart_has_its_lines_limit_units_and_axis() -> None:
    drawn = charts.memory(clean()["memory"]["by_step"], LIMIT)
    lines = [a for name, a in svg(drawn) if name == "polyline"]
    assert [a["class"] for a in lines] == ["peak", "used"]
    assert [len(a["points"].split()) for a in lines] == [20, 20]
    (limit,) = [a for name, a in svg(drawn) if name == "line" and a["class"] == "limit"]
    peaks = [float(point.split(",")[1]) for point in lines[0]["points"].split()]
    assert float(limit["y1"]) < min(peaks), "the limit is above the peaks"
    text = Elements(drawn).text
    assert all(word in text for word in ("Device memory by step", "50 GB", "optimiser step", "limit 103.1 GB"))


def test_a_small_run_is_not_a_flat_line_below_a_far_limit() -> None:
    drawn = charts.memory([[0, 10**6, 2 * 10**6], [1, 10**6, 3 * 10**6]], LIMIT)
    points = next(a["points"] for name, a in svg(drawn) if name == "polyline")
    heights = [float(point.split(",")[1]) for point in points.split()]
    assert heights[0] - heights[1] > 40
    assert not [a for name, a in svg(drawn) if name == "line" and a["class"] == "limit"]
    assert "limit 103.1 GB: above" in Elements(drawn).text
    assert "2 MB" in Elements(drawn).text


def test_many_steps_are_thinned_without_losing_the_peak() -> None:
    rows = [[n, 10**9, 10**9] for n in range(5000)]
    rows[3333][2] = 90 * 10**9
    points = next(a["points"] for name, a in svg(charts.memory(rows, LIMIT)) if name == "polyline").split()
    assert 100 < len(points) < 500
    heights = [float(point.split(",")[1]) for point in points]
    assert sorted(heights)[0] < 80
    assert sorted(heights)[1] > 200


def test_the_bars_are_as_long_as_their_values() -> None:
    drawn = charts.graphs({"forward": (1, 10), "optimizer": (2, 20)})
    bars = [a for name, a in svg(drawn) if name == "rect" and a["height"] == "12"]
    assert [a["class"] for a in bars] == ["compiled", "reused", "compiled", "reused"]
    widths = [float(a["width"]) for a in bars]
    assert widths[1] == pytest.approx(widths[3] / 2, abs=0.2)
    assert widths[0] == pytest.approx(widths[3] / 20, abs=0.2)
    assert "20 graphs" in Elements(drawn).text


def test_the_operators_are_the_twelve_most_frequent() -> None:
    ops = {f"aten::op{n}": {"count": n, "flops": 0} for n in range(1, 30)}
    drawn = charts.operators(ops)
    names = [word for word in Elements(drawn.partition("</title>")[2].join(["<svg>", ""])).words if "aten" in word]
    assert names == [f"aten::op{n}" for n in range(29, 17, -1)]
    assert "top 12 of 29" in Elements(drawn).text


@pytest.mark.parametrize("drawn", [charts.memory([], LIMIT), charts.graphs({}), charts.operators({})])
def test_a_chart_without_data_says_so(drawn: str) -> None:
    assert re.search(r"no (optimiser step ended|graph ended|operator ran)", Elements(drawn).text)
    assert not [name for name, _ in svg(drawn) if name in ("rect", "polyline")]


def test_no_mark_is_outside_its_chart(snapshot: dict[str, Any]) -> None:
    """Positions inside the picture, and no text wider than the room from where it starts."""
    parts = re.findall(r"<svg.*?</svg>", page.render(snapshot))
    assert len(parts) == 3
    for part in parts:
        (view,) = [a["viewbox"] for name, a in Elements(part).elements if name == "svg"]
        width, height = map(float, view.split()[2:])
        for _, a in Elements(part).elements:
            values = [float(a[key]) for key in ("x", "x1", "x2", "cx") if key in a]
            assert all(0 <= value <= width for value in values), a
            assert all(0 <= float(a[key]) <= height for key in ("y", "y1", "y2", "cy") if key in a), a
            assert float(a.get("x", 0)) + float(a.get("width", 0)) <= width
        for x, anchor, content in re.findall(r'<text x="([\d.]+)" y="[\d.]+" text-anchor="(\w+)">(.*?)</text>', part):
            room = {"start": width - float(x), "end": float(x), "middle": 2 * min(float(x), width - float(x))}[anchor]
            assert len(content) * 6.2 <= room + 1, content


def test_labels_do_not_repeat() -> None:
    for rows in ([[n, 1, 1] for n in range(2)], [[n, 1, 1] for n in range(3)], [[7, 1, 1]]):
        words = Counter(Elements(charts.memory(rows, None)).words)
        assert all(count == 1 for word, count in words.items() if re.fullmatch(r"\d+", word))


@pytest.mark.processes
@pytest.mark.skipif(BROWSER is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_overflows_in_a_browser(snapshot: dict[str, Any], width: int, tmp_path: Path) -> None:
    """The page in a frame of that width (a window has a least width), measured by a script of the test's."""
    measure = (
        "<script>const e = document.documentElement; const wide = [...document.querySelectorAll('*')]"
        ".filter(x => x.getBoundingClientRect().right > innerWidth + 1).map(x => x.tagName);"
        "parent.postMessage([e.scrollWidth, innerWidth, wide.slice(0, 5)].join(' '), '*')</script>"
    )
    inner = page.render(snapshot).replace("</body>", measure + "</body>")
    frame = f'<iframe style="border:0;width:{width}px;height:3000px" srcdoc="{escape(inner)}"></iframe>'
    listen = "<script>addEventListener('message', e => document.title = 'measured ' + e.data)</script>"
    file = tmp_path / "page.html"
    file.write_text(f"<!DOCTYPE html><body>{listen}{frame}", encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [BROWSER, *flags, "--virtual-time-budget=3000", "--window-size=1400,1000", "--dump-dom", file.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    measured = re.search(r"<title>measured (\d+) (\d+) ?(.*?)</title>", done.stdout)
    assert measured, done.stderr[-500:]
    assert int(measured[2]) == width
    assert int(measured[1]) <= width
    assert measured[3] == ""
