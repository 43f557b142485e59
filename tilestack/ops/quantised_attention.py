"""Attention of codes, for inference: queries and keys in 8 bits, values in their own dtype or in 8 bits too. No gradients.

    codes of q, one scale for each query and head          k - its mean over the tokens, one scale for each block of keys and head
    scores = (codes of q · codes of k) · both scales · scale          out = softmax(scores) v

The mean is that of a head over all tokens of its row. Real keys have channels that stand far from zero in every token, and a
scale that reaches them leaves few codes for what tells keys apart. Taking the mean away takes the same number off all
scores of a query, and softmax does not see that.

Codes are the same bits whoever makes them: sums of keys are in float64, in which halves add up without loss, what follows is
float32, and quotients are rounded correctly. Products of integers add up exactly, so that an oracle in float64 has the same
integers. Its e4m3 codes stay unrounded, as everywhere: tensor cores keep few bits of their sums, and of weights an exponential
decides on which side of a rounding they fall.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import operator
from tilestack.ops.attention import (
    attention_cost,
    attention_key,
    attention_mask,
    attention_takes,
    documents_cover_rows,
    grouped,
    scale_or_usual,
    ungrouped,
)
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import quantised

BLOCK = 128  # keys that share a scale
E4M3 = torch.float8_e4m3fn
LOG2_TOP = 8  # of a row's largest weight, at most, where weights have 8 bits: e4m3 has no larger power of two
LOG2_E = 1.4426950408889634
MOST_DIM = 2**24 // 127**2  # products of codes whose sum float32 holds exactly
VALUES = ("same", "fp8")


def codes_take(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float | None
) -> bool | str:
    if (reason := attention_takes(q, k, v, cu_seqlens, causal, None, None)) is not True:
        return reason
    if not k.shape[1] or not 0 < q.shape[3] <= MOST_DIM:
        return f"it needs a key and heads of 1 to {MOST_DIM} dimensions, but k is {tuple(k.shape)}"
    return scale is None or scale > 0 or f"scale must be positive, or None, not {scale}"


def codes_and_values_take(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float | None, values: str
) -> bool | str:
    if values not in VALUES:
        return f"values must be {' or '.join(map(repr, VALUES))}, not {values!r}"
    return codes_take(q, k, v, cu_seqlens, causal, scale)


def mean_key(k: Tensor) -> Tensor:
    """[batch, 1, kv_heads, dim], float32."""
    return k.double().mean(1, keepdim=True).float()


def numbers_to_code(x: Tensor, codes: torch.dtype) -> Tensor:
    """What codes are made of: float32 for integers, whatever the dtype, else as in every definition."""
    return x.float() if codes == torch.int8 else wide(x)


def codes_of_blocks(x: Tensor, codes: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes [batch, keys, kv_heads, dim], scale [batch, keys, kv_heads]), blocks of keys having one scale."""
    keys, blocks = x.shape[1], -(-x.shape[1] // BLOCK)
    rows = F.pad(x, (0, 0, 0, 0, 0, blocks * BLOCK - keys)).unflatten(1, (blocks, BLOCK)).transpose(2, 3)
    made, scale = quantised(rows.flatten(3), codes)
    return (
        made.unflatten(3, rows.shape[3:]).transpose(2, 3).flatten(1, 2)[:, :keys],
        scale.repeat_interleave(BLOCK, 1)[:, :keys],
    )


def scores_of_codes(
    q: Tensor,
    k: Tensor,
    middle: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    codes: torch.dtype,
) -> Tensor:
    """[batch, kv_heads, group · queries, keys], -inf where a key is not seen; `middle` is what is taken off every key."""
    precise = wide(q).dtype
    q_codes, q_scale = quantised(numbers_to_code(q, codes), codes)
    k_codes, k_scale = codes_of_blocks(numbers_to_code(k, codes) - middle, codes)
    sums = grouped(q_codes.to(precise), k) @ k_codes.to(precise).permute(0, 2, 3, 1)
    factor = grouped(q_scale.to(precise)[..., None] * scale_or_usual(scale, q), k)
    scores = sums * (factor * k_scale.to(precise).transpose(1, 2)[:, :, None])
    seen = attention_mask(q, k, cu_seqlens, causal, None)
    if seen is None:
        return scores
    by_query = scores.unflatten(2, (q.shape[2] // k.shape[2], q.shape[1]))
    return torch.where(seen[:, None, None], by_query, -torch.inf).flatten(2, 3)


def mean_of_values(scores: Tensor, v: Tensor, values: str) -> Tensor:
    """softmax(scores) v, [batch, kv_heads, group · queries, dim of v].

    With values of 8 bits, v has a scale for each channel and head of a row, and weights are rounded to 8 bits relative to a
    power of two: however far an online softmax has come, they are then the same codes.
    """
    sees_none = scores.amax(-1, keepdim=True) == -torch.inf  # a query before the first key gets zeros
    scores = scores.masked_fill(sees_none, 0)
    if values == "same":
        return (torch.softmax(scores, -1) @ wide(v).transpose(1, 2)).masked_fill(sees_none, 0)
    powers = scores * LOG2_E
    weights = torch.exp2(powers - (powers.amax(-1, keepdim=True).ceil() - LOG2_TOP))
    v_codes, v_scale = quantised(wide(v).permute(0, 2, 3, 1), E4M3)
    in_8_bits = weights if weights.dtype == torch.float64 else weights.to(E4M3).to(weights.dtype)
    sums = in_8_bits @ v_codes.to(weights.dtype).mT
    return (sums * (v_scale[:, :, None].to(weights.dtype) / weights.sum(-1, keepdim=True))).masked_fill(sees_none, 0)


def refuse_gradient(name: str, *tensors: Tensor) -> None:
    """Raise where a gradient is wanted: that of a rounding is zero, and nobody would notice."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
        raise RuntimeError(f"{name} has no gradient; call it under torch.no_grad(), or attention, which has one")


def attention_of_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    middle: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    codes: torch.dtype,
    values: str,
) -> Tensor:
    out = mean_of_values(scores_of_codes(q, k, middle, cu_seqlens, causal, scale, codes), v, values)
    return ungrouped(out, q).to(q.dtype).clone(memory_format=torch.contiguous_format)


def with_far_channels(make, batch, queries, keys, heads, kv_heads, dim, value_dim, rule, **options):
    """Queries, keys and values as models have them: channels of keys stand away from zero in all tokens, one in eight by
    several times as much as tokens differ."""
    away = make.normal(batch, 1, kv_heads, dim, dtype=torch.float32)
    far = 1 + 7 * (torch.arange(dim, device=make.device) % 8 == 3)
    k = make.normal(batch, keys, kv_heads, dim, dtype=torch.float32) + away * far
    made: dict[str, Any] = dict(
        q=make.normal(batch, queries, heads, dim),
        k=k.to(make.dtype),
        v=make.normal(batch, keys, kv_heads, value_dim),
        **options,
    )
    if rule == "documents":
        # In each row a short and a long document and two of one length; then empty ones, as padding leaves them.
        parts = (0, queries // 5, queries // 2, 3 * queries // 4)
        ends = [row * queries + part for row in range(batch) for part in parts] + 3 * [batch * queries]
        made["cu_seqlens"] = torch.tensor(ends, dtype=torch.int32, device=make.device)
    return made | dict(causal=rule != "full") | (dict(scale=0.3) if rule == "scaled" else {})


def int8_case(make, batch, queries, keys, heads, kv_heads, dim, value_dim, rule, values="same"):
    return with_far_channels(make, batch, queries, keys, heads, kv_heads, dim, value_dim, rule, values=values)


CHECKS = [  # batch, queries, keys, heads, kv_heads, dim, dim of v, what is seen
    (1, 1, 1, 1, 1, 8, 8, "causal"),
    (2, 9, 9, 4, 2, 16, 16, "causal"),
    (1, 33, 33, 1, 1, 8, 8, "full"),
    (2, 1, 13, 2, 1, 16, 16, "causal"),
    (1, 3, 12, 2, 2, 40, 24, "scaled"),
    (1, 12, 3, 1, 1, 8, 8, "full"),
    (2, 10, 10, 2, 1, 16, 16, "documents"),
    (1, 3, 3, 1, 1, 80, 80, "full"),
    (1, 3, 5, 1, 1, 192, 128, "causal"),
    (1, 2, 3, 1, 1, 264, 8, "full"),
    (0, 4, 4, 2, 1, 8, 8, "causal"),
    (1, 300, 300, 1, 1, 16, 16, "causal"),  # several tiles and blocks, and a rest
    (1, 150, 280, 1, 1, 16, 16, "full"),
    (1, 290, 290, 2, 1, 8, 8, "documents"),
    (1, 140, 3, 2, 1, 8, 8, "causal"),  # the first queries see nothing
]
ON_GPU = [
    (2, 300, 300, 4, 2, 128, 128, "causal"),
    (1, 384, 384, 2, 2, 128, 128, "full"),
    (2, 300, 300, 4, 2, 64, 64, "causal"),
    (1, 256, 512, 2, 2, 64, 64, "causal"),
    (1, 129, 129, 3, 1, 64, 64, "full"),
    (2, 70, 300, 2, 1, 128, 128, "causal"),
    (1, 100, 70, 2, 1, 128, 128, "full"),
    (1, 130, 130, 2, 1, 96, 96, "causal"),
    (1, 1, 300, 8, 1, 128, 128, "causal"),
    (1, 190, 250, 2, 2, 192, 128, "causal"),
    (1, 170, 170, 2, 1, 256, 256, "scaled"),
    (2, 300, 300, 4, 2, 64, 64, "documents"),
    (2, 670, 670, 2, 1, 128, 128, "documents"),
    (1, 2100, 2100, 2, 1, 128, 128, "causal"),  # tops that rise, and parts of a mean
    (2, 300, 70, 2, 1, 64, 64, "causal"),  # the first queries see nothing
]
BENCHES = [
    (1, 16384, 16384, 32, 8, 128, 128, "causal"),
    (1, 16384, 16384, 32, 8, 128, 128, "full"),
    (4, 4096, 4096, 32, 32, 128, 128, "causal"),
]


def codes_cost(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool):
    return attention_cost(q, k, v, cu_seqlens, causal, None)


def fp8_key(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool) -> tuple[int | str, ...]:
    return attention_key(q, k, cu_seqlens, causal, None, None)


def int8_key(q: Tensor, k: Tensor, cu_seqlens: Tensor | None, causal: bool, values: str) -> tuple[int | str, ...]:
    return *fp8_key(q, k, cu_seqlens, causal), "" if values == "same" else values


@operator(
    cases=cases(
        int8_case,
        check=[*CHECKS, (1, 9, 9, 2, 1, 16, 16, "causal", "fp8")],
        gpu=[*ON_GPU, *((*size, "fp8") for size in ON_GPU[::2])],
        bench=[(*size, values) for size in BENCHES for values in VALUES],
    ),
    cost=codes_cost,
    check=codes_and_values_take,
    check_values=documents_cover_rows,
    tuning_key=int8_key,
)
def attention_int8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    values: str = "same",
) -> Tensor:
    """`attention` of int8 codes of q and of k, less its mean: sums of their products are exact, the softmax is in float32.

    q has a scale for each query and head, k one for each 128 keys of a head. Values and their weights stay in their own
    dtype, or with `values="fp8"` are float8_e4m3fn codes, v with a scale for each channel of a head. Codes are made of whole
    rows, documents together. Arguments are those of `attention`; `scale` is positive.
    """
    refuse_gradient("attention_int8", q, k, v)
    return attention_of_codes(q, k, v, mean_key(k), cu_seqlens, causal, scale, torch.int8, values)


@operator(
    cases=cases(with_far_channels, check=CHECKS, gpu=ON_GPU, bench=BENCHES),
    cost=codes_cost,
    check=codes_take,
    check_values=documents_cover_rows,
    tuning_key=fp8_key,
)
def attention_fp8(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """`attention_int8` with float8_e4m3fn codes of q and k, and of the values and their weights."""
    refuse_gradient("attention_fp8", q, k, v)
    return attention_of_codes(q, k, v, mean_key(k), cu_seqlens, causal, scale, E4M3, "fp8")
