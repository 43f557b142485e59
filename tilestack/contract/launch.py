"""Launching a kernel for the price of a dictionary look-up.

`kernel[grid](...)` re-derives the specialisation of every argument in Python, 15 to 25 µs a call. `launch` does it once
per signature, then calls the compiled kernel. A signature is all that Triton specialises on: each tensor's dtype and
whether it starts on 16 bytes, the value of each integer, and the constants.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

LAUNCHES_KEPT = 1 << 15  # compiled launches remembered before starting over, so that ever-changing sizes stay bounded

_launchers: dict[int, tuple[Callable, Any]] = {}  # by the kernel's id, for hashing a kernel itself takes a lock
_compiled: dict[tuple, Callable] = {}


class Launched(NamedTuple):
    """A launch that was noted: `run` takes the grid, a stream, and the values with addresses in place of tensors."""

    run: Callable
    grid: tuple[int, ...]
    device: int
    values: tuple


_notes: dict[int, list] = {}  # where launches are noted, by thread: a backward runs in one of its own


@contextmanager
def noting(events: list) -> Iterator[None]:
    """Inside, this thread's launches on a GPU are also added to the events."""
    thread = threading.get_ident()
    _notes[thread] = events
    try:
        yield
    finally:
        del _notes[thread]


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel over a grid: tensors and numbers by position, constants (and num_warps, num_stages) by name.

    The kernel's arguments that are tensors, or None in place of one, are those named `…_ptr`; the first is a tensor.
    """
    if 0 in grid:
        return
    if not arguments[0].is_cuda:  # Triton's interpreter, or a compilation for a GPU that is not here
        kernel[grid](*arguments, **constants)
        return
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = launcher_of(kernel), kernel  # kept alive: its id must not be given to another
    run = found[0](grid, *arguments, **constants)
    if _notes and (events := _notes.get(threading.get_ident())) is not None:
        events.append(Launched(run, grid, arguments[0].get_device(), arguments))


def launcher_of(kernel: Any) -> Callable:
    """`launch` for one kernel, written out argument by argument, so that Python only runs what the signature needs."""
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    pointers = [name for name in names if name.endswith("_ptr")]
    numbers = [name for name in names if name not in pointers]
    address = lambda name: f"_{name}"
    values = ", ".join(address(name) if name in pointers else name for name in names)
    signature = [
        *constants, "num_warps", "num_stages",
        *(f"{name} is None or {name}.dtype" for name in pointers),
        f"({' | '.join(map(address, pointers))}) & 15 and ({', '.join(f'{address(name)} & 15' for name in pointers)},)",
        *(f"float if {name}.__class__ is float else {name}" for name in numbers),
    ]  # fmt: skip
    source = f"""
def launcher(_grid, {", ".join(names)}, *, {"".join(f"{name}, " for name in constants)}num_warps=None, num_stages=None):
    _device = {pointers[0]}.get_device()
    {"; ".join(f"{address(name)} = 0 if {name} is None else {name}.data_ptr()" for name in pointers)}
    _key = ({id(kernel)}, _device, {", ".join(signature)})
    _run = _compiled.get(_key)
    if _run is None or _device != _current_device():
        _options = dict({", ".join(f"{name}={name}" for name in [*constants, "num_warps", "num_stages"])})
        return _first_launch(_kernel, _grid, _device, _key, [{", ".join(names)}], _options)
    _size = len(_grid)
    _run(
        _grid[0], _grid[1] if _size > 1 else 1, _grid[2] if _size > 2 else 1, _stream(_device),
        {values},
    )
    return _run
"""
    scope: dict[str, Any] = dict(
        _kernel=kernel,
        _compiled=_compiled,
        _first_launch=first_launch,
        _current_device=torch._C._cuda_getDevice,
        _stream=torch._C._cuda_getCurrentRawStream,
    )
    exec(source, scope)
    return scope["launcher"]


def first_launch(
    kernel: Any, grid: tuple[int, ...], device: int, key: tuple, arguments: list, options: dict[str, Any]
) -> Callable:
    """Launch the ordinary way, and remember what was compiled."""
    for value, parameter in zip(arguments, kernel.params, strict=False):
        if isinstance(value, Tensor) and not parameter.name.endswith("_ptr"):
            raise TypeError(f"{kernel.__name__} takes a tensor as {parameter.name}; name it {parameter.name}_ptr")
    given = {name: value for name, value in options.items() if value is not None}
    with torch.cuda.device(device):
        compiled = kernel[grid](*arguments, **given)
    if len(_compiled) >= LAUNCHES_KEPT:
        _compiled.clear()
    run = ready_to_run(compiled, tuple(options[name] for name in kernel.arg_names[len(arguments) :]))
    _compiled[key] = run
    return run


def ready_to_run(compiled: Any, constants: tuple) -> Callable:
    """A compiled kernel as a function of its grid, stream, addresses and numbers.

    Past Triton's own wrapper, which prepares scratch memory and hooks on each call, where a kernel needs neither.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    head: tuple
    if getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1):
        head = function, metadata, None, None, None
        return lambda x, y, z, stream, *values: run(x, y, z, stream, *head, *values, *constants)
    enqueue, ways = run.launch, (function, run.launch_cooperative_grid, run.launch_pdl)
    if hasattr(run, "kernel_signature"):  # since Triton 3.7: the values in one tuple, told apart by annotations
        head = *ways, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature
        return lambda x, y, z, stream, *values: enqueue(x, y, z, stream, *head, (*values, *constants))
    head = *ways, None, None, metadata, None, None, None
    return lambda x, y, z, stream, *values: enqueue(x, y, z, stream, *head, *values, *constants)
