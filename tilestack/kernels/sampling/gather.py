"""The third step: the tokens that reach the bound, span by span."""

import triton
import triton.language as tl

from tilestack.kernels.early import wait_for_last
from tilestack.kernels.sampling.keys import load_logits
from tilestack.kernels.sampling.settings import settings_of

PIECE = 1024  # logits of a span that are gathered together, or not at all
HELD = 512  # candidates of a span that there is room for


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
