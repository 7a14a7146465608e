"""What one process knows of its run, with or without training: device, precision, folder, evaluation, results."""

from __future__ import annotations

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

from core import (
    adapters,
    checkpoint,
    deepspeed_config,
    distributed,
    dropout,
    evaluation,
    graphs,
    locks,
    optimizers,
    preemption,
    results,
    state,
    strategies,
    tracking,
)
from core.device import select_device
from core.errors import UserError, is_main_process, say, warn_once
from core.files import by_product, write_file
from core.gaudi_config import GaudiConfig
from core.gradients import broadcast_buffers
from core.memory import MemoryTracker
from core.mixed_precision import effective_op_lists, resolve_precision
from core.strategies import Replicated
from core.throughput import Throughput
from core.tracking import banner
from core.zero import Zero, announce, keeps_groups


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
        self.deepspeed = deepspeed_config.of_run(args, distributed.world_size(), gaudi_config)
        self.precision = resolve_precision(args, gaudi_config, self.device, bool(self.deepspeed))
        self.autocast = self.precision.autocast
        self.op_lists = effective_op_lists(gaudi_config, self.device)
        for key, ops in self.op_lists.items():
            say(f"{key}: {' '.join(ops)}")
        tracking.check(args)
        results.check_published(args.run_file["published"], args.config)
        if args.resume_from_checkpoint and not args.do_train:
            warn_once("--resume_from_checkpoint goes on with training; to evaluate a checkpoint, name it as the model")
        checkpoint.check(args)
        if args.do_train and not self.deepspeed:
            # On one weight, so that a wrong option is said before a model of hours is loaded.
            weight = nn.Linear(1, 1).to(self.device.torch_device)
            optimizer = optimizers.create_optimizer(weight, args, gaudi_config, self.device)
            optimizers.create_schedule(optimizer, args, total_steps=1)
        if self.deepspeed and self.deepspeed["zero_optimization"]["stage"] == 3:
            self._announced = announce(args, self.deepspeed)
        args.output_dir = distributed.on_main(lambda: str(results.claim_output_dir(args, name)))
        self.output_dir, asked = Path(args.output_dir), args.resume_from_checkpoint if args.do_train else None
        distributed.on_main(lambda: locks.hold(self.output_dir) or "")
        found = distributed.on_main(lambda: str(checkpoint.find(asked, self.output_dir) or ""))
        self.resume_from = Path(found) if found else None
        self.seed(args.seed)
        self.device.set_dynamic_shapes(gaudi_config.use_dynamic_shapes)
        self.memory, self.ledger = MemoryTracker(self.device), graphs.ShapeLedger()
        self.metrics: dict[str, Any] = {}
        self.facts: dict[str, Any] = {}
        self._inference_model: nn.Module | None = None
        self._unsaved: UserError | None = None  # the model, with --on_save_error continue: the run's last word
        self._strategy: Replicated | Zero | None = None
        if not args.do_train:
            preemption.phase("it was not at its end")

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
        dropout.place(self.model, self.device)
        graphs.apply_mode(self.model, args, self.device)
        return self.model.train(args.do_train)

    def meter(self) -> Throughput:
        """A new meter of time for this run's device and precision."""
        precision = "bf16" if self.precision.name.startswith("bf16") else "fp32"
        return Throughput(self.device, self.args.throughput_warmup_steps, distributed.world_size(), precision=precision)

    def asked_to_end(self) -> bool:
        """Whether any rank got a signal to end; from then on all ranks know of it. All ask together."""
        asked, seconds = distributed.sum_over_ranks([float(preemption.asked()), preemption.seconds_since()])
        if asked:
            preemption.note(seconds / asked)
        return bool(asked)

    def end_if_asked(self, safe: str) -> None:
        """End the run if any rank got a signal; else from now on a signal ends it at once. All ranks call it.

        Raises:
            Preempted: so it is; ``safe`` tells what is done, and need not be done again.
        """
        self.asked_to_end()
        preemption.release(safe)

    def inference_model(self) -> nn.Module:
        """The model to evaluate: with recorded graphs if asked for, but not while training (they drop gradients)."""
        if self.model.training:
            return self.model
        if self._inference_model is None:
            self._inference_model = graphs.cache_inference_graphs(self.model, self.args, self.device)
        return self._inference_model

    evaluate = evaluation.evaluate

    def save_model(self, folder: Path, *companions: Any, part: str = "", override: Any = None) -> None:
        """Write weights, Gaudi configuration and what has ``save_pretrained`` (a tokenizer, a processor).

        Adapters are merged into the weights, which go to the folder ``part`` in it, and are in ``adapter/`` by
        themselves. ``override`` maps names of parameters to tensors, such as averages, that are written instead.

        Raises:
            UserError: a file cannot be written; all ranks raise it.
        """
        main = checkpoint.OnMain()
        self.write_model(main, folder, *companions, part=part, publish=override or {})
        try:
            main.agree(f"{folder}: the model cannot be written: {{}}")
        except UserError as error:
            if self.args.on_save_error == "stop":
                raise
            warn_once(f"--on_save_error continue: {error}")
            self._unsaved = error
        self.end_if_asked(str(self._unsaved or "the model is saved; evaluation was not at its end"))

    def write_model(self, main: Any, folder: Path, *others: Any, part: str = "", publish: Any = None) -> None:
        """The same through ``main``, which tells of a failure later; not to ``publish``: adapters alone. For all."""
        if self._strategy:
            broadcast_buffers(self.model)  # such as running statistics: rank 0's are what is saved
        adapted = adapters.has_adapters(self.model)
        only = adapters.names(self.model) if adapted and publish is None else None
        weights = self._strategy.weights(only) if self._strategy else None
        if weights is None and main.puts_off:
            named, buffers = dict(self.model.named_parameters()), dict(self.model.named_buffers()).keys()
            own = {name: named[name] for name in only} if adapted else self.model.state_dict()
            weights = state.copies(main, own, buffers)
        if publish:
            weights = state.with_others(self.model, weights, publish)
        if adapted:
            main.later(adapters.save, self.model, folder if publish is None else folder / "adapter", weights)
        if not adapted or publish is not None:
            plain = adapters.merged if adapted else lambda model, weights: weights

            def save() -> None:
                state.save_model(self.model, folder / part, plain(self.model, weights), publish is not None)

            main.later(save)
        for companion in (self.gaudi_config, *others):
            if hasattr(companion, "save_through"):  # it has tensors that training changes
                companion.save_through(main, folder)
            else:
                main(companion.save_pretrained, folder)

    def report(self, split: str, metrics: dict[str, Any], texts: Sequence[str] = ()) -> None:
        """Print a split's metrics and write them to ``<split>_results.json`` and ``all_results.json`` at once.

        Texts of the ``predict`` split go to ``generated_predictions.txt``, one a line.
        """
        if not metrics:
            return  # what an earlier process measured stays
        self.metrics |= metrics
        facts = {"name": self.device.name, "execution_mode": self.device.mode, "precision": self.precision.name}
        run = results.describe_run(self.args, facts | {"world_size": distributed.world_size()})
        run |= {"op_lists": self.op_lists, "batch_shapes": self.ledger.report()}
        run["peak_memory (GB)"] = self.memory.peaks()
        run["graphs_compiled"] = graphs.compile_count(self.device)
        self.facts = run
        say(f"\n{split}\n" + banner({f"  {name}": results.show(value) for name, value in metrics.items()}))

        def write() -> None:
            results.save_metrics(self.output_dir, split, metrics, run)
            if texts and split == "predict" and is_main_process():
                lines = "".join(" ".join(text.split()) + "\n" for text in texts)
                write_file(self.output_dir / "generated_predictions.txt", lines.encode("utf-8", "replace"))

        self.by_product(write)

    def by_product(self, write: Callable[[], None]) -> None:
        """Write files that the run can do without: see `files.by_product`. All ranks call it, and know of an error."""

        def work() -> None:
            with by_product(self.args.on_save_error):
                write()

        distributed.together(work)

    def finish(self) -> dict[str, Any]:
        """Print measured beside published figures, where the run file has any, and return all metrics."""
        preemption.over()  # all is written: no signal changes the exit code
        for line in results.compare_with_published(self.args.run_file["published"], self.metrics, self.facts):
            say(line)
        if (path := self.output_dir / "all_results.json").exists():
            say(f"\nall results: {path}")
        self.close()
        if self._unsaved:
            raise self._unsaved
        return self.metrics

    def close(self) -> None:
        """Leave the other ranks."""
        if self._strategy:
            self._strategy.close()
        locks.release(self.output_dir)
        if not keeps_groups():
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
