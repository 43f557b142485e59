"""SmoothQuant: what makes inputs hard to round is moved into the weight, which is easier to.

Where inputs become codes with one scale for a token, a channel that is always large takes the digits of all others. As in
AWQ, a scale for each input leaves the layer as it is, W x = (W diag(s)) (diag(s)⁻¹ x); here

    s_j  =  max|x_j|^α / max|w_j|^(1 - α),

so that with α = 1/2 the largest input and the largest weight of a channel become equally large. What divides x is folded
into the norm before. Xiao et al., https://arxiv.org/abs/2211.10438.
"""

import torch
from torch import Tensor

from tilestack.ops.numerics import wide

ALPHA = 0.5


def smooth_scale(weight: Tensor, largest: Tensor, alpha: float = ALPHA) -> Tensor:
    """The scales [in] of a weight's inputs, whose largest magnitudes are given, [in]; 1 where input or weight is zero."""
    weights = wide(weight.detach()).abs().amax(0)
    largest = largest.to(weights)
    scale = largest**alpha / weights ** (1 - alpha)
    return torch.where((largest > 0) & (weights > 0), scale, 1.0)
