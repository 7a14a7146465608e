"""Faster layers compute what the plain ones do, and whatever is not known exactly stays as it is."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedModel, T5Config, T5ForConditionalGeneration
from transformers.activations import ACT2FN, ClippedGELUActivation
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from core import kernels
from core.device import Device
from core.optimizers import parameter_groups

CPU = Device("cpu", "cpu (test)", "eager", torch.device("cpu"))
NORMS = {"T5": T5LayerNorm, "Llama": LlamaRMSNorm}
PLAIN_ACTIVATIONS = ("gelu_new", "gelu_fast", "gelu_python", "gelu_python_tanh")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def norm(name: str, size: int = 48, epsilon: float = 1e-6) -> nn.Module:
    made = NORMS[name](size, eps=epsilon)
    nn.init.normal_(made.weight, 1, 0.3)
    return made


def derived(module: nn.Module, start: torch.Tensor, low: bool = False) -> list[torch.Tensor]:
    """Value, gradient of the input, gradients of the parameters."""
    leaf = start.clone().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=low):
        value = module(leaf)
    gradient = torch.randn(value.shape, generator=torch.Generator().manual_seed(3)).to(value.dtype)
    return [value.detach(), *torch.autograd.grad(value, [leaf, *module.parameters()], gradient)]


def assert_alike(found: list[torch.Tensor], wanted: list[torch.Tensor], share: float) -> None:
    """Of each tensor's norm."""
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one.float() - other.float()).norm() <= share * other.float().norm()


class Operations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def operations(module: nn.Module, start: torch.Tensor) -> int:
    with Operations() as counted:
        derived(module, start)
    return counted.count


# --- The same numbers -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])  # at the first epsilon is as large as the mean square
@pytest.mark.parametrize("name", NORMS)
def test_a_norm_computes_the_same(name: str, scale: float, low: bool) -> None:
    plain = norm(name)
    faster = copy.deepcopy(plain)
    assert kernels.place(faster, CPU) == 1
    start = scale * torch.randn(3, 5, 48)
    assert_alike(derived(faster, start, low), derived(plain, start, low), 1e-6)
    assert_alike(derived(faster, start.transpose(0, 1), low), derived(plain, start.transpose(0, 1), low), 1e-6)
    assert operations(faster, start) < operations(plain, start)


def test_gradients_of_a_norm_are_those_of_its_values() -> None:
    rows, weight = torch.randn(2, 3, 5, dtype=torch.float64), torch.randn(5, dtype=torch.float64)
    leaves = (rows.requires_grad_(), weight.requires_grad_())
    assert torch.autograd.gradcheck(lambda *given: kernels.rms_norm(*given, 0.1), leaves)
    assert torch.autograd.gradgradcheck(lambda *given: kernels.rms_norm(*given, 0.1), leaves)
    frozen = (leaves[0], leaves[1].detach())
    assert torch.autograd.gradgradcheck(lambda rows: kernels.rms_norm(rows, frozen[1], 0.1), frozen[:1])


def test_a_frozen_weight_or_input_needs_no_gradient() -> None:
    for trained in ((True, False), (False, True)):
        rows, weight = torch.randn(4, 8).requires_grad_(trained[0]), torch.randn(8).requires_grad_(trained[1])
        kernels.rms_norm(rows, weight, 1e-6).sum().backward()
        assert (rows.grad is not None, weight.grad is not None) == trained


@pytest.mark.parametrize("name", PLAIN_ACTIVATIONS)
def test_an_activation_computes_the_same(name: str) -> None:
    plain, faster = ACT2FN[name], copy.deepcopy(ACT2FN[name])
    assert kernels.place(faster, CPU) == 1
    start = 4 * torch.randn(6, 50)
    assert_alike(derived(faster, start), derived(plain, start), 1e-6)
    double = start.double()
    assert_alike(derived(faster, double), derived(plain, double), 1e-6)
    half = start.bfloat16()
    found, exact = derived(faster, half), derived(plain, half.float())
    assert found[0].dtype == torch.bfloat16
    for low in (False, True):
        wanted = derived(plain, half, low)
        assert_alike(derived(faster, half, low), wanted, 1e-2)
        for one, other, truth in zip(found, wanted, exact, strict=True):
            error = (one.float() - truth).norm()
            assert error <= max(4e-3 * truth.norm(), (other.float() - truth).norm()), "one rounding, not eight"
    assert operations(faster, start) < operations(plain, start)


def family(name: str) -> PreTrainedModel:
    torch.manual_seed(1)
    ids = {"vocab_size": 40, "bos_token_id": 1, "eos_token_id": 2}
    if name == "T5":
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=1, pad_token_id=0, **ids))
    return GPT2LMHeadModel(GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=16, **ids))


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize(("name", "layers"), [("T5", 12), ("GPT-2", 2)])
def test_a_model_trains_the_same_and_is_saved_as_the_plain_one(
    tmp_path: Path, name: str, layers: int, low: bool
) -> None:
    plain = family(name).eval()  # without dropout
    faster = copy.deepcopy(plain)
    random = torch.get_rng_state()
    assert kernels.place(faster, CPU) == layers
    assert kernels.place(faster, CPU) == 0, "it is so already"
    assert torch.equal(torch.get_rng_state(), random)
    assert repr(faster) == repr(plain)
    for groups in zip(parameter_groups(faster, 0.1), parameter_groups(plain, 0.1), strict=True):
        assert len(groups[0]["params"]) == len(groups[1]["params"])
    ids, found = torch.randint(3, 40, (4, 12)), []
    for model in (faster, plain):
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.append([loss.detach(), *(one.grad for one in model.parameters())])
    assert_alike(*found, 3e-2 if low else 1e-5)
    faster.save_pretrained(tmp_path)
    loaded = type(plain).from_pretrained(tmp_path)
    assert loaded.state_dict().keys() == plain.state_dict().keys()
    assert not any(hasattr(type(module), kernels.PLAIN) for module in loaded.modules())
    assert loaded.config.architectures == [type(plain).__name__]


def test_a_copy_has_its_own_weight() -> None:
    first = norm("T5")
    kernels.place(first, CPU)
    second, rows = copy.deepcopy(first), torch.randn(2, 48)
    second.weight.data.mul_(2)
    torch.testing.assert_close(second(rows), 2 * first(rows))


# --- What stays as it is ----------------------------------------------------------------------------------------------


class Centred(nn.Module):
    """Its mean is taken off, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(16)), 1e-6

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.layer_norm(rows, (16,), self.weight, eps=self.eps)


class OtherEpsilon(T5LayerNorm):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight * rows * (rows.square().mean(-1, keepdim=True) + 1.5e-6).rsqrt()


class Biased(T5LayerNorm):
    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.bias = nn.Parameter(torch.zeros(size))


class Noisy(nn.Module):
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return functional.gelu(rows, approximate="tanh") + torch.rand_like(rows)


class Two(nn.Module):
    def forward(self, rows: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
        return rows * others


def hooked() -> nn.Module:
    module = T5LayerNorm(16)
    module.register_forward_hook(lambda *_: None)
    return module


def narrow() -> nn.Module:
    return T5LayerNorm(16).bfloat16()


def zeros() -> nn.Module:
    module = T5LayerNorm(16)
    nn.init.zeros_(module.weight)
    return module


UNKNOWN = {
    "an offset weight": lambda: GemmaRMSNorm(16),
    "centred": Centred,
    "another epsilon": lambda: OtherEpsilon(16),
    "a bias": lambda: Biased(16),
    "hooks": hooked,
    "bf16 weights": narrow,
    "a weight of zeros": zeros,
    "clipped": lambda: ClippedGELUActivation(-10, 10),
    "another function": lambda: ACT2FN["quick_gelu"],
    "one operation already": lambda: ACT2FN["gelu_pytorch_tanh"],
    "torch's own": nn.GELU,
    "noise": Noisy,
    "two inputs": Two,
    "dropout": lambda: nn.Dropout(0.5),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_what_is_not_known_exactly_stays_as_it_is(what: str) -> None:
    module = UNKNOWN[what]()
    kind, random = type(module), torch.get_rng_state()
    assert kernels.place(module, CPU) == 0
    assert type(module) is kind
    assert torch.equal(torch.get_rng_state(), random)


def test_other_inputs_go_the_plain_way() -> None:
    faster = norm("T5")
    plain = copy.deepcopy(faster)
    kernels.place(faster, CPU)
    for rows in (torch.randn(3, 48).bfloat16(), torch.randn(3, 48).double()):
        found, wanted = faster(rows), plain(rows)
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)
    with torch.device("meta"):
        rows = torch.randn(3, 48)
    faster.to("meta")
    assert faster(rows).is_meta


@pytest.mark.parametrize(
    "device",
    [
        Device("cpu", "cpu (test)", "compile", torch.device("cpu")),
        SimpleNamespace(compiles=False, queues_work=True),
        SimpleNamespace(compiles=True, queues_work=True),
    ],
    ids=["compile", "card", "lazy card"],
)
def test_it_stands_aside(device: object) -> None:
    module = nn.Sequential(norm("T5"), copy.deepcopy(ACT2FN["gelu_new"]))
    assert kernels.place(module, device) == 0


@pytest.mark.compiles
def test_a_compiler_sees_the_plain_layers() -> None:
    plain = nn.Sequential(norm("T5"), copy.deepcopy(ACT2FN["gelu_new"]))
    faster, rows = copy.deepcopy(plain), torch.randn(3, 48)
    assert kernels.place(faster, CPU) == 2
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, _: list) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    assert torch.equal(torch.compile(faster, backend=note, fullgraph=True)(rows), plain(rows))
    assert len(graphs) == 1
