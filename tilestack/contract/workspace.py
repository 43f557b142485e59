"""Memory that a kernel needs beside its results: counters, flags and partial sums, all zeros when it gets them.

One for each name and stream, kept from call to call: whoever uses it leaves zeros behind, as the last program of a
split sum does with its counter. Two streams never share one, nor does a CUDA graph share one with the calls outside:
while a graph is captured it is given new memory, whose zeroing is part of the graph.
"""

import math
import threading
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilestack.contract.launch import notes

VIEWS_KEPT = 1 << 12

_kept: dict[tuple, Tensor] = {}
_views: dict[tuple, Tensor] = {}  # of what is kept, in the shapes asked for: a repeated call asks for the same again


class Workspace(NamedTuple):
    """A workspace that was noted, and how to ask for it again."""

    tensor: Tensor
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def workspace(name: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of a shape, the same memory for every call of this name on this stream; to be left as zeros."""
    tensor = _find(name, tuple(shape), dtype, device)
    if notes and (events := notes.get(threading.get_ident())) is not None:
        events.append(Workspace(tensor, name, tuple(shape), dtype, device))
    return tensor


def _find(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    stream = 0
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            with _disable_current_modes():  # what is given is no part of the call that asks for it
                return torch.zeros(shape, dtype=dtype, device=device)
        stream = torch._C._cuda_getCurrentRawStream(
            torch.cuda.current_device() if device.index is None else device.index
        )
    found = _views.get((name, shape, dtype, device, stream))
    return _new_view(name, shape, dtype, device, stream) if found is None else found


def _new_view(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """What is kept of a name, in a shape that was not asked for before."""
    size, key = math.prod(shape), (name, dtype, device, stream)
    with _disable_current_modes():
        kept = _kept.get(key)
        if kept is None or kept.numel() < size:
            kept = _kept[key] = torch.zeros(max(size, 1), dtype=dtype, device=device)
            _views.clear()  # those of the smaller memory among them
        if len(_views) >= VIEWS_KEPT:
            _views.clear()
        found = _views[name, shape, dtype, device, stream] = kept[:size].view(shape)
    return found
