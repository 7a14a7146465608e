"""The recipe end to end on tiny real models: data, classes, broken images, losses, resume, bad input, copies."""

from __future__ import annotations

import csv
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from core.errors import UserError
from tests.conftest import ANIMALS, REPOSITORY, save_picture_model, save_pictures, write_jsonl

SCRIPT = REPOSITORY / "recipes" / "image_classification" / "run.py"
QUIET = ["--disable_tqdm", "--report_to", "none", "--use_cpu"]
# The middle square of each image, whatever is drawn: no square has the area of an image whose sides are even, unequal.
CENTRED = "--random_crop_scale 1 1 --random_crop_ratio 1 1 --random_flip 0".split()
NEW = ["--model_type", "vit", "--image_size", "16", "--config_overrides"]  # a small model from scratch
NEW += ["patch_size=8,hidden_size=16,num_hidden_layers=1,num_attention_heads=2,intermediate_size=32"]
ONE_STEP = "--do_train --max_steps 1 --learning_rate 0 --per_device_train_batch_size 32 --save_strategy no".split()


class Recipe:
    """The recipe's ``main`` with a new output folder for each run."""

    def __init__(self, module: ModuleType, folder: Path) -> None:
        self.module, self.folder, self.runs = module, folder, 0

    def __call__(self, *flags: str, model: Path | None = None, data: dict[str, str] | None = None) -> dict[str, Any]:
        self.runs += 1
        self.output = self.folder / f"run{self.runs}"
        named = ["--model_name_or_path", str(model)] if model else []
        named += [word for flag, path in (data or {}).items() for word in (flag, str(path))]
        named += ["--output_dir", str(self.output), "--cache_dir", str(self.folder / "cache")]
        return self.module.main([*named, *QUIET, *flags])

    @property
    def results(self) -> dict[str, Any]:
        return json.loads((self.output / "all_results.json").read_text())

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        from safetensors.torch import load_file

        return load_file(self.output / "model.safetensors")

    def table(self, name: str = "predictions.csv") -> list[dict[str, str]]:
        return list(csv.DictReader((self.output / name).open()))


@pytest.fixture
def recipe(image_classification: ModuleType, tmp_path: Path) -> Recipe:
    return Recipe(image_classification, tmp_path)


@pytest.fixture
def made(image_classification: ModuleType, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """What the next run makes: its pictures and its loaders, by split."""
    found, make = SimpleNamespace(pictures={}, loaders={}), image_classification.make_loader

    def watch(args: Any, pictures: Any, processing: Any, train: bool) -> Any:
        found.pictures[pictures.split] = pictures
        found.loaders[pictures.split] = make(args, pictures, processing, train)
        return found.loaders[pictures.split]

    monkeypatch.setattr(image_classification, "make_loader", watch)
    return found


@pytest.fixture(scope="session")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved ViT without dropout whose outputs stand for the animals in another order than the data's."""
    from transformers import ViTConfig

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    names = {"id2label": dict(enumerate(ANIMALS[::-1])), "label2id": {name: 6 - at for at, name in enumerate(ANIMALS)}}
    config = ViTConfig(image_size=16, patch_size=8, **sizes, **names, initializer_range=0.2)
    return save_picture_model(tmp_path_factory.mktemp("classifier"), config, "ViTForImageClassification")


def only(folders: dict[str, str], *splits: str) -> dict[str, str]:
    return {flag: path for flag, path in folders.items() if flag[2:].rpartition("_")[0] in splits}


def files_of(folder: str | Path) -> list[Path]:
    """The images of class folders in the order in which they are read."""
    return sorted(path for path in Path(folder).rglob("*") if path.is_file())


def logits_of(model: Path, files: list[Path]) -> torch.Tensor:
    """What transformers alone says of images: (files, classes)."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    network, processor = (kind.from_pretrained(model) for kind in (AutoModelForImageClassification, AutoImageProcessor))
    with torch.no_grad():
        pixels = [processor(Image.open(file).convert("RGB"), return_tensors="pt")["pixel_values"] for file in files]
        return torch.cat([network.eval()(one).logits for one in pixels])


def figures(metrics: dict[str, Any], phase: str) -> list[float]:
    return [metrics[f"{phase}_{name}"] for name in ("loss", "accuracy", "top5_accuracy")]


def expected_figures(model: Path, folder: str | Path) -> list[float]:
    """Loss, accuracy and top-5 accuracy of a saved model, image by image, without the recipe."""
    files, config = files_of(folder), json.loads((Path(model) / "config.json").read_text())
    labels = torch.tensor([config["label2id"][file.parent.name] for file in files])
    logits = logits_of(model, files)
    ranks = (logits > logits.gather(1, labels[:, None])).sum(1)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    return [loss.item(), (ranks == 0).float().mean().item(), (ranks < 5).float().mean().item()]


def as_program(*flags: str, script: Path = SCRIPT, **options: Any) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, timeout=240, **options)


# ----------------------------------------------------------------------------------------------------------- contract


@pytest.fixture(scope="module")
def trained(
    image_classification: ModuleType, tiny_vit: Path, picture_folders: dict[str, str], tmp_path_factory: Any
) -> tuple[Recipe, dict[str, Any]]:
    """A whole run that has learned something, and its metrics."""
    recipe = Recipe(image_classification, tmp_path_factory.mktemp("trained"))
    steps = ["--num_train_epochs", "12", "--learning_rate", "0.01", "--random_crop_scale", "0.5", "1"]
    often = ["--logging_steps", "4", "--save_steps", "20", "--eval_strategy", "epoch", "--eval_delay", "11"]
    given = ["--do_train", "--do_eval", "--do_predict", *steps, *often, "--per_device_eval_batch_size", "4"]
    return recipe, recipe(*given, model=tiny_vit, data=picture_folders)


def test_train_evaluate_predict_writes_everything(trained: tuple[Recipe, dict[str, Any]]) -> None:
    recipe, metrics = trained
    written = recipe.results
    for key, value in metrics.items():
        assert written[key] == pytest.approx(value) if isinstance(value, float) else written[key] == value
    keys = {"train_loss", "train_runtime", "train_samples_per_second", "train_unreadable_images"}
    names = ("loss", "accuracy", "top5_accuracy", "samples_per_second", "unreadable_images")
    assert keys | {f"{phase}_{name}" for phase in ("eval", "predict") for name in names} <= written.keys()
    assert written["run"]["arguments"]["on_bad_image"] == "skip"
    assert {"train", "eval", "predict", "save"} <= set(written["run"]["peak_memory (GB)"])
    assert [len(shapes) for shapes in written["run"]["batch_shapes"].values()] == [1, 1, 1]
    rows = recipe.table("logs/metrics.csv")
    assert [int(row["step"]) for row in rows if row["eval_accuracy"]] == [44, 48]
    assert float(rows[-1]["eval_accuracy"]) == pytest.approx(metrics["eval_accuracy"], abs=1e-6)
    for name in ("loss_curve.png", "gaudi_config.json", "preprocessor_config.json", "model.safetensors"):
        assert (recipe.output / name).exists()
    for name in ("model.safetensors", "preprocessor_config.json", "config.json"):
        assert (recipe.output / "checkpoint-40" / name).exists()


def test_the_figures_are_those_of_transformers_alone(
    trained: tuple[Recipe, dict[str, Any]], picture_folders: dict[str, str]
) -> None:
    recipe, metrics = trained
    for split, phase in (("validation", "eval"), ("test", "predict")):
        expected = expected_figures(recipe.output, picture_folders[f"--{split}_dir"])
        assert figures(metrics, phase) == pytest.approx(expected, abs=1e-6)
        assert expected[1] > 0.3


def test_the_pages_are_pictures_and_stand_in_the_model_card(trained: tuple[Recipe, dict[str, Any]]) -> None:
    recipe, metrics = trained
    card = (recipe.output / "README.md").read_text()
    for phase in ("eval", "predict"):
        for name in ("confusion_matrix", *(["mistakes"] if metrics[f"{phase}_accuracy"] < 1 else [])):
            page = f"{phase}_{name}.png"
            Image.open(recipe.output / page).verify()
            assert f"![{page}]({page})" in card
    assert "pipeline_tag: image-classification" in card
    assert "ViTForImageClassification" in card or "local folder" in card
    for number, name in enumerate(ANIMALS):
        assert f"| {number} | {name} |" in card
    for key in ("train_loss", "eval_accuracy", "predict_top5_accuracy"):
        assert key.replace("_", "\\_") in card or key in card
    assert str(recipe.folder) not in card
    assert '"learning_rate": 0.01' in card


def test_the_mistakes_are_the_surest_and_the_matrix_counts_each_row_once(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from core import pages

    drawn: dict[str, Any] = {}
    monkeypatch.setattr(pages, "confusion_matrix", lambda path, *rest: drawn.update({path.name: rest}))
    monkeypatch.setattr(pages, "grid", lambda path, *rest: drawn.update({path.name: rest}))
    recipe("--do_eval", model=classifier, data=only(picture_folders, "validation"))
    files = files_of(picture_folders["--validation_dir"])
    probabilities = logits_of(classifier, files).softmax(-1)
    sure, first = probabilities.max(-1)
    names = ANIMALS[::-1]
    counts, shown, title = drawn["eval_confusion_matrix.png"]
    assert shown == names
    assert title == "13 images"
    for true, name in enumerate(names):
        rows = [at for at, file in enumerate(files) if file.parent.name == name]
        assert counts[true].tolist() == [sum(int(first[at]) == guess for at in rows) for guess in range(7)]
    wrong = [at for at in sure.argsort(descending=True).tolist() if files[at].parent.name != names[first[at]]]
    pictures, captions = drawn["eval_mistakes.png"]
    said = [f"{files[at].parent.name}\ntaken for {names[first[at]]} ({sure[at]:.0%})" for at in wrong]
    assert captions == said
    assert [picture.size for picture in pictures] == [Image.open(files[at]).size for at in wrong]


@pytest.mark.parametrize("model", ["tiny_vit", "tiny_swin"])
def test_a_model_learns_its_training_rows(
    recipe: Recipe, picture_folders: dict[str, str], request: pytest.FixtureRequest, model: str
) -> None:
    same = {"--train_dir": picture_folders["--train_dir"], "--validation_dir": picture_folders["--train_dir"]}
    rate = ["--learning_rate", "0.01", "--num_train_epochs", "25", "--per_device_train_batch_size", "13"]
    given = ["--do_train", "--do_eval", *rate, "--random_crop_scale", "0.6", "1", "--ignore_mismatched_sizes"]
    metrics = recipe(*given, "--save_strategy", "no", model=request.getfixturevalue(model), data=same)
    assert metrics["eval_accuracy"] > 0.9
    assert metrics["eval_loss"] < 0.6
    assert figures(metrics, "eval") == pytest.approx(expected_figures(recipe.output, same["--train_dir"]), abs=1e-5)


def test_evaluation_alone_is_that_of_the_run_that_trained(
    recipe: Recipe, trained: tuple[Recipe, dict[str, Any]], picture_folders: dict[str, str]
) -> None:
    data = only(picture_folders, "validation", "test")
    metrics = recipe("--do_eval", "--do_predict", model=trained[0].output, data=data)
    for phase in ("eval", "predict"):
        assert figures(metrics, phase) == pytest.approx(figures(trained[1], phase), abs=1e-6)
    assert not (recipe.output / "README.md").exists()
    assert not (recipe.output / "model.safetensors").exists()
    assert recipe.table() == trained[0].table()


def test_predictions_of_images_without_classes_are_the_pipelines(
    recipe: Recipe, trained: tuple[Recipe, dict[str, Any]], picture_folders: dict[str, str], tmp_path: Path
) -> None:
    from transformers import pipeline

    folder = tmp_path / "images"
    (folder / "more").mkdir(parents=True)
    for number, file in enumerate(files_of(picture_folders["--test_dir"])):
        shutil.copy(file, folder / ("more" if number % 3 == 1 else "") / f"{number}{file.suffix}")
    (folder / "cut.png").write_bytes((folder / "0.png").read_bytes()[:200])
    metrics = recipe("--do_predict", model=trained[0].output, data={"--test_dir": folder})
    assert metrics["predict_loss"] is None
    assert metrics["predict_unreadable_images"] == 1
    assert not {"predict_accuracy", "predict_top5_accuracy"} & metrics.keys()
    assert not list(recipe.output.glob("*.png"))
    rows, classify = recipe.table(), pipeline("image-classification", model=str(trained[0].output), device="cpu")
    assert [row["path"] for row in rows] == sorted(str(file) for file in files_of(folder))
    for row in rows:
        if row["path"].endswith("cut.png"):
            assert (row["class"], row["probability"]) == ("", "")
            continue
        best = classify(row["path"], top_k=1)[0]
        assert row["class"] == best["label"]
        assert float(row["probability"]) == pytest.approx(best["score"], abs=2e-6)


def test_folders_that_are_called_like_no_class_are_images_without_classes(
    recipe: Recipe,
    classifier: Path,
    picture_folders: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for number, name in enumerate(ANIMALS):
        shutil.copytree(Path(picture_folders["--test_dir"]) / name, tmp_path / "days" / f"day {number}")
    metrics = recipe("--do_predict", model=classifier, data={"--test_dir": tmp_path / "days"})
    assert "no folder that is called like a class" in capsys.readouterr().out
    assert (len(recipe.table()), metrics["predict_loss"]) == (11, None)


def test_the_best_accuracy_is_the_highest(recipe: Recipe, tiny_vit: Path, picture_folders: dict[str, str]) -> None:
    """The rate is far too high: at the end it is not the best."""
    each = "--eval_strategy steps --eval_steps 4 --save_strategy steps --save_steps 4 --save_total_limit 1".split()
    best = ["--load_best_model_at_end", "--metric_for_best_model", "accuracy", "--lr_scheduler_type", "constant"]
    given = ["--do_train", "--do_eval", "--num_train_epochs", "5", "--learning_rate", "0.1", *each, *best]
    metrics = recipe(*given, model=tiny_vit, data=picture_folders)
    found = [float(row["eval_accuracy"]) for row in recipe.table("logs/metrics.csv") if row["eval_accuracy"]]
    assert found[4] < max(found[:5])
    assert metrics["eval_accuracy"] == pytest.approx(max(found[:5]), abs=1e-6)
    expected = expected_figures(recipe.output, picture_folders["--validation_dir"])
    assert figures(metrics, "eval") == pytest.approx(expected, abs=1e-5)


def test_limits_leave_the_same_rows(recipe: Recipe, classifier: Path, picture_folders: dict[str, str]) -> None:
    """The rows that are left are not the first ones, which are of one class; they are always the same."""
    given = ["--do_eval", "--do_predict", "--max_eval_samples", "5", "--max_predict_samples", "3"]
    data = only(picture_folders, "validation", "test")
    first, table = recipe(*given, model=classifier, data=data), recipe.table()
    assert len(table) == 3
    assert [row["path"] for row in table] != [str(file) for file in files_of(picture_folders["--test_dir"])[:3]]
    assert figures(recipe(*given, model=classifier, data=data), "eval") == figures(first, "eval")
    assert recipe.table() == table


def test_another_run_is_replaced_if_that_is_asked_for(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str]
) -> None:
    named = {"model": classifier, "data": only(picture_folders, "train", "validation")}
    recipe(*ONE_STEP, "--do_eval", **named)
    again = [*ONE_STEP, "--seed", "7", "--output_dir", str(recipe.output)]
    with pytest.raises(UserError, match=r"--output_dir.*holds another run.*--overwrite_output_dir"):
        recipe(*again, **named)
    recipe.output = recipe.folder / "run1"
    assert recipe.results["run"]["arguments"]["seed"] == 42
    recipe(*again, "--overwrite_output_dir", **named)
    recipe.output = recipe.folder / "run1"
    assert recipe.results["run"]["arguments"]["seed"] == 7
    assert "eval_loss" not in recipe.results


# --------------------------------------------------------------------------------------------------------------- data


def dataset_of(folder: str | Path, names: list[str] | None = None, image: str = "image", label: str = "label") -> Any:
    """The images of class folders as rows with their files' bytes, shuffled, in a ``datasets.Dataset``."""
    from datasets import ClassLabel, Dataset, Features
    from datasets import Image as Picture

    files = files_of(folder)
    random.Random(0).shuffle(files)
    images = [{"bytes": file.read_bytes(), "path": None} for file in files]
    features = Features({image: Picture(), label: ClassLabel(names=names or ANIMALS)})
    return Dataset.from_dict({image: images, label: [file.parent.name for file in files]}, features=features)


@pytest.fixture(scope="session")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a data set of CIFAR-10's columns (img, label) and splits (train, test)."""
    folder = tmp_path_factory.mktemp("cifar10")
    for seed, (split, count) in enumerate({"train": 40, "test": 11}.items()):
        pictures = save_pictures(folder / "files" / split, count, seed)
        dataset_of(pictures, image="img").to_parquet(folder / f"{split}-00000-of-00001.parquet")
    shutil.rmtree(folder / "files")
    return folder


def write_rows(kind: str, folder: str | Path, target: Path) -> Path:
    """The images of class folders as a file of that kind; relative paths begin where it lies."""
    if kind == "parquet":
        dataset_of(folder).to_parquet(target)
        return target
    shutil.copytree(folder, target.parent / "images", dirs_exist_ok=True)
    rows = [{"label": file.parent.name, "image": str(file.relative_to(folder))} for file in files_of(folder)]
    rows = [row | {"image": f"images/{row['image']}"} for row in rows]
    if kind == "jsonl":
        return write_jsonl(target, rows)
    with target.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["label", "image"])
        writer.writeheader()
        writer.writerows(rows)
    return target


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_every_kind_of_file_has_the_figures_of_the_folder(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], tmp_path: Path, kind: str
) -> None:
    file = write_rows(kind, picture_folders["--validation_dir"], tmp_path / f"rows.{kind}")
    metrics = recipe("--do_eval", model=classifier, data={"--validation_file": file})
    expected = expected_figures(classifier, picture_folders["--validation_dir"])
    assert figures(metrics, "eval") == pytest.approx(expected, abs=1e-6)


def test_columns_are_named(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """By flags, or by what they hold."""
    rows = dataset_of(picture_folders["--validation_dir"], image="img", label="animal")
    rows.add_column("number", list(range(13))).to_parquet(tmp_path / "rows.parquet")
    data = {"--validation_file": tmp_path / "rows.parquet"}
    named = ["--image_column_name", "img", "--label_column_name", "animal"]
    losses = [recipe("--do_eval", *flags, model=classifier, data=data)["eval_loss"] for flags in (named, [])]
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(expected_figures(classifier, picture_folders["--validation_dir"])[0], abs=1e-6)
    assert "'img' is taken" in capsys.readouterr().out


def test_rows_are_held_out_only_where_no_validation_split_is(
    recipe: Recipe, made: SimpleNamespace, classifier: Path, picture_folders: dict[str, str]
) -> None:
    given = [*ONE_STEP, "--do_eval", "--train_val_split", "0.3"]
    recipe(*given, model=classifier, data=picture_folders)
    assert {split: len(rows) for split, rows in made.pictures.items()} == {"train": 26, "validation": 13}
    made.pictures.clear()
    recipe(*given, model=classifier, data=only(picture_folders, "train", "test"))
    parts = [{rows.path(at) for at in range(len(rows))} for rows in made.pictures.values()]
    assert list(made.pictures) == ["train", "validation"]
    assert [len(part) for part in parts] == [18, 8]
    assert parts[0] | parts[1] == {str(file) for file in files_of(picture_folders["--train_dir"])}
    assert len({Path(path).parent for path in parts[1]}) >= 6
    held = sorted(parts[1])
    made.pictures.clear()
    recipe("--do_eval", "--train_val_split", "0.3", model=classifier, data=only(picture_folders, "train"))
    assert sorted(made.pictures["validation"].path(at) for at in range(8)) == held


def test_the_test_split_is_read_by_do_predict_alone(
    recipe: Recipe, made: SimpleNamespace, classifier: Path, cifar: Path
) -> None:
    named = ["--dataset_name", str(cifar), "--image_column_name", "img"]
    recipe(*ONE_STEP, "--do_eval", *named, model=classifier)
    assert {split: len(rows) for split, rows in made.pictures.items()} == {"train": 34, "validation": 6}
    made.pictures.clear()
    metrics = recipe("--do_predict", *named, model=classifier)
    assert {split: len(rows) for split, rows in made.pictures.items()} == {"test": 11}
    assert metrics["predict_accuracy"] == sum(
        row["class"] == ANIMALS[::-1][label]
        for row, label in zip(recipe.table(), made.pictures["test"].labels, strict=True)
    ) / 11  # fmt: skip
    assert [row["path"] for row in recipe.table()] == [f"test image {row} of 11" for row in range(1, 12)]


# ------------------------------------------------------------------------------------------------------------- classes


def test_classes_are_known_by_name_in_any_order(
    recipe: Recipe, made: SimpleNamespace, classifier: Path, picture_folders: dict[str, str], tmp_path: Path
) -> None:
    """Each split and the checkpoint number them otherwise."""
    orders = {"train": ANIMALS, "validation": ANIMALS[3:] + ANIMALS[:3], "test": sorted(ANIMALS, key=lambda n: n[1])}
    data = {}
    for split, names in orders.items():
        data[f"--{split}_file"] = tmp_path / f"{split}.parquet"
        dataset_of(picture_folders[f"--{split}_dir"], names).to_parquet(data[f"--{split}_file"])
    metrics = recipe(*ONE_STEP, "--do_eval", "--do_predict", model=classifier, data=data)
    for split, phase in (("validation", "eval"), ("test", "predict")):
        expected = expected_figures(classifier, picture_folders[f"--{split}_dir"])
        assert figures(metrics, phase) == pytest.approx(expected, abs=1e-6)
    config = json.loads((recipe.output / "config.json").read_text())
    assert list(config["id2label"].values()) == ANIMALS[::-1]
    assert config["label2id"] == {name: at for at, name in enumerate(ANIMALS[::-1])}
    labels = [ANIMALS[::-1][label] for label in made.pictures["train"].labels]
    assert labels == [ANIMALS[number] for number in dataset_of(picture_folders["--train_dir"])["label"]]


def test_a_new_model_has_the_classes_of_the_training_rows(
    recipe: Recipe, picture_folders: dict[str, str], tmp_path: Path
) -> None:
    """In their own order, also where the validation rows lack one."""
    names = sorted(ANIMALS, key=lambda name: name[1])
    dataset_of(picture_folders["--train_dir"], names).to_parquet(tmp_path / "train.parquet")
    rows = dataset_of(picture_folders["--validation_dir"])
    rows.select([at for at, label in enumerate(rows["label"]) if label]).to_parquet(tmp_path / "some.parquet")
    data = {"--train_file": tmp_path / "train.parquet", "--validation_file": tmp_path / "some.parquet"}
    metrics = recipe(*ONE_STEP, "--do_eval", *NEW, data=data)
    config = json.loads((recipe.output / "config.json").read_text())
    assert list(config["id2label"].values()) == names
    assert (config["image_size"], config["patch_size"], config["hidden_size"]) == (16, 8, 16)
    assert metrics["eval_top5_accuracy"] >= metrics["eval_accuracy"]


def test_a_head_of_other_classes_is_new_if_that_is_asked_for(
    recipe: Recipe, tiny_swin: Path, picture_folders: dict[str, str]
) -> None:
    from transformers import AutoModelForImageClassification

    data = only(picture_folders, "train")
    with pytest.raises(UserError, match=r"other classes than these 7.*--ignore_mismatched_sizes") as caught:
        recipe(*ONE_STEP, model=tiny_swin, data=data)
    assert "\n" not in str(caught.value)
    recipe(*ONE_STEP, "--ignore_mismatched_sizes", model=tiny_swin, data=data)
    before, after = (
        AutoModelForImageClassification.from_pretrained(folder).state_dict() for folder in (tiny_swin, recipe.output)
    )
    assert after["classifier.weight"].shape == (7, 16)
    assert all(torch.equal(before[name], after[name]) for name in before if not name.startswith("classifier"))
    assert list(json.loads((recipe.output / "config.json").read_text())["id2label"].values()) == ANIMALS


def test_few_classes_have_no_top_five(recipe: Recipe, picture_folders: dict[str, str], tmp_path: Path) -> None:
    for count in (2, 5):
        data = {}
        for split in ("train", "validation"):
            data[f"--{split}_dir"] = tmp_path / f"{split}{count}"
            for name in ANIMALS[:count]:
                shutil.copytree(Path(picture_folders[f"--{split}_dir"]) / name, tmp_path / f"{split}{count}" / name)
        metrics = recipe(*ONE_STEP, "--do_eval", *NEW, data=data)
        expected = expected_figures(recipe.output, data["--validation_dir"])[:2]
        assert [metrics["eval_loss"], metrics["eval_accuracy"]] == pytest.approx(expected, abs=1e-6)
        assert "eval_top5_accuracy" not in metrics


# ------------------------------------------------------------------------------------------------------- broken images

BROKEN_FILES = ("ant/cut.jpg", "bee/empty.png", "gnu/text.jpg")


@pytest.fixture(scope="session")
def spoiled_folders(picture_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The same folders, each with three files more that no one can read: cut short, of no byte, and a text."""
    root, found = tmp_path_factory.mktemp("spoiled"), {}
    for flag, folder in picture_folders.items():
        copy = shutil.copytree(folder, root / Path(folder).name)
        whole = next(file for file in files_of(copy) if file.suffix == ".jpg").read_bytes()
        contents = (whole[: len(whole) // 2], b"", b"no picture at all")
        for name, content in zip(BROKEN_FILES, contents, strict=True):
            (copy / name).write_bytes(content)
        found[flag] = str(copy)
    return found


def test_broken_images_are_left_out_as_if_they_were_not_there(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], spoiled_folders: dict[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """In training, evaluation and prediction, at several batch sizes, with and without workers."""
    given = ["--do_train", "--do_eval", "--do_predict", "--num_train_epochs", "2", "--optim", "sgd", *CENTRED]
    given += ["--learning_rate", "0.1", "--save_strategy", "no", "--label_smoothing_factor", "0.1"]
    splits = {"32": ("1", "4", "0"), "8": ("4", "8", "2")}
    clean = recipe(*given, "--per_device_train_batch_size", "32", model=classifier, data=picture_folders)
    weights, table = recipe.weights, {Path(row["path"]).name: row for row in recipe.table()}
    for batch, (accumulation, evaluated, workers) in splits.items():
        how = ["--per_device_train_batch_size", batch, "--gradient_accumulation_steps", accumulation]
        how += ["--per_device_eval_batch_size", evaluated, "--dataloader_num_workers", workers]
        metrics = recipe(*given, *how, model=classifier, data=spoiled_folders)
        for phase in ("train", "eval", "predict"):
            assert metrics[f"{phase}_unreadable_images"] == 3
            assert clean[f"{phase}_unreadable_images"] == 0
        assert metrics["train_loss"] == pytest.approx(clean["train_loss"], abs=1e-6)
        for phase in ("eval", "predict"):
            assert figures(metrics, phase) == pytest.approx(figures(clean, phase), abs=1e-6)
        for name, tensor in recipe.weights.items():
            torch.testing.assert_close(tensor, weights[name], rtol=0, atol=1e-6)
        assert [len(shapes) for shapes in recipe.results["run"]["batch_shapes"].values()] == [1, 1, 1]
        for row in recipe.table():
            broken = any(row["path"].endswith(name) for name in BROKEN_FILES)
            expected = ("", "") if broken else [table[Path(row["path"]).name][key] for key in ("class", "probability")]
            assert row["class"] == expected[0]
            assert broken or float(row["probability"]) == pytest.approx(float(expected[1]), abs=2e-6)
    for flag, folder in spoiled_folders.items():
        for name in BROKEN_FILES:
            said = rf"{flag[2:-4]}: {re.escape(f'{folder}/{name}')} cannot be read as an image: .*; it is left out"
            assert sum(bool(re.match(said, message)) for message in caplog.messages) == 1


@pytest.mark.parametrize("workers", ["0", "2"])
@pytest.mark.parametrize("phase", ["train", "eval", "predict"])
def test_a_broken_image_ends_the_run_if_that_is_asked_for(
    recipe: Recipe, classifier: Path, spoiled_folders: dict[str, str], phase: str, workers: str
) -> None:
    split = {"train": "train", "eval": "validation", "predict": "test"}[phase]
    flags = ONE_STEP if phase == "train" else [f"--do_{phase}"]
    given = [*flags, "--on_bad_image", "fail", "--dataloader_num_workers", workers]
    with pytest.raises(UserError) as caught:
        recipe(*given, model=classifier, data=only(spoiled_folders, split))
    named = "|".join(map(re.escape, BROKEN_FILES))
    assert re.search(rf"{spoiled_folders[f'--{split}_dir']}/({named}) cannot be read", str(caught.value))
    assert "--on_bad_image skip" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_image_without_a_file_is_named_by_its_row(
    recipe: Recipe, classifier: Path, spoiled_folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = dataset_of(spoiled_folders["--validation_dir"])
    rows.to_parquet(tmp_path / "rows.parquet")
    data = {"--validation_file": tmp_path / "rows.parquet"}
    metrics = recipe("--do_eval", model=classifier, data=data)
    assert metrics["eval_unreadable_images"] == 3
    said = [re.search(r"validation image (\d+) of 16 cannot be read", message) for message in caplog.messages]
    with pytest.raises(UserError, match=r"validation image \d+ of 16 cannot be read.*--on_bad_image skip"):
        recipe("--do_eval", "--on_bad_image", "fail", model=classifier, data=data)
    images = rows.cast_column("image", rows.features["image"].__class__(decode=False))["image"]
    good = {file.read_bytes() for file in files_of(spoiled_folders["--train_dir"])}
    assert len(good) > 20
    expected = [at + 1 for at, image in enumerate(images) if len(image["bytes"]) < 20 or _is_cut(image["bytes"])]
    assert sorted(int(match[1]) for match in said if match) == expected


def _is_cut(content: bytes) -> bool:
    return content[:2] == b"\xff\xd8" and content[-2:] != b"\xff\xd9"


def test_nothing_but_broken_images(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A window without a target makes no step forward; a split without a readable image ends the run."""
    broken = tmp_path / "broken"
    for name in ("ant", "bee"):
        (broken / name).mkdir(parents=True)
        (broken / name / "text.png").write_text("none")
    data = {"--train_dir": picture_folders["--train_dir"], "--validation_dir": broken}
    with pytest.raises(UserError, match="of 2 validation images none can be read"):
        recipe("--do_eval", *ONE_STEP, model=classifier, data=data)
    with pytest.raises(UserError, match="of 2 train images none can be read"):
        recipe(*ONE_STEP, "--ignore_mismatched_sizes", model=classifier, data={"--train_dir": broken})
    train = shutil.copytree(picture_folders["--train_dir"], tmp_path / "train")
    (train / "ant" / "text.png").write_text("none")
    one = ["--do_train", "--num_train_epochs", "1", "--per_device_train_batch_size", "1", "--train_val_split", "0"]
    metrics = recipe(*one, "--save_strategy", "no", model=classifier, data={"--train_dir": train})
    assert math.isfinite(metrics["train_loss"])
    assert (metrics["train_steps"], metrics["train_unreadable_images"]) == (27, 1)
    assert all(torch.isfinite(tensor).all() for tensor in recipe.weights.values())


# ------------------------------------------------------------------------------------------------------- loss, figures


def first_window(loader: Any) -> tuple[dict[str, torch.Tensor], list[int]]:
    window = next(loader.windows())
    return window.batches[0], window.row_ids


MIXTURES = {
    "sharp": [],
    "smoothed": ["--label_smoothing_factor", "0.2"],
    "mixup": ["--mixup_alpha", "0.8"],
    "cutmix": ["--cutmix_alpha", "1.0"],
    "both, smoothed": ["--mixup_alpha", "0.8", "--cutmix_alpha", "1", "--label_smoothing_factor", "0.1"],
}


@pytest.mark.parametrize("way", MIXTURES)
def test_the_loss_is_that_of_the_formula(
    recipe: Recipe, made: SimpleNamespace, classifier: Path, picture_folders: dict[str, str], way: str
) -> None:
    """Cross-entropy against each row's shares of classes, by hand, on the pixels that the run saw."""
    from transformers import AutoModelForImageClassification

    data, flags = only(picture_folders, "train", "validation"), MIXTURES[way]
    metrics = recipe(*ONE_STEP, "--do_eval", *CENTRED, *flags, model=classifier, data=data)
    batch, numbers = first_window(made.loaders["train"])
    count, names = len(numbers), ANIMALS[::-1]
    pixels = (batch["pixel_values"][:count].numpy() / 255 - 0.5) / 0.5
    with torch.no_grad():
        model = AutoModelForImageClassification.from_pretrained(classifier).eval()
        logits = model(torch.tensor(pixels, dtype=torch.float32)).logits.double().numpy()
    files = [Path(made.pictures["train"].path(number)) for number in numbers]
    target = np.array([[float(file.parent.name == name) for name in names] for file in files])
    if "shares" in batch:
        share = batch["shares"][:count, None].numpy()
        assert 0 < share.min() < 0.5 < share.max() <= 1
        target = share * target + (1 - share) * np.eye(7)[batch["other_labels"][:count].numpy()]
    smoothing = float(flags[-1]) if "--label_smoothing_factor" in flags else 0.0
    target = (1 - smoothing) * target + smoothing / 7
    losses = (np.log(np.exp(logits).sum(1, keepdims=True)) - logits) * target
    assert metrics["train_loss"] == pytest.approx(losses.sum(1).mean(), abs=1e-6)
    assert metrics["eval_loss"] == pytest.approx(expected_figures(classifier, data["--validation_dir"])[0], abs=1e-6)


@pytest.mark.parametrize("way", ["mixup", "cutmix"])
def test_a_mixed_image_has_the_class_of_its_other_half(
    recipe: Recipe, made: SimpleNamespace, classifier: Path, picture_folders: dict[str, str], way: str
) -> None:
    data = only(picture_folders, "train")
    recipe(*ONE_STEP, *CENTRED, model=classifier, data=data)
    batch, numbers = first_window(made.loaders["train"])
    whole = dict(zip(numbers, batch["pixel_values"].numpy(), strict=False))
    recipe(*ONE_STEP, *CENTRED, *MIXTURES[way], model=classifier, data=data)
    batch, numbers = first_window(made.loaders["train"])
    labels = made.pictures["train"].labels
    for at, number in enumerate(numbers):
        mixed, share = batch["pixel_values"][at].numpy(), batch["shares"][at].item()
        own = whole[number].astype(float)
        if way == "mixup":
            blends = {j: np.abs(share * own + (1 - share) * other - mixed).max() for j, other in whole.items()}
            partners = [j for j, distance in blends.items() if distance < 0.51]
        else:
            changed = (mixed != own).any(0)
            partners = [j for j, other in whole.items() if (mixed == other)[:, changed].all()]
            assert share == pytest.approx(1 - changed.mean(), abs=1.5 / 256) or number in partners
        assert labels[number] == batch["labels"][at]
        assert batch["other_labels"][at].item() in {labels[j] for j in partners}
        assert len(partners) < 4 or share > 0.97 or number in partners


def test_evaluation_counts_each_row_once_at_any_batch_size(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str]
) -> None:
    """Some classes come first, some fifth, some last."""
    folder = picture_folders["--train_dir"]
    expected, files = expected_figures(classifier, folder), files_of(folder)
    places = [ANIMALS[::-1].index(file.parent.name) for file in files]
    order = logits_of(classifier, files).argsort(-1, descending=True).tolist()
    ranks = [row.index(place) for row, place in zip(order, places, strict=True)]
    assert {0, 4, 6} <= set(ranks)
    for batch in ("1", "3", "8", "32"):
        given = ["--do_eval", "--per_device_eval_batch_size", batch]
        metrics = recipe(*given, model=classifier, data={"--validation_dir": folder})
        assert figures(metrics, "eval") == pytest.approx(expected, abs=1e-6)
        assert metrics["eval_accuracy"] == ranks.count(0) / 26
        assert metrics["eval_top5_accuracy"] == sum(rank < 5 for rank in ranks) / 26


def test_weights_and_loss_do_not_depend_on_the_split_of_a_window(
    recipe: Recipe, classifier: Path, spoiled_folders: dict[str, str]
) -> None:
    """Each row keeps its random view and its other half, which may be a broken image."""
    results = []
    given = ["--do_train", "--num_train_epochs", "2", "--learning_rate", "0.1", "--optim", "sgd"]
    given += ["--mixup_alpha", "0.8", "--cutmix_alpha", "1", "--rand_augment", "2", "--save_strategy", "no"]
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        split = ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]
        metrics = recipe(*given, *split, model=classifier, data=only(spoiled_folders, "train"))
        results.append((metrics["train_loss"], recipe.weights))
    for loss, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=2e-6)


RESUMED = {
    "plain": [],
    "everything": "--mixup_alpha 0.8 --cutmix_alpha 1 --rand_augment 2 --label_smoothing_factor 0.1".split(),
}


@pytest.mark.parametrize(("way", "workers"), [("plain", "0"), ("everything", "0"), ("everything", "2")])
def test_resume_equals_the_straight_run_at_every_step(
    recipe: Recipe, tiny_vit: Path, spoiled_folders: dict[str, str], tmp_path: Path, way: str, workers: str
) -> None:
    """Two epochs of three steps, with broken images, new views in each epoch and dropout."""
    given = ["--do_train", "--num_train_epochs", "2", "--learning_rate", "0.01", "--logging_steps", "1", *RESUMED[way]]
    given += ["--per_device_train_batch_size", "5", "--gradient_accumulation_steps", "2"]
    given += ["--dataloader_num_workers", workers]
    named = {"model": tiny_vit, "data": only(spoiled_folders, "train")}
    metrics = recipe(*given, "--save_steps", "1", **named)
    straight, expected, rows = recipe.output, recipe.weights, recipe.table("logs/metrics.csv")
    assert (metrics["train_steps"], metrics["train_unreadable_images"]) == (6, 3)
    assert len({row["loss"] for row in rows if row["loss"]}) == 6
    for step in range(1, 6):
        folder = tmp_path / f"from{step}"
        shutil.copytree(straight / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        again = ["--output_dir", str(folder), "--resume_from_checkpoint", "auto", "--save_strategy", "no"]
        recipe(*given, *again, **named)
        recipe.output = folder
        weights = recipe.weights
        assert weights.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items()), f"from step {step}"
        losses = {row["step"]: row["loss"] for row in recipe.table("logs/metrics.csv") if row["loss"]}
        assert losses == {row["step"]: row["loss"] for row in rows if row["loss"] and int(row["step"]) > step}


def test_workers_change_nothing(recipe: Recipe, tiny_vit: Path, spoiled_folders: dict[str, str]) -> None:
    given = ["--do_train", "--do_eval", "--num_train_epochs", "2", "--learning_rate", "0.01", *RESUMED["everything"]]
    found = []
    for workers in ("0", "2"):
        metrics = recipe(*given, "--dataloader_num_workers", workers, "--save_strategy", "no", model=tiny_vit,
                         data=only(spoiled_folders, "train", "validation"))  # fmt: skip
        found.append((metrics["train_loss"], *figures(metrics, "eval"), recipe.weights))
    (*numbers, weights), (*others, other) = found
    assert numbers == others
    assert all(torch.equal(tensor, other[name]) for name, tensor in weights.items())


def test_compiled_equals_eager(recipe: Recipe, classifier: Path, picture_folders: dict[str, str]) -> None:
    given = ["--do_train", "--do_eval", "--max_steps", "2", "--learning_rate", "0.01", "--save_strategy", "no"]
    modes = (["--execution_mode", "eager"], ["--torch_compile", "--torch_compile_backend", "aot_eager"])
    eager, compiled = (
        recipe(*given, *mode, model=classifier, data=only(picture_folders, "train", "validation")) for mode in modes
    )
    assert recipe.results["run"]["graphs_compiled"] > 0
    assert compiled["train_loss"] == pytest.approx(eager["train_loss"], abs=1e-5)
    assert figures(compiled, "eval") == pytest.approx(figures(eager, "eval"), abs=1e-5)


def test_evaluation_alone_in_bf16(recipe: Recipe, classifier: Path, picture_folders: dict[str, str]) -> None:
    data = only(picture_folders, "validation")
    low, full = (
        recipe("--do_eval", *flag, model=classifier, data=data)["eval_loss"] for flag in (["--bf16_full_eval"], [])
    )
    assert low != full
    assert low == pytest.approx(full, rel=0.02)


def test_images_of_another_size_and_of_one_channel(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    data = only(picture_folders, "train", "validation")
    recipe(*ONE_STEP, "--do_eval", "--image_size", "24", model=classifier, data=data)
    assert "its positions are interpolated" in capsys.readouterr().out
    saved = json.loads((recipe.output / "preprocessor_config.json").read_text())
    assert saved["size"] == {"height": 24, "width": 24}
    assert list(recipe.results["run"]["batch_shapes"]["train"]) != []
    metrics = recipe(*ONE_STEP, "--do_eval", *NEW[:-1], f"{NEW[-1]},num_channels=1", data=data)
    assert math.isfinite(metrics["eval_loss"])


# --------------------------------------------------------------------------------------------------------------- flags

# Flag: what is given in both runs, and the value that is not the default: the losses differ.
EVALUATED = ["--do_eval"]
ROWS = ["--train_dir", "", "--validation_dir", "", "--test_dir", "", "--train_file"]
EFFECTS = {
    "model_name_or_path": ([], ["{vit}"]),
    "model_type": (NEW, ["vit_msn"]),
    "config_overrides": (NEW, [f"{NEW[-1]},hidden_act=relu"]),
    "image_processor_name": ([], ["{darker}"]),
    "image_size": ([], ["24"]),
    "train_dir": ([], ["{validation}"]),
    "validation_dir": (EVALUATED, ["{test}"]),
    "test_dir": (["--do_predict"], ["{validation}"]),
    "train_val_split": ([*EVALUATED, "--validation_dir", ""], ["0.4"]),
    "image_column_name": ([*ROWS, "{rows}"], ["other"]),
    "label_column_name": ([*ROWS, "{rows}"], ["kind"]),
    "random_crop_scale": ([], ["0.3", "0.4"]),
    "random_crop_ratio": ([], ["0.3", "0.5"]),
    "random_flip": ([], ["0"]),
    "rand_augment": ([], ["2"]),
    "rand_augment_magnitude": (["--rand_augment", "2"], ["4"]),
    "mixup_alpha": ([], ["0.8"]),
    "cutmix_alpha": ([], ["1"]),
}  # fmt: skip
ELSEWHERE = {"ignore_mismatched_sizes", "on_bad_image"}  # they decide whether a run ends, see above


def test_every_flag_of_the_recipe_is_tried(image_classification: ModuleType) -> None:
    own = {field.name for field in fields(image_classification.ImageClassificationArguments)}
    assert own == EFFECTS.keys() | ELSEWHERE


@pytest.fixture(scope="module")
def places(
    classifier: Path, tiny_vit: Path, picture_folders: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    root = tmp_path_factory.mktemp("places")
    shutil.copytree(classifier, root / "darker")
    path = root / "darker" / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"image_mean": [0.8] * 3}))
    files = files_of(picture_folders["--train_dir"])
    rows = [
        {"image": str(file), "other": str(files[-1 - at]), "label": file.parent.name, "kind": ANIMALS[at % 7]}
        for at, file in enumerate(files)
    ]
    named = {flag[2:-4]: folder for flag, folder in picture_folders.items()}
    rows_file = write_jsonl(root / "rows.jsonl", rows)
    return named | {"vit": str(tiny_vit), "darker": str(root / "darker"), "rows": str(rows_file)}


@pytest.mark.parametrize("name", EFFECTS)
def test_every_flag_has_an_effect(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], places: dict[str, str], name: str
) -> None:
    both, value = ([word.format(**places) for word in words] for words in EFFECTS[name])
    found = []
    for own in ([], [f"--{name}", *value]):
        given = [*ONE_STEP, "--max_train_samples", "12", *both, *own]
        model = None if "--model_type" in given else classifier
        metrics = recipe(*given, model=model, data=picture_folders)
        found.append([metrics.get(f"{phase}_loss") for phase in ("train", "eval", "predict")])
    assert found[0] != found[1]


# --------------------------------------------------------------------------------------------------- published commands

# The image classification commands of optimum-habana's documentation and tests, without launcher and output folder.
# Names of models, data and DeepSpeed files stand in braces: tiny local ones take their place.
CIFAR = "--dataset_name {cifar10} --remove_unused_columns False --image_column_name img --seed 1337 "
COMPILED = "--use_lazy_mode False --torch_compile_backend hpu_backend --torch_compile "
FIVE = "--num_train_epochs 5 --per_device_train_batch_size 128 --per_device_eval_batch_size 64 "
KEPT = "--eval_strategy epoch --save_strategy epoch --load_best_model_at_end True --save_total_limit 3 "
LOW = "--use_habana --dataloader_num_workers 1 --sdp_on_bf16 --bf16 "
TESTED = (
    "--do_train --do_eval --num_train_epochs 1 --per_device_eval_batch_size 64 --use_habana --use_lazy_mode "
    "--throughput_warmup_steps 3 --save_strategy no --use_hpu_graphs_for_inference --dataloader_num_workers 1 "
    "--pipelining_fwd_bwd True --non_blocking_data_copy True "
)
BOTH = "--do_train --do_eval "
VIT, SWIN = (f"--model_name_or_path {{{name}}} --gaudi_config_name Habana/{name} " for name in ("vit", "swin"))
PUBLISHED = {
    "vit": VIT + CIFAR + BOTH + "--learning_rate 3e-5 --throughput_warmup_steps 6 " + FIVE + KEPT + LOW + COMPILED,
    "vit on 8": VIT + CIFAR + BOTH + "--learning_rate 2e-4 --throughput_warmup_steps 8 " + FIVE + KEPT + LOW + COMPILED,
    "vit on a folder": VIT + "--train_dir {train} --remove_unused_columns False --throughput_warmup_steps 3 "
    + BOTH + LOW + COMPILED,
    "vit on folders": VIT + "--train_dir {train} --validation_dir {validation} --remove_unused_columns False "
    "--throughput_warmup_steps 3 --use_lazy_mode --use_hpu_graphs_for_inference " + BOTH + LOW,
    "vit evaluated": VIT + CIFAR + "--do_eval --per_device_eval_batch_size 64 --use_lazy_mode "
    "--use_hpu_graphs_for_inference " + LOW,
    "vit tested": VIT + CIFAR + TESTED + "--learning_rate 3e-5 --per_device_train_batch_size 128",
    "swin": SWIN + CIFAR + BOTH + "--learning_rate 3e-5 --throughput_warmup_steps 6 --ignore_mismatched_sizes "
    + FIVE + KEPT + LOW + COMPILED,
    "swin tested": SWIN + CIFAR + TESTED + "--learning_rate 6e-5 --per_device_train_batch_size 160 "
    "--ignore_mismatched_sizes",
}  # fmt: skip
# What is not here, and has to be said: a part of the one warning about each flag.
MISSING = {
    "--use_habana": "--use_habana: no Gaudi was found",
    "--use_lazy_mode": "lazy mode is a Gaudi's own",
    "--remove_unused_columns": "--remove_unused_columns has no effect here",
    "--torch_compile_backend": "--torch_compile_backend hpu_backend is a Gaudi's own",
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_command_runs_with_only_the_path_changed(
    recipe: Recipe, tiny_vit: Path, tiny_swin: Path, cifar: Path, places: dict[str, str],
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str], name: str,
) -> None:  # fmt: skip
    """Where it says hpu_backend, which there is on a Gaudi only, Dynamo's own eager one is the fastest."""
    from core.device import Device

    command = PUBLISHED[name]
    monkeypatch.setattr(Device, "compile_backend", "eager")
    monkeypatch.setenv("PT_HPU_LAZY_MODE", "0" if "--use_lazy_mode False" in command else "1")
    names = places | {"vit": str(tiny_vit), "swin": str(tiny_swin), "cifar10": str(cifar)}
    output = ["--output_dir", str(recipe.folder / "published"), "--cache_dir", str(recipe.folder / "cache")]
    metrics = recipe.module.main([*command.format(**names).split(), *output, "--disable_tqdm", "--report_to", "none"])
    recipe.output = recipe.folder / "published"
    assert 0 <= metrics["eval_accuracy"] <= 1
    assert math.isfinite(metrics["eval_loss"])
    assert ("train_loss" in metrics) is ("--do_train" in command)
    given = {f"--{part.split()[0].removeprefix('--')}" for part in command.split(" --")}
    given -= {"--use_lazy_mode"} if "--use_lazy_mode False" in command else set()
    for flag, said in MISSING.items():
        assert sum(said in message for message in caplog.messages) == (flag in given), said
    run = recipe.results["run"]
    assert run["device"]["precision"].startswith("bf16") is ("--bf16" in command)
    assert run["device"]["execution_mode"] == ("compile" if "--torch_compile" in command else "eager")
    kind = "swin" if "swin" in name else "vit"
    assert f"Habana/{kind} is read from gaudi_configs/{kind}.json" in capsys.readouterr().out
    if "--load_best_model_at_end" in command:
        assert metrics["train_steps"] == 5
        assert 1 <= len(list(recipe.output.glob("checkpoint-*"))) <= 4
        losses = [float(row["eval_loss"]) for row in recipe.table("logs/metrics.csv") if row["eval_loss"]]
        assert metrics["eval_loss"] == pytest.approx(min(losses), abs=1e-5)


@pytest.mark.processes
def test_a_copy_runs_the_published_command_for_deepspeed(tiny_vit: Path, cifar: Path, tmp_path: Path) -> None:
    """A copy beside the recipe; in a process of its own, for DeepSpeed's groups live as long as that."""
    root = tmp_path / "repository"
    for folder in ("core", "gaudi_configs", "deepspeed_configs"):
        shutil.copytree(REPOSITORY / folder, root / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(SCRIPT.parent, root / "recipes" / "mine")
    command = VIT + CIFAR + BOTH + "--deepspeed zero2 --learning_rate 2e-4 --throughput_warmup_steps 3 "
    command += "--num_train_epochs 5 --per_device_train_batch_size 32 --per_device_eval_batch_size 32 " + KEPT + LOW
    named = (command + "--use_lazy_mode False").format(vit=tiny_vit, cifar10=cifar).split()
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    script, cache = root / "recipes" / "mine" / "run.py", ["--cache_dir", str(tmp_path / "cache")]
    done = as_program(*named, *cache, "--disable_tqdm", "--report_to", "none", script=script, cwd=tmp_path, env=clean)
    assert done.returncode == 0, done.stderr
    (written,) = tmp_path.glob("runs/mine/*/all_results.json")
    results = json.loads(written.read_text())
    assert results["train_steps"] == 10
    assert math.isfinite(results["train_loss"])
    assert 0 <= results["eval_accuracy"] <= 1
    assert results["run"]["device"]["precision"].startswith("bf16")


# ----------------------------------------------------------------------------------------------------------- bad input


def broken_input(folder: Path, pictures: dict[str, str]) -> dict[str, tuple[list[str], str]]:
    """Name: flags on top of a good run, and what the one line must say. A model is not needed to say it."""
    train, validation = Path(pictures["--train_dir"]), Path(pictures["--validation_dir"])
    for name in ("hole", "more", "loose", "splits", "nothing", "one"):
        (folder / name).mkdir()
    for name in ("hole", "more", "loose"):
        shutil.copytree(train, folder / name, dirs_exist_ok=True)
    (folder / "hole" / "yak").mkdir()
    shutil.copytree(validation / "ant", folder / "more" / "yak")
    shutil.copy(train / "ant" / "00.png", folder / "loose" / "top.png")
    shutil.copytree(train, folder / "splits" / "train")
    shutil.copytree(validation, folder / "splits" / "validation")
    (folder / "one" / "ant").mkdir()
    shutil.copy(train / "ant" / "00.png", folder / "one" / "ant" / "00.png")
    (folder / "empty.jsonl").write_text("")
    (folder / "rows.xyz").write_text("a")
    (folder / "broken.jsonl").write_text('{"image": "a", "label"\n')
    image = str(train / "ant" / "00.png")
    write_jsonl(folder / "numbers.jsonl", [{"image": 1, "label": "ant"}] * 9)
    write_jsonl(folder / "shares.jsonl", [{"image": image, "label": 0.5}] * 9)
    write_jsonl(folder / "holes.jsonl", [{"image": image, "label": "ant"}, {"image": image, "label": None}])
    write_jsonl(folder / "other.jsonl", [{"picture": image, "animal": "ant"}] * 9)
    write_jsonl(folder / "yak.jsonl", [{"image": image, "label": "ant"}, {"image": image, "label": "yak"}])
    (folder / "bare.csv").write_text("image,label\n")
    (folder / "run.json").write_text('{"args": {"lerning_rate": 1}}')
    (folder / "another").mkdir()
    (folder / "another" / "all_results.json").write_text("{}")
    rows, where = ROWS, "--train_dir"
    return {
        "missing folder": ([where, str(folder / "absent")], "--train_dir.*absent is not there; give a folder"),
        "a file for a folder": ([where, image], "--train_dir.*is a file; give a folder"),
        "empty folder": ([where, str(folder / "nothing")], "--train_dir.*holds no image in a class folder"),
        "class without images": ([where, str(folder / "hole")], "no image in the class folder 'yak'"),
        "loose images": ([where, str(folder / "loose")], "1 images lie in .*loose itself.*'top.png'"),
        "folder of splits": ([where, str(folder / "splits")], "holds splits .train, validation., no classes"),
        "unknown class": (["--do_eval", "--validation_dir", str(folder / "more")], "validation.*'yak'"),
        "no images": (
            [*rows, str(folder / "numbers.jsonl")], "--image_column_name: 'image' holds int64, not images"),
        "no class": ([*rows, str(folder / "shares.jsonl")], "--label_column_name: 'label' holds double"),
        "a row without class": ([*rows, str(folder / "holes.jsonl")], "1 of 2 rows lack a label in 'label'.*row 2"),
        "image column": ([*rows, str(folder / "other.jsonl")], "--image_column_name: no column 'image'.*picture"),
        "label column": (
            [*rows, str(folder / "other.jsonl"), "--image_column_name", "picture"],
            "--label_column_name: no column 'label'.*animal"),
        "column by name": (
            [*rows, str(folder / "yak.jsonl"), "--image_column_name", "imgae"], "'imgae' .did you mean 'image'"),
        "missing file": ([*rows, str(folder / "absent.csv")], "--train_file.*absent.csv does not exist"),
        "empty file": ([*rows, str(folder / "empty.jsonl")], "--train_file.*empty.jsonl is empty"),
        "no rows": ([*rows, str(folder / "bare.csv")], "bare.csv.* no (rows|data)"),
        "extension": ([*rows, str(folder / "rows.xyz")], "must end in .csv, .json, .jsonl, .parquet"),
        "broken": ([*rows, str(folder / "broken.jsonl")], "--train_file.*broken.jsonl cannot be loaded"),
        "folder and file": (["--validation_file", str(folder / "yak.jsonl")], "--train_dir and --validation_file excl"),
        "folder and data set": (["--dataset_name", "cifar10"], "--train_dir and --dataset_name exclude each other"),
        "file and data set": ([*rows, str(folder / "yak.jsonl"), "--dataset_name", "cifar10"], "exclude each other"),
        "no training split": (["--train_dir", ""], "--do_train needs a train split: give .*--train_dir"),
        "no test split": (["--do_predict", "--test_dir", ""], "--do_predict needs a test split: give .*--test_dir"),
        "nothing to hold out": (
            [where, str(folder / "one"), "--do_eval", "--validation_dir", ""], "1 training rows none can be held out"),
        "share": (["--do_eval", "--train_val_split", "1"], "--train_val_split must be at least 0 and below 1"),
        "one scale": (["--random_crop_scale", "0.5"], "--random_crop_scale must be"),
        "scale": (["--random_crop_scale", "0", "1"], "--random_crop_scale must be 0 < least"),
        "large scale": (["--random_crop_scale", "0.5", "1.1"], "--random_crop_scale.*greatest <= 1"),
        "turned scale": (["--random_crop_scale", "0.5", "0.4"], "--random_crop_scale.*least <= greatest"),
        "scale nan": (["--random_crop_scale", "nan", "1"], "--random_crop_scale must be"),
        "ratio": (["--random_crop_ratio", "2", "1"], "--random_crop_ratio must be 0 < least <= greatest"),
        "endless ratio": (["--random_crop_ratio", "1", "inf"], "--random_crop_ratio must be"),
        "flip": (["--random_flip", "1.5"], "--random_flip must be at most 1"),
        "negative flip": (["--random_flip", "-0.5"], "--random_flip must be at least 0"),
        "operations": (["--rand_augment", "0"], "--rand_augment must be at least 1"),
        "magnitude": (["--rand_augment_magnitude", "11"], "--rand_augment_magnitude must be at most 10"),
        "mixup": (["--mixup_alpha", "-1"], "--mixup_alpha must be at least 0"),
        "cutmix": (["--cutmix_alpha", "nan"], "--cutmix_alpha must be at least 0"),
        "size": (["--image_size", "0"], "--image_size must be at least 1"),
        "policy": (["--on_bad_image", "replace"], "--on_bad_image: invalid choice: 'replace'"),
        "overrides": (["--config_overrides", "patch_size=8"], "--config_overrides needs a model from scratch"),
        "smoothing": (["--label_smoothing_factor", "1"], "--label_smoothing_factor must be at least 0 and below 1"),
        "drop last": (["--dataloader_drop_last", "--per_device_train_batch_size", "64"], "make no optimiser step"),
        "flag": (["--trian_dir", "x"], "unknown flag --trian_dir.*did you mean '--train_dir'"),
        "run file": (["--config", str(folder / "run.json")], "lerning_rate.*did you mean '--learning_rate'"),
        "gaudi config": (["--gaudi_config", "Habana/vti"], "no configuration.*vit"),
        "another run": (["--output_dir", str(folder / "another")], "--output_dir.*holds another run.*all_results"),
        "mode": (["--use_lazy_mode", "True", "--torch_compile"], "contradict"),
        "no such folder": (["--model_name_or_path", "/no/such/model"], "there is no /no/such/model; give a folder"),
        "unknown type": (["--model_type", "vitt"], "--model_type: there is no 'vitt'.*vit"),
        "unknown override": (
            ["--model_type", "vit", "--config_overrides", "pach_size=8"], "pach_size isn't in the original"),
    }  # fmt: skip


BAD = [
    "missing folder", "a file for a folder", "empty folder", "class without images", "loose images", "folder of splits",
    "unknown class", "no images", "no class", "a row without class", "image column", "label column",
    "column by name", "missing file", "empty file", "no rows", "extension", "broken", "folder and file",
    "folder and data set", "file and data set", "no training split", "no test split", "nothing to hold out", "share",
    "one scale", "scale", "large scale", "turned scale", "scale nan", "ratio", "endless ratio", "flip",
    "negative flip", "operations", "magnitude", "mixup", "cutmix", "size", "policy", "overrides", "smoothing",
    "drop last", "flag", "run file", "gaudi config", "another run", "mode", "no such folder", "unknown type",
    "unknown override",
]  # fmt: skip


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory, picture_folders: dict[str, str]) -> dict[str, tuple[list[str], str]]:
    return broken_input(tmp_path_factory.mktemp("bad"), picture_folders)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_clear_line(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], bad: dict[str, tuple[list[str], str]],
    monkeypatch: pytest.MonkeyPatch, name: str,
) -> None:  # fmt: skip
    """Before any model is built: building one would fail here."""
    flags, message = bad[name]
    monkeypatch.setattr(recipe.module, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(UserError) as caught:
        recipe("--do_train", *flags, model=None if "--model_type" in flags else classifier, data=picture_folders)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_all_cases_of_bad_input_are_tried(bad: dict[str, tuple[list[str], str]]) -> None:
    assert list(bad) == BAD


# Name: flags, and what the one line must say, once there is a model.
UNFIT = {
    "size": (["--image_size", "20"], r"images of 20 x 20 pixels do not divide into the model's patches of 8 x 8"),
    "new model's size": (
        ["--model_type", "vit", "--image_size", "20"], "20 x 20 pixels do not divide.*16 x 16"),
    "another kind": (["--model_name_or_path", "{t5}"], "T5Config.*AutoModelForImageClassification"),
    "no processor": (["--model_name_or_path", "{bare}"], "the model .*bare cannot be loaded: .*image processor"),
    "no such processor": (["--image_processor_name", "/no/such"], "there is no /no/such; give a folder"),
}  # fmt: skip


@pytest.mark.parametrize("name", UNFIT)
def test_what_does_not_fit_the_model_is_one_clear_line(
    recipe: Recipe, classifier: Path, picture_folders: dict[str, str], tmp_path: Path, name: str
) -> None:
    from transformers import T5Config

    shutil.copytree(classifier, tmp_path / "t5", ignore=shutil.ignore_patterns("config.json"))
    T5Config(architectures=["T5ForConditionalGeneration"]).save_pretrained(tmp_path / "t5")
    shutil.copytree(classifier, tmp_path / "bare", ignore=shutil.ignore_patterns("preprocessor*"))
    flags, message = UNFIT[name]
    given = [word.format(t5=tmp_path / "t5", bare=tmp_path / "bare") for word in flags]
    with pytest.raises(UserError) as caught:
        recipe(*ONE_STEP, *given, model=None if "--model_type" in flags else classifier, data=picture_folders)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_bad_input_ends_with_code_2_and_no_traceback(tmp_path: Path) -> None:
    done = as_program("--do_train", "--train_dri", "x", *QUIET, "--output_dir", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: unknown flag --train_dri")


# -------------------------------------------------------------------------------------------------------- help, golden


def test_help_answers_at_once_without_torch() -> None:
    code = f"import runpy, sys; sys.argv = ['run.py', '--help']; runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    heavy = "sorted({'torch', 'transformers', 'datasets', 'PIL', 'numpy'} & set(sys.modules))"
    ended = f"try:\n    {code}\nfinally:\n    print({heavy}, file=sys.stderr)"
    seconds = []
    for _ in range(2):
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", ended], capture_output=True, text=True, cwd=REPOSITORY)
        seconds.append(time.monotonic() - start)
        assert done.returncode == 0, done.stderr
    assert "torch" not in done.stderr
    assert min(seconds) < 3
    for group in ("model and data", "hub", "run", "training", "device", "several devices"):
        assert re.search(f"^{group}", done.stdout, re.MULTILINE)


def test_importing_the_recipe_does_nothing(tmp_path: Path) -> None:
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def test_without_a_model_and_data_it_learns_digits(
    recipe: Recipe, made: SimpleNamespace, capsys: pytest.CaptureFixture[str]
) -> None:
    """A short run; `test_built_in.py` runs it to its end."""
    short = ["--max_steps", "15", "--max_eval_samples", "90", "--max_predict_samples", "9"]
    metrics = recipe(*short)
    assert {split: len(rows) for split, rows in made.pictures.items()} == {"train": 1257, "validation": 90, "test": 9}
    assert metrics["eval_accuracy"] > 0.2
    assert metrics["eval_loss"] < 2.3
    config = json.loads((recipe.output / "config.json").read_text())
    assert list(config["id2label"].values()) == [str(digit) for digit in range(10)]
    assert config["problem_type"] == "single_label_classification", "else a pipeline may take it for another kind"
    assert re.fullmatch(r"test-\d{4}\.png", recipe.table()[0]["path"])
    assert "eval_accuracy" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_golden_losses(recipe: Recipe, request: pytest.FixtureRequest, kind: str) -> None:
    """Four recorded losses: a refactoring must not move them. ``--rebase`` records this machine's.

    The pictures are PNG: what is in a JPEG depends on the library that reads it.
    """
    flags = "--do_train --max_steps 4 --logging_steps 1 --learning_rate 0.003 --save_strategy no".split()
    flags += ["--mixup_alpha", "0.8", "--cutmix_alpha", "1", "--rand_augment", "2", "--ignore_mismatched_sizes"]
    flags += ["--train_val_split", "0"]
    data = {"--train_dir": str(save_pictures(recipe.folder / "png", 26, kinds=("png",)))}
    recipe(*flags, model=request.getfixturevalue(f"tiny_{kind}"), data=data)
    losses = [float(row["loss"]) for row in recipe.table("logs/metrics.csv")]
    path, name = REPOSITORY / "tests" / "baselines" / "cpu.json", f"image_classification_{kind}"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if request.config.getoption("--rebase"):
        path.write_text(json.dumps({**recorded, name: losses}, indent=2) + "\n")
        return
    assert losses == pytest.approx(recorded[name], abs=1e-5)
