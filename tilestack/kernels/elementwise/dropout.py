"""Philox inside kernels, and dropout: a read, a write, and a mask that exists only in registers.

A program takes 1024 counters and, with the four words of each, four slabs of 1024 elements (`ops/random.py` has the
picture). Ten rounds cost some forty instructions, which is more time than reading and writing one element takes; shared
by four they hide behind the memory. Of the words only a bit for each element is kept, in the thread that loads it, and
the slabs follow some at a time: the more a kernel does with an element, the fewer, so that registers are left for other
programs, whose memory traffic the rounds of this one hide behind.

    step 0   |---- SLAB ----|  bits & 1          TOGETHER = 2
             |---- SLAB ----|  bits & 2
    step 1   |---- SLAB ----|  bits & 4
             |---- SLAB ----|  bits & 8
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.elementwise.arithmetic import INTERPRETED
from tilestack.kernels.elementwise.vectors import load_block, store_block
from tilestack.kernels.tiles import cdiv, wide
from tilestack.ops.random import SLAB, dropped_below

TOGETHER = 4  # slabs of a step of dropout alone
ADDED_TOGETHER = 2  # and of one that adds something


@triton.jit
def product(x, FACTOR: tl.constexpr):
    """The lower and the upper word of x · FACTOR, by one instruction; `tl.umulhi` and a product are two, one of them slow."""
    if INTERPRETED:
        low, high = x * FACTOR, tl.umulhi(x, tl.full(x.shape, FACTOR, tl.uint32))
    else:
        low, high = tl.inline_asm_elementwise(
            "{ .reg .b64 both; mul.wide.u32 both, $2, $3; mov.b64 {$0, $1}, both; }", "=r,=r,r,r",
            [x, tl.full(x.shape, FACTOR, tl.uint32)], dtype=(tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip
    return low, high


@triton.jit
def random_words(seed, counter):
    """The four words of each 64-bit counter, as uint32: Philox 4x32 of ten rounds, its key the two halves of the seed."""
    seed = seed.to(tl.uint64)
    key, other = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    a, b = counter.to(tl.uint32), (counter >> 32).to(tl.uint32)
    c, d = a * 0, a * 0
    for _ in tl.static_range(10):
        low_a, high_a = product(a, 0xD2511F53)
        low_c, high_c = product(c, 0xCD9E8D57)
        a, b, c, d = high_c ^ b ^ key, low_c, high_a ^ d ^ other, low_a
        key, other = key + 0x9E3779B9, other + 0xBB67AE85
    return a, b, c, d


@triton.jit
def kept_scale(below, DTYPE: tl.constexpr):
    """What is kept is multiplied by this. It is exact: words that keep are counted."""
    return 4294967296.0 / (4294967296 - tl.cast(below, tl.int64)).to(DTYPE)


@triton.jit
def kept_bits(seed_ptr, below, SLAB: tl.constexpr):
    """[1, SLAB], for each counter of this program which of its four elements are kept: one bit a slab."""
    counter = tl.program_id(0).to(tl.int64) * SLAB + tl.arange(0, SLAB)[None, :]
    a, b, c, d = random_words(tl.load(seed_ptr), counter)
    below = tl.cast(below, tl.uint32)
    ab = tl.where(a >= below, 1, 0) | tl.where(b >= below, 2, 0)
    return ab | tl.where(c >= below, 4, 0) | tl.where(d >= below, 8, 0)


@triton.jit
def slabs_of(bits, first, n, TOGETHER: tl.constexpr, SLAB: tl.constexpr):
    """Some of this program's slabs: [TOGETHER, SLAB] offsets, which elements are kept, and whether all lie inside."""
    slab = first + tl.arange(0, TOGETHER)[:, None]
    start = tl.program_id(0).to(tl.int64) * 4 * SLAB
    offsets = start + slab * SLAB + tl.arange(0, SLAB)[None, :]
    return offsets, (bits >> slab & 1) != 0, start + (first + TOGETHER) * SLAB <= n


@triton.jit
def dropout_kernel(x_ptr, out_ptr, seed_ptr, n, below, TOGETHER: tl.constexpr, SLAB: tl.constexpr):
    bits = kept_bits(seed_ptr, below, SLAB)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        x = wide(load_block(x_ptr, offsets, whole, n))
        x = tl.where(kept, x * kept_scale(below, x.dtype), 0.0)
        store_block(out_ptr, offsets, x.to(out_ptr.dtype.element_ty), whole, n)


def dropout_backward(grad: Tensor, seed: Tensor, p: float) -> tuple[Tensor, None]:
    return dropout(grad, seed, p), None


@implements(ops.dropout, backend="triton", repeat=straight_line, backward=dropout_backward)
def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    x = x.contiguous()
    below = dropped_below(p)
    if below == 2**32:
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    n = x.numel()
    launch(dropout_kernel, (cdiv(n, 4 * SLAB),), x, out, seed, n, below, TOGETHER=TOGETHER, SLAB=SLAB, num_warps=4)
    return out


@triton.jit
def dropout_add_kernel(x_ptr, residual_ptr, seed_ptr, n, below, TOGETHER: tl.constexpr, SLAB: tl.constexpr):
    bits = kept_bits(seed_ptr, below, SLAB)
    for first in range(0, 4, TOGETHER):
        offsets, kept, whole = slabs_of(bits, first, n, TOGETHER, SLAB)
        x = wide(load_block(x_ptr, offsets, whole, n))
        x = tl.where(kept, x * kept_scale(below, x.dtype), 0.0)
        if residual_ptr is not None:
            x += load_block(residual_ptr, offsets, whole, n).to(x.dtype)
        store_block(x_ptr, offsets, x.to(x_ptr.dtype.element_ty), whole, n)


def dropout_add_in_place(x: Tensor, residual: Tensor | None, seed: Tensor, p: float) -> Tensor:
    """dropout(x) + residual, rounded once, written over x, which is contiguous: the end of a layer whose product left it to
    a pass of its own."""
    below = dropped_below(p)
    if below == 2**32:
        return x.zero_() if residual is None else x.copy_(residual)
    residual, n = None if residual is None else residual.contiguous(), x.numel()
    launch(
        dropout_add_kernel, (cdiv(n, 4 * SLAB),), x, residual, seed, n, below,
        TOGETHER=ADDED_TOGETHER, SLAB=SLAB, num_warps=4,
    )  # fmt: skip
    return x
