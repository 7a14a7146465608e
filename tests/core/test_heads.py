"""The head on the targets alone: the same loss and gradients for whatever transformers loads, or as ever."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

from core import heads
from core.device import Device
from core.losses import cross_entropy_sum

CPU = Device("cpu", "cpu", "eager", torch.device("cpu"))
VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "num_key_value_heads": 1, "head_dim": 8, "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
OWN = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32, "vocab_size": VOCABULARY},
    "distilbert": {"dim": 16, "hidden_dim": 24, "n_layers": 1, "n_heads": 2, "vocab_size": VOCABULARY},
    "electra": {**SIZES, "embedding_size": 12},
    "albert": {**SIZES, "embedding_size": 12},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2, "vocab_size": VOCABULARY},
    "bart": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 1,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "vocab_size": VOCABULARY,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "forced_eos_token_id": 2,
    },
    "modernbert": {**SIZES, "cls_token_id": 1, "sep_token_id": 2, "bos_token_id": 1, "eos_token_id": 2},
}
CAUSAL = ["gpt2", "llama", "gpt_neox", "gemma2"]
MASKED = ["bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert"]
READING = ["t5", "bart"]  # an encoder, and a decoder that has the head


def build(kind: str) -> nn.Module:
    """A tiny model with weights large enough for every position to have logits of its own, without dropout."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[kind](**OWN.get(kind, SIZES))
    auto = AutoModelForSeq2SeqLM if kind in READING else AutoModelForMaskedLM
    auto = AutoModelForCausalLM if kind in CAUSAL else auto
    model = auto.from_config(config, dtype=torch.float32, attn_implementation="eager")
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3) if parameter.ndim > 1 else None
    return model.eval()


def batch(targets: int = 5) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Four rows of six tokens, the last one padded, and labels for some."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (4, 6), generator=draw)
    mask = torch.ones_like(ids)
    mask[3, 4:] = 0
    labels = torch.full((24,), -100)
    labels[torch.randperm(24, generator=draw)[:targets]] = torch.randint(VOCABULARY, (targets,), generator=draw)
    return {"input_ids": ids, "attention_mask": mask}, labels.view(4, 6)


def derive(model: nn.Module, inputs: dict[str, torch.Tensor], labels: torch.Tensor) -> tuple[Any, dict[str, Any], Any]:
    """Loss, gradients by name, and the shape of the logits."""
    model.zero_grad()
    with heads.targets_only(model, labels) as chosen:
        logits = model(**inputs).logits
        shape, loss = logits.shape, cross_entropy_sum(logits, chosen)
    del logits
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}, shape


@pytest.mark.parametrize("kind", CAUSAL + MASKED + READING)
def test_loss_and_gradients_are_those_of_the_whole_head(kind: str) -> None:
    plain = build(kind)
    narrow = copy.deepcopy(plain)
    assert heads.narrow(narrow, CPU)
    inputs, labels = batch()
    inputs |= {"decoder_input_ids": inputs["input_ids"].flip(0)} if kind in READING else {}
    loss, gradients, shape = derive(plain, inputs, labels)
    found, theirs, narrowed = derive(narrow, inputs, labels)
    assert (shape, narrowed) == ((4, 6, VOCABULARY), (1, 5, VOCABULARY))
    torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        if gradient is not None or theirs[name] is not None:
            torch.testing.assert_close(theirs[name], gradient, rtol=1e-5, atol=1e-6, msg=name)


def test_outside_the_block_and_in_a_copy_a_model_does_as_ever() -> None:
    model = build("bert")
    inputs, labels = batch()
    before = model(**inputs).logits
    heads.narrow(model, CPU)
    other = copy.deepcopy(model)
    with heads.targets_only(model, labels) as chosen:
        assert chosen.shape == (1, 5)
        assert torch.equal(other(**inputs).logits, before)
        assert model(**inputs).logits.shape[1] == 5
    assert torch.equal(model(**inputs).logits, before)


def test_an_error_in_the_block_leaves_nothing_behind() -> None:
    model = build("bert")
    inputs, labels = batch()
    heads.narrow(model, CPU)
    with pytest.raises(ZeroDivisionError), heads.targets_only(model, labels):
        raise ZeroDivisionError
    assert model(**inputs).logits.shape[1] == 6


def test_where_nearly_all_positions_are_targets_none_is_picked() -> None:
    model = build("gpt2")
    heads.narrow(model, CPU)
    inputs, labels = batch(targets=24)
    assert derive(model, inputs, labels)[2] == (4, 6, VOCABULARY)


def test_a_batch_without_targets_has_no_loss_and_gradients_of_zero() -> None:
    model = build("bert")
    heads.narrow(model, CPU)
    loss, gradients, shape = derive(model, *batch(targets=0))
    assert shape == (1, 1, VOCABULARY), "no layer has to bear an empty batch"
    assert loss == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_preparing_draws_nothing_and_keeps_the_mode() -> None:
    model = build("gpt2").train()
    model.base_model.register_forward_pre_hook(lambda *_: torch.rand(1) and None)  # some models draw whenever they run
    state = torch.get_rng_state()
    heads.narrow(model, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(module.training for module in model.modules())


class Mixing(nn.Module):
    """A head that mixes positions: each one sees the one before it."""

    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head = head

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden + hidden.roll(1, dims=1))


def test_a_head_that_mixes_positions_is_left_whole() -> None:
    model = build("bert")
    model.cls = Mixing(model.cls)
    assert not heads.narrow(model, CPU)
    inputs, labels = batch()
    assert derive(model, inputs, labels)[2] == (4, 6, VOCABULARY)
    assert not model.base_model._forward_hooks


def test_a_body_whose_states_are_no_positions_is_left_whole() -> None:
    sizes = {"num_latents": 4, "d_latents": 16, "d_model": 16, "num_blocks": 1, "num_self_attends_per_block": 1}
    sizes |= {"num_self_attention_heads": 2, "num_cross_attention_heads": 2, "vocab_size": VOCABULARY}
    config = CONFIG_MAPPING["perceiver"](**sizes, max_position_embeddings=32)
    assert not heads.narrow(AutoModelForMaskedLM.from_config(config), CPU)


@pytest.mark.parametrize(
    "device",
    [
        Device("cpu", "cpu", "compile", torch.device("cpu")),
        Device("hpu", "gaudi2", "lazy", torch.device("cpu"), torch.cpu),
        Device("hpu", "gaudi2", "eager", torch.device("cpu"), torch.cpu),
        Device("cuda", "a GPU", "eager", torch.device("cpu"), torch.cpu),
    ],
    ids=lambda device: f"{device.kind}-{device.mode}",
)
def test_where_their_number_would_be_waited_for_or_compiled_all_positions_are_taken(device: Device) -> None:
    assert not heads.narrow(build("bert"), device)


def test_a_model_in_shards_is_not_tried() -> None:
    model = build("bert")
    next(model.parameters()).ds_id = 0
    assert not heads.narrow(model, CPU)


@pytest.mark.parametrize("kind", ["tiny_bert", "tiny_gpt2"])
def test_a_recipe_trains_as_with_the_whole_head(
    kind: str,
    language_modeling: ModuleType,
    text_files: dict[str, str],
    tmp_path: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    widths: list[int] = []

    def train(folder: str) -> float:
        flags = ["--model_name_or_path", str(request.getfixturevalue(kind)), "--train_file", text_files["--train_file"]]
        flags += ["--do_train", "--max_steps", "3", "--line_by_line", "--block_size", "32", "--use_cpu"]
        flags += ["--disable_tqdm", "--report_to", "none", "--save_strategy", "no", "--save_last_ckpt", "False"]
        return language_modeling.main([*flags, "--output_dir", str(tmp_path / folder)])["train_loss"]

    def noting(logits: torch.Tensor, *others: Any) -> torch.Tensor:
        widths.append(logits.shape[:-1].numel())
        return cross_entropy_sum(logits, *others)

    monkeypatch.setattr("core.losses.cross_entropy_sum", noting)
    narrow, narrowed = train("narrow"), widths.copy()
    monkeypatch.setattr(heads, "narrow", lambda model, device: False)
    widths.clear()
    assert train("whole") == pytest.approx(narrow, abs=1e-6)
    assert 0 < sum(narrowed) < 0.9 * sum(widths)
