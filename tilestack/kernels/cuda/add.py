"""Vector addition in CUDA C++: the first kernel anyone writes, and all that surrounds one."""

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.implementation import FLOATS
from tilestack.kernels.cuda.build import DTYPES, call, library
from tilestack.ops.elementwise import add_gradient


@implements(ops.add, backend="cuda", backward=add_gradient, dtypes=dict(x=FLOATS, y=FLOATS))
def add(x: Tensor, y: Tensor) -> Tensor:
    x, y = x.contiguous(), y.contiguous()
    out = torch.empty_like(x)
    if out.numel():
        call(library("add.cu").add, x.device, x, y, out, x.numel(), DTYPES[x.dtype])
    return out
