"""Rates of kept rows by the present cost model: times are measured, but the bytes they are held against are counted.

When the cost model counts otherwise than it did (a row that is looked up twice is read once), what is kept would show the
old count for as long as nobody measures again. `python -m tilestack.lab.bench.recount` counts anew, from the cases alone.
Values that a case draws are drawn here as well, since they say which rows are read; they are not those of the GPU, so that
what differs no more than draws do is left as it was.
"""

import functools
from pathlib import Path

import torch
from torch import Tensor

from tilestack.contract import Case, Operator
from tilestack.contract.cases import Make
from tilestack.contract.registry import load_kernels, operators
from tilestack.lab import results
from tilestack.lab.bench.operators import multiplies_codes
from tilestack.lab.bench.roofs import Roofs
from tilestack.lab.rows import Row, Stored

DRAWS_DIFFER = 0.01  # by which share of the bytes two draws of a case may
MOST_NUMBERS = 1 << 20  # of an argument that says where to look, not what is there


class NumbersAlone(Make):
    """Arguments without values but for the numbers that say which rows are read."""

    def __init__(self, dtype: torch.dtype):
        super().__init__(dtype, "cpu")

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0, dtype: torch.dtype | None = None) -> Tensor:
        return self.shape_alone(shape, dtype or self.dtype)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        return self.shape_alone(shape, dtype or self.dtype)

    def integers(self, *shape: int, low: int = 0, high: int, dtype: torch.dtype = torch.int64) -> Tensor:
        if torch.Size(shape).numel() > MOST_NUMBERS:
            return self.shape_alone(shape, dtype)
        return super().integers(*shape, low=low, high=high, dtype=dtype)


@functools.lru_cache(maxsize=4)
def arguments_of(operator: Operator, case: Case, dtype: str) -> dict:
    """What the cost model looks at of a case."""
    wanted = getattr(torch, dtype)
    try:
        return operator.bind(**case.build(NumbersAlone(wanted)))
    except RuntimeError:  # a case that computes with what it draws
        return operator.bind(**case.build(Make(wanted, "meta")))


def recount(rows: list[Stored], roofs: Roofs) -> list[Stored]:
    """Correct the rates of rows where the cost model counts other bytes than it did; the rows that were not right."""
    known = {(operator.name, case.name): (operator, case) for operator in operators() for case in operator.cases}
    corrected = []
    for kept in rows:
        if not kept.get("time_us") or (kept["op"], kept["case"]) not in known:
            continue
        operator, case = known[kept["op"], kept["case"]]
        arguments = arguments_of(operator, case, kept["dtype"])
        _, moved = operator.cost(arguments, kept["direction"])
        row = Row.from_dict(kept)
        if abs(kept["tb_per_s"] * row.time_us * 1e6 / moved - 1) <= DRAWS_DIFFER:
            continue
        flops = kept["tflops"] * row.time_us * 1e6
        row.set_rates(flops, moved, roofs.floor_us(flops, moved, row.dtype, multiplies_codes(operator, arguments)))
        kept.update(tb_per_s=row.tb_per_s, roof_fraction=row.roof_fraction)
        corrected.append(kept)
    return corrected


def recount_file(path: Path) -> list[Stored]:
    """Correct a file of results; its rows that were not right."""
    load_kernels()
    kept = results.load(path)
    if corrected := recount(kept["rows"], Roofs(**kept["roofs"])):
        results.save(path, kept)
    return corrected


if __name__ == "__main__":
    for path in sorted(results.FOLDER.glob("*/kernels.json")):
        print(f"{path}: {len(recount_file(path))} rows corrected")
