"""Repeated calls: what they compute at other addresses, what sends them the implementation's own way, and what is not repeated.

The kernels here take addresses and compute on the host, so that a wrong address, number or shape shows in the result.
"""

import ctypes
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton import knobs

from tilestack import contract, ops
from tilestack.contract import backend, source_of
from tilestack.contract import launch as launcher
from tilestack.contract import workspace as workspaces
from tilestack.contract.into import copied
from tilestack.contract.launch import launch
from tilestack.contract.repeat import straight_line


class OnGpu(torch.Tensor):
    """A tensor on the host that says it is on a GPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    is_cuda = True


class WeightedSum:
    """out = x + weight · y, over n floats: a compiled kernel(x_ptr, y_ptr, out_ptr, n, weight, BLOCK)."""

    __name__ = "weighted_sum"
    arg_names = ("x_ptr", "y_ptr", "out_ptr", "n", "weight", "BLOCK")
    params = tuple(SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in arg_names)

    def __getitem__(self, grid):
        def run(x, y, out, n, weight, BLOCK):
            knobs.runtime.launch_enter_hook(
                SimpleNamespace(get=lambda: {"name": self.__name__})
            )  # as Triton's own does
            compute(x.data_ptr(), y.data_ptr() if y is not None else 0, out.data_ptr(), n, weight)
            return SimpleNamespace(run=Launcher(), function=None, packed_metadata=None)

        return run


class Launcher:
    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    @staticmethod
    def launch(x, y, z, stream, *values):
        compute(*values[9:14])


def compute(x, y, out, n, weight):
    floats = lambda address: (ctypes.c_float * n).from_address(address)
    for place in range(n):
        floats(out)[place] = floats(x)[place] + (weight * floats(y)[place] if y else 0)


@pytest.fixture(autouse=True)
def device(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(workspaces, "_views", {})
    monkeypatch.setattr(workspaces, "_kept", {})  # what is left in these is no fault of a kernel


def on_gpu(*shape, offset=0):
    """Random floats that start on 16 bytes, or some floats behind."""
    size = torch.Size(shape).numel()
    memory = torch.randn(size + 8)
    start = -memory.data_ptr() // 4 % 4 + offset
    return memory[start : start + size].view(shape).as_subclass(OnGpu)


class Repeated:
    """A straight-line function as a plan holds it, counting how often the function itself runs."""

    def __init__(self, function, **options):
        def counted(*values):
            self.own += 1
            return function(*values)

        self.own = 0
        if "otherwise" in options:  # which calls the function as it is
            otherwise = options["otherwise"]
            options["otherwise"] = lambda *values: setattr(self, "own", self.own + 1) or otherwise(*values)
            counted = function
        self.run = straight_line(counted, lambda faster: setattr(self, "run", faster), **options)

    def __call__(self, *values):
        return self.run(*values)


kernel = WeightedSum()


def weighted_sum(x, y, weight=1.0):
    out = torch.empty_like(x)
    launch(kernel, (1,), x, y, out, x.numel(), weight, BLOCK=8)
    return out


def test_the_third_call_is_repeated_at_its_own_addresses():
    repeated = Repeated(weighted_sum)
    kept = []
    for _ in range(5):
        x, y = on_gpu(3, 4), on_gpu(3, 4)
        kept.append((repeated(x, y, 0.5), x + 0.5 * y))
    assert repeated.own == 2
    for found, expected in kept:  # each in memory of its own
        assert torch.equal(found, torch.Tensor(expected))


def test_what_a_signature_leaves_open_takes_the_own_way(monkeypatch):
    repeated = Repeated(weighted_sum)
    for _ in range(3):
        repeated(on_gpu(8), on_gpu(8), 0.5)
    assert repeated.own == 2
    x, y = on_gpu(8), on_gpu(8, offset=1)
    assert torch.equal(repeated(x, y, 0.5), x + 0.5 * y)
    assert torch.equal(repeated(x, x, 2.0), 3 * x)
    assert repeated.own == 4
    monkeypatch.setitem(repeated.run.__globals__, "current_device", lambda: 5)
    repeated(x, x, 0.5)
    assert repeated.own == 5


def test_views_are_found_again_by_their_offset():
    def second_half_plus_first(x, y):
        flat = x.view(-1)
        first, second = flat.split(8)
        out = torch.empty(8, dtype=x.dtype)
        launch(kernel, (1,), x, None, x.new_empty(4, 4), 16, 1.0, BLOCK=8)  # scratch that nobody reads
        launch(kernel, (1,), second.as_subclass(OnGpu), first, out, 8, 1.0, BLOCK=8)
        return out.view(2, 4).T, None, y

    repeated = Repeated(second_half_plus_first)
    for _ in range(4):
        both = torch.randn(40)
        start = -both.data_ptr() // 4 % 4
        x, y = (part.as_subclass(OnGpu) for part in both[start : start + 32].view(2, 4, 4))  # of one memory
        out, nothing, same = repeated(x, y)
        assert torch.equal(out, torch.Tensor(x[2:] + x[:2]).T)
        assert out.stride() == (1, 4)
        assert nothing is None
        assert same is y
    assert repeated.own == 2


def test_a_tensor_without_memory_has_no_address():
    """As the partial sums of a weight's gradient have none where there is no weight."""

    def beside_nothing(x):
        out, nothing = torch.empty_like(x), torch.empty(0, 4)
        launch(kernel, (1,), x, nothing, out, x.numel(), 1.0, BLOCK=8)
        return out

    repeated = Repeated(beside_nothing)
    for _ in range(4):
        x = on_gpu(4)
        assert torch.equal(repeated(x), torch.Tensor(x))
    assert repeated.own == 2


def test_a_call_that_only_writes_returns_nothing():
    repeated = Repeated(lambda x, y: launch(kernel, (1,), x, y, x, x.numel(), 1.0, BLOCK=8))
    for _ in range(4):
        x, y = on_gpu(4), on_gpu(4)
        expected = x + y
        assert repeated(x, y) is None
        assert torch.equal(x, expected)
    assert repeated.own == 2


def test_a_result_may_be_a_view_of_an_argument():
    repeated = Repeated(lambda x, y: (weighted_sum(x, y), x[1:].T))
    for offset in range(5):
        memory = on_gpu(8, 4)
        x, y = memory[offset % 3 * 2 : offset % 3 * 2 + 4].as_subclass(OnGpu), on_gpu(4, 4)
        total, view = repeated(x, y)
        assert torch.equal(total, torch.Tensor(x + y))
        assert torch.equal(torch.Tensor(view), torch.Tensor(x[1:].T))
        assert view.data_ptr() == x[1:].data_ptr()
    assert repeated.own == 2


def test_results_within_results_are_repeated_as_they_lie():
    """As a forward with several results gives them that hands something on besides."""

    def both_and_their_sum(x, y):
        return (weighted_sum(x, y), weighted_sum(y, x, 2.0)), weighted_sum(x, x)

    repeated = Repeated(both_and_their_sum)
    for _ in range(4):
        x, y = on_gpu(2, 3), on_gpu(2, 3)
        (first, second), third = repeated(x, y)
        assert [first.tolist(), second.tolist(), third.tolist()] == [
            (x + y).tolist(),
            (y + 2 * x).tolist(),
            (x + x).tolist(),
        ]
    assert repeated.own == 2


def test_parts_of_one_allocation_are_given_as_parts():
    def halves(x):
        both = torch.empty(2, x.numel())
        launch(kernel, (1,), x, x, both, x.numel(), 1.0, BLOCK=8)
        launch(kernel, (1,), x, x, both[1], x.numel(), 2.0, BLOCK=8)
        return both[0], both[1]

    repeated = Repeated(halves)
    for _ in range(4):
        x = on_gpu(8)
        double, triple = repeated(x)
        assert torch.equal(double, torch.Tensor(x) * 2)
        assert torch.equal(triple, torch.Tensor(x) * 3)
    assert repeated.own == 2


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x, y: weighted_sum(x, y) + 1, id="arithmetic"),
        pytest.param(lambda x, y: weighted_sum(x, y).fill_(1), id="written in place"),
        pytest.param(lambda x, y: weighted_sum(x, y.clone()), id="a copy"),
        pytest.param(lambda x, y: weighted_sum(x, ELSEWHERE), id="memory from elsewhere"),
        pytest.param(lambda x, y: torch.empty(3), id="no launch"),
    ],
)
def test_what_is_not_straight_line_code_is_not_repeated(function):
    repeated = Repeated(function)
    for _ in range(5):
        repeated(on_gpu(8), on_gpu(8))
    assert repeated.own == 5


ELSEWHERE = on_gpu(8)


def test_addresses_that_cannot_be_told_apart_are_not_repeated():
    repeated = Repeated(weighted_sum)
    for _ in range(3):
        x = on_gpu(8)
        repeated(x, x)
    x, y = on_gpu(8), on_gpu(8)
    assert torch.equal(repeated(x, y), x + y)
    assert repeated.own == 4


def test_strides_are_asked_for_where_no_signature_says_them():
    repeated = Repeated(lambda x, y, needs: weighted_sum(x.contiguous().as_subclass(OnGpu), y), strides_known=False)
    x, y = on_gpu(4, 4), on_gpu(4, 4)
    for _ in range(3):
        repeated(x, y, [True, False])
    assert repeated.own == 2
    assert torch.equal(repeated(x.T, y, [True, False]), x.T + y)
    repeated(x, y, [True, True])
    assert repeated.own == 4


def test_numbers_are_those_of_the_call():
    for values in ([2, 2, 5, 7.5], [True, True, 0.25], [np.float64(0.5)] * 3):
        repeated = Repeated(weighted_sum)
        for weight in values:
            x, y = on_gpu(4), on_gpu(4)
            torch.testing.assert_close(torch.Tensor(repeated(x, y, weight)), torch.Tensor(x + float(weight) * y))


def test_a_call_off_16_bytes_does_not_end_repetition():
    repeated = Repeated(weighted_sum)
    repeated(on_gpu(4), on_gpu(4), 0.5)
    repeated(on_gpu(4), on_gpu(4, offset=1), 0.5)
    for _ in range(5):
        repeated(on_gpu(4), on_gpu(4), 0.5)
    assert repeated.own == 3


def test_a_launch_past_ours_is_seen_and_not_repeated():
    def mixed(x, y, weight):
        first, out = torch.empty_like(x), torch.empty_like(x)
        kernel[(1,)](x, None, first, 4, 1.0, BLOCK=8)
        launch(kernel, (1,), first.as_subclass(OnGpu), y, out, 4, weight, BLOCK=8)
        return out

    repeated = Repeated(mixed)
    for _ in range(5):
        x, y = on_gpu(4), on_gpu(4)
        assert torch.equal(repeated(x, y, 0.5), x + 0.5 * y)
    assert repeated.own == 5


@pytest.mark.parametrize("calls_before", [0, 1, 3])
def test_a_call_inside_a_noted_one_is_noted_with_it(calls_before):
    inner = Repeated(weighted_sum)
    for _ in range(calls_before):  # not yet noted, about to be, and repeated already
        inner(on_gpu(4), on_gpu(4), 0.5)

    def outer(x, y, weight):
        return weighted_sum(inner(x, y, weight).as_subclass(OnGpu), y, 1.0)

    repeated = Repeated(outer)
    for _ in range(5):
        x, y = on_gpu(4), on_gpu(4)
        torch.testing.assert_close(torch.Tensor(repeated(x, y, 0.5)), torch.Tensor(x + 1.5 * y))
    assert repeated.own == 2


def test_signatures_that_differ_in_numbers_alone_share_their_text():
    texts = set()
    for size in (4, 8, 12):
        repeated = Repeated(weighted_sum)
        for _ in range(3):
            repeated(on_gpu(size), on_gpu(size), 0.5)
        texts.add(source_of(repeated.run))
    assert len(texts) == 1
    assert "def repeat(a0, a1, a2):" in texts.pop()


def test_results_are_written_into_the_places_given():
    def into(place, *values):
        place.copy_(weighted_sum(*values))

    repeated = Repeated(weighted_sum, places=1, otherwise=into)
    for _ in range(5):
        x, y, place = on_gpu(4), on_gpu(4), on_gpu(4)
        repeated(place, x, y, 0.5)
        assert torch.equal(place, x + 0.5 * y)
    assert repeated.own == 1, "once noted, nothing is allocated and copied"
    memory = on_gpu(8)
    x, y, place = memory[:4], on_gpu(4), memory[2:6]  # the place lies over x
    expected = x + 0.5 * y
    repeated(place, x, y, 0.5)
    assert torch.equal(place, expected)
    assert repeated.own == 2


def test_a_place_of_another_layout_is_copied_to():
    def into(place, *values):
        place.copy_(weighted_sum(*values))

    repeated = Repeated(weighted_sum, places=1, otherwise=into)
    for _ in range(4):
        x, y, place = on_gpu(4, 4), on_gpu(4, 4), on_gpu(4, 4).T
        repeated(place, x, y, 0.5)
        assert torch.equal(place, x + 0.5 * y)


def test_a_workspace_is_asked_for_again_in_every_call(monkeypatch):
    asked = []
    find = workspaces._find
    monkeypatch.setattr(workspaces, "_find", lambda *given: asked.append(given) or find(*given))

    def through_a_workspace(x, y):
        between, out = workspaces.workspace("between", x.shape, x.dtype, x.device), torch.empty_like(x)
        launch(kernel, (1,), x, y, between, x.numel(), 1.0, BLOCK=8)
        launch(kernel, (1,), between.as_subclass(OnGpu), y, out, x.numel(), 1.0, BLOCK=8)
        return out

    repeated = Repeated(through_a_workspace)
    for calls in range(1, 6):
        x, y = on_gpu(4), on_gpu(4)
        assert torch.equal(repeated(x, y), torch.Tensor(x + y + y))
        assert len(asked) == calls
    assert repeated.own == 2


@pytest.mark.usefixtures("outside")
def test_an_operator_keeps_the_faster_function_until_its_plans_are_forgotten():
    runs, kept = [], []

    def repeat(function, keep, strides_known=True):
        kept.append(keep)
        return lambda *values: runs.append("first") or function(*values)

    contract.implements(ops.relu, backend="repeating", backward=lambda grad, out: grad, repeat=repeat)(torch.relu)
    x = torch.randn(3)
    with backend("repeating"):
        ops.relu(x)
        kept[0](lambda x: runs.append("faster") or x)
        ops.relu(x)
        ops.relu.plans.clear()
        kept[0](lambda x: runs.append("stale") or x)
        ops.relu(x)
    assert runs == ["first", "faster", "first"]


@pytest.mark.usefixtures("outside")
def test_forward_and_backward_of_a_gradient_are_repeated_each():
    kept = {}

    def repeat(function, keep, strides_known=True):
        kept[strides_known] = keep
        return function

    contract.implements(ops.relu, backend="repeating", backward=lambda grad, out: grad, repeat=repeat)(torch.relu)
    x = torch.randn(3, requires_grad=True)
    with backend("repeating"):
        ops.relu(x)
        kept[True](lambda x: 2 * x)
        kept[False](lambda grad, out: grad + out)
        out = ops.relu(x)
    assert torch.equal(out, 2 * x)
    out.backward(torch.ones(3))
    assert torch.equal(x.grad, 1 + 2 * x)


def test_a_workspace_outlives_the_allocations_behind_it(monkeypatch):
    """While a graph is captured nobody else keeps it, and freed memory would be given out again at once."""
    alive = []

    def captured(name, shape, dtype, device):
        with _disable_current_modes():
            tensor = on_gpu(*shape)
        alive.append(weakref.ref(tensor))
        return tensor

    def through_a_workspace(x, y):
        between = workspaces.workspace("between", x.shape, x.dtype, x.device)
        out = torch.empty_like(x)
        launch(kernel, (1,), x, y, between, x.numel(), 1.0, BLOCK=8)
        launch(kernel, (1,), between, y, out, x.numel(), 1.0, BLOCK=8)
        return out

    monkeypatch.setattr(workspaces, "_find", captured)
    repeated = Repeated(through_a_workspace)
    for _ in range(3):
        repeated(on_gpu(4), on_gpu(4))
    assert repeated.own == 2
    allocate = torch.empty_strided
    still_there = []
    monkeypatch.setitem(
        repeated.run.__globals__,
        "allocate",
        lambda *shape, **kind: still_there.append(alive[-1]() is not None) or allocate(*shape, **kind),
    )
    repeated(on_gpu(4), on_gpu(4))
    assert still_there == [True]


def test_what_is_there_in_one_call_and_not_in_the_next_takes_the_own_way():
    """A backward may be handed an extra or None: no signature says which."""
    for first, then in ((None, on_gpu(4)), (on_gpu(4), None)):
        repeated = Repeated(weighted_sum, strides_known=False)
        x = on_gpu(4)
        for _ in range(3):
            repeated(x, first, 0.5)
        assert repeated.own == 2
        expected = x if then is None else x + 0.5 * then
        assert torch.equal(torch.Tensor(repeated(x, then, 0.5)), torch.Tensor(expected))
        assert repeated.own == 3


def test_a_place_that_does_not_fit_is_refused_in_every_call():
    def into(place, *values):
        copied(place, weighted_sum(*values))

    repeated = Repeated(weighted_sum, places=1, otherwise=into)
    for _ in range(4):
        with pytest.raises(ValueError, match="but the result is"):
            repeated(on_gpu(2, 4), on_gpu(4), on_gpu(4), 0.5)


@pytest.mark.parametrize(("size", "start", "own"), [(8, 4, 1), (8, 8, 0), (8, 0, 1), (4, 4, 0)])
def test_a_place_over_an_argument_is_written_once_that_is_read(size, start, own):
    """Elements past those of the place are the argument's, from behind and from before."""
    into = lambda place, *values: place.copy_(weighted_sum(*values))
    for swapped in (False, True):
        repeated = Repeated(weighted_sum, places=1, otherwise=into)
        for _ in range(3):
            repeated(on_gpu(size), on_gpu(size), on_gpu(size), 0.5)
        before, memory, y = repeated.own, on_gpu(3 * size), on_gpu(size)
        x, place = memory[:size], memory[start : start + size]
        if swapped:
            x, place = place, x
        expected = torch.Tensor(x + 0.5 * y)
        repeated(place, x, y, 0.5)
        assert torch.equal(torch.Tensor(place), expected)
        assert repeated.own - before == own


def test_a_wide_argument_reaches_further_than_the_place():
    def first_column_doubled(x):
        out = torch.empty(4)
        launch(kernel, (1,), x, x, out, 4, 1.0, BLOCK=8)
        return out

    repeated = Repeated(first_column_doubled, places=1, otherwise=lambda p, x: p.copy_(first_column_doubled(x)))
    for _ in range(3):
        repeated(on_gpu(4), on_gpu(16))
    memory = on_gpu(16)
    before = repeated.own
    repeated(memory[12:], memory)  # behind the place's own length, but in the argument
    repeated(memory[:4], memory)
    assert repeated.own - before == 2


def test_an_argument_that_is_returned_is_copied_to_its_place():
    def both(x, y):
        return weighted_sum(x, y), y

    def into(first, second, x, y):
        first.copy_(weighted_sum(x, y))
        second.copy_(y)

    repeated = Repeated(both, places=2, otherwise=into)
    for _ in range(5):
        first, second, x, y = (on_gpu(4) for _ in range(4))
        repeated(first, second, x, y)
        assert torch.equal(torch.Tensor(first), torch.Tensor(x + y))
        assert torch.equal(torch.Tensor(second), torch.Tensor(y))


def test_nothing_is_noted_while_a_graph_is_captured(monkeypatch):
    monkeypatch.setattr("tilestack.contract.repeat.capturing", lambda: True)
    repeated = Repeated(weighted_sum)
    for _ in range(4):
        repeated(on_gpu(4), on_gpu(4), 0.5)
    assert repeated.own == 4


def test_lists_of_tensors_are_not_repeated():
    repeated = Repeated(lambda x, ys: weighted_sum(x, ys[0]))
    for _ in range(4):
        x, y = on_gpu(4), on_gpu(4)
        assert torch.equal(torch.Tensor(repeated(x, [y])), torch.Tensor(x + y))
    assert repeated.own == 4


def test_a_result_of_another_dtype_than_its_memory_keeps_it():
    def as_bits(x, y):
        return weighted_sum(x, y).view(torch.int32)

    repeated = Repeated(as_bits)
    for _ in range(4):
        x, y = on_gpu(4), on_gpu(4)
        assert torch.equal(torch.Tensor(repeated(x, y).view(torch.float32)), torch.Tensor(x + y))


def test_the_grid_is_repeated_in_its_order(monkeypatch):
    seen = []

    def over_a_grid(x, y):
        out = torch.empty_like(x)
        launch(kernel, (2, 3), x, y, out, x.numel(), 1.0, BLOCK=8)
        return out

    compute_on_host = Launcher.launch
    monkeypatch.setattr(
        Launcher,
        "launch",
        staticmethod(lambda x, y, z, *values: seen.append((x, y, z)) or compute_on_host(x, y, z, *values)),
    )
    launcher._by_values.clear()
    launcher._compiled.clear()
    repeated = Repeated(over_a_grid)
    for _ in range(4):
        repeated(on_gpu(4), on_gpu(4))
    assert repeated.own == 2
    assert set(seen) == {(2, 3, 1)}


def test_a_view_into_another_argument_is_not_taken_for_either():
    """Both arguments lie in one memory, and the view of the first begins where the second does."""

    def second_half(x, y):
        out = torch.empty(4)
        launch(kernel, (1,), x[4:].as_subclass(OnGpu), None, out, 4, 1.0, BLOCK=8)
        return out

    repeated = Repeated(second_half)
    for _ in range(3):
        memory = on_gpu(8)
        repeated(memory, memory[4:])
    x, y = on_gpu(8), on_gpu(4)
    assert torch.equal(torch.Tensor(repeated(x, y)), torch.Tensor(x[4:]))
