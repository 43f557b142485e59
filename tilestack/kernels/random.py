"""Philox inside kernels, and dropout: a read, a write, and a mask that exists only in registers.

A program takes 1024 counters and, with the four words of each, four slabs of 1024 elements (`ops/random.py` has the
picture). Ten rounds cost some sixty instructions, which is more time than reading and writing one element takes; shared
by four they hide behind the memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.elementwise import load, store
from tilestack.kernels.launch import cdiv, launch, wide
from tilestack.ops import implements
from tilestack.ops.random import SLAB, dropped_below


@triton.jit
def random_words(seed, counter):
    """The four words of each 64-bit counter, as uint32."""
    low = counter.to(tl.uint32)
    return tl.philox(seed, low, (counter >> 32).to(tl.uint32), low * 0, low * 0)


@triton.jit
def keep(x, word, below):
    """x scaled where its word does not drop it, else zero. The scale is exact: words that keep are counted."""
    scale = 4294967296.0 / (4294967296 - tl.cast(below, tl.int64)).to(x.dtype)
    return tl.where(word >= tl.cast(below, tl.uint32), x * scale, 0.0)


@triton.jit
def drop(x_ptr, out_ptr, word, start, n, below, SLAB: tl.constexpr):
    """One slab."""
    offsets = start + tl.arange(0, SLAB)
    whole = start + SLAB <= n
    kept = keep(wide(load(x_ptr, offsets, whole, n)), word, below)
    store(out_ptr, offsets, kept.to(out_ptr.dtype.element_ty), whole, n)


@triton.jit
def dropout_kernel(x_ptr, out_ptr, seed_ptr, n, below, SLAB: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    words = random_words(tl.load(seed_ptr), program * SLAB + tl.arange(0, SLAB))
    for slab in tl.static_range(4):
        drop(x_ptr, out_ptr, words[slab], (program * 4 + slab) * SLAB, n, below, SLAB)


def dropout_backward(grad: Tensor, seed: Tensor, p: float) -> tuple[Tensor, None]:
    return dropout(grad, seed, p), None


@implements(ops.dropout, backend="triton", backward=dropout_backward)
def dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    x = x.contiguous()
    below = dropped_below(p)
    if below == 2**32:
        return torch.zeros_like(x)
    out = torch.empty_like(x)
    n = x.numel()
    launch(dropout_kernel, (cdiv(n, 4 * SLAB),), x, out, seed, n, below, SLAB=SLAB, num_warps=4)
    return out
