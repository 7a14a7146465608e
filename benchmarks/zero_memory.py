"""Memory of one rank of 8 under DDP and each file of `deepspeed_configs/`, beside the formulas of the ZeRO paper.

python -m benchmarks.zero_memory [--write]

Counted on the simulated HPU (`--mode shapes`: nothing is computed), so the numbers are the same on every machine. Each
row is two training steps of one micro-batch of 1 x 1,024 tokens with bf16 and torch's AdamW. ``--write`` puts the
tables into `deepspeed_configs/README.md`. The formulas: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training
Trillion Parameter Models", 2020, section 5 and figure 1.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
README = REPOSITORY / "deepspeed_configs" / "README.md"
DEVICES = 8
GB = 1e9
ADAM = 12  # the paper's K: fp32 weights, momentum and variance
TOKENS = 1024
# Of the model states, what the paper's stages share out: (whole, shared) bytes per parameter, K written out.
FORMULAS = {"ddp": (4 + ADAM, 0), "zero1": (4, ADAM), "zero2": (2, 2 + ADAM), "zero3": (0, 4 + ADAM)}
FILES = ("zero1", "zero2", "zero2_offload", "zero3", "zero3_offload")
T5_3B = {"d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32, "vocab_size": 32128}
LLAMA_7B = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT-2 medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16, "n_positions": TOKENS}),
    "T5-3B": ("t5", {**T5_3B, "decoder_start_token_id": 0}),
    "Llama 7B": ("llama", {**LLAMA_7B, "vocab_size": 32000}),
}
LARGE = ("T5-3B", "Llama 7B")
CARDS = {"gaudi": 32 * 2**30, "gaudi2": 96 * 2**30}


def formula(strategy: str, parameters: float, devices: int = DEVICES) -> float:
    """Return the paper's bytes of model states on one rank; for an offload file those of its stage."""
    whole, shared = FORMULAS[strategy.removesuffix("_offload")]
    return parameters * (whole + shared / devices)


# --- On the simulated device -----------------------------------------------------------------------------------------


def build(model: str, strategy: str) -> tuple[Any, Any]:
    """Return what trains: (called and stepped model or engine, optimiser or None where the engine has it)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind, sizes = MODELS[model]
    config = AutoConfig.for_model(kind, **sizes, use_cache=False)
    auto = AutoModelForSeq2SeqLM if kind == "t5" else AutoModelForCausalLM
    if strategy == "ddp":
        net = auto.from_config(config, dtype=torch.float32).to("hpu")
        net.gradient_checkpointing_enable()
        optimizer = torch.optim.AdamW(net.parameters())
        ddp = torch.nn.parallel.DistributedDataParallel
        return ddp(net, gradient_as_bucket_view=True, static_graph=True, broadcast_buffers=False), optimizer
    import deepspeed
    from transformers.integrations import HfDeepSpeedConfig

    deepspeed.init_distributed(dist_init_required=False)
    zero = resolved(strategy, config.hidden_size)
    kept = HfDeepSpeedConfig(zero)  # stage 3: the model is built in shares
    net = auto.from_config(config, dtype=torch.bfloat16)
    del kept
    net.gradient_checkpointing_enable()
    zero |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    engine, *_ = deepspeed.initialize(
        model=net, config=zero, optimizer=torch.optim.AdamW(net.parameters()), dist_init_required=False
    )
    return engine, None


def resolved(strategy: str, hidden_size: int) -> dict[str, Any]:
    """Return the file as a run with ``--bf16`` fills it."""
    from core import arguments, deepspeed_config
    from core.gaudi_config import GaudiConfig

    flags = ["--deepspeed", strategy, "--bf16", "True", "--optim", "adamw_torch", "--per_device_train_batch_size", "1"]
    args = arguments.StrictParser(arguments.SHARED_GROUPS, "").parse_strictly(flags)
    return deepspeed_config.resolve(deepspeed_config.load(strategy), args, DEVICES, hidden_size, None, GaudiConfig())


def measure(model: str, strategy: str) -> dict[str, int]:
    """Train two steps and return what was counted, in bytes.

    Returns:
        ``parameters`` (their number), bytes ``before`` and ``after`` the second optimiser step, ``peak``, and ``host``.
    """
    import torch

    torch.distributed.init_process_group("cpu:gloo,hpu:hccl")
    trained, optimizer = build(model, strategy)
    parameters = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in trained.parameters())
    ids = torch.ones(1, TOKENS, dtype=torch.int64).to("hpu")
    for _ in range(2):
        with torch.autocast("hpu", torch.bfloat16, enabled=strategy == "ddp"):
            loss = trained(input_ids=ids, labels=ids).loss
        (loss if optimizer else trained).backward(*([] if optimizer else [loss]))
        del loss
        before = torch.hpu.memory_allocated()
        if optimizer:
            torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        else:
            trained.step()
    after, peak = torch.hpu.memory_allocated(), torch.hpu.max_memory_allocated()
    return {"parameters": parameters, "before": before, "after": after, "peak": peak, "host": host_bytes()}


def measure_each(rows: list[tuple[str, str]]) -> None:
    """Print `measure` of each as a line of JSON, each in a copy of this process, which imports everything once."""
    import deepspeed  # noqa: F401
    import transformers.integrations.deepspeed  # noqa: F401
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, T5ForConditionalGeneration  # noqa: F401

    for row in rows:
        child = os.fork()
        if child == 0:
            print(json.dumps(measure(*row)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(f"{row} failed")


def host_bytes() -> int:
    """Return the bytes of all tensors that live on the host."""
    import torch

    gc.collect()
    tensors = [item for item in gc.get_objects() if isinstance(item, torch.Tensor) and item.device.type == "cpu"]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


# --- Outside of it ---------------------------------------------------------------------------------------------------


def simulate(rows: list[tuple[str, str]]) -> list[dict[str, int]]:
    """Return what `measure` counts for each (model, strategy), on a simulated card that is large enough for all.

    Raises:
        RuntimeError: one failed; the message is the end of what was said.
    """
    options = ["--mode", "shapes", "--generation", "gaudi3", "--devices", str(DEVICES), "--batch_flag", "none"]
    command = [sys.executable, "-m", "hpu_simulator", *options, "-m", "benchmarks.zero_memory"]
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    environ = {**kept, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PT_HPU_LAZY_MODE": "0"}
    words = [word for row in rows for word in row]
    done = subprocess.run([*command, "--measure", *words], cwd=REPOSITORY, env=environ, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or len(lines) != len(rows):
        raise RuntimeError(f"{rows}: {done.stderr[-3000:]}")
    return [json.loads(line) for line in lines]


def states_table() -> str:
    """Return the table of the middle-sized model: every strategy beside its formula."""
    rows = ["| | formula | before the step | after it | peak | on the host |", "|---|---|---|---|---|---|"]
    strategies = ("ddp", *FILES)
    for strategy, found in zip(strategies, simulate([("GPT-2 medium", name) for name in strategies]), strict=True):
        numbers = (formula(strategy, found["parameters"]), found["before"], found["after"], found["peak"])
        host = found["host"] if strategy.endswith("offload") else 0
        cells = [f"{number / GB:.2f}" for number in (*numbers, host)]
        rows.append(f"| {'no ZeRO (DDP)' if strategy == 'ddp' else f'`{strategy}.json`'} | {' | '.join(cells)} |")
    return "\n".join(rows)


def large_rows(measured: list[tuple[str, str]]) -> list[str]:
    """Return a row for each (large model, strategy): what it needs, and which card it fits."""
    rows = []
    for (model, strategy), found in zip(measured, simulate(measured), strict=True):
        numbers = (formula(strategy, found["parameters"]), found["before"], found["peak"])
        fits = ["yes" if found["peak"] <= limit else "no" for limit in CARDS.values()]
        cells = [f"{number / GB:.2f}" for number in numbers] + fits
        rows.append(f"| {model} | `{strategy}.json` | {' | '.join(cells)} |")
    return rows


def large_table() -> str:
    """Return the table of the large models."""
    cards = [f"{name} ({limit / GB:.1f} GB)" for name, limit in CARDS.items()]
    head = [f"| | | formula | before the step | peak | {' | '.join(cards)} |", "|---|---|---|---|---|---|---|"]
    stages = ("zero1", "zero2", "zero3")
    return "\n".join(head + large_rows([(model, stage) for model in LARGE for stage in stages]))


TABLES = {"states": states_table, "large": large_table}


def stored(name: str, text: str | None = None) -> str:
    """Return that table of the README; with ``text`` the README in which it stands in its place."""
    pattern = re.compile(rf"(<!-- {name}: .*?-->\n)(.*?)(<!-- end -->)", re.DOTALL)
    readme = README.read_text(encoding="utf-8")
    if text is None:
        return pattern.search(readme)[2].rstrip("\n")
    return pattern.sub(lambda match: match[1] + text + "\n" + match[3], readme)


def main() -> None:
    """Print the tables, and write them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the tables into deepspeed_configs/README.md")
    parser.add_argument("--measure", nargs="+", metavar="MODEL STRATEGY", help="rows, on the simulated device")
    args = parser.parse_args()
    if args.measure:
        measure_each(list(zip(args.measure[::2], args.measure[1::2], strict=True)))
        return
    for name, table in TABLES.items():
        made = table()
        print(made, end="\n\n", flush=True)
        if args.write:
            README.write_text(stored(name, made), encoding="utf-8")


if __name__ == "__main__":
    main()
