"""Counts what recipes ask of the simulated device at each step, and a bare loop over the same batches beside them.

``python -m tests.counting plan.json found.json``, on the simulated device: the plan has a recipe's folder and flags by
name. The bare loop has the recipe's model, batches, autocast, optimiser and schedule, and nothing else of this project.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from core import optimizers
from core.engine import Engine
from hpu_simulator import runtime
from tests.conftest import load_recipe

STEPS, WARMUP = 6, 3  # the optimiser makes its state in the first step and reads it first in the second
Counts = dict[str, Any]
Loss = Callable[[Any, dict[str, torch.Tensor], dict[str, Any]], torch.Tensor]


def seen() -> Counter[str]:
    """What the device has been asked so far, by kind; operators, views apart, by their names."""
    found = runtime.snapshot()
    counts = Counter({name: one["count"] for name, one in found["ops"].items()})
    counts["graphs compiled"] = len(found["graphs"])
    counts["graphs run"] = sum(1 + graph["reused"] for graph in found["graphs"])
    counts["host syncs"] = sum(sync["count"] for sync in found["syncs"])
    to_device = found["copies"]["to_device"]
    counts["copies to the device"], counts["bytes to the device"] = to_device["count"], to_device["bytes"]
    return counts


def steady(marks: list[Counter[str]], warmup: int = WARMUP) -> Counts:
    """What is asked for between two marks, after the first ones.

    Raises:
        AssertionError: it is not the same each time.
    """
    steps = [{name: after[name] - before[name] for name in after} for before, after in pairwise(marks[warmup - 1 :])]
    steps = [{name: count for name, count in sorted(step.items()) if count} for step in steps]
    assert len(steps) > 1, f"{len(marks)} marks are too few"
    assert all(step == steps[0] for step in steps), f"steps differ: {steps}"
    operators = {name.partition("::")[2]: count for name, count in steps[0].items() if "::" in name}
    kinds = ("graphs compiled", "graphs run", "host syncs", "copies to the device", "bytes to the device")
    counts = {kind: steps[0].get(kind, 0) for kind in kinds}
    return {**counts, "operators": sum(operators.values()), "operators by name": operators}


# --- Bare loops -------------------------------------------------------------------------------------------------------


def summarization(model: Any, batch: dict[str, torch.Tensor], _: dict[str, Any]) -> torch.Tensor:
    start = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
    logits = model(**inputs, decoder_input_ids=start, use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def language_modeling(model: Any, batch: dict[str, torch.Tensor], _: dict[str, Any]) -> torch.Tensor:
    masked = "attention_mask" in batch
    inputs = {"attention_mask": batch["attention_mask"]} if masked else {"use_cache": False}
    logits = model(batch["input_ids"], **inputs).logits
    return functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def image_classification(model: Any, batch: dict[str, torch.Tensor], tables: dict[str, Any]) -> torch.Tensor:
    pixels = batch["pixel_values"].float() * tables["slope"] + tables["offset"]
    return functional.cross_entropy(model(pixel_values=pixels).logits, batch["labels"])


def text_to_image(model: Any, batch: dict[str, torch.Tensor], tables: dict[str, Any]) -> torch.Tensor:
    pipe = tables["pipe"]
    with torch.no_grad(), torch.autocast("hpu", enabled=False):
        found = pipe.vae.encode(batch["pixel_values"].float() / 127.5 - 1).latent_dist
        latents = (found.mean + found.std * batch["posterior"]) * pipe.vae.config.scaling_factor
        texts = pipe.text_encoder(batch["input_ids"])[0]
    noisy = tables["noise"].add_noise(latents, batch["noise"], batch["timesteps"])
    predicted = model(noisy, batch["timesteps"], texts, return_dict=False)[0]
    return functional.mse_loss(predicted.float(), batch["noise"])


NEEDED = {
    "summarization": ("input_ids", "attention_mask", "labels"),
    "language_modeling": ("input_ids", "attention_mask", "labels"),
    "image_classification": ("pixel_values", "labels"),
    "text_to_image": ("pixel_values", "input_ids", "posterior", "noise", "timesteps"),
}


def tables_of(recipe: str, pipe: Any) -> dict[str, Any]:
    """What a loss needs beside the model and the batch, on the device."""
    if recipe == "image_classification":
        return {name: torch.full((3, 1, 1), value).to("hpu") for name, value in (("slope", 0.01), ("offset", -1.0))}
    if recipe != "text_to_image":
        return {}
    from diffusers import DDPMScheduler

    noise = DDPMScheduler.from_config(pipe.scheduler.config)
    noise.alphas_cumprod = noise.alphas_cumprod.to("hpu")
    return {"pipe": pipe, "noise": noise}


def bare_loop(engine: Engine, loss_of: Loss, needed: tuple[str, ...], tables: dict[str, Any]) -> Counts:
    """Train the engine's model with what one writes by hand for a Gaudi."""
    from habana_frameworks.torch.core import mark_step  # noqa: TID251 - it runs on the simulated device

    model, args, marks = engine.model.train(), engine.args, []
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = optimizers.create_optimizer(model, args, engine.run.gaudi_config, engine.device)
    schedule = optimizers.create_schedule(optimizer, args, STEPS)
    windows = chain.from_iterable(engine.loader.windows(epoch) for epoch in range(STEPS))
    for window in islice(windows, STEPS):
        batch = {name: value.to("hpu") for name, value in window.batches[0].items() if name in needed}
        with engine.autocast():
            loss = loss_of(model, batch, tables)
        loss.backward()
        mark_step()
        torch.nn.utils.clip_grad_norm_(parameters, args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        mark_step()
        marks.append(seen())
    return steady(marks)


# --- Recipes ----------------------------------------------------------------------------------------------------------


class Counted:
    """A recipe that counts as it runs: each training step, then those of a bare loop, then each step of generation."""

    def __init__(self, name: str) -> None:
        self.name, self.found, self.pipe, self.calls = name, {}, None, []
        self.recipe = load_recipe(name)
        for part in ("build_pipeline", "train", "evaluate", "generate"):
            if hasattr(self.recipe, part):
                setattr(self.recipe, part, partial(getattr(self, part), getattr(self.recipe, part)))

    def build_pipeline(self, build: Callable, *args: Any) -> Any:
        self.pipe = build(*args)
        return self.pipe

    def train(self, train: Callable, engine: Engine, *rest: Any) -> Any:
        step, backward, marks = engine.step, engine.backward, []

        def marking(*args: Any) -> bool:
            moved = step(*args)
            marks.append(seen())
            return moved

        def noting(loss_sum: torch.Tensor) -> None:
            self.found["loss"] = str(loss_sum.dtype)
            backward(loss_sum)

        engine.step, engine.backward = marking, noting
        metrics = train(engine, *rest)
        self.found["step"] = steady(marks)
        batch, needed = next(iter(engine.loader.windows())).batches[0], NEEDED[self.name]
        self.found["batch"] = {name: value.nbytes for name, value in batch.items()}
        self.found["needed"] = [name for name in batch if name in needed]
        loss_of, training = globals()[self.name], engine.model.training
        self.found["bare loop"] = bare_loop(engine, loss_of, needed, tables_of(self.name, self.pipe))
        engine.model.train(training)
        return metrics

    def evaluate(self, evaluate: Callable, run: Any, *rest: Any) -> Any:
        with self.called(run.model):
            return evaluate(run, *rest)

    def generate(self, generate: Callable, run: Any, pipe: Any, *rest: Any) -> Any:
        with self.called(pipe.unet):
            return generate(run, pipe, *rest)

    @contextmanager
    def called(self, model: torch.nn.Module) -> Iterator[None]:
        """Count the host's waits between the model's calls; the first is to evaluate or begins to generate."""
        handle, marks = model.register_forward_pre_hook(lambda *_: marks.append(seen())), []
        yield
        handle.remove()
        waits = [after["host syncs"] - before["host syncs"] for before, after in pairwise(marks[1:])]
        assert len(waits) > 2, f"{len(marks)} calls are too few"
        assert len(set(waits)) == 1, f"steps of generation differ: {waits}"
        self.found["generation"] = {"host syncs": waits[0]}


def count(name: str, flags: list[str]) -> Counts:
    """Run a recipe; what each training step asks for, and each step of generation if there are any."""
    counted = Counted(name)
    counted.recipe.main(flags)
    return counted.found


def main() -> None:
    plan, path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    path.write_text(json.dumps({name: count(folder, flags) for name, (folder, flags) in plan.items()}))


if __name__ == "__main__":
    main()
