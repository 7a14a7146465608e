"""What an image processor of transformers does, in two parts, so that bytes travel to the device and not floats."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from core.errors import UserError, say
from core.images import decode, open_image

if TYPE_CHECKING:
    from PIL.Image import Image

BILINEAR = 2  # Pillow's number, of processors that say none


class Processing:
    """Resizes and crops on the host, with the processor itself; the device does the rest, which is a line per channel.

    The lines are found by showing the processor black and one colour after the other; what it makes of a wide and of a
    high picture shows that there is nothing else to it.

    Args:
        processor: an image processor.
        channels: of the model's images, 3 or 1.
        image_size: pixels of a side, None for the processor's own; what is saved has it, too.

    Attributes:
        size: (height, width) of what it makes of an image.
        resample: Pillow's filter.
        blank: a black image as `whole` gives it.
        options: what else the model has to be called with, see `fit`.

    Raises:
        UserError: it does something else, too, makes images of several sizes, or cannot make such images.
    """

    def __init__(self, processor: Any, channels: int, image_size: int | None = None) -> None:
        self.processor, self.channels, self.options = processor, channels, {}
        self._kind = type(processor).__name__
        if channels not in (1, 3):
            raise UserError(f"the model is for images of {channels} channels; take one for 3 (colours) or 1 (grey)")
        if image_size:
            _resize(processor, image_size)
        filter_ = getattr(processor, "resample", None)
        self.resample = BILINEAR if filter_ is None else int(filter_)
        try:
            self._learn()
        except UserError:
            raise
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise UserError(f"{self._kind} makes nothing of an image of {channels} channels: {reason}") from error
        if image_size and self.size != (image_size, image_size):
            raise UserError(f"--image_size {image_size}: {self._kind} goes on making images of {_by(self.size)} pixels")

    def _learn(self) -> None:
        """Find sizes and lines, and see that they are all."""
        shapes = ((64, 96, self.channels), (96, 64, self.channels))
        samples = [open_image(_cells(np.random.default_rng(0).integers(256, size=shape))) for shape in shapes]
        wanted = [self._made(sample) for sample in samples]
        self.size = wanted[0].shape[1:]
        if wanted[1].shape[1:] != self.size:
            sizes = " or ".join(_by(made.shape[1:]) for made in wanted)
            raise UserError(
                f"{self._kind} makes images of {sizes} pixels, but a batch has one size; let it crop them"
                " (do_center_crop and crop_size in its preprocessor_config.json)"
            )
        self._off = {"do_rescale": False, "do_normalize": False}
        if hasattr(self.processor, "do_flip_channel_order"):
            self._off["do_flip_channel_order"] = False
        try:
            self._off = self._off if self._made(samples[0], **self._off).dtype == np.uint8 else {}
        except TypeError:  # it takes no options
            self._off = {}
        black, *colours = (self._middle(colour) for colour in (np.zeros(self.channels), *(255 * np.eye(self.channels))))
        lines = np.stack([colour - black for colour in colours], axis=1) / 255  # (channel of the result, of the image)
        self.flips = self.channels == 3 and bool(lines[0, 2])
        self._numbers = np.stack([lines.sum(1), black]).astype(np.float32)[:, :, None, None]
        self._lines = torch.from_numpy(self._numbers)
        plain = np.count_nonzero(lines) == self.channels
        for sample, made in zip(samples, wanted, strict=True):
            if not plain or not np.allclose(self.scale(torch.from_numpy(self.whole(sample))[None])[0], made, atol=1e-4):
                raise UserError(f"{self._kind} does more to an image than to resize, crop and scale it")
        self.blank = np.zeros_like(self.whole(samples[0]))

    def _made(self, image: Image, **options: bool) -> np.ndarray:
        made = np.asarray(self.processor(image, **options)["pixel_values"][0])
        if made.ndim != 3 or len(made) != self.channels:
            wanted = f"({self.channels}, height, width)"
            raise UserError(f"{self._kind} makes an array of shape {made.shape} of an image, not {wanted}")
        return made

    def _middle(self, colour: np.ndarray) -> np.ndarray:
        """The numbers of the middle pixel of an image of one colour, (channels,)."""
        image = open_image(_cells(np.broadcast_to(colour, (*self.size, self.channels))))
        return self._made(image)[:, self.size[0] // 2, self.size[1] // 2].astype(np.float64)

    def whole(self, image: Image, rng: np.random.Generator | None = None) -> np.ndarray:
        """An opened image as the processor would have it: uint8 (channels, height, width), before it is scaled.

        Where a processor cannot leave the scaling out, it is undone. Nothing is drawn from ``rng``.

        Raises:
            UnreadableImage: see `core.images.decode`.
        """
        made = self._made(decode(image, self.channels), **self._off)
        if made.dtype == np.uint8:
            return made
        slope, offset = self._numbers
        cells = np.rint((made - offset) / slope).astype(np.uint8)
        return cells[::-1].copy() if self.flips else cells

    def scale(self, pixels: torch.Tensor) -> torch.Tensor:
        """Bytes (rows, channels, height, width) as the model's numbers, float32, on the device that they are on."""
        if self._lines.device != pixels.device:
            self._lines = self._lines.to(pixels.device)  # in the first step, not in each
        slope, offset = self._lines
        pixels = pixels.flip(1) if self.flips else pixels
        return torch.addcmul(offset, pixels.to(torch.float32), slope)  # a product alone may be bf16 under autocast

    def usage(self, folder: str) -> str:
        """Lines of Python that load the model that was saved in ``folder``, for its card."""
        if not self.options and self.channels == 3:
            start = "from transformers import pipeline"
            return f"{start}\n\nclassify = pipeline('image-classification', model={folder!r})\nclassify('image.png')"
        mode = "RGB" if self.channels == 3 else "L"
        options = "".join(
            f", {name}={value}" for name, value in self.options.items()
        )  # which a pipeline cannot pass on
        return (
            "from PIL import Image, ImageOps\n"
            "from transformers import AutoImageProcessor, AutoModelForImageClassification\n\n"
            f"model = AutoModelForImageClassification.from_pretrained({folder!r})\n"
            f"processor = AutoImageProcessor.from_pretrained({folder!r})\n"
            f"image = ImageOps.exif_transpose(Image.open('image.png')).convert('{mode}')\n"
            f"chances = model(**processor(image, return_tensors='pt'){options}).logits.softmax(-1)[0]\n"
            "print(model.config.id2label[chances.argmax().item()], chances.max().item())"
        )

    def fit(self, model: Any) -> None:
        """See that a model can take images of this size; its position embeddings are interpolated where they must be.

        Raises:
            UserError: the size does not divide into the model's patches, or the model cannot take another size.
        """
        config = getattr(model.config, "vision_config", None) or model.config  # of models that also read text
        made_for, step, patch = (
            _pair(getattr(config, name, None)) for name in ("image_size", "patch_stride", "patch_size")
        )
        step = step or patch  # patches may overlap
        if step and any(side % part for side, part in zip(self.size, step, strict=True)):
            raise UserError(
                f"images of {_by(self.size)} pixels do not divide into the model's patches of {_by(step)};"
                f" give an --image_size that is a multiple of {math.lcm(*step)}"
            )
        takes = inspect.signature(model.forward).parameters
        if made_for in (None, self.size):
            return
        if "interpolate_pos_encoding" in takes:
            self.options = {"interpolate_pos_encoding": True}
            say(f"the model was made for images of {_by(made_for)} pixels: its positions are interpolated")
        if not any(hasattr(weight, "ds_id") for weight in model.parameters()):  # else each rank has a part of it
            self._try(model)

    def _try(self, model: Any) -> None:
        """Show a model one blank image: not every kind takes any size, and none says so before."""
        training, chosen = model.training, getattr(model.config, "_attn_implementation", None)
        ours = chosen not in (None, "eager", "sdpa")  # a device's kernel, and the model is still on the host
        if ours:
            model.set_attn_implementation("sdpa")
        try:
            with torch.no_grad():
                model.eval()(pixel_values=self.scale(torch.from_numpy(self.blank)[None]), **self.options)
        except Exception as error:
            raise UserError(f"the model cannot take images of {_by(self.size)} pixels: {error}") from None
        finally:
            model.train(training)
            if ours:
                model.set_attn_implementation(chosen)


def _resize(processor: Any, side: int) -> None:
    """Let a processor make images of ``side`` x ``side`` pixels."""
    square = {"height": side, "width": side}
    had = dict(getattr(processor, "size", None) or {})
    processor.size = {"shortest_edge": side} if "shortest_edge" in had else square
    if getattr(processor, "crop_size", None):
        processor.crop_size = square


def _pair(size: Any) -> tuple[int, int] | None:
    """A configuration's size as (height, width); it may be one number, or missing."""
    if isinstance(size, int):
        return size, size
    return tuple(size) if isinstance(size, (list, tuple)) and len(size) == 2 else None


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]} x {size[1]}"


def _cells(pixels: np.ndarray) -> np.ndarray:
    """(height, width, channels) as `open_image` takes it: uint8, and of one channel without the axis."""
    return (pixels[:, :, 0] if pixels.shape[2] == 1 else pixels).astype(np.uint8)
