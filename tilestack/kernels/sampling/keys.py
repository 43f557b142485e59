"""Logits as they are read and compared: integers in the order of their values, NaN last, shifted by the bits their dtype
does not have."""

import torch
import triton
import triton.language as tl

from tilestack.ops.random import SLAB

SPAN = 4 * SLAB  # logits of a program: the four slabs that share Philox counters
NARROW = (torch.float16, torch.bfloat16, torch.float32)
SHIFTS = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}


@triton.jit
def load_logits(row_ptr, token, inside):
    return tl.load(row_ptr + token, mask=inside, other=-float("inf")).to(tl.float32)


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """int32 in the order of x as float32; NaN above all, both zeros equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return tl.where(x != x, 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def value_of(key, SHIFT: tl.constexpr):
    """The float32 of a key, which is the very number where its dtype has no more bits than the key kept."""
    bits = (key << SHIFT) | tl.where(key < 0, (1 << SHIFT) - 1, 0)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def between(low, high):
    """The middle of two keys, rounded down; their sum may be more than int32 holds."""
    return ((low.to(tl.int64) + high) >> 1).to(tl.int32)
