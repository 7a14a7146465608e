"""How many graphs were compiled, for programs to ask and in a file at the end.

``PT_HPU_METRICS_FILE`` names the file, ``PT_HPU_METRICS_FILE_FORMAT`` its format (json or text),
``PT_HPU_METRICS_DUMP_TRIGGERS`` when it is written: at process_exit, or only by the user's call of `metrics_dump`.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

from habana_frameworks import _lacking
from habana_frameworks._simulator import runtime

__getattr__ = _lacking.attribute(__name__)

NAME = "graph_compilation"
FORMATS = ("json", "text")
TRIGGERS = ("process_exit", "user")
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK")


class Metric:
    """The count of compiled graphs since the object was made, until it is stopped."""

    def __init__(self, start: int = 0) -> None:
        self._start = start
        self._stopped: int | None = None

    def stop(self) -> None:
        """Keep the count as it is now."""
        self._stopped = runtime.graph_compilations()

    def stats(self) -> list[tuple[str, float]]:
        """Return (name, value) pairs. The times are 0: the simulator compiles nothing that could be timed."""
        end = runtime.graph_compilations() if self._stopped is None else self._stopped
        return [("TotalNumber", end - self._start), ("TotalTime", 0), ("AvgTime", 0.0)]


def metric_global(name: str) -> Metric | None:
    """Return the count of the whole process for "graph_compilation", None for any other name."""
    return Metric() if name == NAME else None


@contextmanager
def metric_localcontext(name: str) -> Iterator[Metric | None]:
    """Count inside the block only."""
    metric = Metric(runtime.graph_compilations()) if name == NAME else None
    try:
        yield metric
    finally:
        if metric is not None:
            metric.stop()


def metrics_dump(file_name: str, format: str = "json", *, triggered_by: str = "user") -> None:
    """Write the global metrics into a file; with several processes, ``-rank<N>`` is added to its name.

    Raises:
        KeyError: the format is neither json nor text.
        FileNotFoundError: the name has no folder.
    """
    _check("format", format, FORMATS)
    path = _free_path(file_name)
    entry = {
        "metric_name": NAME,
        "triggered_by": triggered_by,
        "generated_on": datetime.now().isoformat(timespec="milliseconds"),
        "statistics": dict(Metric().stats()),
    }
    if format == "json":
        path.write_text(json.dumps([entry], indent=4) + "\n", encoding="utf-8")
        return
    lines = [f"Metric name: {NAME}", f"Triggered by: {triggered_by}", f"Generated on: {entry['generated_on']}"]
    lines += ["Statistics:", *(f"    {name}: {value}" for name, value in entry["statistics"].items())]
    path.write_text("\n".join(lines) + "\n\n", encoding="utf-8")


def start_file(environ: Mapping[str, str]) -> None:
    """Arrange for the file that the environment asks for.

    Raises:
        KeyError: a trigger or the format does not exist.
        FileNotFoundError: the file's name has no folder.
    """
    name = environ.get("PT_HPU_METRICS_FILE")
    triggers = environ.get("PT_HPU_METRICS_DUMP_TRIGGERS", "process_exit").split(",")
    format = environ.get("PT_HPU_METRICS_FILE_FORMAT", "json")
    for trigger in triggers:
        _check("PT_HPU_METRICS_DUMP_TRIGGERS", trigger, TRIGGERS)
    _check("PT_HPU_METRICS_FILE_FORMAT", format, FORMATS)
    if not name:
        return
    _folder(name)
    if "process_exit" in triggers:
        atexit.register(metrics_dump, name, format, triggered_by="process_exit")


def _check(what: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise KeyError(f"{what}: there is no {value!r}; there are {', '.join(known)}")


def _folder(name: str) -> None:
    if not os.path.dirname(name):
        raise FileNotFoundError(f"the metrics file {name!r} needs a folder in its name, as in './{name}'")
    os.makedirs(os.path.dirname(name), exist_ok=True)


def _free_path(name: str) -> Path:
    """Insert the rank, and add .1, .2, ... while a file of that name exists."""
    _folder(name)
    rank = next((os.environ[variable] for variable in RANK_VARIABLES if variable in os.environ), None)
    path = Path(name)
    if rank is not None:
        path = path.with_name(f"{path.stem}-rank{rank}{path.suffix}")
    found, number = path, 0
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}.{number}")
    return found
