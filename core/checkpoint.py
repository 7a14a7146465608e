"""Checkpoints that are complete or absent, and exact. State is safetensors and JSON: nothing is unpickled."""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import Optimizer

from core.device import Device
from core.errors import UserError, read_json_object, say, warn_once
from core.optimizers import family, load_named_state, named_state

FORMAT = 1
MARKER = "checkpoint.json"  # written last; holds size and sha256 of every other file
NAME = re.compile(r"checkpoint-(\d+)")


def save(output_dir: Path, step: int, write: Callable[[Path], None]) -> Path:
    """Save ``checkpoint-<step>``: temporary folder on the same file system, marker last, fsync, then one rename.

    Args:
        output_dir: the run's folder.
        step: optimiser steps done.
        write: writes the files into the folder that it is given.

    Returns:
        The new folder. A folder of the same step is replaced once the new one is complete.

    Raises:
        UserError: a file cannot be written; the temporary folder is removed, earlier checkpoints stay as they are.
    """
    _recover(output_dir)
    final = output_dir / f"checkpoint-{step}"
    temporary = output_dir / f".checkpoint-{step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)  # what a killed run left
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        files = {}
        for path in sorted(temporary.rglob("*")):
            if path.is_file():
                _sync(path)
                name = path.relative_to(temporary).as_posix()
                files[name] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
        marker = temporary / MARKER
        marker.write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1), encoding="utf-8")
        for path in (marker, *filter(Path.is_dir, temporary.rglob("*")), temporary):
            _sync(path)
        if final.exists():
            old = output_dir / f".checkpoint-{step}.old"
            shutil.rmtree(old, ignore_errors=True)
            final.rename(old)
            temporary.rename(final)
            shutil.rmtree(old)
        else:
            temporary.rename(final)
        _sync(output_dir)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, (OSError, SafetensorError)):
            raise UserError(f"{final} cannot be written: {error}; earlier checkpoints are as they were") from error
        raise
    return final


def _recover(output_dir: Path) -> None:
    """Put back a checkpoint that was moved aside when its replacement was interrupted between the two renames."""
    for old in output_dir.glob(".checkpoint-*.old"):
        final = output_dir / old.name.removeprefix(".").removesuffix(".old")
        if not final.exists():
            old.rename(final)


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
    if marker.get("format") != FORMAT or not isinstance(marker.get("files"), dict):
        return f"{folder} has format {marker.get('format')!r}; this version reads {FORMAT}"
    for name, expected in marker["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != expected["bytes"] or _sha256(path) != expected["sha256"]:
            return f"{path} was truncated or altered"
    return None


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
    named = output_dir if asked in ("auto", "True", "true") else Path(asked)
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
    spare = limit - (1 if keep is not None and limit > 1 else 0)
    for _, path in steps[spare:]:
        path.unlink() if path.is_symlink() else shutil.rmtree(path)


def save_model(model: nn.Module, folder: Path) -> None:
    """Write the weights under the module's own names; storage that several names share is written once.

    Models with ``save_pretrained`` write themselves, so that ``from_pretrained`` loads the folder.
    """
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder, save_original_format=False)
        return
    tensors, seen = {}, set()
    for name, tensor in model.state_dict().items():
        key = (tensor.untyped_storage().data_ptr(), tensor.storage_offset(), tensor.shape, tensor.stride())
        if tensor.numel() == 0 or key not in seen:
            seen.add(key)
            tensors[name] = tensor.detach().contiguous().cpu()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_model(model: nn.Module, folder: Path) -> None:
    """Copy saved weights into ``model`` in place; names that share storage are filled by the one that was written.

    Raises:
        UserError: a weight is missing, unknown or of another shape.
    """
    saved = load_tensors(*sorted(folder.glob("model*.safetensors")))
    own = model.state_dict()
    storages = {own[name].untyped_storage().data_ptr() for name in saved.keys() & own.keys()}
    missing = [name for name, tensor in own.items() if name not in saved and _storage(tensor) not in storages]
    unknown = sorted(saved.keys() - own.keys())
    if missing or unknown:
        raise UserError(f"{folder} is of another model: missing {missing[:3]}, unknown {unknown[:3]}; name that model")
    with torch.no_grad():
        for name, tensor in saved.items():
            if own[name].shape != tensor.shape:
                shapes = f"{list(tensor.shape)} there, {list(own[name].shape)} here"
                raise UserError(f"{folder} is of another model: {name} is {shapes}; name that model")
            own[name].copy_(tensor)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def save_tensors(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write tensors to a safetensors file, each with its own storage only."""
    save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def load_tensors(*paths: Path) -> dict[str, torch.Tensor]:
    """Read safetensors files onto the CPU.

    Raises:
        UserError: there is no such file, or it is not readable as safetensors.
    """
    if not paths:
        raise UserError("the checkpoint holds no weights (model*.safetensors)")
    tensors: dict[str, torch.Tensor] = {}
    for path in paths:
        try:
            tensors.update(load_file(path))
        except (SafetensorError, OSError) as error:
            raise UserError(f"{path} cannot be read: {error}") from None
    return tensors


def save_training(
    folder: Path, optimizer: Optimizer, names: Mapping[int, str], schedule: Any, device: Device, state: dict[str, Any]
) -> None:
    """Write what training needs beside the weights: optimiser, schedule, random generators, and ``state`` as it is.

    Numbers go to JSON, which gives floats back bit for bit; tensors to safetensors.
    """
    save_tensors(named_state(optimizer, names), folder / "optimizer.safetensors")
    save_tensors(device.rng_state(), folder / "rng.safetensors")
    python, numpy = random.getstate(), np.random.get_state()
    own = {
        "optimizer": family(optimizer),
        "schedule_steps": [schedule.last_epoch, schedule._step_count],
        "python_random": [python[0], list(python[1]), python[2]],
        "numpy_random": [numpy[0], numpy[1].tolist(), *numpy[2:]],
    }
    (folder / "state.json").write_text(
        json.dumps({**state, "training": own}, indent=1, allow_nan=False), encoding="utf-8"
    )


def load_training(
    folder: Path, optimizer: Optimizer, names: Mapping[int, str], schedule: Any, device: Device
) -> dict[str, Any]:
    """Put back what `save_training` wrote, and return its ``state``.

    Raises:
        UserError: a file cannot be read, or the optimiser is of another family.
    """
    state = read_json_object(folder / "state.json", "checkpoint")
    own = state.pop("training")
    load_named_state(optimizer, names, load_tensors(folder / "optimizer.safetensors"), own["optimizer"])
    schedule.last_epoch, schedule._step_count = own["schedule_steps"]
    # The rate is that of today's flags at this step: a longer schedule or another peak counts from here on.
    rates = [
        base * rate(schedule.last_epoch) for base, rate in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    schedule._last_lr = rates
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    device.set_rng_state(load_tensors(folder / "rng.safetensors"))
    version, words, gauss = own["python_random"]
    random.setstate((version, tuple(words), gauss))
    kind, keys, *rest = own["numpy_random"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    return state
