"""What torch.autocast does to the operands of PyTorch's own matrix products, done to those of ours.

Every implementation of a product lowers its operands as its first step, so that all of them have the result's dtype of
`F.linear`; attention is lowered before one is chosen, and what has products of codes computes as without autocast. Where a
compiler traces a call there is an entry for autocast in the dispatcher: what it traces as one opaque operator runs later,
where autocast is off.
"""

import functools
from collections.abc import Callable, Sequence
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
    return torch.get_autocast_dtype(device) if is_on(device) and x.dtype != torch.float64 else None


def is_on(device: str) -> bool:
    return device in KNOWS_AUTOCAST and torch.is_autocast_enabled(device)


def full_precision(device: str) -> AbstractContextManager:
    """Inside, autocast leaves dtypes alone."""
    return torch.autocast(device, enabled=False) if device in KNOWS_AUTOCAST else nullcontext()


def lowered(x: Tensor, *others: Tensor | None) -> tuple:
    """The operands of a product: in autocast's dtype where it is on, but for float64; otherwise as they are."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, *others
    return x.to(dtype), *(t.to(dtype) if t is not None and is_lowered(t) else t for t in others)


def is_lowered(x: Tensor) -> bool:
    return x.is_floating_point() and x.dtype != torch.float64


def lower_when_traced(op: Operator, *operands: str) -> None:
    """Give an operator its entry for autocast in PyTorch's dispatcher, and so whatever hands extras on in its place; and let
    its arguments be checked as autocast has them. All of its tensors are operands where none is named."""
    op.lowered = functools.partial(lowered_arguments, operands or op.tensors)
    op.autocast_entry = lambda name: lower_operands_of(op, name)
    op.autocast_entry(op.name)


def lower_before(op: Operator, *operands: str) -> None:
    """Let an operator's implementations, which know nothing of autocast, get these operands lowered and compute without it."""
    lower_when_traced(op, *operands)
    call = functools.partial(call_without, op)
    op.under_autocast = lambda arguments: call if is_on(op.device_of(arguments).type) else None


def compute_without(op: Operator) -> None:
    """Let an operator that lowers nothing have the products of its definition left alone too."""
    call = functools.partial(call_without, op)

    def under_autocast(arguments: dict[str, Any]) -> Callable | None:
        on = is_on(op.device_of(arguments).type)
        return call if on and op.resolve(arguments).forward is op.definition else None

    op.under_autocast = under_autocast


def call_without(op: Operator, *values: Any) -> Any:
    """Call an operator without autocast, its operands lowered where it lowers any."""
    arguments = dict(zip(op.parameters, values, strict=True))
    if op.lowered is not None:
        arguments = op.lowered(arguments)
    with full_precision(op.device_of(arguments).type):
        return op(*arguments.values())


def lowered_arguments(operands: Sequence[str], arguments: dict[str, Any]) -> dict[str, Any]:
    return arguments | dict(zip(operands, lowered(*(arguments[name] for name in operands)), strict=True))


def lower_operands_of(op: Operator, name: str) -> None:
    """The entry of `torch.ops.tilestack.<name>`, which takes the operator's arguments and perhaps more after them."""
    keys = [getattr(torch._C.DispatchKey, key) for key in DISPATCH_KEYS]
    without = torch._C.DispatchKeySet(keys[0]) | torch._C.DispatchKeySet(keys[1])
    opaque, count = getattr(torch.ops.tilestack, name), len(op.parameters)

    def run(*values: Any, **chosen: str) -> Any:
        arguments = op.lowered(op.bind(*values[:count]))  # type: ignore[misc]
        with torch._C._ExcludeDispatchKeyGuard(without):
            return opaque(*arguments.values(), *values[count:], **chosen)

    for key in DISPATCH_KEYS:
        LIBRARY.impl(name, run, key)
