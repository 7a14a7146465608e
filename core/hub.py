"""Named models and data: from the hub, which is said to be out of reach within two seconds, and from files."""

from __future__ import annotations

import contextlib
import glob
import os
import threading
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from core.arguments import NO_EFFECT, flag
from core.errors import UserError, did_you_mean, say, warn_once
from core.untrusted import look_at_rows, nothing_unpickled, reason, require_own_shards

SECONDS = 1.8
# What names a model or data: a recipe without any of them builds and reads its own.
NAMED = (
    "model_name_or_path", "model_type", "config_name", "dataset_name", "train_file", "validation_file", "test_file",
    "train_dir", "validation_dir", "test_dir",
)  # fmt: skip
READERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class HubArguments:
    """Which named models and data, and where they come from."""

    _argument_group_name = "hub: models and data by name or path"
    config_name: str | None = flag(None, "configuration, if it is not the model's")
    dataset_name: str | None = flag(None, "a hub's data set or a folder (default: data that every machine has)")
    dataset_config_name: str | None = flag(None, "its configuration", aliases=["--dataset_config"])
    train_file: str | None = flag(None, "csv, json, jsonl or parquet (also txt, where rows are texts)")
    validation_file: str | None = flag(None, "csv, json, jsonl or parquet")
    test_file: str | None = flag(None, "csv, json, jsonl or parquet")
    cache_dir: str | None = flag(None, "where downloads are kept")
    model_revision: str = flag("main", "branch, tag or commit of the model")
    token: str | None = flag(None, "access token (default: the one stored by hf auth login)")
    trust_remote_code: bool = flag(False, "run code that the model's repository brings")
    low_cpu_mem_usage: bool = flag(False, f"has no effect: {NO_EFFECT['low_cpu_mem_usage']}")


@dataclass
class TokenizerArguments:
    """How texts become tokens: for recipes that read texts, beside `HubArguments`."""

    _argument_group_name = "hub: tokenizers"
    tokenizer_name: str | None = flag(None, "tokenizer, if it is not the model's")
    preprocessing_num_workers: int | None = flag(None, "processes that tokenize")
    overwrite_cache: bool = flag(False, "tokenize again although it is cached")
    use_fast_tokenizer: bool = flag(True, f"has no effect: {NO_EFFECT['use_fast_tokenizer']}")
    use_fused_rope: bool = flag(True, f"has no effect: {NO_EFFECT['use_fused_rope']}")


@dataclass
class LoraArguments:
    """Which low-rank adapters are trained, in place of the model's own weights."""

    _argument_group_name = "LoRA"
    peft_type: Literal["lora"] = flag("lora", "the kind of adapters")
    lora_rank: int | None = flag(None, "train adapters of this rank, and nothing else")
    lora_alpha: float = flag(16.0, "adapters are scaled by alpha / rank")
    lora_dropout: float = flag(0.05, "share of an adapter's input that is dropped in training")
    lora_target_modules: list[str] | None = flag(None, "the adapted layers, e.g. q_proj v_proj", nargs="+")


def lora_flags(args: Namespace) -> list[str]:
    """The flags of `LoraArguments`, but for the rank, that are not at their defaults."""
    own = [flag for flag in fields(LoraArguments) if flag.name != "lora_rank"]
    return [flag.name for flag in own if getattr(args, flag.name) != flag.default]


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

    Nothing is unpickled in the block.

    Raises:
        UserError: the block raised anything: the libraries have many kinds of errors for a name that does not exist,
            a hub that does not answer and a file that is broken.
    """
    for name in names:
        if name and name.startswith(("/", "./", "../", "~")) and not os.path.exists(name):
            raise UserError(f"{what} cannot be loaded: there is no {name}; give a folder, or a hub's name")
        if name and os.path.isdir(name):
            require_own_shards(name)
    online = go_offline_if_unreachable(*names)
    try:
        with nothing_unpickled():
            yield
    except UserError:
        raise
    except Exception as error:
        why = reason(error, *names)
        why = "it has no rows" if "corresponds to no data" in why else why  # datasets', of a csv's mere header
        hint = "" if online else "; the hub was not reachable, and it is not in the cache"
        raise UserError(f"{what} cannot be loaded: {why}{hint}") from error


def model_options(args: Namespace) -> dict[str, Any]:
    """What every ``from_pretrained`` is told: cache, revision, token, and whether the repository's code may run."""
    names = {"cache_dir": "cache_dir", "revision": "model_revision", "token": "token"}
    return {key: getattr(args, name) for key, name in names.items()} | {"trust_remote_code": args.trust_remote_code}


def load_config(args: Namespace) -> Any:
    """Load the configuration that ``args`` name, or a model type's own; None if they name neither it nor a model.

    A recipe without ``tokenizer_name`` (`TokenizerArguments`) needs no tokenizer.

    Raises:
        UserError: there is no such model type, or a model and a tokenizer do not come together.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    name, kind = args.config_name or args.model_name_or_path, args.model_type
    tokenizer, reads_text = getattr(args, "tokenizer_name", None), hasattr(args, "tokenizer_name")
    if name is None and kind is None and tokenizer:
        raise UserError("--tokenizer_name needs a model or configuration; without them a tokenizer is trained, too")
    if name is None and kind not in (None, *CONFIG_MAPPING):
        raise UserError(f"--model_type: there is no {kind!r}{did_you_mean(kind, CONFIG_MAPPING)}")
    files = ("adapter_config.json", "config.json")
    if name and [os.path.isfile(os.path.join(name, file)) for file in files] == [True, False]:
        raise UserError(f"{name} is a LoRA adapter, no whole model; name its run's folder, which ends with both merged")
    if name is None and kind and reads_text and not tokenizer:
        raise UserError("--model_type says nothing of the tokenizer: name one with --tokenizer_name")
    if name is None:
        return AutoConfig.for_model(kind) if kind else None
    return AutoConfig.from_pretrained(name, **model_options(args))


def look_back(config: Any) -> None:
    """Let the model of a configuration see the tokens before each one only, as it does in text generation.

    Raises:
        UserError: this kind of model has no such way.
    """
    if config.model_type == "xlnet":
        raise UserError("xlnet sees the tokens that it would have to foretell; take another model")
    config.update({name: True for name in ("is_decoder", "causal") if hasattr(config, name)})


def load_splits(
    args: Namespace, files: dict[str, str | None], text: dict[str, Any] | None = None, streaming: bool = False
) -> dict[str, Any]:
    """Load ``args.dataset_name``, a hub's data set or a folder, or one file per split.

    Args:
        args: with ``dataset_name``, ``dataset_config_name``, ``cache_dir`` and ``token``.
        files: path by split; None where a split has none.
        text: how .txt files are read (options of datasets' text loader); None takes none.
        streaming: read rows as they are asked for, instead of all at first.

    Returns:
        ``datasets.Dataset`` by split, or ``datasets.IterableDataset``.

    Raises:
        UserError: a file is missing, empty or broken, or the data set cannot be had.
    """
    name, options = args.dataset_name, {"cache_dir": args.cache_dir, "streaming": streaming}
    readers = READERS if text is None else READERS | {".txt": "text"}
    files = {split: path for split, path in files.items() if path}
    if name and files:
        raise UserError(f"--dataset_name {name} and --{next(iter(files))}_file exclude each other; give one")
    for split, path in files.items():
        if not os.path.isfile(path) or os.path.getsize(path) == 0:  # unlike Path.is_file, false for what is no name
            problem = "does not exist" if not os.path.exists(path) else "is no file"
            raise UserError(f"--{split}_file: {path} {'is empty' if os.path.isfile(path) else problem}")
        if Path(path).suffix not in readers:
            raise UserError(f"--{split}_file: {path} must end in {', '.join(readers)}")
    from datasets import load_dataset

    if name:
        inside = Path(name).rglob("*") if os.path.isdir(name) else ()
        for path in sorted(path for path in inside if path.suffix in readers and path.is_file()):
            look_at_rows(str(path), readers[path.suffix])
        with loading(f"--dataset_name {name}", name):
            return dict(load_dataset(name, args.dataset_config_name, token=args.token, **options))
    splits = {}
    for split, path in files.items():
        kind = readers[Path(path).suffix]
        how = options | (text if kind == "text" else {})
        with loading(f"--{split}_file: {path}"), _utf8(path, kind, at_once=streaming or kind == "json"):
            splits[split] = load_dataset(kind, data_files={split: glob.escape(path)}, **how)[split]
        if kind == "text" and not text["keep_linebreaks"]:  # the reader heeds it for rows that are lines
            splits[split] = splits[split].map(lambda row: {"text": row["text"].replace("\n", " ")})
    return splits


@contextmanager
def _utf8(path: str, kind: str, at_once: bool) -> Iterator[None]:
    """Where reading fails because the file is not UTF-8, say in which line: the libraries do not know it.

    ``at_once`` looks beforehand: JSON's reader leaves texts unchecked, and a stream fails in the midst of a training.
    """
    try:
        if at_once:
            look_at_rows(path, kind)
        yield
    except UserError:
        raise
    except Exception:
        look_at_rows(path, kind)
        raise


def _positions(model: Any) -> int | None:
    """The tokens that a row may have; None where positions are not counted."""
    table = getattr(getattr(model.base_model, "embeddings", None), "position_embeddings", None)
    unused = getattr(table, "padding_idx", None)  # models that number positions from the padding's row on
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is None or positions <= 0:
        return None
    return positions if unused is None else positions - unused - 1


def choose_length(model: Any, tokenizer: Any, asked: int | None) -> int:
    """Return how many tokens a row has: those asked for, else the tokenizer's limit.

    Where that is more than the model has positions, the model's, but not over 1,024.

    Raises:
        UserError: one is asked for.
    """
    positions, most = _positions(model) or 1024, tokenizer.model_max_length
    if asked == 1:
        raise UserError("a row of one token has nothing to foretell; give at least 2")
    if asked and asked > most:
        warn_once(f"{asked} tokens a row: the tokenizer's limit is {most}, which is used")
        return most
    return asked or (most if most <= positions else min(1024, positions))


def fit(model: Any, tokenizer: Any, longest: int) -> None:
    """Make a model of transformers and its tokenizer fit: embeddings for every token, padding, enough positions.

    A tokenizer without a padding token pads with its end token: padding bears no loss, whatever it is.

    Raises:
        UserError: the tokenizer cannot pad, or ``longest`` tokens are more than the model has positions for.
    """
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token_id is None:
        raise UserError("the tokenizer has no padding token; name one that has, with --tokenizer_name")
    tokens = max(tokenizer.get_vocab().values(), default=0) + 1  # numbers may have gaps
    had = model.get_input_embeddings().num_embeddings  # not the weight's shape, which ZeRO-3 takes away
    if tokens > had:
        model.resize_token_embeddings(tokens)
        say(f"the tokenizer has {tokens} tokens, the model had {had}: the others' embeddings are new, untrained")
    positions = _positions(model)
    if positions and longest > positions:
        raise UserError(
            f"the model has {positions} positions, the longest row may have {longest} tokens; shorten the rows"
        )
