"""The loss over many classes: torch's numbers, one copy of the logits, and nobody's tensor overwritten."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from core import losses
from core.data import IGNORE_INDEX
from core.losses import cross_entropies, cross_entropy_sum
from tests.hpu_simulator import simulator

CLASSES = 37
Made = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 rows; a last one of fewer."""
    monkeypatch.setattr(losses, "CHUNK", 5 * CLASSES + 3)


def scores(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (3 * torch.randn(4, 8, CLASSES, generator=torch.Generator().manual_seed(1))).to(dtype)


def targets() -> torch.Tensor:
    """A row without targets, one padded at the end, and both ends of the range."""
    labels = torch.randint(CLASSES, (4, 8), generator=torch.Generator().manual_seed(2))
    labels[1], labels[2, 5:] = -100, -100
    labels[0, 0], labels[0, 1] = 0, CLASSES - 1
    return labels


def torchs(logits: torch.Tensor, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    logits = logits if logits.dtype == torch.float64 else logits.float()
    options = {"reduction": "sum", "label_smoothing": smoothing}
    return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), **options)


def derive(make: Made, loss: Callable[..., torch.Tensor], start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and gradient of ``start`` through ``make``; nothing holds the logits in the backward pass."""
    leaf = start.clone().requires_grad_()
    value = loss(make(leaf))
    value.backward()
    return value.detach(), leaf.grad


def watched(make: Made, found: list[bool]) -> Made:
    """``make``, and notes whether the gradient of what it made lies in the same memory."""

    def made(leaf: torch.Tensor) -> torch.Tensor:
        logits = make(leaf)
        where = logits.data_ptr()
        logits.register_hook(lambda gradient: found.append(gradient.data_ptr() == where))
        return logits

    return made


# --- Torch's numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_value_and_gradient_are_torchs(dtype: torch.dtype, smoothing: float) -> None:
    labels, in_place = targets(), []
    double = watched(lambda leaf: leaf * 2, in_place)
    value, gradient = derive(double, lambda made: 3 * cross_entropy_sum(made, labels, smoothing), scores(dtype))
    expected, wanted = derive(lambda leaf: leaf * 2, lambda made: 3 * torchs(made, labels, smoothing), scores(dtype))
    assert value.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(value, expected, rtol=1e-6, atol=0)
    rounding = {"rtol": 1e-2, "atol": 1e-6} if dtype == torch.bfloat16 else {"rtol": 1e-6, "atol": 1e-6}
    torch.testing.assert_close(gradient, wanted, **rounding)
    assert (gradient - wanted).norm() <= (1e-4 if dtype == torch.bfloat16 else 1e-6) * wanted.norm()
    assert in_place == [True]


def test_gradients_are_those_of_the_values() -> None:
    logits, labels = scores(torch.float64)[:2, :3].requires_grad_(), targets()[:2, :3]
    assert torch.autograd.gradcheck(lambda made: cross_entropy_sum(made * 1, labels, 0.2), (logits,))


def test_the_value_is_in_fp32_under_autocast_and_without_a_gradient() -> None:
    head, hidden, labels = nn.Linear(8, CLASSES), torch.randn(4, 8, 8), targets()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
        value = cross_entropy_sum(logits, labels)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(value, torchs(logits, labels), rtol=1e-6, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_without_targets_it_is_zero_and_so_is_its_gradient(smoothing: float) -> None:
    for start, labels in ((scores(), torch.full((4, 8), IGNORE_INDEX)), (scores()[:0], targets()[:0])):
        value, gradient = derive(
            lambda leaf: leaf * 1, lambda made, y=labels: cross_entropy_sum(made, y, smoothing), start
        )
        assert value == 0
        assert torch.equal(gradient, torch.zeros_like(start))


def test_scores_of_rows_without_a_target_do_not_matter() -> None:
    logits, labels = scores(), targets()
    logits[1] = torch.inf
    assert cross_entropy_sum(logits, labels, 0.1) == cross_entropy_sum(scores(), labels, 0.1)


def test_logits_that_are_cut_equal_labels_that_are_moved() -> None:
    labels = targets()
    moved = functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)
    cut = derive(lambda leaf: (leaf * 2)[:, :-1], lambda made: cross_entropy_sum(made, labels[:, 1:]), scores())
    whole = derive(lambda leaf: leaf * 2, lambda made: cross_entropy_sum(made, moved), scores())
    torch.testing.assert_close(cut, whole, rtol=1e-6, atol=0)


def test_bad_input_is_named() -> None:
    logits, labels = scores(), targets()
    with pytest.raises(ValueError, match=r"\(4, 8, 37\) need labels of shape \(4, 8\)"):
        cross_entropy_sum(logits, labels.flatten())
    with pytest.raises(RuntimeError, match="label_smoothing"):
        cross_entropy_sum(logits, labels, 1.5)
    for wrong in (CLASSES, -1):
        labels[3, 3] = wrong
        with pytest.raises(IndexError, match=str(wrong)):
            cross_entropy_sum(logits, labels)


# --- Nobody's tensor is overwritten -----------------------------------------------------------------------------------


class Squash(torch.autograd.Function):
    """A user's own operator that needs its output."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        out = x.tanh()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        (out,) = ctx.saved_tensors
        return gradient * (1 - out**2)


KEPT: list[torch.Tensor] = []
LAST = {  # what made the logits: whether the gradient may take their place
    "a product": (lambda x: x @ torch.eye(CLASSES), True),
    "a head with bias": (lambda x: functional.linear(x, torch.eye(CLASSES), torch.ones(CLASSES)), True),
    "a soft cap": (lambda x: 5 * torch.tanh(x / 5), True),
    "rounding": (lambda x: x.tanh().bfloat16(), True),
    "a slice": (lambda x: (x * 2)[:3], True),
    "tanh": (torch.tanh, False),
    "sigmoid": (torch.sigmoid, False),
    "exp": (torch.exp, False),
    "softmax": (lambda x: x.softmax(-1), False),
    "relu_": (lambda x: (x * 2).relu_(), False),
    "one's own": (Squash.apply, False),
    "a view": (lambda x: x.tanh().flatten(0, 1).view(4, 8, CLASSES), False),
    "a slice of tanh": (lambda x: x.tanh()[:3], False),
    "one row for all": (lambda x: x.sum((0, 1)).expand(4, 8, -1), False),
    "kept by a caller": (lambda x: KEPT.append(x * 2) or KEPT[-1], False),
    "half kept": (lambda x: KEPT.append((made := x * 2)[0]) or made, False),
    "a leaf": (lambda x: x, False),
}


@pytest.mark.parametrize("last", LAST)
def test_gradients_are_right_whatever_made_the_logits(last: str) -> None:
    make, ours_alone = LAST[last]
    in_place: list[bool] = []
    labels = targets()[: 3 if "slice" in last else 4]
    _, expected = derive(make, lambda made: torchs(made, labels, 0.1), scores())
    KEPT.clear()
    _, gradient = derive(watched(make, in_place), lambda made: cross_entropy_sum(made, labels, 0.1), scores())
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)
    assert in_place == [ours_alone]
    for kept in KEPT:
        assert torch.equal(kept, (scores() * 2).view(-1)[: kept.numel()].view(kept.shape))


@pytest.mark.parametrize("first", [True, False])
def test_another_loss_of_the_same_logits_has_its_gradient(first: bool) -> None:
    labels = targets()

    def both(logits: torch.Tensor, ours: Callable[..., torch.Tensor]) -> torch.Tensor:
        if first:
            return ours(logits, labels) + logits.logsumexp(-1).square().sum() + ours(logits, labels.flip(0))
        return logits.logsumexp(-1).square().sum() + ours(logits, labels.flip(0)) + ours(logits, labels)

    found = [derive(lambda leaf: leaf * 2, lambda made, ours=ours: both(made, ours), scores())
             for ours in (cross_entropy_sum, torchs)]  # fmt: skip
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)


def test_a_graph_that_is_kept_can_be_derived_again() -> None:
    leaf = scores().requires_grad_()
    loss = cross_entropy_sum(leaf * 2, targets())
    gradients = [torch.autograd.grad(loss, leaf, retain_graph=kept)[0] for kept in (True, True, False)]
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def test_an_overlooked_reader_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Autograd counts changes of a tensor's memory: the second wall, should the first one fall."""
    monkeypatch.setattr(losses, "_is_ours_alone", lambda rows: True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        derive(torch.tanh, lambda made: cross_entropy_sum(made, targets()), scores())


def test_logits_that_were_changed_are_an_error() -> None:
    logits = scores().requires_grad_() * 2
    loss = cross_entropy_sum(logits, targets())
    logits.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_second_derivative_is_an_error() -> None:
    leaf = scores().requires_grad_()
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(cross_entropy_sum(leaf * 2, targets()), leaf, create_graph=True)


# --- Memory, graphs ---------------------------------------------------------------------------------------------------


class Peak(TorchDispatchMode):
    """The most bytes that tensors made inside held at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[StorageWeakRef, int] = {}
        self.bytes = 0

    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.live[StorageWeakRef(storage)] = storage.nbytes()
        self.live = {storage: count for storage, count in self.live.items() if not storage.expired()}
        self.bytes = max(self.bytes, sum(self.live.values()))
        return out


@pytest.mark.parametrize(("dtype", "units"), [(torch.float32, 1.0), (torch.bfloat16, 0.5)])
@pytest.mark.parametrize("trained", [True, False])
def test_the_logits_are_the_one_tensor_of_their_size(dtype: torch.dtype, units: float, trained: bool) -> None:
    """A unit is one tensor of all logits in fp32; a chunk is a hundredth. Torch's own needs three."""
    classes, tokens = 1000, 400
    losses.CHUNK = classes * tokens // 100  # the fixture puts it back
    head, hidden = nn.Linear(4, classes, dtype=dtype), torch.randn(tokens, 4, dtype=dtype)
    labels, peaks = torch.randint(classes, (tokens,)), []
    for loss_of in (cross_entropy_sum, torchs):
        with Peak() as peak, torch.set_grad_enabled(trained):
            loss = loss_of(head(hidden), labels)
            if trained:
                loss.backward()
        peaks.append(peak.bytes / (4 * classes * tokens))
    assert units <= peaks[0] <= units + 0.12, peaks
    assert peaks[1] >= (2.9 if trained else units + 0.9), peaks


def test_it_compiles_into_one_graph() -> None:
    head, hidden, labels = nn.Linear(8, CLASSES), torch.randn(4, 8, 8), targets()

    def loss() -> torch.Tensor:
        return cross_entropy_sum(head(hidden), labels, 0.1)

    found = []
    for run in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        head.zero_grad()
        value = run()
        value.backward()
        found.append((value.detach(), head.weight.grad))
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


ON_DEVICE = """
import json
import habana_frameworks.torch.core as htcore
import torch
from core import losses
from hpu_simulator import runtime

losses.CHUNK = 4 * 1000  # 16 chunks
torch.manual_seed(0)
head, hidden, labels = torch.nn.Linear(16, 1000), torch.randn(2, 32, 16), torch.randint(1000, (2, 32))
labels[0, :20] = -100
found = {}
for low in (False, True):
    for kind in ("cpu", "hpu"):
        head.zero_grad(set_to_none=True)
        head, x, y = head.to(kind), hidden.to(kind), labels.to(kind)
        torch.hpu.reset_peak_memory_stats()
        before, counted, values = torch.hpu.memory_allocated(), [], []
        for step in range(4):
            with torch.autocast(kind, torch.bfloat16, enabled=low):
                loss = losses.cross_entropy_sum(head(x), y, 0.1)
                loss.backward()
            values.append(loss.detach())
            htcore.mark_step()
            seen = runtime.snapshot()
            counted.append([len(seen["graphs"]), len(seen["syncs"])])
        units = (torch.hpu.max_memory_allocated() - before) / (4 * y.numel() * 1000)
        numbers = torch.cat([torch.stack(values), head.weight.grad.flatten()]).tolist()
        found[f"{kind} {low}"] = {"numbers": numbers, "counted": counted, "units": units}
print(json.dumps(found))
"""


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_on_a_card_it_is_the_same_in_one_graph_without_a_wait(tmp_path: Path, mode: str) -> None:
    # Whatever an operator list names: the loss stays in fp32.
    (low := tmp_path / "low.txt").write_text("linear\nsoftmax\nlog_softmax\ncross_entropy_loss\nnll_loss\nsum\n")
    lists = {"PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": str(low)}
    output, report = simulator.rehearse(tmp_path, ON_DEVICE, mode=mode, **lists)
    found = json.loads(output.splitlines()[0])
    for kind in ("False", "True"):
        card, host = found[f"hpu {kind}"], found[f"cpu {kind}"]
        assert card["numbers"] == pytest.approx(host["numbers"], rel=1e-6, abs=1e-6)
        graphs, syncs = zip(*card["counted"], strict=True)
        assert graphs[1] == graphs[-1], "the first step makes the gradients, the second adds to them"
        assert syncs[0] == syncs[-1]
    assert found["hpu False"]["units"] < 1.9
    assert (mode == "lazy") == bool(report["graphs"])


def test_labels_are_ignored_as_the_data_says() -> None:
    assert losses.IGNORED == IGNORE_INDEX


# --- A loss for each row ----------------------------------------------------------------------------------------------


def rows_of(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    return scores(dtype).flatten(0, 1), targets().flatten()


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_losses_are_torchs(dtype: torch.dtype, smoothing: float) -> None:
    logits, labels = rows_of(dtype)
    weights = torch.linspace(0, 1, len(labels))
    leaf, other = (logits.clone().requires_grad_() for _ in range(2))
    found = cross_entropies(leaf, labels, smoothing)
    pairs = zip(other, labels, strict=True)
    expected = torch.stack([torchs(row[None], label[None], smoothing) for row, label in pairs])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    for each in (found, expected):
        (each * weights).sum().backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_rows_without_a_target_are_zero(smoothing: float) -> None:
    logits, labels = rows_of()
    logits.requires_grad_()
    found = cross_entropies(logits, labels, smoothing)
    assert ((found == 0) == (labels == IGNORE_INDEX)).all()
    found.sum().backward()
    assert torch.equal(logits.grad.any(1), labels != IGNORE_INDEX)
    assert cross_entropies(logits[:0], labels[:0]).shape == (0,)
    with pytest.raises(IndexError, match=str(CLASSES)):
        cross_entropies(logits, torch.full_like(labels, CLASSES))


def test_rows_losses_are_in_fp32_under_autocast() -> None:
    head, hidden, labels = nn.Linear(8, CLASSES), torch.randn(32, 8), targets().flatten()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        logits = head(hidden)
        found = cross_entropies(logits, labels, 0.1)
    assert logits.dtype == torch.bfloat16
    assert found.dtype == torch.float32
    assert torch.equal(found, cross_entropies(logits.float(), labels, 0.1))
    torch.testing.assert_close(found.sum(), cross_entropy_sum(logits, labels, 0.1), rtol=1e-6, atol=0)


ROWS_ON_DEVICE = """
import json
import habana_frameworks.torch.core as htcore
import torch
from core.losses import cross_entropies

torch.manual_seed(0)
logits, labels = 3 * torch.randn(8, 100), torch.tensor([0, 99, -100, 5, -100, 7, 1, 2])
found = {}
for kind in ("cpu", "hpu"):
    leaf = logits.detach().clone().to(kind).requires_grad_()
    with torch.autocast(kind, torch.bfloat16):
        losses = cross_entropies(leaf, labels.to(kind), 0.1)
        losses.sum().backward()
    found[kind] = torch.cat([losses.detach(), leaf.grad.flatten()]).tolist()
print(json.dumps(found))
"""


@pytest.mark.compiles
@pytest.mark.parametrize("mode", ["lazy", "eager"])
def test_on_a_card_rows_losses_are_in_fp32_whatever_an_operator_list_names(tmp_path: Path, mode: str) -> None:
    (low := tmp_path / "low.txt").write_text("softmax\nlog_softmax\ncross_entropy_loss\nnll_loss\n")
    lists = {"PT_HPU_AUTOCAST_LOWER_PRECISION_OPS_LIST": str(low)}
    output, _ = simulator.rehearse(tmp_path, ROWS_ON_DEVICE, mode=mode, **lists)
    found = json.loads(output.splitlines()[0])
    assert found["hpu"] == pytest.approx(found["cpu"], rel=1e-6, abs=1e-6)
