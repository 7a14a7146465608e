"""The handwritten digits: real, in the same splits everywhere, and in one split each."""

from __future__ import annotations

import sys
from hashlib import sha256

import numpy as np
import pytest

from core.digits import handwritten_digits
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
