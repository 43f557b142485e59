"""Repeating a call: what it allocated and launched, done again without the Python that found out what.

Most implementations are straight-line code: they look at the signature of their arguments, then allocate, view and
launch, and nothing else. All of it follows from the signature but the addresses. So the second call of a signature is
noted,

    implementation                                    noted, and repeated from then on
    rows = x.flatten(0, -2)
    out = torch.empty_like(x)                         out = empty_strided((4, 16, 1024), (16384, 1024, 1), …)
    launch(kernel, grid_of(rows), rows, out, …)       run(64, 1, 1, stream, address of x, address of out, 64, 1024, …)
    return out                                        return out

and written out as a function. It asks only for what a signature leaves open: addresses off 16 bytes, floats other than
those noted and another current device take the implementation's own way. A call in which PyTorch did anything but
allocate and view, or whose addresses cannot be told apart, is not repeated at all.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack.contract.launch import Launched, noting
from tilestack.contract.operator import as_tuple

CALLS_BEFORE = 1  # of a signature, so that one which is never seen again is not noted; the first also compiles

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}


def straight_line(function: Callable, keep: Callable[[Callable], None], strides_known: bool = True) -> Callable:
    """A straight-line function for calls of one signature, which hands over its faster self once it has one."""
    calls = 0

    def run(*values: Any) -> Any:
        nonlocal calls
        calls += 1
        if not any(isinstance(value, Tensor) and value.is_cuda for value in values):
            keep(function)  # in Triton's interpreter there is nothing to gain
        elif calls > CALLS_BEFORE:
            notes = Notes(values)
            with notes, noting(notes.events):
                result = function(*values)
            keep(notes.written_out(function, result, strides_known) or function)
            return result
        return function(*values)

    return run


class Notes(TorchDispatchMode):
    """What a call does, in order, and which argument or allocation each address belongs to."""

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        self.values = values
        self.events: list[Tensor | Launched] = []
        self.straight_line = True
        self.owners: dict[int, Tensor | None] = {}  # None where an address could be of either of two
        for value in values:
            if isinstance(value, Tensor):
                address = value.data_ptr()
                self.owners[address] = None if address in self.owners else value

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS:
            self.events.append(out)
            self.owners[out.data_ptr()] = out
        elif any(returned.alias_info and not returned.alias_info.is_write for returned in func._schema.returns):
            owner = self.owners.get(args[0].data_ptr())
            for view in out if isinstance(out, list | tuple) else (out,):
                if self.owners.setdefault(view.data_ptr(), owner) is not owner:
                    self.owners[view.data_ptr()] = None
        elif func is not aten.promote_types.default:  # which follows from the signature as well
            self.straight_line = False
        return out

    def written_out(self, function: Callable, result: Any, strides_known: bool) -> Callable | None:
        """The function that repeats the call, None where that cannot be done."""
        launches = [event for event in self.events if isinstance(event, Launched)]
        aligned = all(value.data_ptr() % 16 == 0 for value in self.values if isinstance(value, Tensor))
        if not (self.straight_line and launches and aligned):
            return None
        try:
            return Source(self, launches, as_tuple(result)).compiled(
                function, strides_known, one=isinstance(result, Tensor)
            )
        except Untraceable:
            return None


class Untraceable(Exception):
    """A tensor that is neither an argument, nor allocated by the call, nor a view of one of them."""


class Source:
    """The text of a repeated call: names for its arguments and allocations, and lines made of them."""

    def __init__(self, notes: Notes, launches: Sequence[Launched], results: Sequence[Tensor | None]):
        self.notes, self.launches, self.results = notes, launches, results
        self.scope: dict[str, Any] = dict(
            empty=torch.empty_strided,
            current_device=torch._C._cuda_getDevice,
            stream_of=torch._C._cuda_getCurrentRawStream,
            inf=math.inf,
            nan=math.nan,
        )
        self.parameters = [f"a{place}" for place in range(len(notes.values))]
        named = zip(self.parameters, notes.values, strict=True)
        self.names = {id(value): name for name, value in named if isinstance(value, Tensor)}

    def compiled(self, function: Callable, strides_known: bool, one: bool) -> Callable:
        device = self.launches[0].device
        pointers = [n for n, value in zip(self.parameters, self.notes.values, strict=True) if isinstance(value, Tensor)]
        doubts = [f"({' | '.join(f'{name}_at' for name in pointers)}) & 15", f"current_device() != {device}"]
        for name, value in zip(self.parameters, self.notes.values, strict=True):
            if isinstance(value, Tensor) and not strides_known:
                doubts.append(f"{name}.stride() != {tuple(value.stride())}")
            elif isinstance(value, float | list):  # a list says which gradients are wanted
                doubts.append(f"{name} != {value!r}")
        shapes = self.shapes_of_allocations()
        body = [self.launch(e) if isinstance(e, Launched) else self.allocate(e, shapes) for e in self.notes.events]
        given = "".join(f"{self.given(tensor, shapes)}, " for tensor in self.results)
        source = f"""
def repeat({", ".join(self.parameters)}):
    {"; ".join(f"{name}_at = {name}.data_ptr()" for name in pointers)}
    if {" or ".join(doubts)}:
        return function({", ".join(self.parameters)})
    stream = stream_of({device})
    {"; ".join(filter(None, body))}
    return {given.removesuffix(", ") if one else f"({given})"}
"""
        self.scope["function"] = function
        exec(source, self.scope)
        return self.scope["repeat"]

    def shapes_of_allocations(self) -> dict[int, Tensor]:
        """By the id of each allocation that is used, the tensor as which it is made: the result that is all of it, if any."""
        written = [value for event in self.launches for value in event.values if isinstance(value, Tensor)]
        shapes = {id(self.owner(tensor)): self.owner(tensor) for tensor in written}
        for tensor in reversed(self.results):
            if tensor is not None:
                owner = self.owner(tensor)
                shapes[id(owner)] = tensor if extent(tensor) == extent(owner) else shapes.get(id(owner), owner)
        return shapes

    def owner(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.names or any(tensor is event for event in self.notes.events):
            return tensor
        found = self.notes.owners.get(tensor.data_ptr())
        if found is None or not tensor.data_ptr():
            raise Untraceable
        return found

    def allocate(self, tensor: Tensor, shapes: dict[int, Tensor]) -> str:
        if id(tensor) not in shapes:
            return ""
        name = self.names[id(tensor)] = f"t{len(self.names)}"
        shape, strides = tuple(shapes[id(tensor)].shape), tuple(shapes[id(tensor)].stride())
        self.scope |= {f"{name}_dtype": tensor.dtype, f"{name}_device": tensor.device}
        return f"{name} = empty({shape}, {strides}, dtype={name}_dtype, device={name}_device); {name}_at = {name}.data_ptr()"

    def launch(self, event: Launched) -> str:
        run = f"run{len(self.scope)}"
        self.scope[run] = event.run
        values = [self.address(v) if v is None or isinstance(v, Tensor) else repr(v) for v in event.values]
        x, y, z = (*event.grid, 1, 1)[:3]
        return f"{run}({x}, {y}, {z}, stream, {', '.join(values)})"

    def address(self, tensor: Tensor | None) -> str:
        if tensor is None or not tensor.data_ptr():
            return "0"
        if self.notes.owners.get(tensor.data_ptr()) is None:
            raise Untraceable
        owner = self.owner(tensor)
        offset = tensor.data_ptr() - owner.data_ptr()
        return f"{self.names[id(owner)]}_at" + (f" + {offset}" if offset else "")

    def given(self, tensor: Tensor | None, shapes: dict[int, Tensor]) -> str:
        """How the caller gets a result: an argument, an allocation, or a view of the latter."""
        if tensor is None:
            return "None"
        owner = self.owner(tensor)
        name, made = self.names[id(owner)], shapes[id(owner)]
        if name in self.parameters:
            if tensor is not owner:
                raise Untraceable
            return name
        if extent(tensor) == extent(made) and (tensor.shape, tensor.stride()) == (made.shape, made.stride()):
            return name
        if tensor.dtype != owner.dtype:
            raise Untraceable
        return f"{name}.as_strided({tuple(tensor.shape)}, {tuple(tensor.stride())}, {tensor.storage_offset()})"


def extent(tensor: Tensor) -> tuple:
    """Where a tensor's memory begins, how much of it there is, and what lies in it."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.numel(), last, tensor.dtype
