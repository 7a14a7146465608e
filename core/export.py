"""Plain safetensors from a checkpoint, to use or to publish: python -m core.export CHECKPOINT FOLDER [--dtype bf16]."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from core import adapters, checkpoint
from core.errors import UserError, exit_with_one_line, say

# What only goes on with training needs. Everything else is the model: weights, configuration, tokenizer, processor.
TRAINING = ("checkpoint.json", "state.json", "rank-*.json", "rng.safetensors", "optimizer*.safetensors")
WEIGHTS = ("model*.safetensors", "model.safetensors.index.json", adapters.WEIGHTS)
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}


def export(source: Path, folder: Path, dtype: str = "fp32") -> None:
    """Write a checkpoint's model, of any strategy and number of devices, as ``from_pretrained`` loads it.

    Of a model with adapters that is the adapter, which ``peft.PeftModel.from_pretrained`` loads into its base.

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
    from huggingface_hub import save_torch_state_dict
    from safetensors import SafetensorError

    from core.state import TensorFiles, note_dtype

    adapted = (source / adapters.WEIGHTS).exists()
    saved = TensorFiles(*sorted(source.glob(adapters.WEIGHTS if adapted else WEIGHTS[0])))
    wanted = getattr(torch, DTYPES[dtype])
    weights = {name: tensor.to(wanted) if tensor.is_floating_point() else tensor for name, tensor in saved.items()}
    half = folder.with_name(f".{folder.name}.half")
    shutil.rmtree(half, ignore_errors=True)
    try:
        half.mkdir(parents=True)
        skipped = {path for pattern in (*TRAINING, *WEIGHTS) for path in source.glob(pattern)}
        for path in set(source.iterdir()) - skipped:
            shutil.copy2(path, half) if path.is_file() else shutil.copytree(path, half / path.name)
        pattern = "adapter_model{suffix}.safetensors" if adapted else "model{suffix}.safetensors"
        save_torch_state_dict(weights, half, filename_pattern=pattern, metadata={"format": "pt"})
        note_dtype(half, wanted)
        half.replace(folder)  # an empty folder of that name gives way
    except (OSError, SafetensorError) as error:
        shutil.rmtree(half, ignore_errors=True)
        raise UserError(f"{folder} cannot be written: {error}") from error
    say(f"{len(weights)} tensors, {sum(t.numel() for t in weights.values()):,} numbers in {dtype}: {folder}")


def main() -> None:
    parser = argparse.ArgumentParser("python -m core.export", description=__doc__)
    parser.add_argument("checkpoint", type=Path, help="a folder checkpoint-N")
    parser.add_argument("folder", type=Path, help="where the model goes")
    parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the weights (default: fp32)")
    args = parser.parse_args()
    export(args.checkpoint, args.folder, args.dtype)


if __name__ == "__main__":
    exit_with_one_line(main)
