"""What promises it is held to it: row i alone has the bits of row i in any batch, and only there is it asked."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract.cases import Make
from tilestack.lab.proof.claims import claims
from tilestack.lab.proof.invariance import ALONE, Rows, is_row_by_row, rows_of_case
from tilestack.lab.proof.verify import prove

CPU = torch.device("cpu")


def case_of(operator, name):
    return next(case for case in operator.cases if case.name == name)


@pytest.mark.parametrize(
    ("name", "case", "cut"),
    [
        ("rms_norm", "4x128", ("x",)),
        ("add_layer_norm", "5x1000", ("x", "residual")),
        ("axpy", "127x3", ("x", "y")),
        ("linear", "5x17x33", ("x",)),
        ("sample", "2x40xall", ("logits", "seeds", "temperature", "top_k", "top_p", "min_p")),
    ],
)
def test_the_arguments_with_a_row_for_each_row_are_found(name, case, cut):
    operator = ops.operator_named(name)
    rows = rows_of_case(operator, case_of(operator, case), torch.float32, CPU)
    assert rows is not None
    assert set(rows.cut) == set(cut)
    assert rows.count == next(iter(case_of(operator, case).build(Make(device="meta")).values())).shape[0]


def test_a_mean_over_the_batch_has_no_rows():
    assert rows_of_case(ops.cross_entropy, case_of(ops.cross_entropy, "5x1000"), torch.float32, CPU) is None


def test_an_argument_that_stays_whole_makes_no_row():
    """One row and a residual of seventy give seventy rows, which are compared with none."""
    operator = ops.operator_named("fused_linear")
    case = case_of(operator, "70x130x40xbias+gelu+dropout+residual")
    assert rows_of_case(operator, case, torch.float64, CPU) is None


def test_a_column_that_a_row_sees_only_alone_is_no_rounding():
    """The last of many columns, whose probability may be next to nothing beside 1."""
    operator = ops.operator_named("causal_softmax")
    case = case_of(operator, "2x33000x1.0")
    arguments = operator.bind(**case.build(Make(torch.float64)))
    arguments["x"][:, -1] = -9.0
    assert 0 < operator.definition(**arguments)[1, -1] < 1e-8
    assert not is_row_by_row(operator, Rows(arguments, ("x",), 2))


def rounds_by_batch(x, weight, eps):
    """Whose rows are divided where there is one and multiplied where there are more."""
    root = torch.sqrt(x.square().mean(-1, keepdim=True) + eps)
    normal = x / root if len(x) == 1 else x * (1 / root)
    return normal if weight is None else normal * weight


def row_by_row(x, weight, eps):
    rows = [ops.rms_norm.definition(row, weight, eps) for row in x]
    return torch.stack(rows) if rows else torch.empty_like(x)


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize(("forward", "right"), [(row_by_row, True), (rounds_by_batch, False)])
def test_the_promise_is_proved_only_where_it_is_made(forward, right):
    contract.implements(ops.rms_norm, backend="planted", backward=contract.AUTOGRAD)(forward)
    planted = ops.rms_norm.implementations["planted"]
    listed = lambda: [
        claim
        for claim in claims([ops.rms_norm], CPU, only={"rms_norm": "planted"}, dtypes=[torch.float32])
        if claim.variant == ALONE
    ]
    assert not listed()
    planted.invariant = True
    proofs = [prove(claim) for claim in listed() if claim.case.name in ("3x33", "5x1000")]
    assert {proof.direction for proof in proofs} == {"forward", "backward"}
    assert all(proof.ok for proof in proofs) is right
    if not right:
        assert any("alone differs from row" in proof.message for proof in proofs)
