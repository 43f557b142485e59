"""RMSNorm in CUDA C++: a block to a row. Forward only."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.cuda.build import DTYPES, call, library


def shares_dtype(x: Tensor, weight: Tensor | None) -> bool | str:
    return weight is None or x.dtype == weight.dtype or f"weight is {weight.dtype}, it takes that of x, {x.dtype}"


@implements(ops.rms_norm, backend="cuda", when=shares_dtype)
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x, weight = x.contiguous(), None if weight is None else weight.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        rows, columns = x.numel() // x.shape[-1], x.shape[-1]
        call(library("rms_norm.cu").rms_norm, x.device, x, weight, out, rows, columns, eps, DTYPES[x.dtype])
    return out
