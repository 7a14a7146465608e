"""The ledger of shapes, what is refused, and how the bridge and torch.compile are called."""

from __future__ import annotations

import itertools
from argparse import Namespace
from collections.abc import Iterator
from inspect import signature
from types import ModuleType

import pytest
import torch
from torch import nn

from core import errors, graphs
from core.arguments import parse_arguments
from core.device import Device
from core.errors import UserError
from core.graphs import ShapeLedger
from core.throughput import FlopCounter
from tests import fake_bridge

# A setting that this torch no longer has: the torch of a Gaudi does.
pytestmark = pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules is deprecated:FutureWarning")


@pytest.fixture(autouse=True)
def first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning was given yet."""
    monkeypatch.setattr(errors, "_warned", set())


@pytest.fixture
def bridge(tmp_path) -> Iterator[ModuleType]:
    with fake_bridge.installed(tmp_path) as package:
        yield package


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Nothing is compiled, and the compiler's settings are put back."""
    import torch._dynamo

    names = ("cache_size_limit", "inline_inbuilt_nn_modules", "allow_unspec_int_on_nn_module", "compiled_autograd")
    before = {name: getattr(torch._dynamo.config, name) for name in names}
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    for name, value in before.items():
        setattr(torch._dynamo.config, name, value)


def gaudi(mode: str = "lazy") -> Device:
    """A Gaudi whose tensors stay on the CPU."""
    return Device("hpu", "gaudi2", mode, torch.device("cpu"), getattr(torch, "hpu", None))


def gpu(mode: str = "eager") -> Device:
    return Device("cuda", "a GPU", mode, torch.device("cpu"), torch.cuda)


def cpu(mode: str = "eager") -> Device:
    return Device("cpu", "cpu (test)", mode, torch.device("cpu"))


def flags(*argv: str) -> Namespace:
    return parse_arguments(["--do_eval", *argv], description="test")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).relu()


class Stack(nn.Module):
    """Two blocks, a head, and a list that is no stack of blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.heads = nn.ModuleList([nn.Linear(4, 2), nn.Dropout(0.0)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in (*self.blocks, *self.heads):
            x = module(x)
        return x


# -------------------------------------------------------------------------------------------------------------- ledger


def batch(rows: int, length: int, **more: torch.Tensor) -> dict:
    return {"input_ids": torch.zeros(rows, length), "labels": torch.zeros(rows, 3), "name": "text", **more}


def test_the_ledger_counts_shapes_per_phase():
    ledger = ShapeLedger()
    seen = [ledger.see("train", batch(4, length)) for length in (8, 16, 8, 8)]
    assert [new for _, new in seen] == [True, True, False, False]
    assert seen[0][0] == seen[2][0] == (("input_ids", (4, 8)), ("labels", (4, 3)))
    assert seen[0][0] != seen[1][0]
    assert ledger.see("eval", batch(4, 8))[1]  # another phase, another graph
    assert ledger.see("train", dict(reversed(batch(4, 8).items()))) == (seen[0][0], False)  # order is no shape
    assert ledger.see("train", batch(4, 8, mask=torch.zeros(4, 8)))[1]
    assert ledger.report() == {
        "train": [
            {"batches": 4, "input_ids": [4, 8], "labels": [4, 3]},
            {"batches": 1, "input_ids": [4, 16], "labels": [4, 3]},
            {"batches": 1, "input_ids": [4, 8], "labels": [4, 3], "mask": [4, 8]},
        ],
        "eval": [{"batches": 1, "input_ids": [4, 8], "labels": [4, 3]}],
    }


def test_shapes_beyond_the_declared_ones_are_said(caplog):
    ledger = ShapeLedger()
    ledger.declare("train", 2)
    for length in (8, 16, 8, 16):
        ledger.see("train", batch(4, length))
    ledger.see("eval", batch(4, 99))  # nothing was declared
    assert not caplog.messages
    ledger.see("train", batch(4, 24))
    ledger.see("train", batch(4, 24))
    assert len(caplog.messages) == 1
    assert "train" in caplog.messages[0]
    assert "2 declared" in caplog.messages[0]
    assert "input_ids [4, 24]" in caplog.messages[0]
    ledger.see("train", batch(3, 8))  # a remainder that was not filled
    assert len(caplog.messages) == 2


def test_any_number_of_shapes_may_be_declared(caplog):
    ledger = ShapeLedger()
    ledger.declare("train", None)
    assert all(ledger.see("train", batch(4, length))[1] for length in range(8, 80, 8))
    assert not caplog.messages


# ----------------------------------------------------------------------------------------------------- shapes that cost

RECORDED = "--use_hpu_graphs"


@pytest.mark.parametrize(
    ("device", "argv", "takes"),
    [
        pytest.param(cpu(), [], True, id="cpu"),
        pytest.param(cpu(), [RECORDED], True, id="cpu_that_records_nothing"),
        pytest.param(cpu("compile"), [], False, id="cpu_compile"),
        pytest.param(gpu(), [], True, id="gpu"),
        pytest.param(gpu(), ["--use_hpu_graphs_for_training"], False, id="gpu_graphs"),
        pytest.param(gpu(), ["--use_hpu_graphs_for_inference"], False, id="gpu_inference_graphs"),
        pytest.param(gpu("compile"), [], False, id="gpu_compile"),
        pytest.param(gaudi("lazy"), [], False, id="gaudi_lazy"),
        pytest.param(gaudi("eager"), [], False, id="gaudi_eager"),
        pytest.param(gaudi("compile"), [], False, id="gaudi_compile"),
    ],
)
def test_any_shape_is_taken_where_nothing_is_compiled_or_recorded(device, argv, takes):
    assert graphs.takes_any_shape(flags(*argv), device) is takes


def sized(source: int, target: int) -> graphs.Shape:
    return (("input_ids", (4, source)), ("labels", (4, target)), ("row_weights", (4,)))


def plain_model(source: int, target: int) -> int:
    return 4 * (7 * source + 3 * target + 5 * source**2 + 2 * source * target + target**2) + 11


CORNERS = [(64, 32), (8, 8)]
BETWEEN = [(16, 8), (24, 16), (40, 8), (8, 24), (32, 32), (48, 24)]


def test_flops_of_other_shapes_are_found_exactly():
    known = {sized(*size): plain_model(*size) for size in CORNERS + BETWEEN}
    for size in [(56, 32), (64, 8), (8, 16), (40, 24)]:
        assert graphs.interpolated(sized(*size), known) == plain_model(*size)
    assert graphs.interpolated(sized(72, 8), known) is None  # beyond them
    assert graphs.interpolated((*sized(16, 8), ("mask", (4, 4))), known) is None  # another kind of batch
    for missing in range(2, 8):
        fewer = dict(list(known.items())[:missing])
        assert graphs.interpolated(sized(40, 24), fewer) is None  # six are needed, and two must agree with them
    lengths = {sized(size, 8): plain_model(size, 8) for size in (64, 8, 16, 40, 32)}
    assert graphs.interpolated(sized(56, 8), lengths) == plain_model(56, 8)
    assert graphs.interpolated(sized(56, 8), dict(list(lengths.items())[:4])) is None


def test_flops_that_are_no_polynomial_are_not_found():
    """As of attention within blocks of a length, to which rows are padded."""
    known = {sized(*size): plain_model(-(-size[0] // 24) * 24, size[1]) for size in CORNERS + BETWEEN}
    assert graphs.interpolated(sized(56, 32), known) is None


def test_few_shapes_are_counted():
    known, counted = {}, []
    for size in [CORNERS[0], *((source, target) for source in range(8, 65, 8) for target in range(8, 33, 8))]:
        if sized(*size) not in known and graphs.must_count(sized(*size), known, interpolate=True):
            counted.append(size)
            known[sized(*size)] = plain_model(*size)
    assert known == {sized(*size): plain_model(*size) for size in itertools.product(range(8, 65, 8), range(8, 33, 8))}
    assert len(counted) < 20  # they come in order, so that few lie between
    assert graphs.must_count(sized(1, 1), known, interpolate=False)
    assert not graphs.must_count(sized(1, 1), known | {sized(2, 2): None}, interpolate=False)  # some cannot be counted


def test_a_models_flops_are_such_a_polynomial(tiny_t5):
    from transformers import T5ForConditionalGeneration

    model, known = T5ForConditionalGeneration.from_pretrained(tiny_t5), {}
    others = [(56, 32), (64, 8), (40, 24)]
    for source, target in CORNERS + BETWEEN + others:
        ids, labels = torch.ones(4, source, dtype=torch.long), torch.ones(4, target, dtype=torch.long)
        with FlopCounter() as counter:
            model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels)
        known[sized(source, target)] = counter.total
    for size in others:
        rest = {shape: flops for shape, flops in known.items() if shape not in [sized(*other) for other in others]}
        assert graphs.interpolated(sized(*size), rest) == known[sized(*size)]


# --------------------------------------------------------------------------------------------------------------- check

TRAINING, INFERENCE = "--use_hpu_graphs_for_training", "--use_hpu_graphs_for_inference"


@pytest.mark.parametrize("name", [TRAINING, INFERENCE])
def test_graphs_need_lazy_mode_on_a_gaudi(caplog, name):
    graphs.check(flags(name), gaudi("lazy"))
    with pytest.raises(UserError, match=f"{name} needs --execution_mode lazy"):
        graphs.check(flags(name), gaudi("eager"))
    assert not caplog.messages


@pytest.mark.parametrize("name", [TRAINING, INFERENCE])
@pytest.mark.parametrize("device", [gaudi("compile"), gpu("compile"), cpu("compile")], ids=["gaudi", "gpu", "cpu"])
def test_graphs_and_compilation_exclude_each_other(name, device):
    with pytest.raises(UserError, match=f"{name} and --execution_mode compile"):
        graphs.check(flags(name), device)


def test_graphs_on_a_cpu_are_said_once(caplog):
    for _ in range(2):
        graphs.check(flags(TRAINING), cpu())
    assert len(caplog.messages) == 1
    assert f"{TRAINING} has no effect on cpu (test)" in caplog.messages[0]
    graphs.check(flags("--use_hpu_graphs"), gpu())
    assert len(caplog.messages) == 1


COMPILE_OPTIONS = [
    ["--compile_dynamic", "True"],
    ["--cache_size_limit", "4"],
    ["--use_regional_compilation"],
    ["--compile_from_sec_iteration"],
    ["--inline_inbuilt_nn_modules", "True"],
    ["--allow_unspec_int_on_nn_module", "True"],
    ["--use_compiled_autograd"],
]


def test_all_compile_options_are_looked_at():
    assert {argv[0].removeprefix("--") for argv in COMPILE_OPTIONS} == set(graphs.COMPILE_FLAGS)


@pytest.mark.parametrize("argv", COMPILE_OPTIONS, ids=lambda argv: argv[0])
def test_compile_options_outside_compile_mode_are_said(caplog, argv):
    graphs.check(flags(*argv), cpu("compile"))
    assert not caplog.messages
    graphs.check(flags(*argv), cpu("eager"))
    assert len(caplog.messages) == 1
    assert f"{argv[0]} has no effect in eager mode" in caplog.messages[0]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--torch_compile_backend", "inductr"], "--torch_compile_backend.*inductr"),
        (["--torch_compile_mode", "fastest"], "--torch_compile_mode.*fastest"),
    ],
)
def test_an_unknown_backend_or_mode_is_refused_before_the_model_is_loaded(argv, message):
    with pytest.raises(UserError, match=message):
        graphs.check(flags(*argv), cpu("compile"))
    graphs.check(flags("--torch_compile_backend", "aot_eager"), cpu("compile"))


def test_habanas_backend_elsewhere_is_said_and_replaced(caplog):
    args = flags("--torch_compile_backend", "hpu_backend")
    assert graphs.compile_options(args, gaudi("compile"))["backend"] == "hpu_backend"
    graphs.check(args, gaudi("compile"))
    assert not caplog.messages
    graphs.check(args, cpu("compile"))
    assert graphs.compile_options(args, cpu("compile"))["backend"] == "inductor"
    assert len(caplog.messages) == 1
    assert "hpu_backend" in caplog.messages[0]
    assert "inductor" in caplog.messages[0]


def test_compile_options_are_those_of_the_flags():
    assert graphs.compile_options(flags(), gaudi("compile")) == {"backend": "hpu_backend", "dynamic": None}
    args = flags("--torch_compile_mode", "default", "--compile_dynamic", "False", "--torch_compile_backend", "eager")
    assert graphs.compile_options(args, cpu()) == {"backend": "eager", "dynamic": False, "mode": "default"}


# --------------------------------------------------------------------------------------------------------- HPU graphs


def test_training_graphs_replace_the_model_in_place(bridge):
    model = Stack()
    graphs.apply_mode(model, flags(TRAINING), gaudi())
    assert bridge.calls == []  # a run that only evaluates has no training graphs
    graphs.apply_mode(model, flags(TRAINING, "--do_train"), gaudi())
    assert bridge.calls == [("ModuleCacher", {"model": model, "inplace": True})]


@pytest.mark.parametrize(
    ("argv", "given"),
    [
        ([], {"disable_tensor_cache": False, "max_graphs": None}),
        (["--max_hpu_graphs", "3"], {"disable_tensor_cache": False, "max_graphs": 3}),
        (["--disable_tensor_cache_hpu_graphs"], {"disable_tensor_cache": True, "max_graphs": None}),
    ],
)
def test_inference_graphs_get_their_options(bridge, argv, given):
    model = Stack()
    assert graphs.cache_inference_graphs(model, flags(INFERENCE, *argv), gaudi()) is model
    assert bridge.calls == [("wrap_in_hpu_graph", {"model": model, **given})]


def test_only_what_a_replay_repeats_is_replayed(bridge, monkeypatch):
    """Not a cache that grows as the model runs, and no evaluation by training graphs or the other way round."""
    calls = []

    def record(model, **_):
        plain = model.forward
        model.forward = lambda *args, **kwargs: calls.append("recorded") or plain(*args, **kwargs)
        return model

    monkeypatch.setattr(torch.hpu, "ModuleCacher", lambda: lambda model, inplace: record(model))
    monkeypatch.setattr(torch.hpu, "wrap_in_hpu_graph", record)

    class Model(nn.Module):
        def forward(self, x, cache=None):
            return x

    for name, apply, training in (
        (TRAINING, graphs.apply_mode, True),
        (INFERENCE, graphs.cache_inference_graphs, False),
    ):
        model = Model()
        apply(model, flags(name, "--do_train"), gaudi())
        assert list(signature(model.forward).parameters) == ["x", "cache"]
        for mode, given, recorded in ((training, {"x": 1}, 1), (training, {}, 0), (not training, {"x": None}, 0)):
            calls.clear()
            model.train(mode)(torch.ones(1), cache=given if given else object())
            assert len(calls) == recorded


def test_no_graphs_unless_asked_for(bridge):
    model = Stack()
    graphs.apply_mode(model, flags(INFERENCE, "--do_train"), gaudi())
    assert graphs.cache_inference_graphs(model, flags(TRAINING, "--do_train"), gaudi()) is model
    for device in (cpu(), gaudi("eager")):
        graphs.apply_mode(model, flags("--use_hpu_graphs", "--do_train"), device)
        graphs.cache_inference_graphs(model, flags("--use_hpu_graphs"), device)
    assert bridge.calls == []
    assert model._compiled_call_impl is None


@pytest.mark.parametrize("cache", [graphs.apply_mode, graphs.cache_inference_graphs])
def test_cuda_graphs_come_by_the_compiler(monkeypatch, cache):
    given = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.append(options))
    cache(Stack(), flags("--use_hpu_graphs", "--do_train"), gpu())
    assert given == [{"mode": "reduce-overhead"}]


# --------------------------------------------------------------------------------------------------------- compilation


def test_repeated_blocks_of_a_t5(tiny_t5):
    from transformers import T5ForConditionalGeneration

    model = T5ForConditionalGeneration.from_pretrained(tiny_t5)
    blocks = graphs.repeated_blocks(model)
    assert [id(block) for block in blocks] == [id(block) for block in (*model.encoder.block, *model.decoder.block)]


def test_a_model_without_blocks_is_its_own_block():
    for model in (Block(), nn.ModuleList([Block()]), nn.ModuleList([Block(), nn.ReLU()])):
        assert list(graphs.repeated_blocks(model)) == [model]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("regional", [False, True])
def test_compiled_models_compute_the_same_under_the_same_names(fresh_compiler, backend, regional):
    plain, model = Stack(), Stack()
    argv = ["--torch_compile_backend", backend, *(["--use_regional_compilation"] if regional else [])]
    device = cpu("compile")
    before = graphs.compile_count(device)
    graphs.apply_mode(model, flags(*argv), device)
    assert (model._compiled_call_impl is None) is regional
    assert all((block._compiled_call_impl is not None) is regional for block in model.blocks)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert model.state_dict().keys() == plain.state_dict().keys()
    assert graphs.compile_count(device) == before  # nothing runs yet
    x = torch.randn(3, 4)
    outputs = model(x), plain(x)
    assert torch.allclose(*outputs, atol=1e-6)
    for output in outputs:
        output.square().sum().backward()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-6)
    compiled = graphs.compile_count(device)
    assert compiled > before
    model(x)
    assert graphs.compile_count(device) == compiled
    model(torch.randn(5, 4))
    assert graphs.compile_count(device) > compiled  # another shape


def test_compiler_settings_reach_the_compiler(fresh_compiler, monkeypatch):
    given = []
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: given.append(options))
    config = torch._dynamo.config
    argv = ["--cache_size_limit", "3", "--inline_inbuilt_nn_modules", "False", "--use_compiled_autograd"]
    unspecified = not config.allow_unspec_int_on_nn_module
    argv += ["--allow_unspec_int_on_nn_module", str(unspecified), "--compile_dynamic", "True"]
    graphs.compile_in_place(Stack(), flags(*argv, "--torch_compile_backend", "eager"), cpu("compile"))
    assert config.cache_size_limit == 3
    assert config.inline_inbuilt_nn_modules is False
    assert config.allow_unspec_int_on_nn_module is unspecified
    assert config.compiled_autograd is True
    assert given == [{"backend": "eager", "dynamic": True}]


def test_settings_not_given_stay_the_compilers(fresh_compiler, monkeypatch):
    monkeypatch.setattr(nn.Module, "compile", lambda self, **options: None)
    names = ("cache_size_limit", "inline_inbuilt_nn_modules", "allow_unspec_int_on_nn_module", "compiled_autograd")
    before = [getattr(torch._dynamo.config, name) for name in names]
    graphs.compile_in_place(Stack(), flags(), cpu("compile"))
    assert [getattr(torch._dynamo.config, name) for name in names] == before


def test_compile_count_without_a_compiler_is_the_bridges(bridge):
    gaudi().bridge("hpu.metrics").compiled = 5
    assert graphs.compile_count(gaudi("lazy")) == 5
    assert graphs.compile_count(cpu()) is None
