"""Real images that every machine with scikit-learn has: 1,797 handwritten digits, in fixed splits, and a judge of them.

They are the test part of E. Alpaydin and C. Kaynak's "Optical Recognition of Handwritten Digits" (UCI, 1998): bitmaps
of 32 x 32 points, counted in blocks of 4 x 4, by 13 people. Who wrote which is not recorded, so all splits have digits
of the same people: a score on them says nothing about another person's hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING

from core.errors import UserError, say

if TYPE_CHECKING:
    import numpy as np
    from datasets import Dataset

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
CAPTIONS = ("a handwritten {}", "a picture of the digit {}", "the number {} written by hand", "somebody wrote a {}")
PROMPTS = tuple(CAPTIONS[0].format(word) for word in WORDS)  # of each digit, in order


def handwritten_digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the images, uint8 (n, 8, 8) from 0 (paper) to 255 (ink), and digits, int64 (n,), of each split.

    A fifth is ``test``, a tenth ``validation``, the rest ``train``, each with its share of every digit, within one. The
    sha256 of a row's points decides, and orders a split's rows, so that they are the same on every machine and the
    first ones are a sample of all. No image occurs twice.

    Raises:
        UserError: scikit-learn is not installed.
    """
    found = _splits()
    say("no data is named: the images are scikit-learn's handwritten digits")
    return found


def _splits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    import numpy as np

    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise UserError("the built-in images are scikit-learn's: pip install scikit-learn, or name data") from None
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


def captioned_digits(size: int = 32) -> dict[str, Dataset]:
    """The same as pictures with captions: ``image``, PNG bytes and a name, and ``text``, the list of its `CAPTIONS`.

    Args:
        size: pixels of a side. The picture is in RGB, white ink on black, and smooth between the 8 x 8 points.
    """
    from datasets import Dataset

    captions = [[caption.format(word) for caption in CAPTIONS] for word in WORDS]
    found = {}
    for split, (images, digits) in handwritten_digits().items():
        pictures = [
            {"bytes": png(enlarge(one, size)), "path": f"{split}-{at:04d}.png"} for at, one in enumerate(images)
        ]
        found[split] = Dataset.from_dict({"image": pictures, "text": [captions[digit] for digit in digits]})
    return found


def enlarge(image: np.ndarray, size: int) -> np.ndarray:
    """Return a grey image, (height, width), uint8, as RGB of another size, (size, size, 3): bicubic interpolation."""
    import numpy as np
    from PIL.Image import Resampling, fromarray

    return np.asarray(fromarray(image).resize((size, size), Resampling.BICUBIC).convert("RGB"))


class DigitJudge:
    """Tells which digit a picture shows, by images that a model trained on ``train`` has never seen.

    A support vector machine (Cortes and Vapnik, "Support-Vector Networks", 1995) with scikit-learn's own settings,
    trained on ``validation`` and ``test``, 540 images. It looks at 8 x 8 points in grey, each the mean of a part of the
    picture: shape counts, not sharpness. The images it learns from were enlarged and shrunk in the same way.

    Args:
        size: pixels of a side of the pictures that will be judged.

    Attributes:
        accuracy: share of the real images of ``train`` that it recognises. A share of drawn ones that is greater says
            that these are plainer than real ones, not better.
    """

    def __init__(self, size: int = 32) -> None:
        import numpy as np
        from sklearn.svm import SVC

        splits = _splits()
        images, digits = (np.concatenate(both) for both in zip(splits["validation"], splits["test"], strict=True))
        real, known = ([enlarge(image, size) for image in some] for some in (splits["train"][0], images))
        self._machine = SVC().fit(self._points(known), digits)
        self.accuracy = self.recognised(real, splits["train"][1])

    def recognised(self, images: Sequence[np.ndarray], digits: Sequence[int]) -> float:
        """Return the share of the pictures, each uint8 (height, width, 3), that show the digit they should."""
        return float(self._machine.score(self._points(images), digits))

    @staticmethod
    def _points(images: Sequence[np.ndarray]) -> np.ndarray:
        import numpy as np
        from PIL.Image import Resampling, fromarray

        grey = [fromarray(image).convert("L").resize((8, 8), Resampling.BOX) for image in images]
        return np.stack([np.asarray(image, np.float64).ravel() / 255 for image in grey])


def judge(images: Sequence[np.ndarray], prompts: Sequence[str], phase: str) -> dict[str, float]:
    """Return the share of drawn pictures that a `DigitJudge` recognises, and of real ones.

    Nothing if a prompt has none of `WORDS`: then it is not known what the pictures should show.
    """
    digits = [next((WORDS.index(word) for word in prompt.lower().split() if word in WORDS), None) for prompt in prompts]
    if None in digits:
        return {}
    machine = DigitJudge(len(images[0]))
    found = {"recognised": machine.recognised(images, digits), "recognised_real": machine.accuracy}
    return {f"{phase}_{name}": share for name, share in found.items()}


def png(pixels: np.ndarray) -> bytes:
    """The bytes of a PNG file of a picture: (height, width) or, in RGB, (height, width, 3), uint8."""
    from PIL.Image import fromarray

    fromarray(pixels).save(file := BytesIO(), "png")
    return file.getvalue()
