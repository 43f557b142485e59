"""Linear layers of codes: x and weight in 8 bits with scales beside them. No gradients.

A number is code · scale. Where codes are integers their products add up exactly, and become numbers once, at the end.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.matmul import LAYERS
from tilestack.ops.numerics import wide

RESULTS = ("", "float16", "bfloat16", "float32")
MOST_INNER = {False: 2**31 // 128**2 - 1, True: 2**31 // 255**2}  # products that int32 adds up; with zero points


def int8_case(make, rows, columns, inner, parts="bias"):
    """`parts` names what there is: bias, x_zero, weight_zero, joined by +."""
    codes = dict(low=-128, high=128, dtype=torch.int8)
    named = parts.split("+")
    made = dict(
        x=make.integers(rows, inner, **codes),
        weight=make.integers(columns, inner, **codes),
        x_scale=make.uniform(rows, low=0.01, high=0.02),
        weight_scale=make.uniform(columns, low=0.01, high=0.02) * max(inner, 1) ** -0.5,
    )
    if "bias" in named:
        made |= dict(bias=make.normal(columns))
    sizes = dict(x_zero=rows, weight_zero=columns)
    return made | {name: make.integers(sizes[name], **codes) for name in sizes if name in named}


def codes_agree(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: str) -> bool | str:
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != weight.shape[1]:
        return f"x ends in K and weight is [N, K], but x is {tuple(x.shape)} and weight is {tuple(weight.shape)}"
    if bias is not None and bias.shape != weight.shape[:1]:
        return f"bias must have shape {tuple(weight.shape[:1])}, not {tuple(bias.shape)}"
    return dtype in RESULTS or f"dtype must be float16, bfloat16, float32 or '', not {dtype!r}"


def int8_agrees(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, x_zero: Tensor | None,
    weight_zero: Tensor | None, dtype: str,
) -> bool | str:  # fmt: skip
    if (found := codes_agree(x, weight, bias, dtype)) is not True:
        return found
    for of, name, tensor in (
        (x.shape[:-1], "x_scale", x_scale), (x.shape[:-1], "x_zero", x_zero),
        (weight.shape[:1], "weight_scale", weight_scale), (weight.shape[:1], "weight_zero", weight_zero),
    ):  # fmt: skip
        if tensor is not None and tensor.shape != of:
            return f"{name} has one number for each {'row' if name[0] == 'x' else 'column'}, shape {tuple(of)}, not {tuple(tensor.shape)}"
    most = MOST_INNER[x_zero is not None or weight_zero is not None]
    return x.shape[-1] <= most or f"sums over {x.shape[-1]} products may pass what int32 holds; at most {most} do not"


def eight_bit_cost(x: Tensor, weight: Tensor) -> Cost:
    return Cost(flops=2 * x.numel() * weight.shape[0])


def result_dtype(weight_scale: Tensor, dtype: str) -> torch.dtype:
    return getattr(torch, dtype) if dtype else weight_scale.dtype


BENCHES = [
    *((side, side, side, "plain") for side in (4096, 8192)),
    *((rows, *LAYERS[1], "plain") for rows in (16, 512, 8192)),
]


@operator(
    cases=cases(
        int8_case,
        check=[
            (1, 1, 1),
            (5, 17, 33, "x_zero"),
            (64, 64, 64, "bias+weight_zero"),
            (70, 130, 40, "plain"),
            (20, 24, 304, "bias+x_zero+weight_zero"),
            (0, 8, 8),
            (8, 0, 8),
            (8, 16, 0, "bias+x_zero"),
        ],
        bench=BENCHES,
    ),
    cost=eight_bit_cost,
    check=int8_agrees,
    dtypes=dict(x=(torch.int8,), weight=(torch.int8,), x_zero=(torch.int8,), weight_zero=(torch.int8,)),
    tuning_key=lambda x, weight: (x.shape[:-1].numel(), *weight.shape),
)  # fmt: skip
def linear_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None,
    x_zero: Tensor | None = None, weight_zero: Tensor | None = None, dtype: str = "",
) -> Tensor:  # fmt: skip
    """x @ weight.T + bias of int8 codes: x has a scale for each row, weight, which is [out, in], one for each output.

    With zero points a number is (code - zero) · scale. Sums of codes are exact; they become numbers, in the dtype given or
    that of weight_scale, once.
    """
    codes = x.double() if x_zero is None else x.double() - x_zero.double()[..., None]
    weights = weight.double() if weight_zero is None else weight.double() - weight_zero.double()[:, None]
    sums = (codes @ weights.T).to(wide(weight_scale).dtype)
    scaled = sums * (wide(x_scale)[..., None] * wide(weight_scale))
    return (scaled if bias is None else scaled + wide(bias)).to(result_dtype(weight_scale, dtype))


BLOCK = 128  # codes along K, and along N, that share a scale
E4M3 = torch.float8_e4m3fn
BY = ("tensor", "rows", "blocks")


def blocks_of(size: int) -> int:
    return -(-size // BLOCK)


def fp8_case(make, rows, columns, inner, by="rows", bias="plain", scales=""):
    """`by` is what shares a scale: all of a tensor, its rows, or blocks. Scales have the dtype given, or the result's."""
    shapes = dict(
        tensor=((), ()),
        rows=((rows,), (columns,)),
        blocks=((rows, blocks_of(inner)), (blocks_of(columns), blocks_of(inner))),
    )
    x_shape, weight_shape = shapes[by]
    kept = getattr(torch, scales) if scales else make.dtype
    made = dict(
        x=make.normal(rows, inner, dtype=E4M3),
        weight=make.normal(columns, inner, dtype=E4M3),
        x_scale=make.uniform(*x_shape, low=0.5, high=1.5, dtype=kept),
        weight_scale=make.uniform(*weight_shape, low=0.5, high=1.5, dtype=kept) * max(inner, 1) ** -0.5,
    )
    made |= dict(dtype=str(make.dtype).removeprefix("torch.")) if scales else {}
    return made | (dict(bias=make.normal(columns)) if bias == "bias" else {})


def by_blocks(weight_scale: Tensor) -> bool:
    return weight_scale.ndim == 2


def fp8_agrees(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: str
) -> bool | str:
    if (found := codes_agree(x, weight, bias, dtype)) is not True:
        return found
    rows, columns, inner = x.shape[:-1], weight.shape[:1], blocks_of(x.shape[-1])
    given = f"x_scale {tuple(x_scale.shape)} and weight_scale {tuple(weight_scale.shape)}"
    if by_blocks(weight_scale):
        right = x_scale.shape == (*rows, inner) and weight_scale.shape == (blocks_of(weight.shape[0]), inner)
        wanted = f"{(*rows, inner)} and {(blocks_of(weight.shape[0]), inner)}"
        return right or f"blocks of {BLOCK} codes have scales {wanted}, not {given}"
    right = x_scale.shape in ((), rows) and weight_scale.shape in ((), columns)
    return (
        right or f"a scale is one number, or one for each of {tuple(rows)} rows and {columns[0]} outputs, not {given}"
    )


def spread_over_blocks(scale: Tensor, *sizes: int) -> Tensor:
    """The scale of each code along the last dimensions, whose sizes these are."""
    for dim, size in enumerate(sizes, -len(sizes)):
        scale = scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return scale


@operator(
    cases=cases(
        fp8_case,
        check=[
            (1, 1, 1),
            (5, 17, 33, "tensor", "bias"),
            (64, 64, 64, "tensor"),
            (70, 130, 48, "rows", "bias"),
            (32, 48, 64, "rows", "bias"),
            (20, 24, 304),
            (20, 144, 304, "blocks", "bias"),
            (3, 16, 33, "blocks"),
            (0, 8, 8),
            (8, 0, 8, "blocks"),
            (8, 16, 0, "rows", "bias"),
        ],
        bench=[
            *((side, side, side, by, "plain", "float32") for side in (4096, 8192) for by in BY),
            *((rows, *LAYERS[1], "rows", "plain", "float32") for rows in (16, 512, 8192)),
            (16384, 6144, 1024, "blocks", "plain", "float32"),  # Qwen3-0.6B, as `precision.fp8` trains it
            (16384, 1024, 3072, "blocks", "plain", "float32"),
        ],
    ),
    cost=eight_bit_cost,
    check=fp8_agrees,
    dtypes=dict(x=(E4M3,), weight=(E4M3,)),
    tuning_key=lambda x, weight, weight_scale: (
        x.shape[:-1].numel(), *weight.shape, "blocks" if by_blocks(weight_scale) else ""
    ),
)  # fmt: skip
def linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None, dtype: str = ""
) -> Tensor:
    """x @ weight.T + bias of float8_e4m3fn codes; weight is [out, in].

    Each operand has one scale, or one for each row ([..., rows] of x, [out] of weight), or both have them for blocks: 128
    codes of a row of x, 128 by 128 of weight. The result is in the dtype given or that of weight_scale.
    """
    precise = wide(weight_scale).dtype
    codes, weights, x_scale, scale = (t.to(precise) for t in (x, weight, x_scale, weight_scale))
    if by_blocks(weight_scale):
        codes = codes * spread_over_blocks(x_scale, x.shape[-1])
        out = codes @ (weights * spread_over_blocks(scale, *weight.shape)).T
    else:
        out = (codes @ weights.T) * ((x_scale[..., None] if x_scale.ndim else x_scale) * scale)
    return (out if bias is None else out + wide(bias)).to(result_dtype(weight_scale, dtype))
