"""Routing in one launch: some tokens to a program, each with the scores of all its experts in registers.

    logits → scores → + bias → groups that stay open → k times: the largest, its number, its score; then weights

What is taken is closed, so that the next round finds the next largest; the first of equals wins, as its number is smaller.
A NaN counts as largest, as in a sort.

Backward, a chosen score has the gradient of its weight, less what the others lose as all are divided by their sum, and then
there is the softmax or the sigmoid.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line
from tilestack.kernels.tiles import cdiv, next_power, rows_of, wide, widened
from tilestack.ops.routing import NOT_ZERO, ranks_by_logits

TILE = 1024  # scores of a program
MOST_EXPERTS = 1024
NEVER = tl.constexpr(float("-inf"))
EPSILON = tl.constexpr(NOT_ZERO)


@triton.jit
def largest_open(key, open, number, COUNT: tl.constexpr):
    """The number of each row's largest open key, the first of equals; -inf is one like others."""
    best = tl.max(tl.where(open, key, NEVER), 1, keep_dims=True)
    return tl.min(tl.where(open & (key == best), number, COUNT), 1, keep_dims=True)


@triton.jit
def open_experts(key, COUNTED: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """Whether the group of each expert is among the best; groups and what they hold are powers of two."""
    ROWS: tl.constexpr = key.shape[0]
    EXPERTS: tl.constexpr = key.shape[1]
    SIZE: tl.constexpr = EXPERTS // GROUPS
    grouped = tl.reshape(key, [ROWS, GROUPS, SIZE])
    quality = tl.max(grouped, 2)
    if COUNTED == 2 and SIZE > 1:
        member = tl.arange(0, SIZE)[None, None, :]
        first = tl.min(tl.where(grouped == quality[:, :, None], member, SIZE), 2)
        quality += tl.max(tl.where(member == first[:, :, None], NEVER, grouped), 2)
    group = tl.arange(0, GROUPS)[None, :]
    closed = group >= 0
    for _ in tl.static_range(TOP_GROUPS):
        closed = closed & (group != largest_open(quality, closed, group, GROUPS))
    spread = tl.broadcast_to(closed.to(tl.int32)[:, :, None], [ROWS, GROUPS, SIZE])
    return tl.reshape(spread, [ROWS, EXPERTS]) == 0


@triton.jit
def route_fwd_kernel(
    logits_ptr, bias_ptr, chosen_ptr, weights_ptr, scores_ptr,  # [T, E], [E] or None, [T, K] twice, [T, E]
    tokens, experts, stride, scale,
    SIGMOID: tl.constexpr, BY_LOGITS: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, K: tl.constexpr, COPIES: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    there = (token < tokens) & (expert < experts)
    x = wide(tl.load(logits_ptr + token * stride + expert, mask=there, other=0))
    x = tl.where(expert < experts, x, NEVER)
    if SIGMOID:
        scores = 1 / (1 + tl.exp(-x))
    else:
        powers = tl.exp(x - tl.max(x, 1, keep_dims=True))
        scores = powers / tl.sum(powers, 1, keep_dims=True)
    tl.store(scores_ptr + token * experts + expert, scores, mask=there)
    key = x if BY_LOGITS else scores
    if bias_ptr is not None:
        key += tl.load(bias_ptr + expert, mask=expert < experts, other=0).to(key.dtype)
    key = tl.where(key == key, key, float("inf"))
    open = tl.broadcast_to(expert < experts, [ROWS, EXPERTS])
    if GROUPS > 1:
        open = open_experts(key, 2 if SIGMOID else 1, GROUPS, TOP_GROUPS)
    copy = tl.arange(0, COPIES)[None, :]
    chosen = tl.zeros([ROWS, COPIES], tl.int32)
    weights = tl.zeros([ROWS, COPIES], scores.dtype)
    for turn in tl.static_range(K):
        found = largest_open(key, open, expert, EXPERTS)
        chosen = tl.where(copy == turn, found, chosen)
        weights = tl.where(copy == turn, tl.sum(tl.where(expert == found, scores, 0), 1, keep_dims=True), weights)
        open = open & (expert != found)
    if NORMALISE:
        weights = weights / (tl.sum(weights, 1, keep_dims=True) + EPSILON)
    inside = (token < tokens) & (copy < K)
    tl.store(chosen_ptr + token * K + copy, chosen.to(tl.int64), mask=inside)
    tl.store(weights_ptr + token * K + copy, weights * scale, mask=inside)


@triton.jit
def route_bwd_kernel(
    grad_weights_ptr, grad_scores_ptr, chosen_ptr, weights_ptr, scores_ptr, dlogits_ptr,
    tokens, experts, scale,
    SIGMOID: tl.constexpr, NORMALISE: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    expert = tl.arange(0, EXPERTS)[None, :]
    there = (token < tokens) & (expert < experts)
    scores = tl.load(scores_ptr + token * experts + expert, mask=there, other=0)
    grad = tl.load(grad_scores_ptr + token * experts + expert, mask=there, other=0)
    total = tl.zeros([ROWS, 1], scores.dtype)
    lost = tl.zeros([ROWS, 1], scores.dtype)
    if NORMALISE:
        for turn in tl.static_range(K):
            place = token * K + turn
            found = tl.load(chosen_ptr + place, mask=token < tokens, other=0)
            total += tl.sum(tl.where(expert == found, scores, 0), 1, keep_dims=True)
            arriving = tl.load(grad_weights_ptr + place, mask=token < tokens, other=0)
            lost += arriving * tl.load(weights_ptr + place, mask=token < tokens, other=0)
        total += EPSILON
    for turn in tl.static_range(K):
        place = token * K + turn
        found = tl.load(chosen_ptr + place, mask=token < tokens, other=0)
        own = tl.load(grad_weights_ptr + place, mask=token < tokens, other=0) * scale
        own = (own - lost) / total if NORMALISE else own
        grad += tl.where(expert == found, own, 0)
    if SIGMOID:
        dlogits = grad * scores * (1 - scores)
    else:
        dlogits = scores * (grad - tl.sum(grad * scores, 1, keep_dims=True))
    tl.store(dlogits_ptr + token * experts + expert, dlogits.to(dlogits_ptr.dtype.element_ty), mask=there)


def takes(logits: Tensor, k: int, groups: int) -> bool | str:
    experts = logits.shape[1]
    if experts > MOST_EXPERTS:
        return f"it takes {MOST_EXPERTS} experts and fewer, not {experts}"
    even = groups == 1 or (experts == next_power(experts) and groups == next_power(groups))
    return even or f"it takes groups of powers of two, not {groups} of {experts} experts"


def tile_of_tokens(experts: int) -> dict[str, int]:
    width = next_power(experts)
    return dict(ROWS=max(1, TILE // width), EXPERTS=width, num_warps=4)


def backward(
    grad_weights: Tensor, grad_scores: Tensor, logits: Tensor, k: int, scoring: str, normalise: bool, scale: float,
    chosen: Tensor, weights: Tensor, scores: Tensor,
) -> tuple[Tensor, None]:  # fmt: skip
    tokens, experts = logits.shape
    dlogits = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    tile = tile_of_tokens(experts)
    launch(
        route_bwd_kernel, (cdiv(tokens, tile["ROWS"]),), grad_weights.contiguous(), grad_scores.contiguous(),
        chosen.contiguous(), weights.contiguous(), scores.contiguous(), dlogits, tokens, experts, scale,
        SIGMOID=scoring == "sigmoid", NORMALISE=normalise, K=k, **tile,
    )  # fmt: skip
    return dlogits, None


@implements(ops.route, backend="triton", repeat=straight_line, backward=backward, when=takes)
def route(
    logits: Tensor, bias: Tensor | None, k: int, scoring: str, normalise: bool, scale: float, groups: int,
    top_groups: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    logits, (tokens, experts) = rows_of(logits), logits.shape
    empty = lambda columns, dtype: torch.empty((tokens, columns), dtype=dtype, device=logits.device)
    chosen, weights, scores = (
        empty(*of) for of in ((k, torch.int64), *((n, widened(logits.dtype)) for n in (k, experts)))
    )
    tile = tile_of_tokens(experts)
    launch(
        route_fwd_kernel, (cdiv(tokens, tile["ROWS"]),), logits, None if bias is None else bias.contiguous(),
        chosen, weights, scores, tokens, experts, logits.stride(0), scale,
        SIGMOID=scoring == "sigmoid", BY_LOGITS=ranks_by_logits(bias, scoring, groups), NORMALISE=normalise,
        GROUPS=groups, TOP_GROUPS=top_groups, K=k, COPIES=next_power(k), **tile,
    )  # fmt: skip
    return chosen, weights, scores
