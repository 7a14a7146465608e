"""The CLIP score, by hand: transformers' own logits, without their scale."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from core import clip_score as module
from core.clip_score import clip_score
from core.device import Device
from core.errors import UserError
from tests.core.drawings import arguments, save_clip

CPU = Device("cpu", "cpu (test)", "eager", torch.device("cpu"))
PROMPTS = ["alpha", "beta 1", "a b c d e f g h i j k l m n o p q r s t", "", "beta", "alpha beta", "z"]
IMAGES = list(np.random.default_rng(0).integers(0, 256, (7, 20, 30, 3), np.uint8))


@pytest.fixture(scope="module")
def tiny_clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_clip(tmp_path_factory.mktemp("tiny_clip"))


@pytest.mark.parametrize("rows", [1, 3, 32])
def test_it_is_the_mean_of_cosines(tiny_clip: Path, monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    from transformers import AutoTokenizer, CLIPImageProcessorPil, CLIPModel

    monkeypatch.setattr(module, "ROWS", rows)
    model, processor = CLIPModel.from_pretrained(tiny_clip).eval(), CLIPImageProcessorPil.from_pretrained(tiny_clip)
    tokenizer = AutoTokenizer.from_pretrained(tiny_clip)
    cosines = []
    for image, prompt in zip(IMAGES, PROMPTS, strict=True):
        texts = tokenizer([prompt], truncation=True, max_length=16, return_tensors="pt")
        with torch.no_grad():
            logits = model(**texts, **processor(image, return_tensors="pt")).logits_per_image
        cosines.append((logits / model.logit_scale.exp()).item())
    assert min(cosines) < 0 < cosines[-1]  # of which the last batch is filled
    expected = 100 * np.clip(cosines, 0, None).mean()
    assert clip_score(str(tiny_clip), IMAGES, PROMPTS, arguments(), CPU) == pytest.approx(expected, abs=1e-4)


def test_another_model_is_one_line(tiny_vit: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is of the kind vit; name one of clip"):
        clip_score(str(tiny_vit), IMAGES, PROMPTS, arguments(), CPU)
    with pytest.raises(UserError, match=r"the model /no/such that scores images cannot be loaded"):
        clip_score("/no/such", IMAGES, PROMPTS, arguments(), CPU)
