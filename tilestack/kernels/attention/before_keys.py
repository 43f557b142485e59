"""Queries before the first key: where attention is causal and rows have more queries than keys, they see nothing.

            keys                 Rows are aligned at their ends, so that the last queries, as many as there are keys, are
          0  1  2                causal attention of one length, and those before them get zeros. Kernels that walk over
        +---------               at least one tile of keys are given these last queries alone.
 first  | .  .  .
queries | .  .  .
        | x  .  .
        | x  x  .
   last | x  x  x
"""

import torch.nn.functional as F
from torch import Tensor


def before_first_key(q: Tensor, k: Tensor, causal: bool) -> int:
    """How many queries of a row see nothing."""
    return max(q.shape[1] - k.shape[1], 0) if causal else 0


def behind_zeros(x: Tensor, count: int) -> Tensor:
    """[batch, queries, heads, dim] behind so many queries of zeros."""
    return F.pad(x, (0, 0, 0, 0, count, 0))
