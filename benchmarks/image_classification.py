"""Image classification from a folder of JPEGs, with random crops and mirrors, beside a `Trainer` and timm's loader.

All train the same ViT on the same files. timm needs torchvision, which would change what transformers does in an
environment: both are installed into a folder of the contest's own, without their dependencies.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from typing import Any

from benchmarks.contests import Contest, Impossible, Measured, Row, Settings
from benchmarks.ours import train_in_turns
from benchmarks.turns import REPOSITORY, Turns, rates, take_turns

SIZE = (500, 375)  # pixels of a file, width and height
CLASSES = 10
DRAWN = 320  # pictures that differ; the rest are copies, for to draw one takes longer than to read it
WORKERS = 1  # of all sides
MODEL = {"hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 3}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
PEERS = REPOSITORY / "benchmarks" / "requirements.txt"
# The operators of torchvision's compiled part that it describes to torch when it is imported.
OPERATORS = (
    "nms qnms roi_align _roi_align_backward ps_roi_align _ps_roi_align_backward roi_pool _roi_pool_backward "
    "ps_roi_pool _ps_roi_pool_backward deform_conv2d _deform_conv2d_backward"
).split()


# --- What all sides have in common -----------------------------------------------------------------------------------


def plan(settings: Settings) -> dict[str, Any]:
    """Sizes of the contest: files, rows of a step, pixels of a side of what the model sees, and the model's own."""
    if settings.small:
        return {"files": 20, "batch": 10, "side": 32, "patch": 16, "model": SMALL}
    return {"files": 1536, "batch": 32, "side": 112, "patch": 16, "model": MODEL}


def picture(number: int) -> bytes:
    """A JPEG with what a photograph has: soft light, grain, and edges of shapes; of 40 to 80 KB."""
    import numpy as np
    from PIL import Image, ImageDraw

    rng, image = np.random.default_rng(number), np.zeros((SIZE[1], SIZE[0], 3))
    for cells, strength in ((4, 90), (16, 40), (64, 25), (192, 20)):
        coarse = rng.normal(0, strength, (cells * 3 // 4, cells, 3))
        layers = [Image.fromarray(coarse[:, :, at].astype("float32")).resize(SIZE, 3) for at in range(3)]
        image += np.stack([np.asarray(layer) for layer in layers], axis=2)
    drawn = Image.fromarray((image + 128).clip(0, 255).astype("uint8"))
    draw = ImageDraw.Draw(drawn)
    for _ in range(3 + number % CLASSES):  # how many there are is the class
        left, top, size = *(rng.random(2) * SIZE - 40).tolist(), float(rng.uniform(30, 120))
        shape = draw.ellipse if rng.random() < 0.5 else draw.rectangle
        shape((left, top, left + size, top + size), fill=tuple(rng.integers(256, size=3).tolist()))
    drawn.save(file := BytesIO(), "jpeg", quality=85)
    return file.getvalue()


def prepare(settings: Settings) -> dict[str, Any]:
    """Write images and model where all sides find them; returns facts."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

    sizes, folder, data = plan(settings), settings.folder, {}
    for number in range(sizes["files"]):
        path = folder / "images" / f"class_{number % CLASSES}" / f"{number:04d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = data[number % DRAWN] = data.get(number % DRAWN) or picture(number)
        path.write_bytes(drawn)
    names = {at: f"class_{at}" for at in range(CLASSES)}
    config = ViTConfig(
        **sizes["model"],
        image_size=sizes["side"],
        patch_size=sizes["patch"],
        id2label=names,
        label2id={name: at for at, name in names.items()},
    )
    torch.manual_seed(0)
    model = ViTForImageClassification(config)
    model.save_pretrained(folder / "model")
    square = {"height": sizes["side"], "width": sizes["side"]}
    ViTImageProcessorPil(size=square).save_pretrained(folder / "model")
    size = sum(map(len, data.values())) / len(data)
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "files": f"{sizes['files']} JPEGs of {SIZE[0]} x {SIZE[1]}, {size / 1e3:.0f} KB each",
        "input": f"{sizes['side']} x {sizes['side']}, random crop (0.08 to 1 of the area) and mirror",
        "batch": sizes["batch"],
        "precision": "bf16 autocast",
        "loader processes": WORKERS,
        "threads": torch.get_num_threads(),
        "optimiser": "torch's fused AdamW",
    }


def measure(settings: Settings, peer: str) -> Measured:
    """Ours and one peer, epoch by epoch."""
    facts = prepare(settings)
    reports = take_turns(__name__, ["ours", peer], settings)
    known = all(each["flops"] for each in reports["ours"])
    flops = [each["flops"] / each["seconds"] for each in reports["ours"]] if known else []
    facts["samples in a turn"] = {side: [each["samples"] for each in own] for side, own in reports.items()}
    return Measured(rates(reports, "samples"), facts, flops)


# --- The sides -------------------------------------------------------------------------------------------------------


def ours(settings: Settings, turns: Turns) -> None:
    """The recipe, as its command trains from a folder."""
    shared = settings.folder.parent
    flags = ["--model_name_or_path", shared / "model", "--train_dir", shared / "images", "--bf16"]
    flags += ["--gaudi_config", "vit", "--per_device_train_batch_size", plan(settings)["batch"]]
    flags += ["--learning_rate", "5e-5", "--lr_scheduler_type", "linear", "--dataloader_num_workers", WORKERS]
    flags += ["--train_val_split", 0]  # all rows, as on the other sides
    train_in_turns("image_classification", flags, settings, turns)


class Files:
    """A data set as one writes it without torchvision: Pillow decodes, crops and mirrors, torch scales.

    Crop and mirror are torchvision's: ten tries for a box of 0.08 to 1 of the area and an aspect of 3/4 to 4/3.
    """

    def __init__(self, folder: Path, side: int) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))
        self.side = side

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> dict[str, Any]:
        import numpy as np
        import torch
        from PIL import Image

        path = self.paths[number]
        with Image.open(path) as file:
            image = file.convert("RGB")
        view = image.resize((self.side, self.side), Image.Resampling.BILINEAR, box=self._box(*image.size))
        if random.random() < 0.5:
            view = view.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(view)).permute(2, 0, 1).contiguous()
        pixels = pixels.float().div_(255).sub_(0.5).div_(0.5)
        return {"pixel_values": pixels, "labels": int(path.parent.name.removeprefix("class_"))}

    @staticmethod
    def _box(width: int, height: int) -> tuple[int, int, int, int]:
        for _ in range(10):
            area = width * height * random.uniform(0.08, 1)
            aspect = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
            across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if 0 < across <= width and 0 < down <= height:
                left, top = random.randint(0, width - across), random.randint(0, height - down)
                return left, top, left + across, top + down
        return 0, 0, width, height


def trainer(settings: Settings, turns: Turns) -> None:
    """transformers' `Trainer` with its defaults, over `Files`."""
    from transformers import Trainer, TrainerCallback, TrainingArguments, ViTForImageClassification

    shared, sizes = settings.folder.parent, plan(settings)
    files = Files(shared / "images", sizes["side"])

    class Epochs(TrainerCallback):
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.over(samples=len(files))

    arguments = TrainingArguments(
        output_dir=str(settings.folder / "run"),
        num_train_epochs=100_000,
        per_device_train_batch_size=sizes["batch"],
        learning_rate=5e-5,
        bf16=True,
        use_cpu=settings.device == "cpu",
        dataloader_num_workers=WORKERS,
        dataloader_persistent_workers=WORKERS > 0,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    model = ViTForImageClassification.from_pretrained(shared / "model")
    Trainer(model, arguments, train_dataset=files, callbacks=[Epochs()]).train()


def timm(settings: Settings, turns: Turns) -> None:
    """timm's loader, with the transforms that are common to all sides, before a bare loop."""
    import torch
    from torch.optim.lr_scheduler import LinearLR
    from transformers import ViTForImageClassification

    import_timm(settings.folder.parent / "timm_packages")
    from timm.data import create_dataset, create_loader

    shared, sizes = settings.folder.parent, plan(settings)
    found = torch.accelerator.current_accelerator() if settings.device != "cpu" else None
    device = found or torch.device("cpu")
    model = ViTForImageClassification.from_pretrained(shared / "model").to(device).train()
    loader = create_loader(
        create_dataset("", root=str(shared / "images")),
        input_size=(3, sizes["side"], sizes["side"]),
        batch_size=sizes["batch"],
        is_training=True,
        color_jitter=None,
        mean=(0.5,) * 3,
        std=(0.5,) * 3,
        num_workers=WORKERS,
        persistent_workers=WORKERS > 0,
        device=device,
        pin_memory=device.type == "cuda",
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, weight_decay=0.0, fused=True)
    schedule = LinearLR(optimizer, 1.0, 0.0, total_iters=100_000 * len(loader))
    while True:
        count = 0
        for pixels, labels in loader:
            with torch.autocast(device.type, torch.bfloat16):
                loss = model(pixel_values=pixels, labels=labels).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            count += len(labels)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        turns.over(samples=count)


SIDES = {"ours": ours, "trainer": trainer, "timm": timm}


# --- timm ------------------------------------------------------------------------------------------------------------


def import_timm(folder: str | Path) -> None:
    """Import timm from ``folder``, and torchvision, whose wheel may be for another device than this torch.

    Then its compiled part, which only detection needs, is not loaded, and its import fails where it tells torch about
    operators that are not there: they are declared before. After transformers, which would want to use torchvision.
    """
    import torch

    sys.path.append(str(folder))
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for name in OPERATORS:
            torch.library.define(f"torchvision::{name}", "() -> ()")
    import timm.data  # noqa: F401


def install_timm(folder: Path) -> None:
    """Install what the side needs into ``folder``.

    Raises:
        Impossible: pip cannot, or what it has installed cannot be imported.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--target",
        str(folder),
        "-r",
        str(PEERS),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise Impossible(f"{PEERS.name} cannot be installed: {(done.stderr.strip() or '?').splitlines()[-1]}")
    code = f"from benchmarks.image_classification import import_timm; import_timm({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=REPOSITORY)
    if done.returncode:
        raise Impossible(f"timm cannot be imported here: {(done.stderr.strip() or '?').splitlines()[-1]}")


def measure_timm(settings: Settings) -> Measured:
    """Ours and timm's loader, once that is there."""
    install_timm(settings.folder / "timm_packages")
    return measure(settings, "timm")


CONTESTS = [
    Contest(
        "image_classification",
        "images/s",
        [Row("image classification, fine-tuning", "trainer", "transformers Trainer, Pillow's transforms", 1.2)],
        lambda settings: measure(settings, "trainer"),
    ),
    Contest(
        "image_classification_timm",
        "images/s",
        [Row("image classification, fine-tuning", "timm", "timm's loader, a bare loop", 1.2)],
        measure_timm,
    ),
]
