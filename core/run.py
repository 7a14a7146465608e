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
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from core import adapters, checkpoint, deepspeed_config, distributed, graphs, optimizers, results, state, strategies
from core.data import Batch
from core.device import select_device
from core.errors import UserError, is_main_process, say, warn_once
from core.gaudi_config import GaudiConfig
from core.gradients import broadcast_buffers
from core.memory import MemoryTracker
from core.mixed_precision import effective_op_lists, resolve_precision
from core.strategies import Replicated
from core.stream import Loader
from core.throughput import Throughput
from core.tracking import banner, tracker_names
from core.zero import Zero, announce


class Run:
    """One process of a recipe's run. Made before data and model: what cannot work is said before they load.

    Args:
        args: all flags.
        gaudi_config: of `core.mixed_precision.prepare_environment`.
        name: the recipe's name, for the default output folder.

    Attributes:
        device, precision, output_dir: where the run executes, how, and where it writes.
        autocast: the context for forward passes and losses.
        resume_from: the checkpoint to go on from, or None.
        memory, ledger: peaks per phase, and batch shapes per phase.
        metrics, facts: of the splits that were reported, and what produced them.

    Raises:
        UserError: the flags ask for what this machine or this folder cannot give.
    """

    def __init__(self, args: Namespace, gaudi_config: GaudiConfig, name: str) -> None:
        disable_progress_bar()  # transformers' own; one bar, the run's, is enough
        if not is_main_process():
            set_verbosity_error()  # one table of a loaded model's new weights is enough, too
        if args.disable_tqdm or not is_main_process():
            os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"  # datasets is imported later
        self.args, self.gaudi_config = args, gaudi_config
        self.device = select_device(args, args.execution_mode)
        self.device.check_mode()
        # Else DeepSpeed, where it is installed, looks for a device itself, and says so.
        os.environ.setdefault("DS_ACCELERATOR", self.device.kind)
        distributed.start(self.device, args.ddp_timeout, always=bool(args.deepspeed))
        graphs.check(args, self.device)
        strategies.check(args)
        self.deepspeed = self._deepspeed_config()
        self.precision = resolve_precision(args, gaudi_config, self.device, bool(self.deepspeed))
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
        if args.do_train and not self.deepspeed:
            # On one weight, so that a wrong option is said before a model of hours is loaded.
            weight = nn.Linear(1, 1).to(self.device.torch_device)
            optimizer = optimizers.create_optimizer(weight, args, gaudi_config, self.device)
            optimizers.create_schedule(optimizer, args, total_steps=1)
        if self.deepspeed and self.deepspeed["zero_optimization"]["stage"] == 3:
            self._announced = announce(args, self.deepspeed)
        args.output_dir = distributed.on_main(lambda: str(results.claim_output_dir(args, name)))
        self.output_dir, asked = Path(args.output_dir), args.resume_from_checkpoint if args.do_train else None
        found = distributed.on_main(lambda: str(checkpoint.find(asked, self.output_dir) or ""))
        self.resume_from = Path(found) if found else None
        self.seed(args.seed)
        self.device.set_dynamic_shapes(gaudi_config.use_dynamic_shapes)
        self.memory, self.ledger = MemoryTracker(self.device), graphs.ShapeLedger()
        self.metrics: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self._inference_model: nn.Module | None = None
        self._strategy: Replicated | Zero | None = None

    def _deepspeed_config(self) -> dict[str, Any] | None:
        """Load and check what ``--deepspeed`` names; None where it would do nothing."""
        args = self.args
        if not args.deepspeed:
            return None
        config = deepspeed_config.load(args.deepspeed)
        if "zero_optimization" not in config:
            raise UserError(f"--deepspeed {args.deepspeed} has no zero_optimization block; DDP needs no --deepspeed")
        config = deepspeed_config.resolve(config, args, distributed.world_size(), gaudi_config=self.gaudi_config)
        if config["bf16"]["enabled"] is True and not args.bf16:
            say("bf16: as the DeepSpeed configuration says, although --bf16 is not given")
            args.bf16 = True
        stage = config["zero_optimization"]["stage"]
        if stage == 3 and args.use_hpu_graphs_for_inference:
            warn_once("--use_hpu_graphs_for_inference has no effect under ZeRO-3: a replay would gather no weights")
            args.use_hpu_graphs_for_inference = False
        if not args.do_train and stage < 3:
            say(f"--deepspeed: ZeRO stage {stage} shards what training needs; evaluation alone has nothing to shard")
            return None
        return config

    def seed(self, seed: int) -> None:
        """Seed every random generator of this process."""
        random.seed(seed)
        np.random.seed(seed % 2**32)
        self.device.manual_seed(seed)

    def train(self, model: nn.Module, total_steps: int) -> Replicated | Zero:
        """Place a model, and return what trains it over the devices that there are."""
        args, half = self.args, (torch.bfloat16, torch.float16)
        if not self.deepspeed and any(p.dtype in half for p in model.parameters() if p.requires_grad):
            warn_once("trainable parameters are not fp32: updates smaller than their rounding are lost; load in fp32")
        model = self.place(model)
        if self.deepspeed:
            self._strategy = Zero(model, args, self.gaudi_config, self.device, self.deepspeed, total_steps)
        else:
            self._strategy = Replicated(model, args, self.gaudi_config, self.device)
        if distributed.rank():  # the weights were drawn alike; dropout masks are each rank's own
            self.seed(args.seed + distributed.rank())
        return self._strategy

    def place(self, model: nn.Module) -> nn.Module:
        """Move a model to the device in the dtype, and with the graphs, that the flags ask for."""
        args = self.args
        if args.gradient_checkpointing and args.do_train:
            names = ("supports_gradient_checkpointing", "_supports_gradient_checkpointing")  # the second: diffusers
            if not all(getattr(model, name, True) for name in names):
                raise UserError(f"--gradient_checkpointing: {type(model).__name__} cannot do it; leave it out")
            (getattr(model, "enable_gradient_checkpointing", None) or model.gradient_checkpointing_enable)()
        if args.bf16_full_eval and args.do_train:
            warn_once("--bf16_full_eval has no effect beside --do_train: the parameters must stay fp32")
        elif args.bf16_full_eval:
            model.to(torch.bfloat16)
        self.model = model
        if not any(hasattr(parameter, "ds_id") for parameter in model.parameters()):  # else it was built in its place
            model.to(self.device.torch_device)
            if hasattr(model, "tie_weights"):
                model.tie_weights()  # moving to a device may have made copies
        if self.deepspeed and not args.do_train:
            self._strategy = Zero(model, args, self.gaudi_config, self.device, self.deepspeed)
        graphs.apply_mode(self.model, args, self.device)
        return self.model.train(args.do_train)

    def meter(self) -> Throughput:
        """A new meter of time for this run's device and precision."""
        precision = "bf16" if self.precision.name.startswith("bf16") else "fp32"
        return Throughput(self.device, self.args.throughput_warmup_steps, distributed.world_size(), precision=precision)

    def inference_model(self) -> nn.Module:
        """The model to evaluate: with recorded graphs if asked for, but not while training (they drop gradients)."""
        if self.model.training:
            return self.model
        if self._inference_model is None:
            self._inference_model = graphs.cache_inference_graphs(self.model, self.args, self.device)
        return self._inference_model

    def evaluate(
        self, loader: Loader, forward: Callable[[Batch], tuple[torch.Tensor, torch.Tensor | None]], phase: str
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        """Run ``forward`` over a whole data set: every row counts once, at any batch size and on any number of ranks.

        Args:
            loader: the data set, in order or not.
            forward: returns the sum of the batch's token losses, and per-row outputs (batch, ...) or None.
            phase: ``eval`` or ``predict``; prefix of the metrics.

        Returns:
            Metrics (loss per token, speed), and the rows' outputs on the host, in the order of the data set, on all
            ranks alike.
        """
        if self._strategy:
            broadcast_buffers(self.model)  # such as running statistics: rank 0's are what is saved
        meter, training, ids, outputs, losses, targets = self.meter(), self.model.training, [], [], [], 0
        self.ledger.declare(phase, len(loader.buckets))
        with self.memory.phase(phase), torch.no_grad():
            self.model.eval()
            meter.start()
            for window in meter.received(loader.windows()):
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
                    ids += window.row_ids
                    outputs.append(rows[: len(window.row_ids)].cpu())  # filler comes last
                meter.step(window.rows, window.tokens, cold=new)
            total = torch.stack(losses).cpu().double().sum().item() if losses else 0.0
            total = distributed.sum_over_ranks([total])[0]
            self.model.train(training)
        metrics = {f"{phase}_loss": total / targets if targets else math.nan, **meter.metrics(phase)}
        if not outputs:
            return metrics, []
        numbers = torch.cat(distributed.gather_rows(torch.tensor(ids, dtype=torch.int64)))
        gathered = torch.cat(distributed.gather_rows(torch.cat(outputs)))
        whole = torch.empty_like(gathered)  # which holds every row once
        whole[numbers] = gathered
        return metrics, list(whole)

    def save_model(self, folder: Path, *companions: Any, part: str = "", override: Any = None) -> None:
        """Write weights, Gaudi configuration and what has ``save_pretrained`` (a tokenizer, a processor).

        Adapters are merged into the weights, which go to the folder ``part`` in it, and are in ``adapter/`` by
        themselves. ``override`` maps names of parameters to tensors, such as averages, that are written instead.

        Raises:
            UserError: a file cannot be written; all ranks raise it.
        """
        main = checkpoint.OnMain()
        self.write_model(main, folder, *companions, part=part, publish=override or {})
        main.agree(f"{folder}: the model cannot be written: {{}}")

    def write_model(self, main: Any, folder: Path, *others: Any, part: str = "", publish: Any = None) -> None:
        """The same through ``main``, which tells of a failure later; not to ``publish``: adapters alone. For all."""
        if self._strategy:
            broadcast_buffers(self.model)  # such as running statistics: rank 0's are what is saved
        adapted = adapters.has_adapters(self.model)
        only = adapters.names(self.model) if adapted and publish is None else None
        weights = self._strategy.weights(only) if self._strategy else None
        if publish:
            weights = state.with_others(self.model, weights, publish)
        if adapted:
            main(adapters.save, self.model, folder if publish is None else folder / "adapter", weights)
        if not adapted or publish is not None:
            plain = adapters.merged if adapted else lambda model, weights: weights
            main(lambda: state.save_model(self.model, folder / part, plain(self.model, weights), publish is not None))
        for companion in (self.gaudi_config, *others):
            main(companion.save_pretrained, folder)

    def report(self, split: str, metrics: dict[str, Any], texts: Sequence[str] = ()) -> None:
        """Print a split's metrics and write them to ``<split>_results.json`` and ``all_results.json`` at once.

        Texts of the ``predict`` split go to ``generated_predictions.txt``, one a line.
        """
        if not metrics:
            return  # what an earlier process measured stays
        self.metrics |= metrics
        if texts and split == "predict" and is_main_process():
            lines = "".join(" ".join(text.split()) + "\n" for text in texts)
            (self.output_dir / "generated_predictions.txt").write_text(lines, encoding="utf-8")
        facts = {"name": self.device.name, "execution_mode": self.device.mode, "precision": self.precision.name}
        run = results.describe_run(self.args, facts | {"world_size": distributed.world_size()})
        run |= {"op_lists": self.op_lists, "batch_shapes": self.ledger.report()}
        run["peak_memory (GB)"] = self.memory.peaks()
        run["graphs_compiled"] = graphs.compile_count(self.device)
        results.save_metrics(self.output_dir, split, metrics, run)
        say(f"\n{split}\n" + banner({f"  {name}": results.show(value) for name, value in metrics.items()}))
        self.facts = run

    def finish(self) -> dict[str, Any]:
        """Print measured beside published figures, where the run file has any, and return all metrics."""
        for line in results.compare_with_published(self.args.run_file["published"], self.metrics, self.facts):
            say(line)
        say(f"\nall results: {self.output_dir / 'all_results.json'}")
        self.close()
        return self.metrics

    def close(self) -> None:
        """Leave the other ranks."""
        if self._strategy:
            self._strategy.close()
        if not self.deepspeed:  # which keeps groups of this one, and needs them if this process trains again
            distributed.stop()

    def distribution(self) -> str | None:
        """How the ranks share the work; None for one device without DeepSpeed."""
        if self.deepspeed:
            return f"ZeRO-{self.deepspeed['zero_optimization']['stage']} ({self.args.deepspeed})"
        names = {"ddp": "DDP", "fast_ddp": "fast DDP"}
        return names[self.args.distribution_strategy] if distributed.world_size() > 1 else None

    def description(self) -> str:
        """How this run executes, in a few words."""
        several = f", {self.distribution()}" if self.distribution() else ""
        several += ", graphs for training" if self.args.use_hpu_graphs_for_training else ""
        return f"{distributed.world_size()} x {self.device.name}, {self.device.mode}, {self.precision.name}{several}"
