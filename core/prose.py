"""Real prose that every machine has: Python's language reference and the docstrings of the installed sources.

Which text there is depends on the
installed versions: write it down (`core.sample_data.write_splits`) with a run that rests on it.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from core.sample_data import clean_markup, parse, read_sources, source_files, write_splits

SENTENCES = re.compile(r"[\"'(]?[A-Z0-9].*[.:!?][\"')]?", re.DOTALL)  # few headings, fields and code are
NO_PROSE = re.compile(r">>>|::=|\s{3,}|[|+=_~^-]{4,}|\w\(\w*=")
UNDERLINE = re.compile(r"\s*([-=~^*\"'`#+])\1{2,}\s*")
SPECIAL_TOKENS = ("<pad>", "<eos>", "<cls>", "<sep>", "<mask>")  # ids 0 to 4


def paragraphs(text: str) -> Iterator[str]:
    """Yield the sentences of a docstring, one paragraph a line, without markup: no code, table, heading or doctest.

    A paragraph is a run of lines of one indentation, so that a list's or a parameter's description is one, too.
    """
    lines: list[str] = []
    for line in [*inspect.cleandoc(text).split("\n"), ""]:
        if UNDERLINE.fullmatch(line):  # what it underlines is a heading
            lines = []
            continue
        same = lines and len(line) - len(line.lstrip()) == len(lines[0]) - len(lines[0].lstrip())
        if line.strip() and same:
            lines.append(line)
            continue
        code = any(NO_PROSE.search(line.strip()) for line in lines)
        found = "" if code else clean_markup(" ".join(lines))
        if SENTENCES.fullmatch(found) and len(found.split()) >= 5:
            yield re.sub(r"::$", ":", found)
        lines = [line] if line.strip() else []


def read_prose(source: str, package: str, path: str) -> list[str]:
    """Return the paragraphs of one file's docstrings, in its order; [] when it is not valid Python."""
    return [text for node in parse(source) for text in paragraphs(ast.get_docstring(node, clean=False) or "")]


def documented_prose(packages: Sequence[str] | None = None) -> list[tuple[str, str]]:
    """Return (path, text) of each topic of the language reference and of each source file that has prose.

    The order is decided by the installation alone. A text has a paragraph a line. No paragraph occurs twice, in all
    documents together: the copies of it would be in several splits. Of the packages nothing is imported; files that
    cannot be read or parsed, and packages that are not installed, are skipped.

    Args:
        packages: "stdlib", with which the language reference comes, and names of top-level packages; None means
            ``core.sample_data.DEFAULT_PACKAGES``.
    """
    files = source_files(packages)
    documents = [(path, rows) for (_, path, _), rows in zip(files, read_sources(files, read_prose), strict=True)]
    if any(package == "stdlib" for package, _, _ in files):
        from pydoc_data.topics import topics  # strings alone

        documents += [(f"pydoc_data/topics/{name}", list(paragraphs(topics[name]))) for name in sorted(topics)]
    found, seen = [], set()
    for path, rows in documents:
        fresh = [row for row in dict.fromkeys(rows) if row not in seen]
        seen.update(fresh)
        if fresh:
            found.append((path, "\n".join(fresh)))
    return found


def prose_splits(folder: Path) -> dict[str, Any]:
    """`documented_prose`, parted by source file and written to ``folder``: a ``datasets.Dataset`` of ``text`` each."""
    from datasets import Dataset

    rows = [(path, {"text": text}) for path, text in documented_prose()]
    return {split: Dataset.from_list(rows) for split, rows in write_splits(rows, folder).items()}


def train_byte_level_bpe(texts: Iterable[str], vocab_size: int, frame: bool = False) -> Any:
    """Train a byte-level BPE tokenizer: any text comes back from its ids as it was.

    Source: Radford et al., "Language models are unsupervised multitask learners", 2019, section 2.2.

    Args:
        texts: of any length.
        vocab_size: at least 261: the bytes and ``SPECIAL_TOKENS``, whose ids are 0 to 4. Fewer when the texts have no
            more pairs to merge.
        frame: encode a text as ``<cls> ... <sep>``, as models of masked tokens expect. Otherwise nothing is added.

    Returns:
        ``transformers.PreTrainedTokenizerFast``, which `AutoTokenizer` loads again once it is saved.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": list(SPECIAL_TOKENS)}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **alphabet))
    if frame:
        ends = [(name, SPECIAL_TOKENS.index(name)) for name in ("<cls>", "<sep>")]
        bpe.post_processor = processors.TemplateProcessing(single="<cls> $A <sep>", special_tokens=ends)
    names = {f"{name.strip('<>')}_token": name for name in SPECIAL_TOKENS}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, clean_up_tokenization_spaces=False, **names)


def word_tokenizer(texts: Iterable[str], vocab_size: int, length: int) -> Any:
    """Make a tokenizer of whole words, in lower case, that encodes a text as ``<start> ... <end>``.

    Args:
        vocab_size: the most frequent words are known, the others ``<unknown>``; with the four special tokens, whose
            ids are 0 (``<pad>``) to 3.
        length: tokens of a row at most.

    Returns:
        ``transformers.PreTrainedTokenizerFast``, which `AutoTokenizer` loads again once it is saved.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "bos_token": "<start>", "eos_token": "<end>", "unk_token": "<unknown>"}
    words = Tokenizer(models.WordLevel(unk_token="<unknown>"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    names = {"special_tokens": list(special.values()), "show_progress": False}
    words.train_from_iterator(texts, trainers.WordLevelTrainer(vocab_size=vocab_size, **names))
    ends = [("<start>", 1), ("<end>", 2)]
    words.post_processor = processors.TemplateProcessing(single="<start> $A <end>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=length, **special)
