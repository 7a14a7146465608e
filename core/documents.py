"""From rows of text, or of prompt and answer, to documents of tokens; and the tokens that a model has to guess."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from jinja2 import TemplateError

from core.data import IGNORE_INDEX, Batch, pad_rows
from core.errors import UserError, did_you_mean, warn_once

Columns = dict[str, list[Any]]
# How a prompt is written where no chat template is asked for; a part that a row lacks is left out.
PROMPT = {"instruction": "Instruction: {}\n\n", "input": "Input: {}\n\n"}
ANSWER = "Response: "


def prompt_columns(names: Sequence[str], args: Namespace) -> dict[str, str | None]:
    """Return the columns of ``instruction``, ``input`` and ``output``: those asked for, else those of these names.

    Args:
        args: with ``instruction_column_name`` and so on.

    Raises:
        UserError: there is no such column. Only the input may be missing.
    """
    found = {}
    for part in ("instruction", "input", "output"):
        usual = part if part in names or part != "input" else None
        found[part] = getattr(args, f"{part}_column_name") or usual
        if found[part] and found[part] not in names:
            hint, have = did_you_mean(found[part], names), ", ".join(names)
            raise UserError(f"--{part}_column_name: no column {found[part]!r}{hint}; there are: {have}")
    return found


def text_encoder(tokenizer: Any, column: str, end: list[int], limit: int | None) -> Callable[[Columns], Columns]:
    """Return what turns a batch of texts into ``input_ids``; a missing or empty text becomes a document of no token.

    Args:
        end: the token that ends a document, if there is one and the tokenizer has not written it.
        limit: longer documents are cut to so many tokens; None keeps them whole.
    """

    def encode(batch: Columns) -> Columns:
        texts = [text or "" for text in batch[column]]
        found = tokenizer(texts, truncation=limit is not None, max_length=limit, verbose=False)["input_ids"]
        ended = [ids if ids[-1:] == end else ids + end for ids in found]
        return {"input_ids": [ids[:limit] if text else [] for ids, text in zip(ended, texts, strict=True)]}

    return encode


def prompt_encoder(
    tokenizer: Any, columns: dict[str, str | None], args: Namespace, end: list[int], limit: int | None
) -> Callable[[Columns], Columns]:
    """Return what turns a batch of prompts and answers into ``input_ids``, prompt first.

    Args:
        columns: of ``instruction``, ``input`` and ``output``; None where there is none.
        args: with ``chat_prompt``, to write them as the tokenizer's chat template does; and ``train_on_inputs``: False
            adds ``labels``, which are -100 where the prompt is.
        end, limit: as for `text_encoder`.

    Raises:
        UserError: the tokenizer has no chat template.
    """
    chat, learn_prompts = args.chat_prompt, args.train_on_inputs  # not args: any flag would spoil the cache
    if chat and not getattr(tokenizer, "chat_template", None):
        raise UserError("--chat_prompt: the tokenizer has no chat template; leave it out, or name another tokenizer")

    ends = {tokenizer.eos_token_id, tokenizer.sep_token_id}

    def as_text(value: Any) -> str:
        return "" if value is None else str(value).strip()

    def write(row: dict[str, Any]) -> str:
        parts = {part: as_text(row.get(columns[part])) for part in PROMPT}
        if chat:
            said = [{"role": "user", "content": "\n\n".join(filter(None, parts.values()))}]
            try:
                return tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
            except TemplateError as error:
                raise UserError(f"--chat_prompt: the tokenizer's chat template refuses a row: {error}") from error
        return "".join(PROMPT[part].format(text) for part, text in parts.items() if text) + ANSWER

    def encode(batch: Columns) -> Columns:
        rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
        prompts = tokenizer([write(row) for row in rows], add_special_tokens=not chat, verbose=False)["input_ids"]
        # What a tokenizer puts at a text's end would part the prompt from its answer.
        prompts = [ids[:-1] if ids[-1:] and ids[-1] in ends else ids for ids in prompts]
        answers = [as_text(row[columns["output"]]) for row in rows]
        answers = tokenizer(answers, add_special_tokens=False, verbose=False)["input_ids"]
        both = [(prompt, answer + end) for prompt, answer in zip(prompts, answers, strict=True)]
        found = {"input_ids": [(prompt + answer)[:limit] for prompt, answer in both]}
        if not learn_prompts:
            found["labels"] = [([IGNORE_INDEX] * len(prompt) + answer)[:limit] for prompt, answer in both]
        return found

    return encode


def mask_tokens(
    row: dict[str, Any], draw: np.random.Generator, share: float, mask: int, special: Sequence[int], vocabulary: int
) -> dict[str, Any]:
    """Hide a share of a row's tokens: of these 80 % become the mask, 10 % any token, 10 % stay.

    Source: Devlin et al., 2018, arXiv 1810.04805, section 3.1.

    Args:
        row: with ``input_ids`` (length,) and perhaps ``labels``: where these are -100 nothing is hidden.
        special: tokens that are never hidden.

    Returns:
        The row with the ``input_ids`` that the model sees, and ``labels``: the hidden tokens, else -100.
    """
    ids = np.asarray(row["input_ids"])
    chosen = (draw.random(len(ids)) < share) & ~np.isin(ids, special) & (np.asarray(row.get("labels", ids)) >= 0)
    fate, other = draw.random(len(ids)), draw.integers(vocabulary, size=len(ids))
    seen = np.where(fate < 0.8, mask, np.where(fate < 0.9, other, ids))
    return {**row, "input_ids": np.where(chosen, seen, ids), "labels": np.where(chosen, ids, IGNORE_INDEX)}


def opening(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a text that goes on: as the tokenizer begins one, without the end that it may write."""
    ids = tokenizer(prompt, verbose=False)["input_ids"]
    return ids[:-1] if ids[-1:] and ids[-1] in (tokenizer.eos_token_id, tokenizer.sep_token_id) else ids


def require_opening(tokenizer: Any, args: Namespace) -> None:
    """Say that a masked model does not go on with ``args.sample_prompt``; of a causal one, see that there is room.

    Raises:
        UserError: the prompt has no token, or fills a row of ``args.block_size``.
    """
    count = len(opening(tokenizer, args.sample_prompt))
    if args.objective != "causal":
        warn_once("--sample_prompt has no effect: this model does not go on with a text")
    elif not 0 < count < args.block_size:
        raise UserError(f"--sample_prompt has {count} tokens; it needs 1 at least, and fewer than {args.block_size}")


def masking(tokenizer: Any, share: float) -> Callable[[dict[str, Any], np.random.Generator], dict[str, Any]]:
    """`mask_tokens` with a tokenizer's mask, special tokens and vocabulary.

    Raises:
        UserError: the tokenizer has no mask.
    """
    if tokenizer.mask_token_id is None:
        raise UserError("--objective masked: the tokenizer has no mask token; name one that has, with --tokenizer_name")
    special, vocabulary = tokenizer.all_special_ids, len(tokenizer)
    return partial(mask_tokens, share=share, mask=tokenizer.mask_token_id, special=special, vocabulary=vocabulary)


def collate_tokens(rows: list[dict[str, Any]], shape: tuple[int], pad: int, causal: bool, apart: bool) -> Batch:
    """Pad rows on the right: ``input_ids``, ``labels`` and what keeps padding or documents apart, each (rows, length).

    Args:
        rows: with ``input_ids`` and, if they differ from these, ``labels``.
        shape: (length,)
        causal: each position's label is the token after it: the shift is made here, once. Padding is in the future of
            every token, so that no mask is needed. Else labels stay, and ``attention_mask`` marks what is no padding.
        apart: add ``document_ids``, -1 for padding; a document's last token does not have to foretell the next one.
    """
    batch = {"input_ids": pad_rows([row["input_ids"] for row in rows], shape[0], pad)}
    labels = [np.asarray(row["labels" if "labels" in row else "input_ids"])[int(causal) :] for row in rows]
    if not causal:
        batch["attention_mask"] = pad_rows([[1] * len(row) for row in labels], shape[0], 0)
    if apart:
        documents = [row["document_ids"] for row in rows]
        batch["document_ids"] = pad_rows(documents, shape[0], -1)
        if causal:
            both = zip(labels, documents, strict=True)
            labels = [np.where(ids[1:] == ids[:-1], row, IGNORE_INDEX) for row, ids in both]
    batch["labels"] = pad_rows(labels, shape[0], IGNORE_INDEX)
    return batch
