"""PyTorch's own products of 8-bit codes, as the backend `aten`."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.quantised_linear import result_dtype

LEAST_ROWS = 17  # that torch._int_mm takes


def multiplies_integers(x: Tensor, weight: Tensor, x_zero: Tensor | None, weight_zero: Tensor | None) -> bool | str:
    if not x.is_cuda:
        return "PyTorch's own product of integers is one of GPUs"
    if x_zero is not None or weight_zero is not None:
        return "PyTorch's own product of integers has no zero points"
    if x.shape[:-1].numel() < LEAST_ROWS:
        return f"PyTorch's own product of integers takes {LEAST_ROWS} rows and more, not {x.shape[:-1].numel()}"
    return (x.shape[-1] % 8 == 0 and weight.shape[0] % 8 == 0 and weight.numel() > 0) or (
        f"PyTorch's own product of integers wants multiples of 8, not {x.shape[-1]} to {weight.shape[0]}"
    )


@implements(ops.linear_int8, backend="aten", dtypes=HALVES_AND_SINGLE, when=multiplies_integers)
def linear_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, x_zero: None,
    weight_zero: None, dtype: str,
) -> Tensor:  # fmt: skip
    sums = torch._int_mm(as_matrix(x).contiguous(), weight.contiguous().T).view(*x.shape[:-1], -1)
    out = sums * (x_scale.float()[..., None] * weight_scale.float())
    return (out if bias is None else out + bias.float()).to(result_dtype(weight_scale, dtype))
