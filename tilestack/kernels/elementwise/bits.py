"""A bit for each element, made by a forward for its backward, where that asks of an element only whether it counts.

    elements  0 … 7 | 8 … 15 | 16 …       element e is bit e % 8 of byte e // 8; a line of a tile is a byte
    bytes       0   |   1    |  2

    backward  dx = grad where the bit is set, else zero

It reads grad and an eighth of a byte where it would otherwise read a second tensor.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.elementwise.vectors import load_block, store_block
from tilestack.kernels.tiles import cdiv, wide

BLOCK = 2048  # elements of a program
WARPS = 8


@triton.jit
def packed(counts):
    """[lines, 8] yes and no as [lines] bytes."""
    return tl.sum(counts.to(tl.int32) << tl.arange(0, 8)[None, :], 1).to(tl.uint8)


@triton.jit
def lines_of(n, BLOCK: tl.constexpr):
    """This program's [lines] bytes, [lines, 8] elements, and whether all of them lie inside the vector."""
    line = tl.program_id(0).to(tl.int64) * (BLOCK // 8) + tl.arange(0, BLOCK // 8)
    elements = line[:, None] * 8 + tl.arange(0, 8)[None, :]
    return line, elements, (tl.program_id(0) + 1).to(tl.int64) * BLOCK <= n


@triton.jit
def relu_bits_fwd_kernel(x_ptr, out_ptr, bits_ptr, n, BLOCK: tl.constexpr):
    line, elements, whole = lines_of(n, BLOCK)
    x = load_block(x_ptr, elements, whole, n)
    counts = ~(wide(x) <= 0)  # this way round a NaN does
    store_block(out_ptr, elements, tl.where(counts, x, 0.0).to(x.dtype), whole, n)
    store_block(bits_ptr, line, packed(counts), whole, tl.cdiv(n, 8))


@triton.jit
def bits_bwd_kernel(grad_ptr, bits_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    line, elements, whole = lines_of(n, BLOCK)
    grad = load_block(grad_ptr, elements, whole, n)
    byte = load_block(bits_ptr, line, whole, tl.cdiv(n, 8)).to(tl.int32)
    counts = (byte[:, None] >> tl.arange(0, 8)[None, :] & 1) != 0
    store_block(dx_ptr, elements, tl.where(counts, grad, 0.0).to(grad.dtype), whole, n)


def empty_bits(x: Tensor) -> Tensor:
    return torch.empty(cdiv(x.numel(), 8), dtype=torch.uint8, device=x.device)


def relu_and_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    out, bits = torch.empty_like(x), empty_bits(x)
    launch(
        relu_bits_fwd_kernel, (cdiv(x.numel(), BLOCK),), x, out, bits, x.numel(), BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return out, bits


def backward_of_bits(grad: Tensor, bits: Tensor) -> Tensor:
    """The gradient of what counts."""
    grad = grad.contiguous()
    dx = torch.empty_like(grad)
    launch(
        bits_bwd_kernel, (cdiv(grad.numel(), BLOCK),), grad, bits, dx, grad.numel(), BLOCK=BLOCK, num_warps=WARPS
    )  # fmt: skip
    return dx
