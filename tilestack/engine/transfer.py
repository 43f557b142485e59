"""Numbers on their way to the device, without anybody waiting for what it is doing."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor


def to_pinned(values: Sequence[Any] | numpy.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers in host memory that a device can read by itself."""
    made = torch.from_numpy(numpy.array(values)).to(dtype)  # of a list, PyTorch takes ten times as long
    return made.pin_memory() if device.type == "cuda" else made


def to_device(values: Sequence[Any] | numpy.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    return to_pinned(values, device, dtype).to(device, non_blocking=True)
