"""Each file of ``on_device``, in a process on the simulated device, in lazy and in eager mode."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from tests.hpu_simulator import simulator

FILES = sorted(Path(__file__).with_name("on_device").glob("test_*.py"))


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["lazy", "eager"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_on_device(path: Path, mode: str, tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "--no-header",
        "-n",
        "0",
        f"--junitxml={report}",
        f"--basetemp={tmp_path / 'inner'}",
    ]
    done = simulator.run("-m", "pytest", *options, path, mode=mode, timeout=600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ElementTree.parse(report).getroot().find("testsuite")
    assert int(suite.get("tests")) > int(suite.get("skipped")), "nothing ran"
