"""Run files (``--config``): the flags of a published figure, with what was published and its caveats."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from core.errors import UserError, did_you_mean, json_kind, read_json_object

RUN_FILE_KEYS = {"description": str, "command": str, "args": dict, "published": list, "caveats": list}


def read_run_file(path: str | Path | None) -> dict[str, Any]:
    """Read a run file: ``{"description", "command", "args": {flag: value}, "published": [...], "caveats": [...]}``.

    Keys that it does not have, and without a path all of them, are empty.

    Raises:
        UserError: no such file, no JSON object, an unknown key, or a value of another kind than `RUN_FILE_KEYS` says.
    """
    content = {} if path is None else read_json_object(path, "--config")
    for key, value in content.items():
        if key not in RUN_FILE_KEYS:
            raise UserError(f"--config: {path}: unknown key {key!r}{did_you_mean(key, RUN_FILE_KEYS)}")
        if not isinstance(value, RUN_FILE_KEYS[key]):
            raise UserError(f"--config: {path}: {key!r} must be a JSON {json_kind(RUN_FILE_KEYS[key]())}")
    return {key: kind() for key, kind in RUN_FILE_KEYS.items()} | content


def require_values(tokens: Iterable[str]) -> list[str]:
    """Refuse ``--flag=--``, of which argparse (before Python 3.13) makes no value at all."""
    tokens = list(tokens)
    for token in tokens:
        if token.partition("=")[2] == "--":
            raise UserError(f"{token.partition('=')[0]}: expected a value, not '--'")
    return tokens


def run_file_flags(arguments: dict[str, Any]) -> list[str]:
    """Turn a run file's ``args`` into flags, so that one parser checks both; nothing may pass as a second flag."""
    tokens: list[str] = []
    for name, value in arguments.items():
        if not re.fullmatch(r"\w[\w-]*", name) or name in ("config", "help"):
            raise UserError(f"{name!r} is no flag that a run file can set")
        words = [str(v) for v in value] if isinstance(value, list) else []
        if isinstance(value, dict) or any(re.match(r"-\D|[\[{]", word) for word in words):
            shown = "what it holds" if "token" in name else repr(value)  # it is said to everybody who reads the log
            raise UserError(f"--{name}: {shown} is no value of a flag; give text, a number, true, false or null")
        if value is not None:
            tokens += [f"--{name}", *words] if isinstance(value, list) else [f"--{name}={value}"]
    return require_values(tokens)
