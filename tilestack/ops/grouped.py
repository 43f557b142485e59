"""The grouped linear layer: rows sorted by group, each group with a weight of its own, as the experts of an MoE have."""

import itertools

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.autocast import lower_when_traced, lowered


def grouped_case(make, rows, groups, inner, columns, spread="uneven"):
    weight = make.normal(groups, columns, inner, scale=max(inner, 1) ** -0.5)
    return dict(x=make.normal(rows, inner), weight=weight, offsets=ends(make, rows, groups, spread))


def ends(make, rows, groups, spread):
    """Where groups end: drawn at random, all alike, all rows in the last but one of them, or some rows in none, or no groups."""
    if groups == 0:
        return make.integers(0, high=1, dtype=torch.int32)
    if spread == "even":
        return (torch.arange(1, groups + 1, device=make.device) * rows // groups).int()
    if spread == "one":
        return (torch.arange(groups, device=make.device) >= groups - 2).int() * rows
    last = rows // 2 if spread == "short" else rows
    drawn = make.integers(groups - 1, high=last + 1, dtype=torch.int32).sort().values
    return torch.cat([drawn, drawn.new_full((1,), last)])


def groups_agree(x: Tensor, weight: Tensor, offsets: Tensor) -> bool | str:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        return f"x is [rows, K] and weight [groups, N, K], but x is {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if x.dtype != weight.dtype:
        return f"x and weight must have one dtype, but x is {x.dtype} and weight is {weight.dtype}"
    if offsets.dtype != torch.int32 or offsets.ndim != 1:
        return f"offsets must be a vector of int32, not {offsets.dtype} {tuple(offsets.shape)}"
    return offsets.shape[0] == weight.shape[0] or (
        f"offsets must say where each of the {weight.shape[0]} groups ends, not {offsets.shape[0]}"
    )


def sizes_of(offsets: Tensor, rows: int) -> list[int]:
    """How many rows each group has, and how many are left that belong to none."""
    ends = [0, *offsets.tolist(), rows]
    if ends != sorted(ends):
        raise ValueError(f"offsets must rise up to at most the {rows} rows, but are {ends[1:-1]}")
    return [end - start for start, end in itertools.pairwise(ends)]


def a_product_each(x: Tensor, weight: Tensor) -> Cost:
    return Cost(flops=2 * x.numel() * weight.shape[1])


@operator(
    cases=cases(
        grouped_case,
        check=[
            (1, 1, 1, 1), (20, 2, 17, 33), (40, 4, 24, 8, "one"), (5, 9, 16, 8), (40, 3, 24, 8, "short"),
            (260, 2, 17, 130, "even"),
            (0, 3, 8, 8), (8, 3, 0, 8), (8, 3, 8, 0),
        ],
        bench=[
            (16384, 8, 4096, 14336, "even"),  # Mixtral 8x7B, 8192 tokens
            (16384, 8, 4096, 14336),
            (32768, 32, 2048, 2816),
            (65536, 128, 2048, 1536),  # Qwen3-30B-A3B, 8192 tokens
        ],
    ),
    cost=a_product_each,
    check=groups_agree,
    fake=lambda x, weight, offsets: lowered(x)[0].new_empty(x.shape[0], weight.shape[1]),
    tuning_key=lambda x, weight: (x.shape[0], *weight.shape),
)  # fmt: skip
def grouped_linear(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x[rows of group g] @ weight[g].T for every group; weight is [groups, out, in].

    Group g has the rows offsets[g - 1] up to offsets[g], so offsets are where groups end: rising, up to at most the number
    of rows. Rows past the last of them belong to no group: theirs are zeros, and they have no gradient.
    """
    x, weight = lowered(x, weight)
    *rows, left = x.split(sizes_of(offsets, x.shape[0]))
    products = [mine @ matrix.T for mine, matrix in zip(rows, weight.unbind(), strict=True)]
    return torch.cat([*products, left.new_zeros(left.shape[0], weight.shape[1])])


lower_when_traced(grouped_linear)
