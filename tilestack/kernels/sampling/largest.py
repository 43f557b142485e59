"""The last step of `topk`: the k largest of the candidates, in order."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.kernels.sampling.candidates import Candidates
from tilestack.kernels.sampling.keys import NARROW, key_of
from tilestack.kernels.sampling.search import count_above, kth_key, load_values, pack_row, token_at
from tilestack.kernels.tiles import next_power, rows_of


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
