"""Run files: one per published run, parsed by its own recipe, with provenance, and comparable with its own figures."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import re
import shlex
from pathlib import Path

import pytest

from core.arguments import StrictParser, parse_arguments, read_run_file
from core.deepspeed_config import load, resolve
from core.gaudi_config import GaudiConfig
from core.results import ABOUT_FIGURE, compare_with_published, differences
from tests.conftest import REPOSITORY, load_recipe

RUN_FILES = {path.stem: path for path in sorted((REPOSITORY / "recipes").glob("*/*.json"))}
PUBLISHED = [name for name, path in RUN_FILES.items() if json.loads(path.read_text(encoding="utf-8")).get("published")]
# How many figures each file carries: a lost one fails here, a new one is entered here.
FIGURES = {
    "bart_large_cnn_gaudi1_1x2": 2,
    "bart_large_cnn_gaudi2_1x2": 2,
    "bart_large_cnn_gaudi3_1x2": 2,
    "flan_t5_xxl_gaudi2_8x22": 6,
    "flan_t5_xxl_gaudi3_8x22": 3,
    "t5_3b_a100_80g_8x16": 1,
    "t5_3b_gaudi1_1x2": 2,
    "t5_3b_gaudi2_1x2": 2,
    "t5_3b_gaudi2_8x1": 1,
    "t5_3b_gaudi3_1x2": 2,
    "t5_small_gaudi1_8x4": 4,
    "t5_small_gaudi2_8x32": 4,
}
METRIC = re.compile(r"(train|eval|predict)_(rouge(1|2|L|Lsum)|runtime|samples_per_second|loss)")
TEXTS = ("model", "data", "device", "source")
NUMBERS = ("value", "world_size", "batch_size")


@functools.cache
def groups_of(recipe: str) -> tuple[type, ...]:
    """The argument dataclasses that a recipe defines."""
    module = load_recipe(recipe)
    own = [thing for thing in vars(module).values() if dataclasses.is_dataclass(thing)]
    return tuple(thing for thing in own if thing.__module__ == module.__name__)


def parse(path: Path):
    return parse_arguments(["--config", str(path)], *groups_of(path.parent.name), description="")


@pytest.fixture(params=RUN_FILES)
def path(request) -> Path:
    return RUN_FILES[request.param]


@pytest.fixture(params=PUBLISHED)
def published(request) -> Path:
    return RUN_FILES[request.param]


def test_no_figure_is_lost():
    assert {name: len(read_run_file(RUN_FILES[name])["published"]) for name in PUBLISHED} == FIGURES


def test_the_flags_are_the_recipes_and_keep_their_values(path):
    content = read_run_file(path)
    args = parse(path)
    parser = StrictParser(groups_of(path.parent.name), "")
    assert parser.get_default("config") is None, "recipes do not redefine shared flags"
    assert content["args"] == {name: getattr(args, name) for name in content["args"]}
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
        assert launcher[3:] in ([], ["--use_mpi"], ["--use_deepspeed"])
        assert ("--use_deepspeed" in launcher) == ("deepspeed" in content["args"])


def test_the_name_says_model_device_and_batch(published):
    for figure in read_run_file(published)["published"]:
        model, device = (text.rpartition("/")[2].replace("-", "_") for text in (figure["model"], figure["device"]))
        assert published.stem == f"{model}_{device}_{figure['world_size']}x{figure['batch_size']}"


def test_figures_are_numbers_with_provenance(published):
    figures = read_run_file(published)["published"]
    for figure in figures:
        assert figure["status"] == "reported elsewhere"
        assert METRIC.fullmatch(figure["metric"])
        assert all(isinstance(figure[key], str) and figure[key].strip() for key in TEXTS)
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
        mode = "lazy" if args.use_lazy_mode else "eager"
        there = {"name": figure["device"], "execution_mode": mode, "world_size": figure["world_size"]}
        assert differences(figure, {"arguments": vars(args), "device": there}) == []
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
    assert not throughput or "leave out the first 3" in caveats
    assert "measured here" not in json.dumps(content).lower()


def test_a_regression_that_became_a_baseline_is_called_one():
    caveat = read_run_file(RUN_FILES["bart_large_cnn_gaudi3_1x2"])["caveats"][0]
    slower = {
        name: read_run_file(RUN_FILES[f"bart_large_cnn_{name}_1x2"])["published"] for name in ("gaudi2", "gaudi3")
    }
    assert all(new["value"] < 0.6 * old["value"] for old, new in zip(slower["gaudi2"], slower["gaudi3"], strict=True))
    assert "regression" in caveat


def test_runs_of_one_model_differ_only_where_their_devices_do():
    for name in ("bart_large_cnn", "t5_3b"):
        args = [read_run_file(RUN_FILES[f"{name}_gaudi{generation}_1x2"])["args"] for generation in (1, 2, 3)]
        assert args[0] == args[1] == args[2]
    flan = [read_run_file(RUN_FILES[f"flan_t5_xxl_gaudi{generation}_8x22"])["args"] for generation in (2, 3)]
    assert flan[0] == flan[1]
