"""A script on transformers' ``Seq2SeqTrainer``, as one writes it: what our recipe's memory and start are compared with.

python -m benchmarks.seq2seq_script --train_file rows.jsonl --validation_file more.jsonl --output_dir x --do_train ...

Rows have ``text`` and ``summary``. Without a model it trains a tokenizer on them and builds the recipe's small T5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import transformers
from rouge_score.rouge_scorer import RougeScorer
from transformers import (
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    HfArgumentParser,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    T5Config,
    set_seed,
)


@dataclass
class ScriptArguments:
    """Model and data."""

    train_file: str = field(metadata={"help": "jsonl with text and summary"})
    validation_file: str = field(metadata={"help": "the same, to evaluate"})
    model_name_or_path: str | None = field(default=None, metadata={"help": "a folder (default: a small model)"})
    max_source_length: int = field(default=1024, metadata={"help": "tokens of a text"})
    max_target_length: int = field(default=128, metadata={"help": "tokens of a summary"})


def load_model(args: ScriptArguments, rows: Any) -> tuple[Any, Any]:
    """Load the tokenizer and the model, or build what the recipe builds."""
    if args.model_name_or_path:
        tokenizer = AutoTokenizer.from_pretrained(args.model_name_or_path)
        return tokenizer, AutoModelForSeq2SeqLM.from_pretrained(args.model_name_or_path)
    from core.sample_data import train_tokenizer

    tokenizer = train_tokenizer([*rows["text"][:], *rows["summary"][:]], vocab_size=2000)
    sizes = {"vocab_size": 2000, "d_model": 128, "d_kv": 32, "d_ff": 256, "num_layers": 1, "num_heads": 4}
    config = T5Config(**sizes, decoder_start_token_id=0, dropout_rate=0.0)
    return tokenizer, AutoModelForSeq2SeqLM.from_config(config)


def main() -> None:
    """Train, evaluate and save."""
    args, training = HfArgumentParser((ScriptArguments, Seq2SeqTrainingArguments)).parse_args_into_dataclasses()
    transformers.utils.logging.set_verbosity_warning()
    set_seed(training.seed)
    files = {"train": args.train_file, "validation": args.validation_file}
    data = datasets.load_dataset("json", data_files=files)
    tokenizer, model = load_model(args, data["train"])
    training.generation_max_length = training.generation_max_length or args.max_target_length

    def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        found = tokenizer(batch["text"], max_length=args.max_source_length, truncation=True)
        labels = tokenizer(text_target=batch["summary"], max_length=args.max_target_length, truncation=True)
        return {**found, "labels": labels["input_ids"]}

    def score(found: Any) -> dict[str, float]:
        both = (np.where(tokens < 0, tokenizer.pad_token_id, tokens) for tokens in (found.predictions, found.label_ids))
        texts = [tokenizer.batch_decode(tokens, skip_special_tokens=True) for tokens in both]
        scorer = RougeScorer(kinds := ["rouge1", "rouge2", "rougeL", "rougeLsum"], use_stemmer=True)
        scores = [scorer.score(reference, prediction) for prediction, reference in zip(*texts, strict=True)]
        return {kind: 100 * sum(one[kind].fmeasure for one in scores) / len(scores) for kind in kinds}

    data = data.map(encode, batched=True, remove_columns=data["train"].column_names)
    trainer = Seq2SeqTrainer(
        model=model,
        args=training,
        train_dataset=data["train"] if training.do_train else None,
        eval_dataset=data["validation"] if training.do_eval else None,
        processing_class=tokenizer,
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        compute_metrics=score if training.predict_with_generate else None,
    )
    if training.do_train:
        trainer.train()
        trainer.save_model()
    if training.do_eval:
        metrics = trainer.evaluate()
        trainer.log_metrics("eval", metrics)
        trainer.save_metrics("eval", metrics)


if __name__ == "__main__":
    main()
