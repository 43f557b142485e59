"""Memory for arithmetic, where little arithmetic saves much: a cheap result that a layer reads is not kept for its backward
but computed again from what is kept anyway.

    gate_up ──swiglu──▶ gated ──down──▶       kept: gate_up, for the gradient of swiglu
                                              not kept: gated, half as large, which only the gradient of down asks for
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from tilestack.ops import Operator, backend
from tilestack.ops.backends import chosen


def not_keeping(result: Tensor, operator: Operator, *arguments: Any) -> AbstractContextManager:
    """Inside, autograd keeps the operator and its arguments in place of their result, and runs it again when asked.

    On the backend of now, so that the bits are the same. Compilers and activation checkpointing decide for themselves
    what to keep.
    """
    if torch.compiler.is_compiling() or not result.requires_grad or others_decide():
        return nullcontext()
    memory, size, name = result.untyped_storage().data_ptr(), result.numel(), chosen(operator.name)
    given = [argument.detach() if isinstance(argument, Tensor) else argument for argument in arguments]

    def again(shape: torch.Size) -> Tensor:
        with torch.no_grad(), backend(name):
            return operator(*given).view(shape)

    def pack(kept: Tensor) -> Tensor | torch.Size:
        return kept.shape if kept.untyped_storage().data_ptr() == memory and kept.numel() == size else kept

    def unpack(kept: Tensor | torch.Size) -> Tensor:
        return kept if isinstance(kept, Tensor) else again(kept)

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


def others_decide() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None  # type: ignore[attr-defined]
