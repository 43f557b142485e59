"""Grading an attempt: claim after claim through `lab.verify`, the smallest cases first, up to the first that is wrong.

The solution says what is asked for: an attempt must take every call that the solution takes, in both directions where the
solution has a backward, and launch a kernel in each direction in which the exercise leaves one to write. The first round is float32 in plain layouts; `everything` adds what `tilestack verify` tries.
"""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import KernelInterface

from tilestack.contract.cases import Case, Make
from tilestack.contract.implementation import Implementation
from tilestack.contract.operator import Operator
from tilestack.lab.proof.claims import Claim, Proof, claims
from tilestack.lab.proof.refuted import crash_line
from tilestack.lab.proof.verify import prove
from tilestack.lab.proof.workers import line_of_error, load_file
from tilestack.learn.check import Checked, Tell
from tilestack.learn.exercise import BACKEND, Exercise
from tilestack.learn.finding import Finding, code_in
from tilestack.learn.folder import State
from tilestack.learn.tutor import describe_claim, explain_claim
from tilestack.ops import operator_named
from tilestack.shipped import PACKAGE

LARGER_TRIED = 4  # cases, when the first wrong one does not explain itself
DIRECTIONS = ("forward", "backward", "gradcheck")


def grade(exercise: Exercise, path: Path, device: str, everything: bool, begin: Tell) -> Checked:
    """Prove what a file registers as the backend `mine`; `begin` is told of each claim before it is tried."""
    operator = operator_named(exercise.operator)
    tutor = load_file(exercise.path)
    mistakes = getattr(tutor, "MISTAKES", {})
    further_cases = [Case(name, build) for name, build in getattr(tutor, "CASES", {}).items()]
    solution = operator.implementations.pop(BACKEND)  # the attempt is to register its own
    begin(0, 0)
    failed = lambda wrong: Checked(State.BEGUN, wrong=wrong)
    try:
        load_file(path)
    except ValueError as problem:
        if isinstance(problem.__cause__, SystemExit):
            raise problem.__cause__ from None  # told where one of a launcher is told
        return failed(why_it_does_not_load(path, problem))
    if BACKEND not in operator.implementations:
        what = f"{path.name} registers no backend {BACKEND!r} for {operator.name}"
        advice = [f'Keep the line `@implements(ops.{operator.name}, backend="{BACKEND}", …)` above the launcher.']
        return failed(Finding(what, advice=advice))
    find = functools.partial(claims_asked, operator, solution, further_cases, torch.device(device))
    first = in_order(find([torch.float32], every_variant=False))
    further = find(None, every_variant=True) if everything else []
    asked = first + [claim for claim in further if claim not in first]
    with launches_of_kernels() as launched:
        for number, claim in enumerate(asked):
            begin(number + 1, len(asked))
            if (wrong := refutation(claim, path, mistakes)) is not None:
                if not wrong.advice:
                    wrong = replace(wrong, advice=advice_from_larger(asked[number + 1 :], claim, path, mistakes))
                state = State.PASSES if number >= len(first) else State.BEGUN
                return Checked(state, number, len(asked), wrong)
    if without := [direction for direction in exercise.directions if direction not in launched]:
        what = f"the numbers are right, but no kernel of yours computes them in the {' and the '.join(without)}: none was launched there"
        return Checked(State.BEGUN, len(asked), len(asked), Finding(what, advice=["Launch one: kernel[grid](…)."]))
    return Checked(State.EVERYTHING if everything else State.PASSES, len(asked), len(asked))


@contextmanager
def launches_of_kernels() -> Iterator[set[str]]:
    """The directions in which kernels are launched inside, interpreted or not, but for those that come with tilestack."""
    launched: set[str] = set()
    usual = KernelInterface.__getitem__

    def noted(kernel: Any, grid: Any) -> Any:
        function = kernel
        while not inspect.isfunction(function):  # of an autotuner, of Triton's, of Python's
            function = function.fn
        if not Path(function.__code__.co_filename).is_relative_to(PACKAGE):
            launched.add("backward" if in_backward() else "forward")
        return usual(kernel, grid)

    KernelInterface.__getitem__ = noted
    try:
        yield launched
    finally:
        KernelInterface.__getitem__ = usual


def in_backward() -> bool:
    """Whether autograd is calling this thread for gradients."""
    return torch._C._current_graph_task_id() != -1


def claims_asked(
    operator: Operator,
    solution: Implementation,
    further_cases: Iterable[Case],
    device: torch.device,
    dtypes: Iterable[torch.dtype] | None,
    every_variant: bool,
) -> list[Claim]:
    """All claims on the backend `mine` that the solution could be held to, on the operator's cases and the exercise's."""
    only = {operator.name: BACKEND}
    found = list(claims([operator], device, only=only, dtypes=dtypes, every_variant=every_variant))
    found += [replace(c, case=case) for case in further_cases for c in found if c.case == found[0].case]
    return [c for c in found if not solution.refuses(c.arguments(), device, c.direction != "forward")]


def in_order(found: list[Claim]) -> list[Claim]:
    """Forwards first, the smallest case first; a case without elements is the launcher's business, and comes last."""

    def place(claim: Claim) -> tuple[int, bool, int]:
        sizes = [t.numel() for t in claim.case.build(Make(device="meta")).values() if isinstance(t, Tensor)]
        return DIRECTIONS.index(claim.direction), 0 in sizes, sum(sizes)

    return sorted(found, key=place)


def refutation(claim: Claim, path: Path, mistakes: dict[str, Callable]) -> Finding | None:
    """What is wrong with a claim, or None."""
    proof: Proof = prove(claim)
    if proof.ok is False:
        return explain_claim(claim, proof, path, mistakes)
    if proof.ok is None and not proof.says_nothing:
        advice = ["The exercise asks for this call: see `when`, `dtypes` and `backward` of `@implements`."]
        return Finding(f"it refuses the call: {proof.message}", *describe_claim(claim), advice=advice)
    return None


def advice_from_larger(later: list[Claim], claim: Claim, path: Path, mistakes: dict[str, Callable]) -> list[str]:
    """What the next few cases tell where the smallest that is wrong, of one element perhaps, tells nothing."""
    alike = [c for c in later if (c.direction, c.dtype, c.variant) == (claim.direction, claim.dtype, claim.variant)]
    for larger in alike[:LARGER_TRIED]:
        if (wrong := refutation(larger, path, mistakes)) is not None and wrong.advice:
            return [f"In {wrong.call}: {wrong.advice[0]}"]
    return []


def why_it_does_not_load(path: Path, problem: ValueError) -> Finding:
    """What was raised while the file ran, before any kernel did."""
    cause = problem.__cause__ if isinstance(problem.__cause__, Exception) else problem
    line = line_of_error(cause, path)
    what = f"{path.name} cannot be loaded: {crash_line(cause).removesuffix(f' ({path}:{line})')}"
    return Finding(what, line=line, code=code_in(path, line))
