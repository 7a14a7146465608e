"""Attention: FusedSDPA's stand-in and torch's SDPA give the same numbers and gradients; every option has an effect."""

from __future__ import annotations

from argparse import Namespace
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForSeq2SeqLM,
    BartConfig,
    BartForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    masking_utils,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function

from core import attention, dropout, errors
from core.attention import FUSED, choose, one_document_a_row, register, supported
from core.errors import UserError


def arguments(**changes) -> Namespace:
    names = [*attention.OPTIONS, "use_flash_attention", "sdp_on_bf16"]
    return Namespace(**{"attn_implementation": None, **dict.fromkeys(names, False), **changes})


class Kernel(torch.autograd.Function):
    """FusedSDPA in plain torch: same argument order, and like the original no gradient for the mask."""

    calls: ClassVar[list[SimpleNamespace]] = []

    @staticmethod
    def forward(ctx, q, k, v, attn_mask, dropout_p, is_causal, scale, softmax_mode, recompute):
        assert all(tensor.dtype == q.dtype for tensor in (k, v))
        assert attn_mask is None or (attn_mask.dtype == q.dtype and not is_causal)
        assert q.shape[:2] == k.shape[:2] == v.shape[:2]
        assert isinstance(is_causal, bool)
        assert isinstance(recompute, bool)
        assert softmax_mode in ("fast", "None")
        assert isinstance(scale, float)
        assert dropout_p == 0.0
        call = {"mask": attn_mask, "causal": is_causal, "softmax": softmax_mode, "recompute": recompute, "q": q}
        Kernel.calls.append(SimpleNamespace(**call))
        scores = q @ k.transpose(-1, -2) * scale
        if is_causal:
            future = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(future, torch.finfo(q.dtype).min)
        if attn_mask is not None:
            scores = scores + attn_mask
        weights = scores.softmax(-1)
        ctx.scale = scale
        ctx.save_for_backward(q, k, v, weights)
        return weights @ v

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, weights = ctx.saved_tensors
        of_weights = gradient @ v.transpose(-1, -2)
        of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * ctx.scale
        nothing = [None] * 6
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient, *nothing


class FakeDevice:
    def __init__(self, fused: bool) -> None:
        self.has_fused_attention, self.name = fused, "gaudi2" if fused else "cpu (test)"
        self.draws_masks_on_host = not fused

    def bridge(self, submodule: str) -> SimpleNamespace:
        assert self.has_fused_attention
        assert submodule == "hpex.kernels"
        return SimpleNamespace(FusedSDPA=Kernel)


GAUDI, CPU = FakeDevice(True), FakeDevice(False)


@pytest.fixture(autouse=True)
def clean(monkeypatch, caplog):
    monkeypatch.setattr(errors, "_warned", set())
    Kernel.calls = []
    yield
    AttentionInterface._global_mapping.pop(FUSED, None)
    AttentionInterface.register("sdpa", sdpa_attention_forward)
    AttentionMaskInterface._global_mapping.pop(FUSED, None)
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(False)


def build(family: str, attn: str) -> PreTrainedModel:
    torch.manual_seed(0)
    if family == "t5":
        config = T5Config(vocab_size=40, d_model=16, d_kv=4, d_ff=32, num_layers=2, num_heads=4, dropout_rate=0.0)
        kind = T5ForConditionalGeneration
    elif family == "bart":
        heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
        sizes = {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "encoder_layers": 2, "decoder_layers": 2}
        no_dropout = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0}
        config = BartConfig(vocab_size=40, d_model=16, max_position_embeddings=32, **heads, **sizes, **no_dropout)
        kind = BartForConditionalGeneration
    elif family == "gpt2":
        config = GPT2Config(vocab_size=40, n_embd=16, n_layer=2, n_head=4, n_positions=32)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
        kind = GPT2LMHeadModel
    else:  # four query heads, two key heads
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 32}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        if family == "llama":
            config, kind = LlamaConfig(vocab_size=40, **heads, **sizes), LlamaForCausalLM
        else:
            config, kind = MistralConfig(vocab_size=40, sliding_window=3, **heads, **sizes), MistralForCausalLM
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    config.vocab_size = 40
    model = kind._from_config(config, attn_implementation=attn)
    return model.train()


def batch(family: str, padded: bool = True) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    mask = torch.ones(3, 10, dtype=torch.long)
    if padded:
        mask[0, 6:] = 0
        mask[2, 3:] = 0
    ids = torch.randint(3, 40, (3, 10)) * mask
    if family in ("gpt2", "llama", "mistral"):
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {"input_ids": ids, "attention_mask": mask, "labels": torch.randint(3, 40, (3, 7))}


def loss_and_gradients(family: str, attn: str, inputs: dict) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model = build(family, attn)
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(family: str, inputs: dict) -> None:
    loss, gradients = loss_and_gradients(family, FUSED, inputs)
    expected_loss, expected = loss_and_gradients(family, "sdpa", inputs)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=1e-6)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("padded", [True, False])
@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "llama", "mistral"])
def test_fused_attention_is_sdpas_twin(family, padded):
    register(GAUDI, arguments())
    assert_same(family, batch(family, padded))
    assert Kernel.calls


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2"])
def test_fused_attention_is_sdpas_twin_without_a_mask(family):
    register(GAUDI, arguments())
    inputs = batch(family, padded=False)
    inputs.pop("attention_mask")
    assert_same(family, inputs)
    causal = {"t5": {False}, "bart": {False}, "gpt2": {True}}  # BART's decoder makes a mask of ones
    assert {call.causal for call in Kernel.calls} == causal[family]


@pytest.mark.parametrize("is_causal", [None, True, False])
@pytest.mark.parametrize(("queries", "keys"), [(1, 5), (5, 5)])
@pytest.mark.parametrize("bias", ["none", "fixed", "learned"])
def test_causality_is_that_of_transformers_sdpa(is_causal, queries, keys, bias):
    register(GAUDI, arguments())
    module = torch.nn.Module()
    module.is_causal = True
    query, key, value = torch.randn(2, 3, queries, 4), torch.randn(2, 3, keys, 4), torch.randn(2, 3, keys, 4)
    position_bias = torch.randn(1, 3, queries, keys, requires_grad=bias == "learned")
    options = {"is_causal": is_causal, "position_bias": None if bias == "none" else position_bias}
    fused, _ = AttentionInterface._global_mapping[FUSED](module, query, key, value, None, **options)
    plain, _ = AttentionInterface._global_mapping["sdpa"](module, query, key, value, None, **options)
    torch.testing.assert_close(fused, plain)


def test_an_additive_mask_and_a_bias_add_up():
    register(GAUDI, arguments())
    query, mask, bias = torch.randn(2, 3, 5, 4), torch.randn(2, 1, 5, 5), torch.randn(1, 3, 5, 5)
    for options in ({}, {"position_bias": bias}):
        fused, _ = AttentionInterface._global_mapping[FUSED](torch.nn.Module(), query, query, query, mask, **options)
        plain, _ = AttentionInterface._global_mapping["sdpa"](torch.nn.Module(), query, query, query, mask, **options)
        torch.testing.assert_close(fused, plain)


def test_plain_attention_drops_out():
    register(GAUDI, arguments())
    attend = AttentionInterface._global_mapping[FUSED]
    query, bias = torch.randn(1, 1, 4, 4), torch.zeros(1, 1, 4, 4, requires_grad=True)
    ones = torch.ones(1, 1, 4, 4)
    torch.manual_seed(0)
    out, _ = attend(torch.nn.Module(), query, query, ones, None, dropout=0.5, is_causal=False, position_bias=bias)
    assert not torch.allclose(out, torch.ones(()))  # the weights that are left no longer sum to 1
    out, _ = attend(torch.nn.Module(), query, query, ones, None, is_causal=False, position_bias=bias)
    torch.testing.assert_close(out, torch.ones_like(out))


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2"])
def test_fused_attention_is_sdpas_twin_in_evaluation(family):
    register(GAUDI, arguments())
    fused, plain = build(family, FUSED).eval(), build(family, "sdpa").eval()
    inputs = batch(family)
    with torch.no_grad():
        torch.testing.assert_close(fused(**inputs).logits, plain(**inputs).logits, rtol=1e-5, atol=1e-5)
    attentions = {"t5": 6, "bart": 6, "gpt2": 2}
    assert len(Kernel.calls) == attentions[family]  # every attention, T5's with a bias too
    inputs.pop("labels")
    ends = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(fused.generate(**inputs, **ends), plain.generate(**inputs, **ends))


def test_a_learned_bias_is_trained_although_the_kernel_gives_it_no_gradient(caplog):
    register(GAUDI, arguments())
    _, gradients = loss_and_gradients("t5", FUSED, batch("t5"))
    _, expected = loss_and_gradients("t5", "eager", batch("t5"))
    biases = [name for name in expected if "relative_attention_bias" in name]
    assert len(biases) == 2
    for name in biases:
        assert expected[name].abs().sum() > 0
        torch.testing.assert_close(gradients[name], expected[name], rtol=1e-4, atol=1e-7)
    assert sum("no gradient" in record.getMessage() for record in caplog.records) == 1


def test_on_other_devices_the_name_means_torchs_sdpa():
    register(CPU, arguments())
    loss, gradients = loss_and_gradients("bart", FUSED, batch("bart"))
    expected_loss, expected = loss_and_gradients("bart", "sdpa", batch("bart"))
    assert torch.equal(loss, expected_loss)
    assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
    assert not Kernel.calls


def test_the_mask_does_not_depend_on_what_is_in_it():
    """Leaving it out when nothing is padded would read the device, and make a second graph."""
    register(GAUDI, arguments())
    shapes = []
    for padded in (True, False):
        Kernel.calls = []
        build("bart", FUSED)(**batch("bart", padded))
        shapes.append([None if call.mask is None else call.mask.shape for call in Kernel.calls])
    assert shapes[0] == shapes[1]


def test_causal_mask_of_the_kernel():
    inputs = batch("gpt2")
    register(GAUDI, arguments())
    assert_same("gpt2", inputs)
    assert {call.causal for call in Kernel.calls} == {False}
    Kernel.calls = []
    register(GAUDI, arguments(flash_attention_causal_mask=True))
    assert_same("gpt2", inputs)  # padding is on the right, and ignored in the loss
    assert {call.causal for call in Kernel.calls} == {True}
    assert {call.mask for call in Kernel.calls} == {None}
    Kernel.calls = []
    assert_same("bart", batch("bart"))
    assert [call.causal for call in Kernel.calls] == [False, False, True, False, True, False]
    assert_same("t5", batch("t5"))
    Kernel.calls = []
    assert_same("mistral", batch("mistral"))  # a window is more than causal
    assert {call.causal for call in Kernel.calls} == {False}
    whole = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": causal_mask_function}
    make = AttentionMaskInterface._global_mapping[FUSED]
    assert make(**whole, allow_is_causal_skip=True) is None
    assert make(**whole, allow_is_causal_skip=False).shape == (1, 1, 4, 4)  # the model needs it


def test_causal_mask_of_the_kernel_refuses_padding_on_the_left():
    register(GAUDI, arguments(flash_attention_causal_mask=True))
    inputs = batch("gpt2")
    inputs["attention_mask"][1] = 0  # a filler row has no token at all
    build("gpt2", FUSED)(**inputs)
    register(GAUDI, arguments(flash_attention_causal_mask=True))
    with pytest.raises(UserError, match="flash_attention_causal_mask needs padding on the right"):
        build("gpt2", FUSED)(**{key: value.flip(1) for key, value in inputs.items()})


def test_padding_is_looked_at_once(monkeypatch):
    register(GAUDI, arguments(flash_attention_causal_mask=True))
    reads = []
    read = torch.Tensor.__bool__
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: reads.append(1) or read(self))
    make = AttentionMaskInterface._global_mapping[FUSED]
    whole = {"batch_size": 1, "q_length": 4, "kv_length": 4, "mask_function": causal_mask_function}
    for _ in range(3):
        make(**whole, allow_is_causal_skip=True, attention_mask=torch.ones(1, 4, dtype=torch.bool))
    assert len(reads) == 1


def test_options_reach_the_kernel():
    inputs = batch("bart")
    register(GAUDI, arguments())
    build("bart", FUSED)(**inputs)
    assert {(call.softmax, call.recompute, call.q.dtype) for call in Kernel.calls} == {("None", False, torch.float32)}
    Kernel.calls = []
    register(GAUDI, arguments(flash_attention_fast_softmax=True, attn_softmax_bf16=True))
    loss = build("bart", FUSED)(**inputs).loss
    assert {(call.softmax, call.recompute, call.q.dtype) for call in Kernel.calls} == {("fast", False, torch.bfloat16)}
    assert loss.dtype == torch.float32
    assert torch.isfinite(loss)
    Kernel.calls = []
    register(GAUDI, arguments(flash_attention_recompute=True))
    build("bart", FUSED)(**inputs)
    assert {(call.softmax, call.recompute) for call in Kernel.calls} == {("None", True)}


def test_fast_softmax_with_recompute_trains_causal_layers_only(caplog):
    options = {"flash_attention_recompute": True, "flash_attention_causal_mask": True}
    register(GAUDI, arguments(flash_attention_fast_softmax=True, **options))
    model = build("bart", FUSED)
    model(**batch("bart"))
    assert {(call.causal, call.softmax) for call in Kernel.calls} == {(True, "fast"), (False, "None")}
    assert sum("--flash_attention_fast_softmax" in record.getMessage() for record in caplog.records) == 1
    Kernel.calls = []
    with torch.no_grad():
        model(**batch("bart"))
    assert {call.softmax for call in Kernel.calls} == {"fast"}


def test_a_mask_in_fp32_stays_finite_in_bf16():
    register(GAUDI, arguments())
    attend = AttentionInterface._global_mapping[FUSED]
    query = torch.randn(1, 2, 3, 4, dtype=torch.bfloat16)
    mask = torch.zeros(1, 1, 3, 3).fill_(torch.finfo(torch.float32).min)
    out, _ = attend(torch.nn.Module(), query, query, query, mask)
    assert torch.isfinite(out).all()
    assert out.shape == (1, 3, 2, 4)


def test_a_cap_on_scores_is_refused():
    register(GAUDI, arguments())
    query = torch.randn(1, 2, 3, 4)
    with pytest.raises(UserError, match="--attn_implementation eager"):
        AttentionInterface._global_mapping[FUSED](torch.nn.Module(), query, query, query, None, softcap=50.0)


@pytest.mark.parametrize("wanted", [True, False])
def test_sdp_on_bf16_sets_torchs_switch(wanted):
    torch._C._set_math_sdp_allow_fp16_bf16_reduction(not wanted)
    register(CPU, arguments(sdp_on_bf16=wanted))
    assert torch._C._get_math_sdp_allow_fp16_bf16_reduction() is wanted


@pytest.mark.parametrize(
    ("device", "flags", "expected", "warnings"),
    [
        (GAUDI, {}, FUSED, 0),
        (CPU, {}, "sdpa", 0),
        (GAUDI, {"attn_implementation": "eager"}, "eager", 0),
        (GAUDI, {"use_flash_attention": True}, FUSED, 0),
        (GAUDI, {"use_flash_attention": True, "attn_implementation": FUSED}, FUSED, 0),
        (GAUDI, {"flash_attention_recompute": True, "attn_softmax_bf16": True}, FUSED, 0),
        (CPU, {"attn_implementation": FUSED}, "sdpa", 1),
        (CPU, {"use_flash_attention": True}, "sdpa", 1),
        (CPU, {"attn_implementation": "eager"}, "eager", 0),
        (CPU, dict.fromkeys(attention.OPTIONS, True), "sdpa", 4),
        (GAUDI, {"attn_implementation": "sdpa", "flash_attention_fast_softmax": True}, "sdpa", 1),
    ],
)
def test_choice(device, flags, expected, warnings, caplog):
    args = arguments(**flags)
    assert choose(args, device) == choose(args, device) == expected
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == warnings
    if warnings:
        given = [name for name in flags if name not in ("attn_implementation",)] or ["attn_implementation"]
        assert all(any(f"--{name}" in message for message in messages) for name in given)


def test_contradicting_flags_name_each_other():
    with pytest.raises(UserError, match=r"--use_flash_attention .* but sdpa"):
        choose(arguments(use_flash_attention=True, attn_implementation="sdpa"), GAUDI)


class WithoutSdpa(PreTrainedModel):
    config_class = T5Config


class WithoutRegistry(T5ForConditionalGeneration):
    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        return False


def test_models_that_lack_the_choice_get_the_next_best(caplog):
    assert supported(T5ForConditionalGeneration, FUSED) == FUSED
    assert supported(AutoModelForSeq2SeqLM, FUSED, T5Config()) == FUSED
    assert supported(AutoModelForSeq2SeqLM, FUSED) == FUSED
    assert not caplog.records
    assert supported(WithoutSdpa, "sdpa") == "eager"
    assert supported(WithoutSdpa, FUSED) == "eager"
    assert supported(WithoutSdpa, "eager") == "eager"
    assert supported(WithoutRegistry, FUSED) == "sdpa"
    assert len(caplog.records) == 3
    assert "WithoutSdpa does not have it; eager is used" in caplog.records[0].getMessage()


def test_the_auto_class_is_seen_through(monkeypatch):
    monkeypatch.setattr(T5ForConditionalGeneration, "_supports_sdpa", False)
    assert supported(AutoModelForSeq2SeqLM, "sdpa", T5Config()) == "eager"


def test_rows_are_not_searched_for_documents(monkeypatch):
    """Should transformers rename the search, it would come back unseen: the name is looked for here."""
    searched, search = [], masking_utils.find_packed_sequence_indices

    def watch(positions):
        searched.append(positions)
        return search(positions)

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", watch)
    model, ids = build("gpt2", "sdpa").eval(), batch("gpt2")["input_ids"]
    outside = model(ids, use_cache=False).logits
    assert len(searched) == 1
    with one_document_a_row():
        assert torch.equal(model(ids, use_cache=False).logits, outside)
    assert len(searched) == 1
    with pytest.raises(RuntimeError), one_document_a_row():
        raise RuntimeError
    assert masking_utils.find_packed_sequence_indices is watch


# -------------------------------------------------------------------------------------------------- weights dropped out


def placed_module(**attributes) -> torch.nn.Module:
    module = torch.nn.Module()
    for name, value in {"is_causal": False, dropout.MARK: True, **attributes}.items():
        setattr(module, name, value)
    return module


def left_out(*shape: int) -> torch.Tensor:
    """A mask, False at a third; the first key is left for every query."""
    mask = torch.rand(shape) > 0.3
    mask[..., 0] = True
    return mask


ATTENTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "one query": {"is_causal": True, "queries": 1},
    "more keys than queries, causal": {"is_causal": True, "keys": 9},
    "cross": {"keys": 9, "mask": lambda: left_out(2, 1, 1, 9)},
    "mask": {"mask": lambda: left_out(2, 1, 5, 5)},
    "expanded mask": {"mask": lambda: left_out(2, 1, 1, 5).expand(2, 1, 5, 5)},
    "mask, causal": {"is_causal": True, "mask": lambda: left_out(2, 1, 5, 5)},
    "additive mask": {"mask": lambda: torch.randn(2, 1, 5, 5)},
    "bias": {"bias": (1, 4, 5, 5)},
    "bias of each row": {"bias": (2, 4, 5, 5)},
    "bias, causal": {"bias": (1, 4, 5, 5), "is_causal": True},
    "bias and mask": {"bias": (1, 4, 5, 5), "mask": lambda: left_out(2, 1, 1, 5)},
    "bias and additive mask": {"bias": (1, 4, 5, 5), "mask": lambda: torch.randn(2, 1, 5, 5)},
    "grouped heads": {"heads": 2, "is_causal": True},
    "grouped heads, mask": {"heads": 2, "mask": lambda: left_out(2, 1, 5, 5)},
    "scale": {"scaling": 1.0},
}


def attention_case(name: str, **changes) -> tuple[list[torch.Tensor], dict]:
    """What `call_attention` takes: tensors that get gradients, and options."""
    torch.manual_seed(0)
    case = {"queries": 5, "keys": 5, "heads": 4, "mask": lambda: None, "bias": None, **ATTENTIONS[name], **changes}
    shapes = [(2, 4, case["queries"], 8), *[(2, case["heads"], case["keys"], 8)] * 2]
    tensors = [torch.randn(shape, requires_grad=True) for shape in [*shapes, *([case["bias"]] if case["bias"] else [])]]
    options = {"attention_mask": case["mask"](), "scaling": case.get("scaling"), "is_causal": case.get("is_causal")}
    return tensors, options | {"groups": 4 // case["heads"]}


def call_attention(tensors, options, marked: bool, p: float) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """The output of the registered "sdpa", and the gradients of its tensors."""
    options = dict(options)
    module = placed_module(num_key_value_groups=options.pop("groups"), **{dropout.MARK: marked})
    query, key, value, *bias = tensors
    extra = {"position_bias": bias[0]} if bias else {}
    out, _ = AttentionInterface()["sdpa"](module, query, key, value, dropout=p, **options, **extra)
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(7))
    return out.detach(), torch.autograd.grad(out, tensors, gradient)


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_on_the_host_is_sdpa_where_nothing_is_dropped(monkeypatch, name):
    register(CPU, arguments())
    drawn = []
    monkeypatch.setattr(dropout, "draw", lambda shape, p: drawn.append(shape) or (torch.ones(shape).byte(), 1.0))
    tensors, options = attention_case(name)
    out, gradients = call_attention(tensors, options, marked=True, p=0.1)
    expected, of_expected = call_attention(tensors, options, marked=True, p=0.0)
    assert drawn == [(2, 4, out.shape[1], tensors[1].shape[2])]
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    for gradient, other in zip(gradients, of_expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["bias, causal", "bias and mask", "grouped heads, mask"])
def test_attention_on_the_host_is_sdpa_in_expectation(name):
    """Output and gradients are linear in the mask."""
    register(CPU, arguments())
    tensors, options = attention_case(name)
    expected, gradients = call_attention(tensors, options, marked=True, p=0.0)
    torch.manual_seed(1)
    calls = [call_attention(tensors, options, marked=True, p=0.25) for _ in range(400)]
    draws = [torch.stack(one) for one in zip(*[(out, *of_tensors) for out, of_tensors in calls], strict=True)]
    for drawn, mean in zip(draws, (expected, *gradients), strict=True):
        assert drawn.std(0).max() > 0.05
        error = (drawn.mean(0) - mean).abs()  # 6 standard errors, of some hundred numbers each
        assert (error <= 6 * drawn.std(0) / len(calls) ** 0.5 + 1e-5).all()


def test_gradients_on_the_host_are_those_of_what_was_computed():
    """In fp64, with a mask that is drawn alike each time."""

    def attend(*tensors):
        torch.manual_seed(0)
        return dropout.attend(*tensors[:3], left, tensors[3], 0.5, 0.25)

    left = left_out(2, 1, 1, 3)
    shapes = [(2, 2, 4, 3), (2, 2, 3, 3), (2, 2, 3, 3), (1, 2, 4, 3)]
    tensors = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    assert torch.autograd.gradcheck(attend, tensors)


def test_in_bf16_the_attention_of_the_host_is_as_close_as_that_of_a_layer_in_bf16(monkeypatch):
    monkeypatch.setattr(dropout, "draw", lambda shape, p: (torch.ones(shape).byte(), 1.0))
    torch.manual_seed(0)
    tensors = [torch.randn(4, 4, 64, 32) for _ in range(3)]
    exact = torch.nn.functional.scaled_dot_product_attention(*tensors)
    low = [tensor.bfloat16() for tensor in tensors]
    with torch.autocast("cpu", dtype=torch.bfloat16):  # as the layers before give it, and as autocast would cast it
        found = [dropout.attend(*given, None, None, 32**-0.5, 0.1) for given in (low, tensors)]
    assert [out.dtype for out in found] == [torch.bfloat16] * 2
    torch.testing.assert_close(*found, rtol=0, atol=0)
    error = (found[0].float() - exact).pow(2).mean().sqrt()
    expected = (torch.nn.functional.scaled_dot_product_attention(*low).float() - exact).pow(2).mean().sqrt()
    assert error < 2 * expected


@pytest.mark.parametrize("name", ATTENTIONS)
def test_short_attention_in_bf16_is_torchs(name, monkeypatch):
    """Nothing is dropped: values and gradients are those of fp32 up to the roundings of bf16."""
    register(CPU, arguments())
    tensors, options = attention_case(name)
    exact, gradients = call_attention(tensors, options, marked=True, p=0.0)
    calls, own = [], dropout.attend
    monkeypatch.setattr("core.attention.attend_on_host", lambda *given: calls.append(1) or own(*given))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, of_found = call_attention(tensors, options, marked=True, p=0.0)
    assert calls == [1]
    assert found.dtype == torch.bfloat16
    for low, high in zip((found, *of_found), (exact, *gradients), strict=True):
        assert (low.float() - high).norm() <= 0.02 * high.norm()


@pytest.mark.parametrize("case", ["fp32", "long", "no gradient", "not placed"])
def test_other_attention_without_dropout_is_torchs(case, monkeypatch):
    register(CPU, arguments())
    monkeypatch.setattr("core.attention.attend_on_host", lambda *given: pytest.fail("not for this"))
    query = torch.randn(1, 1, 513 if case == "long" else 5, 8, requires_grad=True)
    kind = torch.float32 if case == "fp32" else torch.bfloat16
    module = placed_module(num_key_value_groups=1, **({dropout.MARK: False} if case == "not placed" else {}))
    with torch.autocast("cpu", dtype=kind, enabled=case != "fp32"), torch.set_grad_enabled(case != "no gradient"):
        out, _ = AttentionInterface()["sdpa"](module, query, query, query, None, dropout=0.0)
    assert out.shape == (1, query.shape[2], 1, 8)


def test_only_placed_models_on_the_host_have_another_attention():
    tensors, options = attention_case("mask")
    found = []
    for device, marked in ((CPU, False), (GAUDI, True), (GAUDI, False)):
        register(device, arguments())
        torch.manual_seed(0)
        found.append(call_attention(tensors, options, marked=marked, p=0.25)[0])
    register(CPU, arguments())
    torch.manual_seed(0)
    other = call_attention(tensors, options, marked=True, p=0.25)[0]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert not torch.equal(found[0], other)
    assert AttentionInterface()["sdpa"] is AttentionInterface()[FUSED]


def test_what_the_attention_of_the_host_does_not_have_is_transformers():
    register(CPU, arguments())
    query = torch.randn(1, 1, 4, 4)
    with pytest.raises(ValueError, match="softcap"):
        AttentionInterface()["sdpa"](placed_module(), query, query, query, None, dropout=0.1, softcap=1.0)
    learned = torch.zeros(1, 1, 4, 4, requires_grad=True)
    out, _ = AttentionInterface()["sdpa"](placed_module(), query, query, query, learned, dropout=0.1)
    out.sum().backward()
    assert learned.grad is not None
    rows = query.expand(3, 1, 4, 4)
    out, _ = AttentionInterface()["sdpa"](placed_module(), query, rows, rows, None, dropout=0.5)
    assert out.shape == (3, 4, 1, 4)
    assert not torch.equal(out[0], out[1])  # each row has masks of its own
