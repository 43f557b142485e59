"""Grading an attempt: claim after claim through `lab.verify`, the smallest cases first, up to the first that is wrong.

The solution says what is asked for: an attempt must take every call that the solution takes, in both directions where the
solution has a backward. The first round is float32 in plain layouts; `everything` adds what `tilestack verify` tries.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from tilestack.contract.cases import Make
from tilestack.contract.implementation import Implementation
from tilestack.contract.operator import Operator
from tilestack.lab.refuted import crash_line
from tilestack.lab.verify import Claim, Proof, claims, prove
from tilestack.lab.workers import line_of, load_file
from tilestack.learn.check import Checked, Tell
from tilestack.learn.exercise import BACKEND, Exercise
from tilestack.learn.finding import Finding, code_in
from tilestack.learn.folder import State
from tilestack.learn.tutor import described, explain
from tilestack.ops import operator_named

DIRECTIONS = ("forward", "backward", "gradcheck")


def grade(exercise: Exercise, path: Path, device: str, everything: bool, begin: Tell) -> Checked:
    """Prove what a file registers as the backend `mine`; `begin` is told of each claim before it is tried."""
    operator = operator_named(exercise.operator)
    mistakes = getattr(load_file(exercise.path), "MISTAKES", {})
    solution = operator.implementations.pop(BACKEND)  # the attempt is to register its own
    begin(0, 0)
    failed = lambda wrong: Checked(str(path), State.BEGUN, wrong=wrong)
    try:
        load_file(path)
    except ValueError as problem:
        return failed(why_it_does_not_load(path, problem))
    if BACKEND not in operator.implementations:
        what = f"{path.name} registers no backend {BACKEND!r} for {operator.name}"
        advice = [f'Keep the line `@implements(ops.{operator.name}, backend="{BACKEND}", …)` above the launcher.']
        return failed(Finding(what, advice=advice))
    first = in_order(claims_asked(operator, solution, torch.device(device), [torch.float32], every_variant=False))
    further = claims_asked(operator, solution, torch.device(device), None, every_variant=True) if everything else []
    asked = first + [claim for claim in further if claim not in first]
    for number, claim in enumerate(asked):
        begin(number + 1, len(asked))
        if (wrong := refutation(claim, path, mistakes)) is not None:
            state = State.PASSES if number >= len(first) else State.BEGUN
            return Checked(str(path), state, number, len(asked), wrong)
    return Checked(str(path), State.EVERYTHING if everything else State.PASSES, len(asked), len(asked))


def claims_asked(
    operator: Operator,
    solution: Implementation,
    device: torch.device,
    dtypes: Iterable[torch.dtype] | None,
    every_variant: bool,
) -> list[Claim]:
    """All claims on the backend `mine` that the solution could be held to."""
    only = {operator.name: BACKEND}
    found = claims([operator], device, only=only, dtypes=dtypes, every_variant=every_variant)
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
        return explain(claim, proof, path, mistakes)
    if proof.ok is None and not proof.says_nothing:
        advice = ["The exercise asks for this call: see `when`, `dtypes` and `backward` of `@implements`."]
        return Finding(f"it refuses the call: {proof.message}", *described(claim), advice=advice)
    return None


def why_it_does_not_load(path: Path, problem: ValueError) -> Finding:
    """What was raised while the file ran, before any kernel did."""
    cause = problem.__cause__ if isinstance(problem.__cause__, Exception) else problem
    line = line_of(cause, path)
    what = f"{path.name} cannot be loaded: {crash_line(cause).removesuffix(f' ({path}:{line})')}"
    return Finding(what, line=line, code=code_in(path, line))
