"""What torch.autocast does to the arguments of PyTorch's own functions, for operators it does not know."""

import functools

import torch
from torch import Tensor

from tilestack.ops.autocast import full_precision, lowered

__all__ = ["full_precision", "lowered", "raised"]


@functools.cache
def knows(function: str) -> bool:
    """Whether this PyTorch's autocast has a rule for a function of its own; the list grows with its versions."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{function}", "AutocastCUDA")


def raised(x: Tensor, function: str) -> Tensor:
    """The argument of a norm or softmax: at least float32 where autocast on CUDA does that to PyTorch's, else as it is."""
    if x.is_cuda and torch.is_autocast_enabled("cuda") and knows(function):
        return x.to(torch.promote_types(x.dtype, torch.float32))
    return x
