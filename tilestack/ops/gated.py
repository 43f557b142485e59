"""Gated pairs: an activation of one half times the other half, the middle of a gated feed-forward layer.

The halves are two tensors (silu_mul, gelu_mul) or lie in one, as a fused projection leaves them (swiglu, geglu): side by
side, [gate | up], or interleaved, gate and up in turn. swiglu_linear goes on through the projection that follows.
"""

import torch.nn.functional as F
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.activation import gelu, gelu_kind
from tilestack.ops.autocast import lower_when_traced, lowered
from tilestack.ops.elementwise import SHAPES
from tilestack.ops.matmul import linear, shapes_agree
from tilestack.ops.numerics import wide

BENCHES = [(8192, 1024), (8192, 4096), (4096, 14336), (4096, 16384), (4096, 13824), (4096, 4097)]
APPROXIMATIONS = ("none", "tanh")
HALVES = [(1, 1), (3, 33), (4, 128), (2, 2049), (5, 1000), (0, 16), (3, 0), (2, 3, 40), (7,)]
LAYOUTS = (False, True)


def two_halves(make, *shape):
    return dict(gate=make.normal(*shape, scale=2), up=make.normal(*shape))


def both_in_one(make, *size):
    *rows, columns, interleaved = size
    return dict(x=make.normal(*rows, 2 * columns, scale=2), interleaved=interleaved)


def alike(gate: Tensor, up: Tensor) -> bool | str:
    return (
        (gate.shape == up.shape and gate.dtype == up.dtype)
        or f"gate and up must have one shape and dtype, but gate is {gate.dtype} {tuple(gate.shape)} and up is {up.dtype} {tuple(up.shape)}"
    )


def has_halves(x: Tensor) -> bool | str:
    return (
        x.ndim > 0 and x.shape[-1] % 2 == 0
    ) or f"the last dimension of x must hold two halves, but its shape is {tuple(x.shape)}"


def halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """(gate, up), views of the tensor that holds both."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    columns = x.shape[-1] // 2
    return x[..., :columns], x[..., columns:]


@operator(
    cases=cases(two_halves, check=SHAPES, bench=BENCHES),
    cost=lambda gate: Cost(flops=5 * gate.numel(), backward_flops=10 * gate.numel()),
    check=alike,
)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, rounded once."""
    return (F.silu(wide(gate)) * wide(up)).to(gate.dtype)


@operator(
    cases=cases(
        lambda make, *size: two_halves(make, *size[:-1]) | dict(approximate=size[-1]),
        check=[(*shape, kind) for kind in APPROXIMATIONS for shape in SHAPES],
        bench=[(*shape, kind) for kind in APPROXIMATIONS for shape in BENCHES],
    ),
    cost=lambda gate: Cost(flops=9 * gate.numel(), backward_flops=18 * gate.numel()),
    check=lambda gate, up, approximate: reason if (reason := alike(gate, up)) is not True else gelu_kind(approximate),
)
def gelu_mul(gate: Tensor, up: Tensor, approximate: str = "none") -> Tensor:
    """gelu(gate) * up, rounded once."""
    return (gelu.definition(wide(gate), approximate) * wide(up)).to(gate.dtype)


@operator(
    cases=cases(
        both_in_one,
        check=[(*shape, interleaved) for interleaved in LAYOUTS for shape in HALVES],
        bench=[(*shape, interleaved) for interleaved in LAYOUTS for shape in BENCHES],
    ),
    cost=lambda x: Cost(flops=2.5 * x.numel(), backward_flops=5 * x.numel()),
    check=has_halves,
)
def swiglu(x: Tensor, interleaved: bool = False) -> Tensor:
    """silu(gate) * up for the two halves of the last dimension, which is halved."""
    return silu_mul.definition(*halves(x, interleaved))


@operator(
    cases=cases(
        lambda make, *size: both_in_one(make, *size[:-1]) | dict(approximate=size[-1]),
        check=[(*shape, layout, kind) for kind in APPROXIMATIONS for layout in LAYOUTS for shape in HALVES],
        bench=[(*shape, layout, kind) for kind in APPROXIMATIONS for layout in LAYOUTS for shape in BENCHES[:4]],
    ),
    cost=lambda x: Cost(flops=4.5 * x.numel(), backward_flops=9 * x.numel()),
    check=lambda x, approximate: reason if (reason := has_halves(x)) is not True else gelu_kind(approximate),
)
def geglu(x: Tensor, approximate: str = "none", interleaved: bool = False) -> Tensor:
    """gelu(gate) * up for the two halves of the last dimension, which is halved."""
    return gelu_mul.definition(*halves(x, interleaved), approximate)


def gated_linear_case(make, rows, columns, inner, bias="plain"):
    arguments = dict(
        x=make.normal(rows, 2 * inner, scale=2), weight=make.normal(columns, inner, scale=max(inner, 1) ** -0.5)
    )
    return arguments | (dict(bias=make.normal(columns)) if bias == "bias" else {})


def halves_meet_weight(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool | str:
    reason = has_halves(x)
    return shapes_agree(halves(x, False)[0], weight, bias) if reason is True else reason


@operator(
    cases=cases(
        gated_linear_case,
        check=[(1, 1, 1), (5, 17, 33), (64, 40, 64, "bias"), (0, 8, 8), (8, 0, 8), (8, 8, 0, "bias")],
        bench=[(16384, 1024, 3072), (8192, 4096, 14336)],  # Qwen3-0.6B, Llama-3-8B
    )
    + cases(
        lambda make, *shape: gated_linear_case(make, *shape[-3:]) | dict(x=make.normal(*shape[:-2], 2 * shape[-1])),
        check=[(2, 3, 10, 16)],
    ),
    cost=lambda x, weight: Cost(flops=x.numel() * weight.shape[0], backward_read=[x, weight]),
    check=halves_meet_weight,
)
def swiglu_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """swiglu(x) @ weight.T + bias: a gated feed-forward layer from its gated pair on."""
    x, weight, bias = lowered(x, weight, bias)
    return linear.definition(swiglu.definition(x), weight, bias)


lower_when_traced(swiglu_linear)
