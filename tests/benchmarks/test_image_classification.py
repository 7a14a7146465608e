"""All sides train on the same files, and the pictures are what the facts say."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks import image_classification
from benchmarks.contests import Settings, compare
from core.augment import crop_box


def test_pictures_are_as_large_as_photographs() -> None:
    data = image_classification.picture(3)
    assert 30_000 < len(data) < 100_000
    assert Image.open(BytesIO(data)).size == image_classification.SIZE
    assert data == image_classification.picture(3) != image_classification.picture(4)


def test_the_peers_boxes_are_in_the_image_and_as_large_as_ours() -> None:
    boxes = [image_classification.Files._box(500, 375) for _ in range(1000)]
    assert all(0 <= left < right <= 500 and 0 <= top < bottom <= 375 for left, top, right, bottom in boxes)
    rng = np.random.default_rng(0)
    ours = [crop_box((500, 375), (0.08, 1), (3 / 4, 4 / 3), rng) for _ in boxes]
    areas = [sum((right - left) * (bottom - top) for left, top, right, bottom in some) for some in (boxes, ours)]
    assert 0.9 < areas[0] / areas[1] < 1.1


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("contest", image_classification.CONTESTS, ids=lambda contest: contest.name)
def test_sides_do_the_same(contest: image_classification.Contest, tmp_path: Path) -> None:
    measured = contest.measure(Settings(tmp_path, rounds=1, small=True))
    (row,) = contest.rows
    assert compare(contest, row, measured)["ratio"] > 0
    assert measured.facts["samples in a turn"] == {side: [20] for side in ("ours", row.side)}
    assert measured.facts["parameters"] > 0
