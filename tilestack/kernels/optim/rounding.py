"""Stochastic rounding of float32 to bfloat16: up or down at random, so that the average is exact.

bfloat16 is the upper half of a float32. Adding 16 random bits to the lower half before cutting it off carries into the
upper half with just the probability of the fraction that would be lost. The bits come from a hash of (seed, step,
tensor, element): the same run gives the same bits, and a CUDA graph draws new ones in every replay.
"""

import triton
import triton.language as tl


@triton.jit
def scramble(x):
    """A bijective hash of 32 bits."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def random_bits(seed, step, tensor, offsets):
    """Two independent words of 32 random bits per element."""
    key = scramble(scramble(scramble(step.to(tl.uint32)) + seed) + tensor.to(tl.uint32))
    first = scramble(key + offsets.to(tl.uint32))
    return first, scramble(first + 0x9E3779B9)


@triton.jit
def round_stochastically(x, bits):
    """x, a float32, rounded to what bfloat16 can hold, by the lower 16 bits of `bits`."""
    raised = (x.to(tl.uint32, bitcast=True) + (bits & 0xFFFF)) & 0xFFFF0000
    return tl.where(x == x, raised.to(tl.float32, bitcast=True), x)
