"""From addresses to elements: which tensor of a kernel an address lies in, and which element of it that is.

A kernel is given addresses, and a launcher may give it several views of one memory (q, k and v of a projection), views with
gaps, and memory that no caller ever sees. A region is one of them under the name of the kernel's argument:

    memory        |guard|q q k k v v|q q k k v v|…|guard|
    region q_ptr        |0 1 · · · ·|2 3 · · · ·|…          its elements, numbered in the order of its own shape
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from tilestack.lab.labels import dtype_name
from tilestack.lab.proof.interpreted import Span


@dataclass(frozen=True)
class Region:
    """Memory as a kernel's argument describes it."""

    name: str
    dtype: str
    itemsize: int
    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements

    @classmethod
    def of(cls, name: str, tensor: Tensor, shape: Iterable[int], strides: Iterable[int]) -> "Region":
        """A tensor in its own shape or another, without what is expanded; one whose elements overlap is a line of memory."""
        kept = [(size, stride) for size, stride in zip(shape, strides, strict=True) if stride or size == 1]
        shape, strides = tuple(size for size, _ in kept), tuple(stride for _, stride in kept)
        reach = 1
        for stride, size in sorted((stride, size) for size, stride in kept if size > 1):
            if stride < reach:
                shape, strides = (1 + sum((size - 1) * stride for size, stride in kept),), (1,)
                break
            reach += (size - 1) * stride
        dtype = dtype_name(tensor.dtype)
        return cls(name, dtype, tensor.element_size(), tensor.data_ptr(), shape, strides)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The address after its last byte."""
        reach = sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1
        return self.address + (reach * self.itemsize if self.size else 0)

    def elements_at(self, addresses: np.ndarray) -> np.ndarray:
        """The number of the element at each address, and -1 where there is none."""
        left = (addresses.astype(np.int64) - self.address) // self.itemsize
        inside = (left >= 0) & (addresses < self.end)
        number = np.zeros_like(left)
        steps = np.cumprod([1, *reversed(self.shape[1:])])[::-1] if self.shape else ()
        for stride, size, step in sorted(zip(self.strides, self.shape, steps, strict=True), reverse=True):
            place = left // max(stride, 1) if size > 1 else np.zeros_like(left)
            left = left - place * stride
            inside &= place < size
            number += place * int(step)
        return np.where(inside & (left == 0), number, -1)


class Memory:
    """All memory that a call may touch: tensors by storage, and what lies around them and must not be touched."""

    def __init__(self, guards: list[Span]) -> None:
        self.guards = guards  # which grows with what is allocated
        self.storages: dict[int, int] = {}  # the address of the first byte, and of the one after the last

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.storages[storage.data_ptr()] = max(
            storage.nbytes() + storage.data_ptr(), self.storages.get(storage.data_ptr(), 0)
        )

    def holding(self, address: int) -> Span | None:
        """The storage in which an address lies, without the guards at its ends."""
        starts = sorted(self.storages)
        place = bisect_right(starts, address) - 1
        if place < 0 or address >= self.storages[starts[place]]:
            return None
        first, end = starts[place], self.storages[starts[place]]
        for start, stop in self.guards:
            if start == first:
                first = stop
            elif stop == end:
                end = start
        return first, end
