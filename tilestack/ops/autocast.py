"""What torch.autocast does to the operands of PyTorch's own matrix products, done to those of ours.

Every implementation of a product lowers its operands as its first step, so that all of them have the result's dtype of
`F.linear`. Where a compiler traces a call there is an entry for autocast in the dispatcher: what it traces as one opaque
operator runs later, where autocast is off.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilestack.contract import Operator
from tilestack.contract.library import LIBRARY

# Asked once: torch.compile cannot trace the question.
KNOWS_AUTOCAST = frozenset(kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind))
DISPATCH_KEYS = ("AutocastCPU", "AutocastCUDA")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """What autocast makes of the operands of a product with x; None where it is off, and for float64."""
    device = x.device.type
    if device not in KNOWS_AUTOCAST or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


def full_precision(device: str) -> AbstractContextManager:
    """Inside, autocast leaves dtypes alone."""
    return torch.autocast(device, enabled=False) if device in KNOWS_AUTOCAST else nullcontext()


def lowered(x: Tensor, *others: Tensor | None) -> tuple:
    """The operands of a product: in autocast's dtype where it is on, but for float64; otherwise as they are."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, *others
    return x.to(dtype), *(t.to(dtype) if t is not None and t.is_floating_point() else t for t in others)


def lower_when_traced(op: Operator) -> None:
    """Give an operator its entry for autocast in PyTorch's dispatcher, and so whatever hands extras on in its place; and let
    its arguments be checked as autocast has them."""
    op.lowered = lambda arguments: lowered_arguments(op, arguments)
    op.autocast_entry = lambda name: lower_operands_of(op, name)
    op.autocast_entry(op.name)


def lowered_arguments(op: Operator, arguments: dict[str, Any]) -> dict[str, Any]:
    operands = lowered(*(arguments[name] for name in op.tensors))
    return arguments | dict(zip(op.tensors, operands, strict=True))


def lower_operands_of(op: Operator, name: str) -> None:
    """The entry of `torch.ops.tilestack.<name>`, which takes the operator's arguments and perhaps more after them."""
    keys = [getattr(torch._C.DispatchKey, key) for key in DISPATCH_KEYS]
    without = torch._C.DispatchKeySet(keys[0]) | torch._C.DispatchKeySet(keys[1])
    opaque, count = getattr(torch.ops.tilestack, name), len(op.parameters)

    def run(*values: Any, **chosen: str) -> Any:
        arguments = lowered_arguments(op, op.bind(*values[:count]))
        with torch._C._ExcludeDispatchKeyGuard(without):
            return opaque(*arguments.values(), *values[count:], **chosen)

    for key in DISPATCH_KEYS:
        LIBRARY.impl(name, run, key)
