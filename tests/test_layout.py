"""The structure, kept by a test: levels, walls, sizes, mirror, banners, and README commands that parse."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY
from tests.test_run_files import asked_by

LEVELS = [
    {"errors", "preemption", "files"},
    {
        "arguments", "gaudi_config", "deepspeed_config", "results", "sample_data", "device", "lines", "preflight",
        "ngrams", "run_files", "digits", "locks", "cards", "lamb", "records",
        "group_norms", "untrusted", "dropout", "kernels", "host_memory",
    },
    {
        "distributed", "mixed_precision", "optimizers", "graphs", "memory", "throughput", "tracking", "attention",
        "processes", "gradients", "hub", "prose", "buckets", "packing", "losses", "adapters", "splits",
        "images", "augment", "labels", "pages", "model_card", "processing", "workers", "noise", "prompts",
        "generators",
    },
    {
        "data", "stream", "documents", "pictures", "checkpoint", "state", "export", "strategies", "zero", "launcher",
        "captions", "ema", "pipelines", "encoders", "drawing", "feature_cache", "examples",
        "autoencoder", "placing", "clip_score", "background", "nonfinite", "evaluation", "heads",
    },
    {"run"},
    {"progress"},
    {"engine", "doctor"},
]  # fmt: skip
# Within a level these build on each other, in this direction only.
WITHIN = {
    ("splits", "distributed"), ("deepspeed_config", "gaudi_config"), ("state", "checkpoint"),
    ("export", "checkpoint"), ("export", "state"), ("export", "ema"), ("distributed", "gradients"), ("stream", "data"),
    ("documents", "data"), ("arguments", "run_files"), ("augment", "images"), ("processing", "images"),
    ("model_card", "pages"), ("splits", "labels"), ("pictures", "data"), ("captions", "pictures"),
    ("drawing", "pipelines"), ("encoders", "pipelines"), ("ema", "state"), ("examples", "captions"),
    ("examples", "data"), ("examples", "encoders"), ("examples", "feature_cache"), ("examples", "pictures"),
    ("placing", "pipelines"), ("pipelines", "zero"), ("clip_score", "zero"), ("drawing", "placing"),
    ("autoencoder", "pictures"), ("background", "checkpoint"), ("nonfinite", "data"), ("evaluation", "data"),
    ("evaluation", "stream"), ("ema", "checkpoint"), ("device", "cards"), ("errors", "preemption"), ("files", "errors"),
    ("tracking", "pages"),
}  # fmt: skip
BANNERS = ["Bootstrap and imports", "Arguments", "Data", "Model", "Task functions", "Train", "Evaluate", "Main"]
TOP = {
    ".ci", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md", "benchmarks", "core",
    "deepspeed_configs", "gaudi_configs", "gaudi_spawn.py", "hpu_simulator", "pyproject.toml", "recipes",
    "requirements-dev.txt", "requirements-gaudi.txt", "requirements.txt", "tests",
}  # fmt: skip
CORE = sorted((REPOSITORY / "core").glob("*.py"))
RECIPES = sorted((REPOSITORY / "recipes").glob("*/run.py"))
SOURCES = [*CORE, *RECIPES, REPOSITORY / "gaudi_spawn.py"]
SIMULATOR = sorted((REPOSITORY / "hpu_simulator").rglob("*.py"))


def tracked() -> list[str]:
    """Files that git tracks, and new ones that it does not ignore."""
    command = ["git", "-C", str(REPOSITORY), "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (REPOSITORY / name).exists()]


def imports_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    names |= {
        f"core.{alias.name}"
        for n in ast.walk(tree)
        if isinstance(n, ast.ImportFrom) and n.module == "core"
        for alias in n.names
    }
    return names | {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}


def test_the_top_level_is_what_the_design_names() -> None:
    assert {name.partition("/")[0] for name in tracked()} <= TOP


def test_every_module_has_a_level_and_imports_downward() -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    assert {path.stem for path in CORE} - {"__init__"} == set(level)
    for path in CORE:
        for imported in imports_of(path):
            name = imported.removeprefix("core.").partition(".")[0]
            if imported.startswith("core.") and (path.stem, name) not in WITHIN:
                assert level[name] < level[path.stem], f"core/{path.name} imports core/{name}.py"


def test_core_package_exports_nothing() -> None:
    tree = ast.parse((REPOSITORY / "core" / "__init__.py").read_text())
    assert all(isinstance(node, ast.Expr) for node in tree.body)


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_walls(path: Path) -> None:
    """Only device.py knows the bridge; nothing imports a recipe; core names no task; nothing is unpickled."""
    imported, text = imports_of(path), path.read_text(encoding="utf-8")
    assert not any(name.startswith(("recipes", "hpu_simulator", "pickle", "dill", "joblib")) for name in imported)
    if path.stem != "device":
        assert not any(name.startswith("habana_frameworks") for name in imported)
        assert not re.search(r"import_module\([^)]*habana", text)
        assert not re.search(r"device\.kind\s*(==|!=|in)\s", text), "ask the device for a capability"
    assert not re.search(r"torch\.load\(|\bpickle\b|shell=True|trust_remote_code=True|mktemp\(", text)
    if path.parent.name == "core":
        task = r"summari[sz]|\brouge|seq2seq|\bT5|\bBART|\bBERT|\bGPT|diffusion|\bViT\b|cnn_dailymail|wikitext"
        paper = 'BERT in 76 minutes", 2020, algorithm 2,'
        assert not re.search(task, text.replace(paper, "").replace("training of BERT", "")), path


@pytest.mark.parametrize("path", SIMULATOR, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_the_simulator_knows_nothing_of_this_project(path: Path) -> None:
    """It rehearses anybody's programs; and nothing in core or a recipe imports it (`test_walls`)."""
    assert not any(name.partition(".")[0] in ("core", "recipes", "tests") for name in imports_of(path))
    if "bridge" not in path.parts:
        assert not any(name.startswith("habana_frameworks") for name in imports_of(path))


@pytest.mark.parametrize("path", SOURCES + SIMULATOR, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_sizes(path: Path) -> None:
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= (350 if path.name == "run.py" else 300)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.body[0].lineno + 1
            assert length <= (35 if node.name == "main" else 50), f"{path.name}: {node.name} has {length} lines"
            assert depth(node) <= 3, f"{path.name}: {node.name} nests too deep"


def depth(node: ast.AST) -> int:
    """Nesting of loops, conditions and handlers; those of functions inside start anew, and ``elif`` adds nothing."""
    chained = node.orelse if isinstance(node, ast.If) and len(node.orelse) == 1 else []
    same = [depth(child) for child in chained if isinstance(child, ast.If)]
    below = [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.FunctionDef)]
    inner = [depth(child) for child in below if not (same and child in chained)]
    return max([max(inner, default=0) + isinstance(node, (ast.For, ast.While, ast.If, ast.Try)), *same])


def test_every_source_has_its_test() -> None:
    for path in CORE:
        if path.stem not in ("__init__", "run"):  # run and engine are tested together
            assert (REPOSITORY / "tests" / "core" / f"test_{path.stem}.py").is_file(), path.name
    for path in (REPOSITORY / "hpu_simulator").glob("[!_]*.py"):
        if path.stem not in ("runtime", "charts"):  # every other test's subject; drawn by page
            assert (REPOSITORY / "tests" / "hpu_simulator" / f"test_{path.stem}.py").is_file(), path.name
    for path in RECIPES:
        assert (REPOSITORY / "tests" / "recipes" / f"test_{path.parent.name}.py").is_file(), path.parent.name


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.parent.name)
def test_a_recipe_has_the_sections_in_order(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^# --- ([^-:]+?)(?::.*?)? -+$", text, re.MULTILINE)
    assert found == BANNERS
    assert ast.get_docstring(ast.parse(text))
    assert text.rstrip().endswith('if __name__ == "__main__":\n    exit_with_one_line(main, preemptible=True)')
    assert (path.parent / "README.md").is_file()


def commands_in(path: Path) -> list[list[str]]:
    """Command lines of a README's code blocks that start a recipe, their continued lines joined."""
    blocks = re.findall(r"```(?:bash|sh)\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    parts = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(part, comments=True) for part in parts if "run.py" in part]


READMES = [
    REPOSITORY / "README.md",
    *sorted(REPOSITORY.glob("[!.]*/README.md")),
    *sorted(REPOSITORY.glob("recipes/*/README.md")),
]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_readme_commands_parse(readme: Path) -> None:
    """Every flag of every command exists, and every file of this repository that it names is there."""
    import gaudi_spawn
    from core.arguments import SHARED_GROUPS, StrictParser

    commands = commands_in(readme)
    assert commands
    for command in commands:
        if "gaudi_spawn.py" in command:
            gaudi_spawn.parse(command[command.index("gaudi_spawn.py") + 1 :])
        at = next(number for number, word in enumerate(command) if word.endswith("run.py"))
        groups, options = asked_by(Path(command[at]).parent.name)
        StrictParser((*groups, *SHARED_GROUPS), "", options.get("aliases")).parse_strictly(command[at + 1 :])
        for word in command:
            if re.match(r"(recipes|gaudi_configs|deepspeed_configs)/", word):
                assert (REPOSITORY / word).exists(), word


def parse_job(words: list[str]) -> None:
    """Parse what follows a recipe's path, as the recipe does."""
    from core.arguments import parse_arguments

    at = next(number for number, word in enumerate(words) if word.endswith("run.py"))
    groups, options = asked_by(Path(words[at]).parent.name)
    parse_arguments(words[at + 1 :], *groups, **options)
    for word in words:
        if re.match(r"(--deepspeed=)?(recipes|gaudi_configs|deepspeed_configs)/", word):
            assert (REPOSITORY / word.rpartition("=")[2]).exists(), word


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("recipes/*/*.sbatch")), ids=lambda path: path.parent.name)
def test_a_slurm_job_is_one_that_can_be_submitted(path: Path) -> None:
    """Bash reads it, its torchrun and recipe know their flags, and devices and processes are as many."""
    from torch.distributed.run import get_args_parser

    text = path.read_text(encoding="utf-8")
    assert subprocess.run(["bash", "-n", str(path)]).returncode == 0
    words = shlex.split(next(line for line in text.replace("\\\n", " ").splitlines() if line.startswith("srun")))
    parse_job(words)
    torchrun = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
    assert f"--gres=gaudi:{torchrun.nproc_per_node}\n" in text
    assert "--ntasks-per-node=1\n" in text


@pytest.mark.parametrize("path", sorted(REPOSITORY.glob("recipes/*/*.yaml")), ids=lambda path: path.parent.name)
def test_a_kubernetes_job_is_one_that_can_be_applied(path: Path) -> None:
    import yaml

    job = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = job["spec"]["pytorchReplicaSpecs"]
    assert list(replicas) == ["Master", "Worker"]
    assert replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        (container,) = replica["template"]["spec"]["containers"]
        assert container["name"] == "pytorch"  # the operator looks for it by this name
        assert all(isinstance(word, str) for word in container["command"])
        parse_job(container["command"])
        assert container["resources"]["limits"]["habana.ai/gaudi"] == int(job["spec"]["nprocPerNode"])
        assert any(name.startswith("hugepages-") for name in container["resources"]["limits"])


def test_the_two_commands_open_the_readme() -> None:
    head = "\n".join((REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()[:25])
    assert (
        "pip install -r requirements.txt && python recipes/summarization/run.py --gaudi_config gaudi_configs/t5.json"
        in head
    )
    assert "pip install -r requirements-dev.txt && pytest" in head


def test_readme_links_and_tree_are_true() -> None:
    for readme in READMES:
        for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", readme.read_text(encoding="utf-8")):
            assert (readme.parent / target).exists(), f"{readme}: {target}"


def test_no_state_is_unpickled_and_no_file_is_large() -> None:
    for name in tracked():
        path = REPOSITORY / name
        assert path.stat().st_size < 200_000, name
        assert path.suffix not in (".pt", ".pth", ".bin", ".pkl", ".pickle"), name


def test_every_flag_is_read_or_said_to_have_no_effect() -> None:
    """A flag that nothing reads is a promise that nothing keeps. Declarations and their help do not count."""
    from dataclasses import fields

    from core.arguments import NO_EFFECT, REFUSED, SHARED_GROUPS

    texts = [path.read_text(encoding="utf-8") for path in SOURCES]
    text = "".join(part.partition("class StrictParser")[2] or part for part in texts)
    for name in (field.name for group in SHARED_GROUPS for field in fields(group)):
        by_phase = re.sub("^(do|max)_(eval|predict)", r"\1_{phase}", name)  # read as f"do_{phase}"
        read = re.search(rf"\b{name}\b", text) or (by_phase != name and by_phase in text)
        assert read or name in NO_EFFECT or name in REFUSED, name


def test_help_of_a_recipe_needs_no_torch_in_the_parser() -> None:
    code = "import sys; import core.arguments, core.hub, core.mixed_precision; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
