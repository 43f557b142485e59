"""Where packed documents begin and end, for every token: found in a kernel, so that nothing waits for the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.tiles import cdiv


@triton.jit
def document_bounds_kernel(cu_ptr, bounds_ptr, tokens, documents, length, BLOCK: tl.constexpr):
    """For every token, the first token of its document and the one after its last, counted from the start of its row."""
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = token < tokens
    low = tl.zeros([BLOCK], tl.int32)
    high = low + documents
    steps = documents
    while steps > 0:  # the last of the offsets that is not behind the token
        middle = (low + high + 1) // 2
        before = tl.load(cu_ptr + middle, mask=inside, other=0) <= token
        low = tl.where(before, middle, low)
        high = tl.where(before, high, middle - 1)
        steps = steps // 2
    row = token // length * length
    tl.store(bounds_ptr + 2 * token, (tl.load(cu_ptr + low, mask=inside, other=0) - row).to(tl.int32), mask=inside)
    end = tl.load(cu_ptr + tl.minimum(low + 1, documents), mask=inside, other=0)
    tl.store(bounds_ptr + 2 * token + 1, (end - row).to(tl.int32), mask=inside)


def document_bounds(cu_seqlens: Tensor | None, batch: int, length: int) -> Tensor | None:
    """[batch, length, 2], int32; None without documents."""
    if cu_seqlens is None:
        return None
    bounds = torch.empty((batch, length, 2), dtype=torch.int32, device=cu_seqlens.device)
    tokens, documents = batch * length, cu_seqlens.shape[0] - 1
    launch(
        document_bounds_kernel,
        (cdiv(tokens, 128),),
        cu_seqlens.contiguous(),
        bounds,
        tokens,
        documents,
        length,
        BLOCK=128,
    )
    return bounds


@triton.jit
def document_of(bounds_ptr, at, there):
    """(first token, token after the last) of the documents of some tokens."""
    start = tl.load(bounds_ptr + 2 * at, mask=there, other=2147483647)
    end = tl.load(bounds_ptr + 2 * at + 1, mask=there, other=0)
    return start, end
