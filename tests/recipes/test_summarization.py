"""The recipe end to end on tiny real models: contracts, published commands, bad input, copies."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from core.errors import UserError
from tests.conftest import REPOSITORY, pairs, write_jsonl

SCRIPT = REPOSITORY / "recipes" / "summarization" / "run.py"
LENGTHS = ["--max_source_length", "32", "--max_target_length", "12"]
QUIET = ["--disable_tqdm", "--report_to", "none", "--use_cpu"]


def flags_of(files: dict[str, str], *splits: str) -> list[str]:
    return [token for name, path in files.items() if name[2:-5] in splits for token in (name, path)]


@pytest.fixture
def base(tiny_t5: Path, pair_files: dict[str, str], tmp_path: Path) -> list[str]:
    """Flags of a short training run on the three files."""
    files = flags_of(pair_files, "train", "validation", "test")
    output = ["--output_dir", str(tmp_path / "run")]
    return ["--model_name_or_path", str(tiny_t5), *files, *output, *LENGTHS, *QUIET]


def as_program(*flags: str, script: Path = SCRIPT, **options) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(script), *flags], capture_output=True, text=True, timeout=240, **options)


def test_train_evaluate_predict_writes_everything(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    steps = ["--logging_steps", "2", "--save_steps", "3", "--eval_strategy", "epoch", "--num_train_epochs", "2"]
    metrics = summarization.main([*base, "--do_train", "--do_eval", "--do_predict", "--predict_with_generate", *steps])
    written = json.loads((tmp_path / "run" / "all_results.json").read_text())
    for key, value in metrics.items():
        assert written[key] == pytest.approx(value) if isinstance(value, float) else written[key] == value
    for key in (
        "train_loss",
        "train_runtime",
        "train_samples_per_second",
        "eval_loss",
        "eval_rougeLsum",
        "predict_rouge1",
    ):
        assert key in written
    run = written["run"]
    assert run["arguments"]["max_source_length"] == 32
    assert run["device"]["execution_mode"] == "eager"
    assert set(run["peak_memory (GB)"]) >= {"train", "eval", "predict", "save"}
    assert len(run["batch_shapes"]["train"]) <= 4
    rows = list(csv.DictReader((tmp_path / "run" / "logs" / "metrics.csv").open()))
    assert [row["step"] for row in rows if row["loss"]] == ["2", "4", "6", "8"]
    assert len([row for row in rows if row["eval_loss"]]) == 2
    memory = ["memory_allocated (GB)", "max_memory_allocated (GB)", "total_memory_available (GB)"]
    assert all(float(rows[0][key]) > 0 for key in memory)
    assert len((tmp_path / "run" / "generated_predictions.txt").read_text().splitlines()) == 11
    for name in ("loss_curve.png", "model.safetensors", "tokenizer.json", "gaudi_config.json", "checkpoint-6"):
        assert (tmp_path / "run" / name).exists()


@pytest.mark.parametrize("model", ["tiny_t5", "tiny_bart"])
def test_a_model_learns_its_training_rows(
    summarization: ModuleType, request: pytest.FixtureRequest, tmp_path: Path, model: str
) -> None:
    rows = pairs(16, seed=3, longest=10)
    for row in rows:
        row["summary"] = " ".join(row["text"].split()[:2])
    file = str(write_jsonl(tmp_path / "rows.jsonl", rows))
    name = ["--model_name_or_path", str(request.getfixturevalue(model)), "--output_dir", str(tmp_path / "run")]
    data = ["--train_file", file, "--test_file", file, "--do_train", "--do_predict", "--predict_with_generate"]
    rate = ["--learning_rate", "0.02", "--num_train_epochs", "150", "--save_strategy", "no"]
    metrics = summarization.main([*name, *data, *LENGTHS, *QUIET, *rate])
    assert metrics["train_loss"] < 2
    assert metrics["predict_loss"] < 0.7
    assert metrics["predict_rouge1"] > 70


def test_the_saved_folder_loads_as_any_other(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    summarization.main([*base, "--do_train", "--max_steps", "2", "--save_steps", "1"])
    for folder in (tmp_path / "run", tmp_path / "run" / "checkpoint-2"):
        model, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        assert model.lm_head.weight.data_ptr() == model.shared.weight.data_ptr()
        assert tokenizer("alpha beta")["input_ids"][-1] == tokenizer.eos_token_id


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.fixture
def still(tiny_t5: Path, tmp_path: Path) -> Path:
    """A copy whose dropout is switched off: its masks depend on the micro-batches' shapes, and on who draws them."""
    shutil.copytree(tiny_t5, folder := tmp_path / "still")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "dropout_rate": 0.0}))
    return folder


def test_weights_and_loss_do_not_depend_on_the_split_of_a_window(
    summarization: ModuleType, base: list[str], tmp_path: Path, still: Path
) -> None:
    results = []
    for batch, accumulation in ((8, 1), (4, 2), (2, 4), (1, 8)):
        folder = tmp_path / str(batch)
        split = ["--per_device_train_batch_size", str(batch), "--gradient_accumulation_steps", str(accumulation)]
        given = [*base, "--model_name_or_path", str(still), "--output_dir", str(folder), "--do_train", *split]
        metrics = summarization.main([*given, "--num_train_epochs", "2", "--learning_rate", "0.01", "--optim", "sgd"])
        results.append((metrics["train_loss"], weights_in(folder)))
    for loss, weights in results[1:]:
        assert loss == pytest.approx(results[0][0], abs=1e-6)
        for name, tensor in weights.items():
            torch.testing.assert_close(tensor, results[0][1][name], rtol=0, atol=1e-6)


def test_resume_equals_the_straight_run(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    """A real kill: the first process stops after its checkpoint, a second one goes on. Dropout is on."""
    given = [*base, "--do_train", "--num_train_epochs", "3", "--save_steps", "3", "--gradient_accumulation_steps", "2"]
    given += ["--per_device_train_batch_size", "4", "--learning_rate", "0.01", "--optim", "adafactor"]
    summarization.main([*given, "--output_dir", str(tmp_path / "straight")])
    expected = weights_in(tmp_path / "straight")
    for step in (3, 6, 9):
        folder = tmp_path / f"from{step}"
        shutil.copytree(tmp_path / "straight" / f"checkpoint-{step}", folder / f"checkpoint-{step}")
        summarization.main([*given, "--output_dir", str(folder), "--resume_from_checkpoint", "auto"])
        for name, tensor in weights_in(folder).items():
            assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("batch", ["1", "2", "5", "13"])
def test_eval_loss_and_rouge_do_not_depend_on_the_batch(summarization: ModuleType, base: list[str], batch: str) -> None:
    given = [*base, "--do_eval", "--predict_with_generate", "--per_device_eval_batch_size"]
    metrics, alone = summarization.main([*given, batch]), summarization.main([*given, "4"])
    assert metrics["eval_loss"] == pytest.approx(alone["eval_loss"], abs=1e-6)
    for kind in ("rouge1", "rouge2", "rougeL", "rougeLsum", "gen_len"):
        assert metrics[f"eval_{kind}"] == alone[f"eval_{kind}"]


@pytest.mark.parametrize("flags", [["--ignore_pad_token_for_loss", "False"], []])
def test_eval_loss_with_padding_as_target_depends_on_no_batch(
    summarization: ModuleType, base: list[str], flags: list[str]
) -> None:
    losses = [
        summarization.main([*base, "--do_eval", *flags, "--per_device_eval_batch_size", batch])["eval_loss"]
        for batch in ("2", "5")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


def test_the_flags_win_over_the_models_generation_settings(
    summarization: ModuleType, base: list[str], tmp_path: Path, tiny_t5: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(tiny_t5, model)
    settings = {"max_new_tokens": 2, "num_return_sequences": 2, "num_beams": 2, "return_dict_in_generate": True}
    old = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps(old | settings))
    given = ["--do_eval", "--predict_with_generate", "--num_beams", "2"]
    plain = summarization.main([*base, *given])
    loud = summarization.main([*base, "--model_name_or_path", str(model), *given])
    assert loud["eval_rouge1"] == plain["eval_rouge1"]
    assert loud["eval_gen_len"] == plain["eval_gen_len"] <= 11


@torch.no_grad()  # as in evaluation: with gradients the last digit differs
def test_what_evaluation_saves_changes_nothing(summarization: ModuleType, tiny_t5: Path) -> None:
    """The text is encoded once for loss and generation, and its cache stays where it is when beams move."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5).eval()
    rows = [{"input_ids": [5, 6, 7, 1], "labels": [5, 1]}, {"input_ids": [8, 1], "labels": [8, 9, 10, 11, 1]}]
    batch, moved = summarization.collate(rows, (8, 8), pad=0, label_pad=-100), []
    texts = {key: batch[key] for key in ("input_ids", "attention_mask")}
    options = {"num_beams": 3, "max_length": 12, "return_dict_in_generate": True, "output_scores": True}
    plain = model.generate(**texts, **options)
    encoded = model.get_encoder()(**texts, return_dict=True)
    assert summarization.loss_sum(model, batch, encoded=encoded) == summarization.loss_sum(model, batch)
    model._reorder_cache = lambda cache, beams: moved.append(beams) or summarization.move_beams(cache, beams)
    saved = model.generate(**texts, encoder_outputs=encoded, **options)
    assert torch.equal(saved.sequences, plain.sequences)
    assert torch.equal(saved.sequences_scores, plain.sequences_scores)
    assert any((beams != torch.arange(6)).any() for beams in moved)  # or it would prove nothing


def test_padding_changes_no_loss(summarization: ModuleType, tiny_t5: Path) -> None:
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5).eval()
    rows = [{"input_ids": [5, 6, 7, 1], "labels": [5, 1]}, {"input_ids": [8, 1], "labels": [8, 9, 10, 11, 1]}]
    batch = summarization.collate(rows, (8, 8), pad=0, label_pad=-100)
    loss = summarization.loss_sum(model, batch)
    scrambled = {**batch, "input_ids": torch.where(batch["attention_mask"] == 1, batch["input_ids"], 17)}
    tight = [summarization.collate([row], (len(row["input_ids"]), len(row["labels"])), 0, -100) for row in rows]
    assert summarization.loss_sum(model, scrambled) == loss
    torch.testing.assert_close(sum(summarization.loss_sum(model, one) for one in tight), loss)


def test_the_decoder_input_is_shifted_once(summarization: ModuleType, tiny_t5: Path) -> None:
    """The loss equals the model's own, which shifts by itself, on targets of 2 and 5 tokens."""
    from transformers import AutoModelForSeq2SeqLM

    model = AutoModelForSeq2SeqLM.from_pretrained(tiny_t5).eval()
    rows = [{"input_ids": [5, 6, 1], "labels": [5, 1]}, {"input_ids": [8, 1], "labels": [8, 9, 10, 11, 1]}]
    batch = summarization.collate(rows, (4, 6), pad=0, label_pad=-100)
    start = model.prepare_decoder_input_ids_from_labels(batch["labels"])
    assert start.tolist() == [[0, 5, 1, 0, 0, 0], [0, 8, 9, 10, 11, 1]]
    own = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=batch["labels"]).loss
    torch.testing.assert_close(summarization.loss_sum(model, batch) / 7, own)


def test_evaluation_alone_in_bf16(summarization: ModuleType, base: list[str]) -> None:
    """optimum-habana's command for evaluation only has --bf16_full_eval."""
    low, full = (summarization.main([*base, "--do_eval", *flag])["eval_loss"] for flag in (["--bf16_full_eval"], []))
    assert low != full
    assert low == pytest.approx(full, rel=0.02)


def test_compiled_equals_eager(summarization: ModuleType, base: list[str], tmp_path: Path, still: Path) -> None:
    losses, base = [], [*base, "--model_name_or_path", str(still)]
    for mode in (["--execution_mode", "eager"], ["--torch_compile", "--torch_compile_backend", "aot_eager"]):
        folder = str(tmp_path / mode[0])
        given = [*base, "--do_train", "--max_steps", "2", "--pad_to_max_length", "--output_dir", folder, *mode]
        losses.append(summarization.main([*given, "--save_strategy", "no"])["train_loss"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    written = json.loads((tmp_path / "--torch_compile" / "all_results.json").read_text())
    assert written["run"]["graphs_compiled"] > 0


def test_padding_as_target_is_a_choice(summarization: ModuleType, base: list[str]) -> None:
    both = [
        summarization.main([*base, "--do_eval", "--pad_to_max_length", "--ignore_pad_token_for_loss", value])[
            "eval_loss"
        ]
        for value in ("True", "False")
    ]
    assert abs(both[0] - both[1]) > 0.01


def test_rouge_is_that_of_the_reference_package(summarization: ModuleType) -> None:
    """The package that `evaluate` itself calls, with sentences put on lines by hand, and evaluate's aggregator."""
    from rouge_score.rouge_scorer import RougeScorer
    from rouge_score.scoring import BootstrapAggregator

    predictions = ["The cat sat. The dog ran away.", "", "Dr. Smith of the U.S. Army spoke. He left."]
    references = [
        "The dog ran away. The cat sat.",
        "Nothing is here.",
        "Dr. Smith of the U.S. Army spoke. He then left.",
    ]
    by_line = [
        (["The cat sat.\nThe dog ran away.", "", "Dr. Smith of the U.S. Army spoke.\nHe left."]),
        (["The dog ran away.\nThe cat sat.", "Nothing is here.", "Dr. Smith of the U.S. Army spoke.\nHe then left."]),
    ]
    kinds = ["rouge1", "rouge2", "rougeL", "rougeLsum"]
    scorer, aggregator = RougeScorer(kinds, use_stemmer=True), BootstrapAggregator()
    scores = [scorer.score(reference, prediction) for prediction, reference in zip(*by_line, strict=True)]
    for score in scores:
        aggregator.add_scores(score)
    ours = summarization.rouge(predictions, references)
    for kind in kinds:
        assert ours[kind] == pytest.approx(100 * sum(score[kind].fmeasure for score in scores) / 3, abs=1e-4)
        low, _, high = aggregator.aggregate()[kind]
        assert 100 * low.fmeasure <= ours[kind] <= 100 * high.fmeasure
    swapped = summarization.rouge(predictions[:1], references[:1])
    assert swapped["rougeLsum"] == pytest.approx(100)
    assert swapped["rougeL"] < 60


def test_other_scripts_warn(summarization: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    assert summarization.rouge(["Это текст"], ["Это текст"])["rouge1"] == 0
    assert "other scripts" in caplog.text


@pytest.mark.parametrize("extension", ["csv", "json", "jsonl", "parquet"])
def test_every_kind_of_file_is_read(summarization: ModuleType, tmp_path: Path, extension: str) -> None:
    import pandas

    rows, path = pairs(5), tmp_path / f"rows.{extension}"
    table = pandas.DataFrame([{"summary": row["summary"], "id": 1, "text": row["text"]} for row in rows])
    write = {"csv": lambda: table.to_csv(path, index=False), "parquet": lambda: table.to_parquet(path)}
    write["json"] = write["jsonl"] = lambda: table.to_json(path, orient="records", lines=extension == "jsonl")
    write[extension]()
    names = ["--text_column", "text", "--summary_column", "summary"]
    args = summarization.parse_arguments(
        ["--do_train", "--train_file", str(path), *names],
        summarization.SummarizationArguments,
        summarization.HubArguments,
        description="",
    )
    assert list(summarization.load_data(args, tmp_path)["train"]) == [
        {"text": row["text"], "summary": row["summary"]} for row in rows
    ]


def broken_input(tmp_path: Path) -> dict[str, tuple[list[str], str]]:
    """Name: flags on top of a good run, and what the one line must say."""
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "text.xyz").write_text("a")
    (tmp_path / "broken.jsonl").write_text('{"text": "a", "summary"\n')
    (tmp_path / "holey.jsonl").write_text('{"text": "a", "summary": "b"}\n{"text": null, "summary": "b"}\n')
    (tmp_path / "config.json").write_text('{"use_fused_adm": true}')
    (tmp_path / "run.json").write_text('{"args": {"lerning_rate": 1}}')
    another = tmp_path / "another"
    another.mkdir()
    (another / "all_results.json").write_text("{}")
    train = "--train_file"
    return {
        "missing": ([train, str(tmp_path / "absent.jsonl")], "--train_file.*absent.jsonl does not exist"),
        "empty": ([train, str(tmp_path / "empty.jsonl")], "--train_file.*empty.jsonl is empty"),
        "extension": ([train, str(tmp_path / "text.xyz")], "must end in .csv, .json, .jsonl, .parquet"),
        "broken": ([train, str(tmp_path / "broken.jsonl")], "--train_file.*broken.jsonl cannot be loaded"),
        "null": ([train, str(tmp_path / "holey.jsonl")], "1 of 2 train rows.*row 2.*--drop_empty_rows"),
        "column": (["--text_column", "article"], "--text_column.*'article'.*it has: text, summary"),
        "config key": (
            ["--gaudi_config", str(tmp_path / "config.json")],
            "use_fused_adm.*did you mean 'use_fused_adam'",
        ),
        "config name": (["--gaudi_config", "Habana/t6"], "no configuration.*t5"),
        "run file": (["--config", str(tmp_path / "run.json")], "lerning_rate.*did you mean '--learning_rate'"),
        "flag": (["--lerning_rate", "1"], "unknown flag --lerning_rate.*did you mean '--learning_rate'"),
        "mode": (["--use_lazy_mode", "True", "--torch_compile"], "contradict"),
        "precision": (["--fp16"], "--fp16.*--bf16"),
        "no update": (["--max_steps", "0"], "train nothing"),
        "drop last": (["--dataloader_drop_last", "--per_device_train_batch_size", "64"], "make no optimiser step"),
        "resume": (["--resume_from_checkpoint", str(tmp_path / "absent")], "--resume_from_checkpoint"),
        "two sources": (["--dataset_name", "cnn_dailymail"], "exclude each other"),
        "schedule": (["--lr_scheduler_type", "lineal"], "--lr_scheduler_type.*did you mean 'linear'"),
        "tracker": (["--report_to", "tensorbord"], "--report_to.*tensorboard"),
        "devices": (["--deepspeed", "zero2", "--distribution_strategy", "fast_ddp"], "--deepspeed.*fast_ddp.*give one"),
        "sharding": (["--deepspeed", "zero4"], "--deepspeed: no configuration 'zero4'.*zero2"),
        "one column": (["--summary_column", "text"], "--text_column.*no column 'text' of its own"),
        "length": (["--max_source_length", "0"], "--max_source_length must be at least 1"),
        "optimiser": (["--optim", "sgd", "--optim_args", "momentun=0.9"], "--optim_args.*did you mean 'momentum'"),
        "another run": (["--output_dir", str(another)], "--output_dir.*holds another run.*all_results"),
    }


@pytest.mark.parametrize("name", [
    "missing", "empty", "extension", "broken", "null", "column", "config key", "config name", "run file", "flag",
    "mode", "precision", "no update", "drop last", "resume", "two sources", "schedule", "tracker", "devices",
    "optimiser", "another run", "one column", "length", "sharding",
])  # fmt: skip
def test_bad_input_is_one_clear_line(
    summarization: ModuleType, base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Before any model is built: building one would fail here."""
    flags, message = broken_input(tmp_path)[name]
    monkeypatch.setattr(summarization, "build_model", lambda *_: pytest.fail("a model was built"))
    with pytest.raises(UserError) as caught:
        summarization.main([*base, "--do_train", *flags])
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)


def test_bad_input_ends_with_code_2_and_no_traceback(base: list[str]) -> None:
    done = as_program(*base, "--do_train", "--text_column", "article")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: --text_column")


def test_nothing_to_do_is_said(summarization: ModuleType, base: list[str]) -> None:
    with pytest.raises(UserError, match="nothing to do"):
        summarization.main(base)


def test_empty_rows_can_be_left_out(summarization: ModuleType, base: list[str], tmp_path: Path) -> None:
    rows = [*pairs(6), {"text": "", "summary": "alpha"}, {"text": "alpha", "summary": None}]
    file = str(write_jsonl(tmp_path / "holey.jsonl", rows))
    given = [*base, "--do_train", "--train_file", file, "--drop_empty_rows", "--num_train_epochs", "1"]
    summarization.main([*given, "--per_device_train_batch_size", "1"])
    state = json.loads(next((tmp_path / "run").glob("checkpoint-*/state.json")).read_text())
    assert state["step_count"] == 6


def test_an_unreachable_hub_is_said_within_two_seconds(tmp_path: Path) -> None:
    """A real process, an endpoint where nothing listens; the time is that of the look-up, start-up left out."""
    names = {"--dataset_name": "abisee/cnn_dailymail", "--model_name_or_path": "google-t5/t5-small"}
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path)}
    file = str(write_jsonl(tmp_path / "rows.jsonl", pairs(4)))
    for flag, name in names.items():
        source = ["--train_file", file] if flag == "--model_name_or_path" else []
        start = time.monotonic()
        done = as_program(flag, name, *source, "--do_train", "--output_dir", str(tmp_path / flag), env=environment)
        assert done.returncode == 2
        assert name in done.stderr
        assert "not reachable" in done.stderr
        assert time.monotonic() - start < 20  # start-up on a busy machine; the retries alone would take 23 s more


def test_published_command_runs_with_only_the_path_changed(
    tiny_t5: Path, pair_files: dict[str, str], tmp_path: Path
) -> None:
    """optimum-habana's command for T5 on one card, with local files in place of the hub's names."""
    command = (
        "--do_train --do_eval --overwrite_output_dir --per_device_train_batch_size 4 --per_device_eval_batch_size 4"
        " --use_habana --use_lazy_mode --use_hpu_graphs_for_inference --gaudi_config_name Habana/t5"
        " --ignore_pad_token_for_loss False --pad_to_max_length --save_strategy epoch --throughput_warmup_steps 3"
        " --predict_with_generate --bf16"
    ).split()
    named = ["--model_name_or_path", str(tiny_t5), *flags_of(pair_files, "train", "validation")]
    named += ["--source_prefix", "summarize: ", "--output_dir", str(tmp_path / "run"), "--text_column", "text"]
    shorter = ["--summary_column", "summary", "--num_train_epochs", "1", *LENGTHS]
    done = as_program(*command, *named, *shorter)
    assert done.returncode == 0, done.stderr
    assert "Habana/t5 is read from gaudi_configs/t5.json" in done.stdout
    assert done.stderr.count("--use_habana: no Gaudi was found") == 1
    results = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert done.stderr.count("lazy mode is a Gaudi's own") == 1
    assert results["run"]["device"]["execution_mode"] == "eager"
    assert results["run"]["device"]["precision"].startswith("bf16")
    assert len(results["run"]["batch_shapes"]["train"]) == 1


def test_run_files_win_over_defaults_and_flags_over_run_files(
    summarization: ModuleType, base: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    figure = {
        "metric": "eval_rougeLsum",
        "value": 38.6,
        "status": "reported elsewhere",
        "device": "gaudi2",
        "world_size": 8,
    }
    content = {"args": {"do_eval": True, "predict_with_generate": True, "seed": 5}, "published": [figure]}
    (tmp_path / "figure.json").write_text(json.dumps(content))
    summarization.main([*base, "--config", str(tmp_path / "figure.json"), "--seed", "6"])
    written = json.loads((tmp_path / "run" / "all_results.json").read_text())
    assert written["run"]["arguments"]["seed"] == 6
    assert written["run"]["arguments"]["do_eval"] is True
    shown = capsys.readouterr().out
    assert re.search(r"eval_rougeLsum .*38\.6 .*n/a .*8 x gaudi2 .*reported elsewhere; not comparable: .*device", shown)


def run_copy(copy: Path, python: str, flags: list[str], cwd: Path) -> None:
    shutil.copytree(SCRIPT.parent, copy)
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, str(copy / "run.py"), *flags, *LENGTHS, *QUIET, "--do_train", "--max_steps", "1"]
    done = subprocess.run(command, cwd=cwd, env=clean, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert len(list(cwd.glob("runs/mine/*/all_results.json"))) == 1


def test_a_copy_beside_the_recipe_runs(tiny_t5: Path, pair_files: dict[str, str], tmp_path: Path) -> None:
    shutil.copytree(REPOSITORY / "core", tmp_path / "repository" / "core")
    flags = ["--model_name_or_path", str(tiny_t5), *flags_of(pair_files, "train")]
    run_copy(tmp_path / "repository" / "recipes" / "mine", sys.executable, flags, tmp_path)


def test_a_copy_elsewhere_runs_after_an_editable_install(
    tiny_t5: Path, pair_files: dict[str, str], tmp_path: Path
) -> None:
    """A real environment with a real ``pip install -e``; the libraries are those of this one."""
    import sysconfig
    import venv

    venv.create(tmp_path / "environment", with_pip=False)
    python = str(tmp_path / "environment" / "bin" / "python")
    site = next((tmp_path / "environment" / "lib").glob("python*")) / "site-packages"
    (site / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    source = tmp_path / "repository"
    shutil.copytree(REPOSITORY, source, ignore=shutil.ignore_patterns(".git", "runs", "*cache*", "tests"))
    pip = [sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check", "install", "--no-deps", "-e"]
    installed = subprocess.run([*pip, str(source)], capture_output=True, text=True)
    assert installed.returncode == 0, installed.stderr
    flags = ["--model_name_or_path", str(tiny_t5), *flags_of(pair_files, "train")]
    run_copy(tmp_path / "elsewhere" / "mine", python, flags, tmp_path)


def test_help_answers_at_once_and_groups_its_flags() -> None:
    seconds = []
    for _ in range(3):
        start = time.monotonic()
        done = as_program("--help")
        seconds.append(time.monotonic() - start)
    assert done.returncode == 0
    assert min(seconds) < 3
    for group in ("model and data", "hub", "run", "training", "device", "several devices"):
        assert re.search(f"^{group}:", done.stdout, re.MULTILINE)


def test_importing_the_recipe_loads_no_torch() -> None:
    code = f"import runpy, sys; runpy.run_path({str(SCRIPT)!r}); assert 'torch' not in sys.modules, 'torch'"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def golden_losses(summarization: ModuleType, tiny_t5: Path, pair_files: dict[str, str], folder: Path) -> list[float]:
    flags = ["--model_name_or_path", str(tiny_t5), *flags_of(pair_files, "train"), "--output_dir", str(folder)]
    flags += [*LENGTHS, *QUIET, "--do_train", "--max_steps", "4", "--logging_steps", "1", "--learning_rate", "0.01"]
    summarization.main([*flags, "--save_strategy", "no"])
    return [float(row["loss"]) for row in csv.DictReader((folder / "logs" / "metrics.csv").open())]


def test_golden_losses(
    summarization: ModuleType, tiny_t5: Path, pair_files: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Four recorded losses: a refactoring must not move them. ``--rebase`` records this machine's."""
    losses = golden_losses(summarization, tiny_t5, pair_files, tmp_path / "run")
    path = REPOSITORY / "tests" / "baselines" / "cpu.json"
    recorded = json.loads(path.read_text()) if path.exists() else {}
    if request.config.getoption("--rebase"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps({**recorded, "summarization": losses}, indent=2) + "\n")
        return
    assert losses == pytest.approx(recorded["summarization"], abs=1e-5)
