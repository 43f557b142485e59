"""How long something takes: kernel time, host time and memory of several candidates, measured side by side.

On CUDA, kernel time is the replay of a CUDA graph, so the host plays no part in it. Every call in the graph works on
another copy of the inputs and writes another output, so that what it reads has left the cache since it was last used:

    graph of one candidate:   call(copy 0)  call(copy 1)  call(copy 2)  call(copy 0)  call(copy 1)  …
                              |<--- at least twice the L2 passes through in between --->|

The candidates take turns, one replay each per round, so that clocks and heat are the same for all of them. Host time is
what plain calls take on the host's clock while nobody waits for the GPU. On a CPU there is no graph, and what counts is the
processor time of one thread: others have the cores too, and several threads wait for one another when they do.
"""

import math
import statistics
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Call = Callable[[], Any]

SECONDS = 0.15  # of sampling per candidate
ROUNDS = (5, 50)  # at least and at most
CPU_ROUNDS = (3, 30)
CALLS_PER_GRAPH = 10  # what a graph costs to start is spread over as many calls
LONGEST_GRAPH = 0.02  # seconds, unless a single turn through the copies takes longer
MOST_COPIES = 1024
EVICTS_ITSELF = 8  # a working set of so many L2s leaves next to nothing of itself behind
HOST_CALLS = 20  # few enough that the GPU's queue never fills and makes the host wait
HOST_BATCHES = (5, 20)
SPIN_CYCLES = 200_000  # about 100 µs in which the GPU waits until the host has queued a whole sample


@dataclass(frozen=True)
class Timing:
    """What was measured of one candidate; with a failure, only the note that says what went wrong."""

    time_us: float | None = None  # one call on the device, the median
    spread: float | None = None  # interquartile range over median
    host_us: float | None = None  # one call on the host
    peak_mib: float | None = None  # device memory one call needs beyond its inputs, results included
    how: str = ""  # graph, events or cpu
    note: str = ""


@dataclass(frozen=True)
class Candidate:
    """Something to time: `prepare(n)` makes n calls that do the same work on memory of their own, inside `scope()`."""

    prepare: Callable[[int], Sequence[Call]]
    scope: Callable[[], AbstractContextManager] = nullcontext


class Sampler(Protocol):
    rounds: int
    host_batches: int

    def sample(self) -> None: ...
    def sample_host(self) -> None: ...
    def result(self) -> Timing: ...


def measure(
    candidates: Mapping[str, Candidate], working_set: float, device: torch.device | str, seconds: float = SECONDS
) -> dict[str, Timing]:
    """Time the candidates against one another; `working_set` is how many bytes a call touches. None can fail the rest."""
    device = torch.device(device)
    on_cuda = device.type == "cuda"
    failed: dict[str, Timing] = {}
    samplers: dict[str, Sampler] = {}

    def attempt(name: str, step: Callable[[], Any]) -> Any:
        try:
            with candidates[name].scope():
                return step()
        except Exception as error:
            failed[name] = Timing(note=in_one_line(error))
            samplers.pop(name, None)

    with one_thread_on(device.type), torch.cuda.stream(torch.cuda.Stream(device)) if on_cuda else nullcontext():
        for name, candidate in candidates.items():
            make = (lambda c: OnCuda(c, working_set, device, seconds)) if on_cuda else (lambda c: OnCpu(c, seconds))
            if (sampler := attempt(name, lambda: make(candidate))) is not None:
                samplers[name] = sampler
        for turn in range(max((s.rounds for s in samplers.values()), default=0)):
            for name, sampler in list(samplers.items()):
                if turn < sampler.rounds:
                    attempt(name, sampler.sample)
        for turn in range(max((s.host_batches for s in samplers.values()), default=0)):
            for name, sampler in list(samplers.items()):
                if turn < sampler.host_batches:
                    attempt(name, sampler.sample_host)
        results = {name: attempt(name, sampler.result) for name, sampler in list(samplers.items())}
    return {name: failed[name] if name in failed else results[name] for name in candidates}


class OnCpu:
    """Samples of processor time; calls too short for its clock are timed several at once."""

    host_batches = 0  # the host is the device

    def __init__(self, candidate: Candidate, seconds: float):
        (self.call,) = candidate.prepare(1)
        self.call()
        once = processor_seconds(self.call, 1)
        self.calls = max(1, int(1e-3 / max(once, 1e-9)))
        self.rounds = within(CPU_ROUNDS, seconds / (once * self.calls))
        self.samples: list[float] = []

    def sample(self) -> None:
        self.samples.append(processor_seconds(self.call, self.calls))

    def sample_host(self) -> None:
        raise NotImplementedError("on a CPU the host is the device")

    def result(self) -> Timing:
        middle, spread = median_and_spread(self.samples)
        return Timing(middle * 1e6, spread, middle * 1e6, None, "cpu")


class OnCuda:
    """Samples replays of a CUDA graph between two events, or plain calls where the candidate cannot be captured."""

    def __init__(self, candidate: Candidate, working_set: float, device: torch.device, seconds: float):
        self.device = device
        cache = torch.cuda.get_device_properties(device).L2_cache_size
        self.copies = copies_needed(working_set, cache)
        self.note = "" if is_cold(working_set, self.copies, cache) else "the inputs stay in L2"
        self.calls = list(candidate.prepare(self.copies))
        for _ in range(3):
            self.calls[0]()
        self.peak = self.peak_of_a_call()
        once = self.seconds_of(self.calls[0])
        self.calls *= turns_per_graph(self.copies, once)
        self.how, self.empty = "graph", False
        self.replay: Call
        try:
            self.replay = self.capture()
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            torch.cuda.empty_cache()  # what the failed capture had set aside
            self.how, self.note = "events", f"no graph ({in_one_line(error)}), so host gaps count"
            self.replay = self.call_all
        self.replay()
        self.rounds = within(ROUNDS, seconds / (once * len(self.calls)))
        self.host_batches = within(HOST_BATCHES, seconds / (once * HOST_CALLS))
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self.host_samples: list[float] = []

    def peak_of_a_call(self) -> float:
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.calls[0]()
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - before) / 2**20

    def seconds_of(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        return max(start.elapsed_time(end) * 1e-3, 1e-6)

    def call_all(self) -> None:
        # Results are held for a whole turn through the copies, lest every call write to the same, cached memory.
        held: deque = deque(maxlen=self.copies)
        for call in self.calls:
            held.append(call())

    def capture(self) -> Call:
        graph = torch.cuda.CUDAGraph()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            # On the stream the forward ran on: a backward runs on the stream of its forward.
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream(self.device)):
                self.call_all()
        self.empty = any("graph is empty" in str(warning.message).lower() for warning in said)
        return graph.replay

    def sample(self) -> None:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if self.how == "graph":
            torch.cuda._sleep(SPIN_CYCLES)
        start.record()
        self.replay()
        end.record()
        end.synchronize()
        self.events.append((start, end))

    def sample_host(self) -> None:
        self.host_samples.append(average_seconds(self.calls[0], HOST_CALLS))
        torch.cuda.synchronize(self.device)

    def result(self) -> Timing:
        host_us = statistics.median(self.host_samples) * 1e6
        if self.empty:
            return Timing(0.0, 0.0, host_us, self.peak, self.how, "runs no kernel")
        per_call = [start.elapsed_time(end) * 1e3 / len(self.calls) for start, end in self.events]
        return Timing(*median_and_spread(per_call), host_us, self.peak, self.how, self.note)


def copies_needed(working_set: float, cache: float) -> int:
    """How many copies of the inputs to rotate through, so that twice the cache passes between two uses of one."""
    if working_set >= EVICTS_ITSELF * cache:
        return 1
    return min(1 + math.ceil(2 * cache / max(working_set, 1)), MOST_COPIES)


def is_cold(working_set: float, copies: int, cache: float) -> bool:
    return copies == 1 or (copies - 1) * working_set >= 2 * cache


def turns_per_graph(copies: int, seconds_per_call: float) -> int:
    """How often a graph goes through the copies: enough calls to hide its start, in a bearable time, and at least once."""
    enough = math.ceil(CALLS_PER_GRAPH / copies)
    bearable = int(LONGEST_GRAPH / (copies * seconds_per_call))
    return max(1, min(enough, bearable))


def within(limits: tuple[int, int], value: float) -> int:
    least, most = limits
    return int(min(max(value, least), most))


def median_and_spread(samples: Sequence[float]) -> tuple[float, float]:
    """The median, and the interquartile range as a fraction of it."""
    middle = statistics.median(samples)
    if len(samples) < 2 or middle == 0:
        return middle, 0.0
    lower, _, upper = statistics.quantiles(samples, n=4, method="inclusive")
    return middle, (upper - lower) / middle


def average_seconds(call: Call, times: int, clock: Callable[[], float] = time.perf_counter) -> float:
    began = clock()
    for _ in range(times):
        call()
    return (clock() - began) / times


def processor_seconds(call: Call, times: int) -> float:
    """What a call costs this process, not counting when others have the core."""
    return average_seconds(call, times, time.process_time)


@contextmanager
def one_thread_on(device: str) -> Iterator[None]:
    """On a CPU, one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1 if device == "cpu" else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def in_one_line(error: BaseException) -> str:
    """An error as a table can show it: its kind and the first line of what it says."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of memory"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {said}"[:200] if said else type(error).__name__
