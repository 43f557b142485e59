"""Experts whose weights alone are quantised: rows sorted by group, each group with codes and scales of its own. No gradients.

The codes are those of `weight_only.py`, one matrix of them for each group: int8, float8_e4m3fn, or two of 4 bits in a byte of
uint8. Where a group ends is known on the device alone, as in `grouped.py`. To keep them apart from groups of rows, the
numbers of a row of a weight that share a scale are called a part here.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.grouped import ends, sizes_of
from tilestack.ops.grouped_fp8 import are_ends
from tilestack.ops.weight_only import FORMATS, codes_fit, linear_weight_only, weight_only_case


def experts_case(make, rows, groups, inner, columns, format="int4", part=0, kept="plain", spread="uneven"):
    """`kept` is plain, or zero where there are zero points."""
    drawn = weight_only_case(make, rows, groups * columns, inner, format, part, kept)
    stacked = {
        name: drawn[name].unflatten(0, (groups, columns)) for name in ("weight", "scale", "zero") if name in drawn
    }
    return dict(x=drawn["x"], offsets=ends(make, rows, groups, spread)) | stacked


def stacks_fit(x: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, zero: Tensor | None) -> bool | str:
    if x.ndim != 2 or weight.ndim != 3 or scale.ndim != 3 or scale.shape[0] != weight.shape[0]:
        return (
            "x is [rows, K], weight [groups, N, K] and scale [groups, N, parts], but they are "
            f"{tuple(x.shape)}, {tuple(weight.shape)} and {tuple(scale.shape)}"
        )
    if zero is not None and zero.shape != scale.shape:
        return f"zero is like scale, {tuple(scale.shape)}, not {tuple(zero.shape)}"
    groups = weight.shape[0]
    # What each group has is a weight of `linear_weight_only`; without groups there is none to look at.
    of_one = lambda stack: stack[0] if groups else stack.new_empty(stack.shape[1:])
    fits = codes_fit(x, of_one(weight), of_one(scale), None if zero is None else of_one(zero), None)
    return are_ends(offsets, groups) if fits is True else fits


@operator(
    cases=cases(
        experts_case,
        check=[
            (1, 1, 32, 1), (20, 2, 64, 17, "int4", 32, "zero"), (40, 4, 128, 24, "int4", 64, "plain", "one"),
            (5, 9, 96, 8, "int4", 32), (37, 3, 33, 9, "int8", 0, "plain", "short"), (20, 2, 128, 40, "int8", 64, "zero"),
            (40, 3, 96, 24, "fp8", 32, "plain", "short"), (70, 2, 48, 33, "fp8", 0, "plain", "even"),
            (0, 3, 32, 8), (8, 3, 32, 0, "int4", 32), (8, 3, 0, 8, "int8"), (8, 0, 32, 8),
        ],
        gpu=[
            (2, 8, 4096, 300, "int4", 128), (260, 4, 2080, 200, "int4", 32, "zero"), (130, 3, 2064, 130, "int8", 16, "zero"),
            (300, 5, 2080, 200, "fp8"), (64, 130, 512, 130, "int4", 128),
        ],
        bench=[
            *((rows, 8, 4096, 14336, "int4", 128) for rows in (2, 32, 2048)),  # Mixtral 8x7B, two experts of each token
            *((rows, 128, 2048, 1536, "int4", 128) for rows in (8, 128, 8192)),  # Qwen3-30B-A3B, eight
            (8, 128, 2048, 1536, "fp8", 128),
            (2, 8, 4096, 14336, "int8"),
        ],
    ),
    cost=lambda x, weight: Cost(flops=2 * x.numel() * weight.shape[1]),
    check=stacks_fit,
    dtypes=dict(weight=tuple(FORMATS.values()), zero=(torch.int8,)),
    fake=lambda x, weight, scale, offsets, zero=None: x.new_empty(x.shape[0], weight.shape[1]),
    tuning_key=lambda x, weight: (
        x.shape[0], *weight.shape, next(name for name, dtype in FORMATS.items() if dtype == weight.dtype)
    ),
)  # fmt: skip
def grouped_linear_weight_only(
    x: Tensor, weight: Tensor, scale: Tensor, offsets: Tensor, zero: Tensor | None = None
) -> Tensor:
    """x[rows of group g] @ ((code - zero) · scale)[g].T for every group: weight is [groups, out, in] of int8 or float8_e4m3fn,
    or [groups, out, in / 2] of two codes of 4 bits in each byte; scale, and zero where there is one, [groups, out, parts].

    Offsets are where groups end, as `grouped_linear` has them; rows past the last of them are zeros. A group without rows
    has its codes left alone.
    """
    *rows, left = x.split(sizes_of(offsets, x.shape[0]))
    zeros = [None] * len(rows) if zero is None else zero.unbind()
    of_groups = zip(rows, weight.unbind(), scale.unbind(), zeros, strict=True)
    products = [linear_weight_only.definition(mine, *codes) for mine, *codes in of_groups if len(mine)]  # type: ignore[arg-type]
    return torch.cat([*products, left.new_zeros(left.shape[0], weight.shape[1])])
