"""DeepSpeed configurations: what "auto" becomes, and every contradiction at once."""

from __future__ import annotations

import json
import re
from copy import deepcopy

import pytest

from core.arguments import parse_arguments
from core.deepspeed_config import CONFIGS_DIR, load, resolve
from core.errors import UserError, json_kind
from core.gaudi_config import GaudiConfig

SHIPPED = sorted(path.stem for path in CONFIGS_DIR.glob("*.json"))
MISSING = object()
# Dotted key: (what the flags below give, the flag that the message names).
KEYS = {
    "train_micro_batch_size_per_gpu": (8, "--per_device_train_batch_size"),
    "gradient_accumulation_steps": (2, "--gradient_accumulation_steps"),
    "train_batch_size": (64, "8 x 2 x 4 devices"),
    "gradient_clipping": (0.5, "--max_grad_norm"),
    "optimizer.params.lr": (1e-4, "--learning_rate"),
}


def flags(*more: str):
    argv = ["--per_device_train_batch_size", "8", "--gradient_accumulation_steps", "2", "--max_grad_norm", "0.5"]
    argv += ["--learning_rate", "1e-4", "--bf16", "--do_train", "--deepspeed", "x.json", *more]
    return parse_arguments(argv, description="")


def config_with(key: str, value: object) -> dict:
    """A configuration that says "auto" everywhere except for ``key``."""
    config = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": "auto"}}, "bf16": {"enabled": "auto"}}
    config |= dict.fromkeys(("train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto")
    config |= {"train_batch_size": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 2}}
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node[parent]
    node.pop(last, None)
    if value is not MISSING:
        node[last] = value
    return config


def at(config: dict, key: str) -> object:
    for part in key.split("."):
        config = config[part]
    return config


def problems(config: dict, args=None, **options) -> str:
    with pytest.raises(UserError) as error:
        resolve(config, args or flags(), world_size=4, **options)
    assert str(error.value).startswith("--deepspeed x.json: ")
    assert len(str(error.value).splitlines()) == 1
    return str(error.value)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("variant", ["right value", "auto", "missing"])
def test_keys_that_agree_or_are_filled(key, variant):
    expected, _ = KEYS[key]
    value = {"right value": expected, "auto": "auto", "missing": MISSING}[variant]
    found = at(resolve(config_with(key, value), flags(), world_size=4), key)
    assert (found, json_kind(found)) == (expected, json_kind(expected))


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("variant", ["string", "other value", "8.0", "null", "true"])
def test_keys_that_contradict_with_both_values_and_types(key, variant):
    expected, source = KEYS[key]
    value = {"string": str(expected), "other value": 3, "8.0": 8.0, "null": None, "true": True}[variant]
    message = problems(config_with(key, value))
    found, wanted = f"{json.dumps(value)} ({json_kind(value)})", f"{json.dumps(expected)} ({json_kind(expected)})"
    assert f"{key} is {found}, but {source} gives {wanted}" in message
    assert message.count(" gives ") == 1, "the other keys are in order"


def test_an_integer_may_stand_for_a_number_with_a_fraction_but_not_the_reverse():
    args = flags("--max_grad_norm", "1.0")
    assert resolve(config_with("gradient_clipping", 1), args, 4)["gradient_clipping"] == 1
    with pytest.raises(UserError, match=re.escape("train_micro_batch_size_per_gpu is 8.0 (number), but")):
        resolve(config_with("train_micro_batch_size_per_gpu", 8.0), args, 4)


def test_every_contradiction_is_listed_at_once():
    config = config_with("train_batch_size", 32) | {
        "train_micro_batch_size_per_gpu": "8",
        "gradient_accumulation_steps": None,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": False},
        "fp16": {"enabled": True},
        "amp": {"enabled": True},
        "scheduler": "WarmupLR",
        "gradient_cliping": 1.0,
    }
    config["optimizer"]["params"] |= {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": "0"}
    message = problems(config)
    for part in (
        'train_micro_batch_size_per_gpu is "8" (string), but --per_device_train_batch_size gives 8 (integer)',
        "gradient_accumulation_steps is null (null), but --gradient_accumulation_steps gives 2 (integer)",
        "train_batch_size is 32 (integer), but 8 x 2 x 4 devices gives 64 (integer)",
        "gradient_clipping is 1.0 (number), but --max_grad_norm gives 0.5 (number)",
        "bf16.enabled is false (boolean), but --bf16 gives true (boolean)",
        "fp16.enabled is true (boolean), but a Gaudi, which trains in bf16 (--bf16), gives false (boolean)",
        "amp.enabled is true (boolean), but a Gaudi",
        "optimizer.params.betas is [0.9, 0.95] (array), but --adam_beta1 and --adam_beta2 gives [0.9, 0.999] (array)",
        "optimizer.params.eps is 1e-08 (number), but --adam_epsilon gives 1e-06 (number)",
        'optimizer.params.weight_decay is "0" (string), but --weight_decay gives 0.0 (number)',
        'scheduler must be an object, with params an object, not "WarmupLR" (string)',
        "unknown key 'gradient_cliping' (did you mean 'gradient_clipping'?)",
    ):
        assert part in message


@pytest.mark.parametrize("block", ["zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "amp"])
@pytest.mark.parametrize("value", [None, [], "auto", 2])
def test_a_block_must_be_an_object(block, value):
    assert f"{block} must be an object" in problems(config_with("train_batch_size", "auto") | {block: value})


def test_parameters_must_be_an_object():
    assert "optimizer must be an object, with params an object" in problems({"optimizer": {"params": None}})


@pytest.mark.parametrize(
    ("key", "nearest"),
    [("zero_optimisation", "zero_optimization"), ("bfloat16", "bf16"), ("train_batchsize", "train_batch_size")],
)
def test_misspelt_keys_that_deepspeed_would_drop(key, nearest):
    assert f"unknown key {key!r} (did you mean {nearest!r}?)" in problems({key: {}})


@pytest.mark.parametrize(
    "key",
    [
        "zero_allow_untested_optimizer",
        "communication_data_type",
        "gradient_predivide_factor",
        "data_types",
        "aio",
        "timers",
    ],
)
def test_deepspeeds_other_keys_pass(key):
    assert resolve({key: 1}, flags(), 4)[key] == 1


def test_fused_adam_of_the_gaudi_configuration_gives_way(caplog):
    resolve({}, flags("--gaudi_config", "t5"), 4, gaudi_config=GaudiConfig(use_fused_clip_norm=True))
    assert "use_fused_adam" not in caplog.text
    resolve({}, flags("--gaudi_config", "t5"), 4)
    assert "use_fused_adam does not work under DeepSpeed" in caplog.text


@pytest.mark.parametrize(
    ("more", "autocast", "expected"),
    [([], False, True), (["--bf16", "False"], False, False), (["--bf16", "False"], True, True)],
)
def test_precision_has_one_owner(more, autocast, expected):
    config = resolve({}, flags(*more), 4, gaudi_config=GaudiConfig(use_torch_autocast=autocast))
    assert config["bf16"] == {"enabled": expected}


@pytest.mark.parametrize("enabled", [False, "auto"])
def test_fp16_that_is_off_stays_off(enabled):
    assert resolve({"fp16": {"enabled": enabled}}, flags(), 4)["fp16"] == {"enabled": False}


def test_zero_switches_clipping_off():
    assert resolve({"gradient_clipping": "auto"}, flags("--max_grad_norm", "0"), 4)["gradient_clipping"] == 0


@pytest.mark.parametrize(
    ("kind", "filled"),
    [
        ("AdamW", {"lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-6}),
        ("Lamb", {"lr": 1e-4, "weight_decay": 0.0, "betas": [0.9, 0.999], "eps": 1e-6}),
        ("SGD", {"lr": 1e-4, "weight_decay": 0.0}),
    ],
)
def test_an_optimizers_missing_parameters_are_the_flags(kind, filled):
    assert resolve({"optimizer": {"type": kind}}, flags(), 4)["optimizer"] == {"type": kind, "params": filled}


def test_without_a_block_none_is_made():
    assert not {"optimizer", "scheduler", "zero_optimization", "fp16", "amp"} & resolve({}, flags(), 4, 64, 10).keys()


@pytest.mark.parametrize(
    ("kind", "filled"),
    [
        ("WarmupLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 6}),
        ("WarmupDecayLR", {"warmup_min_lr": 0.0, "warmup_max_lr": 1e-4, "warmup_num_steps": 6, "total_num_steps": 60}),
        ("WarmupCosineLR", {"warmup_num_steps": 6, "total_num_steps": 60}),
        ("OneCycle", {}),
    ],
)
@pytest.mark.parametrize("more", [["--warmup_steps", "6"], ["--warmup_ratio", "0.1"]])
def test_a_schedule_gets_what_it_takes(kind, filled, more):
    config = resolve({"scheduler": {"type": kind}}, flags(*more), 4, total_steps=60)
    assert config["scheduler"].get("params", {}) == filled


def test_no_warm_up_is_one_step_for_deepspeed_refuses_none():
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    assert resolve(config, flags(), 4)["scheduler"]["params"]["warmup_num_steps"] == 1


def test_what_is_not_known_yet_stays_auto_and_a_second_call_fills_it():
    sizes = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
    config = {
        "zero_optimization": {"stage": 3, **dict.fromkeys(sizes, "auto")},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"}},
    }
    args = flags("--warmup_ratio", "0.5")
    first = resolve(config, args, 4)
    assert [first["zero_optimization"][name] for name in sizes] == ["auto"] * 3
    assert first["scheduler"]["params"]["total_num_steps"] == first["scheduler"]["params"]["warmup_num_steps"] == "auto"
    second = resolve(first, args, 4, hidden_size=64, total_steps=10)
    assert [second["zero_optimization"][name] for name in sizes] == [4096, 3686, 640]
    assert second["scheduler"]["params"]["total_num_steps"] == 10
    assert second["scheduler"]["params"]["warmup_num_steps"] == 5
    assert resolve(second, args, 4, hidden_size=64, total_steps=10) == second


def test_own_bucket_sizes_are_kept_and_none_is_added():
    config = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 7}}
    assert resolve(config, flags(), 4, hidden_size=64)["zero_optimization"] == config["zero_optimization"]


def test_the_given_configuration_is_not_changed():
    config = config_with("train_batch_size", "auto")
    before = deepcopy(config)
    resolve(config, flags(), 4, hidden_size=64, total_steps=10)
    assert config == before


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configurations_resolve_completely(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = load(name)
    assert config == load(f"deepspeed_configs/{name}.json") == load(CONFIGS_DIR / f"{name}.json")
    for world_size in (1, 8):
        resolved = resolve(config, flags(), world_size, hidden_size=64, total_steps=10)
        assert '"auto"' not in json.dumps(resolved)
        assert resolved["train_batch_size"] == 16 * world_size
        assert resolved["steps_per_print"] == 500


def test_files_that_are_none():
    with pytest.raises(UserError, match=r"--deepspeed: no configuration 'zero4' \(did you mean"):
        load("zero4")
    with pytest.raises(UserError, match=r"--deepspeed: gone\.json is not a file"):
        load("gone.json")
