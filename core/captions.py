"""Images with captions: from folders, files and data sets; rows that have no caption are left out."""

from __future__ import annotations

import csv
import os
from argparse import Namespace
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError, did_you_mean, say, warn_once
from core.hub import load_splits
from core.images import image_files
from core.labels import image_column
from core.pictures import sources, undecoded
from core.untrusted import inside

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

COLUMN = "--caption_column_name"
METADATA = ("metadata.csv", "metadata.jsonl", "metadata.parquet")
Caption = str | list[str]


def load_captioned(args: Namespace) -> tuple[dict[str, Dataset], dict[str, int]]:
    """Load the named data set, files or folders, if any.

    A folder has its captions in a ``metadata.csv``, ``.jsonl`` or ``.parquet``, as for datasets' ``imagefolder``: in it
    or in folders below, with the images' paths from there as ``file_name``. Without any, the caption of ``x.png`` is
    the text of ``x.txt``.

    A caption is missing where there is none, or nothing but white space; of several captions of an image those are left
    out, and where no caption remains, the row.

    Args:
        args: with ``dataset_name``, ``dataset_config_name``, ``cache_dir`` and ``token``, a ``_file`` and a ``_dir`` of
            each split, ``image_column_name`` and ``caption_column_name``.

    Returns:
        Each split with columns ``image``, not decoded, and ``text``: one text a row, or a list of texts; and how many
        of its rows are left out. A split of a data set that has no captions, e.g. because they are kept back, is left
        out itself, unless it is the training split.

    Raises:
        UserError: two of these are given, or one of them holds no images with their captions; a caption is no text, or
            not UTF-8.
    """
    files, folders = sources(args)
    loaded = {} if folders else load_splits(args, files)
    for path in files.values():
        _warn_of_commas(path)
    named = {split: (folders | files).get(split, args.dataset_name) for split in folders or loaded}
    found = {split: _scan(path, split, args) for split, path in folders.items()}
    found |= {split: _two_columns(rows, args, named[split]) for split, rows in loaded.items()}
    kept, left_out = {}, {}
    for split, (rows, captions) in found.items():
        some = [number for number, caption in enumerate(captions) if caption]
        left_out[split] = len(captions) - len(some)
        if not some and (folders or files or split == "train"):
            hint = "write them into metadata.csv, or a .txt file beside each image" if folders else f"give {COLUMN}"
            raise UserError(
                f"{named[split]}: of {len(captions):,} images of the {split} split none has a caption; {hint}"
            )
        if left_out[split]:
            share = f"{left_out[split]:,} of {len(captions):,} images ({left_out[split] / len(captions):.1%})"
            warn_once(f"{named[split]}: {share} of the {split} split have no caption and are left out")
        if some:
            kept[split] = rows.select(some) if left_out[split] else rows
    return kept, left_out


def pick_caption(text: Caption, rng: np.random.Generator | None) -> str:
    """Return one of an image's captions: the first without a generator, else any. Takes one draw, also of one text."""
    draw = 0.0 if rng is None else rng.random()
    return text if isinstance(text, str) else text[int(draw * len(text))]


def caption_column(rows: Dataset, asked: str | None, image: str) -> str:
    """Return the column that is asked for, else ``text``, else ``caption``, else the only one of texts.

    Args:
        image: the column of images, which is none.

    Raises:
        UserError: there is none, several could be meant, or it is that of the images.
    """
    if asked and asked == image:
        raise UserError(f"{image!r} is named as the column of the images and of the captions; give two columns")
    names = [name for name in rows.column_names if name != image]
    texts = [name for name in names if _is_text(getattr(rows.features[name], "feature", rows.features[name]))]
    for name in [asked] if asked else ["text", "caption"]:
        if name in names:
            return name
    if not asked and len(texts) == 1:
        say(f"no column is called text or caption: {texts[0]!r} is taken, the only other one of texts")
        return texts[0]
    wanted = f"no column {asked!r}{did_you_mean(asked, names)}" if asked else "no column 'text' or 'caption'"
    raise UserError(f"{COLUMN}: {wanted}; there are: {', '.join(rows.column_names)}")


def _is_text(feature: Any) -> bool:
    return getattr(feature, "dtype", None) in ("string", "large_string")


def _captions(rows: Dataset, column: str, where: str) -> list[Caption | None]:
    """The captions of a column as they are to be used, None where one is missing; ``where`` begins an error."""
    found: list[Caption | None] = []
    for cell in _cells(rows, column, where):
        several = cell if isinstance(cell, list) else [cell]
        wrong = [one for one in several if not (one is None or isinstance(one, str))]
        if wrong:
            raise UserError(
                f"{where}: row {len(found) + 1} of {column!r} holds {wrong[0]!r:.40}, no text; "
                f"mend the data, or name another column with {COLUMN}"
            )
        texts = [one for one in several if one and not one.isspace()]
        found.append((texts if isinstance(cell, list) else texts[0]) if texts else None)
    return found


def _cells(rows: Dataset, column: str, where: str) -> Iterator[Any]:
    start = 0
    try:
        for batch in rows.select_columns([column]).iter(1000):
            yield from batch[column]
            start += len(batch[column])
    except UnicodeDecodeError as error:
        first = f"one of the 1,000 from row {start + 1:,} on"
        raise UserError(f"{where}: {column!r} is not UTF-8 ({first}: {error.reason}); convert the file") from None


def _with_texts(rows: Dataset, captions: list[Caption | None]) -> Dataset:
    """Make ``text`` the captions; where some rows have a list of them, all have."""
    from datasets import List, Value

    if any(isinstance(caption, list) for caption in captions):
        lists = [[caption] if isinstance(caption, str) else caption for caption in captions]
        return rows.add_column("text", lists, feature=List(Value("string")))
    return rows.add_column("text", captions, feature=Value("string"))


def _two_columns(rows: Dataset, args: Namespace, where: str) -> tuple[Dataset, list[Caption | None]]:
    image = image_column(rows, args.image_column_name)
    caption = caption_column(rows, args.caption_column_name, image)
    captions = _captions(rows, caption, where)
    if _is_text(rows.features[caption]):  # there is nothing to take out of a text: it stays where it is, on disk
        return undecoded(rows, {image: "image", caption: "text"}), captions
    return _with_texts(undecoded(rows, {image: "image"}), captions), captions


def _scan(path: str, split: str, args: Namespace) -> tuple[Dataset, list[Caption | None]]:
    """The images of a folder, by their full paths, and their captions."""
    from datasets import Dataset

    option = f"--{split}_dir"
    if not os.path.isdir(path):
        raise UserError(f"{option}: {path} is {'a file' if os.path.isfile(path) else 'not there'}; give a folder")
    files, root = image_files(path), str(Path(path).absolute())
    if tables := _tables(files, root):
        images, captions = [], []
        for table in tables:
            more = _listed(table, split, args)
            images += more[0]
            captions += more[1]
        named = {os.path.normpath(image.replace("\\", "/")) for image in images if image}
        if others := len(set(map(os.path.normpath, files)) - named):
            warn_once(f"{option}: {others:,} of {len(files):,} images of {path} are not in its metadata and left out")
        return _with_texts(Dataset.from_dict({"image": images}), captions), captions
    for flag in ("image_column_name", "caption_column_name"):
        if getattr(args, flag):
            raise UserError(f"--{flag}: {path} has no metadata.csv, .jsonl or .parquet; leave it out, or add one")
    if not files:
        raise UserError(f"{option}: {path} holds no images; give a folder of images with their captions")
    captions = [_beside(file) for file in files]
    return _with_texts(Dataset.from_dict({"image": files}), captions), captions


def _tables(images: list[str], root: str) -> list[str]:
    """The metadata of a folder and of those below it on the way to its images, one file in a folder at most."""
    folders = {root, *map(os.path.dirname, images)}
    folders |= {str(above) for folder in folders for above in Path(folder).parents if above.is_relative_to(root)}
    found = []
    for folder in sorted(folders):
        here = [path for path in (os.path.join(folder, name) for name in METADATA) if os.path.isfile(path)]
        if len(here) > 1:
            raise UserError(f"{here[0]} and {os.path.basename(here[1])} are both there; keep one")
        found += here
    return found


def _listed(table: str, split: str, args: Namespace) -> tuple[list[str | None], list[Caption | None]]:
    """The images that a metadata file lists, by their full paths, and their captions."""
    try:
        rows = load_splits(args, {split: table})[split]
        image = image_column(rows, args.image_column_name, default="file_name")
        caption = caption_column(rows, args.caption_column_name, image)
    except UserError as error:
        message = str(error).removeprefix(f"--{split}_file: ")
        raise UserError(message if table in message else f"{table}: {message}") from None
    _warn_of_commas(table)
    folder, names = os.path.dirname(table), list(_cells(undecoded(rows, {image: "image"}), "image", table))
    if wrong := [name for name in names if not (name is None or isinstance(name, str))]:
        raise UserError(f"{table}: {image!r} holds {wrong[0]!r:.40}, no file's name; name another column")
    paths, root = (
        [name and os.path.join(folder, name) for name in names],
        os.path.abspath(getattr(args, f"{split}_dir")),
    )
    for row, path in enumerate(paths, start=1):
        if path and not inside(root, path):
            name = names[row - 1]
            raise UserError(f"{table}: row {row} names {name!r:.200}, which is not in {root}; put the image there")
    return paths, _captions(rows, caption, table)


def _warn_of_commas(table: str) -> None:
    """Warn where the first row of a csv has more cells than the header: its first ones are then taken as row names."""
    if not table.endswith(".csv"):
        return
    with open(table, encoding="utf-8", errors="replace", newline="") as file:
        header, row = [*islice(filter(None, csv.reader(file)), 2), [], []][:2]
    if len(row) > len(header):
        cells = f"the first row has {len(row)} cells, the header {len(header)}"
        warn_once(f"{table}: {cells}, so that the columns are shifted: a caption with commas needs quotes")


def _beside(image: str) -> str | None:
    """The text of the file that is called like an image, but ends in .txt; None if it has none."""
    path = f"{os.path.splitext(image)[0]}.txt"
    if not os.path.isfile(path):
        return None
    try:
        content = Path(path).read_bytes()
        return content.decode("utf-8-sig").strip() or None
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise UserError(f"{path}, line {line}: {error.reason}: this is not UTF-8; convert the file") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
