"""Memory that a kernel needs beside its results: counters, flags and partial sums, all zeros when it gets them.

One for each name and stream, kept from call to call: whoever uses it leaves zeros behind, as the last program of a
split sum does with its counter. Two streams never share one, nor does a CUDA graph share one with the calls outside:
while a graph is captured, its first call of a name is given new memory, whose zeroing is part of the graph, and those that
follow on the same stream find it as zero as the one before left it. A kernel that zeroes for every call would cost as
much as a small product, and stand between kernels that begin early.
"""

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from tilestack.contract.launch import notes

VIEWS_KEPT = 1 << 12
CAPTURING = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE

_kept: dict[tuple, Tensor] = {}
_captured: dict[tuple, Tensor] = {}  # of the graph that a thread captures, or captured last
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
        stream = torch._C._cuda_getCurrentRawStream(
            torch.cuda.current_device() if device.index is None else device.index
        )
        if torch.cuda.is_current_stream_capturing():
            return _of_capture(name, shape, dtype, device, stream)
    found = _views.get((name, shape, dtype, device, stream))
    return _new_view(name, shape, dtype, device, stream) if found is None else found


def _of_capture(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, stream: int) -> Tensor:
    """Zeros for a call that is captured: those that an earlier call of its graph left, else new ones."""
    thread, capture, size = threading.get_ident(), capture_number(stream), math.prod(shape)
    for other in list(_captured):  # in one go: other threads may capture graphs too
        if other[0] == thread and other[1] != capture:
            del _captured[other]
    key = (thread, capture, name, dtype, device, stream)
    kept = None if capture is None else _captured.get(key)
    with _disable_current_modes():  # what is given is no part of the call that asks for it
        if kept is None or kept.numel() < size:
            kept = torch.zeros(max(size, 1), dtype=dtype, device=device)
            if capture is not None:
                _captured[key] = kept  # held: what a graph frees while it is captured, it uses again
        return kept[:size].view(shape)


def capture_number(stream: int) -> int | None:
    """Which capture a stream takes part in, as the driver numbers them; None where it does not say."""
    status, number = ctypes.c_int(), ctypes.c_uint64()
    ask = _capture_info()
    if ask is None or ask(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None):
        return None
    return number.value if status.value == CAPTURING else None


@functools.cache
def _capture_info() -> Any:
    try:
        return ctypes.CDLL("libcuda.so.1").cuStreamGetCaptureInfo_v2
    except (OSError, AttributeError):
        return None


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
