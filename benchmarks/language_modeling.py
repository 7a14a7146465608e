"""Causal fine-tuning and masked pre-training beside transformers' `Trainer`, on the same documents of tokens.

Each is done in the two usual ways: documents joined and cut into blocks, where nobody pads, and a document a row, where
the `Trainer` has its grouping by length for causal models, and its own defaults for masked ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.contests import Contest, Measured, Row, Settings
from benchmarks.ours import FOREVER, train_in_turns
from benchmarks.turns import Turns, rates, take_turns

PAD, MASK, CLS, SEP, EOS = SPECIAL = range(5)
ROLES = {"pad_token": PAD, "mask_token": MASK, "cls_token": CLS, "sep_token": SEP, "eos_token": EOS}
RATE = 5e-5


@dataclass(frozen=True)
class Task:
    """What is trained.

    Attributes:
        causal: the next token is foretold, by a model with ``vocabulary`` tokens; else hidden ones.
        blocks: documents are joined and cut to ``length``; else each is a row, at most so long, of about ``median``.
        rows: how many there are; ``batch`` of them in a step.
    """

    causal: bool
    blocks: bool
    vocabulary: int
    length: int
    median: int
    rows: int
    batch: int = 16
    width: int = 256
    layers: int = 4
    heads: int = 4


TASKS = {
    "causal_rows": Task(True, False, 32_000, 256, 90, rows=128),
    "causal_blocks": Task(True, True, 32_000, 256, 90, rows=64),
    "masked_rows": Task(False, False, 30_522, 128, 45, rows=192),
    "masked_blocks": Task(False, True, 30_522, 128, 45, rows=128),
}


def task_of(name: str, settings: Settings) -> Task:
    """The task of this name, or a tiny one like it."""
    task = TASKS[name]
    if not settings.small:
        return task
    return Task(task.causal, task.blocks, 64, 16, 6, rows=10, batch=4, width=16, layers=1, heads=2)


# --- What both sides have in common -----------------------------------------------------------------------------------


def documents(task: Task) -> list[list[int]]:
    """Documents of random tokens whose lengths are lognormal, or blocks of them: ``task.rows`` in either case."""
    import numpy as np

    draw, found = np.random.default_rng(0), []
    wanted = task.rows * task.length
    while wanted > 0 if task.blocks else len(found) < task.rows:
        size = int(np.clip(draw.lognormal(np.log(task.median), 0.7), 4, task.length))
        size = min(size, wanted) if task.blocks else size  # the last block is full, too: neither side drops it
        tokens = draw.integers(len(SPECIAL), task.vocabulary, size=size).tolist()
        tokens[-1] = EOS if task.causal else SEP
        found.append(tokens)
        wanted -= size
    return found


def make_tokenizer(task: Task) -> Any:
    """One word for each number: texts are never seen, only who pads, masks and ends."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{number}": number for number in range(task.vocabulary)}
    roles = {role: f"w{number}" for role, number in ROLES.items()}
    model = Tokenizer(models.WordLevel(words, unk_token=roles["pad_token"]))
    return PreTrainedTokenizerFast(tokenizer_object=model, model_max_length=task.length, **roles)


def make_model(task: Task) -> Any:
    """A GPT-2 or a BERT, with the dropout of their configurations, 0.1."""
    import torch
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    if task.causal:
        sizes = {"n_embd": task.width, "n_layer": task.layers, "n_head": task.heads, "n_positions": task.length}
        ends = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": PAD}
        return GPT2LMHeadModel(GPT2Config(vocab_size=task.vocabulary, **sizes, **ends))
    sizes = {"hidden_size": task.width, "num_hidden_layers": task.layers, "num_attention_heads": task.heads}
    sizes |= {"intermediate_size": 4 * task.width, "max_position_embeddings": task.length}
    return BertForMaskedLM(BertConfig(vocab_size=task.vocabulary, pad_token_id=PAD, **sizes))


def prepare(task: Task, folder: Path) -> dict[str, Any]:
    """Write documents, tokenizer and model where both sides find them; returns facts."""
    import torch

    found, model = documents(task), make_model(task)
    with (folder / "documents.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"input_ids": tokens}) + "\n" for tokens in found)
    make_tokenizer(task).save_pretrained(folder / "model")
    model.save_pretrained(folder / "model")
    tokens = sum(map(len, found))
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "vocabulary": task.vocabulary,
        "documents": len(found),
        "tokens of a document, mean": round(tokens / len(found), 1),
        "rows": f"{task.rows} blocks of {task.length}" if task.blocks else f"{task.rows}, a document each",
        "tokens": tokens,
        "batch": task.batch,
        "dropout": 0.1,
        "precision": "bf16 autocast",
        "threads": torch.get_num_threads(),
        "optimiser, ours": "AdamW, fused",
        "optimiser, trainer": "its default (AdamW, fused)",
    } | ({} if task.causal else {"hidden": "15 % of the tokens"})


def measure(settings: Settings, name: str) -> Measured:
    """Both sides, epoch by epoch: real tokens a second (causal), rows a second (masked)."""
    task = task_of(name, settings)
    facts = prepare(task, settings.folder)
    environ = {"HF_DATASETS_CACHE": str(settings.folder / "cache")}
    reports = take_turns(__name__, [f"{name} ours", f"{name} trainer"], settings, environ)
    reports = {side.partition(" ")[2]: own for side, own in reports.items()}
    known = all(each["flops"] for each in reports["ours"])
    flops = [each["flops"] / each["seconds"] for each in reports["ours"]] if known else []
    for count in ("samples", "tokens", "steps"):
        facts[f"{count} of a turn"] = {side: [each[count] for each in own] for side, own in reports.items()}
    return Measured(rates(reports, "tokens" if task.causal else "samples"), facts, flops)


# --- The sides --------------------------------------------------------------------------------------------------------


def ours(settings: Settings, turns: Turns, name: str) -> None:
    """The recipe, as its command trains on a file."""
    task, shared = task_of(name, settings), settings.folder.parent
    flags = ["--model_name_or_path", shared / "model", "--train_file", shared / "documents.jsonl", "--bf16"]
    flags += ["--gaudi_config", "gpt2" if task.causal else "bert", "--per_device_train_batch_size", task.batch]
    flags += ["--learning_rate", RATE, "--block_size", task.length]
    flags += [] if task.blocks else ["--line_by_line"]
    train_in_turns("language_modeling", flags, settings, turns)


def blocks_of(rows: dict[str, list[list[int]]], length: int) -> dict[str, list[list[int]]]:
    """The documents of a batch joined and cut, as a function for ``Dataset.map``; what is left over is dropped."""
    joined = [token for tokens in rows["input_ids"] for token in tokens]
    return {"input_ids": [joined[at : at + length] for at in range(0, len(joined) - length + 1, length)]}


def rows_of(task: Task, path: Path) -> Any:
    """What a `Trainer` is given: rows of ``input_ids``, for masked models with the marks that their collator wants."""
    from datasets import load_dataset

    rows = load_dataset("json", data_files=str(path), split="train")
    if task.blocks:
        cut = partial(blocks_of, length=task.length)
        rows = rows.map(cut, batched=True, batch_size=None, remove_columns=rows.column_names)

    def add(row: dict[str, Any]) -> dict[str, Any]:
        marks = {"special_tokens_mask": [int(token in SPECIAL) for token in row["input_ids"]]}
        return {"attention_mask": [1] * len(row["input_ids"])} | ({} if task.causal else marks)

    return rows.map(add)


def grouping_trainer() -> type:
    """A `Trainer` that groups by length as it does in any corpus of thousands of rows: of so few it makes no groups."""
    from transformers import Trainer
    from transformers.trainer_pt_utils import LengthGroupedSampler, get_length_grouped_indices

    class Grouped(LengthGroupedSampler):
        def __iter__(self) -> Iterator[int]:
            batches = 50  # in a group, which is its own most
            return iter(get_length_grouped_indices(self.lengths, self.batch_size, batches, generator=self.generator))

    class GroupingTrainer(Trainer):
        def _get_train_sampler(self, *given: Any) -> Any:
            sampler = super()._get_train_sampler(*given)
            if isinstance(sampler, LengthGroupedSampler):
                sampler.__class__ = Grouped
            return sampler

    return GroupingTrainer


def trainer(settings: Settings, turns: Turns, name: str) -> None:
    """transformers' `Trainer` with its collator for language modeling; what it would write or show is off."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        TrainerCallback,
        TrainingArguments,
    )

    task, shared = task_of(name, settings), settings.folder.parent
    rows, steps = rows_of(task, shared / "documents.jsonl"), -(-task.rows // task.batch)
    counts = {"samples": len(rows), "tokens": sum(map(len, rows["input_ids"])), "steps": steps}

    class EpochsAreTurns(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if settings.device != "cpu":
                import torch

                torch.accelerator.synchronize()
            assert state.global_step % steps == 0, "an epoch has all rows"
            turns.over(**counts)

    arguments = TrainingArguments(
        output_dir=str(settings.folder / "run"),
        num_train_epochs=FOREVER,
        per_device_train_batch_size=task.batch,
        learning_rate=RATE,
        bf16=True,
        use_cpu=settings.device == "cpu",
        train_sampling_strategy="group_by_length" if task.causal and not task.blocks else "random",
        remove_unused_columns=False,  # it would take away the marks that spare the collator a search
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    kind = AutoModelForCausalLM if task.causal else AutoModelForMaskedLM
    tokenizer = AutoTokenizer.from_pretrained(shared / "model")
    collator = DataCollatorForLanguageModeling(tokenizer, mlm=not task.causal)
    grouping_trainer()(
        model=kind.from_pretrained(shared / "model", dtype="float32"),
        args=arguments,
        train_dataset=rows,
        data_collator=collator,
        processing_class=tokenizer,
        callbacks=[EpochsAreTurns()],
    ).train()


SIDES = {f"{name} {side.__name__}": partial(side, name=name) for name in TASKS for side in (ours, trainer)}
WORDS = {
    "causal_rows": ("causal fine-tuning, a document a row", "transformers Trainer, grouped by length"),
    "causal_blocks": ("causal fine-tuning, blocks of joined documents", "transformers Trainer"),
    "masked_rows": ("masked pre-training, a document a row", "transformers Trainer, its defaults"),
    "masked_blocks": ("masked pre-training, blocks of joined documents", "transformers Trainer, its defaults"),
}
CONTESTS = [
    Contest(
        name=f"language_modeling_{name}",
        unit="tokens/s" if TASKS[name].causal else "samples/s",
        rows=[Row(what, "trainer", peer, target=1.2)],
        measure=partial(measure, name=name),
    )
    for name, (what, peer) in WORDS.items()
]
