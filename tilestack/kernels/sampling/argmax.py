"""`argmax`: the best of each span, then the best of those; key and token in one number, so that one maximum finds both."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.early import early, wait_for_last
from tilestack.kernels.sampling.keys import NARROW, SHIFTS, SPAN, key_of, load_logits
from tilestack.kernels.tiles import cdiv, next_power, rows_of


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
