"""Activations and gated pairs with dropout: what `activation` and `gated` compute, kept or dropped before it is written.

A program takes four slabs of 1024 elements, which share their random words, in steps as in `random`. The backward finds
the words again from the seed, so nothing is kept for it but the inputs.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.activation import activate, slope
from tilestack.kernels.elementwise.dropout import kept_bits, kept_scale, slabs_of
from tilestack.kernels.elementwise.vectors import load_block, store_block
from tilestack.kernels.tiles import cdiv, wide
from tilestack.ops.random import SLAB, dropped_below

TOGETHER = 2  # slabs of a step, so few that at least eight programs fit a multiprocessor
GATED_TOGETHER = 1
WARPS, GATED_BACKWARD_WARPS = 4, 8


@triton.jit
def activation_dropout_fwd_kernel(
    x_ptr, up_ptr, out_ptr, seed_ptr,
    n, below,
    KIND: tl.constexpr, GATED: tl.constexpr, TOGETHER: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    bits = kept_bits(seed_ptr, below, SLAB)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        x = wide(load_block(x_ptr, offsets, whole, n))
        y = activate(x, KIND, HALF) * kept_scale(below, x.dtype)
        if GATED:
            y *= wide(load_block(up_ptr, offsets, whole, n))
        store_block(out_ptr, offsets, tl.where(kept, y, 0.0).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def activation_dropout_bwd_kernel(
    grad_ptr, x_ptr, up_ptr, dx_ptr, dup_ptr, seed_ptr,
    n, below,
    KIND: tl.constexpr, GATED: tl.constexpr, TOGETHER: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    bits = kept_bits(seed_ptr, below, SLAB)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        x = wide(load_block(x_ptr, offsets, whole, n))
        grad = wide(load_block(grad_ptr, offsets, whole, n)) * kept_scale(below, x.dtype)
        dx = grad * slope(x, KIND, HALF)
        # What is dropped is dropped last, so that a NaN there goes no further.
        if GATED:
            dx *= wide(load_block(up_ptr, offsets, whole, n))
            dup = tl.where(kept, grad * activate(x, KIND, HALF), 0.0)
            store_block(dup_ptr, offsets, dup.to(dup_ptr.dtype.element_ty), whole, n)
        store_block(dx_ptr, offsets, tl.where(kept, dx, 0.0).to(dx_ptr.dtype.element_ty), whole, n)


def forward(x: Tensor, up: Tensor | None, seed: Tensor, p: float, kind: str) -> Tensor:
    x, up = x.contiguous(), None if up is None else up.contiguous()
    below, n = dropped_below(p), x.numel()
    if below == 2**32:
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    launch(
        activation_dropout_fwd_kernel, (cdiv(n, 4 * SLAB),), x, up, out, seed, n, below,
        KIND=kind, GATED=up is not None, TOGETHER=TOGETHER if up is None else GATED_TOGETHER, SLAB=SLAB,
        num_warps=WARPS,
    )  # fmt: skip
    return out


def backward(
    grad: Tensor, x: Tensor, up: Tensor | None, seed: Tensor, p: float, kind: str
) -> tuple[Tensor, Tensor | None]:
    """Gradients of x and up."""
    grad, x, up = grad.contiguous(), x.contiguous(), None if up is None else up.contiguous()
    below, n = dropped_below(p), x.numel()
    make = torch.zeros_like if below == 2**32 else torch.empty_like
    dx, dup = make(x), None if up is None else make(x)
    if below < 2**32:
        launch(
            activation_dropout_bwd_kernel, (cdiv(n, 4 * SLAB),), grad, x, up, dx, dup, seed, n, below,
            KIND=kind, GATED=up is not None, TOGETHER=TOGETHER if up is None else GATED_TOGETHER, SLAB=SLAB,
            num_warps=WARPS if up is None else GATED_BACKWARD_WARPS,
        )  # fmt: skip
    return dx, dup


def activation_dropout_backward(grad: Tensor, x: Tensor, seed: Tensor, p: float, kind: str) -> tuple[Tensor, None]:
    return backward(grad, x, None, seed, p, kind)[0], None


@implements(ops.activation_dropout, backend="triton", repeat=straight_line, backward=activation_dropout_backward)
def activation_dropout(x: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    return forward(x, None, seed, p, kind)


def gated_dropout_backward(
    grad: Tensor, gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str
) -> tuple[Tensor | None, ...]:
    return *backward(grad, gate, up, seed, p, kind), None


@implements(ops.gated_dropout, backend="triton", repeat=straight_line, backward=gated_dropout_backward)
def gated_dropout(gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    return forward(gate, up, seed, p, kind)
