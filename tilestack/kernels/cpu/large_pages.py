"""Memory in pages of 2 MiB, where it lies: weights that are read in one go for every token then come faster.

A CPU reads ahead of a stream up to the end of a page, and looks up where each page lies, which takes longer in a
virtual machine. Linux gives pages of 4 KiB unless it is asked. Asking changes no address and no number, and where the system
has no such pages, too little memory or another name, everything stays as it was.
"""

import ctypes
import sys
from collections.abc import Iterable

from torch import Tensor

PAGE = 2 << 20  # bytes
WORTHWHILE = 32 << 20  # bytes that are more than caches hold
ALLOW, COLLAPSE = 14, 25  # MADV_HUGEPAGE and, since Linux 6.1, MADV_COLLAPSE: at once


def use_large_pages(tensors: Iterable[Tensor]) -> None:
    """Put what tensors lie in into large pages, as far as the system does so and where that is worthwhile."""
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in tensors if each.nbytes]
    if sys.platform != "linux" or sum(end - start for start, end in spans) < WORTHWHILE:
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in whole_pages(spans):
        madvise(start, end - start, ALLOW)
        if madvise(start, end - start, COLLAPSE):
            # It may have stopped at a page that belongs to something else in part.
            for page in range(start, end, PAGE):
                madvise(page, PAGE, COLLAPSE)


def whole_pages(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pages that spans of addresses touch, as few spans as possible."""
    found: list[tuple[int, int]] = []
    for start, end in sorted((start // PAGE * PAGE, -(-end // PAGE) * PAGE) for start, end in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found
