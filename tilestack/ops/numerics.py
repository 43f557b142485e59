"""The arithmetic habits that every definition shares."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32: half precisions are computed in float32 and rounded once; float64 stays, for the oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
