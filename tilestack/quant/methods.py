"""The ways to find codes, by name: what each has to know of a layer's inputs, how it scales them, and how it rounds.

nearest   each number to the nearest on its grid; no calibration
clip      grids that reach less far where that is better (clipping.py)
gptq      errors are made up for by columns that are still to be rounded (gptq.py)
awq       weights of large inputs are made larger first, then clip (awq.py)
smooth    large inputs are made smaller first, then nearest (smooth.py); where inputs become codes too
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from tilestack.quant.awq import awq_scale
from tilestack.quant.clipping import clipped_grid
from tilestack.quant.gptq import gptq
from tilestack.quant.schemes import Codes, Scheme
from tilestack.quant.smooth import smooth_scale

Shared = Callable[[Tensor], Tensor]  # makes what is known of inputs that must have one scale alike, [in] to [in]


@dataclass(frozen=True)
class Method:
    """`statistics` is the kind (statistics.py) that `scale` and `round` get, or None. With `scale`, inputs are divided by
    what it finds and the weight is multiplied with it: behind norms only, or behind every layer that allows it."""

    statistics: str | None
    round: Callable[[Tensor, Tensor | None, Scheme], Codes]
    scale: Callable[[Tensor, Tensor, Scheme, Shared], Tensor] | None = None
    behind: str = "norms"  # or "all"


def round_clipped(weight: Tensor, squares: Tensor | None, scheme: Scheme) -> Codes:
    return clipped_grid(weight, scheme, squares).encode(weight)


def round_to_nearest(weight: Tensor, statistics: Tensor | None, scheme: Scheme) -> Codes:
    return scheme.round_to_nearest(weight)


def round_by_gptq(weight: Tensor, moments: Tensor | None, scheme: Scheme) -> Codes:
    assert moments is not None
    return gptq(weight, moments, scheme)


def round_after_awq(weight: Tensor, moments: Tensor | None, scheme: Scheme) -> Codes:
    assert moments is not None
    return round_clipped(weight, moments.diagonal(), scheme)


METHODS = {
    "nearest": Method(None, round_to_nearest),
    "clip": Method("squares", round_clipped),
    "gptq": Method("moments", round_by_gptq),
    "awq": Method("moments", round_after_awq, awq_scale, behind="all"),
    "smooth": Method("largest", round_to_nearest, lambda weight, largest, *_: smooth_scale(weight, largest)),
}


def default_method(scheme: Scheme) -> str:
    """What is worth its time: 4 bits need care, inputs of 8-bit integers need their outliers moved, the rest is near enough."""
    return {"int4": "gptq", "int8": "smooth" if scheme.activations else "nearest", "fp8": "nearest"}[scheme.weights]


def refuse_method(method: str, scheme: Scheme) -> None:
    """Raise where there is no such method, or it does nothing for a scheme."""
    if method not in METHODS:
        raise ValueError(f"no method {method!r}; choose from {', '.join(METHODS)}")
    if scheme.blocks and method != "nearest":
        raise ValueError("blocks of fp8 are rounded to nearest; the other methods are for scales of rows and groups")
    if method == "smooth" and not scheme.activations:
        raise ValueError(
            "smooth is for schemes whose inputs become codes, w8a8 and fp8; for weights alone choose awq or gptq"
        )
