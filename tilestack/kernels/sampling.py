"""Choosing tokens from a vocabulary without sorting it: survey, bound, gather, decide.

    survey   grid (rows, spans)   a program per span of 4096 logits: the largest of each of 32 groups, the sum of exp
    bound    grid (rows)          from those alone, a value below which no token can survive the row's filters
    gather   grid (rows, spans)   tokens at or above it, up to 256 of a span; where no filter needs the others' values,
                                  the span's winner outright
    decide   grid (rows)          exact thresholds by bisection over the few gathered, then the winner

The k-th largest of the group maxima is at most the k-th largest logit, and nearly it: a group seldom holds two of the
k. A token less likely than (1 - p) / vocabulary times the likeliest is outside every top-p set, whatever the rest. So
the logits are read twice, the second time mostly from L2, and what follows touches hundreds of tokens, not hundreds of
thousands. Logits that defeat the bound (all equal, say), or a k above the number of groups beside a p, give more candidates
than there is room for; the last step then reads the row of logits in their stead, again and again: slow, never wrong.

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
from tilestack.kernels.elementwise.dropout import random_words
from tilestack.kernels.tiles import cdiv, next_power, rows_of
from tilestack.ops.random import SLAB

SPAN = 4 * SLAB  # logits of a program: the four slabs that share Philox counters
GROUPS = 32  # group maxima of a span
HELD = 256  # candidates of a span that there is room for,
PACKED = 1024  # and of a row
TILE = 4096  # logits looked at together where that does not suffice
NARROW = (torch.float16, torch.bfloat16, torch.float32)
SHIFTS = {torch.float16: 13, torch.bfloat16: 16, torch.float32: 0}


@triton.jit
def key_of(x, SHIFT: tl.constexpr):
    """Integers, in int64, in the order of x as float32; NaN above all, both zeros equal."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (tl.where(x != x, 0x7FFFFFFF, bits) >> SHIFT).to(tl.int64)


@triton.jit
def load_span(logits_ptr, row, span, vocabulary, stride, SPAN: tl.constexpr):
    token = span * SPAN + tl.arange(0, SPAN)
    return token, tl.load(logits_ptr + row * stride + token, mask=token < vocabulary, other=-float("inf")).to(
        tl.float32
    )


@triton.jit
def settings_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocabulary):
    """(temperature, k or 0, p or 1) of a row."""
    k = tl.load(top_k_ptr + row).to(tl.int64)
    return (
        tl.load(temperature_ptr + row).to(tl.float32),
        tl.where((k > 0) & (k <= vocabulary), k, 0),
        tl.load(top_p_ptr + row).to(tl.float32),
    )


@triton.jit
def likelihood_of(x, top, temperature):
    """(logarithm of) how likely a token is against the likeliest."""
    return (x - top) / tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def exponential(word):
    """As in `ops/sampling.py`."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1 + u * (0.5 + u * (0.3333333333333333 + u * 0.25)))
    return tl.where(u < 0.01, series, -tl.log(tl.maximum(1 - u, 1.1641532182693481e-10)))


@triton.jit
def word_of(seed, token, SLAB: tl.constexpr):
    """The word of single tokens: all four of its counter, and one of them chosen."""
    a, b, c, d = random_words(seed, (token // (4 * SLAB)) * SLAB + token % SLAB)
    which = (token // SLAB) % 4
    return tl.where(which == 0, a, tl.where(which == 1, b, tl.where(which == 2, c, d)))


@triton.jit
def survey_kernel(
    logits_ptr, temperature_ptr, maxima_ptr, sums_ptr,
    vocabulary, stride,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, SPAN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """maxima [rows, spans · GROUPS] keys; sums [rows, spans, 2]: the largest logit, Σ exp((x - it) / temperature)."""
    wait_for_last(EARLY)
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    _, x = load_span(logits_ptr, row, span, vocabulary, stride, SPAN)
    keys = tl.max(tl.reshape(key_of(x, SHIFT), [SPAN // GROUPS, GROUPS]), 0)
    place = row * tl.num_programs(1) + span
    tl.store(maxima_ptr + place * GROUPS + tl.arange(0, GROUPS), keys.to(tl.int32))
    top = tl.max(tl.where(x != x, float("inf"), x), 0)
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    total = tl.sum(tl.exp(likelihood_of(x, tl.where(top == -float("inf"), 0.0, top), temperature)), 0)
    tl.store(sums_ptr + place * 2, top)
    tl.store(sums_ptr + place * 2 + 1, total)


@triton.jit
def bound_kernel(
    maxima_ptr, sums_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, stats_ptr,
    vocabulary, spans,
    SHIFT: tl.constexpr, GROUPS: tl.constexpr, SPANS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """keys [rows, 2]: what a token needs, and the highest; stats [rows, 2]: the largest logit, Σ exp((x - it) / temperature)."""
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    tops = tl.load(sums_ptr + (row * spans + span) * 2, mask=span < spans, other=-float("inf"))
    sums = tl.load(sums_ptr + (row * spans + span) * 2 + 1, mask=span < spans, other=0)
    temperature, k, p = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocabulary)
    top = tl.max(tops, 0)
    tl.store(stats_ptr + row * 2, top)
    tl.store(stats_ptr + row * 2 + 1, tl.sum(sums * tl.exp(likelihood_of(tops, top, temperature)), 0))

    group = tl.arange(0, SPANS * GROUPS)
    maxima = tl.load(maxima_ptr + row * spans * GROUPS + group, mask=group < spans * GROUPS, other=-2147483648).to(
        tl.int64
    )
    highest = tl.max(maxima, 0)
    low = tl.full([], -2147483648 >> SHIFT, tl.int64)
    if (k > 0) & (k <= spans * GROUPS):
        high = highest
        while low < high:
            middle = (low + high + 1) >> 1
            if tl.sum((maxima >= middle).to(tl.int32), 0) >= k:
                low = middle
            else:
                high = middle - 1
    # A little lower than the filters themselves, which are applied to the last digit where tokens are decided.
    share = tl.maximum(tl.load(min_p_ptr + row).to(tl.float32), tl.where(p < 1, (1 - p) / vocabulary, 0.0))
    # With both k and p, all of the k count: their mass is what p is a share of.
    if (share > 0) & ((k == 0) | (p >= 1)):
        low = tl.maximum(low, key_of(top + temperature * (tl.log(tl.minimum(share, 1.0)) - 0.001), SHIFT))
    low = tl.where(temperature <= 0, highest, low)
    tl.store(keys_ptr + row * 2, tl.minimum(low, highest))
    tl.store(keys_ptr + row * 2 + 1, highest)


@triton.jit
def better(score, token, best, winner):
    """The larger of two scores with its token, the first where they are equal."""
    wins = score > best
    return tl.where(wins, score, best), tl.where(wins, token, winner)


@triton.jit
def span_winner(
    row_ptr, seed, span, vocabulary, top, temperature, min_p, SLAB: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """The best score of a span and its token where min_p is the only filter."""
    lane = tl.arange(0, SLAB)
    words = random_words(seed, span.to(tl.int64) * SLAB + lane)
    best = tl.full([], -float("inf"), tl.float32)
    winner = span * SPAN
    for slab in tl.static_range(4):
        token = span * SPAN + slab * SLAB + lane
        x = tl.load(row_ptr + token, mask=token < vocabulary, other=-float("inf")).to(tl.float32)
        scaled = likelihood_of(x, top, temperature)
        kept = (tl.exp(scaled) >= min_p) | (x == top)
        score = tl.where(kept, scaled - tl.log(exponential(words[slab])), -float("inf"))
        highest, at = tl.max(score, 0, return_indices=True)
        best, winner = better(highest, span * SPAN + slab * SLAB + at, best, winner)
    return best, winner


@triton.jit
def gather_kernel(
    logits_ptr, seeds_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, stats_ptr,
    values_ptr, tokens_ptr, counts_ptr, scores_ptr,
    vocabulary, stride,
    SHIFT: tl.constexpr, SLAB: tl.constexpr, SPAN: tl.constexpr, HELD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Either the span's candidates, as far as there is room, and how many, or its winner (in tokens[0]) and the winner's score."""
    wait_for_last(EARLY)
    row, span = tl.program_id(0).to(tl.int64), tl.program_id(1)
    spans = tl.num_programs(1)
    place = row * spans + span
    values_ptr += place * HELD
    tokens_ptr += place * HELD
    temperature, k, p = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocabulary)
    if (k > 0) | (p < 1) | (temperature <= 0):
        token, x = load_span(logits_ptr, row, span, vocabulary, stride, SPAN)
        found = (key_of(x, SHIFT) >= tl.load(keys_ptr + row * 2)) & (token < vocabulary)
        slot = tl.cumsum(found.to(tl.int32), 0) - 1
        held = found & (slot < HELD)
        tl.store(values_ptr + slot, x.to(values_ptr.dtype.element_ty), mask=held)
        tl.store(tokens_ptr + slot, token, mask=held)
        tl.store(counts_ptr + place, tl.sum(found.to(tl.int32), 0))
    else:
        best, winner = span_winner(
            logits_ptr + row * stride, tl.load(seeds_ptr + row), span, vocabulary, tl.load(stats_ptr + row * 2),
            temperature, tl.load(min_p_ptr + row).to(tl.float32), SLAB, SPAN,
        )  # fmt: skip
        tl.store(tokens_ptr, winner)
        tl.store(scores_ptr + place, best)


@triton.jit
def pack_row(
    values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, row, spans,
    HELD: tl.constexpr, PACKED: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """A row's candidates from those of its spans into one run, in order; returns how many, or -1 where room was missing."""
    span = tl.arange(0, SPANS)
    counts = tl.load(counts_ptr + row * spans + span, mask=span < spans, other=0)
    total = tl.sum(counts, 0)
    if (tl.max(counts, 0) > HELD) | (total > PACKED):
        total = -1
    else:
        lane = tl.arange(0, PACKED)
        source = tl.zeros([PACKED], tl.int32)
        end = 0
        for each in range(spans):
            count = tl.load(counts_ptr + row * spans + each)
            source = tl.where((lane >= end) & (lane < end + count), each * HELD + lane - end, source)
            end += count
        source += row * spans * HELD
        inside = lane < total
        tl.store(packed_values_ptr + row * PACKED + lane, tl.load(values_ptr + source, mask=inside), mask=inside)
        tl.store(packed_tokens_ptr + row * PACKED + lane, tl.load(tokens_ptr + source, mask=inside), mask=inside)
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
    """How many candidates have at least this key."""
    count = tl.zeros([TILE], tl.int32)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        x = load_values(values_ptr, lane, total)
        count += ((lane < total) & (key_of(x, SHIFT) >= key)).to(tl.int32)
    return tl.sum(count, 0)


@triton.jit
def mass_above(values_ptr, total, key, top, temperature, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """Σ exp((x - top) / temperature) of the candidates with at least this key."""
    mass = tl.zeros([TILE], tl.float32)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        x = load_values(values_ptr, lane, total)
        mass += tl.where(key_of(x, SHIFT) >= key, tl.exp((x - top) / temperature), 0.0)
    return tl.sum(mass, 0)


@triton.jit
def kth_key(values_ptr, total, k, low, high, SHIFT: tl.constexpr, TILE: tl.constexpr):
    """The largest key that at least k candidates have or exceed."""
    while low < high:
        middle = (low + high + 1) >> 1
        if count_above(values_ptr, total, middle, SHIFT, TILE) >= k:
            low = middle
        else:
            high = middle - 1
    return low


@triton.jit
def winner_of(
    values_ptr, tokens_ptr, total, seed, temperature, k, p, min_p, least, highest, top, mass,
    SHIFT: tl.constexpr, SLAB: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The token that wins among a row's candidates, from the key that it needs `least` up to the `highest`."""
    if (k > 0) & (temperature > 0):
        least = kth_key(values_ptr, total, k, least, highest, SHIFT, TILE)
        mass = mass_above(values_ptr, total, least, top, temperature, SHIFT, TILE)
    if (p < 1) & (temperature > 0):
        high = highest
        while least < high:  # the smallest key with less than p of the mass strictly above it
            middle = (least + high) >> 1
            if mass_above(values_ptr, total, middle + 1, top, temperature, SHIFT, TILE) < p * mass:
                high = middle
            else:
                least = middle + 1
    winner = tl.full([], -1, tl.int32)
    best = tl.full([], -float("inf"), tl.float32)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        x = load_values(values_ptr, lane, total)
        token = token_at(tokens_ptr, lane, total)
        scaled = likelihood_of(x, top, temperature)
        kept = (lane < total) & (key_of(x, SHIFT) >= least) & ((tl.exp(scaled) >= min_p) | (x == top))
        score = scaled - tl.log(exponential(word_of(seed, token.to(tl.int64), SLAB)))
        score = tl.where(kept, tl.where(temperature > 0, score, 0.0), -float("inf"))
        largest, at = tl.max(score, 0, return_indices=True)
        best, winner = better(largest, token_at(tokens_ptr, start + at, total), best, winner)
    return winner


@triton.jit
def decide_kernel(
    logits_ptr, seeds_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, keys_ptr, stats_ptr,
    values_ptr, tokens_ptr, counts_ptr, scores_ptr, packed_values_ptr, packed_tokens_ptr, out_ptr,
    vocabulary, stride, spans,
    SHIFT: tl.constexpr, SLAB: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr,
    SPANS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    temperature, k, p = settings_of(temperature_ptr, top_k_ptr, top_p_ptr, row, vocabulary)
    top = tl.load(stats_ptr + row * 2)
    winner = tl.full([], -1, tl.int32)
    if (top == top) & (tl.abs(top) != float("inf")):
        if (k > 0) | (p < 1) | (temperature <= 0):
            seed, min_p = tl.load(seeds_ptr + row), tl.load(min_p_ptr + row).to(tl.float32)
            mass = tl.load(stats_ptr + row * 2 + 1)
            least, highest = tl.load(keys_ptr + row * 2), tl.load(keys_ptr + row * 2 + 1)
            total = pack_row(
                values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, row, spans,
                HELD, PACKED, SPANS,
            )  # fmt: skip
            if total >= 0:
                winner = winner_of(
                    packed_values_ptr + row * PACKED, packed_tokens_ptr + row * PACKED, total,
                    seed, temperature, k, p, min_p, least, highest, top, mass, SHIFT, SLAB, PACKED,
                )  # fmt: skip
            else:
                winner = winner_of(
                    logits_ptr + row * stride, None, vocabulary,
                    seed, temperature, k, p, min_p, least, highest, top, mass, SHIFT, SLAB, TILE,
                )  # fmt: skip
        else:
            span = tl.arange(0, SPANS)
            scores = tl.load(scores_ptr + row * spans + span, mask=span < spans, other=-float("inf"))
            _, at = tl.max(scores, 0, return_indices=True)
            winner = tl.load(tokens_ptr + (row * spans + at) * HELD)
    tl.store(out_ptr + row, winner.to(tl.int64))


@triton.jit
def rank_largest(
    values_ptr, tokens_ptr, total, chosen_ptr, out_values_ptr, out_indices_ptr, k, least, highest,
    SHIFT: tl.constexpr, TILE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """The k largest candidates in order: those above the k-th key, as many of its equals as fit, and a sort of just these."""
    kth = kth_key(values_ptr, total, k, least, highest, SHIFT, TILE)
    above = tl.zeros([], tl.int32)
    equal = count_above(values_ptr, total, kth + 1, SHIFT, TILE)
    for start in range(0, total, TILE):
        lane = start + tl.arange(0, TILE)
        inside = lane < total
        key = key_of(load_values(values_ptr, lane, total), SHIFT)
        higher = (inside & (key > kth)).to(tl.int32)
        same = (inside & (key == kth)).to(tl.int32)
        slot = tl.where(higher > 0, above + tl.cumsum(higher, 0), equal + tl.cumsum(same, 0)) - 1
        # Packed to sort by falling key, then rising place; places rise with tokens.
        tl.store(chosen_ptr + slot, (key << 32) + (2147483647 - lane), mask=((higher + same) > 0) & (slot < k))
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
    logits_ptr, keys_ptr, values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, chosen_ptr,
    out_values_ptr, out_indices_ptr,
    k, vocabulary, stride, spans,
    SHIFT: tl.constexpr, HELD: tl.constexpr, PACKED: tl.constexpr, TILE: tl.constexpr, SPANS: tl.constexpr,
    K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    least, highest = tl.load(keys_ptr + row * 2), tl.load(keys_ptr + row * 2 + 1)
    chosen_ptr += row * k
    out_values_ptr += row * k
    out_indices_ptr += row * k
    total = pack_row(
        values_ptr, tokens_ptr, counts_ptr, packed_values_ptr, packed_tokens_ptr, row, spans, HELD, PACKED, SPANS
    )
    if total >= 0:
        rank_largest(
            packed_values_ptr + row * PACKED, packed_tokens_ptr + row * PACKED, total, chosen_ptr, out_values_ptr,
            out_indices_ptr, k, least, highest, SHIFT, PACKED, K,
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
    token, x = load_span(logits_ptr, row, span, vocabulary, stride, SPAN)
    packed = (key_of(x, SHIFT) << 32) + (2147483647 - token)
    packed = tl.where(token < vocabulary, packed, -9223372036854775808)
    tl.store(best_ptr + row * tl.num_programs(1) + span, tl.max(packed, 0))


@triton.jit
def argmax_rows_kernel(best_ptr, out_ptr, spans, SPANS: tl.constexpr, EARLY: tl.constexpr):
    wait_for_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    span = tl.arange(0, SPANS)
    best = tl.max(tl.load(best_ptr + row * spans + span, mask=span < spans, other=-9223372036854775808), 0)
    tl.store(out_ptr + row, 2147483647 - (best & 0xFFFFFFFF))


def spans_of(logits: Tensor) -> tuple[int, dict]:
    spans = cdiv(logits.shape[1], SPAN)
    return spans, dict(SHIFT=SHIFTS[logits.dtype], SPAN=SPAN)


@implements(ops.argmax, backend="triton", invariant=True, repeat=straight_line, dtypes=NARROW)
def argmax(logits: Tensor) -> Tensor:
    source = rows_of(logits)
    rows, vocabulary = source.shape
    spans, constants = spans_of(source)
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
        **constants,
        num_warps=4,
        **begin,
    )
    launch(argmax_rows_kernel, (rows,), best, out, spans, SPANS=next_power(spans), num_warps=1, **begin)
    return out


class Candidates:
    """The survey, bound and gather of a batch of rows, and the buffers that the last step reads."""

    def __init__(self, logits: Tensor, seeds: Tensor, *settings: Tensor):
        """`settings` are temperature, top_k, top_p and min_p, all contiguous, as the seeds are."""
        rows, vocabulary = logits.shape
        self.spans, constants = spans_of(logits)
        power = next_power(self.spans)
        self.constants = dict(SHIFT=constants["SHIFT"], HELD=HELD, PACKED=PACKED, TILE=TILE, SPANS=power)
        new = lambda *shape, dtype=torch.float32: torch.empty(shape, dtype=dtype, device=logits.device)
        maxima, sums = new(rows, self.spans * GROUPS, dtype=torch.int32), new(rows, self.spans, 2)
        self.keys, self.stats = new(rows, 2, dtype=torch.int64), new(rows, 2)
        self.counts, self.scores = new(rows, self.spans, dtype=torch.int32), new(rows, self.spans)
        self.values = new(rows, self.spans, HELD, dtype=logits.dtype)
        self.tokens = new(rows, self.spans, HELD, dtype=torch.int32)
        self.packed_values = new(rows, PACKED, dtype=logits.dtype)
        self.packed_tokens = new(rows, PACKED, dtype=torch.int32)
        launch(
            survey_kernel, (rows, self.spans), logits, settings[0], maxima, sums, vocabulary, logits.stride(0),
            **constants, GROUPS=GROUPS, num_warps=4, **early(logits),
        )  # fmt: skip
        launch(
            bound_kernel, (rows,), maxima, sums, *settings, self.keys, self.stats, vocabulary, self.spans,
            SHIFT=constants["SHIFT"], GROUPS=GROUPS, SPANS=power, num_warps=4, **early(logits),
        )  # fmt: skip
        launch(
            gather_kernel, (rows, self.spans), logits, seeds, *settings, self.keys, self.stats,
            self.values, self.tokens, self.counts, self.scores, vocabulary, logits.stride(0),
            **constants, SLAB=SLAB, HELD=HELD, num_warps=4, **early(logits),
        )  # fmt: skip


@implements(ops.topk, backend="triton", dtypes=NARROW)
def topk(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    source = rows_of(logits)
    rows = source.shape[0]
    each = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype, device=logits.device)
    found = Candidates(source, each(0, torch.int64), each(1.0), each(k, torch.int32), each(1.0), each(0.0))
    shape = (*logits.shape[:-1], k)
    values = torch.empty(shape, dtype=logits.dtype, device=logits.device)
    indices = torch.empty(shape, dtype=torch.int64, device=logits.device)
    launch(
        largest_kernel, (rows,), source, found.keys, found.values, found.tokens, found.counts, found.packed_values,
        found.packed_tokens, torch.empty_like(indices), values, indices, k, source.shape[1], source.stride(0), found.spans,
        **found.constants, K=next_power(k), num_warps=8,
    )  # fmt: skip
    return values, indices


@implements(ops.sample, backend="triton", repeat=straight_line, dtypes=NARROW)
def sample(logits: Tensor, seeds: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    source = rows_of(logits)
    rows, vocabulary = source.shape
    seeds, *settings = (value.contiguous() for value in (seeds, temperature, top_k, top_p, min_p))
    found = Candidates(source, seeds, *settings)
    out = torch.empty((rows,), dtype=torch.int64, device=logits.device)
    launch(
        decide_kernel, (rows,), source, seeds, *settings, found.keys, found.stats, found.values, found.tokens, found.counts,
        found.scores, found.packed_values, found.packed_tokens, out, vocabulary, source.stride(0), found.spans,
        **found.constants, SLAB=SLAB, num_warps=8, **early(logits),
    )  # fmt: skip
    return out
