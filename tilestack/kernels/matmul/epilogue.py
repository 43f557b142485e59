"""What a product does to its tile before it is stored: bias, activation, dropout, residual, each only where it is given.

    total ──+ bias──▶ pre ──activation──▶ ──dropout──▶ ──+ residual──▶ rounded once ──▶ c
                       └─ also stored where a gradient will ask for it

On registers: of a layer `gelu(x @ weightᵀ + bias) + residual`, only the residual is read and only c is written, where three
operators would read and write M · N numbers each. Dropout takes more registers than a tile leaves, and has a second look
at the tile while the cache still holds it.

Which elements dropout keeps depends on the seed and the position in c, counted row by row, as `ops.dropout` has it
(`ops/random.py`), so that its gradient finds them again in any kernel. There an element shares a counter's four words
with three others, a slab apart; here these lie in other programs' tiles, and a thread takes one word of the four.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.elementwise.activation import activate, slope
from tilestack.kernels.elementwise.dropout import random_words
from tilestack.kernels.tiles import cdiv, wide
from tilestack.ops.random import SLAB, dropped_below

ELEMENTS = 1024  # of a program of the backward
KERNEL_SLAB = tl.constexpr(SLAB)


class Epilogue(NamedTuple):
    """What follows a product; `pre` is memory for what the activation is given, [M, N] and contiguous."""

    activation: str = "none"
    residual: Tensor | None = None  # [M, N], of any strides
    seed: Tensor | None = None
    p: float = 0.0
    pre: Tensor | None = None

    def arguments(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, tuple[int, ...], int]:
        """residual, seed, pre, strides of the residual, and the word below which an element is dropped."""
        strides = (0, 0) if self.residual is None else self.residual.stride()
        return self.residual, self.seed, self.pre, strides, 0 if self.seed is None else dropped_below(self.p)


PLAIN = Epilogue()


@triton.jit
def kept_of(position, seed_ptr, below):
    """Which elements dropout keeps, given their positions."""
    counter = position // (4 * KERNEL_SLAB) * KERNEL_SLAB + position % KERNEL_SLAB
    a, b, c, d = random_words(tl.load(seed_ptr), counter)
    word = position // KERNEL_SLAB % 4
    chosen = tl.where(word < 2, tl.where(word == 0, a, b), tl.where(word == 2, c, d))
    return chosen.to(tl.int64) >= below


@triton.jit
def dropped_of(x, position, seed_ptr, below):
    """x with what dropout does not keep at zero, and the rest scaled."""
    left = tl.maximum(4294967296 - tl.cast(below, tl.int64), 1)
    return tl.where(kept_of(position, seed_ptr, below), x * (4294967296.0 / left.to(x.dtype)), 0.0)


@triton.jit
def halves_of_columns(tile):
    """The left and the right half of a tile. On Hopper both lie in the same threads' registers, and nothing moves."""
    return tl.split(tl.permute(tl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2]), (0, 2, 1)))


@triton.jit
def finish_tile(
    total, first_m, first_n, M, N, bias_ptr, residual_ptr, residual_stride_m, residual_stride_n, seed_ptr, below, pre_ptr,
    c_ptr, ACTIVATION: tl.constexpr,
):  # fmt: skip
    """Store a tile of a product from row first_m and column first_n on; pointers are None for what is not wanted."""
    m = first_m + tl.arange(0, total.shape[0])[:, None]
    n = first_n + tl.arange(0, total.shape[1])[None, :]
    inside = (m < M) & (n < N)
    DTYPE: tl.constexpr = c_ptr.dtype.element_ty
    if bias_ptr is not None:
        total += tl.load(bias_ptr + n, mask=n < N, other=0).to(total.dtype)
    if pre_ptr is not None:
        tl.store(pre_ptr + m * N + n, total.to(DTYPE), mask=inside)
    if ACTIVATION != "none":
        # Rounded as it is stored, so that the gradient is that of what was computed.
        total = activate(total.to(DTYPE).to(total.dtype), ACTIVATION, DTYPE.primitive_bitwidth == 16)
    if residual_ptr is not None and seed_ptr is None:
        places = residual_ptr + m * residual_stride_m + n * residual_stride_n
        total += tl.load(places, mask=inside, other=0).to(total.dtype)
    tl.store(c_ptr + m * N + n, total.to(DTYPE), mask=inside)
    if seed_ptr is not None:
        tl.debug_barrier()  # other threads stored what this one loads
        drop_in_place(
            c_ptr, residual_ptr, residual_stride_m, residual_stride_n, seed_ptr, below, first_m, first_n, M, N,
            total.shape[0], total.shape[1],
        )  # fmt: skip


@triton.jit
def drop_in_place(
    c_ptr, residual_ptr, residual_stride_m, residual_stride_n, seed_ptr, below, first_m, first_n, M, N,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Dropout of a tile that this program has just stored, then the residual: a strip of rows at a time, from the cache.

    Ten rounds of Philox for a whole tile at once do not fit into the registers beside it."""
    STRIP: tl.constexpr = 1024 // COLUMNS
    n = first_n + tl.arange(0, COLUMNS)[None, :]
    for top in range(0, ROWS, STRIP):
        m = first_m + top + tl.arange(0, STRIP)[:, None]
        inside = (m < M) & (n < N)
        x = dropped_of(wide(tl.load(c_ptr + m * N + n, mask=inside, other=0)), m * N + n, seed_ptr, below)
        if residual_ptr is not None:
            places = residual_ptr + m * residual_stride_m + n * residual_stride_n
            x += tl.load(places, mask=inside, other=0).to(x.dtype)
        tl.store(c_ptr + m * N + n, x.to(c_ptr.dtype.element_ty), mask=inside)


@triton.jit
def epilogue_bwd_kernel(
    grad_ptr, pre_ptr, seed_ptr, dpre_ptr, elements, below, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    grad = wide(tl.load(grad_ptr + place, mask=inside, other=0))
    if ACTIVATION != "none":
        pre = wide(tl.load(pre_ptr + place, mask=inside, other=0))
        if ACTIVATION == "relu":
            grad = tl.where(pre <= 0, 0.0, grad)  # a zero, whatever arrives
        else:
            grad *= slope(pre, ACTIVATION, pre_ptr.dtype.element_ty.primitive_bitwidth == 16)
    if seed_ptr is not None:
        grad = dropped_of(grad, place, seed_ptr, below)  # last, so that what is dropped is zero whatever its slope
    tl.store(dpre_ptr + place, grad.to(dpre_ptr.dtype.element_ty), mask=inside)


def epilogue_backward(
    grad: Tensor, pre: Tensor | None, activation: str = "none", seed: Tensor | None = None, p: float = 0.0
) -> Tensor:
    """The gradient of what the activation was given: [M, N], like the gradient that arrives."""
    if activation == "none" and seed is None:
        return grad
    grad = grad.contiguous()
    dpre = torch.empty_like(grad)
    launch(
        epilogue_bwd_kernel, (cdiv(grad.numel(), ELEMENTS),), grad, pre, seed, dpre, grad.numel(),
        0 if seed is None else dropped_below(p), ACTIVATION=activation, BLOCK=ELEMENTS, num_warps=4,
    )  # fmt: skip
    return dpre
