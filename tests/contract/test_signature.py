"""What a signature is made of: whatever changes between two calls, the plan of the one is not that of the other."""

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestack import contract
from tilestack.contract import backend, call
from tilestack.contract.cases import cases

pytestmark = pytest.mark.usefixtures("outside")


@pytest.fixture
def of_every_kind():
    """An operator with an argument of every kind, on a backend that sees each of its first calls."""
    seen = []

    def kinds(x: Tensor, y: Tensor | None, zs: list[Tensor], scale: float = 1.0, dims: list[int] = [0]) -> Tensor:  # noqa: B006
        return x * scale

    kinds.__name__ = f"kinds_{next(numbers)}"
    made = cases(lambda make, n: dict(x=make.normal(n), y=make.normal(n), zs=[make.normal(n)]), check=[(3,)])
    op = contract.operator(cases=made, dtypes=dict(x=(), y=(), zs=()))(kinds)
    contract.implements(op, backend="seeing", backward=contract.AUTOGRAD, when=lambda x: seen.append(1) or True)(kinds)
    return op, seen


numbers = itertools.count()


def in_dual_level(call):
    with forward_ad.dual_level():
        call()


def deterministically(call):
    torch.use_deterministic_algorithms(True)
    try:
        call()
    finally:
        torch.use_deterministic_algorithms(False)


OTHERS = {
    "class": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "shape": lambda x: x[:1].view(1, 2),
    "strides": lambda x: x.T,
    "dtype": lambda x: x.double(),
    "gradient": lambda x: x.clone().requires_grad_(),
}
STATES = {
    "deterministic": deterministically,
    "autocast": lambda call: torch.autocast("cpu", torch.bfloat16)(call)(),
    "transform": lambda call: torch.func.grad(lambda x: (call(), x.sum())[1])(torch.ones(1)),
    "forward mode": in_dual_level,
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("name", ["x", "y", "zs"])
def test_every_part_of_every_tensor_is_in_the_signature(of_every_kind, name, what):
    op, seen = of_every_kind
    given = dict(x=torch.ones(2, 2), y=torch.ones(2, 2), zs=[torch.ones(2, 2)])
    x = torch.ones(2, 2)
    changed = given | {name: [OTHERS[what](x)] if name == "zs" else OTHERS[what](x)}
    with backend("seeing"):
        for arguments in (given, changed, given, changed):
            op(**arguments)
    assert len(seen) == 2


@pytest.mark.parametrize(
    "changed", [dict(y=None), dict(zs=[]), dict(scale=2.0), dict(dims=[1])], ids=["y", "zs", "scale", "dims"]
)
def test_every_other_argument_is_in_the_signature(of_every_kind, changed):
    op, seen = of_every_kind
    given = dict(x=torch.ones(2, 2), y=torch.ones(2, 2), zs=[torch.ones(2, 2)], scale=1.0, dims=[0])
    with backend("seeing"):
        for arguments in (given, given | changed, given, given | changed):
            op(**arguments)
    assert len(seen) == 2


@pytest.mark.parametrize("state", STATES)
def test_every_state_that_counts_is_in_the_signature(of_every_kind, state):
    op, seen = of_every_kind
    x = torch.ones(2, 2)
    call = lambda: op(x, None, [x])
    with backend("seeing"):
        call()
        STATES[state](call)
        call()
    assert len(seen) == 2


def test_a_negated_view_in_a_list_is_in_the_signature(of_every_kind):
    op, _ = of_every_kind
    signs = []
    contract.implements(op, backend="signs")(lambda x, y, zs, scale, dims: signs.append(zs[0].is_neg()) or x)
    x = torch.ones(2, 2)
    with backend("signs"):
        for z in (x, torch._neg_view(x), x):
            op(x, None, [z])
    assert signs == [False] * 3


def test_the_device_is_in_the_signature(of_every_kind):
    op, seen = of_every_kind
    with backend("seeing"):
        for device in ("cpu", "meta", "cpu", "meta"):
            x = torch.ones(2, 2, device=device)
            assert op(x, None, []).device.type == device
    assert len(seen) == 2


def test_what_was_not_used_lately_is_forgotten_last(monkeypatch):
    monkeypatch.setattr(call, "PLANS_KEPT", 2)
    plans, made = call.Plans(), {key: (lambda: None) for key in "abcd"}
    for key in "abc":
        plans.keep(key, made[key])
    assert plans.find("a") is made["a"], "the generation before the recent one is still known"
    faster = lambda: None
    plans.replace("b", made["b"], faster)
    assert plans.find("b") is faster, "and a plan in it can be replaced"
    for key in "cd":
        plans.keep(key, made[key])
    plans.replace("c", made["d"], faster)
    assert plans.find("c") is made["c"], "but only the plan that was meant"
    for key in "abcd":
        plans.forget(key)
    assert len(plans) == 0
    plans.keep("a", made["a"])
    plans.older["b"] = made["b"]
    plans.clear()
    assert plans.find("a") is plans.find("b") is None
