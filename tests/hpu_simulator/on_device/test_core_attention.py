"""Fused attention on the simulated card against torch's own on the CPU in real models; options and recorded graphs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from habana_frameworks.torch.hpex import kernels
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import causal_mask_function

from core import attention, graphs
from core.arguments import parse_arguments
from core.attention import FUSED, choose, register, supported
from core.device import LAZY_VARIABLE, Device, select_device
from core.errors import UserError
from hpu_simulator import runtime
from tests.core.test_attention import arguments, batch, build

LAZY = os.environ[LAZY_VARIABLE] == "1"
lazy_only = pytest.mark.skipif(not LAZY, reason="HPU graphs exist in lazy mode only")
FAMILIES = ["t5", "bart", "gpt2", "llama", "mistral"]


@pytest.fixture(autouse=True)
def device() -> Iterator[Device]:
    found = select_device(parse_arguments(["--do_eval"], description=""), "lazy" if LAZY else "eager")
    yield found
    found.synchronize()
    AttentionInterface._global_mapping.pop(FUSED, None)
    AttentionMaskInterface._global_mapping.pop(FUSED, None)
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """The arguments of every call of the kernel; made before `register`, which looks the kernel up."""
    made: list[tuple] = []

    class Watched:
        @staticmethod
        def apply(*given):
            made.append(given)
            return kernel.apply(*given)

    kernel = kernels.FusedSDPA
    monkeypatch.setattr(kernels, "FusedSDPA", Watched)
    return made


def on(kind: str, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.to(kind) for name, value in inputs.items()}


def learn(model: PreTrainedModel, inputs: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients, on the host."""
    loss = model(**on(model.device.type, inputs)).loss
    loss.backward()
    return float(loss.detach()), {name: p.grad.cpu() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(family: str, inputs: dict, tolerance: float = 1e-5) -> None:
    loss, gradients = learn(build(family, FUSED).to("hpu"), inputs)
    expected_loss, expected = learn(build(family, "sdpa"), inputs)
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=100 * tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_learns_the_same_as_with_torchs(device: Device, calls: list, family: str, padded: bool) -> None:
    args = arguments()
    register(device, args)
    assert supported(type(build(family, "sdpa")), choose(args, device)) == FUSED
    assert_same(family, batch(family, padded))
    assert calls
    assert all(given[0].device.type == "hpu" for given in calls)


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2"])
def test_a_model_answers_and_generates_the_same(device: Device, calls: list, family: str) -> None:
    register(device, arguments())
    fused, plain = build(family, FUSED).eval().to("hpu"), build(family, "sdpa").eval()
    inputs = batch(family)
    with torch.no_grad():
        found = fused(**on("hpu", inputs)).logits.cpu()
        torch.testing.assert_close(found, plain(**inputs).logits, rtol=1e-5, atol=1e-5)
    assert len(calls) == {"t5": 6, "bart": 6, "gpt2": 2}[family]
    inputs.pop("labels")
    ends = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(fused.generate(**on("hpu", inputs), **ends).cpu(), plain.generate(**inputs, **ends))


OPTIONS = [
    ({"flash_attention_recompute": True}, {("None", True)}),
    ({"flash_attention_fast_softmax": True}, {("fast", False)}),
    ({"flash_attention_causal_mask": True}, {("None", False)}),
    ({"flash_attention_causal_mask": True, "flash_attention_recompute": True}, {("None", True)}),
    (
        {name: True for name in attention.OPTIONS if name != "attn_softmax_bf16"},
        {("fast", True), ("None", True)},
    ),
]


@pytest.mark.parametrize(("options", "modes"), OPTIONS, ids=lambda value: "-".join(value) if value is dict else "")
@pytest.mark.parametrize("family", ["bart", "gpt2"])
def test_options_change_the_kernel_and_no_result(
    device: Device, calls: list, family: str, options: dict, modes: set
) -> None:
    register(device, arguments(**options))
    assert_same(family, batch(family))
    assert {given[7:9] for given in calls} <= modes
    causal = {given[5] for given in calls}
    if "flash_attention_causal_mask" in options:
        assert causal == ({True, False} if family == "bart" else {True})
        assert all(given[3] is None for given in calls if given[5])
    else:
        assert causal == {False}


def test_softmax_in_bf16_is_bf16(device: Device, calls: list) -> None:
    register(device, arguments(attn_softmax_bf16=True))
    loss, _ = learn(build("bart", FUSED).to("hpu"), batch("bart"))
    assert {given[0].dtype for given in calls} == {torch.bfloat16}
    assert all(given[3] is None or torch.isfinite(given[3]).all() for given in calls)
    expected, _ = learn(build("bart", "sdpa"), batch("bart"))
    assert loss == pytest.approx(expected, rel=0.01)


def test_autocast_reaches_the_kernel(device: Device, calls: list) -> None:
    register(device, arguments())
    model = build("bart", FUSED).to("hpu")
    with torch.autocast("hpu", dtype=torch.bfloat16):
        loss, gradients = learn(model, batch("bart"))
    assert calls
    assert {given[0].dtype for given in calls} == {torch.bfloat16}
    expected, _ = learn(build("bart", "sdpa"), batch("bart"))
    assert loss == pytest.approx(expected, rel=0.02)
    assert {gradient.dtype for gradient in gradients.values()} == {torch.float32}


def test_a_learned_bias_is_trained(device: Device, calls: list, caplog: pytest.LogCaptureFixture) -> None:
    register(device, arguments())
    _, gradients = learn(build("t5", FUSED).to("hpu"), batch("t5"))
    biases = [name for name in gradients if "relative_attention_bias" in name]
    assert len(biases) == 2
    assert all(gradients[name].abs().sum() > 0 for name in biases)
    assert len(calls) == 2  # the others, which have no such bias
    assert caplog.text.count("no gradient") == 1


def test_the_mask_costs_no_sync_and_no_graph(device: Device) -> None:
    """A full batch and a padded one run as the same graph."""
    register(device, arguments())
    model = build("bart", FUSED).to("hpu")
    batches = [on("hpu", batch("bart", padded)) for padded in (True, False, True)]
    counts = []
    for inputs in batches:
        device.synchronize()
        syncs = runtime.snapshot()["syncs"]
        model(**inputs).loss.backward()
        device.step_boundary()
        counts.append(device.graph_compilations())
        assert runtime.snapshot()["syncs"] == syncs
        model.zero_grad()
    assert counts[1] == counts[2] == counts[0]


def test_the_kernels_causal_mask_looks_at_padding_once(device: Device) -> None:
    register(device, arguments(flash_attention_causal_mask=True))
    make = AttentionMaskInterface._global_mapping[FUSED]
    whole = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": causal_mask_function}
    whole["attention_mask"] = torch.ones(1, 4, dtype=torch.bool, device="hpu")
    counts = [sum(sync["count"] for sync in runtime.snapshot()["syncs"])]
    for _ in range(3):
        assert make(**whole, allow_is_causal_skip=True) is None
        counts.append(sum(sync["count"] for sync in runtime.snapshot()["syncs"]))
    assert counts[1:] == [counts[0] + 1] * 3
    register(device, arguments(flash_attention_causal_mask=True))
    inputs = {name: value.flip(1) for name, value in batch("gpt2").items()}
    with pytest.raises(UserError, match="padding on the right"):
        build("gpt2", FUSED).to("hpu")(**on("hpu", inputs))


def test_torchs_attention_runs_on_the_card_too(device: Device, calls: list) -> None:
    register(device, arguments())
    assert choose(arguments(attn_implementation="sdpa"), device) == "sdpa"
    for family in ("bart", "t5"):
        for name in ("sdpa", "eager"):
            loss, _ = learn(build(family, name).to("hpu"), batch(family))
            assert loss == pytest.approx(learn(build(family, "sdpa"), batch(family))[0], rel=1e-5)
    assert not calls


def test_an_additive_mask_and_a_bias_add_up(device: Device, calls: list) -> None:
    register(device, arguments())
    query, mask, bias = torch.randn(2, 3, 5, 4), torch.randn(2, 1, 5, 5), torch.randn(1, 3, 5, 5)
    attend, plain = (AttentionInterface._global_mapping[name] for name in (FUSED, "sdpa"))
    for options in ({}, {"position_bias": bias}):
        given = on("hpu", {"mask": mask, **options})
        card = [query.to("hpu")] * 3
        found, _ = attend(torch.nn.Module(), *card, given.pop("mask"), **given)
        expected, _ = plain(torch.nn.Module(), query, query, query, mask, **options)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)
    assert len(calls) == 2
    with pytest.raises(UserError, match="cannot cap"):
        attend(torch.nn.Module(), *card, None, softcap=30.0)


def test_reduction_in_bf16_is_switched(device: Device) -> None:
    for allowed in (True, False):
        register(device, arguments(sdp_on_bf16=allowed))
        assert torch._C._get_math_sdp_allow_fp16_bf16_reduction() is allowed


# ---------------------------------------------------------------------------------------------------- recorded graphs


def flags(*argv: str):
    return parse_arguments(["--do_train", "--do_eval", *argv], description="")


@lazy_only
@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generation_with_recorded_graphs_is_the_same(device: Device, family: str, use_cache: bool) -> None:
    """A cache of keys and values grows in Python, which a replay does not run."""
    register(device, arguments())
    model = build(family, FUSED).eval().to("hpu")
    inputs = [on("hpu", batch(family, padded)) for padded in (True, False)]
    for each in inputs:
        each.pop("labels")
    inputs[1]["input_ids"] = inputs[1]["input_ids"].flip(1)
    ends = {"max_new_tokens": 6, "do_sample": False, "num_beams": 2, "use_cache": use_cache}
    expected = [model.generate(**each, **ends).cpu() for each in inputs]
    recorded = graphs.cache_inference_graphs(model, flags("--use_hpu_graphs_for_inference"), device)
    for each, wanted in [*zip(inputs, expected, strict=True)] * 2:
        assert torch.equal(recorded.generate(**each, **ends).cpu(), wanted)


@lazy_only
def test_a_model_with_recorded_graphs_learns_the_same_and_evaluates_after(device: Device) -> None:
    register(device, arguments())
    args = flags("--use_hpu_graphs")
    plain, recorded = build("bart", FUSED).to("hpu"), build("bart", FUSED).to("hpu")
    graphs.apply_mode(recorded, args, device)
    for padded in (True, False, True):
        found, wanted = learn(recorded, batch("bart", padded)), learn(plain, batch("bart", padded))
        assert found[0] == pytest.approx(wanted[0], rel=1e-6)
        for name, gradient in wanted[1].items():  # added up over the passes
            torch.testing.assert_close(found[1][name], gradient, rtol=1e-4, atol=1e-6, msg=name)
    recorded = graphs.cache_inference_graphs(recorded.eval(), args, device)
    for padded in (True, False):
        inputs = on("hpu", batch("bart", padded))
        with torch.no_grad():
            torch.testing.assert_close(recorded(**inputs).logits.cpu(), plain.eval()(**inputs).logits.cpu())
