"""Variants of a case that break kernels: the same arguments laid out awkwardly in memory, very large, or with a NaN.

Each changes the arguments of any operator, so that a new operator is tried in all of them without a line of its own.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]


def plain(x: Tensor) -> Tensor:
    return x


def strided(x: Tensor) -> Tensor:
    """Every second element of a row twice as long."""
    if x.ndim == 0:
        return x
    return x.new_zeros(*x.shape[:-1], 2 * x.shape[-1])[..., ::2].copy_(x)


def transposed(x: Tensor) -> Tensor:
    """Columns contiguous instead of rows."""
    return x.mT.contiguous().mT if x.ndim > 1 else x


def offset(x: Tensor) -> Tensor:
    """Contiguous, but starting one element into its memory, so that it is not aligned to 16 bytes."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape).copy_(x)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = dict(
    plain=plain, strided=strided, transposed=transposed, offset=offset
)


def large(arguments: Arguments) -> Arguments:
    """The first floating tensor a thousand times larger."""
    name = first_float(arguments)
    return arguments | {name: arguments[name] * 1000} if name else arguments


def with_nan(arguments: Arguments) -> Arguments:
    """A NaN in the middle of the first floating tensor."""
    name = first_float(arguments)
    if name is None or arguments[name].numel() == 0:
        return arguments
    poisoned = arguments[name].clone(memory_format=torch.contiguous_format)
    poisoned.view(-1)[poisoned.numel() // 2] = torch.nan
    return arguments | {name: poisoned}


VALUES: dict[str, Callable[[Arguments], Arguments]] = dict(large=large, nan=with_nan)
ALL = [*LAYOUTS, *VALUES]


def vary(arguments: Arguments, variant: str) -> Arguments:
    if variant in VALUES:
        return VALUES[variant](arguments)
    return {name: LAYOUTS[variant](value) if isinstance(value, Tensor) else value for name, value in arguments.items()}


def first_float(arguments: Arguments) -> str | None:
    return next(
        (name for name, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()), None
    )
