"""The CUDA side of timing with a stand-in for the GPU: what is captured, what is held, and what happens when it cannot be."""

import itertools
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

import pytest
import torch

from tilestack.lab.bench import timing
from tilestack.lab.bench.timing import Candidate, measure

MIB = 2**20


class Clock:
    """An event a microsecond after the one before it, whatever the host does meanwhile."""

    now = itertools.count()

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = next(self.now) * 1e-6

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        return (end.at - self.at) * 1e3


@pytest.fixture
def gpu(monkeypatch):
    """A GPU with 1 MiB of L2 whose graphs replay nothing; `log` says what was done, `refuse` makes capture fail."""
    state = SimpleNamespace(log=[], refuse=None, empty=False, capturing=False)

    @contextmanager
    def graph(captured, stream):
        state.log.append("capture")
        if state.refuse:
            raise state.refuse
        state.capturing = True
        yield
        state.capturing = False
        if state.empty:
            warnings.warn("The CUDA Graph is empty. This usually means …", stacklevel=1)

    replacements = {
        "get_device_properties": lambda device: SimpleNamespace(L2_cache_size=MIB),
        "synchronize": lambda device=None: None,
        "reset_peak_memory_stats": lambda device: state.log.append("reset"),
        "memory_allocated": lambda device: 10 * MIB,
        "max_memory_allocated": lambda device: 13 * MIB,
        "Event": Clock,
        "CUDAGraph": lambda: SimpleNamespace(replay=lambda: state.log.append("replay")),
        "graph": graph,
        "Stream": lambda device: "side stream",
        "stream": lambda stream: nullcontext(),
        "current_stream": lambda device: "side stream",
        "_sleep": lambda cycles: state.log.append("spin"),
    }
    for name, replacement in replacements.items():
        monkeypatch.setattr(torch.cuda, name, replacement)
    return state


def test_a_graph_is_captured_once_and_replayed_behind_a_spin(gpu):
    captured = []
    prepare = lambda n: [lambda i=i: captured.append(i) if gpu.capturing else None for i in range(n)]
    found = measure({"ours": Candidate(prepare)}, MIB, "cuda")["ours"]
    assert (found.how, found.note, found.peak_mib) == ("graph", "", 3.0)
    assert found.time_us == pytest.approx(1 / 12)  # of a graph of twelve calls
    assert found.host_us > 0
    assert captured == [0, 1, 2] * 4, "three copies put 2 MiB between two uses, four turns make ten calls or more"
    assert gpu.log.count("capture") == 1
    sampled = gpu.log[gpu.log.index("replay") + 1 :]
    assert sampled == ["spin", "replay"] * timing.ROUNDS[1]


def test_a_result_lives_until_every_other_copy_had_its_turn(gpu):
    """Memory freed earlier would be handed to the next call, which would then write to cached lines."""
    made, alive = weakref.WeakSet(), []

    def call():
        alive.append(len(made))
        result = type("Result", (), {})()
        made.add(result)
        return result

    sampler = timing.OnCuda(Candidate(lambda n: [call] * n), MIB, torch.device("cuda"), 0.0)
    assert sampler.copies == 3
    alive.clear()
    sampler.call_all()
    assert alive == [0, 1, 2] + [3] * (len(sampler.calls) - 3)


def test_what_cannot_be_captured_is_timed_with_events_and_says_so(gpu):
    gpu.refuse = RuntimeError("operation not permitted when stream is capturing")
    found = measure({"ours": Candidate(lambda n: [lambda: None] * n)}, MIB, "cuda")["ours"]
    assert found.how == "events"
    assert "not permitted" in found.note
    assert found.time_us > 0
    assert "spin" not in gpu.log


def test_running_out_of_memory_in_a_capture_is_no_reason_for_events(gpu):
    gpu.refuse = torch.cuda.OutOfMemoryError("20 GiB")
    assert measure({"ours": Candidate(lambda n: [lambda: None] * n)}, MIB, "cuda")["ours"] == timing.Timing(
        note="out of memory"
    )


def test_a_call_that_launches_nothing_takes_no_time(gpu):
    gpu.empty = True
    found = measure({"ours": Candidate(lambda n: [lambda: None] * n)}, MIB, "cuda")["ours"]
    assert (found.time_us, found.note) == (0.0, "runs no kernel")


def test_inputs_too_small_to_leave_the_cache_are_noted(gpu):
    found = measure({"ours": Candidate(lambda n: [lambda: None] * n)}, 64, "cuda")["ours"]
    assert found.note == "the inputs stay in L2"
