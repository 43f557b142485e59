"""Rows as small codes and one scale each: value ≈ code · scale, the row's largest magnitude on the largest code."""

import torch
from torch import Tensor

LARGEST_CODE = {torch.int8: 127, torch.float8_e4m3fn: 448}
SMALLEST_ROW = 1e-30  # rows whose largest magnitude is below count as this large, so that zeros have a scale too


def quantised(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scale) of each row of wide values, rounded to nearest. A row that is not finite has the scale NaN.

    Float64 codes stay unrounded, for the oracle: it then knows which roundings were too close to call.
    """
    largest = values.abs().amax(-1)
    top = torch.full_like(largest, LARGEST_CODE[dtype])  # by a number, PyTorch multiplies with its inverse on a GPU
    scale = torch.where(largest < torch.inf, largest.clamp_min(SMALLEST_ROW) / top, torch.nan)
    codes = values / scale[..., None]
    if codes.dtype == torch.float64:
        return codes, scale
    return (codes.nan_to_num(0).round() if dtype == torch.int8 else codes).to(dtype), scale
