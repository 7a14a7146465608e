"""Named models and data: from the hub, which is said to be out of reach within two seconds, and from files."""

from __future__ import annotations

import contextlib
import glob
import os
import threading
import uuid
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from core.arguments import flag
from core.errors import UserError, warn_once

SECONDS = 1.8
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class HubArguments:
    """Where named models and data come from."""

    _argument_group_name = "hub"
    cache_dir: str | None = flag(None, "where downloads are kept")
    model_revision: str = flag("main", "branch, tag or commit of the model")
    token: str | None = flag(None, "access token (default: the one stored by hf auth login)")
    trust_remote_code: bool = flag(False, "run code that the model's repository brings")


def is_local(name: str | None) -> bool:
    """Whether ``name`` is a path on this machine (or None), so that no hub is needed for it."""
    return name is None or os.path.exists(name)


def go_offline_if_unreachable(*names: str | None) -> bool:
    """Look for the hub if one of ``names`` needs it; without an answer, switch the libraries to their caches.

    Returns:
        True if the libraries may use the network (or none of the names needs it).
    """
    if all(is_local(name) for name in names):
        return True
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answered = threading.Event()

    def probe() -> None:
        with contextlib.suppress(Exception):  # whichever client the hub's library brings has its own kinds
            session.head(constants.ENDPOINT, timeout=SECONDS)
            answered.set()

    # In a thread: a name server that drops packets blocks the look-up itself, which no client's timeout covers.
    session = get_session()  # here, so that a slow import is not taken for a hub that does not answer
    thread = threading.Thread(target=probe, daemon=True)
    thread.start()
    thread.join(SECONDS)
    if answered.is_set():
        return True
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_EVALUATE_OFFLINE"] = "1"
    constants.HF_HUB_OFFLINE = True  # read at import, which has happened
    warn_once(f"{constants.ENDPOINT} does not answer within {SECONDS} s: only cached models and data sets are found")
    return False


@contextmanager
def loading(what: str, *names: str | None) -> Iterator[None]:
    """Look for the hub if one of ``names`` needs it; what goes wrong in the block becomes one line about ``what``.

    Raises:
        UserError: the block raised anything: the libraries have many kinds of errors for a name that does not exist,
            a hub that does not answer and a file that is broken.
    """
    online = go_offline_if_unreachable(*names)
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        reason = (str(error.__cause__ or error).strip() or type(error).__name__).splitlines()[0]
        hint = "" if online else "; the hub was not reachable, and it is not in the cache"
        raise UserError(f"{what} cannot be loaded: {reason}{hint}") from error


def model_options(args: Namespace) -> dict[str, Any]:
    """What every ``from_pretrained`` is told: cache, revision, token, and whether the repository's code may run."""
    names = {"cache_dir": "cache_dir", "revision": "model_revision", "token": "token"}
    return {key: getattr(args, name) for key, name in names.items()} | {"trust_remote_code": args.trust_remote_code}


def load_splits(args: Namespace, files: dict[str, str | None]) -> dict[str, Any]:
    """Load ``args.dataset_name``, a hub's data set or a folder, or one file per split.

    Args:
        args: with ``dataset_name``, ``dataset_config_name``, ``cache_dir`` and ``token``.
        files: path by split; None where a split has none.

    Returns:
        ``datasets.Dataset`` by split.

    Raises:
        UserError: a file is missing, empty or broken, or the data set cannot be had.
    """
    name, cache = args.dataset_name, args.cache_dir
    files = {split: path for split, path in files.items() if path}
    if name and files:
        raise UserError(f"--dataset_name {name} and --{next(iter(files))}_file exclude each other; give one")
    for split, path in files.items():
        if not Path(path).is_file() or Path(path).stat().st_size == 0:
            raise UserError(f"--{split}_file: {path} {'is empty' if Path(path).is_file() else 'does not exist'}")
        if Path(path).suffix not in READERS:
            raise UserError(f"--{split}_file: {path} must end in {', '.join(READERS)}")
    from datasets import load_dataset

    if name:
        with loading(f"--dataset_name {name}", name):
            return dict(load_dataset(name, args.dataset_config_name, cache_dir=cache, token=args.token))
    splits = {}
    for split, path in files.items():
        with loading(f"--{split}_file: {path}"):
            splits[split] = load_dataset(
                READERS[Path(path).suffix], data_files={split: glob.escape(path)}, cache_dir=cache
            )[split]
    return splits


def map_rows(rows: Any, encode: Any, args: Namespace) -> Any:
    """``rows.map(encode)`` in batches, in place of all columns; once per machine, where the rows are in files.

    The first of a machine's processes that comes works, the others find its file in the cache. No collective waits
    meanwhile, so it may take as long as it takes. All ranks call it.

    Args:
        rows: ``datasets.Dataset``.
        encode: from a batch of columns to one of new columns; what it refers to is part of the cache's key.
        args: with ``preprocessing_num_workers`` and ``overwrite_cache``.
    """
    from core.distributed import on_main, once_per_machine

    # "Anew" is another key for all ranks: a rank that came first would else go on with what was there.
    key = on_main(lambda: uuid.uuid4().hex[:16]) if args.overwrite_cache else None
    with once_per_machine() if rows.cache_files else contextlib.nullcontext():
        return rows.map(
            encode,
            batched=True,
            remove_columns=rows.column_names,
            num_proc=args.preprocessing_num_workers,
            new_fingerprint=key,
            desc="tokenize",
        )


def fit(model: Any, tokenizer: Any, longest: int) -> None:
    """Make a model of transformers and its tokenizer fit: embeddings for every token, padding, enough positions.

    Raises:
        UserError: the tokenizer cannot pad, or ``longest`` tokens are more than the model has positions for.
    """
    if tokenizer.pad_token_id is None:
        raise UserError("the tokenizer has no padding token; name one that has, with --tokenizer_name")
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:  # not the weight's shape, which ZeRO-3 takes away
        model.resize_token_embeddings(len(tokenizer))
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions and longest > positions:
        raise UserError(
            f"the model has {positions} positions, the longest row may have {longest} tokens; shorten the rows"
        )
