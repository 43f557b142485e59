"""Choosing tokens from a vocabulary without sorting it: survey, bound, gather, decide.

    survey   grid (rows, spans)   a program per span of 4096 logits. Of a row without filters: the span's winner. Of others:
                                  the largest of each of 32 groups; for top_p also Σ exp and how many logits lie how deep
    bound    grid (rows)          without filters the best of the spans' winners, and that row is done; of others, from
                                  the survey alone, a value below which no token can survive the row's filters
    gather   grid (rows, spans)   tokens at or above it, up to 512 of a span; pieces of a span that have none are not read
    decide   grid (rows)          exact thresholds by bisection over the few gathered, then the winner

A row's settings are looked at first, and a row pays for what it asks: temperature 0 draws no random numbers, and without
filters the logits are read once.

The k-th largest of the group maxima is at most the k-th largest logit, and nearly it: a group seldom holds two of the k.
For top_p the survey counts the logits of each half nat (of x / temperature) down to 32 nats below the span's largest:

    likeliest │ 0 │ 1 │ 2 │ … │ b │ … │ 63 │ deeper      no token of depth b is likelier than the upper edge of b

so count · exp(upper edge) is more than what a depth weighs, and depths from b on that are less than 1 - p of the mass even
so are outside. What follows touches hundreds or thousands of tokens, not hundreds of thousands. Logits that defeat the
bound (all equal, say), or a k above the number of groups, give more candidates than there is room for; the last step then
reads the row of logits in their stead, again and again: slow, never wrong.

Logits are compared as integers in the order of their values, NaN last, shifted by the bits their dtype does not have.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.early import early, wait_for_last
from tilestack.kernels.elementwise.arithmetic import INTERPRETED, exp_of
from tilestack.kernels.elementwise.dropout import random_words
from tilestack.kernels.tiles import cdiv, next_power, rows_of
from tilestack.ops.random import SLAB

SPAN = 4 * SLAB  # logits of a program: the four slabs that share Philox counters
GROUPS = 32  # group maxima of a span
DEPTHS = 64  # that logits are counted by,
PER_NAT = tl.constexpr(2.0)  # so many to a nat below the likeliest
PIECE = 1024  # logits of a span that are gathered together, or not at all
HELD = 512  # candidates of a span that there is room for
LISTED = 1024  # candidates looked at together,
TILE = 4096  # and logits, where candidates have no room
WARPS = dict(survey=8, bound=4, gather=8, decide=16)
NARROW = (torch.float16, torch.bfloat16, torch.float32)
SHIFTS = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}
LOG2_E = tl.constexpr(1.4426950408889634)


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


@triton.jit
def load_logits(row_ptr, token, inside):
    return tl.load(row_ptr + token, mask=inside, other=-float("inf")).to(tl.float32)


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


@triton.jit
def log2_of(x):
    """log2 of numbers that are no smaller than 2**-126: one instruction, which is right to 2**-22."""
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def log2_exponential(word):
    """log2 of the number that `exponential` in `ops/sampling.py` makes of a word."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = 0.2 + u * (0.16666666666666666 + u * 0.14285714285714285)
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * (0.25 + u * series))))
    logarithm = -0.6931471805599453 * log2_of(tl.maximum(1 - u, 1.1641532182693481e-10))
    return log2_of(tl.where(u < 0.1, series, logarithm))


@triton.jit
def word_of(seed, token, SLAB: tl.constexpr):
    """The word of single tokens: all four of its counter, and one of them chosen."""
    a, b, c, d = random_words(seed, (token // (4 * SLAB)) * SLAB + token % SLAB)
    which = (token // SLAB) % 4
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))


@triton.jit
def largest_of_four(a, b, c, d):
    """NaN where there is one."""
    ab = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    cd = tl.maximum(c, d, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(ab, cd, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def span_winner(row_ptr, seed, span, vocabulary, temperature, SLAB: tl.constexpr):
    """A span's largest logit, infinite for NaN; its best score, in bits above that of a likeliest token without noise; its token.

    At temperature 0 the score is 0 and the token the first of the largest."""
    lane = tl.arange(0, SLAB)
    first = span * 4 * SLAB + lane
    a = load_logits(row_ptr, first, first < vocabulary)
    b = load_logits(row_ptr, first + SLAB, first + SLAB < vocabulary)
    c = load_logits(row_ptr, first + 2 * SLAB, first + 2 * SLAB < vocabulary)
    d = load_logits(row_ptr, first + 3 * SLAB, first + 3 * SLAB < vocabulary)
    largest = largest_of_four(a, b, c, d)
    top = tl.max(tl.where(largest != largest, float("inf"), largest), 0)
    if temperature > 0:
        scale = LOG2_E * inverse_of(temperature)
        base = tl.where(top == -float("inf"), 0.0, top)
        words = random_words(seed, span.to(tl.int64) * SLAB + lane)
        a = (a - base) * scale - log2_exponential(words[0])
        b = (b - base) * scale - log2_exponential(words[1])
        c = (c - base) * scale - log2_exponential(words[2])
        d = (d - base) * scale - log2_exponential(words[3])
        largest = largest_of_four(a, b, c, d)
    best = tl.max(largest, 0)
    # The last slab first, so that the first of equals stays.
    token = tl.where(d == best, first + 3 * SLAB, 2147483647)
    token = tl.where(c == best, first + 2 * SLAB, token)
    token = tl.where(b == best, first + SLAB, token)
    token = tl.where(a == best, first, token)
    return top, tl.where(temperature > 0, best, 0.0), tl.min(token, 0)


@triton.jit
def count_depths(x, top, temperature, DEPTHS: tl.constexpr):
    """How many logits of a span lie how deep below its largest: differences of x / temperature, rounded down to depths."""
    scale = PER_NAT * inverse_of(temperature)
    depth = tl.floor(top * scale) - tl.floor(x * scale)
    counted = depth < DEPTHS
    return tl.histogram(tl.where(counted, depth, 0.0).to(tl.int32), DEPTHS, mask=counted)


@triton.jit
def survey_kernel(
    logits_ptr, seeds_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr,
    tops_ptr, scores_ptr, winners_ptr, maxima_ptr, depths_ptr,
    vocabulary, stride,
    HALF: tl.constexpr, SLAB: tl.constexpr, GROUPS: tl.constexpr, DEPTHS: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Of each span tops [rows, spans], the largest logit, infinite for NaN. Without filters scores and winners [rows, spans];
    else maxima [rows, spans, GROUPS] and, for top_p, Σ exp((x - the top) / temperature) in scores and depths [rows, spans,
    DEPTHS]."""
    wait_for_last(EARLY)
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + span
    temperature, k, p, _, filtered = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary)
    logits_ptr += row * stride
    if filtered:
        token = span * SPAN + tl.arange(0, SPAN)
        x = load_logits(logits_ptr, token, token < vocabulary)
        x = tl.where(x != x, float("inf"), x)
        maxima = tl.max(tl.reshape(x, [GROUPS, SPAN // GROUPS]), 1)
        top = tl.max(maxima, 0)
        tl.store(maxima_ptr + place * GROUPS + tl.arange(0, GROUPS), maxima)
        if (p < 1) & (k == 0):
            base = tl.where(top == -float("inf"), 0.0, top)
            tl.store(scores_ptr + place, tl.sum(exp_of((x - base) * inverse_of(temperature), HALF), 0))
            depths = count_depths(x, top, temperature, DEPTHS)
            tl.store(depths_ptr + place * DEPTHS + tl.arange(0, DEPTHS), depths)
    else:
        top, score, winner = span_winner(logits_ptr, tl.load(seeds_ptr + row), span, vocabulary, temperature, SLAB)
        tl.store(scores_ptr + place, score)
        tl.store(winners_ptr + place, winner)
    tl.store(tops_ptr + place, top)


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
        # A little lower than the filters themselves, which are applied to the last digit where tokens are decided.
        share = tl.where(
            (k == 0) | (p >= 1), min_p, 0.0
        )  # with both k and p, all of the k count: p is a share of their mass
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
        winner = tl.load(winners_ptr + row * spans + at)
        tl.store(out_ptr + row, tl.where(finite, winner, -1).to(tl.int64))


@triton.jit
def better(score, token, best, winner):
    """The larger of two scores with its token, the first where they are equal."""
    wins = score > best
    return tl.where(wins, score, best), tl.where(wins, token, winner)


@triton.jit
def gather_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, maxima_ptr, stats_ptr,
    values_ptr, tokens_ptr, counts_ptr,
    vocabulary, stride,
    GROUPS: tl.constexpr, SPAN: tl.constexpr, PIECE: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of rows with filters values and tokens [rows, spans, HELD], a span's candidates as far as there is room, and how many
    they are in counts [rows, spans]."""
    wait_for_last(EARLY)
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    place = row * tl.num_programs(1) + span
    _, _, _, _, filtered = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary)
    if filtered:
        floor = tl.load(stats_ptr + row * 3)
        maxima_ptr += place * GROUPS
        count = tl.zeros([], tl.int32)
        WIDTH: tl.constexpr = SPAN // GROUPS
        TOGETHER: tl.constexpr = PIECE // WIDTH  # groups of a piece
        for group in range(0, GROUPS, TOGETHER):
            if tl.max(tl.load(maxima_ptr + group + tl.arange(0, TOGETHER)), 0) >= floor:
                token = span * SPAN + group * WIDTH + tl.arange(0, PIECE)
                x = load_logits(logits_ptr + row * stride, token, token < vocabulary)
                found = (token < vocabulary) & ((x >= floor) | (x != x))
                slot = count + tl.cumsum(found.to(tl.int32), 0) - 1
                held = found & (slot < HELD)
                tl.store(values_ptr + place * HELD + slot, x.to(values_ptr.dtype.element_ty), mask=held)
                tl.store(tokens_ptr + place * HELD + slot, token, mask=held)
                count += tl.sum(found.to(tl.int32), 0)
        tl.store(counts_ptr + place, count)


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
def mass_above(values_ptr, total, key, top, temperature, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Σ exp((x - top) / temperature) of the candidates with more than this key."""
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        x = load_values(values_ptr, lane, total)
        mass += tl.where(key_of(x, SHIFT) > key, tl.exp((x - top) / temperature), 0.0)
    return tl.sum(mass, 0)


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


@triton.jit
def winner_of(
    values_ptr, tokens_ptr, total, seed, temperature, k, p, min_p, floor, top, mass,
    SHIFT: tl.constexpr, SLAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token that wins among a row's candidates, which are all that reach the floor."""
    least, highest = key_of(floor, SHIFT), key_of(top, SHIFT)
    if k > 0:
        least = kth_key(values_ptr, total, k, least, highest, SHIFT, TILE)
    if p < 1:
        if k > 0:
            mass = mass_above(values_ptr, total, least - 1, top, temperature, SHIFT, TILE)
        high = highest
        while least < high:  # the smallest key with less than p of the mass strictly above it
            middle = between(least, high)
            if mass_above(values_ptr, total, middle, top, temperature, SHIFT, TILE) < p * mass:
                high = middle
            else:
                least = middle + 1
    winner = tl.full([], -1, tl.int32)
    best = tl.full([], -float("inf"), tl.float32)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        x = load_values(values_ptr, lane, total)
        token = token_at(tokens_ptr, lane, total)
        scaled = (x - top) / temperature
        kept = (lane < total) & (key_of(x, SHIFT) >= least) & ((tl.exp(scaled) >= min_p) | (x == top))
        score = LOG2_E * scaled - log2_exponential(word_of(seed, token.to(tl.int64), SLAB))
        largest, at = tl.max(tl.where(kept, score, -float("inf")), 0, return_indices=True)
        best, winner = better(largest, token_at(tokens_ptr, start + at, total), best, winner)
    return winner


@triton.jit
def decide_kernel(
    logits_ptr, seeds_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, stats_ptr,
    values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, out_ptr,
    vocabulary, stride, spans,
    SHIFT: tl.constexpr, SLAB: tl.constexpr, HELD: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr,
    SPANS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The tokens of rows with filters."""
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p, min_p, filtered = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, row, vocabulary)
    if filtered:
        seed = tl.load(seeds_ptr + row)
        floor, top, mass = (
            tl.load(stats_ptr + row * 3),
            tl.load(stats_ptr + row * 3 + 1),
            tl.load(stats_ptr + row * 3 + 2),
        )
        winner = tl.full([], -1, tl.int32)
        if tl.abs(top) < float("inf"):
            total = pack_row(
                values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, row, spans, HELD, SPANS
            )
            if total >= 0:
                packed = row * spans * HELD
                winner = winner_of(
                    packed_values_ptr + packed, packed_tokens_ptr + packed, total,
                    seed, temperature, k, p, min_p, floor, top, mass, SHIFT, SLAB, LISTED,
                )  # fmt: skip
            else:
                winner = winner_of(
                    logits_ptr + row * stride, None, vocabulary,
                    seed, temperature, k, p, min_p, floor, top, mass, SHIFT, SLAB, TILE,
                )  # fmt: skip
        tl.store(out_ptr + row, winner.to(tl.int64))


@triton.jit
def rank_largest(
    values_ptr, tokens_ptr, total, chosen_ptr, out_values_ptr, out_indices_ptr, k, least, highest,
    SHIFT: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The k largest candidates in order: those above the k-th key, as many of its equals as fit, and a sort of just these."""
    kth = kth_key(values_ptr, total, k, least, highest, SHIFT, TILE)
    above = tl.zeros([], tl.int32)
    equal = count_above(values_ptr, total, kth, SHIFT, TILE)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        inside = lane < total
        key = key_of(load_values(values_ptr, lane, total), SHIFT)
        higher = (inside & (key > kth)).to(tl.int32)
        same = (inside & (key == kth)).to(tl.int32)
        slot = tl.where(higher > 0, above + tl.cumsum(higher, 0), equal + tl.cumsum(same, 0)) - 1
        # Packed to sort by falling key, then rising place; places rise with tokens.
        tl.store(
            chosen_ptr + slot, (key.to(tl.int64) << 32) + (2147483647 - lane), mask=((higher + same) > 0) & (slot < k)
        )
        above += tl.sum(higher, 0)
        equal += tl.sum(same, 0)
    tl.debug_barrier()
    rank = tl.arange(0, K)
    chosen = tl.sort(tl.load(chosen_ptr + rank, mask=rank < k, other=-9223372036854775808), descending=True)
    lane = tl.where(rank < k, 2147483647 - (chosen & 0xFFFFFFFF), 0).to(tl.int32)
    value = load_values(values_ptr, lane, total)
    tl.store(out_values_ptr + rank, value.to(out_values_ptr.dtype.element_ty), mask=rank < k)
    tl.store(out_indices_ptr + rank, token_at(tokens_ptr, lane, total).to(tl.int64), mask=rank < k)


@triton.jit
def largest_kernel(
    logits_ptr, stats_ptr, values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, chosen_ptr,
    out_values_ptr, out_indices_ptr,
    k, vocabulary, stride, spans,
    SHIFT: tl.constexpr, HELD: tl.constexpr, LISTED: tl.constexpr, TILE: tl.constexpr, SPANS: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    top = tl.load(stats_ptr + row * 3 + 1)
    least = key_of(tl.load(stats_ptr + row * 3), SHIFT)
    highest = key_of(tl.where(top == float("inf"), float("nan"), top), SHIFT)  # an infinite top may have been NaN
    chosen_ptr += row * k
    out_values_ptr += row * k
    out_indices_ptr += row * k
    total = pack_row(values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, row, spans, HELD, SPANS)
    if total >= 0:
        packed = row * spans * HELD
        rank_largest(
            packed_values_ptr + packed, packed_tokens_ptr + packed, total, chosen_ptr, out_values_ptr,
            out_indices_ptr, k, least, highest, SHIFT, LISTED, K,
        )  # fmt: skip
    else:
        rank_largest(
            logits_ptr + row * stride, None, vocabulary, chosen_ptr, out_values_ptr,
            out_indices_ptr, k, least, highest, SHIFT, TILE, K,
        )  # fmt: skip


@triton.jit
def argmax_spans_kernel(
    logits_ptr, best_ptr, vocabulary, stride, SHIFT: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr
):
    """best [rows, spans]: the largest key and, below it, the first token that has it, counted from the end."""
    wait_for_last(EARLY)
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = span * SPAN + tl.arange(0, SPAN)
    x = load_logits(logits_ptr + row * stride, token, token < vocabulary)
    packed = (key_of(x, SHIFT).to(tl.int64) << 32) + (2147483647 - token)
    packed = tl.where(token < vocabulary, packed, -9223372036854775808)
    tl.store(best_ptr + row * tl.num_programs(1) + span, tl.max(packed, 0))


@triton.jit
def argmax_rows_kernel(best_ptr, out_ptr, spans, SPANS: tl.constexpr, EARLY: tl.constexpr):
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    best = tl.max(tl.load(best_ptr + row * spans + span, mask=span < spans, other=-9223372036854775808), 0)
    tl.store(out_ptr + row, 2147483647 - (best & 0xFFFFFFFF))


@implements(ops.argmax, backend="triton", invariant=True, repeat=straight_line, dtypes=NARROW)
def argmax(logits: Tensor) -> Tensor:
    source = rows_of(logits)
    rows, vocabulary = source.shape
    spans = cdiv(vocabulary, SPAN)
    best = torch.empty((rows, spans), dtype=torch.int64, device=logits.device)
    out = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    begin = early(logits)
    launch(
        argmax_spans_kernel,
        (rows, spans),
        source,
        best,
        vocabulary,
        source.stride(0),
        SHIFT=SHIFTS[logits.dtype],
        SPAN=SPAN,
        num_warps=4,
        **begin,
    )
    launch(argmax_rows_kernel, (rows,), best, out, spans, SPANS=next_power(spans), num_warps=1, **begin)
    return out


class Candidates:
    """The survey, bound and gather of a batch of rows, and the buffers that the last step reads."""

    def __init__(self, logits: Tensor, out: Tensor, seeds: Tensor, *settings: Tensor):
        """`settings` are temperature, top_k, top_p and min_p, all contiguous, as the seeds are; rows without filters have
        their token in `out` already."""
        rows, vocabulary = logits.shape
        self.spans = spans = cdiv(vocabulary, SPAN)
        shared = dict(SHIFT=SHIFTS[logits.dtype], SPANS=next_power(spans))
        self.constants = dict(shared, HELD=HELD, LISTED=LISTED, TILE=TILE, num_warps=WARPS["decide"])
        new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=logits.device)
        tops, scores, winners = new(rows, spans), new(rows, spans), new(rows, spans, dtype=torch.int32)
        maxima, depths = new(rows, spans, GROUPS), new(rows, spans, DEPTHS, dtype=torch.int32)
        self.stats, self.counts = new(rows, 3), new(rows, spans, dtype=torch.int32)
        self.values, self.packed_values = (new(rows, spans, HELD, dtype=logits.dtype) for _ in range(2))
        self.tokens, self.packed_tokens = (new(rows, spans, HELD, dtype=torch.int32) for _ in range(2))
        launch(
            survey_kernel, (rows, spans), logits, seeds, *settings, tops, scores, winners, maxima, depths,
            vocabulary, logits.stride(0),
            HALF=logits.dtype != torch.float32, SLAB=SLAB, GROUPS=GROUPS, DEPTHS=DEPTHS, SPAN=SPAN,
            num_warps=WARPS["survey"], **early(logits),
        )  # fmt: skip
        launch(
            bound_kernel, (rows,), *settings, tops, scores, winners, maxima, depths, self.stats, out, vocabulary, spans,
            **shared, GROUPS=GROUPS, DEPTHS=DEPTHS, num_warps=WARPS["bound"], **early(logits),
        )  # fmt: skip
        launch(
            gather_kernel, (rows, spans), logits, *settings, maxima, self.stats, self.values, self.tokens, self.counts,
            vocabulary, logits.stride(0),
            GROUPS=GROUPS, SPAN=SPAN, PIECE=PIECE, HELD=HELD, num_warps=WARPS["gather"], **early(logits),
        )  # fmt: skip


@implements(ops.topk, backend="triton", dtypes=NARROW)
def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    source = rows_of(logits)
    rows = source.shape[0]
    each = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype, device=logits.device)
    shape = (*logits.shape[:-1], k)
    values = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    indices = torch.empty(shape, dtype=torch.int64, device=logits.device)
    found = Candidates(source, indices, each(0, torch.int64), each(1.0), each(k, torch.int32), each(1.0), each(0.0))
    launch(
        largest_kernel, (rows,), source, found.stats, found.values, found.tokens, found.counts, found.packed_values,
        found.packed_tokens, torch.empty_like(indices), values, indices, k, source.shape[1], source.stride(0), found.spans,
        **found.constants, K=next_power(k),
    )  # fmt: skip
    return values, indices


@implements(ops.sample, backend="triton", repeat=straight_line, dtypes=NARROW)
def sample(logits: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    source = rows_of(logits)
    rows, vocabulary = source.shape
    seeds, *settings = (value.contiguous() for value in (seeds, temperature, top_k, top_p, min_p))
    out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    found = Candidates(source, out, seeds, *settings)
    launch(
        decide_kernel, (rows,), source, seeds, *settings, found.stats, found.values, found.tokens, found.counts,
        found.packed_values, found.packed_tokens, out, vocabulary, source.stride(0), found.spans,
        **found.constants, SLAB=SLAB, **early(logits),
    )  # fmt: skip
    return out
