"""Images with captions: from whatever holds them, and one policy for those that are missing."""

from __future__ import annotations

import json
import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from datasets import Dataset, Features, Image, List, Value, load_dataset

from core.captions import load_captioned, pick_caption
from core.digits import png
from core.errors import UserError
from core.images import decode
from core.pictures import Pictures

Rows = list[dict[str, Any]]
MISSING = [None, "", " \n\t\u00a0"]


@pytest.fixture
def arguments(tmp_path: Path) -> Any:
    """Makes the flags that the module reads; caches lie in the test's folder."""

    def make(**given: Any) -> Namespace:
        names = [f"{split}_{kind}" for split in ("train", "validation", "test") for kind in ("file", "dir")]
        names += ["dataset_name", "dataset_config_name", "token", "image_column_name", "caption_column_name"]
        others = {"cache_dir": str(tmp_path / "cache"), "on_bad_image": "skip"}
        return Namespace(**dict.fromkeys(names) | others | {name: str(value) for name, value in given.items()})

    return make


def draw(path: Path, value: int) -> Path:
    """Write a grey image; its value tells it from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png(np.full((4, 4), value, np.uint8)))
    return path


def write(path: Path, rows: Rows) -> Path:
    """As csv, json, jsonl or parquet, by the suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        getattr(Dataset.from_list(rows), f"to_{path.suffix[1:]}")(path)
    return path


def pairs(args: Namespace, split: str = "train") -> list[tuple[int, Any]]:
    """The grey value and the caption of each image of a split."""
    rows = load_captioned(args)[0][split]
    assert rows.column_names == ["image", "text"]
    pictures = Pictures(rows, None, split, args)
    values = [decode(pictures.open(at), 1).getpixel((0, 0)) for at in range(len(pictures))]
    return list(zip(values, rows["text"], strict=True))


# --- files and data sets ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "json", "jsonl", "parquet"])
def test_files_of_paths(suffix: str, tmp_path: Path, arguments: Any, monkeypatch: Any) -> None:
    for value, name in enumerate(("a", "b", "c"), start=1):
        draw(tmp_path / "data" / "images" / f"{name}.png", value)
    rows = [{"image": f"images/{name}.png", "text": f'"{name}", été\n'} for name in "abc"]
    rows[1]["image"] = str(tmp_path / "data" / "images" / "b.png")
    rows[2]["image"] = "images\\c.png"
    args = arguments(train_file=write(tmp_path / "data" / f"x.{suffix}", rows))
    expected = [(at, f'"{name}", été\n') for at, name in enumerate("abc", start=1)]
    assert pairs(args) == expected
    args.validation_file, args.train_file = args.train_file, None
    found, left_out = load_captioned(args)
    assert list(found) == ["validation"]
    assert left_out == {"validation": 0}


def test_nothing_given_is_nothing_found(arguments: Any) -> None:
    assert load_captioned(arguments()) == ({}, {})


def test_sources_exclude_each_other(tmp_path: Path, arguments: Any) -> None:
    others = {"dataset_name": "some/body", "dataset_config_name": "x", "train_file": "x.csv", "test_file": "x.csv"}
    for other, value in others.items():
        with pytest.raises(UserError, match=f"--validation_dir and --{other} exclude each other; give one"):
            load_captioned(arguments(validation_dir=tmp_path, **{other: value}))
    with pytest.raises(UserError, match="exclude each other"):
        load_captioned(arguments(dataset_name="some/body", train_file="x.csv"))


def test_a_data_set_with_the_files_in_it(tmp_path: Path, arguments: Any, capsys: Any) -> None:
    """As hubs store them, with columns that are called otherwise and several captions of an image."""
    features = Features(img=Image(), number=Value("int64"), said=List(Value("string")))
    contents = [{"bytes": png(np.full((4, 4), value, np.uint8)), "path": None} for value in range(3)]
    said = [["one", "two"], ["", None, "three", " "], []]
    for split in ("train", "test"):
        texts = said if split == "train" else [[], None, [" "]]
        rows = Dataset.from_dict({"img": contents, "number": [1, 2, 3], "said": texts}, features=features)
        rows.to_parquet(tmp_path / "set" / f"{split}-00000-of-00001.parquet")
    args = arguments(dataset_name=tmp_path / "set")
    found, left_out = load_captioned(args)
    assert found["train"].features["image"] == Image(decode=False)
    assert list(found) == ["train"], "the test split's captions are kept back"
    assert left_out == {"train": 1, "test": 3}
    assert pairs(args) == [(0, ["one", "two"]), (1, ["three"])]
    said = capsys.readouterr().out
    assert "no column is called text or caption: 'said' is taken" in said
    assert "train: 2 images\n" in said
    os.replace(tmp_path / "set" / "test-00000-of-00001.parquet", tmp_path / "set" / "train-00000-of-00001.parquet")
    with pytest.raises(UserError, match="of 3 images of the train split none has a caption; give --caption_column"):
        load_captioned(args)


def test_which_column_has_the_captions(tmp_path: Path, arguments: Any) -> None:
    def taken(asked: str | None = None, pictures: str | None = None, **columns: Any) -> str:
        args = arguments(train_file=write(tmp_path / "x.jsonl", [columns]))
        args.image_column_name, args.caption_column_name = pictures, asked
        return load_captioned(args)[0]["train"]["text"][0]

    assert taken(image="a", caption="b", text="c") == "c"
    assert taken(image="a", caption="b", title="c") == "b"
    assert taken(image="a", title="b", size=3) == "b"
    assert taken("title", image="a", caption="b", text="c", title="d") == "d"
    assert taken("text", "caption", caption="a", text="b", image="c") == "b"
    assert taken("image", "text", text="a", image="b") == "b", "the two may be called like each other"
    for columns, told in (
        ({"image": "a", "title": "b", "more": "c"}, "no column 'text' or 'caption'; there are: image, title, more"),
        ({"image": "a", "size": 3}, "no column 'text' or 'caption'; there are: image, size"),
        ({"asked": "titel", "image": "a", "title": "b"}, r"no column 'titel' \(did you mean 'title'\?\); there are"),
        ({"asked": "image", "image": "a", "title": "b"}, "'image' is named as the column of the images and of the cap"),
        ({"picture": "a", "text": "b"}, "--image_column_name: no column 'image'"),
    ):
        with pytest.raises(UserError, match=told):
            taken(**columns)


# --- folders ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "parquet"])
def test_a_folder_with_metadata_is_that_of_datasets(suffix: str, tmp_path: Path, arguments: Any, capfd: Any) -> None:
    """Also below the folder, with an image twice, and one that is not listed."""
    folder = tmp_path / "set"
    for value, name in enumerate(("a.png", "deep/b.png", "part/some/c.png", "part/more/d.png", "not_listed.png")):
        draw(folder / name, value)
    (folder / "a.txt").write_text("not asked")
    upper = [("a.png", "one"), ("deep/b.png", "two, or three"), ("a.png", "once more")]
    lower = [("more/d.png", "four"), ("some/c.png", "five")]
    for place, listed in ((folder, upper), (folder / "part", lower)):
        rows = [{"file_name": name, "caption": text, "size": 3} for name, text in listed]
        write(place / f"metadata.{suffix}", rows)
    args = arguments(train_dir=folder)
    found = pairs(args)
    assert found == [(0, "one"), (1, "two, or three"), (0, "once more"), (3, "four"), (2, "five")]
    peer = load_dataset("imagefolder", data_dir=str(folder), cache_dir=args.cache_dir)["train"]
    assert sorted(found) == sorted((row["image"].getpixel((0, 0)), row["caption"]) for row in peer)
    args.train_dir = os.path.relpath(folder)
    assert pairs(args) == found


def test_images_that_the_metadata_do_not_list(tmp_path: Path, arguments: Any, caplog: Any) -> None:
    for name in "abc":
        draw(tmp_path / "set" / "x" / f"{name}.png", 1)
    listed = [{"file_name": name, "text": "t"} for name in ("x/a.png", "./x//a.png", "x\\b.png", "gone.png", None, "")]
    write(tmp_path / "set" / "metadata.jsonl", listed)
    args = arguments(train_dir=tmp_path / "set")
    rows = load_captioned(args)[0]["train"]
    assert [len(rows), rows["image"][4], rows["image"][5]] == [6, None, ""]
    assert f"--train_dir: 1 of 3 images of {args.train_dir} are not in its metadata and left out" in caplog.text
    pictures = Pictures(rows, None, "train", args)
    views = [pictures.view(at, lambda image, rng: image.size, np.random.default_rng()) for at in range(6)]
    assert views == [(4, 4)] * 3 + [None] * 3, "a missing file is an unreadable image"


def test_a_text_beside_each_image(tmp_path: Path, arguments: Any, caplog: Any) -> None:
    folder = tmp_path / "set"
    for value, name in enumerate(("a.png", "b.c.png", "d/e.PNG", "f.png", "g.png", "h.png", "i.png")):
        draw(folder / name, value)
    (folder / "a.txt").write_bytes("\ufeffein Ä,\r\nin two lines\n".encode())
    (folder / "b.c.txt").write_text(" dots ")
    (folder / "d" / "e.txt").write_text("below")
    (folder / "f.txt").write_text(" \n")
    (folder / "g.txt").mkdir()
    os.mkfifo(folder / "h.txt")  # to read it would wait for its writer
    (folder / "i.txt").symlink_to(folder / "gone.txt")
    (folder / "alone.txt").write_text("without an image")
    args = arguments(train_dir=folder)
    assert pairs(args) == [(0, "ein Ä,\r\nin two lines"), (1, "dots"), (2, "below")]
    assert load_captioned(args)[1] == {"train": 4}
    assert f"{folder}: 4 of 7 images (57.1%) of the train split have no caption and are left out" in caplog.text


def test_a_folder_that_will_not_do(tmp_path: Path, arguments: Any) -> None:
    (tmp_path / "empty").mkdir()
    draw(tmp_path / "bare" / "a.png", 1)
    write(tmp_path / "two" / "metadata.csv", [{"file_name": "a.png", "text": "x"}])
    write(tmp_path / "two" / "metadata.jsonl", [{"file_name": "a.png", "text": "x"}])
    write(tmp_path / "other" / "metadata.csv", [{"file": "a.png", "text": "x"}])
    write(tmp_path / "numbers" / "metadata.csv", [{"file_name": 3, "text": "x"}])
    write(tmp_path / "bytes" / "metadata.parquet", [{"file_name": b"a.png", "text": "x"}])
    write(tmp_path / "silent" / "metadata.csv", [{"file_name": "a.png", "size": 3}])
    (tmp_path / "hollow").mkdir()
    (tmp_path / "hollow" / "metadata.csv").touch()
    for folder, told in (
        ("gone", "--train_dir: .*gone is not there; give a folder"),
        ("other/metadata.csv", "--train_dir: .* is a file; give a folder"),
        ("empty", "--train_dir: .*empty holds no images"),
        ("bare", "bare: of 1 images of the train split none has a caption; .*a .txt file beside each image"),
        ("two", "two/metadata.csv and metadata.jsonl are both there; keep one"),
        ("other", "^/[^ ]*other/metadata.csv: --image_column_name: no column 'file_name'.*there are: file, text"),
        ("numbers", "numbers/metadata.csv: --image_column_name: 'file_name' holds int64, not images"),
        ("bytes", "bytes/metadata.parquet: 'file_name' holds b'a.png', no file's name"),
        ("silent", "silent/metadata.csv: --caption_column_name: no column 'text' or 'caption'; there are: file_name"),
        ("hollow", "^/[^ ]*hollow/metadata.csv is empty"),
    ):
        with pytest.raises(UserError, match=told) as caught:
            load_captioned(arguments(train_dir=tmp_path / folder))
        assert "--train_file" not in str(caught.value)
    for flag in ("image_column_name", "caption_column_name"):
        with pytest.raises(UserError, match=f"--{flag}: .*bare has no metadata.csv"):
            load_captioned(arguments(train_dir=tmp_path / "bare", **{flag: "text"}))
    write(tmp_path / "lost" / "metadata.csv", [{"file_name": "a.png", "text": "x"}])
    args = arguments(train_dir=tmp_path / "lost")
    with pytest.raises(UserError, match="the train split's images are not there"):
        Pictures(load_captioned(args)[0]["train"], None, "train", args)


def test_commas_that_shift_the_columns_are_said(tmp_path: Path, arguments: Any, caplog: Any) -> None:
    for name, text in (("bare", "file_name,text\na.png,one, two\n"), ("quoted", 'file_name,text\na.png,"one, two"\n')):
        draw(tmp_path / name / "a.png", 1)
        (tmp_path / name / "metadata.csv").write_text(text)
        (tmp_path / f"{name}.csv").write_text(text.replace("a.png", f"{name}/a.png"))
        for given in ({"train_dir": tmp_path / name}, {"train_file": tmp_path / f"{name}.csv"}):
            caplog.clear()
            load_captioned(arguments(**given, image_column_name="file_name"))
            said = f"{name}.*: the first row has 3 cells, the header 2, .*shifted: a caption with commas needs quotes"
            assert bool(re.search(said, caplog.text)) == (name == "bare")


def test_metadata_may_call_its_columns_otherwise(tmp_path: Path, arguments: Any) -> None:
    draw(tmp_path / "set" / "a.png", 7)
    write(tmp_path / "set" / "metadata.csv", [{"file_name": "b.png", "text": "x", "path": "a.png", "title": "y"}])
    args = arguments(test_dir=tmp_path / "set", image_column_name="path", caption_column_name="title")
    assert pairs(args, "test") == [(7, "y")]


def test_one_caption_here_and_several_there(tmp_path: Path, arguments: Any) -> None:
    for value, name in enumerate("ab"):
        draw(tmp_path / "set" / name / "x.png", value)
    write(tmp_path / "set" / "a" / "metadata.jsonl", [{"file_name": "x.png", "text": "one"}])
    write(tmp_path / "set" / "b" / "metadata.jsonl", [{"file_name": "x.png", "text": ["two", "three"]}])
    assert pairs(arguments(train_dir=tmp_path / "set")) == [(0, ["one"]), (1, ["two", "three"])]


# --- captions that are missing, or none -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "lists", "mixed", "metadata"])
def test_missing_captions_are_left_out_and_counted(kind: str, tmp_path: Path, arguments: Any, caplog: Any) -> None:
    cells = [*MISSING, "x", *MISSING, "y"]
    if kind in ("lists", "mixed"):
        cells = [*([cell] for cell in MISSING), [], None, ["x"], MISSING, [*MISSING, "y", ""]]
        cells[5] = "x" if kind == "mixed" else ["x"]
    path = draw(tmp_path / "set" / "a.png", 5)
    names = {"metadata": "metadata.csv", "lists": "x.parquet", "mixed": "x.jsonl"}
    column = "file_name" if kind == "metadata" else "image"
    file = write(tmp_path / "set" / names.get(kind, f"x.{kind}"), [{column: str(path), "text": cell} for cell in cells])
    args = arguments(**({"train_dir": file.parent} if kind == "metadata" else {"train_file": file}))
    assert pairs(args) == [(5, ["x"] if cells[-1] != "y" else "x"), (5, ["y"] if cells[-1] != "y" else "y")]
    assert load_captioned(args)[1] == {"train": 6}
    assert [record.getMessage() for record in caplog.records] == [
        f"{args.train_dir or file}: 6 of 8 images (75.0%) of the train split have no caption and are left out"
    ]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_no_caption_at_all_ends_the_run(kind: str, tmp_path: Path, arguments: Any) -> None:
    file = write(tmp_path / f"x.{kind}", [{"image": "a.png", "text": None}] * 2)
    for split in ("train", "test"):
        with pytest.raises(UserError, match=f"of 2 images of the {split} split none has a caption; give --caption_col"):
            load_captioned(arguments(**{f"{split}_file": file}))


@pytest.mark.parametrize(
    ("cells", "row", "shown"),
    [([1, 2], 1, "1"), (["x", 2], 2, "2"), ([None, ["x", 2]], 2, "2"), ([{"en": "x"}] * 2, 1, r"\{'en': 'x'\}"),
     (["x", True], 2, "True"), ([["x"], [["y"]]], 2, r"\['y'\]")],
    ids=str,
)  # fmt: skip
def test_a_caption_that_is_no_text_is_named(
    cells: list[Any], row: int, shown: str, tmp_path: Path, arguments: Any
) -> None:
    draw(tmp_path / "a.png", 1)
    for name, column, flags in (
        ("x.jsonl", "image", {"train_file": tmp_path / "x.jsonl"}),
        ("metadata.jsonl", "file_name", {"train_dir": tmp_path}),
    ):
        write(tmp_path / name, [{column: "a.png", "said": cell, "text": "t"} for cell in cells])
        with pytest.raises(UserError, match=rf"{name}: row {row} of 'said' holds {shown}, no text; ") as caught:
            load_captioned(arguments(caption_column_name="said", **flags))
        assert "\n" not in str(caught.value)


def test_what_is_not_utf8_is_named(tmp_path: Path, arguments: Any) -> None:
    draw(tmp_path / "set" / "a.png", 1)
    (tmp_path / "set" / "a.txt").write_bytes("one\ntwo é".encode("latin-1"))
    with pytest.raises(UserError, match=r"set/a.txt, line 2: .*this is not UTF-8; convert the file"):
        load_captioned(arguments(train_dir=tmp_path / "set"))
    (tmp_path / "set" / "a.txt").write_bytes("one".encode("utf-16"))
    with pytest.raises(UserError, match=r"set/a.txt, line 1: "):
        load_captioned(arguments(train_dir=tmp_path / "set"))
    for name, content in (("csv", "file_name,text\na.png,é\n"), ("jsonl", '{"file_name": "a.png",\n"text": "é"}\n')):
        (tmp_path / "set" / f"metadata.{name}").write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match=rf"metadata.{name}, line 2, byte \d+: .*this is not UTF-8"):
            load_captioned(arguments(train_dir=tmp_path / "set"))
        (tmp_path / "set" / f"metadata.{name}").unlink()
    ends = pa.array([0, 1, 3], pa.int32()).buffers()[1]
    texts = pa.Array.from_buffers(pa.string(), 2, [None, ends, pa.py_buffer(b"a\xff\xfe")])
    parquet.write_table(pa.table({"image": ["a", "b"], "text": texts}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x.parquet: 'text' is not UTF-8 \(one of the 1,000 from row 1 on"):
        load_captioned(arguments(train_file=tmp_path / "x.parquet"))


# --- pick_caption -----------------------------------------------------------------------------------------------------


def test_a_caption_is_picked_evenly_by_one_draw() -> None:
    texts = ["a", "b", "c"]
    assert (pick_caption(texts, None), pick_caption("abc", None)) == ("a", "abc")
    picked = [pick_caption(texts, np.random.default_rng(seed)) for seed in range(900)]
    assert all(picked.count(text) == pytest.approx(300, abs=60) for text in texts)
    following = []
    for text in ("abc", ["a"], texts):
        rng = np.random.default_rng(3)
        assert pick_caption(text, rng) in (text, *text)
        following.append(rng.random())
    rng = np.random.default_rng(3)
    rng.random()
    assert set(following) == {rng.random()}, "exactly one draw"
