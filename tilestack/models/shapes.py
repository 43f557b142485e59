"""Models by their shapes alone, on `meta`: what loading, planning and checks before a run begin with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

DRAWS = (torch.nn.init.normal_, torch.Tensor.normal_)


class NothingDrawn(TorchFunctionMode):
    """Leaves alone what modules would fill with normal numbers. On `meta` that does nothing, but PyTorch loads its compiler for
    it, a second's work before a model answers."""

    def __torch_function__(
        self, function: Callable, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if function in DRAWS:
            return args[0] if args else given["tensor"]
        return function(*args, **given)


@contextmanager
def shapes_alone() -> Iterator[None]:
    """Inside, modules are made without memory and without numbers."""
    with torch.device("meta"), NothingDrawn():
        yield
