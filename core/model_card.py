"""``README.md`` of a trained model's folder, in the hub's format: what it is, how good, how to load and repeat it."""

from __future__ import annotations

import html
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from core.arguments import SHARED_GROUPS
from core.errors import UserError, is_main_process, warn_once
from core.files import write_file
from core.pages import one_line
from core.results import SECRET, show

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData

MARKER = (
    "<!-- Written by a training run; the next one into this folder writes it anew. Remove this line to keep it. -->"
)
MOST_LABELS = 200  # in the card; config.json has them all
INDEXED = ("accuracy", "f1", "precision", "recall", "perplexity", "wer")  # metrics that the hub knows by these names
# Where a run lies and whether it goes on says nothing about the model.
PLACES = (
    "config", "output_dir", "overwrite_output_dir", "logging_dir", "resume_from_checkpoint", "cache_dir", "run_name",
    "local_rank",
)  # fmt: skip


def write_model_card(
    folder: str | Path,
    *,
    task: str,
    metrics: Mapping[str, Any],
    facts: Mapping[str, Any],
    groups: Sequence[type] = (),
    labels: Sequence[str] | None = None,
    usage: str = "",
    model: str = "a new model",
    data: str = "data that is not on the hub",
    pictures: Sequence[str] = (),
    library: str = "transformers",
) -> Path | None:
    """Write the model card on the main process. A ``README.md`` that no run wrote is kept, with a warning.

    The YAML head names a model and data set only by their ids on the hub. Secrets and where files lie on this machine
    do not get into the card, which may be published.

    Args:
        folder: of the trained model, made if it is missing.
        task: the hub's pipeline tag.
        metrics: by names as in ``all_results.json``: ``eval_accuracy``, ``train_loss``, ...
        facts: of `core.results.describe_run`; whatever is missing is not mentioned.
        groups: the recipe's own argument dataclasses. Flags of these and the shared ones that are not at their defaults
            are shown, as a run file.
        labels: the classes' names in the order of their numbers, any text.
        usage: Python code that loads the model.
        model, data: how to call them where no flag names them.
        pictures: files in ``folder`` to show below the metrics; those that are not there are left out.
        library: the hub's name of the library that loads the model.

    Returns:
        The card's path, or None if none is written.

    Raises:
        UserError: the file cannot be read or written.
    """
    if not is_main_process():
        return None
    path = Path(folder) / "README.md"
    if _is_foreign(path):
        warn_once(f"{path} is not a training run's: it is kept, and no model card is written")
        return None
    args = facts.get("arguments", {})
    base, dataset = _hub_id(args.get("model_name_or_path")), _hub_id(args.get("dataset_name"))
    name = one_line(path.parent.resolve().name, 100) or task
    head = _head(name, task, library, base, dataset, metrics, args)
    model = _link(base, "") or _folder(args.get("model_name_or_path")) or model
    data = _link(dataset, "datasets/") or _folder(args.get("dataset_name")) or data
    shown = [f"![{file}]({file})" for file in pictures if (Path(folder) / file).is_file()]
    sections = [
        f"---\n{head.to_yaml()}\n---\n\n# {_plain(name)}\n\n{MARKER}",
        f"For {_plain(task)}: {model}, trained on {data}.",
        "## Metrics",
        _table(("metric", "value"), _shown(metrics)),
        *shown,
        *(["## How to load it", f"```python\n{usage.strip()}\n```"] if usage else []),
        *_training(facts, [*groups, *SHARED_GROUPS]),
        *(_classes(labels) if labels is not None else []),
    ]
    write_file(path, ("\n\n".join(sections) + "\n").encode("utf-8", "replace"))
    return path


def _is_foreign(path: Path) -> bool:
    try:
        return path.exists() and MARKER not in path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give another --output_dir") from None


def _shown(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What the model can do before how fast it learned it; what is not known is left out."""
    first = [name for name in metrics if name.endswith((*INDEXED, "loss"))]
    known = [name for name in dict.fromkeys([*first, *metrics]) if metrics[name] is not None]
    return [(name, show(_number(metrics[name]))) for name in known]


def _head(
    name: str,
    task: str,
    library: str,
    base: str | None,
    dataset: str | None,
    metrics: Mapping[str, Any],
    args: Mapping[str, Any],
) -> ModelCardData:
    """The card's metadata. Its results are those on all rows of the hub's data sets, which others can measure, too."""
    from huggingface_hub import EvalResult, ModelCardData

    results = []
    for phase, rows in (("eval", "validation"), ("predict", "test")) if dataset else ():
        found = {metric: _number(metrics.get(f"{phase}_{metric}")) for metric in INDEXED}
        limited = args.get(f"max_{phase}_samples") is not None
        about = {"dataset_type": dataset, "dataset_name": dataset, "dataset_config": args.get("dataset_config_name")}
        results += [
            EvalResult(task, metric_type=metric, metric_value=value, metric_name=f"{metric} ({rows})", **about)
            for metric, value in found.items()
            if not limited and isinstance(value, (int, float)) and math.isfinite(value)
        ]
    listed = {metric: None for metric in INDEXED if any(key.endswith(f"_{metric}") for key in metrics)}
    return ModelCardData(
        base_model=base,
        datasets=[dataset] if dataset else None,
        library_name=library,
        pipeline_tag=task,
        metrics=list(listed) or None,
        **({"model_name": name, "eval_results": results} if results else {}),
    )


def _training(facts: Mapping[str, Any], groups: Sequence[type]) -> list[str]:
    """How it was trained: the device, the versions, and the flags as a run file."""
    device, versions = facts.get("device", {}), facts.get("versions", {})
    words = [device.get("name") and f"{device.get('world_size', 1)} x {device['name']}"]
    words += [device.get("execution_mode"), device.get("precision"), facts.get("date")]
    words += [facts.get("commit") and f"commit {facts['commit']}"]
    words += [f"{package} {version}" for package, version in versions.items() if version]
    flags = _flags(facts.get("arguments", {}), groups)
    run_file = json.dumps({"args": flags}, indent=2, ensure_ascii=False, default=str)
    sections = ["## Training", ", ".join(_plain(word) for word in words if word)]
    if flags:
        sections += [
            "The flags that were not at their defaults, as a run file (`--config`):",
            f"```json\n{run_file}\n```",
        ]
    return [section for section in sections if section]


def _flags(args: Mapping[str, Any], groups: Sequence[type]) -> dict[str, Any]:
    """The flags that differ from their defaults; secrets and places left out, absolute paths cut to their last part."""
    declared = {field.name: field for group in groups for field in fields(group)}
    flags = {}
    for name in sorted(declared.keys() & args.keys()):
        field, value = declared[name], args[name]
        default = field.default if field.default_factory is MISSING else field.default_factory()
        secret = SECRET.search(name) and not isinstance(value, (int, float))  # a number of tokens is none
        if value != default and value is not None and name not in PLACES and not secret:
            flags[name] = [_last_part(item) for item in value] if isinstance(value, list) else _last_part(value)
    return flags


def _last_part(value: Any) -> Any:
    """An absolute path's last part: the rest is about a machine and its user."""
    is_path = isinstance(value, (str, Path)) and re.match(r"[/~]|\\\\|[A-Za-z]:[/\\]", str(value))
    return re.split(r"[/\\]", str(value).rstrip("/\\"))[-1] if is_path else value


def _hub_id(name: Any) -> str | None:
    """``name`` if it can be the hub's and is no path here."""
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(name or "/")
    except HFValidationError:
        return None
    return None if os.path.exists(name) else name


def _link(name: str | None, kind: str) -> str:
    return f"[{_plain(name)}](https://huggingface.co/{kind}{name})" if name else ""


def _folder(name: Any) -> str:
    return f"the local folder {_plain(_last_part(os.path.abspath(name)))}" if name else ""


def _classes(labels: Sequence[str]) -> list[str]:
    rows = [(str(number), one_line(label, 100)) for number, label in enumerate(labels[:MOST_LABELS])]
    more = len(labels) - len(rows)
    rest = [f"... and {more:,} more, in `config.json`."] if more > 0 else []
    return ["## Classes", f"{len(labels):,} in all.", _table(("number", "class"), rows), *rest]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plain(text: Any) -> str:
    """``text`` in one line of at most 200 characters, so that Markdown shows it as it is."""
    shown = html.escape(one_line(text, 200), quote=False)
    return re.sub(r"([\\`*\[\]|~$]|(?<![^\W_])_|_(?![^\W_]))", r"\\\1", shown)


def _number(value: Any) -> Any:
    """A number of numpy or torch as Python's own."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
