"""Documented code: what is read, cleaned, dropped and split, and that nothing is imported for it."""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from core import sample_data
from core.sample_data import clean_markup, documented_code, read_source, split_docstring, stable_split

MODULE = '''
    """Tools that read the tide tables.

    The tables come from the harbour office once a year.
    """

    raise RuntimeError("this file was imported")


    class Table(dict):
        """Heights of one harbour by hour.

        Parameters
        ----------
        rows : list
        """

        width = 3

        def look_up(self, hour):
            """Return the height of the water at an hour. Between hours it is interpolated linearly.

            :param hour: the hour
            """
            return self[hour]

        def short(self):
            """Too short."""


    if True:
        async def fetch(address):
            """Fetch :func:`~net.tables` from the ``address`` given.

            Retries are the *caller's* business, see [the guide](guide.md)::

                literal = block

            Args:
                address: where
            """
            def inner():
                """This inner function is left out of it."""
'''


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, str | bytes]], None]:
    """Make packages from {path: text} on ``sys.path``."""

    def make(files):
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_bytes(text if isinstance(text, bytes) else dedent(text).encode())
        monkeypatch.syspath_prepend(str(tmp_path))

    return make


def test_objects_of_a_file_without_importing_it(packages) -> None:
    packages({"tides/__init__.py": "raise RuntimeError('imported')", "tides/tables.py": MODULE})
    rows = documented_code(["tides"])
    assert "tides" not in sys.modules
    assert {(row.package, row.path) for row in rows} == {("tides", "tides/tables.py")}
    assert [(row.name, row.kind, row.summary, row.description) for row in rows] == [
        ("tables", "module", "Tools that read the tide tables.",
         "The tables come from the harbour office once a year."),
        ("Table", "class", "Heights of one harbour by hour.", ""),
        ("look_up", "function", "Return the height of the water at an hour.",
         "Between hours it is interpolated linearly."),
        ("fetch", "function", "Fetch tables from the address given.",
         "Retries are the caller's business, see the guide:"),
    ]  # fmt: skip
    codes = [row.code for row in rows]
    assert codes[0].startswith("raise RuntimeError")
    assert codes[1].startswith("class Table(dict):")
    assert "width = 3" in codes[1]
    assert not any(row.summary in code for row, code in zip(rows, codes, strict=True))
    assert codes[2] == "def look_up(self, hour):\nreturn self[hour]"
    assert all(len(code) <= sample_data.MAX_CODE_CHARS for code in codes)


@pytest.mark.parametrize(
    ("markup", "clean"),
    [
        (":class:`~torch.nn.Module` and :py:meth:`run`", "Module and run"),
        (":ref:`the title <some-label>` of it", "the title of it"),
        ("a [link](https://x.org/a_b) here", "a link here"),
        ("`text <https://x.org>`_ there", "text there"),
        ("``x * y`` and `z`", "x * y and z"),
        ("**bold**, *slanted*, 2 * 3 * 4, **kwargs", "bold, slanted, 2 * 3 * 4, **kwargs"),
        ("as shown by Kim [1]_ and [Kim2019]_.", "as shown by Kim and."),
        ("two\n   lines", "two lines"),
    ],
)
def test_markup_is_cleaned(markup, clean) -> None:
    assert clean_markup(markup) == clean


@pytest.mark.parametrize(
    "docstring",
    [
        "Only three words.",
        "word " * 31,
        "Déjà vu is not ASCII text.",
        "Helper that does some of the work.",
        "Test that all of it works.",
        "See the other function for this.",
        "!!! warning this is an admonition",
        "An example of use follows here::\n\n    x = 1",
        "Read https://example.org/page for the details.",
        "",
        "Parameters\n----------\nx : int",
    ],
)
def test_unusable_summaries_are_dropped(docstring) -> None:
    assert split_docstring(docstring) == ("", "")


def test_summary_is_one_sentence_and_abbreviations_do_not_end_it() -> None:
    assert split_docstring("Sort items, e.g. Numbers, in place. The sort is stable. It is fast.") == (
        "Sort items, e.g. Numbers, in place.",
        "The sort is stable. It is fast.",
    )


@pytest.mark.parametrize("heading", ["Args:", "Returns\n-------", "Example::", ":param x: it", ">>> f(1)", "# Usage"])
def test_description_ends_at_a_section(heading) -> None:
    text = f"Return the sum of it.\n\nIt adds all of them.\n\n{heading}\n    x: more\n\nThis is not read any more."
    assert split_docstring(text) == ("Return the sum of it.", "It adds all of them.")


def test_unreadable_files_and_absent_packages_are_skipped(packages) -> None:
    packages({
        "odd/latin.py": b'"""Not valid \xe9 as UTF-8 text."""\n',
        "odd/broken.py": '"""Not valid as Python text."""\ndef',
        "odd/null.py": b'"""Has a null byte in it."""\0',
        "odd/escape.py": 'def f():\n    """Has an invalid escape below."""\n    return "\\d"',
        "odd/tests/helpers.py": '"""Lies in a folder of tests."""\nx = 1',
        "odd/test_it.py": '"""Is itself a test file."""\nx = 1',
        "odd/empty.py": '"""Has nothing but this line."""',
    })  # fmt: skip
    assert [row.path for row in documented_code(["odd", "no_such_package"])] == ["odd/escape.py"]


def test_no_summary_and_no_text_twice(packages) -> None:
    one = 'def f(x):\n    """Return twice the number given."""\n    return 2 * x\n'
    packages({
        "twice/a.py": one,
        "twice/b.py": one.replace("2 * x", "x + x"),  # the same summary
        "twice/c.py": one.replace("twice", "double"),  # the same text
        "twice/d.py": one.replace("twice", "thrice").replace("2", "3"),
    })  # fmt: skip
    assert [row.path for row in documented_code(["twice"])] == ["twice/a.py", "twice/d.py"]


def test_processes_find_the_same_as_one(packages, monkeypatch) -> None:
    text = 'def f{0}():\n    """Return the number {0} of all."""\n    return {0}'
    packages({f"many/m{i:03}.py": text.format(i) for i in range(210)})
    rows = {}
    for workers in (1, 3):
        monkeypatch.setattr(sample_data.os, "cpu_count", lambda workers=workers: workers)
        rows[workers] = documented_code(["many"])
    assert rows[1] == rows[3]
    assert [row.name for row in rows[1]] == [f"f{i}" for i in range(210)]


@pytest.fixture(scope="module")
def stdlib():
    return documented_code(["stdlib"])


def test_standard_library(stdlib) -> None:
    assert len(stdlib) > 4000
    assert "json/decoder.py" in {row.path for row in stdlib}
    assert not any(row.path.startswith("/") or "\\" in row.path for row in stdlib)
    assert len({row.summary for row in stdlib}) == len(stdlib)
    for row in stdlib:
        assert 4 <= len(row.summary.split()) <= 30
        assert row.summary.isascii()
        assert not any(mark in row.summary for mark in ("::", "`", "\n"))
        assert row.description or row.code
    again = documented_code(["email", "json", "email"])  # the same file is the same id by either way
    assert again == documented_code(["email", "json"])
    assert {row.path for row in again} < {row.path for row in stdlib}


def test_split_is_by_file_and_stable(stdlib) -> None:
    # These values must never change: published figures rest on them.
    assert [stable_split(key) for key in ("json/decoder.py", "16", "23")] == ["train", "test", "validation"]
    splits = defaultdict(set)
    for row in stdlib:
        splits[row.path].add(stable_split(row.path))
    assert all(len(names) == 1 for names in splits.values())
    counts = Counter(stable_split(f"file {i}", 10, 20) for i in range(5000))
    assert counts["validation"] == pytest.approx(500, abs=80)
    assert counts["test"] == pytest.approx(1000, abs=110)
    assert {stable_split(f"{i}", 0, 0) for i in range(100)} == {"train"}


def test_not_python() -> None:
    assert read_source('"""Unclosed is not Python at all', "p", "p/a.py") == []
    assert read_source("x = 1", "p", "p/a.py") == []
