"""The shipped configurations: complete, and neighbours differ only in what their names say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core.deepspeed_config import CONFIGS_DIR as DEEPSPEED_DIR
from core.deepspeed_config import load
from core.gaudi_config import CONFIGS_DIR as GAUDI_DIR
from core.gaudi_config import GaudiConfig

FILES = sorted(path for folder in (GAUDI_DIR, DEEPSPEED_DIR) for path in folder.iterdir() if path.name != "README.md")


def changes(old: dict, new: dict, prefix: str = "") -> dict[str, tuple]:
    """Every dotted key whose value differs, with both values; a missing one is None."""
    found: dict[str, tuple] = {}
    for key in old.keys() | new.keys():
        pair = (old.get(key), new.get(key))
        if isinstance(pair[0], dict) and isinstance(pair[1], dict):
            found |= changes(*pair, f"{prefix}{key}.")
        elif pair[0] != pair[1]:
            found[prefix + key] = pair
    return found


def test_the_files_are_there():
    families = {"bart", "bert", "falcon", "gpt2", "llama", "roberta", "t5"}
    families |= {"stable_diffusion", "stable_diffusion_2", "stable_diffusion_xl"}
    assert families <= {path.stem for path in GAUDI_DIR.glob("*.json")}
    names = {"zero1.json", "zero2.json", "zero2_offload.json", "zero3.json", "zero3_offload.json"}
    assert {path.name for path in DEEPSPEED_DIR.iterdir()} == {*names, "README.md"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_files_are_plain_json(path: Path):
    text = path.read_text(encoding="utf-8")
    assert path.suffix == ".json"
    assert text == json.dumps(json.loads(text), indent=2) + "\n"


@pytest.mark.parametrize("path", sorted(GAUDI_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_gaudi_configurations_load(path: Path):
    GaudiConfig.from_pretrained(path.stem)


@pytest.mark.parametrize(
    "name", ["t5", "bart", "gpt2", "roberta", "llama", "falcon", "stable_diffusion", "stable_diffusion_xl"]
)
def test_most_use_the_fused_kernels_and_leave_precision_to_the_flag(name: str):
    assert GaudiConfig.from_pretrained(name) == GaudiConfig(use_fused_adam=True, use_fused_clip_norm=True)


@pytest.mark.parametrize("name", ["bert", "stable_diffusion_2"])
def test_some_are_published_with_autocast(name: str):
    expected = GaudiConfig(use_torch_autocast=True, use_fused_adam=True, use_fused_clip_norm=True)
    assert GaudiConfig.from_pretrained(name) == expected


ZERO = "zero_optimization."
ON_CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("zero1", "zero2", {ZERO + "stage": (1, 2)}),
        ("zero2", "zero2_offload", {ZERO + "offload_optimizer": (None, ON_CPU)}),
        (
            "zero2",
            "zero3",
            {ZERO + "stage": (2, 3), ZERO + "stage3_gather_16bit_weights_on_model_save": (None, True)},
        ),
        (
            "zero3",
            "zero3_offload",
            {ZERO + "offload_optimizer": (None, ON_CPU), ZERO + "offload_param": (None, ON_CPU)},
        ),
    ],
)
def test_neighbours_differ_only_in_what_their_names_say(old: str, new: str, expected: dict):
    assert changes(load(old), load(new)) == expected


@pytest.mark.parametrize("path", sorted(DEEPSPEED_DIR.glob("*.json")), ids=lambda path: path.stem)
def test_deepspeed_configurations_leave_the_flags_values_to_the_flags(path: Path):
    config = load(path)
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
    assert {config[key] for key in keys} == {config["bf16"]["enabled"]} == {"auto"}
    assert not {"optimizer", "scheduler", "fp16", "amp"} & config.keys(), "optimiser and schedule are the recipe's"
    for name in ("overlap_comm", "reduce_scatter", "contiguous_gradients"):
        assert config["zero_optimization"][name] is False, "what was validated on Gaudi"
