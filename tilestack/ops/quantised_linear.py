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
