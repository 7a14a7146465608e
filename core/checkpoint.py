"""Checkpoint folders that are complete or absent; `core.state` fills them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from core import distributed
from core.errors import UserError, if_interrupted, is_main_process, read_json_object, say, warn_once
from core.files import share
from core.results import AUTO, GO_ON

FORMAT = 1
MARKER = "checkpoint.json"  # written last; holds size and sha256 of every other file
NAME = re.compile(r"checkpoint-(\d+)")
TROUBLE = (OSError, SafetensorError, UserError)
UNWRITTEN = "{} cannot be written: {{}}; earlier checkpoints are as they were"


def check(args: Namespace) -> None:
    """Raise a `UserError` if the best checkpoint is asked for, and it may be one that is never saved."""
    same = args.eval_strategy == args.save_strategy != "no"
    fits = args.eval_strategy == "epoch" or args.save_steps % (args.eval_steps or args.logging_steps) == 0
    if args.load_best_model_at_end and not (same and fits):
        raise UserError(
            "--load_best_model_at_end needs one --eval_strategy and --save_strategy, saving where it evaluates"
        )


class OnMain:
    """Calls functions on rank 0, and none after one that failed, so that the ranks can go on gathering together.

    `core.background` has one that puts off what is said to be for ``later``.
    """

    puts_off = False

    def __init__(self) -> None:
        self.failure: Exception | None = None

    def __call__(self, work: Callable[..., Any], *args: Any, **options: Any) -> None:
        if is_main_process() and self.failure is None:
            try:
                work(*args, **options)
            except TROUBLE as error:
                self.failure = error
            except Exception as error:  # libraries in Rust, as tokenizers is, raise nothing better
                if "(os error " not in str(error):
                    raise
                self.failure = OSError(str(error))

    def later(self, work: Callable[..., Any], *args: Any, **options: Any) -> None:
        """Call a function that reads, beside its arguments, nothing that training changes."""
        self(work, *args, **options)

    def copy(self, tensor: torch.Tensor, at_once: bool = False) -> torch.Tensor:
        """A tensor on the host, with storage of its own, for what is called later.

        ``at_once``: it may change before the next step, as a buffer does in a forward pass.
        """
        return tensor.detach().cpu().contiguous().clone()

    def reason(self, message: str = "{}") -> str:
        """Why a call has failed, in ``message``, on all ranks; empty if none has. A bug is raised as it is."""

        def tell() -> str:
            if self.failure is not None and not isinstance(self.failure, TROUBLE):
                raise self.failure
            return message.format(self.failure) if self.failure else ""

        return distributed.on_main(tell)

    def agree(self, message: str = "{}") -> None:
        """Raise a `UserError` on all ranks if a call has failed; ``message`` has a place for the reason."""
        if reason := self.reason(message):
            raise UserError(reason) from self.failure


def begin(main: OnMain, output_dir: Path, step: int, write: Callable[[OnMain, Path], None]) -> Path:
    """Begin ``checkpoint-<step>``: make a temporary folder on the same file system, and let all ranks fill it.

    Args:
        output_dir: the run's folder.
        step: optimiser steps done.
        write: is called on all ranks, which gather what they share out; writes files through ``main``, into the folder
            that it is given.

    Returns:
        The temporary folder, for `complete`.
    """
    temporary = output_dir / f".checkpoint-{step}.tmp"
    try:
        main(_begin, output_dir, temporary)
        write(main, temporary)
    except BaseException:
        if is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return temporary


def complete(main: OnMain, temporary: Path, step: int) -> None:
    """Make the temporary folder a checkpoint: checksums and marker last, fsync, then one rename. On rank 0.

    A checkpoint of the same step is replaced. If anything has failed, the folder is removed, ``main`` has the reason,
    and earlier checkpoints stay as they are.
    """
    done = False
    try:
        main(_complete, temporary, temporary.with_name(f"checkpoint-{step}"), step)
        done = main.failure is None
    finally:
        if not done and is_main_process():
            shutil.rmtree(temporary, ignore_errors=True)


def _begin(output_dir: Path, temporary: Path) -> None:
    _recover(output_dir)
    temporary.mkdir(parents=True)


def _complete(temporary: Path, final: Path, step: int) -> None:
    files = {}
    share(temporary, temporary.rglob("*.safetensors"))
    for path in sorted(filter(Path.is_file, temporary.rglob("*"))):
        _sync(path)
        files[path.relative_to(temporary).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    marker = temporary / MARKER
    marker.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8")
    for path in (marker, *filter(Path.is_dir, temporary.rglob("*")), temporary):
        _sync(path)
    if final.exists():
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        temporary.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        temporary.rename(final)
    _sync(final.parent)
    if_interrupted(GO_ON)


def _recover(output_dir: Path) -> None:
    """Put back a checkpoint that was moved aside when its replacement was interrupted, and remove other rests."""
    for old in output_dir.glob(".checkpoint-*.old"):
        final = output_dir / old.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            old.rename(final)
    for rest in output_dir.glob(".checkpoint-*.*"):  # what a killed run left; nobody else is in the folder
        shutil.rmtree(rest, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a checkpoint such that no part of it is ever seen under its name."""
    gone = folder.with_name(f".{folder.name}.gone")
    shutil.rmtree(gone, ignore_errors=True)
    folder.rename(gone)
    shutil.rmtree(gone)


def set_aside(output_dir: Path, step: int) -> None:
    """Rename checkpoints beyond ``step``: a run that goes on from there is another branch than theirs."""
    for later, path in all_steps(output_dir):
        if later > step:
            number = sum(1 for _ in output_dir.glob(f"abandoned-{path.name}*"))
            path.rename(path.with_name(f"abandoned-{path.name}" + (f".{number}" if number else "")))
            say(f"{path.name} is of another branch of this run; it is now abandoned-{path.name}")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        if hasattr(hashlib, "file_digest"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
        return digest.hexdigest()


def problem(folder: Path) -> str | None:
    """Return what makes the checkpoint unusable, naming the file; None if it is complete and unaltered."""
    try:
        marker = read_json_object(folder / MARKER, "checkpoint")
    except UserError:
        return f"{folder} is not complete: it has no readable {MARKER}"
    if marker.get("format") != FORMAT:
        return f"{folder} has format {marker.get('format')!r:.40}; this version reads {FORMAT}"
    files = marker.get("files")
    if not isinstance(files, dict) or not files or not all(isinstance(value, dict) for value in files.values()):
        return f"{folder / MARKER} lists no files"
    return next(filter(None, (_file_problem(folder, name, expected) for name, expected in files.items())), None)


def _file_problem(folder: Path, name: str, expected: dict[str, Any]) -> str | None:
    path = folder / name
    try:
        inside = path.resolve().is_relative_to(folder.resolve()) and ".." not in Path(name).parts
        if not inside or Path(name).is_absolute():  # a link that stays in the folder is as good as a file
            return f"{folder / MARKER} names {name!r:.80}, which is not in its folder"
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != expected.get("bytes") or _sha256(path) != expected.get("sha256"):
            return f"{path} was truncated or altered"
    except (OSError, ValueError, RuntimeError) as error:  # not readable, or a name that no file can have
        return f"{folder} cannot be read: {error}"
    return None


def lists(path: Path) -> bool:
    """Whether the checkpoint that a file lies in has it in its marker, and `problem` has verified it.

    A copy that somebody keeps there, under whatever name, is not the checkpoint's. Without a marker all files count.

    Raises:
        UserError: the marker cannot be read.
    """
    marker = path.with_name(MARKER)
    if not marker.exists():
        return True
    files = read_json_object(marker, "checkpoint").get("files")
    return isinstance(files, dict) and path.name in files


def all_steps(output_dir: Path) -> list[tuple[int, Path]]:
    """Return (step, folder) of every checkpoint folder, newest first, complete or not."""
    found = [(NAME.fullmatch(path.name), path) for path in output_dir.glob("checkpoint-*") if path.is_dir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def find(asked: str | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that ``--resume_from_checkpoint`` means; None to start anew.

    ``auto`` (or a folder of checkpoints) is the newest complete one; an unusable one is skipped with a warning.

    Raises:
        UserError: the named checkpoint does not exist or is unusable.
    """
    if asked is None:
        return None
    _recover(output_dir)
    named = output_dir if asked in AUTO else Path(asked)
    if not named.is_dir() and named != output_dir:
        raise UserError(f"--resume_from_checkpoint: {asked} is no folder; give a checkpoint, or auto")
    if named != output_dir and not all_steps(named):
        if reason := problem(named):
            raise UserError(f"--resume_from_checkpoint: {reason}; give another checkpoint, or auto")
        return named
    for _, folder in all_steps(named):
        reason = problem(folder)
        if reason is None:
            return folder
        warn_once(f"checkpoint skipped: {reason}")
    say(f"resume_from_checkpoint: {named} has no complete checkpoint; the run starts at the beginning")
    return None


def prune(output_dir: Path, limit: int | None, keep: str | None = None) -> None:
    """Remove all but the newest ``limit`` checkpoints; ``keep`` (a folder's name, the best one) stays as well."""
    if limit is None:
        return
    steps = [(step, path) for step, path in all_steps(output_dir) if path.name != keep]
    newest = next((path.name for _, path in all_steps(output_dir)), None)
    spare = limit - (1 if keep is not None and (limit > 1 or keep == newest) else 0)
    for _, path in steps[spare:]:
        path.unlink() if path.is_symlink() else _remove(path)
