"""The same bits from PyTorch's fused attention in every run, where PyTorch is to be deterministic.

Its backward has two ways, one that adds up gradients in one order and a faster one whose order differs from run to run.
Told to be deterministic but only to warn where it cannot, which is how training asks, PyTorch warns and takes the second,
although it has the first. So while a fused kernel runs, forward or backward, it is told to be strict.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


def only_warns() -> bool:
    """Whether PyTorch is to be deterministic, but warns and goes on where it has no such algorithm."""
    return torch.are_deterministic_algorithms_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()


@contextmanager
def in_one_order() -> Iterator[None]:
    """Inside, PyTorch is strict where it would only warn."""
    if not only_warns():
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)


def backward_in_one_order(out: Tensor) -> Tensor:
    """The result of a fused kernel, whose backward will be strict too."""
    node, strict = out.grad_fn, ExitStack()

    def begin(_: Any) -> None:
        strict.enter_context(in_one_order())

    if node is not None and only_warns():
        node.register_prehook(begin)
        node.register_hook(lambda *_: strict.close())
    return out
