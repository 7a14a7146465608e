"""Rows to learn from, made anew or kept: the same draws, the same numbers; what makes a kept one be computed anew."""

from __future__ import annotations

import json
import os
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from core.augment import CropView
from core.captions import load_captioned
from core.data import BatchLoader
from core.device import Device
from core.encoders import Encoders
from core.errors import UserError
from core.examples import Examples, collate_examples
from core.noise import Noise, NoiseArguments
from core.pictures import Pictures
from tests.conftest import write_jsonl

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))
SIZES = [(20, 30), (16, 16), (40, 18), (17, 25), (64, 32), (22, 22), (30, 20)]  # (width, height)
BROKEN = 3
SEVERAL = {0: ["alpha", "beta 1", "alpha beta"], 5: ["gamma 7"]}
CENTRED = CropView(16, 16, center=True, flip=0.0)
DRAWN = CropView(20, 16, center=False, flip=0.5)


def arguments(folder: Path, **given: Any) -> Namespace:
    names = [f"{split}_{kind}" for split in ("train", "validation", "test") for kind in ("file", "dir")]
    names += ["dataset_name", "dataset_config_name", "token", "image_column_name", "caption_column_name", "latents_dir"]
    others = {"cache_dir": str(folder / "cache"), "on_bad_image": "skip", "per_device_train_batch_size": 3, "seed": 5}
    return Namespace(**dict.fromkeys(names) | others | given)


def write_pictures(folder: Path, several: bool = True) -> Path:
    """A file of rows, whose images' relative paths begin where it lies; one image cannot be read."""
    draw, rows = np.random.default_rng(0), []
    (folder / "images").mkdir(parents=True)
    for number, (width, height) in enumerate(SIZES):
        path = folder / "images" / f"{number}.png"
        Image.fromarray(draw.integers(0, 256, (height, width, 3), np.uint8)).save(path)
        rows.append({"image": f"images/{number}.png", "text": SEVERAL.get(number, [f"alpha {number}"])})
    (folder / "images" / f"{BROKEN}.png").write_text("no image")
    if several:
        return write_jsonl(folder / "rows.jsonl", rows)
    lines = [f"{row['image']},{row['text'][0]}\n" for row in rows]
    (folder / "rows.csv").write_text("image,text\n" + "".join(lines))
    return folder / "rows.csv"


def make(pipe: Any, args: Namespace, view: CropView = CENTRED, empty: float = 0.0) -> Examples:
    pictures = Pictures(load_captioned(args)[0]["train"], None, "train", args)
    noise = Noise(pipe.scheduler.config, Namespace(**asdict(NoiseArguments())))
    return Examples(pictures, view, Encoders(pipe, CPU), noise, empty)


def row(examples: Examples, number: int, seed: int = 0) -> dict[str, np.ndarray]:
    return examples(examples.pictures[number], np.random.default_rng([seed, number]))


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    return write_pictures(tmp_path / "data")


@pytest.fixture(params=["sd", "sdxl"])
def pipe(request: pytest.FixtureRequest) -> Any:
    return DiffusionPipeline.from_pretrained(request.getfixturevalue(f"tiny_{request.param}"))


def seen(encoders: Encoders, made: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """What the network would be told of a row that was made anew."""
    batch = collate_examples([made])
    ids = {name: batch.pop(name) for name in list(batch) if name.startswith("input_ids")}
    moments = encoders.moments(batch.pop("pixel_values"))
    return batch | encoders.embed(ids) | {"moments": moments}


# -------------------------------------------------------------------------------------------------------- new and kept


@pytest.mark.parametrize("empty", [0.0, 0.4])
def test_a_kept_row_is_the_row_made_anew(pipe: Any, rows_file: Path, tmp_path: Path, empty: float) -> None:
    """Of one view: latents, embeddings, sizes and place, and every draw."""
    args = arguments(tmp_path, train_file=str(rows_file))
    new, kept = make(pipe, args, empty=empty), make(pipe, args, empty=empty)
    kept.keep(args, CPU, tmp_path / "kept")
    names = {"moments", "encoder_hidden_states", "posterior", "noise", "timesteps", "labels", "unreadable"}
    names |= {"time_ids", "text_embeds"} if new.encoders.needs_time_ids else set()
    for number, seed in ((number, seed) for number in range(len(SIZES)) for seed in range(3)):
        expected, found = seen(new.encoders, row(new, number, seed)), collate_examples([row(kept, number, seed)])
        assert expected.keys() == found.keys() == names
        for name, value in found.items():
            assert value.dtype == expected[name].dtype
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)
        for name in ("posterior", "noise", "timesteps"):
            assert torch.equal(found[name], expected[name])


def test_no_draw_moves_with_what_is_kept_or_how_it_is_seen(tiny_sd: Path, rows_file: Path, tmp_path: Path) -> None:
    """Another view is no other noise: it is drawn last."""
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sd), arguments(tmp_path, train_file=str(rows_file))
    every = [make(pipe, args, view, empty=0.5) for view in (CENTRED, DRAWN, DRAWN)]
    every[2].keep(args, CPU, tmp_path / "kept")
    for number in range(len(SIZES)):
        first, *others = (row(examples, number) for examples in every)
        for other in others:
            assert all(np.array_equal(first[name], other[name]) for name in ("posterior", "noise", "timesteps"))
        assert np.array_equal(first["input_ids"], others[0]["input_ids"])
    views = {row(every[1], 4, seed)["pixel_values"].tobytes() for seed in range(8)}
    assert len(views) > 4
    assert len({row(every[2], 4, seed)["moments"].tobytes() for seed in range(8)}) == 1


def test_of_a_drawn_view_one_is_kept_by_the_seed(
    tiny_sd: Path, rows_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe, found = DiffusionPipeline.from_pretrained(tiny_sd), {}
    for name, seed, size in (("one", 5, 3), ("same", 5, 2), ("other", 6, 3)):
        args = arguments(tmp_path, train_file=str(rows_file), seed=seed, per_device_train_batch_size=size)
        examples = make(pipe, args, DRAWN)
        examples.keep(args, CPU, tmp_path / name)
        found[name] = np.array(examples.kept_pictures["moments"])
    assert np.allclose(found["one"], found["same"], rtol=0, atol=1e-5)
    assert not np.allclose(found["one"], found["other"], rtol=0, atol=1e-2)
    assert capsys.readouterr().out.count("crops and mirrors do not change with the epochs") == 3
    make(pipe, args, CENTRED).keep(args, CPU, tmp_path / "centred")
    assert "crops and mirrors" not in capsys.readouterr().out


def test_sizes_and_place_of_the_view(tiny_sdxl: Path, rows_file: Path, tmp_path: Path) -> None:
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sdxl), arguments(tmp_path, train_file=str(rows_file))
    examples = make(pipe, args, CropView(20, 16, center=True, flip=0.0))
    width, height = SIZES[2]
    assert row(examples, 2)["time_ids"].tolist() == [height, width, 2, (20 * width // height - 16) // 2, 16, 16]


@pytest.mark.parametrize("way", ["new", "kept"])
def test_an_image_that_cannot_be_read_bears_no_loss(
    tiny_sd: Path, rows_file: Path, tmp_path: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sd), arguments(tmp_path, train_file=str(rows_file))
    examples = make(pipe, args)
    if way == "kept":
        examples.keep(args, CPU, tmp_path / "kept")
        assert examples.pictures.unreadable.rows == {BROKEN}
        assert sum("cannot be read as an image" in message for message in caplog.messages) == 1
    for number in range(len(SIZES)):
        made = row(examples, number)
        assert (made["labels"], made["unreadable"]) == ((-100, True) if number == BROKEN else (0, False))
    loader = BatchLoader(examples.pictures, collate_examples, [(0, 0)] * 7, [(16, 16)], 7, augment=examples)
    window = next(loader.windows())
    assert (window.targets, window.rows, window.unreadable) == (6, 6, [BROKEN])
    assert window.batches[0]["row_weights"].tolist() == [float(at != BROKEN) for at in range(7)]
    args.on_bad_image = "fail"
    examples = make(pipe, args)
    with pytest.raises(UserError, match=r"3\.png.*--on_bad_image skip"):
        row(examples, BROKEN) if way == "new" else examples.keep(args, CPU, tmp_path / "anew")


# ------------------------------------------------------------------------------------------------------------ captions


@pytest.mark.parametrize("way", ["new", "kept"])
def test_captions_are_lost_as_often_as_asked_for(tiny_sd: Path, rows_file: Path, tmp_path: Path, way: str) -> None:
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sd), arguments(tmp_path, train_file=str(rows_file))
    shares, name = {}, "input_ids" if way == "new" else "encoder_hidden_states"
    for empty in (0.0, 0.3, 1.0):
        examples = make(pipe, args, empty=empty)
        nothing = examples.encoders.tokenize("")["input_ids"]
        if way == "kept":
            examples.keep(args, CPU, tmp_path / "kept")
            nothing = examples.encoders.embed({"input_ids": torch.tensor(nothing)[None]})["encoder_hidden_states"][0]
        lost = [np.allclose(row(examples, 1, seed)[name], nothing, atol=1e-6) for seed in range(200)]
        shares[empty] = np.mean(lost)
    assert (shares[0.0], shares[1.0]) == (0, 1)
    assert 0.2 < shares[0.3] < 0.4


@pytest.mark.parametrize("way", ["new", "kept"])
def test_of_several_captions_each_is_learned(tiny_sd: Path, rows_file: Path, tmp_path: Path, way: str) -> None:
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sd), arguments(tmp_path, train_file=str(rows_file))
    examples = make(pipe, args)
    tokens = {text: examples.encoders.tokenize(text)["input_ids"] for text in (*SEVERAL[0], *SEVERAL[5])}
    name, known = "input_ids", tokens
    if way == "kept":
        examples.keep(args, CPU, tmp_path / "kept")
        ids = torch.from_numpy(np.stack(list(tokens.values())))
        found = examples.encoders.embed({"input_ids": ids})["encoder_hidden_states"].numpy()
        name, known = "encoder_hidden_states", dict(zip(tokens, found, strict=True))
    drawn = []
    for seed in range(60):
        made = row(examples, 0, seed)[name]
        drawn += [text for text in SEVERAL[0] if np.allclose(made, known[text], atol=1e-5)]
    assert len(drawn) == 60
    assert min(drawn.count(text) for text in SEVERAL[0]) > 10
    assert np.allclose(row(examples, 5)[name], known["gamma 7"], atol=1e-5)


def test_what_is_lost_of_captions_and_made_up_of_images_is_said(
    tiny_sd: Path, rows_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [json.loads(line) for line in rows_file.read_text().splitlines()]
    rows[1]["text"] = ["a " * 20, "alpha"]
    write_jsonl(rows_file, rows)
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sd), arguments(tmp_path, train_file=str(rows_file))
    make(pipe, args, CropView(20, 16, True, 0.0))
    assert "train: 1 of 10 captions are longer than 16 tokens" in caplog.text
    assert "train: 2 of 6 images have sides below 20 pixels: they are enlarged" in caplog.text
    with pytest.raises(UserError, match="--resolution, --crop_resolution: pictures of 18 pixels do not fit"):
        make(pipe, args, CropView(20, 18, True, 0.0))


# ------------------------------------------------------------------------------------------------------ kept, and until


def changed_image(args: Namespace, pipe: Any) -> None:
    path = Path(args.train_file).parent / "images" / "1.png"
    Image.new("RGB", (16, 16), (255, 0, 9)).save(path)


def touched_image(args: Namespace, pipe: Any) -> None:
    """The same size, as an edited bitmap may have."""
    path = Path(args.train_file).parent / "images" / "1.png"
    os.utime(path, ns=(1, 1))


def another_caption(args: Namespace, pipe: Any) -> None:
    path = Path(args.train_file)
    path.write_text(path.read_text().replace("alpha 2", "beta 2"))


def another_autoencoder(args: Namespace, pipe: Any) -> None:
    with torch.no_grad():
        pipe.vae.encoder.conv_in.bias[0] += 1


def another_scale(args: Namespace, pipe: Any) -> None:
    pipe.vae.register_to_config(scaling_factor=0.5)


def another_text_encoder(args: Namespace, pipe: Any) -> None:
    with torch.no_grad():
        next(pipe.text_encoder.parameters())[0] += 1


CHANGES = {
    "nothing": (None, 0),
    "image": (changed_image, 1),
    "time": (touched_image, 1),
    "caption": (another_caption, 2),
    "autoencoder": (another_autoencoder, 2),
    "scale": (another_scale, 2),
    "text encoder": (another_text_encoder, 2),
    "seed": (lambda args, pipe: vars(args).update(seed=6), 1),
    "batch": (lambda args, pipe: vars(args).update(per_device_train_batch_size=2), 0),
    "rate": (lambda args, pipe: vars(args).update(learning_rate=2), 0),
}


OF_ROWS = [(change, kind) for change in ("nothing", "image", "caption") for kind in ("jsonl", "folder")]


@pytest.mark.parametrize(("change", "kind"), [*((change, "csv") for change in CHANGES), *OF_ROWS])
def test_what_is_kept_is_computed_anew_when_something_changed(
    tiny_sd: Path, tmp_path: Path, change: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images' paths begin where the file lies, or are whole; the run may stand elsewhere."""
    file = write_pictures(tmp_path / "data", several=kind != "csv")
    args = arguments(tmp_path, train_file=str(file))
    if kind == "folder":
        file = file.rename(file.with_name("metadata.jsonl"))
        file.write_text(file.read_text().replace('"image"', '"file_name"'))
        args = arguments(tmp_path, train_dir=str(file.parent))
    alter, new = CHANGES[change]
    found = []
    for _ in range(2):
        pipe = DiffusionPipeline.from_pretrained(tiny_sd)
        if found and alter:
            alter(Namespace(train_file=str(file)) if change in ("image", "caption", "time") else args, pipe)
        examples = make(pipe, args)
        examples.keep(args, CPU, tmp_path / "kept")
        found.append({path.name: path.stat().st_mtime_ns for path in (tmp_path / "kept").iterdir()})
        monkeypatch.chdir(tmp_path)
    first, second = found
    assert {name: time for name, time in second.items() if name in first} == first
    assert len(second) - len(first) == new
    assert {name.rpartition("-")[0] for name in first} == {"train-images", "train-captions"}
    fresh = make(pipe, args)
    for number in range(len(SIZES)):
        made = fresh.encoders.moments(torch.from_numpy(row(fresh, number)["pixel_values"])[None])[0]
        assert np.allclose(row(examples, number)["moments"], made, atol=1e-5)


def test_where_they_are_kept_can_be_said(tiny_sd: Path, rows_file: Path, tmp_path: Path) -> None:
    args = arguments(tmp_path, train_file=str(rows_file), latents_dir=str(tmp_path / "elsewhere"))
    make(DiffusionPipeline.from_pretrained(tiny_sd), args).keep(args, CPU, tmp_path / "kept")
    assert len(list((tmp_path / "elsewhere").iterdir())) == 2
    assert not (tmp_path / "kept").exists()


def test_numbers_that_are_none_are_not_kept(tiny_sd: Path, rows_file: Path, tmp_path: Path) -> None:
    """One image of seven, one caption of several: they are named, and nothing is left on disk."""
    pipe, args = DiffusionPipeline.from_pretrained(tiny_sd), arguments(tmp_path, train_file=str(rows_file))
    find = Encoders.moments

    class Odd(Encoders):
        def moments(self, pixels: torch.Tensor) -> torch.Tensor:
            found = find(self, pixels)
            wrong = torch.tensor([bool((image == odd).all()) for image in pixels])
            return torch.where(wrong[:, None, None, None], torch.inf, found)

    examples = make(pipe, args)
    odd = torch.from_numpy(row(examples, 4)["pixel_values"])
    examples.encoders = Odd(pipe, CPU)
    with pytest.raises(UserError, match=r"inf or nan is made of \S*4\.png by the autoencoder; .*--pretrained_vae"):
        examples.keep(args, CPU, tmp_path / "kept")
    token = examples.encoders.tokenize("gamma 7")["input_ids"][1]
    with torch.no_grad():
        pipe.text_encoder.get_input_embeddings().weight[int(token)] = torch.nan
    with pytest.raises(UserError, match=r"inf or nan is made of the caption 'gamma 7' by a text encoder; name"):
        make(pipe, args).keep(args, CPU, tmp_path / "kept")
    assert [path.name.rpartition("-")[0] for path in (tmp_path / "kept").iterdir()] == ["train-captions"]


@pytest.mark.parametrize("way", ["new", "kept"])
def test_worker_processes_make_the_same_rows(pipe: Any, rows_file: Path, tmp_path: Path, way: str) -> None:
    args = arguments(tmp_path, train_file=str(rows_file))
    examples, found = make(pipe, args, DRAWN, empty=0.3), []
    if way == "kept":
        examples.keep(args, CPU, tmp_path / "kept")
    for workers in (0, 2):
        how = {"augment": examples, "augment_seed": 3, "seed": 1, "workers": workers}
        loader = BatchLoader(examples.pictures, collate_examples, [(0, 0)] * 7, [(16, 16)], 2, **how)
        windows = [window for epoch in range(2) for window in loader.windows(epoch)]
        found.append([window.batches[0] for window in windows])
    assert len(found[0]) == len(found[1]) == 8
    for alone, by_worker in zip(*found, strict=True):
        assert alone.keys() == by_worker.keys()
        assert all(torch.equal(value, by_worker[name]) for name, value in alone.items())
