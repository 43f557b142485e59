"""The contract from outside: operators and implementations of one's own, what is kept for a gradient, and errors."""

import copy
import inspect
import pickle
import pydoc

import numpy as np
import pytest
import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import AUTOGRAD, Extras, backend, call, check_values, implements, operator, registry
from tilestack.contract.cases import cases

pytestmark = pytest.mark.usefixtures("mine", "each_node")
some_cases = cases(lambda make, n: dict(x=make.normal(n)), check=[(3,)])


@operator(
    cases=cases(lambda make, n: dict(x=make.normal(n), picks=make.integers(2, high=n)), check=[(5,)]),
    outputs=("picked", "total"),
)
def pick_and_total(x: Tensor, picks: Tensor, shift: Tensor | None = None, key: int = 2) -> tuple[Tensor, Tensor]:
    """Two outputs, an integer tensor, an optional one, and an argument with an awkward name."""
    return x[picks] * key, x.sum() if shift is None else x.sum() + shift


asked = []


def pick_and_total_backward(grad_picked, grad_total, x, picks, shift, needs, key):
    asked.append(tuple(needs))
    dx = torch.zeros_like(x).index_add(0, picks, grad_picked * key) + grad_total
    return dx, None, None if shift is None else grad_total.clone()


implements(pick_and_total, backend="mine", backward=pick_and_total_backward)(
    lambda x, picks, shift, key: pick_and_total.definition(x, picks, shift, key)
)


@operator(cases=some_cases)
def sum_over(x: Tensor, dims: list[int]) -> Tensor:
    """An operator with an argument that has no hash."""
    return x.sum(dims)


def sum_over_backward(grad, x, dims):
    for dim in sorted(dim % x.ndim for dim in dims):
        grad = grad.unsqueeze(dim)
    return grad.expand_as(x).contiguous()


implements(sum_over, backend="mine", backward=sum_over_backward)(lambda x, dims: x.sum(dims))


@pytest.fixture
def saved_bytes():
    """Runs a function and tells how many bytes of tensors autograd kept for its backward, each storage once."""

    def measure(function):
        storages = {}
        keep = lambda t: storages.update({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes()}) or t
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            out = function()
        return out, storages

    return measure


@operator(cases=some_cases)
def tells_kind_of_flag(x: Tensor, number: bool = False) -> Tensor:
    return x.clone()


@operator(cases=some_cases)
def tells_kind_of_count(x: Tensor, number: int = 0) -> Tensor:
    return x.clone()


@operator(cases=some_cases, consumes=("x",))
def use_up_what_is_given(x: Tensor) -> Tensor:
    return x.mul_(2).clone()


@operator(cases=some_cases)
def tells_kind_of_share(x: Tensor, number: float = 0.0) -> Tensor:
    return x.clone()


# In the registry only while these tests run, so that no other test meets them.
MINE = {
    described.name: registry._operators.pop(described.name)
    for described in (
        pick_and_total,
        sum_over,
        tells_kind_of_flag,
        tells_kind_of_count,
        tells_kind_of_share,
        use_up_what_is_given,
    )
}


@pytest.fixture
def mine(outside):
    registry._operators.update(MINE)


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def test_an_operator_from_outside_is_one_among_the_others():
    assert ops.operator_named("pick_and_total") is pick_and_total
    assert pick_and_total in ops.operators()
    assert list(pick_and_total.implementations) == ["torch", "mine"]
    assert pick_and_total.tensors == ["x", "picks", "shift"]
    assert pick_and_total.optional == ["shift"]


@pytest.mark.parametrize("with_shift", [False, True])
def test_several_outputs_optional_and_integer_tensors_differentiate(with_shift):
    x, picks = leaf(5), torch.tensor([3, 3])
    shift = leaf() if with_shift else None
    inputs = [x, shift] if with_shift else [x]
    found = []
    for name in ("torch", "mine"):
        with backend(name):
            picked, total = pick_and_total(x, picks, shift, key=3)
        found.append((picked, total, *torch.autograd.grad(picked.sum() + 2 * total, inputs)))
    assert all(torch.equal(theirs, ours) for theirs, ours in zip(*found, strict=True))


def test_a_backward_knows_what_is_needed():
    asked.clear()
    with backend("mine"):
        pick_and_total(torch.randn(5), torch.tensor([0, 1]), leaf())[1].backward()
        pick_and_total(leaf(5), torch.tensor([0, 1]), torch.randn(()))[1].backward()
    assert asked == [(False, False, True), (True, False, False)]


def test_linear_computes_no_gradient_that_nobody_needs(monkeypatch):
    from tilestack.kernels.matmul import pipelined

    sizes = []
    product = pipelined.pipelined_product
    monkeypatch.setattr(
        pipelined, "pipelined_product", lambda a, b, bias: sizes.append((a.shape, b.shape)) or product(a, b, bias)
    )
    with backend("triton"):
        out = ops.linear(torch.randn(3, 4), leaf(5, 4))
        sizes.clear()
        out.sum().backward()
    assert sizes == [((5, 3), (3, 4))]


@pytest.mark.parametrize("name", ["torch", "mine"])
def test_arguments_without_a_hash_keep_their_gradient(name):
    x = leaf(2, 3, 4)
    with backend(name):
        out = sum_over(x, [0, 2])
    out.backward(torch.arange(3.0))
    assert torch.equal(x.grad, torch.arange(3.0).view(1, 3, 1).expand(2, 3, 4))


@pytest.mark.parametrize(
    ("call", "kept"),
    [
        (lambda x, y: ops.add(x, y), []),
        (lambda x, y: ops.axpy(x, y, 2.0), []),
        (lambda x, y: ops.tanh(x), ["out"]),
        (lambda x, y: ops.softmax(x), ["out"]),
        (lambda x, y: ops.silu(x), ["x"]),
        (lambda x, y: ops.rms_norm(x), ["x"]),
    ],
    ids=["add", "axpy", "tanh", "softmax", "silu", "rms_norm"],
)
def test_triton_keeps_only_what_the_gradient_names(call, kept, saved_bytes):
    x, y = leaf(4, 8), leaf(4, 8)
    with backend("triton"):
        out, storages = saved_bytes(lambda: call(x, y))
    tensors = {"x": x, "out": out}
    assert set(storages) == {tensors[name].data_ptr() for name in kept}


@pytest.mark.parametrize(
    ("call", "made"),
    [
        (lambda x: ops.relu(x), 4),
        (lambda x: ops.logsumexp(x, 1), 4 * 4),  # besides x, the unrounded result of each row
    ],
    ids=["relu", "logsumexp"],
)
def test_triton_makes_something_small_to_keep_in_place_of_a_tensor_or_a_reduction(call, made, saved_bytes):
    x = leaf(4, 8)
    with backend("triton"):
        out, storages = saved_bytes(lambda: call(x))
    theirs = {x.data_ptr(), out.data_ptr()}
    assert [size for place, size in storages.items() if place not in theirs] == [made]
    assert out.data_ptr() not in storages


@pytest.mark.parametrize("dims", [[0], [0, 1]])
def test_an_implementation_keeps_what_it_makes_where_it_says_so(dims, saved_bytes):
    """A sum that hands its backward the shape of x as a tensor, not x; over more than one dimension x itself is kept."""
    kept = Extras(
        lambda x, dims: (x.sum(dims), torch.tensor(x.shape)),
        lambda grad, shape, dims: grad.unsqueeze(dims[0]).expand(shape.tolist()).contiguous(),
        when=lambda dims: len(dims) == 1,
    )
    ordinary = sum_over.implementations["mine"]
    implements(sum_over, backend="mine", backward=sum_over_backward, extras=kept)(ordinary.forward)
    try:
        x, grad = leaf(2, 3), torch.randn([3] if dims == [0] else [])
        with backend("mine"):
            out, storages = saved_bytes(lambda: sum_over(x, dims))
            assert torch.equal(sum_over(x.detach(), dims), out)
        assert (x.data_ptr() in storages) == (len(dims) > 1)
        assert torch.equal(torch.autograd.grad(out, x, grad)[0], grad.expand(2, 3))
    finally:
        sum_over.implementations["mine"] = ordinary
        sum_over.plans.clear()


def test_operators_pickle_and_copy_as_themselves():
    assert pickle.loads(pickle.dumps(ops.softmax)) is ops.softmax
    assert copy.deepcopy({"activation": ops.relu})["activation"] is ops.relu


def test_operators_look_like_their_definition():
    assert inspect.signature(ops.gelu) == inspect.signature(ops.gelu.definition)
    assert ops.gelu.__name__ == "gelu"
    shown = pydoc.render_doc(ops.gelu, renderer=pydoc.plaintext)
    assert "gelu = <operator gelu(x: torch.Tensor" in shown
    assert ops.gelu.definition.__doc__ in shown
    with pytest.raises(TypeError, match=r"missing 1 required positional argument: 'x'"):
        ops.gelu()


X = torch.randn(3, 5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.relu([1.0]), TypeError, "relu: x must be a tensor, not list"),
        (lambda: ops.rms_norm(X, 2.0), TypeError, "rms_norm: weight must be a tensor or None, not float"),
        (lambda: ops.add(X, X.to("meta")), ValueError, "add: all tensors must be on one device, but x is on cpu, y is on meta"),
        (lambda: ops.add(X, X[0]), ValueError, r"add: x and y must have one shape and dtype, but x is torch.float32 \(3, 5\) and y"),
        (lambda: ops.softmax(X, 2), ValueError, "softmax: dim 2 is out of range for a tensor of 2 dimensions"),
        (lambda: ops.gelu(X, "erf"), ValueError, "gelu: approximate must be 'none' or 'tanh', not 'erf'"),
        (lambda: ops.rms_norm(X, X[0, :4]), ValueError, r"rms_norm: weight must have shape \(5,\), the last dimension of x"),
        (lambda: ops.layer_norm(X, None, X[0]), ValueError, "layer_norm: a bias needs a weight"),
        (lambda: ops.linear(X, X.T), ValueError, r"linear: x ends in K and weight is \[N, K\], but x is \(3, 5\) and weight is \(5, 3\)"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("name", ["auto", "triton"])
def test_bad_arguments_are_errors_for_people(call, error, message, name):
    with backend(name), pytest.raises(error, match=message):
        call()


def declare(name="never_made", annotations=None, **options):
    def definition(x):
        return x

    definition.__name__ = name
    definition.__annotations__ = {"x": Tensor, "return": Tensor} if annotations is None else annotations
    return operator(cases=some_cases, **options)(definition)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(annotations={"return": Tensor}), "never_made: annotate x; annotations are an operator's schema"),
        (dict(gradient=lambda grad, y: grad), "the gradient of never_made names y; it has grad, x, out, needs"),
        (dict(check=lambda y: True), "the check of never_made names y; it has x"),
        (dict(cost=lambda y: None), "the cost of never_made names y; it has x"),
    ],
)
def test_a_contract_that_cannot_be_kept_is_refused_and_leaves_no_trace(options, message):
    with pytest.raises(TypeError, match=message):
        declare(**options)
    assert "never_made" not in registry._operators


def test_a_name_is_given_once():
    with pytest.raises(ValueError, match=r"an operator named softmax exists already, defined in tilestack.ops.softmax"):
        declare("softmax")


@pytest.mark.parametrize(
    ("described", "options", "message"),
    [
        (ops.add, dict(backward=lambda grad, x: (grad, grad)), "the backward of add on mine names x; it has grad, needs"),
        (ops.softmax, dict(backward=lambda grad, out: grad, when=lambda x: True), "the when of softmax on mine names x; it has grad, out, dim, needs"),
        (ops.softmax, dict(when=lambda y: True), "the when of softmax on mine names y; it has x, dim"),
    ],
)  # fmt: skip
def test_an_implementation_names_only_what_it_can_have(described, options, message):
    with pytest.raises(TypeError, match=message):
        implements(described, backend="mine", **options)(lambda *values: values[0])
    assert "mine" not in described.implementations


@pytest.mark.parametrize("name", ["torch", "auto", "a=b", ""])
def test_a_backend_needs_a_name_of_its_own(name):
    with pytest.raises(ValueError, match=f"a backend of your own needs a name of its own, not {name!r}"):
        implements(ops.add, backend=name, backward=AUTOGRAD)


@pytest.mark.parametrize("other", ["softmax", torch.softmax])
def test_only_an_operator_is_implemented(other):
    with pytest.raises(TypeError, match=r"implements takes an operator, such as ops\.softmax, not .*softmax"):
        implements(other, backend="mine")


@pytest.mark.parametrize("call", [ops.softmax, ops.silu, ops.rms_norm], ids=lambda described: described.name)
def test_a_second_derivative_works_on_torch_and_is_refused_by_name_on_triton(call):
    x = leaf(2, 3).double().detach().requires_grad_()
    with backend("torch"):
        assert torch.autograd.gradgradcheck(call, (x,))
    with backend("triton"):
        (first,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
    message = rf"{call.name} has no second derivative on triton; run it `with tilestack.backend\({call.name}='torch'\)`"
    with pytest.raises(NotImplementedError, match=message):
        torch.autograd.grad(first.sum() + x.sum(), x)


def test_backward_through_a_first_derivative_is_refused_by_name():
    x = leaf(2, 3)
    with backend("triton"):
        (first,) = torch.autograd.grad(ops.softmax(x).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="softmax has no second derivative on triton"):
        (first.sum() + x.sum()).backward()


@pytest.mark.parametrize("made", [lambda x: (x, x), lambda x: None], ids=["two", "none"])
def test_another_number_of_results_than_declared_is_refused_in_every_call(made):
    implements(ops.relu, backend="miscounted")(made)
    with backend("miscounted"):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"relu on miscounted has returned \d results .* declares 1 \(out\)"):
                ops.relu(torch.ones(3))


@pytest.mark.parametrize("backward", [lambda grad, mask: mask.mul_(grad), lambda grad, out, mask: mask.mul_(grad)], ids=["alone", "behind a result"])  # fmt: skip
def test_what_a_backward_writes_over_is_copied_where_the_graph_is_kept(backward):
    extras = Extras(
        lambda x: (x.relu(), (x > 0).to(x.dtype)),
        backward,
        when=lambda x: True,
        overwrites=("mask",),
    )
    implements(ops.relu, backend="overwriting", backward=lambda grad, out: grad, extras=extras)(torch.relu)
    x = leaf(4, 8)
    with backend("overwriting"):
        out = ops.relu(x)
    grad = torch.full((4, 8), 3.0)
    first, second = (torch.autograd.grad(out, x, grad, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, 3 * (x > 0))
    assert torch.equal(first, second)


@pytest.mark.parametrize("first", [True, False])
def test_an_implementation_may_hand_extras_on_in_some_calls_only(first):
    """Whichever comes first, calls with extras and without each get the backward that is theirs."""
    extras = Extras(lambda x: (x.relu(), x > 0), lambda grad, mask: grad * mask * 2, when=lambda x: x.is_contiguous())
    implements(ops.relu, backend="sometimes", backward=lambda grad, out: grad * (out > 0) * 3, extras=extras)(
        torch.relu
    )
    x = torch.randn(4, 8)
    with backend("sometimes"):
        for contiguous in (first, not first, first):
            given = (x if contiguous else x.T.contiguous().T).requires_grad_()
            (found,) = torch.autograd.grad(ops.relu(given).sum(), given)
            assert torch.equal(found, (x > 0) * (2.0 if contiguous else 3.0))


def test_a_backward_notes_nothing_for_a_second_derivative():
    seen = []
    implements(
        ops.relu, backend="noting", backward=lambda grad, out: seen.append(torch.is_grad_enabled()) or grad * (out > 0)
    )(torch.relu)
    x = leaf(4)
    with backend("noting"):
        torch.autograd.grad(ops.relu(x).sum(), x, create_graph=True)
        torch.autograd.grad(ops.relu(x).sum(), x)
    assert seen == [False, False]


def test_warming_up_runs_the_backward_too():
    ran = []
    implements(ops.relu, backend="warm", backward=lambda grad, out: ran.append(1) or grad * (out > 0))(torch.relu)
    with backend("warm"):
        ops.relu.warm_up(leaf(4))
    assert len(ran) == call.WARM_UP_CALLS


def test_what_a_call_consumes_may_be_written():
    assert torch.equal(use_up_what_is_given(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize(
    ("given", "kind"),
    [(1, bool), (np.bool_(True), bool), (True, int), (np.int64(3), int), (2, float), (np.float32(0.5), float)],
)
def test_implementations_get_numbers_of_the_declared_kind(given, kind):
    seen = []
    op = {bool: tells_kind_of_flag, int: tells_kind_of_count, float: tells_kind_of_share}[kind]
    implements(op, backend="kinds")(lambda x, number: seen.append(type(number)) or x.clone())
    with backend("kinds"):
        op(torch.ones(3), given)
    assert seen == [kind]


def test_the_innermost_choice_for_an_operator_wins():
    implements(ops.relu, backend="inner")(lambda x: x + 7)
    with backend(relu="torch"), backend(relu="inner"):
        assert torch.equal(ops.relu(torch.zeros(2)), torch.full((2,), 7.0))


def test_a_new_implementation_a_need_and_checking_values_count_from_the_next_call_on():
    x, rows = torch.zeros(2), torch.tensor([9])
    with backend("renewed"):
        for added in (1, 2):
            implements(ops.relu, backend="renewed")(lambda x, added=added: x + added)
            assert torch.equal(ops.relu(x), torch.full((2,), float(added)))
    with backend("triton"):
        ops.embedding(rows, torch.randn(4, 3))
        check_values(True)
        try:
            with pytest.raises(IndexError):
                ops.embedding(rows, torch.randn(4, 3))
        finally:
            check_values(None)
