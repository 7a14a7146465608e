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


def test_text_to_image_draws_digits_that_a_judge_recognises_and_diffusers_loads_them(tmp_path: Path) -> None:
    results, said = run(tmp_path / "run", "text_to_image", "--gaudi_config", "gaudi_configs/stable_diffusion.json")
    assert results["generate_images"] == 300
    assert results["generate_recognised"] >= 0.95
    assert 0.95 < results["generate_recognised_real"] < 1  # a judge of 540 other images: not one of these
    assert "generate_recognised " in said
    assert "generate_recognised_real" in said
    pictures = sorted((tmp_path / "run" / "images").glob("0*.png"))
    assert len(pictures) == 300
    assert (tmp_path / "run" / "images" / "contact_sheet.png").stat().st_size > 10_000
    program = (
        "import sys, torch, diffusers, numpy, PIL.Image\n"
        "pipe = diffusers.StableDiffusionPipeline.from_pretrained(sys.argv[1])\n"
        "how = dict(num_inference_steps=25, guidance_scale=2.0, generator=torch.Generator().manual_seed(42))\n"
        "drawn = numpy.asarray(pipe('a handwritten zero', **how).images[0], int)\n"
        "assert drawn.shape == (32, 32, 3)\n"
        "print('difference', abs(drawn - numpy.asarray(PIL.Image.open(sys.argv[2]), int)).max())"
    )
    command = [sys.executable, "-c", program, tmp_path / "run", pictures[0]]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    assert int(done.stdout.split("difference")[1]) <= 2, done.stdout  # levels of 255, of another batch size


def test_summarization_beats_what_needs_no_model(tmp_path: Path) -> None:
    results, _ = run(tmp_path / "run", "summarization", "--gaudi_config", "gaudi_configs/t5.json")
    for phase in ("eval", "predict"):
        assert results[f"{phase}_rouge1"] > results[f"{phase}_name_rouge1"] + 2
        assert results[f"{phase}_rouge1"] > results[f"{phase}_lead_rouge1"] + 2
