"""Elementwise operators of two vectors: the first kernels anyone writes."""

from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.numerics import wide

SHAPES = [(1,), (33,), (127, 3), (1024,), (4, 1025), (0,), (2, 0, 3), ()]
BENCHES = [(8192, 1024), (8192, 4096), (4096, 16384)]

two_tensors = cases(
    lambda make, *shape: dict(x=make.normal(*shape), y=make.normal(*shape)), check=SHAPES, bench=BENCHES
)


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
    dtypes=dict(x=(), y=()),
)
def add(x: Tensor, y: Tensor) -> Tensor:
    """x + y."""
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
