"""Plain safetensors from a checkpoint, to use or to publish: python -m core.export CHECKPOINT FOLDER [--dtype bf16]."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from core import adapters, checkpoint, ema
from core.errors import UserError, exit_with_one_line, read_json_object, say
from core.files import share

if TYPE_CHECKING:
    from torch import Tensor

# What only goes on with training needs. Everything else is the model: weights, configuration, tokenizer, processor.
TRAINING = (
    "checkpoint.json", "state.json", "learned_from.json", "rank-*.json", "rng.safetensors", "optimizer*.safetensors",
    ema.FILE,
)  # fmt: skip
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", adapters.WEIGHTS)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(source: Path, folder: Path, dtype: str = "fp32") -> None:
    """Write a checkpoint's model, of any strategy and number of devices, as ``from_pretrained`` loads it.

    Of a model with adapters that is the adapter, which ``peft.PeftModel.from_pretrained`` loads into its base. Where
    the checkpoint has averaged weights, they are taken. The trained part of a pipeline goes into its own folder.

    Args:
        source: a checkpoint folder, whose checksums are verified.
        folder: made; must not hold anything.
        dtype: ``fp32``, as it was trained, or ``bf16``, half the size.

    Raises:
        UserError: the checkpoint is incomplete or altered, or DeepSpeed's own; or the folder is taken or not writable.
    """
    if any(source.glob("*zero_pp_rank_*")) or any(source.glob("global_step*")):
        raise UserError(
            f"{source} is DeepSpeed's own checkpoint, pickles, which nothing here opens; its zero_to_fp32.py converts"
        )
    if reason := checkpoint.problem(source):
        raise UserError(f"{reason}; give a complete checkpoint folder")
    if folder.resolve().is_relative_to(source.resolve()):
        raise UserError(f"{folder} is within the checkpoint {source}; give a folder elsewhere")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists and is not an empty folder; give another")
    import torch
    from safetensors import SafetensorError

    from core.state import TensorFiles

    adapted = (source / adapters.WEIGHTS).exists()
    saved = TensorFiles(*sorted(source.glob(adapters.WEIGHTS if adapted else WEIGHTS[0])))
    wanted = getattr(torch, DTYPES[dtype])
    averages = {adapters.file_name(name): t for path in source.glob(ema.FILE) for name, t in TensorFiles(path).items()}
    whole = {name: averages.get(name, tensor) for name, tensor in saved.items()}
    weights = {name: tensor.to(wanted) if tensor.is_floating_point() else tensor for name, tensor in whole.items()}
    half = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        skipped = {path for pattern in (*TRAINING, *WEIGHTS) for path in source.glob(pattern)}
        for path in set(source.iterdir()) - skipped:
            shutil.copy2(path, half) if path.is_file() else shutil.copytree(path, half / path.name)
        _write(weights, half, adapted)
        half.replace(folder)  # an empty folder of that name gives way
    except (OSError, SafetensorError) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise UserError(f"{folder} cannot be written: {error}") from error
    say(f"{len(weights)} tensors, {sum(t.numel() for t in weights.values()):,} numbers in {dtype}: {folder}")


def _write(weights: dict[str, Tensor], folder: Path, adapted: bool) -> None:
    """Write weights beside their configuration, under the names that their library looks for."""
    from core.state import note_dtype, weights_name, write_weights

    if adapted:
        write_weights(weights, folder, adapters.WEIGHTS)
        adapters.for_pipelines(weights, folder)
        share(folder, folder.glob("*.safetensors"))
        return
    place = _component(folder)
    name = weights_name(place)
    write_weights(weights, place, name)
    if name == weights_name(place, publish=False):  # the others' configurations have no dtype
        note_dtype(place, next(tensor.dtype for tensor in weights.values() if tensor.is_floating_point()))


def _component(folder: Path) -> Path:
    """Where a model belongs: in a folder of its own, with its configuration, if it is part of a pipeline."""
    index, config = folder / "model_index.json", folder / "config.json"
    if index.exists() and config.exists():
        kind = read_json_object(config, "checkpoint").get("_class_name")
        for name, what in read_json_object(index, "checkpoint").items():
            if isinstance(what, list) and what[-1:] == [kind] and Path(name).name == name != "..":
                (folder / name).mkdir(exist_ok=True)
                config.replace(folder / name / config.name)
                return folder / name
    return folder


def main() -> None:
    parser = argparse.ArgumentParser("python -m core.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoint-N")
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: fp32)")
    args = parser.parse_args()
    export(args.checkpoint, args.folder, args.dtype)


if __name__ == "__main__":
    exit_with_one_line(main)
