"""How far an engine has come: what is due after a step, and the checkpoints that it goes on from."""

from __future__ import annotations

import math
from contextlib import suppress
from copy import copy
from pathlib import Path
from typing import Any

from core import adapters, checkpoint, distributed, state
from core.checkpoint import OnMain
from core.errors import UserError, read_json_object

BYTES = 16  # that a trained parameter takes in a checkpoint: itself, two moments, an average
PLAIN = ("step_count", "epoch", "position", "total", "best", "epoch_ended", "left")  # an engine's, kept as they are


def describe(engine: Any) -> dict[str, Any]:
    """The start banner's lines: what will run, in numbers that a change of devices would change."""
    args, world, loader = engine.args, distributed.world_size(), engine.loader
    batch = (args.per_device_train_batch_size, args.gradient_accumulation_steps, world)
    epoch = "" if math.isinf(loader.windows_per_epoch) else f" ({loader.windows_per_epoch} an epoch)"
    shapes = ", ".join("x".join(map(str, shape)) for shape in loader.buckets)
    rate = f"learning rate {args.learning_rate:g}, {args.lr_scheduler_type}"
    resumed = f"{engine.run.resume_from} at step {engine.step_count}" if engine.run.resume_from else None
    return {
        "device": f"{engine.device.name} x {world}",
        "execution mode": engine.device.mode,
        "precision": engine.run.precision.name,
        "distribution": engine.run.distribution(),
        "global batch": f"{math.prod(batch)} rows ({' x '.join(map(str, batch))})",
        "batch shapes": f"{shapes}, cut to a batch's longest row" if engine.trims else shapes,
        "optimiser steps": f"{engine.total_steps}{epoch}",
        "optimiser": f"{type(engine.optimizer).__name__}, {rate}",
        "parameters": f"{engine.trained_parameters:,}",
        "output folder": engine.run.output_dir,
        "resumed from": resumed,
    }


def is_due(engine: Any, what: str) -> bool:
    """Whether the flags ask for ``log``, ``eval``, ``save`` or ``images`` after the step that was made last."""
    args, step, last = engine.args, engine.step_count, engine.step_count == engine.total_steps
    if what == "images":
        steps, epochs = args.validation_steps, args.validation_epochs
        ends = step % steps == 0 if steps else engine.epoch_ended and (engine.epoch + 1) % epochs == 0
        return args.validation_prompt is not None and (ends or last)
    strategy, every = {
        "log": (args.logging_strategy, args.logging_steps),
        "eval": (args.eval_strategy, args.eval_steps or args.logging_steps),
        "save": (args.save_strategy, args.save_steps),
    }[what]
    if what == "log" and (last or (step == 1 and args.logging_first_step)):
        return True
    if what == "eval" and (step if strategy == "steps" else engine.epochs_done()) < args.eval_delay:
        return False
    if strategy == "epoch":
        return engine.epoch_ended or last
    return strategy == "steps" and (step % every == 0 or last)


def advice(engine: Any, step: int) -> str:
    """What to do about a step whose numbers are not finite, which ends the run."""
    engine.writer.join()  # the checkpoint to go on from
    if step == engine.first_step + 1:  # no rate has changed anything yet
        mend = "mend the model or the rows"
    else:
        mend = "lower --learning_rate, set --max_grad_norm, or leave such steps out with --on_nonfinite skip"
    mend += "; go on with --resume_from_checkpoint auto" * bool(checkpoint.all_steps(engine.run.output_dir))
    return mend


def reported(engine: Any) -> str:
    """Where an earlier process has written the metrics of this end of the training; empty if none has."""
    path = engine.run.output_dir / "train_results.json"
    with suppress(UserError):  # there is no such file
        return str(path) if read_json_object(path, path.name).get("train_steps") == engine.step_count else ""
    return ""


def save(engine: Any, loss: float, companions: tuple[Any, ...]) -> None:
    """Begin to write ``checkpoint-<step>``; ``loss`` is the sum of all ranks since the last record."""

    def write(main: OnMain, folder: Path) -> None:
        engine.run.write_model(main, folder, *companions)
        windows, losses = engine.loader.windows_per_epoch, engine.losses
        known = {name: copy(getattr(engine, name)) for name in PLAIN} | {"order": engine.loader.order()}
        known["windows_per_epoch"] = None if math.isinf(windows) else windows
        known |= {"since_record": {"loss": loss, "targets": losses.targets}, "skipped_steps": losses.skipped}
        state.save_training(folder, engine.strategy, engine.schedule, engine.device, known, losses.sum, main)

    args, best = engine.args, engine.best
    kept = f"checkpoint-{best['step']}" if best and args.load_best_model_at_end else None
    frozen = 0 if adapters.has_adapters(engine.run.model) else engine.parameters - engine.trained_parameters
    size = engine.trained_parameters * BYTES + 4 * frozen
    engine.writer.save(engine.run.output_dir, engine.step_count, write, size, (args.save_total_limit, kept))


FORM = {  # of what `save` notes, see `core.untrusted.wrong_place`; keys with ? came later
    "step_count": 0, "epoch": 0, "position": 0, "total": {"loss": 0.0, "targets": 0}, "epoch_ended": True,
    "best": {"metric?": "", "value?": 0.0, "step?": 0},
    "left?": [""], "order": {}, "since_record": {"loss": 0.0, "targets": 0}, "skipped_steps?": 0,
}  # fmt: skip


def load(engine: Any, folder: Path) -> None:
    """Put an engine at a checkpoint's position, with its weights and all that training needs.

    Raises:
        UserError: a file cannot be read, or the checkpoint is of another model or of other rows.
    """
    distributed.together(lambda: state.TensorFiles(*folder.glob("*.safetensors")))  # one machine may lack it
    state.load_model(engine.run.model, folder, engine.strategy.put)
    saved, own = state.load_training(folder, engine.strategy, engine.schedule, engine.device)
    state.require_form(folder, saved, FORM)
    with state.of_a_run(folder):
        _go_to(engine, folder, saved, own)


def _go_to(engine: Any, folder: Path, saved: dict[str, Any], own: list[float]) -> None:
    args, loader, losses = engine.args, engine.loader, engine.losses
    loader.follow(then := saved["order"])
    now = loader.order()
    differing = [f"{key} {then.get(key)}, not {now[key]}" for key in sorted(now) if then.get(key) != now[key]]
    if differing and not args.ignore_data_skip:
        raise UserError(
            f"{folder} was made with {'; '.join(differing)}: its position in the data means other rows. Resume with"
            " the same data and global batch (window: batch x accumulation x devices), or pass --ignore_data_skip"
            " to go to an epoch's beginning"
        )
    for name in PLAIN:
        setattr(engine, name, saved.get(name, []) if name == "left" else saved[name])  # which is newer than the others
    asked = {"eval": args.eval_strategy != "no", "images": getattr(args, "validation_prompt", None) is not None}
    engine.left = [what for what in engine.left if asked.get(what)]  # today's flags decide
    if folder.parent == engine.run.output_dir and not args.ignore_data_skip:
        engine.writer.complete = engine.step_count
    if math.isinf(loader.windows_per_epoch) and not differing:  # a stream, whose end has been seen or not
        loader.windows_per_epoch = saved["windows_per_epoch"] or math.inf
    if args.ignore_data_skip:
        engine.epoch, engine.position = engine.epoch + saved["epoch_ended"], 0
    at, since = distributed.rank(), saved["since_record"]
    losses.sum = float(own[at] if len(own) == distributed.world_size() else since["loss"] if at == 0 else 0.0)
    losses.targets, losses.skipped = since["targets"], saved.get("skipped_steps", 0)
