"""Triton's interpreter made stricter: it refuses reads of what is not a kernel's, and treats numbers as carelessly as a GPU.

By itself it reads any address, so that a mask which lets through too much is seen only where something becomes of what was
read; a number too large for an integer wraps around to what may be the right one, where a GPU promises nothing; and the
place of the largest is that of a NaN, where on a GPU NaN is overlooked. Where kernels have a branch for the interpreter, it
can be made to take the other. (What is wrong for anybody who interprets kernels is mended in kernels/interpreter.py.)
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from tilestack.contract.backends import interpreting

SWITCH = "INTERPRETED"  # what a file of kernels calls the answer to whether it is interpreted
Span = tuple[int, int]  # of addresses: that of the first byte, and the one after the last


class ReadOutside(Exception):
    """A kernel read where it had no business: before or beyond a tensor."""


@contextmanager
def reads_refused(spans: Sequence[Span]) -> Iterator[None]:
    """Inside, an interpreted kernel must not read from these addresses, which do not overlap; more may be added meanwhile."""
    if not interpreting():
        yield
        return
    bounds = np.empty(0, np.uint64)

    def check(pointers: np.ndarray, mask: np.ndarray) -> None:
        nonlocal bounds
        if len(bounds) != 2 * len(spans):
            bounds = np.sort(np.array(spans, np.uint64).ravel())
        read = pointers[np.broadcast_to(mask, pointers.shape) != 0]  # a mask may be of integers
        if not len(read):
            return
        first, last = np.searchsorted(bounds, np.array([read.min(), read.max()]), "right")
        # Between the same two bounds, and these not a span's: all is well without a look at each address.
        if (first != last or first % 2) and (np.searchsorted(bounds, read, "right") % 2).any():
            raise ReadOutside("it reads before or beyond a tensor")

    def checked(load: Callable) -> Callable:
        def create_masked_load(ptrs: Any, mask: Any, *rest: Any, **named: Any) -> Any:
            check(ptrs.data, mask.data)
            return load(ptrs, mask, *rest, **named)

        return create_masked_load

    with interpreter_with(create_masked_load=checked):
        yield


@contextmanager
def careless_casts() -> Iterator[None]:
    """Inside, a float that an integer's type does not hold becomes the integer at the other end of that type."""
    if not interpreting():
        yield
        return

    def careless(cast: Callable) -> Callable:
        def convert(source: Any, to: Any) -> Any:
            converted = cast(source, to)
            if source.data.dtype.kind == "f" and converted.data.dtype.kind in "iu":
                held = np.iinfo(converted.data.dtype)
                value = source.data.astype(np.float64)
                converted.data = np.where(value >= held.max + 1.0, held.min, converted.data)
                converted.data = np.where(value > held.min - 1.0, converted.data, held.max).astype(held.dtype)
            return converted

        return convert

    with interpreter_with(create_fp_to_si=careless, create_fp_to_ui=careless):
        yield


@contextmanager
def nan_overlooked() -> Iterator[None]:
    """Inside, where the place of the largest is sought, a NaN loses to what it is compared with first, even to what fills up
    a tile."""
    if not interpreting():
        yield
        return
    from triton.language import standard
    from triton.runtime.interpreter import ReduceOps

    places = standard._argmax_combine_tie_break_left, standard._argmin_combine_tie_break_left
    usual = ReduceOps.apply_impl

    def reduce(reduction: Any, tiles: Sequence[Any]) -> Any:
        by_halves = reduction.combine_fn in places and np.isnan(tiles[0].handle.data).any()
        return tuple(reduce_by_halves(reduction, tiles)) if by_halves else usual(reduction, tiles)

    with attributes_replaced(ReduceOps, apply_impl=reduce):
        yield


@contextmanager
def branches_of_a_gpu(module: ModuleType) -> Iterator[None]:
    """Inside, a file of kernels takes the branches that it has for a GPU, if any, and reductions go by halves as there."""
    before = getattr(module, SWITCH, None)
    if before is None:
        yield
        return
    from triton.runtime.interpreter import ReduceOps

    with (
        attributes_replaced(module, **{SWITCH: type(before)(False)}),
        attributes_replaced(ReduceOps, generic_reduce=reduce_by_halves),
    ):
        yield


def reduce_by_halves(reduction: Any, tiles: Sequence[Any]) -> list[Any]:
    """In the place of `ReduceOps.generic_reduce`, which goes from element to element: slowly, and rounding each time."""
    tiles, axis = reduction.unravel(tiles, reduction.axis)
    while (size := tiles[0].handle.data.shape[axis]) > 1:
        halves = [np.split(tile.handle.data, [size // 2], axis) for tile in tiles]
        parts = [
            reduction.to_tensor(half[side], tile.dtype)
            for side in (0, 1)
            for tile, half in zip(tiles, halves, strict=True)
        ]
        combined = reduction.combine_fn.fn(*parts)
        tiles = combined if isinstance(combined, tuple) else (combined,)
    found = [(tile.handle.data, tile.dtype) for tile in tiles]
    return [reduction.to_tensor(data if reduction.keep_dims else data.squeeze(axis), dtype) for data, dtype in found]


@contextmanager
def interpreter_with(**wrappers: Callable[[Callable], Callable]) -> Iterator[None]:
    """Inside, methods of the builder that interprets kernels are wrapped."""
    from triton.runtime.interpreter import interpreter_builder as builder

    with attributes_replaced(builder, **{name: wrap(getattr(builder, name)) for name, wrap in wrappers.items()}):
        yield


@contextmanager
def attributes_replaced(owner: Any, **values: Any) -> Iterator[None]:
    """Inside, attributes have other values."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)
