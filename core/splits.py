"""The rows of a run: which splits it needs, what is held out, which columns, and how they become tokens."""

from __future__ import annotations

import contextlib
import math
import uuid
import zlib
from argparse import Namespace
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from core.errors import UserError, did_you_mean, say, warn_once

if TYPE_CHECKING:
    import numpy as np

PHASES = {"train": "train", "validation": "eval", "test": "predict"}  # of each split, in the names of flags and metrics


def hold_out(rows: Any, percent: float) -> tuple[Any, Any]:
    """Part rows in (training, validation): the first ``percent`` of 100; in a stream, those that a hash chooses.

    A stream may be read in another order the next time; a row must not change sides for that.
    """
    if hasattr(rows, "select"):
        held = math.ceil(len(rows) * percent / 100)
        if held >= len(rows):
            raise UserError(
                f"of {len(rows)} rows none would be left to train on: give --validation_file"
                " (blank lines part the rows of a txt file; with --line_by_line every line is one)"
            )
        return rows.select(range(held, len(rows))), rows.select(range(held))

    def is_held(row: dict[str, Any]) -> bool:
        return zlib.crc32(repr(sorted(row.items())).encode()) % 10_000 < 100 * percent

    return rows.filter(lambda row: not is_held(row)), rows.filter(is_held)


def add_validation(found: dict[str, Any], args: Namespace) -> None:
    """Hold ``--validation_split_percentage`` of the training rows out, if validation rows are needed and missing."""
    if args.validation_split_percentage >= 100:
        raise UserError("--validation_split_percentage must be below 100: the others are trained on")
    needed = args.do_eval or args.eval_strategy != "no"
    if needed and "train" in found and "validation" not in found and args.validation_split_percentage:
        found["train"], found["validation"] = hold_out(found["train"], args.validation_split_percentage)


def hold_out_validation(found: dict[str, Any], args: Namespace, column: str | None = None) -> None:
    """Hold ``--train_val_split`` of the training rows out, drawn by ``--seed``, if there is no validation split.

    Whether they are evaluated or not: with the same seed they are the same rows on every rank, and in a later run that
    evaluates them. Both parts keep the rows' order.

    Args:
        found: ``datasets.Dataset`` by split; the two splits are put into it.
        args: with ``train_val_split``, from 0 (none is held out) and below 1, and ``seed``.
        column: of labels (`core.labels`): the share is drawn from every class, within one row, and each class keeps a
            row to be trained on. Without it all rows are of one class.

    Raises:
        UserError: the share is none, or rows are to be evaluated and none can be held out.
    """
    import numpy as np

    from core.labels import read_labels

    if not 0 <= args.train_val_split < 1:
        raise UserError(f"--train_val_split must be at least 0 and below 1, not {args.train_val_split}")
    if "train" not in found or "validation" in found or not args.train_val_split:
        return
    rows, count = found["train"], len(found["train"])
    classes = read_labels(rows, column)[0] if column else np.zeros(count, dtype=int)
    order = np.random.RandomState(args.seed).permutation(count)  # its stream is the same in every version of NumPy
    order = order[np.argsort(classes[order], kind="stable")]
    held = math.ceil(args.train_val_split * count)
    is_held = np.zeros(count, dtype=bool)
    is_held[order[np.arange(held) * count // max(held, 1)]] = True  # every so many: of each class its share
    names, first = np.unique(classes[order], return_index=True)
    is_held[order[first[~np.isin(names, classes[~is_held])]]] = False
    if not is_held.any() and not (args.do_eval or args.eval_strategy != "no"):
        return
    if not is_held.any():
        kept = f"of {count} training rows none can be held out: each class keeps one"
        raise UserError(f"{kept}; give {_sources('validation', args)}")
    say(f"--train_val_split {args.train_val_split}: {is_held.sum():,} of {count:,} training rows are held out")
    found["train"], found["validation"] = rows.select(np.flatnonzero(~is_held)), rows.select(np.flatnonzero(is_held))


def _sources(split: str, args: Namespace) -> str:
    """The flags that name a split's data: not every recipe reads folders."""
    return f"--{split}_file" + (f" or --{split}_dir" if hasattr(args, f"{split}_dir") else "")


def needed_splits(args: Namespace, splits: dict[str, Any]) -> dict[str, str]:
    """Which splits the flags ask for, each with its phase: to train on, to evaluate (also on the way), to test.

    Raises:
        UserError: one of them is not there.
    """
    needed = {}
    for split, phase in PHASES.items():
        if getattr(args, f"do_{phase}") or (phase == "eval" and args.do_train and args.eval_strategy != "no"):
            if split not in splits:
                raise UserError(
                    f"--do_{phase} needs a {split} split: give {_sources(split, args)}, or a data set that has one"
                )
            needed[split] = phase
    return needed


def columns_of(rows: Any) -> list[str]:
    """The names of the columns; a stream may have to read its first row for them.

    Raises:
        UserError: that row cannot be read, or there is none.
    """
    try:
        names = rows.column_names or list(next(iter(rows), {}))
    except Exception as error:  # whatever reads the stream has its own
        raise UserError(f"the first row of the stream cannot be read: {error}") from error
    if not names:
        raise UserError("the stream has no rows")
    return names


def text_column(rows: Any, asked: str | None) -> str:
    """Return the column that is asked for, else ``text``, else the first.

    Raises:
        UserError: there is no such column, or it holds no text.
    """
    names = columns_of(rows)
    if asked and asked not in names:
        hint, have = did_you_mean(asked, names), ", ".join(names)
        raise UserError(f"--text_column: no column {asked!r}{hint}; there are: {have}")
    name = asked or ("text" if "text" in names else names[0])
    if name == names[0] != "text" and not asked and len(names) > 1:
        warn_once(f"no column is called text: {name!r} is read, of {', '.join(names)}; --text_column names another")
    kind = (rows.features or {}).get(name)  # a stream may not know
    if kind is not None and getattr(kind, "dtype", None) not in ("string", "large_string", "null"):
        raise UserError(f"--text_column: {name!r} holds {kind}, not text; there are: {', '.join(names)}")
    return name


def token_column(rows: Any, vocabulary: int) -> Any:
    """Return rows of ``input_ids`` alone, which somebody else has made.

    Args:
        vocabulary: token numbers must be below it; those of a stream are looked at as they are read.

    Raises:
        UserError: they are not, or no lists of integers; of a stream, when it is read.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    if hasattr(rows, "data"):
        column = rows.data.column("input_ids")
        kinds = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
        lists = any(is_kind(column.type) for is_kind in kinds)
        if not (lists and pa.types.is_integer(column.type.value_type)):
            raise UserError(f"input_ids holds {column.type}, not lists of token numbers; name the column of the texts")
        require_known(*pc.min_max(pc.list_flatten(column)).as_py().values(), vocabulary)
    if others := set(columns_of(rows)) - {"input_ids"}:
        warn_once(
            f"input_ids alone is taken; not used: {', '.join(sorted(others))} (--text_column reads texts instead)"
        )
    rows = rows.select_columns(["input_ids"])
    if hasattr(rows, "data"):
        return rows

    def look(row: dict[str, Any]) -> dict[str, Any]:
        ids = row["input_ids"] or [0]
        require_known(min(ids), max(ids), vocabulary)
        return row

    return rows.map(look)


def require_known(least: int | None, most: int | None, vocabulary: int) -> None:
    """Raise a `UserError` if the least or greatest of token numbers (None: there is none) has no embedding."""
    if (least or 0) < 0:
        raise UserError(f"input_ids has the token {least}; token numbers begin at 0")
    if (most or 0) >= vocabulary:
        raise UserError(f"input_ids has the token {most}, the vocabulary ends at {vocabulary - 1}; name its tokenizer")


def token_lengths(rows: Any, columns: Sequence[str]) -> np.ndarray:
    """How many tokens each row has in each of the columns, as Arrow counts them: int32 of shape (rows, columns).

    No token is read. A list that is null has none.

    Args:
        rows: ``datasets.Dataset``.
    """
    import numpy as np

    of_table = [np.concatenate([sizes for sizes, _ in _lists(rows, name)]) for name in columns]
    return _chosen(rows, np.stack(of_table, axis=1))


def _has_target(rows: Any, column: str, length: int) -> np.ndarray:
    """Whether a row has a label >= 0 among the first ``length``, the very first left aside: bool of shape (rows,)."""
    import numpy as np

    of_table = []
    for sizes, chunk in _lists(rows, column):
        ends = np.cumsum(sizes, dtype=np.int64)
        starts = ends - sizes
        ends = starts + np.minimum(sizes, length)
        labels = chunk.flatten().to_numpy(zero_copy_only=False)  # without null lists, and what a slice leaves out
        before = np.cumsum(np.append(False, labels >= 0))
        of_table.append(before[ends] > before[np.minimum(starts + 1, ends)])
    return _chosen(rows, np.concatenate(of_table))


def _lists(rows: Any, column: str) -> Iterator[tuple[np.ndarray, Any]]:
    """The chunks of a column of the table behind rows, one at least, each with the int32 sizes of its lists."""
    import pyarrow as pa
    import pyarrow.compute as pc

    whole = rows.data.column(column)
    for chunk in whole.chunks or [pa.array([], whole.type)]:
        sizes = pc.fill_null(pc.list_value_length(chunk), 0)
        yield sizes.to_numpy(zero_copy_only=False).astype("int32", copy=False), chunk


def _chosen(rows: Any, of_table: np.ndarray) -> np.ndarray:
    """What is known of the table's rows, for rows that are selected or shuffled: those, in their order."""
    return of_table if rows._indices is None else of_table[rows._indices.column(0).to_numpy()]


def whole_rows(documents: Any, length: int, limit: int | None, split: str) -> tuple[Any, np.ndarray]:
    """Return the documents that have something to foretell, each a row, and their lengths: at most ``length``.

    Lengths are int32 of shape (rows, 1).

    Args:
        documents: with ``input_ids``, numbers from 0 on, and, if they differ from these, ``labels``.
        limit: the first N rows only.

    Raises:
        UserError: there are none.
    """
    import numpy as np

    lengths = np.minimum(token_lengths(documents, ["input_ids"]), length)
    has_target = _has_target(documents, "labels", length) if "labels" in documents.column_names else lengths[:, 0] > 1
    rows = documents
    if not has_target.all():
        missing = f"{np.sum(~has_target):,} of {len(documents):,} {split} rows have nothing to foretell"
        warn_once(f"{missing}: they are empty, or a prompt fills them; they are left out")
        rows, lengths = documents.select(np.flatnonzero(has_target)), lengths[has_target]
    if limit and limit < len(rows):
        rows, lengths = rows.select(range(limit)), lengths[:limit]
    if not len(rows):
        raise UserError(f"the {split} split has no rows")
    say(f"{split}: {lengths.sum():,} tokens in {len(rows):,} rows of at most {length}")
    return rows, lengths


def map_rows(rows: Any, encode: Any, args: Namespace, columns: Sequence[str]) -> Any:
    """``rows.map(encode)`` in batches, in place of all columns; once per machine, where the rows are in files.

    The first of a machine's processes that comes works, the others find its file in the cache. No collective waits
    meanwhile, so it may take as long as it takes. All ranks call it.

    Args:
        rows: ``datasets.Dataset``; of an ``IterableDataset``, rows are encoded as they are read.
        encode: from a batch of columns to one of new columns; what it refers to is part of the cache's key.
        args: with ``preprocessing_num_workers`` and ``overwrite_cache``.
        columns: the new ones, of token numbers each: rows that have none would not tell their type.
    """
    from datasets import Features, List, Value

    from core.distributed import on_main, once_per_machine

    features = Features({name: List(Value("int32")) for name in columns})
    if not hasattr(rows, "cache_files"):
        return rows.map(encode, batched=True, remove_columns=columns_of(rows), features=features)
    # "Anew" is another key for all ranks: a rank that came first would else go on with what was there.
    key = on_main(lambda: uuid.uuid4().hex[:16]) if args.overwrite_cache else None
    try:
        with once_per_machine() if rows.cache_files else contextlib.nullcontext():
            return rows.map(
                encode,
                batched=True,
                remove_columns=rows.column_names,
                features=features,
                num_proc=args.preprocessing_num_workers,
                new_fingerprint=key,
                desc="tokenize",
            )
    except UnicodeDecodeError as error:  # files of a folder, which nobody has looked at
        raise UserError(f"a text of the data set is not UTF-8 ({error}); convert its files") from None
