"""Image files: every mode and orientation, every way to be broken, folders, and what is said of it."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
import zlib
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from core import images
from core.errors import UserError
from core.images import UnreadableImage, class_folders, decode, image_files, open_image, upright_size
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.filterwarnings(r"ignore::UserWarning:PIL\.")  # as the module has it outside of pytest
RED, WHITE = (255, 0, 0), (255, 255, 255)


@pytest.fixture(autouse=True)
def _no_damage_yet() -> None:
    images._damaged.clear()


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(width: int = 64, height: int = 48) -> Image.Image:
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def pixel(source, channels: int = 3, at: tuple[int, int] = (0, 0)):
    image = decode(open_image(source), channels)
    assert image.mode == {3: "RGB", 1: "L"}[channels]
    return image.getpixel(at)


def palette_image(mode: str = "P") -> Image.Image:
    """Red, with a second entry of the palette, blue, in the right half."""
    image = Image.new(mode, (4, 2), 0)
    image.putpalette([255, 0, 0, 0, 0, 255])
    image.paste(1, (2, 0, 4, 2))
    return image


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, depth: int, colour: int, rows: bytes, extra: bytes = b"", late: bytes = b"") -> bytes:
    """A PNG of modes that Pillow does not write."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    body = chunk(b"IDAT", zlib.compress(rows)) + late + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + head + extra + body


def with_exif(orientation, kind: str = "JPEG") -> bytes:
    """A picture of 48 x 32 with a red upper left corner, stored as that orientation has it."""
    image = Image.new("RGB", (48, 32), "blue")
    image.paste(RED, (0, 0, 16, 16))
    back = {
        2: "FLIP_LEFT_RIGHT", 3: "ROTATE_180", 4: "FLIP_TOP_BOTTOM", 5: "TRANSPOSE", 6: "ROTATE_90", 7: "TRANSVERSE",
        8: "ROTATE_270",
    }.get(orientation)  # fmt: skip
    exif = Image.Exif()
    exif[0x0112] = orientation
    return encoded(image.transpose(Image.Transpose[back]) if back else image, kind, exif=exif)


# Modes


@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize(
    ("mode", "colour", "grey"),
    [("1", 1, 255), ("L", 77, 77), ("LA", (77, 255), 77), ("LA", (77, 0), 255), ("La", (77, 255), 77),
     ("La", (0, 0), 255), ("RGB", (77, 77, 77), 77), ("RGBA", (77, 77, 77, 255), 77), ("RGBA", (0, 0, 0, 0), 255),
     ("RGBA", (0, 0, 0, 128), 127), ("RGBa", (0, 0, 0, 0), 255), ("RGBX", (77, 77, 77, 0), 77),
     ("CMYK", (178, 178, 178, 0), 77), ("YCbCr", (77, 128, 128), 77), ("LAB", (128, 128, 128), 119),
     ("HSV", (0, 0, 77), 77), ("I;16", 77 * 257, 77), ("I;16", 200, 0), ("I;16B", 77 * 257, 77), ("I", 77 * 257, 77),
     ("I", 77, 77), ("I", -3, 0), ("F", 77.0, 77), ("F", 77 / 255, 77), ("F", 77 * 257.0, 77), ("F", float("nan"), 0),
     ("F", float("inf"), 255)],
)  # fmt: skip
def test_an_image_of_every_mode_becomes_its_pixels(mode, colour, grey, channels):
    image = Image.new(mode, (3, 2), colour)
    decoded = decode(open_image(image), channels)
    assert (decoded.mode, decoded.size) == ("RGB" if channels == 3 else "L", (3, 2))
    assert np.abs(np.asarray(decoded, dtype=int) - grey).max() <= (mode == "LAB")


def test_a_palette_becomes_its_colours():
    assert pixel(encoded(palette_image())) == RED
    assert pixel(encoded(palette_image()), at=(3, 0)) == (0, 0, 255)
    assert pixel(encoded(palette_image()), channels=1) == 76


@pytest.mark.parametrize(("kind", "transparency"), [("GIF", 0), ("PNG", 0), ("PNG", b"\x00\xff"), ("PNG", b"\x00")])
def test_what_a_palette_makes_transparent_is_white(kind, transparency):
    file = encoded(palette_image(), kind, transparency=transparency)
    assert (pixel(file), pixel(file, at=(3, 0))) == (WHITE, (0, 0, 255))


def test_a_palette_with_alpha_of_its_own():
    image = palette_image().convert("PA")
    image.putalpha(Image.new("L", image.size, 0))
    assert pixel(image) == WHITE
    image = palette_image()
    image.putpalette([255, 0, 0, 0, 0, 0, 255, 255], "RGBA")
    assert (pixel(image), pixel(image, at=(3, 0))) == (WHITE, (0, 0, 255))


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_transparent_colour_without_a_palette_is_white(mode):
    image = Image.new(mode, (2, 1), 0)
    image.putpixel((1, 0), 9 if mode == "L" else (9, 9, 9))
    file = encoded(image, transparency=0 if mode == "L" else (0, 0, 0))
    assert (pixel(file), pixel(file, at=(1, 0))) == (WHITE, (9, 9, 9))


def test_sixteen_bits_are_scaled_and_not_clipped():
    grey = encoded(Image.fromarray(np.array([[0, 256, 77 * 257, 65535]], dtype=np.uint16)))
    assert [pixel(grey, 1, (x, 0)) for x in range(4)] == [0, 1, 77, 255]
    colours = png(1, 1, 16, 2, b"\x00" + struct.pack(">HHH", 77 * 257, 300, 65535))
    assert pixel(colours) == (77, 1, 255)
    clear = png(2, 1, 16, 0, b"\x00" + struct.pack(">HH", 300, 301), extra=chunk(b"tRNS", struct.pack(">H", 300)))
    assert [pixel(clear, 1, (x, 0)) for x in range(2)] == [255, 1]
    dark = b"P5 2 1 65535\n" + struct.pack(">HH", 200, 255)  # the file says its range: this is nearly black
    assert [pixel(dark, 1, (x, 0)) for x in range(2)] == [0, 0]
    assert [pixel(np.array([[np.nan, 1]], np.float32), 1, (x, 0)) for x in range(2)] == [0, 255]


@pytest.mark.parametrize("adobe", [True, False], ids=["marked", "unmarked"])
def test_the_inks_of_a_jpeg_are_stored_inverted(adobe):
    """So Adobe has it, and all programs read it so, also without its mark."""
    file = encoded(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100)
    at = file.index(b"\xff\xee")
    assert file[at + 4 : at + 9] == b"Adobe"
    plain = file[:at] + file[at + 2 + struct.unpack(">H", file[at + 2 : at + 4])[0] :]
    assert np.abs(np.array(pixel(file if adobe else plain)) - RED).max() <= 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO", "AVIF"])
def test_the_first_of_several_frames(kind):
    frames = [Image.new("RGB", (16, 16), colour) for colour in ("red", "blue")]
    file = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert open_image(file).n_frames == 2
    assert np.abs(np.array(pixel(file), dtype=int) - RED).max() <= 3


@pytest.mark.parametrize("kind", ["BMP", "PPM", "TGA", "ICO", "JPEG2000", "PCX", "SGI", "DDS", "QOI"])
def test_other_formats(kind):
    assert pixel(encoded(Image.new("RGB", (16, 16), "red"), kind)) == RED


# Orientation


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP", "MPO", "AVIF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_upright(orientation, kind):
    file = with_exif(orientation, kind)
    assert upright_size(open_image(file)) == (48, 32)
    decoded = decode(open_image(file))
    assert decoded.size == (48, 32)
    difference = np.asarray(decoded, dtype=int) - np.asarray(decode(open_image(with_exif(1, kind))), dtype=int)
    assert np.abs(difference).mean() < 6  # a lossy format differs a little
    assert np.abs(np.array(decoded.getpixel((4, 4))) - RED).max() < 12
    assert decode(decoded).tobytes() == decoded.tobytes()  # it is not turned a second time


def test_a_picture_that_is_turned_may_be_shrunk_as_well():
    decoded = decode(open_image(with_exif(6)), shrink=2)
    assert decoded.size == (24, 16)
    assert np.abs(np.array(decoded.getpixel((3, 3))) - RED).max() < 12


def test_the_orientation_may_stand_behind_the_pixels_or_in_xmp():
    exif = Image.Exif()
    exif[0x0112] = 6
    late = png(2, 1, 8, 0, b"\x00\x05\x06", late=chunk(b"eXIf", exif.tobytes()[6:]))
    assert upright_size(open_image(late)) == (1, 2)
    assert decode(open_image(late), 1).tobytes() == b"\x05\x06"
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    assert upright_size(open_image(encoded(noise(), "JPEG", xmp=xmp))) == (48, 64)


@pytest.mark.parametrize("orientation", [0, 9, 65535])
def test_an_orientation_that_is_none_says_nothing(orientation, caplog):
    file = with_exif(orientation)
    assert decode(open_image(file)).size == upright_size(open_image(file)) == (48, 32)
    assert not caplog.records


def hand_made_exif(*entries: bytes, count: int | None = None, tail: bytes = b"") -> bytes:
    """An EXIF block with these entries of 12 bytes, little-endian."""
    return b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<H", count or len(entries)) + b"".join(entries) + bytes(4) + tail


ORIENTATION_6 = struct.pack("<HHIHH", 0x0112, 3, 1, 6, 0)
RESOLUTION = struct.pack("<HHII", 0x011A, 5, 1, 8 + 2 + 24 + 4)  # a rational behind two entries


def test_a_zero_denominator_beside_the_orientation_does_no_harm(caplog):
    exif = hand_made_exif(ORIENTATION_6, RESOLUTION, tail=struct.pack("<II", 72, 0))
    file = encoded(noise(), "JPEG", exif=exif)
    assert upright_size(open_image(file)) == decode(open_image(file)).size == (48, 64)
    assert not caplog.records


DAMAGED = {
    "no TIFF": b"Exif\0\0no TIFF", "no directory": b"Exif\0\0II*\0\xff\xff\0\0",
    "entries missing": hand_made_exif(RESOLUTION, count=9), "value missing": hand_made_exif(RESOLUTION),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "PNG"])
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_exif_is_warned_of_once_and_the_picture_taken_as_it_is(what, kind, tmp_path, caplog):
    path = tmp_path / "odd.img"
    path.write_bytes(encoded(noise(), kind, exif=DAMAGED[what]))
    for _ in range(2):
        assert upright_size(open_image(path)) == decode(open_image(path)).size == (64, 48)
    assert [record.getMessage()[: len(str(path)) + 21] for record in caplog.records] == [f"{path}: its EXIF is damaged"]


def test_a_damaged_exif_that_has_the_orientation_is_enough(caplog):
    file = encoded(noise(), "JPEG", exif=hand_made_exif(ORIENTATION_6, RESOLUTION))
    assert upright_size(open_image(file)) == decode(open_image(file)).size == (48, 64)
    assert not caplog.records


def test_an_orientation_over_zero_is_none(caplog):
    exif = hand_made_exif(struct.pack("<HHII", 0x0112, 5, 1, 8 + 2 + 12 + 4), tail=struct.pack("<II", 6, 0))
    assert decode(open_image(encoded(noise(), "JPEG", exif=exif))).size == (64, 48)
    exif = exif[:-8] + struct.pack("<II", 12, 2)
    assert decode(open_image(encoded(noise(), "JPEG", exif=exif))).size == (48, 64)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_xmp_that_is_no_text_does_no_harm(kind, caplog):
    """In a PNG it is text, or Pillow does not have it."""
    file = encoded(noise(), kind, xmp=b'\xff\xfe<x tiff:Orientation="\xc3"\x80>')
    assert upright_size(open_image(file)) == decode(open_image(file)).size == (64, 48)
    text = png(2, 1, 8, 0, b"\x00\x05\x06", extra=chunk(b"iTXt", b"XML:com.adobe.xmp\0\0\0\0\0\xff\xfe<x>"))
    assert upright_size(open_image(text)) == decode(open_image(text)).size == (2, 1)


def test_the_warning_names_a_file_of_which_only_the_bytes_are_here(caplog):
    content = encoded(noise(), "JPEG", exif=b"Exif\0\0no TIFF")
    upright_size(open_image({"bytes": content, "path": "holiday.jpg"}))
    assert "holiday.jpg" in caplog.text


def test_of_many_damaged_exifs_the_first_are_named(caplog):
    content = encoded(noise(), "JPEG", exif=b"Exif\0\0no TIFF")
    for number in range(30):
        upright_size(open_image({"bytes": content, "path": f"{number}.jpg"}))
    assert len(caplog.records) == images.NAMED + 1


# Sources


def test_every_kind_of_source_gives_the_same_pixels(tmp_path):
    content, path = encoded(noise()), tmp_path / "x.png"
    path.write_bytes(content)
    sources = [
        path, str(path), content, bytearray(content), {"bytes": content, "path": None},
        {"bytes": None, "path": str(path)}, {"bytes": content, "path": "gone.png"}, noise(), np.asarray(noise()),
    ]  # fmt: skip
    assert {decode(open_image(source)).tobytes() for source in sources} == {noise().tobytes()}
    grey = np.arange(6, dtype=np.uint8).reshape(2, 3)
    assert decode(open_image(grey), 1).tobytes() == grey.tobytes()


def test_bytes_are_not_mistaken_for_the_file_of_their_name(tmp_path):
    """Pillow maps an uncompressed picture's file into memory by its name."""
    other = tmp_path / "x.bmp"
    Image.new("L", (8, 8), 1).save(other)
    assert pixel({"bytes": encoded(Image.new("L", (8, 8), 99), "BMP"), "path": str(other)}, 1) == 99


def test_opening_decodes_nothing(tmp_path):
    path = tmp_path / "half.jpg"
    content = encoded(noise(), "JPEG")
    path.write_bytes(content[: len(content) // 2])
    assert upright_size(open_image(path)) == (64, 48)


@pytest.mark.parametrize(("shrink", "size"), [(1, 75), (1.9, 75), (2, 38), (3.9, 38), (4, 19), (8, 10), (100, 10)])
def test_a_jpeg_is_shrunk_by_no_more_than_was_allowed(shrink, size):
    file = encoded(noise(75, 150), "JPEG")
    assert decode(open_image(file), shrink=shrink).width == size
    assert decode(open_image(encoded(noise(75, 150))), shrink=shrink).width == 75
    assert decode(open_image(encoded(noise(3, 5), "JPEG")), shrink=shrink).width >= 3 / shrink


def test_a_shrunk_jpeg_is_the_same_picture():
    smooth = noise(6, 4).resize((96, 64), Image.Resampling.BICUBIC)
    file = encoded(smooth, "JPEG", quality=95)
    small, full = decode(open_image(file), shrink=4), decode(open_image(file)).reduce(4)
    assert np.abs(np.asarray(small, dtype=int) - np.asarray(full, dtype=int)).mean() < 2


# Broken files


def png_with(find: bytes, change) -> bytes:
    content = bytearray(encoded(noise()))
    at = content.index(find)
    change(content, at)
    return bytes(content)


def flipped(content: bytearray, at: int) -> None:
    content[at + 40] ^= 255


BROKEN = {
    "empty": b"", "one byte": b"\xff", "text": b"this is no picture\n" * 50, "html": b"<html>404</html>",
    "signature only": b"\x89PNG\r\n\x1a\n", "jpeg markers only": b"\xff\xd8\xff\xd9",
    "zeros": bytes(4096), "zero size gif": b"GIF89a" + bytes(30), "zero size png": png(0, 0, 8, 2, b""),
    "zip chunk": png_with(b"IDAT", flipped), "no IDAT": png(8, 8, 8, 2, b""),
    "chunk name": png_with(b"IDAT", lambda content, at: content.__setitem__(slice(at, at + 4), b"I\x01\x02\x03")),
    "chunk checksum": png_with(b"IHDR", lambda content, at: content.__setitem__(at + 20, 7)),
    "bomb": png(40_000, 40_000, 8, 2, b""), "postscript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EOF\n",
    "bmp of no size": b"BM" + bytes(60), "tiff without tags": b"II*\0\x08\0\0\0\0\0\0\0\0\0",
}  # fmt: skip


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_file_is_an_unreadable_image(what, tmp_path):
    path = tmp_path / "x.jpg"
    path.write_bytes(BROKEN[what])
    for source, name in [(path, str(path)), ({"bytes": BROKEN[what], "path": "x.jpg"}, "x.jpg"), (BROKEN[what], "")]:
        with pytest.raises(UnreadableImage, match=r"cannot be read as an image: .") as caught:
            decode(open_image(source))
        assert str(caught.value).startswith(name or "an image without a file name")
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("part", [0.02, 0.5, 0.9])
@pytest.mark.parametrize(
    ("kind", "options"),
    [("JPEG", {}), ("JPEG", {"progressive": True}), ("PNG", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {}),
     ("TIFF", {"compression": "tiff_lzw"}), ("TIFF", {"compression": "jpeg"}), ("WEBP", {}),
     ("WEBP", {"lossless": True}), ("AVIF", {}), ("PPM", {}), ("MPO", {})],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)  # fmt: skip
def test_a_file_cut_short_is_an_unreadable_image(kind, options, part, tmp_path):
    content = encoded(noise(), kind, **options)
    cut = content[: int(len(content) * part)]
    path = tmp_path / "x.img"
    path.write_bytes(cut)
    for source in (path, cut):
        with pytest.raises(UnreadableImage):
            decode(open_image(source))


def test_the_message_is_one_line_of_file_and_reason(tmp_path):
    reasons = {
        "gone.jpg": "No such file or directory", "text": "no format that Pillow knows",
        "postscript": "EPS files are not read",
    }  # fmt: skip
    for name, reason in reasons.items():
        path = tmp_path / name
        if name in BROKEN:
            path.write_bytes(BROKEN[name])
        with pytest.raises(UnreadableImage) as caught:
            open_image(path)
        assert str(caught.value) == f"{path} cannot be read as an image: {reason}"


def test_what_is_no_file_is_an_unreadable_image(tmp_path):
    for name, reason in [("", "directory"), ("gone.jpg", "No such file"), ("/dev/zero", "regular"), ("a\0b", "null")]:
        with pytest.raises(UnreadableImage, match=reason):
            open_image(tmp_path / name)


def test_a_file_that_may_not_be_read(tmp_path):
    path = tmp_path / "x.jpg"
    noise().save(path)
    path.chmod(0)
    program = (
        "import os, sys; from core.images import open_image; open_image(sys.argv[1])"  # imports: before others' rights
        if os.getuid()
        else "import os, sys; from core.images import open_image, _pillow; _pillow().init(); os.seteuid(65534)\n"
        "open_image(sys.argv[1])"
    )
    ended = subprocess.run([sys.executable, "-c", program, path], cwd=REPOSITORY, capture_output=True, text=True)
    assert "UnreadableImage" in ended.stderr
    assert "Permission denied" in ended.stderr


@pytest.mark.parametrize(
    "source",
    [None, 7, {}, {"bytes": None, "path": None}, np.zeros((0, 5, 3), np.uint8), np.zeros((2, 2, 5), np.uint8),
     np.zeros((2, 2), np.complex64), Image.new("RGB", (0, 3))],
    ids="none number empty nothing no_height five_channels complex no_width".split(),
)  # fmt: skip
def test_what_is_no_image_is_an_unreadable_image(source):
    with pytest.raises(UnreadableImage):
        open_image(source)


@pytest.mark.parametrize(
    "error", [SyntaxError("chunk"), struct.error("x"), zlib.error("y"), IndexError(), MemoryError()]
)
def test_whatever_a_decoder_raises(error, monkeypatch):
    def load(self):
        raise error

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(UnreadableImage, match=f"image: {str(error) or type(error).__name__}"):
        decode(open_image(encoded(noise(), "JPEG")))


def test_an_interrupt_is_no_broken_file(monkeypatch):
    def load(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(ImageFile.ImageFile, "load", load)
    with pytest.raises(KeyboardInterrupt):
        decode(open_image(encoded(noise(), "JPEG")))


def test_pillows_own_warnings_are_not_shown_and_cut_files_stay_errors(tmp_path):
    odd = {
        "corrupt": encoded(noise(), "JPEG", exif=hand_made_exif(RESOLUTION, count=9)),
        "palette": encoded(palette_image(), transparency=b"\x00\xff"),
        "large": png(10_000, 10_000, 1, 0, b""),
    }
    for name, content in odd.items():
        (tmp_path / name).write_bytes(content)
    program = """if True:
        import sys, pathlib
        from core.images import open_image, upright_size
        from core.errors import UserError
        from PIL import ImageFile
        for path in pathlib.Path(sys.argv[1]).iterdir():
            try:
                with open_image(path) as image:
                    upright_size(image)
            except UserError:
                pass
        print(ImageFile.LOAD_TRUNCATED_IMAGES)
    """
    ended = subprocess.run(
        [sys.executable, "-W", "always", "-c", program, tmp_path], cwd=REPOSITORY, capture_output=True, text=True
    )
    assert ended.stdout == "False\n"
    assert [line for line in ended.stderr.splitlines() if "EXIF is damaged" not in line] == []
    assert ended.stderr.count("EXIF is damaged") == 1


def test_importing_the_module_does_not_import_pillow():
    program = "import sys, core.images; sys.exit(bool({'PIL', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY).returncode == 0


# Folders


@pytest.fixture(scope="module")
def dot() -> bytes:
    return encoded(Image.new("RGB", (2, 2)))


def fill(root: Path, *names: str, content: bytes = b"") -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return root


def test_images_are_found_by_their_suffix_in_the_order_of_their_paths(tmp_path):
    shown = ["a/b/2.JPEG", "a/1.jpg", "a b/3.Png", "a/c.webp", "Z/1.tif", "b/x.y.gif", "b/ü.bmp", "b/z.avif"]
    hidden = [".DS_Store", "a/._1.jpg", "a/.ipynb_checkpoints/1.jpg", "__MACOSX/a/1.jpg", ".git/1.png"]
    others = [
        "readme.txt",
        "a/labels.csv",
        "a/jpg",
        "a/1.jpg.txt",
        "a/1.pdf",
        "a/1.eps",
        "a/1.mpg",
        "a/1.h5",
        "Thumbs.db",
    ]
    fill(tmp_path, *shown, *hidden, *others)
    assert image_files(tmp_path) == [str(tmp_path / name) for name in sorted(shown)]


def test_paths_are_full_ones_and_a_hidden_folder_may_be_asked_for(tmp_path, monkeypatch):
    fill(tmp_path / ".cache" / "data", "a/1.jpg")
    monkeypatch.chdir(tmp_path)
    assert image_files(".cache/data") == [str(tmp_path / ".cache/data/a/1.jpg")]


def test_links_are_followed_once_around(tmp_path):
    root = fill(tmp_path / "root", "a/1.jpg", "b/2.jpg")
    fill(tmp_path / "elsewhere", "3.jpg")
    (root / "c").symlink_to(tmp_path / "elsewhere")
    (root / "d").symlink_to(tmp_path / "elsewhere")  # a second way to the same folder
    (root / "a" / "loop").symlink_to(root)
    (root / "a" / "self").symlink_to(root / "a")
    (root / "b" / "gone.jpg").symlink_to(root / "nothing")
    assert [os.path.relpath(file, root) for file in image_files(root)] == [
        "a/1.jpg", "b/2.jpg", "b/gone.jpg", "c/3.jpg", "d/3.jpg"
    ]  # fmt: skip


def test_a_folder_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(UserError, match=r"gone cannot be read: No such file"):
        image_files(tmp_path / "gone")


def test_the_class_is_the_first_folder_however_deep_the_image_lies(tmp_path):
    fill(
        tmp_path, "dog/1.jpg", "cat/x/2.jpg", "cat/x/y/3.jpg", "cat/1.jpg", "test/x/1.jpg", "notes.txt", ".hidden/1.jpg"
    )
    files, names = class_folders(tmp_path, "--train_dir")
    assert [os.path.relpath(file, tmp_path) for file in files] == [
        "cat/1.jpg", "cat/x/2.jpg", "cat/x/y/3.jpg", "dog/1.jpg", "test/x/1.jpg"
    ]  # fmt: skip
    assert names == ["cat", "cat", "cat", "dog", "test"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], r"holds no image in a class folder"),
        (["a/x.txt"], r"holds no image in a class folder"),
        (["a/1.jpg", "x.jpg", "b.png"], r"2 images lie in .* itself \('b\.png' first\)"),
        (["a/1.jpg", "b/x.txt", "c/x/y.txt"], r"no image in the class folder 'b', 'c' of"),
        (["a/1.jpg", *(f"b{n}/x.txt" for n in range(7))], r"'b4' and 2 more of"),
        (["train/a/1.jpg", "Validation/a/1.jpg"], r"holds splits \(Validation, train\)"),
    ],
)
def test_a_folder_without_the_layout_is_refused(names, message, tmp_path):
    root = fill(tmp_path / "data", *names, "notes.txt")
    with pytest.raises(UserError, match=rf"^--train_dir: .*{message}"):
        class_folders(root, "--train_dir")


@pytest.mark.parametrize(("name", "message"), [("gone", "is not there"), ("file", "is a file")])
def test_what_is_no_folder_is_refused(name, message, tmp_path):
    fill(tmp_path, "file")
    with pytest.raises(UserError, match=rf"^--eval_dir: .*{name} {message}"):
        class_folders(tmp_path / name, "--eval_dir")


# Policy


def test_pictures_that_pillow_cannot_read_are_not_passed_over_in_silence(tmp_path, caplog):
    for name in ("a.png", "b.HEIC", "c.heic", "scan", "notes.txt", "Thumbs.db"):
        (tmp_path / name).touch()
    assert [Path(file).name for file in image_files(tmp_path)] == ["a.png"]
    assert caplog.messages == [
        f"{tmp_path}: files are left out: 2 .heic, 1 without a suffix; convert them if they are pictures"
    ]


def test_a_name_that_is_not_utf8_is_one_line(tmp_path):
    Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), b"\xff.png"))).touch()
    with pytest.raises(UserError, match=r"the name of '.*\\udcff\.png' is not UTF-8; rename it"):
        image_files(tmp_path)


def test_an_image_is_not_to_blame_for_what_the_system_lacks(tmp_path, monkeypatch):
    Image.new("RGB", (4, 4)).save(tmp_path / "a.png")

    def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Image, "open", full)
    with pytest.raises(OSError, match="Too many open files"):
        open_image(tmp_path / "a.png")


def test_an_empty_folder_is_nobodys_class_where_none_is_asked_for(tmp_path):
    for name in ("one/a.png", "two/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    (tmp_path / "three").mkdir()
    with pytest.raises(UserError, match="no image in the class folder 'three'"):
        class_folders(tmp_path, "--train_dir")
    assert class_folders(tmp_path, "--test_dir", all_full=False)[1] == ["one", "two"]
