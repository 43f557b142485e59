"""The global norm of all gradients and what clipping to it multiplies them by, without the host looking.

A fixed set of programs stride over the blocks of all tensors, each with one sum of squares in registers:

    program 0: block 0, block P, block 2P, …  →  partial 0      one more program adds the partials up in float64 and
    program 1: block 1, block P+1, …          →  partial 1      writes the norm and min(1, max_norm / (norm + 1e-6))

The order of every addition is fixed, so that the norm is the same bits in every run.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.optim.multi_tensor import Table, address, fetch, place, put, triton_dtype
from tilestack.kernels.tiles import accumulator, multiprocessors

BLOCK = 4096
PROGRAMS_PER_MULTIPROCESSOR = 8
GRAD = tl.constexpr(1)  # the row of the table


@triton.jit
def squares_kernel(
    table_ptr, blocks_ptr, partial_ptr,
    tensors, blocks,
    GRAD_TYPE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    total = tl.zeros([BLOCK], ACC)
    for index in range(tl.program_id(0), blocks, tl.num_programs(0)):
        tensor, start, length = place(table_ptr, blocks_ptr, index, blocks, BLOCK)
        location = address(table_ptr, tensors, tensor, GRAD)
        lane = tl.arange(0, BLOCK)
        if (start + BLOCK <= length) & ((location & 15) == 0):
            g = fetch(location, start, lane, length, GRAD_TYPE, True).to(ACC)
        else:
            g = fetch(location, start, lane, length, GRAD_TYPE, False).to(ACC)
        total += g * g
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total.to(tl.float64), 0))


@triton.jit
def norm_kernel(partial_ptr, norm_ptr, coefficient_ptr, scale_ptr, count, max_norm: tl.float64, CHUNK: tl.constexpr):
    """One program: sqrt of the sum of the partials, in units of unscaled gradients, and the clipping coefficient."""
    total = tl.zeros([CHUNK], tl.float64)
    for start in range(0, count, CHUNK):
        lane = start + tl.arange(0, CHUNK)
        total += tl.load(partial_ptr + lane, mask=lane < count, other=0)
    norm = tl.sqrt(tl.sum(total, 0))
    if scale_ptr is not None:
        norm = norm / tl.load(scale_ptr).to(tl.float64)
    tl.store(norm_ptr, norm.to(norm_ptr.dtype.element_ty))
    coefficient = max_norm / (norm + 1e-6)
    tl.store(coefficient_ptr, tl.where(coefficient > 1, 1.0, coefficient))  # this way round a NaN stays one


@triton.jit
def scale_kernel(
    table_ptr, blocks_ptr, coefficient_ptr,
    tensors, blocks,
    GRAD_TYPE: tl.constexpr, ACC: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    coefficient = tl.load(coefficient_ptr).to(ACC)
    if coefficient != 1:  # most steps are not clipped
        tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, BLOCK)
        location = address(table_ptr, tensors, tensor, GRAD)
        lane = tl.arange(0, BLOCK)
        if (start + BLOCK <= length) & ((location & 15) == 0):
            g = fetch(location, start, lane, length, GRAD_TYPE, True).to(ACC)
            put(location, start, lane, length, g * coefficient, GRAD_TYPE, True)
        else:
            g = fetch(location, start, lane, length, GRAD_TYPE, False).to(ACC)
            put(location, start, lane, length, g * coefficient, GRAD_TYPE, False)


def gradient_norm(
    tables: Sequence[tuple[Table, torch.dtype]], max_norm: float, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    """(norm, clipping coefficient) of the gradients in some tables, one per dtype, all on one device."""
    like = tables[0][0].entries
    most = multiprocessors(like.device) * PROGRAMS_PER_MULTIPROCESSOR
    programs = [min(table.programs, most) for table, _ in tables]
    partial = torch.empty(sum(programs), dtype=torch.float64, device=like.device)
    for (table, dtype), own in zip(tables, partial.split(programs), strict=True):
        launch(
            squares_kernel, (len(own),), table.entries, table.blocks, own, table.tensors, table.programs,
            GRAD_TYPE=triton_dtype(dtype), ACC=accumulator(dtype), BLOCK=table.block, num_warps=8,
        )  # fmt: skip
    dtype = torch.float64 if any(dtype == torch.float64 for _, dtype in tables) else torch.float32
    norm = torch.empty((), dtype=dtype, device=like.device)
    coefficient = torch.empty((), dtype=torch.float64, device=like.device)
    launch(norm_kernel, (1,), partial, norm, coefficient, scale, len(partial), float(max_norm), CHUNK=1024, num_warps=8)
    return norm, coefficient


def scale_gradients(table: Table, dtype: torch.dtype, coefficient: Tensor) -> None:
    launch(
        scale_kernel, (table.programs,), table.entries, table.blocks, coefficient, table.tensors, table.programs,
        GRAD_TYPE=triton_dtype(dtype), ACC=accumulator(dtype), BLOCK=table.block, num_warps=8,
    )  # fmt: skip
