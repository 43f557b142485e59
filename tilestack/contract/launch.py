"""Launching a kernel for the price of a dictionary look-up.

`kernel[grid](...)` re-derives the specialisation of every argument in Python, 15 to 25 µs a call. `launch` does it once
for all that Triton specialises on (each tensor's dtype and whether it starts on 16 bytes; of each integer whether it is
one, a multiple of 16, and its width; the constants), and finds what was compiled by the plain values from then on.

A kernel's arguments say by their names what they are: `…_ptr` a tensor or None, `…_desc` a `Tile` that TMA moves, any
other a number. Triton and Gluon kernels come through the same door. Where Triton's internals are not those we know, its
own launcher takes over.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestack.contract.descriptors import Tile, described_launch
from tilestack.contract.source import listed, write_function

LAUNCHES_KEPT = 1 << 14  # launches found by their plain values; behind them stands what was compiled

_launchers: dict[int, tuple[Callable, Any]] = {}  # by the kernel's id, for hashing a kernel itself takes a lock
_by_values: dict[tuple, Callable] = {}
_compiled: dict[tuple, Callable] = {}


class Launched(NamedTuple):
    """A launch that was noted: `run` takes the grid, a stream, and the values with addresses in place of tensors."""

    run: Callable
    grid: tuple[int, ...]
    device: int
    values: tuple


class Unseen(NamedTuple):
    """A launch that came past `launch`, of which only this is known."""

    kernel: str


notes: dict[int, list] = {}  # where launches are noted, by thread: a backward runs in one of its own
_compiling_for: set[int] = set()  # threads in which a launch of ours is Triton's to make, and no news


@contextmanager
def noting(events: list) -> Iterator[bool]:
    """Inside, this thread's launches on a GPU are added to the events, `Unseen` where they come past `launch`. Answers
    whether all are seen: not inside another noting, nor where Triton has no hook for launches."""
    thread = threading.get_ident()

    def unseen(metadata: Any) -> None:
        if threading.get_ident() == thread and thread not in _compiling_for:
            events.append(Unseen(str(metadata.get()["name"]) if hasattr(metadata, "get") else "a kernel"))

    try:
        from triton import knobs

        hooks = knobs.runtime.launch_enter_hook
        hooks.add(unseen)
    except (ImportError, AttributeError):
        yield False
        return
    if thread in notes:
        hooks.remove(unseen)
        yield False
        return
    notes[thread] = events
    try:
        yield True
    finally:
        del notes[thread]
        hooks.remove(unseen)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Run a kernel over a grid: tensors, tiles and numbers by position, constants (and num_warps, num_stages) by name.

    The first argument is a tensor or a tile.
    """
    if 0 in grid:
        return
    first = arguments[0]
    if not (first.tensor if first.__class__ is Tile else first).is_cuda:
        # Triton's interpreter, or a compilation for a GPU that is not here.
        kernel[grid](*(a.descriptor() if a.__class__ is Tile else a for a in arguments), **constants)
        return
    found = _launchers.get(id(kernel))
    if found is None:
        found = _launchers[id(kernel)] = (
            write_launcher(kernel),
            kernel,
        )  # kept alive: its id must not be given to another
    run = found[0](grid, *arguments, **constants)
    if notes and (events := notes.get(threading.get_ident())) is not None:
        events.append(Launched(run, grid, (first.tensor if first.__class__ is Tile else first).get_device(), arguments))


def write_launcher(kernel: Any) -> Callable:
    """`launch` for one kernel, argument by argument, so that Python only runs what the signature needs."""
    constants = [parameter.name for parameter in kernel.params if parameter.is_constexpr]
    names = [parameter.name for parameter in kernel.params if not parameter.is_constexpr]
    pointers = [name for name in names if name.endswith("_ptr")]
    tiles = [name for name in names if name.endswith("_desc")]
    address = lambda name: f"_{name}"
    addresses = [
        *(f"{address(name)} = 0 if {name} is None else {name}.data_ptr()" for name in pointers),
        *(f"{address(name)} = {name}.tensor.data_ptr()" for name in tiles),
    ]
    values = [
        f"*_run.encoders[{tiles.index(n)}]({address(n)}, {n}.shape, {n}.strides)" if n in tiles
        else address(n) if n in pointers else n
        for n in names
    ]  # fmt: skip
    aligned = " | ".join(map(address, pointers)) or "0"
    signature = [
        *constants, "num_warps", "num_stages", "tuple(_more.items()) if _more else None",
        *(f"{name} is None or {name}.dtype" for name in pointers),
        *(f"{name}.tensor.dtype, {name}.block, {name}.layout" for name in tiles),
        f"({aligned}) & 15 and ({listed(f'{address(name)} & 15' for name in pointers)})",
        *(f"{n} if {n}.__class__ is int else float if {n}.__class__ is float else ({n},)" for n in names if n not in (*pointers, *tiles)),
    ]  # fmt: skip
    first = pointers[0] if names[0] in pointers else f"{names[0]}.tensor"
    text = f"""
def launcher(_grid, {listed(names)}*, {listed(constants)}num_warps=None, num_stages=None, **_more):
    _device = {first}.get_device()
    {"; ".join(addresses)}
    _key = (_kernel_id, _device, {listed(signature)})
    _run = _by_values.get(_key)
    if _run is None or _device != _current_device():
        _options = dict({listed(f"{name}={name}" for name in [*constants, "num_warps", "num_stages"])}**_more)
        return _new_launch(_kernel, _grid, _device, _key, [{listed(names)}], _options)
    _size = len(_grid)
    _run(
        _grid[0], _grid[1] if _size > 1 else 1, _grid[2] if _size > 2 else 1, _stream(_device),
        {listed(values)}
    )
    return _run
"""
    scope: dict[str, Any] = dict(
        _kernel=kernel,
        _kernel_id=id(kernel),
        _by_values=_by_values,
        _new_launch=new_launch,
        _current_device=torch._C._cuda_getDevice,
        _stream=torch._C._cuda_getCurrentRawStream,
    )
    return write_function("launcher", text, scope)


def new_launch(
    kernel: Any, grid: tuple[int, ...], device: int, key: tuple, arguments: list, options: dict[str, Any]
) -> Callable:
    """Launch with values that were not met before: by what was compiled for such values, or the ordinary way."""
    for value, parameter in zip(arguments, kernel.params, strict=False):
        if isinstance(value, Tensor) and not parameter.name.endswith("_ptr"):
            raise TypeError(f"{kernel.__name__} takes a tensor as {parameter.name}; name it {parameter.name}_ptr")
        if isinstance(value, Tile) and not parameter.name.endswith("_desc"):
            raise TypeError(f"{kernel.__name__} takes a tile as {parameter.name}; name it {parameter.name}_desc")
    names = [parameter.name for parameter in kernel.params]
    specialised = (id(kernel), device, tuple(map(specialisation, names, arguments)), tuple(options.items()))
    run = _compiled.get(specialised)
    with torch.cuda.device(device):
        if run is not None:
            values = values_of(names, arguments, getattr(run, "encoders", ()))
            run(*(*grid, 1, 1)[:3], torch._C._cuda_getCurrentRawStream(device), *values)
        else:
            run = _compiled[specialised] = first_launch(kernel, grid, arguments, options)
    if len(_by_values) >= LAUNCHES_KEPT:
        _by_values.clear()
    _by_values[key] = run
    return run


def specialisation(name: str, value: Any) -> Any:
    """What Triton compiles a kernel anew for."""
    if name.endswith("_ptr"):
        return value is not None and (value.dtype, value.data_ptr() % 16 == 0)
    if name.endswith("_desc"):
        return value.tensor.dtype, value.block, value.layout
    if value.__class__ is int:
        return value == 1, value % 16 == 0, -(2**31) <= value < 2**31, value >= 2**63
    return value.__class__


def values_of(names: Sequence[str], arguments: list, encoders: Sequence[Callable]) -> Iterator[Any]:
    """What the C launcher takes for each argument."""
    left = iter(encoders)
    for name, argument in zip(names, arguments, strict=False):
        if name.endswith("_desc"):
            yield from next(left)(argument.tensor.data_ptr(), argument.shape, argument.strides)
        else:
            yield 0 if argument is None else argument.data_ptr() if name.endswith("_ptr") else argument


def first_launch(kernel: Any, grid: tuple[int, ...], arguments: list, options: dict[str, Any]) -> Callable:
    """Launch the ordinary way, and make of what was compiled a function of grid, stream and values."""
    thread = threading.get_ident()
    given = {name: value for name, value in options.items() if value is not None or name in kernel.arg_names}
    values = [a.descriptor() if isinstance(a, Tile) else a for a in arguments]
    _compiling_for.add(thread)
    try:
        compiled = kernel[grid](*values, **given)
    finally:
        _compiling_for.discard(thread)
    constants = tuple(options[name] for name in kernel.arg_names[len(arguments) :])
    return ready_to_run(compiled, constants, [a for a in arguments if isinstance(a, Tile)])


def ready_to_run(compiled: Any, constants: tuple, tiles: list[Tile] | None = None) -> Callable:
    """A compiled kernel as a function of its grid, stream, addresses and numbers.

    Past Triton's own wrapper, which prepares scratch memory and hooks on each call, where a kernel needs neither and the
    wrapper is one we know; through it otherwise.
    """
    run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
    enqueue, encoders = described_launch(run, compiled, tiles or [])
    known = all(hasattr(run, name) for name in ("launch", "launch_cooperative_grid", "launch_pdl"))
    scratch = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
    head: tuple
    if scratch or not known or enqueue is None:
        head = function, metadata, None, None, None
        direct = lambda x, y, z, stream, *values: run(x, y, z, stream, *head, *values, *constants)
    elif hasattr(run, "kernel_signature"):  # since Triton 3.7: the values in one tuple, told apart by annotations
        ways = function, run.launch_cooperative_grid, run.launch_pdl
        head = *ways, metadata, None, None, None, None, None, run.arg_annotations, run.kernel_signature
        direct = lambda x, y, z, stream, *values: enqueue(x, y, z, stream, *head, (*values, *constants))
    else:
        ways = function, run.launch_cooperative_grid, run.launch_pdl
        head = *ways, None, None, metadata, None, None, None
        direct = lambda x, y, z, stream, *values: enqueue(x, y, z, stream, *head, *values, *constants)
    direct.encoders = encoders  # type: ignore[attr-defined]
    return direct
