"""Texts, prompts and answers as tokens; masks; batches: on a tokenizer of words."""

from __future__ import annotations

import copy
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.documents import (
    collate_tokens,
    mask_tokens,
    masking,
    opening,
    prompt_columns,
    prompt_encoder,
    require_opening,
    text_encoder,
)
from core.errors import UserError
from tests.conftest import build_text_tokenizer

EOS, CLS, SEP, MASK = 1, 3, 4, 5
ALPHA, BETA, GAMMA, DELTA = range(6, 10)
COLUMNS = {"instruction": "instruction", "input": "input", "output": "output"}


def tokenizer_in(folder: Path, **roles: str) -> Any:
    from transformers import AutoTokenizer

    build_text_tokenizer(folder, **roles)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Adds nothing to a text."""
    return tokenizer_in(tmp_path_factory.mktemp("plain"), eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes <cls> and <sep> around a text."""
    roles = {f"{name}_token": f"<{name}>" for name in ("pad", "cls", "sep", "mask")}
    return tokenizer_in(tmp_path_factory.mktemp("framed"), **roles)


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Writes <cls> before a text and <eos> after it."""
    from tokenizers import processors

    found = tokenizer_in(tmp_path_factory.mktemp("ended"), eos_token="<eos>", pad_token="<pad>")
    ends = [("<cls>", CLS), ("<eos>", EOS)]
    found.backend_tokenizer.post_processor = processors.TemplateProcessing("<cls> $A <eos>", special_tokens=ends)
    return found


# -------------------------------------------------------------------------------------------------------------- texts


def test_a_documents_end_is_marked_once(plain: Any, framed: Any) -> None:
    texts = {"body": ["alpha beta", "", None, "gamma"]}
    assert text_encoder(plain, "body", [], None)(texts) == {"input_ids": [[ALPHA, BETA], [], [], [GAMMA]]}
    marked = text_encoder(plain, "body", [EOS], None)(texts)
    assert marked == {"input_ids": [[ALPHA, BETA, EOS], [], [], [GAMMA, EOS]]}
    written = text_encoder(framed, "body", [SEP], None)(texts)  # the tokenizer's own is not doubled
    assert written == {"input_ids": [[CLS, ALPHA, BETA, SEP], [], [], [CLS, GAMMA, SEP]]}


def test_long_texts_are_cut_only_where_a_limit_is_given(plain: Any) -> None:
    texts = {"text": ["alpha beta gamma delta", "alpha"]}
    assert text_encoder(plain, "text", [EOS], 3)(texts) == {"input_ids": [[ALPHA, BETA, GAMMA], [ALPHA, EOS]]}
    assert text_encoder(plain, "text", [EOS], None)(texts)["input_ids"][0] == [ALPHA, BETA, GAMMA, DELTA, EOS]


def test_a_text_that_is_cut_keeps_the_frame_that_the_tokenizer_writes(framed: Any) -> None:
    texts = {"text": ["alpha beta gamma delta", "alpha"]}
    for end in ([SEP], []):
        found = text_encoder(framed, "text", end, 4)(texts)["input_ids"]
        assert found == [[CLS, ALPHA, BETA, SEP], [CLS, ALPHA, SEP]]


def test_an_opening_begins_as_a_text_does_and_has_no_end(plain: Any, framed: Any, ended: Any) -> None:
    assert opening(plain, "alpha beta") == [ALPHA, BETA]
    assert opening(framed, "alpha beta") == opening(ended, "alpha beta") == [CLS, ALPHA, BETA]
    assert opening(plain, " ") == []


@pytest.mark.parametrize(("prompt", "count"), [(" ", 0), ("alpha " * 4, 4), ("alpha " * 5, 5)])
def test_an_opening_must_fit_a_row(plain: Any, prompt: str, count: int) -> None:
    args = Namespace(sample_prompt=prompt, objective="causal", block_size=4)
    with pytest.raises(UserError, match=f"--sample_prompt has {count} tokens; it needs 1 at least, and fewer than 4"):
        require_opening(plain, args)
    require_opening(plain, Namespace(sample_prompt="alpha " * 3, objective="causal", block_size=4))


def test_a_masked_model_does_not_go_on_with_a_text(framed: Any, caplog: pytest.LogCaptureFixture) -> None:
    for prompt in ("alpha", "alpha " * 9):
        require_opening(framed, Namespace(sample_prompt=prompt, objective="masked", block_size=4))
    assert caplog.messages == ["--sample_prompt has no effect: this model does not go on with a text"]


# ------------------------------------------------------------------------------------------------- prompts and answers


def asked(**names: str) -> Namespace:
    return Namespace(**{f"{part}_column_name": names.get(part) for part in COLUMNS})


def test_columns_are_those_asked_for_or_those_of_these_names() -> None:
    assert prompt_columns(["input", "output", "instruction", "text"], asked()) == COLUMNS
    assert prompt_columns(["instruction", "output"], asked()) == {**COLUMNS, "input": None}
    found = prompt_columns(["q", "a", "input"], asked(instruction="q", output="a"))
    assert found == {"instruction": "q", "input": "input", "output": "a"}


@pytest.mark.parametrize(
    ("names", "wanted", "message"),
    [
        (["instruction", "text"], {}, "--output_column_name: no column 'output'; there are: instruction, text"),
        (["output"], {}, "--instruction_column_name: no column 'instruction'"),
        (["question", "output"], {"instruction": "qestion"}, r"'qestion' \(did you mean 'question'\?\)"),
        (["instruction", "output"], {"input": "context"}, "--input_column_name: no column 'context'"),
    ],
)
def test_a_column_that_is_not_there_is_named(names: list[str], wanted: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prompt_columns(names, asked(**wanted))


def encoder(tokenizer: Any, end: list[int], limit: int | None = None, **flags: bool) -> Any:
    args = Namespace(**{"chat_prompt": False, "train_on_inputs": True} | flags)
    return prompt_encoder(tokenizer, COLUMNS, args, end, limit)


ROWS = {"instruction": ["alpha", "beta"], "input": ["gamma", None], "output": ["delta alpha", "beta"], "note": [1, 2]}


def test_a_prompt_names_its_parts_and_an_answer_follows(plain: Any) -> None:
    found = encoder(plain, [EOS])(ROWS)
    assert found.keys() == {"input_ids"}
    said = [plain.decode(ids).split() for ids in found["input_ids"]]
    # The words of the frame are unknown to this tokenizer.
    assert said[0] == ["<unk>", ":", "alpha", "<unk>", ":", "gamma", "<unk>", ":", "delta", "alpha", "<eos>"]
    assert said[1] == ["<unk>", ":", "beta", "<unk>", ":", "beta", "<eos>"]  # no input, no frame for it


def test_labels_leave_out_the_prompt(plain: Any) -> None:
    found = encoder(plain, [EOS], train_on_inputs=False)(ROWS)
    assert found["input_ids"] == encoder(plain, [EOS])(ROWS)["input_ids"]
    for ids, labels, answer in zip(found["input_ids"], found["labels"], (3, 2), strict=True):
        assert labels == [-100] * (len(ids) - answer) + ids[-answer:]
    cut = encoder(plain, [EOS], limit=5, train_on_inputs=False)(ROWS)
    assert cut["labels"] == [[-100] * 5] * 2
    assert [len(ids) for ids in cut["input_ids"]] == [5, 5]


@pytest.mark.parametrize(("name", "written"), [("framed", SEP), ("ended", EOS)])
@pytest.mark.parametrize("marked", [True, False])
def test_an_end_that_the_tokenizer_writes_does_not_part_prompt_and_answer(
    request: pytest.FixtureRequest, name: str, written: int, marked: bool
) -> None:
    tokenizer = request.getfixturevalue(name)
    for end in ([written], [9]) if marked else ([],):  # 9: a causal model's end is not what the tokenizer writes
        found = encoder(tokenizer, end)(ROWS)["input_ids"]
        assert [ids[:-1].count(written) for ids in found] == [0, 0]
        assert [ids[-1] for ids in found] == (end * 2 or [ALPHA, BETA])
        assert [ids.count(CLS) for ids in found] == [1, 1]


def test_a_number_is_a_text_and_nothing_is_none(plain: Any) -> None:
    """0 is an answer; a part that is missing is left out."""
    rows = {"instruction": ["alpha", "alpha", "alpha"], "input": [0, None, ""], "output": [0, False, None]}
    zeros = copy.deepcopy(plain)
    zeros.add_tokens(["0", "False", "None"])
    said = [zeros.decode(ids).split()[3:] for ids in encoder(zeros, [])(rows)["input_ids"]]
    assert said == [["<unk>", ":", "0", "<unk>", ":", "0"], ["<unk>", ":", "False"], ["<unk>", ":"]]


def test_a_chat_template_writes_the_prompt(plain: Any) -> None:
    chatting = copy.deepcopy(plain)
    chatting.chat_template = "{% for m in messages %}: {{ m['content'] }} .{% endfor %}"
    found = encoder(chatting, [EOS], chat_prompt=True)(ROWS)["input_ids"]
    assert chatting.decode(found[0]) == ": alpha gamma . delta alpha <eos>"
    assert chatting.decode(found[1]) == ": beta . beta <eos>"
    chatting.chat_template = "{{ raise_exception('no such role') }}"
    with pytest.raises(UserError, match="--chat_prompt: the tokenizer's chat template refuses a row: no such role"):
        encoder(chatting, [EOS], chat_prompt=True)(ROWS)
    with pytest.raises(UserError, match="--chat_prompt: the tokenizer has no chat template"):
        encoder(plain, [EOS], chat_prompt=True)


def test_a_chat_template_brings_its_own_special_tokens(framed: Any) -> None:
    chatting = copy.deepcopy(framed)
    chatting.chat_template = "{{ messages[0]['content'] }}"
    found = encoder(chatting, [SEP], chat_prompt=True)(ROWS)["input_ids"]
    assert found == [[ALPHA, GAMMA, DELTA, ALPHA, SEP], [BETA, BETA, SEP]]


# -------------------------------------------------------------------------------------------------------------- masks


def test_four_fifths_become_the_mask_a_tenth_another_token_a_tenth_stays() -> None:
    """On 300,000 tokens, of which a fifth is special, within five standard deviations."""
    draw, count, share = np.random.default_rng(0), 300_000, 0.3
    ids = draw.integers(10, 1000, count)
    ids[::5] = 2
    row = {"input_ids": ids, "document_ids": np.zeros(count)}
    found = mask_tokens(row, np.random.default_rng(1), share, mask=5, special=[2, 5], vocabulary=1000)
    chosen, seen = found["labels"] != -100, found["input_ids"]
    assert not chosen[::5].any()
    assert np.array_equal(found["labels"][chosen], ids[chosen])
    assert np.array_equal(seen[~chosen], ids[~chosen])
    usual = count * 0.8
    assert abs(chosen.sum() - usual * share) < 5 * (usual * share * (1 - share)) ** 0.5
    hidden, same = seen[chosen] == 5, seen[chosen] == ids[chosen]
    for part, expected in ((hidden, 0.8), (same, 0.1), (~hidden & ~same, 0.1)):
        assert abs(part.mean() - expected) < 0.005
    others = seen[chosen][~hidden & ~same]
    assert others.min() < 10  # of the whole vocabulary
    assert others.max() > 990
    assert found["document_ids"] is row["document_ids"]
    assert np.array_equal(row["input_ids"], ids)  # the row itself stays


def test_a_tokenizer_without_a_mask_is_refused(plain: Any) -> None:
    with pytest.raises(UserError, match="--objective masked: the tokenizer has no mask token; name one that has"):
        masking(plain, 0.5)


def test_what_bears_no_loss_is_not_hidden(framed: Any) -> None:
    row = {"input_ids": np.arange(6, 24), "labels": np.array([-100] * 9 + list(range(15, 24)))}
    found = masking(framed, 0.99)(row, np.random.default_rng(0))
    assert (found["labels"][:9] == -100).all()
    assert np.array_equal(found["input_ids"][:9], row["input_ids"][:9])
    assert (found["labels"][9:] >= 0).sum() > 5


def test_masks_come_from_the_generator_alone(framed: Any) -> None:
    row, mask = {"input_ids": [CLS, *range(6, 24), SEP]}, masking(framed, 0.5)
    first, again, other = (mask(row, np.random.default_rng(seed)) for seed in (1, 1, 2))
    for key in ("input_ids", "labels"):
        assert np.array_equal(first[key], again[key])
        assert not np.array_equal(first[key], other[key])
    for seed in range(50):
        found = mask(row, np.random.default_rng(seed))
        assert list(found["labels"][[0, -1]]) == [-100, -100]
        assert found["input_ids"].max() < len(framed)
        assert (
            found["input_ids"][found["labels"] == -100] == np.array(row["input_ids"])[found["labels"] == -100]
        ).all()


# ------------------------------------------------------------------------------------------------------------ batches


def collated(rows: list[dict[str, Any]], **options: Any) -> dict[str, list]:
    batch = collate_tokens(rows, (5,), **{"pad": 0, "causal": True, "apart": False} | options)
    assert all(value.dtype == torch.int64 for value in batch.values())
    return {name: value.tolist() for name, value in batch.items()}


def test_a_causal_batch_is_shifted_once_and_needs_no_mask() -> None:
    batch = collated([{"input_ids": [6, 7, 8]}, {"input_ids": np.arange(6, 11)}])
    assert batch == {
        "input_ids": [[6, 7, 8, 0, 0], [6, 7, 8, 9, 10]],
        "labels": [[7, 8, -100, -100, -100], [7, 8, 9, 10, -100]],
    }


def test_labels_of_their_own_are_shifted_too() -> None:
    assert collated([{"input_ids": [6, 7, 8, 1], "labels": [-100, -100, 8, 1]}])["labels"] == [[-100, 8, 1, -100, -100]]


def test_a_masked_batch_says_what_is_padding() -> None:
    batch = collated([{"input_ids": [6, 5, 8], "labels": [-100, 7, -100]}], causal=False)
    assert batch["attention_mask"] == [[1, 1, 1, 0, 0]]
    assert batch["labels"] == [[-100, 7, -100, -100, -100]]


def test_a_documents_last_token_does_not_foretell_the_next_document() -> None:
    row = {"input_ids": [6, 7, 1, 8], "document_ids": np.array([0, 0, 0, 1], dtype=np.int32)}
    batch = collated([row], apart=True)
    assert batch["document_ids"] == [[0, 0, 0, 1, -1]]
    assert batch["labels"] == [[7, 1, -100, -100, -100]]
    masked = collated([{**row, "labels": [-100, 7, -100, 8]}], apart=True, causal=False)
    assert masked["labels"] == [[-100, 7, -100, 8, -100]]
    assert masked["attention_mask"] == [[1, 1, 1, 1, 0]]


def test_a_row_longer_than_the_shape_is_cut() -> None:
    batch = collated([{"input_ids": list(range(6, 14))}])
    assert batch == {"input_ids": [[6, 7, 8, 9, 10]], "labels": [[7, 8, 9, 10, 11]]}
