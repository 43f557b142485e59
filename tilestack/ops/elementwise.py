"""Elementwise operators: the vector tutorial (add, axpy) and the activations of the transformer family."""

import math

import torch
from torch import Tensor

from tilestack.ops.cases import cases
from tilestack.ops.contract import Cost, operator
from tilestack.ops.numerics import wide

SHAPES = [(1,), (33,), (127, 3), (1024,), (4, 1025), (0,), (2, 0, 3), ()]
BENCHES = [(8192, 1024), (8192, 4096), (4096, 16384)]

two_tensors = cases(
    lambda make, *shape: dict(x=make.normal(*shape), y=make.normal(*shape)), check=SHAPES, bench=BENCHES
)
one_tensor = cases(lambda make, *shape: dict(x=make.normal(*shape, scale=2)), check=SHAPES, bench=BENCHES)


def same_shape_and_dtype(x: Tensor, y: Tensor) -> bool | str:
    return (
        (x.shape == y.shape and x.dtype == y.dtype)
        or f"x and y must have one shape and dtype, but x is {x.dtype} {tuple(x.shape)} and y is {y.dtype} {tuple(y.shape)}"
    )


def add_gradient(grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad


@operator(
    cases=two_tensors,
    cost=lambda x: Cost(flops=x.numel(), backward_flops=0),
    check=same_shape_and_dtype,
    gradient=add_gradient,
)
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y: the first kernel anyone writes."""
    return x + y


def axpy_gradient(grad: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    return grad * alpha, grad


@operator(
    cases=cases(
        lambda make, *shape: dict(x=make.normal(*shape), y=make.normal(*shape), alpha=-1.7), check=SHAPES, bench=BENCHES
    ),
    cost=lambda x: Cost(flops=2 * x.numel(), backward_flops=x.numel(), backward_write=[x]),
    check=same_shape_and_dtype,
    gradient=axpy_gradient,
)
def axpy(x: Tensor, y: Tensor, alpha: float = 1.0) -> Tensor:
    """alpha * x + y, rounded once."""
    return (alpha * wide(x) + wide(y)).to(x.dtype)


def relu_gradient(grad: Tensor, out: Tensor) -> Tensor:
    return torch.where(out <= 0, 0, grad)


@operator(cases=one_tensor, cost=lambda x: Cost(flops=x.numel()), gradient=relu_gradient)
def relu(x: Tensor) -> Tensor:
    """max(x, 0); its gradient needs only the output."""
    return torch.relu(x)


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
