"""PyTorch's own attention as the backend `aten`.

Whole rows go to `scaled_dot_product_attention`, which runs cuDNN or FlashAttention on CUDA. Documents, windows and
queries at the end of longer keys have their flash kernel too, the one for sequences of varying length, which takes
half precision on CUDA; elsewhere they become a mask. These kernels read 16 bytes at a time and do not look where a tensor
starts, so what lies crooked is copied first. Fused kernels make a gradient's weights from rounded sums: where
scores are large, float32 loses half its digits that way, and the CPU's kernel also loses a NaN. So outside of half
precision on CUDA, PyTorch is told to take its plain one, and on the CPU long causal rows are cut into blocks of queries.
"""

import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilestack import ops
from tilestack.contract import AUTOGRAD, implements
from tilestack.kernels.attention.before_keys import before_first_key, behind_zeros
from tilestack.kernels.attention.one_order import backward_in_one_order, in_one_order
from tilestack.ops.attention import attention_mask, grouped, scale_or_usual, ungrouped
from tilestack.ops.numerics import wide

HALVES = (torch.float16, torch.bfloat16)
BLOCK = 128  # queries at a time on the CPU


@functools.cache
def varying_lengths() -> tuple[Callable, dict[str, bool]] | None:
    """PyTorch's attention over sequences of varying length, and what it wants said to take grouped heads."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    named = inspect.signature(varlen_attn).parameters
    return (varlen_attn, dict(enable_gqa=True) if "enable_gqa" in named else {}) if "window_size" in named else None


def has_flash(q: Tensor, v: Tensor) -> bool:
    """Whether FlashAttention takes these heads, as far as PyTorch brings it."""
    return (
        q.device.type == "cuda"
        and q.dtype in HALVES
        and q.shape[3] == v.shape[3] <= 256
        and q.shape[3] % 8 == 0
        and q.numel() > 0
    )


def window_is_lost(queries: int, keys: int, causal: bool, window: int | None) -> bool:
    """Whether FlashAttention would let all queries see all keys: it takes a window wider than the keys for none, though
    queries that come long before the first key have none of them in it."""
    return window is not None and not causal and window > keys < queries


def flash(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, window: int | None, scale: float | None
) -> Tensor:
    batch, queries, keys = *q.shape[:2], k.shape[1]
    ends = lambda length: torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=q.device)
    of_queries = ends(queries) if cu_seqlens is None else cu_seqlens.int().contiguous()
    of_keys = ends(keys) if cu_seqlens is None else of_queries
    reach = -1 if window is None else window - 1
    function, grouping = varying_lengths() or (None, {})
    assert function is not None
    with in_one_order():
        out = function(
            *(x.flatten(0, 1) for x in (q, k, v)),
            of_queries,
            of_keys,
            queries,
            keys,
            scale=scale,
            window_size=(reach, 0 if causal else reach),
            **grouping,
        )
    return backward_in_one_order(out).unflatten(0, (batch, queries))


def straight(x: Tensor) -> Tensor:
    """x itself where its rows are dense and start on 16 bytes, else a copy."""
    step = 16 // x.element_size()
    places = (x.storage_offset(), *(stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1))
    dense = x.stride(-1) == 1 and not any(place % step for place in places)
    return x if dense or not x.is_cuda else x.clone(memory_format=torch.contiguous_format)


class StraightGradient(torch.autograd.Function):
    """Nothing to the result; the gradient that arrives at it goes on straight."""

    @staticmethod
    def forward(ctx, out):
        return out.view_as(out)

    @staticmethod
    def backward(ctx, grad):
        return straight(grad)


def in_blocks(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal attention over whole rows, some queries at a time and only over the keys up to them: half of the scores."""
    scale = scale_or_usual(scale, q)
    keys, values = wide(k).permute(0, 2, 3, 1), wide(v).transpose(1, 2)
    blocks = []
    for start in range(0, q.shape[1], BLOCK):
        part = q[:, start : start + BLOCK]
        length, end = part.shape[1], start + part.shape[1]
        after = torch.full((length, end), -torch.inf, dtype=keys.dtype).triu(start + 1)
        scores = grouped(part, k) * scale @ keys[..., :end]  # [batch, kv_heads, group · length, end]
        scores.unflatten(2, (-1, length)).add_(after)
        blocks.append(ungrouped(torch.softmax(scores, -1) @ values[:, :, :end], part).to(q.dtype))
    return torch.cat(blocks, 1)


def trusted_kernels(q: Tensor, fused: bool) -> AbstractContextManager:
    """Where PyTorch is to be deterministic, of its fused kernels only FlashAttention is."""
    half_on_cuda = q.device.type == "cuda" and q.dtype in HALVES and q.numel() > 0  # cuDNN answers nothing with None
    repeats = fused or not torch.are_deterministic_algorithms_enabled()
    return nullcontext() if half_on_cuda and repeats else sdpa_kernel(SDPBackend.MATH)


def of_one_width(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Heads with zeros behind the narrower ones, as FlashAttention takes them; scores and the first results stay."""
    width = max(q.shape[3], v.shape[3])
    padded = lambda x: x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))
    return padded(q), padded(k), padded(v)


@implements(
    ops.attention,
    backend="aten",
    backward=AUTOGRAD,
    when=lambda softcap: softcap is None or "PyTorch's own attention has no softcap",
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    queries, keys = q.shape[1], k.shape[1]
    if first := before_first_key(q, k, causal):
        return behind_zeros(attention(q[:, first:], k, v, cu_seqlens, causal, window, scale, softcap), first)
    q, k, v = straight(q), straight(k), straight(v)
    in_one_piece = cu_seqlens is None and window is None and (not causal or queries in (1, keys))
    lost = window_is_lost(queries, keys, causal, window)
    if not in_one_piece and not lost and has_flash(q, v) and varying_lengths():
        out = flash(q, k, v, cu_seqlens, causal, window, scale)
    elif in_one_piece and causal and queries > BLOCK and q.device.type == "cpu":
        out = in_blocks(q, k, v, scale)
    else:
        mask = None if in_one_piece else attention_mask(q, k, cu_seqlens, causal, window)
        if q.dtype not in HALVES:  # the plain one would round queries and keys, times the root of the scale each
            q, scale = q * scale_or_usual(scale, q), 1.0
        width = v.shape[3]
        if mask is None and q.dtype in HALVES and q.shape[3] != width and torch.are_deterministic_algorithms_enabled():
            scale = scale_or_usual(scale, q)
            q, k, v = of_one_width(q, k, v)
        fused = mask is None and has_flash(q, v)
        with (
            sdpa_kernel(SDPBackend.MATH) if lost else trusted_kernels(q, fused),
            in_one_order() if fused else nullcontext(),
        ):
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2),
                k.transpose(1, 2),
                v.transpose(1, 2),
                attn_mask=None if mask is None else mask[:, None],
                is_causal=causal and in_one_piece and queries > 1,
                scale=scale,
                enable_gqa=q.shape[2] != k.shape[2],
            )
        out = (backward_in_one_order(out) if fused else out).transpose(1, 2)
        out = out if out.shape[3] == width else out[..., :width].contiguous()
    return StraightGradient.apply(out) if out.is_cuda and out.requires_grad else out
