"""Multiplying or dividing tensors by a number on the device, rounded once.

PyTorch rounds a 0-dim tensor on CUDA to the dtype of the tensor it meets: a float32 factor becomes a bfloat16 of eight bits,
and every gradient is up to 0.4% off. A factor with a dimension takes part in type promotion instead: the product is made in
float32 and rounded when it is stored, in the same pass over memory. Nothing is waited for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def scale_exactly_(tensors: Sequence[Tensor], factor: Tensor) -> None:
    """Multiply tensors in place by a factor, a tensor of no dimension."""
    alike, narrower = by_precision(tensors, factor)
    if alike:
        torch._foreach_mul_(alike, factor)
    for tensor in narrower:
        with_dimension(tensor).mul_(factor.reshape(1))


def divide_exactly_(tensors: Sequence[Tensor], divisor: Tensor) -> None:
    """Divide tensors in place by a divisor, a tensor of no dimension."""
    alike, narrower = by_precision(tensors, divisor)
    if alike:
        torch._foreach_div_(alike, divisor)
    for tensor in narrower:
        with_dimension(tensor).div_(divisor.reshape(1))


def by_precision(tensors: Sequence[Tensor], factor: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Tensors that hold all of the factor's bits, and those whose dtype would cut some off."""
    holds = lambda tensor: torch.promote_types(tensor.dtype, factor.dtype) == tensor.dtype
    return [x for x in tensors if holds(x)], [x for x in tensors if not holds(x)]


def with_dimension(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim else tensor.view(1)
