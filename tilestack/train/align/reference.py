"""What a frozen reference says of given answers, computed once and kept on disk under a fingerprint of model and data."""

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilestack.files import whole_file
from tilestack.train.evaluation.evaluate import score
from tilestack.train.evaluation.log_probs import Scored
from tilestack.train.fp8 import modules_in_fp8


def fingerprint(model: torch.nn.Module, sequences: Sequence[Scored], device: torch.device | str) -> str:
    """The same for models that compute the same, in the same precision, and sequences that ask the same."""
    digest = hashlib.blake2b(digest_size=16)
    kind = torch.device(device).type
    digest.update(str(torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None).encode())
    for name in modules_in_fp8(model):
        digest.update(f"{name} in fp8".encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy())
    for sequence in sequences:
        digest.update(f"{sequence.ids}{sequence.mask}".encode())
    return digest.hexdigest()


def reference_log_probs(
    model: torch.nn.Module,
    sequences: Sequence[Scored],
    device: torch.device | str,
    folder: Path | None,
) -> Tensor:
    """log p of each sequence's scored tokens under the model as it is now, [sequences] in float64 on the CPU."""
    path = None if folder is None else folder / f"reference-{fingerprint(model, sequences, device)}.safetensors"
    if path is not None and path.is_file():
        try:
            return load_file(path)["log_probs"]
        except (SafetensorError, KeyError):
            path.unlink()  # damaged: the reference is asked again
    was_training = model.training
    model.eval()
    found = torch.tensor([scored.log_prob for scored in score(model, sequences, device)], dtype=torch.float64)
    model.train(was_training)
    if path is not None:
        with whole_file(path) as hidden:
            save_file({"log_probs": found}, hidden)
    return found
