"""Pages to look at: contact sheets, confusion matrices and curves as PNG, tables as csv."""

from __future__ import annotations

import csv
import io
import textwrap
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import numpy as np

from core.errors import is_main_process, warn_once
from core.files import write_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from PIL.Image import Image

DPI = 128  # a power of two: so many pixels divided by it and multiplied again are as many
CELL, GAP, LINE = 192, 12, 15  # pixels of a contact sheet: side of a thumbnail, space between two, line of a caption
CAPTION_LINES, CAPTION_WIDTH = 3, 28  # a caption's lines, and characters in each: about as wide as a thumbnail
FEW = 30  # classes whose every name and number can be read
SHARES = (0, 1, 5, 10, 25, 50, 100)  # percent, along the colours
# The first, matplotlib's own, has many alphabets; the others, where they are installed, have Chinese, Japanese, Korean.
FONTS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "Microsoft YaHei", "Hiragino Sans",
    "Arial Unicode MS",
)  # fmt: skip


def one_line(text: Any, longest: int) -> str:
    """Return ``text`` without line breaks and characters that cannot be shown, with ``…`` if it is cut."""
    shown = "".join(c if c.isprintable() or c in "\u200c\u200d" else " " for c in str(text))  # two join letters
    shown = " ".join(shown.split())
    return shown if len(shown) <= longest else shown[: longest - 1].rstrip() + "…"


def grid(
    path: str | Path,
    pictures: Sequence[Image | np.ndarray],
    captions: Sequence[str],
    columns: int = 5,
    title: str = "",
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Draw a contact sheet on the main process: thumbnails row by row, a caption of at most three lines under each.

    Args:
        pictures: of any size and mode, drawn as they are given. An array is (height, width) or (height, width,
            channels) with 1, 3 or 4 channels, floats from 0 to 1, truth values, or integers from 0 to 255.
        captions: one for each picture; line breaks are kept, long lines are broken, the end of a long one is cut.
        columns: pictures in a full row.
        metadata: texts of the PNG file by keyword (Latin-1, at most 79 characters).

    Raises:
        UserError: the file cannot be written.
        ValueError: there are not as many captions as pictures, or an array has another shape.
    """
    if not _draws(path):
        return
    columns = max(min(columns, len(pictures)), 1)
    texts = [_broken(caption) for caption in captions]
    depth = GAP + max((len(lines) for lines in texts), default=0) * LINE  # of the captions under a row
    top = GAP + (2 * LINE if title else 0)
    width = max(columns * (CELL + GAP) + GAP, 3 * CELL)  # room for a title over one picture
    height = top + max(-(-len(pictures) // columns), 1) * (CELL + depth)
    canvas = np.full((height, width, 3), 255, np.uint8)
    with _page(path, width, height, metadata) as figure:
        for number, (picture, lines) in enumerate(zip(pictures, texts, strict=True)):
            row, column = divmod(number, columns)
            left, upper = GAP + column * (CELL + GAP), top + row * (CELL + depth)
            small = _thumbnail(picture)
            y, x = upper + (CELL - small.shape[0]) // 2, left + (CELL - small.shape[1]) // 2
            canvas[y : y + small.shape[0], x : x + small.shape[1]] = small
            for line, text in enumerate(lines):
                _write(figure, left + CELL / 2, upper + CELL + 3 + line * LINE, text, CELL + GAP, size=6)
        _write(figure, width / 2, GAP, one_line(title, width // 9), width, size=9)
        figure.figimage(canvas, origin="upper", zorder=-1)


def confusion_counts(true: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """Count how often a row of class i was taken for class j: (classes, classes), int64.

    Args:
        true, predicted: class numbers (rows,), from 0 to below ``classes``.

    Raises:
        ValueError: a number is not that of a class, or there are not as many of one as of the other.
    """
    pairs = np.stack([np.asarray(true, np.int64), np.asarray(predicted, np.int64)])
    if pairs.size and not 0 <= pairs.min() <= pairs.max() < classes:
        raise ValueError(f"class numbers from {pairs.min()} to {pairs.max()}, of {classes} classes")
    return np.bincount(pairs[0] * classes + pairs[1], minlength=classes**2).reshape(classes, classes)


def confusion_matrix(path: str | Path, counts: np.ndarray, names: Sequence[str], title: str = "") -> None:
    """Draw how often each class (row) was taken for each (column), on the main process.

    A cell's colour is its share of the row, on a scale of roots: else the few mistakes of a good model would all look
    like none. Up to 30 classes have their numbers and names; of more, some names along the axes. The counts take
    8 bytes x classes², 8 MB for 1,000: it is for the caller to leave 20,000 classes alone.

    Args:
        counts: of `confusion_counts`, (classes, classes); a class without rows stays blank.
        names: of the classes, any text.

    Raises:
        UserError: the file cannot be written.
        ValueError: the counts are not of as many classes as there are names.
    """
    counts, classes = np.asarray(counts), len(names)
    if counts.shape != (classes, classes):
        raise ValueError(f"counts of shape {counts.shape} for {classes} names")
    if not _draws(path):
        return
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.full(counts.shape, np.nan), where=totals > 0)
    # 1,500 have a pixel for each of 1,000 classes; one mistake in it is small, so its colour has to be strong.
    side, root = (max(600, 360 + 50 * classes), 1 / 2) if classes <= FEW else (1500, 1 / 4)
    with _page(path, side + 100, side, layout="constrained") as figure:
        axes = figure.add_subplot()
        heat = axes.imshow(shares**root, cmap="Blues", vmin=0, vmax=1)
        bar = figure.colorbar(heat, shrink=0.8, label="share of the true class")
        bar.set_ticks([(share / 100) ** root for share in SHARES], labels=[f"{share:.4g}%" for share in SHARES])
        ticks = range(0, classes, 1 if classes <= FEW else -(-classes // 25))
        labels = [one_line(names[tick], 20) for tick in ticks]
        axes.set_xticks(ticks, labels, rotation=90, parse_math=False)
        axes.set_yticks(ticks, labels, parse_math=False)
        axes.set(xlabel="predicted", ylabel="true")
        axes.set_title(textwrap.fill(one_line(title, 150), side // 12), parse_math=False)
        for row, column in np.argwhere(counts) if classes <= FEW else ():
            color = "white" if shares[row, column] > 0.3 else "black"
            axes.text(column, row, f"{counts[row, column]}", ha="center", va="center", fontsize=7, color=color)


def curves(
    path: str | Path, found: Mapping[str, Sequence[tuple[int, float]]], title: str, x_label: str, y_label: str
) -> None:
    """Draw curves on the main process.

    Args:
        found: points of each curve by its label, whole numbers along x; a curve without points is left out.

    Raises:
        UserError: the file cannot be written.
    """
    if not _draws(path):
        return
    with _page(path, 1024, 576, layout="constrained") as figure:
        axes = figure.add_subplot()
        for label, points in found.items():
            if points:
                marks = "o-" if len(points) <= 40 else "-"
                axes.plot(*zip(*points, strict=True), marks, markersize=4, linewidth=1.4, label=label)
        axes.set(xlabel=x_label, ylabel=y_label)
        axes.set_title(one_line(title, 100), parse_math=False)  # a run's name may hold a $
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.grid(alpha=0.3)
        axes.legend()


def _draws(path: str | Path) -> bool:
    found = find_spec("matplotlib") is not None
    if not found:
        warn_once(f"matplotlib is not installed: no {Path(path).name}")
    return found and is_main_process()


@contextmanager
def _page(
    path: str | Path, width: int, height: int, metadata: Mapping[str, str] | None = None, **options: Any
) -> Iterator[Figure]:
    """A figure of so many pixels to draw on, which is then written; the user's own matplotlib settings do not count."""
    from matplotlib import font_manager, style
    from matplotlib.figure import Figure  # without pyplot there is no window and no global state; it draws with Agg

    installed = {font.name for font in font_manager.fontManager.ttflist}
    fonts = {"font.family": [font for font in FONTS if font in installed]}
    texts = {key: "".join(c if c.isprintable() else " " for c in str(v)) for key, v in (metadata or {}).items()}
    png = io.BytesIO()
    with style.context(["default", fonts]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from")  # the box in its place says so, too
        figure = Figure(figsize=(width / DPI, height / DPI), dpi=DPI, **options)
        yield figure
        figure.savefig(png, format="png", metadata=texts)
    write_file(path, png.getvalue())


def _write(figure: Figure, x: float, y: float, text: str, room: float, size: float) -> None:
    """Write one centred line whose top is ``y`` pixels below the figure's; what is wider than ``room`` is cut off."""
    from matplotlib.transforms import Bbox

    height = figure.bbox.height
    place = {"ha": "center", "va": "top", "transform": None, "clip_on": True}
    clip = Bbox.from_bounds(x - room / 2, 0, room, height)
    figure.text(x, height - y, text, fontsize=size, parse_math=False, clip_box=clip, **place)


def _broken(caption: str) -> list[str]:
    """A caption's lines, each as wide as a thumbnail; ``…`` ends the last if there were more."""
    given = [one_line(line, 1000) for line in caption.splitlines()]
    width = CAPTION_WIDTH // (2 if any(east_asian_width(c) in "WF" for c in caption) else 1)  # such a letter is wide
    lines = [line for text in given for line in textwrap.wrap(text, width)]
    if len(lines) > CAPTION_LINES:
        lines[CAPTION_LINES - 1] = lines[CAPTION_LINES - 1][: width - 1] + "…"
    return lines[:CAPTION_LINES]


def _thumbnail(picture: Image | np.ndarray) -> np.ndarray:
    """The picture as (height, width, 3) of uint8, neither side over `CELL`: small ones in whole multiples, sharp."""
    from PIL import Image

    image = _image(picture)
    factor = CELL / max(image.size)
    if factor >= 1:
        size, how = [side * int(factor) for side in image.size], Image.Resampling.NEAREST
    else:
        size, how = [max(round(side * factor), 1) for side in image.size], Image.Resampling.LANCZOS
    return np.asarray(image.resize(size, how))


def _image(picture: Image | np.ndarray) -> Image:
    """The picture in RGB; what is transparent is white, and more than 8 bits are scaled to the brightest pixel."""
    from PIL import Image

    if isinstance(picture, Image.Image) and picture.mode[0] in "IF":
        deep = np.nan_to_num(np.asarray(picture, np.float64)).clip(0)
        picture = deep / max(deep.max(), 1)
    if not isinstance(picture, Image.Image):
        array = np.asarray(picture)
        array = array[..., 0] if array.ndim == 3 and array.shape[-1] == 1 else array
        if 0 in array.shape or not (array.ndim == 2 or (array.ndim == 3 and array.shape[-1] in (3, 4))):
            raise ValueError(f"an array of shape {array.shape} is no picture")
        scale = 1 if array.dtype.kind in "iu" else 255
        picture = Image.fromarray((np.nan_to_num(array) * scale).clip(0, 255).round().astype(np.uint8))
    picture = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def table(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write a csv file on the main process.

    Raises:
        UserError: the file cannot be written.
    """
    if is_main_process():
        writer = csv.writer(text := io.StringIO())
        writer.writerows([header, *rows])
        write_file(path, text.getvalue().encode())
