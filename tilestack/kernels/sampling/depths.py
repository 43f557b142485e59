"""Where a nucleus ends at the latest, from counts alone.

The survey counts the logits of each half nat (of x / temperature) down to 32 nats below the span's largest:

    likeliest │ 0 │ 1 │ 2 │ … │ b │ … │ 63 │ deeper      no token of depth b is likelier than the upper edge of b

so count · exp(upper edge) is more than what a depth weighs, and depths from b on that are less than 1 - p of the mass even
so are outside.
"""

import triton
import triton.language as tl

from tilestack.kernels.sampling.settings import inverse_of

DEPTHS = 64  # that logits are counted by,
PER_NAT = tl.constexpr(2.0)  # so many to a nat below the likeliest


@triton.jit
def count_depths(x, top, temperature, DEPTHS: tl.constexpr):
    """How many logits of a span lie how deep below its largest: differences of x / temperature, rounded down to depths."""
    scale = PER_NAT * inverse_of(temperature)
    depth = tl.floor(top * scale) - tl.floor(x * scale)
    counted = depth < DEPTHS
    return tl.histogram(tl.where(counted, depth, 0.0).to(tl.int32), DEPTHS, mask=counted)


@triton.jit
def nucleus_floor(depths_ptr, tops, top, mass, temperature, p, vocabulary, spans, DEPTHS: tl.constexpr, SPANS: tl.constexpr):  # fmt: skip
    """A logit below which all tokens together have less than 1 - p of the mass; -inf where the depths do not tell."""
    scale = PER_NAT * inverse_of(temperature)
    first = tl.floor(top * scale)
    span, depth = tl.arange(0, SPANS), tl.arange(0, DEPTHS)
    # Depths are counted from the top of a span, here from that of the row.
    own = depth[None, :] - (first - tl.floor(tops * scale))[:, None]
    inside = (own >= 0) & (own < DEPTHS) & (span < spans)[:, None]
    own = tl.where(inside, own, 0.0).to(tl.int32)
    counts = tl.sum(tl.load(depths_ptr + span[:, None] * DEPTHS + own, mask=inside, other=0), 0)
    likeliest = tl.exp(tl.minimum((first + 1 - depth) / PER_NAT - top / temperature, 0.0))
    deeper = vocabulary * tl.exp((first + 1 - DEPTHS) / PER_NAT - top / temperature)
    outside = deeper + tl.cumsum(counts.to(tl.float32) * likeliest, 0, reverse=True)
    allowed = (0.999 * (1 - p) - 1e-6) * mass
    kept = tl.sum((outside > allowed).to(tl.int32), 0)
    # A little lower than the edge, which was computed with roundings; beyond so many depths they would be too large.
    floor = (first + 0.99 - kept) / scale
    return tl.where((deeper <= allowed) & (tl.abs(first) < 65536), floor, -float("inf"))
