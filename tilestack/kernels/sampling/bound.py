"""The second step: what a token needs to survive its row's filters, from the survey alone.

The k-th largest of the group maxima is at most the k-th largest logit, and nearly it: a group seldom holds two of the k. For
top_p the depths tell (depths.py).
"""

import triton
import triton.language as tl

from tilestack.kernels.early import wait_for_last
from tilestack.kernels.sampling.depths import nucleus_floor
from tilestack.kernels.sampling.keys import between, key_of, value_of
from tilestack.kernels.sampling.noise import LOG2_E
from tilestack.kernels.sampling.settings import inverse_of, settings_of


@triton.jit
def kth_maximum(maxima_ptr, k, spans, SHIFT: tl.constexpr, GROUPS: tl.constexpr, SPANS: tl.constexpr):
    """The k-th largest of a row's group maxima; -inf where there are fewer."""
    group = tl.arange(0, SPANS * GROUPS)
    inside = group < spans * GROUPS
    keys = key_of(tl.load(maxima_ptr + group, mask=inside, other=-float("inf")), SHIFT)
    low = key_of(tl.full([], -float("inf"), tl.float32), SHIFT)
    high = tl.max(keys, 0)
    while low < high:
        middle = between(low, high)
        if tl.sum((keys > middle).to(tl.int32), 0) >= k:
            low = middle + 1
        else:
            high = middle
    return value_of(low, SHIFT)


@triton.jit
def bound_kernel(
    temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, tops_ptr, scores_ptr, winners_ptr, maxima_ptr, depths_ptr,
    stats_ptr, out_ptr,
    vocabulary, spans,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, DEPTHS: tl.constexpr, SPANS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Without filters the row's token; else stats [rows, 3]: the logit that a token needs, the largest logit, and for top_p
    Σ exp((x - the largest) / temperature)."""
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, min_p, filtered = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary)
    span = tl.arange(0, SPANS)
    tops = tl.load(tops_ptr + row * spans + span, mask=span < spans, other=-float("inf"))
    top = tl.max(tops, 0)
    finite = tl.abs(top) < float("inf")
    below = (tops - tl.where(finite, top, 0.0)) * (LOG2_E * inverse_of(temperature))
    if filtered:
        floor = tl.full([], -float("inf"), tl.float32)
        # A little lower than the filters themselves, which are applied to the last digit where tokens are decided. With both
        # k and p, all of the k count: p is a share of their mass.
        share = tl.where((k == 0) | (p >= 1), min_p, 0.0)
        if k > 0:
            floor = kth_maximum(maxima_ptr + row * spans * GROUPS, k, spans, SHIFT, GROUPS, SPANS)
        else:
            if p < 1:
                sums = tl.load(scores_ptr + row * spans + span, mask=span < spans, other=0)
                mass = tl.sum(sums * tl.exp2(below), 0)
                tl.store(stats_ptr + row * 3 + 2, mass)
                floor = nucleus_floor(
                    depths_ptr + row * spans * DEPTHS, tops, top, mass, temperature, p, vocabulary, spans, DEPTHS, SPANS
                )
                # All that are less likely than this weigh less than 1 - p together, whatever they are.
                share = tl.maximum(share, (1 - p) / vocabulary)
        if share > 0:
            floor = tl.maximum(floor, top + temperature * (tl.log(tl.minimum(share, 1.0)) - 0.001))
        tl.store(stats_ptr + row * 3, tl.minimum(floor, top))
        tl.store(stats_ptr + row * 3 + 1, top)
    else:
        scores = tl.load(scores_ptr + row * spans + span, mask=span < spans, other=-float("inf"))
        _, at = tl.max(scores + below, 0, return_indices=True)
        # Among scores that are NaN the best may be one of those that fill up the tile.
        winner = tl.load(winners_ptr + row * spans + at, mask=finite, other=-1)
        tl.store(out_ptr + row, winner.to(tl.int64))
