"""Whether modules must keep to operators that promise batch-invariant results."""

import torch

from tilestack.contract.backends import wants_invariance


def invariant_wanted() -> bool:
    """Inside `tilestack.batch_invariant()`; a compiler cannot ask, and compiled code is not in the mode."""
    return not torch.compiler.is_compiling() and wants_invariance()
