"""Log records in ``metrics.csv``: whole at any time, and one that cannot be written does not spoil the next."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker

from core.errors import UserError
from core.files import not_written, write_file

CSV_NAME, CONFIGURATION = "metrics.csv", "hyperparameters.json"
LONGEST = 100_000  # characters of a line; Python's csv takes 131,072 in a field


def read_csv(path: Path) -> list[dict[str, str]]:
    """Read the whole rows of a log file that `CSVTracker` wrote; a last line without an end is not one.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}; give another --logging_dir") from None
    lines = [f"{line}\n" for line in text.split("\n")[:-1] if "\0" not in line and len(line) < LONGEST]
    rows = [row for row in csv.DictReader(lines) if None not in row and None not in row.values()]  # cut, or glued
    return [row for row in rows if re.fullmatch("[0-9]{1,18}", row.get("step", ""))]


class CSVTracker(GeneralTracker):
    """One row per log record in ``metrics.csv``. A column that appears later is added to the earlier rows, empty.

    A record is written whole or not at all, and the next one is tried again.

    Args:
        run_name: not used; accelerate gives it to every tracker.
        logging_dir: folder of the file.
        start_step: rows of later steps are dropped, the others kept: those steps run again. 0 drops all.

    Raises:
        UserError: the file cannot be read or written.
    """

    name = "csv"
    requires_logging_directory = True

    def __init__(self, run_name: str, logging_dir: str | os.PathLike, start_step: int = 0) -> None:
        super().__init__()
        self.path = Path(logging_dir, CSV_NAME)
        kept = [row for row in read_csv(self.path) if 0 < start_step >= int(row["step"])]
        self._write(kept, list(kept[0]) if kept else ["step"])
        for rest in (path for name in (CSV_NAME, CONFIGURATION) for path in self.path.parent.glob(f".{name}.*")):
            rest.unlink(missing_ok=True)  # of a run that was killed while it wrote

    @property
    def tracker(self) -> Path:
        return self.path

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        write_file(self.path.with_name(CONFIGURATION), text.encode("utf-8", "replace"), "--logging_dir")

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        row = {"step": step, **values}
        new = [key for key in row if key not in self.columns]
        if new or not self.path.exists():
            self._write([*read_csv(self.path), row], [*self.columns, *new])
            return
        csv.DictWriter(line := io.StringIO(), self.columns, lineterminator="\n").writerow(row)
        try:
            self._append(line.getvalue().encode("utf-8", "replace"))
        except OSError as error:
            raise not_written(self.path, error, "--logging_dir") from None

    def _append(self, line: bytes) -> None:
        with open(self.path, "ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[file.write(line) :]  # a disk that gets full takes a part
            except OSError:
                file.truncate(end)  # else the next record would be glued to this one's beginning
                raise

    def _write(self, rows: list[dict[str, Any]], columns: list[str]) -> None:
        writer = csv.DictWriter(text := io.StringIO(), columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_file(self.path, text.getvalue().encode("utf-8", "replace"), "--logging_dir")
        self.columns = columns
