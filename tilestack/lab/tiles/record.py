"""Recording a call of an operator in Triton's interpreter: every load and store of every program, in order.

    call → launcher → kernel[grid](…)     a Launch: its arguments as regions, its grid
                         program           in the interpreter's order, the last index of the grid fastest
                           tl.load         a Step: kind, lines of source, region, elements, lanes masked off

Everything is counted; what is kept to be shown is limited, and a launch says how much of it that is. A call that fails leaves
what was recorded until then, and the error. An access outside of all memory of the call is recorded and ends the call, since
nothing may be there. One to the guards around a tensor, which are nobody's, is recorded as outside, and the call goes on.
"""

import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import triton
from torch import Tensor
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import GridExecutor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilestack.lab.proof import interpreted
from tilestack.lab.proof.evaluate import EVALUATE
from tilestack.lab.proof.interpreted import attributes_replaced, interpreter_with
from tilestack.lab.proof.memory_guards import GuardedMemory, surroundings
from tilestack.lab.proof.refuted import crash_line
from tilestack.lab.proof.verify import Claim, implementation_of
from tilestack.lab.tiles.regions import Memory, Region
from tilestack.lab.tiles.sectors import sectors_of
from tilestack.lab.tiles.steps import ATOMIC, DESCRIPTOR, LOAD, STORE, Launch, Line, Program, Recording, Step

PROGRAMS_KEPT = 256  # of a launch, to be shown
LANES_KEPT = 1 << 19  # of a launch's loads and stores together
INTERRUPTED = "interrupted"  # by Ctrl-C
OURS = (os.path.dirname(triton.__file__) + os.sep, interpreted.__file__, __file__)  # frames that are no kernel's


class TouchedOutside(Exception):
    """A kernel used an address that lies in no memory of its call."""


def record(claim: Claim, programs: int = PROGRAMS_KEPT, lanes: int = LANES_KEPT) -> Recording:
    """Run the call that a claim is about and record its kernels; of a backward, those of the backward alone."""
    arguments = claim.arguments()
    function, recorder = implementation_of(claim), Recorder(programs, lanes)
    recording = Recording(claim, arguments, recorder.launches)

    def call(**given: Any) -> Any:
        recorder.watching = claim.direction == "forward"
        results = function(**given)
        recorder.watching = True
        return results

    try:
        with GuardedMemory(zeros=True) as guarded, np.errstate(all="ignore"):
            given = claim.operator.given_tensors(arguments)
            guarded.spans.extend(span for tensor in given.values() for span in surroundings(tensor))
            with recorder.recording(Memory(guarded.spans), given):
                EVALUATE[claim.direction](call, claim.operator, arguments, claim.variant)
    except KeyboardInterrupt:
        recording.error = INTERRUPTED
    except Exception as failure:
        while isinstance(failure, InterpreterError) and isinstance(failure.__cause__, Exception):
            failure = failure.__cause__
        recording.error = crash_line(failure)
    return recording


class Recorder:
    """Listens to Triton's interpreter."""

    def __init__(self, programs: int, lanes: int) -> None:
        self.programs_most, self.lanes_most = programs, lanes
        self.launches: list[Launch] = []
        self.watching = True
        self.through = ""  # DESCRIPTOR while one is at work
        self.kernel_code: Any = None
        self.memory = Memory([])
        self.given: dict[str, Tensor] = {}

    @contextmanager
    def recording(self, memory: Memory, given: dict[str, Tensor]) -> Iterator[None]:
        """Inside, interpreted kernels are recorded; `given` are the tensors of the call by the operator's names."""
        self.memory, self.given = memory, given
        for tensor in given.values():
            memory.add(tensor)
        launch = GridExecutor.__call__

        def launched(executor: Any, *arguments: Any, **named: Any) -> None:
            self.begin_launch(executor, arguments, named)
            launch(executor, *arguments, **named)

        with (
            attributes_replaced(GridExecutor, __call__=launched),
            interpreter_with(
                set_grid_idx=self.beginning_programs,
                create_masked_load=self.noting(LOAD, lambda pointers, mask, *_, **__: mask),
                create_masked_store=self.noting(STORE, lambda pointers, value, mask, *_, **__: mask),
                create_atomic_rmw=self.noting(ATOMIC, lambda kind, pointers, value, mask, *_: mask, place=1),
                create_atomic_cas=self.noting(ATOMIC, lambda pointers, *_: None),
                create_descriptor_load=self.through_descriptor,
                create_descriptor_store=self.through_descriptor,
            ),
        ):
            yield

    def begin_launch(self, executor: Any, arguments: tuple, named: dict[str, Any]) -> None:
        known = {name: value for name, value in named.items() if name in executor.arg_names}
        values = inspect.getcallargs(executor.fn, *arguments, **known)
        tensors = dict(tensors_in(values))
        grid = executor.grid(values) if callable(executor.grid) else executor.grid
        for tensor, *_ in tensors.values():
            self.memory.add(tensor)
        code = self.kernel_code = executor.fn.__code__
        if self.watching:
            begins = Line(code.co_filename, code.co_name, code.co_firstlineno, code.co_firstlineno)
            launch = Launch(executor.fn.__name__, begins, (*grid, 1, 1)[:3])  # type: ignore[arg-type]
            for region in merged(Region.of(name, *described) for name, described in tensors.items()):
                launch.add_region(region)
            self.launches.append(launch)

    def beginning_programs(self, begin: Callable) -> Callable:
        def set_grid_idx(x: int, y: int, z: int) -> None:
            begin(x, y, z)
            if self.watching:
                launch = self.launches[-1]
                launch.executed += 1
                if not launch.full and launch.executed <= self.programs_most:
                    launch.programs.append(Program((x, y, z)))

        return set_grid_idx

    def noting(self, kind: str, mask_of: Callable, place: int = 0) -> Callable[[Callable], Callable]:
        """A wrapper of an access that notes it first; its pointers are the argument at a place."""

        def wrap(access: Callable) -> Callable:
            def noted(*arguments: Any, **named: Any) -> Any:
                mask = mask_of(*arguments, **named)
                self.note(kind, arguments[place], None if mask is None else np.asarray(mask.data))
                return access(*arguments, **named)

            return noted

        return wrap

    def through_descriptor(self, access: Callable) -> Callable:
        def noted(*arguments: Any, **named: Any) -> Any:
            self.through = DESCRIPTOR
            try:
                return access(*arguments, **named)
            finally:
                self.through = ""

        return noted

    def note(self, kind: str, pointers: Any, mask: np.ndarray | None) -> None:
        """Record an access, part by part where its lanes point into several tensors."""
        addresses = pointers.data
        itemsize = max(pointers.get_element_ty().primitive_bitwidth // 8, 1)
        used = np.ones(addresses.shape, bool) if mask is None else np.broadcast_to(mask != 0, addresses.shape)
        wild = self.wild(addresses[used])
        if self.watching:
            launch, lines = self.launches[-1], lines_of_kernel(self.kernel_code)
            off = int(used.size - used.sum())
            for region, lanes, elements, outside in self.parts(launch, lines, addresses, used, itemsize):
                on = int(lanes.sum())
                counted = sectors_of(addresses, lanes, itemsize, whole=bool(self.through))
                step = Step(self.through + kind, lines, region, elements, on + off, off, outside, on * itemsize, *counted)  # fmt: skip
                launch.add(step, self.lanes_most)
                off = 0  # is told once
        if wild:
            raise TouchedOutside(
                f"a {kind} at an address that is in no tensor of this call; see its offsets and its mask"
            )

    def wild(self, addresses: np.ndarray) -> bool:
        """Whether an address lies in no memory that the call has."""
        starts = np.array(sorted(self.memory.storages), np.uint64)
        ends = np.array([self.memory.storages[int(start)] for start in starts], np.uint64)
        place = np.searchsorted(starts, addresses, "right").astype(np.int64) - 1
        return bool(((place < 0) | (addresses >= ends[np.maximum(place, 0)])).any()) if len(addresses) else False

    def parts(
        self, launch: Launch, lines: tuple[Line, ...], addresses: np.ndarray, used: np.ndarray, itemsize: int
    ) -> Iterator[tuple[int, np.ndarray, np.ndarray, int]]:
        """By region that lanes point into: the region's number, the lanes, their elements, and how many lanes are outside.

        Lanes that are outside count to the region of the first of the others, or to the likely one.
        """
        left = used.copy()
        found = []
        while left.any():
            number, elements = best_region(launch.regions, addresses[left], itemsize)
            if not (elements >= 0).any():
                further = (self.further_region(launch, int(each), itemsize) for each in np.unique(addresses[left]))
                if (region := next(filter(None, further), None)) is None:
                    break
                number = launch.add_region(region)
                elements = best_region([region], addresses[left], itemsize)[1]
            mine = left.copy()
            mine[left] = (elements >= 0).any(axis=1)
            found.append((number, mine, elements[elements >= 0]))
            left &= ~mine
        if not launch.regions:
            launch.add_region(Region("memory", f"{8 * itemsize} bits", itemsize, int(addresses.min()), (1,), (1,)))
        if not found:
            found.append((likely_region(launch, lines, int(addresses.min())), np.zeros_like(used), np.empty(0, int)))
        for place, (number, mine, elements) in enumerate(found):
            lost = 0 if place else int(left.sum())
            yield number, mine | left if lost else mine, elements, lost

    def further_region(self, launch: Launch, address: int, itemsize: int) -> Region | None:
        """Memory that no argument of the kernel describes, if it is the call's: around a view, or behind a pointer in memory."""
        span = self.memory.holding(address)
        if span is None or not span[0] <= address < span[1]:
            return None
        inside = lambda start: span[0] <= start < span[1]
        names = [f"memory of {region.name}" for region in launch.regions if inside(region.address)]
        names += [name for name, tensor in self.given.items() if inside(tensor.data_ptr())]
        shape = ((span[1] - span[0]) // itemsize,)
        return Region((names or ["memory"])[0], f"{8 * itemsize} bits", itemsize, span[0], shape, (1,))


def tensors_in(values: dict[str, Any]) -> Iterator[tuple[str, tuple[Tensor, list[int], list[int]]]]:
    """The tensors among a kernel's arguments by name, with the shape and strides that they are given in."""
    for name, value in values.items():
        if isinstance(value, tuple):
            yield from tensors_in({f"{name}[{place}]": each for place, each in enumerate(value)})
        elif isinstance(value, TensorDescriptor):
            yield name, (value.base, list(value.shape), list(value.strides))
        elif hasattr(value, "data_ptr"):
            tensor = value if isinstance(value, Tensor) else value.base  # of what was given another dtype
            yield name, (tensor, list(tensor.shape), list(tensor.stride()))


def merged(regions: Iterator[Region]) -> list[Region]:
    """Regions, those of the same memory in the same shape as one with all of their names."""
    names: dict[Region, list[str]] = {}
    for region in regions:
        names.setdefault(replace(region, name=""), []).append(region.name)
    return [replace(region, name=", ".join(alike)) for region, alike in names.items()]


def best_region(regions: list[Region], addresses: np.ndarray, itemsize: int) -> tuple[int, np.ndarray]:
    """The region in which most of these addresses are, the first of several, and by lane the elements there, or -1."""
    best, most, found = 0, -1, np.full((len(addresses), 1), -1)
    first, last = int(addresses.min()), int(addresses.max())
    for number, region in enumerate(regions):
        if region.address <= last and first < region.end:
            parts = np.arange(max(itemsize // region.itemsize, 1), dtype=np.uint64) * np.uint64(region.itemsize)
            elements = region.elements_at(addresses[:, None] + parts)
            inside = int((elements >= 0).any(axis=1).sum())
            if inside > most:
                best, most, found = number, inside, elements
        if most == len(addresses):
            break
    return best, found


def likely_region(launch: Launch, lines: tuple[Line, ...], address: int) -> int:
    """The region that an access was meant for, which has no lane in any: the one that was last touched from the same line, the
    one that is named there, or the one that begins last before the address."""
    if (known := launch.by_lines.get(lines)) is not None:
        return known
    text = linecache.getline(lines[-1].file, lines[-1].number)
    for number, region in enumerate(launch.regions):
        if re.search(rf"\b{re.escape(region.name)}\b", text):
            return number
    before = [(region.address, number) for number, region in enumerate(launch.regions) if region.address <= address]
    return max(before)[1] if before else 0


def lines_of_kernel(code: Any) -> tuple[Line, ...]:
    """The lines that are executed now, from the function with this code, the kernel, down to the access."""
    lines: list[Line] = []
    frame = sys._getframe(1)
    while frame is not None:
        if not frame.f_code.co_filename.startswith(OURS):
            here = frame.f_code
            lines.append(Line(here.co_filename, here.co_name, here.co_firstlineno, frame.f_lineno))
        if frame.f_code is code:
            return tuple(reversed(lines))
        frame = frame.f_back  # type: ignore[assignment]
    raise AssertionError("an access outside of a kernel")
