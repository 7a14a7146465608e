"""DeepSpeed configurations: load one, fill what says "auto" from the flags, list every contradiction at once."""

from __future__ import annotations

import difflib
import json
import math
from argparse import Namespace
from copy import deepcopy
from pathlib import Path
from typing import Any

from core.errors import UserError, find_shipped, json_kind, read_json_object, say, warn_once
from core.gaudi_config import GaudiConfig

CONFIGS_DIR = Path(__file__).resolve().parents[1] / "deepspeed_configs"
BLOCKS = ("zero_optimization", "optimizer", "scheduler", "bf16", "fp16", "amp")
BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
# DeepSpeed drops unknown keys in silence. Near misses of these are refused; the list of all grows with each release.
GUARDED = (*BLOCKS, *BATCH_KEYS, "gradient_clipping", "steps_per_print")
PARALLEL = ("tensor_parallel", "sequence_parallel_size", "pipeline", "autotp")  # ranks would share rows
SCHEDULES = {  # the parameters that each of DeepSpeed's own schedules takes
    "WarmupLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps"),
    "WarmupDecayLR": ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"),
    "WarmupCosineLR": ("warmup_num_steps", "total_num_steps"),
}


def load(path: str | Path) -> dict[str, Any]:
    """Load the file that ``--deepspeed`` names: a path, ``deepspeed_configs/zero2.json`` from anywhere, or ``zero2``.

    Raises:
        UserError: there is no such file, or it is no JSON object.
    """
    return read_json_object(find_shipped(str(path), CONFIGS_DIR, "--deepspeed"), "--deepspeed")


def of_run(args: Namespace, world_size: int, gaudi_config: GaudiConfig) -> dict[str, Any] | None:
    """Load and check what ``--deepspeed`` names; None where it would do nothing. May set flags that it decides.

    Raises:
        UserError: as `load` and `resolve` do, or it shards nothing.
    """
    if not args.deepspeed:
        return None
    config = load(args.deepspeed)
    if "zero_optimization" not in config:
        raise UserError(f"--deepspeed {args.deepspeed} has no zero_optimization block; DDP needs no --deepspeed")
    config = resolve(config, args, world_size, gaudi_config=gaudi_config)
    if config["bf16"]["enabled"] is True and not args.bf16:
        say("bf16: as the DeepSpeed configuration says, although --bf16 is not given")
        args.bf16 = True
    stage = config["zero_optimization"]["stage"]
    if stage == 3 and args.use_hpu_graphs_for_inference:
        warn_once("--use_hpu_graphs_for_inference has no effect under ZeRO-3: a replay would gather no weights")
        args.use_hpu_graphs_for_inference = False
    if not args.do_train and stage < 3:
        say(f"--deepspeed: ZeRO stage {stage} shards what training needs; evaluation alone has nothing to shard")
        return None
    return config


def resolve(
    config: dict[str, Any],
    args: Namespace,
    world_size: int,
    hidden_size: int | None = None,
    total_steps: int | None = None,
    gaudi_config: GaudiConfig | None = None,
) -> dict[str, Any]:
    """Return a copy of ``config`` in which the flags have filled each "auto" and each missing key that they decide.

    Needs no model: what depends on ``hidden_size`` or ``total_steps`` stays "auto" while that is None, and a second
    call with them goes on from the result of the first.

    Args:
        world_size: number of devices.
        hidden_size: width of the model, for bucket sizes.
        total_steps: optimiser steps of the run, for schedules.
        gaudi_config: of ``--gaudi_config``; None loads it.

    Raises:
        UserError: file and flags contradict each other; the message lists all of it, values and types.
    """
    config = deepcopy(config)
    gaudi_config = gaudi_config or GaudiConfig.from_pretrained(args.gaudi_config)
    problems = _refuse_keys(config)
    if gaudi_config.use_fused_adam:
        warn_once("the Gaudi configuration's use_fused_adam does not work under DeepSpeed: torch's AdamW runs instead")
    stage = config["zero_optimization"].get("stage", 0) if "zero_optimization" in config else 1
    if type(stage) is not int or stage not in (1, 2, 3):
        problems.append(f"zero_optimization.stage is {_show(stage)}; it must be 1, 2 or 3 (DDP needs no --deepspeed)")
    if args.use_zero3_leaf_promotion and stage != 3:
        problems.append(f"--use_zero3_leaf_promotion needs zero_optimization.stage 3, not {_show(stage)}")
    if any(config.get(block) for block in PARALLEL):
        problems.append("tensor, sequence and pipeline parallelism: every rank has rows of its own here; take them out")
    if args.optim in ("lamb", "adafactor"):
        problems.append(
            f"--optim {args.optim} measures whole tensors, and ZeRO's ranks step parts of them; use adamw_torch"
        )
    if "optimizer" in config and args.optim != "adamw_torch":
        problems.append(f"an optimizer block and --optim {args.optim} both name the optimiser; leave one out")
    bf16, often = config.get("bf16", {}).get("enabled", "auto"), config.get("steps_per_print", "auto")
    if bf16 != "auto" and not isinstance(bf16, bool):
        problems.append(f'bf16.enabled is {_show(bf16)}; it must be true, false or "auto"')
    if often != "auto" and (type(often) is not int or often < 1):
        problems.append(f"steps_per_print is {_show(often)}; it must be an integer above 0")
    for entry in _decided_by_flags(config, args, gaudi_config, world_size, hidden_size, total_steps):
        problems += _settle(config, *entry)
    if problems:
        raise UserError(f'--deepspeed {args.deepspeed}: {"; ".join(problems)} ("auto" takes a flag\'s value)')
    return config


def _decided_by_flags(
    config: dict, args: Namespace, gaudi: GaudiConfig, world_size: int, hidden_size: int | None, steps: int | None
) -> list[tuple[str, Any, str | None, bool]]:
    """List what `_settle` takes: key, value, who says so, whether a missing key is filled."""
    bf16 = args.bf16 or gaudi.use_torch_autocast
    micro, accum = args.per_device_train_batch_size, args.gradient_accumulation_steps
    decided: list[tuple[str, Any, str | None, bool]] = [
        ("train_micro_batch_size_per_gpu", micro, "--per_device_train_batch_size", True),
        ("gradient_accumulation_steps", accum, "--gradient_accumulation_steps", True),
        ("train_batch_size", micro * accum * world_size, f"{micro} x {accum} x {world_size} devices", True),
        ("gradient_clipping", args.max_grad_norm or 0.0, "--max_grad_norm", True),
        ("bf16.enabled", bf16, "--bf16" if bf16 else None, True),  # without the flag, the file may ask for it
        ("steps_per_print", args.logging_steps, None, True),
    ]
    if "optimizer" in config:
        kind = str(config["optimizer"].get("type")).lower()
        moments = "adam" in kind or "lamb" in kind  # other optimisers refuse betas that their block does not have
        decided += [
            ("optimizer.params.lr", args.learning_rate, "--learning_rate", True),
            ("optimizer.params.weight_decay", args.weight_decay, "--weight_decay", True),
            ("optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "--adam_beta1 and --adam_beta2", moments),
            ("optimizer.params.eps", args.adam_epsilon, "--adam_epsilon", moments),
        ]
    if "scheduler" in config:
        taken = SCHEDULES.get(str(config["scheduler"].get("type")), ())
        warmup = steps and math.ceil(args.warmup_ratio * steps) if args.warmup_ratio else args.warmup_steps
        warmup = warmup if warmup is None else max(1, warmup)  # DeepSpeed refuses 0
        decided += [
            ("scheduler.params.warmup_min_lr", 0.0, None, "warmup_min_lr" in taken),
            ("scheduler.params.warmup_max_lr", args.learning_rate, "--learning_rate", "warmup_max_lr" in taken),
            ("scheduler.params.warmup_num_steps", warmup, "the flags' warm-up", "warmup_num_steps" in taken),
            ("scheduler.params.total_num_steps", steps, "the run's length", "total_num_steps" in taken),
        ]
    if "zero_optimization" in config and hidden_size is not None:
        decided += [
            ("zero_optimization.reduce_bucket_size", hidden_size**2, None, False),
            ("zero_optimization.stage3_prefetch_bucket_size", int(0.9 * hidden_size**2), None, False),
            ("zero_optimization.stage3_param_persistence_threshold", 10 * hidden_size, None, False),
        ]
    return [entry for entry in decided if entry[1] is not None]


def _refuse_keys(config: dict[str, Any]) -> list[str]:
    """Name misspelt keys, blocks that are none, and fp16; what is named is taken out so that the rest can be read."""
    problems = []
    for key in list(config):
        near = ["bf16"] if key == "bfloat16" else difflib.get_close_matches(key, GUARDED, n=1, cutoff=0.85)
        if near and near != [key]:
            problems.append(f"unknown key {key!r} (did you mean {near[0]!r}?)")
    for block in [name for name in BLOCKS if name in config]:
        value = config[block].get("params", {}) if isinstance(config[block], dict) else config[block]
        if not isinstance(value, dict):
            problems.append(f"{block} must be an object, with params an object, not {_show(value)}")
            del config[block]
        elif block in ("fp16", "amp"):
            problems += _settle(config, f"{block}.enabled", False, "a Gaudi, which trains in bf16 (--bf16),", True)
    return problems


def _settle(config: dict[str, Any], key: str, value: Any, source: str | None, fill_missing: bool) -> list[str]:
    """Fill a dotted key, or return how it contradicts ``source``; None for ``source`` is a default, not a claim."""
    *parents, last = key.split(".")
    node = config
    for parent in parents:
        node = node.setdefault(parent, {})
    if node.get(last) == "auto" or (last not in node and fill_missing):
        node[last] = value
    if source is None or last not in node or _same(node[last], value):
        return []
    return [f"{key} is {_show(node[last])}, but {source} gives {_show(value)}"]


def _same(found: Any, value: Any) -> bool:
    """Equal and of one JSON type; an integer may stand where a number with a fraction is due, not the reverse."""
    if isinstance(value, list):
        return isinstance(found, list) and len(found) == len(value) and all(map(_same, found, value))
    kinds = ("integer", "number") if isinstance(value, float) else (json_kind(value),)
    return json_kind(found) in kinds and found == value


def _show(value: Any) -> str:
    return f"{json.dumps(value)} ({json_kind(value)})"
