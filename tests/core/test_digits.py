"""The handwritten digits: real, in the same splits everywhere, and in one split each; and who tells drawn ones."""

from __future__ import annotations

import sys
from hashlib import sha256
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from core.digits import CAPTIONS, PROMPTS, WORDS, DigitJudge, captioned_digits, enlarge, handwritten_digits
from core.errors import UserError

# Of the images and the digits, both as int64: other sums are other data, on whichever machine.
SUMS = {
    "train": "7f046d212cac1ff6d9ca63ed9114aa2e4e98f8170d434d9f39a1ce3f3ac0c1fc",
    "validation": "cf91e0d564b1c78b249f0c33879b23ed9618b64707d7d15c61625ff649a3d0c3",
    "test": "f45a39a9aa2a25afbc37c7fc3dc5774680fe4dac3061008a6b244a41e27de816",
}


@pytest.fixture(scope="module")
def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    return handwritten_digits()


def test_the_splits_are_the_same_everywhere(digits) -> None:
    assert list(digits) == ["train", "validation", "test"]
    found = {}
    for split, (images, labels) in digits.items():
        assert (images.dtype, labels.dtype) == (np.uint8, np.int64)
        found[split] = sha256(images.astype("<i8").tobytes() + labels.astype("<i8").tobytes()).hexdigest()
    assert found == SUMS


def test_a_fifth_is_to_test_on_and_every_digit_is_in_each_split(digits) -> None:
    sizes = {split: len(labels) for split, (_, labels) in digits.items()}
    assert sizes == {"train": 1257, "validation": 180, "test": 360}
    all_labels = np.concatenate([labels for _, labels in digits.values()])
    share = np.bincount(all_labels) / 1797
    for split, (images, labels) in digits.items():
        assert images.shape == (sizes[split], 8, 8)
        assert (abs(np.bincount(labels) - share * len(labels)) < 1.5).all()
        assert set(labels[:90]) == set(range(10))  # the first ones are a sample of all


def test_no_image_is_in_two_splits(digits) -> None:
    images = np.concatenate([images for images, _ in digits.values()])
    assert len({image.tobytes() for image in images}) == 1797


def test_they_are_the_digits_of_scikit_learn_in_shades_of_a_byte(digits) -> None:
    from sklearn.datasets import load_digits

    source = load_digits()
    expected = sorted(
        (image.astype(int).tolist(), int(label)) for image, label in zip(source.images, source.target, strict=True)
    )
    images, labels = (np.concatenate(parts) for parts in zip(*digits.values(), strict=True))
    assert set(np.unique(images)) == {round(255 * shade / 16) for shade in range(17)}
    shades = np.round(images / 255 * 16).astype(int)
    assert sorted((image.tolist(), int(label)) for image, label in zip(shades, labels, strict=True)) == expected


def test_the_nearest_image_to_train_on_tells_most_of_the_digits(digits) -> None:
    """So images and digits belong together; and a tested image is no copy of one that is trained on."""
    (train, known), (test, labels) = digits["train"], digits["test"]
    train, test = (images.reshape(len(images), -1) / 255 for images in (train, test))
    distances = (test**2).sum(1)[:, None] + (train**2).sum(1) - 2 * test @ train.T
    assert (known[distances.argmin(1)] == labels).mean() > 0.95
    assert distances.min() > 0.2


def test_without_scikit_learn_it_is_one_line(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(
        UserError, match="the built-in images are scikit-learn's: pip install scikit-learn, or name data"
    ):
        handwritten_digits()


# --- With captions ----------------------------------------------------------------------------------------------------


def opened(rows, number: int) -> Image.Image:
    return Image.open(BytesIO(rows[number]["image"]["bytes"]))


def test_pictures_with_captions_are_the_same_digits_enlarged(digits) -> None:
    found = captioned_digits(size=24)
    assert list(found) == ["train", "validation", "test"]
    for split, rows in found.items():
        images, labels = digits[split]
        assert rows.column_names == ["image", "text"]
        assert [texts[0] for texts in rows["text"]] == [PROMPTS[digit] for digit in labels]
        for number in (0, 100, len(labels) - 1):
            picture = opened(rows, number)
            assert (picture.format, picture.mode, picture.size) == ("PNG", "RGB", (24, 24))
            points = np.asarray(picture.convert("L").resize((8, 8), Image.Resampling.BOX), int)
            assert np.corrcoef(points.ravel(), images[number].ravel().astype(int))[0, 1] > 0.98
    names = [image["path"] for rows in found.values() for image in rows["image"]]
    assert len(set(names)) == 1797


def test_each_caption_tells_the_digit_and_no_other() -> None:
    rows = captioned_digits(size=8)["validation"]
    for texts, prompt in ((rows[number]["text"], rows[number]["text"][0]) for number in range(30)):
        digit = PROMPTS.index(prompt)
        assert len(set(texts)) == len(CAPTIONS) == 4
        assert all({word for word in text.split() if word in WORDS} == {WORDS[digit]} for text in texts)


def test_an_enlarged_image_is_smooth_and_grey(digits) -> None:
    image = digits["train"][0][0]
    large = enlarge(image, 32).astype(int)
    assert (large == large[:, :, :1]).all()
    steps = [abs(np.diff(shades.astype(int), axis=1)).max() for shades in (image, large[:, :, 0])]
    assert steps[1] < steps[0] / 2


# --- The judge --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def judge() -> DigitJudge:
    return DigitJudge()


def test_the_judge_knows_images_of_the_other_splits_only(judge, digits) -> None:
    assert judge._machine.shape_fit_ == (540, 64)
    remembered = {row.tobytes() for row in judge._machine.support_vectors_}
    of_train = {row.tobytes() for row in judge._points([enlarge(image, 32) for image in digits["train"][0]])}
    assert len(remembered) > 100
    assert not remembered & of_train


def test_the_judge_tells_how_well_it_knows_real_digits(judge, digits) -> None:
    images, labels = digits["train"]
    pictures = np.stack([enlarge(image, 32) for image in images])
    assert judge.accuracy == judge.recognised(pictures, labels)
    assert 0.96 < judge.accuracy < 1


def test_what_is_recognised_is_the_share_that_shows_the_right_digit(judge, digits) -> None:
    images, labels = (both[:100] for both in digits["test"])  # which it knows
    pictures = np.stack([enlarge(image, 32) for image in images])
    assert judge.recognised(pictures, labels) >= 0.98
    wrong = np.where(np.arange(100) < 25, (labels + 1) % 10, labels)
    assert judge.recognised(pictures, wrong) == pytest.approx(0.75, abs=0.02)
    assert judge.recognised(np.zeros_like(pictures), labels) < 0.2
    with pytest.raises(ValueError, match="inconsistent numbers"):
        judge.recognised(pictures, labels[:-1])


def test_the_judge_looks_at_means(judge) -> None:
    picture = np.random.default_rng(0).integers(256, size=(32, 32, 1)).repeat(3, axis=2).astype(np.uint8)
    means = picture[:, :, 0].reshape(8, 4, 8, 4).mean((1, 3)).ravel()
    assert judge._points([picture])[0] * 255 == pytest.approx(means, abs=1)


def test_shape_counts_not_sharpness_or_size(judge, digits) -> None:
    images, labels = (both[:200] for both in digits["train"])
    sharp = [np.asarray(Image.fromarray(image).resize((64, 64), 0).convert("RGB")) for image in images]
    assert judge.recognised(sharp, labels) == pytest.approx(judge.accuracy, abs=0.02)
    assert DigitJudge(64).accuracy == pytest.approx(judge.accuracy, abs=0.01)


def test_the_judge_decides_the_same_every_time_and_says_nothing(judge, capsys) -> None:
    assert DigitJudge().accuracy == judge.accuracy
    assert capsys.readouterr().out == ""
