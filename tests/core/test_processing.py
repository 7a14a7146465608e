"""Processors of transformers in two parts give what they give in one, at their own size and at another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from core.augment import RandomView
from core.errors import UserError
from core.images import open_image
from core.processing import Processing

SMALL = {"height": 32, "width": 32}
EDGE = {"size": {"shortest_edge": 40}, "crop_size": {"height": 32, "width": 28}}
PROCESSORS = {  # smaller than their models', for speed
    "vit": ("ViTImageProcessorPil", {"size": SMALL}),
    "vit, oblong": ("ViTImageProcessorPil", {"size": {"height": 24, "width": 40}, "resample": 3}),
    "vit, nothing but a size": ("ViTImageProcessorPil", {"size": SMALL, "do_rescale": False, "do_normalize": False}),
    "vit, not normalized": ("ViTImageProcessorPil", {"size": SMALL, "do_normalize": False}),
    "vit, not rescaled": ("ViTImageProcessorPil", {"size": SMALL, "do_rescale": False}),
    "vit, -1 to 1": ("ViTImageProcessorPil", {"size": SMALL, "rescale_factor": 1 / 127.5, "image_mean": [1.0] * 3}),
    "beit": ("BeitImageProcessorPil", EDGE | {"size": SMALL, "do_center_crop": True}),
    "bit": ("BitImageProcessorPil", EDGE),
    "bit, framed": ("BitImageProcessorPil", {"size": {"shortest_edge": 20}, "crop_size": SMALL}),
    "clip": ("CLIPImageProcessorPil", EDGE),
    "convnext": ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 32}}),
    "convnext, warped": ("ConvNextImageProcessorPil", {"size": {"shortest_edge": 384}}),
    "deit": ("DeiTImageProcessorPil", {"size": {"height": 40, "width": 40}, "crop_size": SMALL}),
    "efficientnet": ("EfficientNetImageProcessorPil", {"size": SMALL}),
    "efficientnet, -1 to 1": ("EfficientNetImageProcessorPil", {"size": SMALL, "rescale_offset": True}),
    "levit": ("LevitImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": SMALL}),
    "mobilenet": ("MobileNetV2ImageProcessorPil", EDGE),
    "mobilevit": ("MobileViTImageProcessorPil", EDGE),
    "mobilevit, straight": ("MobileViTImageProcessorPil", EDGE | {"do_flip_channel_order": False}),
    "perceiver": ("PerceiverImageProcessorPil", {"size": SMALL, "crop_size": {"height": 48, "width": 48}}),
    "poolformer": ("PoolFormerImageProcessorPil", {"size": {"shortest_edge": 32}, "crop_size": SMALL}),
    "segformer": ("SegformerImageProcessorPil", {"size": SMALL}),
    "siglip": ("SiglipImageProcessorPil", {"size": SMALL}),
}


def make(name: str, **options: Any) -> Any:
    kind, given = PROCESSORS[name]
    return getattr(transformers, kind)(**given | options)


def vit(**options: Any) -> Any:
    return make("vit", **options)


def noise(width: int, height: int, mode: str = "RGB") -> Image.Image:
    bands = {"L": 1, "RGB": 3, "RGBA": 4}[mode]
    cells = np.random.default_rng([width, height]).integers(0, 256, (height, width, bands), dtype=np.uint8)
    return Image.fromarray(cells[..., 0] if bands == 1 else cells, mode)


def over_white(image: Image.Image) -> Image.Image:
    """In colours, as a processor that knows no others has to be given it."""
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


def both_parts(processing: Processing, image: Image.Image) -> np.ndarray:
    pixels = processing.whole(open_image(image))
    assert (pixels.dtype, pixels.shape) == (np.uint8, (processing.channels, *processing.size))
    return processing.scale(torch.from_numpy(pixels)[None])[0].numpy()


PICTURES = [noise(48, 48), noise(50, 33), noise(31, 77), noise(9, 1), noise(40, 30, "L"), noise(37, 41, "RGBA")]


# --- The same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PROCESSORS)
def test_both_parts_make_what_the_processor_makes(name: str) -> None:
    processor = make(name)
    processing = Processing(processor, 3)
    for image in PICTURES:
        wanted = processor(over_white(image))["pixel_values"][0]
        assert wanted.shape[1:] == processing.size
        np.testing.assert_allclose(both_parts(processing, image), wanted, atol=1e-5)


def test_sizes_and_filters() -> None:
    found = {name: Processing(make(name), 3) for name in PROCESSORS}
    assert found["vit, oblong"].size == (24, 40)
    assert found["clip"].size == found["mobilevit"].size == (32, 28)
    assert found["convnext, warped"].size == (384, 384)
    assert (found["vit"].resample, found["clip"].resample) == (2, 3)
    assert Processing(vit(resample=0), 3).resample == 0
    assert Processing(Plain(), 3).resample == 2
    for processing in found.values():
        assert processing.blank.shape == (3, *processing.size)
        assert processing.blank.dtype == np.uint8
        assert not processing.blank.any()


@pytest.mark.parametrize("mean", [[0.5], [0.1307]])
def test_images_of_one_channel(mean: list[float]) -> None:
    processor = vit(image_mean=mean, image_std=[0.3081])
    processing = Processing(processor, 1)
    assert processing.blank.shape == (1, 32, 32)
    for image in (noise(40, 30, "L"), noise(50, 33), noise(37, 41, "RGBA")):
        grey = image if image.mode == "L" else over_white(image).convert("L")
        wanted = processor(grey)["pixel_values"][0]
        np.testing.assert_allclose(both_parts(processing, image), wanted, atol=1e-5)


@pytest.mark.parametrize("name", ["vit", "efficientnet", "mobilevit"])
def test_views_to_train_on_have_the_type_of_whole_images(name: str) -> None:
    """The blank image that stands for one that cannot be read lies in a batch with them."""
    processing = Processing(make(name), 3)
    view = RandomView(processing.size, processing.resample, 3)(open_image(noise(50, 40)), np.random.default_rng(0))
    assert view.dtype == processing.blank.dtype == processing.whole(open_image(noise(50, 40))).dtype
    assert view.shape == processing.blank.shape


def test_scaling_is_done_in_fp32_under_autocast() -> None:
    processing = Processing(vit(), 3)
    pixels = torch.from_numpy(processing.whole(open_image(noise(50, 40))))[None]
    with torch.autocast("cpu", torch.bfloat16):
        scaled = processing.scale(pixels)
    assert scaled.dtype == torch.float32
    assert torch.equal(scaled, processing.scale(pixels))
    assert not scaled.requires_grad


class Watched(transformers.ViTImageProcessorPil):
    scaled = 0

    def rescale(self, *numbers: Any, **options: Any) -> np.ndarray:
        Watched.scaled += 1
        return super().rescale(*numbers, **options)

    def normalize(self, *numbers: Any, **options: Any) -> np.ndarray:
        Watched.scaled += 1
        return super().normalize(*numbers, **options)


def test_the_host_does_not_scale_what_need_not_be() -> None:
    processing = Processing(Watched(size=SMALL), 3)
    assert Watched.scaled > 0
    Watched.scaled = 0
    both_parts(processing, noise(50, 33))
    assert Watched.scaled == 0


# --- What cannot be done ----------------------------------------------------------------------------------------------


class Curved(transformers.ViTImageProcessorPil):
    def rescale(self, image: np.ndarray, scale: float, **options: Any) -> np.ndarray:
        return (super().rescale(image, scale, **options)) ** 2


class Equalized(transformers.ViTImageProcessorPil):
    """As all numbers of one image depend on all others, one colour shows nothing."""

    def rescale(self, image: np.ndarray, scale: float, **options: Any) -> np.ndarray:
        low, high = image.min(), image.max()
        even = (image - low) * (255 / (high - low)) if high > low else image
        return super().rescale(even, scale, **options)


class Framed(transformers.ViTImageProcessorPil):
    """Zeros of the scaled image are no black ones."""

    def normalize(self, image: np.ndarray, *numbers: Any, **options: Any) -> np.ndarray:
        image = super().normalize(image, *numbers, **options)
        image[:, :2] = 0
        return image


class Grey(transformers.ViTImageProcessorPil):
    def rescale(self, image: np.ndarray, scale: float, **options: Any) -> np.ndarray:
        return super().rescale(image.mean(0, keepdims=True).repeat(3, 0), scale, **options)


class Blind(transformers.ViTImageProcessorPil):
    def rescale(self, image: np.ndarray, scale: float, **options: Any) -> np.ndarray:
        return 0 * super().rescale(image, scale, **options)


@pytest.mark.parametrize("kind", [Curved, Equalized, Framed, Grey, Blind])
def test_a_processor_that_does_more_is_refused(kind: type) -> None:
    with pytest.raises(UserError, match=f"^{kind.__name__} does more to an image than to resize, crop and scale it$"):
        Processing(kind(size=SMALL), 3)


class Plain:
    """Takes no options, as some that come with a model's own code; the last colour comes first."""

    def __call__(self, image: Image.Image) -> dict[str, Any]:
        made = vit(image_mean=[0.1, 0.2, 0.3], image_std=[0.4, 0.5, 0.7])(image, return_tensors="pt")
        return {"pixel_values": made["pixel_values"].flip(1)}


def test_a_processor_that_takes_no_options_is_undone() -> None:
    processing = Processing(Plain(), 3)
    wanted = Plain()(noise(50, 33))["pixel_values"][0]
    np.testing.assert_allclose(both_parts(processing, noise(50, 33)), wanted, atol=1e-5)
    with pytest.raises(UserError, match="--image_size 24: Plain goes on making images of 32 x 32 pixels"):
        Processing(Plain(), 3, 24)


def test_a_processor_without_one_size_is_refused() -> None:
    for processor in (make("clip", do_center_crop=False), vit(do_resize=False)):
        with pytest.raises(UserError, match=r"makes images of \d+ x \d+ or \d+ x \d+ pixels.*let it crop them"):
            Processing(processor, 3)


class Broken:
    def __call__(self, image: Image.Image, **options: Any) -> dict[str, Any]:
        raise OSError("no wheels\nand no engine")


def test_a_processor_of_other_channels_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"^ViTImageProcessorPil makes nothing of an image of 1 channels: mean must"):
        Processing(vit(), 1)
    with pytest.raises(UserError, match=r"shape \(3, 32, 32\) of an image, not \(1, height, width\)"):
        Processing(make("siglip", do_convert_rgb=True), 1)
    with pytest.raises(UserError, match="images of 4 channels; take one for 3"):
        Processing(vit(), 4)
    with pytest.raises(UserError, match=r"^Broken makes nothing of an image of 3 channels: no wheels$"):
        Processing(Broken(), 3)
    for name, message in (("ImageGPTImageProcessorPil", "Clusters must be"), ("Siglip2ImageProcessorPil", "of shape")):
        with pytest.raises(UserError, match=message):
            Processing(getattr(transformers, name)(), 3)


# --- Another size -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in PROCESSORS if "," not in name])
def test_another_size(name: str, tmp_path: Path) -> None:
    """Of the images, and of what is saved."""
    processing = Processing(make(name), 3, 48)
    assert processing.size == (48, 48)
    processing.processor.save_pretrained(tmp_path)
    again = transformers.AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    assert dict(again.size).keys() == dict(make(name).size).keys()  # what was cropped is not warped
    for image in PICTURES[:3]:
        wanted = again(image)["pixel_values"][0]
        assert wanted.shape == (3, 48, 48)
        np.testing.assert_allclose(both_parts(processing, image), wanted, atol=1e-5)


# --- Models -----------------------------------------------------------------------------------------------------------


def model(kind: str, **options: Any) -> Any:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    config = getattr(transformers, f"{kind}Config")(**sizes | options)
    torch.manual_seed(0)
    return getattr(transformers, f"{kind}ForImageClassification")(config).eval()


def logits(processing: Processing, network: Any) -> torch.Tensor:
    pixels = torch.from_numpy(processing.whole(open_image(noise(50, 40))))[None]
    with torch.no_grad():
        return network(processing.scale(pixels), **processing.options).logits


@pytest.mark.parametrize("image_size", [16, 48])
def test_positions_are_interpolated_where_sizes_differ(image_size: int, capsys: Any) -> None:
    network = model("ViT", image_size=32, patch_size=8)
    processing = Processing(vit(), 3, image_size)
    with pytest.raises(ValueError, match="doesn't match model"):
        logits(processing, network)
    processing.fit(network)
    assert processing.options == {"interpolate_pos_encoding": True}
    assert "made for images of 32 x 32 pixels: its positions are interpolated" in capsys.readouterr().out
    assert logits(processing, network).shape == (1, 2)


def test_positions_of_models_that_also_read_text() -> None:
    vision = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vision |= {"image_size": 32, "patch_size": 8}
    network = transformers.SiglipForImageClassification(transformers.SiglipConfig(vision_config=vision)).eval()
    processing = Processing(make("siglip"), 3, 48)
    processing.fit(network)
    assert logits(processing, network).shape == (1, 2)
    with pytest.raises(UserError, match="patches of 8 x 8"):
        Processing(make("siglip"), 3, 44).fit(network)


def test_nothing_is_interpolated_where_it_need_not_or_cannot_be(capsys: Any) -> None:
    small = {"hidden_sizes": [8], "depths": [1], "embedding_size": 8}
    resnet = transformers.ResNetForImageClassification(transformers.ResNetConfig(**small)).eval()
    dino = model("Dinov2", image_size=56, patch_size=8)  # interpolates by itself
    square = model("ViT", image_size=32, patch_size=8)
    listed = model("ViT", image_size=[24, 40], patch_size=[8, 20])
    for network, name in ((resnet, "vit"), (dino, "vit"), (square, "vit"), (listed, "vit, oblong")):
        processing = Processing(make(name), 3)
        processing.fit(network)
        assert processing.options == {}
        assert logits(processing, network).shape == (1, 2)
    assert "interpolated" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (12, "images of 32 x 32 pixels do not divide into the model's patches of 12 x 12; .* multiple of 12$"),
        ([16, 12], "patches of 16 x 12; give an --image_size that is a multiple of 48$"),
        ((12, 16), "patches of 12 x 16; .* multiple of 48$"),
    ],
)
def test_images_that_do_not_divide_into_patches(patch: Any, message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        Processing(vit(), 3).fit(model("ViT", image_size=48, patch_size=patch))
    assert "\n" not in str(caught.value)


def test_patches_that_overlap_are_counted_by_their_step() -> None:
    sizes = {"embed_dim": 8, "depths": [1, 1], "num_heads": [1, 1], "num_query_pool": 1, "image_size": [32, 32]}
    config = transformers.HieraConfig(**sizes, patch_size=[7, 7], patch_stride=[4, 4], masked_unit_size=[4, 4])
    processing = Processing(vit(), 3)
    network = transformers.HieraForImageClassification(config).eval()
    processing.fit(network)
    assert logits(processing, network).shape == (1, 2)


@pytest.mark.parametrize(
    ("name", "size"),
    [("vit", None), ("vit", 24), ("vit, oblong", None), ("deit", 24), ("mobilevit", None), ("efficientnet", None)],
)
def test_what_is_saved_classifies_alike_elsewhere(name: str, size: int | None, tmp_path: Path) -> None:
    """A pipeline makes every image one in colours; a model for grey ones it cannot run."""
    processing = Processing(make(name), 3, size)
    labels = {"id2label": {0: "cat", 1: "dog", 2: "bird"}}
    network = model("ViT", image_size=list(processing.size), patch_size=4, initializer_range=0.5, **labels)
    processing.fit(network)
    network.save_pretrained(tmp_path)
    processing.processor.save_pretrained(tmp_path)
    classify = transformers.pipeline("image-classification", model=str(tmp_path))
    for image in PICTURES[:3]:
        pixels = torch.from_numpy(processing.whole(open_image(image)))[None]
        with torch.no_grad():
            sure = network(processing.scale(pixels), **processing.options).logits.softmax(-1)[0]
        best = classify(image)[0]
        assert best["label"] == network.config.id2label[int(sure.argmax())]
        assert best["score"] == pytest.approx(float(sure.max()), abs=1e-5)


def test_the_lines_that_load_a_model_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the model card shows them: by a pipeline, or by hand where a pipeline cannot."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (20, 20), "red").save("image.png")
    for channels, made_for in ((3, 16), (3, 8), (1, 16)):
        mean = [0.5] * channels
        processing = Processing(ViTImageProcessorPil(size=16, image_mean=mean, image_std=mean), channels)
        sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = ViTConfig(image_size=made_for, patch_size=4, num_channels=channels, num_labels=2, **sizes)
        processing.fit(model := ViTForImageClassification(config))
        for part in (model, processing.processor):
            part.save_pretrained("this folder")
        assert ("pipeline" in processing.usage("this folder")) == (channels == 3 and made_for == 16)
        exec(processing.usage("this folder"), {})


def test_a_size_that_a_model_cannot_take_is_one_line() -> None:
    """CLIP's positions are not interpolated; nobody but the model knows."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.CLIPConfig(
        text_config={**sizes, "vocab_size": 9}, vision_config={**sizes, "image_size": 16, "patch_size": 8}
    )
    processing = Processing(transformers.ViTImageProcessorPil(size=32), 3)
    model = transformers.CLIPForImageClassification(config).train()
    with pytest.raises(UserError, match=r"the model cannot take images of 32 x 32 pixels: Input image size"):
        processing.fit(model)
    Processing(transformers.ViTImageProcessorPil(size=16), 3).fit(model)
    assert model.training


def test_a_size_is_tried_on_the_host_where_a_devices_attention_does_not_run() -> None:
    def only_on_a_device(*_: Any, **__: Any) -> None:
        pytest.fail("this kernel was called on the host")

    transformers.AttentionInterface.register("only_on_a_device", only_on_a_device)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, **sizes))
    model.set_attn_implementation("only_on_a_device")
    Processing(transformers.ViTImageProcessorPil(size=32), 3).fit(model)
    assert model.config._attn_implementation == "only_on_a_device"
