"""The definition's own error is an estimate: what is refuted by one from a single draw is judged once more by one from many."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract.cases import Make, cases
from tilestack.lab.mutation.suite import Original
from tilestack.lab.proof.claims import claims
from tilestack.lab.proof.evaluate import LARGE, NUDGES, REDRAWS, compute_standards, further_draws
from tilestack.lab.proof.oracle import own_error
from tilestack.lab.proof.variants import nudged_arguments
from tilestack.lab.proof.verify import prove

CPU = torch.device("cpu")
SHAPE = (5, 8001)  # so small that many draws can be afforded
QUIET_ROW = 0  # holds no large element, so that next to nothing is allowed there but the definition's error


@pytest.fixture
def heavy_tailed(outside):
    """An operator whose largest element, and with it the error of rounding it, differs from draw to draw."""

    def build(make, rows, columns):
        x = make.normal(rows, columns, scale=0.5)
        x[QUIET_ROW].clamp_(-1, 1)
        return dict(x=x)

    @contract.operator(cases=cases(build, check=[SHAPE]))
    def heavy(x: torch.Tensor) -> torch.Tensor:
        """e^4x."""
        return (4 * x).exp()

    return heavy


def definitions_error(operator, seeds):
    (case,) = operator.cases
    drawn = [case.build(Make(torch.float16, CPU, seed))["x"] for seed in seeds]
    return max(own_error(operator.definition(x), operator.definition(x.double()))[0] for x in drawn)


def claim_of(operator, off):
    """The claim that an implementation is right which is off by this much in one element of the quiet row."""
    calls = []

    def forward(x):
        calls.append(x)
        out = operator.definition(x)
        out[QUIET_ROW, 7] += off
        return out

    contract.implements(operator, backend="planted")(forward)
    (claim,) = (
        claim
        for claim in claims([operator], CPU, only={operator.name: "planted"}, dtypes=[torch.float16])
        if (claim.variant, claim.direction) == ("plain", "forward")
    )
    return claim, calls


def test_an_error_that_further_draws_allow_is_accepted_and_a_larger_one_is_not(heavy_tailed):
    one, many = definitions_error(heavy_tailed, [0]), definitions_error(heavy_tailed, range(1 + REDRAWS))
    assert many > 1.5 * one, "the draws do not differ enough to tell the two apart"
    between, calls = claim_of(heavy_tailed, one + many)  # more than 2 · one, less than 2 · many
    found = prove(between)
    assert (found.ok, found.message) == (True, "")
    assert 2 * one < found.error <= found.bound < 2.1 * many
    assert len(calls) == between.calls, "judged anew, but not computed anew: luck must not help a kernel that races"
    assert Original().holds(between)  # mutants are tried by the same rule
    beyond, _ = claim_of(heavy_tailed, 2.5 * many)
    found = prove(beyond)
    assert found.ok is False
    assert "1 of 40005 elements are out of bound" in found.message
    assert found.bound > 2 * many


def test_a_claim_that_chance_refuted_on_a_gpu_can_be_judged_once_more():
    """Its gradients are large together, none of them alone; an error in the queries' was 1.05 of the bound."""
    (case,) = (case for case in ops.attention.cases if case.name == "2x70x300x2x1x128x128xcausal")
    one, many = (compute_standards(ops.attention, case, "large", torch.float16, "backward", CPU, more) for more in (False, True))  # fmt: skip
    (_, truth, own), (_, _, worst) = one["gradient of q"], many["gradient of q"]
    assert further_draws("large", [truth])
    assert worst[0] > 1.5 * own[0]


def test_further_draws_are_made_only_for_what_is_refuted_and_where_they_can_change_that(outside):
    asked = []

    def counting(*identity):
        asked.append(identity[-1])
        return compute_standards(*identity)

    def ask(operator, case, forward):
        asked.clear()
        contract.implements(operator, backend="planted")(forward)
        found = claims([operator], CPU, only={operator.name: "planted"}, dtypes=[torch.float32])
        (claim,) = (c for c in found if (c.case.name, c.variant, c.direction) == (case, "plain", "forward"))
        return prove(claim, counting).ok, list(asked)

    assert ask(ops.relu, "33", torch.relu) == (True, [False])
    assert ask(ops.relu, "33", torch.neg) == (False, [False, True])
    assert ask(ops.argmax, "3x33", lambda logits: logits.argmin(-1)) == (False, [False])


def test_the_definition_is_drawn_again_where_no_result_is_large():
    sizes = lambda *shapes: [torch.empty(shape, dtype=torch.float64) for shape in shapes]
    redrawn = [("plain", seed, 0) for seed in range(1, 1 + REDRAWS)]
    redrawn += [("plain", 0, nudge) for nudge in range(1, 1 + NUDGES)]
    assert further_draws("plain", sizes(1)) == further_draws("plain", sizes(LARGE, 1)) == redrawn
    assert further_draws("plain", sizes(LARGE + 1, 1)) == []
    assert further_draws("large", sizes(LARGE + 1, 1)) == [("plain", 0, 0)]  # the unvaried arguments
    assert further_draws("nan", [torch.empty(3, dtype=torch.int64)]) == []  # integers have no error to estimate


def test_arguments_rounded_otherwise_are_as_hard_as_they_were():
    """Two scores a rounding apart: a softmax's error is made by that row alone, which other arguments do not have."""
    scores = torch.tensor([[4096.0, 4096.25, -4096.0], [4096.0, 1.0, 2.0]])
    given = dict(x=scores, count=3, codes=torch.tensor([1, 2]))
    found = [nudged_arguments(given, seed) for seed in range(1, 9)]
    assert all((each["count"], each["codes"].tolist()) == (3, [1, 2]) for each in found)
    away = torch.stack([(each["x"].double() - scores.double()) / scores.double() for each in found])
    assert set((away / torch.finfo(torch.float32).eps).round(decimals=3).unique().tolist()) == {-1.0, 0.0, 1.0}
    assert len({each["x"].numpy().tobytes() for each in found}) == len(found)
    assert given["x"] is scores
    assert nudged_arguments(given, 1)["x"].equal(found[0]["x"])
    half = nudged_arguments(dict(x=torch.ones(64, dtype=torch.bfloat16)), 1)["x"]
    assert half.dtype == torch.bfloat16
    assert set(half.tolist()) == {1 - 2**-7, 1.0, 1 + 2**-7}
