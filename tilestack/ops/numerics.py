"""The arithmetic habits that every definition shares."""

import torch
from torch import Tensor


def wide(x: Tensor) -> Tensor:
    """At least float32: half precisions are computed in float32 and rounded once; float64 stays, for the oracle."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def named_rows_exist(name: str, index: Tensor, rows: int, but: int | None = None) -> bool | str:
    """True where every index names one of so many rows, or is the number that stands for none; else the first that does not."""
    wrong = (index < 0) | (index >= rows)
    if but is not None:
        wrong &= index != but
    if not bool(wrong.any()):
        return True
    place = wrong.nonzero()[0].tolist()
    return f"{name}{place} is {int(index[tuple(place)])}, which names none of {rows} rows"
