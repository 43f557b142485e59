"""Numbers on their way to the device."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch
from torch import Tensor


def to_device(values: Sequence[Any] | numpy.ndarray, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Sent from pinned memory, so that nobody waits for what the device is doing."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)
