"""Run files: one per published run, parsed by its own recipe, with provenance, and comparable with its own figures."""

from __future__ import annotations

import functools
import json
import math
import re
import shlex
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from core.arguments import SUBSTITUTES, StrictParser, parse_arguments
from core.deepspeed_config import load, resolve
from core.gaudi_config import GaudiConfig
from core.results import ABOUT_FIGURE, INSTEAD, compare_with_published, differences
from core.run_files import read_run_file
from tests.conftest import REPOSITORY, load_recipe

# How many figures each file carries: a lost one fails here, a new one is entered here.
FIGURES = {
    "bart_large_cnn_gaudi1_1x2": 2,
    "bart_large_cnn_gaudi2_1x2": 2,
    "bart_large_cnn_gaudi3_1x2": 2,
    "bert_base_uncased_from_scratch_a100_80g_8x32": 1,
    "bert_base_uncased_from_scratch_a100_80g_8x64": 1,
    "bert_base_uncased_from_scratch_gaudi1_8x32": 2,
    "bert_base_uncased_from_scratch_gaudi2_8x32": 2,
    "bert_base_uncased_from_scratch_gaudi2_8x64": 2,
    "bloom_7b1_gaudi1_8x8": 2,
    "chatglm3_6b_gaudi2_8x4": 3,
    "chatglm3_6b_gaudi3_8x4": 3,
    "codellama_13b_instruct_hf_gaudi2_8x48": 3,
    "codellama_13b_instruct_hf_gaudi3_8x48": 3,
    "falcon_40b_gaudi2_8x1_lora_finred": 3,
    "falcon_40b_gaudi2_8x1_lora_guanaco": 3,
    "falcon_40b_gaudi3_8x1_lora_finred": 3,
    "falcon_40b_gaudi3_8x1_lora_guanaco": 3,
    "flan_t5_xxl_gaudi2_8x22": 6,
    "flan_t5_xxl_gaudi3_8x22": 3,
    "flux_1_schnell_gaudi2_1x1": 1,
    "flux_1_schnell_gaudi3_1x1": 1,
    "gemma_2b_it_gaudi2_1x4": 3,
    "gemma_2b_it_gaudi2_1x4_eager": 3,
    "gemma_2b_it_gaudi2_8x4": 3,
    "gemma_2b_it_gaudi2_8x4_deepspeed": 3,
    "gemma_2b_it_gaudi2_8x4_deepspeed_lr8e4": 3,
    "gemma_2b_it_gaudi2_8x4_lr8e4": 1,
    "gemma_2b_it_gaudi3_1x4": 3,
    "gemma_2b_it_gaudi3_1x4_eager": 3,
    "gemma_2b_it_gaudi3_8x4": 3,
    "gemma_2b_it_gaudi3_8x4_deepspeed": 3,
    "gpt2_gaudi1_1x4": 3,
    "gpt2_gaudi1_8x4": 3,
    "gpt2_gaudi2_1x16": 3,
    "gpt2_gaudi2_8x16": 3,
    "gpt2_unspecified_1x4": 2,
    "gpt2_unspecified_8x4": 2,
    "gpt2_xl_gaudi1_8x2": 3,
    "gpt2_xl_gaudi2_8x16": 6,
    "gpt2_xl_gaudi3_8x16": 3,
    "gpt_j_6b_unspecified_8x4": 2,
    "gpt_neox_20b_gaudi2_16x2": 2,
    "gpt_neox_20b_gaudi2_8x2": 3,
    "gpt_neox_20b_gaudi3_8x2": 3,
    "granite_3_1_8b_instruct_gaudi2_8x8_lora_alpaca_fsdp": 2,
    "granite_3_1_8b_instruct_gaudi3_8x8_lora_alpaca_fsdp": 2,
    "llama_2_7b_hf_gaudi2_8x8_lora_alpaca_fsdp": 2,
    "llama_2_7b_hf_gaudi3_8x8_lora_alpaca_fsdp": 2,
    "llama_7b_gaudi1_1x2_lora_dolly": 3,
    "llama_7b_gaudi1_8x2_lora_alpaca": 3,
    "llama_7b_gaudi2_1x16_lora_dolly": 3,
    "llama_7b_gaudi2_8x16_lora_alpaca_fp8": 3,
    "llama_7b_gaudi2_8x8_lora_alpaca": 3,
    "llama_7b_gaudi2_8x8_lora_alpaca_cp": 3,
    "llama_7b_gaudi2_8x8_lora_alpaca_fsdp": 3,
    "llama_7b_gaudi2_8x8_lora_finred": 3,
    "llama_7b_gaudi3_1x16_lora_dolly": 3,
    "llama_7b_gaudi3_8x16_lora_alpaca_fp8": 3,
    "llama_7b_gaudi3_8x8_lora_alpaca": 3,
    "llama_7b_gaudi3_8x8_lora_alpaca_cp": 3,
    "llama_7b_gaudi3_8x8_lora_alpaca_fsdp": 3,
    "llama_7b_gaudi3_8x8_lora_finred": 3,
    "meta_llama_3_1_8b_gaudi2_8x1_lora_alpaca_fp8": 2,
    "mistral_7b_instruct_v0_2_gaudi2_1x8_lora_alpaca_fp8": 2,
    "mistral_7b_instruct_v0_2_gaudi3_1x8_lora_alpaca_fp8": 2,
    "qwen_image_gaudi2_1x1": 1,
    "qwen_image_gaudi3_1x1": 1,
    "roberta_base_gaudi1_8x24": 3,
    "roberta_base_gaudi2_8x32": 3,
    "roberta_large_gaudi1_8x8": 3,
    "roberta_large_gaudi2_8x16": 3,
    "roberta_large_gaudi3_8x16": 3,
    "stable_diffusion_2_1_gaudi1_1x7": 1,
    "stable_diffusion_2_1_gaudi2_1x7": 1,
    "stable_diffusion_2_1_gaudi3_1x7": 1,
    "stable_diffusion_2_inpainting_gaudi1_1x4": 1,
    "stable_diffusion_2_inpainting_gaudi2_1x4": 1,
    "stable_diffusion_2_inpainting_gaudi3_1x4": 1,
    "stable_diffusion_3_medium_diffusers_gaudi2_1x1": 1,
    "stable_diffusion_3_medium_diffusers_gaudi3_1x1": 1,
    "stable_diffusion_v1_4_a100_80g_1x1": 1,
    "stable_diffusion_v1_4_gaudi1_1x7": 2,
    "stable_diffusion_v1_4_gaudi1_1x8": 1,
    "stable_diffusion_v1_4_gaudi2_1x7": 2,
    "stable_diffusion_v1_4_gaudi2_1x8": 1,
    "stable_diffusion_v1_4_gaudi3_1x7": 2,
    "stable_diffusion_xl_1_0_inpainting_0_1_gaudi1_1x4": 1,
    "stable_diffusion_xl_1_0_inpainting_0_1_gaudi2_1x4": 1,
    "stable_diffusion_xl_1_0_inpainting_0_1_gaudi3_1x4": 1,
    "stable_diffusion_xl_base_1_0_gaudi1_1x7": 1,
    "stable_diffusion_xl_base_1_0_gaudi2_1x7": 1,
    "stable_diffusion_xl_base_1_0_gaudi3_1x7": 1,
    "swin_base_patch4_window7_224_in22k_gaudi1_1x64": 3,
    "swin_base_patch4_window7_224_in22k_gaudi1_8x64": 3,
    "swin_base_patch4_window7_224_in22k_gaudi2_1x160": 6,
    "swin_base_patch4_window7_224_in22k_gaudi2_8x160": 3,
    "swin_base_patch4_window7_224_in22k_gaudi3_1x160": 3,
    "swin_base_patch4_window7_224_in22k_gaudi3_8x160": 3,
    "t5_3b_a100_80g_8x16": 1,
    "t5_3b_gaudi1_1x2": 2,
    "t5_3b_gaudi2_1x2": 2,
    "t5_3b_gaudi2_8x1": 1,
    "t5_3b_gaudi3_1x2": 2,
    "t5_small_gaudi1_8x4": 4,
    "t5_small_gaudi2_8x32": 4,
    "vit_base_patch16_224_in21k_gaudi1_1x64": 3,
    "vit_base_patch16_224_in21k_gaudi1_8x64": 3,
    "vit_base_patch16_224_in21k_gaudi2_1x128": 6,
    "vit_base_patch16_224_in21k_gaudi2_8x128": 3,
    "vit_base_patch16_224_in21k_gaudi3_1x128": 3,
    "vit_base_patch16_224_in21k_gaudi3_8x128": 3,
}
# The name of a published figure's file is its own; a run without a model and data has its recipe's name in front.
RUN_FILES = {
    path.stem if path.stem in FIGURES else f"{path.parent.name}/{path.stem}": path
    for path in sorted((REPOSITORY / "recipes").glob("*/*.json"))
}
PUBLISHED = [name for name, path in RUN_FILES.items() if json.loads(path.read_text(encoding="utf-8")).get("published")]
METRIC = re.compile(
    r"(train|eval|predict)_(rouge(1|2|L|Lsum)|runtime|samples_per_second|loss|accuracy)|perplexity"
    r"|generate_(images_per_second|seconds_per_image|clip_score)"
)
TEXTS = ("model", "device", "source")
NUMBERS = ("value", "world_size", "batch_size")


@functools.cache
def asked_by(recipe: str) -> tuple[tuple[type, ...], dict[str, Any]]:
    """What a recipe's ``main`` parses with: its argument dataclasses besides the shared ones, and the options."""
    module, asked = load_recipe(recipe), []

    def ask(argv: list[str], *groups: type, built_in: object = None, **options: Any) -> None:
        asked.append((groups, options))
        raise InterruptedError

    module.parse_arguments = ask
    with suppress(InterruptedError):
        module.main([])
    return asked[0]


def groups_of(recipe: str) -> tuple[type, ...]:
    return asked_by(recipe)[0]


@functools.cache
def parse(path: Path) -> Namespace:
    groups, options = asked_by(path.parent.name)
    return parse_arguments(["--config", str(path)], *groups, **options)


@pytest.fixture(params=RUN_FILES)
def path(request) -> Path:
    return RUN_FILES[request.param]


@pytest.fixture(params=PUBLISHED)
def published(request) -> Path:
    return RUN_FILES[request.param]


def test_no_figure_is_lost():
    assert {name: len(read_run_file(RUN_FILES[name])["published"]) for name in PUBLISHED} == FIGURES
    assert len(RUN_FILES) == len(list((REPOSITORY / "recipes").glob("*/*.json"))), "no two recipes use one name"


def test_the_flags_are_the_recipes_and_keep_their_values(path):
    content = read_run_file(path)
    args = parse(path)
    parser = StrictParser(groups_of(path.parent.name), "")
    assert parser.get_default("config") is None, "recipes do not redefine shared flags"
    changed = set().union(*(SUBSTITUTES[name][1] for name in content["args"].keys() & SUBSTITUTES.keys()))
    kept = content["args"].keys() - INSTEAD.keys() - (changed - {"bf16"})
    assert {name: content["args"][name] for name in kept} == {name: getattr(args, name) for name in kept}
    assert content["description"].endswith(".")


def test_configurations_that_it_names_exist_and_do_not_contradict_it(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args = parse(path)
    gaudi_config = GaudiConfig.from_pretrained(args.gaudi_config)
    if args.deepspeed:
        world_size = args.run_file["published"][0]["world_size"]
        config = resolve(
            load(args.deepspeed), args, world_size, hidden_size=64, total_steps=20, gaudi_config=gaudi_config
        )
        assert config["bf16"]["enabled"] == args.bf16


def test_the_command_is_one_that_can_be_typed(published):
    content = read_run_file(published)
    own = published.relative_to(REPOSITORY).as_posix()
    words = [word for word in shlex.split(content["command"]) if not re.fullmatch(r"[A-Z_0-9]+=\S+", word)]
    launcher = words[1 : words.index(f"recipes/{published.parent.name}/run.py")]
    world_size = content["published"][0]["world_size"]
    assert words[0] == "python"
    assert words[-3:] == [f"recipes/{published.parent.name}/run.py", "--config", own]
    if world_size == 1:
        assert launcher == []
    else:
        assert launcher[:3] == ["gaudi_spawn.py", "--world_size", str(world_size)]
        machines = ["--hostfile", "hostfile"] if world_size > 8 else []
        assert launcher[3:] in (machines, [*machines, "--use_mpi"], [*machines, "--use_deepspeed"])
        assert ("--use_deepspeed" in launcher) == ("deepspeed" in content["args"])


def slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.rpartition("/")[2].lower()).strip("_")


def variants(args: dict) -> dict[str, bool]:
    """What a name may say after model, device and batch, and whether that is true."""
    data = ("alpaca", "dolly", "finred", "guanaco")
    return {
        "lora": "lora_rank" in args,
        **{name: "lora_rank" in args and name in args["dataset_name"] for name in data},
        "fp8": "fp8" in args,
        "fsdp": "fsdp" in args,
        "cp": "context_parallel_size" in args,
        "eager": args.get("use_lazy_mode") is False and "torch_compile" not in args,
        "deepspeed": "deepspeed" in args,
        "lr8e4": args.get("learning_rate") == 8e-4,
    }


def test_the_name_says_model_device_batch_and_what_is_special(published):
    content = read_run_file(published)
    for figure in content["published"]:
        sizes = f"{figure['world_size']}x{figure['batch_size']}"
        usual = f"{slug(figure['model'])}_{slug(figure['device'])}_{sizes}"
        assert re.fullmatch(f"{usual}(_.*)?", published.stem)
    said, true = published.stem[len(usual) :].split("_")[1:], variants(content["args"])
    assert all(true[word] for word in said)
    two_of_a_kind = ("deepspeed", "lr8e4")  # said only where a neighbour differs in nothing else
    assert {name for name, is_so in true.items() if is_so} - set(two_of_a_kind) <= set(said)


def test_figures_are_numbers_with_provenance(published):
    figures = read_run_file(published)["published"]
    for figure in figures:
        assert figure["status"] == "reported elsewhere"
        assert METRIC.fullmatch(figure["metric"])
        texts = TEXTS if figure["metric"].startswith("generate_") else (*TEXTS, "data")
        assert all(isinstance(figure[key], str) and figure[key].strip() for key in texts)
        assert all(type(figure[key]) in (int, float) and 0 < figure[key] < math.inf for key in NUMBERS)
        assert re.fullmatch(r"(<=|>=) (0\.\d+|1\.\d+)\*value|", figure.get("pass_rule", ""))
        assert figure.get("historical", True) is True
    named = [(figure["metric"], figure.get("historical")) for figure in figures]
    assert len(set(named)) == len(named), "one value a metric"


def test_a_figures_flags_are_those_of_the_file(published):
    content = read_run_file(published)
    for figure in content["published"]:
        flags = {name: value for name, value in figure.items() if name not in ABOUT_FIGURE}
        assert flags == {name: content["args"].get(name) for name in flags}


def test_a_run_on_the_published_device_is_comparable_and_one_on_a_laptop_is_not(published):
    args = parse(published)
    for figure in args.run_file["published"]:
        mode = "compile" if args.torch_compile else "lazy" if args.use_lazy_mode else "eager"
        there = {"name": figure["device"], "execution_mode": mode, "world_size": figure["world_size"]}
        otherwise = ["precision: bf16, not fp16"] if figure.get("precision") == "fp16" else []
        if figure.get("execution") == "compile" and "fsdp" in read_run_file(published)["args"]:
            otherwise.append(f"execution: {mode}, not compile")
        otherwise += [f"{name}: {INSTEAD[name]}, not {figure[name]}" for name in figure if name in INSTEAD]
        assert differences(figure, {"arguments": vars(args), "device": there}) == otherwise
        laptop = {"arguments": vars(args), "device": {"name": "cpu (some model)", "execution_mode": "eager"}}
        assert differences(figure, laptop)[0] == f"device: cpu (some model), not {figure['device']}"
    table = compare_with_published(args.run_file["published"], {}, laptop)
    assert all("reported elsewhere" in row for row in table[1:])


def test_caveats_stand_beside_the_figures(published):
    content = read_run_file(published)
    figures, caveats = content["published"], " ".join(content["caveats"])
    assert content["caveats"]
    assert all(isinstance(caveat, str) and caveat.endswith(".") for caveat in content["caveats"])
    assert any(figure.get("historical", False) for figure in figures) == ("Historical" in caveats)
    assert ("max_steps" in content["args"]) == ("max_steps" in caveats)
    throughput = any(figure["metric"].endswith("samples_per_second") and "pass_rule" in figure for figure in figures)
    throughput |= any(figure["metric"].endswith(("images_per_second", "seconds_per_image")) for figure in figures)
    assert not throughput or f"leave out the first {content['args']['throughput_warmup_steps']} " in caveats
    assert (content["args"].keys() & INSTEAD.keys() != set()) == ("the figures are not comparable" in caveats)
    assert any(figure["device"] == "unspecified" for figure in figures) == ("which generation" in caveats)
    assert "measured here" not in json.dumps(content).lower()


def figures_of(name: str) -> dict[str, float]:
    """Values of a run file that still stand, by metric."""
    figures = read_run_file(RUN_FILES[name])["published"]
    return {figure["metric"]: figure["value"] for figure in figures if "historical" not in figure}


@pytest.mark.parametrize(
    ("new", "old", "metric", "most"),
    [
        ("bart_large_cnn_gaudi3_1x2", "bart_large_cnn_gaudi2_1x2", "predict_rougeLsum", 0.6),
        ("bart_large_cnn_gaudi3_1x2", "bart_large_cnn_gaudi2_1x2", "predict_samples_per_second", 0.6),
        ("roberta_large_gaudi3_8x16", "roberta_large_gaudi2_8x16", "train_samples_per_second", 0.95),
        (
            "swin_base_patch4_window7_224_in22k_gaudi3_8x160",
            "swin_base_patch4_window7_224_in22k_gaudi2_8x160",
            "train_samples_per_second",
            0.85,
        ),
        (
            "vit_base_patch16_224_in21k_gaudi3_8x128",
            "vit_base_patch16_224_in21k_gaudi2_8x128",
            "train_samples_per_second",
            0.99,
        ),
        (
            "llama_7b_gaudi3_8x8_lora_alpaca_fsdp",
            "llama_7b_gaudi2_8x8_lora_alpaca_fsdp",
            "train_samples_per_second",
            0.8,
        ),
    ],
)
def test_a_regression_that_became_a_baseline_is_called_one(new, old, metric, most):
    assert figures_of(new)[metric] < most * figures_of(old)[metric]
    assert "regression" in read_run_file(RUN_FILES[new])["caveats"][0]


def test_values_that_nobody_measured_say_so():
    """Copies from another device or data set, bounds entered by hand, and runs that diverged."""
    pairs = [
        (name, old) for name in PUBLISHED if (old := name.replace("gaudi3", "gaudi2")) != name and old in PUBLISHED
    ]
    pairs += [("llama_7b_gaudi2_8x8_lora_finred", "llama_7b_gaudi2_8x8_lora_alpaca")]
    pairs += [("swin_base_patch4_window7_224_in22k_gaudi2_1x160", "swin_base_patch4_window7_224_in22k_gaudi1_1x64")]
    for new, old in pairs:
        there = {(figure["metric"], figure["value"]) for figure in read_run_file(RUN_FILES[old])["published"]}
        words = " ".join(read_run_file(RUN_FILES[new])["caveats"]).lower()
        assert not there & set(figures_of(new).items()) or "copied" in words or "entered by hand" in words, new
    for name in PUBLISHED:
        words = " ".join(read_run_file(RUN_FILES[name])["caveats"])
        figures = read_run_file(RUN_FILES[name])["published"]
        bounds = [f for f in figures if "pass_rule" in f and f["metric"] == "train_runtime" and f["value"] % 1 == 0]
        assert bool(bounds) <= ("entered by hand" in words), name
        assert any(f["metric"] == "perplexity" and f["value"] > 100 for f in figures) == ("diverged" in words), name


def test_runs_of_one_model_differ_only_where_their_devices_do():
    for name in ("bart_large_cnn", "t5_3b"):
        args = [read_run_file(RUN_FILES[f"{name}_gaudi{generation}_1x2"])["args"] for generation in (1, 2, 3)]
        assert args[0] == args[1] == args[2]
    published_otherwise = {"llama_7b_gaudi3_8x8_lora_finred": {"dataloader_drop_last"}}
    pairs = [(name, name.replace("gaudi3", "gaudi2")) for name in PUBLISHED if "gaudi3" in name]
    assert len(pairs) > 20
    for new, old in pairs:
        args = [read_run_file(RUN_FILES[name])["args"] for name in (old, new)]
        changed = {name for name in args[0] | args[1] if args[0].get(name) != args[1].get(name)}
        assert changed == published_otherwise.get(new, set()), new


def test_what_is_drawn_leaves_batches_to_time():
    drawing = [name for name in PUBLISHED if "do_generate" in read_run_file(RUN_FILES[name])["args"]]
    assert len(drawing) == 24
    for name in drawing:
        content = read_run_file(RUN_FILES[name])
        args, caveats = content["args"], " ".join(content["caveats"])
        assert args["scheduler"] == "default" or args["timestep_spacing"] == "leading", "as measured: the model's own"
        images = args["num_images_per_prompt"] * len(args["prompts"])
        assert images % args["batch_size"] == 0, "no image only fills a batch"
        left = images // args["batch_size"] - args["throughput_warmup_steps"]
        assert left > 0
        assert f"of {images} images in batches of " in caveats
        assert (f", {left} batches are left" if left > 1 else ", one batch is left") in caveats
        assert all(figure["batch_size"] == args["batch_size"] for figure in content["published"])


def test_the_articles_latencies_make_the_ratios_that_it_prints():
    latency = {
        device: figures_of(f"stable_diffusion_v1_4_{device}_1x{batch}")["generate_seconds_per_image"]
        for device, batch in (("gaudi1", 8), ("gaudi2", 8), ("a100_80g", 1))
    }
    ratios = {device: f"x{latency['gaudi1'] / seconds:.2f}" for device, seconds in latency.items()}
    assert ratios == {"gaudi1": "x1.00", "gaudi2": "x3.51", "a100_80g": "x1.24"}
