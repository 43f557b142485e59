"""Workspaces: zeros at first, one memory for a name, dtype and stream, and new memory for every captured graph."""

import sys
import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack.contract import workspace as workspaces

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(workspaces, "_kept", {})
    monkeypatch.setattr(workspaces, "_views", {})
    monkeypatch.setattr(workspaces, "_captured", {})


@pytest.fixture
def gpu(monkeypatch):
    """A device that says it is a GPU, whose memory is the host's; its stream and whether it captures are to be set."""
    state = {"stream": 1, "capturing": False, "capture": 1}
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False)
    monkeypatch.setattr(workspaces, "capture_number", lambda stream: state["capture"])
    return state


def ask(name="sums", shape=(4,), dtype=torch.float32, device=CPU):
    return workspaces.workspace(name, shape, dtype, device)


def test_a_name_and_dtype_have_one_memory_that_grows_and_begins_as_zeros():
    first = ask()
    assert torch.equal(first, torch.zeros(4))
    assert ask(shape=(2, 2)).data_ptr() == first.data_ptr()
    assert ask("counters").data_ptr() != first.data_ptr()
    assert ask(dtype=torch.int32).dtype == torch.int32
    larger = ask(shape=(3, 5))
    assert larger.shape == (3, 5)
    assert not larger.any()
    assert ask(shape=(0,)).shape == (0,)


def test_what_was_asked_for_before_is_looked_up():
    """It stands in every repeated call that splits its sum: no view is made there, and no mode left for it."""
    first, names = ask(shape=(2, 2)), []
    with CountedOperations() as counted:
        assert ask(shape=(2, 2)) is first
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    ask(shape=(2, 2))
    sys.setprofile(None)
    assert (counted.operations, names) == (0, ["ask", "workspace", "_find"])


def test_shapes_of_a_name_share_its_memory_after_it_has_grown(monkeypatch):
    small, other = ask(), ask("counters")
    large = ask(shape=(9,))
    assert ask().data_ptr() == large.data_ptr() != small.data_ptr()
    assert ask("counters").data_ptr() == other.data_ptr()
    monkeypatch.setattr(workspaces, "VIEWS_KEPT", 3)
    assert all(ask(shape=(size,)).data_ptr() == large.data_ptr() for size in range(1, 9))
    assert len(workspaces._views) <= 3


class CountedOperations(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


def test_what_is_kept_is_no_part_of_the_call_that_first_asks_for_it():
    with CountedOperations() as counted:
        ask()
    assert counted.operations == 0


def test_memory_is_zeroed_even_where_the_allocator_gives_back_what_was_used():
    for size in range(1, 200):
        torch.full((size * 64,), 7.0)
        assert not ask(str(size), (size * 64,)).any()


def test_streams_and_graphs_share_nothing(gpu):
    device = torch.device("cuda", 0)
    first = ask(device=device)
    assert ask(device=device).data_ptr() == first.data_ptr()
    gpu["stream"] = 2
    assert ask(device=device).data_ptr() != first.data_ptr()
    gpu.update(stream=1, capturing=True)
    captured = ask(device=device)
    gpu["capture"] = 2
    another = ask(device=device)
    assert len({first.data_ptr(), captured.data_ptr(), another.data_ptr()}) == 3
    gpu["capturing"] = False
    assert ask(device=device).data_ptr() == first.data_ptr()


def test_calls_of_a_graph_share_what_the_first_zeroed(gpu):
    device = torch.device("cuda", 0)
    gpu["capturing"] = True
    first = ask(device=device)
    assert ask(shape=(2, 2), device=device).data_ptr() == first.data_ptr()
    assert ask("counters", device=device).data_ptr() != first.data_ptr()
    larger = ask(shape=(9,), device=device)
    assert larger.data_ptr() != first.data_ptr()
    assert ask(device=device).data_ptr() == larger.data_ptr()
    gpu["stream"] = 2
    assert ask(device=device).data_ptr() not in {first.data_ptr(), larger.data_ptr()}


def test_what_a_graph_was_given_is_let_go_with_the_next_graph(gpu):
    device = torch.device("cuda", 0)
    gpu["capturing"] = True
    held = weakref.ref(ask(device=device)._base)
    assert held() is not None
    gpu["capture"] = 2
    ask("counters", device=device)
    assert held() is None


class CapturingThread(int):
    """A thread that is given memory of its own whenever another looks whose some memory is."""

    def __eq__(self, other):
        workspaces._captured[CapturingThread(-1), len(workspaces._captured)] = torch.empty(1)
        return int(self) == other

    __hash__ = int.__hash__


def test_threads_may_capture_at_the_same_time(gpu):
    gpu["capturing"] = True
    workspaces._captured[CapturingThread(-1), 0] = torch.empty(1)
    assert not ask(device=torch.device("cuda", 0)).any()
    assert len(workspaces._captured) == 3


def test_where_captures_have_no_numbers_every_call_is_given_its_own(gpu):
    device = torch.device("cuda", 0)
    gpu.update(capturing=True, capture=None)
    one, two = ask(device=device), ask(device=device)
    assert one.data_ptr() != two.data_ptr()
    assert not workspaces._captured
