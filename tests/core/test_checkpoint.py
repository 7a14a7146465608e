"""Complete or absent: killed in the middle, full disk, altered files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from core import checkpoint
from core.checkpoint import OnMain
from core.errors import UserError
from tests.core.saved import save

REPOSITORY = Path(__file__).resolve().parents[2]


def write_two(main: OnMain, folder: Path) -> None:
    main(_write_two, folder)


def _write_two(folder: Path) -> None:
    (folder / "a.txt").write_text("first")
    (folder / "sub").mkdir()
    (folder / "sub" / "b.txt").write_text("second")


def put(name: str, text: str = "1") -> Callable[[OnMain, Path], None]:
    """What writes one file of a checkpoint."""
    return lambda main, folder: main((folder / name).write_text, text)


def test_a_saved_checkpoint_is_found_and_sound(tmp_path: Path) -> None:
    folder = save(tmp_path, 7, write_two)
    assert folder == tmp_path / "checkpoint-7"
    assert checkpoint.problem(folder) is None
    assert checkpoint.find("auto", tmp_path) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-7"]


@pytest.mark.parametrize("damage", ["truncate", "alter", "remove", "marker"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = save(tmp_path, 5, write_two), save(tmp_path, 10, write_two)
    victim = bad / (checkpoint.MARKER if damage == "marker" else "sub/b.txt")
    if damage == "truncate":
        victim.write_text("sec")
    elif damage == "alter":
        victim.write_text("sEcond")
    else:
        victim.unlink()
    assert checkpoint.find("auto", tmp_path) == good
    assert victim.name in caplog.text
    with pytest.raises(UserError, match=victim.name.replace(".", r"\.")):
        checkpoint.find(str(bad), tmp_path)


def test_newest_is_by_number_not_by_name_or_age(tmp_path: Path) -> None:
    for step in (100, 9, 20):
        save(tmp_path, step, write_two)
    (tmp_path / "checkpoint-best").mkdir()
    assert checkpoint.find("auto", tmp_path).name == "checkpoint-100"
    assert checkpoint.find(str(tmp_path), tmp_path / "elsewhere").name == "checkpoint-100"


def test_nothing_to_resume_starts_anew_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checkpoint.find("auto", tmp_path) is None
    assert "starts at the beginning" in capsys.readouterr().out
    assert checkpoint.find(None, tmp_path) is None
    with pytest.raises(UserError, match="no folder"):
        checkpoint.find(str(tmp_path / "absent"), tmp_path)


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 3, write_two)
    folder = save(tmp_path, 3, put("c.txt"))
    assert sorted(path.name for path in folder.iterdir()) == ["c.txt", checkpoint.MARKER]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]


def _raise(error: Exception) -> None:
    raise error


def test_an_error_while_writing_leaves_the_earlier_ones_and_no_rest(tmp_path: Path) -> None:
    save(tmp_path, 1, write_two)

    def fail(main: OnMain, folder: Path) -> None:
        write_two(main, folder)
        main(_raise, OSError("no space"))
        main(_raise, AssertionError("nothing is called after what failed"))

    with pytest.raises(UserError, match="checkpoint-2 cannot be written: no space; earlier"):
        save(tmp_path, 2, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]


def test_a_bug_while_writing_is_raised_as_it_is_and_leaves_no_rest(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="a bug"):
        save(tmp_path, 2, lambda main, folder: main(_raise, KeyError("a bug")))
    assert not list(tmp_path.iterdir())


def test_a_process_killed_while_writing_leaves_no_half_checkpoint(tmp_path: Path) -> None:
    """A real process, stopped by a real SIGKILL at each of three places: after a file, before the marker, after it."""
    script = textwrap.dedent("""
        import os, signal, sys
        from pathlib import Path
        sys.path.insert(0, sys.argv[3])
        from core import checkpoint
        from tests.core.saved import save
        place, output = sys.argv[1], Path(sys.argv[2])
        def write_one(main, folder):
            (folder / "a").write_text("1")
        save(output, 1, write_one)
        def write(main, folder):
            (folder / "a").write_text("1")
            if place == "file":
                os.kill(os.getpid(), signal.SIGKILL)
        synced = checkpoint._sync
        def sync(path):
            synced(path)
            if place == "sync" or (place == "marker" and path.name == checkpoint.MARKER):
                os.kill(os.getpid(), signal.SIGKILL)
        checkpoint._sync = sync
        save(output, 2, write)
    """)
    for place in ("file", "sync", "marker"):
        output = tmp_path / place
        if place == "sync":  # its first checkpoint must stand before the signal can come
            save(output, 1, put("a"))
        done = subprocess.run([sys.executable, "-c", script, place, str(output), str(REPOSITORY)], check=False)
        assert done.returncode == -signal.SIGKILL
        if checkpoint.all_steps(output):
            assert checkpoint.find("auto", output).name == "checkpoint-1"
        assert not (output / "checkpoint-2").exists()
        save(output, 2, put("a", "2"))  # what was left is no obstacle
        assert checkpoint.find("auto", output).name == "checkpoint-2"


def test_a_replacement_killed_between_its_two_renames_is_undone(tmp_path: Path) -> None:
    folder = save(tmp_path, 5, write_two)
    folder.rename(tmp_path / ".checkpoint-5.old")  # what a kill leaves there
    assert checkpoint.find("auto", tmp_path) == folder
    assert checkpoint.problem(folder) is None


def test_checkpoints_of_another_branch_are_set_aside(tmp_path: Path) -> None:
    for step in (2, 4, 6):
        save(tmp_path, step, write_two)
    checkpoint.set_aside(tmp_path, 2)
    save(tmp_path, 4, write_two)
    checkpoint.set_aside(tmp_path, 2)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["abandoned-checkpoint-4", "abandoned-checkpoint-4.1", "abandoned-checkpoint-6", "checkpoint-2"]
    assert checkpoint.find("auto", tmp_path).name == "checkpoint-2"


def test_a_linked_checkpoint_is_pruned_as_a_link(tmp_path: Path) -> None:
    real = save(tmp_path / "elsewhere", 1, write_two)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoint-1").symlink_to(real)
    save(tmp_path / "run", 2, write_two)
    checkpoint.prune(tmp_path / "run", 1)
    assert real.is_dir()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["checkpoint-2"]


def test_limit_keeps_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save(tmp_path, step, write_two)
    checkpoint.prune(tmp_path, 3, keep="checkpoint-2")
    assert [step for step, _ in checkpoint.all_steps(tmp_path)] == [5, 4, 2]
    checkpoint.prune(tmp_path, 1, keep="checkpoint-2")
    assert [step for step, _ in checkpoint.all_steps(tmp_path)] == [5, 2]
    checkpoint.prune(tmp_path, None)
    assert [step for step, _ in checkpoint.all_steps(tmp_path)] == [5, 2]


def test_a_file_that_somebody_else_put_there_is_not_the_checkpoints(tmp_path: Path) -> None:
    folder = save(tmp_path, 1, write_two)
    (folder / "c.txt").write_text("mine")
    assert [checkpoint.lists(folder / name) for name in ("a.txt", "c.txt", "absent")] == [True, False, False]
    assert checkpoint.problem(folder) is None
    (folder / checkpoint.MARKER).write_text('{"files": null}')
    assert not checkpoint.lists(folder / "a.txt")
    (folder / checkpoint.MARKER).unlink()
    assert checkpoint.lists(folder / "a.txt")


@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_tensors_are_as_readable_as_the_other_files(tmp_path: Path, umask: int) -> None:
    """safetensors makes files that their owner alone may read."""
    before = os.umask(umask)
    try:
        folder = save(tmp_path, 1, lambda main, folder: main(save_file, {"a": torch.ones(2)}, folder / "a.safetensors"))
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}
    assert modes == {"a.safetensors": 0o666 & ~umask, checkpoint.MARKER: 0o666 & ~umask}


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
def test_a_full_disk_in_the_middle_of_a_save_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """A real file system of 1 MB."""
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"no mount here: {mounted.stderr.decode().strip()}")
    try:
        save(tmp_path, 1, write_two)
        with pytest.raises(UserError, match="No space"):
            save(tmp_path, 2, put("big", "0" * 2_000_000))
        assert checkpoint.find("auto", tmp_path).name == "checkpoint-1"
        assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-1"]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)
