"""Invariance: an implementation that promises it gives row i alone the bits that row i has in any batch.

Which arguments have a row for each row of the result is not written anywhere; it is found out with the definition: a
choice of arguments to cut is right when the definition of row i of these is row i of the definition.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.cases import Case
from tilestack.contract.operator import Operator, as_tuple
from tilestack.lab.proof.evaluate import arguments_of, float_leaves
from tilestack.lab.proof.memory_guards import same_bits

ALONE = "alone"  # the name of the variant
LEAST_DIFFERENCE = 1e-13  # of a row's largest element: what float64 may lose of a small one


@dataclass(frozen=True)
class Rows:
    """A call whose results have a row for each row of some of its arguments, which `cut` names."""

    arguments: dict[str, Any]
    cut: tuple[str, ...]
    count: int

    @property
    def tried(self) -> list[int]:
        """Row 1 among them: of short elements it seldom starts on 16 bytes as row 0 does."""
        return sorted({0, min(1, self.count - 1), self.count // 2, self.count - 1})

    @property
    def has_gradients(self) -> bool:
        """Whether there is a gradient that has rows: of the others, sums over all rows, nothing is promised."""
        return any(self.arguments[name].is_floating_point() for name in self.cut)

    def alone(self, row: int) -> dict[str, Any]:
        return self.arguments | {name: self.arguments[name][row : row + 1] for name in self.cut}


def rows_of_case(operator: Operator, case: Case, dtype: torch.dtype, device: torch.device) -> Rows | None:
    """A case as rows; None where its results are not made row by row."""
    arguments = arguments_of(operator, case, "plain", dtype, device)
    # Beside fewer rows, indices may name what is not there: an exception on a CPU, and the end of the process on a GPU.
    indexed = any(isinstance(value, Tensor) and not value.is_floating_point() for value in arguments.values())
    if indexed and case.kind != "check" and device.type != "cpu":
        return None
    exact = arguments_of(operator, case, "plain", torch.float64, torch.device("cpu") if indexed else device)
    for rows in possible_rows(operator, arguments):
        if is_row_by_row(operator, Rows(exact, rows.cut, rows.count)):
            return rows
    return None


def possible_rows(operator: Operator, arguments: dict[str, Any]) -> Iterator[Rows]:
    """Ways to cut a call into rows: the first tensor, with as many others of as many rows as possible."""
    tensors = [name for name in operator.tensors if isinstance(arguments[name], Tensor) and arguments[name].ndim]
    if not tensors:
        return
    first, count = tensors[0], len(arguments[tensors[0]])
    others = [name for name in tensors[1:] if len(arguments[name]) == count]
    for number in range(len(others), -1, -1):
        for chosen in itertools.combinations(others, number):
            yield Rows(arguments, (first, *chosen), count)


def is_row_by_row(operator: Operator, rows: Rows) -> bool:
    with torch.no_grad():
        try:
            together = as_tuple(operator.definition(**rows.arguments))
            alone = {row: as_tuple(operator.definition(**rows.alone(row))) for row in rows.tried}
        except (RuntimeError, ValueError, IndexError):
            return False
    if any(not whole.ndim or len(whole) != rows.count for whole in together):
        return False
    return all(
        is_same_row(whole[row : row + 1], found)
        for row, results in alone.items()
        for whole, found in zip(together, results, strict=True)
    )


def is_same_row(whole: Tensor, found: Tensor) -> bool:
    """Whether a row is the same, but for roundings: of a row's largest element, and not of 1, beside which a probability
    of 1e-9 would be none."""
    if whole.shape != found.shape:
        return False
    whole, found = whole.double(), found.double()
    largest = found[found.isfinite()].abs().amax().item() if found.isfinite().any() else 0.0
    return torch.allclose(whole, found, atol=LEAST_DIFFERENCE * largest, equal_nan=True)


def difference(function: Callable, operator: Operator, rows: Rows, direction: str) -> str:
    """Which of some rows is not the same alone as among the others; empty when none is."""
    evaluate = row_results if direction == "forward" else row_gradients
    together = evaluate(function, operator, rows.arguments, rows.cut, slice(None))
    for row in rows.tried:
        alone = evaluate(function, operator, rows.alone(row), rows.cut, slice(row, row + 1))
        for name, whole in together.items():
            if not same_bits(whole[row : row + 1], alone[name]):
                return f"{name}: row {row} alone differs from row {row} of {rows.count}"
    return ""


def row_results(
    function: Callable, operator: Operator, arguments: dict[str, Any], cut: tuple[str, ...], rows: slice
) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(zip(operator.outputs, as_tuple(function(**arguments)), strict=True))


def row_gradients(
    function: Callable, operator: Operator, arguments: dict[str, Any], cut: tuple[str, ...], rows: slice
) -> dict[str, Tensor]:
    """The gradients of the arguments that are cut; row i of what arrives is drawn from i alone."""
    leaves = float_leaves(operator, arguments)
    out = [t for t in as_tuple(function(**arguments | leaves)) if t.is_floating_point()]
    numbers = range(rows.start or 0, (rows.start or 0) + len(out[0]))
    arriving = [torch.stack([gradient_of_row(t[0], number) for number in numbers]) for t in out]
    wanted = {name: leaf for name, leaf in leaves.items() if name in cut}
    found = torch.autograd.grad(out, list(wanted.values()), arriving, allow_unused=True)
    return {f"gradient of {name}": g for name, g in zip(wanted, found, strict=True) if g is not None}


def gradient_of_row(like: Tensor, number: int) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(number)
    return torch.randn(like.shape, generator=generator, device=like.device).to(like.dtype)
