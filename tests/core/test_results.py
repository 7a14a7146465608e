"""Result files that hold, and measured beside published figures that claim nothing."""

from __future__ import annotations

import json
import math
import os
import re
from argparse import Namespace

import numpy as np
import pytest

from core import errors, results
from core.arguments import SUBSTITUTES, parse_arguments
from core.errors import UserError
from core.results import INSTEAD, compare_with_published, describe_run, save_metrics
from tests.core.saved import save


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())


def read(folder, name: str) -> dict:
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads((folder / name).read_text(encoding="utf-8"), parse_constant=refuse)


# ------------------------------------------------------------------------------------------------------------ files


def test_splits_have_their_own_file_and_are_merged(tmp_path):
    save_metrics(tmp_path / "new" / "folder", "train", {"train_loss": 1.5, "train_samples_per_second": None})
    save_metrics(tmp_path / "new" / "folder", "eval", {"eval_rouge1": 40.25, "eval_samples": 7}, run={"commit": "abc"})
    save_metrics(tmp_path / "new" / "folder", "train", {"train_loss": 1.25})
    folder = tmp_path / "new" / "folder"
    assert read(folder, "train_results.json") == {"train_loss": 1.25}
    assert read(folder, "eval_results.json") == {"eval_rouge1": 40.25, "eval_samples": 7}
    assert read(folder, "all_results.json") == {
        "train_loss": 1.25,
        "train_samples_per_second": None,
        "eval_rouge1": 40.25,
        "eval_samples": 7,
        "run": {"commit": "abc"},
    }
    assert sorted(os.listdir(folder)) == ["all_results.json", "eval_results.json", "train_results.json"]


def test_other_ranks_write_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    save_metrics(tmp_path, "train", {"train_loss": 1.0})
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, np.float32("nan")])
def test_what_json_does_not_have_is_null_and_noted(tmp_path, caplog, value):
    save_metrics(tmp_path, "eval", {"eval_loss": value, "eval_samples": 3})
    expected = {"eval_loss": None, "eval_samples": 3, "notes": {"eval_loss": f"was {float(value)}"}}
    assert read(tmp_path, "eval_results.json") == read(tmp_path, "all_results.json") == expected
    assert caplog.messages == [f"eval_results.json: eval_loss was {float(value)}; the file says null"]


def test_a_note_goes_when_its_number_is_measured_and_others_stay(tmp_path):
    save_metrics(tmp_path, "train", {"train_loss": math.nan})
    save_metrics(tmp_path, "eval", {"eval_loss": math.inf})
    assert read(tmp_path, "all_results.json")["notes"] == {"train_loss": "was nan", "eval_loss": "was inf"}
    save_metrics(tmp_path, "eval", {"eval_loss": 2.0})
    assert read(tmp_path, "all_results.json")["notes"] == {"train_loss": "was nan"}
    save_metrics(tmp_path, "train", {"train_loss": 2.0})
    assert "notes" not in read(tmp_path, "all_results.json")


def test_numbers_of_numpy_lists_and_nested_metrics(tmp_path):
    metrics = {"a": np.float64(0.5), "b": np.arange(2), "c": {"d": math.nan, "e": (1, math.inf)}, "f": tmp_path}
    save_metrics(tmp_path, "eval", metrics)
    found = read(tmp_path, "eval_results.json")
    assert found.pop("notes") == {"c.d": "was nan", "c.e[1]": "was inf"}
    assert found == {"a": 0.5, "b": [0, 1], "c": {"d": None, "e": [1, None]}, "f": str(tmp_path)}


@pytest.mark.parametrize("content", ["{", "[1]", ""])
def test_an_old_broken_file_does_not_cost_the_new_metrics(tmp_path, content, caplog):
    (tmp_path / "all_results.json").write_text(content)
    save_metrics(tmp_path, "eval", {"eval_loss": 1.0})
    assert read(tmp_path, "all_results.json") == {"eval_loss": 1.0}
    assert "it is written anew" in caplog.text


def test_the_splits_own_file_is_the_last_one(tmp_path):
    """Where it is, the other has the metrics, too."""
    (tmp_path / "all_results.json").mkdir()
    with pytest.raises(UserError, match=r"all_results\.json cannot be written"):
        save_metrics(tmp_path, "train", {"train_loss": 1.0})
    assert os.listdir(tmp_path) == ["all_results.json"]


def test_what_a_killed_run_was_writing_is_removed(tmp_path):
    for name in (".all_results.json.1234", ".eval_results.json.77"):
        (tmp_path / name).write_text("{")
    save_metrics(tmp_path, "train", {"train_loss": 1.0})
    assert sorted(os.listdir(tmp_path)) == ["all_results.json", "train_results.json"]


def test_a_file_in_the_folders_place_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--output_dir"):
        save_metrics(tmp_path / "file", "eval", {})


# -------------------------------------------------------------------------------------------------------------- run


def test_a_run_is_described_so_that_it_can_be_repeated(tmp_path):
    args = parse_arguments(["--seed", "7", "--bf16", "--do_train"], description="")
    run = describe_run(args, {"name": "gaudi2", "execution_mode": "lazy", "world_size": 1})
    assert run["arguments"] == {name: value for name, value in vars(args).items() if name != "run_file"}
    assert run["device"] == {"name": "gaudi2", "execution_mode": "lazy", "world_size": 1}
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", run["date"])
    assert set(run["versions"]) == {"python", *results.PACKAGES}
    assert re.match(r"\d+\.\d+", run["versions"]["torch"])
    save_metrics(tmp_path, "train", {}, run=run)
    assert read(tmp_path, "all_results.json")["run"] == run


def test_absent_packages_have_no_version(monkeypatch):
    def absent(name):
        raise results.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(results.metadata, "version", absent)
    versions = describe_run(Namespace())["versions"]
    assert {name: version for name, version in versions.items() if version} == {"python": versions["python"]}


SECRETS = {
    "token": "hf_abc",
    "hub_token": "hf_abc",
    "WANDB_API_KEY": "abc",
    "aws_secret_access": "abc",
    "db_password": "abc",
    "private_key": "abc",
    "passphrase": "abc",
    "ssh-key": "abc",
    "nested": {"access_key": "abc", "list_of_tokens": ["abc"]},
}
ADDRESSES = {
    "https://alice:abc@example.com/x.json": "https://example.com/x.json",
    "s3://abc@bucket/rows?part=1": "s3://bucket/rows?part=1",
    "https://u:a@b:abc@example.com/": "https://example.com/",
    "https://example.com/x?sig=abc&n=2": "https://example.com/x?sig=(left out)&n=2",
    "https://example.com/x?X-Amz-Signature=abc#top": "https://example.com/x?X-Amz-Signature=(left out)#top",
    "https://example.com/x?n=2&access_token=abc": "https://example.com/x?n=2&access_token=(left out)",
    "https://example.com/@alice/x": "https://example.com/@alice/x",
    "alice@example.com": "alice@example.com",
}
HARMLESS = {
    "tokenizer_name": "t5-small",
    "forced_bos_token": "<en>",
    "ignore_pad_token_for_loss": False,
    "max_new_tokens": 128,
    "token": None,
    "keyboard": "de",
}


def test_secrets_are_left_out():
    assert "abc" not in json.dumps(describe_run(Namespace(**SECRETS))["arguments"])
    assert describe_run(Namespace(**SECRETS))["arguments"]["hub_token"] == "(left out)"


@pytest.mark.parametrize("address", ADDRESSES)
def test_who_asks_is_left_out_of_an_address(address):
    args = Namespace(train_file=address, prompts=["a", address], nested={"url": address})
    shown = ADDRESSES[address]
    assert describe_run(args)["arguments"] == {"train_file": shown, "prompts": ["a", shown], "nested": {"url": shown}}


def test_what_only_sounds_like_a_secret_is_kept():
    assert describe_run(Namespace(**HARMLESS))["arguments"] == HARMLESS


def test_the_commit_is_this_projects_own(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "ROOT", tmp_path)
    assert results._commit() is None, "not a checkout"
    (tmp_path / ".git").mkdir()
    assert results._commit() is None, "a checkout that git cannot read"
    monkeypatch.setattr(results.subprocess, "run", lambda *_, **__: Namespace(stdout="0123abc-dirty\n"))
    assert results._commit() == "0123abc-dirty"


def test_without_git_there_is_no_commit(monkeypatch):
    def no_git(*_, **__):
        raise FileNotFoundError("git")

    monkeypatch.setattr(results.subprocess, "run", no_git)
    assert results._commit() is None


# -------------------------------------------------------------------------------------------------------- published

FIGURE = {
    "metric": "train_samples_per_second",
    "value": 200.0,
    "status": "reported elsewhere",
    "device": "gaudi2",
    "world_size": 8,
    "batch_size": 4,
    "model": "t5-small",
    "data": "cnn_dailymail 3.0.0",
    "precision": "bf16",
    "execution": "lazy + HPU graphs",
    "gradient_checkpointing": True,
    "pass_rule": ">= 0.95*value",
    "source": "somewhere",
}
RUN = {
    "device": "gaudi2",
    "world_size": 8,
    "do_train": True,
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 2,
    "model_name_or_path": "google-t5/t5-small",
    "dataset_name": "abisee/cnn_dailymail",
    "dataset_config_name": "3.0.0",
    "bf16": True,
    "execution_mode": "lazy",
    "gradient_checkpointing": True,
    "max_steps": -1,
    "max_train_samples": None,
    "max_eval_samples": None,
}
METRICS = {"train_samples_per_second": 190.0, "eval_rougeLsum": 38.0}


def line(figure: dict, run: dict, metrics: dict | None = None) -> str:
    table = compare_with_published([figure], METRICS if metrics is None else metrics, run)
    assert table[0].split() == ["metric", "measured", "published", "ratio", "published", "on", "note"]
    assert len(table) == 2
    return table[1]


def test_the_same_run_has_a_ratio():
    expected = ["train_samples_per_second", "190", "200", "0.950", "8 x gaudi2", "reported elsewhere; >= 0.95*value"]
    assert re.split(r"\s{2,}", line(FIGURE, RUN)) == expected


def test_what_describe_run_returns_will_do():
    flags = {name: value for name, value in RUN.items() if name not in ("device", "world_size", "execution_mode")}
    args = Namespace(**flags, execution_mode="auto")
    run = describe_run(
        args, {"name": "gaudi2", "execution_mode": "lazy", "world_size": 8, "precision": "bf16 autocast"}
    )
    assert "  0.950  " in line(FIGURE, run)
    assert "device: cpu (Xeon), not gaudi2" in line(FIGURE, run | {"device": {"name": "cpu (Xeon)"}})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device": "cpu (some model)"}, "device: cpu (some model), not gaudi2"),
        ({"device": "gaudi3"}, "device: gaudi3, not gaudi2"),
        ({"device": None}, "device: None, not gaudi2"),
        ({"world_size": 1}, "world_size: 1, not 8"),
        ({"per_device_train_batch_size": 8}, "batch_size: 8, not 4"),
        ({"model_name_or_path": "google-t5/t5-base"}, "model: google-t5/t5-base, not t5-small"),
        ({"model_name_or_path": None}, "model: built here, not t5-small"),
        ({"dataset_config_name": "2.0.0"}, "data: abisee/cnn_dailymail 2.0.0, not cnn_dailymail 3.0.0"),
        ({"dataset_name": None, "dataset_config_name": None}, "data: this machine's own, not cnn_dailymail 3.0.0"),
        ({"bf16": False}, "precision: fp32, not bf16"),
        ({"execution_mode": "eager"}, "execution: eager, not lazy + HPU graphs"),
        ({"gradient_checkpointing": False}, "gradient_checkpointing: False, not True"),
        ({"max_steps": 20}, "max_steps: 20, not None"),
        ({"max_train_samples": 100}, "max_train_samples: 100, not None"),
        ({"model_name_or_path": "t5-small (from scratch)"}, "model: t5-small (from scratch), not t5-small"),
    ],
)
def test_another_run_is_not_comparable(change, reason):
    text = line(FIGURE, RUN | change)
    assert text.endswith(f"reported elsewhere; not comparable: {reason}")
    assert "  n/a  " in text
    assert "0.95*value" not in text


def test_all_differences_are_named():
    text = line(FIGURE, {"device": "cpu"})
    for name in ("device", "world_size", "batch_size", "model", "data", "precision", "execution"):
        assert f"{name}: " in text


def test_limits_count_for_what_they_limit():
    assert "not comparable" not in line(FIGURE, RUN | {"max_eval_samples": 5})
    evaluated = FIGURE | {"metric": "eval_rougeLsum", "max_eval_samples": 880}
    assert "max_eval_samples: None, not 880" in line(evaluated, RUN)
    assert "not comparable" not in line(evaluated, RUN | {"max_eval_samples": 880})
    assert "max_steps: 3, not None" in line(evaluated, RUN | {"max_eval_samples": 880, "max_steps": 3})


def test_a_metric_without_a_prefix_is_of_the_evaluation():
    perplexity, measured = FIGURE | {"metric": "perplexity"}, {"perplexity": 100.0}
    assert "  0.500  " in line(perplexity, RUN, measured)
    assert "max_eval_samples: 5, not None" in line(perplexity, RUN | {"max_eval_samples": 5}, measured)


def test_a_model_of_new_weights_goes_by_its_configuration():
    figure, run = FIGURE | {"model": "bert-base-uncased (from scratch)"}, RUN | {"model_name_or_path": None}
    assert "not comparable" not in line(figure, run | {"config_name": "google-bert/bert-base-uncased"})
    other = line(figure, run | {"config_name": "google-bert/bert-base-uncased", "config_overrides": "num_layers=2"})
    assert "model: google-bert/bert-base-uncased num_layers=2 (from scratch), not bert-base-uncased (" in other
    trained = dict.fromkeys(("model_name_or_path", "config_name"), "google-bert/bert-base-uncased")
    assert "model: google-bert/bert-base-uncased, not" in line(figure, run | trained)


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ({"fp8": True}, "fp8: bf16, not True"),
        ({"fsdp": "auto_wrap"}, "fsdp: ZeRO-3, not auto_wrap"),
        ({"context_parallel_size": 4}, "context_parallel_size: whole sequences, not 4"),
    ],
)
def test_what_is_done_otherwise_here_is_not_comparable_although_the_flags_agree(flag, reason):
    assert line(FIGURE | flag, RUN | flag).endswith(f"not comparable: {reason}")


def test_what_is_done_otherwise_is_what_the_flags_say():
    assert INSTEAD.keys() == SUBSTITUTES.keys()


def test_prediction_has_the_batch_of_evaluation():
    figure = FIGURE | {"metric": "predict_rougeLsum", "batch_size": 2}
    assert "  0.500  " in line(figure, RUN | {"max_steps": 9}, {"predict_rougeLsum": 100.0})
    assert "batch_size: 2, not 4" in line(figure | {"batch_size": 4}, RUN)


DRAWN = {
    "metric": "generate_images_per_second",
    "value": 2.0,
    "device": "gaudi2",
    "world_size": 1,
    "batch_size": 7,
    "model": "stable-diffusion-v1-4",
    "precision": "bf16",
    "num_inference_steps": 50,
    "height": 512,
    "pass_rule": ">= 0.95*value",
}
DRAWS = {
    "device": {"name": "gaudi2", "execution_mode": "lazy", "precision": "bf16 autocast"},
    "do_train": False,
    "batch_size": 7,
    "per_device_train_batch_size": 16,
    "per_device_eval_batch_size": 8,
    "model_name_or_path": "CompVis/stable-diffusion-v1-4",
    "num_inference_steps": 50,
    "height": 512,
    "max_steps": -1,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"do_train": True, "max_steps": 9, "max_train_samples": 5, "max_eval_samples": 5}, ""),
        ({"dataset_name": "some/captions", "dataset_config_name": "all"}, ""),
        ({"batch_size": 1}, "batch_size: 1, not 7"),
        ({"num_inference_steps": 20}, "num_inference_steps: 20, not 50"),
        ({"height": None}, "height: None, not 512"),
        ({"model_name_or_path": "CompVis/stable-diffusion-v1-1"}, "model: CompVis/stable-diffusion-v1-1, not"),
    ],
)
def test_generation_has_its_own_batch_and_no_data(change, reason):
    text = line(DRAWN, DRAWS | change, {"generate_images_per_second": 1.0})
    assert ("  0.500  " in text) == (not reason)
    assert text.endswith("reported elsewhere; >= 0.95*value") if not reason else f"not comparable: {reason}" in text


@pytest.mark.parametrize(
    ("published", "here", "same"),
    [
        ("gaudi1", "gaudi", True),
        ("gaudi2", "GAUDI2", True),
        ("gaudi1", "gaudi2", False),
        ("a100-80g", "NVIDIA A100-SXM4-80GB", True),
        ("a100-80g", "NVIDIA A100-PCIE-40GB", False),
        ("a100-80g", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_device_names(published, here, same):
    assert ("device: " not in line(FIGURE | {"device": published}, RUN | {"device": here})) == same


@pytest.mark.parametrize("value", [None, math.nan])
def test_what_was_not_measured_says_so(value):
    assert re.split(r"\s{2,}", line(FIGURE, RUN, {FIGURE["metric"]: value}))[3] == "n/a"
    assert re.split(r"\s{2,}", line(FIGURE, RUN, {}))[1:4] == ["n/a", "200", "n/a"]


def test_text_and_zero_have_no_ratio():
    assert re.split(r"\s{2,}", line(FIGURE | {"value": "1:33"}, RUN))[2:4] == ["1:33", "n/a"]
    assert re.split(r"\s{2,}", line(FIGURE | {"value": 0}, RUN))[2:4] == ["0", "n/a"]


def test_every_published_number_is_reported_elsewhere_whatever_the_file_claims():
    text = line(FIGURE | {"status": "measured here", "historical": True}, RUN)
    assert "reported elsewhere; historical" in text
    assert "measured here" not in text


def test_nothing_published_prints_nothing():
    assert compare_with_published([], METRICS, RUN) == []


def pipeline_in(folder, *signs):
    """A pipeline's folder with the user's own beside it; ``signs`` are of a run."""
    (folder / "model_index.json").write_text(json.dumps({"unet": ["diffusers", "X"], "vae": ["a", "b"], "scale": 2}))
    for name in (
        "unet/config.json",
        "vae/config.json",
        "scale/mine",
        "mine/x",
        "images/0001.png",
        "images/me.jpg",
        *signs,
    ):
        path = folder / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text("")
    return Namespace(output_dir=str(folder), do_train=True, resume_from_checkpoint=None, overwrite_output_dir=True)


def test_a_runs_pipeline_and_images_make_room_and_nothing_else(tmp_path):
    drawn = (
        "images/contact_sheet.png",
        "validation_images/step-2/contact_sheet.png",
        "validation_images/step-2/0001.png",
    )
    args = pipeline_in(tmp_path, "all_results.json", "validation_images/step-000003.png", "loss_curve.png", *drawn)
    with pytest.raises(UserError, match="holds another run"):
        results.claim_output_dir(Namespace(**vars(args) | {"overwrite_output_dir": False}), "x")
    assert results.claim_output_dir(args, "x") == tmp_path
    results.clear_output_dir(tmp_path)
    left = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    assert left == ["images/me.jpg", "mine/x", "scale/mine"]
    assert not (tmp_path / "unet").exists()


def test_a_pipeline_that_no_run_has_left_is_kept(tmp_path):
    args = pipeline_in(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match="holds a pipeline that no run has left there; give another folder"):
        results.claim_output_dir(args, "x")
    results.clear_output_dir(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    for change in ({"do_train": False}, {"resume_from_checkpoint": "auto"}):
        assert results.claim_output_dir(Namespace(**vars(args) | change), "x") == tmp_path


SAVED = "--resume_from_checkpoint auto goes on from the last checkpoint"


@pytest.mark.parametrize(
    ("asked", "has_one", "advice"),
    [
        (None, False, "nothing is saved yet: start it anew, with --overwrite_output_dir"),
        (None, True, "nothing is saved yet: start it anew, with --overwrite_output_dir"),
        ("auto", False, "nothing is saved yet: start it again as it was"),
        ("auto", True, SAVED),
        ("other/checkpoint-3", False, "--resume_from_checkpoint other/checkpoint-3 goes on from there again"),
        ("other/checkpoint-3", True, "--resume_from_checkpoint other/checkpoint-3 goes on from there again"),
    ],
)
def test_an_interruption_before_the_first_save_tells_the_way_that_there_is(tmp_path, capsys, asked, has_one, advice):
    def interrupted() -> str:
        def interrupt() -> None:
            raise KeyboardInterrupt

        with pytest.raises(SystemExit):
            errors.exit_with_one_line(interrupt)
        return capsys.readouterr().err.splitlines()[-1]

    if has_one:
        (tmp_path / "checkpoint-2").mkdir()
    names = {"output_dir": str(tmp_path), "resume_from_checkpoint": asked, "overwrite_output_dir": True}
    results.claim_output_dir(Namespace(**names, do_train=True), "x")
    assert interrupted() == f"interrupted; {advice}"
    save(tmp_path, 4, lambda main, folder: main((folder / "x").write_text, ""))
    assert interrupted() == f"interrupted; {SAVED}"
    results.claim_output_dir(Namespace(**names, do_train=False), "x")
    assert interrupted() == "interrupted"
