"""Files that somebody has made to do harm: nothing is unpickled or run, no name leads out, and nothing hangs."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from core import adapters, checkpoint, deepspeed_config, feature_cache, prompts
from core.arguments import parse_arguments
from core.encoders import ORIGIN, _check_origin
from core.errors import UserError, read_json_object
from core.gaudi_config import GaudiConfig
from core.hub import HubArguments, load_splits, loading
from core.launcher import read_hostfile
from core.run_files import read_run_file
from tests.conftest import REPOSITORY, load_recipe, save_captioned

# ------------------------------------------------------------------------------------------- nothing here unpickles

MODULES = {"pickle", "_pickle", "cPickle", "dill", "joblib", "shelve", "marshal", "cloudpickle", "jsonpickle", "runpy"}
NAMES = {
    "torch.load", "torch.jit.load", "torch.hub.load", "torch.package", "pandas.read_pickle", "yaml.load",
    "yaml.load_all", "yaml.full_load", "yaml.unsafe_load", "importlib.util.spec_from_file_location",
    "importlib.machinery.SourceFileLoader", "os.system", "os.popen",
}  # fmt: skip
BUILT_IN = {"eval", "exec", "compile", "__import__"}
# What may be True in nobody's call, and what in nobody's call may be anything else.
FORBIDDEN_ON, REQUIRED_ON = {"allow_pickle", "trust_remote_code", "shell"}, {"weights_only", "use_safetensors"}
BY_NAME = "importlib.import_module"
ALLOWED = {
    ("core/untrusted.py", "torch.load"): "takes its place, so that nobody calls it",
    ("core/pipelines.py", "trust_remote_code=args.trust_remote_code"): "the user's own flag",
    ("core/device.py", BY_NAME): "the bridge's submodules",
    ("core/sample_data.py", BY_NAME): "this project's own module, in another process",
    ("hpu_simulator/build.py", "importlib.util.spec_from_file_location"): "the library that it has just built",
    ("hpu_simulator/bridge/habana_frameworks/_simulator.py", "importlib.util.spec_from_file_location"): "itself",
    ("hpu_simulator/bridge/habana_frameworks/_simulator.py", BY_NAME): "itself",
    ("benchmarks/ours.py", "importlib.util.spec_from_file_location"): "a recipe, which is a file",
    ("benchmarks/", BY_NAME): "contests and sides, by their modules' names",
    ("tests/", BY_NAME): "this project's own modules",
    ("tests/", "exec"): "text that the project itself has written",
    ("tests/", "eval"): "text that the project itself has written",
}


def dotted(node: ast.expr, names: dict[str, str]) -> str:
    """What a name or attribute stands for, by the file's imports, such as ``torch.load``."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value, names)}.{node.attr}"
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def imported(node: ast.Import | ast.ImportFrom) -> dict[str, str]:
    """Names that a statement makes, and what each stands for."""
    if isinstance(node, ast.ImportFrom):
        return {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    whole = {alias.asname: alias.name for alias in node.names if alias.asname}
    return whole | {first: first for first in (a.name.partition(".")[0] for a in node.names if not a.asname)}


def dangers(text: str) -> Iterator[str]:
    """What in a file unpickles, or runs what it has read."""
    tree = ast.parse(text)
    statements = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {name: what for node in statements for name, what in imported(node).items()}
    for node in statements:
        listed = [alias.name for alias in node.names]
        whole = [f"{node.module}.{name}" for name in listed] if isinstance(node, ast.ImportFrom) else listed
        yield from (name for name in whole if name.partition(".")[0] in MODULES or name in NAMES)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and dotted(node, names) in NAMES:
            yield dotted(node, names)
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func, names)
        if called in BUILT_IN or (called == BY_NAME and not isinstance(node.args[0], ast.Constant)):
            yield called
        for word in node.keywords:
            value = word.value.value if isinstance(word.value, ast.Constant) else ...
            if (word.arg in FORBIDDEN_ON and value not in (False, None)) or (word.arg in REQUIRED_ON and not value):
                yield f"{word.arg}={ast.unparse(word.value)}"


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from pickle import loads", "import dill as d", "import torch.package"),
        *("import torch\ntorch.load('x')", "import torch as t\nopen_it = t.load", "from torch import load"),
        *("import numpy as np\nnp.load('x', allow_pickle=True)", "load(x, weights_only=False)", "eval(text)"),
        *("import yaml\nyaml.load(text)", "f(trust_remote_code=True)", "f(use_safetensors=False)", "run(shell=True)"),
        *("import importlib\nimportlib.import_module(name)", "from pandas import read_pickle", "__import__(name)"),
    ],
)
def test_the_search_finds(text):
    assert list(dangers(text))


def test_nothing_in_the_tree_unpickles_or_runs_what_it_reads():
    found, used = [], set()
    for folder in ("core", "recipes", "hpu_simulator", "benchmarks", "tests", "gaudi_spawn.py"):
        place = REPOSITORY / folder
        for path in [place] if place.is_file() else sorted(place.rglob("*.py")):
            name = path.relative_to(REPOSITORY).as_posix()
            for what in dangers(path.read_text(encoding="utf-8")):
                reason = next((key for key in ALLOWED if name.startswith(key[0]) and what == key[1]), None)
                used.add(reason)
                found += [] if reason else [f"{name}: {what}"]
    assert not found
    assert used - {None} == set(ALLOWED)  # what nobody needs any more is taken out


LOADERS = ["recipes/*/run.py", "core/pipelines.py", "core/drawing.py", "core/clip_score.py"]


@pytest.mark.parametrize("pattern", LOADERS)
def test_whoever_loads_weights_asks_for_safetensors(pattern):
    """Else gigabytes of pickles would be fetched, only to be refused."""
    for path in REPOSITORY.glob(pattern):
        text = path.read_text(encoding="utf-8")
        assert re.search(r"use_safetensors\"?[=:] ?True", text) or "text_to_image" in path.parts, path


# ------------------------------------------------------------------------------------------------- weights of others


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """What hostile code leaves when it runs. It never does."""
    path = tmp_path / "it-has-run"
    yield path
    assert not path.exists()


def write_payload(path: Path, marker: Path) -> None:
    """A pickle that makes ``marker``: the oldest format, which every loader takes."""
    path.write_bytes(f"cbuiltins\nopen\n(V{marker}\nVw\ntR.".encode())


def copy(model: Path, folder: Path) -> Path:
    shutil.copytree(model, folder)
    return folder


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_the_payload_is_one(tmp_path):
    write_payload(tmp_path / "x.bin", tmp_path / "made")
    code = f"import pickle; pickle.load(open({str(tmp_path / 'x.bin')!r}, 'rb'))"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert (tmp_path / "made").exists()


MODELS = {
    "summarization": "tiny_t5",
    "language_modeling": "tiny_gpt2",
    "image_classification": "tiny_vit",
    "text_to_image": "tiny_sd",
}
DATA = {"summarization": "pair_files", "language_modeling": "text_files", "image_classification": "picture_folders"}


class Recipe:
    """A recipe's ``main`` that evaluates, or draws, with a model of somebody else's."""

    def __init__(self, name: str, request: pytest.FixtureRequest, folder: Path) -> None:
        self.name, self.folder, self.main = name, folder, request.getfixturevalue(name).main
        self.model = copy(request.getfixturevalue(MODELS[name]), folder / "model")
        self.weights = self.model / ("unet/diffusion_pytorch_model" if name == "text_to_image" else "model")
        flags = "--do_generate --prompts alpha --num_inference_steps 1" if name == "text_to_image" else "--do_eval"
        self.flags = [*flags.split(), "--disable_tqdm", "--report_to", "none", "--use_cpu"]
        files = request.getfixturevalue(DATA[name]) if name in DATA else {}
        self.flags += [word for item in files.items() if "validation" in item[0] for word in item]

    def run(self, *flags: Any) -> dict[str, Any]:
        named = ["--model_name_or_path", self.model, "--output_dir", self.folder / "run"]
        return self.main(list(map(str, [*named, *self.flags, "--cache_dir", self.folder / "cache", *flags])))

    def refused(self, *flags: Any) -> str:
        with pytest.raises(UserError) as error:
            self.run(*flags)
        assert "\n" not in str(error.value)
        return str(error.value)


def refusal(load: Callable[[], Any], folder: Path | None = None) -> str | None:
    """The line that refuses what ``load`` loads; None if nothing does."""
    try:
        with loading(f"the model {folder}", str(folder) if folder else None):
            load()
    except UserError as error:
        said = str(error)
    else:
        return None
    assert len(said) < 1000
    assert "\n" not in said
    return said


@pytest.fixture
def recipe(request: pytest.FixtureRequest, tmp_path: Path) -> Recipe:
    return Recipe(request.param, request, tmp_path)


ALL, TEXTS = ("recipe", list(MODELS)), ("recipe", ["summarization", "language_modeling"])


@pytest.mark.parametrize(*ALL, indirect=True)
def test_pickled_weights_are_refused_with_what_to_do(recipe, marker):
    weights = Path(f"{recipe.weights}.safetensors")
    weights.rename(recipe.folder / "away.safetensors")
    write_payload(weights.with_name({"model": "pytorch_model"}.get(weights.stem, weights.stem) + ".bin"), marker)
    said = recipe.refused()
    assert "its weights are in no file of safetensors; pickled ones (.bin, .pt) can run code" in said
    command = shlex.split(said.partition("where you trust it, convert it once: ")[2])
    assert command[:2] == ["python", "-c"]
    assert str(weights.parent) in command[2]
    ast.parse(command[2])
    (recipe.folder / "away.safetensors").rename(weights)
    assert not marker.exists()
    assert recipe.run()  # and with them it works, although the others are still there


@pytest.mark.parametrize(*ALL, indirect=True)
def test_an_index_that_names_pickled_weights_is_refused(recipe, marker):
    weights = Path(f"{recipe.weights}.safetensors")
    from safetensors import safe_open

    with safe_open(weights, "numpy") as file:
        places = dict.fromkeys(file.keys(), "x.bin")
    weights.unlink()
    write_payload(weights.with_name("x.bin"), marker)
    Path(f"{weights}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    assert "convert it once: python -c " in recipe.refused()


@pytest.mark.parametrize(*TEXTS, indirect=True)
@pytest.mark.parametrize("how", ["beside", "named"])
def test_pickled_adapters_of_a_model_are_refused(recipe, marker, how):
    write_payload(recipe.model / "adapter_model.bin", marker)
    if how == "beside":  # transformers puts them into the model
        names = {"peft_type": "LORA", "r": 2, "target_modules": ["q", "c_attn"], "fan_in_fan_out": True}
        (recipe.model / "adapter_config.json").write_text(json.dumps(names))
    else:
        edit(recipe.model / "config.json", transformers_weights="adapter_model.bin")
    assert "safetensors" in recipe.refused()


@pytest.mark.parametrize("recipe", ["text_to_image"], indirect=True)
@pytest.mark.parametrize("part", ["text_encoder", "vae", "named vae", "unet adapters", "lora"])
def test_no_part_of_a_pipeline_is_unpickled(recipe, marker, part, tiny_sd, tmp_path):
    if part == "text_encoder":
        (recipe.model / part / "model.safetensors").unlink()
        write_payload(recipe.model / part / "pytorch_model.bin", marker)
        assert "import transformers as x; x.CLIPTextModel.from_pretrained(" in recipe.refused()
        return
    folder = recipe.model / "vae" if part == "vae" else copy(tiny_sd / "vae", tmp_path / "other")
    (folder / "diffusion_pytorch_model.safetensors").unlink()
    for name in ("diffusion_pytorch_model", "adapter_model", "pytorch_lora_weights"):
        write_payload(folder / f"{name}.bin", marker)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "target_modules": ["to_q"]}')
    flag = {"named vae": "pretrained_vae_model_name_or_path", "unet adapters": "unet_adapter_name_or_path"}
    said = recipe.refused(*([] if part == "vae" else [f"--{flag.get(part, 'lora_id')}", folder]))
    assert "safetensors" in said


def test_a_model_that_scores_images_is_not_unpickled_and_runs_no_code(tiny_t5, marker, tmp_path, monkeypatch):
    from core.clip_score import clip_score, look_at
    from core.device import select_device

    monkeypatch.setattr("builtins.input", lambda _: "y")  # nobody is asked
    args = parse_arguments(["--do_eval", "--use_cpu"], HubArguments, description="")
    folder = copy(tiny_t5, tmp_path / "scores")
    bring_code(folder, marker, "evil")
    with pytest.raises(UserError, match="it brings Python code of its own, which is not run"):
        look_at(str(folder), args)
    (folder / "evil.py").unlink()
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = {"model_type": "clip", "text_config": sizes, "vision_config": sizes, "architectures": ["CLIPModel"]}
    (folder / "config.json").write_text(json.dumps(config))
    processor = {"image_processor_type": "CLIPImageProcessor", "crop_size": 16, "size": {"shortest_edge": 16}}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "model.safetensors").unlink()
    write_payload(folder / "pytorch_model.bin", marker)
    with pytest.raises(UserError, match=r"import transformers as x; x\.CLIPModel\.from_pretrained"):
        clip_score(str(folder), [], [], args, select_device(args, "eager"))


@pytest.mark.slow
def test_the_command_that_is_told_converts(tiny_t5, tmp_path):
    import torch
    from transformers import AutoModelForSeq2SeqLM

    folder = copy(tiny_t5, tmp_path / "a 'model'")
    model = AutoModelForSeq2SeqLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError) as error, loading("the model", str(folder)):
        AutoModelForSeq2SeqLM.from_pretrained(folder, use_safetensors=True)
    command = shlex.split(str(error.value).partition("convert it once: ")[2])
    subprocess.run([sys.executable, *command[1:]], check=True, capture_output=True, timeout=200)
    again = AutoModelForSeq2SeqLM.from_pretrained(folder, use_safetensors=True).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in model.state_dict().items())


# ------------------------------------------------------------------------------------------------------ code of others


def bring_code(folder: Path, marker: Path, kind: str, base: str = "T5", file: str = "config.json") -> None:
    """Let a folder bring Python that makes ``marker``, for a model of a kind that nobody knows."""
    classes = f"class C(transformers.{base}Config):\n    model_type = {kind!r}\n"
    text = f"import transformers\nopen({str(marker)!r}, 'w').close()\n{classes}"
    (folder / "evil.py").write_text(text)
    edit(folder / file, model_type=kind, auto_map={"AutoConfig": "evil.C"})


@pytest.mark.parametrize("recipe", ["summarization", "language_modeling", "image_classification"], indirect=True)
def test_a_models_code_runs_only_if_asked_for(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")  # nobody is asked
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    ran = tmp_path / "it-has-run"
    base = {"summarization": "T5", "language_modeling": "GPT2", "image_classification": "ViT"}[recipe.name]
    bring_code(recipe.model, ran, f"evil{base}".lower(), base)
    said = recipe.refused()
    assert "it brings Python code of its own, which is not run" in said
    assert "--trust_remote_code" in said
    assert not ran.exists()
    recipe.refused("--trust_remote_code")  # it ran, and brings a configuration without a model
    assert ran.exists()


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("what", ["tokenizer", "processor"])
def test_the_code_of_tokenizers_and_processors_does_not_run(request, what, known, marker, tmp_path, monkeypatch):
    from transformers import AutoImageProcessor, AutoTokenizer

    monkeypatch.setattr("builtins.input", lambda _: "y")
    auto = AutoTokenizer if what == "tokenizer" else AutoImageProcessor
    folder = copy(request.getfixturevalue("tiny_t5" if what == "tokenizer" else "tiny_swin"), tmp_path / "model")
    (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    if what == "tokenizer":
        changes = {"auto_map": {"AutoTokenizer": [None, "evil.E"]}} | ({} if known else {"tokenizer_class": "E"})
        edit(folder / "tokenizer_config.json", **changes)
    else:
        changes = {"auto_map": {"AutoImageProcessor": "evil.E"}} | ({} if known else {"image_processor_type": "E"})
        edit(folder / "preprocessor_config.json", **changes)
        edit(folder / "config.json", model_type="nothing")
    said = refusal(lambda: auto.from_pretrained(folder, trust_remote_code=False), folder)
    assert said is None or "--trust_remote_code" in said  # None: the library's own class has taken its place


@pytest.mark.parametrize("recipe", ["text_to_image"], indirect=True)
@pytest.mark.parametrize("what", ["pipeline", "part", "module", "configuration"])
def test_the_code_of_a_pipeline_does_not_run(recipe, what, marker, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda _: "y")
    evil, index = f"open({str(marker)!r}, 'w').close()\n", recipe.model / "model_index.json"
    for folder in (recipe.model, recipe.model / "unet", recipe.model / "text_encoder"):
        (folder / "evil.py").write_text(evil)
    if what == "pipeline":
        edit(index, _class_name=["evil", "E"])
    elif what == "part":
        edit(index, unet=["evil", "E"])
    elif what == "module":
        edit(index, unet=["os", "system"])
    else:
        edit(index, text_encoder=["transformers", "AutoModel"])
        edit(recipe.model / "text_encoder" / "config.json", model_type="evil", auto_map={"AutoConfig": "evil.E"})
    said = recipe.refused()
    assert str(recipe.model) in said
    assert ("--trust_remote_code" in said) is (what == "part")


def data_args(folder: Path, **names: Any) -> Namespace:
    nothing = dict.fromkeys(("dataset_name", "dataset_config_name", "token"))
    return Namespace(**nothing | {"cache_dir": str(folder / "cache")} | names)


@pytest.mark.parametrize("with_rows", [True, False])
def test_a_data_sets_script_does_not_run(with_rows, marker, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "data.py").write_text(f"open({str(marker)!r}, 'w').close()\n")
    if with_rows:
        (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(UserError, match=r"scripts are no longer supported, but found data\.py"):
        load_splits(data_args(tmp_path, dataset_name=str(folder)), {})


def test_a_data_sets_card_makes_no_objects(marker, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "rows.jsonl").write_text('{"text": "a"}\n')
    (folder / "README.md").write_text(f"---\nconfigs: !!python/object/apply:builtins.open [{marker}, w]\n---\n")
    with pytest.raises(UserError, match="could not determine a constructor"):
        load_splits(data_args(tmp_path, dataset_name=str(folder)), {})


def test_pickles_in_a_data_set_stay_bytes(marker, tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    write_payload(tmp_path / "x", marker)
    with tarfile.open(folder / "train.tar", "w") as tar:
        for name in ("0.pyd", "0.pickle", "0.txt"):
            tar.add(tmp_path / "x", name)
    rows = load_splits(data_args(tmp_path, dataset_name=str(folder)), {})["train"]
    assert rows[0]["pyd"] == rows[0]["pickle"] == (tmp_path / "x").read_bytes()


# ------------------------------------------------------------------------------------------- names that lead elsewhere


def test_an_archive_writes_nowhere_but_into_the_cache(tmp_path):
    folder, row = tmp_path / "a" / "data", b'{"text": "a"}\n'
    folder.mkdir(parents=True)
    names = ["rows.jsonl", "../evil.jsonl", "../../../../../evil.jsonl", str(tmp_path / "evil.jsonl")]
    with zipfile.ZipFile(folder / "train.zip", "w") as archive:
        for name in names:
            archive.writestr(name, row)
    with tarfile.open(folder / "train.tar.gz", "w:gz") as archive:
        link = tarfile.TarInfo("link")
        link.type, link.linkname = tarfile.SYMTYPE, str(tmp_path)
        archive.addfile(link)
        for name in [*names, "link/evil.jsonl"]:
            member = tarfile.TarInfo(name)
            member.size = len(row)
            archive.addfile(member, BytesIO(row))
    for archive in ("train.zip", "train.tar.gz"):
        shutil.copy(folder / archive, tmp_path / "a" / f"{archive}.parquet")
        only = tmp_path / "a" / archive.replace(".", "-")
        only.mkdir()
        shutil.copy(folder / archive, only)
    before = sorted(path for path in tmp_path.rglob("*"))
    tries = [({"dataset_name": str(tmp_path / "a" / name)}, {}) for name in ("data", "train-zip", "train-tar-gz")]
    tries += [({}, {"train": str(tmp_path / "a" / f"train.{kind}.parquet")}) for kind in ("zip", "tar.gz")]
    for names, files in tries:
        refusal(lambda names=names, files=files: load_splits(data_args(tmp_path, **names), files))
    after = sorted(path for path in tmp_path.rglob("*") if not path.is_relative_to(tmp_path / "cache"))
    assert after == before
    assert not list((tmp_path / "cache").rglob("evil*"))
    assert not any(Path(path, "evil.jsonl").exists() for path in tmp_path.parents)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("../outside.png", False),
        ("x/../../outside.png", False),
        ("..\\outside.png", False),
        ("/etc/hostname", False),
        ("{root}/outside.png", False),
        ("{root}/images/00.png", True),
        ("./00.png", True),
        ("x/../00.png", True),
    ],
)
def test_metadata_names_images_of_its_folder_alone(name, inside, tmp_path):
    from core.captions import load_captioned

    folder = save_captioned(tmp_path / "images", 3)
    shutil.copy(folder / "01.png", tmp_path / "outside.png")
    rows = [{"file_name": "01.png", "text": "a"}, {"file_name": name.format(root=tmp_path), "text": "b"}]
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("test_dir", "validation_dir", "train_file", "validation_file", "test_file", "image_column_name")
    args = data_args(tmp_path, **dict.fromkeys((*flags, "caption_column_name")), train_dir=str(folder))
    if inside:
        assert len(load_captioned(args)[0]["train"]) == 2
        return
    with pytest.raises(UserError, match=re.escape(f"{folder / 'metadata.jsonl'}: row 2 names ")) as error:
        load_captioned(args)
    assert f"which is not in {folder}; put the image there" in str(error.value)


@pytest.mark.parametrize(*ALL, indirect=True)
def test_weights_come_from_the_models_folder_alone(recipe):
    from safetensors import safe_open

    weights = Path(f"{recipe.weights}.safetensors")
    with safe_open(weights, "numpy") as file:
        places = dict.fromkeys(file.keys(), os.path.relpath(recipe.folder / "outside.safetensors", weights.parent))
    weights.rename(recipe.folder / "outside.safetensors")
    Path(f"{weights}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    said = recipe.refused()
    assert "outside.safetensors" in said
    assert "not in its folder" in said or "not allowed" in said


def test_kept_features_come_from_their_folder_alone(tmp_path):
    import numpy as np

    folder = tmp_path / "latents-1"
    folder.mkdir()
    np.save(tmp_path / "x.npy", np.zeros(2))
    sizes = {"../x.npy": (tmp_path / "x.npy").stat().st_size}
    (folder / feature_cache.MARKER).write_text(json.dumps({"key": "k", "count": 2, "bytes": sizes}))
    assert "which is not in it" in feature_cache._problem(folder, "k", 2)
    np.save(tmp_path / "objects.npy", np.array([{}, {}]))
    with pytest.raises(ValueError, match="objects"):
        feature_cache.open_array(tmp_path / "objects.npy")


# ------------------------------------------------------------------------------------------------------ broken files

EMPTY_OBJECT = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # sha256 of {}
SOUND = {
    "config": {"args": {"seed": 3}},
    "gaudi_config": {"use_fused_adam": True},
    "deepspeed": {"zero_optimization": {"stage": 2}},
    "checkpoint": {"format": 1, "step": 1, "files": {"blob.json": {"bytes": 2, "sha256": EMPTY_OBJECT}}},
    "learned_from": {"prediction_type": "epsilon"},
    "adapter": {"r": 2},
}


def read_marker(path: Path) -> None:
    if reason := checkpoint.problem(path.parent):
        raise UserError(reason)


def read_prompts(path: Path) -> None:
    names = dict.fromkeys(prompts.PROMPTS) | {"prompts_file": str(path), "num_images_per_prompt": 1, "seed": 1}
    prompts.wanted_images(Namespace(**names))


READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "config": ("run.json", read_run_file),
    "gaudi_config": ("own.json", GaudiConfig.from_pretrained),
    "deepspeed": ("own.json", deepspeed_config.load),
    "checkpoint": (checkpoint.MARKER, read_marker),
    "learned_from": (ORIGIN, lambda path: _check_origin(path.parent, {"prediction_type": "epsilon"})),
    "adapter": (adapters.CONFIG, lambda path: read_json_object(path, "checkpoint")),
    "prompts": ("prompts.txt", read_prompts),
    "hostfile": ("hosts", read_hostfile),
    "train_file": ("rows.jsonl", lambda path: load_splits(data_args(path.parent), {"train": str(path)})),
}
CONTENTS = {
    "empty": b"",
    "latin-1": b'{"a": "\xe4"}',
    "bom": b"\xef\xbb\xbf{",
    "deep": b"[" * 100_000,
    "list": b"[1]",
    "number": b"3",
    "string": b'"x"',
    "null": b"null",
    "nan": b'{"args": NaN, "files": NaN}',
    "twice": b'{"args": {}, "args": {}}',
    "long": b'{"a": ' + b"9" * 5000 + b"}",
    "binary": bytes(range(256)),
}
PLACES = ("missing", "directory", "dangling", "loop", "fifo", "endless", "large")
# Texts of one line each are prompts, and JSON's values are rows, whatever is in them.
FINE = {("prompts", name) for name in CONTENTS.keys() - {"empty", "latin-1", "binary"}}
FINE |= {("train_file", name) for name in ("list", "nan", "long", "twice")}


def place(path: Path, case: str) -> None:
    """Put at ``path`` what is no file to read, or the content that is called so."""
    if case == "directory":
        path.mkdir()
    elif case == "dangling":
        path.symlink_to(path.with_name("nowhere"))
    elif case == "loop":
        path.symlink_to(path.name)
    elif case == "fifo":
        os.mkfifo(path)  # who opens it waits for ever
    elif case == "endless":
        path.symlink_to("/dev/zero")
    elif case == "large":
        with path.open("wb") as file:
            file.truncate(100_000_000)
    elif case != "missing":
        path.write_bytes(CONTENTS[case])


# Data may be large; all of it is read.
CASES = [
    (reader, case) for reader in READERS for case in (*PLACES, *CONTENTS) if (reader, case) != ("train_file", "large")
]


@pytest.mark.parametrize(("reader", "case"), CASES)
def test_a_broken_file_is_one_line(reader, case, tmp_path):
    name, read = READERS[reader]
    place(tmp_path / name, case)
    if (reader, case) in FINE:
        read(tmp_path / name)
        return
    with pytest.raises(UserError) as error:
        read(tmp_path / name)
    assert str(tmp_path) in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("reader", READERS)
def test_a_link_to_a_sound_file_is_one(reader, tmp_path):
    name, read = READERS[reader]
    text = "host slots=2\n" if reader == "hostfile" else json.dumps(SOUND.get(reader, {"text": "a"}))
    (tmp_path / "blob").write_text(text)
    (tmp_path / "blob.json").write_text("{}")
    (tmp_path / name).symlink_to("blob")
    read(tmp_path / name)


@pytest.mark.parametrize("content", ["null", "null\n", " null", "[null, {}]", "[\nnull,\n{}]", '{"a": 1}\nnull\n'])
@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_is_null_is_refused_before_it_ends_the_process(content, streaming, tmp_path):
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"rows.jsonl, line [12]: a row is null; give an object"):
        load_splits(data_args(tmp_path), {"train": str(tmp_path / "rows.jsonl")}, streaming=streaming)


def test_null_in_the_midst_of_an_object_is_none(tmp_path):
    (tmp_path / "rows.json").write_text('[{"a":\nnull,\n"b": [1,\nnull\n]}]')
    assert load_splits(data_args(tmp_path), {"train": str(tmp_path / "rows.json")})["train"][0]["a"] is None


MODEL_FILES = {
    "config.json": {"latin-1", "bom", "deep", "list", "number", "string", "null", "empty", "binary", "missing"},
    "tokenizer.json": {"latin-1", "deep", "list", "number", "null", "empty", "binary"},
    "tokenizer_config.json": {"latin-1", "deep", "list", "number", "null", "empty", "binary"},
    "model.safetensors": {"empty", "list", "binary", "header", "cut", "missing", "dangling", "fifo", "endless"},
}
MODEL_CASES = [(file, case) for file, cases in MODEL_FILES.items() for case in sorted(cases)]


@pytest.mark.parametrize(("file", "case"), MODEL_CASES)
def test_a_broken_file_of_a_model_is_one_line_that_names_it(file, case, tiny_t5, tmp_path):
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    folder = copy(tiny_t5, tmp_path / "model")
    sound = (folder / file).read_bytes()
    (folder / file).unlink()
    if case in ("header", "cut"):
        (folder / file).write_bytes((2**60).to_bytes(8, "little") + b"{}" if case == "header" else sound[:-40])
    else:
        place(folder / file, case)
    how = {"trust_remote_code": False}
    said = refusal(lambda: AutoTokenizer.from_pretrained(folder, **how), folder)
    said = said or refusal(lambda: AutoModelForSeq2SeqLM.from_pretrained(folder, use_safetensors=True, **how), folder)
    missing = case in ("missing", "dangling", "fifo", "endless")
    assert file in said or missing or "model_type" in said


@pytest.mark.parametrize("case", ["list", "null", "empty", "deep", "missing"])
@pytest.mark.parametrize("file", ["model_index.json", "unet/config.json", "scheduler/scheduler_config.json"])
def test_a_broken_file_of_a_pipeline_is_one_line_that_names_it(file, case, tiny_sd, tmp_path):
    from core.pipelines import load_pipeline

    folder = copy(tiny_sd, tmp_path / "model")
    (folder / file).unlink()
    place(folder / file, case)
    flags = ("pretrained_vae_model_name_or_path", "controlnet_model_name_or_path", "base_image", "mask_image", "token")
    flags += ("control_image", "bf16", "bf16_full_eval", "do_train", "do_eval", "do_predict", "cache_dir")
    args = Namespace(**dict.fromkeys(flags), model_name_or_path=str(folder), model_revision="main")
    args.trust_remote_code, args.unet_adapter_name_or_path, args.text_encoder_adapter_name_or_path = False, None, None
    with pytest.raises(UserError) as error:
        load_pipeline(args)
    assert Path(file).name in str(error.value)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------------------------------------- content of checkpoints


def changed(content: Any, place: str, value: Any) -> Any:
    """JSON with another value at a dotted place; ``...`` takes it out."""
    content = json.loads(json.dumps(content))
    *above, last = place.split(".")
    node = content
    for part in above:
        node = node[int(part) if isinstance(node, list) else part]
    last = int(last) if isinstance(node, list) else last
    if value is ...:
        del node[last]
    else:
        node[last] = value
    return content


PLACES_IN_STATE = [
    *(
        "step_count",
        "epoch",
        "position",
        "total",
        "total.loss",
        "total.targets",
        "since_record",
        "since_record.targets",
    ),
    *("order", "training", "training.optimizer", "training.schedule_steps", "training.schedule_steps.1"),
    *("training.own.0", "training.python_random", "training.numpy_random", "training.numpy_random.1"),
]
SPOILED = [(place, value) for place in PLACES_IN_STATE for value in (..., None, "x", [], {}, -1, 1e300, 10**25)]
NUMBERS = {"total.loss": (-1,), "since_record.loss": (-1,), "training.own.0": (..., -1)}  # which may be anything
SPOILED = [(place, value) for place, value in SPOILED if value not in NUMBERS.get(place, ())]
FEW = [("total.loss", ...), ("step_count", "x"), ("training.schedule_steps.1", {}), ("position", -1)]
SLOW = [pytest.param(*one, marks=pytest.mark.slow) for one in SPOILED if one not in FEW]


@pytest.fixture(scope="module")
def trained(tiny_t5, pair_files, tmp_path_factory) -> tuple[list[str], Path]:
    """Flags of a short training, and its checkpoint."""
    module, folder = load_recipe("summarization"), tmp_path_factory.mktemp("run")
    flags = ["--model_name_or_path", str(tiny_t5), "--train_file", pair_files["--train_file"], "--use_cpu"]
    flags += "--max_source_length 32 --max_target_length 12 --disable_tqdm --report_to none --do_train".split()
    flags += ["--max_steps", "3", "--save_steps", "2"]
    module.main([*flags, "--output_dir", str(folder)])
    return flags, folder / "checkpoint-2"


def resume(trained: tuple[list[str], Path], summarization: Any, folder: Path, change: Callable[[Path], None]) -> str:
    """The line that refuses the checkpoint, changed, with the right checksums."""
    flags, sound = trained
    copied = copy(sound, folder / "run" / "checkpoint-2")
    change(copied)
    index = json.loads((copied / checkpoint.MARKER).read_text())
    for name in index["files"]:
        content = (copied / name).read_bytes()
        index["files"][name] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    (copied / checkpoint.MARKER).write_text(json.dumps(index))
    assert checkpoint.problem(copied) is None
    with pytest.raises(UserError) as error:
        summarization.main([*flags, "--output_dir", str(folder / "run"), "--resume_from_checkpoint", "auto"])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(("place", "value"), [*FEW, *SLOW])
def test_a_state_of_another_form_is_refused(trained, summarization, tmp_path, place, value):
    def change(folder: Path) -> None:
        content = json.loads((folder / "state.json").read_text())
        (folder / "state.json").write_text(json.dumps(changed(content, place, value)))

    assert "checkpoint" in resume(trained, summarization, tmp_path, change)


@pytest.mark.parametrize("how", ["lacking", "shape", "integers", "empty", "garbage"])
@pytest.mark.parametrize("file", ["optimizer.safetensors", "rng.safetensors", "model.safetensors"])
def test_tensors_of_another_form_are_refused(trained, summarization, tmp_path, file, how):
    import torch
    from safetensors.torch import load_file, save_file

    def change(folder: Path) -> None:
        tensors = load_file(folder / file)
        first = min(tensors)
        if how == "garbage":
            (folder / file).write_bytes(b"x" * 99)
            return
        if how == "lacking":
            del tensors[first]
        elif how == "empty":
            tensors = {}
        else:
            tensors[first] = torch.zeros(3, 3, 3) if how == "shape" else tensors[first].to(torch.int16)
        save_file(tensors, folder / file, metadata={"format": "pt"})

    if (file, how) in (("model.safetensors", "integers"), ("optimizer.safetensors", "empty")):
        return  # weights are cast; an optimiser that has not stepped has no state
    assert resume(trained, summarization, tmp_path, change)
