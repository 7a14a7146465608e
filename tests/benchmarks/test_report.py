"""The tables say what the JSON says, no more; the README's is the one that its report makes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks import __main__ as command
from benchmarks import machine, report
from benchmarks.contests import Contest, Impossible, Measured, Row, Settings


def made(settings: Settings) -> Measured:
    assert settings.folder.is_dir()
    values = {"ours": [30.0] * settings.rounds, "slow": [10.0] * settings.rounds, "fast": [31.0] * settings.rounds}
    return Measured(values, {"precision": "bf16", "rows": 640}, [5e9] * settings.rounds)


def impossible(settings: Settings) -> Measured:
    raise Impossible("the peer needs what is not here")


def broken(settings: Settings) -> Measured:
    raise RuntimeError("the side ended")


ROWS = [Row("training", "slow", "the slow one", 2.7), Row("training", "fast", "the fast one", 1.2)]
HELD = [
    Contest("training", "samples/s", ROWS, made),
    Contest("loading", "images/s", [], impossible),
    Contest("elsewhere", "images/s", [], broken, devices=("accelerator",)),
]


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "contests", lambda: HELD)
    monkeypatch.setattr(machine, "SIDE", 64)
    monkeypatch.setattr(machine, "devices", lambda: {"cpu": "Some CPU"})


@pytest.mark.usefixtures("quick")
def test_one_command_measures_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert command.main(["--rounds", "3", "--only", "training", "loading", "--output_dir", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["ratio"] for row in found["rows"]] == [3, 30 / 31]
    assert [row["reached"] for row in found["rows"]] == [True, False]
    assert {row["device"] for row in found["rows"]} == {"Some CPU"}
    assert found["mfu"][0]["mfu"] == 5e9 / found["matmul"]["Some CPU"]["bf16"]
    assert found["missing"] == [{"contest": "loading", "device": "Some CPU", "why": "the peer needs what is not here"}]
    assert found["failed"] == []
    assert found["measured"][0]["facts"]["rows"] == 640
    assert re.fullmatch(r"[0-9a-f]{40}(-dirty)?", found["commit"])
    assert found["machine"]["cores"] >= 1
    assert found["versions"]["torch"].startswith("2.")
    shown = capsys.readouterr().out
    assert re.search(r"training +the slow one +30\.0 samples/s +10\.0 samples/s +3\.00 \(3\.00 to 3\.00\)", shown)
    assert "at least 1.2  **no**" in shown
    assert "loading: not measured: the peer needs what is not here" in shown


@pytest.mark.usefixtures("quick")
def test_a_contest_that_fails_is_said_and_the_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(machine, "devices", lambda: {"cpu": "Some CPU", "accelerator": "Some GPU"})
    monkeypatch.setattr(machine, "matmul_rates", lambda device: {"fp32": 1e12, "bf16": 2e12})
    assert command.main(["--rounds", "2", "--only", "training", "elsewhere", "--output_dir", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "report.json").read_text())
    assert [row["device"] for row in found["rows"]] == ["Some CPU"] * 2 + ["Some GPU"] * 2
    assert found["failed"] == [{"contest": "elsewhere", "device": "Some GPU", "why": "the side ended"}]
    assert "elsewhere: FAILED: the side ended" in capsys.readouterr().err


def test_the_readme_gets_the_table_between_its_marks(tmp_path: Path) -> None:
    row = {"contest": "a_b", "device": "Some CPU", "what": "training", "peer": "P", "unit": "s", "ours": 0.5}
    row |= {"theirs": 123.4, "ratio": 0.004, "quartiles": [0.003, 0.006], "target": 1, "at_most": True, "reached": True}
    facts = {"date": "2027-01-02T03:04:05+00:00", "commit": "c" * 40, "rounds": 5, "versions": {"torch": "2.13.0"}}
    facts |= {"machine": {"cores": 2, "processor": "Some CPU"}, "matmul": {"Some CPU": {"fp32": 2.5e11}}}
    mfu = [{"contest": "a_b", "device": "Some CPU", "mfu": 0.25}]
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write_into(readme, facts | {"rows": [row], "mfu": mfu, "missing": []}, "benchmarks/x.json")
    text = readme.read_text()
    assert text.startswith(f"before\n\n{report.BEGIN}\n| what | beside |")
    assert text.endswith(f"{report.END}\nafter\n")
    assert "old" not in text
    assert "| training | P | 0.500 s | 123 s | 0.00 (0.00 to 0.01) | at most 1 | yes |" in text
    assert "250 GFLOP/s in fp32. Training uses of it: a b 25%." in text
    assert "2027-01-02, commit cccccccccc" in text
    readme.write_text("no marks\n")
    with pytest.raises(ValueError, match="has no lines"):
        report.write_into(readme, facts | {"rows": [], "mfu": [], "missing": []}, "x")
