"""A case in words: `batch 4, sequence 2048, 16 query heads` where its builder names its sizes, else the shapes it makes."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor


def label_of_sizes(sizes: Iterable[tuple[str, Any]]) -> str:
    """Every size by its name."""
    return ", ".join(filter(None, (phrase(name, value) for name, value in sizes)))


def label_of_arguments(arguments: Mapping[str, Any]) -> str:
    """The shapes of the tensors, by name where they differ, then the options.

    A vector as long as a dimension of an earlier tensor says nothing new: the weight of a norm, a label for each row.
    """
    names_of: dict[str, list[str]] = {}
    lengths: set[int] = set()
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            if value.ndim > 1 or not names_of or (value.ndim and value.shape[0] not in lengths):
                names_of.setdefault(shape_label(value), []).append(name)
            lengths.update(value.shape)
    alone = len(names_of) == 1
    shapes = [shape if alone else f"{', '.join(names)} {shape}" for shape, names in names_of.items()]
    options = [phrase(name, value) for name, value in arguments.items() if not isinstance(value, Tensor)]
    return ", ".join(filter(None, [*shapes, *options]))


def shape_label(tensor: Tensor) -> str:
    return "×".join(map(str, tensor.shape)) or "scalar"


def phrase(name: str, value: Any) -> str:
    """`16 query heads`, `batch 4`, `rule causal`, `interleaved`; nothing for an option that is off."""
    words = name.strip("_").replace("_", " ")
    if value is None or value is False or value == "plain":
        return ""
    if value is True:
        return words
    if isinstance(value, list | tuple):
        return "" if any(isinstance(item, Tensor) for item in value) else f"{words} {' '.join(map(str, value))}"
    many = isinstance(value, int) and value != 1 and words.endswith("s")
    return f"{value} {words}" if many else f"{words} {value}".strip()
