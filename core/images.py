"""Image files as upright pixels, with Pillow alone: every mode and orientation; what is broken is named."""

from __future__ import annotations

import errno
import functools
import os
import re
import stat
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.errors import UserError, warn_once

if TYPE_CHECKING:
    from PIL import Image

# Pillow opens these without having pixels for them, or has them drawn by another program.
NOT_PICTURES = {"BUFR", "EPS", "GRIB", "HDF5", "MPEG", "WMF"}
TURNS = (  # for EXIF's orientations 2 to 8, names of `Image.Transpose`
    "FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90",
)  # fmt: skip
MAY_TURN = re.compile("exif|xmp", re.IGNORECASE)  # where an image's orientation stands, but for a TIFF's
OF_THE_SYSTEM = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE)
# Pictures by their suffix, but of no kind that Pillow reads by itself.
OTHER_PICTURES = {".heic", ".heif", ".jxl", ".raw", ".dng", ".cr2", ".cr3", ".nef", ".arw", ".orf", ".rw2", ".svg", ""}
SPLIT_NAMES = {"train", "training", "val", "valid", "validation", "eval", "dev", "test"}
ORIENTATION = 0x0112  # the tag of EXIF
NAMED = 20  # images that are named in warnings of one kind, each in a line
_warnings_lock = threading.Lock()  # `warnings.catch_warnings` changes the whole process
_damaged: set[str] = set()  # files whose EXIF this process found damaged


class UnreadableImage(UserError):  # noqa: N818, it is what it says
    """An image that cannot be read. The message names the file, where there is one, and the reason."""


def open_image(source: Any) -> Image.Image:
    """Open an image; of a file only the header is read.

    Args:
        source: a path, a file's bytes, ``{"bytes": ..., "path": ...}`` as ``datasets.Image(decode=False)`` gives it,
            an image of Pillow, or an array of uint8, height x width [x 3].

    Raises:
        UnreadableImage: there is no such file, or it holds no picture.
    """
    pillow, path = _pillow(), None
    if isinstance(source, dict):
        source, path = source.get("bytes"), source.get("path")
        source = path if source is None else source
    path = source if isinstance(source, (str, os.PathLike)) else path
    with _reading(str(path or "an image without a file name")):
        if isinstance(source, (str, os.PathLike)):
            if not stat.S_ISREG(os.stat(source).st_mode) and not os.path.isdir(source):
                raise ValueError("it is not a regular file")  # to open a pipe would wait for its writer
            image = pillow.open(source)
        elif isinstance(source, (bytes, bytearray)):
            image = pillow.open(BytesIO(source))
        elif isinstance(source, pillow.Image):
            image = source
        elif hasattr(source, "__array_interface__"):
            image = pillow.fromarray(source)
        else:
            raise TypeError(f"it is {'nothing' if source is None else f'of type {type(source).__name__}'}")
        if image.format in NOT_PICTURES or 0 in image.size:
            raise ValueError("it has no pixels" if 0 in image.size else f"{image.format} files are not read")
    if path:
        image.source_name = str(path)  # `image.filename` is for Pillow alone: it maps that file into memory
    return image


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height as the picture is to be shown.

    Nothing is decoded, but a PNG without EXIF before its pixels: it may stand behind them.

    Raises:
        UnreadableImage: see `open_image`.
    """
    with _reading(_name(image)):
        width, height = image.size
        turned = not hasattr(image, "tag_v2") and _orientation(image) >= 5  # of a TIFF, Pillow turns the size itself
    return (height, width) if turned else (width, height)


def decode(image: Image.Image, channels: int = 3, shrink: float = 1.0) -> Image.Image:
    """Return the picture upright by its EXIF, with what is transparent laid over white; of several frames the first.

    Values of 16 bits are cut to their upper 8. Where a file does not say its range (modes I and F) it is the smallest
    of 0..1 (F), 0..255 and 0..65535 that holds the picture. An EXIF that cannot be read is warned of and ignored.

    Args:
        image: from `open_image`; ask `upright_size` first, for its size may change here.
        channels: 3 for mode ``RGB``, 1 for mode ``L``.
        shrink: a JPEG may be decoded smaller by up to this factor (2, 4 or 8 in effect), in a fraction of the time.

    Raises:
        UnreadableImage: the file is damaged, in whatever way Pillow finds out.
    """
    pillow = _pillow()
    with _reading(_name(image)):
        scale = max(number for number in (1, 2, 4, 8) if number == 1 or number <= shrink)
        if scale > 1:
            image.draft(None, (max(1, image.width // scale), max(1, image.height // scale)))
        image.load()  # before EXIF is asked for: a TIFF is turned as it is loaded
        orientation = _orientation(image)
        image = _eight_bits(image) if image.mode.startswith(("I", "F")) else image
        if image.has_transparency_data:
            image = image.convert("LA") if image.mode == "La" else image  # the only way out of La
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
        if channels == 3 or image.mode not in ("1", "L"):
            image = image if image.mode == "RGB" else image.convert("RGB")
        if channels == 1 and image.mode != "L":
            image = image.convert("L")
        if orientation > 1:
            image = image.transpose(pillow.Transpose[TURNS[orientation - 2]])
            image.info.clear()  # of the EXIF, or the next reader turns it once more
        return image


def image_files(folder: str | os.PathLike) -> list[str]:
    """Return the full paths of the images below ``folder``, by their suffix, in the order of their relative paths.

    Hidden files and folders, and what macOS adds to archives, are left out; pictures of kinds that Pillow cannot read,
    and files without a suffix, with a warning. Links are followed, also those that lead nowhere: a file that is missing
    is an unreadable image.

    Raises:
        UserError: a folder cannot be read, or a name is not UTF-8.
    """
    pillow = _pillow()
    kinds = pillow.registered_extensions()
    suffixes = {suffix for suffix, kind in kinds.items() if kind in pillow.OPEN and kind not in NOT_PICTURES}
    root = Path(folder).absolute()
    suffix_of = {name: os.path.splitext(name)[1].lower() for name in _below(str(root), "", ())}
    names = sorted(name for name, suffix in suffix_of.items() if suffix in suffixes)
    if others := Counter(suffix for suffix in suffix_of.values() if suffix in OTHER_PICTURES - suffixes):
        listed = ", ".join(f"{count} {suffix or 'without a suffix'}" for suffix, count in others.most_common())
        warn_once(f"{folder}: files are left out: {listed}; convert them if they are pictures")
    if strange := [name for name in names if name != name.encode(errors="replace").decode()]:
        raise UserError(f"{folder}: the name of {strange[0]!r} is not UTF-8; rename it")
    return [os.path.join(root, name) for name in names]


def class_folders(folder: str | os.PathLike, option: str, all_full: bool = True) -> tuple[list[str], list[str]]:
    """Return the images of ``folder/<class>/**`` as full paths, and the class name of each.

    The class is the first folder's name, however deep the image lies.

    Args:
        folder: has one folder for each class.
        option: what gave the folder, for errors, e.g. ``"--train_dir"``.
        all_full: refuse an empty folder.

    Raises:
        UserError: there is no such folder, it has no class with images or an empty one, its folders are splits, or
            images lie beside them.
    """
    root = Path(folder).absolute()
    if not os.path.isdir(root):
        raise UserError(f"{option}: {folder} is {'a file' if os.path.isfile(root) else 'not there'}; give a folder")
    files, start = image_files(root), len(os.path.join(root, ""))
    names = [file[start:].partition(os.sep)[0] for file in files]
    if loose := [name for file, name in zip(files, names, strict=True) if len(file) == start + len(name)]:
        raise UserError(
            f"{option}: {len(loose)} images lie in {folder} itself ({loose[0]!r} first); "
            f"move them into the folder of their class, {folder}/<class>/<image>"
        )
    if not files:
        raise UserError(f"{option}: {folder} holds no image in a class folder; give a folder of <class>/<image>")
    with _listing(str(root)) as entries:
        empty = sorted({entry.name for entry in entries if _is_visible(entry.name) and entry.is_dir()} - set(names))
    if empty and all_full:
        listed = ", ".join(repr(name) for name in empty[:5]) + (f" and {len(empty) - 5} more" if empty[5:] else "")
        raise UserError(f"{option}: no image in the class folder {listed} of {folder}; fill or remove it")
    if SPLIT_NAMES.issuperset(name.lower() for name in names):
        listed = ", ".join(sorted(set(names)))
        raise UserError(f"{option}: {folder} holds splits ({listed}), no classes; give one of these folders")
    return files, names


@functools.cache
def _pillow() -> Any:
    """Return Pillow's ``Image``, with its warnings silenced: what matters of them is told here, by file."""
    from PIL import Image

    warnings.filterwarnings("ignore", module=r"PIL\.")
    return Image


def _warn_of_first(number: int, message: str, what: str) -> None:
    """Warn of the first `NAMED` of ``what``, and once that there are more."""
    warn_once(message if number <= NAMED else f"... and so on: further {what} of this kind are not named")


def _name(image: Image.Image) -> str:
    return getattr(image, "source_name", None) or getattr(image, "filename", None) or "an image without a file name"


@contextmanager
def _reading(name: str) -> Iterator[None]:
    """Turn what Pillow raises into an `UnreadableImage`: broken files bring out nearly any exception.

    But where the system has run out of something, the image is not to blame.
    """
    try:
        yield
    except Exception as error:
        if getattr(error, "errno", None) in OF_THE_SYSTEM:
            raise
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        reason = "no format that Pillow knows" if type(error).__name__ == "UnidentifiedImageError" else reason
        raise UnreadableImage(f"{name} cannot be read as an image: {reason}") from None


def _orientation(image: Image.Image) -> int:
    """Return EXIF's orientation, 1 to 8, and 1 where it is not known; a damaged EXIF without one is warned of."""
    found, problem, exif = None, None, _pillow().Exif()
    if image.format == "PNG" and "exif" not in image.info:
        image.load()  # it may stand behind the pixels
    if not hasattr(image, "tag_v2") and not any(MAY_TURN.search(str(key)) for key in image.info):
        return 1
    with _warnings_lock, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            exif.load(image.info.get("exif", b""))  # anew: as it opened the file, Pillow may have swallowed an error
            found = exif.get(ORIENTATION) or image.getexif().get(ORIENTATION)  # that may also come from XMP
        except Exception as error:
            problem = str(error) or type(error).__name__
    if problem or (said and found is None):
        name = _name(image)
        _damaged.add(name)
        problem = problem or str(said[0].message).strip()
        _warn_of_first(len(_damaged), f"{name}: its EXIF is damaged ({problem}); the picture is not turned", "EXIFs")
    return int(found) if found in range(1, 9) else 1


def _eight_bits(image: Image.Image) -> Image.Image:
    """Return an image of mode I;16, I or F as mode L."""
    import numpy

    values = numpy.asarray(image)
    if image.mode == "F":
        values = numpy.nan_to_num(values, posinf=numpy.inf)
        values = numpy.rint(values * 255) if values.max() <= 1 else values
    wide = image.mode.startswith("I;") or image.format == "PPM" or values.max() > 255
    values = values.clip(0, 65535).astype("uint16")
    clear = image.info.get("transparency")
    if isinstance(clear, int):
        values[values == clear] = 65535 if wide else 255
    return _pillow().fromarray((values >> 8 if wide else values).astype("uint8"))


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"


@contextmanager
def _listing(folder: str) -> Iterator[Iterator[os.DirEntry]]:
    try:
        with os.scandir(folder) as entries:
            yield entries
    except OSError as error:
        raise UserError(f"{folder} cannot be read: {error.strerror}") from None


def _below(folder: str, head: str, above: tuple) -> Iterator[str]:
    """Yield visible files by relative path; ``above`` are the folders on the way here, to which no link leads back."""
    with _listing(folder) as entries:
        visible = [entry for entry in entries if _is_visible(entry.name)]
        status = os.stat(folder)
    above = (*above, (status.st_dev, status.st_ino))
    for entry in visible:
        if not entry.is_dir():
            yield head + entry.name
            continue
        status = entry.stat()
        if (status.st_dev, status.st_ino) not in above:
            yield from _below(entry.path, f"{head}{entry.name}/", above)
