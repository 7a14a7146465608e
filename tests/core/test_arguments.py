"""Strict flags, their values, and the precedence of run files."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core import arguments, errors
from core.arguments import (
    NO_EFFECT,
    REFUSED,
    SHARED_GROUPS,
    SUBSTITUTES,
    flag,
    parse_arguments,
)
from core.errors import UserError
from core.hub import HubArguments, TokenizerArguments

SHARED = {f.name: f for group in SHARED_GROUPS for f in fields(group)}
KINDS = {name: kind for group in SHARED_GROUPS for name, kind in get_type_hints(group).items()}
# Flags of every recipe that names models and data are in the tables, too.
ALL = SHARED | {f.name: f for group in (HubArguments, TokenizerArguments) for f in fields(group)}


@dataclass
class OwnArguments:
    """A recipe's own flags."""

    _argument_group_name = "own"
    data: str | None = flag(None, "where the rows are")
    width: int = flag(4, "columns", aliases=["--columns"])
    begin: int = flag(0, "first column", least=0)
    near: float = flag(0.5, "how near", below=2)
    far: float = flag(0.5, "how far", needs="do_draw")
    prompts: list[str] | None = flag(None, "what to draw", nargs="+")
    prompts_file: str | None = flag(None, "the same, one a line")
    do_draw: bool = flag(False, "draw")


def parse(*argv: str, **options):
    """Parse ``argv`` and, for a command without work is refused, ``--do_train``."""
    return parse_arguments([*argv, "--do_train"], OwnArguments, description="What it does.", **options)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def run_file(tmp_path):
    def write(content: object, name: str = "run.json") -> str:
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return str(path)

    return write


# ----------------------------------------------------------------------------------------------------------- flags


def test_the_defaults_are_a_valid_command():
    args = parse()
    assert (args.seed, args.report_to, args.config, args.width) == (42, ["all"], None, 4)
    assert args.run_file == {"description": "", "command": "", "args": {}, "published": [], "caveats": []}


def test_default_lists_are_not_shared():
    parse().report_to.append("x")
    assert parse().report_to == ["all"]


def test_without_argv_those_of_the_process_count(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["run.py", "--seed", "7", "--do_eval"])
    assert parse_arguments(None, description="").seed == 7


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--use_laz"], "unknown flag --use_laz (did you mean '--use_lazy_mode'?); --help lists all flags"),
        (["--max_step", "3"], "unknown flag --max_step (did you mean '--max_steps'?); --help lists all flags"),
        (["--max_step=3"], "unknown flag --max_step (did you mean '--max_steps'?); --help lists all flags"),
        (["--widht", "3"], "unknown flag --widht (did you mean '--width'?); --help lists all flags"),
        (["--qqqqqqqqqq"], "unknown flag --qqqqqqqqqq; --help lists all flags"),
        (["-s", "1"], "unknown flag -s; --help lists all flags"),
        (["stray"], "a value without a flag: stray; --help lists all flags"),
        (["--seed", "1", "2"], "a value without a flag: 2; --help lists all flags"),
        (["--seed"], "--seed: expected one argument"),
        (["--seed", "1.5"], "--seed: invalid int value: '1.5'"),
        (["--do_train", "maybe"], "--do_train: Truthy value expected"),
        (["--optim", "adam"], "--optim: invalid choice: 'adam' (choose from "),
        (["--evaluation_strategy", "never"], "--eval_strategy: invalid choice: 'never' (choose from "),
    ],
)
def test_what_is_not_understood_is_refused_with_the_nearest_flag(argv, message):
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert str(error.value).startswith(message)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "value"),
    [
        ([], None),
        (["--use_lazy_mode"], True),
        (["--use_lazy_mode", "True"], True),
        (["--use_lazy_mode", "False"], False),
        (["--use_lazy_mode=false"], False),
        (["--use_lazy_mode", "--do_train"], True),
    ],
)
def test_a_switch_has_three_states(argv, value):
    assert parse(*argv).use_lazy_mode is value


def test_bare_and_negative_forms():
    assert parse("--resume_from_checkpoint").resume_from_checkpoint == "auto"
    assert parse("--resume_from_checkpoint", "x").resume_from_checkpoint == "x"
    assert parse("--no_use_cache").use_cache is False
    assert parse("--report_to", "a", "b").report_to == ["a", "b"]
    assert parse("--per-device-train-batch-size", "3").per_device_train_batch_size == 3


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--gaudi_config_name", "Habana/t5"], "gaudi_config", "Habana/t5"),
        (["--evaluation_strategy", "epoch"], "eval_strategy", "epoch"),
        (["--no_cuda"], "use_cpu", True),
        (["--columns", "9"], "width", 9),
    ],
)
def test_aliases(argv, name, value):
    assert getattr(parse(*argv), name) == value


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["--gaudi_config", "t5", "--gaudi_config_name", "bart"],
            "--gaudi_config (t5) and --gaudi_config_name (bart) contradict each other; give one of them",
        ),
        (["--gaudi_config=t5", "--seed", "1", "--gaudi_config_name=bart"], "--gaudi_config (t5) and --gaudi_config_n"),
        (["--no_cuda", "False", "--use_cpu"], "--no_cuda (False) and --use_cpu (True)"),
        (["--no_use_cache", "--use_cache"], "--no_use_cache (False) and --use_cache (True)"),
        (["--width", "3", "--columns", "4"], "--width (3) and --columns (4)"),
    ],
)
def test_one_flag_under_two_names_with_two_values(argv, message):
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("argv", "name", "value"),
    [
        (["--gaudi_config", "t5", "--gaudi_config_name", "t5"], "gaudi_config", "t5"),
        (["--use_cpu", "--no_cuda", "--do_train"], "use_cpu", True),
        (["--use_cpu", "--no_cuda", "true"], "use_cpu", True),
        (["--use_cache", "False", "--no_use_cache"], "use_cache", False),
        (["--width", "3", "--columns=3"], "width", 3),
        (["--seed", "1", "--seed", "2"], "seed", 2),
    ],
)
def test_one_flag_under_two_names_with_one_value(argv, name, value):
    assert getattr(parse(*argv), name) == value


# ------------------------------------------------------------------------------------- another program's conventions

ALIASES = {"train_batch_size": "per_device_train_batch_size", "n_columns": "width"}


def test_another_programs_names_are_flags_everywhere(run_file):
    assert parse("--train_batch_size", "3", aliases=ALIASES).per_device_train_batch_size == 3
    assert parse("--n_columns=3", "--width", "3", aliases=ALIASES).width == 3
    path = run_file({"args": {"n_columns": 5, "train_batch_size": 2}})
    args = parse("--config", path, "--train_batch_size", "7", aliases=ALIASES)
    assert (args.width, args.per_device_train_batch_size) == (5, 7)
    for argv, message in (
        (["--n_columns", "3", "--width", "4"], "--n_columns (3) and --width (4) contradict each other"),
        (["--columns", "3", "--n_columns", "4"], "--columns (3) and --n_columns (4) contradict each other"),
        (["--train_batch_siz", "4"], "unknown flag --train_batch_siz (did you mean '--train_batch_size'?)"),
        (["--n_columns", "x"], "--width: invalid int value: 'x'"),
        (["--n_columns", "0"], "--width must be at least 1"),
    ):
        with pytest.raises(UserError) as error:
            parse(*argv, aliases=ALIASES)
        assert str(error.value).startswith(message)
    with pytest.raises(UserError, match="unknown flag --n_columns"):
        parse("--n_columns", "3")  # another recipe's parser knows none of it


def test_a_recipes_own_defaults_come_before_run_file_and_flag(run_file, caplog):
    defaults = {"learning_rate": 1e-4, "report_to": ["none"], "use_cache": False}
    args = parse(defaults=defaults)
    assert (args.learning_rate, args.report_to, args.use_cache) == (1e-4, ["none"], False)
    args.report_to.append("x")
    assert defaults["report_to"] == ["none"]
    path = run_file({"args": {"learning_rate": 0.5}})
    assert parse("--config", path, defaults=defaults).learning_rate == 0.5
    assert parse("--config", path, "--learning_rate", "0.25", defaults=defaults).learning_rate == 0.25
    assert parse("--learning_rate", "5e-5", defaults=defaults).learning_rate == 5e-5  # the shared default, given
    assert parse(defaults={"adjust_throughput": True}).adjust_throughput
    assert caplog.messages == []  # a default is nothing that the user asks for
    assert parse().learning_rate == 5e-5


IMPLIED = {"do_draw": ("prompts", "prompts_file"), "do_train": ("data",)}


def work(*argv: str) -> list[str]:
    """The work that is done: names of flags, all of them True or False."""
    args = vars(parse_arguments(list(argv), OwnArguments, description="", implied=IMPLIED))
    found = {name: value for name, value in args.items() if name.startswith("do_")}
    assert all(isinstance(value, bool) for value in found.values())
    return sorted(name for name in found if found[name])


@pytest.mark.parametrize(
    ("argv", "done"),
    [
        (["--data", "x"], ["do_train"]),
        (["--prompts", "a", "b"], ["do_draw"]),
        (["--prompts", "a", "--data", "x"], ["do_draw", "do_train"]),
        (["--prompts", "a", "--data", "x", "--do_train"], ["do_train"]),
        (["--prompts", "a", "--data", "x", "--do_eval"], ["do_eval"]),
        (["--prompts", "a", "--data", "x", "--do_train", "False"], ["do_draw"]),
        (["--prompts", "a", "--do_eval=false"], ["do_draw"]),
    ],
)
def test_work_is_implied_by_what_it_needs_if_no_work_is_named(argv, done):
    assert work(*argv) == done


def test_a_run_file_names_work_and_implies_it(run_file):
    assert work("--config", run_file({"args": {"prompts_file": "x"}})) == ["do_draw"]
    assert work("--config", run_file({"args": {"prompts_file": "x"}}), "--do_eval") == ["do_eval"]
    assert work("--config", run_file({"args": {"do_predict": True}}), "--data", "x") == ["do_predict"]
    assert work("--config", run_file({"args": {"do_train": False}}), "--data", "x", "--prompts", "a") == ["do_draw"]


def test_nothing_to_do_is_refused_where_work_is_implied():
    for argv in ([], ["--width", "3"], ["--data", "x", "--do_train", "False"]):
        with pytest.raises(UserError, match="nothing to do"):
            work(*argv)


def test_without_it_nothing_is_implied():
    with pytest.raises(UserError, match="nothing to do"):
        parse_arguments(["--data", "x"], OwnArguments, description="")


def test_help_tells_another_programs_names_and_the_recipes_defaults(capsys):
    with pytest.raises(SystemExit):
        parse("--help", aliases=ALIASES, defaults={"learning_rate": 1e-4})
    text = " ".join(capsys.readouterr().out.split())
    assert "--columns WIDTH, --n_columns WIDTH columns (default: 4)" in text
    assert "never scaled with the number of devices (default: 0.0001)" in text


# -------------------------------------------------------------------------------------------------------- run files


def test_precedence_is_default_then_run_file_then_flag(run_file):
    path = run_file({"args": {"seed": 1, "max_steps": 5, "report_to": ["none"], "gaudi_config": "t5", "width": 8}})
    args = parse("--config", path, "--seed", "2", "--gaudi_config_name", "bart")
    assert (args.logging_steps, args.max_steps, args.seed) == (500, 5, 2)
    assert (args.gaudi_config, args.report_to, args.width, args.config) == ("bart", ["none"], 8, path)
    assert parse("--report_to", "all", "--config", path).report_to == ["all"]


def test_run_file_values_mean_what_flags_mean(run_file):
    values = {"do_train": True, "use_lazy_mode": False, "learning_rate": 1e-8, "run_name": "--a b", "data": None}
    args = parse("--config", run_file({"args": values}))
    assert {name: getattr(args, name) for name in values} == values


def test_the_whole_run_file_is_handed_on(run_file):
    content = {"description": "d", "command": "c", "args": {}, "published": [{"metric": "m"}], "caveats": ["x"]}
    assert parse("--config", run_file(content)).run_file == content


def test_a_built_in_run_file_applies_unless_something_is_named(run_file):
    built_in = (Path(run_file({"args": {"width": 8}}, "built_in.json")), ("data",))
    other = run_file({"args": {"width": 6}})
    assert parse(built_in=built_in).width == 8
    assert parse("--width", "9", built_in=built_in).width == 9
    assert parse("--data", "x", built_in=built_in).width == 4
    assert parse("--config", other, built_in=built_in).width == 6
    by_seed = (lambda args: built_in[0] if args.seed == 1 else Path(other), ("data",))
    assert [parse("--seed", seed, built_in=by_seed).width for seed in ("1", "2")] == [8, 6]


BAD_RUN_FILES = {
    "unknown key": ({"arg": {}}, "unknown key 'arg' (did you mean 'args'?)"),
    "unknown flag": ({"args": {"sed": 1}}, "unknown flag --sed (did you mean '--seed'?)"),
    "wrong value": ({"args": {"seed": "x"}}, "--seed: invalid int value: 'x'"),
    "number with fraction": ({"args": {"seed": 8.0}}, "--seed: invalid int value: '8.0'"),
    "two names": ({"args": {"width": 1, "columns": 2}}, "--width (1) and --columns (2) contradict each other"),
    "a flag in a list": ({"args": {"report_to": ["a", "--do_train"]}}, "is no value of a flag"),
    "another run file": ({"args": {"config": "x.json"}}, "'config' is no flag that a run file can set"),
    "empty list": ({"args": {"report_to": []}}, "--report_to: expected at least one argument"),
}


@pytest.mark.parametrize("case", BAD_RUN_FILES)
def test_bad_run_files_are_named(run_file, case):
    content, message = BAD_RUN_FILES[case]
    path = run_file(content)
    with pytest.raises(UserError) as error:
        parse("--config", path)
    assert message in str(error.value)
    assert str(error.value).startswith("--config")
    assert path in str(error.value)


# ----------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_flag_without_effect_says_so_once(name, caplog):
    is_switch = isinstance(ALL[name].default, bool) or KINDS.get(name) == bool | None
    value = str(not ALL[name].default) if is_switch else "7"
    for _ in range(2):
        parse_arguments(["--do_train", f"--{name}", value], HubArguments, TokenizerArguments, description="")
    assert caplog.messages == [f"--{name} has no effect here: {NO_EFFECT[name]}"]


def test_flags_with_an_effect_are_silent(caplog):
    parse("--seed", "1", "--do_train", "--bf16", "--ddp_timeout", str(SHARED["ddp_timeout"].default))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("argv", "changed", "message"),
    [
        (["--fp8"], {"fp8": False, "bf16": True}, "--fp8 True: not available here; used instead: bf16"),
        (
            ["--fsdp", "full_shard auto_wrap", "--torch_compile"],
            {"fsdp": None, "deepspeed": "zero3", "torch_compile": False},
            "--fsdp full_shard auto_wrap: not available here; used instead: ZeRO-3",
        ),
        (["--context_parallel_size", "4"], {}, "--context_parallel_size 4: not available here; used instead: whole"),
    ],
)
def test_what_is_not_here_is_substituted_and_said_once(argv, changed, message, caplog):
    for _ in range(2):
        args = parse(*argv)
        assert {name: getattr(args, name) for name in changed} == changed
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith(message)


def test_substitutes_are_flags_that_exist(caplog):
    for name, (_, flags) in SUBSTITUTES.items():
        assert {name, *flags} <= SHARED.keys()
    parse("--fp8", "False", "--context_parallel_size", "1")
    assert caplog.messages == []  # nothing is asked for


def test_two_ways_to_shard_are_refused():
    with pytest.raises(UserError, match="--fsdp auto_wrap and --deepspeed zero2 both shard the model; give one"):
        parse("--fsdp", "auto_wrap", "--deepspeed", "zero2")


@pytest.mark.parametrize("name", REFUSED)
def test_refused_flags_say_what_to_use(name):
    value = "True" if KINDS[name] is bool else "2"
    with pytest.raises(UserError, match=f"--{name}: ") as error:
        parse(f"--{name}", value)
    assert REFUSED[name] in str(error.value)


NUMBERS = [name for name, kind in KINDS.items() if kind in (int, float, int | None)]
NUMBERS = [name for name in NUMBERS if name not in REFUSED]
COUNTS = (
    "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "logging_steps",
    "save_steps", "eval_steps", "save_total_limit", "max_train_samples", "max_eval_samples", "max_predict_samples",
    "length_buckets", "max_hpu_graphs", "cpu_threads", "cache_size_limit", "ddp_bucket_cap_mb", "ddp_timeout",
)  # fmt: skip
SHARES = ("label_smoothing_factor", "adam_beta1", "adam_beta2", "warmup_ratio")
UNSET_BELOW_ZERO = ("max_steps", "local_rank")


@pytest.mark.parametrize("name", NUMBERS)
def test_ranges(name):
    """Shared numbers are finite and not negative. Some are at least 1, some below 1, and -1 is "not given" for two."""
    least = 1 if name in COUNTS else -1 if name in UNSET_BELOW_ZERO else 0
    bad = [str(least - 1)] + (["1"] if name in SHARES else [])
    bad += ["nan", "inf", str(least - 0.5)] if KINDS[name] is float else []
    for value in bad:
        with pytest.raises(UserError, match=f"--{name} must be at least {least} and below"):
            parse(f"--{name}", value)
    good = "0.5" if name in SHARES else str(least) if least else "1"
    assert getattr(parse(f"--{name}", good, "--use_hpu_graphs"), name) == float(good)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--width", "0"], "--width must be at least 1 and below inf, not 0"),
        (["--begin", "-1"], "--begin must be at least 0 and below inf, not -1"),
        (["--near", "2"], "--near must be at least 0 and below 2, not 2.0"),
    ],
)
def test_bounds_of_a_recipes_own_flags(argv, message):
    """A recipe's int is a count, unless the flag says otherwise."""
    assert parse("--begin", "0", "--near", "0").begin == 0
    with pytest.raises(UserError) as error:
        parse(*argv)
    assert str(error.value) == message


def test_tables_name_flags_that_exist():
    for table in (REFUSED, COUNTS, SHARES, UNSET_BELOW_ZERO):
        assert set(table) <= set(SHARED)
    assert set(NO_EFFECT) <= set(ALL)
    assert len(NUMBERS) > 25


def test_a_command_without_work_is_refused(run_file):
    for argv in ([], ["--seed", "1"], ["--do_train", "False"]):
        with pytest.raises(UserError, match="nothing to do: give --do_train"):
            parse_arguments(argv, description="")
    for argv in (["--do_eval"], ["--do_predict"], ["--config", run_file({"args": {"do_predict": True}})]):
        assert not parse_arguments(argv, description="").do_train


def test_all_problems_are_listed_at_once():
    with pytest.raises(UserError) as error:
        parse("--fp16", "--seed", "-1", "--save_steps", "0", "--warmup_steps", "1", "--warmup_ratio", "0.1")
    assert str(error.value).split("; ") == [
        "--fp16: Gaudi trains in bf16",
        "use --bf16",
        "--seed must be at least 0 and below 4294967296, not -1",
        "--save_steps must be at least 1 and below inf, not 0",
        "--warmup_steps 1 and --warmup_ratio 0.1: give one of them",
    ]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max_steps", "0"], "would train nothing"),
        (["--num_train_epochs", "0"], "would train nothing"),
        (["--seed", "5000000000"], "--seed must be at least 0 and below 4294967296"),
        (["--max_hpu_graphs", "3"], "--max_hpu_graphs needs --use_hpu_graphs_for_inference"),
        (["--disable_tensor_cache_hpu_graphs"], "--disable_tensor_cache_hpu_graphs needs --use_hpu_graphs_for_infer"),
    ],
)
def test_combinations_that_cannot_work(argv, message):
    with pytest.raises(UserError, match=message):
        parse(*argv)


def test_a_flag_that_needs_another_one_says_so(caplog):
    assert parse("--far", "0.7", "--do_draw").far == 0.7
    assert parse("--far", "0.5").far == 0.5  # its default asks for nothing
    assert not caplog.messages
    assert parse("--far", "0.7").far == 0.7
    assert caplog.messages == ["--far has no effect without --do_draw"]


def test_combinations_that_do_work():
    assert parse("--max_steps", "5", "--num_train_epochs", "0").max_steps == 5
    for old in ("--use_hpu_graphs", "--use_hpu_graphs_for_inference", "--use_hpu_graphs_for_training"):
        assert parse(old, "--max_hpu_graphs", "3").max_hpu_graphs == 3
    args = parse("--use_hpu_graphs")
    assert (args.use_hpu_graphs_for_training, args.use_hpu_graphs_for_inference) == (True, True)
    args = parse("--use_hpu_graphs_for_inference")
    assert (args.use_hpu_graphs_for_training, args.use_hpu_graphs_for_inference) == (False, True)


# ------------------------------------------------------------------------------------------------------------- help


def test_every_flag_has_help_and_a_group():
    parser = arguments.StrictParser((OwnArguments, *SHARED_GROUPS), "d")
    grouped = [action for group in parser._action_groups[2:] for action in group._group_actions]
    assert {action.dest for action in grouped} == {*SHARED, *(f.name for f in fields(OwnArguments))}
    assert [action.dest for action in grouped if not (action.help or "").strip()] == []
    assert {action.dest for action in parser._actions} - {action.dest for action in grouped} == {"help"}


def test_help_is_a_short_usage_the_description_and_groups(capsys):
    with pytest.raises(SystemExit) as stop:
        parse("--help")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert text.startswith("usage: run.py [flags]\n\nWhat it does.\n")
    assert text.index("\nown:") < text.index("\nrun: ") < text.index("\ntraining: ") < text.index("\ndevice: ")


def test_flags_are_read_before_torch_is_loaded():
    """The execution mode has to be decided before torch loads the bridge; and --help answers at once."""
    code = "import sys, core.arguments, core.deepspeed_config, core.results; sys.exit('torch' in sys.modules)"
    root = Path(arguments.__file__).resolve().parents[1]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0


# ------------------------------------------------------------------------------------------------------------- fuzz

OPTIONS = sorted(arguments.StrictParser((OwnArguments, *SHARED_GROUPS), "d")._option_string_actions)
VALUES = st.sampled_from(["", "0", "-1", "1", "0.5", "1e400", "nan", "True", "False", "x", "--", "-", "=", "[1]", "{}"])
TOKENS = st.one_of(
    st.sampled_from(OPTIONS), st.builds("{}={}".format, st.sampled_from(OPTIONS), VALUES), VALUES, st.text(max_size=8)
)


@settings(deadline=None)
@given(argv=st.lists(TOKENS, max_size=8))
def test_no_command_line_escapes_as_another_error(argv):
    try:
        assert parse(*argv).run_file is not None
    except UserError as error:
        said = str(error)
    except SystemExit as stop:
        said = f"help {stop.code}"
        assert stop.code in (0, None)  # noqa: PT017
    else:
        return
    assert said
    assert len(said.splitlines()) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
NAMES = st.sampled_from([*SHARED, "data", "width", "columns", "config", "help", "no_use_cache"]) | st.text(max_size=6)
KEYS = st.sampled_from(["args", "published", "caveats", "description", "command"]) | st.text(max_size=4)


@settings(deadline=None)
@given(content=st.dictionaries(NAMES, JSON, max_size=4).map(lambda args: {"args": args}) | st.dictionaries(KEYS, JSON))
def test_no_run_file_escapes_as_another_error(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz_run.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        assert parse("--config", str(path)).config == str(path)
    except UserError as error:
        said = str(error)
    else:
        return
    assert len(said.splitlines()) == 1
