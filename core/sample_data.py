"""Real text that every machine has: the documented objects of the installed Python sources.

The standard library and the distributions that this project requires carry tens of thousands of docstrings written by
people, each beside the code it describes. Which rows there are depends on the installed versions. Only the standard
library and `core.errors` are imported: the processes that read the sources start from here (a fork would copy a parent
with threads, ``multiprocessing``'s spawn would import the parent's main module, and torch with it).
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.util
import inspect
import json
import keyword
import os
import random
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from core.errors import is_main_process, say

# What the requirements bring in, also through torch (sympy, networkx), datasets (pandas) and the metrics (nltk). Not
# torch and transformers themselves: to read them takes longer than all of these together.
DEFAULT_PACKAGES = ("stdlib", "numpy", "pandas", "sympy", "networkx", "nltk", "matplotlib", "datasets", "accelerate")
MAX_CODE_CHARS = 400
CODE_WORDS = {*(word.lower() for word in keyword.kwlist), "self", "cls"}
SKIPPED_FOLDER = re.compile(r"_?tests?|_?testing|test_.*|.*_tests?|idlelib|(?:site|dist)-packages|__pycache__|\..*")
SECTION = re.compile(  # a description ends at the first section heading, field list, doctest, directive or table
    r"[-=~^+|]{3,}|>>>|\.\. |[:@](?:param|return|raise|r?type|arg|key|[ic]?var|meta)|#+ |!!!|(?:Arg(?:ument)?s?|Shape|"
    r"(?:Other )?Param(?:eter)?s?|Returns?|Yields?|Warn(?:s|ings?)|Notes?|See Also|Examples?|References?|Usage|Raises?|"
    r"Attributes?|Methods?|Keyword Arg(?:ument)?s|Inputs?|Outputs?|Todo|Tips?)\s*:*\s*$"
)
MARKUP = (  # a role's target, [title](address), `title <address>`_, a footnote's mark, code, emphasis, escapes and tags
    (re.compile(r":[\w:+.-]+:`~?[\w.]*?([^`<.]+)(?:\s*<[^`>]*>)?`"), r"\1"),
    (re.compile(r"\[([^\]\[]+)\]\([^)\s]*\)|`([^`<]+?)\s*<[^`>]*>`_{1,2}"), r"\1\2"),
    (re.compile(r"\s*\[(?:\d+|\w+\d{2,4}\w?|#\w*)\]_"), ""),
    (re.compile(r"`+([^`]*)`+_{0,2}"), r"\1"),
    (re.compile(r"(?<![\w*])\*{1,2}([^\s*](?:[^*\n]*[^\s*])?)\*{1,2}(?![\w*])"), r"\1"),
    (re.compile(r"\\([*_`|<>\[\]])|</?\w+>"), r"\1"),
)
SENTENCE_END = re.compile(r"(?<=[.!?])(?<!e\.g\.)(?<!i\.e\.)(?<!etc\.)(?<!vs\.)(?<!cf\.)\s+(?=[A-Z\"'(])")
DROPPED = re.compile(r"::|!!!|\]\(|https?:|[`{}<>|\\]|^(?:Helper|Tests?|See)\b|\b(?:TODO|FIXME|XXX)\b")


@dataclass(frozen=True)
class DocumentedObject:
    """One documented module, class or function. One of ``description`` and ``code`` may be ""."""

    package: str  # "stdlib" or a top-level package
    path: str  # the file's stable id, relative to the standard library or the package's parent: "json/decoder.py"
    name: str  # without its class or package: "decode"; of a module "decoder"
    kind: str  # "module", "class" or "function"
    summary: str  # the docstring's first sentence, 4 to 30 words of ASCII
    description: str  # the prose after it, up to the first section
    code: str  # the source without the docstring, at most MAX_CODE_CHARS characters

    @property
    def title(self) -> str:
        """The bare name in words: "make archive"."""
        return identifier_words(self.name.rpartition(".")[2])

    @property
    def body(self) -> str:
        """The description or, where there is none, the words of the code, each once, in order, without keywords."""
        if self.description:
            return identifier_words(self.description)
        found = re.findall(r"[A-Za-z]{2,}", identifier_words(re.sub(r"#.*", "", self.code)))
        words = {word.lower(): word for word in reversed(found) if word.lower() not in CODE_WORDS}
        return " ".join(list(reversed(words.values()))[:40])


def identifier_words(text: str) -> str:
    """Split identifiers: ``parse_URLPath`` becomes ``parse URL Path``."""
    text = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", text)
    return re.sub(r"[_\s]+", " ", re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1 \2", text)).strip()


def clean_markup(text: str) -> str:
    """Return ``text`` on one line without reStructuredText and markdown markup."""
    for pattern, replacement in MARKUP:
        text = pattern.sub(replacement, text)
    return " ".join(text.split())


def split_docstring(docstring: str) -> tuple[str, str]:
    """Return (summary, description) of a docstring, cleaned; ("", "") when it has no usable summary."""
    prose: list[str] = []
    for paragraph in re.split(r"\n[ \t]*\n", inspect.cleandoc(docstring)):
        lines = paragraph.split("\n")
        end = next((i for i, line in enumerate(lines) if SECTION.match(line.strip())), len(lines))
        ended, underline = end < len(lines), "".join(lines[end : end + 1]).strip()[:3]
        kept = lines[: max(0, end - 1) if underline in ("---", "===", "~~~", "^^^") else end]
        if kept and not kept[0].startswith((" ", "\t")):  # an indented paragraph is a literal block
            prose.append(clean_markup(" ".join(kept)))
        if ended:
            break
    summary, *rest = SENTENCE_END.split(prose[0], maxsplit=1) if prose else [""]
    if not summary.isascii() or DROPPED.search(summary) or not 4 <= len(summary.split()) <= 30:
        return "", ""
    description = re.sub(r"\s*::(?!\S)", ":", " ".join((*rest, *prose[1:])))
    return summary, description if len(description.split()) >= 4 else ""


def parse(source: str) -> list[ast.AST]:
    """Return the module, its classes and their functions; [] when ``source`` is not Python, or has no docstring."""
    if '"""' not in source and "'''" not in source:  # parsing takes most of the time
        return []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return [tree, *_nodes(tree.body)]


def _nodes(body: list[ast.stmt]) -> Iterator[ast.AST]:
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node
        if isinstance(node, (ast.ClassDef, ast.If, ast.Try, ast.With)):  # functions inside functions are left out
            yield from _nodes(node.body)


def read_source(source: str, package: str, path: str) -> list[DocumentedObject]:
    """Return the documented objects of one file's text, in its order; [] when it is not valid Python."""
    found, lines, module = [], source.split("\n"), Path(path.removesuffix("/__init__.py")).stem
    for node in parse(source):
        summary, description = split_docstring(ast.get_docstring(node, clean=False) or "")
        if summary:
            kind = {"Module": "module", "ClassDef": "class"}.get(type(node).__name__, "function")
            start, end = (0, len(lines)) if kind == "module" else (node.lineno - 1, node.end_lineno)
            code = lines[start : node.body[0].lineno - 1] + lines[node.body[0].end_lineno : end]
            code = inspect.cleandoc("\n".join(code[:60]))[:MAX_CODE_CHARS].strip()
            name = getattr(node, "name", module)
            found.append(DocumentedObject(package, path, name, kind, summary, description, code))
    return found


def source_files(packages: Sequence[str] | None = None) -> list[tuple[str, str, str]]:
    """Return (package, path, file) of the source files of packages, of each sorted; None means ``DEFAULT_PACKAGES``."""
    return [file for package in dict.fromkeys(packages or DEFAULT_PACKAGES) for file in _files(package)]


def _files(package: str) -> list[tuple[str, str, str]]:
    """Return (package, path, file) of each source file of a package, sorted; [] when it is not installed."""
    spec = None if package == "stdlib" else importlib.util.find_spec(package)  # finds a top-level name, imports nothing
    roots = (spec and spec.submodule_search_locations) or [sysconfig.get_path("stdlib")] * (package == "stdlib")
    found = []
    for root in map(Path, roots):
        base = root if package == "stdlib" else root.parent
        for folder, folders, names in os.walk(root):
            folders[:] = [name for name in folders if not SKIPPED_FOLDER.fullmatch(name)]
            files = [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith("test_")]
            found += [(package, file.relative_to(base).as_posix(), str(file)) for file in files]
    return sorted(found)


def read_sources(files: list[tuple[str, str, str]], reader: Callable[[str, str, str], list]) -> list[list]:
    """Return what ``reader(source, package, path)`` finds in each file, [] where a file cannot be read.

    Args:
        files: (package, path, file) of each.
        reader: a function of a module that imports the standard library and `core` alone: it runs in processes of its
            own. Its rows go through JSON, a data class as a list of its fields.
    """
    workers = max(1, min(os.cpu_count() or 1, 16, len(files) // 50))
    # -I, and core's folder as the last one: nothing there shadows a module of the standard library.
    code = "import sys; sys.path.append(sys.argv[1]); import core.sample_data as data; data.serve(*sys.argv[2:])"
    where = [str(Path(__file__).parents[1]), reader.__module__, reader.__name__]

    def work(part: list[tuple[str, str, str]]) -> list[list]:
        command = [sys.executable, "-I", "-S", "-c", code, *where]
        done = subprocess.run(command, input=json.dumps(part).encode(), stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout)

    with ThreadPoolExecutor(workers) as pool:  # each thread waits for its process
        parts = list(pool.map(work, [files[number::workers] for number in range(workers)]))
    return [parts[number % workers][number // workers] for number in range(len(files))]


def serve(module: str, name: str) -> None:
    """Be a process of `read_sources`: files come in on stdin, their rows go out on stdout."""
    gc.disable()  # syntax trees are large and have no cycles
    reader, found = getattr(importlib.import_module(module), name), []
    for package, path, file in json.load(sys.stdin):
        try:
            found.append(reader(Path(file).read_text(encoding="utf-8"), package, path))
        except (OSError, UnicodeDecodeError):
            found.append([])
    json.dump(found, sys.stdout, default=astuple)


def documented_code(packages: Sequence[str] | None = None) -> list[DocumentedObject]:
    """Return the documented objects of the installed sources, in an order that the installation alone decides.

    Nothing is imported. No summary occurs twice and no text (description, or code where there is none): copied code
    would be in several splits. Files that cannot be read or parsed, and packages that are not installed, are skipped.

    Args:
        packages: "stdlib" and names of top-level packages; None means ``DEFAULT_PACKAGES``.
    """
    kept, seen = [], set()
    for row in (DocumentedObject(*row) for rows in read_sources(source_files(packages), read_source) for row in rows):
        keys = {row.summary.rstrip(".").lower(), "\n" + (row.description or row.code)}
        if "\n" not in keys and not keys & seen:
            kept.append(row)
            seen |= keys
    return kept


def stable_split(key: str, validation_percent: int = 5, test_percent: int = 5) -> str:
    """Return "train", "validation" or "test" for a key, always the same one.

    Use a file's ``path``, not a row: rows of one file describe each other, so that held-out ones would be half known.
    """
    place = int.from_bytes(sha256(key.encode()).digest()[:8], "big") % 100
    return "test" if place < test_percent else "validation" if place < test_percent + validation_percent else "train"


def write_splits(rows: Iterable[tuple[str, dict[str, Any]]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Split rows by `stable_split` of their keys, and write ``<split>.jsonl``: what is installed differs by machine.

    The rows of a split are in a fixed random order, so that the first ones are a sample of all.

    Args:
        rows: pairs of a key (the source file) and what JSON holds.
        folder: made if it is missing. The sha256 of each file is printed, and written to ``sha256.txt`` beside them.

    Returns:
        The rows of ``train``, ``validation`` and ``test``.
    """
    splits: dict[str, list[dict[str, Any]]] = {"train": [], "validation": [], "test": []}
    for key, row in rows:
        splits[stable_split(key)].append(row)
    main, sums = is_main_process(), ""
    if main:
        folder.mkdir(parents=True, exist_ok=True)
    for split, kept in splits.items():
        random.Random(0).shuffle(kept)
        content = "".join(json.dumps(row) + "\n" for row in kept).encode()
        if main:
            (folder / f"{split}.jsonl").write_bytes(content)
        sums += f"{sha256(content).hexdigest()}  {split}.jsonl\n"
        say(f"data: {len(kept):,} {split} rows, sha256 {sums.splitlines()[-1][:16]}")
    if main:
        (folder / "sha256.txt").write_text(sums, encoding="utf-8")
    return splits


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Any:
    """Train a BPE tokenizer on words, digits and punctuation in lower case: 0 is padding, 1 ends a text, 2 is unknown.

    Returns:
        ``transformers.PreTrainedTokenizerFast``, which `AutoTokenizer` loads again once it is saved.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    splits = [pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True), pre_tokenizers.Punctuation()]
    bpe.normalizer, bpe.pre_tokenizer, bpe.decoder = (
        normalizers.Lowercase(),
        pre_tokenizers.Sequence(splits),
        decoders.Metaspace(),
    )
    special = {"special_tokens": ["<pad>", "</s>", "<unk>"], "limit_alphabet": 200}
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=vocab_size, show_progress=False, **special))
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
