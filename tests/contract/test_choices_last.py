"""A choice of backend lasts: what is computed again in a backward, and its gradient, are on the backend of the forward."""

import threading

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tilestack import contract, ops
from tilestack.contract import backend

pytestmark = pytest.mark.usefixtures("each_node")
FUNCTIONS = dict(
    softmax=lambda x: ops.softmax(x),
    tanh=lambda x: ops.tanh(x),
    relu=lambda x: ops.relu(x),
    rms_norm=lambda x: ops.rms_norm(x),
    softmax_of_silu=lambda x: ops.softmax(ops.silu(x)),
)


def in_a_thread(function):
    """As autograd's own threads on a GPU do, which know nothing of a `with` around the caller."""
    failed = []

    def run():
        try:
            function()
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("where", ["outside", "in a thread", "under another choice"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_recomputation_runs_on_the_backend_of_the_forward(name, where, reentrant):
    x, grad = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.randn(3, 8, dtype=torch.float64)
    with backend("torch"):
        (truth,) = torch.autograd.grad(FUNCTIONS[name](x), x, grad)
    with backend("triton"):
        out = checkpoint(FUNCTIONS[name], x, use_reentrant=reentrant)
        if where == "in a thread":
            in_a_thread(lambda: out.backward(grad))
    if where == "outside":
        out.backward(grad)
    elif where == "under another choice":
        with backend("torch"):
            out.backward(grad)
    torch.testing.assert_close(x.grad, truth)


@pytest.mark.usefixtures("outside")
def test_no_choice_lasts_too():
    ran = []
    contract.implements(ops.relu, backend="mine", backward=contract.AUTOGRAD)(lambda x: ran.append(1) or torch.relu(x))
    out = checkpoint(lambda x: ops.relu(x), torch.randn(3, requires_grad=True), use_reentrant=False)
    with backend("mine"):
        out.sum().backward()
    assert not ran


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    ("before", "inside", "after"), [("triton", "", "torch"), ("", "", "triton"), ("torch", "triton", "")]
)
def test_what_is_configured_in_between_changes_nothing(before, inside, after, reentrant, monkeypatch):
    """Of silu and softmax another backend keeps other tensors of the same shapes: gradients would be wrong without a word."""
    monkeypatch.setattr(contract.backends, "_configured", contract.backends.Choice())
    x, grad = torch.randn(3, 8, dtype=torch.float64, requires_grad=True), torch.randn(3, 8, dtype=torch.float64)
    (truth,) = torch.autograd.grad(torch.softmax(torch.nn.functional.silu(x), -1), x, grad)
    try:
        contract.configure_backend(before)
        with backend(inside):
            out = checkpoint(FUNCTIONS["softmax_of_silu"], x, use_reentrant=reentrant)
        contract.configure_backend(after)
        out.backward(grad)
    finally:
        contract.configure_backend("")
    torch.testing.assert_close(x.grad, truth)


@pytest.mark.usefixtures("outside")
def test_a_gradient_keeps_the_backend_outside_the_with():
    ran = []
    contract.implements(ops.relu, backend="mine", backward=lambda grad, out: ran.append(1) or grad)(torch.relu)
    with backend("mine"):
        out = ops.relu(torch.randn(3, requires_grad=True))
    out.sum().backward()
    assert ran


@pytest.mark.usefixtures("outside")
def test_extras_reach_the_backward_under_a_compiler():
    made = []
    extras = contract.Extras(
        lambda x: (torch.relu(x), made.append(1) or x > 0),
        lambda grad, counts: grad * counts,
        when=lambda x: True,
        fake=lambda x: torch.empty_like(x, dtype=torch.bool),
    )
    contract.implements(ops.relu, backend="mine", backward=lambda grad, out: 1 / 0, extras=extras)(torch.relu)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: 2 * ops.relu(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(5, requires_grad=True)
    with backend("mine"):
        out = compiled(x)
    out.backward(torch.arange(5.0))
    assert made
    assert torch.equal(x.grad, 2 * torch.arange(5.0) * (x > 0))


@pytest.mark.usefixtures("outside")
@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_runs_the_very_implementation_of_the_forward(reentrant):
    ran = []
    contract.implements(ops.relu, backend="mine", backward=contract.AUTOGRAD)(lambda x: ran.append(1) or torch.relu(x))
    x = torch.randn(4, requires_grad=True)
    with backend("mine"):
        out = checkpoint(lambda x: ops.relu(x) * 2, x, use_reentrant=reentrant)
    out.sum().backward()
    assert len(ran) == 2


@pytest.mark.usefixtures("outside")
def test_extras_registered_anew_are_the_ones_that_are_compiled():
    found = []
    for scale in (2.0, 7.0):
        extras = contract.Extras(
            lambda x, scale=scale: (torch.relu(x), torch.full_like(x, scale)),
            lambda grad, factor: grad * factor,
            when=lambda x: True,
            fake=lambda x: torch.empty_like(x),
        )
        contract.implements(ops.relu, backend="mine", backward=lambda grad, out: grad, extras=extras)(torch.relu)
        torch.compiler.reset()
        x = torch.ones(1, requires_grad=True)
        with backend("mine"):
            torch.compile(lambda x: ops.relu(x), fullgraph=True, backend="aot_eager")(x).backward()
        found.append(x.grad.item())
    assert found == [2.0, 7.0]
