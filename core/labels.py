"""Classes by name: which there are, each row's number among them, and which output of a model stands for which.

Two data sets, or a data set and a checkpoint, may number the same classes differently, and nothing would show it but a
low score. So a class is known by its name everywhere; its number is its place among the model's outputs.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from core.errors import UserError, did_you_mean, read_json_object, say, warn_once

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from datasets import Dataset

LABELS, IMAGES = "--label_column_name", "--image_column_name"
UNLABELLED = -100  # what losses leave out


def label_column(rows: Dataset, asked: str | None, default: str = "label") -> str:
    """Return the column that is asked for, else the one called ``default``, else the only one of named classes.

    Raises:
        UserError: there is none, or several could be meant.
    """
    return _column(rows, asked, default, "ClassLabel", LABELS)


def image_column(rows: Dataset, asked: str | None, default: str = "image") -> str:
    """Return the column that is asked for, else the one called ``default``, else the only one of images.

    Raises:
        UserError: there is none, several could be meant, or it holds no images: `datasets.Image`, paths, or files'
            bytes (alone, or with their path).
    """
    name = _column(rows, asked, default, "Image", IMAGES)
    feature = rows.features[name]
    kind = str(getattr(feature, "dtype", None) or feature)
    parts = isinstance(feature, dict) and feature and feature.keys() <= {"bytes", "path"}
    if type(feature).__name__ != "Image" and kind.removeprefix("large_") not in ("string", "binary") and not parts:
        raise UserError(f"{IMAGES}: {name!r} holds {kind}, not images; there are: {', '.join(rows.column_names)}")
    return name


def _column(rows: Dataset, asked: str | None, default: str, kind: str, option: str) -> str:
    names, wanted = rows.column_names, asked or default
    if wanted in names:
        return wanted
    fitting = [name for name in names if type(rows.features[name]).__name__ == kind]
    if not asked and len(fitting) == 1:
        say(f"no column is called {default}: {fitting[0]!r} is taken, the only one of kind {kind}")
        return fitting[0]
    raise UserError(f"{option}: no column {wanted!r}{did_you_mean(wanted, names)}; there are: {', '.join(names)}")


def label_names(rows: Dataset, column: str, option: str = LABELS) -> list[str]:
    """Return the names of the classes of a column, all different.

    They are those of a `datasets.ClassLabel` in its order; else the distinct values as text: texts sorted, numbers by
    size. For names that a split shares with those held out of it, take them before it is parted.

    Raises:
        UserError: a row has no label, or something else than one text or whole number.
    """
    feature = rows.features[column]
    if names := getattr(feature, "names", None):
        return list(names)
    numbers, values = read_labels(rows, column, option)
    if (numbers < 0).any():
        raise UserError(f"{option}: {_unknown(numbers, column)}; mend the data, or leave such rows out")
    if not values:
        raise UserError(f"{option}: there are no rows, so {column!r} names no classes")
    return [str(value) for value in sorted(values)]


def label_numbers(rows: Dataset, column: str, names: list[str], split: str, option: str = LABELS) -> np.ndarray:
    """Return each row's class as its place in ``names``, int64 (rows,): by name, whatever the split's own order is.

    Where no row has a label (a test split's are often kept back: -1 in a `datasets.ClassLabel`, else nothing, or no
    such column at all), all are ``UNLABELLED``.

    Args:
        names: the classes, all different, as the model's outputs have them.
        split: what errors call the rows; ``option`` is the flag that says where their labels are.

    Raises:
        UserError: some rows have no label, or have one that ``names`` lack.
    """
    import numpy as np

    where, absent = f"{option}: the {split} split", column not in rows.column_names
    numbers, values = (np.full(len(rows), -1), []) if absent else read_labels(rows, column, where)
    if (numbers < 0).all():
        return np.full(len(rows), UNLABELLED)
    if (numbers < 0).any():
        raise UserError(f"{where}: {_unknown(numbers, column)}; mend the data, or leave such rows out")
    places = {name: place for place, name in enumerate(names)}
    found = np.array([places.get(str(value), -1) for value in values])[numbers]
    if (missing := found < 0).any():
        others = [repr(str(values[number])) for number in np.unique(numbers[missing])]
        listed = ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")
        raise UserError(
            f"{where}: {missing.sum():,} rows (first: row {missing.argmax() + 1}) are of classes that are not among "
            f"the model's {len(names)}: {listed}; mend the data, or train on these classes too"
        )
    return found


def _unknown(numbers: np.ndarray, column: str) -> str:
    missing = numbers < 0
    return f"{missing.sum():,} of {len(numbers):,} rows lack a label in {column!r} (first: row {missing.argmax() + 1})"


def read_labels(rows: Dataset, column: str, where: str = LABELS) -> tuple[np.ndarray, list[Any]]:
    """Return each row's place among the distinct values of a column (-1: none), int64 (rows,), and these values.

    Raises:
        UserError: they are neither texts nor whole numbers. It begins with ``where``.
    """
    import numpy as np
    import pyarrow as pa
    import pyarrow.compute as pc

    data = rows.data.column(column).combine_chunks()
    if rows._indices is not None:  # of chosen rows; by way of the library a million of them take six seconds
        data = data.take(rows._indices.column(0).combine_chunks())
    if data.null_count == len(data):
        return np.full(len(data), -1), []
    if (names := getattr(rows.features[column], "names", None)) is not None:
        numbers = pc.fill_null(data, -1).to_numpy(zero_copy_only=False)
        if (wrong := (numbers < -1) | (numbers >= len(names))).any():
            first = int(wrong.argmax())
            raise UserError(
                f"{where}: row {first + 1} has label {numbers[first]}, but {column!r} has {len(names)} classes"
            )
        return numbers, names
    kind = data.type
    text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (text or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        hole = pc.index(data.is_null(), True).as_py()  # for one, a reader of csv takes whole numbers for others
        row = max(hole, 0)
        raise UserError(
            f"{where}: {column!r} holds {kind} (row {row + 1}: {str(data[row])[:40]}), not one text or whole number a "
            "row; mend the data, or name another column"
        )
    if text:
        data = pc.utf8_trim_whitespace(data)
        data = pc.if_else(pc.equal(data, ""), None, data)
    encoded = data.dictionary_encode()
    numbers = pc.fill_null(pc.cast(encoded.indices, "int64"), -1).to_numpy(zero_copy_only=False)
    return numbers, encoded.dictionary.to_pylist()


def choose_classes(
    config_names: Mapping[int, str] | None, data_names: list[str] | None, training: bool
) -> tuple[list[str], bool]:
    """Decide which class each output of the model stands for, and whether a checkpoint's classifier can be kept.

    The checkpoint's own names decide wherever it has some, but not when it is trained on other classes. Some
    checkpoints give two classes one name (a crane may be a bird, or a machine that lifts). Where the data have
    as many classes, and the same at each place but for such names, they are matched by place, and the data's names are
    taken; else all but the first are numbered: "crane", "crane (2)".

    Args:
        config_names: the checkpoint's classes by output; None if it has no classifier. ``LABEL_0`` and so on are no
            names: transformers makes them up, even for a checkpoint without a classifier, which only loading shows.
        data_names: classes of the training rows, or of those to evaluate; None if they have none.
        training: whether the model is trained on these classes before it is used.

    Returns:
        The class of each output, and whether the checkpoint's classifier has just these outputs.

    Raises:
        UserError: nobody names a class, training rows are all of one, or the checkpoint's are not numbered from 0.
    """
    own = None if config_names is None else [str(config_names[number]) for number in sorted(config_names)]
    if config_names and sorted(config_names) != list(range(len(config_names))):
        raise UserError(f"the model's id2label numbers its {len(own)} classes otherwise than 0 to {len(own) - 1}")
    if training and data_names is not None and len(data_names) < 2:
        raise UserError(f"{LABELS}: the data have one class, {data_names[0]!r}; there is nothing to tell it from")
    named = bool(own) and own != [f"LABEL_{number}" for number in range(len(own))]
    if data_names is None:
        if training or not own:
            ask = f" to train on; give {LABELS}" if training else ", nor does a model; give --model_name_or_path"
            raise UserError(f"the data name no classes{ask}")
        return _different(own), True
    if named and _match_by_place(own, data_names):
        return list(data_names), True
    if named and (not training or set(_different(own)) == set(data_names)):
        return _different(own), True
    if not named and own and len(own) == len(data_names):
        say(f"the model's classes have no names; they are taken to be, in this order: {', '.join(data_names[:10])}")
        return list(data_names), True
    if not training:
        have = f"{len(own)} classes without names" if own else "none"
        warn_once(
            f"the data have {len(data_names)} classes, the model {have}: its classifier is new and untrained, and its "
            "figures are those of chance"
        )
    return list(data_names), False


def load_classifier(kind: Any, name: str, config: Any, new_head: bool, **options: Any) -> Any:
    """Load a model whose configuration names the classes; its head is new where the checkpoint's has others.

    Args:
        kind: has ``from_pretrained``, e.g. ``AutoModelForImageClassification``.
        new_head: whether a head of another number of classes gives way.

    Raises:
        UserError: it does not give way, but would have to.
    """
    how = {"ignore_mismatched_sizes": True, "output_loading_info": True}
    model, info = kind.from_pretrained(name, config=config, **how, **options)
    others = {key: (list(there), list(here)) for key, there, here in info["mismatched_keys"]}
    if others and not new_head:
        key, (there, here) = min(others.items())
        raise UserError(
            f"{name} was trained on other classes than these {config.num_labels} ({key} is {there}, not {here}); "
            "--ignore_mismatched_sizes gives it a new head"
        )
    if new := sorted({*info["missing_keys"], *others}):
        say(f"new, untrained weights: {', '.join(new)}")
    return model


def require_same_classes(checkpoint: Path | None, config: Any) -> None:
    """Raise a `UserError` if a checkpoint to go on from (None: there is none) has its classes otherwise."""
    if checkpoint is None:
        return
    then = read_json_object(checkpoint / "config.json", "--resume_from_checkpoint").get("id2label")
    then = then if isinstance(then, dict) else {}
    for number, name in config.id2label.items():
        if then.get(str(number), name) != name:
            was = then[str(number)]
            raise UserError(f"{checkpoint} was trained with class {number} {was!r}, not {name!r}: resume with its data")


def _match_by_place(own: list[str], data: list[str]) -> bool:
    counts = Counter(own)
    told = [a == b for a, b in zip(own, data, strict=False) if counts[a] == 1]
    return len(own) == len(data) and bool(told) and all(told)


def _different(names: list[str]) -> list[str]:
    found: dict[str, None] = {}  # a set that keeps its order
    for name in names:
        again = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
        found[next(one for one in again if one not in found)] = None
    return list(found)
