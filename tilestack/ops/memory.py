"""Memory patterns: operators that only move elements (copy, stride, permute, gather, scatter), and the plain sum.

They do next to no arithmetic, so all that counts is how their reads and writes fall on memory; docs/memory.md tells how.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.lookup import rows_named
from tilestack.ops.numerics import named_rows_exist, wide

ANY: dict[str, tuple] = dict(x=())  # what is moved is not looked at

SQUARE = (16384, 16384)  # 512 MB in bfloat16, far beyond any cache


def shaped(make, *shape):
    return dict(x=make.normal(*shape))


def copy_gradient(grad: Tensor) -> Tensor:
    return grad


@operator(
    cases=cases(shaped, check=[(1,), (33,), (127, 3), (4, 1025), (2, 3, 4, 5), (0,), (2, 0, 3), ()], bench=[SQUARE]),
    gradient=copy_gradient,
    dtypes=ANY,
)
def copy(x: Tensor) -> Tensor:
    """x in fresh, contiguous memory."""
    return x.clone(memory_format=torch.contiguous_format)


def stepped(make, *size):
    *shape, step = size
    return dict(x=make.normal(*shape), step=step)


def steps_forward(x: Tensor, step: int) -> bool | str:
    if x.ndim == 0:
        return "x needs at least one dimension"
    return step >= 1 or f"step must be at least 1, not {step}"


def strided_copy_gradient(grad: Tensor, x: Tensor, step: int) -> Tensor:
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format)
    dx[..., ::step] = grad
    return dx


@operator(
    cases=cases(
        stepped,
        check=[(1, 1), (33, 2), (3, 40, 4), (2, 3, 127, 5), (4, 8, 1), (3, 7, 9), (0, 3), (3, 0, 2)],
        bench=[(8192, 32768, 2), (8192, 32768, 16)],
    ),
    cost=lambda x, step: Cost(read=[x[..., ::step]], backward_read=[]),
    check=steps_forward,
    gradient=strided_copy_gradient,
    dtypes=ANY,
    tuning_key=lambda x, step: (x.numel(), x.shape[-1], step),
)
def strided_copy(x: Tensor, step: int) -> Tensor:
    """Every step-th element of the last dimension, x[..., ::step], side by side; its gradient has zeros between."""
    return x[..., ::step].clone(memory_format=torch.contiguous_format)


def transpose_gradient(grad: Tensor) -> Tensor:
    return grad.mT


@operator(
    cases=cases(
        shaped,
        check=[(1, 1), (3, 33), (127, 65), (64, 128), (2, 40, 24), (5, 2, 9, 3), (0, 4), (3, 0, 2)],
        bench=[SQUARE, (16385, 16383), (64, 2048, 2048), (8192, 4096)],
    ),
    check=lambda x: x.ndim >= 2 or f"x needs two dimensions, not {x.ndim}",
    gradient=transpose_gradient,
    dtypes=ANY,
)
def transpose(x: Tensor) -> Tensor:
    """The last two dimensions exchanged in memory, not only in the strides."""
    return x.mT.clone(memory_format=torch.contiguous_format)


def permuted(make, *size):
    *shape, order = size
    return dict(x=make.normal(*shape), dims=tuple(map(int, order)))


def permutes(x: Tensor, dims: Sequence[int]) -> bool | str:
    return (
        len(dims) == x.ndim and sorted(d % x.ndim for d in dims) == list(range(x.ndim))
    ) or f"dims must name each of the {x.ndim} dimensions once, not {tuple(dims)}"


def permute_gradient(grad: Tensor, dims: Sequence[int]) -> Tensor:
    return grad.permute(inverse(dims))


def inverse(dims: Sequence[int]) -> list[int]:
    """The permutation that undoes one."""
    order = [d % len(dims) for d in dims]
    return [order.index(d) for d in range(len(order))]


@operator(
    cases=cases(
        permuted,
        check=[
            (5, "0"), (33, 20, "10"), (2, 3, 4, "012"), (2, 33, 40, "021"), (40, 3, 33, "120"), (3, 5, 7, 8, "0213"),
            (4, 2, 3, 5, "3210"), (2, 3, 2, 5, 3, "42031"), (3, 2, 3, 2, 20, 24, "021354"), (2, 3, 2, 2, 3, 2, 2, "6420531"), (3, 0, 2, "201"),
        ],
        bench=[
            (16, 8192, 16, 128, "0213"),  # tokens by heads to heads by tokens
            (64, 64, 256, 256, "0231"),  # channels to the end
            (64, 256, 256, 64, "0312"),  # and back
            (512, 512, 1024, "210"),
        ],
    ),
    check=permutes,
    dtypes=ANY,
    gradient=permute_gradient,
)  # fmt: skip
def permute(x: Tensor, dims: Sequence[int]) -> Tensor:
    """x with its dimensions in another order, contiguous in that order."""
    return x.permute(tuple(dims)).clone(memory_format=torch.contiguous_format)


def indexed(make, *size):
    *shape, count = size
    return dict(x=make.normal(*shape), index=make.integers(count, high=max(shape[0], 1)))


def takes_index(x: Tensor, index: Tensor) -> bool | str:
    if x.ndim == 0:
        return "x needs at least one dimension"
    if index.dtype not in (torch.int32, torch.int64):
        return f"index must be int32 or int64, not {index.dtype}"
    return index.ndim == 1 or f"index must have one dimension, not {index.ndim}"


def gathered(x: Tensor, index: Tensor) -> Cost:
    added = index.shape[0] * x.shape[1:].numel()
    return Cost(read=[rows_named(x, index), index], backward_flops=added, backward_read=[index])


def gather_rows_gradient(grad: Tensor, x: Tensor, index: Tensor) -> tuple[Tensor, None]:
    return sum_by_index(grad, index, x.shape[0]), None


def sum_by_index(x: Tensor, index: Tensor, rows: int) -> Tensor:
    return wide(x).new_zeros((rows, *x.shape[1:])).index_add(0, index, wide(x)).to(x.dtype)


@operator(
    cases=cases(
        indexed,
        check=[(1, 1, 1), (7, 33, 5), (20, 3, 4, 40), (6, 1100, 5), (9, 300), (5, 2, 200), (4, 8, 0), (5, 0, 3)],
        bench=[(65536, 4096, 65536), (151936, 1024, 32768)],
    ),
    cost=gathered,
    check=takes_index,
    check_values=lambda x, index: named_rows_exist("index", index, x.shape[0]),
    dtypes=ANY,
    gradient=gather_rows_gradient,
)
def gather_rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index]: rows (whatever is behind the first dimension) in the order and as often as index names them.

    An index that x does not have is an error; a kernel, which cannot raise one, writes NaN (zero where integers have
    none) and reads nothing out of bounds. The gradient sums what comes back for each row in a fixed order.
    """
    return x.index_select(0, index)


def scattered(make, *size):
    *shape, rows = size
    return dict(x=make.normal(*shape), index=make.integers(shape[0], high=max(rows, 1)), rows=rows)


def spread_out(make, *size):
    """An index that names no row twice."""
    *shape, rows = size
    order = make.uniform(rows, dtype=torch.float64).argsort()
    return dict(x=make.normal(*shape), index=order[: shape[0]], rows=rows)


def scatters(x: Tensor, index: Tensor, rows: int) -> bool | str:
    if (reason := takes_index(x, index)) is not True:
        return reason
    if not x.is_floating_point():
        return f"x must be floating-point, not {x.dtype}"
    if rows < 0:
        return f"rows must not be negative, but is {rows}"
    return index.shape[0] == x.shape[0] or f"index must name a row for each of the {x.shape[0]} of x, not {len(index)}"


def put_back(x: Tensor, index: Tensor, rows: int) -> Cost:
    into = x.new_empty(rows, *x.shape[1:], device="meta")
    return Cost(flops=x.numel(), backward_flops=0, arriving=[rows_named(into, index)])


def scatter_rows_gradient(grad: Tensor, index: Tensor) -> tuple[Tensor, None]:
    return grad.index_select(0, index), None


@operator(
    cases=cases(spread_out, check=[(5, 33, 9), (20, 3, 4, 40)], bench=[(65536, 4096, 65536)])
    + cases(scattered, check=[(1, 1, 1), (60, 17, 3), (300, 9), (0, 4, 3), (4, 0, 3)], bench=[(65536, 1024, 512)]),
    cost=put_back,
    check=scatters,
    check_values=lambda index, rows: named_rows_exist("index", index, rows),
    gradient=scatter_rows_gradient,
)
def scatter_rows(x: Tensor, index: Tensor, rows: int) -> Tensor:
    """Row i of x put at row index[i] of a tensor of `rows` rows, zero elsewhere: what undoes gather_rows.

    Rows that share a place are added, in a fixed order and rounded once; so each of the two is the other's gradient.
    """
    return sum_by_index(x, index, rows)


def summed(make, *size):
    *shape, dim = size
    return dict(x=make.normal(*shape), dim=dim)


def sums(x: Tensor, dim: int) -> bool | str:
    if not x.is_floating_point():
        return f"x must be floating-point, not {x.dtype}"
    return -x.ndim <= dim < x.ndim or f"dim {dim} is out of range for a tensor of {x.ndim} dimensions"


def reduce_sum_gradient(grad: Tensor, x: Tensor, dim: int) -> Tensor:
    return grad.unsqueeze(dim).expand(x.shape)


@operator(
    cases=cases(
        summed,
        check=[
            (1, 0), (33, -1), (5000, 0), (3, 1000, -1), (2, 40000, -1), (1000, 3, 0), (2048, 3, 0), (300, 129, 0), (4, 5, 6, 1), (2, 1025, 37, 1), (2, 40, 3, 0),
            (0, 4, 0), (3, 0, 1), (3, 0, 0),
        ],
        bench=[(16384, 16384, -1), (16384, 16384, 0), (8, 2**25, -1), (2**25, 8, 0), (2**28, 0)],
    ),
    cost=lambda x: Cost(flops=x.numel(), backward_flops=0, backward_read=[]),
    check=sums,
    dtypes=ANY,
    gradient=reduce_sum_gradient,
)  # fmt: skip
def reduce_sum(x: Tensor, dim: int) -> Tensor:
    """The sum over one dimension, added up in float32 and rounded once, in the same order in every run."""
    return wide(x).sum(dim).to(x.dtype)
