"""Real images that every machine with scikit-learn has: 1,797 handwritten digits, in fixed splits.

They are the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998): bitmaps
of 32 x 32 points, counted in blocks of 4 x 4, by 13 people. Who wrote which is not recorded, so all splits have digits
of the same people: a score on them says nothing about another person's hand.
"""

from __future__ import annotations

from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING

from core.errors import UserError, say

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset


def handwritten_digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the images, uint8 (n, 8, 8) from 0 (paper) to 255 (ink), and digits, int64 (n,), of each split.

    A fifth is ``test``, a tenth ``validation``, the rest ``train``, each with its share of every digit, within one. The
    sha256 of a row's points decides, and orders a split's rows, so that they are the same on every machine and the
    first ones are a sample of all. No image occurs twice.

    Raises:
        UserError: scikit-learn is not installed.
    """
    import numpy as np

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the built-in images are scikit-learn's: pip install scikit-learn, or name data") from None
    say("no data is named: the images are scikit-learn's handwritten digits")
    counts, digits = load_digits(return_X_y=True)  # points of ink in a block, 0 to 16: (n, 64)
    counts, digits = counts.astype(np.uint8), digits.astype(np.int64)
    place = np.argsort(np.argsort([sha256(row.tobytes()).hexdigest() for row in counts]))
    images = ((counts.astype(np.int64) * 255 + 8) // 16).astype(np.uint8).reshape(-1, 8, 8)
    rows, total, found = np.lexsort((place, digits)), len(digits), {}
    for split, count in (("test", -(-total // 5)), ("validation", -(-total // 10)), ("train", None)):
        # The rows at which count / len(rows), added up, reaches another whole number.
        taken = np.diff(np.arange(len(rows) + 1) * (count or len(rows)) // len(rows)) > 0
        chosen = rows[taken]
        chosen = chosen[np.argsort(place[chosen])]
        rows, found[split] = rows[~taken], (images[chosen], digits[chosen])
    return dict(reversed(found.items()))


def digit_files() -> dict[str, Dataset]:
    """The same as rows of files in memory: ``image``, PNG bytes and a name, and ``label``, the digit."""
    from datasets import Dataset

    found = {}
    for split, (images, digits) in handwritten_digits().items():
        files = [{"bytes": png(image), "path": f"{split}-{at:04d}.png"} for at, image in enumerate(images)]
        found[split] = Dataset.from_dict({"image": files, "label": digits})
    return found


def png(pixels: np.ndarray) -> bytes:
    """The bytes of a PNG file of a picture: (height, width), uint8."""
    from PIL.Image import fromarray

    fromarray(pixels).save(file := BytesIO(), "png")
    return file.getvalue()
