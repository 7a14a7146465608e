"""Files that are whole or absent, and what a run does without one that it cannot write."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from core.errors import UserError, warn_once


def write_file(path: str | Path, content: bytes, option: str = "--output_dir") -> None:
    """Write a file so that a reader, or a crash, sees the old one or the new one, never a part.

    Raises:
        UserError: the file cannot be written; the line names ``option``, which says where it is.
    """
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise not_written(path, error, option) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def write_json(path: str | Path, content: Mapping) -> None:
    """Write one JSON object, whole or not at all, see `write_file`."""
    write_file(path, (json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n").encode())


def share(folder: Path, files: Iterable[Path]) -> None:
    """Give files the mode that any new one has in ``folder``: safetensors makes its own for their owner alone.

    Raises:
        OSError: there is no room for a file, or it cannot be changed.
    """
    probe = folder / f".mode-{os.getpid()}"
    probe.touch()  # to ask for the umask, it would have to be set: for all threads
    mode = probe.stat().st_mode & 0o777
    probe.unlink()
    for path in files:
        path.chmod(mode)


@contextmanager
def model_files(folder: Path) -> Iterator[None]:
    """Write a model: all its files, which others may read as `share` says, or none that is new in ``folder``."""
    before = set(folder.glob("*"))
    try:
        yield
        share(folder, folder.glob("*model*.safetensors"))
    except BaseException:
        for path in filter(Path.is_file, set(folder.glob("*")) - before):
            with suppress(OSError):
                path.unlink()
        raise


def not_written(path: Path, error: OSError, option: str) -> UserError:
    """The error of a file that cannot be written; ``option`` says where it is."""
    return UserError(f"{path} cannot be written: {error.strerror or error}; make room or give another {option}")


@contextmanager
def by_product(on_save_error: str) -> Iterator[None]:
    """Write what a run can do without: with ``--on_save_error continue`` a `UserError` is a warning, and it goes on.

    Raises:
        UserError: that one, and how to go on, with ``--on_save_error stop``.
    """
    try:
        yield
    except UserError as error:
        if on_save_error != "continue":
            raise UserError(f"{error}, or --on_save_error continue") from None
        warn_once(f"{error}; the run goes on without it")
