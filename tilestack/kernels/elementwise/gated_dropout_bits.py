"""A gated pair with dropout whose forward keeps the bits of its mask for the backward: a byte for each four elements.

    forward    seed ──▶ bits ──▶ out          backward    bits, grad, gate, up ──▶ dgate, dup
                          └── kept

The backward of `activation_dropout` makes the random words again. With two inputs, two results and an activation besides,
that is more arithmetic than its memory traffic hides. Here it reads what was drawn, in half precision one fortieth more to
read and write. A counter of Philox serves four elements, a slab apart (`ops/random.py`), and its byte has a bit for each.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise import activation_dropout
from tilestack.kernels.elementwise.activation import activate, slope
from tilestack.kernels.elementwise.activation_dropout import GATED_TOGETHER, WARPS, gated_dropout_backward
from tilestack.kernels.elementwise.dropout import kept_bits, kept_scale, slabs_of
from tilestack.kernels.elementwise.vectors import load_block, store_block
from tilestack.kernels.tiles import cdiv, wide
from tilestack.ops.random import SLAB, dropped_below

TOGETHER = 2  # slabs of a step of the backward: 16 elements a thread, as in `gated`


@triton.jit
def counters_of(SLAB: tl.constexpr):
    """This program's counters, [1, SLAB]."""
    return tl.program_id(0).to(tl.int64) * SLAB + tl.arange(0, SLAB)[None, :]


@triton.jit
def gated_dropout_bits_fwd_kernel(
    gate_ptr, up_ptr, out_ptr, bits_ptr, seed_ptr,
    n, below,
    KIND: tl.constexpr, TOGETHER: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = gate_ptr.dtype.element_ty.primitive_bitwidth == 16
    tl.store(bits_ptr + counters_of(SLAB), kept_bits(seed_ptr, below, SLAB).to(tl.uint8))
    # Read back, bits are laid out for the loads below. Used as they are in both places, they are so for neither, and every
    # step would pass them between threads.
    tl.debug_barrier()
    bits = tl.load(bits_ptr + counters_of(SLAB)).to(tl.int32)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        gate = wide(load_block(gate_ptr, offsets, whole, n))
        y = activate(gate, KIND, HALF) * kept_scale(below, gate.dtype) * wide(load_block(up_ptr, offsets, whole, n))
        store_block(out_ptr, offsets, tl.where(kept, y, 0.0).to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def gated_dropout_bits_bwd_kernel(
    grad_ptr, gate_ptr, up_ptr, bits_ptr, dgate_ptr, dup_ptr,
    n, below,
    KIND: tl.constexpr, TOGETHER: tl.constexpr, SLAB: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = gate_ptr.dtype.element_ty.primitive_bitwidth == 16
    bits = tl.load(bits_ptr + counters_of(SLAB)).to(tl.int32)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        gate = wide(load_block(gate_ptr, offsets, whole, n))
        up = wide(load_block(up_ptr, offsets, whole, n))
        grad = wide(load_block(grad_ptr, offsets, whole, n)) * kept_scale(below, gate.dtype)
        # What is dropped is dropped last, so that a NaN there goes no further.
        dgate = tl.where(kept, grad * slope(gate, KIND, HALF) * up, 0.0)
        dup = tl.where(kept, grad * activate(gate, KIND, HALF), 0.0)
        store_block(dgate_ptr, offsets, dgate.to(dgate_ptr.dtype.element_ty), whole, n)
        store_block(dup_ptr, offsets, dup.to(dup_ptr.dtype.element_ty), whole, n)


def empty_kept(gate: Tensor) -> Tensor:
    """Memory for the bits, of whole programs."""
    return torch.empty(cdiv(gate.numel(), 4 * SLAB) * SLAB, dtype=torch.uint8, device=gate.device)


def gated_dropout_and_bits(gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str) -> tuple[Tensor, Tensor]:
    gate, up, bits = gate.contiguous(), up.contiguous(), empty_kept(gate)
    below, n = dropped_below(p), gate.numel()
    if below == 2**32:
        return torch.zeros_like(gate), bits
    out = torch.empty_like(gate)
    launch(
        gated_dropout_bits_fwd_kernel, (cdiv(n, 4 * SLAB),), gate, up, out, bits, seed, n, below,
        KIND=kind, TOGETHER=GATED_TOGETHER, SLAB=SLAB, num_warps=WARPS,
    )  # fmt: skip
    return out, bits


def gated_dropout_backward_of_bits(
    grad: Tensor, gate: Tensor, up: Tensor, p: float, kind: str, bits: Tensor
) -> tuple[Tensor | None, ...]:
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    below, n = dropped_below(p), gate.numel()
    if below == 2**32:
        return torch.zeros_like(gate), torch.zeros_like(up), None
    dgate, dup = torch.empty_like(gate), torch.empty_like(gate)
    launch(
        gated_dropout_bits_bwd_kernel, (cdiv(n, 4 * SLAB),), grad, gate, up, bits, dgate, dup, n, below,
        KIND=kind, TOGETHER=TOGETHER, SLAB=SLAB, num_warps=WARPS,
    )  # fmt: skip
    return dgate, dup, None


@implements(
    ops.gated_dropout,
    backend="triton_bits",
    repeat=straight_line,
    backward=gated_dropout_backward,
    extras=Extras(gated_dropout_and_bits, gated_dropout_backward_of_bits, when=lambda gate: True, fake=empty_kept),
)
def gated_dropout(gate: Tensor, up: Tensor, seed: Tensor, p: float, kind: str) -> Tensor:
    return activation_dropout.forward(gate, up, seed, p, kind)
