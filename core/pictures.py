"""Rows of images, and their classes: from folders, files and data sets, by number, prepared, and in batches."""

from __future__ import annotations

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.augment import mix
from core.data import IGNORE_INDEX, Batch
from core.errors import UserError, say, warn_once
from core.hub import load_splits
from core.images import NAMED, UnreadableImage, class_folders, decode, image_files, open_image
from core.labels import image_column, label_column, label_names, label_numbers, read_labels
from core.splits import PHASES

if TYPE_CHECKING:
    from datasets import Dataset
    from PIL.Image import Image

Show = Callable[["Image", np.random.Generator], Any]


def load_pictures(args: Namespace) -> dict[str, Dataset]:
    """Load the named data set, files or folders, if any: each split has columns ``image`` and, with classes, ``label``.

    Raises:
        UserError: two of these are given, or one of them holds no images with their classes.
    """
    files, folders = sources(args, "image_column_name", "label_column_name")
    if folders:
        return {split: _scan(path, split) for split, path in folders.items()}
    return {split: _two_columns(rows, args, split) for split, rows in load_splits(args, files).items()}


def sources(args: Namespace, *columns: str) -> tuple[dict[str, str], dict[str, str]]:
    """The files and the folders that are given, by split.

    Raises:
        UserError: beside folders there are other data, or one of ``columns``: flags that mean nothing for folders.
    """
    given = ({split: getattr(args, f"{split}_{kind}") for split in PHASES} for kind in ("file", "dir"))
    files, folders = ({split: path for split, path in paths.items() if path} for paths in given)
    others = [f"--{name}" for name in ("dataset_name", "dataset_config_name", *columns) if getattr(args, name)]
    others += [f"--{split}_file" for split in files]
    if folders and others:
        raise UserError(f"--{next(iter(folders))}_dir and {others[0]} exclude each other; give one")
    return files, folders


def class_names(found: dict[str, Dataset], args: Namespace) -> list[str] | None:
    """The names of the training split's classes, else of another's; None if no split names any.

    The folders of ``--test_dir`` are not asked: they may be none, see `Pictures`.
    """
    for split in PHASES:
        rows = found.get(split)
        if rows is None or "label" not in rows.column_names or (split == "test" and args.test_dir):
            continue
        if split != "test" or (read_labels(rows, "label")[0] >= 0).any():  # a test split's may be kept back
            return label_names(rows, "label")
    return None


def _scan(path: str, split: str) -> Dataset:
    """Rows of a folder; those of the test split may be images alone, without a folder for each class."""
    from datasets import Dataset

    if split == "test" and os.path.isdir(path):
        files, root = image_files(path), str(Path(path).absolute())
        if any(os.path.dirname(file) == root for file in files):
            return Dataset.from_dict({"image": files})
    files, classes = class_folders(path, f"--{split}_dir", all_full=split != "test")
    return Dataset.from_dict({"image": files, "label": classes})


def _two_columns(rows: Dataset, args: Namespace, split: str) -> Dataset:
    """Name the columns ``image`` and ``label``, which the test split may lack."""
    image = image_column(rows, args.image_column_name)
    columns = {image: "image"}
    try:
        columns[label_column(rows, args.label_column_name)] = "label"
    except UserError as error:
        if split != "test":
            raise
        say(f"the images of the test split are taken to have no classes ({error})")
    if columns[image] == "label":
        raise UserError(f"{image!r} is named as the column of the images and of the classes; give two columns")
    return undecoded(rows, columns)


def undecoded(rows: Dataset, columns: dict[str, str]) -> Dataset:
    """Keep these columns under their new names; those called ``image`` stay as they are stored."""
    from datasets import Image

    rows = rows.select_columns(list(columns)).rename_columns(columns)
    return rows.cast_column("image", Image(decode=False)) if isinstance(rows.features["image"], Image) else rows


class Pictures:
    """The images of a split by row number, each with its class, if there are classes.

    Args:
        rows: of `load_pictures`, or of `core.captions.load_captioned`.
        classes: the model's, in the order of its outputs; None for images without classes.
        split: its name.
        args: with ``on_bad_image``, and what names the split's file or folder.

    Attributes:
        labels: (rows,), int64: places in ``classes``, or -100 where no row has a class.
        unreadable: the images that turned out to be.

    Raises:
        UserError: a row's class is not among ``classes``, only some rows have one, or none has of those to train on;
            there are no files where the rows say.
    """

    def __init__(self, rows: Dataset, classes: list[str] | None, split: str, args: Namespace) -> None:
        self.labels = np.full(len(rows), IGNORE_INDEX)
        if classes is not None:
            folders = split == "test" and args.test_dir and "label" in rows.column_names
            if folders and not set(rows.unique("label")) & set(classes):
                say(f"{args.test_dir} has no folder that is called like a class: its images are taken to have none")
                rows = rows.remove_columns("label")
            option = f"--{split}_dir" if getattr(args, f"{split}_dir") else "--label_column_name"
            self.labels = label_numbers(rows, "label", classes, split, option)
            if split == "train" and (self.labels < 0).all():
                raise UserError(f"no row of the {split} split has a class: there is nothing to learn; give {option}")
        self.rows, self._cells = rows, None
        # Rows that are held out of the training rows have no file of their own.
        file = getattr(args, f"{split}_file") or args.train_file
        self.split, self.folder = split, os.path.dirname(file) if file else args.dataset_name or ""
        self.on_bad_image = args.on_bad_image
        self.unreadable = UnreadableImages(self._reason, split, len(rows))
        self._look_for_some()
        known = self.labels[self.labels >= 0]
        say(f"{split}: {len(rows):,} images" + (f" of {len(np.unique(known))} classes" if len(known) else ""))

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"number": number, "label": int(self.labels[number])}

    def _look_for_some(self) -> None:
        """Raise a `UserError` if of 20 images, evenly spread, none has bytes or a file: paths begin elsewhere."""
        if not len(self) or any(self.source(at) is not None for at in range(0, len(self), -(-len(self) // 20))):
            return
        raise UserError(
            f"the {self.split} split's images are not there (the first one: {self.path(0)[:200]!r}); give paths of this"
            f" machine that begin in {self.folder or '.'} or in the working directory"
        )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_cells": None}  # another process opens the rows' files itself

    def _cell(self, number: int) -> Any:
        """What the rows have, straight from Arrow: by way of the library it takes ten times as long."""
        if self._cells is None:
            chosen = self.rows._indices
            self._cells = self.rows.data.column("image"), chosen and chosen.column(0)
        column, chosen = self._cells
        return column[number if chosen is None else chosen[number].as_py()].as_py()

    def source(self, number: int) -> Any:
        """What `open_image` takes; None for a file that is not there."""
        source = self._cell(number)
        if isinstance(source, dict) and source.get("bytes") is None:
            source = source.get("path")
        if not isinstance(source, str):
            return source
        spelled = [source, source.replace("\\", "/")]  # the second: a table that was written on Windows
        places = (place for path in spelled if path for place in (os.path.join(self.folder, path), path))
        return next(filter(os.path.exists, places), None)

    def open(self, number: int) -> Image:
        """Open an image. Relative paths begin where the file lies that names them, else in the working directory.

        Raises:
            UnreadableImage: it is none.
        """
        source = self.source(number)
        if isinstance(source, dict):
            source = source | {"path": self.name(number)}
        return open_image(self.path(number) or None if source is None else source)

    def view(self, number: int, show: Show, rng: np.random.Generator) -> Any:
        """What ``show`` makes of an image; None, or a `UserError`, if it cannot be read: see --on_bad_image."""
        try:
            return show(self.open(number), rng)
        except UnreadableImage as error:
            if self.on_bad_image == "skip":
                return None
            raise UserError(f"{error}; mend or remove it, or give --on_bad_image skip") from None

    def smaller_than(self, side: int) -> tuple[int, int]:
        """How many of up to 1,000 images, evenly spread, have a side below ``side`` pixels, and how many open."""
        smaller = []
        for number in range(0, len(self), max(1, -(-len(self) // 1000))):
            with contextlib.suppress(UnreadableImage):
                smaller.append(min(self.open(number).size) < side)  # of the header; a turn does not change it
        return sum(smaller), len(smaller)

    def thumbnail(self, number: int, side: int = 400) -> Image:
        """The whole image, upright, neither side over ``side`` pixels: what a page of many needs of large ones."""
        image = self.open(number)
        small = decode(image, shrink=max(min(image.size) / side, 1))
        small.thumbnail((side, side))
        return small

    def path(self, number: int) -> str:
        """The image's path as the data has it; of bytes their name, and "" where they have none."""
        source = self._cell(number)
        path = source.get("path") if isinstance(source, dict) else source
        return path if isinstance(path, str) else ""

    def name(self, number: int) -> str:
        """What a message calls the image."""
        return self.path(number) or f"{self.split} image {number + 1} of {len(self)}"

    def _reason(self, number: int) -> str:
        """Why the image cannot be read, with its name."""
        try:
            decode(self.open(number))
        except UnreadableImage as error:
            return str(error)
        return f"{self.name(number)} could not be read"  # and now it can

    def known(self) -> np.ndarray:
        """Which rows can be right or wrong, bool (rows,): those that have a class, and an image that could be read."""
        known = self.labels >= 0
        known[sorted(self.unreadable.rows)] = False
        return known


class UnreadableImages:
    """Which rows of a split's ``count`` have turned out unreadable, in ``rows``; ``reason`` says why one is."""

    def __init__(self, reason: Callable[[int], str], split: str, count: int) -> None:
        self.reason, self.split, self.count = reason, split, count
        self.rows: set[int] = set()

    def found(self, row_numbers: Sequence[int]) -> None:
        """Take up rows that could not be read, the same on all ranks; a `UserError` if no other one is left."""
        for row in sorted(set(row_numbers) - self.rows):
            self.rows.add(row)
            if len(self.rows) <= NAMED:
                warn_once(f"{self.split}: {self.reason(row)}; it is left out")
            elif len(self.rows) == NAMED + 1:
                warn_once(f"{self.split}: more images cannot be read and are left out; no more are named")
        if len(self.rows) == self.count:
            raise UserError(f"of {self.count} {self.split} images none can be read")


@dataclass
class Prepare:
    """Reads a row's image and shows it whole, or changed at random: a loader's ``augment``.

    Attributes:
        show: makes pixels (channels, height, width) of an opened image.
        blank: what an image that cannot be read becomes; it bears no loss.
        mixup_alpha, cutmix_alpha: above 0, each image is mixed with another one of the split, see `core.augment.mix`.
    """

    pictures: Pictures
    show: Show
    blank: np.ndarray
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0

    def __call__(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        pixels = self.pictures.view(row["number"], self.show, rng)
        prepared = {"pixels": pixels, "label": row["label"], "unreadable": False}
        if pixels is None:
            prepared = {"pixels": self.blank, "label": IGNORE_INDEX, "unreadable": True}
        if not (self.mixup_alpha or self.cutmix_alpha):
            return prepared
        other, share, number = prepared["label"], 1.0, int(rng.integers(len(self.pictures)))
        second = None if pixels is None else self.pictures.view(number, self.show, rng)
        if second is not None:
            other = int(self.pictures.labels[number])
            prepared["pixels"], share = mix(pixels, second, rng, self.mixup_alpha, self.cutmix_alpha)
        return prepared | {"other_label": other, "share": share}


def collate_pixels(rows: list[dict[str, Any]], shape: tuple[int, ...]) -> Batch:
    """Put prepared rows into a batch: pixel_values (rows, channels, height, width), labels (rows,).

    Mixed images also have other_labels (rows,) and shares (rows,): how much of an image is its own.
    """
    batch = {"pixel_values": torch.from_numpy(np.stack([row["pixels"] for row in rows]))}
    names = {"label": "labels", "other_label": "other_labels", "share": "shares", "unreadable": "unreadable"}
    return batch | {name: torch.tensor([row[key] for row in rows]) for key, name in names.items() if key in rows[0]}
