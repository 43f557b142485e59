"""Workspaces: zeros at first, one memory for a name, dtype and stream, and new memory for every captured graph."""

import pytest
import torch

from tilestack.contract import workspace as workspaces

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch):
    monkeypatch.setattr(workspaces, "_kept", {})


@pytest.fixture
def gpu(monkeypatch):
    """A device that says it is a GPU, whose memory is the host's; its stream and whether it captures are to be set."""
    state = {"stream": 1, "capturing": False}
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, dtype, device: zeros(*shape, dtype=dtype))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: state["stream"], raising=False)
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
    captured = ask(device=device), ask(device=device)
    assert len({first.data_ptr(), *(tensor.data_ptr() for tensor in captured)}) == 3
    gpu["capturing"] = False
    assert ask(device=device).data_ptr() == first.data_ptr()
