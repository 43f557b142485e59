"""Operators that write: into arguments they declare, into memory they are given, and nowhere else."""

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from tilestack import contract, ops
from tilestack.contract import backend, implements, operator
from tilestack.contract.cases import cases

pytestmark = pytest.mark.usefixtures("outside")
cache_cases = cases(lambda make, n: dict(cache=make.normal(n), x=make.normal(n)), check=[(3,)])


names = iter(range(1000))


def named(definition):
    """The definition under a name that no other test has taken: torch.library keeps names for good."""
    definition.__name__ = f"{definition.__name__}_{next(names)}"
    return definition


@pytest.fixture
def write_cache():
    def cache_write(cache: Tensor, x: Tensor, shift: float = 0.0) -> None:
        cache.copy_(x + shift)

    def by_address(cache, x, shift):  # as a kernel does, of which autograd sees nothing
        cache.numpy()[:] = x.numpy() + shift

    op = operator(cases=cache_cases, mutates=("cache",))(named(cache_write))
    implements(op, backend="mine")(by_address)
    return op


@pytest.mark.parametrize("chosen", ["torch", "mine"])
def test_a_declared_argument_is_written_eagerly_and_compiled(write_cache, chosen):
    def step(cache, x):
        write_cache(cache, x, 1.0)
        return cache + 0

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    with backend(chosen), torch.no_grad():
        for run in (step, compiled):
            cache, x = torch.zeros(3), torch.ones(3)
            for _ in range(4):
                assert torch.equal(run(cache, x), torch.full((3,), 2.0))
                assert torch.equal(cache, torch.full((3,), 2.0))
                x = x.clone()


@pytest.mark.parametrize("chosen", ["torch", "mine"])
def test_autograd_is_told_of_what_is_written(write_cache, chosen):
    cache = torch.ones(3)
    weight = torch.ones(3, requires_grad=True)
    loss = (cache * weight).sum()
    with backend(chosen), torch.no_grad():
        for _ in range(3):
            before = cache._version
            write_cache(cache, torch.zeros(3))
            assert cache._version > before
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writing_has_no_gradient(write_cache):
    with pytest.raises(RuntimeError, match=r"writes into cache and has no gradient; call it under torch.no_grad\(\)"):
        write_cache(torch.zeros(3), torch.ones(3, requires_grad=True))


def test_what_is_not_declared_is_refused_eagerly_and_compiled():
    def sneaky(cache: Tensor, x: Tensor) -> Tensor:
        cache.copy_(x)
        return x * 1

    op = operator(cases=cache_cases)(named(sneaky))
    implements(op, backend="mine")(lambda cache, x: op.definition(cache, x))
    with pytest.raises(RuntimeError, match=r"on torch has written into cache; .* @operator\(mutates=\('cache',\)\)"):
        op(torch.zeros(3), torch.ones(3))
    torch.compiler.reset()
    with (
        backend("mine"),
        pytest.raises(Exception, match=r"writes into cache; declare it: @operator\(mutates=\('cache',\)\)"),
    ):
        torch.compile(op, fullgraph=True, backend="aot_eager")(torch.zeros(3), torch.ones(3))


def test_mutates_names_tensor_arguments():
    def never_written(x: Tensor) -> Tensor:
        return x

    with pytest.raises(TypeError, match="mutates names y, which is no tensor argument of it"):
        operator(cases=cache_cases, mutates=("y",))(named(never_written))


@pytest.mark.parametrize("chosen", ["torch", "aten", "triton"])
def test_results_go_where_out_says(chosen):
    x = torch.randn(4, 8)
    with backend(chosen):
        expected = ops.softmax(x)
        for layout in (torch.empty(4, 8), torch.empty(8, 4).T, torch.empty(4, 16)[:, ::2]):
            for _ in range(3):
                out = layout.fill_(torch.nan)
                assert ops.softmax(x, out=out) is out
                assert torch.equal(out, expected)


def test_out_of_several_results_and_over_an_argument():
    x, residual, weight = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    expected = ops.add_rms_norm(x, residual, weight)
    places = torch.empty(4, 8), residual  # written over, once it has been read
    assert ops.add_rms_norm(x, residual, weight, out=places) is places
    for place, result in zip(places, expected, strict=True):
        assert torch.equal(place, result)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (
            torch.empty(4, 7),
            ValueError,
            r"out is torch.float32 \(4, 7\) on cpu, but the result is torch.float32 \(4, 8\)",
        ),
        (torch.empty(4, 8, dtype=torch.float64), ValueError, "out is torch.float64"),
        ((torch.empty(4, 8), torch.empty(4, 8)), TypeError, "softmax: out must be a tensor"),
        ("here", TypeError, "softmax: out must be a tensor"),
    ],
)
def test_out_that_does_not_fit_is_refused(out, error, message):
    with pytest.raises(error, match=message):
        ops.softmax(torch.randn(4, 8), out=out)


def test_out_has_no_gradient_and_works_under_a_compiler():
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="softmax: out= has no gradient"):
        ops.softmax(x, out=torch.empty(4, 8))
    torch.compiler.reset()
    with torch.no_grad(), backend("triton"):
        out = torch.empty(4, 8)
        torch.compile(lambda x, out: ops.softmax(x, out=out), fullgraph=True, backend="aot_eager")(x, out)
        assert torch.equal(out, ops.softmax(x))


def test_lists_of_tensors_are_arguments():
    def total_of(xs: list[Tensor], scale: float = 1.0) -> Tensor:
        return torch.stack([x.sum() for x in xs]).sum() * scale

    op = operator(cases=cases(lambda make, n: dict(xs=[make.normal(n), make.normal(2 * n)]), check=[(3,)]))(
        named(total_of)
    )
    implements(op, backend="mine", backward=contract.AUTOGRAD)(op.definition)
    xs = [torch.randn(3, requires_grad=True), torch.randn(5)]
    for chosen in ("torch", "mine"):
        with backend(chosen):
            for _ in range(3):
                out = op(xs, 2.0)
                torch.testing.assert_close(out, 2 * sum(x.sum() for x in xs))
    out.backward()
    assert torch.equal(xs[0].grad, torch.full((3,), 2.0))
    with pytest.raises(TypeError, match="xs must be a list of tensors"):
        op([1.0])
    with pytest.raises(ValueError, match=r"xs\[0\] is on cpu, xs\[1\] is on meta"):
        op([torch.ones(1), torch.ones(1, device="meta")])


def test_dtypes_are_declared_for_each_argument():
    floats, whole = (torch.float32, torch.float64), (torch.int32, torch.int64)

    def look_up(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    rows = cases(lambda make, n: dict(x=make.normal(n), index=make.integers(2, high=n)), check=[(3,)])
    op = operator(cases=rows, dtypes=dict(x=floats, index=whole))(named(look_up))
    implements(op, backend="mine", dtypes=dict(x=(torch.float32,), index=(torch.int32,)))(op.definition)
    x, index = torch.randn(3), torch.tensor([2, 0])
    assert torch.equal(op(x, index), x[index])
    with pytest.raises(TypeError, match="index must be int32 or int64, not float32"):
        op(x, index.float())
    with pytest.raises(TypeError, match="x must be float32 or float64, not int64"):
        op(index, index)
    with backend("mine"), pytest.raises(contract.BackendError, match="index is int64, it takes int32"):
        op(x, index)


def test_out_keeps_to_what_a_call_without_it_does():
    x = torch.randn(4, 8)
    expected, given = torch.nn.functional.silu(-x), torch._neg_view(x)
    with backend("triton"):
        for _ in range(2):
            assert torch.equal(ops.silu(given, out=torch.empty(4, 8)), ops.silu(given))
            torch.testing.assert_close(ops.silu(given, out=torch.empty(4, 8)), expected)
            torch.testing.assert_close(ops.silu(given, out=torch._neg_view(torch.empty(4, 8))), expected)
        with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="silu has no forward-mode derivative"):
            ops.silu(forward_ad.make_dual(x, x), out=torch.empty(4, 8))
        contract.check_values(True)
        try:
            with pytest.raises(IndexError):
                ops.embedding(torch.tensor([9]), x, out=torch.empty(1, 8))
        finally:
            contract.check_values(None)


def test_an_undeclared_write_is_refused_in_every_call():
    def sneaky(x: Tensor) -> Tensor:
        return x.add_(1).clone()

    op = operator(cases=cases(lambda make, n: dict(x=make.normal(n)), check=[(3,)]))(named(sneaky))
    for _ in range(3):
        with pytest.raises(RuntimeError, match="has written into x"):
            op(torch.zeros(3))


def test_an_argument_may_lie_beside_one_that_is_written(write_cache):
    both = torch.ones(2, 3)
    for shift in (1.0, 2.0):  # views of one tensor share its version
        write_cache(both[0], both[1], shift)
        assert torch.equal(both[0], both[1] + shift)


def test_what_is_written_may_be_left_out_or_a_list():
    def count_up(x: Tensor, counters: list[Tensor], cache: Tensor | None = None) -> Tensor:
        for counter in counters if cache is None else [*counters, cache]:
            counter.add_(1)
        return x * 1

    some = cases(lambda make, n: dict(x=make.normal(n), counters=[make.normal(n)]), check=[(3,)])
    op = operator(cases=some, mutates=("counters", "cache"))(named(count_up))
    counter, x = torch.zeros(3), torch.ones(3)
    op(torch._neg_view(x), [counter])
    assert torch.equal(op(x, [counter], out=torch.empty(3)), x)
    assert torch.equal(counter, torch.full((3,), 2.0))
    op.warm_up(x, [counter])
    assert torch.equal(counter, torch.full((3,), 2.0))
    before = counter._version
    op(x, [counter])
    assert counter._version > before
    with pytest.raises(ValueError, match=r"writes into counters\[0\], which cannot be a negated view"):
        op(x, [torch._neg_view(counter)])


@pytest.mark.parametrize("chosen", ["torch", "mine"])
def test_no_gradient_is_dropped_under_a_compiler(write_cache, chosen):
    def total_of(xs: list[Tensor]) -> Tensor:
        return torch.stack(xs).sum(0)

    total = operator(cases=cases(lambda make, n: dict(xs=[make.normal(n)]), check=[(3,)]))(named(total_of))
    implements(total, backend="mine", backward=lambda grad: [grad])(lambda xs: torch.stack(list(xs)).sum(0))
    x = torch.ones(3, requires_grad=True)
    torch.compiler.reset()
    with backend(**{write_cache.name: "torch", total.name: chosen}):
        write = torch.compile(lambda cache, x: write_cache(cache, x), backend="aot_eager")
        with pytest.raises(Exception, match="writes into cache and has no gradient"):
            write(torch.zeros(3), x)
        add_up = torch.compile(lambda x: total([x, x]), backend="aot_eager")
        if chosen == "mine":
            with pytest.raises(Exception, match="for which only AUTOGRAD makes gradients"):
                add_up(x)
        else:
            add_up(x).sum().backward()
            assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_everything_written_is_told_whatever_the_way():
    """Plainly, into given memory, and by what repeats either; an argument that is left out is not told."""
    faster = []

    def repeat(function, keep, strides_known=True, places=0, otherwise=None):
        def by_address(place, *values):  # as a repeated launch writes, of which autograd sees nothing
            place.numpy()[:] = function(*values).numpy()

        faster.append(lambda: keep(by_address if places else function))
        return otherwise or function

    def write_both(x: Tensor, first: Tensor, second: Tensor | None = None) -> Tensor:
        return x * 1

    some = cases(lambda make, n: dict(x=make.normal(n), first=make.normal(n)), check=[(3,)])
    op = operator(cases=some, mutates=("first", "second"))(named(write_both))
    implements(op, backend="mine", repeat=repeat)(op.definition)
    x, first, second, out = (torch.ones(3) for _ in range(4))
    versions = lambda: [t._version for t in (x, first, second, out)]
    with backend("mine"):
        for options, told in (
            (dict(second=second), (0, 1, 1, 0)),
            (dict(out=out, second=second), (0, 1, 1, 1)),
            (dict(out=out), (0, 1, 0, 1)),
            ({}, (0, 1, 0, 0)),
        ):
            for call in range(3):
                before = versions()
                op(x, first, **options)
                assert [now > then for now, then in zip(versions(), before, strict=True)] == list(map(bool, told))
                if call == 0:
                    faster[-1]()


def test_a_plan_for_given_memory_is_for_memory_laid_out_like_that():
    seen = []

    def repeat(function, keep, strides_known=True, places=0, otherwise=None):
        seen.append(places)
        return otherwise or function

    implements(ops.relu, backend="mine", backward=lambda grad, out: grad, repeat=repeat)(torch.relu)
    x = torch.randn(4, 4)
    with backend("mine"):
        for _ in range(2):
            ops.relu(x)
            for out in (torch.empty(4, 4), torch.empty(4, 4).T, torch._neg_view(torch.empty(4, 4))):
                torch.testing.assert_close(ops.relu(x, out=out), torch.relu(x))
    assert seen == [0, 1, 1]


def test_warming_up_leaves_what_is_written_as_it_was(write_cache):
    cache = torch.zeros(3)
    write_cache.warm_up(cache, torch.ones(3))
    assert torch.equal(cache, torch.zeros(3))
