"""Adapters on disk, as PEFT writes and reads them: adapter_model.safetensors and adapter_config.json.

A fused layer is several of Hugging Face's one below the other: qkv is q, k and v. An adapter of it, B A, is therefore an
adapter of each with the same A and some rows of B. The other way round, adapters trained apart have As of their own;
beside each other they are one adapter of the sum of their ranks,

    A = [A_q; A_k; A_v]        B = diag(B_q, B_k, B_v)

and where only some are adapted, the others' rows of B are zero.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilestack.files import whole_folder
from tilestack.models.decoder import Decoder
from tilestack.models.weights import Piece, layout
from tilestack.nn.lora import add_lora, lora_layers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


class AdapterError(ValueError):
    """Adapters that cannot be read or do not belong to the model."""


def save_adapters(model: Decoder, folder: Path, base: str = "") -> None:
    """Write a decoder's adapters; `base` says which model they belong to."""
    layers, pieces = lora_layers(model), layout(model.config)
    if not layers:
        raise AdapterError("the model has no adapters to save")
    tensors: dict[str, Tensor] = {}
    for path, layer in layers.items():
        parts = pieces[f"{path}.weight"]
        for piece, rows in zip(parts, layer.lora_B.detach().split([part.rows for part in parts]), strict=True):
            tensors[f"{name_of(piece)}.lora_A.weight"] = layer.lora_A.detach().cpu().clone()
            tensors[f"{name_of(piece)}.lora_B.weight"] = rows.cpu().contiguous()
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": first.dropout,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    with whole_folder(folder) as hidden:
        save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
        (hidden / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def load_adapters(model: Decoder, folder: Path | str) -> None:
    """Give a decoder the adapters of a folder; its other parameters are frozen. `merge_lora` makes them part of it."""
    config, tensors = read(Path(folder))
    rank, alpha = config["r"], config["lora_alpha"]
    unused = set(tensors)
    adapted = {}
    for name, pieces in layout(model.config).items():
        parts = [part_of(piece, tensors, rank) for piece in pieces]
        if any(part is not None for part in parts):
            adapted[name.removesuffix(".weight")] = fused(parts, pieces, name, folder)
            unused -= {f"{name_of(piece)}.lora_{letter}.weight" for piece in pieces for letter in "AB"}
    if unused:
        raise AdapterError(f"{folder}: the model has no layer for {', '.join(sorted(unused)[:3])}")
    if not adapted:
        raise AdapterError(f"{folder}: there are no adapters in {WEIGHTS}")
    widest = max(len(a) for a, _ in adapted.values())
    layers = add_lora(model, list(adapted), widest, alpha * widest / rank)  # alpha / rank stays what it was
    with torch.no_grad():
        for path, (a, b) in adapted.items():
            layer = layers[path]
            if a.shape[1] != layer.in_features or b.shape[0] != layer.out_features:
                raise AdapterError(f"{folder}: the adapter of {path} is for a layer of another shape")
            layer.lora_A.zero_()[: len(a)] = a
            layer.lora_B.zero_()[:, : len(a)] = b


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as problem:
        raise AdapterError(f"{folder} holds no adapters: {problem}") from problem
    if config.get("peft_type") != "LORA" or config.get("use_dora") or config.get("use_rslora"):
        raise AdapterError(f"{folder / CONFIG}: only plain LoRA is read, without DoRA or rank-stabilised scaling")
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise AdapterError(f"{folder / CONFIG} must have numbers under r and lora_alpha")
    return config, tensors


def name_of(piece: Piece) -> str:
    return PREFIX + piece.name.removesuffix(".weight")


def part_of(piece: Piece, tensors: dict[str, Tensor], rank: int) -> tuple[Tensor, Tensor] | None:
    """A and B of one of Hugging Face's layers, where it is adapted."""
    a, b = (tensors.get(f"{name_of(piece)}.lora_{letter}.weight") for letter in "AB")
    if a is None or b is None:
        return None
    if a.ndim != 2 or len(a) != rank or b.shape != (piece.rows, rank):
        raise AdapterError(f"the adapter of {piece.name} does not have rank {rank} or {piece.rows} rows")
    return a, b


def fused(
    parts: list[tuple[Tensor, Tensor] | None], pieces: list[Piece], name: str, folder: Path | str
) -> tuple[Tensor, Tensor]:
    """One adapter of a fused layer from those of its parts."""
    if not name.endswith(".weight"):
        raise AdapterError(f"{folder}: adapters of experts are not supported, and {name} is theirs")
    given = [part for part in parts if part is not None]
    alike = all(torch.equal(part[0], given[0][0]) for part in given)
    a = given[0][0] if alike else torch.cat([part[0] for part in given])
    rows, first = [], 0
    for part, piece in zip(parts, pieces, strict=True):
        b = a.new_zeros(piece.rows, len(a))
        if part is not None:
            b[:, first : first + len(part[0])] = part[1]
            first += 0 if alike else len(part[0])
        rows.append(b)
    return a, torch.cat(rows)
