"""Freed memory stays with a process that trains on its host, and goes back to the system afterwards."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from core import host_memory
from tests.conftest import REPOSITORY

PROGRAM = """
import json
import resource
import sys
from types import SimpleNamespace
from core import host_memory


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for size in (40, 65, 90):
        bytearray(b"1") * (size * 2**20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096 / 2**20


kept = host_memory.keep(SimpleNamespace(queues_work=sys.argv[1] == "card"))
first, second, held = faults(), faults(), resident()
host_memory.release()
print(json.dumps({"kept": kept, "first": first, "second": second, "held": held, "after": resident()}))
"""


def run(kind: str, **environment: str) -> dict[str, float]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MALLOC_", "GLIBC_"))}
    command = [sys.executable, "-c", PROGRAM, kind]
    done = subprocess.run(
        command, cwd=REPOSITORY, env={**clean, **environment}, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)


pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's own")


def test_what_was_freed_is_used_again_and_goes_back_at_the_end() -> None:
    found = run("host")
    assert found["kept"]
    assert found["second"] < 0.05 * found["first"], found
    assert found["held"] > 90, found
    assert found["after"] < found["held"] - 60, found


def test_by_default_it_does_not_stay() -> None:
    """What the other test guards: else the C library would do it by itself."""
    found = run("card")
    assert not found["kept"]
    assert found["held"] < 60, found


@pytest.mark.parametrize(
    "environment", [{"MALLOC_TRIM_THRESHOLD_": "100000"}, {"GLIBC_TUNABLES": "glibc.malloc.mmap_max=10"}]
)
def test_who_tunes_the_library_decides(environment: dict[str, str]) -> None:
    assert not run("host", **environment)["kept"]


def test_another_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda name: SimpleNamespace())
    monkeypatch.setattr(host_memory, "_is_tuned", lambda: False)
    assert not host_memory.keep(SimpleNamespace(queues_work=False))
    host_memory.release()
