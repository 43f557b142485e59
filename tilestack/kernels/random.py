"""Philox inside kernels, and dropout: a read, a write, and a mask that exists only in registers.

A program takes 1024 counters and, with the four words of each, four slabs of 1024 elements (`ops/random.py` has the
picture). Ten rounds cost some forty instructions, which is more time than reading and writing one element takes; shared
by four they hide behind the memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.kernels.elementwise import load, store
from tilestack.kernels.launch import cdiv, launch, wide
from tilestack.kernels.repeat import straight_line
from tilestack.ops import implements
from tilestack.ops.backends import interpreting
from tilestack.ops.random import SLAB, dropped_below

INTERPRETED = tl.constexpr(interpreting())


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
def keep(x, word, below):
    """x scaled where its word does not drop it, else zero. The scale is exact: words that keep are counted."""
    scale = 4294967296.0 / (4294967296 - tl.cast(below, tl.int64)).to(x.dtype)
    return tl.where(word >= tl.cast(below, tl.uint32), x * scale, 0.0)


@triton.jit
def slabs_of(seed_ptr, n, SLAB: tl.constexpr):
    """This program's four slabs as the lines of a tile: [4, SLAB] offsets and words, and whether all lie inside.

    One tile, so that the words are made in the threads that load the elements; slab by slab they would have to be
    passed around through shared memory.
    """
    program = tl.program_id(0).to(tl.int64)
    a, b, c, d = random_words(tl.load(seed_ptr), program * SLAB + tl.arange(0, SLAB))
    words = tl.permute(tl.join(tl.join(a, c), tl.join(b, d)), (1, 2, 0))  # [2, 2, SLAB]
    offsets = program * 4 * SLAB + tl.arange(0, 4)[:, None] * SLAB + tl.arange(0, SLAB)[None, :]
    return offsets, tl.reshape(words, [4, SLAB]), (program + 1) * 4 * SLAB <= n


@triton.jit
def dropout_kernel(x_ptr, out_ptr, seed_ptr, n, below, SLAB: tl.constexpr):
    offsets, words, whole = slabs_of(seed_ptr, n, SLAB)
    x = keep(wide(load(x_ptr, offsets, whole, n)), words, below)
    store(out_ptr, offsets, x.to(out_ptr.dtype.element_ty), whole, n)


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
    launch(dropout_kernel, (cdiv(n, 4 * SLAB),), x, out, seed, n, below, SLAB=SLAB, num_warps=4)
    return out
