"""Language modeling: train and evaluate causal (GPT-2, Llama) and masked (BERT, RoBERTa) models on text.

One device:    python recipes/language_modeling/run.py --gaudi_config gaudi_configs/gpt2.json
Eight devices: python gaudi_spawn.py --world_size 8 recipes/language_modeling/run.py --gaudi_config gpt2

A named model is fine-tuned (with ``--lora_rank``: adapters alone), a named configuration is pre-trained. Without model
and data it trains a small GPT-2 (``--objective masked``: a small BERT) on documentation that every machine has.
Expected: test perplexity 11, where a trigram model, printed beside it, has 15 (masked: 18 to 23, a unigram model 198).
"""

# --- Bootstrap and imports --------------------------------------------------------------------------------------------
# torch and what builds on it are imported inside functions: the execution mode has to be in the environment before
# torch loads the Gaudi bridge, and --help answers at once.

from __future__ import annotations

import math
import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

for folder in Path(__file__).resolve().parents:  # a copy beside this folder finds core; elsewhere it is installed
    if (folder / "core" / "engine.py").is_file():
        sys.path.insert(0, str(folder))
        break

from core import hub, ngrams, splits
from core.arguments import flag, parse_arguments, switch
from core.errors import UserError, exit_with_one_line, say, warn_once
from core.mixed_precision import prepare_environment
from core.prose import prose_splits, train_byte_level_bpe

if TYPE_CHECKING:
    import torch

    from core.data import Batch
    from core.engine import Engine
    from core.run import Run
    from core.stream import Loader

LINES = ("wikitext",)  # data sets whose rows are lines: no row is the end of a document

# --- Arguments --------------------------------------------------------------------------------------------------------


@dataclass
class LanguageModelingArguments:
    """Which model and objective, which text, and how it is cut into rows."""

    _argument_group_name = "model and data"
    objective: Literal["causal", "masked"] | None = flag(None, "what is predicted (default: what the model is for)")
    model_name_or_path: str | None = flag(None, "a hub's model or a folder (default: a small one, built here)")
    model_type: str | None = flag(None, "the same with a model type's default configuration, e.g. gpt2")
    config_overrides: str | None = flag(None, "changes of a configuration to train from scratch, n_embd=10,n_layer=2")
    torch_dtype: Literal["auto", "float32", "bfloat16"] | None = flag(None, "of loaded weights (bf16 LoRA: bfloat16)")
    validation_split_percentage: float = flag(5.0, "share of the training rows to evaluate on, where no split is there")
    streaming: bool = flag(False, "read the data while training, needs --max_steps")
    text_column: str | None = flag(None, "default: text, else the first column", aliases=["--text_column_name"])
    instruction_column_name: str | None = flag(None, "rows of prompt and answer: the instructions")
    input_column_name: str | None = flag(None, "the same: what the instructions are about")
    output_column_name: str | None = flag(None, "the same: the answers")
    chat_prompt: bool = flag(False, "write prompts and answers with the tokenizer's chat template")
    train_on_inputs: bool = flag(True, "prompts bear loss too, not the answers alone")
    dataset_concatenation: bool = flag(False, "pack rows of prompt and answer into blocks, as texts always are")
    keep_linebreaks: bool = flag(True, "keep the line breaks of txt files")
    line_by_line: bool = flag(False, "each row is a row of the batch, padded, instead of blocks of joined rows")
    append_eos: bool | None = switch("mark the end of each document (default: unless the data set's rows are lines)")
    pack_documents: bool = flag(False, "the documents in a block do not attend to each other")
    block_size: int | None = flag(None, "tokens of a row", aliases=["--max_seq_length", "--max_seq_len"])
    mlm_probability: float = flag(0.15, "share of the tokens that a masked model has to predict")
    save_last_ckpt: bool = flag(True, "save the trained model at the end")
    sample_prompt: str | None = flag(None, "at the end, show how a causal model goes on with this text")


def check(args: Namespace) -> None:
    """Refuse flags that contradict each other, before anything is loaded."""
    args.prompts = args.chat_prompt or args.instruction_column_name or args.input_column_name or args.output_column_name
    args.rowwise = args.line_by_line or (args.prompts and not args.dataset_concatenation)
    problems = {
        "--config_overrides needs a model from scratch": args.config_overrides and args.model_name_or_path,
        "--mlm_probability must be above 0 and below 1": not 0 < args.mlm_probability < 1,
        "--streaming packs texts into blocks, so it goes with no --line_by_line": args.streaming and args.rowwise,
        "--streaming needs named data": args.streaming
        and not (args.dataset_name or args.train_file or args.validation_file),
        "--pack_documents is about blocks, not about a row for each document": args.pack_documents and args.rowwise,
        "--torch_dtype needs a model to load": args.torch_dtype and not args.model_name_or_path,
        "LoRA's other flags need --lora_rank": not args.lora_rank and hub.lora_flags(args),
        "--train_on_inputs False needs rows of prompt and answer, not packed": not args.train_on_inputs
        and not (args.prompts and args.rowwise),
    }
    if any(problems.values()):
        raise UserError("; ".join(problem for problem, found in problems.items() if found))
    if args.dataset_concatenation and not args.lora_rank:
        warn_once("no --lora_rank is given: all weights are trained")


# --- Data -------------------------------------------------------------------------------------------------------------


def load_data(args: Namespace, output_dir: Path) -> dict[str, Any]:
    """Return the splits that the flags ask for: rows of text, of prompt and answer, or of ``input_ids``."""
    files = {split: getattr(args, f"{split}_file") for split in splits.PHASES}
    if args.dataset_name or any(files.values()):
        text = {"sample_by": "line" if args.line_by_line else "paragraph", "keep_linebreaks": args.keep_linebreaks}
        found = hub.load_splits(args, files, text, args.streaming)
    else:
        found = prose_splits(output_dir / "data")
    splits.add_validation(found, args)
    return {split: found[split] for split in splits.needed_splits(args, found)}


def tokenize(rows: Any, tokenizer: Any, args: Namespace) -> Any:
    """Return documents of ``input_ids``, their ends marked; with ``labels``, if prompts bear no loss."""
    from core.documents import prompt_columns, prompt_encoder, text_encoder

    if "input_ids" in splits.columns_of(rows) and not args.text_column:
        return splits.token_column(rows, len(tokenizer))
    marks = args.append_eos if args.append_eos is not None else Path(args.dataset_name or "").name not in LINES
    last = tokenizer.eos_token_id if args.objective == "causal" else tokenizer.sep_token_id
    end, limit = [last] if marks and last is not None else [], args.block_size if args.rowwise else None
    if args.prompts:
        encode = prompt_encoder(tokenizer, prompt_columns(splits.columns_of(rows), args), args, end, limit)
    else:
        encode = text_encoder(tokenizer, splits.text_column(rows, args.text_column), end, limit)
    return splits.map_rows(rows, encode, args, ["input_ids"] if args.train_on_inputs else ["input_ids", "labels"])


def make_loader(args: Namespace, rows: Any, tokenizer: Any, split: str) -> Loader:
    """Tokenize a split and cut it into blocks (or rows, each one a document); masks are drawn anew in every epoch."""
    from core.data import BatchLoader
    from core.documents import collate_tokens, masking
    from core.packing import Blocks
    from core.stream import StreamLoader

    train, causal, length = split == "train", args.objective == "causal", args.block_size
    documents, limit = tokenize(rows, tokenizer, args), getattr(args, f"max_{splits.PHASES[split]}_samples")
    padded = partial(collate_tokens, pad=tokenizer.pad_token_id, causal=causal, apart=args.pack_documents)
    augment = None if causal else masking(tokenizer, args.mlm_probability)
    if args.streaming:
        return StreamLoader.from_arguments(args, documents, padded, length, train, augment, limit)
    if args.rowwise:
        rows, lengths = splits.whole_rows(documents, length, limit, split)
    else:
        rows = Blocks(documents, length, limit, f"{split} split", may_be_short=not train)
        lengths = rows.lengths
        say(f"{split}: {rows.describe()}")
    return BatchLoader.from_arguments(args, rows, padded, lengths, (length,), train, augment)


# --- Model ------------------------------------------------------------------------------------------------------------


def build_model(args: Namespace, run: Run, data: dict[str, Any]) -> tuple[Any, Any]:
    """Load tokenizer and model (or build small ones from the texts and the seed), and add adapters if asked to."""
    from transformers import MODEL_FOR_MASKED_LM_MAPPING as MASKED_MODELS
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, AutoTokenizer

    from core import adapters, attention, heads

    name, options = args.model_name_or_path or args.config_name, hub.model_options(args)
    with hub.loading(f"the model {name or args.model_type}", name, args.tokenizer_name):
        if config := hub.load_config(args):
            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_name or name, **options)
        else:
            tokenizer, config = small_model(args, data)
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
        looks_ahead = type(config) in MASKED_MODELS and not getattr(config, "is_decoder", False)
        args.objective = args.objective or ("masked" if looks_ahead and not config.is_encoder_decoder else "causal")
        kind = AutoModelForCausalLM if args.objective == "causal" else AutoModelForMaskedLM
        if args.objective == "causal":
            hub.look_back(config)
        attention.register(run.device, args)
        how = {"attn_implementation": attention.supported(kind, attention.choose(args, run.device), config)}
        if args.model_name_or_path:
            how["dtype"] = args.torch_dtype or ("bfloat16" if args.bf16 and args.lora_rank else "float32")
            model = kind.from_pretrained(name, config=config, use_safetensors=True, **how, **options)
        else:
            model = kind.from_config(config, dtype="float32", **how)
    model.config.use_cache = args.use_cache
    settle(args, tokenizer, model)
    if args.lora_rank:
        lora = (args.lora_rank, args.lora_alpha, args.lora_dropout, args.lora_target_modules)
        adapters.add_lora(model, *lora, args.seed)
    heads.narrow(model, run.device)
    return tokenizer, model


def settle(args: Namespace, tokenizer: Any, model: Any) -> None:
    """Choose the block size where no flag does, and see that flags, tokenizer and model fit together."""
    from core.documents import require_opening
    from core.packing import require_separable

    args.block_size = hub.choose_length(model, tokenizer, args.block_size)
    hub.fit(model, tokenizer, args.block_size)
    if args.pack_documents and args.objective == "causal":
        require_separable(model, args.block_size)
    if args.sample_prompt is not None:
        require_opening(tokenizer, args)


def small_model(args: Namespace, data: dict[str, Any]) -> tuple[Any, Any]:
    """Train a byte-level tokenizer on the texts, and configure a GPT-2 of 1.0 million parameters, or a BERT of 0.5."""
    from transformers import BertConfig, GPT2Config

    rows = data.get("train") or next(iter(data.values()))
    column, masked = splits.text_column(rows, args.text_column), args.objective == "masked"
    tokenizer = train_byte_level_bpe((row[column] or "" for row in islice(rows, 100_000)), 512, masked)
    if masked:
        sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2}
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "initializer_range": 0.1}
        return tokenizer, BertConfig(vocab_size=512, max_position_embeddings=128, type_vocab_size=1, **sizes)
    sizes = {"n_positions": 128, "n_embd": 192, "n_layer": 2, "n_head": 3, "initializer_range": 0.05}
    sizes |= dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) | {"bos_token_id": 1, "eos_token_id": 1}
    return tokenizer, GPT2Config(vocab_size=512, activation_function="gelu", **sizes)


# --- Task functions: loss and baseline --------------------------------------------------------------------------------


def predict(model: Any, batch: Batch) -> torch.Tensor:
    """The logits of each position's label: (rows, length, vocabulary)."""
    from core.attention import one_document_a_row
    from core.packing import packed_inputs

    causal = "attention_mask" not in batch
    inputs = {"use_cache": False} if causal else {"attention_mask": batch["attention_mask"]}
    if "document_ids" in batch:
        inputs |= packed_inputs(batch["document_ids"], causal, model.config._attn_implementation)
    with one_document_a_row():
        return model(batch["input_ids"], **inputs).logits


def loss_sum(model: Any, batch: Batch, smoothing: float = 0.0) -> torch.Tensor:
    """Sum of the cross-entropies of all real targets, a scalar in fp32. It takes the logits' memory: they end here."""
    from core import heads, losses

    with heads.targets_only(model, batch["labels"]) as labels:
        return losses.cross_entropy_sum(predict(model, batch), labels, smoothing)


def baseline(args: Namespace, loaders: dict[str, Loader], split: str, phase: str) -> dict[str, float]:
    """Perplexity of a count model of the training tokens, on the targets that the model is evaluated on."""
    tokens = (row["input_ids"] for row in loaders["train"].dataset)
    if args.objective == "causal":
        blocks = (row["input_ids"] for row in loaders[split].dataset)
        return {f"{phase}_trigram_perplexity": ngrams.trigram_perplexity(tokens, blocks)}
    hidden = (row["labels"][row["labels"] >= 0] for row in loaders[split].rows())
    return {f"{phase}_unigram_perplexity": ngrams.unigram_perplexity(tokens, hidden)}


# --- Train ------------------------------------------------------------------------------------------------------------


def train(engine: Engine, tokenizer: Any, smoothing: float, evaluation: Callable[[], dict]) -> dict[str, Any]:
    """The loop: one window is one optimiser step; the engine owns normalisation, clipping and step boundaries."""
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_sum(engine.model, batch, smoothing)
            engine.backward(loss)
        engine.step(window)
        if engine.due("log"):
            engine.log()
        if engine.due("eval"):
            engine.evaluate(evaluation)
        if engine.due("save"):
            engine.save(tokenizer)
    return engine.finish_training()


# --- Evaluate ---------------------------------------------------------------------------------------------------------


def evaluate(run: Run, loader: Loader, phase: str) -> dict[str, Any]:
    """Return loss and perplexity per target, accuracy and speed of a split."""
    import torch

    from core.losses import cross_entropy_sum

    def forward(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = predict(run.inference_model(), batch), batch["labels"]
        counts = torch.stack([(logits.argmax(-1) == labels).sum(-1), (labels >= 0).sum(-1)], dim=-1)
        return cross_entropy_sum(logits, labels), counts

    metrics, counts = run.evaluate(loader, forward, phase)
    hits, targets = torch.stack(counts).sum(0).tolist()
    perplexity = math.exp(min(metrics[f"{phase}_loss"], 700))  # beyond it a float has no number
    metrics |= {f"{phase}_perplexity": perplexity, f"{phase}_accuracy": hits / max(targets, 1)}
    return metrics | ({"perplexity": perplexity} if phase == "eval" else {})  # its published name


def sample(run: Run, tokenizer: Any, prompt: str) -> None:
    """Show how the model goes on with a prompt."""
    import torch

    from core.documents import opening

    ids = run.device.move({"inputs": torch.tensor([opening(tokenizer, prompt)])}, False)
    count = min(100, run.args.block_size - ids["inputs"].shape[1])
    options = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": True, "top_p": 0.9}
    with run.autocast():
        tokens = run.inference_model().generate(**ids, **options, use_cache=run.args.use_cache)
    say(f"\nsample: {tokenizer.decode(tokens[0], skip_special_tokens=True)}")


# --- Main -------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run what the flags ask for, write ``all_results.json``, and return its metrics."""
    groups = (LanguageModelingArguments, hub.LoraArguments, hub.HubArguments, hub.TokenizerArguments)
    built_in = (lambda args: Path(__file__).with_name(f"built_in_{args.objective or 'causal'}.json"), hub.NAMED)
    args = parse_arguments(argv, *groups, description=__doc__, built_in=built_in)
    gaudi_config = prepare_environment(args)
    from core.engine import Engine
    from core.run import Run

    check(args)
    run = Run(args, gaudi_config, Path(__file__).parent.name)
    data = load_data(args, run.output_dir)
    tokenizer, model = build_model(args, run, data)
    loaders = {split: make_loader(args, rows, tokenizer, split) for split, rows in data.items()}
    if args.do_train:
        engine = Engine(run, model, loaders["train"])
        evaluation = partial(evaluate, run, loaders.get("validation"), "eval")
        metrics = train(engine, tokenizer, args.label_smoothing_factor, evaluation)
        if args.save_last_ckpt:
            run.save_model(run.output_dir, tokenizer)
        run.end_if_asked("training is at its end; evaluation was not")
        run.report("train", metrics)
    else:
        run.place(model)
    counts = args.do_train and not any(getattr(args, name, None) for name in hub.NAMED)
    for split, phase in (("validation", "eval"), ("test", "predict")):
        if getattr(args, f"do_{phase}"):
            metrics = evaluate(run, loaders[split], phase)
            run.report(phase, metrics | (baseline(args, loaders, split, phase) if counts else {}))
    if args.sample_prompt and args.objective == "causal":
        sample(run, tokenizer, args.sample_prompt)
    return run.finish()


if __name__ == "__main__":
    exit_with_one_line(main, preemptible=True)
