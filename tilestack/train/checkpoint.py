"""Checkpoints that are whole or not there: safetensors and JSON in a folder that appears under its name in one step.

A checkpoint is written by `tilestack.files`: a crash, a kill or a full disk leaves at most a hidden folder, which the next
start removes, and the checkpoints before it as they were. The latest is found by looking, not by a link that could point
to nothing.

    checkpoints/
      step-000200/
        weights.safetensors      parameters and buffers
        optimizer.safetensors    its states, <parameter's number>.<state's name>
        average.safetensors      the moving average, where the recipe asks for one
        loads.safetensors        of experts in the last steps, where the model is a mixture
        rng.safetensors          the random states of PyTorch
        state.json               all that is not a tensor, and the size of every file; written last
"""

import hashlib
import json
import random
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilestack.files import clean_parts, discard, whole_folder
from tilestack.models import CheckpointError
from tilestack.train import metrics

NAME = re.compile(r"step-(\d{6,})")
STATE = "state.json"
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # integers of so many bytes
Groups = Mapping[str, Mapping[str, Tensor]]  # tensors by file and name


@dataclass(frozen=True)
class Saved:
    """A checkpoint as read: tensors by file and name, and everything else."""

    folder: Path
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


class Checkpoints:
    """The checkpoints of one run. They are written by a thread of their own from a copy of what they hold, unless not
    `asynchronous`; `wait` until the last one is on the disk."""

    def __init__(self, folder: Path, keep: int, asynchronous: bool = False):
        self.folder, self.keep, self.asynchronous = folder, keep, asynchronous
        self.writing: Future[None] | None = None
        self.writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, oldest first."""
        found = [NAME.fullmatch(path.name) for path in self.folder.glob("step-*")]
        return sorted(int(match[1]) for match in found if match and complete(self.folder / match[0]))

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:06d}"

    def clean(self) -> None:
        """Remove what a killed process left half-written."""
        clean_parts(self.folder)

    def save(self, step: int, tensors: Groups, state: Mapping[str, Any], copies: bool = False) -> None:
        """Save the checkpoint of a step and forget the oldest ones. The tensors of each name become a file; where they are
        `copies` already, later steps leave them alone."""
        self.wait()
        if self.asynchronous:
            if not copies:
                tensors = {name: {key: copied(x) for key, x in group.items()} for name, group in tensors.items()}
            self.writing = self.writer.submit(self.write, step, tensors, json.loads(json.dumps(state)))
        else:
            self.write(step, tensors, state)

    def wait(self) -> None:
        """Wait until the last checkpoint is on the disk; what went wrong with it is raised here."""
        if self.writing is not None:
            written, self.writing = self.writing, None
            written.result()

    def look(self) -> None:
        """Raise what went wrong with the last checkpoint, if that is known by now."""
        if self.writing is not None and self.writing.done():
            self.wait()

    def write(self, step: int, tensors: Groups, state: Mapping[str, Any]) -> None:
        """Write a checkpoint whole, then remove those that are too many."""
        try:
            write_folder(self.path(step), tensors, state)
            for old in self.steps()[: -self.keep]:
                discard(self.path(old))
        except (OSError, SafetensorError) as problem:
            good = f"; the checkpoint of step {self.steps()[-1]} is intact" if self.steps() else ""
            raise CheckpointError(
                f"cannot save the checkpoint of step {step} in {self.folder}: {problem}{good}. "
                "Make room and run the same command to continue"
            ) from problem

    def load(self, step: int) -> Saved:
        folder = self.path(step)
        try:
            state = json.loads((folder / STATE).read_text())
            tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
        except (OSError, ValueError, SafetensorError) as problem:
            raise CheckpointError(f"cannot read the checkpoint {folder}: {problem}") from problem
        return Saved(folder, tensors, state)


def complete(folder: Path) -> bool:
    """Whether a folder holds everything its state says it should."""
    try:
        sizes = json.loads((folder / STATE).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def write_folder(target: Path, tensors: Groups, state: Mapping[str, Any]) -> None:
    """Make a folder of tensors and their state in one step: under its name it is whole, or not there."""
    with whole_folder(target) as hidden:
        for name, group in tensors.items():
            save_file({key: x.detach().contiguous() for key, x in group.items()}, hidden / f"{name}.safetensors")
        sizes = {path.name: path.stat().st_size for path in sorted(hidden.iterdir())}
        (hidden / STATE).write_text(json.dumps({**state, "files": sizes}))


def copied(tensor: Tensor) -> Tensor:
    """A copy on the host, which later steps do not change."""
    return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class RandomState:
    """The random states of this process, as they were when it was taken: cheap enough for every step."""

    torch: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def taken(cls) -> "RandomState":
        cuda = torch.cuda.get_rng_state() if torch.cuda.is_available() else None
        numpy: Any = np.random.get_state(legacy=True)
        return cls(torch.get_rng_state(), cuda, random.getstate(), numpy)

    def restore(self) -> None:
        torch.set_rng_state(self.torch)
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(self.cuda)
        random.setstate(self.python)
        np.random.set_state(self.numpy)

    def packed(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """PyTorch's as tensors, Python's and numpy's for JSON."""
        tensors = {"torch": self.torch} | ({"cuda": self.cuda} if self.cuda is not None else {})
        version, words, gauss = self.python
        name, keys, *rest = self.numpy
        return tensors, {"python": [version, list(words), gauss], "numpy": [name, np.asarray(keys).tolist(), *rest]}

    @classmethod
    def unpacked(cls, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> "RandomState":
        version, words, gauss = values["python"]
        name, keys, *rest = values["numpy"]
        numpy = (name, np.asarray(keys, dtype=np.uint32), *rest)
        return cls(tensors["torch"], tensors.get("cuda"), (version, tuple(words), gauss), numpy)


def pack_optimizer(state_dict: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state dict as tensors and JSON."""
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for number, state in state_dict["state"].items():
        for name, value in state.items():
            (tensors if isinstance(value, Tensor) else values)[f"{number}.{name}"] = value
    plain = lambda value: value.item() if isinstance(value, Tensor) else value  # a learning rate on the device
    groups = [{name: plain(value) for name, value in group.items()} for group in state_dict["param_groups"]]
    return tensors, {"param_groups": groups, "values": values}


def unpack_optimizer(tensors: Mapping[str, Tensor], packed: Mapping[str, Any]) -> dict[str, Any]:
    state: dict[int, dict[str, Any]] = {}
    for key, value in {**tensors, **packed["values"]}.items():
        number, _, name = key.partition(".")
        state.setdefault(int(number), {})[name] = value
    return {"state": state, "param_groups": packed["param_groups"]}


def checksum(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """The same for the same tensors, wherever they lie: sums of their bits, which take no longer than to read them."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in tensors:
        bits = tensor.detach().contiguous().view(BITS[tensor.element_size()])
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {int(bits.sum(dtype=torch.int64))}".encode())
    return digest.hexdigest()


def refuse_other_shapes(saved: Saved, group: str, here: Mapping[str, Tensor]) -> None:
    """An error that says in one line how a checkpoint's tensors differ from those that are to take them."""
    there = saved.tensors.get(group, {})
    wrong = [f"{name} is missing" for name in here if name not in there]
    wrong += [f"{name} is not in this model" for name in there if name not in here]
    wrong += [
        f"{name} is {list(there[name].shape)} there and {list(here[name].shape)} here"
        for name in here
        if name in there and there[name].shape != here[name].shape
    ]
    if wrong:
        more = f", and {len(wrong) - 1} more differences" if len(wrong) > 1 else ""
        raise CheckpointError(f"{saved.folder} is the checkpoint of another model: {wrong[0]}{more}")


def save_broken_step(
    folder: Path,
    batches: Sequence[Any],
    weights: Mapping[str, Tensor],
    optimizer: dict[str, Any],
    figures: Mapping[str, Any],
) -> None:
    """Keep a step that went wrong for whoever wants to know why: its batches, the weights and optimizer before it, and its
    figures."""
    states, values = pack_optimizer(optimizer)
    named = {f"{number}.{name}": x for number, batch in enumerate(batches) for name, x in tensors_in(batch)}
    told = {name: metrics.finite(value) for name, value in figures.items()}
    write_folder(
        folder, {"batch": named, "weights": weights, "optimizer": states}, {"figures": told, "optimizer": values}
    )


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
