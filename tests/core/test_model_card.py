"""Model cards: a head that the hub's library reads, a body that shows every text as it is, and nothing private."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from dataclasses import dataclass, fields

import numpy as np
import pytest
import yaml
from huggingface_hub import ModelCard

from core import errors
from core.arguments import SHARED_GROUPS, flag, parse_arguments
from core.errors import UserError
from core.hub import HubArguments
from core.model_card import MARKER, MOST_LABELS, PLACES, write_model_card
from core.results import describe_run

HOSTILE = [
    "a\n---\nb", '"quoted": yes', "a: b", "- item", "# head", "a|b", "<script>alert(1)</script>", "`code`", "*bold*",
    "_under_ a_b", "[link](http://x)", "$math$", "\\", "\udcff", "", "x" * 500, "猫", "{{ jinja }}", "~~~", "&amp;",
]  # fmt: skip


@dataclass
class ToyArguments:
    model_name_or_path: str | None = flag(None, "a model")
    dataset_name: str | None = flag(None, "data")
    dataset_config_name: str | None = flag(None, "its configuration")
    train_dir: str | None = flag(None, "a folder")
    image_size: int = flag(224, "pixels")
    prompts: list[str] = flag(["a"], "texts", nargs="+")
    token: str | None = flag(None, "access token")
    max_new_tokens: int = flag(20, "a number")


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())


def parsed(*flags: str) -> Namespace:
    return parse_arguments(["--do_train", *flags], ToyArguments, description="")


def facts(*flags: str) -> dict:
    device = {"name": "gaudi2", "execution_mode": "lazy", "precision": "bf16", "world_size": 8}
    return describe_run(parsed(*flags), device)


def write(folder, *flags: str, **changes) -> str:
    """Write a card and return its text."""
    options = {"task": "image-classification", "metrics": {"eval_accuracy": 0.9}, "groups": [ToyArguments]}
    path = write_model_card(folder, **(options | {"facts": facts(*flags)} | changes))
    assert path == folder / "README.md"
    return path.read_text(encoding="utf-8")


def head(folder) -> dict:
    """The card's YAML, read by the hub's library and by a plain parser."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    plain = yaml.safe_load(text.split("\n---\n")[0].removeprefix("---\n"))
    assert ModelCard.load(folder / "README.md").data.to_dict() == plain
    return plain


def rows(text: str, title: str) -> list[list[str]]:
    """Cells of the table below a heading."""
    lines = [
        line for line in text.partition(f"\n## {title}\n")[2].partition("\n## ")[0].splitlines() if line[:1] == "|"
    ]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines[2:]]


def run_file(text: str) -> dict:
    return json.loads(re.search(r"```json\n(.*?)\n```", text, re.DOTALL)[1])


# ------------------------------------------------------------------------------------------------------------- head


def test_the_head_names_model_and_data_of_the_hub_with_their_results(tmp_path):
    flags = ("--model_name_or_path", "google/some-model", "--dataset_name", "uoft-cs/cifar10")
    metrics = {"train_loss": 0.1, "eval_accuracy": np.float32(0.5), "eval_samples": 7, "predict_accuracy": 0.25}
    text = write(tmp_path / "my run", *flags, "--dataset_config_name", "plain", metrics=metrics)
    data = {"name": "uoft-cs/cifar10", "type": "uoft-cs/cifar10", "config": "plain"}
    found = [
        {"type": "accuracy", "value": 0.5, "name": "accuracy (validation)"},
        {"type": "accuracy", "value": 0.25, "name": "accuracy (test)"},
    ]
    assert head(tmp_path / "my run") == {
        "base_model": "google/some-model",
        "datasets": ["uoft-cs/cifar10"],
        "library_name": "transformers",
        "pipeline_tag": "image-classification",
        "metrics": ["accuracy"],
        "model-index": [
            {
                "name": "my run",
                "results": [{"task": {"type": "image-classification"}, "dataset": data, "metrics": found}],
            }
        ],
    }
    assert "[google/some-model](https://huggingface.co/google/some-model), trained on [uoft-cs/cifar10](" in text
    assert "https://huggingface.co/datasets/uoft-cs/cifar10)" in text


def test_results_on_some_of_the_rows_are_not_those_of_the_data_set(tmp_path):
    flags = ("--dataset_name", "mnist", "--max_eval_samples", "10")
    write(tmp_path, *flags, metrics={"eval_accuracy": 0.5, "predict_f1": 0.25})
    ((result,),) = [index["results"] for index in head(tmp_path)["model-index"]]
    assert [metric["name"] for metric in result["metrics"]] == ["f1 (test)"]


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), "text"])
def test_what_is_no_number_is_no_result(tmp_path, value):
    text = write(tmp_path, "--dataset_name", "mnist", metrics={"eval_accuracy": value})
    assert "model-index" not in head(tmp_path)
    assert rows(text, "Metrics") == ([] if value is None else [["eval_accuracy", str(value)]])


def test_local_models_and_data_are_not_those_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "alice" / "pets").mkdir(parents=True)
    flags = ("--model_name_or_path", str(tmp_path / "alice"), "--dataset_name", "alice/pets")
    text = write(tmp_path / "run", *flags, "--train_dir", str(tmp_path / "alice" / "pets"))
    assert head(tmp_path / "run").keys() == {"library_name", "pipeline_tag", "metrics"}
    assert "the local folder alice, trained on the local folder pets." in text
    assert str(tmp_path) not in text
    assert run_file(text)["args"] == {
        "do_train": True, "model_name_or_path": "alice", "dataset_name": "alice/pets", "train_dir": "pets"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["/gone/model", "../model", "a/b/c", "~/model", "models/", "a\n---\nb", "", None])
def test_what_cannot_be_an_id_is_none(tmp_path, name):
    write(tmp_path, facts={"arguments": {"model_name_or_path": name, "dataset_name": name}})
    assert not {"base_model", "datasets", "model-index"} & head(tmp_path).keys()


def test_without_names_the_recipe_says_what_it_is(tmp_path):
    text = write(tmp_path, model="a small model", data="8x8 pictures of digits")
    assert "For image-classification: a small model, trained on 8x8 pictures of digits." in text


# ------------------------------------------------------------------------------------------------------------- body


def test_hostile_texts_break_neither_head_nor_tables(tmp_path):
    folder = tmp_path / "run: - #x\n---\n'\"_|"
    metrics = {f"eval_{text}": 0.5 for text in HOSTILE} | {"eval_accuracy": 1.0}
    flags = ("--dataset_name", "mnist", "--dataset_config_name", "a: b\n---\n'\"|")
    text = write(folder, *flags, "--prompts", *HOSTILE, labels=HOSTILE, metrics=metrics)
    index = head(folder)["model-index"][0]
    assert index["name"] == "run: - #x --- '\"_|"
    assert index["results"][0]["dataset"]["config"] == "a: b\n---\n'\"|"
    assert [row[0] for row in rows(text, "Classes")] == [str(number) for number in range(len(HOSTILE))]
    assert len(rows(text, "Metrics")) == len(metrics)
    assert all(len(row) == 2 for row in rows(text, "Classes") + rows(text, "Metrics"))
    assert text.count("\n---\n") == 1
    assert [line for line in text.splitlines() if line.startswith("#")] == [
        "# run: - #x --- '\"\\_\\|", "## Metrics", "## Training", "## Classes"
    ]  # fmt: skip


def test_markdown_shows_the_names_themselves(tmp_path):
    names = ["a|b", "<b>", "_under_ a_b", "*bold*", "`code`", "[link](x)", "\\", "&amp;", "two\nlines", "x" * 500]
    shown = [
        r"a\|b", "&lt;b&gt;", r"\_under\_ a_b", r"\*bold\*", r"\`code\`", r"\[link\](x)", "\\\\", "&amp;amp;",
        "two lines", "x" * 99 + "…",
    ]  # fmt: skip
    assert [row[1] for row in rows(write(tmp_path, labels=names), "Classes")] == shown


@pytest.mark.parametrize("classes", [0, 2, 10, MOST_LABELS, 1000])
def test_classes_are_listed_up_to_a_number_and_counted_beyond(tmp_path, classes):
    text = write(tmp_path, labels=[f"class {number}" for number in range(classes)])
    listed = [[str(number), f"class {number}"] for number in range(min(classes, MOST_LABELS))]
    assert rows(text, "Classes") == listed
    assert f"\n{classes:,} in all.\n" in text
    assert ("... and 800 more, in `config.json`." in text) == (classes == 1000)
    assert ("more, in" in text) == (classes == 1000)


def test_a_model_without_classes_has_no_such_section(tmp_path):
    assert "## Classes" not in write(tmp_path)


def test_metrics_have_six_digits(tmp_path):
    metrics = {"eval_loss": 1 / 3, "eval_samples": 1000, "eval_accuracy": np.float64(0.5), "per_class": {"cat": 0.25}}
    found = [["eval_loss", "0.333333"], ["eval_accuracy", "0.5"], ["eval_samples", "1000"], ["per_class", "cat 0.25"]]
    assert rows(write(tmp_path, metrics=metrics), "Metrics") == found, "what it can do comes first"


def test_how_it_was_trained(tmp_path):
    about = facts()
    text = write(tmp_path, facts=about)
    assert f"\n8 x gaudi2, lazy, bf16, {about['date']}, commit {about['commit']}, python 3." in text
    assert f"torch {about['versions']['torch']}" in text
    assert "habana" not in text, "what is not installed has no version"


def test_nothing_is_made_up(tmp_path):
    text = write(tmp_path, facts={}, metrics={})
    assert text.endswith("| metric | value |\n| --- | --- |\n\n## Training\n")


def test_code_and_pictures_that_are_there(tmp_path):
    (tmp_path / "confusion_matrix.png").touch()
    code = "from transformers import pipeline\n\nclassify = pipeline(model='.')\n"
    text = write(tmp_path, usage=code, pictures=["confusion_matrix.png", "gone.png"])
    assert "\n```python\nfrom transformers import pipeline\n\nclassify = pipeline(model='.')\n```\n" in text
    assert "\n![confusion_matrix.png](confusion_matrix.png)\n" in text
    assert "gone" not in text


# ------------------------------------------------------------------------------------------------------------ flags


def test_flags_that_differ_from_their_defaults_are_a_run_file(tmp_path):
    flags = (
        "--seed", "7", "--image_size", "32", "--prompts", "猫", '"b" ```', "--learning_rate", "5e-5", "--max_steps", "3"
    )  # fmt: skip
    text = write(tmp_path, *flags)
    expected = {"do_train": True, "seed": 7, "image_size": 32, "prompts": ["猫", '"b" ```'], "max_steps": 3}
    assert run_file(text) == {"args": expected}
    (tmp_path / "again.json").write_text(json.dumps(run_file(text)), encoding="utf-8")
    again = parse_arguments(["--config", str(tmp_path / "again.json")], ToyArguments, description="")
    differing = {name for name, value in vars(again).items() if value != vars(parsed(*flags))[name]}
    assert differing == {"config", "run_file"}


def test_secrets_and_places_stay_out(tmp_path):
    secret, place = "hf_topsecret", str(tmp_path / "home" / "alice")
    flags = ("--token", secret, "--output_dir", place, "--logging_dir", place, "--max_new_tokens", "30")
    arguments = vars(parsed(*flags)) | {"api_key": secret}
    text = write(tmp_path, facts={"arguments": arguments})
    assert secret not in text
    assert "alice" not in text
    assert run_file(text)["args"] == {"do_train": True, "max_new_tokens": 30}


@pytest.mark.parametrize("path", ["/home/alice/a.csv", "~/a.csv", r"C:\alice\a.csv", r"\\host\alice\a.csv"])
def test_of_absolute_paths_the_last_part_is_shown(tmp_path, path):
    assert run_file(write(tmp_path, facts={"arguments": {"train_dir": path}}))["args"] == {"train_dir": "a.csv"}
    assert run_file(write(tmp_path, facts={"arguments": {"prompts": [path, "x"]}}))["args"] == {
        "prompts": ["a.csv", "x"]
    }


def test_places_are_flags():
    assert {*PLACES} <= {field.name for group in (*SHARED_GROUPS, HubArguments) for field in fields(group)}


# ------------------------------------------------------------------------------------------------------------ files


def test_a_card_of_a_run_is_written_anew(tmp_path):
    assert MARKER in write(tmp_path, metrics={"eval_accuracy": 0.1})
    assert rows(write(tmp_path, metrics={"eval_accuracy": 0.2}), "Metrics") == [["eval_accuracy", "0.2"]]
    assert [path.name for path in tmp_path.iterdir()] == ["README.md"]


@pytest.mark.parametrize("edit", [lambda card: card.replace(MARKER, ""), lambda card: "my own \udcff"])
def test_a_readme_of_somebody_else_is_kept(tmp_path, caplog, edit):
    own = edit(write(tmp_path)).encode("utf-8", "surrogateescape")
    (tmp_path / "README.md").write_bytes(own)
    assert write_model_card(tmp_path, task="image-classification", metrics={}, facts={}) is None
    assert (tmp_path / "README.md").read_bytes() == own
    (message,) = caplog.messages
    assert message == f"{tmp_path / 'README.md'} is not a training run's: it is kept, and no model card is written"


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(UserError, match=r"taken/README\.md cannot be written"):
        write_model_card(tmp_path / "taken", task="image-classification", metrics={}, facts={})
    (tmp_path / "README.md").mkdir()
    with pytest.raises(UserError, match=r"README\.md cannot be read"):
        write_model_card(tmp_path, task="image-classification", metrics={}, facts={})


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert write_model_card(tmp_path / "run", task="image-classification", metrics={}, facts={}) is None
    assert list(tmp_path.iterdir()) == []
