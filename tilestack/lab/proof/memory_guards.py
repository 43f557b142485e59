"""Memory that shows what a kernel does with it: what it leaves unwritten, and what it reads or writes that is not its own."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack.contract import workspace
from tilestack.lab.proof.interpreted import Span, careless_casts, nan_overlooked, reads_refused
from tilestack.lab.proof.variants import GUARD

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
FILLED_ALLOCATIONS = {
    aten.clone.default,
    aten._to_copy.default,
    aten.zeros.default,
    aten.zeros_like.default,
    aten.new_zeros.default,
}


class WrittenOutside(Exception):
    """A kernel wrote where it had no business: into an input, or beyond the end of its own memory."""


def same_bits(a: Tensor, b: Tensor) -> bool:
    dense = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (a, b))
    return torch.equal(*(t.view(torch.uint8) for t in dense))


def whole_memory(x: Tensor) -> Tensor:
    """All the bytes of the memory in which a tensor lies."""
    return torch.empty(0, dtype=torch.uint8, device=x.device).set_(x.untyped_storage())


def reach_of(x: Tensor) -> int:
    """How many elements lie between the first and the last of a tensor, these included."""
    return 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0


def surroundings(x: Tensor) -> list[Span]:
    """The addresses before and after a tensor in its memory."""
    memory, start = x.untyped_storage(), x.data_ptr()
    end = memory.data_ptr() + memory.nbytes()
    return [(memory.data_ptr(), start), (start + reach_of(x) * x.element_size(), end)] if x.numel() else []


@contextmanager
def unchanged(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[None]:
    """Refuses what changes one of these tensors, or what lies around it in its memory, or reads what lies around it."""
    before = [(name, tensor, whole_memory(tensor).clone()) for name, tensor in tensors]
    with reads_refused(
        [span for _, tensor, _ in before if tensor.device.type == "cpu" for span in surroundings(tensor)]
    ):
        yield
    for name, tensor, bytes_before in before:
        if not torch.equal(whole_memory(tensor), bytes_before):
            raise WrittenOutside(f"it writes into {name}, which is only to be read")


@contextmanager
def workspaces_left_as_zeros() -> Iterator[None]:
    """Refuse what leaves anything else behind for the next call, which may be right all the same; it is given zeros."""
    yield
    spoilt = {name: kept for (name, *_), kept in workspace._kept.items() if kept.count_nonzero()}
    for kept in spoilt.values():
        kept.zero_()
    if spoilt:
        raise WrittenOutside(f"it leaves other than zeros in the workspace of {', '.join(spoilt)}")


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, new uninitialised tensors hold NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextmanager
def guarded_memory(device: torch.device, zeros: bool = False) -> Iterator[None]:
    """Inside, new CPU tensors have guards before and after them; refuses what reads one, or writes over it.

    What is not initialised holds `zeros` there if wanted: a kernel that reads it may be lucky in what it finds, but not twice.

    Not on a GPU, where a call is to run as it always does, repetition included, and compute-sanitizer sees more.
    """
    if device.type != "cpu":
        yield
        return
    with GuardedMemory(zeros) as guarded, reads_refused(guarded.spans), careless_casts(), nan_overlooked():
        yield
    guarded.check()


class GuardedMemory(TorchDispatchMode):
    """Puts guards around every allocation on a CPU."""

    def __init__(self, zeros: bool = False) -> None:
        super().__init__()
        self.zeros = zeros
        self.guards: list[tuple[Tensor, Tensor]] = []
        self.spans: list[Span] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        filled = func in FILLED_ALLOCATIONS
        if not (filled or func in ALLOCATIONS) or not out.numel() or out.device.type != "cpu":
            return out
        memory = torch.empty(GUARD + reach_of(out) + GUARD, dtype=out.dtype)
        for guard in (
            memory[:GUARD].view(torch.uint8),
            memory[-GUARD:].view(torch.uint8),
        ):  # a bool's copy may be tidied
            self.guards.append((guard, guard.clone()))
            self.spans.append((guard.data_ptr(), guard.data_ptr() + guard.nbytes))
        placed = memory.as_strided(out.shape, out.stride(), GUARD)
        if filled:
            return placed.copy_(out)
        return placed.zero_() if self.zeros else placed

    def check(self) -> None:
        if not all(torch.equal(guard, before) for guard, before in self.guards):
            raise WrittenOutside("it writes before or beyond the memory that it allocated")
