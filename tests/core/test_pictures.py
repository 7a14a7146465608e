"""Rows of images: from whatever holds them, by number and name, prepared alike at any number of workers."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image, Value
from datasets import Sequence as Values
from PIL import Image as Pillow

from core.augment import RandomView
from core.data import BatchLoader
from core.digits import png
from core.errors import UserError
from core.images import UnreadableImage, decode
from core.pictures import Pictures, Prepare, UnreadableImages, class_names, collate_pixels, load_pictures

PETS = ["cat", "dog"]
Rows = list[dict[str, Any]]


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """Makes the flags that the module reads; caches lie in the test's folder."""

    def make(**given: Any) -> Namespace:
        names = [f"{split}_{kind}" for split in ("train", "validation", "test") for kind in ("file", "dir")]
        names += ["dataset_name", "dataset_config_name", "token", "image_column_name", "label_column_name"]
        others = {"cache_dir": str(tmp_path / "cache"), "on_bad_image": "skip"}
        return Namespace(**dict.fromkeys(names) | others | given)

    return make


def grey(value: int, size: tuple[int, int] = (4, 4)) -> bytes:
    return png(np.full(size, value, np.uint8))


def draw(path: Path, value: int) -> Path:
    """Write a grey image; its value tells it from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(grey(value))
    return path


def values(pictures: Pictures) -> list[int]:
    """The grey value of each image."""
    return [decode(pictures.open(at), 1).getpixel((0, 0)) for at in range(len(pictures))]


def in_memory(count: int, label: bool = True, **replaced: Any) -> Dataset:
    """Images of the values 0, 10, ... of alternating classes; ``replaced`` are other cells, by ``row<number>``."""
    cells = [{"bytes": grey(10 * at), "path": f"{at}.png"} for at in range(count)]
    for name, cell in replaced.items():
        cells[int(name.removeprefix("row"))] = cell
    rows = {"image": cells} | ({"label": [PETS[at % 2] for at in range(count)]} if label else {})
    return Dataset.from_dict(rows)


# --- load_pictures: folders -------------------------------------------------------------------------------------------


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    for name, value in (("dog/b.png", 3), ("dog/deep/a.png", 4), ("cat/c.png", 2), ("cat/.hidden.png", 9)):
        draw(tmp_path / "pets" / name, value)
    return tmp_path / "pets"


def test_folders_of_classes(pets: Path, arguments: Any) -> None:
    args = arguments(train_dir=str(pets), validation_dir=str(pets), test_dir=str(pets))
    found = load_pictures(args)
    assert list(found) == ["train", "validation", "test"]
    for split, rows in found.items():
        pictures = Pictures(rows, ["dog", "cat"], split, args)  # in the order of the model's outputs
        assert values(pictures) == [2, 3, 4]
        assert pictures.labels.tolist() == [1, 0, 0]
        assert [pictures[at] for at in (0, 2)] == [{"number": 0, "label": 1}, {"number": 2, "label": 0}]
        assert pictures.path(1) == str(pets / "dog/b.png")


def test_a_test_folder_may_hold_images_alone(tmp_path: Path, arguments: Any, monkeypatch: Any) -> None:
    draw(tmp_path / "loose" / "b.png", 2)
    draw(tmp_path / "loose" / "a.png", 1)
    draw(tmp_path / "loose" / "more" / "c.png", 3)
    monkeypatch.chdir(tmp_path)
    for folder in (str(tmp_path / "loose"), "loose", "./loose/"):
        rows = load_pictures(args := arguments(test_dir=folder))["test"]
        assert rows.column_names == ["image"]
        pictures = Pictures(rows, PETS, "test", args)
        assert values(pictures) == [1, 2, 3]
        assert pictures.labels.tolist() == [-100] * 3
        assert not pictures.known().any()
    with pytest.raises(UserError, match="--train_dir: 2 images lie in"):
        load_pictures(arguments(train_dir=str(tmp_path / "loose")))
    for folder in ("none", "loose/a.png"):
        with pytest.raises(UserError, match="--test_dir: "):
            load_pictures(arguments(test_dir=folder))


def test_a_test_folder_of_other_folders_has_no_classes(tmp_path: Path, arguments: Any, capsys: Any) -> None:
    draw(tmp_path / "test" / "images" / "a.png", 1)
    args = arguments(test_dir=str(tmp_path / "test"))
    pictures = Pictures(load_pictures(args)["test"], PETS, "test", args)
    assert pictures.labels.tolist() == [-100]
    assert "no folder that is called like a class" in capsys.readouterr().out
    draw(tmp_path / "test" / "dog" / "a.png", 1)  # one is: the other one is a mistake
    with pytest.raises(UserError, match="not among the model's 2: 'images'"):
        Pictures(load_pictures(args)["test"], PETS, "test", args)
    args = arguments(validation_dir=str(tmp_path / "test"), test_dir=str(tmp_path / "test"))
    with pytest.raises(UserError, match="not among the model's 2"):
        Pictures(load_pictures(args)["validation"], ["fish", "bird"], "validation", args)


def test_sources_exclude_each_other(pets: Path, arguments: Any) -> None:
    for other, value in (("dataset_name", "somebody/pets"), ("train_file", "x.csv"), ("test_file", "x.csv")):
        with pytest.raises(UserError, match=f"--validation_dir and --{other} exclude each other; give one"):
            load_pictures(arguments(validation_dir=str(pets), **{other: value}))
    with pytest.raises(UserError, match="exclude each other"):
        load_pictures(arguments(dataset_name="somebody/pets", train_file="x.csv"))
    assert load_pictures(arguments()) == {}


# --- load_pictures: files ---------------------------------------------------------------------------------------------


def write(path: Path, rows: Rows) -> str:
    """As csv, jsonl or parquet, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        getattr(Dataset.from_list(rows), f"to_{path.suffix[1:]}")(path)
    return str(path)


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_files_of_paths(suffix: str, tmp_path: Path, arguments: Any, monkeypatch: Any) -> None:
    """Absolute, from the file's folder, written on Windows, from the working directory; the folder comes first."""
    draw(tmp_path / "data" / "images" / "a.png", 1)
    draw(tmp_path / "here" / "images" / "a.png", 99)
    draw(tmp_path / "here" / "only" / "b.png", 2)
    paths = [str(draw(tmp_path / "c.png", 3)), "images/a.png", "images\\a.png", "only/b.png", "only\\b.png"]
    kinds = ["dog", "cat", "cat", "dog", "dog"]
    rows = [{"size": 1, "file": path, "kind": kind} for path, kind in zip(paths, kinds, strict=True)]
    file = write(tmp_path / "data" / f"rows.{suffix}", rows)
    monkeypatch.chdir(tmp_path / "here")
    args = arguments(train_file=file, image_column_name="file", label_column_name="kind")
    rows = load_pictures(args)["train"]
    assert rows.column_names == ["image", "label"]
    pictures = Pictures(rows, PETS, "train", args)
    assert values(pictures) == [3, 1, 1, 2, 2]
    assert pictures.labels.tolist() == [1, 0, 0, 1, 1]
    assert pictures.name(2) == pictures.path(2) == "images\\a.png"
    # Rows that are held out of these have the paths of this file.
    held = Pictures(rows.select([1, 2]), PETS, "validation", args)
    assert values(held) == [1, 1]
    monkeypatch.chdir(tmp_path / "data")
    args.train_file = os.path.basename(file)
    assert values(Pictures(rows.select([1]), PETS, "train", args)) == [1]


def test_each_file_has_a_folder_of_its_own(tmp_path: Path, arguments: Any) -> None:
    files = {}
    for value, split in enumerate(("train", "validation", "test")):
        draw(tmp_path / split / "a.png", value)
        files[f"{split}_file"] = write(tmp_path / split / "rows.csv", [{"image": "a.png", "label": "cat"}])
    args = arguments(**files)
    found = {split: values(Pictures(rows, PETS, split, args)) for split, rows in load_pictures(args).items()}
    assert found == {"train": [0], "validation": [1], "test": [2]}


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_only_a_test_file_may_lack_classes(suffix: str, tmp_path: Path, arguments: Any, capsys: Any) -> None:
    path = str(draw(tmp_path / "a.png", 7))
    file = write(tmp_path / f"rows.{suffix}", [{"image": path, "name": "x"}] * 2)
    for options, told in (({}, "no column 'label'"), ({"label_column_name": "nam"}, "did you mean 'name'")):
        args = arguments(test_file=file, **options)
        pictures = Pictures(load_pictures(args)["test"], PETS, "test", args)
        assert (values(pictures), pictures.labels.tolist()) == ([7, 7], [-100, -100])
        assert told in capsys.readouterr().out
        for split in ("train", "validation"):
            with pytest.raises(UserError, match=told):
                load_pictures(arguments(**{f"{split}_file": file}, **options))
    with pytest.raises(UserError, match="--image_column_name: no column 'picture'"):
        load_pictures(arguments(test_file=file, image_column_name="picture"))


def test_classes_that_are_kept_back(tmp_path: Path, arguments: Any) -> None:
    path = str(draw(tmp_path / "a.png", 7))
    rows = {"image": [path] * 2, "label": [-1, -1]}
    hidden = Dataset.from_dict(rows, features=Features(image=Value("string"), label=ClassLabel(names=PETS)))
    hidden.to_parquet(tmp_path / "test.parquet")
    empty = write(tmp_path / "empty.jsonl", [{"image": path, "label": None}] * 2)
    for file in (str(tmp_path / "test.parquet"), empty):
        args = arguments(test_file=file)
        pictures = Pictures(load_pictures(args)["test"], PETS, "test", args)
        assert pictures.labels.tolist() == [-100, -100]
    with pytest.raises(UserError, match=r"no row of the train split has a class: .*--label_column_name"):
        Pictures(hidden, PETS, "train", arguments())


# --- load_pictures: data sets -----------------------------------------------------------------------------------------


def test_an_image_folder_with_metadata(tmp_path: Path, arguments: Any) -> None:
    for value, split in enumerate(("train", "test")):
        draw(tmp_path / "set" / split / "x" / "a.png", value)
        draw(tmp_path / "set" / split / "b.png", 10 + value)
        table = "file_name,kind\nb.png,dog\nx/a.png,cat\n"
        (tmp_path / "set" / split / "metadata.csv").write_text(table)
    args = arguments(dataset_name=str(tmp_path / "set"), label_column_name="kind")
    found = load_pictures(args)
    assert found.keys() == {"train", "test"}
    for value, (split, rows) in enumerate(found.items()):
        pictures = Pictures(rows, PETS, split, args)
        pairs = sorted(zip(values(pictures), pictures.labels.tolist(), strict=True))
        assert pairs == [(value, 0), (10 + value, 1)]
        assert pictures.path(0).endswith(".png")


def test_parquet_with_the_files_in_it(tmp_path: Path, arguments: Any, capsys: Any) -> None:
    """As hubs store them, and with columns that are called otherwise; the label of the test split is found, too."""
    features = Features(img=Image(), kind=ClassLabel(names=["dog", "cat"]), size=Value("int64"))
    for split in ("train", "test"):
        pictures = [Pillow.new("L", (5, 4), value) for value in (1, 2, 3)]
        rows = Dataset.from_dict({"img": pictures, "kind": [0, 1, 1], "size": [1, 2, 3]}, features=features)
        rows.to_parquet(tmp_path / "set" / "data" / f"{split}-00000-of-00001.parquet")
    args = arguments(dataset_name=str(tmp_path / "set"))
    found = load_pictures(args)
    for split, rows in found.items():
        assert rows.column_names == ["image", "label"]
        assert rows.features["image"] == Image(decode=False)
        pictures = Pictures(rows, PETS, split, args)
        assert values(pictures) == [1, 2, 3]
        assert pictures.labels.tolist() == [1, 0, 0]
    assert "no column is called image: 'img' is taken" in capsys.readouterr().out


def test_a_folder_of_tables_whose_paths_begin_in_it(tmp_path: Path, arguments: Any) -> None:
    draw(tmp_path / "set" / "images" / "a.png", 5)
    write(tmp_path / "set" / "train.csv", [{"image": "images/a.png", "label": "cat"}])
    args = arguments(dataset_name=str(tmp_path / "set"))
    assert values(Pictures(load_pictures(args)["train"], PETS, "train", args)) == [5]


# --- Pictures ---------------------------------------------------------------------------------------------------------


def test_cells_of_every_kind(tmp_path: Path, arguments: Any) -> None:
    path = str(draw(tmp_path / "a.png", 1))
    bytes_alone = Dataset.from_dict({"image": [grey(1), grey(2)], "label": PETS})
    assert bytes_alone.features["image"] == Value("binary")
    pictures = Pictures(bytes_alone, PETS, "train", arguments())
    assert values(pictures) == [1, 2]
    assert [pictures.path(1), pictures.name(1)] == ["", "train image 2 of 2"]
    cells = [{"bytes": None, "path": path}, {"bytes": grey(2), "path": "gone.png"}, {"bytes": grey(3), "path": None}]
    for features in (None, Features(image=Image(decode=False), label=Value("string"))):
        rows = Dataset.from_dict({"image": cells, "label": [*PETS, "dog"]}, features=features)
        pictures = Pictures(rows, PETS, "train", arguments())
        assert values(pictures) == [1, 2, 3]
        assert [pictures.name(at) for at in range(3)] == [path, "gone.png", "train image 3 of 3"]
        cells[0]["path"] = "a.png"
        beside = Dataset.from_dict({"image": cells[:1], "label": ["cat"]})
        assert values(Pictures(beside, PETS, "train", arguments(train_file=str(tmp_path / "rows.csv")))) == [1]
        cells[0]["path"] = path


def test_empty_cells_are_unreadable_images(tmp_path: Path, arguments: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    draw(tmp_path / "a.png", 1)
    texts = Dataset.from_dict({"image": ["a.png", "", None, "https://x.org/a.png", "a\0.png", "A" * 5000, "gone\\b"]})
    files = Dataset.from_dict({"image": [{"bytes": grey(1), "path": None}, {"bytes": None, "path": None}, None]})
    contents = Dataset.from_dict({"image": [grey(1), b"", None, b"GIF89a"]})
    for rows in (texts, files, contents, files.cast_column("image", Image(decode=False))):
        pictures = Pictures(rows, PETS, "test", arguments(test_file=str(tmp_path / "rows.csv")))
        assert decode(pictures.open(0), 1).getpixel((0, 0)) == 1
        for at in range(1, len(pictures)):
            with pytest.raises(UnreadableImage) as caught:
                pictures.open(at)
            path, said = (text.replace("\0", "\\x00") for text in (pictures.path(at), str(caught.value)))
            assert path[:1500] in said  # of a longer one the middle is left out
            assert pictures.name(at) == pictures.path(at) or pictures.name(at) == f"test image {at + 1} of {len(rows)}"


def test_paths_that_lead_nowhere_end_the_run_at_once(tmp_path: Path, arguments: Any) -> None:
    def rows(missing: Sequence[int], count: int = 100) -> Dataset:
        path = str(draw(tmp_path / "a.png", 1))
        return Dataset.from_dict({"image": ["gone.png" if at in missing else path for at in range(count)]})

    for missing in (range(90), range(10, 100), [*range(50), *range(56, 100)], []):
        Pictures(rows(missing), PETS, "test", arguments(test_file="some/rows.csv"))
    for every in (rows(range(100)), rows(range(1), 1), Dataset.from_dict({"image": ["", None]})):
        with pytest.raises(UserError, match=r"test split's images are not there .*begin in some or in the working dir"):
            Pictures(every, PETS, "test", arguments(test_file="some/rows.csv"))
    with pytest.raises(UserError, match=r"images are not there \(the first one: ''\)"):  # not the folder itself
        Pictures(Dataset.from_dict({"image": [""]}), PETS, "test", arguments(test_file=str(tmp_path / "rows.csv")))
    long = Dataset.from_dict({"image": ["/9j/" * 5000]})  # a file's content as text, in base 64
    with pytest.raises(UserError, match="not there") as caught:
        Pictures(long, PETS, "test", arguments())
    assert len(str(caught.value)) < 500


def test_rows_that_can_be_right_or_wrong(arguments: Any, caplog: Any) -> None:
    pictures = Pictures(in_memory(5), PETS, "train", arguments())
    assert pictures.known().tolist() == [True] * 5
    pictures.unreadable.found([3, 1])
    assert pictures.known().tolist() == [True, False, True, False, True]
    assert "train: 3.png could not be read; it is left out" in caplog.text, "it can be now"
    with pytest.raises(UserError, match="1 of 3 rows lack a label"):
        Pictures(Dataset.from_dict({"image": ["a"] * 3, "label": ["cat", None, "dog"]}), PETS, "test", arguments())


def test_a_shuffled_choice_of_rows_stays_together(arguments: Any) -> None:
    rows = in_memory(9).shuffle(seed=1).select(range(5))
    pictures = Pictures(rows, PETS, "train", arguments())
    for at, value in enumerate(values(pictures)):
        assert pictures.path(at) == f"{value // 10}.png"
        assert pictures.labels[at] == value // 10 % 2


@pytest.mark.parametrize("split", ["train", "validation", "test"])
@pytest.mark.parametrize("label", [True, False])
def test_images_without_classes(split: str, label: bool, arguments: Any, capsys: Any) -> None:
    """Nothing is asked of the labels, whatever they are."""
    args = arguments(test_dir="some/folder", train_dir="some/folder")
    del args.label_column_name
    pictures = Pictures(in_memory(3, label), None, split, args)
    assert pictures.labels.dtype == np.int64
    assert [pictures[at] for at in range(3)] == [{"number": at, "label": -100} for at in range(3)]
    assert values(pictures) == [0, 10, 20]
    assert not pictures.known().any()
    assert capsys.readouterr().out == f"{split}: 3 images\n"


def test_a_view_is_whatever_is_shown(arguments: Any) -> None:
    def show(image: Any, rng: np.random.Generator) -> tuple[int, float]:
        return decode(image, 1).getpixel((0, 0)), rng.random()

    rows = in_memory(3, row1={"bytes": grey(1)[:30], "path": None})
    pictures = Pictures(rows, None, "train", arguments())
    assert pictures.view(2, show, np.random.default_rng(5)) == (20, np.random.default_rng(5).random())
    assert pictures.view(1, show, np.random.default_rng(5)) is None
    pictures = Pictures(rows, None, "train", arguments(on_bad_image="fail"))
    assert pictures.view(0, show, np.random.default_rng(5))[0] == 0
    with pytest.raises(UserError, match=r"^train image 2 of 3 cannot be read .*or give --on_bad_image skip$"):
        pictures.view(1, show, np.random.default_rng(5))


def test_how_many_images_are_smaller(tmp_path: Path, arguments: Any, monkeypatch: Any) -> None:
    """By the shorter side, also of one that is turned; what cannot be opened is not counted."""
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.new("RGB", (30, 8)).save(tmp_path / "turned.jpg", exif=exif)
    kinds = [grey(0, (9, 9)), grey(0, (8, 20)), grey(0, (20, 8)), (tmp_path / "turned.jpg").read_bytes(), b"none"]
    rows = Dataset.from_dict({"image": [{"bytes": kind, "path": None} for kind in kinds]})
    pictures = Pictures(rows, None, "train", arguments())
    assert [pictures.smaller_than(side) for side in (8, 9, 10)] == [(0, 4), (3, 4), (4, 4)]
    assert Pictures(rows.select([]), None, "train", arguments()).smaller_than(9) == (0, 0)
    many = Pictures(rows.select([1] * 1500 + [0] * 1500), None, "train", arguments())
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", None)  # only headers are read
    assert many.smaller_than(9) == (500, 1000)


# --- Prepare, in a loader ---------------------------------------------------------------------------------------------


VIEW = RandomView((6, 6), 2, 3, scale=(0.2, 0.6), operations=1)


def noise(count: int, bad: Sequence[int] = ()) -> Dataset:
    """Images of which every crop is another; those of ``bad`` are cut off in the middle."""
    draw = np.random.default_rng(3)
    files = [png(draw.integers(0, 256, (12, 14), dtype=np.uint8)) for _ in range(count)]
    files = [file[: len(file) // 2] if at in bad else file for at, file in enumerate(files)]
    cells = [{"bytes": file, "path": f"{at}.png"} for at, file in enumerate(files)]
    return Dataset.from_dict({"image": cells, "label": [PETS[at % 2] for at in range(count)]})


def loader(pictures: Pictures, batch: int = 4, workers: int = 0, seed: int = 5, **mixed: float) -> BatchLoader:
    prepare = Prepare(pictures, VIEW, np.zeros((3, 6, 6), np.uint8), **mixed)
    shapes = ([(0, 0)] * len(pictures), [(6, 6)], batch)
    how = {"augment": prepare, "augment_seed": seed, "on_unreadable": pictures.unreadable.found}
    return BatchLoader(pictures, collate_pixels, *shapes, seed=1, workers=workers, **how)


def seen(batches: BatchLoader, epoch: int = 0) -> dict[int, dict[str, Any]]:
    """What each row became in an epoch, and its weight."""
    rows = {}
    for window in batches.windows(epoch):
        (batch,) = window.batches
        for at, number in enumerate(window.row_ids):
            rows[number] = {name: values[at].tolist() for name, values in batch.items()}
    return rows


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker")
@pytest.mark.parametrize("mixed", [{}, {"mixup_alpha": 0.8}, {"mixup_alpha": 0.8, "cutmix_alpha": 1.0}], ids=str)
def test_what_is_drawn_depends_on_seed_epoch_and_row_alone(mixed: dict[str, float], arguments: Any) -> None:
    def run(batch: int = 4, workers: int = 0, seed: int = 5, epoch: int = 0) -> dict[int, dict[str, Any]]:
        pictures = Pictures(noise(10, bad=[3]), PETS, "train", arguments())
        found = seen(loader(pictures, batch, workers, seed, **mixed), epoch)
        assert pictures.unreadable.rows == {3}  # also of those that a worker found
        return found

    expected = run()
    assert expected.keys() == set(range(10))
    for again in (run(), run(workers=1), run(workers=3), run(batch=3), run(batch=10, workers=1)):
        assert again == expected
    for other in (run(seed=6), run(epoch=1)):
        changed = [row for row in range(10) if other[row]["pixel_values"] != expected[row]["pixel_values"]]
        assert changed == [row for row in range(10) if row != 3]


def test_an_unreadable_image_is_blank_and_bears_no_loss(arguments: Any, caplog: Any) -> None:
    for mixed in ({}, {"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}):
        pictures = Pictures(noise(10, bad=[3, 4]), PETS, "train", arguments())
        rows = seen(loader(pictures, **mixed))
        for number, row in rows.items():
            labels = [row["labels"], row.get("other_labels", -100)]
            assert row["row_weights"] == (number not in (3, 4))
            assert labels[0] == (-100 if number in (3, 4) else number % 2)
            assert (not np.any(row["pixel_values"])) == (number in (3, 4))
            if number in (3, 4):
                assert labels == [-100, -100]
                assert row.get("shares", 1.0) == 1.0
    assert caplog.text.count("3.png cannot be read as an image: image file is truncated; it is left out") == 1


def prepared(pictures: Pictures, number: int, partner: int, **mixed: float) -> dict[str, Any]:
    """A row that is mixed with ``partner``: seeds are tried until it is drawn."""
    whole = partial(shown, size=(4, 4))
    prepare = Prepare(pictures, whole, np.zeros((3, 4, 4), np.uint8), **mixed)
    seed = next(seed for seed in range(1000) if np.random.default_rng(seed).integers(len(pictures)) == partner)
    return prepare(pictures[number], np.random.default_rng(seed))


def shown(image: Any, rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """An image as it is."""
    return np.asarray(decode(image).resize(size)).transpose(2, 0, 1)


def test_two_images_are_mixed_with_their_classes(arguments: Any) -> None:
    pictures = Pictures(in_memory(4), PETS, "train", arguments())
    row = prepared(pictures, 0, 3, mixup_alpha=1.0)
    assert (row["label"], row["other_label"]) == (0, 1)
    assert 0 < row["share"] < 1
    assert np.array_equal(row["pixels"], np.full((3, 4, 4), round(30 * (1 - row["share"]))))
    row = prepared(pictures, 1, 2, cutmix_alpha=1.0)
    assert row["share"] == (row["pixels"] == 10).mean()
    assert set(np.unique(row["pixels"])) <= {10, 20}
    assert (row["label"], row["other_label"]) == (1, 0)


def test_an_image_may_meet_itself_or_one_that_cannot_be_read(arguments: Any) -> None:
    rows = in_memory(4, row2={"bytes": b"none", "path": None})
    for mixed in ({"mixup_alpha": 0.5}, {"cutmix_alpha": 0.5}):
        pictures = Pictures(rows, PETS, "train", arguments())
        row = prepared(pictures, 1, 1, **mixed)
        assert np.array_equal(row["pixels"], np.full((3, 4, 4), 10))
        assert row["label"] == row["other_label"] == 1
        row = prepared(pictures, 1, 2, **mixed)
        assert np.array_equal(row["pixels"], np.full((3, 4, 4), 10))
        assert (row["label"], row["other_label"], row["share"], row["unreadable"]) == (1, 1, 1.0, False)
        row = prepared(pictures, 2, 1, **mixed)
        assert not row["pixels"].any()
        assert (row["label"], row["other_label"], row["share"], row["unreadable"]) == (-100, -100, 1.0, True)
        assert pictures.unreadable.rows == set()  # the loader tells, once and on all ranks
        with pytest.raises(UserError, match=r"train image 3 of 4 cannot be read .*skip"):
            prepared(Pictures(rows, PETS, "train", arguments(on_bad_image="fail")), 1, 2, **mixed)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_that_is_to_fail_names_the_image(workers: int, tmp_path: Path, arguments: Any) -> None:
    path = tmp_path / "broken.png"
    path.write_bytes(grey(1)[:30])
    named = in_memory(10, row2={"bytes": None, "path": str(path)})
    bare = in_memory(10, row2={"bytes": grey(1)[:30], "path": None})
    for rows, name in ((named, f"^{path} cannot be"), (bare, "^train image 3 of 10 cannot be read as an image")):
        pictures = Pictures(rows, PETS, "train", arguments(on_bad_image="fail"))
        with pytest.raises(UserError, match=rf"{name}.*; mend or remove it, or give --on_bad_image skip$") as caught:
            seen(loader(pictures, workers=workers))
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_travels_into_processes_that_are_not_forked(workers: int, arguments: Any) -> None:
    batches = loader(Pictures(noise(6), PETS, "train", arguments()), workers=workers, mixup_alpha=0.8)
    again = ForkingPickler.loads(ForkingPickler.dumps(batches))
    assert seen(again) == seen(batches)


# --- Batches and files ------------------------------------------------------------------------------------------------


def test_batches() -> None:
    pixels = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
    rows = [{"pixels": one, "label": at, "unreadable": at == 1} for at, one in enumerate(pixels)]
    batch = collate_pixels(rows, (4, 5))
    assert {name: value.dtype for name, value in batch.items()} == {
        "pixel_values": torch.uint8, "labels": torch.int64, "unreadable": torch.bool,
    }  # fmt: skip
    assert np.array_equal(batch["pixel_values"], pixels)
    assert batch["labels"].tolist() == [0, 1]
    mixed = collate_pixels([row | {"other_label": 7, "share": 0.25} for row in rows], (4, 5))
    assert mixed["other_labels"].tolist() == [7, 7]
    assert mixed["shares"].dtype == torch.float32
    assert mixed["shares"].tolist() == [0.25, 0.25]


def test_a_png_has_the_picture(tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 5), dtype=np.uint8)
    (tmp_path / "a.png").write_bytes(png(pixels))
    with Pillow.open(tmp_path / "a.png") as image:
        assert (image.format, image.mode) == ("PNG", "L")
        assert np.array_equal(image, pixels)


def test_other_columns_are_no_images(tmp_path: Path, arguments: Any) -> None:
    features = Features(image=Values(Value("int64")), label=Value("string"))
    Dataset.from_dict({"image": [[1, 2]], "label": ["cat"]}, features=features).to_parquet(tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"'image' holds .*, not images"):
        load_pictures(arguments(train_file=str(tmp_path / "x.parquet")))


def test_what_is_left_out_is_named_once_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    unreadable = UnreadableImages(lambda row: f"{row}.jpg is truncated", "train", 300)
    unreadable.found([3, 3, 5])
    unreadable.found([5])
    assert unreadable.rows == {3, 5}
    said = ["train: 3.jpg is truncated; it is left out", "train: 5.jpg is truncated; it is left out"]
    assert [record.getMessage() for record in caplog.records] == said
    unreadable.found(range(100))
    unreadable.found(range(200))
    assert len(unreadable.rows) == 200
    assert len(caplog.records) == 21
    assert "no more are named" in caplog.records[-1].getMessage()


def test_a_split_without_one_readable_image_ends_the_run() -> None:
    unreadable = UnreadableImages(str, "train", 3)
    unreadable.found([0, 2])
    with pytest.raises(UserError, match="of 3 train images none can be read"):
        unreadable.found([1])


def test_one_column_is_not_both(tmp_path: Path, arguments: Any) -> None:
    (tmp_path / "rows.csv").write_text("image,label\na.png,x\n")
    args = arguments(train_file=str(tmp_path / "rows.csv"), label_column_name="image")
    with pytest.raises(UserError, match="'image' is named as the column of the images and of the classes"):
        load_pictures(args)


def test_a_test_split_with_an_empty_column_of_classes_has_none(tmp_path: Path, arguments: Any) -> None:
    (tmp_path / "rows.csv").write_text("image,label\na.png,\nb.png,\n")
    args = arguments(test_file=str(tmp_path / "rows.csv"))
    assert class_names(load_pictures(args), args) is None


def test_a_thumbnail_is_small_and_upright(tmp_path: Path, arguments: Any) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = 6
    Pillow.new("RGB", (1200, 600)).save(tmp_path / "a.jpg", exif=exif)
    rows = Dataset.from_dict({"image": [str(tmp_path / "a.jpg")], "label": ["cat"]})
    assert Pictures(rows, PETS, "train", arguments()).thumbnail(0, 100).size == (50, 100)
