"""The call to look at: one that is named, or the smallest in which a kernel has several programs."""

import math
from collections.abc import Sequence

import torch

from tilestack.contract.backends import BackendError, family_of
from tilestack.contract.cases import Case
from tilestack.contract.implementation import Implementation
from tilestack.contract.operator import Operator
from tilestack.lab.compile.explain import elements
from tilestack.lab.proof.evaluate import EVALUATE
from tilestack.lab.proof.variants import LAYOUTS
from tilestack.lab.proof.verify import Claim
from tilestack.lab.tiles.record import INTERRUPTED, PROGRAMS_KEPT, record
from tilestack.lab.tiles.steps import Recording

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
PICTURE = 1000  # elements of a case that are enough for a picture


def record_call(
    implementation: Implementation,
    case: str | None = None,
    direction: str = "forward",
    dtypes: Sequence[torch.dtype] | None = None,
    layout: str = "plain",
    programs: int = PROGRAMS_KEPT,
) -> Recording:
    """The recording of a case by name, or of the first that is telling, in the first of the dtypes that a case is taken in."""
    operator = implementation.operator
    if direction not in EVALUATE:
        raise ValueError(f"--direction is forward or backward, not {direction!r}")
    if layout not in LAYOUTS:
        raise ValueError(f"--layout is one of {', '.join(LAYOUTS)}, not {layout!r}")
    if direction == "backward" and operator.mutates:
        raise ValueError(f"{operator.name} writes its arguments and has no backward; leave --direction out")
    chosen = [case_named(operator, case)] if case else in_order_of_interest(operator)
    refusals: list[str] = []
    for dtype in dtypes or DTYPES:
        taken = []
        for claim in (Claim(operator, implementation, each, layout, dtype, direction, CPU) for each in chosen):
            if reason := implementation.refuses(claim.arguments(), CPU, direction == "backward"):
                refusals.append(reason)
            else:
                taken.append(claim)
        if taken:
            return first_telling(taken, programs)
    where = f"{operator.name} on {implementation.backend}"
    raise BackendError(f"{where} cannot run {case or 'any small case'} here: {refusals[0]}")


def first_telling(claims: Sequence[Claim], programs: int) -> Recording:
    """The first recording in which a kernel shares its work among programs, or that a person ended; the first of all where
    there is none."""
    recordings = []
    for claim in claims:
        recordings.append(record(claim, programs))
        if recordings[-1].error == INTERRUPTED or any(math.prod(launch.grid) > 1 for launch in recordings[-1].launches):
            return recordings[-1]
    if not any(recording.launches or recording.error for recording in recordings):
        operator, name = claims[0].operator, claims[0].implementation.backend
        others = ", ".join(backends_with_kernels(operator)) or "none"
        raise BackendError(
            f"{operator.name} on {name} launches no Triton kernel in its {claims[0].direction}; "
            f"backends in Triton: {others}"
        )
    return recordings[0]


def in_order_of_interest(operator: Operator) -> list[Case]:
    """The small cases: from the smallest that fills a picture to the largest, then those that are smaller still."""
    small = sorted((case for case in operator.cases if case.kind == "check" and elements(case)), key=elements)
    enough = [case for case in small if elements(case) >= PICTURE]
    return [*enough, *reversed(small[: len(small) - len(enough)])]


def case_named(operator: Operator, name: str) -> Case:
    found = {case.name: case for case in operator.cases}
    if name not in found:
        small = ", ".join(name for name, case in found.items() if case.kind == "check")
        raise ValueError(
            f"{operator.name} has no case {name!r}; small ones are {small}; `tilestack ops {operator.name}` lists large ones"
        )
    return found[name]


def implementation_to_show(operator: Operator, backend: str | None, known: set[str]) -> Implementation:
    """The named backend; otherwise one that a file brought along, which is not among those `known` before, or Triton's."""
    brought = [name for name in operator.implementations if name not in known]
    name = backend or next(iter([*brought, *backends_with_kernels(operator)]), None)
    if name not in operator.implementations:
        there = ", ".join(operator.implementations)
        raise BackendError(f"{operator.name} has no {name or 'triton'} backend; it has {there}")
    return operator.implementations[name]


def backends_with_kernels(operator: Operator) -> list[str]:
    """The backends of an operator that are written in Triton, the usual one first."""
    names = [name for name in operator.implementations if family_of(name) == "triton"]
    return sorted(names, key=lambda name: name != "triton")
