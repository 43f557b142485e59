"""Repeating a call: what it allocated and launched, done again without the Python that found out what.

Most implementations are straight-line code: they look at the signature of their arguments, then allocate, view and
launch, and nothing else. All of it follows from the signature but the addresses. So the second call of a signature is
noted,

    implementation                                    noted, and repeated from then on
    rows = x.flatten(0, -2)
    out = torch.empty_like(x)                         out = empty((4, 16, 1024), (16384, 1024, 1), bfloat16)
    launch(kernel, grid_of(rows), rows, out, …)       run(64, 1, 1, stream, address of x, address of out, 64, 1024, …)
    return out                                        return out

and written as a function. It asks only for what a signature leaves open: addresses off 16 bytes, other options and
another current device take the implementation's own way. A call in which PyTorch did anything but allocate and view, a
kernel was launched past `launch`, or addresses cannot be told apart, is not repeated at all. With `places` for its
results, what it would allocate for them is the memory given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack.contract.descriptors import Tile
from tilestack.contract.into import copied
from tilestack.contract.launch import Launched, notes, noting
from tilestack.contract.operator import as_tuple
from tilestack.contract.source import lines, listed, write_function
from tilestack.contract.workspace import Workspace, workspace

CALLS_BEFORE = 1  # of a signature, so that one which is never seen again is not noted; the first also compiles

aten = torch.ops.aten
ALLOCATIONS = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.empty_like.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# What inductor's code allocates with, in a third of the time: on the current device, which a repeated call asks for.
ALLOCATE_ON_GPU = getattr(getattr(torch._C._dynamo, "guards", None), "_empty_strided_cuda", None)


def straight_line(
    function: Callable,
    keep: Callable[[Callable], None],
    strides_known: bool = True,
    places: int = 0,
    otherwise: Callable | None = None,
) -> Callable:
    """A straight-line function for calls of one signature, which hands over its faster self once it has one.

    With `places` it is called with as many tensors before the arguments, where the results go; `otherwise` does that in
    any case.
    """
    own = otherwise or function
    calls = 0

    def run(*values: Any) -> Any:
        nonlocal calls
        calls += 1
        tensors = [value for value in values if isinstance(value, Tensor)]
        lists = any(isinstance(value, list | tuple) and any(isinstance(v, Tensor) for v in value) for value in values)
        if lists or not any(tensor.is_cuda for tensor in tensors):
            keep(own)  # in Triton's interpreter there is nothing to gain
        elif calls > CALLS_BEFORE and all(t.data_ptr() % 16 == 0 for t in tensors) and not capturing():
            return note(*values)
        return own(*values)

    def note(*values: Any) -> Any:
        record = Notes(values[places:])
        with noting(record.events) as all_seen:
            if not all_seen:
                return own(*values)
            with record:
                result = function(*values[places:])
        keep(record.written(own, result, strides_known, values[:places]) or own)
        if not places:
            return result
        copied(values[:places], result)
        return None

    return run


def capturing() -> bool:
    """Whether a CUDA graph is being captured: a time to launch and to do nothing else."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Notes(TorchDispatchMode):
    """What a call does, in order, and which argument or allocation each address belongs to."""

    def __init__(self, values: Sequence[Any]):
        super().__init__()
        self.values = values
        self.events: list[Any] = []  # allocations, workspaces and launches
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

    def written(
        self, own: Callable, result: Any, strides_known: bool, places: Sequence[Tensor] = ()
    ) -> Callable | None:
        """The function that repeats the call, None where that cannot be done."""
        known = all(isinstance(event, Tensor | Launched | Workspace) for event in self.events)
        launched = any(isinstance(event, Launched) for event in self.events)
        if not (self.straight_line and known and launched):
            return None
        for event in self.events:
            if isinstance(event, Workspace):
                self.owners[event.tensor.data_ptr()] = event.tensor
        try:
            return Repeated(self, result, places).function(own, strides_known)
        except Untraceable:
            return None


class Untraceable(Exception):
    """A tensor that is neither an argument, nor allocated by the call, nor a view of one of them."""


class Repeated:
    """The text of a repeated call: names for its arguments and allocations, and lines made of them.

    Numbers, shapes and compiled kernels are names in its scope, so that signatures that differ in nothing else share the
    text.
    """

    def __init__(self, record: Notes, result: Any, places: Sequence[Tensor]):
        self.record, self.result, self.results, self.places = record, result, leaves_of(result), places
        self.launches = [event for event in record.events if isinstance(event, Launched)]
        self.scope: dict[str, Any] = dict(
            allocate=torch.empty_strided,
            allocate_on_gpu=ALLOCATE_ON_GPU,
            workspace=workspace,
            current_device=torch._C._cuda_getDevice,
            stream_of=torch._C._cuda_getCurrentRawStream,
            notes=notes,
        )
        self.parameters = [f"a{place}" for place in range(len(record.values))]
        named = zip(self.parameters, record.values, strict=True)
        self.names = {id(value): name for name, value in named if isinstance(value, Tensor)}

    def function(self, own: Callable, strides_known: bool) -> Callable:
        given = [f"p{place}" for place in range(len(self.places))]
        named = dict(zip(self.parameters, self.record.values, strict=True))
        tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        device = self.constant(self.launches[0].device)
        addresses = [f"{name}_at = {name}.data_ptr()" for name in (*given, *tensors)]
        guards = [
            f"({' | '.join(f'{name}_at' for name in (*given, *tensors))}) & 15",
            f"current_device() != {device}",
            "notes",  # who notes a call must see the launches in it
        ]
        if not strides_known:
            guards += [f"{name}.stride() != {self.constant(tuple(t.stride()))}" for name, t in tensors.items()]
            guards += [f"{name} is not None" for name, value in named.items() if value is None]
        guards += [f"{name} != {self.constant(value)}" for name, value in named.items() if is_option(value)]
        guards += [self.overlaps(p, place, name, t) for p, place in zip(given, self.places, strict=True) for name, t in tensors.items()]  # fmt: skip
        shapes = self.shapes_of_allocations()
        if self.places:
            for name, place, result in zip(given, self.places, self.results, strict=True):
                self.put(name, place, result, shapes)
        body = [self.line(event, shapes) for event in self.record.events]
        returned = "None" if self.places else self.returned(self.result, shapes)
        arguments = ", ".join((*given, *self.parameters))
        text = f"""
def repeat({arguments}):
    try:
{lines(*addresses, indent=8)}
    except AttributeError:  # None, where a tensor was noted
        return own({arguments})
    if {" or ".join(guards)}:
        return own({arguments})
    stream = stream_of({device})
{lines(*body)}
    return {returned}
"""
        self.scope["own"] = own
        return write_function("repeat", text, self.scope)

    def constant(self, value: Any) -> str:
        """The name by which the text knows a value."""
        name = f"c{len(self.scope)}"
        self.scope[name] = value
        return name

    def overlaps(self, p: str, place: Tensor, name: str, argument: Tensor) -> str:
        """Whether the memory given for a result lies over that of an argument."""
        ends = [self.constant(bytes_of(tensor)) for tensor in (place, argument)]
        return f"{p}_at < {name}_at + {ends[1]} and {name}_at < {p}_at + {ends[0]}"

    def put(self, name: str, place: Tensor, result: Tensor | None, shapes: dict[int, Tensor]) -> None:
        """Let a result be written where the caller wants it, if it is an allocation of just that shape."""
        if result is None or id(owner := self.owner(result)) in self.names:
            raise Untraceable
        if extent(result)[1:] != extent(place)[1:] or extent(result) != extent(owner):
            raise Untraceable
        if (result.shape, result.stride()) != (place.shape, place.stride()):
            raise Untraceable
        self.names[id(owner)] = name

    def shapes_of_allocations(self) -> dict[int, Tensor]:
        """By the id of each allocation that is used, the tensor as which it is made: the result that is all of it, if any."""
        used = [tensor_of(value) for event in self.launches for value in event.values]
        owners = [self.owner(tensor) for tensor in used if tensor is not None and tensor.data_ptr()]
        shapes = {id(owner): owner for owner in owners}
        for tensor in reversed(self.results):
            if tensor is not None:
                owner = self.owner(tensor)
                shapes[id(owner)] = tensor if extent(tensor) == extent(owner) else shapes.get(id(owner), owner)
        return shapes

    def owner(self, tensor: Tensor) -> Tensor:
        if id(tensor) in self.names or any(tensor is event for event in self.record.events):
            return tensor
        found = self.record.owners.get(tensor.data_ptr())
        if found is None or not tensor.data_ptr():
            raise Untraceable
        return found

    def line(self, event: Any, shapes: dict[int, Tensor]) -> str:
        if isinstance(event, Launched):
            return self.launch(event)
        if isinstance(event, Workspace):
            name = self.names[id(event.tensor)] = f"w{len(self.names)}"
            asked = ", ".join(map(self.constant, event[1:]))
            return f"{name} = workspace({asked}); {name}_at = {name}.data_ptr()"  # held: in a graph nobody else does
        if id(event) not in shapes or id(event) in self.names:
            return ""
        return self.allocate(event, shapes[id(event)])

    def allocate(self, tensor: Tensor, made: Tensor) -> str:
        name = self.names[id(tensor)] = f"t{len(self.names)}"
        shape, strides = self.constant(tuple(made.shape)), self.constant(tuple(made.stride()))
        dtype, device = self.constant(tensor.dtype), self.constant(tensor.device)
        if tensor.device.type == "cuda" and ALLOCATE_ON_GPU is not None:
            call = f"allocate_on_gpu({shape}, {strides}, {dtype})"
        else:
            call = f"allocate({shape}, {strides}, dtype={dtype}, device={device})"
        return f"{name} = {call}; {name}_at = {name}.data_ptr()"

    def launch(self, event: Launched) -> str:
        run, encoders = self.constant(event.run), iter(getattr(event.run, "encoders", ()))
        values = []
        for value in event.values:
            if isinstance(value, Tile):
                encode, fixed = self.constant(next(encoders)), map(self.constant, (value.shape, value.strides))
                values.append(f"*{encode}({self.address(value.tensor)}, {', '.join(fixed)})")
            elif value is None or isinstance(value, Tensor):
                values.append(self.address(value))
            else:
                values.append(self.constant(value))
        x, y, z = map(self.constant, (*event.grid, 1, 1)[:3])
        return f"{run}({x}, {y}, {z}, stream, {', '.join(values)})"

    def address(self, tensor: Tensor | None) -> str:
        if tensor is None or not tensor.data_ptr():
            return "0"
        if self.record.owners.get(tensor.data_ptr()) is None:
            raise Untraceable
        owner = self.owner(tensor)
        offset = tensor.data_ptr() - owner.data_ptr()
        return f"{self.names[id(owner)]}_at" + (f" + {self.constant(offset)}" if offset else "")

    def returned(self, result: Any, shapes: dict[int, Tensor]) -> str:
        """What the call returns: a tensor, or several, of which some may be several again."""
        if isinstance(result, tuple | list):
            return f"({listed(self.returned(each, shapes) for each in result)})"
        return self.given(result, shapes)

    def given(self, tensor: Tensor | None, shapes: dict[int, Tensor]) -> str:
        """How the caller gets a result: an argument, an allocation, or a view of the latter."""
        if tensor is None:
            return "None"
        owner = self.owner(tensor)
        name, made = self.names[id(owner)], shapes.get(id(owner), owner)
        if name in self.parameters and tensor is owner:
            return name
        if name.startswith("w"):
            raise Untraceable
        if name in self.parameters:
            shape, strides = self.constant(tuple(tensor.shape)), self.constant(tuple(tensor.stride()))
            behind = self.constant(tensor.storage_offset() - owner.storage_offset())
            if tensor.dtype != owner.dtype:
                raise Untraceable
            return f"{name}.as_strided({shape}, {strides}, {name}.storage_offset() + {behind})"
        if extent(tensor) == extent(made) and (tensor.shape, tensor.stride()) == (made.shape, made.stride()):
            return name
        if tensor.dtype != owner.dtype:
            raise Untraceable
        view = (
            self.constant(tuple(tensor.shape)),
            self.constant(tuple(tensor.stride())),
            self.constant(tensor.storage_offset()),
        )
        return f"{name}.as_strided({', '.join(view)})"


def leaves_of(result: Any) -> list[Tensor | None]:
    """The tensors of a result in which tuples may lie in tuples, as where a forward hands extras to its backward."""
    return [
        leaf for each in as_tuple(result) for leaf in (leaves_of(each) if isinstance(each, tuple | list) else [each])
    ]


def is_option(value: Any) -> bool:
    return value is not None and not isinstance(value, Tensor)


def tensor_of(value: Any) -> Tensor | None:
    return value.tensor if isinstance(value, Tile) else value if isinstance(value, Tensor) else None


def extent(tensor: Tensor) -> tuple:
    """Where a tensor's memory begins, how much of it there is, and what lies in it."""
    return tensor.data_ptr(), tensor.numel(), last_of(tensor), tensor.dtype


def last_of(tensor: Tensor) -> int:
    """The offset of a tensor's last element."""
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def bytes_of(tensor: Tensor) -> int:
    """How far a tensor reaches from its first byte."""
    return (last_of(tensor) + 1) * tensor.element_size() if tensor.numel() else 0
