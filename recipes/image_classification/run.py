"""Image classification: fine-tune and evaluate a ViT, a Swin or another classifier on images and their classes.

One device:    python recipes/image_classification/run.py --gaudi_config gaudi_configs/vit.json
Eight devices: python gaudi_spawn.py --world_size 8 recipes/image_classification/run.py --gaudi_config vit

Without a model and data it trains a small ViT from scratch on 1,257 handwritten digits that scikit-learn brings.
Expected: 99 % of the 360 digits that it never saw, in about a minute on two cores.
"""

# --- Bootstrap and imports --------------------------------------------------------------------------------------------
# torch and what builds on it are imported inside functions: the execution mode has to be in the environment before
# torch loads the Gaudi bridge, and --help answers at once.

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

for folder in Path(__file__).resolve().parents:  # a copy beside this folder finds core; elsewhere it is installed
    if (folder / "core" / "engine.py").is_file():
        sys.path.insert(0, str(folder))
        break

from core import hub, splits
from core.arguments import flag, parse_arguments
from core.errors import UserError, exit_with_one_line, is_main_process, say
from core.mixed_precision import prepare_environment

if TYPE_CHECKING:
    import numpy as np
    import torch
    from datasets import Dataset

    from core.data import Batch, BatchLoader
    from core.engine import Engine
    from core.pictures import Pictures
    from core.processing import Processing
    from core.run import Run

BUILT_IN = Path(__file__).with_name("built_in.json")  # flags of the run without a model and data

# --- Arguments --------------------------------------------------------------------------------------------------------


@dataclass
class ImageClassificationArguments:
    """Which model, which images and classes, and how images are changed in training."""

    _argument_group_name = "model and data"
    model_name_or_path: str | None = flag(None, "a hub's model or a folder (default: a small ViT, built here)")
    model_type: str | None = flag(None, "the same with a model type's default configuration, e.g. vit")
    config_overrides: str | None = flag(None, "changes of a configuration to train from scratch, patch_size=8,...")
    image_processor_name: str | None = flag(None, "image processor, if it is not the model's")
    ignore_mismatched_sizes: bool = flag(False, "a head of another number of classes gives way to a new one")
    image_size: int | None = flag(None, "pixels of a side (default: the image processor's)")
    train_dir: str | None = flag(None, "folder with one folder of images per class")
    validation_dir: str | None = flag(None, "the same to evaluate")
    test_dir: str | None = flag(None, "the same for --do_predict, or images without classes")
    train_val_split: float = flag(0.15, "share of the training rows to evaluate on, where no split is there")
    image_column_name: str | None = flag(None, "column of the images or their paths (default: image)")
    label_column_name: str | None = flag(None, "column of the classes (default: label)")
    on_bad_image: Literal["skip", "fail"] = flag("skip", "an image that cannot be read: leave it out, or stop")
    random_crop_scale: list[float] = flag([0.08, 1.0], "training: least and greatest share of an image in a crop")
    random_crop_ratio: list[float] = flag([0.75, 4 / 3], "training: least and greatest width / height of a crop")
    random_flip: float = flag(0.5, "training: share of the images that are mirrored")
    rand_augment: int | None = flag(None, "training: so many of RandAugment's operations on each image")
    rand_augment_magnitude: float = flag(9.0, "how strong they are, 0 to 10")
    mixup_alpha: float = flag(0.0, "training: mix each image with another one, e.g. 0.8")
    cutmix_alpha: float = flag(0.0, "training: put a part of another image into each one, e.g. 1.0")


GROUPS = (ImageClassificationArguments, hub.HubArguments)


def check(args: Namespace) -> None:
    """Refuse what cannot work, before anything is loaded."""
    scale, ratio = args.random_crop_scale, args.random_crop_ratio
    demands = {
        "--config_overrides needs a model from scratch": not (args.config_overrides and args.model_name_or_path),
        "--model_type needs a model from scratch": not (args.model_type and args.model_name_or_path),
        "--random_crop_scale must be 0 < least <= greatest <= 1": len(scale) == 2 and 0 < scale[0] <= scale[1] <= 1,
        "--random_crop_ratio must be 0 < least <= greatest": len(ratio) == 2 and 0 < ratio[0] <= ratio[1] < 1e9,
        "--random_flip must be at most 1": args.random_flip <= 1,
        "--rand_augment_magnitude must be at most 10": args.rand_augment_magnitude <= 10,
    }
    if not all(demands.values()):
        raise UserError("; ".join(demand for demand, met in demands.items() if not met))


# --- Data -------------------------------------------------------------------------------------------------------------


def load_data(args: Namespace) -> tuple[dict[str, Dataset], list[str] | None]:
    """Return the splits that the flags ask for, with columns ``image`` and ``label``, and the classes' names.

    The classes are those of the training split, as it is before rows are held out of it.
    """
    from core.data import chosen_rows
    from core.digits import digit_files
    from core.pictures import class_names, load_pictures

    found = load_pictures(args) or digit_files()
    names = class_names(found, args)
    splits.hold_out_validation(found, args, "label")
    return {split: chosen_rows(found[split], split, args) for split in splits.needed_splits(args, found)}, names


def make_loader(args: Namespace, pictures: Pictures, processing: Processing, train: bool) -> BatchLoader:
    """Batches of a split: random views to train on, whole images as the image processor has them to evaluate."""
    from core.augment import RandomView
    from core.data import BatchLoader
    from core.pictures import Prepare, collate_pixels

    prepare = Prepare(pictures, processing.whole, processing.blank)
    if train:
        crop = {"scale": tuple(args.random_crop_scale), "ratio": tuple(args.random_crop_ratio)}
        change = {"operations": args.rand_augment or 0, "magnitude": args.rand_augment_magnitude}
        sizes = (processing.size, processing.resample, processing.channels)
        prepare.show = RandomView(*sizes, **crop, flip=args.random_flip, **change)
        prepare.mixup_alpha, prepare.cutmix_alpha = args.mixup_alpha, args.cutmix_alpha
    args = Namespace(**{**vars(args), "pad_to_max_length": True})  # all images have one size, and no tokens
    lengths, how = [(0, 0)] * len(pictures), (train, prepare, pictures.unreadable.found)
    return BatchLoader.from_arguments(args, pictures, collate_pixels, lengths, processing.size, *how)


# --- Model ------------------------------------------------------------------------------------------------------------


def configure(args: Namespace, names: list[str] | None) -> Any:
    """Return the model's configuration, which names its classes: the checkpoint's, or the data's if they are others."""
    from transformers import ViTConfig

    from core.labels import choose_classes

    name = args.config_name or args.model_name_or_path
    with hub.loading(f"the model {name or args.model_type}", name):
        config = hub.load_config(args)
        if config is None:
            sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4}
            config = ViTConfig(**sizes, image_size=32, patch_size=4, initializer_range=0.1)
            if any(getattr(args, name) for name in hub.NAMED):
                say("no model is named: a small ViT is trained from scratch, for which a few hundred images are few")
        if not args.model_name_or_path:
            config.image_size = args.image_size or getattr(config, "image_size", 224)
            config.architectures = config.architectures or []  # transformers looks into it, of a mere type it is None
        if args.config_overrides:
            config.update_from_string(args.config_overrides)
    trained = config.id2label if args.model_name_or_path else None
    classes, kept = choose_classes(trained, names, args.do_train)
    if trained and args.do_train and not kept:
        say(f"the model has other classes than the data ({len(classes)}): what its head has learned is not about these")
    config.problem_type = "single_label_classification"
    config.id2label, config.label2id = dict(enumerate(classes)), {label: at for at, label in enumerate(classes)}
    return config


def build_model(args: Namespace, run: Run, config: Any) -> tuple[Any, Processing]:
    """Load the named image processor and model, or make them; a head of other classes is new, if that is asked for."""
    from transformers import AutoImageProcessor, AutoModelForImageClassification, ViTImageProcessorPil

    from core import attention
    from core.labels import load_classifier, require_same_classes
    from core.processing import Processing
    from core.zero import whole_models

    require_same_classes(run.resume_from, config)
    name, options, kind = args.model_name_or_path, hub.model_options(args), AutoModelForImageClassification
    with hub.loading(f"the model {name or config.model_type}", name, args.image_processor_name), whole_models():
        if source := args.image_processor_name or name:
            processor = AutoImageProcessor.from_pretrained(source, backend="pil", **options)
        else:
            grey = [0.5] * getattr(config, "num_channels", 3)
            processor = ViTImageProcessorPil(size=config.image_size, image_mean=grey, image_std=grey)
        attention.register(run.device, args)
        how = {"attn_implementation": attention.supported(kind, attention.choose(args, run.device), config)}
        if name:
            how |= {"dtype": "float32", "use_safetensors": True, **options}
            model = load_classifier(kind, name, config, args.ignore_mismatched_sizes, **how)
        else:
            model = kind.from_config(config, dtype="float32", **how)
    processing = Processing(processor, getattr(config, "num_channels", 3), args.image_size)
    processing.fit(model)
    return model, processing


# --- Task functions: loss and metric ----------------------------------------------------------------------------------


def predict(model: Any, batch: Batch, processing: Processing) -> torch.Tensor:
    """The logits: (rows, classes)."""
    return model(pixel_values=processing.scale(batch["pixel_values"]), **processing.options).logits


def loss_sum(model: Any, batch: Batch, processing: Processing, smoothing: float = 0.0) -> torch.Tensor:
    """Sum of the rows' cross-entropies, a scalar in fp32; a mixed image has two classes, each with its share."""
    import torch

    from core.losses import cross_entropies

    logits = predict(model, batch, processing)
    losses = cross_entropies(logits, batch["labels"], smoothing)
    if "shares" in batch:
        others = cross_entropies(logits, batch["other_labels"], smoothing)
        losses = torch.lerp(others, losses, batch["shares"]).masked_fill(batch["labels"] < 0, 0)
    return losses.sum()  # rows that weigh nothing have no class, and a loss of 0; fp32: no product that autocast halves


def accuracy(top: np.ndarray, labels: np.ndarray, phase: str) -> dict[str, float]:
    """Share of the rows whose class comes first and, of more than five classes, among the first five.

    ``top`` is (rows, k), the most probable classes of each row, the first one first; ``labels`` is (rows,).
    """
    hits = top == labels[:, None]
    found = {f"{phase}_accuracy": float(hits[:, 0].mean())}
    return found | ({f"{phase}_top5_accuracy": float(hits.any(axis=1).mean())} if hits.shape[1] == 5 else {})


# --- Train ------------------------------------------------------------------------------------------------------------


def train(engine: Engine, processing: Processing, smoothing: float, evaluation: Callable[[], dict]) -> dict[str, Any]:
    """The loop: one window is one optimiser step; the engine owns normalisation, clipping and step boundaries."""
    for window in engine.windows():
        for batch in engine.micro_batches(window):
            with engine.autocast():
                loss = loss_sum(engine.model, batch, processing, smoothing)
            engine.backward(loss)
        engine.step(window)
        if engine.due("log"):
            engine.log()
        if engine.due("eval"):
            engine.evaluate(evaluation)
        if engine.due("save"):
            engine.save(processing.processor)
    metrics = engine.finish_training()
    return metrics and metrics | {"train_unreadable_images": len(engine.loader.dataset.unreadable.rows)}


# --- Evaluate ---------------------------------------------------------------------------------------------------------


def evaluate(run: Run, processing: Processing, loader: BatchLoader, phase: str) -> tuple[dict, np.ndarray, np.ndarray]:
    """Return loss, accuracy and speed of a split, and per row its most probable classes and their probabilities."""
    import torch

    from core.losses import cross_entropies

    model, pictures = run.inference_model(), loader.dataset
    count = min(6, model.config.num_labels) - 1 or 1  # of five classes, all are among the first five

    def forward(batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = predict(model, batch, processing)
        top = logits.float().softmax(-1).topk(count)
        return cross_entropies(logits, batch["labels"]).sum(), torch.stack([top.indices.float(), top.values], dim=1)

    metrics, outputs = run.evaluate(loader, forward, phase)
    top, probabilities = torch.stack(outputs).numpy().transpose(1, 0, 2)
    top, known = top.astype(int), pictures.known()  # not images without a class, or that cannot be read
    metrics[f"{phase}_unreadable_images"] = len(pictures.unreadable.rows)
    metrics |= accuracy(top[known], pictures.labels[known], phase) if known.any() else {f"{phase}_loss": None}
    return metrics, top, probabilities


def write_pages(run: Run, pictures: Pictures, top: np.ndarray, probabilities: np.ndarray, phase: str) -> None:
    """Write confusion matrix and surest mistakes, and of the test split every image's class, on the main process."""
    from core import pages

    if not is_main_process():
        return
    names, folder, known = list(run.model.config.id2label.values()), run.output_dir, pictures.known()
    labels, first, sure = pictures.labels, top[:, 0], probabilities[:, 0]
    if known.any() and len(names) <= 1000:
        counts = pages.confusion_counts(labels[known], first[known], len(names))
        pages.confusion_matrix(folder / f"{phase}_confusion_matrix.png", counts, names, f"{known.sum()} images")
    wrong = (known & (first != labels)).nonzero()[0]
    wrong = wrong[(-sure[wrong]).argsort(kind="stable")][:25]
    if len(wrong):
        captions = [f"{names[labels[at]]}\ntaken for {names[first[at]]} ({sure[at]:.0%})" for at in wrong]
        pages.grid(folder / f"{phase}_mistakes.png", [pictures.thumbnail(at) for at in wrong], captions)
    if phase == "predict":
        rows = [[pictures.name(at), names[first[at]], f"{sure[at]:.6f}"] for at in range(len(first))]
        for at in pictures.unreadable.rows:
            rows[at][1:] = "", ""
        header = ["path", "class", "probability"]
        if known.any():
            header.append("true class")
            rows = [[*row, names[label]] for row, label in zip(rows, labels, strict=True)]
        pages.table(folder / "predictions.csv", header, rows)


def describe(run: Run, processing: Processing) -> None:
    """Write the model card."""
    from core.model_card import write_model_card

    pages = [f"{phase}_{page}.png" for phase in ("eval", "predict") for page in ("confusion_matrix", "mistakes")]
    about = {"task": "image-classification", "usage": processing.usage(run.output_dir.name), "pictures": pages}
    about |= {"labels": list(run.model.config.id2label.values()), "facts": run.facts}
    write_model_card(run.output_dir, metrics=run.metrics, groups=GROUPS, **about)


# --- Main -------------------------------------------------------------------------------------------------------------


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run what the flags ask for, write ``all_results.json``, and return its metrics."""
    args = parse_arguments(argv, *GROUPS, description=__doc__, built_in=(BUILT_IN, hub.NAMED))
    gaudi_config = prepare_environment(args)
    from core.engine import Engine
    from core.pictures import Pictures
    from core.run import Run

    check(args)
    run = Run(args, gaudi_config, Path(__file__).parent.name)
    data, names = load_data(args)
    config = configure(args, names)
    pictures = {split: Pictures(rows, list(config.id2label.values()), split, args) for split, rows in data.items()}
    model, processing = build_model(args, run, config)
    loaders = {split: make_loader(args, rows, processing, split == "train") for split, rows in pictures.items()}
    if args.do_train:
        engine = Engine(run, model, loaders["train"])
        evaluation = partial(evaluate, run, processing, loaders.get("validation"), "eval")
        metrics = train(engine, processing, args.label_smoothing_factor, lambda: evaluation()[0])
        run.save_model(run.output_dir, processing.processor)
        run.report("train", metrics)
    else:
        run.place(model)
    for split, phase in (("validation", "eval"), ("test", "predict")):
        if getattr(args, f"do_{phase}"):
            metrics, *found = evaluate(run, processing, loaders[split], phase)
            run.report(phase, metrics)
            run.by_product(partial(write_pages, run, pictures[split], *found, phase))
    if args.do_train:
        run.by_product(partial(describe, run, processing))
    return run.finish()


if __name__ == "__main__":
    exit_with_one_line(main, preemptible=True)
