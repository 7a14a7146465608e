"""The mechanics of training: normalisation, clipping, step boundaries, schedule, checkpoints, records."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from core import checkpoint, distributed, optimizers, results, state
from core.data import Batch, Window
from core.errors import UserError, is_main_process, say, warn_once
from core.run import Run
from core.stream import Loader
from core.throughput import FlopsByShape
from core.tracking import Tracker, banner, profiler

FIRST_STEPS = 3  # of several devices: their losses are looked at one by one, since a wrong set-up shows there
PROGRESS = ("step_count", "epoch", "position", "total", "best")  # what a checkpoint knows beside the tensors


class Engine:
    """What a training loop calls: `windows`, `micro_batches`, `autocast`, `backward`, `step`, and what is `due`.

    Args:
        run: device, precision, flags and folder; if it resumes, the engine starts at its checkpoint's position.
        model: is moved to the device and made ready to train, over several devices if there are.
        loader: the training rows.

    Attributes:
        step_count: optimiser steps done, of ``total_steps``.
        grad_norm: norm of the last step's gradients before clipping, a scalar tensor.

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
        run.ledger.declare("train", len(loader.buckets))
        self.throughput = run.meter()
        sizes = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in self.model.parameters()]
        self.trained_parameters = sum(size for size, trained in sizes if trained)
        self.flops = FlopsByShape(backward=2 if 2 * self.trained_parameters > sum(size for size, _ in sizes) else 1)
        self.step_count = self.epoch = self.position = 0
        self.total, self.best = {"loss": 0.0, "targets": 0}, {}
        # Of the steps since the last record. On the device: nothing waits for it until a record is written.
        self.loss_sum = torch.zeros((), device=self.device.torch_device)
        self.grad_norm, self.targets = self.loss_sum.clone(), 0
        if run.resume_from:
            self._load(run.resume_from)
        self.first_step = self._looked_at = self.step_count
        distributed.together(self._make_room)
        say(banner(self.describe()))
        self.profiler = profiler(args, self.device, run.output_dir)
        self.tracker = Tracker(args, run.output_dir, self.total_steps, self.step_count)
        self.tracker.store_init_configuration(results.describe_run(args)["arguments"])

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

    def describe(self) -> dict[str, Any]:
        """The start banner's lines: what will run, in numbers that a change of devices would change."""
        args, world = self.args, distributed.world_size()
        batch, windows = (args.per_device_train_batch_size, args.gradient_accumulation_steps, world), self.loader
        epoch = "" if math.isinf(windows.windows_per_epoch) else f" ({windows.windows_per_epoch} an epoch)"
        rate = f"learning rate {args.learning_rate:g}, {args.lr_scheduler_type}"
        return {
            "device": f"{self.device.name} x {world}",
            "execution mode": self.device.mode,
            "precision": self.run.precision.name,
            "distribution": self.run.distribution(),
            "global batch": f"{math.prod(batch)} rows ({' x '.join(map(str, batch))})",
            "batch shapes": ", ".join("x".join(map(str, shape)) for shape in windows.buckets),
            "optimiser steps": f"{self.total_steps}{epoch}",
            "optimiser": f"{type(self.optimizer).__name__}, {rate}",
            "parameters": f"{self.trained_parameters:,}",
            "output folder": self.run.output_dir,
            "resumed from": f"{self.run.resume_from} at step {self.step_count}" if self.run.resume_from else None,
        }

    def windows(self) -> Iterator[Window]:
        """Yield the micro-batches of one optimiser step after another until the last step, epochs included."""
        self.throughput.start()
        with self.run.memory.phase("train"), self.profiler or nullcontext():
            while self.step_count < self.total_steps:
                for window in self.throughput.received(self.loader.windows(self.epoch, self.position)):
                    self.position += 1
                    self._cold, self._flops, self._epoch_ended = False, 0, window.last_in_epoch
                    yield window
                    if self.step_count >= self.total_steps:
                        break
                else:
                    self.epoch, self.position = self.epoch + 1, 0

    def micro_batches(self, window: Window) -> Iterator[Batch]:
        """Yield the window's micro-batches on the device; the first of each shape is counted in FLOPs as it runs."""
        args = self.args
        self._scale = self.device.move(window.scale(), args.non_blocking_data_copy)
        if args.compile_from_sec_iteration and self.device.mode == "compile":
            torch.compiler.set_stance("force_eager" if self.step_count == 0 else "default")
        countable = self.device.mode != "compile" and not args.use_hpu_graphs_for_training
        for number, batch in enumerate(window.batches if window.targets else (), start=1):
            batch = self.device.move(batch, args.non_blocking_data_copy)
            shape, new = self.run.ledger.see("train", batch)
            if new:
                self.throughput.edge()
            self._cold |= new
            counting = self.flops.counting(shape) if new and countable else nullcontext()
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
        self.strategy.backward(loss_sum * self._scale)
        self.loss_sum += loss_sum.detach()
        self.device.step_boundary()

    def step(self, window: Window) -> None:
        """Clip, update, advance the schedule and clear the gradients: one optimiser step, whatever its size."""
        if window.targets:
            self.grad_norm = self.strategy.step()
        else:
            warn_once(f"step {self.step_count + 1}: no row has a target, so nothing was updated")
        if not (window.targets and self.strategy.schedule):
            self.schedule.step()
        self.device.step_boundary()
        self.step_count += 1
        self.targets += window.targets
        self._row_ids = window.row_ids
        flops = self._flops and self._flops * distributed.world_size()  # all ranks do equal work
        self.throughput.step(window.rows, window.tokens, cold=self._cold, flops=flops)
        if self.step_count - self.first_step <= FIRST_STEPS and distributed.world_size() > 1:
            self.loss_so_far()
        self.tracker.advance(self.step_count)

    def due(self, what: str) -> bool:
        """Whether ``log``, ``eval``, ``save`` or ``images`` (of a ``--validation_prompt``) are due after this step."""
        args, last = self.args, self.step_count == self.total_steps
        if what == "images":
            steps, epochs = args.validation_steps, args.validation_epochs
            ends = self.step_count % steps == 0 if steps else self._epoch_ended and (self.epoch + 1) % epochs == 0
            return args.validation_prompt is not None and (ends or last)
        strategy, every = {
            "log": (args.logging_strategy, args.logging_steps),
            "eval": (args.eval_strategy, args.eval_steps or args.logging_steps),
            "save": (args.save_strategy, args.save_steps),
        }[what]
        if what == "log" and (last or (self.step_count == 1 and args.logging_first_step)):
            return True
        if what == "eval" and (self.step_count if strategy == "steps" else self.epochs_done()) < args.eval_delay:
            return False
        if strategy == "epoch":
            return self._epoch_ended or last
        return strategy == "steps" and (self.step_count % every == 0 or last)

    def epochs_done(self) -> float:
        """Epochs and the part of the one that has begun; of a stream's first one, no part is known."""
        return self.epoch + self.position / self.loader.windows_per_epoch

    def log(self) -> None:
        """Write one record: loss per token since the last, learning rate, norm before clipping, memory, speed, wait."""
        with self.throughput.excluded("log"):
            norm, limit, loss = float(self.grad_norm), self.args.max_grad_norm, self.loss_so_far()
            values = {
                "loss": loss / max(self.targets, 1),
                "learning_rate": self.schedule.get_last_lr()[0],
                "grad_norm": norm,
                "grad_clipped": int(bool(limit) and norm > limit),
                "epoch": round(self.epochs_done(), 4),
                "samples_per_second": self.throughput.recent_rate(),
                "data_wait_seconds": self.throughput.data_wait(),
                **self.run.memory.record(),
            }
            self.total = {"loss": self.total["loss"] + loss, "targets": self.total["targets"] + self.targets}
            self.loss_sum.zero_()
            self.targets = 0
            self.tracker.log(values, self.step_count)
            shown = {key: values[key] for key in ("loss", "learning_rate", "samples_per_second")}
            self.tracker.advance(self.step_count, **shown, memory=values["memory_allocated (GB)"])

    def loss_so_far(self) -> float:
        """Sum of the token losses since the last record, over all ranks.

        Raises:
            UserError: it is not finite, on any rank; all ranks raise it.
        """
        own, ids, step = float(self.loss_sum), self._row_ids, self.step_count
        loss = distributed.sum_over_ranks([own])[0]
        if not math.isfinite(loss):
            mine = "" if math.isfinite(own) else ", ".join([*map(str, ids[:16]), *["..."] * (len(ids) > 16)])
            rows = ", ".join(filter(None, distributed.gather_texts(mine)))
            rows = f"its rows, from 0: {rows}" if step == self._looked_at + 1 else "--logging_steps 1 tells its rows"
            first = step == self.first_step + 1  # no rate has changed anything yet
            advice = "mend the model or the rows" if first else "lower --learning_rate or set --max_grad_norm"
            advice += ", and go on with --resume_from_checkpoint auto" * bool(checkpoint.all_steps(self.run.output_dir))
            at = f"before step {step} ({self.run.description()}; {rows})"
            raise UserError(f"the loss became {loss} {at}; nothing was saved; {advice}")
        self._looked_at = step
        return loss

    def evaluate(self, evaluation: Callable[[], dict[str, Any]]) -> None:
        """Evaluate during training, outside the measured time; log it, and remember the step if it is the best."""
        with self.throughput.excluded("eval"):
            metrics = evaluation()
        name = "eval_" + (self.args.metric_for_best_model or "loss").removeprefix("eval_")
        if name not in metrics:
            raise UserError(f"--metric_for_best_model: no metric {name!r}; there are: {', '.join(sorted(metrics))}")
        greater = self.args.greater_is_better
        sign = 1 if (greater if greater is not None else not name.endswith(("loss", "perplexity"))) else -1
        self.tracker.log(metrics, self.step_count)
        if math.isfinite(metrics[name]) and (not self.best or sign * metrics[name] > sign * self.best["value"]):
            self.best = {"metric": name, "value": metrics[name], "step": self.step_count}

    def finish_training(self) -> dict[str, Any]:
        """Close the loop: the best weights if asked for, and the run's training metrics."""
        self.tracker.finish()
        if self.step_count == self.first_step:
            say(f"nothing is left to train: {self.run.resume_from} is at step {self.step_count} of {self.total_steps}")
            self.model.eval()
            return {}
        metrics = {
            "train_loss": (self.total["loss"] + self.loss_so_far()) / max(self.total["targets"] + self.targets, 1),
            "epoch": self.epochs_done(),
            "train_steps": self.step_count,
            **self.throughput.metrics("train"),
        }
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
        """Write ``checkpoint-<step>``: weights, optimiser, schedule, random state, position; and the companions."""
        folder, loss = self.run.output_dir, self.loss_so_far()
        with self.throughput.excluded("save"), self.run.memory.phase("save"):
            checkpoint.save(folder, self.step_count, lambda main, folder: self._write(main, folder, loss, companions))
            best = f"checkpoint-{self.best['step']}" if self.best and self.args.load_best_model_at_end else None
            if is_main_process():
                checkpoint.prune(folder, self.args.save_total_limit, best)

    def _write(self, main: checkpoint.OnMain, folder: Path, loss: float, companions: tuple[Any, ...]) -> None:
        self.run.write_model(main, folder, *companions)
        progress = {name: getattr(self, name) for name in PROGRESS} | {"order": self.loader.order()}
        windows = self.loader.windows_per_epoch
        progress |= {"epoch_ended": self._epoch_ended, "windows_per_epoch": None if math.isinf(windows) else windows}
        progress["since_record"] = {"loss": loss, "targets": self.targets}
        state.save_training(folder, self.strategy, self.schedule, self.device, progress, float(self.loss_sum), main)

    def _load(self, folder: Path) -> None:
        distributed.together(lambda: state.TensorFiles(*folder.glob("*.safetensors")))  # one machine may lack it
        state.load_model(self.run.model, folder, self.strategy.put)
        saved, own = state.load_training(folder, self.strategy, self.schedule, self.device)
        then, now = saved["order"], self.loader.order()
        differing = [f"{key} {then.get(key)}, not {now[key]}" for key in sorted(now) if then.get(key) != now[key]]
        if differing and not self.args.ignore_data_skip:
            raise UserError(
                f"{folder} was made with {'; '.join(differing)}: its position in the data means other rows. Resume with"
                " the same data and global batch (window: batch x accumulation x devices), or pass --ignore_data_skip"
                " to go to an epoch's beginning"
            )
        for name in PROGRESS:
            setattr(self, name, saved[name])
        if math.isinf(self.loader.windows_per_epoch) and not differing:  # a stream, whose end has been seen or not
            self.loader.windows_per_epoch = saved["windows_per_epoch"] or math.inf
        if self.args.ignore_data_skip:
            self.epoch, self.position = self.epoch + saved["epoch_ended"], 0
        at, loss = distributed.rank(), saved["since_record"]["loss"]
        self.loss_sum.fill_(own[at] if len(own) == distributed.world_size() else loss if at == 0 else 0.0)
        self.targets = saved["since_record"]["targets"]
