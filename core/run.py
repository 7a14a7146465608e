"""What one process knows of its run, with or without training: device, precision, folder, evaluation, results."""

from __future__ import annotations

import math
import os
import random
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers.utils.logging import disable_progress_bar

from core import checkpoint, distributed, graphs, optimizers, results
from core.data import Batch, BatchLoader
from core.device import select_device
from core.errors import UserError, say, warn_once
from core.gaudi_config import GaudiConfig
from core.memory import MemoryTracker
from core.mixed_precision import effective_op_lists, resolve_precision
from core.throughput import Throughput
from core.tracking import banner, tracker_names


class Run:
    """One run of a recipe on one device. Made before data and model: what cannot work is said before they load.

    Args:
        args: all flags.
        gaudi_config: of `core.mixed_precision.prepare_environment`.
        name: the recipe's name, for the default output folder.

    Attributes:
        device, precision, output_dir: where the run executes, how, and where it writes.
        autocast: the context for forward passes and losses.
        resume_from: the checkpoint to go on from, or None.
        memory, ledger: peaks per phase, and batch shapes per phase.

    Raises:
        UserError: the flags ask for what this machine or this folder cannot give.
    """

    def __init__(self, args: Namespace, gaudi_config: GaudiConfig, name: str) -> None:
        distributed.require_single_process()
        disable_progress_bar()  # transformers' own; one bar, the run's, is enough
        if args.disable_tqdm:
            os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets is imported later
        if args.deepspeed:
            raise UserError("--deepspeed: this release trains on one device, without DeepSpeed; leave it out")
        self.args, self.gaudi_config = args, gaudi_config
        self.device = select_device(args, args.execution_mode)
        self.device.check_mode()
        graphs.check(args, self.device)
        self.precision = resolve_precision(args, gaudi_config, self.device)
        self.autocast = self.precision.autocast
        self.op_lists = effective_op_lists(gaudi_config, self.device)
        for key, ops in self.op_lists.items():
            say(f"{key}: {' '.join(ops)}")
        tracker_names(args.report_to)
        results.check_published(args.run_file["published"], args.config)
        if args.resume_from_checkpoint and not args.do_train:
            warn_once("--resume_from_checkpoint goes on with training; to evaluate a checkpoint, name it as the model")
        same = args.eval_strategy == args.save_strategy != "no"
        fits = args.eval_strategy == "epoch" or args.save_steps % (args.eval_steps or args.logging_steps) == 0
        if args.load_best_model_at_end and not (same and fits):
            raise UserError(
                "--load_best_model_at_end needs one --eval_strategy and --save_strategy, saving where it evaluates"
            )
        if args.do_train:  # on one weight, so that a wrong option is said before a model of hours is loaded
            weight = nn.Linear(1, 1).to(self.device.torch_device)
            optimizer = optimizers.create_optimizer(weight, args, gaudi_config, self.device)
            optimizers.create_schedule(optimizer, args, total_steps=1)
        self.output_dir = results.claim_output_dir(args, name)
        self.resume_from = checkpoint.find(args.resume_from_checkpoint, self.output_dir) if args.do_train else None
        random.seed(args.seed)
        np.random.seed(args.seed)
        self.device.manual_seed(args.seed)
        self.device.set_dynamic_shapes(gaudi_config.use_dynamic_shapes)
        self.memory, self.ledger = MemoryTracker(self.device), graphs.ShapeLedger()
        self.metrics: dict[str, Any] = {}
        self._facts: dict[str, Any] = {}
        self._inference_model: nn.Module | None = None

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device in the dtype, and with the graphs, that the flags ask for."""
        args = self.args
        if args.gradient_checkpointing and args.do_train:
            model.gradient_checkpointing_enable()
        if args.bf16_full_eval and args.do_train:
            warn_once("--bf16_full_eval has no effect beside --do_train: the parameters must stay fp32")
        elif args.bf16_full_eval:
            model.to(torch.bfloat16)
        self.model = model.to(self.device.torch_device)
        if hasattr(model, "tie_weights"):
            model.tie_weights()  # moving to a device may have made copies
        graphs.apply_mode(self.model, args, self.device)
        return self.model.train(args.do_train)

    def meter(self) -> Throughput:
        """A new meter of time for this run's device and precision."""
        precision = "bf16" if self.precision.enabled else "fp32"
        return Throughput(self.device, self.args.throughput_warmup_steps, distributed.world_size(), precision=precision)

    def inference_model(self) -> nn.Module:
        """The model to evaluate: with recorded graphs if asked for, but not while training (they drop gradients)."""
        if self.model.training:
            return self.model
        if self._inference_model is None:
            self._inference_model = graphs.cache_inference_graphs(self.model, self.args, self.device)
        return self._inference_model

    def evaluate(
        self, loader: BatchLoader, forward: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | None]], phase: str
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Run ``forward`` over a whole data set: every row counts once, at any batch size.

        Args:
            loader: the data set, in order or not.
            forward: returns the sum of the batch's token losses, and per-row outputs (batch, ...) or None.
            phase: ``eval`` or ``predict``; prefix of the metrics.

        Returns:
            Metrics (loss per token, speed), and the rows' outputs on the host, in the order of the data set.
        """
        meter, training, outputs, losses, targets = self.meter(), self.model.training, {}, [], 0
        self.ledger.declare(phase, len(loader.buckets))
        with self.memory.phase(phase), torch.no_grad():
            self.model.eval()
            meter.start()
            for window in loader.windows():
                batch = self.device.move(window.batches[0], self.args.non_blocking_data_copy)
                new = self.ledger.see(phase, batch)[1] and self.device.compiles
                if new:
                    meter.edge()
                with self.autocast():
                    loss_sum, rows = forward(batch)
                self.device.step_boundary()
                losses.append(loss_sum)
                targets += window.targets
                if rows is not None:
                    outputs.update(zip(window.row_ids, rows.cpu(), strict=False))  # filler comes last and has no id
                meter.step(window.rows, window.tokens, cold=new)
            total = torch.stack(losses).double().sum().item() if losses else 0.0
            total, targets = distributed.sum_over_ranks([total, targets])
            self.model.train(training)
        metrics = {f"{phase}_loss": total / targets if targets else math.nan, **meter.metrics(phase)}
        return metrics, [outputs[row] for row in sorted(outputs)]

    def save_model(self, folder: Path, *companions: Any) -> None:
        """Write weights, Gaudi configuration and what has ``save_pretrained`` (a tokenizer, a processor)."""
        checkpoint.save_model(self.model, folder)
        self.gaudi_config.save_pretrained(folder)
        for companion in companions:
            companion.save_pretrained(folder)

    def report(self, split: str, metrics: dict[str, Any], texts: Sequence[str] = ()) -> None:
        """Print a split's metrics and write them to ``<split>_results.json`` and ``all_results.json`` at once.

        Texts of the ``predict`` split go to ``generated_predictions.txt``, one a line.
        """
        if not metrics:
            return  # what an earlier process measured stays
        self.metrics |= metrics
        if texts and split == "predict":
            lines = "".join(" ".join(text.split()) + "\n" for text in texts)
            (self.output_dir / "generated_predictions.txt").write_text(lines, encoding="utf-8")
        facts = {"name": self.device.name, "execution_mode": self.device.mode, "precision": self.precision.name}
        run = results.describe_run(self.args, facts | {"world_size": distributed.world_size()})
        run |= {
            "op_lists": self.op_lists,
            "batch_shapes": self.ledger.report(),
            "peak_memory (GB)": self.memory.peaks(),
        }
        run["graphs_compiled"] = graphs.compile_count(self.device)
        results.save_metrics(self.output_dir, split, metrics, run)
        say(f"\n{split}\n" + banner({f"  {name}": results.show(value) for name, value in metrics.items()}))
        self._facts = run

    def finish(self) -> dict[str, Any]:
        """Print measured beside published figures, where the run file has any, and return all metrics."""
        for line in results.compare_with_published(self.args.run_file["published"], self.metrics, self._facts):
            say(line)
        say(f"\nall results: {self.output_dir / 'all_results.json'}")
        return self.metrics
