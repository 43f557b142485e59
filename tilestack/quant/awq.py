"""AWQ: weights that meet large inputs are made larger before they are rounded, and their inputs smaller.

A scale s_j > 0 for each input j leaves the layer as it is,

    W x  =  (W diag(s)) (diag(s)⁻¹ x),

but not its rounding: the error of a number that meets input j is now as if its step were s_j times finer. What divides x
is folded into the layer before. Scales follow the size of inputs, s_j = rms(x_j)^α; of some exponents α from 0, which
changes nothing, to 1 the one is kept with the least error of the output,

    E ‖(W - round(W diag(s)) diag(s)⁻¹) x‖²  =  Σ_rows  d H dᵀ,     d a row's error, H = E[x xᵀ],

so that of the inputs no more has to be kept than H. Lin et al., https://arxiv.org/abs/2306.00978, who take the mean
magnitude of inputs; the root mean square is on the diagonal of H.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from tilestack.ops.numerics import wide
from tilestack.quant.grid import grid_of
from tilestack.quant.schemes import Scheme

EXPONENTS = [step / 20 for step in range(21)]
SMALLEST_INPUT = 1e-4  # of the largest: smaller ones, and those that are always zero, count as this large


def awq_scale(
    weight: Tensor, moments: Tensor, scheme: Scheme, shared: Callable[[Tensor], Tensor] = lambda squares: squares
) -> Tensor:
    """The scales [in] of a weight's inputs. `shared` makes the mean squares [in] of inputs that must have one scale alike."""
    weight, moments = wide(weight.detach()), moments.to(wide(weight).dtype)
    sizes = shared(moments.diagonal()).clamp_min(0).sqrt()
    if not sizes.any():
        return torch.ones_like(sizes)
    sizes = sizes.clamp_min(SMALLEST_INPUT * sizes.max())
    found, least = torch.ones_like(sizes), torch.inf
    for exponent in EXPONENTS:
        scale = sizes**exponent
        scale = scale / (scale.max() * scale.min()).sqrt()
        scaled = weight * scale
        error = output_error(weight - grid_of(scaled, scheme).nearest(scaled) / scale, moments)
        if error < least:
            found, least = scale, error
    return found


def output_error(difference: Tensor, moments: Tensor) -> float:
    """The mean square of what a difference of weights [out, in] does to the output, over all of it."""
    return float(((difference @ moments) * difference).sum())
