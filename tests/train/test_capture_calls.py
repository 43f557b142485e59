"""What StaticStep asks of CUDA, of which the CPU plays every part: streams that wait for each other, graphs that hold what was
called while they were captured, and figures that a replay writes over. A GPU would only sometimes tell of a mistake here.
"""

import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from tiny import TinyModel, recipe

from tilestack import optim
from tilestack.train import RecipeError, static_step
from tilestack.train.static_step import StaticStep, choose_steps, clear_up_after_capture

SYNCHRONISES = "called a synchronizing CUDA operation"


class Stream:
    def __init__(self, name, log):
        self.name, self.log = name, log

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")


class PlayedCUDA:
    """Keeps a log of what happens, each call with the stream that it is on and a `!` where waiting would be told of."""

    def __init__(self):
        self.log, self.capturing, self.mode = [], None, 0
        self.stream = self.main = Stream("main", self.log)

    def do(self, call):
        """Something that is launched, and says what it was: held by the graph that is captured, or done."""
        if self.capturing is not None:
            self.capturing.held.append(call)
        else:
            self.log.append(f"{call()} on {self.stream.name}{'!' if self.mode else ''}")

    @contextmanager
    def on(self, stream):
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    @contextmanager
    def graph(self, graph, pool=None, stream=None):
        self.log.append(f"capture in {pool} on {stream.name if stream else 'any stream'}")
        self.capturing = graph
        try:
            yield
        finally:
            self.capturing = None

    def set_sync_debug_mode(self, mode):
        self.mode = {"warn": 1}.get(mode, mode)


@pytest.fixture
def cuda(monkeypatch):
    played = PlayedCUDA()

    class Graph:
        def __init__(self):
            self.held = []

        def replay(self):
            played.log.extend(f"{call()} replayed" for call in self.held)

    parts = dict(
        Stream=lambda device: Stream("side", played.log), current_stream=lambda: played.stream, stream=played.on,
        CUDAGraph=Graph, graph=played.graph, graph_pool_handle=lambda: "the pool", empty_cache=lambda: played.log.append("empty"),
        get_sync_debug_mode=lambda: played.mode, set_sync_debug_mode=played.set_sync_debug_mode,
        get_device_name=lambda device=None: "none",
    )  # fmt: skip
    for name, part in parts.items():
        monkeypatch.setattr(torch.cuda, name, part)
    return played


class LoggedStep:
    """A step that computes nothing but its number, in a place that stays where it is."""

    device = torch.device("cuda")

    def __init__(self, cuda, accumulate=2, graph="auto", warns=(), fails=""):
        self.cuda, self.warns, self.fails = cuda, warns, fails
        self.recipe = recipe(run={"graph": graph}, data={"accumulate": accumulate})
        self.objective, self.runner = SimpleNamespace(fixed_shapes=True), TinyModel()
        self.optimizer = optim.AdamW(self.runner.parameters())
        self.place = torch.zeros(1)

    def begin(self, number):
        return 1.0

    def micro_batch(self, batch, first):
        name = "first" if first else "more"
        self.cuda.do(lambda: f"{name} of {int(batch['ids'])}")
        for text in self.warns if self.cuda.mode else ():
            warnings.warn(text, stacklevel=1)
        if self.cuda.capturing and name == self.fails:
            raise RuntimeError("operation not permitted")
        return 7

    def update(self):
        self.cuda.do(lambda: f"update {int(self.place.add_(1))}")
        return self.place if self.cuda.capturing else self.place.clone()

    def forget(self):
        self.cuda.log.append("forget")


def take_steps(steps, count, accumulate=2):
    """The figures of so many steps, with those of all of them at hand at the end as the loop has them."""
    figures = []
    for number in range(count):
        for part in range(accumulate):
            assert steps.micro_batch({"ids": torch.tensor(10 * number + part)}, part == 0) == 7
        figures.append(steps.update())
    return torch.cat(figures).tolist()


def parts_of(number, accumulate=2):
    """What happens in a step of those."""
    more = [f"more of {10 * number + part}" for part in range(1, accumulate)]
    return [f"first of {10 * number}", *more, f"update {number + 1}"]


def beside(*calls):
    """The log of calls on the side stream, each after what the main one has queued and before what it queues."""
    return [line for call in calls for line in ("side waits for main", call, "main waits for side")]


CAPTURE = "capture in the pool on side"


@pytest.mark.parametrize("accumulate", [1, 2])
def test_three_steps_run_beside_the_others_and_the_rest_are_replays(cuda, accumulate):
    steps = StaticStep(LoggedStep(cuda, accumulate))
    assert take_steps(steps, 6, accumulate) == [1, 2, 3, 4, 5, 6]
    warm_up = [f"{part} on side" for number in (0, 1) for part in parts_of(number, accumulate)]
    watched = [f"{part} on side!" for part in parts_of(2, accumulate)]
    replays = [f"{part} replayed" for number in (3, 4, 5) for part in parts_of(number, accumulate)]
    assert cuda.log == beside(*warm_up, *watched) + [CAPTURE] * (accumulate + 1) + replays
    assert cuda.mode == 0


def test_a_step_that_waits_is_not_captured_and_other_warnings_are_told(cuda):
    said = []
    steps = StaticStep(LoggedStep(cuda, warns=[SYNCHRONISES, "something else"]), say=said.append)
    with pytest.warns(UserWarning, match="something else") as told:
        assert take_steps(steps, 6) == [1, 2, 3, 4, 5, 6]
    assert [str(warning.message) for warning in told] == ["something else"]
    assert len(said) == 1
    assert said[0].startswith(f"steps are not captured in CUDA graphs: {__file__}:")
    assert said[0].endswith("waits for the device")
    assert CAPTURE not in cuda.log
    assert (cuda.mode, cuda.log.count("empty")) == (0, 1)
    assert cuda.log[-3:] == [f"{part} on main" for part in parts_of(5)]


def test_a_step_that_waits_is_an_error_where_graphs_must_be(cuda):
    with pytest.raises(RecipeError, match="waits for the device"):
        take_steps(StaticStep(LoggedStep(cuda, warns=[SYNCHRONISES]), must=True), 4)
    assert cuda.mode == 0


@pytest.mark.parametrize("fails", ["first", "more"])
def test_after_a_capture_that_failed_the_step_is_done_on_the_stream_of_before(cuda, fails, monkeypatch):
    said, cleared = [], []
    monkeypatch.setattr(static_step, "clear_up_after_capture", lambda stream, pool: cleared.append((stream.name, pool)))
    steps = StaticStep(LoggedStep(cuda, fails=fails), say=said.append)
    assert take_steps(steps, 5) == [1, 2, 3, 4, 5]
    assert said == ["steps are not captured in CUDA graphs: RuntimeError, operation not permitted"]
    assert cleared == [("main", "the pool")]
    after = cuda.log[cuda.log.index("forget") :]
    assert after == ["forget", "empty", *(f"{part} on main" for part in (*parts_of(3), *parts_of(4)))]


def test_released_graphs_are_not_captured_again(cuda):
    steps = StaticStep(LoggedStep(cuda))
    take_steps(steps, 5)
    assert steps.release()
    del cuda.log[:]
    steps.step.place.zero_()
    take_steps(steps, 2)
    assert cuda.log == [f"{part} on main" for part in (*parts_of(0), *parts_of(1))]
    assert not steps.release()


def test_the_buffer_is_nobody_elses(cuda):
    """A batch that is drawn ahead, or kept in case its step breaks, must not change with the next."""
    steps, batches = StaticStep(LoggedStep(cuda)), [{"ids": torch.tensor(number)} for number in range(3)]
    for batch in batches:
        steps.micro_batch(batch, True)
        steps.update()
    assert [int(batch["ids"]) for batch in batches] == [0, 1, 2]
    assert steps.batch["ids"].is_contiguous()


def test_what_a_failed_capture_leaves_behind_is_undone(monkeypatch):
    done = []
    generator = SimpleNamespace(clone_state=lambda: "a copy", graphsafe_set_state=lambda state: done.append(state))
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: done.append(f"on {stream}"))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "default_generators", [generator])
    end = lambda device, pool: done.append(f"{pool} ended")
    release = lambda device, pool: done.append(f"{pool} released")
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", release, raising=False)
    clear_up_after_capture("main", "the pool")
    assert done == ["on main", "the pool ended", "the pool released", "a copy"]


@pytest.mark.parametrize("graph", ["auto", "on", "off"])
def test_the_choice_is_made_for_the_model_that_runs(cuda, graph, monkeypatch):
    """A hook on what a step runs keeps `auto` from graphs, and only that."""
    monkeypatch.setattr(static_step, "takes_kernels", lambda name, device: True)
    step = LoggedStep(cuda, graph=graph)
    steps, about = choose_steps(step, print)
    assert about == ""
    assert (steps is step) == (graph == "off")
    step.runner.layers[1].register_forward_hook(lambda *given: None)
    steps, about = choose_steps(step, print)
    assert (steps is step) == (graph != "on")
    reason = "steps are not captured in CUDA graphs: layers.1 has a hook, which a replay would not call"
    assert about == (reason if graph == "auto" else "")
    assert graph != "on" or steps.must
