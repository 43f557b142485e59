"""The last step of `sample`: exact thresholds by bisection over the candidates, then the token that wins."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.early import early, wait_for_last
from tilestack.kernels.sampling.candidates import Candidates
from tilestack.kernels.sampling.keys import NARROW, between, key_of
from tilestack.kernels.sampling.noise import LOG2_E, log2_exponential, word_of
from tilestack.kernels.sampling.search import kth_key, load_values, pack_row, token_at
from tilestack.kernels.sampling.settings import settings_of
from tilestack.kernels.tiles import rows_of
from tilestack.ops.random import SLAB


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
def better(score, token, best, winner):
    """The larger of two scores with its token, the first where they are equal."""
    wins = score > best
    return tl.where(wins, score, best), tl.where(wins, token, winner)


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
