"""Which device, in which mode: every combination of what can ask, and what the device is then asked for."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch

from core import device as device_module
from core import errors
from core.arguments import parse_arguments
from core.device import BRIDGE, LAZY_VARIABLE, Device, decide_execution_mode, select_device
from core.errors import UserError
from tests import fake_bridge

# Flags, and the mode that they ask for (None: whatever is there).
REQUESTS = {
    "nothing": ([], None),
    "auto": (["--execution_mode", "auto"], None),
    "lazy": (["--execution_mode", "lazy"], "lazy"),
    "eager": (["--execution_mode", "eager"], "eager"),
    "compile": (["--execution_mode", "compile"], "compile"),
    "use_lazy_mode": (["--use_lazy_mode"], "lazy"),
    "use_lazy_mode True": (["--use_lazy_mode", "True"], "lazy"),
    "use_lazy_mode False": (["--use_lazy_mode", "False"], "eager"),
    "torch_compile": (["--torch_compile"], "compile"),
    "torch_compile_backend": (["--torch_compile_backend", "hpu_backend"], "compile"),
    "torch_compile_mode": (["--torch_compile_mode", "default"], "compile"),
    "compile, not lazy": (["--use_lazy_mode", "False", "--torch_compile"], "compile"),
    "compile twice": (["--execution_mode", "compile", "--torch_compile_backend", "inductor"], "compile"),
}
CONTRADICTIONS = (
    ["--execution_mode", "eager", "--use_lazy_mode", "True"],
    ["--execution_mode", "lazy", "--use_lazy_mode", "False"],
    ["--execution_mode", "lazy", "--torch_compile", "True"],
    ["--execution_mode", "eager", "--torch_compile_backend", "inductor"],
    ["--use_lazy_mode", "True", "--torch_compile", "True"],
)


def flags(*argv: str) -> Namespace:
    return parse_arguments(["--do_eval", *argv], description="test")


@pytest.fixture(autouse=True)
def first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """No warning was given yet, and no mode is set."""
    monkeypatch.setattr(errors, "_warned", set())
    monkeypatch.delenv(LAZY_VARIABLE, raising=False)


@pytest.fixture
def bridge(tmp_path):
    with fake_bridge.installed(tmp_path) as package:
        yield package


def gaudi(mode: str = "lazy") -> Device:
    """A Gaudi whose tensors stay on the CPU."""
    return Device("hpu", "gaudi2", mode, torch.device("cpu"), torch.hpu)


def cpu(mode: str = "eager") -> Device:
    return Device("cpu", "cpu (test)", mode, torch.device("cpu"))


# ------------------------------------------------------------------------------------------------------ execution mode


@pytest.mark.parametrize("installed", [True, False], ids=["bridge", "no bridge"])
@pytest.mark.parametrize("value", [None, "0", "1", "2", "junk", ""])
@pytest.mark.parametrize("request_name", REQUESTS)
def test_every_combination_has_one_documented_outcome(monkeypatch, request_name, value, installed):
    argv, asked = REQUESTS[request_name]
    monkeypatch.setattr(device_module, "bridge_is_installed", lambda: installed)
    environ = {} if value is None else {LAZY_VARIABLE: value}
    wrong_value = value not in (None, "0", "1")
    contradiction = asked and value is not None and (asked == "lazy") != (value == "1")
    if wrong_value or contradiction:
        with pytest.raises(UserError) as error:
            decide_execution_mode(flags(*argv), environ)
        message = str(error.value)
        assert f"{LAZY_VARIABLE}={value}" in message
        assert wrong_value or any(name in message for name in argv if name.startswith("--"))
        assert "\n" not in message
        assert environ == {LAZY_VARIABLE: value}
        return
    default = {None: "lazy" if installed else "eager", "0": "eager", "1": "lazy"}[value]
    assert decide_execution_mode(flags(*argv), environ) == (asked or default)
    announced = "1" if (asked or default) == "lazy" else "0"
    assert environ.get(LAZY_VARIABLE) == (announced if installed else value)  # without a bridge nobody reads it


@pytest.mark.parametrize("value", [None, "0", "1"])
@pytest.mark.parametrize("argv", CONTRADICTIONS, ids=" ".join)
def test_flags_that_contradict_are_both_named_with_their_values(argv, value):
    environ = {} if value is None else {LAZY_VARIABLE: value}
    with pytest.raises(UserError) as error:
        decide_execution_mode(flags(*argv), environ)
    for name, given in zip(argv[::2], argv[1::2], strict=True):
        assert f"{name} {given}" in str(error.value)


@pytest.mark.parametrize("mode", ["lazy", "eager", "compile"])
@pytest.mark.parametrize("value", [None, "0", "1"])
def test_a_bridge_that_was_imported_in_another_mode_is_an_error(monkeypatch, mode, value):
    monkeypatch.setattr(device_module, "bridge_is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, BRIDGE, SimpleNamespace())
    needed = "1" if mode == "lazy" else "0"
    environ = {} if value is None else {LAZY_VARIABLE: value}
    if value == needed:
        assert decide_execution_mode(flags("--execution_mode", mode), environ) == mode
        return
    with pytest.raises(UserError, match=LAZY_VARIABLE):
        decide_execution_mode(flags("--execution_mode", mode), environ)


def test_auto_does_not_hide_that_the_bridge_came_too_early(monkeypatch):
    monkeypatch.setattr(device_module, "bridge_is_installed", lambda: True)
    monkeypatch.setitem(sys.modules, BRIDGE, SimpleNamespace())
    with pytest.raises(UserError, match=f"before lazy mode.*{LAZY_VARIABLE}=1"):
        decide_execution_mode(flags(), {})
    assert decide_execution_mode(flags(), {LAZY_VARIABLE: "0"}) == "eager"


@pytest.mark.parametrize(("argv", "seen"), [([], "1"), (["--execution_mode", "compile"], "0")])
def test_the_bridge_finds_the_mode_when_torch_imports_it(tmp_path, argv, seen):
    code = f"""
import sys
from core.arguments import parse_arguments
from core.mixed_precision import prepare_environment
args = parse_arguments(["--do_eval", *{argv!r}], description="test")
prepare_environment(args)
assert "torch" not in sys.modules and "habana_frameworks.torch" not in sys.modules, "imported too early"
from core.device import select_device
device = select_device(args, args.execution_mode)
device.check_mode()
print(sys.modules["habana_frameworks.torch"].LAZY_MODE, device.kind, device.name, device.mode, device.torch_device)
"""
    done = fake_bridge.run(code, fake_bridge.write(tmp_path))
    assert done.stderr == ""
    assert done.stdout.split() == [seen, "hpu", "gaudi2", "lazy" if seen == "1" else "compile", "hpu"]


def test_torch_before_the_mode_is_an_error(tmp_path):
    code = """
import torch
from core.arguments import parse_arguments
from core.errors import exit_with_one_line
from core.mixed_precision import prepare_environment
exit_with_one_line(lambda: prepare_environment(parse_arguments(["--do_eval"], description="test")))
"""
    done = fake_bridge.run(code, fake_bridge.write(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith("error: the bridge was imported before lazy mode")
    assert done.stderr.count("\n") == 1


def test_a_late_change_of_the_variable_is_found(monkeypatch, bridge):
    gaudi("lazy").check_mode()
    for late in ("0", "2"):
        monkeypatch.setenv(LAZY_VARIABLE, late)
        with pytest.raises(UserError, match=f"{LAZY_VARIABLE} became {late}"):
            gaudi("lazy").check_mode()
    monkeypatch.delenv(LAZY_VARIABLE)
    with pytest.raises(UserError, match=LAZY_VARIABLE):
        gaudi("lazy").check_mode()
    monkeypatch.setenv(LAZY_VARIABLE, "1")
    for mode in ("eager", "compile"):
        with pytest.raises(UserError, match=LAZY_VARIABLE):
            gaudi(mode).check_mode()
    monkeypatch.setenv(LAZY_VARIABLE, "0")
    with pytest.raises(UserError, match="became 0, but the bridge read 1"):
        gaudi("eager").check_mode()  # the whole run believed the variable
    monkeypatch.setenv(LAZY_VARIABLE, "1")
    cpu().check_mode()  # nobody reads it there


# ----------------------------------------------------------------------------------------------------------- selection


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(device_module, "bridge_is_installed", lambda: False)


def test_use_habana_without_a_gaudi_warns_and_goes_on(no_gpu, caplog):
    device = select_device(flags("--use_habana"), "eager")
    assert (device.kind, device.torch_device, device.runtime) == ("cpu", torch.device("cpu"), None)
    assert device.name.startswith("cpu (")
    select_device(flags("--use_habana"), "eager")
    assert len(caplog.messages) == 1
    assert "--use_habana" in caplog.messages[0]
    assert device.name in caplog.messages[0]


@pytest.mark.parametrize("argv", [[], ["--use_cpu"], ["--no_cuda"], ["--use_habana", "False"]])
def test_without_an_accelerator_it_is_the_cpu(no_gpu, caplog, argv):
    assert select_device(flags(*argv), "eager").kind == "cpu"
    assert not caplog.messages


def test_use_habana_and_use_cpu_contradict():
    with pytest.raises(UserError, match="--use_habana and --use_cpu"):
        select_device(flags("--use_habana", "--use_cpu"), "eager")


def test_a_gpu_is_taken_unless_the_cpu_is_asked_for(no_gpu, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    device = select_device(flags(), "eager")
    assert (device.kind, device.name, device.runtime) == ("cuda", "a GPU", torch.cuda)
    assert select_device(flags("--use_cpu"), "eager").kind == "cpu"
    assert not caplog.messages


@pytest.mark.parametrize("argv", [[], ["--use_habana"], ["--use_habana", "True"]])
def test_a_gaudi_comes_first(bridge, argv, caplog):
    device = select_device(flags(*argv), "lazy")
    assert (device.kind, device.name, device.mode, device.runtime) == ("hpu", "gaudi2", "lazy", torch.hpu)
    assert not caplog.messages


@pytest.mark.parametrize(("found", "name"), [("Gaudi", "gaudi"), ("Gaudi3", "gaudi3"), ("Gaudi4", "hpu (")])
def test_the_card_is_named(bridge, found, name):
    experimental = Device("hpu", "", "lazy", None).bridge("utils.experimental")
    experimental.found = f"synDevice{found}"
    assert select_device(flags(), "lazy").name.startswith(name)


@pytest.mark.parametrize("argv", [["--use_cpu"], ["--use_habana", "False"]])
def test_a_gaudi_can_be_declined(bridge, monkeypatch, argv):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert select_device(flags(*argv), "eager").kind == "cpu"


def test_a_bridge_without_a_card_is_no_gaudi(bridge, monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    torch.hpu.cards = 0
    assert select_device(flags("--use_habana"), "eager").kind == "cpu"
    assert "no Gaudi was found" in caplog.text


def test_lazy_mode_elsewhere_is_said_and_is_eager(no_gpu, caplog):
    device = select_device(flags("--use_lazy_mode"), "lazy")
    assert device.mode == "eager"
    assert len(caplog.messages) == 1
    assert "lazy" in caplog.messages[0]
    assert select_device(flags("--torch_compile"), "compile").mode == "compile"
    assert len(caplog.messages) == 1


# -------------------------------------------------------------------------------------------------------- capabilities


def test_capabilities_follow_kind_and_mode(bridge):
    lazy, eager, compiled = gaudi("lazy"), gaudi("eager"), gaudi("compile")
    gpu = Device("cuda", "a GPU", "eager", torch.device("cuda"), torch.cuda)
    everywhere = (lazy, eager, compiled, gpu, cpu(), cpu("compile"))
    table = {
        "has_step_boundaries": (True, False, False, False, False, False),
        "compiles": (True, False, True, False, False, True),
        "queues_work": (True, True, True, True, False, False),
        "has_hpu_graphs": (True, False, False, False, False, False),
        "has_cuda_graphs": (False, False, False, True, False, False),
        "has_habana_kernels": (True, True, True, False, False, False),
        "has_fused_attention": (True, True, True, False, False, False),
        "has_op_lists": (True, True, True, False, False, False),
        "draws_masks_on_host": (False, False, False, False, True, False),
        "compile_backend": ("hpu_backend", "hpu_backend", "hpu_backend", "inductor", "inductor", "inductor"),
    }
    for name, expected in table.items():
        assert tuple(getattr(device, name) for device in everywhere) == expected, name
    assert all(device.has_fast_bf16 for device in everywhere[:4])
    assert isinstance(cpu().has_fast_bf16, bool)


@pytest.mark.parametrize(("mode", "marks"), [("lazy", 3), ("eager", 0), ("compile", 0)])
def test_step_boundaries_are_those_of_lazy_mode(bridge, mode, marks):
    device = gaudi(mode)
    device.step_boundary()
    device.step_boundary()
    device.synchronize()  # what is queued must be started before it can be waited for
    assert bridge.count("mark_step") == marks
    assert bridge.count("synchronize") == 1
    assert bridge.calls[-1][0] == "synchronize"


@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_an_event_stands_where_it_was_put_and_waits_for_nothing(bridge, mode):
    device = gaudi(mode)
    start, end = device.event(), device.event()
    assert [name for name, _ in bridge.calls] == ["record", "record"]
    assert 0 <= start.elapsed_time(end) < 1000
    assert cpu().event() is None


def test_the_cpu_needs_neither(bridge):
    cpu().step_boundary()
    cpu("compile").synchronize()
    assert bridge.calls == []


@pytest.mark.parametrize(
    ("mode", "calls"), [("lazy", ["enable_dynamic_shape", "disable_dynamic_shape"]), ("eager", [])]
)
def test_dynamic_shapes_are_switched_in_lazy_mode_only(bridge, mode, calls):
    gaudi(mode).set_dynamic_shapes(True)
    gaudi(mode).set_dynamic_shapes(False)
    cpu().set_dynamic_shapes(True)
    assert [name for name, _ in bridge.calls] == calls


def test_graph_compilations(bridge):
    metrics = gaudi().bridge("hpu.metrics")
    assert gaudi().graph_compilations() == 0
    metrics.compiled = 7
    assert gaudi("compile").graph_compilations() == 7
    metrics.names.clear()  # a bridge that names the metric otherwise
    assert gaudi().graph_compilations() is None
    assert cpu().graph_compilations() is None


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_of_a_cpu_is_that_of_the_process():
    device = cpu()
    device.reset_peak_memory_stats()
    before = device.memory_stats()
    block = torch.ones(200_000_000, dtype=torch.uint8)  # written, so that it is in memory
    during = device.memory_stats()
    assert 190e6 < during["InUse"] - before["InUse"] < 300e6
    assert during["MaxInUse"] >= during["InUse"] - 1e6
    assert during["Limit"] == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    del block
    after = device.memory_stats()
    assert after["InUse"] < during["InUse"] - 150e6
    assert after["MaxInUse"] > during["InUse"] - 10e6  # the peak outlives the block
    if os.access("/proc/self/clear_refs", os.W_OK):
        device.reset_peak_memory_stats()
        assert device.memory_stats()["MaxInUse"] < during["InUse"] - 150e6


def test_memory_of_a_gaudi_is_the_bridges(bridge):
    device = gaudi()
    assert device.memory_stats()["Limit"] == 96 * 2**30
    assert device.memory_stats()["MaxInUse"] == 7 * 2**20
    device.reset_peak_memory_stats()
    assert device.memory_stats()["MaxInUse"] == device.memory_stats()["InUse"] == 3 * 2**20


# ------------------------------------------------------------------------------------------------------- random states


def test_random_state_round_trip_on_a_cpu():
    device = cpu()
    state = device.rng_state()
    assert list(state) == ["cpu"]
    first = torch.rand(5)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(5), first)


def test_random_state_round_trip_on_a_gaudi(bridge):
    device, generator = gaudi(), gaudi().bridge("hpu.random").generator
    state = {name: value.clone() for name, value in device.rng_state().items()}
    assert set(state) == {"cpu", "hpu"}
    assert all(value.dtype == torch.uint8 for value in state.values())
    first = torch.rand(5), torch.rand(5, generator=generator)
    device.set_rng_state(state)
    assert torch.equal(torch.rand(5), first[0])
    assert torch.equal(torch.rand(5, generator=generator), first[1])


def test_the_seed_is_also_that_of_a_gaudis_own_generator(bridge):
    generator = gaudi().bridge("hpu.random").generator
    draws = []
    for _ in range(2):
        gaudi().manual_seed(5)
        draws.append((torch.rand(5), torch.rand(5, generator=generator)))
    assert all(torch.equal(one, other) for one, other in zip(*draws, strict=True))
    cpu().manual_seed(5)
    assert torch.equal(torch.rand(5), draws[0][0])


def test_a_state_of_another_device_is_left_out_and_said(bridge, caplog):
    generator = gaudi().bridge("hpu.random").generator
    of_hpu, of_cpu = generator.get_state(), cpu().rng_state()
    first = torch.rand(5)
    gaudi().set_rng_state(of_cpu)
    assert torch.equal(torch.rand(5), first)
    assert torch.equal(generator.get_state(), of_hpu)
    assert len(caplog.messages) == 1
    assert "no hpu random state" in caplog.messages[0]
    cpu().set_rng_state({**of_cpu, "hpu": of_hpu})  # a Gaudi's checkpoint on a laptop
    assert len(caplog.messages) == 1


# ---------------------------------------------------------------------------------------------------------------- move


class Recorded:
    """What has ``to`` is moved by it."""

    def to(self, device, non_blocking):
        return device, non_blocking


def test_move_keeps_the_nesting():
    Pair = namedtuple("Pair", "left right")
    device = Device("cuda", "meta", "eager", torch.device("meta"))
    tensor = torch.ones(2)
    batch = {"a": tensor, "b": [tensor, (tensor, "text", None)], "c": Pair(tensor, 3), "d": {"e": 1.5, "f": []}}
    moved = device.move(batch)
    assert moved["a"].device.type == moved["b"][0].device.type == moved["b"][1][0].device.type == "meta"
    assert moved["b"][1][1:] == ("text", None)
    assert type(moved["b"]) is list
    assert type(moved["b"][1]) is tuple
    assert moved["c"].left.device.type == "meta"
    assert moved["c"].right == 3
    assert moved["d"] == {"e": 1.5, "f": []}
    assert batch["a"] is tensor
    assert device.move(Recorded()) == (torch.device("meta"), False)
    assert device.move([Recorded()], non_blocking=True) == [(torch.device("meta"), True)]
