"""Flags that all recipes share, strict parsing, and run files (``--config``). Precedence: default < run file < flag."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from transformers import HfArgumentParser

from core.errors import Help, UserError, did_you_mean, warn_once
from core.run_files import read_run_file, require_values, run_file_flags


def flag(default: Any, help: str, **options: Any) -> Any:
    """A dataclass field that is a flag; ``least``, ``below`` and ``needs`` are `check`'s, other options argparse's."""
    how = {"default_factory": default.copy} if isinstance(default, list) else {"default": default}
    return field(**how, metadata={"help": help, **options})


def switch(help: str, **options: Any) -> Any:
    """A flag with three states: absent (None), given, or given with True or False."""
    return flag(None, help, nargs="?", const=True, **options)


@dataclass
class RunArguments:
    _argument_group_name = "run: what to do, where results go, how often to look"
    config: str | None = flag(None, "run file (JSON) with the flags of a published figure; flags given beside it win")
    do_train: bool = flag(False, "train")
    do_eval: bool = flag(False, "evaluate on the validation split")
    do_predict: bool = flag(False, "evaluate on the test split, and write the predictions")
    output_dir: str | None = flag(None, "folder for checkpoints, logs and results (default: runs/<recipe>/<time>)")
    overwrite_output_dir: bool = flag(False, "replace another run's results in the output folder")
    seed: int = flag(42, "seed of weights, order and dropout", below=2**32)
    data_seed: int | None = flag(None, "seed of the order alone (default: --seed)", below=2**32)
    max_train_samples: int | None = flag(None, "use N training rows only: the first, or of images drawn ones", least=1)
    max_eval_samples: int | None = flag(None, "the same for validation rows", least=1)
    max_predict_samples: int | None = flag(None, "the same for test rows", least=1)
    eval_strategy: Literal["no", "steps", "epoch"] = flag("no", "when to evaluate", aliases=["--evaluation_strategy"])
    eval_steps: int | None = flag(None, "optimiser steps between evaluations (default: --logging_steps)", least=1)
    eval_delay: float = flag(0.0, "no evaluation before so many steps, or epochs with --eval_strategy epoch")
    logging_strategy: Literal["no", "steps", "epoch"] = flag("steps", "when to log; the last step always is")
    logging_steps: int = flag(500, "optimiser steps between log records, each with loss, memory, throughput", least=1)
    logging_first_step: bool = flag(False, "log the first step too")
    logging_dir: str | None = flag(None, "folder of the trackers' files (default: <output_dir>/logs)")
    report_to: list[str] = flag(["all"], "trackers besides CSV: tensorboard, all, none, any of accelerate's")
    run_name: str | None = flag(None, "name of the run in the trackers")
    disable_tqdm: bool = flag(False, "no progress bar")
    save_strategy: Literal["no", "steps", "epoch"] = flag("steps", "when to save a checkpoint")
    save_steps: int = flag(500, "optimiser steps between checkpoints", least=1)
    save_total_limit: int | None = flag(None, "keep the newest N checkpoints (and the best one)", least=1)
    load_best_model_at_end: bool = flag(False, "end with the checkpoint of the best --metric_for_best_model")
    metric_for_best_model: str | None = flag(None, "metric that decides the best checkpoint (default: eval loss)")
    greater_is_better: bool | None = switch("whether a larger metric is better (default: unless a loss or perplexity)")
    resume_from_checkpoint: str | None = flag(None, "checkpoint to go on from; auto: newest", nargs="?", const="auto")
    on_save_error: Literal["stop", "continue"] = flag("stop", "if a checkpoint or a log cannot be written (disk full)")
    on_nonfinite: Literal["stop", "skip"] = flag("stop", "if a loss or gradient is no finite number; skip: no update")


@dataclass
class TrainingArguments:
    _argument_group_name = "training: hyper-parameters"
    num_train_epochs: float = flag(3.0, "epochs to train, if --max_steps is not given")
    max_steps: int = flag(-1, "optimiser steps to train; overrides --num_train_epochs", least=-1)
    per_device_train_batch_size: int = flag(8, "rows a device takes in one forward pass", least=1)
    per_device_eval_batch_size: int = flag(8, "rows a device evaluates at once", least=1)
    gradient_accumulation_steps: int = flag(1, "forward passes in one optimiser step", least=1)
    learning_rate: float = flag(5e-5, "peak learning rate; never scaled with the number of devices", below=1e35)
    lr_scheduler_type: str = flag("linear", "schedule of the learning rate, any name that transformers has")
    warmup_steps: int = flag(0, "optimiser steps of warm-up")
    warmup_ratio: float = flag(0.0, "warm-up as a share of all optimiser steps, if --warmup_steps is 0", below=1)
    optim: Literal["adamw_torch", "adamw_torch_fused", "adafactor", "lamb", "sgd"] = flag("adamw_torch", "optimiser")
    optim_args: str | None = flag(None, "further optimiser options, key=value[,key=value]")
    weight_decay: float = flag(0.0, "weight decay; biases and norms have none")
    adam_beta1: float = flag(0.9, "first moment's decay (AdamW, LAMB)", below=1)
    adam_beta2: float = flag(0.999, "second moment's decay (AdamW, LAMB)", below=1)
    adam_epsilon: float = flag(1e-6, "epsilon (AdamW, LAMB); 1e-6 as in Habana's FusedAdamW, torch's own is 1e-8")
    max_grad_norm: float = flag(1.0, "clip gradients to this L2 norm; 0 switches clipping off")
    label_smoothing_factor: float = flag(0.0, "share of the target spread over all classes, in training", below=1)
    gradient_checkpointing: bool = flag(False, "recompute activations in backward: less memory, a third more time")
    use_cache: bool = flag(True, "keep keys and values while generating; off in training with checkpointing")
    pad_to_max_length: bool = flag(False, "pad every row to the maximum lengths: one shape")
    length_buckets: int = flag(4, "without --pad_to_max_length: how many padded lengths there are", least=1)
    dataloader_num_workers: int = flag(0, "processes that prepare batches ahead; 0 prepares them in the main one")
    dataloader_drop_last: bool = flag(False, "drop the last, smaller batch instead of filling it with rows of weight 0")
    remove_unused_columns: bool = flag(True, "leave out columns that the model does not take")
    ignore_data_skip: bool = flag(False, "resume at the start of the epoch instead of at the exact row")


@dataclass
class DeviceArguments:
    _argument_group_name = "device: where and how the model executes"
    gaudi_config: str | None = flag(None, "JSON file, folder, t5 or Habana/t5", aliases=["--gaudi_config_name"])
    use_habana: bool | None = switch("train on a Gaudi; without one: a warning, and the next best device")
    use_cpu: bool = flag(False, "train on the CPU although there is an accelerator", aliases=["--no_cuda"])
    cpu_threads: int | None = flag(None, "threads of one operator on the CPU (default: torch's choice)", least=1)
    execution_mode: Literal["auto", "lazy", "eager", "compile"] = flag("auto", "auto: lazy on a Gaudi, else eager")
    use_lazy_mode: bool | None = switch("True: --execution_mode lazy; False: eager, or compile with --torch_compile")
    torch_compile: bool = flag(False, "--execution_mode compile")
    torch_compile_backend: str | None = flag(None, "compiler backend (default: hpu_backend on a Gaudi, else inductor)")
    torch_compile_mode: str | None = flag(None, "torch.compile's mode, e.g. reduce-overhead")
    compile_dynamic: bool | None = switch("compile for dynamic shapes")
    cache_size_limit: int | None = flag(None, "how many versions of a function the compiler keeps", least=1)
    use_regional_compilation: bool = flag(False, "compile the repeated blocks one by one: a shorter first step")
    compile_from_sec_iteration: bool = flag(False, "the run's first step is eager, compilation starts with the second")
    inline_inbuilt_nn_modules: bool | None = switch("torch._dynamo's option of this name")
    allow_unspec_int_on_nn_module: bool | None = switch("torch._dynamo's option of this name")
    use_compiled_autograd: bool = flag(False, "compile the backward pass too")
    bf16: bool = flag(False, "bf16 autocast; parameters stay fp32")
    bf16_full_eval: bool = flag(False, "evaluate with bf16 parameters, in runs without --do_train")
    half_precision_backend: Literal["auto", "hpu_amp", "cpu_amp"] = flag("auto", "whose operators autocast affects")
    fp16: bool = flag(False, "refused: use --bf16")
    fp8: bool = flag(False, "bf16 instead: fp8 needs Habana's transformer engine, which no recipe here uses")
    pipelining_fwd_bwd: bool = flag(False, "step boundary between forward and backward: both overlap on a Gaudi")
    non_blocking_data_copy: bool = flag(False, "copy batches to the device without waiting")
    use_hpu_graphs: bool = flag(False, "old name for both of the next two")
    use_hpu_graphs_for_training: bool = flag(False, "record the training graphs once and replay them")
    use_hpu_graphs_for_inference: bool = flag(False, "record graphs of evaluation and drawing, and replay them")
    max_hpu_graphs: int | None = flag(None, "how many graphs are kept for evaluation", least=1)
    disable_tensor_cache_hpu_graphs: bool = flag(False, "do not keep the graphs' inner tensors: less memory")
    attn_implementation: Literal["eager", "sdpa", "gaudi_fused_sdpa"] | None = flag(None, "default: the device's best")
    attn_softmax_bf16: bool = flag(False, "softmax of fused attention in bf16")
    use_flash_attention: bool = flag(False, "old name for --attn_implementation gaudi_fused_sdpa")
    flash_attention_recompute: bool = flag(False, "fused attention recomputes in backward: less memory")
    flash_attention_fast_softmax: bool = flag(False, "fused attention's fast softmax")
    flash_attention_causal_mask: bool = flag(False, "fused attention makes the causal mask itself")
    sdp_on_bf16: bool = flag(False, "torch's math attention may reduce in bf16")
    throughput_warmup_steps: int = flag(0, "first steps (drawing: batches, 0 is 2) that throughput leaves out")
    adjust_throughput: bool = flag(False, "leave out the time of logging, evaluation and saving")
    profiling_warmup_steps: int = flag(0, "forward passes that the profiler lets pass")
    profiling_steps: int = flag(0, "forward passes that the profiler records, into <output_dir>/profile")
    profiling_record_shapes: bool = flag(True, "record shapes in the profile")
    profiling_with_stack: bool = flag(False, "record Python lines in the profile")
    ignore_eos: bool | None = switch("generation goes on after a row's end token")


@dataclass
class DistributedArguments:
    _argument_group_name = "several devices"
    deepspeed: str | None = flag(None, "DeepSpeed configuration (JSON): how state is sharded")
    use_zero3_leaf_promotion: bool = flag(False, "ZeRO-3 gathers each repeated block at once, not layer by layer")
    distribution_strategy: Literal["ddp", "fast_ddp"] = flag("ddp", "how gradients are averaged over devices")
    reduction_dtype: Literal["fp32", "bf16"] = flag("fp32", "in which fast_ddp sums gradients over devices")
    ddp_bucket_cap_mb: int | None = flag(None, "MB of gradients that travel at once (Gaudi: 230, else 25)", least=1)
    ddp_find_unused_parameters: bool = flag(False, "DDP looks for parameters without a gradient at each step")
    ddp_timeout: int = flag(1800, "seconds until a collective gives up", least=1)
    fsdp: str | None = flag(None, "ZeRO-3 instead, which shards the same state")
    fsdp_config: str | None = flag(None, "ZeRO-3's own settings instead")
    context_parallel_size: int = flag(1, "1 instead: sequences are not split over devices")
    local_rank: int = flag(-1, "set by launchers; the environment decides", least=-1)


SHARED_GROUPS = (RunArguments, TrainingArguments, DeviceArguments, DistributedArguments)

# Published flags that a user may keep, and why they change nothing: each is said once when it is given.
NO_EFFECT = {
    "adjust_throughput": "throughput always leaves out compilation, logging, evaluation and saving, and shows them",
    "remove_unused_columns": "each recipe takes the columns that it needs and no others",
    "ignore_eos": "a generated row ends at its end token either way",
    "local_rank": "rank and world size come from the launcher's environment",
    "low_cpu_mem_usage": "weights are always read straight into the model",
    "use_fast_tokenizer": "a tokenizer of the fast kind is used wherever there is one",
    "use_fused_rope": "rotary embeddings are transformers' own",
    "fsdp_config": "--fsdp becomes ZeRO-3 here, with ZeRO-3's settings",
}
REFUSED = {"fp16": "Gaudi trains in bf16; use --bf16"}
# Published flags that ask for what is not here: what is used instead, said once; they go back to their defaults.
ZERO_3 = {"deepspeed": "zero3", "torch_compile": False, "torch_compile_backend": None, "torch_compile_mode": None}
SUBSTITUTES = {
    "fp8": ("bf16", {"bf16": True}),
    "fsdp": ("ZeRO-3, which shards the same state (--deepspeed zero3), without compilation", ZERO_3),
    "context_parallel_size": ("whole sequences on every device: more memory, and a larger global batch", {}),
}


class StrictParser(HfArgumentParser):
    """No prefix guessing; an error is a `UserError` of one line."""

    def __init__(self, groups: tuple[type, ...], description: str, aliases: Any = None, defaults: Any = None) -> None:
        how = {"formatter_class": Help, "allow_abbrev": False, "prog": "run.py", "usage": "%(prog)s [flags]"}
        super().__init__(groups, description=description, **how)
        self.set_defaults(**{n: list(v) if isinstance(v, list) else v for n, v in (defaults or {}).items()})
        for alias, name in (aliases or {}).items():
            action = self._option_string_actions[f"--{alias}"] = self._option_string_actions[f"--{name}"]
            action.option_strings.append(f"--{alias}")

    def add_argument_group(self, *args: Any, **options: Any) -> Any:
        group = super().add_argument_group(*args, **options)
        group.add_argument = lambda *names, add=group.add_argument, least=0, below=0, needs=0, **how: add(*names, **how)
        return group

    def error(self, message: str) -> Any:
        raise UserError(re.sub(r"^argument (--\w+)(/\S+)?:", r"\1:", message))

    def parse_strictly(self, argv: list[str], namespace: argparse.Namespace | None = None) -> argparse.Namespace:
        """Parse ``argv``; flags that ``namespace`` holds already are defaults."""
        self.compare_names(argv)
        args, unknown = self.parse_known_args(argv, namespace)
        if unknown:
            name, known = unknown[0].partition("=")[0], self._option_string_actions.keys() - {"--help"}
            what = "unknown flag" if name.startswith("-") else "a value without a flag:"
            raise UserError(f"{what} {name}{did_you_mean(name, sorted(known))}; --help lists all flags")
        return args

    def compare_names(self, argv: list[str]) -> None:
        """Refuse one flag under two names (an alias, ``--no_...``) with two values; the same value twice is fine."""
        said: dict[str, tuple[str, Any]] = {}
        for position, token in enumerate(argv):
            action = self._option_string_actions.get(name := token.partition("=")[0])
            if action is None or action.dest == "help":
                continue
            values = takewhile(lambda t: t.partition("=")[0] not in self._option_string_actions, argv[position + 1 :])
            value = getattr(self.parse_known_args([token, *values])[0], action.dest)
            first, before = said.setdefault(action.dest, (name, value))
            if before != value and first.replace("-", "_") != name.replace("-", "_"):
                raise UserError(f"{first} ({before}) and {name} ({value}) contradict each other; give one of them")


def parse_arguments(
    argv: list[str] | None,
    *groups: type,
    description: str,
    built_in: tuple[Path | Callable[[argparse.Namespace], Path], tuple[str, ...]] | None = None,
    aliases: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    implied: Mapping[str, tuple[str, ...]] | None = None,
) -> argparse.Namespace:
    """Parse flags and run file into one flat namespace, whose ``run_file`` is the file; check what needs no model.

    Args:
        argv: arguments without the program's name; None takes those of the process.
        groups: the recipe's own argument dataclasses, shown first in ``--help``.
        description: of ``--help``.
        built_in: a run file, or what chooses it by the flags, for when neither ``--config`` nor these flags are given.
        aliases: other names of flags, as other programs call them; each with the flag's own name.
        defaults: the recipe's own defaults of shared flags.
        implied: work (a ``do_`` flag) by what it needs: without any ``do_`` flag, that is done which has a flag here.

    Raises:
        UserError: an unknown, contradictory or impossible flag.
    """
    argv = require_values(sys.argv[1:] if argv is None else argv)
    parser = StrictParser((*groups, *SHARED_GROUPS), description, aliases, defaults)
    unsaid = dict.fromkeys(implied or {})  # None, until a flag says True or False
    args = parser.parse_strictly(argv, argparse.Namespace(**unsaid))
    if args.config is None and built_in and not any(getattr(args, name, None) for name in built_in[1]):
        args.config = str(built_in[0](args) if callable(built_in[0]) else built_in[0])
    config, run_file = args.config, read_run_file(args.config)
    if config is not None:
        try:
            args = parser.parse_strictly(run_file_flags(run_file["args"]), argparse.Namespace(**unsaid))
        except UserError as error:
            raise UserError(f"--config {config}: {error}") from None
        args = parser.parse_strictly(argv, args)
    args.config, args.run_file = config, run_file
    idle = not any(value for name, value in vars(args).items() if name.startswith("do_"))
    for work in (name for name in unsaid if getattr(args, name) is None):
        setattr(args, work, idle and any(getattr(args, name) for name in implied[work]))
    check(args, parser)
    return args


def check(args: argparse.Namespace, parser: StrictParser) -> None:
    """Refuse values and combinations that cannot work, all at once; say which flags change nothing."""
    given = {name for name, value in vars(args).items() if value != parser.get_default(name)}
    problems = [f"--{name}: {reason}" for name, reason in REFUSED.items() if name in given]
    for kind, one in ((group, f) for group in parser.dataclass_types for f in fields(group)):
        value, most = getattr(args, one.name), one.metadata.get("below", float("inf"))
        least = one.metadata.get("least", int(kind not in SHARED_GROUPS and type(value) is int))  # a recipe's: counts
        if isinstance(value, (int, float)) and not least <= value < most:  # nan, which compares false, is a problem too
            problems.append(f"--{one.name} must be at least {least} and below {most}, not {value}")
        if (needed := one.metadata.get("needs")) and one.name in given and not getattr(args, needed):
            warn_once(f"--{one.name} has no effect without --{needed}")
    if not any(value for name, value in vars(args).items() if name.startswith("do_")):
        problems.append("nothing to do: give --do_train, or one of the other --do_ flags")
    if args.max_steps == 0 or (args.max_steps < 0 and args.num_train_epochs == 0):
        problems.append("--max_steps 0 or --num_train_epochs 0 would train nothing; leave --do_train out instead")
    if args.warmup_steps and args.warmup_ratio:
        problems.append(f"--warmup_steps {args.warmup_steps} and --warmup_ratio {args.warmup_ratio}: give one of them")
    args.use_hpu_graphs_for_training |= args.use_hpu_graphs
    args.use_hpu_graphs_for_inference |= args.use_hpu_graphs
    if not (args.use_hpu_graphs_for_training or args.use_hpu_graphs_for_inference):
        graphs = given & {"max_hpu_graphs", "disable_tensor_cache_hpu_graphs"}
        problems += [f"--{name} needs --use_hpu_graphs_for_inference" for name in sorted(graphs)]
    if args.fsdp and args.deepspeed:
        problems.append(f"--fsdp {args.fsdp} and --deepspeed {args.deepspeed} both shard the model; give one")
    if problems:
        raise UserError("; ".join(problems))
    for name in sorted(given & SUBSTITUTES.keys()):
        instead, flags = SUBSTITUTES[name]
        warn_once(f"--{name} {getattr(args, name)}: not available here; used instead: {instead}")
        vars(args).update({name: parser.get_default(name)} | flags)
    for name in sorted(given & NO_EFFECT.keys()):
        warn_once(f"--{name} has no effect here: {NO_EFFECT[name]}")
