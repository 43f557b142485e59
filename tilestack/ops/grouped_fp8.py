"""Grouped products of fp8 codes, for experts in 8 bits: rows sorted by group, with scales beside the codes. No gradients:
they are such products themselves, of what `fp8_tiles` makes of the operands.

    y = x wᵀ      each row times the weight of its group         grouped_linear_fp8
    dx = dy w     the same, of turned weights                    grouped_linear_fp8
    dw = dyᵀ x    added up over the rows of each group           grouped_outer_fp8
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.grouped import ends, sizes_of
from tilestack.ops.numerics import wide
from tilestack.ops.quantised_linear import E4M3, RESULTS, blocks_of, linear_fp8, result_dtype, spread_over_blocks


def scale_shapes(rows: int, groups: int, columns: int, inner: int, by_blocks: bool) -> tuple[tuple[int, ...], ...]:
    """Of the scales of x and of weight."""
    if by_blocks:
        return (rows, blocks_of(inner)), (groups, blocks_of(columns), blocks_of(inner))
    return (rows,), (groups, columns)


def rows_case(make, rows, groups, inner, columns, spread="uneven", by="blocks"):
    """`by` is what shares a scale: rows of both, or blocks of 128 and of 128 by 128."""
    of_x, of_weight = scale_shapes(rows, groups, columns, inner, by == "blocks")
    return dict(
        x=make.normal(rows, inner, dtype=E4M3),
        weight=make.normal(groups, columns, inner, dtype=E4M3),
        x_scale=make.uniform(*of_x, low=0.5, high=1.5),
        weight_scale=make.uniform(*of_weight, low=0.5, high=1.5) * max(inner, 1) ** -0.5,
        offsets=ends(make, rows, groups, spread),
    )


def are_ends(offsets: Tensor, groups: int | None = None) -> bool | str:
    if offsets.dtype != torch.int32 or offsets.ndim != 1:
        return f"offsets must be a vector of int32, not {offsets.dtype} {tuple(offsets.shape)}"
    return (
        groups in (None, len(offsets)) or f"offsets must say where each of the {groups} groups ends, not {len(offsets)}"
    )


def rows_agree(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: str
) -> bool | str:
    if x.ndim != 2 or weight.ndim != 3 or x.shape[1] != weight.shape[2]:
        return f"x is [rows, K] and weight [groups, N, K], but x is {tuple(x.shape)} and weight {tuple(weight.shape)}"
    groups, columns, inner = weight.shape
    wanted = scale_shapes(len(x), groups, columns, inner, by_blocks=weight_scale.ndim == 3)
    if (x_scale.shape, weight_scale.shape) != wanted:
        return (
            "scales are of rows, [rows] and [groups, N], or of 128 numbers of a row of x and 128 by 128 of a weight: "
            f"{wanted[0]} and {wanted[1]}, not {tuple(x_scale.shape)} and {tuple(weight_scale.shape)}"
        )
    if dtype not in RESULTS:
        return f"dtype must be float16, bfloat16, float32 or '', not {dtype!r}"
    return are_ends(offsets, groups)


@operator(
    cases=cases(
        rows_case,
        check=[
            (1, 1, 1, 1), (20, 2, 17, 33, "uneven", "rows"), (40, 4, 24, 8, "one"), (40, 3, 144, 8, "short", "rows"),
            (40, 3, 160, 16, "short"), (5, 9, 16, 144), (140, 2, 17, 130, "even"), (144, 1, 272, 16),
            (0, 3, 8, 8), (8, 3, 0, 8, "uneven", "rows"), (8, 3, 8, 0), (8, 0, 8, 8, "none"),
        ],
        bench=[
            (16384, 8, 4096, 14336, "even"),  # Mixtral 8x7B, 8192 tokens
            (65536, 128, 2048, 1536),  # Qwen3-30B-A3B, 8192 tokens
            (65536, 128, 2048, 1536, "uneven", "rows"),
        ],
    ),
    cost=lambda x, weight: Cost(flops=2 * x.numel() * weight.shape[1]),
    check=rows_agree,
    dtypes=dict(x=(E4M3,), weight=(E4M3,)),
    fake=lambda x, weight, x_scale, weight_scale, offsets, dtype="": x.new_empty(
        x.shape[0], weight.shape[1], dtype=result_dtype(weight_scale, dtype)
    ),
    tuning_key=lambda x, weight, weight_scale: (x.shape[0], *weight.shape, "blocks" if weight_scale.ndim == 3 else ""),
)  # fmt: skip
def grouped_linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: str = ""
) -> Tensor:
    """x[rows of group g] @ weight[g].T for every group, of float8_e4m3fn codes; weight is [groups, out, in].

    Scales are of rows, [rows] and [groups, out], or of blocks, 128 codes of a row of x and 128 by 128 of a weight. Offsets
    are where groups end, as `grouped_linear` has them; rows past the last of them are zeros. The result is in the dtype
    given or that of weight_scale.
    """
    *sizes, left = sizes_of(offsets, x.shape[0])
    of_groups = zip(x.split([*sizes, left]), x_scale.split([*sizes, left]), weight, weight_scale, strict=False)
    products = [linear_fp8.definition(mine, w, scale, w_scale, None, dtype) for mine, scale, w, w_scale in of_groups]
    nothing = x.new_zeros((left, weight.shape[1]), dtype=result_dtype(weight_scale, dtype))
    return torch.cat([*products, nothing])


def outer_case(make, rows, groups, columns, inner, spread="uneven"):
    blocks = blocks_of(rows)
    return dict(
        left=make.normal(columns, rows, dtype=E4M3),
        right=make.normal(inner, rows, dtype=E4M3),
        left_scale=make.uniform(columns, blocks, low=0.5, high=1.5),
        right_scale=make.uniform(blocks_of(inner), blocks, low=0.5, high=1.5) * max(rows, 1) ** -0.5,
        offsets=ends(make, rows, groups, spread),
    )


def columns_agree(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: str
) -> bool | str:
    if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[1]:
        return f"left is [N, rows] and right [K, rows], but they are {tuple(left.shape)} and {tuple(right.shape)}"
    blocks = blocks_of(left.shape[1])
    wanted = ((left.shape[0], blocks), (blocks_of(right.shape[0]), blocks))
    if (left_scale.shape, right_scale.shape) != wanted:
        return (
            f"scales are of 128 numbers of a row of left and of 128 by 128 of right, {wanted[0]} and {wanted[1]}, "
            f"not {tuple(left_scale.shape)} and {tuple(right_scale.shape)}"
        )
    if dtype not in RESULTS:
        return f"dtype must be float16, bfloat16, float32 or '', not {dtype!r}"
    return are_ends(offsets)


@operator(
    cases=cases(
        outer_case,
        check=[
            (1, 1, 1, 1), (20, 2, 17, 33), (40, 4, 24, 8, "one"), (300, 3, 8, 130, "short"), (272, 4, 130, 16),
            (256, 2, 16, 16, "even"), (0, 3, 8, 8), (8, 3, 0, 8), (8, 3, 8, 0), (8, 0, 8, 8, "none"),
        ],
        bench=[(16384, 8, 14336, 4096, "even"), (65536, 128, 1536, 2048)],
    ),
    cost=lambda left, right: Cost(flops=2 * left.numel() * right.shape[0]),
    check=columns_agree,
    dtypes=dict(left=(E4M3,), right=(E4M3,)),
    fake=lambda left, right, left_scale, right_scale, offsets, dtype="": left.new_empty(
        len(offsets), left.shape[0], right.shape[0], dtype=result_dtype(right_scale, dtype)
    ),
    tuning_key=lambda left, right, offsets: (left.shape[1], len(offsets), left.shape[0], right.shape[0]),
)  # fmt: skip
def grouped_outer_fp8(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: str = ""
) -> Tensor:
    """left[:, rows of group g] @ right[:, rows of group g].T for every group, [groups, N, K], of float8_e4m3fn codes.

    left is [N, rows] with a scale for 128 codes of each line, right [K, rows] with one for 128 by 128. Blocks of 128 are
    counted from the first row, wherever groups begin. A group without rows has zeros; rows past the last group count
    for none.
    """
    precise = wide(right_scale).dtype
    lefts = left.to(precise) * spread_over_blocks(left_scale.to(precise), left.shape[1])
    rights = right.to(precise) * spread_over_blocks(right_scale.to(precise), *right.shape)
    sizes = sizes_of(offsets, left.shape[1])
    of_groups = zip(lefts.split(sizes, 1), rights.split(sizes, 1), strict=True)
    products = [mine @ others.T for mine, others in of_groups][:-1]
    made = torch.stack(products) if products else lefts.new_empty(0, left.shape[0], right.shape[0])
    return made.to(result_dtype(right_scale, dtype))
