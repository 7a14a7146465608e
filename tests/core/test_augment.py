"""Random views: the draws are as their papers say, come from one generator only, and do not move each other."""

from __future__ import annotations

import io
import math
import random

import numpy as np
import pytest
from PIL import Image, ImageOps

from core import augment
from core.augment import OPERATIONS, CropView, RandomView, crop_box, mix, rand_augment
from core.images import upright_size

NEAREST, BILINEAR, BICUBIC = Image.Resampling.NEAREST, Image.Resampling.BILINEAR, Image.Resampling.BICUBIC
EVERYTHING = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0)}  # of a square image


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def picture(mode: str = "RGB", size: tuple[int, int] = (40, 30), low: int = 40, high: int = 200) -> Image.Image:
    """Noise: every pixel and channel another value, none of them black or white."""
    shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
    return Image.fromarray(rng(7).integers(low, high, shape, dtype=np.uint8))


def pixels(image: Image.Image) -> np.ndarray:
    """(height, width, channels), wide enough to subtract."""
    return np.asarray(image).reshape(image.height, image.width, -1).astype(int)


def off(samples: np.ndarray) -> float:
    """How far the distribution of the samples is from that of 0 to 1 (Kolmogorov-Smirnov), 1.6 being 1 in 100."""
    ordered = np.sort(samples)
    return np.abs(ordered - (np.arange(len(ordered)) + 0.5) / len(ordered)).max() * math.sqrt(len(ordered))


# --- crop_box


def test_area_aspect_and_place_are_uniform() -> None:
    generator, scale, ratio = rng(1), (0.08, 0.75), (3 / 4, 4 / 3)  # 0.75 * 4/3 = 1: every try fits into a square
    boxes = np.array([crop_box((3000, 3000), scale, ratio, generator) for _ in range(3000)])
    across, down = (boxes[:, 2] - boxes[:, 0]), (boxes[:, 3] - boxes[:, 1])
    area = across * down / 3000**2
    assert off((area - 0.08) / 0.67) < 1.6
    assert off(np.log(across / down) / np.log(16 / 9) + 0.5) < 1.6
    assert off((boxes[:, 0] + 0.5) / (3001 - across)) < 1.6
    assert off((boxes[:, 1] + 0.5) / (3001 - down)) < 1.6
    independent = np.corrcoef([area, across / down, boxes[:, 0] / (3001 - across), boxes[:, 1] / (3001 - down)])
    assert np.abs(independent - np.eye(4)).max() < 0.06


def test_ten_tries_and_then_the_centre() -> None:
    """In an image three times as wide as high an area a fits where the aspect is 3a or more: 0.28 of the tries."""
    generator, low, high = rng(2), 0.08, 1.0
    fits = ((1 / 4 - low) + (4 / 9 - 1 / 4 - 1 / 4 * math.log(16 / 9)) / math.log(16 / 9)) / (high - low)
    centre = ((900 - 400) // 2, 0, (900 + 400) // 2, 300)  # 4/3 is the widest
    boxes = [crop_box((900, 300), (low, high), (3 / 4, 4 / 3), generator) for _ in range(4000)]
    assert boxes.count(centre) / len(boxes) == pytest.approx((1 - fits) ** 10, abs=0.01)


@pytest.mark.parametrize("size", [(1, 1), (1, 1000), (1000, 1), (2, 3), (31, 17)], ids=str)
@pytest.mark.parametrize("ratio", [(3 / 4, 4 / 3), (0.1, 0.3), (5.0, 9.0), (1.0, 1.0)], ids=str)
def test_boxes_lie_within_images_of_every_size(size: tuple[int, int], ratio: tuple[float, float]) -> None:
    generator = rng(3)
    for scale in 40 * [(0.08, 1.0), (1.0, 1.0), (1e-6, 1e-5)]:
        left, top, right, bottom = box = crop_box(size, scale, ratio, generator)
        assert all(isinstance(side, int) for side in box)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]


def test_a_line_is_cut_in_its_middle_and_a_whole_image_stays_whole() -> None:
    assert crop_box((1, 1000), (0.5, 1.0), (3 / 4, 4 / 3), rng()) == (0, 499, 1, 500)
    assert crop_box((1000, 1), (0.5, 1.0), (3 / 4, 4 / 3), rng()) == (499, 0, 500, 1)
    assert crop_box((50, 50), (1.0, 1.0), (1.0, 1.0), rng()) == (0, 0, 50, 50)
    assert crop_box((50, 45), (1.0, 1.0), (3 / 4, 4 / 3), rng(5)) == (0, 0, 50, 45)  # no try fits


def test_every_place_is_drawn() -> None:
    generator = rng(4)
    boxes = [crop_box((2, 3), (1 / 6, 1 / 6), (1.0, 1.0), generator) for _ in range(600)]
    assert sorted(set(boxes)) == [(x, y, x + 1, y + 1) for x in range(2) for y in range(3)]
    assert all(boxes.count(box) == pytest.approx(100, abs=30) for box in set(boxes))


# --- the operations


@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_kind_and_size_and_its_argument(name: str, mode: str) -> None:
    for size in [(1, 1), (1, 5), (2, 2), (8, 8), (40, 30)]:
        image = picture(mode, size)
        before = image.tobytes()
        for strength in (-1.0, -0.3, 0.0, 1.0):
            result = OPERATIONS[name](image, strength)
            assert (result.mode, result.size) == (mode, size)
            if strength == 0 and name not in ("autocontrast", "equalize"):
                assert result.tobytes() == before
        assert image.tobytes() == before


def test_the_operations_are_those_of_the_paper() -> None:
    names = "identity autocontrast equalize rotate solarize color posterize contrast brightness sharpness"
    assert list(OPERATIONS) == [*names.split(), "shear_x", "shear_y", "translate_x", "translate_y"]


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_what_operations_do_to_values(mode: str) -> None:
    image = picture(mode)
    before = pixels(image)

    def after(name: str, strength: float) -> np.ndarray:
        return pixels(OPERATIONS[name](image, strength))

    assert (after("identity", 1.0) == before).all()
    darkest, lightest = before.min((0, 1)), before.max((0, 1))
    assert np.abs(after("autocontrast", 1.0) - (before - darkest) * 255 / (lightest - darkest)).max() <= 1
    assert (after("solarize", -0.5) == np.where(before >= 128, 255 - before, before)).all()
    assert (after("solarize", 1.0) == 255 - before).all()
    assert (after("posterize", -0.5) == before & 0b11111100).all()
    assert (after("posterize", 1.0) == before & 0b11110000).all()
    assert np.abs(after("brightness", -0.5) - 0.55 * before).max() <= 1
    assert np.abs(after("brightness", 1.0) - np.minimum(1.9 * before, 255)).max() <= 1
    mean = before.mean() if mode == "L" else pixels(image.convert("L")).mean()
    assert np.abs(after("contrast", -0.5) - (mean + 0.55 * (before - mean))).max() <= 1
    assert np.abs(after("contrast", 0.5) - np.clip(mean + 1.45 * (before - mean), 0, 255)).max() <= 1.5
    steps = [np.abs(np.diff(after("sharpness", strength), axis=1)).mean() for strength in (-1, -0.5, 0, 0.5, 1)]
    assert steps == sorted(steps)
    assert steps[0] < 0.5 * steps[2] < 0.5 * steps[4]
    dark = picture(mode, (200, 200)).point(lambda value: value**2 // 255)
    even = pixels(OPERATIONS["equalize"](dark, 0.0)) / 255
    assert all(off(even[..., channel].ravel()) < 0.04 * 200 for channel in range(even.shape[2]))


def test_color_moves_between_grey_and_garish() -> None:
    image = picture("RGB", low=80, high=150)
    spread = np.ptp(pixels(image), axis=2)
    for strength in (-1.0, -0.5, 1.0):
        now = np.ptp(pixels(OPERATIONS["color"](image, strength)), axis=2)
        assert np.abs(now - (1 + 0.9 * strength) * spread).max() <= 2
    grey = picture("L")
    assert OPERATIONS["color"](grey, 1.0).tobytes() == grey.tobytes()


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_translation_moves_by_a_share_of_the_side(mode: str) -> None:
    image = picture(mode, (40, 60))
    before, right = pixels(image), pixels(OPERATIONS["translate_x"](image, 0.5))  # 9 of 40
    assert (right[:, 9:] == before[:, :-9]).all()
    assert (right[:, :9] == 128).all()
    up = pixels(OPERATIONS["translate_y"](image, -1.0))  # 27 of 60
    assert (up[:-27] == before[27:]).all()
    assert (up[-27:] == 128).all()


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_shear_moves_a_row_the_more_the_lower(mode: str) -> None:
    image = picture(mode, (40, 40))
    before, sheared = pixels(image), pixels(OPERATIONS["shear_x"](image, 1.0))
    flipped = image.transpose(Image.Transpose.TRANSPOSE)
    down = OPERATIONS["shear_y"](flipped, 1.0).transpose(Image.Transpose.TRANSPOSE)
    assert np.abs(pixels(down) - sheared).max() <= 1
    for row in (1, 11, 31):  # the middle of a row is a half below its number
        moved = 0.3 * (row + 0.5)
        whole, part = int(moved), moved - int(moved)
        expected = (1 - part) * before[row, 1 : 39 - whole] + part * before[row, : 38 - whole]
        assert np.abs(sheared[row, 1 + whole : 39] - expected).max() <= 1
        assert (sheared[row, :whole] == 128).all()


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_rotation_is_by_up_to_30_degrees_about_the_centre(mode: str) -> None:
    dark = np.zeros((101, 101), np.uint8)
    dark[48:53, 83:88] = 255  # 35 right of the centre
    image = Image.fromarray(dark).convert(mode)
    for strength in (-1.0, 0.5, 1.0):
        turned = pixels(OPERATIONS["rotate"](image, strength))
        inside = turned[..., 0] * (np.hypot(*(np.indices((101, 101)) - 50)) < 50)
        y, x = (np.average(axis, weights=inside) - 50 for axis in np.indices((101, 101)))
        assert math.degrees(math.atan2(-y, x)) == pytest.approx(30 * strength, abs=0.5)
        assert (turned[0, 0] == 128).all()


def test_operations_are_drawn_evenly_with_either_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    noted = {name: lambda image, strength, name=name: seen.append((name, strength)) or image for name in OPERATIONS}
    monkeypatch.setattr(augment, "OPERATIONS", noted)
    rand_augment(picture(), 14_000, 7.0, rng())
    assert {strength for _, strength in seen} == {0.7, -0.7}
    for name in OPERATIONS:
        strengths = [strength for found, strength in seen if found == name]
        assert len(strengths) == pytest.approx(1000, abs=120)
        assert sum(strength > 0 for strength in strengths) == pytest.approx(len(strengths) / 2, abs=70)


# --- RandomView


@pytest.mark.parametrize(("mode", "channels"), [("RGB", 3), ("L", 1), ("RGB", 1), ("L", 3)])
def test_a_view_is_a_function_of_image_and_seed(mode: str, channels: int) -> None:
    view = RandomView((8, 12), BICUBIC, channels, operations=2)
    image = picture(mode)
    first = [view(image, rng(seed)) for seed in range(20)]
    again = [view(image, rng(seed)) for seed in reversed(range(20))][::-1]
    assert all(np.array_equal(one, other) for one, other in zip(first, again, strict=True))
    assert len({one.tobytes() for one in first}) == 20
    assert {(one.shape, one.dtype.name) for one in first} == {((channels, 8, 12), "uint8")}
    assert all(one.flags.writeable and one.flags.c_contiguous for one in first)


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_the_whole_image_at_its_size_is_the_image(mode: str) -> None:
    image = picture(mode, (24, 24))
    for flip, expected in ((0.0, image), (1.0, ImageOps.mirror(image))):
        view = RandomView((24, 24), BICUBIC, len(image.getbands()), flip=flip, **EVERYTHING)
        assert (view(image, rng()).transpose(1, 2, 0) == pixels(expected)).all()


@pytest.mark.parametrize("resample", [NEAREST, BILINEAR, BICUBIC])
def test_the_view_has_its_size_and_filter(resample: int) -> None:
    image = picture("RGB", (24, 24))
    found = RandomView((8, 13), resample, 3, flip=0.0, **EVERYTHING)(image, rng())
    assert (found.transpose(1, 2, 0) == pixels(image.resize((13, 8), resample))).all()


def test_half_of_the_views_are_mirrored() -> None:
    image = picture("L", (8, 8))
    view = RandomView((8, 8), NEAREST, 1, flip=0.5, **EVERYTHING)
    generator = rng()
    straight = sum(np.array_equal(view(image, generator)[0], pixels(image)[..., 0]) for _ in range(1000))
    assert straight == pytest.approx(500, abs=50)


def test_the_view_shows_the_box() -> None:
    y, x = np.indices((200, 250), dtype=np.uint8)
    image = Image.fromarray(np.stack([x, y, y], axis=2))
    view = RandomView((12, 17), BILINEAR, 3, scale=(0.01, 0.3), flip=0.0)
    for seed in range(20):
        left, top, right, bottom = crop_box((250, 200), view.scale, view.ratio, rng(seed))
        found = view(image, rng(seed)).mean((1, 2))
        assert found[0] == pytest.approx((left + right - 1) / 2, abs=1)
        assert found[1] == pytest.approx((top + bottom - 1) / 2, abs=1)


def test_later_options_move_no_earlier_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    image = picture()
    for seed in range(10):
        plain = RandomView((8, 8), BICUBIC, 3, flip=0.0)(image, rng(seed))
        mirrored = RandomView((8, 8), NEAREST, 3, flip=1.0)(image, rng(seed))
        assert np.array_equal(RandomView((8, 8), NEAREST, 3, flip=0.0)(image, rng(seed)), mirrored[..., ::-1])
        monkeypatch.setattr(augment, "OPERATIONS", {"identity": OPERATIONS["identity"]})
        assert np.array_equal(RandomView((8, 8), BICUBIC, 3, flip=0.0, operations=3)(image, rng(seed)), plain)
        monkeypatch.undo()
    following = []
    for size, flip in (((40, 40), 0.5), ((400, 10), 0.5), ((1, 1), 0.0), ((1, 1), 1.0)):  # all, some or no tries fit
        generator = rng()
        RandomView((8, 8), BICUBIC, 3, flip=flip, operations=2)(picture(size=size), generator)
        following.append(generator.random())
    assert len(set(following)) == 1


def test_global_generators_are_left_alone() -> None:
    random.seed(1)
    np.random.seed(1)
    before = random.getstate(), str(np.random.get_state())
    generator = rng()
    view = RandomView((8, 8), BICUBIC, 3, operations=14)
    for _ in range(10):
        mix(view(picture(), generator), view(picture(), generator), generator, 0.8, 1.0)
    assert (random.getstate(), str(np.random.get_state())) == before


def smooth(size: tuple[int, int]) -> Image.Image:
    """Colours that change slowly: what a JPEG keeps at any scale."""
    y, x = np.indices((size[1], size[0]))
    return Image.fromarray(np.stack([x * 255 // size[0], y * 255 // size[1], 128 + 0 * x], axis=2).astype(np.uint8))


def stored(image: Image.Image, kind: str, orientation: int = 1) -> Image.Image:
    """Write and open again, not yet decoded."""
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    image.save(file, kind, exif=exif, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    return Image.open(file)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_decoded_small_looks_the_same(orientation: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upright as it was meant, with the view's pixels at least, and no more than twice as many a side."""
    image, view = smooth((333, 250)), RandomView((12, 20), BICUBIC, 3, scale=(0.01, 0.5))
    size, factors, decode = upright_size(stored(image, "JPEG", orientation)), [], augment.decode

    def note(*arguments: object, **options: object) -> Image.Image:
        factors.append(size[0] / (result := decode(*arguments, **options)).width)
        return result

    monkeypatch.setattr(augment, "decode", note)
    for seed in range(20):
        upright = view(ImageOps.exif_transpose(stored(image, "PNG", orientation)), rng(seed))
        small, exact = (view(stored(image, kind, orientation), rng(seed)) for kind in ("JPEG", "PNG"))
        assert np.array_equal(exact, upright)
        assert np.abs(small.astype(int) - exact).mean() < 2.5
        left, top, right, bottom = crop_box(size, view.scale, view.ratio, rng(seed))
        enough = min((right - left) / 20, (bottom - top) / 12)
        assert factors[-2] == pytest.approx(max(by for by in (1, 2, 4, 8) if by <= max(1, enough)), rel=0.03)
        assert factors[-1] == 1
    assert {round(factor) for factor in factors} == {1, 2, 4, 8}


# --- CropView


def resized(image: Image.Image, resolution: int, resample: int = BILINEAR) -> Image.Image:
    """The whole image as Pillow resizes it, its shorter side of ``resolution`` pixels."""
    width, height = (int(resolution * side / min(image.size)) for side in image.size)
    return image.resize((width, height), resample)


@pytest.mark.parametrize("size", [(40, 30), (30, 47), (16, 16), (9, 5), (3, 90)], ids=str)
@pytest.mark.parametrize("resample", [BILINEAR, BICUBIC])
@pytest.mark.parametrize("flip", [0.0, 1.0])
def test_a_crop_is_that_of_the_resized_image(size: tuple[int, int], resample: int, flip: float) -> None:
    image = picture("RGB", size)
    whole = resized(image, 16, resample)
    whole = ImageOps.mirror(whole) if flip else whole
    for crop in (16, 11, 1):
        for seed in range(5):
            found, (height, width, top, left) = CropView(16, crop, flip=flip, resample=resample)(image, rng(seed))
            of_top, of_left, _ = rng(seed).random(3)
            assert (found.shape, found.dtype, found.flags.c_contiguous) == ((3, crop, crop), np.uint8, True)
            assert (height, width) == (size[1], size[0])
            assert (top, left) == (int(of_top * (whole.height - crop + 1)), int(of_left * (whole.width - crop + 1)))
            expected = pixels(whole.crop((left, top, left + crop, top + crop)))
            assert np.abs(found.transpose(1, 2, 0) - expected).max() <= 1
    assert isinstance(top, int)
    assert isinstance(left, int)


def test_a_square_of_its_size_stays_as_it_is() -> None:
    image = picture("RGB", (24, 24))
    for flip, expected in ((0.0, image), (1.0, ImageOps.mirror(image))):
        found, place = CropView(24, 24, flip=flip)(image, rng())
        assert (found.transpose(1, 2, 0) == pixels(expected)).all()
        assert place == (24, 24, 0, 0)


@pytest.mark.parametrize(("size", "place"), [((41, 20), (0, 10)), ((20, 41), (10, 0)), ((20, 20), (0, 0))], ids=str)
def test_the_centre_is_the_centre(size: tuple[int, int], place: tuple[int, int]) -> None:
    image = picture("RGB", size)
    for seed in range(5):
        for flip in (0.0, 1.0):
            found, (*_, top, left) = CropView(20, 20, center=True, flip=flip)(image, rng(seed))
            assert (top, left) == place
            whole = ImageOps.mirror(image) if flip else image
            assert (found.transpose(1, 2, 0) == pixels(whole)[top : top + 20, left : left + 20]).all()


def test_every_place_of_a_crop_is_drawn_and_half_are_mirrored() -> None:
    image, generator, view, seen = picture("RGB", (10, 8)), rng(), CropView(8, 7, flip=0.5), []
    for _ in range(1600):
        found, (*_, top, left) = view(image, generator)
        mirrored = [
            np.array_equal(pixels(whole)[top : top + 7, left : left + 7], found.transpose(1, 2, 0))
            for whole in (image, ImageOps.mirror(image))
        ]
        seen.append((top, left, mirrored.index(True)))
    assert sorted(set(seen)) == [(top, left, kind) for top in (0, 1) for left in range(4) for kind in (0, 1)]
    assert all(seen.count(one) == pytest.approx(100, abs=40) for one in set(seen))


def test_a_crop_takes_three_draws_whatever_the_options() -> None:
    drawn = rng()
    drawn.random(3)
    following, places = drawn.random(), set()
    for size in ((40, 30), (16, 16), (1, 1)):
        for center in (False, True):
            for flip in (0.0, 0.5, 1.0):
                generator = rng()
                _, (*_, top, left) = CropView(16, 12, center, flip)(picture("RGB", size), generator)
                assert generator.random() == following
                places |= {(top, left)} if size == (16, 16) and not center else set()
    assert len(places) == 1, "a mirror moves no place"


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "I;16", "1"])
def test_a_crop_is_rgb_of_whatever_mode(mode: str) -> None:
    found, _ = CropView(8, 8)(Image.new(mode, (20, 10)), rng())
    assert found.shape == (3, 8, 8)


def test_a_line_of_pixels_does_not_fill_the_memory() -> None:
    """Its whole would have 512 x 51,200,000 pixels."""
    found, (height, width, top, left) = CropView(512, 16)(Image.new("RGB", (100_000, 1), "red"), rng(1))
    assert (found == np.array([255, 0, 0])[:, None, None]).all()
    assert (height, width) == (1, 100_000)
    assert 0 <= top <= 496
    assert 0 <= left <= 512 * 100_000 - 16


@pytest.mark.parametrize("crop", [0, 17])
def test_a_crop_fits_into_the_resized_image(crop: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        CropView(16, crop)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("resolution", "factor"), [(20, 8), (31, 8), (32, 4), (63, 2), (126, 1), (250, 1), (300, 1)])
def test_a_jpeg_is_decoded_small_as_far_as_pixels_allow(
    orientation: int, resolution: int, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    image, sizes, decode = smooth((333, 250)), [], augment.decode
    view = CropView(resolution, resolution, flip=0.5)

    def note(*arguments: object, **options: object) -> Image.Image:
        sizes.append((result := decode(*arguments, **options)).size)
        return result

    monkeypatch.setattr(augment, "decode", note)
    for seed in range(3):
        jpeg, png = (view(stored(image, kind, orientation), rng(seed)) for kind in ("JPEG", "PNG"))
        upright = ImageOps.exif_transpose(stored(image, "PNG", orientation))
        assert jpeg[1] == png[1] == view(upright, rng(seed))[1]
        assert jpeg[1][:2] == (upright.height, upright.width)
        assert np.array_equal(png[0], view(upright, rng(seed))[0])
        assert np.abs(jpeg[0].astype(int) - png[0]).mean() < 2.5
        small = next(size for size in sizes if size != upright.size) if factor > 1 else upright.size
        assert min(small) == -(-250 // factor) >= min(resolution, 250)


# --- mix


def noise(seed: int, shape: tuple[int, ...] = (3, 16, 12)) -> np.ndarray:
    return rng(seed).integers(0, 256, shape, dtype=np.uint8)


def black_and_white(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    return np.zeros(shape, np.uint8), np.full(shape, 255, np.uint8)


def test_mixup_is_a_blend_by_the_share() -> None:
    first, second = noise(1), noise(2)
    for seed in range(20):
        mixed, share = mix(first, second, rng(seed), 0.8, 0.0)
        exact = share * first.astype(float) + (1 - share) * second
        assert np.abs(mixed - exact).max() <= 0.5 + 1e-4
        assert mixed.dtype == np.uint8
    assert np.array_equal(first, noise(1))
    assert np.array_equal(second, noise(2))


def test_mixup_draws_its_share_from_beta() -> None:
    shares = np.array([mix(*black_and_white((1, 1, 1)), rng(seed), 0.4, 0.0)[1] for seed in range(3000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.02)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.006)


@pytest.mark.parametrize("shape", [(3, 16, 12), (1, 1, 1), (3, 8, 8), (1, 5, 31)], ids=str)
def test_cutmix_puts_one_box_and_counts_what_is_left(shape: tuple[int, int, int]) -> None:
    first, second = noise(1, shape), noise(2, shape)
    for seed in range(100):
        mixed, share = mix(*black_and_white(shape), rng(seed), 0.0, 1.0)
        white = mixed[0] == 255
        assert ((mixed == 255) == white).all()
        assert share == (~white).sum() / white.size
        rows, columns = white.any(axis=1), white.any(axis=0)
        assert (white == np.outer(rows, columns)).all()
        assert all(np.abs(np.diff(side.astype(int))).sum() <= 2 for side in (rows, columns))  # in one piece
        other, same = mix(first, second, rng(seed), 0.0, 1.0)
        assert np.array_equal(other, np.where(white, second, first))
        assert same == share
    assert np.array_equal(first, noise(1, shape))
    assert np.array_equal(second, noise(2, shape))


def test_cutmix_loses_at_the_edge_what_the_paper_loses() -> None:
    """Of a side r of the box r - r * r / 4 lies within on average; r * r is uniform at an alpha of 1."""
    drawn = [mix(*black_and_white((1, 64, 64)), rng(seed), 0.0, 1.0) for seed in range(3000)]
    assert np.mean([share for _, share in drawn]) == pytest.approx(1 - 2 * (1 / 4 - 1 / 10 + 1 / 96), abs=0.012)
    centres = np.array([np.argwhere(mixed[0]).mean(axis=0) for mixed, share in drawn if share < 1])
    assert centres.mean(axis=0) == pytest.approx([31.5, 31.5], abs=1)
    assert np.corrcoef(centres.T)[0, 1] == pytest.approx(0, abs=0.06)


def test_one_of_both_is_drawn_evenly_and_neither_at_zero() -> None:
    cut = 0
    for seed in range(1000):
        mixed, share = mix(*black_and_white((1, 64, 64)), rng(seed), 1.0, 1.0)
        cut += len(np.unique(mixed)) == 2 or share in (0.0, 1.0)
    assert cut == pytest.approx(500, abs=50)
    first = noise(1)
    mixed, share = mix(first, noise(2), rng(), 0.0, 0.0)
    assert share == 1.0
    assert np.array_equal(mixed, first)
    assert not np.shares_memory(mixed, first)


def test_images_of_two_shapes_do_not_mix() -> None:
    with pytest.raises(ValueError, match="do not mix"):
        mix(noise(1), noise(2, (1, 16, 12)), rng(), 1.0, 0.0)
