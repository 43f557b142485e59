"""PyTorch's own products of 8-bit codes, as the backend `aten`."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.aten import aligned, zero_past
from tilestack.kernels.quantised.codes import HALVES_AND_SINGLE
from tilestack.kernels.quantised.fp8 import OPERANDS
from tilestack.kernels.tiles import as_matrix
from tilestack.ops.quantised_linear import by_blocks, result_dtype

LEAST_ROWS = 17  # that torch._int_mm takes


def multiplies_integers(x: Tensor, weight: Tensor, x_zero: Tensor | None, weight_zero: Tensor | None) -> bool | str:
    if not x.is_cuda:
        return "PyTorch's own product of integers needs a GPU"
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


def multiplies_fp8(
    x: Tensor, weight: Tensor, weight_scale: Tensor, x_scale: Tensor, bias: Tensor | None, dtype: str
) -> bool | str:
    if not x.is_cuda or torch.cuda.get_device_capability(x.device) < (9, 0):
        return "PyTorch's own product of fp8 with scales needs compute capability 9.0"
    if by_blocks(weight_scale) or x_scale.ndim != weight_scale.ndim or x_scale.ndim > 1:
        return "PyTorch's own product of fp8 has one scale for each tensor, or one for each row of both matrices"
    if result_dtype(weight_scale, dtype) != torch.bfloat16 or (bias is not None and bias.dtype != torch.bfloat16):
        return "PyTorch's own product of fp8 gives bfloat16, and wants a bias of it"
    if 0 in (*x.shape, *weight.shape) or x.shape[-1] % 16 or weight.shape[0] % 16:
        return f"PyTorch's own product of fp8 wants multiples of 16, not {x.shape[-1]} to {weight.shape[0]}"
    return True


@implements(ops.linear_fp8, backend="aten", dtypes=OPERANDS, when=multiplies_fp8)
def linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, dtype: str
) -> Tensor:
    by_rows = weight_scale.ndim == 1
    x_scale, weight_scale = x_scale.float().contiguous(), weight_scale.float().contiguous()
    out = torch._scaled_mm(
        aligned(as_matrix(x)),
        aligned(weight).T,
        scale_a=x_scale.view(-1, 1) if by_rows else x_scale,
        scale_b=weight_scale.view(1, -1) if by_rows else weight_scale,
        bias=None if bias is None else aligned(bias),
        out_dtype=torch.bfloat16,
    )
    return out.view(*x.shape[:-1], -1)


def has_grouped_fp8(device: torch.device) -> bool | str:
    """Whether PyTorch multiplies groups of fp8 codes with scales of rows here."""
    if not hasattr(torch, "_scaled_grouped_mm"):
        return f"PyTorch {torch.__version__} has no grouped product of fp8, torch._scaled_grouped_mm"
    return (device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9) or (
        "PyTorch's own grouped product of fp8 with scales of rows needs compute capability 9.0"
    )


def multiplies_groups_of_fp8(x: Tensor, weight: Tensor, weight_scale: Tensor, dtype: str) -> bool | str:
    if (found := has_grouped_fp8(x.device)) is not True:
        return found
    if weight_scale.ndim != 2:
        return "PyTorch's own grouped product of fp8 has a scale for each row of both matrices, none for blocks"
    if result_dtype(weight_scale, dtype) != torch.bfloat16:
        return "PyTorch's own grouped product of fp8 gives bfloat16"
    if 0 in (*x.shape, *weight.shape) or x.shape[1] % 16 or weight.shape[1] % 16:
        return f"PyTorch's own grouped product of fp8 wants multiples of 16, not {x.shape[1]} to {weight.shape[1]}"
    return True


@implements(ops.grouped_linear_fp8, backend="aten", dtypes=OPERANDS, when=multiplies_groups_of_fp8)
def grouped_linear_fp8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: str
) -> Tensor:
    offsets = offsets.contiguous()
    out = torch._scaled_grouped_mm(
        aligned(x),
        aligned(weight).mT,
        x_scale.float().contiguous(),
        weight_scale.float().contiguous(),
        offs=offsets,
        out_dtype=torch.bfloat16,
    )
    return zero_past(out, offsets)
