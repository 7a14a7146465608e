"""Masks of bytes: the share, the scale, independence, replay; a placed model draws no number of torch's own."""

from __future__ import annotations

import copy
import json
import math
import statistics

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from core import adapters, attention, dropout, generators
from core.device import Device
from tests.core.test_attention import arguments

CPU = Device("cpu", "cpu (test)", "eager", torch.device("cpu"))
SIGMAS = 5  # of a share or a mean: one in two million by chance, and the seeds are fixed


@pytest.fixture(autouse=True)
def registered():
    attention.register(CPU, arguments())
    torch.manual_seed(0)
    yield
    attention.register(Device("cpu", "cpu (test)", "compile", torch.device("cpu")), arguments())


class Numbers(TorchDispatchMode):
    """Counts the tensors whose numbers torch draws for a dropout, one for each element."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "bernoulli" in str(func) or "native_dropout" in str(func)
        return func(*args, **(kwargs or {}))


def build(family: str, attn: str = "sdpa", share: float = 0.1, layers: int = 2) -> PreTrainedModel:
    torch.manual_seed(1)
    ids = {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 40}
    if family == "t5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": layers, "num_heads": 4}
        config, kind = T5Config(**sizes, dropout_rate=share, **ids), T5ForConditionalGeneration
    elif family == "bart":
        sizes = {"d_model": 32, "encoder_layers": layers, "decoder_layers": layers, "max_position_embeddings": 32}
        sizes |= {f"{side}_{name}": 4 for side in ("encoder", "decoder") for name in ("attention_heads", "ffn_dim")}
        shares = {"dropout": share, "attention_dropout": share, "activation_dropout": share}
        config, kind = BartConfig(**sizes, **shares, **ids), BartForConditionalGeneration
    elif family == "falcon":  # its layers call torch's function by way of another
        sizes = {"hidden_size": 32, "num_hidden_layers": layers, "num_attention_heads": 4}
        config, kind = FalconConfig(**sizes, hidden_dropout=share, attention_dropout=share, **ids), FalconForCausalLM
    else:
        config = GPT2Config(n_embd=32, n_layer=layers, n_head=4, n_positions=32, **ids)
        config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = share
        kind = GPT2LMHeadModel
    return kind._from_config(config, attn_implementation=attn).train()


def batch(seed: int = 0, rows: int = 4, length: int = 12) -> dict[str, torch.Tensor]:
    """Ids whose labels are the ids themselves; the rows' ends are padding."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(length // 2, length + 1, (rows,), generator=generator)
    mask = (torch.arange(length) < lengths[:, None]).long()
    ids = torch.randint(3, 40, (rows, length), generator=generator) * mask
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


# ---------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("p", [0.5, 0.1, 0.05, 0.3, 0.9, 0.01, 0.001, 0.99])
def test_a_call_drops_a_share_close_to_p_and_scales_by_what_it_keeps(p):
    bits, least, rest = dropout.steps(p)
    assert bits == (16 if p in (0.01, 0.001, 0.99) else 8)
    assert (least + rest) / 2**bits == pytest.approx(p, rel=1e-12)
    keep, scale = dropout.draw((1001, 999), p)
    share = 1 - 1 / scale
    assert share * 2**bits == pytest.approx(least) or share * 2**bits == pytest.approx(least + 1)
    assert abs(share - p) <= dropout.COARSE * min(p, 1 - p)
    assert set(keep.unique().tolist()) == {0, 1}
    for lane in range(8):  # each byte of a word by itself
        mine = keep.flatten()[lane::8].double()
        assert abs(mine.mean().item() - (1 - share)) < SIGMAS * math.sqrt(share * (1 - share) / mine.numel())


@pytest.mark.parametrize("p", [0.5, 0.1, 0.05, 0.9, 0.001])
def test_all_calls_together_drop_the_share_p(p):
    bits, least, rest = dropout.steps(p)
    shares = [(1 - 1 / dropout.draw((1,), p)[1]) * 2**bits for _ in range(4000)]
    assert {round(share) for share in shares} == ({least, least + 1} if rest else {least})
    assert abs(statistics.mean(shares) - p * 2**bits) <= SIGMAS * math.sqrt(rest * (1 - rest) / 4000) + 1e-9


def test_what_is_too_coarse_is_torchs():
    assert [dropout.steps(p)[0] for p in (0.0, 5e-5, 1 - 5e-5, 1.0, 1e-9)] == [0] * 5
    assert dropout.steps(0.1) == (8, 25, pytest.approx(0.6))
    assert dropout.steps(0.5) == (8, 128, 0.0)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.01])
def test_masks_are_independent(p):
    """Of another call, and of each neighbour within a word and beyond it."""
    first, second = (dropout.draw((1 << 20,), p)[0].double() for _ in range(2))
    pairs = [(first, second)] + [(first[lag:], first[:-lag]) for lag in (*range(1, 18), 64, 1024)]
    for one, other in pairs:
        correlation = torch.corrcoef(torch.stack([one, other]))[0, 1].item()
        assert abs(correlation) < SIGMAS / math.sqrt(one.numel())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("p", [0.1, 0.01])
def test_what_is_kept_is_scaled_and_rounded_once_and_nothing_is_biased(dtype, p):
    x = torch.randn(333, 777).to(dtype).requires_grad_()
    state = torch.get_rng_state()
    _, scale = dropout.draw(x.shape, p)
    torch.set_rng_state(state)
    out = dropout.dropout(x, p)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kept = out != 0
    assert out.dtype == dtype
    assert torch.equal(out[kept], (x.detach().to(wide) * scale).to(dtype)[kept])
    share = 1 - 1 / scale
    error = (out.detach().double() - x.detach().double()).mean().item()
    assert abs(error) < SIGMAS * math.sqrt(share / (1 - share) * x.detach().double().pow(2).mean() / x.numel())
    gradient = torch.randn_like(x)
    out.backward(gradient)
    assert torch.equal(x.grad != 0, kept & (gradient != 0))
    assert torch.equal(x.grad[kept], (gradient.to(wide) * scale).to(dtype)[kept])


def test_gradients_of_gradients():
    def seeded(x):
        torch.manual_seed(0)
        return dropout.dropout(x, 0.5).pow(2)

    x = torch.randn(5, 7, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(seeded, x)
    assert torch.autograd.gradgradcheck(seeded, x)


@pytest.mark.parametrize("view", ["transposed", "expanded", "empty", "scalar"])
def test_any_layout(view):
    base = torch.ones(6, 1, 5)
    x = {"transposed": base.mT, "expanded": base.expand(6, 4, 5), "empty": base[:0], "scalar": base[0, 0, 0]}[view]
    out = dropout.dropout(x, 0.5)
    assert out.shape == x.shape
    assert set(out.flatten().tolist()) <= {0.0, 2.0}


@pytest.mark.parametrize("case", ["p=0", "p=1", "not training", "in place", "fp16", "subclass"])
def test_what_does_not_fit_is_torchs(case):
    x = torch.randn(64, 64, dtype=torch.float16 if case == "fp16" else torch.float32)
    if case == "subclass":
        x = x.as_subclass(type("Other", (torch.Tensor,), {}))
    p = {"p=0": 0.0, "p=1": 1.0}.get(case, 0.3)
    options = {"training": case != "not training", "inplace": case == "in place"}
    found = []
    for function in (dropout.dropout, functional.dropout):
        torch.manual_seed(0)
        found.append(function(x.clone(), p, **options))
    assert torch.equal(*found)
    assert case not in ("p=0", "not training") or torch.equal(found[0], x)


def test_the_state_of_a_checkpoint_brings_the_masks_back():
    saved = json.loads(json.dumps(generators.as_json(CPU)))
    first = dropout.dropout(torch.ones(100, 3), 0.1), dropout.dropout(torch.ones(7), 0.01)
    other = dropout.dropout(torch.ones(100, 3), 0.1)
    assert not torch.equal(first[0], other)
    generators.put_back(CPU, saved)
    assert torch.equal(dropout.dropout(torch.ones(100, 3), 0.1), first[0])
    assert torch.equal(dropout.dropout(torch.ones(7), 0.01), first[1])


# --------------------------------------------------------------------------------------------------------------- models


def kinds_in(model: nn.Module) -> list[str]:
    """Full names of the modules' classes, by which transformers knows what it may record."""
    return [str(type(module)) for module in model.modules() if not isinstance(module, nn.Dropout)]


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "falcon"])
def test_a_placed_model_draws_no_number_for_each_element(family, attn):
    model = build(family, attn)
    with Numbers() as before:
        model(**batch()).loss.backward()
    names, printed, kinds = list(model.state_dict()), str(model), kinds_in(model)
    dropout.place(model, CPU)
    dropout.place(model, CPU)  # twice is once
    assert (list(model.state_dict()), str(model)) == (names, printed)
    assert kinds_in(model) == kinds
    with Numbers() as after:
        first, second = model(**batch()).loss, model(**batch()).loss
        first.backward()
    assert before.count > 0
    assert after.count == 0
    assert first != second
    model.eval()
    assert torch.equal(model(**batch()).logits, build(family, attn).eval()(**batch()).logits)


@pytest.mark.parametrize("family", ["t5", "bart", "gpt2", "falcon"])
def test_recomputed_activations_draw_the_same_masks(family):
    gradients = []
    for recomputes in (False, True):
        model = build(family)
        dropout.place(model, CPU)
        if recomputes:
            model.gradient_checkpointing_enable()
        torch.manual_seed(3)
        with torch.autocast("cpu", dtype=torch.bfloat16), Numbers() as numbers:
            model(**batch(), use_cache=False).loss.backward()
        assert numbers.count == 0
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert all(torch.equal(gradient, gradients[1][name]) for name, gradient in gradients[0].items())


def test_a_saved_and_a_copied_model_are_themselves(tmp_path):
    model = build("bart")
    dropout.place(model, CPU)
    model.save_pretrained(tmp_path)
    again = BartForConditionalGeneration.from_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BartForConditionalGeneration"]
    assert torch.equal(again.eval()(**batch()).logits, model.eval()(**batch()).logits)
    copied = copy.deepcopy(model).train()
    with Numbers() as numbers:
        copied(**batch()).loss.backward()
    assert numbers.count == 0
    assert all(parameter.grad is None for parameter in model.parameters())
    hidden = copied(**batch(), output_hidden_states=True).encoder_hidden_states
    assert len(hidden) == 3
    ids = model.eval().generate(batch()["input_ids"], max_new_tokens=3, do_sample=False)
    assert ids.shape[1] <= 5


def test_dropout_of_adapters():
    model = build("gpt2", share=0.0)
    adapters.add_lora(model, rank=2, alpha=4, dropout=0.2, targets=["c_attn"], seed=0)
    dropout.place(model, CPU)
    with Numbers() as numbers:
        first, second = model(**batch()).loss, model(**batch()).loss
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                nn.init.ones_(parameter)  # they begin as zeros, which hide the mask
        third, fourth = model(**batch()).loss, model(**batch()).loss
    assert numbers.count == 0
    assert first == second
    assert third != fourth


def test_only_what_was_placed_is_changed():
    placed, other = build("bart"), build("bart")
    untouched = [type(module) for module in other.modules()]
    dropout.place(placed, CPU)
    assert [type(module) for module in other.modules()] == untouched
    with Numbers() as numbers:
        other(**batch()).loss.backward()
    assert numbers.count > 0
    for device in (Device("cpu", "cpu", "compile", CPU.torch_device), Device("hpu", "gaudi2", "lazy", None)):
        dropout.place(other, device)
        assert [type(module) for module in other.modules()] == untouched
        assert not any(hasattr(module, dropout.MARK) for module in other.modules())


class Direct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(self.layer(x), 0.5, training=self.training)


def test_a_compiled_model_draws_as_torch_does():
    x, found = torch.ones(64, 64), []
    for placed in (True, False):
        model = Direct()
        if placed:
            dropout.place(model, CPU)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.manual_seed(0)
        found.append(compiled(x))
    assert torch.equal(*found)
    assert set(found[0].unique().tolist()) == {0.0, 4.0}
    torch._dynamo.reset()


def test_a_forward_pass_that_fails_leaves_nothing_behind():
    model = Direct()
    dropout.place(model, CPU)
    with pytest.raises(TypeError):
        model(None)
    with Numbers() as numbers:
        functional.dropout(torch.ones(4), 0.5)
    assert numbers.count == 1
    with Numbers() as numbers:
        model(torch.ones(4))
    assert numbers.count == 0


# ------------------------------------------------------------------------------------------------------------- training


def sequences(seed: int) -> dict[str, torch.Tensor]:
    """Rows that count up from anywhere by 1, 2 or 3: each id follows from the two before it."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(low, high, (16, 1), generator=generator) for low, high in ((0, 37), (1, 4)))
    ids = 3 + (start + step * torch.arange(12)) % 37
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def losses_of(family: str, seed: int, placed: bool) -> list[float]:
    """Training losses of 200 steps: weights and batches are always the same, masks are those of the seed."""
    model = build(family, layers=1)
    if placed:
        dropout.place(model, CPU)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(seed)
    losses = []
    for step in range(200):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**sequences(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_training_ends_where_torchs_dropout_ends(family):
    """Within what the seed of the masks changes: the means of twelve runs each differ as means of such runs do."""
    runs = [[losses_of(family, seed, placed) for seed in range(12)] for placed in (False, True)]
    plain, ours = ([statistics.mean(losses[-50:]) for losses in these] for these in runs)
    spread = math.sqrt((statistics.variance(plain) + statistics.variance(ours)) / 12)
    print(f"{family}: torch {plain}, bytes {ours}, standard error {spread}")
    assert max(plain + ours) < 0.8 * statistics.mean(runs[0][0][:50])  # it learns: else every dropout would do
    assert abs(statistics.mean(ours) - statistics.mean(plain)) < 4 * spread  # Student's t, 22 degrees: one in 1,600
