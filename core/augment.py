"""Random views of images, and mixtures of two.

Every draw comes from the generator that is passed in: seeded for a row and an epoch, it gives that row's view at any
number of workers and ranks and after a resume.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from core.images import decode, upright_size

TRIES = 10
FILL = "#808080"  # mid grey, as in the code of the paper, where a rotation, shear or shift leaves nothing
BILINEAR = Image.Resampling.BILINEAR


def crop_box(
    size: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float], rng: np.random.Generator
) -> tuple[int, int, int, int]:
    """Draw the box of a random resized crop (Szegedy et al., "Going deeper with convolutions", 2014, section 6).

    The area is uniform in ``scale``, the aspect log-uniform in ``ratio``, the place uniform. The first of ten tries
    that fits is taken; if none does, the largest centred box whose aspect is allowed. Takes 40 draws.

    Args:
        size: (width, height), in pixels, at least 1.
        scale: (lowest, highest) share of the image's area.
        ratio: (lowest, highest) width / height.

    Returns:
        (left, top, right, bottom), in pixels, within the image and never empty.
    """
    width, height = size
    for of_scale, of_ratio, of_left, of_top in rng.random((TRIES, 4)).tolist():
        area = width * height * (scale[0] + of_scale * (scale[1] - scale[0]))
        aspect = ratio[0] * (ratio[1] / ratio[0]) ** of_ratio
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            left, top = int(of_left * (width - across + 1)), int(of_top * (height - down + 1))
            return left, top, left + across, top + down
    aspect = min(max(width / height, ratio[0]), ratio[1])
    across = max(1, min(width, round(height * aspect)))
    down = max(1, min(height, round(width / aspect)))
    left, top = (width - across) // 2, (height - down) // 2
    return left, top, left + across, top + down


def _affine(image: Image.Image, *matrix: float) -> Image.Image:
    """Take the pixel at (x, y) from (a x + b y + c, d x + e y + f), with the matrix a to f."""
    return image.transform(image.size, Image.Transform.AFFINE, matrix, BILINEAR, fillcolor=FILL)


# Of the paper's figure 2. The strength is from -1 to 1: 0 changes nothing, except for the two that have no strength.
OPERATIONS: dict[str, Callable[[Image.Image, float], Image.Image]] = {
    "identity": lambda image, strength: image,
    "autocontrast": lambda image, strength: ImageOps.autocontrast(image),
    "equalize": lambda image, strength: ImageOps.equalize(image),
    "rotate": lambda image, strength: image.rotate(30 * strength, BILINEAR, fillcolor=FILL),
    "solarize": lambda image, strength: ImageOps.solarize(image, 256 - round(256 * abs(strength))),
    "color": lambda image, strength: ImageEnhance.Color(image).enhance(1 + 0.9 * strength),
    "posterize": lambda image, strength: ImageOps.posterize(image, 8 - round(4 * abs(strength))),
    "contrast": lambda image, strength: ImageEnhance.Contrast(image).enhance(1 + 0.9 * strength),
    "brightness": lambda image, strength: ImageEnhance.Brightness(image).enhance(1 + 0.9 * strength),
    "sharpness": lambda image, strength: ImageEnhance.Sharpness(image).enhance(1 + 0.9 * strength),
    "shear_x": lambda image, strength: _affine(image, 1, -0.3 * strength, 0, 0, 1, 0),
    "shear_y": lambda image, strength: _affine(image, 1, 0, 0, -0.3 * strength, 1, 0),
    "translate_x": lambda image, strength: _affine(image, 1, 0, -0.45 * strength * image.width, 0, 1, 0),
    "translate_y": lambda image, strength: _affine(image, 1, 0, 0, 0, 1, -0.45 * strength * image.height),
}


def rand_augment(image: Image.Image, operations: int, magnitude: float, rng: np.random.Generator) -> Image.Image:
    """Apply ``operations`` of `OPERATIONS`, each drawn evenly (Cubuk et al., "RandAugment", 2020).

    The magnitude is the paper's and timm's, 0 to 10 (torchvision counts to 30), the sign of each strength is drawn.
    0 is no change: the paper's code dims the image to a tenth there, timm's ``inc1`` and torchvision do not. Takes two
    draws an operation. ``image`` is RGB or L, and not changed.
    """
    for choice, sign in rng.random((operations, 2)).tolist():
        operate = list(OPERATIONS.values())[int(choice * len(OPERATIONS))]
        image = operate(image, math.copysign(magnitude / 10, sign - 0.5))
    return image


@dataclass(frozen=True)
class RandomView:
    """A random crop of an image, mirrored or not, under RandAugment: what training sees of it.

    The draws are those of `crop_box`, one for the mirror, and those of `rand_augment`, whatever the options: a change
    of ``flip`` moves no box, one of ``operations`` neither box nor mirror.

    Attributes:
        size: (height, width) of the view, in pixels.
        resample: PIL's filter for the resizing, e.g. 3 for bicubic.
        channels: 3 (RGB) or 1 (grey).
        scale: (lowest, highest) share of the image's area, see `crop_box`.
        ratio: (lowest, highest) width / height.
        flip: probability of the mirror image.
        operations: RandAugment's N; 0 is off.
        magnitude: RandAugment's M, 0 to 10.
    """

    size: tuple[int, int]
    resample: int
    channels: int
    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    operations: int = 0
    magnitude: float = 9.0

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> np.ndarray:
        """Return the view of an opened image as uint8 (channels, height, width).

        A JPEG is decoded smaller by 2, 4 or 8 where the box keeps at least the view's pixels.

        Raises:
            UnreadableImage: see `core.images.decode`.
        """
        height, width = self.size
        full = upright_size(image)
        box = crop_box(full, self.scale, self.ratio, rng)
        mirrored = rng.random() < self.flip
        decoded = decode(image, self.channels, shrink=min((box[2] - box[0]) / width, (box[3] - box[1]) / height))
        scaled = tuple(at * now / was for at, now, was in zip(box, 2 * decoded.size, 2 * full, strict=True))
        view = decoded.resize((width, height), self.resample, box=scaled)
        view = rand_augment(ImageOps.mirror(view) if mirrored else view, self.operations, self.magnitude, rng)
        return np.atleast_3d(np.asarray(view)).transpose(2, 0, 1).copy()


@dataclass(frozen=True)
class CropView:
    """A square of an image whose shorter side has been made ``resolution`` pixels long, mirrored or not.

    Three draws are taken, whatever the options: for top, left and mirror. So none of the options moves another's draw.

    Attributes:
        resolution: of the shorter side, in pixels; smaller images are enlarged. The aspect is kept, but for less than
            a pixel of the longer side.
        crop: side of the square, in pixels, at most ``resolution``.
        center: take it from the middle instead of a drawn place.
        flip: probability of the mirror image.
        resample: PIL's filter for the resizing, e.g. 2 for bilinear.

    Raises:
        ValueError: ``crop`` is not from 1 to ``resolution``.
    """

    resolution: int
    crop: int
    center: bool = False
    flip: float = 0.0
    resample: int = BILINEAR

    def __post_init__(self) -> None:
        if not 1 <= self.crop <= self.resolution:
            raise ValueError(f"a square of {self.crop} pixels does not fit into images of {self.resolution}")

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> tuple[np.ndarray, tuple[int, int, int, int]]:
        """Return the square of an opened image as uint8 (3, crop, crop), and (height, width, top, left).

        These are what a model may be told of it (Podell et al., "SDXL", 2023, section 2.2): the image's size before the
        resizing, upright, and where the square begins in the resized image; of a mirrored one in the mirror image, as
        in the training scripts of diffusers. A JPEG is decoded smaller by 2, 4 or 8 where that leaves ``resolution``.

        Raises:
            UnreadableImage: see `core.images.decode`.
        """
        full = upright_size(image)
        shorter = min(full)
        width, height = (self.resolution * side // shorter for side in full)
        of_top, of_left, of_mirror = rng.random(3).tolist()
        spare, mirrored = (height - self.crop, width - self.crop), of_mirror < self.flip
        drawn = (int(of * (free + 1)) for of, free in zip((of_top, of_left), spare, strict=True))
        top, left = (round(free / 2) for free in spare) if self.center else drawn
        decoded = decode(image, shrink=shorter / self.resolution)
        start = width - self.crop - left if mirrored else left
        box = (start, top, start + self.crop, top + self.crop)
        # The box alone is resized: of an image of one row of pixels the whole would not fit into any memory.
        scaled = tuple(at * now / was for at, now, was in zip(box, 2 * decoded.size, 2 * (width, height), strict=True))
        view = decoded.resize((self.crop, self.crop), self.resample, box=scaled)
        pixels = np.asarray(ImageOps.mirror(view) if mirrored else view).transpose(2, 0, 1).copy()
        return pixels, (full[1], full[0], top, left)


def mix(
    first: np.ndarray, second: np.ndarray, rng: np.random.Generator, mixup_alpha: float, cutmix_alpha: float
) -> tuple[np.ndarray, float]:
    """Mix two images and say how much of the first there is: the weight of its label, the rest is the second's.

    Mixup (Zhang et al., 2017) blends them, by a share of Beta(alpha, alpha); CutMix (Yun et al., 2019) puts a box of
    the second in the same place of the first, and the share is the area that is left, after the image's edge has cut
    the box. If both alphas are above 0, one of the two is drawn, evenly; at two zeros the first comes back.

    Args:
        first, second: uint8 (channels, height, width), of one shape; not changed.

    Returns:
        New pixels of that shape and type, and the share, 0 to 1.

    Raises:
        ValueError: the shapes differ.
    """
    if first.shape != second.shape:
        raise ValueError(f"images of shapes {first.shape} and {second.shape} do not mix")
    choice, *centre = rng.random(3).tolist()
    cut = cutmix_alpha > 0 and (mixup_alpha <= 0 or choice < 0.5)
    alpha = cutmix_alpha if cut else mixup_alpha
    share = float(rng.beta(alpha, alpha)) if alpha > 0 else 1.0
    if not cut:
        blend = first.astype(np.float32) * share + second.astype(np.float32) * (1 - share)
        return np.rint(blend).astype(np.uint8), share
    place = [slice(None)]
    for side, at in zip(first.shape[1:], centre, strict=True):
        length = int(side * math.sqrt(1 - share))
        start = int(side * at) - length // 2
        place.append(slice(max(0, start), start + length))
    mixed = first.copy()
    mixed[tuple(place)] = second[tuple(place)]
    return mixed, (mixed.size - mixed[tuple(place)].size) / mixed.size
