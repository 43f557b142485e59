"""Activation checkpointing keeps the choice of backends: what is computed again is what was computed before.

PyTorch's checkpoint runs its function a second time in the backward: after the `with backend(...)` around the forward
has ended, or in a thread of autograd's own. Another backend there keeps other tensors, and gradients made from them are
wrong without a word. So the function that is to run again is bound to the choice in force when it first runs.
"""

import functools
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint

from tilestack.contract.backends import with_choice_of_now


def keep_choices() -> None:
    """Bind every checkpointed function to its choice, from now on; once."""
    again = getattr(checkpoint, "_checkpoint_without_reentrant_generator", None)
    if again is not None and not hasattr(again, "__wrapped__"):
        checkpoint._checkpoint_without_reentrant_generator = _binding(again, place=0)  # type: ignore[attr-defined]
    function = checkpoint.CheckpointFunction
    if not hasattr(function.forward, "__wrapped__"):
        function.forward = staticmethod(_binding(function.forward, place=1))  # type: ignore[method-assign]


def _binding(original: Callable, place: int) -> Callable:
    """The original with the function it is given, its argument in a place, bound to the choice of now."""

    @functools.wraps(original)
    def bound(*args: Any, **kwargs: Any) -> Any:
        return original(*args[:place], with_choice_of_now(args[place]), *args[place + 1 :], **kwargs)

    return bound
