"""The judge of every kernel: the definition in float64, and a bound that nobody types by hand.

For one set of arguments there are three results of an operator:

    truth      the definition in float64 on the same (already rounded) arguments
    reference  the definition in the dtype under test
    result     the implementation under test

The reference is off from the truth by what the dtype costs. A result may be off by twice that, plus what rounding the
truth itself would cost, and that in four ways, so that a kernel that is a little wrong everywhere is caught as surely as
one that is very wrong somewhere:

    anywhere              |result - truth| ≤ 2 · max|reference - truth| + one unit in the last place of the row's largest
    root mean square      the same of the errors' root mean square; in half precision a result is rounded but once, so that
                          half a unit of each element itself, not of its row's largest, is all that is added
    offset, in halves     the errors' sum, with their signs, over √N: roundings cancel, an offset does not
    scale, in halves      the errors' sum, with the signs and weights of the truth, over its norm: a factor does not cancel

The last two are projections of N errors on a direction. Those of fair roundings have the same root mean square as a single
error, so SIGNIFICANT of these are added; those of a fault shared by all elements are √N times as large. What all share, a
factor or a mean, may itself be rounded once: half a unit of every element.

Where the truth is as close to the largest number as that, a result may be infinite or not, as it falls out.

In float64 the definition is its own truth, and a result must have half of the digits right. Integers are right when they
equal the reference. What has no finite element, or nothing but zeros, is not wrong, but says nothing either (`silent`).

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
SIGNIFICANT = 6  # standard deviations: fair roundings exceed them once in a billion trials
UNITS_BEFORE_ROUNDING = 16  # a sum, a root, a maximum, two quotients and a few products, each good to a unit or two


@dataclass(frozen=True)
class Verdict:
    """How far a result is from the truth against how far it may be, both at the worst element; empty message: accepted."""

    error: float
    bound: float
    message: str = ""


def largest_magnitude(x: Tensor) -> float:
    return float(x.abs().max()) if x.numel() else 0.0


def root_mean_square(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt()) if x.numel() else 0.0


def silent(reference: Tensor, truth: Tensor) -> str:
    """Why agreeing with a reference would say nothing; empty when it says something, or there is nothing to say."""
    if not reference.numel():
        return ""
    finite = reference.double().isfinite() & truth.double().isfinite()
    if not bool(finite.any()):
        return "nothing in it is finite"
    return "" if bool(reference.double()[finite].any()) else "all of it is zero"


Own = tuple[float, float, float, float]


def own_error(reference: Tensor, truth: Tensor) -> Own:
    """The definition's own (largest, root mean square, offset, scale) error where both are finite."""
    if reference.dtype in CODES:
        beyond_half = off_nearest(reference, truth)
        return (max(float(beyond_half.max()), 0.0) if beyond_half.numel() else 0.0), 0.0, 0.0, 0.0
    if not reference.is_floating_point():
        return 0.0, 0.0, 0.0, 0.0
    finite = reference.isfinite() & truth.isfinite()
    if reference.dtype == torch.float64:
        half_the_digits = largest_magnitude(truth[finite]) * torch.finfo(torch.float64).eps ** 0.5
        return half_the_digits, half_the_digits, 0.0, 0.0
    exact = truth[finite]
    off = reference.double()[finite] - exact
    return largest_magnitude(off), root_mean_square(off), *shared_errors(off, exact)


def shared_errors(off: Tensor, truth: Tensor) -> tuple[float, float]:
    """How much of the errors is an offset, and how much a factor: their projections on ones and on the truth."""
    size = float(truth.norm())
    return abs(float(off.sum())) / max(off.numel(), 1) ** 0.5, abs(float(off @ truth)) / size if size else 0.0


def judge(result: Tensor, reference: Tensor, truth: Tensor, own: Own) -> Verdict:
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
    resolution = torch.finfo(result.dtype)
    overflow = resolution.max * (1 - resolution.eps) - 2 * own[0]
    for kind, test, sign in (("NaN", torch.isnan, 0), ("inf", torch.isposinf, 1), ("-inf", torch.isneginf, -1)):
        wrong = (test(result) != test(reference)) & ~(truth.isfinite() & (sign * truth >= overflow))
        if kind == "NaN":  # a library may spread one, as convolutions by transforms do; the truth has it in its place
            wrong &= test(result) != test(truth)
        if bool(wrong.any()):
            return Verdict(
                math.inf,
                0.0,
                f"{int(wrong.sum())} elements are {kind} in one of kernel and definition only, first at {_first(wrong)}",
            )
    # Where a library has spread a NaN, the truth alone says what belongs there.
    finite = ~reference.isinf() & truth.isfinite() & result.isfinite()
    exact = truth[finite]
    signed = result.double()[finite] - exact
    off = signed.abs()
    if not off.numel():
        return Verdict(0.0, 0.0)
    magnitude = torch.where(finite, truth.abs(), 0)
    row_largest = magnitude.amax(-1, keepdim=True).expand_as(magnitude) if magnitude.ndim else magnitude
    least = smallest_unit(result.dtype)
    unit = (row_largest[finite] * resolution.eps).clamp_min(least)
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
    half = resolution.bits == 16
    if half:
        unit = (exact.abs() * resolution.eps).clamp_min(least) / 2
    typical = 2 * own[1] + root_mean_square(unit)
    clauses = [("in the root mean square", root_mean_square(off), typical)]
    if half:
        rounded_once = shared_errors(exact.abs() * resolution.eps / 2, exact.abs())
        names = "as a common offset", "as a common factor"
        for place, (drift, once) in enumerate(zip(shared_errors(signed, exact), rounded_once, strict=True)):
            clauses.append((names[place], drift, 2 * own[2 + place] + SIGNIFICANT * typical + once))
    for what, average, most in clauses:
        if average > most:
            return Verdict(average, most, f"off by {average:.3g} {what}, allowed {most:.3g}")
    return Verdict(error, bound)


def smallest_unit(dtype: torch.dtype) -> float:
    """The step between the smallest numbers; GPUs take float32's below the normal ones for zero, not float16's."""
    format = torch.finfo(dtype)
    return format.smallest_normal * (format.eps if dtype == torch.float16 else 1)


def judge_codes(result: Tensor, reference: Tensor, truth: Tensor, own: Own) -> Verdict:
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
