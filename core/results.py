"""``all_results.json``: metrics, what produced them, and measured beside published. Torch is not imported here."""

from __future__ import annotations

import math
import platform
import re
import shutil
import subprocess
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from core.errors import UserError, if_interrupted, is_main_process, make_folder, read_json_object, warn_once
from core.files import write_json

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("torch", "transformers", "diffusers", "accelerate", "datasets", "peft", "deepspeed", "habana-torch-plugin")
# What a run leaves in its folder, beside a pipeline and drawn images; nothing else is ever removed from it.
LEFTOVERS = (
    "checkpoint-*", ".checkpoint-*", "abandoned-checkpoint-*", "*_results.json", "generated_predictions.txt",
    "predictions.csv", "*_confusion_matrix.png", "*_mistakes.png", "validation_images/step-*.png", "model*.safetensors",
    "adapter/adapter_*", "adapter/pytorch_lora_weights.safetensors", "loss_curve.png", "logs", "profile",
    "nonfinite.jsonl",
)  # fmt: skip
AUTO = ("auto", "True", "true")  # --resume_from_checkpoint: from the newest checkpoint in --output_dir
GO_ON = "--resume_from_checkpoint auto goes on from the last checkpoint"
# Names whose values stay out of every file. A tokenizer's name and its special tokens are no secrets.
SECRET = re.compile(
    r"(?i)secret|passw|passphrase|credential|signature|(api|access|private|auth|ssh|account)[_-]?key"
    r"|(?<!bos_)(?<!eos_)(?<!pad_)token(?!iz)"
)
# The same within an address: who asks (scheme://user:password@host), and what a query says about it.
IN_ADDRESS = (
    (re.compile(r"(?<=://)[^/\s?#]+@"), ""),
    (
        re.compile(rf"([?&][^=&\s]*(?:{SECRET.pattern.replace('(?i)', '')}|\bsig)[^=&\s]*=)[^&\s#]+", re.I),
        r"\1(left out)",
    ),
)
# What a published figure says about itself; every other key is a flag with the value that the figure was made with.
ABOUT_FIGURE = (
    "metric", "value", "status", "source", "pass_rule", "historical", "note", "distribution",
    "device", "world_size", "batch_size", "model", "data", "precision", "execution",
)  # fmt: skip
# Flags that no run here follows, with what it does instead: a figure that was made with one is not comparable.
INSTEAD = {"fp8": "bf16", "fsdp": "ZeRO-3", "context_parallel_size": "whole sequences"}


def claim_output_dir(args: Namespace, name: str) -> Path:
    """Return the run's folder, made if it is not there; without ``--output_dir`` a new one per run.

    Raises:
        UserError: it is no folder, or holds another run that neither flag allows to go on or to replace.
    """
    if args.output_dir is None:
        runs = Path("runs") / name
        resumes = args.resume_from_checkpoint in AUTO and runs.is_dir()
        previous = [path for path in sorted(runs.iterdir()) if any(path.glob("checkpoint-*"))][-1:] if resumes else []
        folder = previous[0] if previous else runs / time.strftime("%Y-%m-%d_%H-%M-%S")
    else:
        folder = Path(args.output_dir)
    args.output_dir = str(folder)
    if_interrupted(_until_a_save(args, folder))
    starts = args.do_train and args.resume_from_checkpoint is None
    taken = leftovers(folder) if starts else []
    if starts and not taken and (folder / "model_index.json").exists():
        raise UserError(f"--output_dir: {folder} holds a pipeline that no run has left there; give another folder")
    if taken and not args.overwrite_output_dir:
        raise UserError(
            f"--output_dir: {folder} holds another run ({taken[0].name}); give another folder,"
            " --resume_from_checkpoint auto to go on, or --overwrite_output_dir to replace it"
        )
    return make_folder(folder, "--output_dir")


def _until_a_save(args: Namespace, folder: Path) -> str:
    """What to do after an interruption before this run's first checkpoint; from then on it is `GO_ON`."""
    asked = args.resume_from_checkpoint
    if not args.do_train:
        return ""
    if asked is None:
        return "nothing is saved yet: start it anew, with --overwrite_output_dir"
    if asked in AUTO and not any(folder.glob("checkpoint-*")):
        return "nothing is saved yet: start it again as it was"
    return GO_ON if asked in AUTO else f"--resume_from_checkpoint {asked} goes on from there again"


def leftovers(folder: Path) -> list[Path]:
    """What an earlier run has left in its folder. A pipeline or images without the signs of a run are the user's."""
    found = [path for pattern in LEFTOVERS for path in folder.glob(pattern)]
    for sheet in folder.glob("*images/**/contact_sheet.png"):
        found += [sheet, *sheet.parent.glob("[0-9]*.png"), *sheet.parent.glob("images.npy")]
    if found and (index := folder / "model_index.json").is_file():
        parts = read_json_object(index, "--output_dir")
        found += [index, *(path for path in folder.iterdir() if isinstance(parts.get(path.name), list))]
    return found


def clear_output_dir(folder: Path) -> None:
    """Remove an earlier run's results, and nothing else: when the new run is about to write, not before."""
    for path in leftovers(folder):
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def check_published(published: Sequence[Any], file: str | None) -> None:
    """Refuse a run file's figures that could not be compared after hours of training.

    Raises:
        UserError: an entry is no object with a metric's name, a number, and texts that say where it was measured.
    """
    for entry in published:
        texts = ("metric", "device", "model", "data", "precision", "execution", "status")
        sound = isinstance(entry, Mapping) and isinstance(entry.get("metric"), str)
        sound = sound and isinstance(entry.get("value"), (int, float)) and not isinstance(entry["value"], bool)
        if not sound or any(not isinstance(entry[k], str) or not entry[k].strip() for k in texts if k in entry):
            raise UserError(
                f"--config: {file}: 'published' needs objects with metric, value, device, ...; not {entry!r}"
            )


def save_metrics(output_dir: str | Path, split: str, metrics: Mapping, run: Mapping | None = None) -> None:
    """Merge a split's metrics into ``all_results.json``, and write ``<split>_results.json``, on the main process.

    The second comes last: a run that was killed and finds it need not report the split again. JSON has no NaN and no
    infinity: such a value becomes null, and the file's ``notes`` say what it was.

    Args:
        output_dir: made if it is missing.
        split: ``train``, ``eval`` or ``predict``, which is also the prefix of the metrics' names.
        run: of `describe_run`, kept under ``run``; None keeps the one that the file has.

    Raises:
        UserError: the folder cannot be written to.
    """
    if not is_main_process():
        return
    plain = _plain(metrics, "", notes := {})
    for name, note in notes.items():
        warn_once(f"{split}_results.json: {name} {note}; the file says null")
    path = Path(output_dir) / "all_results.json"
    try:
        merged = read_json_object(path, "all_results.json") if path.exists() else {}
    except UserError as error:  # a finished run must not lose its metrics to an old, broken file
        warn_once(f"{error}; it is written anew")
        merged = {}
    own = plain | ({"notes": dict(notes)} if notes else {})
    notes |= {name: note for name, note in merged.pop("notes", {}).items() if name not in plain}
    merged |= plain | ({"notes": notes} if notes else {})
    write_json(path, merged | ({"run": _plain(run, "", {})} if run is not None else {}))
    write_json(Path(output_dir) / f"{split}_results.json", own)
    for rest in Path(output_dir).glob(".*_results.json.*"):  # of a run that was killed while it wrote
        rest.unlink(missing_ok=True)


def _plain(value: Any, name: str, notes: dict[str, str]) -> Any:
    """Turn ``value`` into what JSON holds; ``notes`` gets the name of every number that it cannot hold."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}".lstrip("."), notes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{name}[{position}]", notes) for position, item in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        notes[name] = f"was {value}"
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


def describe_run(args: Namespace, device: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what is needed to repeat a run and to judge its numbers: flags, versions, commit, device, time.

    Args:
        args: resolved flags; values of secrets, and the run file's own text, are left out.
        device: facts of the device: ``name``, ``execution_mode``, ``precision``, ``world_size``.
    """
    return {
        "arguments": _without_secrets({name: value for name, value in vars(args).items() if name != "run_file"}),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        "commit": _commit(),
        "device": dict(device or {}),
        "machine": platform.platform(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime()),
    }


def _without_secrets(content: Any, name: str = "") -> Any:
    if isinstance(content, Mapping):
        return {key: _without_secrets(value, str(key)) for key, value in content.items()}
    if isinstance(content, (list, tuple)) and not SECRET.search(name):
        return [_without_secrets(item) for item in content]
    if content is None or isinstance(content, (int, float)):  # a number of tokens is no secret
        return content
    if isinstance(content, (str, Path)) and "://" in str(content):
        for pattern, instead in IN_ADDRESS:
            content = pattern.sub(instead, str(content))
    return "(left out)" if SECRET.search(name) else content


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of this project, with ``-dirty`` if files differ from it; None outside a checkout."""
    if not (ROOT / ".git").exists():  # an installed copy may lie within somebody else's repository
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def compare_with_published(published: Sequence[Mapping], metrics: Mapping, run: Mapping) -> list[str]:
    """Return the lines of a table that sets measured beside published figures; none without published figures.

    A ratio (measured / published) is only shown where device, world size, batch, model, data, precision, execution
    mode and the figure's own flags agree; elsewhere the line says what differs.

    Args:
        published: of a run file; ``metrics`` are those of `save_metrics`.
        run: of `describe_run`, or a flat mapping of the same facts.
    """
    rows = [("metric", "measured", "published", "ratio", "published on", "note")] if published else []
    for figure in published:
        measured, value = metrics.get(figure["metric"]), figure["value"]
        reasons = differences(figure, run)
        comparable = not reasons and all(isinstance(n, (int, float)) and math.isfinite(n) for n in (measured, value))
        ratio = f"{measured / value:.3f}" if comparable and value else "n/a"
        notes = ["reported elsewhere", "historical" if figure.get("historical") else ""]
        notes += [f"not comparable: {', '.join(reasons)}" if reasons else figure.get("pass_rule", "")]
        where, note = f"{figure.get('world_size')} x {figure.get('device')}", "; ".join(filter(None, notes))
        rows.append((figure["metric"], _number(measured), _number(value), ratio, where, note))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def differences(figure: Mapping, run: Mapping) -> list[str]:
    """Return what keeps ``run`` from being compared with a published figure, each as ``name: this, not that``."""
    device = run["device"] if isinstance(run.get("device"), Mapping) else {"name": run.get("device")}
    facts = {"world_size": 1, **run.get("arguments", {}), **run, **device, "device": device.get("name")}
    prefix = figure["metric"].partition("_")[0]
    phase = prefix if prefix in ("train", "predict", "generate") else "eval"  # perplexity has no prefix
    trains = phase in ("train", "eval") and facts.get("do_train", True)
    batch = "batch_size" if phase == "generate" else f"per_device_{'train' if trains else 'eval'}_batch_size"
    data = next(filter(None, map(facts.get, ("dataset_name", "train_file", "train_dir"))), "this machine's own")
    here = {
        "device": str(facts["device"]),
        "world_size": facts["world_size"],
        "batch_size": facts.get(batch),
        "model": facts.get("model_name_or_path") or _from_scratch(facts) or "built here",
        "data": f"{data} {facts.get('dataset_config_name') or ''}".strip(),
        "precision": facts.get("precision") or ("bf16" if facts.get("bf16") else "fp32"),
        "execution": facts.get("execution_mode", "unknown"),
    }
    # A figure that names no limit was measured without one.
    limits = ("max_steps", "max_train_samples", f"max_{phase}_samples") if trains else (f"max_{phase}_samples",)
    flags = dict.fromkeys(limits) | {name: value for name, value in figure.items() if name not in ABOUT_FIGURE}
    there = {name: figure[name] for name in here if name in figure} | flags
    here |= {name: INSTEAD.get(name, facts.get(name)) for name in flags}
    return [f"{name}: {here[name]}, not {there[name]}" for name in there if not _agree(name, here[name], there[name])]


def _from_scratch(facts: Mapping) -> str:
    """Name a model of new weights by its published configuration; its changes make it another model."""
    named = [facts.get("config_name"), facts.get("config_overrides"), "(from scratch)"]
    return " ".join(filter(None, named)) if named[0] else ""


def _agree(name: str, here: Any, there: Any) -> bool:
    if name == "device":  # "NVIDIA A100-SXM4-80GB" is a100-80g; the first generation calls itself gaudi
        parts = {"gaudi1" if p == "gaudi" else p for p in re.findall(r"[a-z0-9]+", here.lower().replace("gb", "g"))}
        return parts >= set(re.findall(r"[a-z0-9]+", there))
    if name in ("model", "data"):  # the hub has put owners before some names since; a figure may not say a version
        words, wanted = (text.rpartition("/")[2].lower().split() for text in (here, there))
        return (words if name == "model" else words[: len(wanted)]) == wanted
    if name in ("precision", "execution"):
        return here.split()[0] == there.split()[0]
    return (None if here == -1 else here) == there


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, (int, float)) and math.isfinite(value) else str(value or "n/a")


def show(value: Any) -> str:
    """Write a metric for the terminal: six digits, n/a for None, nested values in one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {show(item)}" for name, item in value.items()) or "none"
    return _number(value) if isinstance(value, (int, float, type(None))) else str(value)
