"""The runs without a model and data, from the README's command to their end: minutes each, so not by default."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow


def run(folder: Path, recipe: str, *flags: str) -> tuple[dict, str]:
    """Return the results and what was printed; the threads are those that the run's own flags ask for."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, REPOSITORY / "recipes" / recipe / "run.py", *flags, "--output_dir", folder]
    done = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / "all_results.json").read_text()), done.stdout


def test_causal_language_modeling_beats_a_trigram_model(tmp_path: Path) -> None:
    results, said = run(tmp_path / "run", "language_modeling", "--gaudi_config", "gaudi_configs/gpt2.json")
    for phase in ("eval", "predict"):
        assert results[f"{phase}_perplexity"] < 0.85 * results[f"{phase}_trigram_perplexity"]
    assert results["perplexity"] == results["eval_perplexity"]
    assert "eval_trigram_perplexity" in said
    assert "sample: The function returns" in said


def test_masked_language_modeling_is_far_below_the_unigram_model(tmp_path: Path) -> None:
    flags = ["--objective", "masked", "--gaudi_config", "gaudi_configs/bert.json"]
    results, said = run(tmp_path / "run", "language_modeling", *flags)
    for phase in ("eval", "predict"):
        assert results[f"{phase}_perplexity"] < 0.2 * results[f"{phase}_unigram_perplexity"]
    assert "eval_unigram_perplexity" in said


def test_image_classification_knows_97_of_100_digits_that_it_never_saw(tmp_path: Path) -> None:
    results, said = run(tmp_path / "run", "image_classification", "--gaudi_config", "gaudi_configs/vit.json")
    for phase in ("eval", "predict"):
        assert results[f"{phase}_accuracy"] >= 0.97
        assert results[f"{phase}_unreadable_images"] == 0
    assert "predict_accuracy" in said
    rows = (tmp_path / "run" / "predictions.csv").read_text().splitlines()
    assert len(rows) == 361
    assert rows[0] == "path,class,probability,true class"
    card = (tmp_path / "run" / "README.md").read_text()
    for page in ("confusion_matrix", "mistakes")[: 1 + (results["predict_accuracy"] < 1)]:
        assert (tmp_path / "run" / f"predict_{page}.png").stat().st_size > 1000
        assert f"(predict_{page}.png)" in card


def test_summarization_beats_what_needs_no_model(tmp_path: Path) -> None:
    results, _ = run(tmp_path / "run", "summarization", "--gaudi_config", "gaudi_configs/t5.json")
    for phase in ("eval", "predict"):
        assert results[f"{phase}_rouge1"] > results[f"{phase}_name_rouge1"] + 2
        assert results[f"{phase}_rouge1"] > results[f"{phase}_lead_rouge1"] + 2
