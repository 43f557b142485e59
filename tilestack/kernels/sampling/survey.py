"""The first step: one reading of the logits, by which rows without filters have all they need."""

import triton
import triton.language as tl

from tilestack.kernels.early import wait_for_last
from tilestack.kernels.elementwise.arithmetic import exp_of
from tilestack.kernels.elementwise.dropout import random_words
from tilestack.kernels.sampling.depths import count_depths
from tilestack.kernels.sampling.keys import load_logits
from tilestack.kernels.sampling.noise import LOG2_E, log2_exponential
from tilestack.kernels.sampling.settings import inverse_of, settings_of

GROUPS = 32  # group maxima of a span


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
