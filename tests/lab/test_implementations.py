"""Every implementation in the registry is proved: a sample of what `tilestack verify` tries, drawn evenly over all of it."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from tilestack import ops
from tilestack.contract.backends import usable
from tilestack.lab import invariance, variants
from tilestack.lab.explain import elements
from tilestack.lab.verify import SAYS_NOTHING, WITHOUT_EXTRAS, claims, default_dtypes, prove

CPU = torch.device("cpu")
NAMES = [operator.name for operator in ops.operators()]


@dataclass(frozen=True)
class Sample:
    """Plainly in every case and dtype; besides, each layout and kind of values in some cases, more of them in float32, each
    configuration in some, and gradients by differences in the smallest, for time."""

    places: dict
    smallest: set

    @classmethod
    def of(cls, operator):
        several = [case for case in operator.cases if case.kind == "check" and elements(case)]
        smallest = sorted(several, key=elements)[: max(2, len(several) // 3)]
        return cls({case: place for place, case in enumerate(operator.cases)}, set(smallest))

    def takes(self, claim):
        if claim.direction == "gradcheck":
            return claim.case in self.smallest
        if claim.config:
            return (
                claim.dtype == torch.float16
                and (self.places[claim.case] + list(claim.implementation.configs).index(claim.config)) % 4 == 0
            )
        if claim.variant == "plain":
            return True
        turn = self.places[claim.case] + [*variants.ALL, invariance.ALONE, WITHOUT_EXTRAS].index(claim.variant)
        return turn % {torch.float32: 4, torch.float16: 8}.get(claim.dtype, turn + 1) == 0


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_is_proved(name):
    operator = ops.operator_named(name)
    sample = Sample.of(operator)
    proofs = [prove(claim) for claim in claims([operator], CPU) if sample.takes(claim)]
    assert not [p for p in proofs if p.ok is False]
    for backend, implementation in operator.implementations.items():
        mine = [p for p in proofs if p.backend == backend]
        proved = {(p.direction, p.dtype) for p in mine if p.ok}
        if backend == "torch":
            assert proved <= {("backward", "float64")}
            assert bool(proved) >= bool(operator.gradient)
        elif usable(backend, CPU) is True and not any("needs a GPU" in p.message for p in mine):
            dtypes = [str(d).removeprefix("torch.") for d in default_dtypes(CPU) if d in implementation.dtypes]
            directions = ["forward", *(["backward"] if implementation.backward is not None else [])]
            assert proved >= set(itertools.product(directions, dtypes))
            telling = any(p.ok and SAYS_NOTHING not in p.message for p in mine)
            assert telling or not dtypes, "no case says something of every result"
