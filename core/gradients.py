"""Fast data parallelism: gradients averaged over ranks in a few flat buffers, without a wrapper around the model."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import nn

from core.device import Device
from core.errors import UserError

# What every backend carries. HCCL lacks bool, uint8, float64 and others; those travel as bytes between the hosts.
CARRIED = (torch.float32, torch.bfloat16)


@dataclass
class _Bucket:
    """Parameters whose gradients travel together: ``flat`` holds them, one after the other, then a flag for each."""

    parameters: list[nn.Parameter]
    flat: torch.Tensor
    views: list[torch.Tensor] = field(default_factory=list)
    ready: set[int] = field(default_factory=set)
    absent: list[int] = field(default_factory=list)
    work: dist.Work | None = None

    def __post_init__(self) -> None:
        sizes = [parameter.numel() for parameter in self.parameters]
        *parts, self.flags = self.flat.split([*sizes, len(sizes)])
        self.views = [part.view(one.shape) for part, one in zip(parts, self.parameters, strict=True)]


class GradientReducer:
    """Averages the gradients of a model over all ranks, as DistributedDataParallel does, but between two calls.

    Buckets are filled in reverse order of the parameters, about the order in which gradients become ready, and
    reduced in that same order on all ranks, whatever order they become ready in. A parameter without a gradient on
    this rank counts as zero here and gets one if another rank has it: flags for this travel in the bucket and are
    read, which waits for the device, only on a rank that lacks a gradient itself.

    Source of the idea: Li et al., "PyTorch Distributed: Experiences on Accelerating Data Parallel Training", 2020,
    section 3.2 (buckets, overlap).

    Args:
        model: as it will be trained: what needs no gradient now is left out.
        bucket_cap_mb: MiB of a bucket; a larger parameter has one of its own.
        reduction_dtype: in which gradients are added up. In bfloat16 half the bytes travel, and every rank rounds.
        overlap: start each bucket during the backward pass (between `arm` and `finish`). Default: where the device
            works by itself while the host goes on.
        as_views: let gradients become views of the buckets, which saves a copy. Not if something else holds on to them,
            like a recorded graph that writes them: by default they stay where they are.
    """

    def __init__(
        self,
        model: nn.Module,
        device: Device,
        bucket_cap_mb: float = 25.0,
        reduction_dtype: torch.dtype = torch.float32,
        overlap: bool | None = None,
        as_views: bool = False,
    ) -> None:
        self._model, self._device, self._as_views = model, device, as_views
        self._ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._overlap = device.queues_work if overlap is None else overlap
        self._buckets = _fill_buckets(model, bucket_cap_mb * 2**20, reduction_dtype) if self._ranks > 1 else []
        self._armed, self._launched = False, 0
        for bucket in self._buckets if self._overlap else []:
            for number, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, number))

    def arm(self) -> None:
        """Call before the last backward pass of an optimizer step: its gradients are final and may leave at once."""
        self._armed = True

    def finish(self) -> None:
        """Call after it: every gradient is the average over ranks when device work that follows reads it."""
        self._armed = False
        while self._launched < len(self._buckets):
            self._launch()
        self._launched = 0
        for bucket in self._buckets:
            bucket.ready.clear()
            bucket.work.wait()
            self._unpack(bucket)
        self._device.step_boundary()

    def _hook(self, bucket: _Bucket, number: int):
        def note(_: torch.Tensor) -> None:
            if not self._armed:
                return
            if number in bucket.ready:
                raise UserError("a gradient came twice in one backward pass; checkpointing needs use_reentrant=False")
            bucket.ready.add(number)
            while self._launched < len(self._buckets) and self._is_full(self._buckets[self._launched]):
                self._launch()

        return note

    @staticmethod
    def _is_full(bucket: _Bucket) -> bool:
        return len(bucket.ready) == len(bucket.parameters)

    @torch.no_grad()
    def _launch(self) -> None:
        """Pack the next bucket and send it."""
        bucket = self._buckets[self._launched]
        self._launched += 1
        bucket.absent = []
        bucket.flags.fill_(1)
        for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            if parameter.grad is None:
                bucket.absent.append(number)
                bucket.flags[number] = 0
                view.zero_()
            elif view.dtype == parameter.grad.dtype:  # also where the gradient is the view
                torch.mul(parameter.grad, 1 / self._ranks, out=view)
            else:  # in one pass it would be many times slower on a CPU
                view.copy_(parameter.grad.mul_(1 / self._ranks))
        self._device.step_boundary()
        bucket.work = dist.all_reduce(bucket.flat, async_op=True)

    @torch.no_grad()
    def _unpack(self, bucket: _Bucket) -> None:
        elsewhere = bucket.flags.tolist() if bucket.absent else []
        for number, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
            same = self._as_views and view.dtype == parameter.dtype
            if parameter.grad is None and elsewhere[number]:
                parameter.grad = view if same else view.to(parameter.dtype, copy=True)
            elif parameter.grad is not None and parameter.grad is not view:
                if same:
                    parameter.grad = view
                else:
                    parameter.grad.copy_(view)


def synchronize_state(model: nn.Module) -> None:
    """Give every rank the parameters and buffers of rank 0, of any dtype.

    Raises:
        UserError: the ranks built different models.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    tensors = [*model.parameters(), *model.buffers()]  # a tied one is listed once
    shapes = zlib.crc32(repr([(tuple(one.shape), one.dtype, one.requires_grad) for one in tensors]).encode())
    extremes = torch.tensor([shapes, -shapes])
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    if extremes.sum() != 0:
        raise UserError("the ranks built different models; give all of them the same flags, files and versions")
    for one in tensors:
        _copy_from_first(one.detach())


def broadcast_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, of any dtype."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        for one in model.buffers():
            _copy_from_first(one.detach())


def all_reduce_gradients(
    model: nn.Module, device: Device, bucket_cap_mb: float = 25.0, reduction_dtype: torch.dtype = torch.float32
) -> None:
    """Average the gradients of ``model`` over all ranks, once, after backward; a loop keeps a `GradientReducer`."""
    GradientReducer(model, device, bucket_cap_mb, reduction_dtype, overlap=False).finish()


def _fill_buckets(model: nn.Module, cap: float, reduction_dtype: torch.dtype) -> list[_Bucket]:
    groups: dict[tuple, list[list[nn.Parameter]]] = {}
    order: list[tuple[tuple, list[nn.Parameter]]] = []
    for parameter in reversed([one for one in model.parameters() if one.requires_grad]):
        wide = torch.promote_types(parameter.dtype, torch.float32)  # never narrower, unless asked for
        dtype = wide if reduction_dtype == torch.float32 else reduction_dtype
        key = (parameter.device, parameter.dtype, dtype)
        members = groups.get(key)
        if members is None or (sum(one.numel() for one in members) + parameter.numel()) * dtype.itemsize > cap:
            members = groups[key] = []
            order.append((key, members))
        members.append(parameter)
    return [
        _Bucket(members, torch.zeros(sum(one.numel() + 1 for one in members), dtype=dtype, device=where))
        for (where, _, dtype), members in order
    ]


def _copy_from_first(tensor: torch.Tensor) -> None:
    """Overwrite ``tensor``, of any shape and dtype, with that of rank 0."""
    if tensor.dtype in CARRIED:
        whole = tensor.contiguous()
        dist.broadcast(whole, 0)
    else:
        whole = tensor.cpu().contiguous()
        dist.broadcast(whole.view(-1).view(torch.uint8), 0)
    if whole is not tensor:
        tensor.copy_(whole)
