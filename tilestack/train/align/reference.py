"""The frozen reference, the model as the run found it: what it says of given answers, and its weights where new answers come.

Given answers do not change, so it is asked once, before the first step, and what it says is kept on disk under a fingerprint of
model and data. Where answers are drawn anew its weights are kept beside the model's, of which a process has the same part.
"""

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilestack.files import whole_file
from tilestack.parallel.placement import Placement
from tilestack.train.evaluation.evaluate import BUDGET, batches
from tilestack.train.evaluation.log_probs import Scored, log_probs
from tilestack.train.fp8 import modules_in_fp8


def fingerprint(placement: Placement, sequences: Sequence[Scored], device: torch.device | str) -> str:
    """The same for models that compute the same, in the same precision, and sequences that ask the same."""
    digest = hashlib.blake2b(digest_size=16)
    kind = torch.device(device).type
    digest.update(str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None).encode())
    digest.update(repr(configuration(placement)).encode())
    for name in modules_in_fp8(placement.model):
        digest.update(f"{name} in fp8".encode())
    for name, tensor in placement.whole_state():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    for sequence in sequences:
        digest.update(f"{sequence.ids}{sequence.mask}".encode())
    return digest.hexdigest()


def configuration(placement: Placement) -> Any:
    """What the whole model computes with its weights, such as its RoPE, whatever part of it is here; not what ends its answers."""
    whole = placement.whole_without_weights if placement.divided else placement.model
    config = getattr(whole, "config", None)
    return config and dataclasses.replace(config, eos=())


def reference_log_probs(
    placement: Placement,
    sequences: Sequence[Scored],
    device: torch.device | str,
    folder: Path | None,
) -> Tensor:
    """log p of each sequence's scored tokens under the model as it is now, [sequences] in float64 on the CPU."""
    path = None if folder is None else folder / f"reference-{fingerprint(placement, sequences, device)}.safetensors"
    mesh = placement.mesh
    kept = read_log_probs(path) if path is not None and mesh.first else None
    if mesh.largest(int(kept is not None)):
        return mesh.from_first(torch.zeros(len(sequences), dtype=torch.float64) if kept is None else kept)
    found = shared_log_probs(placement, sequences, device)
    if path is not None and mesh.first:
        with whole_file(path) as hidden:
            save_file({"log_probs": found}, hidden)
    return found


def read_log_probs(path: Path) -> Tensor | None:
    """What is kept in a file; None where there is none, or a damaged one, so that the reference is asked again."""
    try:
        return load_file(path)["log_probs"]
    except FileNotFoundError:
        return None
    except (SafetensorError, KeyError):
        path.unlink()
        return None


@torch.no_grad()
def shared_log_probs(
    placement: Placement, sequences: Sequence[Scored], device: torch.device | str, budget: int = BUDGET
) -> Tensor:
    """The same, by all processes: those with other texts read a batch each at a time. Who finds none left reads another's
    again, since a model that is divided by rows needs all of them."""
    model, mesh = placement.model, placement.mesh
    index, ranks = mesh.index("replicas"), mesh.size("replicas")
    found = torch.zeros(len(sequences), dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    parts = batches(model, sequences, budget)
    while some := list(itertools.islice(parts, ranks)):
        numbers, rows = some[min(index, len(some) - 1)]
        sums = log_probs(model, rows.to(device)).double().sum(-1)
        if index < len(some):
            found[numbers] = sums
    model.train(was_training)
    placement.reshard()
    mesh.sum(found, "replicas")
    return found.cpu()


class FrozenWeights:
    """The weights of a model as they are when this is made; a process keeps those of the part that it has."""

    def __init__(self, placement: Placement):
        self.placement = placement
        changing = [*placement.parameters.values(), *placement.model.buffers()]
        self.both = [(now, now.detach().clone()) for now in changing]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Inside, the model has them as its weights."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        self.placement.reshard()  # what was gathered of the others
        for now, kept in self.both:
            passing = now.clone()
            now.copy_(kept)
            kept.copy_(passing)
