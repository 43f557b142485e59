"""Collectives that autograd sees: what is the same on all ranks of a group meets what is divided among them.

    entered           the same on all ──► each rank's own work      backward: gradients are summed
    summed            parts on all ──► their sum on all             backward: as it is
    joined_columns    columns of each ──► all columns on all        backward: each rank's own columns

In all three what is the same on all ranks has the same gradient on all of them, or autograd would count it once for each.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Entered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return all_summed(grad, ctx.group), None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        return all_summed(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class JoinedColumns(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        ctx.sizes, ctx.rank = sizes, dist.get_rank(group)
        return torch.cat(gathered(x, [(*x.shape[:-1], size) for size in sizes], group), -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return grad.split(ctx.sizes, -1)[ctx.rank], None, None


def entered(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Entered.apply(x, group)


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    return Summed.apply(x, group)


def joined_columns(x: Tensor, sizes: Sequence[int], group: dist.ProcessGroup) -> Tensor:
    """The columns of all ranks beside each other, so many of each."""
    return JoinedColumns.apply(x, sizes, group)


def all_summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum over a group in memory of its own: what x lies in may be wanted as it was."""
    made = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(made, group=group)
    return made


def gathered(local: Tensor, shapes: Sequence[Sequence[int]], group: dist.ProcessGroup) -> list[Tensor]:
    """Every rank's tensor, of these shapes; all are sent as long as the longest."""
    most = max(torch.Size(shape).numel() for shape in shapes)
    flat = local.new_zeros(most)
    flat[: local.numel()] = local.detach().flatten()
    rows = [torch.empty_like(flat) for _ in shapes]
    dist.all_gather(rows, flat, group=group)
    return [row[: torch.Size(shape).numel()].view(*shape) for row, shape in zip(rows, shapes, strict=True)]
