"""The mechanics of training: normalisation, clipping, step boundaries, schedule, checkpoints, records."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from core import checkpoint, distributed, graphs, optimizers, preemption, progress, results, state
from core.background import Writer
from core.data import Batch, Window
from core.errors import UserError, is_main_process, say, warn_once
from core.generators import unless_preempted
from core.nonfinite import Losses
from core.preemption import Preempted
from core.run import Run
from core.stream import Loader
from core.throughput import FlopsByShape, peak_flops
from core.tracking import Tracker, banner, profiler

FIRST_STEPS = 3  # of several devices: their losses are looked at one by one, since a wrong set-up shows there
PAUSE = Window([], 0, 0, 0, [], False)  # for what is due after the step before it, and no step


class Engine:
    """What a training loop calls: `windows`, `micro_batches`, `autocast`, `backward`, `step`, and what is `due`.

    Args:
        run: device, precision, flags and folder; if it resumes, the engine starts at its checkpoint's position.
        model: is moved to the device and made ready to train, over several devices if there are.
        loader: the training rows.

    Attributes:
        step_count: optimiser steps done, of ``total_steps``.
        losses: the losses since the last record, and the norm of the last step's gradients.
        trims: whether batches are padded to their own longest row, and shapes cost nothing.

    Raises:
        UserError: the flags or the checkpoint do not fit the model or the data.
    """

    def __init__(self, run: Run, model: nn.Module, loader: Loader) -> None:
        self.run, self.device, self.loader, self.autocast = run, run.device, loader, run.autocast
        self.args = args = run.args
        self.total_steps = args.max_steps if args.max_steps > 0 else self._steps_of_epochs()
        self.strategy = run.train(model, self.total_steps)
        self.model, self.optimizer = self.strategy.model, self.strategy.optimizer
        self.schedule = self.strategy.schedule or optimizers.create_schedule(self.optimizer, args, self.total_steps)
        run.ledger.declare("train", shapes := loader.declare(graphs.takes_any_shape(args, self.device)))
        self.throughput = run.meter()
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.model.parameters()]
        self.parameters = sum(size for size, _ in sizes)
        self.trained_parameters = sum(size for size, trained in sizes if trained)
        self.flops = FlopsByShape(backward=2 if 2 * self.trained_parameters > self.parameters else 1)
        self._countable = self.device.mode != "compile" and not args.use_hpu_graphs_for_training
        self._countable &= peak_flops(self.device.name, self.throughput.precision) is not None
        self.trims = shapes is None
        self.step_count = self.epoch = self.position = 0
        self.total, self.best = {"loss": 0.0, "targets": 0}, {}
        advice = partial(progress.advice, weakref.proxy(self))  # a circle would keep all of a run that has ended
        self.losses = Losses(args, self.device, run.output_dir, run.description(), advice)
        self.writer = Writer(self.device, args.on_save_error == "stop")
        self._pause, self._stopping, self.epoch_ended = "", False, False
        self.left: list[str] = []  # what was due after a step, and not done when the run was asked to end
        if run.resume_from:
            progress.load(self, run.resume_from)
        self.first_step = self.step_count
        distributed.together(self._make_room)
        say(banner(progress.describe(self)))
        self.profiler = profiler(args, self.device, run.output_dir)
        self.tracker = distributed.together(lambda: Tracker(args, run.output_dir, self.total_steps, self.step_count))
        distributed.together(lambda: self.tracker.store_init_configuration(results.describe_run(args)["arguments"]))

    def _steps_of_epochs(self) -> int:
        if math.isinf(self.loader.windows_per_epoch):
            raise UserError("data that is read as a stream needs --max_steps: where an epoch ends is not known before")
        return max(math.ceil(self.args.num_train_epochs * self.loader.windows_per_epoch), 1)

    def _make_room(self) -> None:
        """Put away what another branch or an earlier run left in the folder: now that this one is sure to start."""
        if is_main_process() and self.run.resume_from:
            checkpoint.set_aside(self.run.output_dir, self.step_count)
        elif is_main_process() and self.args.overwrite_output_dir:
            results.clear_output_dir(self.run.output_dir)

    def windows(self) -> Iterator[Window]:
        """Yield the micro-batches of one optimiser step after another until the last step, epochs included.

        A run that is asked to end gets a window without batches at last, after which a checkpoint is due; one that goes
        on from there gets one at first, if an evaluation was cut off.
        """
        self.throughput.start()
        try:
            with self.run.memory.phase("train"), self.profiler or nullcontext():
                if self.left:
                    preemption.hold()
                    yield from self._paused("resume")
                yield from self._steps()
                if self.run.asked_to_end() or self._stopping:
                    yield from self._paused("stop")
        finally:
            self.writer.join()  # whatever ends the loop: what was begun is completed

    def _steps(self) -> Iterator[Window]:
        while self.step_count < self.total_steps and not self._stopping:
            for window in self.throughput.received(self.loader.windows(self.epoch, self.position)):
                preemption.hold()  # from here on there is something to save
                if window.asked_to_end:
                    self._stopping = True
                    break
                self.position += 1
                self._cold, self._flops, self.epoch_ended = False, 0, window.last_in_epoch
                yield window
                if self._stopping or self.step_count >= self.total_steps:
                    break
            else:
                self.epoch, self.position, self.epoch_ended = self.epoch + 1, 0, False

    def _paused(self, cause: Literal["resume", "stop"]) -> Iterator[Window]:
        self._pause = cause
        yield PAUSE
        self._pause, self.left = "", self.left if self._stopping else []

    def micro_batches(self, window: Window) -> Iterator[Batch]:
        """Yield the window's micro-batches on the device; FLOPs of a shape are counted as it runs, if need be."""
        args = self.args
        self._scale = self.device.move(window.scale(), args.non_blocking_data_copy)
        if args.compile_from_sec_iteration and self.device.mode == "compile":
            torch.compiler.set_stance("force_eager" if self.step_count == 0 else "default")
        for number, batch in enumerate(window.batches if window.targets else (), start=1):
            batch = self.device.move(batch, args.non_blocking_data_copy)
            shape, new = self.run.ledger.see("train", batch)
            counts = new and self._countable and graphs.must_count(shape, self.flops.known, self.trims)
            cold = new and (counts or not self.trims or self.step_count == self.first_step)
            if cold:
                self.throughput.edge()
            self._cold |= cold
            counting = self.flops.counting(shape) if counts else nullcontext()
            with self.strategy.micro_batch(last=number == len(window.batches)), counting:
                yield batch
            if self.profiler:
                self.profiler.step()
            flops = self.flops.known.get(shape)
            self._flops = None if flops is None or self._flops is None else self._flops + flops

    def backward(self, loss_sum: torch.Tensor) -> None:
        """Backpropagate a sum of token losses, divided by the number of targets in the whole window."""
        if self.args.pipelining_fwd_bwd:
            self.device.step_boundary()
        self.flops.forward_ends()
        self.strategy.backward(loss_sum, self.losses.add(loss_sum, self._scale))
        self.device.step_boundary()

    def step(self, window: Window) -> bool:
        """Clip, update, advance the schedule and clear the gradients: one optimiser step, whatever its size.

        Returns:
            Whether the weights moved, as far as is known: then averages of them take them in.
        """
        if window is PAUSE:
            return False
        self.writer.settle()
        norm, skipped = self.strategy.step() if window.targets else None, self.losses.skipped
        if norm is not None:  # before the boundary, or the next forward pass would have another graph than those after
            self.losses.step(self.step_count + 1, self.epoch, window, norm)
        else:
            self.optimizer._opt_called = True  # else torch's schedules warn that they are stepped first
            warn_once(f"step {self.step_count + 1}: no row has a target, so nothing was updated")
        if not (window.targets and self.strategy.schedule):
            self.schedule.step()
        self.device.step_boundary()
        self.step_count += 1
        flops = self._flops and self._flops * distributed.world_size()  # all ranks' shapes are equal
        self.throughput.step(window.rows, window.tokens, cold=self._cold, flops=flops)
        if self.step_count - self.first_step <= FIRST_STEPS and distributed.world_size() > 1:
            self.losses.look()
        if distributed.world_size() == 1 and self.writer.failed():  # several ranks are told at the next record
            self.writer.finish()
        self.tracker.advance(self.step_count)
        return self.losses.skipped == skipped

    def due(self, what: str) -> bool:
        """Whether ``log``, ``eval``, ``save`` or ``images`` (of a ``--validation_prompt``) are due after this step.

        In a run that is asked to end nothing is, but for a checkpoint at the end.
        """
        if self._pause == "stop":
            return what == "save"
        due = what in self.left if self._pause else progress.is_due(self, what)
        if due and self._stopping and what in ("eval", "images"):
            self.left = list(dict.fromkeys([*self.left, what]))
        if due and what == "images":
            self.writer.settle()  # the averages may take the weights' place
        return due and not self._stopping

    def epochs_done(self) -> float:
        """Epochs and the part of the one that has begun; of a stream's first one, no part is known."""
        return self.epoch + self.position / self.loader.windows_per_epoch

    def log(self) -> None:
        """Write one record: loss per token since the last, learning rate, norm before clipping, memory, speed, wait."""
        with self.throughput.excluded("log"):
            if distributed.sum_over_ranks([float(self.writer.failed())])[0]:
                self.writer.finish()
            loss, targets, norm = self.losses.total(), self.losses.targets, self.losses.norm
            values = {
                "loss": loss / targets if targets else None,
                "learning_rate": self.schedule.get_last_lr()[0],
                "grad_norm": norm,
                "grad_clipped": int(0 < (self.args.max_grad_norm or 0) < norm),
                "epoch": round(self.epochs_done(), 4),
                "samples_per_second": self.throughput.recent_rate(),
                "data_wait_seconds": self.throughput.data_wait(),
                **self.run.memory.record(),
            }
            self.total = {"loss": self.total["loss"] + loss, "targets": self.total["targets"] + targets}
            self.losses.restart()
            distributed.together(lambda: self.tracker.log(values, self.step_count))
            shown = {key: values[key] for key in ("loss", "learning_rate", "samples_per_second")}
            self.tracker.advance(self.step_count, **shown, memory=values["memory_allocated (GB)"])

    def evaluate(self, evaluation: Callable[[], dict[str, Any]]) -> None:
        """Evaluate during training, outside the measured time; log it, and remember the step if it is the best."""
        self.losses.look()
        self.writer.settle()  # averages may take the weights' place
        try:
            with self.throughput.excluded("eval"), unless_preempted(self.device):
                metrics = evaluation()
        except Preempted:  # held, as it is while training: only `Run.evaluate` raises it, on all ranks alike
            self._stopping, self.left = True, list(dict.fromkeys(["eval", *self.left]))
            return
        name = "eval_" + (self.args.metric_for_best_model or "loss").removeprefix("eval_")
        if name not in metrics:
            raise UserError(f"--metric_for_best_model: no metric {name!r}; there are: {', '.join(sorted(metrics))}")
        greater = self.args.greater_is_better
        sign = 1 if (greater if greater is not None else not name.endswith(("loss", "perplexity"))) else -1
        distributed.together(lambda: self.tracker.log(metrics, self.step_count))
        if math.isfinite(metrics[name]) and (not self.best or sign * metrics[name] > sign * self.best["value"]):
            self.best = {"metric": name, "value": metrics[name], "step": self.step_count}

    def finish_training(self) -> dict[str, Any]:
        """Close the loop: the best weights if asked for, and the run's training metrics.

        A run that had nothing left to train has those of the run before, if they are still missing, without its speed.
        """
        if self._stopping:
            self.run.end_if_asked("training was not at its end, and its loop has not saved")
        with self.throughput.excluded("save"):
            self.writer.finish()
        self.tracker.finish()
        loss = self.total["loss"] + self.losses.total()
        metrics = {
            "train_loss": loss / max(self.total["targets"] + self.losses.targets, 1),
            "epoch": self.epochs_done(),
            "train_steps": self.step_count,
            "train_skipped_steps": self.losses.skipped,
        }
        if self.step_count > self.first_step:
            saves = {f"train_{name}": value for name, value in self.writer.metrics().items()}
            metrics |= {**self.throughput.metrics("train"), **saves}
        else:
            say(f"nothing is left to train: {self.run.resume_from} is at step {self.step_count} of {self.total_steps}")
            metrics = {} if distributed.on_main(lambda: progress.reported(self)) else metrics
        if self.args.load_best_model_at_end and self.best:
            best = self.run.output_dir / f"checkpoint-{self.best['step']}"
            if distributed.on_main(lambda: "here" if best.is_dir() else ""):
                state.load_model(self.run.model, best, self.strategy.put)
                say(f"the weights are those of {best}: {self.best['metric']} {self.best['value']:.4f}")
            else:
                warn_once(f"--load_best_model_at_end: step {self.best['step']} was the best, but was not saved")
        self.model.eval()
        return metrics

    def save(self, *companions: Any) -> None:
        """Write ``checkpoint-<step>``: weights, optimiser, schedule, random state, position; and the companions.

        Training goes on as soon as the state is copied, see `core.background`.

        Raises:
            UserError: the checkpoint before it, or a companion of this one, cannot be written.
            Preempted: the run was asked to end; the checkpoint is complete.
        """
        if stopping := self._pause == "stop":
            self.writer.finish()
        if not stopping or (self.step_count and (self.writer.complete != self.step_count or self.left)):
            loss = self.losses.total()
            with self.throughput.excluded("save"), self.run.memory.phase("save"):
                progress.save(self, loss, companions)
        if stopping:
            self.writer.finish()
            done = "is complete" if self.writer.complete == self.step_count else "could not be written"
            safe = f"checkpoint-{self.step_count} {done}, {preemption.seconds_since():.1f} s after the signal"
            self.tracker.finish()
            self.run.end_if_asked(safe if self.step_count else "training had not begun")
