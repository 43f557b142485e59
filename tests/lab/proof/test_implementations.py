"""Every implementation in the registry is proved: a sample of what `tilestack verify` tries, drawn evenly over all of it."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from tilestack import ops
from tilestack.contract.backends import usable
from tilestack.contract.named import answer_of
from tilestack.lab.compile.explain import elements
from tilestack.lab.proof import invariance, variants
from tilestack.lab.proof.claims import SAYS_NOTHING, WITHOUT_EXTRAS, claims, default_dtypes
from tilestack.lab.proof.evaluate import arguments_of
from tilestack.lab.proof.verify import prove

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


OF_A_DEVICE = ("needs a GPU", "compute capability", "on Hopper")  # in reasons that no case can help
WRITES_FP8 = [
    "fp8_tiles", "swiglu_fp8_tiles", "swiglu_gradient_fp8_tiles", "cross_entropy_gradient_fp8_tiles", "silu_mul_fp8",
    "rms_norm_fp8", "add_rms_norm_fp8", "quantise_rows_fp8", "kv_write",
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_implementation_takes_a_case_that_is_proved(name):
    """One that its `when` keeps out of all of them would have no proof, and nobody would be told."""
    operator = ops.operator_named(name)
    proved = [case for case in operator.cases if case.kind != "bench"]
    for backend, implementation in operator.implementations.items():
        answers = (
            answer_of(implementation.when, arguments_of(operator, case, "plain", dtype, CPU))
            for case in proved
            for dtype in (torch.float32, torch.float16)
        )
        told = set()
        if implementation.when is not None:
            takes = any(answer is True or told.add(answer) for answer in answers)
            assert takes or any(words in reason for reason in told for words in OF_A_DEVICE), f"{backend}: {told}"
            assert takes or name in WRITES_FP8 or not any("rounds to fp8" in reason for reason in told)


@pytest.mark.parametrize("name", WRITES_FP8)
def test_what_writes_codes_of_fp8_is_proved_although_it_asks_for_a_gpu(name, monkeypatch):
    """Triton's interpreter rounds to fp8 as a GPU does since kernels/interpreter.py has mended it."""
    operator = ops.operator_named(name)
    monkeypatch.setattr(operator.implementations["triton"], "when", None)
    operator.plans.clear()
    sample = Sample.of(operator)
    held = [claim for claim in claims([operator], CPU, only={name: "triton"}) if sample.takes(claim)]
    proofs = [prove(claim) for claim in held]
    operator.plans.clear()
    assert not [p for p in proofs if p.ok is False]
    assert {p.dtype for p in proofs if p.ok} >= {"float16", "float32"}
