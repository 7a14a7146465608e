"""Blocks are the documents again, however Arrow holds them; masks and positions as plain loops make them."""

from __future__ import annotations

import itertools
import tracemalloc
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets.table import InMemoryTable
from hypothesis import given, settings
from hypothesis import strategies as st

from core.buckets import make_buckets
from core.data import BatchLoader
from core.errors import UserError
from core.packing import Blocks, cut, document_mask, document_positions, require_separable

DOCUMENTS = st.lists(st.lists(st.integers(0, 999), max_size=12), min_size=1, max_size=12)


def table_of(documents: list[list[int] | None], edges: list[int], kind: pa.DataType) -> datasets.Dataset:
    """Documents in Arrow chunks that end at ``edges``; each is a slice of a longer array."""
    edges = sorted({0, len(documents), *(edge % len(documents) for edge in edges)})
    pairs = itertools.pairwise(edges)
    chunks = [pa.array([[7, 7], *documents[a:b], [8]], type=kind).slice(1, b - a) for a, b in pairs]
    return datasets.Dataset(InMemoryTable(pa.table({"input_ids": pa.chunked_array(chunks, type=kind)})))


def plain(documents: list[list[int]], length: int) -> list[tuple[list[int], list[int]]]:
    """Blocks as a plain loop makes them: tokens, and numbers of their documents."""
    numbered = [(token, number) for number, document in enumerate(documents) for token in document]
    result = []
    for at in range(0, len(numbered), length):
        tokens, numbers = zip(*numbered[at : at + length], strict=True)
        place = {number: found for found, number in enumerate(dict.fromkeys(numbers))}
        result.append((list(tokens), [place[number] for number in numbers]))
    return result


def shown(blocks: Blocks) -> list[tuple[list[int], list[int]]]:
    return [(blocks[i]["input_ids"].tolist(), blocks[i]["document_ids"].tolist()) for i in range(len(blocks))]


@settings(max_examples=80, deadline=None)
@given(
    DOCUMENTS,
    st.integers(1, 9),
    st.lists(st.integers(0, 12), max_size=4),
    st.sampled_from([pa.list_(pa.int64()), pa.list_(pa.int32()), pa.large_list(pa.uint16())]),
    st.randoms(use_true_random=False),
)
def test_blocks_are_the_documents_however_arrow_holds_them(documents, length, edges, kind, draw) -> None:
    rows = table_of(documents, edges, kind)
    order = draw.sample(range(len(documents)), draw.randint(1, len(documents)))
    for chosen, held in ((documents, rows), ([documents[i] for i in order], rows.select(order))):
        tokens = sum(map(len, chosen))
        if tokens < length:
            said = f"{tokens} tokens make no block of {length}; give more text or"
            with pytest.raises(UserError, match=f"^train split: {said}"):
                Blocks(held, length, name="train split")
            with pytest.raises(UserError, match=f"^stream: {said}"):
                list(cut(chosen, length))
            continue
        blocks = Blocks(held, length)
        assert shown(blocks) == plain(chosen, length)
        assert blocks.lengths.tolist() == [[len(tokens)] for tokens, _ in shown(blocks)]
        assert (blocks.tokens, blocks.used) == (tokens, tokens)
        assert (blocks.documents, blocks.empty) == (len(chosen), chosen.count([]))
        assert (blocks[0]["input_ids"].dtype, blocks[0]["document_ids"].dtype) == (np.int64, np.int32)
        found = [(block["input_ids"].tolist(), block["document_ids"].tolist()) for block in cut(chosen, length)]
        assert found == shown(blocks)


def test_a_missing_document_is_an_empty_one_and_a_missing_token_an_error() -> None:
    blocks = Blocks(table_of([[1, 2], None, [3]], [], pa.list_(pa.int64())), 2)
    assert (shown(blocks), blocks.empty) == ([([1, 2], [0, 0]), ([3], [0])], 1)
    with pytest.raises(UserError, match="input_ids: a token is null"):
        Blocks(table_of([[1, None]], [], pa.list_(pa.int64())), 1)
    with pytest.raises(UserError, match=r"^data: there are no documents"):
        Blocks(datasets.Dataset.from_dict({"input_ids": []}, datasets.Features(input_ids=[datasets.Value("int64")])), 1)


def test_documents_that_are_all_empty_are_no_block() -> None:
    """Their column may have no type: nothing was there to infer it from."""
    rows = datasets.Dataset.from_dict({"input_ids": [[], []]})
    for held in (rows, rows.cast_column("input_ids", datasets.List(datasets.Value("int32")))):
        with pytest.raises(UserError, match="0 tokens make no block of 4"):
            Blocks(held, 4)


def test_the_first_blocks() -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [4, 5, 6, 7]]})
    whole, two, more = Blocks(rows, 3), Blocks(rows, 3, limit=2), Blocks(rows, 3, limit=9)
    assert shown(two) == shown(whole)[:2]
    assert shown(more) == shown(whole)
    assert (two.lengths.tolist(), two.tokens, two.used) == ([[3], [3]], 7, 6)
    assert (whole.lengths.tolist(), whole.used) == ([[3], [3], [1]], 7)
    with pytest.raises(IndexError):
        two[2]


def test_a_block_may_be_short_where_that_is_allowed() -> None:
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    blocks = Blocks(rows, 9, may_be_short=True)
    assert shown(blocks) == shown(ForkingPickler.loads(ForkingPickler.dumps(blocks))) == [([1, 2, 3], [0, 0, 1])]
    with pytest.raises(UserError, match="1 tokens make no block of 2"):
        Blocks(rows.select([1]), 9, may_be_short=True)


def encode(batch: dict[str, list[str]]) -> dict[str, list[list[int]]]:
    return {"input_ids": [[*text.encode(), 0] if text else [] for text in batch["text"]]}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> datasets.Dataset:
    """37 texts, on disk."""
    path = tmp_path_factory.mktemp("texts")
    lines = ["word " * (number * 7 % 11) for number in range(37)]
    datasets.Dataset.from_dict({"text": lines}).save_to_disk(path)
    return datasets.load_from_disk(path)


def test_neither_batches_nor_processes_of_the_map_move_a_block(texts: datasets.Dataset, tmp_path: Path) -> None:
    expected = plain(encode(texts[:])["input_ids"], 16)
    features = datasets.Features(text=datasets.Value("string"), input_ids=datasets.List(datasets.Value("int32")))
    for size, processes in ((1, 1), (5, 1), (1000, 1), (5, 2)):
        options = {
            "features": features,  # the first documents are empty: nothing tells what the others hold
            "num_proc": processes,
            "cache_file_name": str(tmp_path / f"{size}-{processes}.arrow"),
        }
        rows = texts.map(encode, batched=True, batch_size=size, writer_batch_size=size, **options)
        assert shown(Blocks(rows, 16)) == expected
    shuffled = rows.shuffle(seed=3)
    assert shown(Blocks(shuffled, 16)) == plain(shuffled["input_ids"][:], 16)
    assert shown(Blocks(shuffled.flatten_indices(), 16)) == plain(shuffled["input_ids"][:], 16)


def test_tokens_stay_in_the_file(tmp_path: Path) -> None:
    """Neither this process nor what is sent to a worker holds them: 4 MB of them here."""
    parts = [{"input_ids": [list(range(1000))] * 100} for _ in range(5)]
    for number, part in enumerate(parts):
        datasets.Dataset.from_dict(part).save_to_disk(tmp_path / str(number))
    rows = datasets.concatenate_datasets([datasets.load_from_disk(tmp_path / str(number)) for number in range(5)])
    Blocks(rows, 512)  # imports what it needs
    tracemalloc.start()
    before = pa.total_allocated_bytes()
    blocks = Blocks(rows, 512)
    assert pa.total_allocated_bytes() - before < 50_000
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    sent = ForkingPickler.dumps(blocks)
    assert len(sent) < 20_000
    again = ForkingPickler.loads(sent)
    assert shown(again) == shown(blocks)
    assert again.lengths.tolist() == blocks.lengths.tolist()


def collate(rows: list[dict], shape: tuple[int]) -> dict[str, torch.Tensor]:
    """Pad blocks with -1."""
    padded = [np.pad(row["input_ids"], (0, shape[0] - len(row["input_ids"])), constant_values=-1) for row in rows]
    return {"inputs": torch.from_numpy(np.stack(padded))}


def test_worker_processes_read_the_same_blocks(texts: datasets.Dataset) -> None:
    blocks = Blocks(texts.map(encode, batched=True).shuffle(seed=1), 16)
    shapes = make_buckets(blocks.lengths, (16,), 4)
    assert shapes == [(16,)]
    found = []
    for workers in (0, 2):
        windows = BatchLoader(blocks, collate, blocks.lengths, shapes, 4, seed=1, workers=workers).windows()
        found.append(torch.cat([batch["inputs"] for window in windows for batch in window.batches]))
    assert torch.equal(*found)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 4), max_size=4).filter(lambda sizes: sum(sizes) <= 9), min_size=1, max_size=3),
    st.booleans(),
)
def test_masks_and_positions_keep_documents_apart(rows: list[list[int]], causal: bool) -> None:
    """Of rows with documents of these sizes, padded to 9 tokens."""
    ids = torch.full((len(rows), 9), -1, dtype=torch.int32)
    positions = torch.zeros(len(rows), 9, dtype=torch.int64)
    for row, sizes in enumerate(rows):
        at = 0
        for number, size in enumerate(sizes):
            ids[row, at : at + size] = number
            positions[row, at : at + size] = torch.arange(size)
            at += size
        positions[row, at:] = torch.arange(9 - at)
    expected = torch.zeros(len(rows), 1, 9, 9, dtype=torch.bool)
    for row in range(len(rows)):
        for query in range(9):
            for key in range(9):
                same = int(ids[row, query]) == int(ids[row, key]) >= 0
                expected[row, 0, query, key] = query == key or (same and (key < query or not causal))
    mask, found = document_mask(ids, causal), document_positions(ids)
    assert mask.dtype == torch.bool
    assert found.dtype == torch.int64
    assert torch.equal(mask, expected)
    assert torch.equal(found, positions)


SIZES = {"vocab_size": 27, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
INNER = {"intermediate_size": 32, "num_key_value_heads": 1}
WINDOW = {**SIZES, **INNER, "sliding_window": 8}
FAMILIES = {  # model type: changes of its configuration, and why its documents cannot be kept apart
    "mistral": (WINDOW, "attends to fewer tokens than the 16 of a row"),
    "qwen2": ({**WINDOW, "use_sliding_window": True}, "attends to fewer tokens"),
    "mamba": ({"vocab_size": 27, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, "takes no positions"),
    "recurrent_gemma": ({**SIZES, **INNER, "lru_width": 16}, "hands a state from token to token"),
    "lfm2": ({**SIZES, **INNER, "layer_types": ["conv"]}, "hands a state from token to token"),
    "roberta": ({**SIZES, "is_decoder": True}, "numbers positions from the padding on"),
    "falcon": ({**SIZES, "alibi": True}, "takes no positions"),
    "gpt2": ({"vocab_size": 27, "n_embd": 16, "n_layer": 1, "n_head": 2}, None),
    "llama": ({**SIZES, **INNER}, None),
    "bert": ({**SIZES, "is_decoder": True}, None),
}


def model_of(kind: str, changes: dict) -> torch.nn.Module:
    """Without memory: nothing of it is computed."""
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes))


@pytest.mark.parametrize("kind", FAMILIES)
def test_models_whose_documents_cannot_be_kept_apart(kind: str) -> None:
    changes, reason = FAMILIES[kind]
    model = model_of(kind, changes)
    if reason is None:
        require_separable(model, 16)
        return
    with pytest.raises(UserError, match=f"^--pack_documents: this model {reason}") as error:
        require_separable(model, 16)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("kind", "used", "length"), [("mistral", True, 8), ("smollm3", False, 16)])
def test_a_window_that_a_row_fits_in_or_that_is_not_used_is_none(kind: str, used: bool, length: int) -> None:
    require_separable(model_of(kind, {**WINDOW, "use_sliding_window": used, "pad_token_id": 0}), length)


def test_a_model_that_says_itself_that_it_has_a_state_is_refused() -> None:
    model = model_of("llama", FAMILIES["llama"][0])
    model._is_stateful = True
    with pytest.raises(UserError, match="hands a state from token to token"):
        require_separable(model, 16)
