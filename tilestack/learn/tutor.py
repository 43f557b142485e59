"""Explaining a wrong result as a tutor would: the call, the first wrong numbers beside the right ones, and what does this.

Three ways to find out, in this order:

    unwritten    a first call finds NaN in new memory and a second zeros: what is so in both results was never written
    mistakes     the exercise knows mistakes as definitions; one that gives the same wrong numbers is the one
    patterns     where the wrong elements lie: from some power of two on, in all rows but the first, transposed, scaled …
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from tilestack.contract.named import call_named
from tilestack.lab.labels import dtype_name
from tilestack.lab.proof.claims import Claim, Proof
from tilestack.lab.proof.evaluate import EVALUATE, in_float64, standards_of
from tilestack.lab.proof.refuted import CRASHED
from tilestack.lab.proof.variants import LAYOUTS
from tilestack.lab.proof.verify import evaluations
from tilestack.learn.finding import Element, Finding, code_in

SHOWN = 4  # wrong elements
BLOCK_OF = 16  # elements from which on a power of two is taken for the size of a block
ABOUT = dict(rtol=1e-3, atol=1e-5)  # as near as two ways to the same wrong numbers are
INTERPRETED = re.compile(r"^InterpreterError: (\w+)\((['\"])(.*)\2\)$")  # an error in a kernel, in Triton's words
ADVICE_FOR = {
    "it reads before or beyond a tensor": "A `tl.load` touches memory outside its tensor. Its mask must be false wherever "
    "the offset is not an element: give every load `mask=`, and compare with the size of what is loaded.",
    "it writes before or beyond the memory": "A `tl.store` goes outside the result. Its mask must be false beyond the last "
    "element, and a row must begin where the result's rows begin.",
    "which is only to be read": "An argument was changed. Store into a new tensor, not into an input.",
    "differs from the first": "Two programs write the same element, or one reads what another writes: no order is "
    "promised among them. Let each element have one owner.",
    "NameError": "A name is not known in the kernel: what it uses must be an argument, computed in it, "
    "or a `tl.constexpr`.",
}


def describe_claim(claim: Claim) -> tuple[str, str]:
    """The call, and the direction, dtype and variant in which it was tried, in words."""
    arguments = claim.arguments()
    usual = {name: parameter.default for name, parameter in claim.operator.signature.parameters.items()}
    words = [
        f"{name} {list(value.shape)}" if isinstance(value, Tensor) else f"{name}={value!r}"
        for name, value in arguments.items()
        if isinstance(value, Tensor) or value != usual[name]
    ]
    layout = f" ({(LAYOUTS[claim.variant].__doc__ or '').strip('.')})" if claim.variant in LAYOUTS else ""
    dtype = dtype_name(claim.dtype)
    called = f"{claim.operator.name}({', '.join(words)})"
    return called, f"{claim.direction}, {dtype}" + (f", {claim.variant}{layout}" if claim.variant != "plain" else "")


def explain_claim(claim: Claim, proof: Proof, path: Path, mistakes: dict[str, Callable]) -> Finding:
    """Everything that can be said of a claim that is wrong."""
    call, circumstances = describe_claim(claim)
    said = [advice for words, advice in ADVICE_FOR.items() if words in proof.message]
    where = re.search(rf"\({re.escape(str(path))}:(\d+)\)$", proof.message)
    line = int(where[1]) if where else None
    what = INTERPRETED.sub(r"\1: \3", CRASHED.sub("", proof.message))
    told = functools.partial(Finding, call=call, claim=circumstances, line=line, code=code_in(path, line))
    name = proof.message.partition(": ")[0]
    numbers = None
    if claim.direction in EVALUATE and line is None:
        with suppress(Exception):  # what raises has been told already
            numbers = numbers_of(claim, name)
    if numbers is None or not numbers[1].numel():
        return told(what, advice=said)
    results, truth, allowed = numbers
    unwritten = never_written(*results[:2]) if len(results) > 1 else torch.zeros_like(truth, dtype=torch.bool)
    wrong = wrong_elements(results[0], truth, allowed) | unwritten
    found = explanations(claim, name, results[0], truth, wrong, mistakes)
    advice = [missing_part(unwritten)] if unwritten.any() else said or list(itertools.islice(found, 1))
    count = f"{name} is wrong in {int(wrong.sum())} of {wrong.numel()} elements"
    return told(count if wrong.any() else what, elements=first_wrong_elements(results[0], truth, wrong), advice=advice)


def numbers_of(claim: Claim, name: str) -> tuple[list[Tensor], Tensor, Tensor] | None:
    """The results of each call, the truth, and how far each element may be off; None where the shapes differ."""
    results = [evaluated[name] for evaluated in evaluations(claim)]
    reference, truth, own = claim.standards(standards_of)[name]
    if results[0].shape != truth.shape:
        return None
    magnitude = torch.where(truth.isfinite(), truth.abs(), 0).double()
    rows = magnitude.amax(-1, keepdim=True).expand_as(magnitude) if magnitude.ndim and magnitude.numel() else magnitude
    unit = torch.finfo(reference.dtype).eps * rows if reference.is_floating_point() else torch.full_like(rows, 0.501)
    return results, truth.double(), 2 * own[0] + unit


def wrong_elements(result: Tensor, truth: Tensor, allowed: Tensor) -> Tensor:
    yours = result.double()
    same = (yours == truth) | (yours.isnan() & truth.isnan())
    return ~(same | ((yours - truth).abs() <= allowed))


def first_wrong_elements(result: Tensor, truth: Tensor, wrong: Tensor) -> list[Element]:
    """The first wrong elements; where none by itself is out of bound, the worst."""
    places = wrong.nonzero()[:SHOWN].tolist()
    if not places and truth.numel():
        worst = (result.double() - truth).abs().flatten().argmax()
        places = [[int(index) for index in torch.unravel_index(worst, truth.shape)]]
    number = lambda value: f"{float(value):.6g}"
    return [Element(str(p), number(result[tuple(p)]), number(truth[tuple(p)])) for p in places]


def explanations(
    claim: Claim, name: str, result: Tensor, truth: Tensor, wrong: Tensor, mistakes: dict[str, Callable]
) -> Iterator[str]:
    """What may have led to wrong numbers, the surest first."""
    for words, definition in mistakes.items():
        with suppress(Exception):  # a mistake may have no meaning for some shape
            mistaken = results_of_mistake(claim, definition)[name].double()
            if alike(result, mistaken) and not alike(truth, mistaken):
                yield f"These are the numbers that come out when {words}."
    if result.is_floating_point():
        yield from not_finite(result, truth)
    yield from patterns(result.double(), truth, wrong)


def never_written(first: Tensor, second: Tensor) -> Tensor:
    """What is still as new memory was: NaN, or the largest integer, in the first call, and zero in the second."""
    untouched = first.isnan() if first.is_floating_point() else first == torch.iinfo(first.dtype).max
    return untouched & (second == 0)


def missing_part(unwritten: Tensor) -> str:
    """Which part of a result was never written, and why that happens."""
    flat = unwritten.flatten()
    begins = int(flat.int().argmax())
    how = "New memory is filled with NaN (or the largest integer) before your kernel runs, so that gaps show."
    if bool(flat.all()):
        return f"Nothing was written. {how} Is the kernel's body still empty, or does no program reach its `tl.store`?"
    if not bool(flat[begins:].all()):
        return f"Some elements were never written. {how} Compare their places with those that your programs store to."
    if is_block(begins):
        return (
            f"Only the first {begins} elements were written: one program's share. Does `tl.program_id` enter the "
            "offsets, and is the grid as large as the launcher computes it?"
        )
    return f"The end of the result was never written. {how} Does the mask, or the grid, end early?"


def is_block(size: int) -> bool:
    return size >= BLOCK_OF and size & (size - 1) == 0


def results_of_mistake(claim: Claim, definition: Callable) -> dict[str, Tensor]:
    """What a definition with a mistake gives in float64, or its gradients."""
    arguments = {n: in_float64(v) if isinstance(v, Tensor) else v for n, v in claim.arguments().items()}
    mistaken = lambda **given: call_named(definition, given)
    return EVALUATE[claim.direction](mistaken, claim.operator, arguments, claim.variant)


def alike(a: Tensor, b: Tensor) -> bool:
    """Whether two results are the same but for rounding, which for integers is half a step."""
    if a.shape != b.shape:
        return False
    if a.is_floating_point():
        return torch.allclose(a.double(), b.double(), equal_nan=True, **ABOUT)
    held = b.abs() <= torch.iinfo(a.dtype).max
    return torch.allclose(a[held].double(), b[held].double(), rtol=0, atol=0.501)


def not_finite(result: Tensor, truth: Tensor) -> Iterator[str]:
    if bool((result.isinf() & truth.isfinite()).any()):
        yield "A number overflowed to infinity: before `tl.exp`, subtract the maximum; and divide by no zero."
    if bool((result.isnan() & ~truth.isnan()).any()):
        yield (
            "NaN stands where a number belongs: it was never written, since new memory holds NaN here, or was computed, by "
            "inf - inf, 0 / 0 or inf / inf. Does `tl.exp` overflow (subtract the maximum first), or do elements outside "
            "the tensor take part (see `other=`)?"
        )
    if bool((truth.isnan() & ~result.isnan()).any()):
        yield (
            "The definition passes a NaN on, and yours loses it: `tl.maximum` drops NaN, and every comparison "
            "with it is false. Which branch of `tl.where` does it take?"
        )


def patterns(result: Tensor, truth: Tensor, wrong: Tensor) -> Iterator[str]:
    """What the places and sizes of the errors tell."""
    if truth.ndim >= 2 and truth.numel() > 1 and alike(result.reshape(truth.mT.shape), truth.mT):
        yield "These are the right numbers, transposed: rows and columns change places somewhere in an address."
    finite = result.isfinite() & truth.isfinite() & (truth.abs() > 1e-6)
    ratio = (result / truth)[finite]
    common = ratio.numel() > 3 and bool((ratio - ratio[0]).abs().max() < 1e-3 * ratio[0].abs())
    if common and abs(float(ratio[0]) - 1) > 1e-2:
        yield f"Every element is {float(ratio[0]):.4g} times the right one: a factor is missing, or there twice."
    flat = wrong.flatten()
    begins = int(flat.int().argmax())
    if is_block(begins) and truth.ndim == 1:
        yield f"The first {begins} elements, one block, are right: what differs for the second program?"
    if truth.ndim >= 2 and truth.numel():
        rows = wrong.flatten(0, -2)
        bad_rows, bad_columns = rows.any(-1), rows.any(0)
        first = int(bad_columns.int().argmax())
        if len(bad_rows) > 1 and not bad_rows[0] and bad_rows[1:].all():
            yield (
                "The first row is right and every later one is wrong: where does a row begin? At its number times "
                "the distance between rows, which is not the same for every tensor."
            )
        if is_block(first) and bad_columns[first:].any():
            yield f"The first {first} columns are right: what differs in the second block of columns?"
    off = (result - truth)[result.isfinite() & truth.isfinite()].abs()
    if off.numel() and float(off.max()) < 1e-2 * max(float(truth[truth.isfinite()].abs().max()), 1e-6):
        yield (
            "All are close, but not as close as the definition is: compute and add up in float32, and round once, "
            'at the store. On a GPU, `tl.dot` of float32 needs `input_precision="ieee"`.'
        )
