"""A step that went wrong, kept for whoever wants to know why: its batches, and what the model was before it."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from tilestack.train import checkpoint, metrics


def save_broken_step(
    folder: Path,
    batches: Sequence[Any],
    weights: Mapping[str, Tensor],
    optimizer: dict[str, Any],
    figures: Mapping[str, Any],
) -> None:
    """Write batch, weights and optimizer as safetensors, and the figures of the step as JSON."""
    states, values = checkpoint.pack_optimizer(optimizer)
    named = {f"{number}.{name}": x for number, batch in enumerate(batches) for name, x in tensors_in(batch)}
    files = {
        f"{name}.safetensors": lambda path, group=group: checkpoint.save_file(contiguous(group), path)  # type: ignore[misc]
        for name, group in {"batch": named, "weights": weights, "optimizer": states}.items()
    }
    told = {name: metrics.finite(value) for name, value in figures.items()}
    checkpoint.write_folder(folder, files, {"figures": told, "optimizer": values})


def contiguous(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().contiguous() for name, tensor in tensors.items()}


def tensors_in(value: Any, name: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """The tensors of a batch, whatever it is made of, with names."""
    if isinstance(value, Tensor):
        yield name, value.detach().contiguous()
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{index}")
    elif hasattr(value, "__dataclass_fields__"):
        yield from tensors_in({key: getattr(value, key) for key in value.__dataclass_fields__}, name)
