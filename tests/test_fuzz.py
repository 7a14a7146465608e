"""Whatever stands in arguments and files, it is one line of at most 2,000 characters, or it works."""

from __future__ import annotations

import copy
import functools
import json
import random
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from core import checkpoint, deepspeed_config, prompts
from core.arguments import SHARED_GROUPS, StrictParser, parse_arguments
from core.errors import UserError
from core.gaudi_config import GaudiConfig
from core.launcher import read_hostfile
from core.run_files import read_run_file, run_file_flags
from tests.conftest import REPOSITORY
from tests.test_run_files import asked_by

RECIPES = ("image_classification", "language_modeling", "summarization", "text_to_image")
LONGEST = 2000  # characters of an error; a list of everything that is wrong may be cut


def fuzz(examples: int) -> settings:
    """The same examples at each run."""
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
    how = {"derandomize": True, "deadline": None, "database": None, "suppress_health_check": checks}
    return settings(max_examples=examples, **how)


def allowed(call: Callable[[], Any]) -> Any:
    """What ``call`` returns; None where it refused in one line, or showed its help."""
    try:
        return call()
    except UserError as error:
        said = str(error)
    except SystemExit as stop:
        assert stop.code in (0, None)  # noqa: PT017
        return None
    assert said.strip()
    assert len(said.splitlines()) == 1
    assert len(said) <= LONGEST, len(said)
    said.encode("utf-8", errors="strict")  # any terminal shows it
    return None


def each(*arguments: Any) -> Callable:
    """A test of few examples, and one of many with the slow tests."""
    few = pytest.param(*arguments, id=str(arguments[0]))
    many = pytest.param(*arguments[:-1], arguments[-1] * 25, id=f"{arguments[0]}-slow", marks=pytest.mark.slow)
    return [few, many]


# ----------------------------------------------------------------------------------------------------------- arguments

ODD = st.sampled_from([
    "", " ", "-", "--", "---", "=", "--=", "-1", "0", "1e999", "nan", "inf", "-0", "9" * 400, "0x10", "1_000", "٣",
    "none", "null", "x" * 3000, "\0", "a\0b", "a\nb", "a\r\nb\x1b[2J", "ü" * 50, "\ud800", "\u202e", "[1]", "{}", "{",
    "True", "%s", "%(prog)s", "@file", "~", "../..", "/", "/dev/null", "--help=1", "-h", "auto", "no", "steps",
])  # fmt: skip
TEXT = ODD | st.text(max_size=12) | st.integers().map(str) | st.floats().map(str)


@functools.cache
def flags_of(recipe: str) -> tuple[tuple, dict[str, Any], list[str]]:
    groups, options = asked_by(recipe)
    parser = StrictParser((*groups, *SHARED_GROUPS), "", options.get("aliases"))
    return groups, options, sorted(parser._option_string_actions.keys() - {"--help", "-h", "--config"})


@pytest.mark.parametrize(("recipe", "examples"), [case for recipe in RECIPES for case in each(recipe, 40)])
def test_a_command_line_parses_or_is_refused_in_one_line(recipe, examples):
    groups, options, names = flags_of(recipe)
    flag = st.sampled_from(names)
    misspelt = st.tuples(flag, st.integers(2, 9), st.sampled_from(["", "x", "-", "É"])).map(
        lambda spoiled: spoiled[0][: spoiled[1]] + spoiled[2] + spoiled[0][spoiled[1] + 1 :]
    )
    joined = st.tuples(flag, TEXT).map("=".join)
    word = flag | flag | TEXT | joined | misspelt | st.sampled_from(["--do_train", "--do_eval", "--help", "--config"])

    @fuzz(examples)
    @given(argv=st.lists(word, max_size=7))
    def check(argv: list[str]) -> None:
        args = allowed(lambda: parse_arguments(argv, *groups, **options))
        assert args is None or isinstance(args.run_file, dict)

    check()


# --------------------------------------------------------------------------------------------------------------- files

SCALARS = st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.floats() | TEXT
JSON = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4), max_leaves=12
)
SPOILED = (b"", b"\xff", b"\xef\xbb\xbf{}", b"{", b"[]", b"null", b"3", b'"x"', b'{"a": 1, "a": 2}', b"[" * 20000)


def spoil(content: Any, draw: random.Random, value: Any) -> Any:
    """``content`` with one thing in it changed: a value, a key, or one more of either."""
    content = copy.deepcopy(content)
    node, at = content, None
    while isinstance(node, (dict, list)) and node and (at is None or draw.random() < 0.7):
        parent, at = node, draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        node = parent[at]
    if at is None:
        return value
    kind = draw.randrange(4)
    if kind == 0 and isinstance(parent, dict):
        parent[f"{at}x"] = parent.pop(at)
    elif kind == 1:
        del parent[at]
    else:
        parent[at] = value
    return content


def documents(shipped: list[Path]) -> st.SearchStrategy:
    """Bytes of files: any JSON, one of those that are shipped with a change or two, and what is no JSON object."""
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in shipped]
    near = st.tuples(st.sampled_from(contents), st.randoms(use_true_random=False), SCALARS | JSON, st.booleans())
    near = near.map(lambda one: spoil(spoil(one[0], one[1], one[2]) if one[3] else one[0], one[1], one[2]))
    written = (near | near | JSON).map(lambda content: json.dumps(content).encode("utf-8", "surrogatepass"))
    return written | st.sampled_from(SPOILED) | st.binary(max_size=30)


def run_file(path: Path) -> None:
    groups, options, _ = flags_of("language_modeling")
    content = read_run_file(path)
    run_file_flags(content["args"])
    parse_arguments(["--config", str(path)], *groups, **options)


def gaudi_config(path: Path) -> None:
    config = GaudiConfig.from_pretrained(path)
    assert isinstance(config.use_fused_adam, bool)


def deepspeed(path: Path) -> None:
    names = {"deepspeed": "x", "bf16": True, "optim": "adamw_torch", "use_zero3_leaf_promotion": False}
    names |= {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 1, "max_grad_norm": 1.0}
    names |= {"learning_rate": 1e-4, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-6}
    names |= {"logging_steps": 5, "warmup_ratio": 0.1, "warmup_steps": 0, "gaudi_config": None}
    once = deepspeed_config.resolve(deepspeed_config.load(path), Namespace(**names), 2)
    deepspeed_config.resolve(once, Namespace(**names), 2, hidden_size=8, total_steps=10)


def drawn(path: Path) -> None:
    names = dict.fromkeys(prompts.PROMPTS) | {"prompts_file": str(path), "num_images_per_prompt": 2, "seed": 1}
    assert prompts.wanted_images(Namespace(**names))


def hosts(path: Path) -> None:
    assert all(count > 0 for count in read_hostfile(path).values())


def marker(path: Path) -> None:
    found = checkpoint.problem(path.parent)
    assert found is None or (len(found.splitlines()) == 1 and len(found) <= LONGEST)


CONFIGS = {
    "run file": (run_file, "run.json", sorted(REPOSITORY.glob("recipes/language_modeling/**/*.json"))[:8]),
    "gaudi_config": (gaudi_config, "gaudi_config.json", sorted(REPOSITORY.glob("gaudi_configs/*.json"))),
    "deepspeed": (deepspeed, "deepspeed.json", sorted(REPOSITORY.glob("deepspeed_configs/*.json"))),
    "checkpoint": (marker, checkpoint.MARKER, []),
    "prompts": (drawn, "prompts.txt", []),
    "hostfile": (hosts, "hosts", []),
}
CASES = [case for name in CONFIGS for case in each(name, 40 if name == "run file" else 150)]


@pytest.mark.parametrize(("name", "examples"), CASES)
def test_a_file_is_read_or_refused_in_one_line(name, examples, tmp_path):
    read, file, shipped = CONFIGS[name]
    if name == "checkpoint":
        (tmp_path / "state.json").write_text("{}")
        digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
        sound = {"format": 1, "step": 3, "files": {"state.json": {"bytes": 2, "sha256": digest}}}
        (tmp_path / "sound").write_text(json.dumps(sound))
        shipped = [tmp_path / "sound"]
    if name in ("prompts", "hostfile"):
        lines = st.lists(TEXT | st.just("host slots=2") | st.tuples(TEXT, TEXT).map(" slots=".join), max_size=4)
        content = lines.map(lambda words: "\n".join(words).encode("utf-8", "surrogatepass")) | st.binary(max_size=40)
    else:
        content = documents(shipped)

    @fuzz(examples)
    @given(content=content)
    def check(content: bytes) -> None:
        (tmp_path / file).write_bytes(content)
        allowed(lambda: read(tmp_path / file))

    check()
