"""A call that wants a gradient, in Python and in C++: both are to autograd what PyTorch's own functions are."""

import gc
import sys
import threading
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilestack import ops
from tilestack.contract import Extras, autograd, backend, implements, operator, registry
from tilestack.contract.cases import cases

pytestmark = pytest.mark.usefixtures("mine", "each_node")


@operator(
    cases=cases(lambda make, n: dict(x=make.normal(n)), check=[(3,)]),
    outputs=("scaled", "order", "total"),
)
def scale_and_sort(
    x: Tensor, weight: Tensor | None = None, factor: float = 2.0, shift: float = 9.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Several outputs, one of them of whole numbers, an optional tensor, and two options."""
    scaled = x * factor if weight is None else x * weight * factor
    return scaled + shift, x.argsort(), x.sum()


def scale_and_sort_backward(grad_scaled, grad_order, grad_total, x, weight, needs, shift, factor):
    """Options come by their names, in whichever order."""
    assert shift == 9
    seen.append((grad_scaled, grad_order, grad_total, list(needs)))
    dx = grad_scaled * factor if weight is None else grad_scaled * weight * factor
    return dx + grad_total, None if weight is None else grad_scaled * x * factor


seen: list = []
implements(scale_and_sort, backend="mine", backward=scale_and_sort_backward)(
    lambda x, weight, factor, shift: scale_and_sort.definition(x, weight, factor, shift)
)
MINE = registry._operators.pop("scale_and_sort")  # in the registry only while these tests run


@pytest.fixture
def mine(outside):
    registry._operators["scale_and_sort"] = MINE
    seen.clear()


def relu_as(forward, backward, **more):
    """Run `relu`, which keeps its result, on a forward and backward of the test's own."""
    implements(ops.relu, backend="its_own", backward=backward, **more)(forward)
    return backend("its_own")


def silu_as(forward, backward):
    """Run `silu`, which keeps its argument, on a forward and backward of the test's own."""
    implements(ops.silu, backend="its_own", backward=backward)(forward)
    return backend("its_own")


def plain_relu():
    return relu_as(torch.relu, lambda grad, out: grad * (out > 0))


def leaf(*shape):
    return torch.randn(shape, requires_grad=True)


def test_the_fixture_gives_what_it_says(each_node):
    with plain_relu():
        kind = type(ops.relu(leaf(3)).grad_fn)
    assert (kind.__module__ == "tilestack_node") == (each_node == "C++")
    assert issubclass(kind, torch.autograd.graph.Node)


@pytest.mark.parametrize("weighted", [False, True])
def test_outputs_that_nobody_uses_arrive_as_zeros_in_their_dtype(weighted):
    x, weight = leaf(4), leaf(4) if weighted else None
    with backend("mine"):
        scaled, order, total = scale_and_sort(x, weight, 3)
    assert scaled.requires_grad
    assert total.requires_grad
    assert not order.requires_grad
    assert order.dtype == torch.int64
    total.backward(retain_graph=True)
    grad_scaled, grad_order, grad_total, needs = seen[-1]
    assert torch.equal(grad_scaled, torch.zeros(4))
    assert torch.equal(grad_order, torch.zeros(4, dtype=torch.int64))
    assert torch.equal(grad_total, torch.ones(()))
    assert needs == [True, weighted]
    assert torch.equal(x.grad, torch.ones(4))
    x.grad = None
    scaled.sum().backward()
    assert torch.equal(seen[-1][2], torch.zeros(()))
    torch.testing.assert_close(x.grad, torch.full((4,), 3.0) if weight is None else 3 * weight.detach())
    if weight is not None:
        torch.testing.assert_close(weight.grad, 3 * x.detach())


def test_a_tensor_that_wants_no_gradient_gets_none():
    x, weight = torch.randn(4), leaf(4)
    with backend("mine"):
        scaled, *_ = scale_and_sort(x, weight)
    (found,) = torch.autograd.grad(scaled.sum(), weight)
    assert seen[-1][3] == [False, True]
    torch.testing.assert_close(found, 2 * x)
    assert x.grad is None


def test_without_gradients_nothing_is_kept():
    with backend("mine"), torch.no_grad():
        assert not scale_and_sort(leaf(3))[0].requires_grad
    implementation = MINE.implementations["mine"]
    run = autograd.differentiable(implementation, None, implementation.forward)
    scaled, order, total = run(torch.ones(3), None, 2.0, 9.0)  # as verify calls it, whoever wants a gradient
    assert scaled.grad_fn is total.grad_fn is order.grad_fn is None
    with torch.no_grad():
        assert run(leaf(3), None, 2.0, 9.0)[0].grad_fn is None


def test_a_kept_argument_that_is_written_is_noticed():
    given = leaf(3) * 1
    with silu_as(torch.relu, lambda grad, x: grad * (x > 0)):
        out = ops.silu(given)
    given.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_kept_result_that_is_written_is_noticed():
    with plain_relu():
        out = ops.relu(leaf(3))
    out.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_a_graph_serves_once_unless_it_is_kept():
    x = leaf(3)
    with plain_relu():
        out = ops.relu(x)
    out.sum().backward(retain_graph=True)
    out.sum().backward()
    torch.testing.assert_close(x.grad, 2.0 * (x > 0))
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        out.sum().backward()


def test_what_is_kept_goes_with_the_backward_and_with_the_graph():
    held = []

    def forward(x):
        mask = (x > 0).to(x.dtype)
        held.append(weakref.ref(mask))
        return x * mask, mask

    extras = Extras(forward, lambda grad, mask: grad * mask, when=lambda x: True)
    with relu_as(torch.relu, lambda grad, out: grad, extras=extras):
        x = leaf(3)
        out = ops.relu(x)
        assert held[-1]() is not None
        out.sum().backward()
        assert held[-1]() is None  # out, and the graph behind it, are still there
        out = ops.relu(x)
        assert held[-1]() is not None
        del out
        assert held[-1]() is None


def test_a_kept_result_makes_no_circle():
    with plain_relu():
        out = ops.relu(leaf(3))
    gone = weakref.ref(out)
    gc.disable()
    try:
        del out
        assert gone() is None
    finally:
        gc.enable()


def test_calls_leave_nothing_behind():
    """Options, pairs and tensors are held as often after a thousand calls as before."""
    factor = float("2.5")
    x, weight = leaf(3), leaf(3)

    def step():
        with backend("mine"):
            scaled, _, total = scale_and_sort(x, weight, factor)
        torch.autograd.grad([scaled.sum(), total], [x, weight])
        with backend("mine"):
            scale_and_sort(x, weight, factor)  # a graph that is dropped
        seen.clear()

    for _ in range(3):
        step()
    (plan,) = [run for key, run in MINE.plans.recent.items() if key[-2] == factor]
    before = sys.getrefcount(factor), sys.getrefcount(x), sys.getrefcount(plan)
    for _ in range(1000):
        step()
    assert (sys.getrefcount(factor), sys.getrefcount(x), sys.getrefcount(plan)) == before


def test_hooks_move_away_what_is_kept_and_bring_it_back():
    moved, x = [], leaf(3)
    pack = lambda t: moved.append(t.detach().clone()) or len(moved) - 1
    with plain_relu(), torch.autograd.graph.saved_tensors_hooks(pack, lambda place: moved[place]):
        out = ops.relu(x)
    assert len(moved) == 1
    assert torch.equal(moved[0], out)
    moved[0] = torch.tensor([1.0, 0.0, 1.0])
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], moved[0])


def test_save_on_cpu_and_checkpoints_give_the_same_gradients():
    x = leaf(5)
    with backend("mine"):
        call = lambda x: scale_and_sort(x, None, 3.0)[0].square().sum()
        (truth,) = torch.autograd.grad(call(x), x)
        with torch.autograd.graph.save_on_cpu():
            moved = call(x)
        found = [torch.autograd.grad(moved, x)[0]]
        for reentrant in (False, True):
            x.grad = None
            checkpoint(call, x, use_reentrant=reentrant).backward()
            found.append(x.grad)
    for each in found:
        assert torch.equal(each, truth)


def test_anomalies_are_told_with_the_call_that_made_them():
    with relu_as(torch.relu, lambda grad, out: grad * float("nan")), torch.autograd.detect_anomaly(check_nan=True):
        out = ops.relu(leaf(3))
        with (
            pytest.warns(UserWarning, match=r"(?s)relu_its_ownBackward.*forward call.*test_nodes"),
            pytest.raises(RuntimeError, match="Function 'relu_its_ownBackward' returned nan values"),
        ):
            out.sum().backward()


@pytest.mark.parametrize("view", [lambda x: x, lambda x: x[1:], lambda x: x.view(-1)], ids=["itself", "part", "view"])
def test_a_result_in_the_memory_of_an_argument_is_differentiated_as_any_other(view):
    def backward(grad, x):
        dx = torch.zeros_like(x)
        view(dx).add_(grad)
        return dx * 3

    for start in (leaf(4), leaf(4) * 1):
        with silu_as(view, backward):
            out = ops.silu(start)
        assert out is not start
        assert out.data_ptr() == view(start).data_ptr()
        assert out.grad_fn.name() == "silu_its_ownBackward"
        (found,) = torch.autograd.grad(out.sum(), start)
        assert torch.equal(found, backward(torch.ones_like(out), start))


def test_writing_into_a_result_that_is_a_view_is_refused_as_pytorch_does():
    with silu_as(lambda x: x[1:], lambda grad, x: torch.zeros_like(x)):
        out = ops.silu(leaf(4) * 1)
    with pytest.raises(RuntimeError, match="created inside a custom Function"):
        out.add_(1)


def test_writing_into_a_result_is_allowed_where_it_is_not_kept():
    x = leaf(4)
    with silu_as(lambda x: x * 1, lambda grad, x: grad * 7):
        out = ops.silu(x)
    out.mul_(2)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.full((4,), 14.0))


def test_extras_are_handed_on_and_needs_are_asked_for():
    asked = []

    def forward(x, weight, factor, shift, needs):
        asked.append(needs)
        return scale_and_sort.definition(x, weight, factor, shift), x * factor, None

    def backward(grad_scaled, weight, times, nothing, needs, factor):
        asked.append((nothing, needs))
        return grad_scaled * weight * factor, grad_scaled * times

    extras = Extras(forward, backward, when=lambda x: True)
    implements(scale_and_sort, backend="handing", backward=scale_and_sort_backward, extras=extras)(
        scale_and_sort.definition
    )
    x, weight = torch.randn(3), leaf(3)
    with backend("handing"):
        scaled, *_ = scale_and_sort(x, weight, 5.0)
    (found,) = torch.autograd.grad(scaled.sum(), weight)
    torch.testing.assert_close(found, 5 * x)
    assert asked == [[False, True], (None, [False, True])]


def test_what_is_no_tensor_cannot_be_kept():
    extras = Extras(lambda x: (x.relu(), 3), lambda grad, three: grad, when=lambda x: True)
    with (
        relu_as(torch.relu, lambda grad, out: grad, extras=extras),
        pytest.raises(TypeError, match="can only save variables, but argument 0 is of type int"),
    ):
        ops.relu(leaf(3))


def test_other_extras_than_named_are_an_error():
    extras = Extras(lambda x: (x.relu(), None, None), lambda grad, one: grad, when=lambda x: True)
    with relu_as(torch.relu, lambda grad, out: grad, extras=extras), pytest.raises(ValueError, match="values"):
        ops.relu(leaf(3))


@pytest.mark.parametrize("made", [(), (None, None), None], ids=["none", "two", "nothing"])
def test_another_number_of_gradients_is_an_error_that_says_what_belongs_there(made):
    with relu_as(torch.relu, lambda grad, out: made):
        out = ops.relu(leaf(3))
    with pytest.raises(
        TypeError, match=r"the backward of relu on its_own returned \d gradients; it returns one for each of x"
    ):
        out.sum().backward()


@pytest.mark.parametrize("create_graph", [False, True])
def test_what_a_backward_raises_reaches_the_caller(create_graph):
    def backward(grad, out):
        raise LookupError("not there")

    x = leaf(3)
    with relu_as(torch.relu, backward):
        out = ops.relu(x)
    with pytest.raises(LookupError, match="not there"):
        torch.autograd.grad(out.sum(), x, create_graph=create_graph)


def test_what_a_forward_raises_reaches_the_caller_and_no_node_stays():
    def forward(x):
        raise LookupError("not there")

    with relu_as(forward, lambda grad, out: grad):
        for _ in range(3):
            with pytest.raises(LookupError, match="not there"):
                ops.relu(leaf(3))


def test_a_gradient_that_is_no_tensor_is_an_error():
    with relu_as(torch.relu, lambda grad, out: 3):
        out = ops.relu(leaf(3))
    with pytest.raises(RuntimeError, match=r"expected Variable or None \(got int\)"):
        out.sum().backward()


def test_a_gradient_of_another_shape_is_an_error():
    with relu_as(torch.relu, lambda grad, out: grad[:1, None]):
        out = ops.relu(leaf(3))
    with pytest.raises(RuntimeError, match="relu_its_ownBackward returned an invalid gradient at index 0"):
        out.sum().backward()


def test_no_gradient_for_an_argument_is_none():
    x = leaf(3)
    with relu_as(torch.relu, lambda grad, out: (None,)):
        out = ops.relu(x)
    assert torch.autograd.grad(out.sum(), x, allow_unused=True) == (None,)


def test_a_gradient_may_be_what_arrived():
    x, arriving = leaf(3), torch.randn(3)
    with relu_as(torch.relu, lambda grad: grad):
        out = ops.relu(x)
    assert torch.equal(torch.autograd.grad(out, x, arriving)[0], arriving)


def test_hooks_of_tensors_and_nodes_run():
    seen, x = [], leaf(3)
    with plain_relu():
        out = ops.relu(x)
    out.register_hook(lambda grad: grad * 2)
    out.grad_fn.register_prehook(lambda grads: seen.append("before"))
    out.grad_fn.register_hook(lambda found, arrived: seen.append("after"))
    out.retain_grad()
    out.sum().backward()
    assert seen == ["before", "after"]
    assert torch.equal(x.grad, 2.0 * (x > 0))
    assert torch.equal(out.grad, torch.full((3,), 2.0))


def test_profilers_see_both_directions_by_name():
    x = leaf(3)
    with plain_relu(), torch.profiler.profile(record_shapes=True) as profile:
        ops.relu(x).sum().backward()
    shapes = {event.key: event.input_shapes for event in profile.key_averages(group_by_input_shape=True)}
    assert shapes["relu_its_own"] == shapes["relu_its_ownBackward"] == [[3]]


def test_the_node_is_printed_by_its_name():
    with plain_relu():
        out = ops.relu(leaf(3))
    assert out.grad_fn.name() == "relu_its_ownBackward"
    assert "grad_fn=<relu_its_ownBackward>" in repr(out)
    assert out.grad_fn.next_functions[0][0].name() == "torch::autograd::AccumulateGrad"


def test_a_very_long_graph_goes_without_a_stack_overflow():
    with relu_as(lambda x: x * 1, lambda grad: grad):
        out = x = leaf(1)
        for _ in range(20_000):
            out = ops.relu(out)
    out.backward()
    assert x.grad.item() == 1
    with backend("its_own"):
        for _ in range(20_000):
            out = ops.relu(out)
    del out


def test_threads_differentiate_the_same_graph():
    x = leaf(64)
    with plain_relu():
        out = ops.relu(x)
        start, found = threading.Barrier(4), []

        def run():
            start.wait()
            for _ in range(50):
                graph = ops.relu(x)
                found.append(torch.autograd.grad(graph.sum(), x)[0])
                found.append(torch.autograd.grad(out.sum(), x, retain_graph=True)[0])

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found) == 400
    assert all(torch.equal(each, (x > 0).float()) for each in found)


def test_a_second_derivative_is_refused_whatever_it_goes_through():
    x, weight = leaf(3), leaf(3)
    with backend("mine"):
        scaled, _, total = scale_and_sort(x, weight, 3.0)
    first = torch.autograd.grad((scaled * x).sum() + total, [x, weight], create_graph=True)
    assert all(each.requires_grad for each in first)
    for each in first:
        with pytest.raises(NotImplementedError, match="scale_and_sort has no second derivative on mine"):
            torch.autograd.grad(each.sum(), x, retain_graph=True)


def test_a_tensor_made_for_inference_cannot_be_kept():
    with torch.inference_mode():
        x = torch.randn(3)
    with backend("mine"), pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        scale_and_sort(x, leaf(3))


def test_compiled_autograd_sees_calls_where_it_is_turned_on():
    from torch._dynamo import compiled_autograd, config

    x = leaf(3)
    with plain_relu(), config.patch(compiled_autograd=True):
        out = ops.relu(x)
    with compiled_autograd._enable(lambda graph: graph):
        out.sum().backward()
    assert torch.equal(x.grad, (x > 0).float())


def test_where_it_was_not_compiled_autograd_is_told_the_way_out(each_node):
    from torch._dynamo import compiled_autograd

    if each_node == "Python":
        pytest.skip("it looks into Python")
    with plain_relu():
        out = ops.relu(leaf(3))
    with (
        compiled_autograd._enable(lambda graph: graph),
        pytest.raises(NotImplementedError, match=r"relu_its_ownBackward, which is C\+\+; set TILESTACK_NATIVE=0"),
    ):
        out.sum().backward()


def test_a_compiled_function_around_eager_calls_is_as_before():
    @torch.compiler.disable
    def outside_of_the_graph(x):
        return ops.relu(x)

    x = leaf(4)
    with plain_relu():
        torch.compiler.reset()
        found = torch.compile(lambda x: 2 * outside_of_the_graph(3 * x), backend="aot_eager")(x)
    found.sum().backward()
    assert torch.equal(x.grad, 6.0 * (x > 0))
