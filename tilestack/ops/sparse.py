"""Products with sparse matrices: blocks of 16 to 128 that are there or not, and single elements in compressed rows.

S, D: which of result, left and right is sparse. A sparse matrix in blocks is `values` [blocks, side, side] and for each
block its `rows` and `columns`, counted in blocks and in any order; blocks at the same place add up.
"""

import functools
import itertools

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.autocast import full_precision, lower_when_traced, lowered
from tilestack.ops.numerics import named_rows_exist, wide

SIDES = (16, 32, 64, 128)
WHOLE = (torch.int32, torch.int64)
PLACES = dict(rows=WHOLE, columns=WHOLE)


def pattern(make, blocks, lines, width):
    return dict(
        rows=make.integers(blocks, high=lines, dtype=torch.int32),
        columns=make.integers(blocks, high=width, dtype=torch.int32),
    )


def pattern_of_places(make, blocks, lines, width):
    """As many places, no two of them the same: what a matrix has that was cut into blocks."""
    places = make.uniform(lines * width, dtype=torch.float32).argsort()[:blocks].int()
    return dict(rows=places // width, columns=places % width)


def left_sparse_case(make, blocks, side, lines, width, columns, pattern=pattern):
    values = make.normal(blocks, side, side, scale=(side * max(1, blocks // lines)) ** -0.5)
    return dict(values=values, **pattern(make, blocks, lines, width), x=make.normal(width * side, columns), lines=lines)


def right_sparse_case(make, blocks, side, lines, width, rows, pattern=pattern):
    values = make.normal(blocks, side, side, scale=(side * max(1, blocks // width)) ** -0.5)
    return dict(x=make.normal(rows, lines * side), values=values, **pattern(make, blocks, lines, width), width=width)


def sampled_case(make, blocks, side, lines, width, inner, pattern=pattern):
    a, b = make.normal(lines * side, inner, scale=max(inner, 1) ** -0.5), make.normal(inner, width * side)
    return dict(a=a, b=b, **pattern(make, blocks, lines, width), side=side)


def blocks_agree(values: Tensor, rows: Tensor, columns: Tensor) -> bool | str:
    if values.ndim != 3 or values.shape[1] != values.shape[2] or values.shape[1] not in SIDES:
        return f"values are [blocks, side, side] with sides of {SIDES}, not {tuple(values.shape)}"
    if not rows.shape == columns.shape == values.shape[:1]:
        return (
            f"there are {values.shape[0]} blocks, but rows are {tuple(rows.shape)} and columns {tuple(columns.shape)}"
        )
    return True


def alike(first: Tensor, second: Tensor) -> bool | str:
    return first.dtype == second.dtype or f"both operands must have one dtype, not {first.dtype} and {second.dtype}"


def left_agrees(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, lines: int) -> bool | str:
    if (found := blocks_agree(values, rows, columns)) is not True:
        return found
    if x.ndim != 2 or x.shape[0] % values.shape[1] or lines < 0:
        return f"x must have a multiple of {values.shape[1]} rows, but its shape is {tuple(x.shape)}; lines is {lines}"
    return alike(values, x)


def right_agrees(x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: int) -> bool | str:
    if (found := blocks_agree(values, rows, columns)) is not True:
        return found
    if x.ndim != 2 or x.shape[1] % values.shape[1] or width < 0:
        return (
            f"x must have a multiple of {values.shape[1]} columns, but its shape is {tuple(x.shape)}; width is {width}"
        )
    return alike(values, x)


def sampled_agrees(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int) -> bool | str:
    if side not in SIDES or a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[0]:
        return f"a is [M, K] and b [K, N], the side of a block one of {SIDES}, but they are {tuple(a.shape)}, {tuple(b.shape)} and {side}"
    if a.shape[0] % side or b.shape[1] % side or rows.ndim != 1 or rows.shape != columns.shape:
        return f"M and N must be multiples of {side}, rows and columns lists of one length, not {tuple(a.shape)}, {tuple(b.shape)}, {tuple(rows.shape)} and {tuple(columns.shape)}"
    return alike(a, b)


def exist(rows: Tensor, lines: int, columns: Tensor, width: int) -> bool | str:
    found = named_rows_exist("rows", rows, lines)
    return named_rows_exist("columns", columns, width) if found is True else found


def sparse_benches(case):
    """Matrices of 4096² of which a half and a tenth is there, in blocks of 64 and of 128."""
    sizes = [(2048, 64, 64, 64, 4096), (410, 64, 64, 64, 4096), (512, 128, 32, 32, 4096), (102, 128, 32, 32, 4096)]
    return cases(functools.partial(case, pattern=pattern_of_places), check=[], bench=sizes)


@operator(
    cases=cases(
        left_sparse_case,
        check=[(1, 16, 1, 1, 1), (3, 16, 2, 3, 20), (2, 32, 3, 2, 5), (1, 64, 1, 1, 129), (2, 16, 1, 2, 128), (0, 16, 2, 2, 4), (2, 16, 2, 2, 0)],
    )
    + sparse_benches(left_sparse_case),
    cost=lambda values, x: Cost(flops=2 * values.numel() * x.shape[1]),
    check=left_agrees,
    check_values=lambda values, rows, columns, x, lines: exist(rows, lines, columns, x.shape[0] // values.shape[1]),
    dtypes=PLACES,
    tuning_key=lambda values, x, lines: (*values.shape[:2], lines, *x.shape),
)  # fmt: skip
def block_sparse_dsd(values: Tensor, rows: Tensor, columns: Tensor, x: Tensor, lines: int) -> Tensor:
    """Sparse @ dense: a matrix of `lines` rows of blocks times x [K, N]."""
    values, x = lowered(values, x)
    side = values.shape[1]
    met = wide(x).unflatten(0, (x.shape[0] // side, side))[columns.long()]
    with full_precision(x.device.type):  # where sums are kept
        products = wide(values) @ met
    out = met.new_zeros(lines, side, x.shape[1]).index_add(0, rows.long(), products)
    return out.flatten(0, 1).to(values.dtype)


@operator(
    cases=cases(
        right_sparse_case,
        check=[(1, 16, 1, 1, 1), (3, 16, 2, 3, 20), (2, 32, 3, 2, 5), (0, 16, 2, 2, 4), (2, 16, 2, 2, 0)],
    )
    + sparse_benches(right_sparse_case),
    cost=lambda values, x: Cost(flops=2 * values.numel() * x.shape[0]),
    check=right_agrees,
    check_values=lambda x, values, rows, columns, width: exist(rows, x.shape[1] // values.shape[1], columns, width),
    dtypes=PLACES,
    tuning_key=lambda values, x, width: (*values.shape[:2], width, *x.shape),
)  # fmt: skip
def block_sparse_dds(x: Tensor, values: Tensor, rows: Tensor, columns: Tensor, width: int) -> Tensor:
    """Dense @ sparse: x [M, K] times a matrix of `width` columns of blocks."""
    x, values = lowered(x, values)
    side = values.shape[1]
    met = wide(x).unflatten(1, (x.shape[1] // side, side)).movedim(1, 0)[rows.long()]
    with full_precision(x.device.type):
        products = met @ wide(values)
    out = met.new_zeros(width, x.shape[0], side).index_add(0, columns.long(), products)
    return out.movedim(0, 1).flatten(1).to(values.dtype)


@operator(
    cases=cases(
        sampled_case,
        check=[(1, 16, 1, 1, 1), (3, 16, 2, 3, 40), (2, 32, 3, 2, 33), (0, 16, 2, 2, 4), (2, 16, 2, 2, 0)],
    )
    + sparse_benches(sampled_case),
    cost=lambda a, rows, side: Cost(flops=2 * rows.shape[0] * side * side * a.shape[1]),
    check=sampled_agrees,
    check_values=lambda a, b, rows, columns, side: exist(rows, a.shape[0] // side, columns, b.shape[1] // side),
    dtypes=PLACES,
    tuning_key=lambda a, b, rows, side: (rows.shape[0], side, *a.shape, b.shape[1]),
)  # fmt: skip
def block_sparse_sdd(a: Tensor, b: Tensor, rows: Tensor, columns: Tensor, side: int) -> Tensor:
    """Dense @ dense, of which only some blocks are wanted: [blocks, side, side] of a [M, K] @ b [K, N]."""
    a, b = lowered(a, b)
    left = wide(a).unflatten(0, (a.shape[0] // side, side))[rows.long()]
    right = wide(b).unflatten(1, (b.shape[1] // side, side)).movedim(1, 0)[columns.long()]
    with full_precision(a.device.type):
        return (left @ right).to(a.dtype)


def csr_case(make, rows, inner, each, columns):
    """`each` elements a row on average, of none to twice as many."""
    ends = list(itertools.accumulate((each * (place % 3) for place in range(rows)), initial=0))
    elements = ends[-1]
    x = make.normal(inner, columns) if columns else make.normal(inner)
    return dict(
        values=make.normal(elements),
        columns=make.integers(elements, high=inner, dtype=torch.int32),
        offsets=torch.tensor(ends, device=make.device),
        x=x,
    )


def csr_agrees(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> bool | str:
    if values.ndim != 1 or columns.shape != values.shape or offsets.ndim != 1 or not offsets.shape[0]:
        return f"values and columns are lists of one length and offsets one longer than the rows, not {tuple(values.shape)}, {tuple(columns.shape)} and {tuple(offsets.shape)}"
    return (
        alike(values, x) if x.ndim in (1, 2) else f"x must be a vector or a matrix, but its shape is {tuple(x.shape)}"
    )


def elements_exist(values: Tensor, columns: Tensor, offsets: Tensor, width: int) -> bool | str:
    """True where every column is one of so many, and every element lies in a row."""
    if (found := named_rows_exist("columns", columns, width)) is not True:
        return found
    rising = bool((offsets.diff() >= 0).all()) and (int(offsets[0]), int(offsets[-1])) == (0, values.shape[0])
    return rising or f"offsets must rise from 0 to the {values.shape[0]} elements, but are {offsets.tolist()[:8]}"


def rows_of_elements(offsets: Tensor, elements: int) -> Tensor:
    """The row of each element, by where rows end."""
    return torch.searchsorted(offsets[1:].contiguous(), torch.arange(elements, device=offsets.device), right=True)


@operator(
    cases=cases(
        csr_case,
        check=[(3, 1, 1, 1), (7, 20, 3, 5), (4, 9, 40, 3), (6, 12, 2, 0), (3, 4, 0, 2), (1, 5, 2, 4)],
        bench=[(65536, 65536, 64, 128), (1048576, 65536, 16, 0)],
    ),
    cost=lambda values, x: Cost(flops=2 * values.numel() * x.shape[1:].numel()),
    check=csr_agrees,
    check_values=lambda values, columns, offsets, x: elements_exist(values, columns, offsets, x.shape[0]),
    dtypes=dict(columns=WHOLE, offsets=WHOLE),
    tuning_key=lambda values, offsets, x: (values.shape[0], offsets.shape[0], *x.shape),
)  # fmt: skip
def csr_matmul(values: Tensor, columns: Tensor, offsets: Tensor, x: Tensor) -> Tensor:
    """A matrix in compressed rows times x, a matrix or a vector: row r has the elements offsets[r] up to offsets[r + 1], each
    a value and its column."""
    values, x = lowered(values, x)
    rows = rows_of_elements(offsets, values.shape[0])
    products = wide(values).view(-1, *(1,) * (x.ndim - 1)) * wide(x)[columns.long()]
    return products.new_zeros(offsets.shape[0] - 1, *x.shape[1:]).index_add(0, rows, products).to(values.dtype)


lower_when_traced(block_sparse_dsd)
lower_when_traced(block_sparse_dds)
lower_when_traced(block_sparse_sdd)
lower_when_traced(csr_matmul)
