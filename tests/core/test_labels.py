"""Classes by name: real data sets whose numbers, orders and kinds of labels differ, and what is wrong with some."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value, load_dataset

from core.errors import UserError
from core.labels import (
    UNLABELLED,
    choose_classes,
    image_column,
    label_column,
    label_names,
    label_numbers,
    load_classifier,
    require_same_classes,
)

PETS = ["dog", "cat", "bird"]


def labelled(values: list[Any], names: list[str] | None = None, kind: str | None = None) -> Dataset:
    feature = ClassLabel(names=names) if names else kind and Value(kind)
    return Dataset.from_dict({"label": values}, features=feature and Features({"label": feature}))


def stored(values: list[Any], kind: pa.DataType, names: list[str] | None = None) -> Dataset:
    """Labels as a file may hold them, whatever the library would say to them."""
    features = Features({"label": ClassLabel(names=names)}) if names else None
    table = pa.table({"label": pa.array(values, kind)})
    return Dataset(table if features is None else table.cast(features.arrow_schema))


# -------------------------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        (labelled([2, 0], PETS), PETS),
        (labelled([-1, -1], PETS), PETS),
        (labelled(["dog", "cat", "dog", "Bird"]), ["Bird", "cat", "dog"]),
        (labelled(["b", "a"], kind="large_string"), ["a", "b"]),
        (labelled([10, 9, 100, 9]), ["9", "10", "100"]),
        (labelled([1, -1], kind="int8"), ["-1", "1"]),
        (labelled([2**62, 0], kind="uint64"), ["0", str(2**62)]),
        (labelled([True, False, True]), ["False", "True"]),
        (labelled(["10", "9"]), ["10", "9"]),
        (labelled(["one"] * 3), ["one"]),
        (labelled(["c", "b", "a", "b"]).select([3, 2]), ["a", "b"]),  # of these rows, not of all that are stored
    ],
)
def test_the_names_of_a_column(rows: Dataset, names: list[str]) -> None:
    assert label_names(rows, "label") == names


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (labelled(["a", None, "b", None]), r"2 of 4 rows lack a label in 'label' \(first: row 2\); mend the data"),
        (labelled(["a", "b", " \t"]), r"1 of 3 rows lack a label in 'label' \(first: row 3\)"),
        (labelled(["", "b"]).select([1, 0]), r"1 of 2 rows lack a label .*row 2"),
        (labelled([1, None]), r"1 of 2 rows lack a label .*row 2"),
        (labelled([None, None]), r"2 of 2 rows lack a label .*row 1"),
        (labelled([1.0, None, 2.0]), r"'label' holds double \(row 2: None\), not one text or whole number a row; mend"),
        (labelled([0.5, 1.5]), r"'label' holds double \(row 1: 0.5\), not one text or whole number a row"),
        (labelled([["a", "b"], ["a"]]), r"'label' holds list<.*string> \(row 1: \['a', 'b'\]\), not one text"),
        (labelled([{"name": "a"}]), r"'label' holds struct<name: string> \(row 1: "),
        (labelled([b"a"]), r"'label' holds binary"),
        (labelled([]), r"there are no rows, so 'label' names no classes"),
        (labelled([["x" * 500]]), r"'label' holds list"),
    ],
)
def test_a_column_that_names_no_classes(rows: Dataset, message: str) -> None:
    with pytest.raises(UserError, match=f"^--label_column_name: {message}") as error:
        label_names(rows, "label")
    assert len(str(error.value).splitlines()) == 1
    assert len(str(error.value)) < 220
    with pytest.raises(UserError, match=r"^--other: "):
        label_names(rows, "label", "--other")


def test_a_csv_file_with_a_hole_names_its_row(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("path,label\na,0\nb,\nc,1\n")
    rows = load_dataset("csv", data_files=str(tmp_path / "rows.csv"), split="train", cache_dir=str(tmp_path))
    with pytest.raises(UserError, match=r"--label_column_name: .*row 2"):
        label_names(rows, "label")


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize(
    ("rows", "numbers"),
    [
        (labelled([0, 1, 2, 0], ["cat", "bird", "dog"]), [1, 2, 0, 1]),  # another order than the model's
        (labelled([0, 1], ["bird", "cat"]), [2, 1]),  # fewer
        (labelled([1, 2], ["lion", "cat", "dog"]), [1, 0]),  # one of them, that no row has, is unknown
        (labelled(["cat", "dog", "cat"]), [1, 0, 1]),
        (labelled(["cat", "dog", "cat"], kind="large_string").select([2, 1]), [1, 0]),
    ],
)
def test_classes_are_found_by_name_and_not_by_number(rows: Dataset, numbers: list[int]) -> None:
    found = label_numbers(rows, "label", PETS, "validation")
    assert found.dtype == np.int64
    assert found.tolist() == numbers


def test_numbers_and_their_texts_are_one_class() -> None:
    for rows in (labelled([10, 9, 10]), labelled(["10", "9", "10"]), labelled([1, 0, 1], ["9", "10"])):
        assert label_numbers(rows, "label", ["9", "10"], "test").tolist() == [1, 0, 1]
    assert label_numbers(labelled([True, False]), "label", ["False", "True"], "test").tolist() == [1, 0]
    assert label_numbers(labelled([-1, 1]), "label", ["-1", "1"], "test").tolist() == [0, 1]  # of a plain column


def test_a_split_shares_numbers_with_the_one_that_names_them() -> None:
    rng = np.random.default_rng(0)
    values = [PETS[number] for number in rng.integers(0, 3, 60)]
    train, test = labelled(values[:40]), labelled(values[40:]).class_encode_column("label")
    names = label_names(train, "label")
    for rows, own in ((train, values[:40]), (test, values[40:])):
        assert [names[number] for number in label_numbers(rows, "label", names, "test")] == own


@pytest.mark.parametrize(
    "rows",
    [
        labelled([-1, -1, -1], PETS),
        labelled([None, -1, None], PETS),
        labelled([None] * 3),
        labelled(["", " ", None]),
        labelled([None] * 3, kind="float64"),
        labelled([None] * 3, kind="string"),
        Dataset.from_dict({"image": ["a", "b", "c"]}),
    ],
)
def test_a_split_whose_labels_are_kept_back(rows: Dataset) -> None:
    found = label_numbers(rows, "label", PETS, "test")
    assert found.dtype == np.int64
    assert found.tolist() == [UNLABELLED] * 3


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (labelled([0, -1, 2, -1], PETS), r"2 of 4 rows lack a label in 'label' \(first: row 2\); mend the data"),
        (labelled([0, None], PETS), r"1 of 2 rows lack a label .*row 2"),
        (labelled(["dog", ""]), r"1 of 2 rows lack a label .*row 2"),
        (
            labelled(["dog", "lion", "cat", "lion"]),
            r"2 rows \(first: row 2\) are of classes that are not among the model's 3: 'lion'; mend the data, or train",
        ),
        (labelled([*"dcbae", "cat"]), r"5 rows \(first: row 1\) .* 'd', 'c', 'b' and 2 more;"),
        (labelled([1, 0], ["cat", "lion"]), r"1 rows \(first: row 1\) .*: 'lion';"),
        (labelled([1, 0]), r"2 rows .* '1', '0';"),
        (labelled([0.0, 1.0]), r"'label' holds double \(row 1: 0.0\)"),
        (labelled([["dog"]]), r"'label' holds list"),
        (stored([0, 7], pa.int64(), PETS), r"row 2 has label 7, but 'label' has 3 classes"),
        (stored([0, -5], pa.int64(), PETS), r"row 2 has label -5, but 'label' has 3 classes"),
    ],
)
def test_labels_that_no_output_stands_for(rows: Dataset, message: str) -> None:
    with pytest.raises(UserError, match=f"^--label_column_name: the validation split: {message}") as error:
        label_numbers(rows, "label", PETS, "validation")
    assert len(str(error.value).splitlines()) == 1


def test_a_million_labels_take_no_loop() -> None:
    """Row by row it takes more than ten times as long; on a noisy machine, half a minute is left to it."""
    values = np.random.default_rng(0).integers(0, 1000, 1_200_000)
    rows = Dataset(pa.table({"label": pa.array(values).cast(pa.string())}))
    start = time.perf_counter()
    names = label_names(rows, "label")
    numbers = label_numbers(rows, "label", names, "train")
    assert time.perf_counter() - start < 5
    assert (np.array(names).astype(int)[numbers] == values).all()


# ------------------------------------------------------------------------------------------------------------ columns

COLUMNS = Features({"picture": Image(), "kind": ClassLabel(names=PETS), "other": Value("int64")})


def columns(*names: str) -> Dataset:
    return Dataset.from_dict({"picture": [None], "kind": [0], "other": [1]}, features=COLUMNS).select_columns(
        list(names)
    )


def test_the_column_that_is_asked_for_or_has_the_name_or_is_the_only_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = columns("picture", "kind", "other")
    assert (label_column(rows, "kind"), image_column(rows, "picture")) == ("kind", "picture")
    assert label_column(rows, "other") == "other"
    named = rows.rename_columns({"picture": "image", "other": "label"})
    assert (label_column(named, None), image_column(named, None)) == ("label", "image")
    assert label_column(named, None, "kind") == "kind"
    assert not capsys.readouterr().out
    assert (label_column(rows, None), image_column(rows, None)) == ("kind", "picture")
    assert capsys.readouterr().out.splitlines() == [
        "no column is called label: 'kind' is taken, the only one of kind ClassLabel",
        "no column is called image: 'picture' is taken, the only one of kind Image",
    ]


def test_a_published_command_names_the_columns_of_its_data_set() -> None:
    features = Features({"img": Image(), "label": ClassLabel(names=PETS)})
    rows = Dataset.from_dict({"img": [None], "label": [1]}, features=features)
    assert (image_column(rows, "img"), label_column(rows, "label")) == ("img", "label")


def test_a_column_that_is_not_there() -> None:
    rows = columns("picture", "kind", "other")
    two = Dataset.from_dict(
        {"fine_label": [0], "coarse_label": [0]},
        features=Features({name: ClassLabel(names=PETS) for name in ("fine_label", "coarse_label")}),
    )
    for find, data, asked, message in (
        (
            label_column,
            rows,
            "kinds",
            r"--label_column_name: no column 'kinds' \(did you mean 'kind'\?\); there are: pi",
        ),
        (label_column, two, None, r"no column 'label' .*; there are: fine_label, coarse_label"),
        (label_column, columns("other"), None, "--label_column_name: no column 'label'; there are: other"),
        (image_column, rows, "pictures", r"--image_column_name: no column 'pictures' \(did you mean 'picture'\?\)"),
        (image_column, columns("other"), None, "--image_column_name: no column 'image'; there are: other"),
    ):
        with pytest.raises(UserError, match=message) as error:
            find(data, asked)
        assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (["a.png"], None),
        ([None], Image()),
        ([None], Image(decode=False)),
        (["a.png"], Value("large_string")),
        ([b"PNG"], None),
        ([b"PNG"], Value("large_binary")),
        ([{"bytes": b"PNG", "path": None}], {"bytes": Value("binary"), "path": Value("string")}),
        ([{"path": "a.png"}], None),
    ],
)
def test_what_an_image_can_be(value: list[Any], kind: Any) -> None:
    assert (
        image_column(Dataset.from_dict({"image": value}, features=kind and Features({"image": kind})), None) == "image"
    )


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (3, "int64"),
        (None, "null"),
        (0.5, "float64"),
        ([[[1, 2]]], r"List\(.*"),
        ({"data": b"x"}, r"\{'data'.*"),
        ({"path": "a", "size": 3}, r"\{'path'.*"),
    ],
)
def test_what_an_image_cannot_be(value: Any, kind: str) -> None:
    rows = Dataset.from_list([{"image": value, "label": "a"}])
    message = rf"^--image_column_name: 'image' holds {kind}, not images; there are: image, label$"
    with pytest.raises(UserError, match=message) as error:
        image_column(rows, None)
    assert len(str(error.value).splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------ classes


def checkpoint(*names: str) -> dict[int, str]:
    return dict(enumerate(names))


GENERIC = checkpoint("LABEL_0", "LABEL_1", "LABEL_2")


@pytest.mark.parametrize(
    ("config", "data", "training", "classes", "kept"),
    [
        (None, PETS, True, PETS, False),
        ({}, PETS, True, PETS, False),
        (checkpoint("bird", "cat", "dog"), PETS, True, ["bird", "cat", "dog"], True),  # the same, in another order
        (checkpoint("bird", "cat", "lion"), PETS, True, PETS, False),
        (checkpoint("bird", "cat", "dog", "lion"), PETS, True, PETS, False),
        (GENERIC, PETS, True, PETS, True),
        (GENERIC, PETS[:2], True, PETS[:2], False),
        (checkpoint("bird", "cat", "dog"), PETS, False, ["bird", "cat", "dog"], True),
        (checkpoint("bird", "cat", "lion"), PETS, False, ["bird", "cat", "lion"], True),
        (checkpoint("bird", "cat"), None, False, ["bird", "cat"], True),
        (GENERIC, PETS, False, PETS, True),
        (GENERIC, None, False, ["LABEL_0", "LABEL_1", "LABEL_2"], True),
        ({2: "c", 0: "a", 1: "b"}, ["c", "b", "a"], True, ["a", "b", "c"], True),  # by number, not as they are listed
        (checkpoint("0", "1"), ["1", "0"], True, ["0", "1"], True),
        (checkpoint("LABEL_1", "LABEL_0"), ["LABEL_0", "LABEL_1"], True, ["LABEL_1", "LABEL_0"], True),
    ],
)
def test_which_class_an_output_stands_for(
    config: Any, data: Any, training: bool, classes: list[str], kept: bool, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose_classes(config, data, training) == (classes, kept)
    assert not caplog.messages


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (None, "the data have 2 classes, the model none: "),
        (GENERIC, "the data have 2 classes, the model 3 classes without names: "),
    ],
)
def test_an_untrained_classifier_is_said_to_be_one(config: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_classes(config, ["b", "a"], False) == (["b", "a"], False)
    assert caplog.messages == [f"{said}its classifier is new and untrained, and its figures are those of chance"]


@pytest.mark.parametrize("training", [False, True])
def test_two_classes_of_one_name_are_matched_by_place(training: bool) -> None:
    """As in ImageNet: the checkpoint calls two classes crane, the data call them apart."""
    config = checkpoint("hen", "crane", "dog", "crane")
    data = ["hen", "crane bird", "dog", "crane"]
    assert choose_classes(config, data, training) == (data, True)
    numbers = label_numbers(labelled([3, 1], data), "label", data, "test")
    assert numbers.tolist() == [3, 1]


def test_two_classes_of_one_name_that_have_no_place_are_numbered() -> None:
    config, numbered = checkpoint("hen", "crane", "dog", "crane"), ["hen", "crane", "dog", "crane (2)"]
    for data in (["dog", "crane"], ["crane", "hen", "dog", "crane bird"], None):
        assert choose_classes(config, data, False) == (numbered, True)
    assert choose_classes(config, ["crane", "dog", "hen"], True) == (["crane", "dog", "hen"], False)
    assert choose_classes(config, numbered[::-1], True) == (numbered, True)  # saved by this project, then read again
    assert choose_classes(config, ["hen", "crane bird", "dog", "crane", "lion"], True)[1] is False
    many = checkpoint("a", "a", "a (2)", "a")
    assert len(set(choose_classes(many, None, False)[0])) == 4
    same = checkpoint("a", "a")
    assert choose_classes(same, ["b", "c"], True) == (["b", "c"], False)  # no name tells that the places are the same


def test_twenty_thousand_classes_take_no_time() -> None:
    names = [f"class {number % 20_000}" for number in range(21_841)]
    start = time.perf_counter()
    classes, kept = choose_classes(checkpoint(*names), [f"{name}, {at}" for at, name in enumerate(names)], False)
    assert time.perf_counter() - start < 2
    assert kept
    assert len(set(classes)) == 21_841


@pytest.mark.parametrize(
    ("config", "data", "training", "message"),
    [
        (None, None, False, "the data name no classes, nor does a model; give --model_name_or_path"),
        (GENERIC, None, True, "the data name no classes to train on; give --label_column_name"),
        ({1: "a", 2: "b"}, ["a", "b"], True, "the model's id2label numbers its 2 classes otherwise than 0 to 1"),
        ({"0": "a", "1": "b"}, ["a", "b"], True, "id2label numbers its 2 classes otherwise than 0 to 1"),
    ],
)
def test_classes_that_nobody_names(config: Any, data: Any, training: bool, message: str) -> None:
    with pytest.raises(UserError, match=message):
        choose_classes(config, data, training)


def test_one_class_is_nothing_to_train_on() -> None:
    with pytest.raises(UserError, match="the data have one class, 'cat'; there is nothing to tell it from"):
        choose_classes(None, ["cat"], training=True)
    assert choose_classes({0: "cat", 1: "dog"}, ["cat"], training=False) == (["cat", "dog"], True)


def test_a_head_of_other_classes_gives_way_only_if_asked_to(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    from transformers import AutoConfig, AutoModelForImageClassification, ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    saved = ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=3, **sizes))
    saved.save_pretrained(tmp_path)
    name, kind, config = str(tmp_path), AutoModelForImageClassification, AutoConfig.from_pretrained(tmp_path)
    loaded = load_classifier(kind, name, config, new_head=True)
    assert loaded.classifier.weight.equal(saved.classifier.weight)
    assert "untrained" not in capsys.readouterr().out
    config.id2label = {0: "cat", 1: "dog"}
    with pytest.raises(UserError, match=r"trained on other classes than these 2 .*--ignore_mismatched_sizes gives it"):
        load_classifier(kind, name, config, new_head=False)
    assert load_classifier(kind, name, config, new_head=True).classifier.weight.shape == (2, 8)
    assert "new, untrained weights: classifier.bias, classifier.weight" in capsys.readouterr().out


def test_a_checkpoint_of_other_classes_is_not_gone_on_from(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(id2label={0: "cat", 1: "dog"}).save_pretrained(tmp_path)
    require_same_classes(None, ViTConfig(id2label={0: "dog"}))
    require_same_classes(tmp_path, ViTConfig(id2label={0: "cat", 1: "dog"}))
    with pytest.raises(UserError, match=r"was trained with class 0 'cat', not 'dog': resume with its data"):
        require_same_classes(tmp_path, ViTConfig(id2label={0: "dog", 1: "cat"}))
