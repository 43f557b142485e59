"""Adapters on disk, as PEFT writes and reads them: adapter_model.safetensors and adapter_config.json.

A fused layer is several of Hugging Face's one below the other: qkv is q, k and v. An adapter of it, B A, is therefore an
adapter of each with the same A and some rows of B. The other way round, adapters trained apart have As of their own;
beside each other they are one adapter of the sum of their ranks,

    A = [A_q; A_k; A_v]        B = diag(B_q, B_k, B_v)

and where only some are adapted, the others' rows of B are zero. Parts of different alpha / rank have the difference in B.

The experts of a mixture are one parameter in transformers too. PEFT writes all of their adapters into two matrices, A
[E · r, in] and B [out, r · E], under the name of the module: gate_up as its `base_layer`, down as itself. Those of a mixture
it will not find by the names gate_proj, up_proj and down_proj, which it takes for the experts' own: dense layers and shared
experts of such a model are named as parameters, by their full paths. Adapters of each expert apart, as PEFT wrote them for
transformers 4, are read as well.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from tilestack.files import whole_folder
from tilestack.models.config import ModelConfig
from tilestack.models.decoder import Decoder
from tilestack.models.weights import Piece, layout, unfused
from tilestack.nn.lora import ExpertLoRA, add_lora, lora_layers

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
# PEFT's settings under which a layer computes something else than x W + scale · x A B, and beginnings of its ways to begin
# adapters that change W.
OTHER_SUMS = (
    "use_dora", "use_qalora", "use_bdlora", "alora_invocation_tokens", "arrow_config", "kasa_config", "monteclora_config",
    "layer_replication", "lora_bias",
)  # fmt: skip
TAKEN_FROM_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")


class AdapterError(ValueError):
    """Adapters that cannot be read or do not belong to the model."""


def save_adapters(model: Decoder, folder: Path, base: str = "") -> None:
    """Write a decoder's adapters; `base` says which model they belong to."""
    layers, pieces = lora_layers(model), layout(model.config)
    if not layers:
        raise AdapterError("the model has no adapters to save")
    tensors: dict[str, Tensor] = {}
    modules: list[str] = []
    parameters: list[str] = []
    for path, layer in layers.items():
        if isinstance(layer, ExpertLoRA):
            tensors |= saved_experts(path, layer, layers)
            parameters.append(f"{experts_of(path)}.{path.rpartition('.')[2]}_proj")
            continue
        parts = pieces[f"{path}.weight"]
        for piece, rows in zip(parts, layer.lora_B.detach().split([part.rows for part in parts]), strict=True):
            tensors[f"{name_of(piece)}.lora_A.weight"] = layer.lora_A.detach().cpu().clone()
            tensors[f"{name_of(piece)}.lora_B.weight"] = rows.cpu().contiguous()
            (parameters if is_taken_for_experts(piece, model.config) else modules).append(piece.name)
    first = next(iter(layers.values()))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": first.rank,
        "lora_alpha": first.alpha,
        "lora_dropout": 0.0 if parameters else first.dropout,  # PEFT knows none for parameters
        "target_modules": target_modules(modules, [piece.name for parts in pieces.values() for piece in parts]),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    } | ({"target_parameters": sorted(parameters)} if parameters else {})
    with whole_folder(folder) as hidden:
        save_file(tensors, hidden / WEIGHTS, metadata={"format": "pt"})
        (hidden / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def saved_experts(path: str, layer: ExpertLoRA, layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """An adapter of experts as PEFT writes it; where gate_up and down are both adapted, gate_up is the inner one."""
    mixture, _, name = path.rpartition(".")
    inner = ".base_layer" if name == "gate_up" and f"{mixture}.down" in layers else ""
    a, b = layer.lora_A.detach().cpu(), layer.lora_B.detach().cpu()
    key = f"{PREFIX}{experts_of(path)}{inner}"
    return {
        f"{key}.lora_A.weight": a.flatten(0, 1).contiguous(),
        f"{key}.lora_B.weight": b.permute(1, 2, 0).flatten(1).contiguous(),
    }


def experts_of(path: str) -> str:
    """What transformers calls the module of the experts whose parameter has this path."""
    return f"model.{path.rpartition('.')[0]}.experts"


def is_taken_for_experts(piece: Piece, config: ModelConfig) -> bool:
    return bool(config.experts) and piece.name.split(".")[-2] in ("gate_proj", "up_proj", "down_proj")


def target_modules(adapted: Sequence[str], everything: Sequence[str]) -> list[str]:
    """The last parts of the names of what is adapted; where that would name more, the names in full."""
    last = lambda name: name.split(".")[-2]
    partly = {last(name) for name in set(everything) - set(adapted)}
    return sorted({name.removesuffix(".weight") if last(name) in partly else last(name) for name in adapted})


def load_adapters(model: Decoder, folder: Path | str) -> None:
    """Give a decoder the adapters of a folder; its other parameters are frozen. `merge_lora` makes them part of it."""
    found, scale = read_adapters(model, folder)
    widest = max(a.shape[-2] for a, _ in found.values())
    layers = add_lora(model, list(found), widest, scale * widest)  # alpha / rank stays what it was
    with torch.no_grad():
        for path, (a, b) in found.items():
            layer, rank = layers[path], a.shape[-2]
            layer.lora_A.zero_()[..., :rank, :] = a
            layer.lora_B.zero_()[..., :rank] = b


def read_adapters(model: Decoder, folder: Path | str) -> tuple[dict[str, "Factors"], float]:
    """The adapters of a folder by the paths of a decoder's layers, which do not change; and the scale of their products."""
    file = AdapterFile(Path(folder))
    found: dict[str, Factors] = {}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    for name, pieces in layout(model.config).items():
        path = name.removesuffix(".weight")
        if name in shapes and len(shapes[name]) == 3:
            factors = file.experts(path, pieces, shapes[name])
        elif name.endswith(".weight") and name in shapes and len(shapes[name]) == 2:
            factors = file.fused(pieces)
        else:
            continue
        if factors is not None:
            found[path] = factors
            if (factors[0].shape[-1], factors[1].shape[-2]) != (shapes[name][-1], shapes[name][-2]):
                raise AdapterError(f"{folder}: the adapter of {path} is for a layer of another shape")
    for name, weight in unfused(model):  # PEFT keeps an adapted head beside its adapter
        file.leave_copy(f"{name_of(Piece(name, 0))}.base_layer.weight", weight)
    if file.unused:
        raise AdapterError(f"{folder}: the model has no layer for {', '.join(sorted(file.unused)[:3])}")
    if not found:
        raise AdapterError(f"{folder}: there are no adapters in {WEIGHTS}")
    return found, file.scale


Factors = tuple[Tensor, Tensor]  # A and B of one adapter, or of one for each expert


class AdapterFile:
    """What PEFT wrote. Scales that differ from that of the file are put into B."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config, self.tensors = read(folder)
        self.unused = set(self.tensors)
        self.scale = self.scale_of("", self.config["r"])

    def fused(self, pieces: Sequence[Piece]) -> Factors | None:
        """One adapter of a fused layer from those of its parts."""
        parts = [self.part(piece) for piece in pieces]
        given = [part for part in parts if part is not None]
        if not given:
            return None
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

    def part(self, piece: Piece) -> Factors | None:
        """A and B of one of Hugging Face's layers, where it is adapted."""
        module = piece.name.removesuffix(".weight")
        a, b = self.taken(PREFIX + module)
        if a is None or b is None:
            return None
        rank = self.pattern("rank_pattern", module, self.config["r"])
        if a.ndim != 2 or len(a) != rank or b.shape != (piece.rows, rank):
            raise AdapterError(f"the adapter of {piece.name} does not have rank {rank} or {piece.rows} rows")
        return a, b * (self.scale_of(module, rank) / self.scale)

    def experts(self, path: str, pieces: Sequence[Piece], shape: Sequence[int]) -> Factors | None:
        """The adapters of all experts' gate_up or down, [experts, out, in]: written together, or each apart."""
        count, out, width = shape
        for inner in (".base_layer", ""):
            key = f"{PREFIX}{experts_of(path)}{inner}"
            a, b = (self.tensors.get(f"{key}.lora_{letter}.weight") for letter in "AB")
            if a is None or b is None or (a.shape[1], b.shape[0]) != (width, out):
                continue  # not there, or those of the experts' other parameter
            self.taken(key)
            rank, module = len(a) // count, f"{experts_of(path)}.{path.rpartition('.')[2]}_proj"
            if len(a) != rank * count or b.shape[1] != len(a):
                raise AdapterError(f"the adapter of {module} is not one for each of {count} experts")
            factors = a.view(count, rank, width), b.view(out, rank, count).permute(2, 0, 1)
            return factors[0], factors[1] * (self.scale_of(module, rank) / self.scale)
        each = len(pieces) // count
        found = [self.fused(pieces[first : first + each]) for first in range(0, len(pieces), each)]
        if not any(found):
            return None
        widest = max(len(factors[0]) for factors in found if factors is not None)
        a, b = torch.zeros(count, widest, width), torch.zeros(count, out, widest)
        for expert, own in enumerate(found):
            if own is not None:
                rank = len(own[0])
                a[expert, :rank], b[expert, :, :rank] = own
        return a, b

    def taken(self, key: str) -> tuple[Tensor | None, Tensor | None]:
        names = [f"{key}.lora_{letter}.weight" for letter in "AB"]
        self.unused -= set(names)
        a, b = (self.tensors.get(name) for name in names)
        return a, b

    def leave_copy(self, name: str, weight: Tensor) -> None:
        """Pass over a tensor that is the model's own; one that differs would change the model, and stays unused. Of a weight
        that was made codes nobody can tell."""
        if name in self.unused and (weight.is_meta or torch.equal(self.tensors[name].to(weight), weight)):
            self.unused.remove(name)

    def scale_of(self, module: str, rank: int) -> float:
        """alpha / rank of a module, or alpha / √rank where the file says so."""
        alpha = self.pattern("alpha_pattern", module, self.config["lora_alpha"])
        return alpha / (math.sqrt(rank) if self.config.get("use_rslora") else rank)

    def pattern(self, kind: str, module: str, default: Any) -> Any:
        """What rank_pattern or alpha_pattern says of a module: the first pattern that its name ends in."""
        patterns = self.config.get(kind) or {}
        return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    try:
        config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as problem:
        raise AdapterError(f"{folder} holds no adapters: {problem}") from problem
    other = "peft_type" if config.get("peft_type") != "LORA" else next(filter(config.get, OTHER_SUMS), None)
    if other is not None:
        raise AdapterError(f"{folder / CONFIG}: only plain LoRA is read, and {other} is {config.get(other)!r}")
    if str(config.get("init_lora_weights")).lower().startswith(TAKEN_FROM_BASE):
        raise AdapterError(
            f"{folder / CONFIG}: init_lora_weights {config['init_lora_weights']!r} has taken the first adapters out of the base "
            "model's weights, which these do not say; save them with PEFT's path_initial_model_for_weight_conversion"
        )
    if not isinstance(config.get("r"), int) or not isinstance(config.get("lora_alpha"), int | float):
        raise AdapterError(f"{folder / CONFIG} must have numbers under r and lora_alpha")
    return config, tensors


def name_of(piece: Piece) -> str:
    return PREFIX + piece.name.removesuffix(".weight")
