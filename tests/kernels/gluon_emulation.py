"""Gluon kernels on a CPU: their own Python, run by a stand-in for the language, with threads for groups of warps.

What is asynchronous on a GPU is so here: a copy by TMA, a product and a store are made at some moment between their start
and the wait for them, which a seed decides. Shared memory and results that nobody waited for hold NaN, or a code that is wrong. So a barrier that
lets someone read too early or write too soon shows as a wrong result, and one that nobody arrives at as a deadlock.
Layouts, registers and the visibility of writes are not emulated: those need the compiler, and a GPU.
"""

import functools
import itertools
import random
import threading
import types
from collections.abc import Callable
from typing import Any

import torch


class Value(torch.Tensor):
    """A tensor in registers, which is never changed in place."""

    __iadd__ = torch.Tensor.__add__
    __isub__ = torch.Tensor.__sub__
    __imul__ = torch.Tensor.__mul__
    __ixor__ = torch.Tensor.__xor__

    def split(self) -> tuple["Value", "Value"]:
        """As Gluon's: the two that its last dimension holds."""
        first, second = self.unbind(-1)
        return first, second


def value(x: Any) -> Value:
    return torch.as_tensor(x).as_subclass(Value)


class Deadlock(Exception):
    """Every group of warps waits."""


class Program:
    """One program, of as many as there are: its groups of warps."""

    def __init__(self, numbers: tuple[int, ...], count: int, seed: int):
        self.numbers, self.count = numbers, count
        self.random = random.Random(f"{seed} {numbers}")
        self.haste = self.random.choice([0.0, 0.3])  # how often a product or a store is made before it is waited for
        self.groups: list[Group] = []
        self.machine: Machine | None = None

    def has(self, functions: list[tuple[Callable, tuple]]) -> None:
        self.groups = [Group(self, function, arguments) for function, arguments in functions]

    @property
    def done(self) -> bool:
        return all(group.done for group in self.groups)


class Machine:
    """Programs that run beside each other, so many at most, beginning in their order: at any moment one group of warps of one
    of them, and what is under way meanwhile."""

    def __init__(self, programs: list[Program], at_most: int):
        self.programs, self.at_most = programs, at_most
        self.random = programs[0].random
        self.last_first = self.random.choice([0.0, 0.95])  # how often the last program that can go on does
        self.failure: BaseException | None = None
        self.copies: list[Callable] = []
        for program in programs:
            program.machine = self

    def run(self) -> None:
        groups = [group for program in self.programs for group in program.groups]
        for group in groups:
            group.thread.start()
        self.pass_on()
        for group in groups:
            group.thread.join()
        if self.failure:
            raise self.failure

    def pass_on(self) -> None:
        """Let some of what is under way happen, then let a group run that can."""
        while True:
            begun = list(itertools.islice((program for program in self.programs if not program.done), self.at_most))
            while self.copies and self.random.random() < 0.5:
                self.copies.pop(self.random.randrange(len(self.copies)))()
            groups = [group for program in begun for group in program.groups]
            for group in groups:
                for queue in (group.products, group.stores, group.writes):
                    if queue and self.random.random() < group.program.haste:
                        queue.pop(0)()
            able = [group for group in groups if not group.done and (self.failure or group.until())]
            if able:
                last = len(self.programs) > 1 and self.random.random() < self.last_first
                (able[-1] if last else self.random.choice(able)).may_run.set()
                return
            if not begun:
                return
            if self.copies:
                self.copies.pop(0)()
                continue
            waiting = {program.numbers[0]: [group.done or group.what for group in program.groups] for program in begun}
            self.failure = Deadlock(f"programs {waiting}")


class Group:
    """A group of warps: a thread, the products and stores it started, and what it waits for."""

    def __init__(self, program: Program, function: Callable, arguments: tuple):
        self.program, self.function, self.arguments = program, function, arguments
        self.products: list[Callable] = []
        self.stores: list[Callable] = []  # what is to be read from shared memory
        self.writes: list[Callable] = []  # what was read, and is to come into global memory
        self.until: Callable[[], bool] = lambda: True
        self.what = ""
        self.done = False
        self.may_run = threading.Event()
        self.thread = threading.Thread(target=self.work, daemon=True)

    def work(self) -> None:
        here.group, here.program = self, self.program
        self.may_run.wait()
        try:
            self.function(*self.arguments)
            assert not self.products, "a product was not waited for"
            assert not self.stores, "a store was not waited for"
            self.write_all()
        except BaseException as failure:
            self.machine.failure = self.machine.failure or failure
        self.done = True
        self.machine.pass_on()

    @property
    def machine(self) -> Machine:
        assert self.program.machine is not None
        return self.program.machine

    def store(self, source: "Shared", part: tuple[slice, ...], write: Callable[[torch.Tensor], Any]) -> None:
        """Have a part of shared memory read, and what was read written, at two moments."""

        def read() -> None:
            found = source.memory[part].clone()
            self.writes.append(lambda: write(found))

        self.stores.append(read)

    def write_all(self) -> None:
        while self.writes:
            self.writes.pop(0)()

    def pause(self, until: Callable[[], bool] = lambda: True, what: str = "") -> None:
        self.until, self.what = until, what
        self.may_run.clear()
        self.machine.pass_on()
        self.may_run.wait()
        if self.machine.failure:
            raise self.machine.failure


here = threading.local()


class Shared:
    """Shared memory, or a part of it."""

    def __init__(self, memory: torch.Tensor):
        self.memory, self.shape, self.dtype = memory, list(memory.shape), memory.dtype

    def index(self, place: Any) -> "Shared":
        assert 0 <= int(place) < self.shape[0]
        return Shared(self.memory[int(place)])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.memory.view(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.memory.permute(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.memory.narrow(dim, start, length))

    def store(self, x: Value) -> None:
        self.memory.copy_(x)

    def load(self, layout: Any) -> Value:
        return value(self.memory.clone())


class Barrier:
    """A barrier in shared memory: a phase ends when all have arrived, and all bytes that are expected."""

    def __init__(self):
        self.count = self.missing = self.bytes = self.phase = 0

    def arrive(self, count: int = 0, bytes: int = 0) -> None:
        self.missing -= count
        self.bytes += bytes
        assert self.missing >= 0, "more arrive than are expected"
        if self.missing == self.bytes == 0:
            self.missing, self.phase = self.count, self.phase + 1


class Barriers:
    def __init__(self, count: int):
        self.barriers = [Barrier() for _ in range(count)]

    def index(self, place: Any) -> Barrier:
        return self.barriers[int(place)]


def one(barrier: Barrier | Barriers) -> Barrier:
    return barrier if isinstance(barrier, Barrier) else barrier.barriers[0]


class mbarrier:
    @staticmethod
    def MBarrierLayout() -> str:
        return "barriers"

    @staticmethod
    def init(barrier: Any, count: int) -> None:
        one(barrier).count = one(barrier).missing = count

    @staticmethod
    def expect(barrier: Any, bytes: int, pred: Any = True) -> None:
        if pred:
            one(barrier).bytes += bytes
            one(barrier).arrive(1)

    @staticmethod
    def arrive(barrier: Any, count: int = 1, pred: Any = True) -> None:
        if pred:
            one(barrier).arrive(count)
        here.group.pause()

    @staticmethod
    def wait(barrier: Any, phase: Any) -> None:
        barrier, phase = one(barrier), int(phase)
        here.group.pause(lambda: barrier.phase % 2 != phase, f"waits for phase {phase} of a barrier")


class NotForTma(Exception):
    """A tile that CUDA would make no descriptor of."""


def refuse_what_tma_cannot_move(tile: Any) -> None:
    """Raise for a tile that does not begin on 16 bytes, or whose lines do not, or whose block is too large."""
    size = tile.tensor.element_size()
    *apart, last = tile.strides
    if tile.tensor.data_ptr() % 16 or last != 1 or any(stride * size % 16 for stride in apart):
        raise NotForTma(
            f"TMA begins lines on 16 bytes: {tile.tensor.data_ptr():#x}, {size} bytes, strides {tile.strides}"
        )
    if max(tile.block) > 256 or tile.block[-1] * size % 16 or not 1 <= len(tile.block) <= 5:
        raise NotForTma(f"TMA has no block of {tile.block}")


class Descriptor:
    """A tile's view of global memory."""

    def __init__(self, tile: Any):
        refuse_what_tma_cannot_move(tile)
        self.memory = tile.tensor.as_strided(tile.shape, tile.strides)
        self.dtype, self.layout = tile.tensor.dtype, "tile"
        bytes = torch.empty(tile.block).numel() * tile.tensor.element_size()
        self.block_type = types.SimpleNamespace(shape=list(tile.block), nbytes=bytes)

    def inside(self, at: list) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of a block at some place lies in memory, in both; the rest of a block is zeros, and written nowhere."""
        there, part = [], []
        for start, length, size in zip(map(int, at), self.block_type.shape, self.memory.shape, strict=True):
            first = min(max(start, 0), size)
            last = max(first, min(start + length, size))
            there.append(slice(first, last))
            part.append(slice(first - start, last - start))
        return tuple(there), tuple(part)


class tma:
    @staticmethod
    def async_copy_global_to_shared(
        descriptor: Descriptor, at: list, barrier: Any, to: Shared, pred: Any = True
    ) -> None:
        if not pred:
            return
        there, part = descriptor.inside(at)

        def copy() -> None:
            to.memory.zero_()
            to.memory[part] = descriptor.memory[there]
            one(barrier).arrive(bytes=-descriptor.block_type.nbytes)

        here.program.machine.copies.append(copy)
        here.group.pause()

    @staticmethod
    def async_copy_shared_to_global(descriptor: Descriptor, at: list, source: Shared) -> None:
        there, part = descriptor.inside(at)
        here.group.store(source, part, descriptor.memory[there].copy_)

    @staticmethod
    def store_wait(pendings: int) -> None:
        here.group.pause()
        while len(here.group.stores) > pendings:
            here.group.stores.pop(0)()


def async_add(descriptor: Descriptor, at: list, source: Shared) -> None:
    there, part = descriptor.inside(at)
    here.group.store(source, part, descriptor.memory[there].add_)


def wait_for_adds() -> None:
    tma.store_wait(0)
    here.group.write_all()


def warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    out = value(unwritten(acc.shape, acc.dtype))
    left = a.memory if isinstance(a, Shared) else a

    def multiply() -> None:
        product = left.float() @ b.memory.float()
        out.copy_(product + acc if use_acc else product)

    here.group.products.append(multiply)
    if not is_async:
        warpgroup_mma_wait(0)
    return out


def warpgroup_mma_wait(num_outstanding: int, deps: tuple = ()) -> Any:
    here.group.pause()
    while len(here.group.products) > num_outstanding:
        here.group.products.pop(0)()
    return deps[0] if len(deps) == 1 else deps


class Pointer:
    def __init__(self, memory: torch.Tensor, places: Any = 0):
        self.memory, self.places = memory, places

    def __add__(self, places: Any) -> "Pointer":
        return Pointer(self.memory, self.places + places)

    def __sub__(self, places: Any) -> "Pointer":
        return self + -places

    @property
    def dtype(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(element_ty=self.memory.dtype)


def from_first(memory: torch.Tensor) -> torch.Tensor:
    """Memory from the first element of a tensor to the last, whose rows may lie apart."""
    apart = zip(memory.shape, memory.stride(), strict=True)
    reach = 1 + sum((size - 1) * stride for size, stride in apart) if memory.numel() else 0
    return memory.as_strided((reach,), (1,))


def load(pointer: Pointer, mask: Any = None, other: float = 0.0, cache_modifier: str = "") -> Value:
    if mask is None:
        return value(from_first(pointer.memory)[pointer.places].clone())
    found = value(torch.full(pointer.places.shape, other, dtype=pointer.memory.dtype))
    found[mask] = from_first(pointer.memory)[pointer.places[mask]]
    return found


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    x = value(x)
    places, kept = (pointer.places, x) if mask is None else (pointer.places[mask], x[mask])
    from_first(pointer.memory)[places] = value(kept).to(pointer.memory.dtype)


def atomic_add(pointer: Pointer, x: Any, sem: str = "") -> Value:
    before = load(pointer)
    store(pointer, before + x)
    return before


def largest(x: Value, axis: int) -> Value:
    """Which overlooks NaN unless there is nothing else, as a GPU does."""
    if not x.dtype.is_floating_point:
        return x.amax(axis)
    found = x.nan_to_num(-torch.inf, torch.inf, -torch.inf).amax(axis)
    return value(found.where(~x.isnan().all(axis), torch.nan))


def unwritten(shape: Any, dtype: torch.dtype) -> torch.Tensor:
    """NaN, and of integers what is far from any sum of codes."""
    if not dtype.is_floating_point:
        return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype)
    return torch.full(shape, torch.nan).to(dtype)


def allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Shared | Barriers:
    return Barriers(shape[0]) if layout == "barriers" else Shared(unwritten(shape, dtype))


def some_layout(*_: Any, **__: Any) -> str:
    return "layout"


LANGUAGE = types.SimpleNamespace(
    constexpr=None, float32=torch.float32, int8=torch.int8, int32=torch.int32, int64=torch.int64,
    static_range=range, program_id=lambda axis: value(here.program.numbers[axis]), num_programs=lambda axis: value(here.program.count),
    NVMMADistributedLayout=some_layout, DotOperandLayout=some_layout, SliceLayout=some_layout, BlockedLayout=some_layout,
    SwizzledSharedLayout=some_layout, NVMMASharedLayout=types.SimpleNamespace(get_default_for=some_layout),
    allocate_shared_memory=allocate, load=load, store=store, atomic_add=atomic_add, assume=lambda known: None, convert_layout=lambda x, layout: x,
    arange=lambda start, end, layout: value(torch.arange(start, end)),
    zeros=lambda shape, dtype, layout: value(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, x, dtype, layout: value(torch.full(shape, float(x)).to(dtype)), zeros_like=torch.zeros_like,
    max=largest, reduce=lambda x, axis, combine: functools.reduce(combine, x.unbind(axis)), sum=lambda x, axis: x.sum(axis), exp=torch.exp, exp2=torch.exp2, log2=torch.log2,
    abs=torch.abs, ceil=torch.ceil, div_rn=torch.div, reshape=torch.reshape, permute=torch.permute,
    where=lambda chosen, a, b: torch.where(value(chosen), a, b),
    maximum=lambda a, b: torch.fmax(value(a), value(b)), minimum=lambda a, b: torch.fmin(value(a), value(b)),
    cdiv=lambda a, b: (value(a) + b - 1) // b,
    warp_specialize=lambda functions, warps, registers: here.program.has(functions),
)  # fmt: skip
STAND_INS = dict(
    gl=LANGUAGE, mbarrier=mbarrier, tma=tma, async_add=async_add, fence_async_shared=lambda: None,
    warpgroup_mma=warpgroup_mma, warpgroup_mma_wait=warpgroup_mma_wait, meet=lambda: here.group.pause(),
    wait_for_adds=wait_for_adds,
    wait_for_shares=lambda count, shares: here.group.pause(lambda: load(count) >= shares, f"waits for {shares} shares"),
    packed=lambda weights: weights, unpacked=lambda pairs, dtype: pairs, faded=lambda rows, fade: rows * fade[:, None],
)  # fmt: skip


def emulated(kernel: Any) -> Callable:
    """A Gluon function in the stand-in for its language, and all those that it calls."""
    return types.FunctionType(
        kernel.fn.__code__, Scope(kernel.fn.__globals__), kernel.fn.__name__, kernel.fn.__defaults__
    )


class Scope(dict):
    """A module's names, with stand-ins for those of the language."""

    def __init__(self, names: dict[str, Any]):
        super().__init__(names)
        for name, found in names.items():
            if name in STAND_INS:
                self[name] = STAND_INS[name]
            elif type(found).__name__ == "constexpr":
                self[name] = found.value
            elif type(found).__name__ == "GluonJITFunction":
                self[name] = lambda *arguments, kernel=found: emulated(kernel)(*arguments)


def emulate(
    kernel: Any,
    grid: tuple[int, ...],
    *arguments: Any,
    seed: int = 0,
    num_warps: int = 4,
    at_most: int | None = None,
    **constants: Any,
) -> None:
    """Run a Gluon kernel's programs one after the other, in whatever order, as `launch` would all at once; or, where they wait
    for each other, `at_most` so many beside each other, beginning in their order."""
    constants.pop("maxnreg", None)
    constants.pop("launch_pdl", None)
    numbers = list(itertools.product(*map(range, grid)))
    if at_most is None:
        random.Random(seed).shuffle(numbers)
    programs = [Program(each, grid[0], seed) for each in numbers]
    given = [
        Pointer(a) if isinstance(a, torch.Tensor)
        else Descriptor(a) if hasattr(a, "block")
        else value(a) if isinstance(a, int)
        else a
        for a in arguments
    ]  # fmt: skip
    body = functools.partial(emulated(kernel), **constants)
    for program in programs:
        here.program = program
        if "warp_specialize" in kernel.fn.__code__.co_names:
            body(*given)
        else:  # all warps are one group
            program.has([(body, tuple(given))])
        if at_most is None:
            Machine([program], 1).run()
    if at_most is not None:
        Machine(programs, at_most).run()
