"""Variants of a case that break kernels: the same call laid out awkwardly in memory, very large, or with a NaN.

Each changes the arguments of any operator, and the gradients that arrive at its results, so that a new operator is tried
in all of them without a line of its own. A tensor lies alone in memory of its own, and before, between and after its
elements lies what must not be read: NaN, or zeros where there is none. No two tensors of a call have the same strides
where that can be helped, so that a kernel that takes one for another's is seen. The order of dimensions in memory stays
that of the case: an image whose channels lie together is laid out awkwardly with its channels together.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Arguments = dict[str, Any]

GUARD = 1024  # elements that must not be read, before and after a tensor; a multiple of any alignment


def placed(x: Tensor, strides: Sequence[int], start: int = GUARD) -> Tensor:
    """x in memory of its own, with these strides, from element `start` on."""
    reach = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, strides, strict=True)) if x.numel() else 0
    memory = x.new_full((start + reach + GUARD,), math.nan if x.is_floating_point() else 0)
    return memory.as_strided(x.shape, strides, start).copy_(x)


def strides_with(shape: Sequence[int], step: int = 1, pad: int = 0, lines: int = 0) -> list[int]:
    """Strides of rows whose elements lie `step` apart, with `pad` elements after a row and `lines` rows after a matrix."""
    strides, reach = [], step
    for place, size in enumerate(reversed(shape)):
        strides.append(reach)
        reach *= max(size, 1)
        reach += (pad, lines * reach // max(size, 1))[place] if place < 2 else 0
    return strides[::-1]


def plain(x: Tensor, place: int) -> Tensor:
    """Contiguous."""
    return placed(x, strides_with(x.shape))


def padded(x: Tensor, place: int) -> Tensor:
    """The first columns of a wider matrix, whose rows start on 16 bytes wherever those of x would."""
    return placed(x, strides_with(x.shape, pad=16 * (place + 1)))


def ragged(x: Tensor, place: int) -> Tensor:
    """The first columns and lines of a wider and longer matrix, whose rows start anywhere."""
    return placed(x, strides_with(x.shape, pad=2 * place + 1, lines=1))


def strided(x: Tensor, place: int) -> Tensor:
    """Every second element of a row twice as long."""
    return placed(x, strides_with(x.shape, step=2))


def transposed(x: Tensor, place: int) -> Tensor:
    """Columns contiguous instead of rows."""
    return placed(x.mT, strides_with(x.mT.shape)).mT if x.ndim > 1 else plain(x, place)


def offset(x: Tensor, place: int) -> Tensor:
    """Contiguous, but starting an odd number of elements into its memory, so that it is not aligned to 16 bytes."""
    return placed(x, strides_with(x.shape), start=GUARD + 2 * place + 1)


Layout = Callable[[Tensor, int], Tensor]
LAYOUTS: dict[str, Layout] = dict(
    plain=plain, padded=padded, ragged=ragged, strided=strided, transposed=transposed, offset=offset
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
    poisoned = arguments[name].clone()
    poisoned[torch.unravel_index(torch.tensor(poisoned.numel() // 2), poisoned.shape)] = torch.nan
    return arguments | {name: poisoned}


def nudged_arguments(arguments: Arguments, seed: int) -> Arguments:
    """Every number moved by a unit in its last place, or not: the same problem, as hard as before, rounded otherwise."""
    moved = {}
    for place, (name, value) in enumerate(arguments.items()):
        if isinstance(value, Tensor) and value.is_floating_point() and value.element_size() > 1:
            generator = torch.Generator().manual_seed(997 * seed + place)
            units = torch.randint(-1, 2, value.shape, generator=generator).to(value.device)
            moved[name] = (value.double() * (1 + units * torch.finfo(value.dtype).eps)).to(value.dtype)
    return arguments | moved


def expanded(x: Tensor, place: int) -> Tensor:
    """The first of x in the place of all others, which is what `expand` gives: a stride of zero."""
    if not x.is_floating_point() or not x.numel() or not x.ndim:
        return plain(x, place)
    return plain(x[:1], place).expand(x.shape)


def in_its_order(layout: Layout, x: Tensor, place: int) -> Tensor:
    """x in a layout, its dimensions one inside the other as they are in memory now, where they lie there without gaps."""
    order = sorted(range(x.ndim), key=x.stride().__getitem__, reverse=True)
    if not x.permute(order).is_contiguous():
        return layout(x, place)
    return layout(x.permute(order), place).permute([order.index(dim) for dim in range(x.ndim)])


# These change values, and so the definition's results.
VALUES: dict[str, Callable[[Arguments], Arguments]] = dict(large=large, nan=with_nan, expanded=lambda given: given)
ALL = [*LAYOUTS, *VALUES]


def vary(arguments: Arguments, variant: str, written: Sequence[str] = ()) -> Arguments:
    """The arguments of a call in a variant; what is `written` cannot be expanded."""
    arguments = VALUES.get(variant, lambda given: given)(arguments)
    tensors = [name for name, value in arguments.items() if isinstance(value, Tensor)]
    for place, name in enumerate(tensors):
        layout = LAYOUTS.get(variant, plain) if variant != "expanded" or name in written else expanded
        arguments = arguments | {name: in_its_order(layout, arguments[name], place)}
    return arguments


def vary_gradients(arriving: Sequence[Tensor], variant: str, place: int) -> list[Tensor]:
    """The gradients that arrive at a call's results in a variant; `place` is how many tensors the call has besides."""
    layout = expanded if variant == "expanded" else LAYOUTS.get(variant, plain)
    return [in_its_order(layout, gradient, place + number) for number, gradient in enumerate(arriving)]


def first_float(arguments: Arguments) -> str | None:
    """The first floating tensor; codes of 8 bits are no numbers to be made larger, their scales are."""
    tensors = ((name, value) for name, value in arguments.items() if isinstance(value, Tensor))
    return next((name for name, value in tensors if value.is_floating_point() and value.element_size() > 1), None)
