"""Documented prose: what is kept of docstrings and the language reference; and the tokenizer that loses nothing."""

from __future__ import annotations

import sys
from textwrap import dedent

import pytest

from core.prose import SPECIAL_TOKENS, documented_prose, paragraphs, train_byte_level_bpe

DOCSTRING = """Read the :class:`~tides.Table` of one harbour
    from a file.

    Title of a section
    ------------------
    The heights are in *metres*, see [the guide](guide.md). Use it as follows::

        table = read("harbour")

    >>> read("harbour").look_up(3)
    1.2

    Parameters
    ----------
    path : str
        Where the file lies. It may be a folder, too,
        with one file a year.
    .. note:: This directive is left out of it.
    :param hour: This field is left out as well.

    Too few words.

    "Quoted text at the start is fine."
    """


def test_paragraphs_are_sentences_without_code() -> None:
    assert list(paragraphs(DOCSTRING)) == [
        "Read the Table of one harbour from a file.",
        "The heights are in metres, see the guide. Use it as follows:",
        "Where the file lies. It may be a folder, too, with one file a year.",
        '"Quoted text at the start is fine."',
    ]


@pytest.mark.parametrize("text", ["", "\n\n", "lower case is not a sentence.", "No full stop at the end of this"])
def test_no_paragraph(text) -> None:
    assert list(paragraphs(text)) == []


def test_documents_are_files_and_nothing_is_twice_or_imported(tmp_path, monkeypatch) -> None:
    shared = "This sentence stands in both of the files."
    (tmp_path / "shore").mkdir()
    for name, own in {"a.py": "This one is the first file's.", "b.py": "And this one is of the second."}.items():
        text = f'''
            """{shared}

            {own}
            """
            raise RuntimeError("imported")


            class Tide:
                def rise(self):
                    """{shared}"""
                def fall(self):
                    """Falls of the tide follow {name} in order."""
        '''
        (tmp_path / "shore" / name).write_text(dedent(text), encoding="utf-8")
    (tmp_path / "shore" / "broken.py").write_text('"""This file is not valid Python."""\ndef', encoding="utf-8")
    (tmp_path / "shore" / "latin.py").write_bytes(b'"""This file is not valid UTF-8: \xe9."""')
    (tmp_path / "shore" / "copy.py").write_text(f'"""{shared}"""', encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert documented_prose(["shore", "no_such_package"]) == [
        ("shore/a.py", f"{shared}\nThis one is the first file's.\nFalls of the tide follow a.py in order."),
        ("shore/b.py", "And this one is of the second.\nFalls of the tide follow b.py in order."),
    ]
    assert "shore" not in sys.modules


@pytest.fixture(scope="module")
def stdlib() -> list[tuple[str, str]]:
    return documented_prose(["stdlib"])


def test_standard_library_and_language_reference(stdlib) -> None:
    texts = dict(stdlib)
    assert len(texts) == len(stdlib) > 500
    assert sum(map(len, texts.values())) > 1_000_000
    assert "Assert statements are a convenient way" in texts["pydoc_data/topics/assert"]
    assert "json/decoder.py" in texts
    lines = [line for text in texts.values() for line in text.split("\n")]
    assert len(set(lines)) == len(lines)
    assert not any(">>>" in line or "::=" in line or len(line.split()) < 5 for line in lines)


@pytest.mark.parametrize("frame", [False, True])
def test_any_text_comes_back_from_a_saved_tokenizer(stdlib, frame, tmp_path) -> None:
    from transformers import AutoTokenizer

    trained = train_byte_level_bpe((text for _, text in stdlib[:200]), 600, frame)
    trained.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    text = "Déjà   vu, 東京 \U0001f600\n\n\ttwo  blanks , don 't\r\n"
    for tokenizer in (trained, loaded):
        assert len(tokenizer) == 600
        ids = tokenizer(text)["input_ids"]
        assert ids == trained(text)["input_ids"]
        assert ids[:: len(ids) - 1] == [2, 3] or not frame
        assert 2 not in ids or frame
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
        names = [getattr(tokenizer, f"{name}_token") for name in ("pad", "eos", "cls", "sep", "mask")]
        assert tuple(names) == SPECIAL_TOKENS
        assert tokenizer.convert_tokens_to_ids(names) == [0, 1, 2, 3, 4]
    assert trained.tokenize(" the file") == ["Ġthe", "Ġfile"]
