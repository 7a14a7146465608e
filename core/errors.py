"""What every module says to the user in one way: help, errors of one line, one-time warnings, nearest matches, JSON."""

from __future__ import annotations

import argparse
import difflib
import errno
import json
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from core import preemption

logger = logging.getLogger("gaudi_recipes")
CREDENTIALS = re.compile(r"(?<=:/)(/?)[^/\s?#]+@")  # who asks, in an address
_warned: set[str] = set()
_advice = {"interrupted": ""}  # what an interrupted user is told, by `if_interrupted`


class Help(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """``--help`` with the description as it is written, and a flag's default, unless its own text tells it."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        told = "(default" in (action.help or "") or action.default in (None, False)
        return action.help if told else super()._get_help_string(action)


class UserError(Exception):
    """Input that the user can mend. The message is one line: it names the flag or the file, and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


def one_line(message: str) -> str:
    """A message, whose quoted names and library messages may hold anything, as it can be shown.

    Line breaks become spaces, and other signs that do not show are written as Python does. Who asks in an address
    (``//user:password@host``) is left out, and of more than 2,000 characters the middle.
    """
    text = CREDENTIALS.sub(r"\1", " ".join(message.splitlines()))
    text = "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
    return text if len(text) <= 2000 else f"{text[:1500]} [...] {text[-450:]}"


def is_main_process() -> bool:
    """Whether this process is the one that talks, from the launcher's environment (before any process group)."""
    return int(os.environ.get("RANK") or 0) == 0


def say(message: str) -> None:
    """Print one line on rank 0, at once: a run that is killed later has still shown it."""
    if is_main_process():
        print(message, flush=True)


def warn_once(message: str) -> None:
    """Warn on rank 0, once per process and message: a request that cannot be met is said, not repeated."""
    message = CREDENTIALS.sub(r"\1", message)
    if message not in _warned and is_main_process():
        _warned.add(message)
        logger.warning(message)


def if_interrupted(advice: str) -> None:
    """Let the line about an interruption (Ctrl-C) tell what is left of the run; an empty text tells nothing."""
    _advice["interrupted"] = advice


def did_you_mean(name: str, valid: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the nearest valid name, or an empty string if none is near."""
    match = difflib.get_close_matches(name, list(valid), n=1, cutoff=0.6)
    return f" (did you mean {match[0]!r}?)" if match else ""


def json_kind(value: Any) -> str:
    """Return what JSON calls the type of ``value``, e.g. ``integer``."""
    kinds = {dict: "object", list: "array", str: "string", bool: "boolean", int: "integer", float: "number"}
    return kinds.get(type(value), "null")


def read_json_object(path: str | os.PathLike, what: str) -> dict[str, Any]:
    """Read a file that must hold one JSON object. ``what`` names it in errors, e.g. ``"--gaudi_config"``.

    Raises:
        UserError: the file is missing, a directory, too large, not UTF-8, not JSON, repeats a key, or is no object.
    """
    path = Path(path)
    if not os.path.isfile(path):  # unlike Path.is_file, false for a name that is no name
        raise UserError(f"{what}: {path} is {'a directory' if os.path.isdir(path) else 'not a file'}; give a JSON file")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise UserError(f"{what}: {path} says {key!r} twice; keep one")
            keys.add(key)
        return dict(pairs)

    def refuse(constant: str) -> None:
        raise UserError(f"{what}: {path} holds {constant}, which JSON does not have; give a number or null")

    try:
        if path.stat().st_size > 4_000_000:
            raise UserError(f"{what}: {path} has {path.stat().st_size:,} bytes; a configuration file has at most 4 MB")
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_constant=refuse)
    except OSError as error:
        raise UserError(f"{what}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{what}: {path} is not UTF-8 text ({error.reason} at byte {error.start})") from None
    except (ValueError, RecursionError) as error:  # ValueError also: an integer of thousands of digits
        raise UserError(f"{what}: {path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise UserError(f"{what}: {path} holds a JSON {json_kind(content)}; it must be an object {{...}}")
    return content


def make_folder(folder: Path, option: str) -> Path:
    """Make a folder if it is not there, and try to write to it: what a run ends with must have its place.

    Raises:
        UserError: it cannot be written to; the line names ``option``.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        reason = "is a file; give a folder" if folder.is_file() else f"cannot be written to: {error.strerror}"
        raise UserError(f"{option}: {folder} {reason}") from None
    return folder


def find_shipped(name: str, folder: Path, what: str) -> Path:
    """Return the file that ``name`` means: a path, or one that this repository ships in ``folder``.

    A shipped file is meant by its bare name (``t5``) and by ``gaudi_configs/t5.json``, from any working directory;
    a file of the user's at that path comes first.

    Raises:
        UserError: a bare name that is not shipped. A missing file is left to the reader, which names it.
    """
    path = Path(name)
    if os.path.isfile(path) or (path.suffix == ".json" and path.parent != Path(folder.name)):
        return path
    shipped = {file.stem: file for file in folder.glob("*.json")}
    stem = path.stem if path.suffix == ".json" else name
    if stem not in shipped:
        raise UserError(
            f"{what}: no configuration {name!r}{did_you_mean(stem, shipped)}; "
            f"give a JSON file or one of: {', '.join(sorted(shipped))}"
        )
    return shipped[stem]


class Unheard:
    """A text stream that drops what nobody can read: ``tee``, ``ssh`` or the terminal is gone, or the disk is full."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._try(self._stream.write, text)
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    @staticmethod
    def _try(work: Callable[..., Any], *args: Any) -> None:
        try:
            work(*args)
        except OSError as error:
            if error.errno not in (errno.EPIPE, errno.EIO, errno.ENOSPC):
                raise


def exit_with_one_line(main: Callable[[], Any], preemptible: bool = False) -> None:
    """Run ``main`` as a program: a `UserError` becomes one line on stderr and exit code 2, everything else is a bug.

    If it is ``preemptible``, SIGTERM and SIGUSR1 end it as `preemption` says, one line and exit code 75, and it goes on
    when nobody reads its output any more: the same signal, or the same end of a connection, often ends the reader.
    """
    if preemptible:
        for name in ("stdout", "stderr"):
            if not isinstance(stream := getattr(sys, name), Unheard | None):  # None: it was closed
                setattr(sys, name, Unheard(stream))
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        with preemption.listen() if preemptible else nullcontext():
            main()
            preemption.over()
    except preemption.Preempted as stop:
        with suppress(ValueError):  # not the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # it would change the exit code
        _tell("; ".join(filter(None, [stop.message, _advice["interrupted"]])), all_ranks=False)
        sys.exit(preemption.EXIT_CODE)
    except UserError as error:
        _tell(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        _tell("; ".join(filter(None, ["interrupted", _advice["interrupted"]])), all_ranks=False)
        sys.exit(130)


def _tell(message: str, all_ranks: bool = True) -> None:
    if not (all_ranks or is_main_process()):
        return  # the others were told the same, and have nothing to add
    tqdm = sys.modules.get("tqdm")
    for bar in list(getattr(getattr(tqdm, "tqdm", None), "_instances", ())):
        bar.close()  # else the line would be written behind it
    if not is_main_process():
        time.sleep(10)  # what all ranks have to say is said by rank 0, at whose end a launcher ends the others
    print(message, file=sys.stderr, flush=True)
