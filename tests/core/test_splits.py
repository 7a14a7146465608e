"""Splits, what is held out, columns, and rows of tokens: on real data sets and streams."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, LargeList, List, Value, concatenate_datasets, load_dataset

from core.errors import UserError
from core.packing import Blocks
from core.splits import (
    add_validation,
    columns_of,
    hold_out,
    hold_out_validation,
    map_rows,
    needed_splits,
    text_column,
    token_column,
    token_lengths,
    whole_rows,
)
from core.stream import StreamLoader
from tests.conftest import write_jsonl


def rows_of(count: int) -> Dataset:
    return Dataset.from_list([{"text": f"row {number}"} for number in range(count)])


def stream_of(folder: Path, rows: list[dict[str, Any]]) -> Any:
    path = str(write_jsonl(folder / "rows.jsonl", rows))
    return load_dataset("json", data_files=path, split="train", streaming=True)


def wanted(**flags: Any) -> Namespace:
    off = {"do_train": False, "do_eval": False, "do_predict": False, "eval_strategy": "no"}
    return Namespace(**off | {"preprocessing_num_workers": None, "overwrite_cache": False} | flags)


# ------------------------------------------------------------------------------------------------------------- splits


@pytest.mark.parametrize(("percent", "held"), [(5, 1), (10, 1), (11, 2), (50, 5), (0.1, 1)])
def test_the_first_rows_are_held_out(percent: float, held: int) -> None:
    train, validation = hold_out(rows_of(10), percent)
    assert list(validation["text"]) == [f"row {number}" for number in range(held)]
    assert list(train["text"]) == [f"row {number}" for number in range(held, 10)]


@pytest.mark.parametrize(("count", "percent"), [(1, 5), (10, 100), (3, 99)])
def test_some_rows_must_be_left(count: int, percent: float) -> None:
    with pytest.raises(UserError, match=f"of {count} rows none would be left to train on"):
        hold_out(rows_of(count), percent)


def test_a_stream_is_parted_by_row_and_not_by_order(tmp_path: Path) -> None:
    rows = [{"text": f"row {number}", "note": number} for number in range(400)]
    found = []
    for order in (rows, rows[::-1]):
        train, validation = hold_out(stream_of(tmp_path, order), 20)
        found.append([{row["text"] for row in part} for part in (train, validation)])
        assert [row["text"] for row in train] == [r["text"] for r in order if r["text"] in found[-1][0]]
        (tmp_path / "rows.jsonl").unlink()
    assert found[0] == found[1]
    train, validation = found[0]
    assert not train & validation
    assert len(train | validation) == 400
    assert 50 < len(validation) < 110


def test_a_part_of_a_percent_of_a_stream() -> None:
    """Of 20,000 rows 100; within five standard deviations."""
    _, validation = hold_out(Dataset.from_dict({"number": range(20_000)}).to_iterable_dataset(), 0.5)
    assert 50 < sum(1 for _ in validation) < 150


def test_some_percent_must_be_left() -> None:
    args = wanted(do_train=True, do_eval=True, validation_split_percentage=100)
    for rows in (rows_of(10), rows_of(10).to_iterable_dataset()):
        with pytest.raises(
            UserError, match=r"^--validation_split_percentage must be below 100: the others are trained"
        ):
            add_validation({"train": rows}, args)


def drawn(rows: Dataset, column: str | None = None, **flags: Any) -> dict[str, Dataset]:
    found = {"train": rows}
    hold_out_validation(found, wanted(**{"do_eval": True, "seed": 42, "train_val_split": 0.15} | flags), column)
    return found


def test_a_share_is_drawn_by_the_seed_and_every_row_is_on_one_side() -> None:
    rows = Dataset.from_dict({"number": range(1000)})
    found = drawn(rows)
    train, held = (found[split]["number"][:] for split in ("train", "validation"))
    assert len(held) == 150
    assert sorted(train + held) == list(range(1000))
    assert (train, held) == (sorted(train), sorted(held))  # the rows' own order
    assert held[:6] == [3, 15, 17, 18, 24, 29]  # also in another version, on another machine
    assert 400 < np.mean(held) < 600
    assert drawn(rows)["validation"]["number"][:] == held
    assert drawn(rows, do_eval=False, eval_strategy="epoch")["validation"]["number"][:] == held
    assert drawn(rows, seed=43)["validation"]["number"][:] != held
    assert [len(drawn(rows.select(range(3)), train_val_split=share)["train"]) for share in (0.01, 0.5, 0.99)] == [
        2,
        1,
        1,
    ]


@pytest.mark.parametrize("kind", [Value("string"), Value("int8"), ClassLabel(names=["x", "y", "7"])])
def test_every_class_gives_its_share_and_keeps_a_row(kind: Any) -> None:
    classes = [0] * 100 + [1] * 20 + [2]
    names = classes if kind.dtype != "string" else [str(number) for number in classes]
    order = np.random.default_rng(0).permutation(121)
    rows = Dataset.from_dict({"label": names}, features=Features({"label": kind})).select(order)
    for seed in range(20):
        found = drawn(rows, "label", seed=seed)
        held = [found["validation"]["label"][:].count(name) for name in (names[0], names[100], names[120])]
        assert held[0] in (15, 16)
        assert held[1] in (3, 4)
        assert held[2] == 0
        assert len(found["train"]) == 121 - sum(held)


def test_nothing_is_drawn_where_it_is_not_needed_or_given() -> None:
    rows = rows_of(4)
    assert list(drawn(rows, train_val_split=0.0)) == ["train"]
    assert drawn(rows, do_eval=False)["validation"][:] == drawn(rows)["validation"][:], "for a later evaluation"
    one = Dataset.from_dict({"label": ["a"]})
    assert list(drawn(one, "label", do_eval=False)) == ["train"]
    for found in ({"train": rows, "validation": rows}, {"test": rows}):
        before = dict(found)
        hold_out_validation(found, wanted(do_eval=True, seed=1, train_val_split=0.5))
        assert found == before


@pytest.mark.parametrize("share", [1.0, -0.1, 1.5, float("nan")])
def test_a_share_is_not_all(share: float) -> None:
    with pytest.raises(UserError, match=r"^--train_val_split must be at least 0 and below 1, not "):
        drawn(rows_of(4), train_val_split=share, do_eval=False)


@pytest.mark.parametrize("labels", [[], ["a"], ["a", "b", "c"]])
def test_a_class_of_one_row_is_trained_on(labels: list[str]) -> None:
    rows = Dataset.from_dict({"label": labels}, features=Features({"label": Value("string")}))
    said = f"of {len(labels)} training rows none can be held out: each class keeps one; give --validation_file$"
    with pytest.raises(UserError, match=said):
        drawn(rows, "label")
    with pytest.raises(UserError, match=r"give --validation_file or --validation_dir$"):
        drawn(rows, "label", validation_dir=None)


def test_labels_that_are_none_are_refused_before_anything_is_drawn() -> None:
    with pytest.raises(UserError, match=r"^--label_column_name: 'label' holds double"):
        drawn(Dataset.from_dict({"label": [0.5, 1.5]}), "label")


def test_the_splits_that_the_flags_ask_for() -> None:
    there = {"train": 1, "validation": 2, "test": 3}
    assert needed_splits(wanted(do_train=True, do_predict=True), there) == {"train": "train", "test": "predict"}
    assert needed_splits(wanted(do_eval=True), there) == {"validation": "eval"}
    on_the_way = wanted(do_train=True, eval_strategy="steps")
    assert needed_splits(on_the_way, there) == {"train": "train", "validation": "eval"}
    assert needed_splits(wanted(do_predict=True, eval_strategy="steps"), {"test": 3}) == {"test": "predict"}
    for flags, message in (
        ({"do_train": True}, "--do_train needs a train split: give --train_file"),
        ({"do_eval": True}, "--do_eval needs a validation split: give --validation_file"),
        ({"do_predict": True}, "--do_predict needs a test split: give --test_file"),
    ):
        with pytest.raises(UserError, match=f"{message}, or a data set that has one$"):
            needed_splits(wanted(**flags), {})
    with pytest.raises(UserError, match=r": give --test_file or --test_dir, or a data set that has one$"):
        needed_splits(wanted(do_predict=True, test_dir=None), {})


# ------------------------------------------------------------------------------------------------------------ columns


def test_columns_of_a_stream_that_does_not_know_them(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, [{"b": 1, "a": "x"}])
    assert columns_of(stream) == ["b", "a"]
    assert columns_of(rows_of(2)) == ["text"]
    assert columns_of(stream.map(lambda row: {"c": row["b"]})) == ["b", "a", "c"]


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("json", '{"text": "a"', "the first row of the stream cannot be read: "),
        ("csv", "text\n", "the stream has no rows"),
    ],
)
def test_a_stream_without_a_first_row_is_one_line(tmp_path: Path, kind: str, text: str, said: str) -> None:
    (tmp_path / "rows").write_text(text)
    stream = load_dataset(kind, data_files=str(tmp_path / "rows"), split="train", streaming=True)
    with pytest.raises(UserError, match=said) as error:
        columns_of(stream)
    assert len(str(error.value).splitlines()) == 1


def test_a_column_that_is_taken_because_it_is_the_first_is_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([{"title": "a", "body": "b"}])
    assert text_column(rows, "title") == text_column(rows.select_columns("title"), None) == "title"
    assert text_column(rows.add_column("text", ["c"]), None) == "text"
    assert not caplog.messages
    assert text_column(rows, None) == "title"
    said = "no column is called text: 'title' is read, of title, body; --text_column names another"
    assert caplog.messages == [said]


def test_the_text_column() -> None:
    both = Dataset.from_list([{"title": "a", "text": "b"}])
    assert text_column(both, None) == "text"
    assert text_column(both, "title") == "title"
    assert text_column(both.remove_columns("text"), None) == "title"
    assert text_column(Dataset.from_list([{"text": None}]), None) == "text"


@pytest.mark.parametrize(
    ("row", "asked", "message"),
    [
        ({"text": "a"}, "txt", r"--text_column: no column 'txt' \(did you mean 'text'\?\); there are: text"),
        ({"text": 3}, None, "--text_column: 'text' holds .*int64.*, not text"),
        ({"text": ["a"]}, None, "--text_column: 'text' holds .*, not text"),
        ({"text": {"a": "b"}}, None, "--text_column: 'text' holds .*, not text"),
        ({"count": 1, "body": "a"}, None, "--text_column: 'count' holds .*, not text; there are: count, body"),
    ],
)
def test_a_column_that_holds_no_text_is_named(
    row: dict[str, Any], asked: str | None, message: str, tmp_path: Path
) -> None:
    for rows in (Dataset.from_list([row]), stream_of(tmp_path, [row])):
        if asked or hasattr(rows, "num_rows"):  # a stream may not know what it holds
            with pytest.raises(UserError, match=message) as error:
                text_column(rows, asked)
            assert len(str(error.value).splitlines()) == 1


# ------------------------------------------------------------------------------------------------------------- tokens


def test_prepared_tokens_are_taken_alone(caplog: pytest.LogCaptureFixture) -> None:
    rows = Dataset.from_list([{"input_ids": [1, 2], "attention_mask": [1, 1]}, {"input_ids": [], "attention_mask": []}])
    assert token_column(rows.select_columns("input_ids"), 3)[:] == {"input_ids": [[1, 2], []]}
    assert not caplog.messages
    assert token_column(rows, 3)[:] == {"input_ids": [[1, 2], []]}
    said = "input_ids alone is taken; not used: attention_mask (--text_column reads texts instead)"
    assert caplog.messages == [said]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1, 9], [2]], "input_ids has the token 9, the vocabulary ends at 8"),
        ([[2], [1, -1]], "input_ids has the token -1; token numbers begin at 0"),
        (["a b"], "input_ids holds string, not lists of token numbers"),
        ([[0.5]], "input_ids holds .*double.*, not lists of token numbers"),
        ([[[1]]], "input_ids holds .*, not lists of token numbers"),
        ([3], "input_ids holds int.., not lists of token numbers"),
    ],
)
def test_prepared_tokens_that_do_not_fit(values: list[Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        token_column(Dataset.from_list([{"input_ids": value} for value in values]), 9)


@pytest.mark.parametrize("kind", [List(Value("int64"), length=2), LargeList(Value("int64")), List(Value("uint16"))])
def test_prepared_tokens_of_any_kind_of_list(kind: Any) -> None:
    rows = Dataset.from_dict({"input_ids": [[1, 2], [3, 4]]}, features=Features({"input_ids": kind}))
    blocks = Blocks(token_column(rows, 9), 3)
    assert [block["input_ids"].tolist() for block in blocks] == [[1, 2, 3], [4]]


def test_prepared_tokens_of_a_stream_are_taken_alone_and_looked_at_as_they_are_read(tmp_path: Path) -> None:
    rows = [{"input_ids": [1, 8], "note": "x"}, {"input_ids": [], "note": ""}, {"input_ids": None, "note": ""}]
    taken = list(token_column(stream_of(tmp_path, rows), 9))
    assert taken == [{"input_ids": row["input_ids"]} for row in rows]
    for token, message in (
        (9, "input_ids has the token 9, the vocabulary ends at 8"),
        (-1, "input_ids has the token -1;"),
    ):
        stream = token_column(stream_of(tmp_path, [*rows, {"input_ids": [2, token], "note": "x"}]), 9)
        loader = StreamLoader(stream, lambda blocks, shape: {}, length=2, batch_size=1)
        with pytest.raises(UserError, match=f"^{message}"):
            list(loader.windows())


def test_rows_that_foretell_nothing_are_left_out_and_counted(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = [[6, 7, 8], [], [6], None, list(range(6, 16)), [6, 7]]
    rows, lengths = whole_rows(Dataset.from_list([{"input_ids": ids} for ids in tokens]), 5, None, "train")
    assert rows["input_ids"][:] == [tokens[0], tokens[4], tokens[5]]
    assert (lengths.tolist(), lengths.dtype) == ([[3], [5], [2]], np.int32)
    assert caplog.messages == [
        "3 of 6 train rows have nothing to foretell: they are empty, or a prompt fills them; they are left out"
    ]
    assert "train: 10 tokens in 3 rows of at most 5" in capsys.readouterr().out


def test_a_prompt_that_fills_the_row_leaves_nothing_to_foretell() -> None:
    """The first label is nobody's target, and what is beyond the length is cut off."""
    labels = [[-100, -100, 8], [-100, -100, -100, 9], [8, -100, -100], [-100, -100, -100]]
    rows = Dataset.from_list([{"input_ids": [6] * len(one), "labels": one} for one in labels])
    kept, lengths = whole_rows(rows, 3, None, "test")
    assert kept["labels"][:] == [labels[0]]
    assert lengths.tolist() == [[3]]


def test_the_first_rows_alone_and_none_at_all() -> None:
    rows = Dataset.from_list([{"input_ids": [6] * count} for count in (1, 2, 3, 4)])
    for limit, expected in ((2, [2, 3]), (7, [2, 3, 4])):
        kept, lengths = whole_rows(rows, 9, limit, "validation")
        assert [len(ids) for ids in kept["input_ids"]] == lengths[:, 0].tolist() == expected
    with pytest.raises(UserError, match="the validation split has no rows"):
        whole_rows(rows.select([0]), 9, None, "validation")
    with pytest.raises(UserError, match="the validation split has no rows"):
        whole_rows(rows.select([]), 9, None, "validation")


def ways_to_hold(rows: Dataset) -> dict[str, Dataset]:
    half = len(rows) // 2
    return {
        "whole": rows,
        "sliced": rows.select(range(3, len(rows) - 2)),
        "filtered": rows.filter(lambda row: len(row["input_ids"] or []) != 1),
        "shuffled": rows.shuffle(seed=1),
        "parts": concatenate_datasets([rows.select(range(half)), rows.select(range(half, len(rows)))]),
        "chosen": concatenate_datasets([rows.select([5, 2, 2]), rows.shuffle(seed=2)]).select([4, 0, 9, 2]),
        "none": rows.select([]),
    }


@pytest.mark.parametrize("kind", [List, LargeList], ids=["list", "large list"])
def test_lengths_are_those_of_the_rows_however_arrow_holds_them(kind: type) -> None:
    draw = np.random.default_rng(0)
    labels = [draw.choice([-100, 7], size, p=[0.8, 0.2]).tolist() for size in draw.integers(0, 6, 60)]
    columns = {"input_ids": [[6] * len(one) for one in labels], "labels": labels}
    columns["input_ids"][4] = columns["labels"][4] = None
    rows = Dataset.from_dict(columns, Features({name: kind(Value("int32")) for name in columns}))
    columns["labels"] = [[] for _ in labels]
    other = Dataset.from_dict(columns, rows.features)  # the axes differ
    for name, held in ways_to_hold(rows).items():
        expected = [len(ids or []) for ids in held["input_ids"]]
        found = token_lengths(held, ["input_ids", "labels"])
        assert (found.tolist(), found.dtype) == ([[size, size] for size in expected], np.int32), name
        for length in (1, 3, 9) if len(held) else ():
            learns = [any(label >= 0 for label in (one or [])[1:length]) for one in held["labels"]]
            if any(learns):
                kept, lengths = whole_rows(held, length, None, "train")
                wanted_rows = [row for row, one in zip(held, learns, strict=True) if one]
                assert list(kept) == wanted_rows, name
                assert lengths.tolist() == [[min(len(row["input_ids"]), length)] for row in wanted_rows]
    assert token_lengths(other, ["input_ids", "labels"])[:, 1].tolist() == [0] * 60
    all_learn = rows.remove_columns("labels").select(
        [number for number, one in enumerate(labels) if len(one or []) > 1]
    )
    assert whole_rows(all_learn, 9, None, "train")[0] is all_learn


def encode(batch: dict[str, list]) -> dict[str, list]:
    return {"input_ids": [list(map(len, (text or "").split())) for text in batch["text"]]}


def test_rows_become_tokens_in_any_number_of_processes_and_in_a_stream(tmp_path: Path) -> None:
    rows = [{"text": "a bc def"}, {"text": None}, {"text": "gh"}] * 3
    expected = [{"input_ids": ids} for ids in [[1, 2, 3], [], [2]] * 3]
    path = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    for streaming in (False, True):
        data = load_dataset("json", data_files=path, split="train", streaming=streaming, cache_dir=str(tmp_path))
        for workers in (None, 2):
            found = map_rows(data, encode, wanted(preprocessing_num_workers=workers), ["input_ids"])
            assert list(found) == expected
            assert found.column_names == ["input_ids"]


def test_rows_without_a_token_have_the_type_of_tokens() -> None:
    found = map_rows(Dataset.from_list([{"text": ""}] * 3), encode, wanted(), ["input_ids"])
    assert str(found.data.column("input_ids").type) == "list<item: int32>"


def test_the_cache_is_used_unless_it_is_to_be_made_anew(tmp_path: Path) -> None:
    path, calls = str(write_jsonl(tmp_path / "rows.jsonl", [{"text": "a"}])), tmp_path / "calls"
    data = load_dataset("json", data_files=path, split="train", cache_dir=str(tmp_path))

    def counted(batch: dict[str, list]) -> dict[str, list]:
        with open(calls, "a") as file:
            file.write("x")
        return encode(batch)

    for overwrite, count in ((False, 1), (False, 1), (True, 2), (False, 2)):
        map_rows(data, counted, wanted(overwrite_cache=overwrite), ["input_ids"])
        assert len(calls.read_text()) == count
