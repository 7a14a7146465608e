"""Pages: what is drawn is what was given, whatever the names; a file is whole or not there."""

from __future__ import annotations

import csv
import subprocess
import sys
import time
import warnings

import numpy as np
import pytest
from PIL import Image

from core import errors, pages
from core.errors import UserError
from core.pages import CELL, GAP, LINE, confusion_counts, confusion_matrix, grid, one_line
from tests.conftest import REPOSITORY

HOSTILE = [
    "$x_1",
    r"$\frac{",
    "a_b^c",
    "猫と犬",
    "كلب",
    "\x00\x1b[31m",
    "\udcff",
    "",
    "two\nlines",
    "x" * 300,
    "👩‍🚀",
    "%s{0}",
]


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def cell(page: np.ndarray, number: int, columns: int, caption_lines: int, title: bool = False) -> np.ndarray:
    """The square of a contact sheet that belongs to a picture."""
    row, column = divmod(number, columns)
    top = GAP + 2 * LINE * title + row * (CELL + GAP + caption_lines * LINE)
    left = GAP + column * (CELL + GAP)
    return page[top : top + CELL, left : left + CELL]


# ------------------------------------------------------------------------------------------------------------ texts


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\nb\t\x00c", "a b c"),
        ("\u202eevil\udcff", "evil"),
        ("किं\u200cपि", "किं\u200cपि"),
        ("abcdefghij", "abcdefghij"),
        ("abcdefghijk", "abcdefghi…"),
        ("abcdefgh ijk", "abcdefgh…"),
        (7, "7"),
    ],
)
def test_one_line(text, shown):
    assert one_line(text, 10) == shown


# ------------------------------------------------------------------------------------------------------------ files


def test_a_table_keeps_what_its_cells_hold(tmp_path, monkeypatch):
    rows = [("a,b.png", 'the "first"', 0.5), ("über.png", "two\nlines", "")]
    pages.table(tmp_path / "table.csv", ("path", "class", "probability"), rows)
    with (tmp_path / "table.csv").open(encoding="utf-8", newline="") as file:
        read = list(csv.reader(file))
    assert read == [["path", "class", "probability"], *(list(map(str, row)) for row in rows)]
    monkeypatch.setenv("RANK", "1")
    pages.table(tmp_path / "other.csv", ("path",), [])
    assert not (tmp_path / "other.csv").exists()


def test_a_file_in_place_of_the_folder_is_an_error_that_names_it(tmp_path):
    (tmp_path / "taken").touch()
    for draw in (
        lambda path: grid(path, [np.eye(8)], ["one"]),
        lambda path: confusion_matrix(path, np.eye(2), ["a", "b"]),
    ):
        with pytest.raises(UserError, match=r"taken/page\.png cannot be written"):
            draw(tmp_path / "taken" / "page.png")


def test_other_ranks_draw_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    grid(tmp_path / "grid.png", [np.eye(8)], ["one"])
    confusion_matrix(tmp_path / "matrix.png", np.eye(2), ["a", "b"])
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_a_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pages, "find_spec", lambda name: None)
    grid(tmp_path / "grid.png", [np.eye(8)], ["one"])
    assert list(tmp_path.iterdir()) == []
    assert caplog.messages == ["matplotlib is not installed: no grid.png"]


def test_importing_is_cheap_and_drawing_leaves_no_global_state(tmp_path):
    code = (
        "import sys; from core import pages; import numpy as np\n"
        "assert not {'matplotlib', 'PIL', 'torch'} & set(sys.modules)\n"
        "from matplotlib import rcParams  # of which reading the backend would import pyplot\n"
        "settings = lambda: {name: rcParams[name] for name in rcParams if name != 'backend'}\n"
        "before = settings()\n"
        f"pages.grid({str(tmp_path / 'grid.png')!r}, [np.eye(8)], ['one'])\n"
        "assert settings() == before and 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_users_own_matplotlib_settings_do_not_count(tmp_path):
    import matplotlib

    grid(tmp_path / "before.png", [np.eye(8)], ["a_b"], title="$x$")
    with matplotlib.rc_context({"text.usetex": True, "savefig.dpi": 40, "figure.facecolor": "red", "font.size": 40}):
        grid(tmp_path / "after.png", [np.eye(8)], ["a_b"], title="$x$")
    assert (pixels(tmp_path / "before.png") == pixels(tmp_path / "after.png")).all()


# --------------------------------------------------------------------------------------------------- contact sheets


def test_small_pictures_are_enlarged_to_sharp_squares(tmp_path):
    digits = [np.random.default_rng(number).random((8, 8)) for number in range(7)]
    grid(tmp_path / "page.png", digits, [f"true {number}" for number in range(7)], title="seven")
    page = pixels(tmp_path / "page.png")
    assert page.shape == (GAP + 2 * LINE + 2 * (CELL + GAP + LINE), 5 * (CELL + GAP) + GAP, 3)
    for number, digit in enumerate(digits):
        expected = np.kron((digit * 255).round().astype(np.uint8), np.ones((24, 24), np.uint8))
        assert (cell(page, number, 5, 1, title=True) == expected[..., None]).all(), number
    assert (cell(page, 7, 5, 1, title=True) == 255).all(), "the last row is not full"
    assert (page[: GAP + 2 * LINE] < 100).any(), "the title"
    assert (page[-GAP - LINE :, : CELL + GAP] < 100).any(), "a caption"
    assert not (page[-GAP - LINE :, 2 * (CELL + GAP) + GAP :] < 255).any(), "no caption where no picture is"


def test_pictures_of_any_size_keep_their_aspect(tmp_path):
    sizes = [(400, 200), (200, 400), (3000, 3), (1, 4000), (100, 130), (CELL, CELL), (1, 1)]
    expected = [(192, 96), (96, 192), (192, 1), (1, 192), (100, 130), (192, 192), (192, 192)]
    grid(tmp_path / "page.png", [Image.new("RGB", size, "red") for size in sizes], [""] * 7, columns=7)
    page = pixels(tmp_path / "page.png")
    for number, (width, height) in enumerate(expected):
        rows, columns = np.nonzero((cell(page, number, 7, 0) != 255).any(-1))
        assert (np.ptp(columns) + 1, np.ptp(rows) + 1) == (width, height), sizes[number]
        assert abs(rows.min() + rows.max() - (CELL - 1)) <= 1, "in the middle"


@pytest.mark.parametrize(
    ("picture", "color"),
    [
        (Image.new("L", (8, 8), 100), (100, 100, 100)),
        (Image.new("1", (8, 8), 1), (255, 255, 255)),
        (Image.new("RGBA", (8, 8), (255, 0, 0, 0)), (255, 255, 255)),
        (Image.new("LA", (8, 8), (0, 255)), (0, 0, 0)),
        (Image.new("P", (8, 8), 0), (0, 0, 0)),
        (Image.new("CMYK", (8, 8), (0, 255, 255, 0)), (255, 0, 0)),
        (Image.fromarray(np.full((8, 8), 40000, np.uint16)), (255, 255, 255)),
        (Image.fromarray(np.repeat([[5000], [20000]], 8, axis=1).astype(np.uint16)), (64, 64, 64)),
        (Image.new("F", (8, 8), 0), (0, 0, 0)),
        (np.full((8, 8, 1), 7, np.uint8), (7, 7, 7)),
        (np.full((8, 8, 3), 300, np.int64), (255, 255, 255)),
        (np.full((8, 8, 4), 0.5, np.float32), (191, 191, 191)),
        (np.full((8, 8), np.nan), (0, 0, 0)),
        (np.ones((8, 8), bool), (255, 255, 255)),
    ],
)
def test_pictures_of_any_kind(tmp_path, picture, color):
    grid(tmp_path / "page.png", [picture], [""])
    assert np.abs(cell(pixels(tmp_path / "page.png"), 0, 1, 0)[CELL // 2 - 20, 1].astype(int) - color).max() <= 1


@pytest.mark.parametrize("shape", [(8,), (8, 8, 2), (3, 8, 8), (2, 8, 8, 3), (0, 8)])
def test_an_array_that_is_no_picture_is_refused(tmp_path, shape):
    with pytest.raises(ValueError, match="no picture"):
        grid(tmp_path / "page.png", [np.zeros(shape)], [""])


def test_captions_are_as_many_as_pictures(tmp_path):
    with pytest.raises(ValueError, match="shorter"):
        grid(tmp_path / "page.png", [np.eye(8)], [])


def test_hostile_captions_stay_below_their_picture(tmp_path):
    blank = [np.zeros((8, 8))] * len(HOSTILE)
    grid(
        tmp_path / "page.png", blank, [f"{text}\n{text * 20}" for text in HOSTILE], columns=3, title="$_{".join(HOSTILE)
    )
    page = pixels(tmp_path / "page.png")
    for number in range(len(HOSTILE)):
        assert (cell(page, number, 3, 3, title=True) == 0).all(), HOSTILE[number]


def test_a_wide_caption_stays_in_its_column(tmp_path):
    grid(tmp_path / "page.png", [np.zeros((8, 8))] * 3, ["W" * pages.CAPTION_WIDTH, "", ""])
    page = pixels(tmp_path / "page.png")
    assert page.shape[1] == 3 * (CELL + GAP) + GAP, "no wider than the pictures"
    assert (page[GAP + CELL :, : CELL + GAP] < 100).any()
    assert (page[GAP + CELL :, GAP + CELL + GAP :] == 255).all()


def test_a_long_caption_is_broken_and_cut(tmp_path):
    lines = pages._broken("seed 7\n" + "a prompt of many words " * 9)
    assert lines[0] == "seed 7"
    assert len(lines) == 3
    assert all(len(line) <= pages.CAPTION_WIDTH for line in lines)
    assert lines[2].endswith("…")
    assert pages._broken("seed 7\na prompt") == ["seed 7", "a prompt"]
    assert {len(line) for line in pages._broken("猫" * 99)} == {pages.CAPTION_WIDTH // 2}


def test_the_file_holds_texts(tmp_path):
    texts = {"prompt": "猫, oil on canvas\udcff", "seed": "7"}
    grid(tmp_path / "page.png", [np.eye(8)], [""], metadata=texts)
    with Image.open(tmp_path / "page.png") as image:
        image.load()
        assert image.text["prompt"] == "猫, oil on canvas "
        assert image.text["seed"] == "7"


def test_without_pictures_the_page_has_its_title(tmp_path):
    grid(tmp_path / "page.png", [], [], title="no mistakes")
    page = pixels(tmp_path / "page.png")
    assert (page[: GAP + 2 * LINE] < 100).any()
    assert (page[GAP + 2 * LINE :] == 255).all()


def test_fonts_that_are_not_here_are_not_asked_for(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(pages, "FONTS", (*pages.FONTS, "No Such Font"))
    grid(tmp_path / "page.png", [np.eye(8)], ["猫"])
    assert caplog.messages == []


# ----------------------------------------------------------------------------------------------- confusion matrices


def test_counts_are_true_by_predicted():
    counts = confusion_counts(np.array([0, 0, 2, 2, 2]), np.array([0, 1, 2, 0, 2], np.int32), 3)
    assert counts.tolist() == [[1, 1, 0], [0, 0, 0], [1, 0, 2]]
    assert counts.dtype == np.int64
    assert confusion_counts([], [], 2).tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(("true", "predicted"), [([0, 3], [0, 0]), ([0, 0], [0, -1]), ([0], [0, 0])])
def test_a_number_that_is_no_class_is_refused(true, predicted):
    with pytest.raises(ValueError, match=r"of 3 classes|same shape"):
        confusion_counts(np.array(true), np.array(predicted), 3)


def drawn(tmp_path, monkeypatch, counts, names, title=""):
    """Draw, and return the page's pixels and its axes."""
    from matplotlib.figure import Figure

    found, add = [], Figure.add_subplot
    monkeypatch.setattr(Figure, "add_subplot", lambda self, *a, **o: found.append(add(self, *a, **o)) or found[-1])
    confusion_matrix(tmp_path / "page.png", counts, names, title)
    return pixels(tmp_path / "page.png"), found[0]


def colour(page, axes, row: int, column: int, away: float = 0.35) -> np.ndarray:
    """Colour near a cell's corner, where no number is."""
    x, y = axes.transData.transform((column - away, row - away))
    return page[page.shape[0] - 1 - round(y), round(x)].astype(int)


def test_few_classes_have_all_numbers_and_colours_of_their_row(tmp_path, monkeypatch):
    counts = np.array([[1000, 0, 0], [5, 5, 0], [0, 0, 0]])
    page, axes = drawn(tmp_path, monkeypatch, counts, ["cat", "dog", "bird"], "test")
    assert sorted((text.get_text(), *text.get_position()) for text in axes.texts) == [
        ("1000", 0, 0), ("5", 0, 1), ("5", 1, 1)
    ]  # fmt: skip
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog", "bird"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["cat", "dog", "bird"]
    assert (axes.get_xlabel(), axes.get_ylabel(), axes.get_title()) == ("predicted", "true", "test")
    full, half, none, blank = (colour(page, axes, *at) for at in ((0, 0), (1, 0), (0, 1), (2, 2)))
    assert (blank == 255).all(), "a class without rows"
    assert full.sum() < half.sum() < none.sum() < blank.sum()
    assert (half == colour(page, axes, 1, 1)).all()


def test_colours_do_not_depend_on_how_many_rows_a_class_has(tmp_path, monkeypatch):
    page, axes = drawn(tmp_path, monkeypatch, np.array([[3000, 1000], [1, 3]]), ["a", "b"])
    assert (colour(page, axes, 0, 0) == colour(page, axes, 1, 1)).all()
    assert (colour(page, axes, 0, 1) == colour(page, axes, 1, 0)).all()


def test_hostile_names_are_shown_as_they_are(tmp_path, monkeypatch):
    names = HOSTILE
    page, axes = drawn(tmp_path, monkeypatch, np.eye(len(names), dtype=int), names, "$_{".join(names))
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels[:3] == names[:3]
    assert max(map(len, labels)) == 20
    assert not any(label.get_parse_math() for label in [*axes.get_yticklabels(), *axes.get_xticklabels(), axes.title])
    assert (page < 100).any()


def test_a_thousand_classes_are_a_heat_map_with_some_names(tmp_path, monkeypatch):
    counts = np.diag(np.full(1000, 49)).astype(np.int64)
    counts[700, 200] = 1
    counts[300] = 0
    start = time.perf_counter()
    page, axes = drawn(tmp_path, monkeypatch, counts, [f"class_{number}" for number in range(1000)])
    assert time.perf_counter() - start < 10  # about 1 on an idle machine
    assert len(axes.texts) == 0
    assert [label.get_text() for label in axes.get_yticklabels()] == [f"class_{n}" for n in range(0, 1000, 40)]
    width, height = axes.transData.transform((1000, 0)) - axes.transData.transform((0, 1000))
    assert min(width, height) >= 1000, "a pixel for each class"
    x, y = axes.transData.transform((200, 700)).round().astype(int)
    around = page[page.shape[0] - y - 3 : page.shape[0] - y + 3, x - 3 : x + 3].astype(int)
    assert around.sum(-1).min() < colour(page, axes, 600, 200).sum() - 100, "one mistake of 50 can be seen"


def test_names_and_counts_are_as_many(tmp_path):
    with pytest.raises(ValueError, match="for 3 names"):
        confusion_matrix(tmp_path / "page.png", np.eye(2), ["a", "b", "c"])


def test_curves_are_drawn_with_any_title_and_numbers(tmp_path):
    points = [(step, value) for step, value in enumerate((2.0, float("nan"), float("inf"), 1e30), start=1)]
    title, dense = "$x^ " + "y" * 200, [(step, 1.0) for step in range(100)]
    pages.curves(tmp_path / "a.png", {"training": points, "evaluation": []}, title, "steps", "loss")
    pages.curves(tmp_path / "b.png", {"training": dense}, "", "steps", "loss")
    shown = [np.asarray(Image.open(tmp_path / name).convert("L")) for name in ("a.png", "b.png")]
    assert [one.shape for one in shown] == [(576, 1024)] * 2
    assert all((one < 128).sum() > 500 for one in shown)
