"""The judge of every kernel: the definition in float64, and a bound that nobody types by hand.

For one set of arguments there are three results of an operator:

    truth      the definition in float64 on the same (already rounded) arguments
    reference  the definition in the dtype under test
    result     the implementation under test

The reference is off from the truth by what the dtype costs. A result may be off by twice that, plus one unit in the
last place of its row's largest element: |result - truth| ≤ 2 · max|reference - truth| + ulp(row), and the same for the
root mean square, so that a kernel that is a little wrong everywhere is caught as surely as one that is very wrong
somewhere. In float64 the definition is its own truth, and a result must have half of the digits right.
Integers are right when they equal the reference.

Codes (int8, fp8) are right when they are the nearest to the truth, which the definition leaves unrounded in float64:
|code - truth| ≤ half a step between codes there, plus twice what the reference needs beyond that half, plus a few units
in the last place of float32, in which a value is computed before it is rounded. So a code may be the other neighbour of
the truth only where the truth lies that close to the middle between both.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

CODES = (torch.int8, torch.float8_e4m3fn)
UNITS_BEFORE_ROUNDING = 16  # a sum, a root, a maximum, two quotients and a few products, each good to a unit or two


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth against how far it may be, both at the worst element; empty message: accepted."""

    error: float
    bound: float
    message: str = ""


def largest(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def own_error(reference: Tensor, truth: Tensor) -> tuple[float, float]:
    """(largest, root mean square) error of the definition itself where both are finite."""
    if reference.dtype in CODES:
        beyond_half = off_nearest(reference, truth)
        return (max(float(beyond_half.max()), 0.0) if beyond_half.numel() else 0.0), 0.0
    finite = reference.isfinite() & truth.isfinite()
    if reference.dtype == torch.float64:
        return (largest(truth[finite]) * torch.finfo(torch.float64).eps ** 0.5,) * 2
    off = (reference.double() - truth)[finite]
    return largest(off), root_mean_square(off)


def judge(result: Tensor, reference: Tensor, truth: Tensor, own: tuple[float, float]) -> Verdict:
    """Accept or refuse a result; `own` is the definition's own error, from this draw of the arguments or several."""
    if result.shape != reference.shape:
        return Verdict(math.inf, 0.0, f"shape {tuple(result.shape)} instead of {tuple(reference.shape)}")
    if result.dtype != reference.dtype:
        return Verdict(math.inf, 0.0, f"dtype {result.dtype} instead of {reference.dtype}")
    if result.dtype in CODES and truth.dtype == torch.float64:
        return judge_codes(result, reference, truth, own)
    if not result.is_floating_point():
        wrong = result != reference
        if not bool(wrong.any()):
            return Verdict(0.0, 0.0)
        return Verdict(math.inf, 0.0, f"{int(wrong.sum())} of {wrong.numel()} differ, first at {_first(wrong)}")
    for kind, test in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        wrong = test(result) != test(reference)
        if bool(wrong.any()):
            return Verdict(
                math.inf,
                0.0,
                f"{int(wrong.sum())} elements are {kind} in one of kernel and definition only, first at {_first(wrong)}",
            )
    finite = reference.isfinite() & truth.isfinite()
    off = (result.double() - truth)[finite].abs()
    if not off.numel():
        return Verdict(0.0, 0.0)
    resolution = torch.finfo(result.dtype)
    magnitude = torch.where(finite, truth.abs(), 0)
    row_largest = magnitude.amax(-1, keepdim=True).expand_as(magnitude) if magnitude.ndim else magnitude
    unit = (row_largest[finite] * resolution.eps).clamp_min(resolution.smallest_normal)
    allowed = 2 * own[0] + unit
    worst = int((off - allowed).argmax())
    error, bound = float(off[worst]), float(allowed[worst])
    if error > bound:
        where = torch.nonzero(finite)[worst].tolist()
        return Verdict(
            error,
            bound,
            f"{int((off > allowed).sum())} of {off.numel()} elements are out of bound, worst at {where}: off by {error:.3g}, allowed {bound:.3g}",
        )
    average, allowed_average = root_mean_square(off), 2 * own[1] + root_mean_square(unit)
    if average > allowed_average:
        return Verdict(
            average, allowed_average, f"off by {average:.3g} in the root mean square, allowed {allowed_average:.3g}"
        )
    return Verdict(error, bound)


def judge_codes(result: Tensor, reference: Tensor, truth: Tensor, own: tuple[float, float]) -> Verdict:
    if bool((wrong := result.double().isnan() != reference.double().isnan()).any()):
        return Verdict(math.inf, 0.0, f"NaN in one of kernel and definition only, first at {_first(wrong)}")
    off = off_nearest(result, truth)
    if not off.numel():
        return Verdict(0.0, 0.0)
    allowed = 2 * own[0] + UNITS_BEFORE_ROUNDING * torch.finfo(torch.float32).eps * truth[truth.isfinite()].abs()
    worst = int((off - allowed).argmax())
    error, bound = max(float(off[worst]), 0.0), float(allowed[worst])
    if error > bound:
        where = torch.nonzero(truth.isfinite())[worst].tolist()
        count = f"{int((off > allowed).sum())} of {off.numel()} codes are not the nearest"
        return Verdict(error, bound, f"{count}, worst at {where}: {error:.3g} beyond half a step, allowed {bound:.3g}")
    return Verdict(error, bound)


def off_nearest(codes: Tensor, truth: Tensor) -> Tensor:
    """How much further than half a step each code is from a finite truth; at most 0 for the nearest."""
    finite = truth.isfinite()
    exact = truth[finite]
    if codes.is_floating_point():
        format = torch.finfo(codes.dtype)
        exponent = torch.frexp(exact.abs().clamp_min(format.smallest_normal)).exponent - 1
        step = torch.ldexp(torch.full_like(exact, format.eps), exponent)
    else:
        step = torch.ones_like(exact)
    return (codes.double()[finite] - exact).abs() - step / 2


def _first(mask: Tensor) -> list[int]:
    return torch.nonzero(mask)[0].tolist()
