"""What others have made: nothing in it is unpickled or run unasked, and what would end the process is found before."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from core.errors import UserError

PICKLED = "its weights are in no file of safetensors; pickled ones (.bin, .pt) can run code and are not opened here"
CODE = "it brings Python code of its own, which is not run; read it, and give --trust_remote_code if you trust it"
# How the libraries say that they found no safetensors, and in which folder.
NO_SAFETENSORS = re.compile(r"no file named (?P<name>\S+\.safetensors),? found in directory (?P<folder>.*?)\.?$")
MODEL_JSON = re.compile(r"(^|_)config\.json$|^model_index\.json$|^tokenizer\.json$|\.index\.json$")
LARGEST = 64_000_000  # bytes of a text
GREATEST = 10**18  # a number of steps, rows or targets; a sum of losses
NEITHER = re.compile(r"cannot be loaded with `safetensors`|the necessary `safetensors` weights")


class Pickled(Exception):  # noqa: N818, it is what it says
    """A file that would have to be unpickled; the message says what to do."""


@contextmanager
def nothing_unpickled() -> Iterator[None]:
    """While it lasts ``torch.load`` raises `Pickled`, whoever calls it.

    The libraries open pickled weights on several ways although they are told to take safetensors: where an index or a
    configuration names such a file, or adapters lie beside a model.
    """
    import torch

    ordinary = torch.load  # noqa: TID251 - to have nobody call it
    torch.load = _refuse  # noqa: TID251
    try:
        yield
    finally:
        torch.load = ordinary  # noqa: TID251


def _refuse(file: Any, *_: Any, **__: Any) -> Any:
    path = str(getattr(file, "name", file))
    raise Pickled(f"{PICKLED}{_convert(os.path.dirname(path))}")


def _convert(folder: str) -> str:
    """How the weights in ``folder``, if it is known, become safetensors: to be said after `PICKLED`."""
    library, kind = "transformers", ""
    try:
        config = json.loads(Path(folder, "config.json").read_text(encoding="utf-8"))
        library = "diffusers" if "_class_name" in config else library
        kind = config.get("_class_name") or (config.get("architectures") or [""])[0]
    except (OSError, ValueError, AttributeError, LookupError, TypeError, RecursionError):
        pass  # whatever it is, it is no configuration
    if not (isinstance(kind, str) and re.fullmatch(r"[A-Za-z]\w*", kind)):
        return "; where you trust it, load it with the library that wrote it and save it again with save_pretrained"
    place = json.dumps(folder, ensure_ascii=False)
    code = f"import {library} as x; x.{kind}.from_pretrained({place}).save_pretrained({place})"
    return f"; where you trust it, convert it once: python -c {shlex.quote(code)}"


def reason(error: BaseException, *names: str | None) -> str:
    """One line that says why a library could not load something: its own, unless there is more to tell.

    Args:
        names: what it was told to load; in those that are folders, files that are damaged are looked for.
    """
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    text = " ".join(" ".join(map(str, chain)).split())
    if ours := [str(one) for one in chain if isinstance(one, (Pickled, UserError))]:
        return ours[0]
    if "trust_remote_code" in text or "custom code" in text:
        return CODE
    if found := [match["folder"] for one in chain if (match := NO_SAFETENSORS.search(str(one).strip()))]:
        return f"{PICKLED}{_convert(found[0])}"
    if NEITHER.search(text):
        return f"{PICKLED}{_convert('')}"
    cause = error.__cause__ or error
    kind = f"{type(cause).__name__}: " if isinstance(cause, (LookupError, AttributeError, TypeError)) else ""
    said = f"{kind}{str(cause).strip()}" if str(cause).strip() else type(cause).__name__
    said = said.splitlines()[0][:500]
    damaged = next(filter(None, (_damaged(name) for name in names if name and os.path.isdir(name))), None)
    return damaged or said


def _damaged(folder: str) -> str | None:
    """What is wrong with a model's files: the first one that cannot be read at all."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(Path(folder).rglob("*")):
        try:
            if path.suffix == ".safetensors":
                with safe_open(path, "numpy"):
                    pass
                continue
            content = json.loads(path.read_text("utf-8")) if MODEL_JSON.search(path.name) and path.is_file() else {}
            if not isinstance(content, dict):
                return f"{path} holds no JSON object"
        except SafetensorError as error:
            return f"{path} is no sound file of safetensors: {error}"
        except (ValueError, RecursionError) as error:
            return f"{path} is not valid JSON: {error}"
        except OSError as error:
            return f"{path} cannot be read: {error.strerror or error}"
    return None


def require_own_shards(folder: str) -> None:
    """Raise a `UserError` if an index of weights in ``folder`` names files that are not in it."""
    for index in sorted(Path(folder).glob("*.index.json")):
        try:
            names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        except (OSError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
            continue  # the library says what is wrong with it, if it is read at all
        if others := [name for name in names if not isinstance(name, str) or os.path.basename(name) != name]:
            raise UserError(f"{index} names {others[0]!r:.200}, which is not in its folder; put it there")


def read_text(path: str, option: str) -> str:
    """Read a small file of UTF-8 text, with or without a byte order mark; ``option`` names it in errors.

    Raises:
        UserError: it is missing, no file, too large, or not UTF-8.
    """
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # a pipe would have to be waited for
            raise UserError(f"{option}: {path} is {'a directory' if os.path.isdir(path) else 'no file'}; give a file")
        if (size := os.path.getsize(path)) > LARGEST:
            raise UserError(f"{option}: {path} has {size:,} bytes; at most {LARGEST // 10**6} MB are read")
        return Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(f"{option}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{option}: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except ValueError as error:
        raise UserError(f"{option}: {path!r} is no file's name: {error}") from None


def look_at_rows(path: str, kind: str) -> None:
    """Look through a file of rows that is text; ``kind`` is csv, json, text or parquet.

    Raises:
        UserError: it is not UTF-8, which the libraries say without a line; or a row of JSON is null, which ends the
            process where a block of the file begins with it (in Arrow's reader, up to release 26 at least).
    """
    before = b""
    with open(path, "rb") as file:
        for number, line in enumerate(file if kind != "parquet" else (), start=1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                where = f"{path}, line {number}, byte {error.start}"
                raise UserError(f"{where}: {error.reason}: this is not UTF-8; convert the file") from None
            row = line.removeprefix(b"\xef\xbb\xbf").strip() if kind == "json" else b""
            if re.match(rb"(\[\s*)?null\b", row) and (not before or before.endswith((b"}", b"null", b"["))):
                raise UserError(f"{path}, line {number}: a row is null; give an object {{...}} in each row")
            before = row or before


def inside(folder: str, path: str) -> bool:
    """Whether a path, not looking at links, leads into a folder; both from the root on."""
    return os.path.commonpath([folder, os.path.normpath(path.replace("\\", "/"))]) == folder


def wrong_place(content: Any, form: Any, name: str = "") -> str | None:
    """Where JSON does not have the form of an example, as ``outer.inner``; None if it has it everywhere.

    Args:
        form: an object stands for one with these keys, of which those that end in ``?`` may be missing, and any others;
            a list of one entry for entries like it; 0 for an integer from 0 on and 0.0 for any number, both of a size
            that a run can have; None for anything; else its type.
    """
    if isinstance(form, dict) and isinstance(content, dict):
        there = [key for key in form if not key.endswith("?") or key[:-1] in content]
        of_keys = ((content.get(key.rstrip("?"), ...), form[key], f"{name}.{key.rstrip('?')}") for key in there)
        return next(filter(None, (wrong_place(*one) for one in of_keys)), None)
    if isinstance(form, list) and isinstance(content, list):
        of_entries = ((entry, form[0], f"{name}.{at}") for at, entry in enumerate(content))
        return next(filter(None, (wrong_place(*one) for one in of_entries)), None)
    if type(form) in (int, float):
        kinds, least = ((int,), 0) if type(form) is int else ((int, float), -GREATEST)
        fits = type(content) in kinds and least <= content <= GREATEST
    else:
        fits = form is None or type(content) is type(form)
    return None if fits else name.lstrip(".") or "all of it"
