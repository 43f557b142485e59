"""Rotary position embedding: queries and keys turned by an angle that grows with their position.

Pair i of a head's first 2·F elements is turned by position · frequency[i]; the rest passes through. `frequencies` gives
the frequencies, `tables` the cosines and sines of every position that the operators look up.
"""

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.lookup import rows_named, rows_or_nan
from tilestack.ops.numerics import wide


def frequencies(
    head_dim: int, base: float = 10000.0, scaling: dict[str, Any] | None = None, sequence_length: int | None = None
) -> tuple[Tensor, float]:
    """(the angle per position of each pair, the factor on cosines and sines) for a rotary dimension of `head_dim`.

    `scaling` stretches a model beyond the length it was trained on, in the words of a Hugging Face config: `rope_type`
    is default, linear, dynamic (NTK; wants `sequence_length` and `max_position_embeddings`), yarn, llama3 or longrope
    (wants them too), and `factor` says how far.
    """
    scaling = scaling or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    if kind == "dynamic":
        trained = scaling["max_position_embeddings"]
        stretch = scaling["factor"] * max(sequence_length or 0, trained) / trained - (scaling["factor"] - 1)
        base = base * stretch ** (head_dim / (head_dim - 2))
    plain = 1.0 / base**exponents
    if kind in ("default", "dynamic"):
        return plain, 1.0
    if kind == "linear":
        return plain / scaling["factor"], 1.0
    if kind == "yarn":
        return yarn(plain, head_dim, base, scaling)
    if kind == "llama3":
        return llama3(plain, scaling), 1.0
    if kind == "longrope":
        return longrope(plain, scaling, sequence_length or 0)
    raise ValueError(f"rope_type must be default, linear, dynamic, yarn, llama3 or longrope, not {kind!r}")


def yarn(plain: Tensor, head_dim: int, base: float, scaling: dict[str, Any]) -> tuple[Tensor, float]:
    """Pairs that turn often within the trained length keep their frequency, slow ones are stretched, a ramp between."""
    factor, trained = scaling["factor"], scaling["original_max_position_embeddings"]

    def pair_turning(times: float) -> float:
        return head_dim * math.log(trained / (times * 2 * math.pi)) / (2 * math.log(base))

    def temperature(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    first, last = pair_turning(scaling.get("beta_fast") or 32), pair_turning(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2) - first) / (last - first or 0.001)).clamp(0, 1)
    scale = scaling.get("attention_factor")
    if scale is None:
        both = scaling.get("mscale"), scaling.get("mscale_all_dim")
        scale = temperature(both[0]) / temperature(both[1]) if both[0] and both[1] else temperature()
    return plain / factor * ramp + plain * (1 - ramp), scale


def llama3(plain: Tensor, scaling: dict[str, Any]) -> Tensor:
    """Wavelengths past the trained length over `low_freq_factor` are stretched, short ones kept, a blend between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - kept) * plain / factor + kept * plain


def longrope(plain: Tensor, scaling: dict[str, Any], sequence_length: int) -> tuple[Tensor, float]:
    """Every pair has a factor of its own, and another one in texts longer than those it was trained on."""
    trained = scaling["original_max_position_embeddings"]
    factors = torch.tensor(scaling["long_factor" if sequence_length > trained else "short_factor"])
    scale, factor = scaling.get("attention_factor"), scaling.get("factor")
    if scale is None:
        factor = scaling["max_position_embeddings"] / trained if factor is None else factor
        scale = math.sqrt(1 + math.log(factor) / math.log(trained)) if factor > 1 else 1.0
    return plain / factors.float(), scale


def tables(
    frequency: Tensor, positions: int, scale: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Cosines and sines, [positions, pairs], of the positions 0, 1, …"""
    angles = torch.arange(positions, device=frequency.device, dtype=torch.float32)[:, None] * frequency
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def angles_at(table: Tensor, positions: Tensor | None, x: Tensor) -> Tensor:
    """The table's rows for every token of x, [batch or 1, sequence, 1, pairs]; tables are constants and get no gradient."""
    rows = table[: x.shape[1]] if positions is None else rows_or_nan(table, positions)
    return wide((rows if rows.ndim == 3 else rows[None])[:, :, None].detach()).to(wide(x).dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x, [batch, sequence, heads, head_dim], turned by angles for each token, in the precision of the angles."""
    pairs = cos.shape[-1]
    turning, passing = x[..., : 2 * pairs].to(cos.dtype), x[..., 2 * pairs :].to(cos.dtype)
    pair_shape, pair_axis = ((pairs, 2), -1) if interleaved else ((2, pairs), -2)
    first, second = turning.unflatten(-1, pair_shape).unbind(pair_axis)
    turned = torch.stack((first * cos - second * sin, second * cos + first * sin), pair_axis).flatten(-2)
    return torch.cat((turned, passing), -1) if passing.shape[-1] else turned


def rope_takes(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> bool | str:
    if q.ndim != 4 or k.ndim != 4 or q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or q.dtype != k.dtype:
        return (
            "q and k must be [batch, sequence, heads, head_dim] of one dtype, differing in heads alone, "
            f"but q is {q.dtype} {tuple(q.shape)} and k is {k.dtype} {tuple(k.shape)}"
        )
    if cos.ndim != 2 or cos.shape != sin.shape or cos.dtype != sin.dtype or 2 * cos.shape[1] > q.shape[3]:
        return (
            f"cos and sin must be alike, [positions, pairs] with at most {q.shape[3] // 2} pairs for heads of "
            f"{q.shape[3]}, but cos is {cos.dtype} {tuple(cos.shape)} and sin is {sin.dtype} {tuple(sin.shape)}"
        )
    if positions is None:
        return q.shape[1] <= cos.shape[0] or f"cos has {cos.shape[0]} positions, too few for a sequence of {q.shape[1]}"
    if positions.dtype not in (torch.int32, torch.int64) or positions.shape not in (q.shape[:2], q.shape[1:2]):
        return (
            f"positions must be integers of shape {tuple(q.shape[:2])} or {tuple(q.shape[1:2])}, "
            f"not {positions.dtype} {tuple(positions.shape)}"
        )
    return True


def norm_rope_takes(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> bool | str:
    if q_weight.shape != q.shape[-1:] or k_weight.shape != q.shape[-1:] or q_weight.dtype != k_weight.dtype:
        return (
            f"q_weight and k_weight must be of one dtype and shape {tuple(q.shape[-1:])}, not {q_weight.dtype} "
            f"{tuple(q_weight.shape)} and {k_weight.dtype} {tuple(k_weight.shape)}"
        )
    return rope_takes(q, k, cos, sin, positions)


CHECKS = [  # batch, sequence, query heads, key heads, head_dim, rotary dimension, where positions come from, interleaved
    (1, 1, 1, 1, 2, 2, "none", False),
    (2, 3, 4, 2, 16, 16, "batch", False),
    (2, 3, 3, 1, 16, 16, "batch", True),
    (1, 5, 5, 2, 24, 10, "shared", False),
    (2, 2, 2, 2, 20, 12, "none", True),
    (1, 2, 40, 8, 80, 80, "none", False),
    (2, 0, 4, 2, 16, 16, "batch", False),
]
BENCHES = [
    (1, 4096, 32, 8, 128, 128, "batch", False),  # Llama-3-8B
    (4, 2048, 16, 8, 128, 128, "batch", False),  # Qwen3-0.6B
    (1, 4096, 32, 8, 128, 128, "batch", True),
    (256, 1, 32, 8, 128, 128, "batch", False),  # one step of decoding
]


def rope_case(make, batch, sequence, query_heads, key_heads, head_dim, rotary, positions, interleaved):
    longest = max(2 * sequence, 1)
    angles = make.uniform(longest, rotary // 2, high=2 * math.pi, dtype=torch.float32)
    shape = dict(none=None, shared=(sequence,), batch=(batch, sequence))[positions]
    fused = make.normal(batch, sequence, query_heads + key_heads, head_dim)
    return dict(
        q=fused[:, :, :query_heads],
        k=fused[:, :, query_heads:],
        cos=angles.cos().to(make.dtype),
        sin=angles.sin().to(make.dtype),
        positions=None if shape is None else make.integers(*shape, high=longest),
        interleaved=interleaved,
    )


def norm_rope_case(make, batch, sequence, query_heads, key_heads, head_dim, rotary, positions, interleaved):
    turned = rope_case(make, batch, sequence, query_heads, key_heads, head_dim, rotary, positions, interleaved)
    return turned | dict(q_weight=make.normal(head_dim, mean=1), k_weight=make.normal(head_dim, mean=1), eps=1e-6)


def rope_cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None) -> Cost:
    angles = [rows_named(table, positions, q.shape[1]) for table in (cos, sin)]
    flops = 3 * (q.numel() + k.numel())
    return Cost(
        flops, flops, read=[q, k, positions, *angles], backward_read=[positions, *angles], backward_write=[q, k]
    )


def norm_rope_cost(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None
) -> Cost:
    angles = [rows_named(table, positions, q.shape[1]) for table in (cos, sin)]
    elements, differentiated = q.numel() + k.numel(), [q, k, q_weight, k_weight]
    read = [*differentiated, positions, *angles]
    return Cost(7 * elements, 12 * elements, read=read, backward_read=read, backward_write=differentiated)


def rope_gradient(
    grad_turned_q: Tensor, grad_turned_k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool
) -> tuple[Tensor | None, ...]:
    turn = angles_at(cos, positions, grad_turned_q), -angles_at(sin, positions, grad_turned_q), interleaved
    return (
        rotated(grad_turned_q, *turn).to(grad_turned_q.dtype),
        rotated(grad_turned_k, *turn).to(grad_turned_k.dtype),
        None,
        None,
        None,
    )


@operator(
    cases=cases(rope_case, check=CHECKS, bench=BENCHES),
    cost=rope_cost,
    check=rope_takes,
    gradient=rope_gradient,
    outputs=("turned_q", "turned_k"),
)
def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False
) -> tuple[Tensor, Tensor]:
    """q and k turned by their positions' angles, in float32 and rounded once.

    Pairs are element i and i + F of a head (Llama, NeoX), or 2i and 2i + 1 with `interleaved` (GPT-J). Without positions
    a token's is its place in the sequence. A position outside the tables gives NaN.
    """
    turn = angles_at(cos, positions, q), angles_at(sin, positions, q), interleaved
    return rotated(q, *turn).to(q.dtype), rotated(k, *turn).to(k.dtype)


def qk_norm_rope_gradient(
    grad_turned_q: Tensor, grad_turned_k: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor,
    cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    turn_back = angles_at(cos, positions, q), -angles_at(sin, positions, q), interleaved

    def of_norm(grad: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        wide_x, arriving = wide(x), rotated(grad, *turn_back)
        scale = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
        normal, g = wide_x * scale, arriving * wide(weight)
        dx = (g - normal * (g * normal).mean(-1, keepdim=True)) * scale
        return dx.to(x.dtype), (arriving * normal).sum_to_size(weight.shape).to(weight.dtype)

    (dq, dq_weight), (dk, dk_weight) = of_norm(grad_turned_q, q, q_weight), of_norm(grad_turned_k, k, k_weight)
    return dq, dk, dq_weight, dk_weight, None, None, None


@operator(
    cases=cases(rope_case, check=CHECKS, bench=BENCHES),
    cost=lambda q, k, cos, sin, positions: replace(rope_cost(q, k, cos, sin, positions), write=[q, k]),
    check=rope_takes,
    mutates=("q", "k"),
)
def rope_(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, interleaved: bool = False
) -> None:
    """`rope` written over q and k, for inference: no gradient, no new memory."""
    turned = rope.definition(q, k, cos, sin, positions, interleaved)
    q.copy_(turned[0])
    k.copy_(turned[1])


def qkv_case(make, batch, sequence, query_heads, key_heads, head_dim, rotary, positions, kind):
    turned = rope_case(make, batch, sequence, query_heads, key_heads, head_dim, rotary, positions, False)
    weight = (lambda: make.normal(head_dim, mean=1)) if kind == "norm" else (lambda: None)
    return dict(
        heads=make.normal(batch, sequence, query_heads + 2 * key_heads, head_dim),
        q_weight=weight(),
        k_weight=weight(),
        cos=turned["cos"],
        sin=turned["sin"],
        positions=turned["positions"],
        q_heads=query_heads,
        k_heads=key_heads,
    )


def qkv_takes(
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_heads: int,
    k_heads: int,
) -> bool | str:
    if heads.ndim != 4 or min(q_heads, k_heads) < 1 or q_heads + k_heads > heads.shape[2]:
        return f"heads must be [batch, tokens, q + k + v heads, dim], not {tuple(heads.shape)} with {q_heads} + {k_heads} of q and k"
    q, k = heads[:, :, :q_heads], heads[:, :, q_heads : q_heads + k_heads]
    if q_weight is None or k_weight is None:
        together = q_weight is k_weight
        return rope_takes(q, k, cos, sin, positions) if together else "q_weight and k_weight go together"
    return norm_rope_takes(q, k, q_weight, k_weight, cos, sin, positions)


def qkv_cost(heads: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, q_heads: int, k_heads: int) -> Cost:
    turned = heads[:, :, : q_heads + k_heads]
    angles = [rows_named(table, positions, heads.shape[1]) for table in (cos, sin)]
    flops = 3 * turned.numel()
    return Cost(flops, flops, read=[turned, *angles], write=[turned], backward_read=angles, backward_write=[heads])


def qkv_rope_gradient(
    grad_turned_q: Tensor, grad_turned_k: Tensor, grad_v: Tensor, heads: Tensor, q_weight: Tensor | None,
    k_weight: Tensor | None, cos: Tensor, sin: Tensor, positions: Tensor | None, q_heads: int, k_heads: int, eps: float,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dq_weight = dk_weight = None
    turned = grad_turned_q, grad_turned_k
    if q_weight is None or k_weight is None:
        dq, dk, *_ = rope_gradient(*turned, cos, sin, positions, False)
    else:
        q, k = heads[:, :, :q_heads], heads[:, :, q_heads : q_heads + k_heads]
        dq, dk, dq_weight, dk_weight, *_ = qk_norm_rope_gradient(
            *turned, q, k, q_weight, k_weight, cos, sin, positions, False, eps
        )
    assert dq is not None
    assert dk is not None
    return torch.cat((dq, dk, grad_v), 2), dq_weight, dk_weight, None, None, None


@operator(
    cases=cases(
        qkv_case,
        check=[
            (1, 1, 1, 1, 2, 2, "none", "plain"),
            (2, 5, 4, 2, 16, 16, "batch", "plain"),
            (1, 5, 4, 2, 24, 10, "shared", "norm"),
            (2, 3, 3, 1, 16, 16, "batch", "norm"),
            (2, 0, 4, 2, 16, 16, "batch", "plain"),
        ],
        bench=[(4, 2048, 16, 8, 128, 128, "batch", "norm"), (1, 4096, 32, 8, 128, 128, "batch", "plain")],
    ),
    cost=qkv_cost,
    check=qkv_takes,
    gradient=qkv_rope_gradient,
    outputs=("turned_q", "turned_k", "v"),
    views=dict(v="heads"),
)
def qkv_rope(
    heads: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    q_heads: int,
    k_heads: int,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of one projection, [batch, tokens, q + k + v heads, dim]: `rope` of q and k, after
    their norms where there are weights (`qk_norm_rope`), and v, a view."""
    q, k, v = heads.split((q_heads, k_heads, heads.shape[2] - q_heads - k_heads), 2)
    if q_weight is None or k_weight is None:
        return *rope.definition(q, k, cos, sin, positions), v
    return *qk_norm_rope.definition(q, k, q_weight, k_weight, cos, sin, positions, eps=eps), v


@operator(
    cases=cases(norm_rope_case, check=CHECKS, bench=BENCHES[:2]),
    cost=norm_rope_cost,
    check=norm_rope_takes,
    gradient=qk_norm_rope_gradient,
    outputs=("turned_q", "turned_k"),
)
def qk_norm_rope(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None = None,
    interleaved: bool = False,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """RMSNorm of every head of q and k, then `rope`, as in Qwen3; in float32 and rounded once."""
    turn = angles_at(cos, positions, q), angles_at(sin, positions, q), interleaved

    def normal(x: Tensor, weight: Tensor) -> Tensor:
        wide_x = wide(x)
        return wide_x * torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps) * wide(weight)

    return rotated(normal(q, q_weight), *turn).to(q.dtype), rotated(normal(k, k_weight), *turn).to(k.dtype)
