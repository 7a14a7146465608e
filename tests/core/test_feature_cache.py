"""Arrays on disk: computed once in batches of one shape, complete or absent, shared out over real processes."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest

from core import errors
from core.errors import UserError
from core.feature_cache import MARKER, StoredArray, cached, open_array
from tests.conftest import REPOSITORY
from tests.core.ranks import results, start_ranks

COUNT, BATCH = 11, 4
SQUARES = np.arange(COUNT) ** 2


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(errors, "_warned", set())


class Compute:
    """Squares, and three numbers in half precision, of each row; remembers for which rows it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[int]] = []

    def __call__(self, rows: list[int]) -> dict[str, np.ndarray]:
        self.asked.append(rows)
        numbers = np.array(rows)
        return {"squares": numbers**2, "latents": np.stack([numbers] * 3, axis=1).astype(np.float16)}


def make(
    folder: Path, key: str = "model and data", count: int = COUNT
) -> tuple[dict[str, np.ndarray], list[list[int]]]:
    compute = Compute()
    return cached(folder, "toy", key, count, compute, BATCH), compute.asked


def only(folder: Path) -> Path:
    (found,) = folder.iterdir()
    return found


def test_rows_are_computed_once_in_batches_of_one_size(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, asked = make(tmp_path / "new")
    assert asked == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 10]]
    again, asked = make(tmp_path / "new")
    assert asked == []
    for arrays in (found, again):
        assert arrays.keys() == {"squares", "latents"}
        assert np.array_equal(arrays["squares"], SQUARES)
        assert np.array_equal(arrays["latents"], np.stack([np.arange(COUNT)] * 3, axis=1))
        assert arrays["latents"].dtype == np.float16
        assert not any(array.flags.writeable for array in arrays.values())
    kept = only(tmp_path / "new")
    assert {path.name for path in kept.iterdir()} == {"squares.npy", "latents.npy", MARKER}
    assert np.array_equal(np.load(kept / "squares.npy", allow_pickle=False), SQUARES)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"{kept}: 11 rows, 0.0 MB, computed now and kept"
    assert second == f"{kept}: 11 rows, 0.0 MB, kept from before"


def test_another_key_has_arrays_of_its_own(tmp_path: Path) -> None:
    make(tmp_path)
    assert make(tmp_path, "another model")[1] != []
    assert len(list(tmp_path.iterdir())) == 2
    assert make(tmp_path)[1] == []


def truncated(folder: Path) -> None:
    os.truncate(folder / "latents.npy", (folder / "latents.npy").stat().st_size - 1)


def other_header(folder: Path) -> None:
    content = (folder / "latents.npy").read_bytes()
    (folder / "latents.npy").write_bytes(content.replace(b"(11, 3)", b"(3, 11)"))


def no_numbers(folder: Path) -> None:
    (folder / "latents.npy").write_bytes(b"x" * (folder / "latents.npy").stat().st_size)


def objects(folder: Path) -> None:
    content = (folder / "latents.npy").read_bytes()
    (folder / "latents.npy").write_bytes(content.replace(b"'<f2'", b"'|O' "))


DAMAGE = {
    "truncated": (truncated, "latents.npy was truncated or altered"),
    "other lengths": (other_header, "has arrays of other lengths than 11"),
    "no array": (no_numbers, "cannot be read"),
    "objects": (objects, "cannot be read"),
    "a file less": (lambda folder: (folder / "squares.npy").unlink(), "cannot be read"),
    "no marker": (lambda folder: (folder / MARKER).unlink(), "cannot be read"),
    "no JSON": (lambda folder: (folder / MARKER).write_text("{"), "cannot be read"),
    "another marker": (lambda folder: (folder / MARKER).write_text("{}"), "has None rows of another key"),
    "no files": (
        lambda folder: (folder / MARKER).write_text('{"key": "model and data", "count": 11, "bytes": 3}'),
        "cannot be read",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_what_is_damaged_is_computed_anew_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture, case: str) -> None:
    damage, message = DAMAGE[case]
    make(tmp_path)
    damage(only(tmp_path))
    found, asked = make(tmp_path)
    assert len(asked) == 3
    assert np.array_equal(found["squares"], SQUARES)
    assert len(caplog.messages) == 1
    assert message in caplog.text
    assert "it is computed anew" in caplog.text
    assert make(tmp_path)[1] == []


def test_other_rows_under_the_same_key_are_computed_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make(tmp_path)
    assert len(make(tmp_path, count=3)[0]["squares"]) == 3
    assert "has 11 rows of another key, not 3; it is computed anew" in caplog.text


def test_an_array_travels_to_other_processes_as_its_files_name(tmp_path: Path) -> None:
    array = make(tmp_path, count=1000)[0]["latents"]
    for of, whole in ((array, True), (array[3:5], False), (array[3], False), (array[3:900][1:2], False)):
        sent = bytes(ForkingPickler.dumps(of))  # as a worker that is not forked gets it
        assert isinstance(ForkingPickler.loads(sent), StoredArray) == whole
        assert np.array_equal(ForkingPickler.loads(sent), of)
        assert len(sent) < 400


def test_whoever_is_faster_wins(tmp_path: Path) -> None:
    """Another run may complete the same folder meanwhile; its files are in use, and stay."""
    inner: list[os.stat_result] = []

    def compute(rows: list[int]) -> dict[str, np.ndarray]:
        if not inner:
            inner.append(os.stat(make(tmp_path)[0]["squares"].filename))
        return Compute()(rows)

    found = cached(tmp_path, "toy", "model and data", COUNT, compute, BATCH)
    assert os.path.samestat(inner[0], os.stat(found["squares"].filename))
    assert np.array_equal(found["squares"], SQUARES)
    assert only(tmp_path)


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), RuntimeError("no")])
def test_nothing_half_written_is_left(tmp_path: Path, error: BaseException) -> None:
    def compute(rows: list[int]) -> dict[str, np.ndarray]:
        if rows[0]:
            raise error
        return Compute()(rows)

    with pytest.raises(type(error)):
        cached(tmp_path, "toy", "key", COUNT, compute, BATCH)
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.core.test_feature_cache import BATCH, COUNT, Compute, cached
def compute(rows):
    if rows[0] == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    return Compute()(rows)
cached(Path(sys.argv[1]), "toy", "model and data", COUNT, compute, BATCH)
"""


@pytest.mark.processes
def test_what_a_killed_run_leaves_the_next_one_removes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    assert subprocess.run(command, cwd=REPOSITORY, capture_output=True).returncode == -signal.SIGKILL
    assert only(tmp_path).name.startswith(".toy-")
    make(tmp_path, "another model")
    assert len(list(tmp_path.iterdir())) == 2  # that one's key is another
    found, asked = make(tmp_path)
    assert len(asked) == 3
    assert np.array_equal(found["squares"], SQUARES)
    assert not list(tmp_path.glob(".*"))


def test_a_running_ones_work_is_left_alone(tmp_path: Path) -> None:
    make(tmp_path)
    kept = only(tmp_path)
    own, mine = (tmp_path / f".{kept.name}.{os.uname().nodename}-{pid}.tmp" for pid in (os.getppid(), "x"))
    own.mkdir()
    mine.mkdir()
    truncated(kept)
    make(tmp_path)
    assert set(tmp_path.iterdir()) == {kept, own}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 1 MB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small file system needs root")
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)]
    if (done := subprocess.run(command, capture_output=True)).returncode:
        pytest.skip(f"no mount here: {done.stderr.decode().strip()}")
    yield tmp_path
    subprocess.run(["umount", str(tmp_path)], check=True)


def megabytes(rows: list[int]) -> dict[str, np.ndarray]:
    return {"latents": np.ones((len(rows), 50_000), np.float32)}


def test_a_disk_that_is_too_small_is_said_before_the_work(small_disk: Path) -> None:
    with pytest.raises(UserError, match=r"needs 2\.2 MB, and 1\.0 MB are free; make room for it"):
        cached(small_disk, "toy", "key", COUNT, megabytes, BATCH)
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_fills_up_meanwhile_is_one_line(small_disk: Path) -> None:
    def compute(rows: list[int]) -> dict[str, np.ndarray]:
        if rows[0] == 2:
            (small_disk / "another").write_bytes(b"x" * 500_000)
        return megabytes(rows)

    with pytest.raises(UserError, match="cannot be written: No space left on device; make room"):
        cached(small_disk, "toy", "key", 4, compute, 1)
    assert [path.name for path in small_disk.iterdir()] == ["another"]


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written: Not a directory; make room or give another folder"):
        make(tmp_path / "file" / "below")
    limit, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limit[1]))
    try:
        with pytest.raises(UserError, match="cannot be written: File too large"):
            cached(tmp_path / "new", "toy", "key", COUNT, megabytes, 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_file_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    with path.open("wb") as file:
        np.lib.format.write_array(file, np.zeros(3), version=(3, 0))
    with pytest.raises(ValueError, match="version"):
        open_array(path)


@pytest.mark.processes
def test_two_ranks_share_the_rows_out_and_an_error_of_one_ends_both(tmp_path: Path) -> None:
    folders = [str(tmp_path / name) for name in ("failing", "shared")]
    (failed, first), (failed_too, second) = results(start_ranks(2, "features", *folders))
    assert failed["said"] == "rank 1: row 4 cannot be computed"
    assert failed_too["said"] == "row 4 cannot be computed"
    assert list((tmp_path / "failing").iterdir() if (tmp_path / "failing").exists() else []) == []
    assert (first["asked"], second["asked"]) == ([[0, 1, 2, 3], [8, 9, 10, 10]], [[4, 5, 6, 7]])
    assert first["squares"] == second["squares"] == SQUARES.tolist()
    assert first["latents"] == second["latents"] == np.repeat(np.arange(COUNT)[:, None], 3, 1).tolist()
    assert make(tmp_path / "shared", "key")[1] == []
    assert only(tmp_path / "shared")


OTHER = ["unshare", "--uts", "sh", "-c", 'hostname other && exec "$0" "$@"']


@pytest.mark.processes
@pytest.mark.skipif(subprocess.run([*OTHER, "true"], capture_output=True).returncode != 0, reason="needs unshare")
def test_each_machine_has_all_rows(tmp_path: Path) -> None:
    """Two hosts: with a folder that they share; with one each; with one each, the first of which is full already."""
    make(tmp_path / "0" / "full", "key")
    folders = [str(tmp_path / name) for name in ("shared", "RANK/own", "RANK/full")]
    both = results(start_ranks(2, "features", *folders, prefixes=[[], OTHER]))
    assert [[len(one["asked"]) for one in found] for found in both] == [[3, 3, 0], [3, 3, 3]]
    assert all(one["squares"] == SQUARES.tolist() for found in both for one in found)
    for name in ("shared", "0/own", "1/own", "0/full", "1/full"):
        assert only(tmp_path / name).name.startswith("toy-")
