"""Weights in and out: between the tensors of a Hugging Face checkpoint and a decoder's fused parameters.

Every parameter of ours, seen as rows, is some of theirs one below the other: qkv is q, k and v; gate_up is gate and up;
all experts' gate_up is gate and up of expert 0, of expert 1, and so on. `layout` lists the pieces of each parameter, and
both ways follow it. Where a layer is codes, each of their tensors is several: its codes, their scales and so on (codes.py).
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tilestack.models.config import ModelConfig
from tilestack.models.decoder import Decoder
from tilestack.models.families import FAMILIES
from tilestack.models.keys import shown
from tilestack.nn import Router
from tilestack.quant.formats import Kept

if TYPE_CHECKING:
    from tilestack.models.codes import StoredCodes

FEW = 5  # tensors that an error names before it counts the others
LONGEST_NAME = 200  # of a tensor or file that an error writes out


class CheckpointError(ValueError):
    """A checkpoint that cannot be read or written, or does not hold what it should; the message says what is still good."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a checkpoint and how many rows of a parameter it is."""

    name: str
    rows: int

    @property
    def layer(self) -> str:
        """The name of the module whose weight it is."""
        return self.name.removesuffix(".weight")


class Source(Protocol):
    """Where tensors come from, by their Hugging Face names."""

    def names(self) -> Collection[str]: ...  # in which looking one up takes no time
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...  # as safetensors calls it
    def read(self, name: str) -> Tensor: ...


def layout(config: ModelConfig, fused: Collection[str] | None = None) -> dict[str, list[Piece]]:
    """The pieces of every parameter, by its name in the decoder; in the order of a Hugging Face model. `fused` are those of
    our fused projections that are one piece, by default as the family keeps them."""
    tensors = FAMILIES[config.family].tensors
    fused = tensors.fused if fused is None else fused
    found = {"embedding.weight": [Piece("model.embed_tokens.weight", config.vocabulary)]}
    for layer in range(config.layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        attention = latent_attention_layout(config) if config.kv_rank else attention_layout(config, fused)
        sparse = config.sparse(layer)
        block = tensors.experts_block if sparse else "mlp"
        mlp = experts_layout(config, fused) if sparse else mlp_layout(config.intermediate, config, fused, "")
        for name, pieces in attention.items():
            found[f"{ours}.attention.{name}"] = [Piece(f"{theirs}.self_attn.{p.name}", p.rows) for p in pieces]
        for name, pieces in mlp.items():
            found[f"{ours}.mlp.{name}"] = [Piece(f"{theirs}.{block}.{p.name}", p.rows) for p in pieces]
        for name in ("attention_norm", "mlp_norm") * config.pre_norms:
            found[f"{ours}.{name}.weight"] = [Piece(f"{theirs}.{tensors.norms[name]}.weight", config.hidden)]
        for name in ("attention_post_norm", "mlp_post_norm") * config.post_norms:
            found[f"{ours}.{name}.weight"] = [Piece(f"{theirs}.{tensors.norms[name]}.weight", config.hidden)]
    found["norm.weight"] = [Piece("model.norm.weight", config.hidden)]
    if not config.tied:
        found["head.weight"] = [Piece("lm_head.weight", config.vocabulary)]
    return found


def rows_of_matrices(config: ModelConfig) -> dict[str, list[int]]:
    """The rows of each matrix in every parameter that is made of several, by its name in the decoder."""
    pieces = layout(config, fused=())
    return {name: [piece.rows for piece in some] for name, some in pieces.items() if len(some) > 1}


def attention_layout(config: ModelConfig, fused: Collection[str]) -> dict[str, list[Piece]]:
    sizes = [("q", config.heads), ("k", config.kv_heads), ("v", config.kv_heads)]
    if "qkv" in fused:
        sizes = [("qkv", config.heads + 2 * config.kv_heads)]
    found = {
        f"qkv.{kind}": [Piece(f"{name}_proj.{kind}", heads * config.head_dim) for name, heads in sizes]
        for kind in ("weight", *(["bias"] if config.qkv_bias else []))
    }
    for kind in ("weight", *(["bias"] if config.output_bias else [])):
        found[f"output.{kind}"] = [Piece(f"o_proj.{kind}", config.hidden)]
    for name, heads in (("q_norm", config.heads), ("k_norm", config.kv_heads)) if config.qk_norm else ():
        found[f"{name}.weight"] = [
            Piece(f"{name}.weight", config.head_dim * (heads if config.qk_norm == "projection" else 1))
        ]
    return found


def latent_attention_layout(config: ModelConfig) -> dict[str, list[Piece]]:
    queries = config.heads * config.head_dim
    down = Piece("q_a_proj.weight", config.q_rank) if config.q_rank else Piece("q_proj.weight", queries)
    found = {
        "qkv.weight": [down, Piece("kv_a_proj_with_mqa.weight", config.kv_rank + config.rope_dim)],
        "kv_norm.weight": [Piece("kv_a_layernorm.weight", config.kv_rank)],
        "kv_up.weight": [Piece("kv_b_proj.weight", config.heads * (config.nope_dim + config.value_dim))],
        "output.weight": [Piece("o_proj.weight", config.hidden)],
    }
    if config.q_rank:
        found["q_norm.weight"] = [Piece("q_a_layernorm.weight", config.q_rank)]
        found["q_up.weight"] = [Piece("q_b_proj.weight", queries)]
    return found


def mlp_layout(intermediate: int, config: ModelConfig, fused: Collection[str], prefix: str) -> dict[str, list[Piece]]:
    sizes = [("gate", intermediate), ("up", intermediate)]
    if "gate_up" in fused:
        sizes = [("gate_up", 2 * intermediate)]
    found = {}
    for kind in ("weight", *(["bias"] if config.mlp_bias else [])):
        found[f"gate_up.{kind}"] = [Piece(f"{prefix}{name}_proj.{kind}", rows) for name, rows in sizes]
        found[f"down.{kind}"] = [Piece(f"{prefix}down_proj.{kind}", config.hidden)]
    return found


def experts_layout(config: ModelConfig, fused: Collection[str]) -> dict[str, list[Piece]]:
    names = FAMILIES[config.family].tensors.expert
    gate, up, down = (lambda expert, name=name: f"experts.{expert}.{name}.weight" for name in names)
    width, every = config.expert_intermediate, range(config.experts)
    found = {
        "router.weight": [Piece("gate.weight", config.experts)],
        "gate_up": [Piece(name(expert), width) for expert in every for name in (gate, up)],
        "down": [Piece(down(expert), config.hidden) for expert in every],
    }
    if config.shared_intermediate:
        shared = mlp_layout(config.shared_intermediate, config, fused, "shared_experts.")
        found |= {f"shared.{name}": pieces for name, pieces in shared.items()}
    return found


def fill(
    decoder: Decoder,
    source: Source,
    dtype: torch.dtype | None,
    device: torch.device | str,
    filled: Callable[[str, torch.nn.Module], None] | None = None,
    codes: "Mapping[str, StoredCodes] | None" = None,
) -> None:
    """Give a decoder that lies on `meta` its parameters, one piece at a time, in the source's dtype or the one given.
    `filled` gets every module with its path as soon as it has its own, so that it can be made smaller before the next is
    read. `codes` are the parameters that the source has as codes, which stay codes."""
    parameters, pieces, codes = dict(decoder.named_parameters()), layout(decoder.config), codes or {}
    refuse_mismatch(parameters, pieces, source, decoder.config, codes)
    for name, parameter in parameters.items():
        if name in codes:
            codes[name].put_into(decoder, source, dtype or decoder.embedding.weight.dtype, device)
            continue
        made = torch.empty(0)
        row = 0
        path, _, attribute = name.rpartition(".")
        module = decoder.get_submodule(path)
        for piece in pieces[name]:
            tensor = source.read(piece.name)
            if not tensor.is_floating_point() or tensor.element_size() < 2:
                raise CheckpointError(f"{piece.name} is {tensor.dtype}: quantised weights are not read here")
            if row == 0:
                kept = dtype or tensor.dtype
                kept = torch.promote_types(kept, torch.float32) if isinstance(module, Router) else kept
                made = torch.empty(parameter.shape, dtype=kept, device=device)
            as_rows(made)[row : row + piece.rows].copy_(tensor)
            row += piece.rows
        setattr(module, attribute, torch.nn.Parameter(made, parameter.requires_grad))
        if filled is not None and not any(each.is_meta for each in module.parameters(recurse=False)):
            filled(path, module)
    decoder.rotary.rebuild(device)


def refuse_more_than_there_is(config: ModelConfig, source: Source) -> None:
    """Raise before a decoder is built for layers or experts of which a checkpoint cannot have the tensors."""
    tensors = len(source.names())
    sparse = sum(config.sparse(layer) for layer in range(config.layers))
    for field, needed in (("layers", config.layers), ("experts", sparse * config.experts)):
        if needed > tensors:
            raise CheckpointError(
                f"{config.spelt(field)} is {getattr(config, field)}, but there are no more than {tensors} tensors"
            )


def as_rows(parameter: Tensor) -> Tensor:
    return parameter.flatten(0, -2) if parameter.ndim > 2 else parameter


def refuse_mismatch(
    parameters: Mapping[str, Tensor],
    pieces: Mapping[str, list[Piece]],
    source: Source,
    config: ModelConfig,
    codes: "Mapping[str, StoredCodes]",
) -> None:
    """One error for all that is missing, too much, or of another shape."""
    expected: dict[str, Kept] = {}
    for name, some in pieces.items():
        of_row = parameters[name].shape[1:][-1:]
        plain = {piece.name: Kept(((piece.rows, *of_row),)) for piece in some}
        expected |= codes[name].tensors if name in codes else plain
    spare = {name for name in source.names() if name.endswith("rotary_emb.inv_freq")}
    spare |= {"lm_head.weight"} if config.tied else set()
    spare |= {name for stored in codes.values() for name in stored.unused(source, expected)}
    problems = mismatches(expected, source)
    problems["unexpected"] = sorted({*source.names()} - expected.keys() - spare)
    if said := [f"{len(names)} {kind}: {shortened(names)}" for kind, names in problems.items() if names]:
        raise CheckpointError("the tensors do not fit the configuration; " + "; ".join(said))


def mismatches(expected: Mapping[str, Kept], source: Source) -> dict[str, list[str]]:
    """What is not as it should be, by the kind of fault."""
    given = source.names()
    here = {name: kept for name, kept in expected.items() if name in given}
    one_of = lambda values: " or ".join(map(str, values))
    return {
        "missing": [name for name, kept in expected.items() if kept.needed and name not in given],
        "unexpected": [],
        "of the wrong shape": [
            f"{name} is {source.shape(name)} instead of {one_of(kept.shapes)}"
            for name, kept in here.items()
            if source.shape(name) not in kept.shapes
        ],
        "of the wrong dtype": [
            f"{name} is {source.dtype(name)} instead of {one_of(kept.dtypes)}"
            for name, kept in here.items()
            if kept.dtypes and source.dtype(name) not in kept.dtypes
        ],
    }


def shortened(names: list[str]) -> str:
    """A few names for a message, which stays one line whatever a file calls its tensors."""
    few = [name if name.isprintable() and len(name) < LONGEST_NAME else shown(name) for name in names[:FEW]]
    return ", ".join(few) + (f" and {len(names) - FEW} more" if len(names) > FEW else "")


def unfused(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The decoder's weights under their Hugging Face names; views of its parameters, no copies."""
    parameters = dict(decoder.named_parameters())
    for name, pieces in layout(decoder.config).items():
        rows = as_rows(parameters[name].detach()).split([piece.rows for piece in pieces])
        yield from ((piece.name, part) for piece, part in zip(pieces, rows, strict=True))


def sharded(tensors: Iterable[tuple[str, Tensor]], most: int) -> list[dict[str, Tensor]]:
    """Tensors in files of at most `most` bytes, in their order; one that is larger has a file of its own."""
    files: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors:
        size = math.prod(tensor.shape) * tensor.element_size()
        if files[-1] and filled + size > most:
            files.append({})
            filled = 0
        files[-1][name] = tensor
        filled += size
    return files
