"""Activations and gated pairs with dropout: what `activation` and `gated` compute, kept or dropped before it is written.

A program takes four slabs of 1024 elements, which share their random words, in steps as in `random`. The backward finds
the words again from the seed, so nothing is kept for it but the inputs; for relu the forward makes a bit an element,
which says both whether it is kept and whether it is positive, and nothing else is kept.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.activation import activate, slope
from tilestack.kernels.bits import backward_of_bits, bytes_for, packed
from tilestack.kernels.elementwise import load, store
from tilestack.kernels.launch import cdiv, launch, wide
from tilestack.kernels.random import kept_bits, kept_scale, slabs_of
from tilestack.kernels.repeat import straight_line
from tilestack.ops import Keeping, implements
from tilestack.ops.random import SLAB, dropped_below

FORWARD, BACKWARD, GATED_BACKWARD = 2, 2, 1  # slabs of a step, so few that at least eight programs fit a multiprocessor
WARPS = 4


@triton.jit
def activation_dropout_fwd_kernel(
    x_ptr, up_ptr, out_ptr, bits_ptr, seed_ptr,  # bits, of relu alone, may be None
    n, below,
    KIND: tl.constexpr, GATED: tl.constexpr, TOGETHER: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = x_ptr.dtype.element_ty.primitive_bitwidth == 16
    bits = kept_bits(seed_ptr, below, SLAB)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        x = wide(load(x_ptr, offsets, whole, n))
        y = activate(x, KIND, HALF) * kept_scale(below, x.dtype)
        if GATED:
            y *= wide(load(up_ptr, offsets, whole, n))
        store(out_ptr, offsets, tl.where(kept, y, 0.0).to(out_ptr.dtype.element_ty), whole, n)
        if bits_ptr is not None:
            counts = packed(tl.reshape(kept & ~(x <= 0), [TOGETHER * SLAB // 8, 8]))
            line = (tl.program_id(0).to(tl.int64) * 4 + first) * (SLAB // 8) + tl.arange(0, TOGETHER * SLAB // 8)
            store(bits_ptr, line, counts, whole, tl.cdiv(n, 8))


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
        x = wide(load(x_ptr, offsets, whole, n))
        grad = wide(load(grad_ptr, offsets, whole, n)) * kept_scale(below, x.dtype)
        dx = grad * slope(x, KIND, HALF)
        # What is dropped is dropped last, so that a NaN there goes no further.
        if GATED:
            dx *= wide(load(up_ptr, offsets, whole, n))
            dup = tl.where(kept, grad * activate(x, KIND, HALF), 0.0)
            store(dup_ptr, offsets, dup.to(dup_ptr.dtype.element_ty), whole, n)
        store(dx_ptr, offsets, tl.where(kept, dx, 0.0).to(dx_ptr.dtype.element_ty), whole, n)


def forward(x: Tensor, up: Tensor | None, seed: Tensor, p: float, kind: str, bits: Tensor | None = None) -> Tensor:
    """With `bits` also which elements pass their gradient on, for a relu."""
    x, up = x.contiguous(), None if up is None else up.contiguous()
    below, n = dropped_below(p), x.numel()
    if below == 2**32:
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    launch(
        activation_dropout_fwd_kernel, (cdiv(n, 4 * SLAB),), x, up, out, bits, seed, n, below,
        KIND=kind, GATED=up is not None, TOGETHER=FORWARD, SLAB=SLAB, num_warps=WARPS,
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
            KIND=kind, GATED=up is not None, TOGETHER=BACKWARD if up is None else GATED_BACKWARD, SLAB=SLAB,
            num_warps=WARPS,
        )  # fmt: skip
    return dx, dup


def activation_dropout_backward(grad: Tensor, x: Tensor, seed: Tensor, p: float, kind: str) -> tuple[Tensor, None]:
    return backward(grad, x, None, seed, p, kind)[0], None


def relu_dropout_and_bits(x: Tensor, seed: Tensor, p: float, kind: str) -> tuple[Tensor, Tensor]:
    bits = bytes_for(x)
    return forward(x, None, seed, p, kind, bits), bits


def relu_dropout_backward(grad: Tensor, bits: Tensor, p: float) -> tuple[Tensor, None]:
    below = dropped_below(p)
    return torch.zeros_like(grad) if below == 2**32 else backward_of_bits(grad, bits, below), None


@implements(
    ops.activation_dropout,
    backend="triton",
    repeat=straight_line,
    backward=activation_dropout_backward,
    keeping=Keeping(
        relu_dropout_and_bits,
        relu_dropout_backward,
        when=lambda kind: kind == "relu",
    ),
)
def activation_dropout(x: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    return forward(x, None, seed, p, kind)


def gated_dropout_backward(
    grad: Tensor, gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str
) -> tuple[Tensor | None, ...]:
    return *backward(grad, gate, up, seed, p, kind), None


@implements(ops.gated_dropout, backend="triton", repeat=straight_line, backward=gated_dropout_backward)
def gated_dropout(gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    return forward(gate, up, seed, p, kind)
