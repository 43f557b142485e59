"""What a row asks for: how sharp its distribution is, and which tokens it leaves out."""

import triton
import triton.language as tl


@triton.jit
def settings_of(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary):
    """(temperature, k or 0, p, min_p) of a row, and whether tokens are filtered at all."""
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    k = tl.load(top_k_ptr + row).to(tl.int64)
    k = tl.where((k > 0) & (k <= vocabulary), k, 0)
    p, min_p = tl.load(top_p_ptr + row).to(tl.float32), tl.load(min_p_ptr + row).to(tl.float32)
    return temperature, k, p, min_p, (temperature > 0) & ((k > 0) | (p < 1) | (min_p > 0))


@triton.jit
def inverse_of(temperature):
    """1 / temperature, kept finite; 1 for temperature 0."""
    return tl.minimum(1 / tl.where(temperature > 0, temperature, 1.0), 1.0e38)
