"""Softmax in CUDA C++: a block to a row."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.kernels.cuda.build import DTYPES, call, library
from tilestack.ops.softmax import softmax_gradient


@implements(ops.softmax, backend="cuda", backward=softmax_gradient)
def softmax(x: Tensor, dim: int) -> Tensor:
    rows = x.movedim(dim, -1).contiguous()
    out = torch.empty_like(rows)
    if out.numel():
        columns = rows.shape[-1]
        call(library("softmax.cu").softmax, x.device, rows, out, rows.numel() // columns, columns, DTYPES[x.dtype])
    return out.movedim(-1, dim).contiguous()
