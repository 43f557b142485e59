"""A buffer that batches are copied into, one after another, so that a step finds each in the same place.

Whatever a batch is made of (tables, lists, tuples, dataclasses), its tensors may differ in their contents and in nothing else,
and all that is no tensor must stay the same: a CUDA graph would go on with what it was captured with.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

BUFFERED = (Tensor, bool, int, float, str, bytes, type(None))  # what a batch may be made of in the end


def leaves(value: Any, name: str = "batch") -> Iterator[tuple[str, Any]]:
    """What a batch is made of in the end, with names."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves(item, f"{name}.{index}")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from leaves({field.name: getattr(value, field.name) for field in dataclasses.fields(value)}, name)
    else:
        yield name, value


def no_buffer_for(batch: Any) -> str:
    """Why no buffer can be made like a batch; empty where one can."""
    for name, leaf in leaves(batch):
        if not isinstance(leaf, BUFFERED):
            return f"{name} is a {type(leaf).__name__}, whose contents are not known"
    return ""


def difference(buffer: Any, batch: Any) -> str:
    """In what a batch differs from that which a buffer was made for, but the contents of its tensors; empty where in nothing."""
    ours, theirs = dict(leaves(buffer)), dict(leaves(batch))
    if ours.keys() != theirs.keys():
        return f"a batch of {', '.join(theirs)} comes after one of {', '.join(ours)}"
    for name, mine in ours.items():
        given = theirs[name]
        if isinstance(mine, Tensor) and isinstance(given, Tensor):
            if (given.shape, given.dtype) != (mine.shape, mine.dtype):
                of = lambda tensor: f"{tensor.dtype}{list(tensor.shape)}".removeprefix("torch.")
                return f"{name} of {of(given)} comes after one of {of(mine)}"
        elif type(given) is not type(mine) or given != mine:
            return f"{name} is {given!r} after {mine!r}"
    return ""


def fill(buffer: Any, batch: Any) -> None:
    """Copy the tensors of a batch into a buffer that was made for one like it."""
    for (_, mine), (_, given) in zip(leaves(buffer), leaves(batch), strict=True):
        if isinstance(mine, Tensor):
            mine.copy_(given)


def map_tensors(value: Any, call: Callable[[Tensor], Any]) -> Any:
    """A batch like this one, made of what the call makes of its tensors."""
    if isinstance(value, Tensor):
        return call(value)
    if isinstance(value, dict):
        return {key: map_tensors(item, call) for key, item in value.items()}
    if isinstance(value, list | tuple):
        made = [map_tensors(item, call) for item in value]
        return type(value)(*made) if hasattr(value, "_fields") else type(value)(made)  # a named tuple takes them apart
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {field.name: map_tensors(getattr(value, field.name), call) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value
