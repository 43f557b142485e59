"""What the last steps do with a row's candidates, or with its logits where candidates had no room."""

import triton
import triton.language as tl

from tilestack.kernels.sampling.keys import between, key_of


@triton.jit
def pack_row(
    values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, row, spans,
    HELD: tl.constexpr, SPANS: tl.constexpr, TOGETHER: tl.constexpr = 32,
):  # fmt: skip
    """A row's candidates from those of its spans into one run, in order; returns how many, or -1 where room was missing."""
    span = tl.arange(0, SPANS)
    counts = tl.load(counts_ptr + row * spans + span, mask=span < spans, other=0)
    most, total = tl.max(counts, 0), tl.sum(counts, 0)
    if most > HELD:
        total = -1
    else:
        begin = (row * spans * HELD + tl.cumsum(counts, 0) - counts)[:, None]
        for first in range(0, most, TOGETHER):
            slot = first + tl.arange(0, TOGETHER)[None, :]
            inside = slot < counts[:, None]
            source = (row * spans + span)[:, None] * HELD + slot
            tl.store(packed_values_ptr + begin + slot, tl.load(values_ptr + source, mask=inside), mask=inside)
            tl.store(packed_tokens_ptr + begin + slot, tl.load(tokens_ptr + source, mask=inside), mask=inside)
        tl.debug_barrier()
    return total


@triton.jit
def load_values(values_ptr, lane, total):
    return tl.load(values_ptr + lane, mask=lane < total, other=-float("inf")).to(tl.float32)


@triton.jit
def token_at(tokens_ptr, lane, total):
    """The tokens of some candidates; where there is no list of them, candidates are a row's logits and lie by token."""
    if tokens_ptr is None:
        return lane
    else:
        return tl.load(tokens_ptr + lane, mask=lane < total, other=0)


@triton.jit
def count_above(values_ptr, total, key, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """How many candidates have more than this key."""
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        x = load_values(values_ptr, lane, total)
        count += ((lane < total) & (key_of(x, SHIFT) > key)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def kth_key(values_ptr, total, k, low, high, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The largest key that at least k candidates have or exceed."""
    while low < high:
        middle = between(low, high)
        if count_above(values_ptr, total, middle, SHIFT, TILE) >= k:
            low = middle + 1
        else:
            high = middle
    return low
