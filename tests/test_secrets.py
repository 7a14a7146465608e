"""Tokens and passwords, of flags, run files and the environment, are in no file that a run writes and in no line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from core import errors
from tests.conftest import write_jsonl

SECRETS = {
    name: f"Mark{number}OfASecret{number}"
    for number, name in enumerate(
        "HF_TOKEN HUGGING_FACE_HUB_TOKEN WANDB_API_KEY AWS_SECRET_ACCESS_KEY GITHUB_TOKEN HABANA_PASSWORD "
        "COMET_API_KEY MY_CREDENTIALS --token run_file address".split(),
        start=10,
    )
}
ADDRESS = f"http://user:{SECRETS['address']}@127.0.0.1:9/data"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SECRETS.items():
        if name.isupper():
            monkeypatch.setenv(name, value)
    for name in ("http_proxy", "https_proxy"):
        monkeypatch.setenv(name, ADDRESS)


def told(content: bytes) -> list[str]:
    """The secrets in it."""
    return [name for name, value in SECRETS.items() if value.encode() in content]


def files_with_secrets(folder: Path) -> list[str]:
    found = [(path, told(path.read_bytes())) for path in folder.rglob("*") if path.is_file()]
    assert found
    return [f"{path}: {names}" for path, names in found if names]


def run_file(folder: Path, **arguments: object) -> str:
    path = folder / "run.json"
    path.write_text(json.dumps({"args": arguments}))
    return str(path)


def test_the_search_finds(tmp_path):
    (tmp_path / "x").write_bytes(b"\0..." + SECRETS["HF_TOKEN"].encode() + b"\0")
    assert "HF_TOKEN" in files_with_secrets(tmp_path)[0]


def test_a_training_leaves_no_secret(image_classification, tiny_vit, picture_folders, tmp_path, capfd):
    config = run_file(tmp_path, token=SECRETS["run_file"], logging_steps=1)
    named = ["--config", config, "--model_name_or_path", str(tiny_vit), "--token", SECRETS["--token"]]
    data = [word for item in picture_folders.items() for word in item]
    work = "--do_train --do_eval --do_predict --max_steps 2 --save_steps 1 --report_to tensorboard --use_cpu".split()
    folder = tmp_path / "out"
    image_classification.main([*named, *data, *work, "--output_dir", str(folder), "--run_name", "name"])
    names = {path.name for path in folder.rglob("*")}
    assert {"README.md", "all_results.json", "checkpoint-2", "metrics.csv", "hyperparameters.json"} <= names
    assert any(name.startswith("events.out") for name in names)
    assert json.loads((folder / "all_results.json").read_text())["run"]["arguments"]["token"] == "(left out)"
    assert not files_with_secrets(folder)
    shown = capfd.readouterr()
    assert not told(f"{shown.out}{shown.err}".encode())


def test_a_token_of_the_run_file_alone_is_left_out(summarization, tiny_t5, pair_files, tmp_path, capfd):
    config = run_file(tmp_path, token=SECRETS["run_file"], do_eval=True, use_cpu=True, report_to="none")
    named = ["--config", config, "--model_name_or_path", str(tiny_t5), "--validation_file"]
    lengths = ["--max_source_length", "32", "--max_target_length", "12", "--output_dir", str(tmp_path / "out")]
    summarization.main([*named, pair_files["--validation_file"], *lengths])
    assert not files_with_secrets(tmp_path / "out")
    assert not told("".join(capfd.readouterr()).encode())


FAILING = {
    "unknown flag": ["--tokn", SECRETS["--token"]],
    "unknown flag, joined": [f"--tokn={SECRETS['--token']}"],
    "no such model": ["--model_name_or_path", "nobody/none", "--token", SECRETS["--token"]],
    "no such data": ["--dataset_name", "nobody/none", "--token", SECRETS["--token"]],
    "an address as data": ["--dataset_name", ADDRESS],
    "an address as a model": ["--model_name_or_path", ADDRESS],
    "an address as a file": ["--train_file", f"{ADDRESS}.jsonl"],
    "an address as a run file": ["--config", ADDRESS],
    "an address as a number": ["--seed", ADDRESS],
    "an address as a checkpoint": ["--resume_from_checkpoint", ADDRESS],
}


@pytest.mark.parametrize("case", FAILING)
def test_a_start_that_fails_tells_no_secret(case, summarization, pair_files, tmp_path, capfd):
    data = [] if "data" in case or "file" in case else [word for item in pair_files.items() for word in item]
    flags = [*FAILING[case], *data, "--do_train", "--use_cpu", "--report_to", "none"]
    fails(lambda: summarization.main([*flags, "--output_dir", str(tmp_path / "out")]), capfd)


@pytest.mark.parametrize(
    "arguments",
    [
        {"token": {"x": SECRETS["run_file"]}},
        {"token": ["--seed", SECRETS["run_file"]]},
        {"token": [SECRETS["run_file"], "--seed"]},
        {"tokn": SECRETS["run_file"]},
        {"seed": "x", "token": SECRETS["run_file"]},
    ],
)
def test_a_run_file_that_is_wrong_tells_no_secret(arguments, summarization, tmp_path, capfd):
    fails(lambda: summarization.main(["--config", run_file(tmp_path, **arguments)]), capfd)


@pytest.mark.parametrize("text", ['{"args": {"token": "%s"', '{"args": {"token": %s}}', '{"args": "%s"}', '["%s"]'])
def test_a_run_file_that_cannot_be_read_tells_no_secret(text, summarization, tmp_path, capfd):
    (tmp_path / "run.json").write_text(text % SECRETS["run_file"])
    fails(lambda: summarization.main(["--config", str(tmp_path / "run.json")]), capfd)


def test_a_hub_that_does_not_answer_tells_no_secret(summarization, tmp_path, capfd, monkeypatch, caplog):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", ADDRESS)
    for name in ("http_proxy", "https_proxy", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name)
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": "a", "summary": "b"}])
    flags = ["--model_name_or_path", "nobody/none", "--do_eval", "--validation_file", str(rows), "--use_cpu"]
    fails(lambda: summarization.main([*flags, "--output_dir", str(tmp_path / "out")]), capfd)
    assert "127.0.0.1:9/data does not answer" in caplog.text
    assert not told(caplog.text.encode())


def fails(start, capfd) -> None:
    """A start ends with one line and code 2; nothing that it has shown is a secret."""
    with pytest.raises(SystemExit) as stop:
        errors.exit_with_one_line(start)
    assert stop.value.code == 2
    shown = "".join(capfd.readouterr())
    assert "error: " in shown
    assert not told(shown.encode())
