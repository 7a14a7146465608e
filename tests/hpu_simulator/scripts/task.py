"""A small model and its batches, the same in every process and on every device."""

import gc
import time

import torch

MICRO_BATCHES = 2  # per optimiser step
STEPS = 6
LEARNING_RATE = 0.005
EPSILON = 1e-12  # DeepSpeed adds it elsewhere: too small to matter
CLIP = 0.5


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, activation="gelu")
    return torch.nn.Sequential(
        torch.nn.Embedding(40, 16), torch.nn.BatchNorm1d(8), layer, torch.nn.Flatten(), torch.nn.Linear(8 * 16, 3)
    )


def batches(rank: int, ranks: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return what this rank trains on: (words, labels)."""
    generator = torch.Generator().manual_seed(1)
    count = STEPS * MICRO_BATCHES * ranks
    words = torch.randint(0, 40, (count, 4, 8), generator=generator)
    labels = torch.randint(0, 3, (count, 4), generator=generator)
    return list(zip(words[rank::ranks], labels[rank::ranks], strict=True))


def leave() -> None:
    """Let gloo's threads end before the interpreter does: one that then lets go of its last tensors aborts the process.

    They are joined with the last reference to a process group, which a wrapped model holds: drop that before.
    """
    gc.collect()
    time.sleep(0.2)
