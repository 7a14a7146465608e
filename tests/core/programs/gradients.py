"""The same steps under torch's DDP and under `GradientReducer` in all its ways; each rank prints what differed."""

from __future__ import annotations

import copy
import hashlib
import json

import torch
import torch.distributed as dist
from setting import outcome, this_device
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from core import distributed
from core.gradients import GradientReducer, all_reduce_gradients, synchronize_state

STEPS, MICRO_BATCHES = 3, 2
LATE = ("sometimes.weight", "sometimes.bias")  # become views in the second step


class Model(nn.Module):
    """Tied tables, buffers of many dtypes, and parts that not every rank uses.

    ``first`` is used by rank 0 only, ``sometimes`` in step 1 only, ``never`` by nobody; rank 1 has the two branches in
    another order, so that their gradients become ready in another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = (
            nn.Linear(16, 16) for _ in range(2)
        )  # reduced last, since nobody may wait for them
        self.table, self.out = nn.Embedding(30, 16), nn.Linear(16, 30, bias=False)
        self.out.weight = self.table.weight
        self.norm = nn.BatchNorm1d(16)
        self.branches = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.first = nn.Linear(16, 16)
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.register_buffer("flag", torch.tensor([True, False]))
        self.register_buffer("bytes", torch.arange(5, dtype=torch.uint8))
        self.register_buffer("long_wide", torch.arange(3))
        self.register_buffer("half_wide", torch.arange(3, dtype=torch.float16), persistent=False)
        if device.torch_device.type == "cpu":  # the others have none
            self.register_buffer("double_wide", torch.linspace(0, 1, 3, dtype=torch.float64))

    def forward(self, rows: torch.Tensor, step: int) -> torch.Tensor:
        x = self.norm(self.table(rows).mean(dim=1)) * self.scalar
        order = self.branches if dist.get_rank() == 0 else self.branches[::-1]
        x = x + sum(branch(x).tanh() for branch in order)
        if dist.get_rank() == 0:
            x = x + self.first(x)
        if step == 1:
            x = x + self.sometimes(x)
        return self.out(self.frozen(x)).square().mean()


def batches(step: int) -> list[torch.Tensor]:
    """Token numbers, (4, 5), of each micro-batch; other ones on each rank."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return [torch.randint(30, (4, 5), generator=generator).to(where) for _ in range(MICRO_BATCHES)]


def of(model: nn.Module) -> dict[str, list[float] | None]:
    return {name: None if p.grad is None else p.grad.cpu().clone() for name, p in model.named_parameters()}


def where_gradients_are(model: nn.Module) -> dict[str, int]:
    return {name: p.grad.data_ptr() for name, p in model.named_parameters() if p.grad is not None}


def with_ddp(model: nn.Module) -> list[dict]:
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, broadcast_buffers=False)
    found = []
    for step in range(STEPS):
        first, last = batches(step)
        with wrapped.no_sync():
            wrapped(first, step).backward()
        wrapped(last, step).backward()
        found.append(of(model))
        model.zero_grad()
    return found


def with_reducer(model: nn.Module, forget: bool, **options) -> tuple[list[dict], set[str], int]:
    """Gradients after each step, parameters whose gradients `finish` moved, collectives begun during backward."""
    reducer = GradientReducer(model, device, **options)
    begun, counted = [], dist.all_reduce
    dist.all_reduce = lambda *args, **kwargs: begun.append(reducer._armed) or counted(*args, **kwargs)
    found, moved = [], set()
    for step in range(STEPS):
        for number, rows in enumerate(batches(step)):
            loss = model(rows, step)
            if number == MICRO_BATCHES - 1:
                reducer.arm()
            loss.backward()
        before = where_gradients_are(model)
        reducer.finish()
        found.append(of(model))
        if step > 0 or not options.get("as_views"):  # in the first step they become views
            after = where_gradients_are(model)
            moved |= {name for name, place in before.items() if after[name] != place and name not in LATE}
        model.zero_grad(set_to_none=forget)
    dist.all_reduce = counted
    return found, moved, sum(begun)


def by_hand(model: nn.Module) -> list[dict]:
    found = []
    for step in range(STEPS):
        for rows in batches(step):
            model(rows, step).backward()
        all_reduce_gradients(model, device, bucket_cap_mb=0.001)
        found.append(of(model))
        model.zero_grad()
    return found


def compare(ours: list[dict], theirs: list[dict]) -> dict:
    """Largest difference relative to the largest gradient of the parameter, and who has a gradient only in one."""
    worst, odd = 0.0, set()
    for mine, other in zip(ours, theirs, strict=True):
        for name, gradient in mine.items():
            if gradient is None or other[name] is None:
                odd |= {name} if (gradient is None) != (other[name] is None) else set()
            else:
                error = (gradient - other[name]).abs().max() / other[name].abs().max().clamp(min=1e-12)
                worst = max(worst, error.item())
    return {"worst": worst, "odd": sorted(odd)}


def digest(model: nn.Module) -> str:
    every = [*model.parameters(), *model.buffers()]
    return hashlib.sha1(b"".join(one.detach().cpu().reshape(-1).view(torch.uint8).numpy() for one in every)).hexdigest()


def synchronized() -> dict:
    """State before and after, when every rank began with its own."""
    torch.manual_seed(dist.get_rank())
    model = Model().to(where)
    for buffer in model.buffers():
        buffer.copy_(~buffer if buffer.dtype == torch.bool and dist.get_rank() else buffer + dist.get_rank())
    conv = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    before = digest(model)
    synchronize_state(model)
    synchronize_state(conv.to(where))
    shared = model.out.weight is model.table.weight
    return {"before": before, "after": digest(model), "conv": digest(conv), "tied": shared}


def twice() -> str:
    model = nn.Linear(3, 3).to(where)
    reducer = GradientReducer(model, device, overlap=True)
    reducer.arm()
    model(torch.ones(1, 3, device=where)).sum().backward()
    return outcome(lambda: model(torch.ones(1, 3, device=where)).sum().backward())


def wide() -> list[float]:
    """Gradients in float64 whose sum no float32 holds."""
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    parameter.grad = torch.full((3,), 1 + 2.0**-40 if dist.get_rank() else 256.0, dtype=torch.float64)
    all_reduce_gradients(nn.ParameterList([parameter]), device)
    return parameter.grad.tolist()


device = this_device()
where = device.torch_device
distributed.start(device, timeout_s=60)
torch.manual_seed(0)
start = Model().to(where)
reference = with_ddp(copy.deepcopy(start))
half = {"reduction_dtype": torch.bfloat16}
found = {"by_hand": compare(by_hand(copy.deepcopy(start)), reference)}
for name, forget, options in [
    ("plain", True, {"overlap": False}),
    ("kept", False, {}),
    ("overlap", True, {"overlap": True}),
    ("views", True, {"as_views": True, "overlap": False}),
    ("views_kept", False, {"as_views": True}),
    ("views_overlap", True, {"as_views": True, "overlap": True}),
    ("bf16", True, half),
    ("bf16_overlap_kept", False, {**half, "as_views": True, "overlap": True}),
]:
    model = copy.deepcopy(start)
    gradients, moved, begun = with_reducer(model, forget, bucket_cap_mb=0.001, **options)
    found[name] = {**compare(gradients, reference), "moved": sorted(moved), "begun": begun}
found["synchronized"] = synchronized()
found["unlike"] = outcome(lambda: synchronize_state(nn.Linear(2, 2 + dist.get_rank()).to(where)))
found["twice"] = twice()
if where.type == "cpu":
    found["wide"] = wide()
distributed.stop()
print(json.dumps(found))
