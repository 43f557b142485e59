"""Activations: functions of one number, applied to every element, that a layer ends with."""

import math

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.elementwise import BENCHES, SHAPES
from tilestack.ops.numerics import wide

one_tensor = cases(lambda make, *shape: dict(x=make.normal(*shape, scale=2)), check=SHAPES, bench=BENCHES)


def relu_gradient(grad: Tensor, out: Tensor) -> Tensor:
    return torch.where(out <= 0, 0, grad)


def bits_of(x: Tensor) -> Tensor:
    """A bit for each element: all that the gradient of a relu has to know of x."""
    return torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device="meta")


@operator(
    cases=one_tensor,
    cost=lambda x: Cost(flops=x.numel(), backward_read=[bits_of(x)]),
    gradient=relu_gradient,
)
def relu(x: Tensor) -> Tensor:
    """max(x, 0); its gradient needs only the output."""
    return torch.relu(x)


@operator(cases=one_tensor, cost=lambda x: Cost(flops=2 * x.numel()))
def squared_relu(x: Tensor) -> Tensor:
    """max(x, 0)², rounded once."""
    return torch.relu(wide(x)).square().to(x.dtype)


def sigmoid_gradient(grad: Tensor, out: Tensor) -> Tensor:
    return (wide(grad) * (wide(out) * (1 - wide(out)))).to(out.dtype)


@operator(cases=one_tensor, cost=lambda x: Cost(flops=3 * x.numel()), gradient=sigmoid_gradient)
def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)); its gradient needs only the output."""
    return torch.sigmoid(wide(x)).to(x.dtype)


def tanh_gradient(grad: Tensor, out: Tensor) -> Tensor:
    return (wide(grad) * ((1 - wide(out)) * (1 + wide(out)))).to(out.dtype)


@operator(cases=one_tensor, cost=lambda x: Cost(flops=5 * x.numel()), gradient=tanh_gradient)
def tanh(x: Tensor) -> Tensor:
    """The hyperbolic tangent; its gradient needs only the output."""
    return torch.tanh(wide(x)).to(x.dtype)


def softcap_case(make, *size):
    *shape, cap = size
    return dict(x=make.normal(*shape, scale=2), cap=cap)


@operator(
    cases=cases(
        softcap_case,
        check=[*((*shape, 1.5) for shape in SHAPES), (4, 1025, 30.0)],
        bench=[(*shape, 30.0) for shape in BENCHES],
    ),
    cost=lambda x: Cost(flops=7 * x.numel()),
    check=lambda cap: cap > 0 or f"cap must be positive, not {cap}",
)
def softcap(x: Tensor, cap: float) -> Tensor:
    """cap * tanh(x / cap): x where it is small, never beyond ±cap; for attention scores and logits."""
    return (cap * torch.tanh(wide(x) / cap)).to(x.dtype)


@operator(cases=one_tensor, cost=lambda x: Cost(flops=4 * x.numel()))
def silu(x: Tensor) -> Tensor:
    """x * sigmoid(x), also called swish."""
    return (wide(x) * torch.sigmoid(wide(x))).to(x.dtype)


def gelu_kind(approximate: str) -> bool | str:
    return approximate in ("none", "tanh") or f"approximate must be 'none' or 'tanh', not {approximate!r}"


def gelu_case(make, *size):
    *shape, approximate = size
    return dict(x=make.normal(*shape, scale=2), approximate=approximate)


@operator(
    cases=cases(
        gelu_case,
        check=[(*shape, kind) for kind in ("none", "tanh") for shape in SHAPES],
        bench=[(*shape, kind) for kind in ("none", "tanh") for shape in BENCHES],
    ),
    cost=lambda x: Cost(flops=8 * x.numel()),
    check=gelu_kind,
)
def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """x * Φ(x), with Φ the normal distribution function: exact through erf, or its tanh approximation."""
    wide_x = wide(x)
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (wide_x + 0.044715 * wide_x**3)
        return (0.5 * wide_x * (1 + torch.tanh(inner))).to(x.dtype)
    return (0.5 * wide_x * (1 + torch.erf(wide_x / math.sqrt(2)))).to(x.dtype)
