"""What a call costs in Python once its signature is known: a key, a look-up, and nothing that chooses again."""

import sys

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import autograd, backend, plan, wiring
from tilestack.contract.cases import Make

pytestmark = pytest.mark.usefixtures("outside")


def python_calls(function):
    """The names of the Python functions that a call runs, in order, its own first."""
    names = []

    def note(frame, event, argument):
        if event == "call":
            names.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


def small_arguments(described):
    case = next(c for c in described.cases if c.kind == "check" and "0" not in c.name.split("x"))
    return tuple(described.bind(**case.build(Make())).values())


def replace_all_by_nothing(described):
    results = len(described.outputs)

    def nothing(*values, **config):
        return None if results == 0 else values[0] if results == 1 else values[:1] * results

    for name in described.implementations:
        described.implementations[name].forward = nothing


@pytest.fixture
def forwards():
    kept = {(o, name): i.forward for o in ops.operators() for name, i in o.implementations.items()}
    yield
    for (described, name), forward in kept.items():
        described.implementations[name].forward = forward


@pytest.mark.usefixtures("forwards")
@pytest.mark.parametrize(
    ("name", "choice"),
    [
        (o.name, choice)
        for o in ops.operators()
        for choice in ("", "triton")
        if not choice or choice in o.implementations
    ],
)
def test_a_known_signature_costs_a_look_up(name, choice):
    described = ops.operator_named(name)
    replace_all_by_nothing(described)
    values = small_arguments(described)
    arguments = dict(zip(described.parameters, values, strict=True))
    if choice and (reason := described.implementations[choice].refuses(arguments, torch.device("cpu"))):
        pytest.skip(reason)
    with torch.no_grad(), backend(choice):
        described(*values)
        calls = python_calls(lambda: described(*values))
    if described.mutates:  # autograd is told
        assert calls[-1] == "increment_version"
        calls = [call for call in calls if call != "increment_version" and not call.endswith("run_and_tell")]
    assert calls[-1].endswith("nothing")
    # The test's lambda, the operator, PyTorch's "are we compiling?", the hash of a chosen backend; then the kernel.
    allowed = {"__call__", "is_compiling", "is_dynamo_compiling", "is_scripting", "__hash__", "nothing"}
    assert {call.rpartition(".")[2] for call in calls[1:]} <= allowed
    assert len(calls) <= 7


def test_the_first_call_of_a_signature_is_the_one_that_chooses():
    x = torch.randn(3, 5)
    ops.relu.plans.clear()
    first, second = (python_calls(lambda: ops.relu(x)) for _ in range(2))
    assert {"plan", "Operator.validate", "resolve", "chosen"} <= set(first)
    assert not {"plan", "Operator.validate", "resolve", "chosen", "candidates"} & set(second)


def test_a_signature_is_all_that_a_choice_may_depend_on():
    seen = []
    limited = contract.implements(
        ops.softmax, backend="limited", backward=contract.AUTOGRAD, when=lambda x, dim: seen.append(1) or True
    )
    limited(torch.softmax)
    x = torch.randn(4, 4)
    with backend("limited"):
        for _ in range(3):
            ops.softmax(x)
        assert len(seen) == 1
        for other in (x.T, x.double(), x[:2], x.clone().requires_grad_(), x[None]):
            ops.softmax(other)
        ops.softmax(x, dim=0)
    assert len(seen) == 7


def test_ever_changing_shapes_stay_bounded_and_what_is_used_stays_known(monkeypatch):
    monkeypatch.setattr(plan, "PLANS_KEPT", 8)
    ops.relu.plans.clear()
    for length in range(60):
        ops.relu(torch.ones(length))
        ops.relu(torch.ones(3))
        assert len(ops.relu.plans) <= 2 * 8
        assert "make_plan" not in python_calls(lambda: ops.relu(torch.ones(3)))
    assert torch.equal(ops.relu(torch.ones(3)), torch.ones(3))


def test_a_new_signature_builds_nothing_that_belongs_to_the_implementation(monkeypatch):
    written = []
    monkeypatch.setattr(autograd, "wiring_of", lambda *parts: written.append(1) or wiring.wiring_of(*parts))
    ops.silu.implementations["triton"].functions.clear()
    with backend("triton"):
        for length in range(1, 6):
            ops.silu(torch.ones(length, requires_grad=True)).sum().backward()
    assert len(written) == 1
