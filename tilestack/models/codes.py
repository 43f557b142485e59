"""Layers of codes in and out: between the tensors of a quantised checkpoint and a decoder's fused layers.

A checkpoint quantises q, k and v one by one, and here they are rows of one matrix; so are their codes and scales. It
quantises each projection of each expert, and here all experts' gate and up are one stack of matrices, and all their down.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilestack.models.decoder import Decoder
from tilestack.models.quantised_config import written_config
from tilestack.models.weights import CheckpointError, Piece, Source, layout, mismatches, unfused
from tilestack.nn import Linear, MoE, Router
from tilestack.quant import Codes, QuantisedLinear
from tilestack.quant.experts import PROJECTIONS, QuantisedMoE, put_codes
from tilestack.quant.formats import CodeFormat, Kept, PackedCodes, PlainCodes, format_of_scheme, written_format
from tilestack.quant.linear import quantise_linear

PLAIN = ("F64", "F32", "BF16", "F16")  # dtypes of numbers, as safetensors calls them
# Tensors that are not needed: static scales of a layer's inputs, as scales of inputs are found as they come, and, of the
# attention that it is in, of keys and values.
UNUSED = ("input_scale", "input_zero_point", "activation_scale")
UNUSED_ABOVE = ("k_scale", "v_scale")
EVERY_EXPERT = r"re:.*\.experts\..*"


@dataclass(frozen=True)
class StoredCodes:
    """A parameter of a decoder's linear layer, or of its experts, as codes that lie in a source."""

    name: str
    pieces: Sequence[Piece]
    inner: int
    format: CodeFormat

    @property
    def tensors(self) -> dict[str, Kept]:
        return {
            name: kept for piece in self.pieces for name, kept in tensors_of(piece, self.inner, self.format).items()
        }

    def unused(self, source: Source, expected: Mapping[str, Kept]) -> set[str]:
        """Tensors of these layers that are not needed; also biases of zeros, which GPTQ's files have of every layer."""
        given, found = source.names(), set()
        for piece in self.pieces:
            above, bias = piece.layer.rpartition(".")[0], f"{piece.layer}.bias"
            found |= {f"{piece.layer}.{name}" for name in UNUSED} | {f"{above}.{name}" for name in UNUSED_ABOVE}
            if bias in given and bias not in expected and source.dtype(bias) in PLAIN and not source.read(bias).any():
                found.add(bias)
        return {name for name in found if name in given}

    def put_into(self, decoder: Decoder, source: Source, dtype: torch.dtype, device: torch.device | str) -> None:
        """Make the parameter's layer one of these codes, on a device, for inputs of a dtype."""
        path, _, attribute = self.name.rpartition(".")
        layer = decoder.get_submodule(path)
        codes = joined(
            (self.read(piece, source) for piece in self.pieces), sum(piece.rows for piece in self.pieces), device
        )
        scheme = replace(self.format.scheme, symmetric=codes.zero is None)
        weight = torch.nn.Parameter(getattr(layer, attribute).to(dtype), requires_grad=False)
        setattr(layer, attribute, weight)
        if isinstance(layer, MoE):
            put_codes(layer, attribute, scheme, codes.each(lambda rows: rows.unflatten(0, weight.shape[:2])))
        else:
            assert isinstance(layer, Linear)
            quantise_linear(layer, scheme, codes)

    def read(self, piece: Piece, source: Source) -> Codes:
        given = {name.rpartition(".")[2]: name for name in tensors_of(piece, self.inner, self.format)}
        try:
            found = {kind: source.read(name) for kind, name in given.items() if name in source.names()}
            return self.format.codes(found, piece.rows, self.inner)
        except ValueError as problem:
            raise CheckpointError(f"{piece.layer}: {problem}") from problem


def joined(parts: Iterable[Codes], rows: int, device: torch.device | str) -> Codes:
    """Codes of so many rows from those of matrices that lie one below the other, which are let go one by one."""
    made: list[Tensor | None] = []
    first = 0
    for codes in parts:
        made = made or [
            None if each is None else torch.empty((rows, *each.shape[1:]), dtype=each.dtype, device=device)
            for each in codes
        ]
        for whole, part in zip(made, codes, strict=True):
            if whole is not None and part is not None:
                whole[first : first + len(part)].copy_(part)
        first += len(codes.codes)
    return Codes(*made)  # type: ignore[arg-type]


def tensors_of(piece: Piece, inner: int, format: CodeFormat) -> dict[str, Kept]:
    return {f"{piece.layer}.{kind}": kept for kind, kept in format.tensors(piece.rows, inner).items()}


def stored_codes(decoder: Decoder, source: Source, formats: Sequence[CodeFormat]) -> dict[str, StoredCodes]:
    """The parameters that a source has as codes of some formats, by their names; an error for what cannot be read as such."""
    if not formats:
        return {}
    found = {}
    parameters = dict(decoder.named_parameters())
    for name, pieces in layout(decoder.config).items():
        inner = parameters[name].shape[-1]
        coded = {piece for piece in pieces if has_codes(piece, inner, source, formats)}
        if not coded:
            continue
        one = next(piece for piece in pieces if piece in coded)
        if not is_projection(decoder, name):
            raise CheckpointError(
                f"{one.layer} holds codes, and of these only the projections of attention, feed-forward layers and experts "
                "are read; take a checkpoint that leaves out the others, or the model that it was made from"
            )
        kept = {piece: format_of(piece, inner, source, formats) for piece in coded}
        whole = {piece for piece, (faults, _) in kept.items() if not faults}
        _, own = kept[next((piece for piece in pieces if piece in whole), one)]
        for piece in pieces:
            # One that fits nothing, or of which there is nothing, is broken and not kept in another way: what it lacks is said.
            if (piece.name in source.names() and piece not in coded) or (piece in whole and kept[piece] != (0, own)):
                raise CheckpointError(different(one, piece))
            if reason := own.refused(piece.rows, inner):
                raise CheckpointError(f"{piece.layer} cannot be read: {reason}")
        found[name] = StoredCodes(name, pieces, inner, own)
    return found


def is_projection(decoder: Decoder, name: str) -> bool:
    """Whether a parameter is the weight of a linear layer other than the head, or of experts."""
    path, _, attribute = name.rpartition(".")
    layer = decoder.get_submodule(path)
    if isinstance(layer, MoE):
        return attribute in PROJECTIONS
    return isinstance(layer, Linear) and attribute == "weight" and path != "head"


def has_codes(piece: Piece, inner: int, source: Source, formats: Sequence[CodeFormat]) -> bool:
    """Whether a source has a weight as codes, or as some of their tensors."""
    given = source.names()
    if not piece.name.endswith(".weight") or (piece.name in given and source.dtype(piece.name) in PLAIN):
        return False
    return any(name in given for format in formats for name in tensors_of(piece, inner, format))


def format_of(piece: Piece, inner: int, source: Source, formats: Sequence[CodeFormat]) -> tuple[int, CodeFormat]:
    """How many things keep a layer and its tensors from fitting a format, and the format: the first that they fit, or the one
    that they are closest to, whose misfits will be named."""

    def faults(format: CodeFormat) -> int:
        misfits = mismatches(tensors_of(piece, inner, format), source)
        return sum(map(len, misfits.values())) + bool(format.refused(piece.rows, inner))

    return min(((faults(format), format) for format in formats), key=lambda found: found[0])


def different(one: Piece, other: Piece) -> str:
    return (
        f"{one.layer} and {other.layer} are kept in different ways, and here they are one matrix; take a checkpoint that "
        "quantises both alike"
    )


def pieces_of_codes(decoder: Decoder) -> dict[str, tuple[PlainCodes | PackedCodes, Codes]]:
    """The codes of a decoder's layers and how they are written, by the Hugging Face names of the weights they stand for."""
    found = {}
    for name, pieces in layout(decoder.config).items():
        path, _, attribute = name.rpartition(".")
        layer = decoder.get_submodule(path)
        if isinstance(layer, QuantisedLinear) and attribute == "weight":
            for piece, codes in zip(pieces, layer.kept.split([piece.rows for piece in pieces]), strict=True):
                found[piece.name] = written_format(layer.scheme, codes), codes
        elif isinstance(layer, QuantisedMoE) and attribute in layer.stacks:
            below = layer.stacks[attribute].each(lambda stack: stack.flatten(0, 1))
            for piece, codes in zip(pieces, below.split([piece.rows for piece in pieces]), strict=True):
                found[piece.name] = format_of_scheme(layer.schemes[attribute]), codes
    return found


def dequantise(decoder: Decoder) -> None:
    """Give layers of codes the weights that they stand for, in place and in float32, as adapters need them."""
    for layer in decoder.modules():
        if isinstance(layer, QuantisedLinear):
            weight = layer.kept.numbers()
            layer.__class__ = Linear  # type: ignore[assignment]
            layer.weight = torch.nn.Parameter(weight)


def written_tensors(decoder: Decoder) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a decoder's checkpoint: its weights, views of them, and its codes, packed anew."""
    coded = pieces_of_codes(decoder)
    for name, weight in unfused(decoder):
        layer = name.removesuffix(".weight")
        if name in coded:
            format, codes = coded[name]
            try:
                yield from ((f"{layer}.{kind}", tensor) for kind, tensor in format.pack(codes).items())
            except ValueError as problem:
                raise CheckpointError(f"{layer} cannot be written: {problem}") from problem
        elif weight.is_meta:
            raise CheckpointError(
                f"{layer} has no weight to write: an engine has packed it for a CPU or put adapters beside it"
            )
        else:
            yield name, weight


def quantization_config_of(decoder: Decoder) -> dict[str, Any] | None:
    """What a config.json says of a decoder's codes; None where it has none."""
    formats = {name: format for name, (format, _) in pieces_of_codes(decoder).items()}
    if not formats:
        return None
    coded: dict[str, PlainCodes | PackedCodes] = {}
    ignored = {"lm_head"}  # in other libraries it is a layer of its own where it is tied, too
    experts: dict[str, PlainCodes | PackedCodes | None] = {}  # by patterns of their names; None of plain weights
    for name, pieces in layout(decoder.config).items():
        path, _, attribute = name.rpartition(".")
        layer = decoder.get_submodule(path)
        if isinstance(layer, MoE) and attribute in PROJECTIONS:
            experts[pattern_of_experts(pieces)] = formats.get(pieces[0].name)
        elif attribute == "weight" and isinstance(layer, Linear | Router):
            coded |= {piece.layer: formats[piece.name] for piece in pieces if piece.name in formats}
            ignored |= {piece.layer for piece in pieces if piece.name not in formats}
    if len({*experts.values()}) == 1:
        experts = {EVERY_EXPERT: next(iter(experts.values()))}
    coded |= {pattern: format for pattern, format in experts.items() if format is not None}
    return written_config(coded, ignored | {pattern for pattern, format in experts.items() if format is None})


def pattern_of_experts(pieces: Sequence[Piece]) -> str:
    """A regular expression, as compressed-tensors marks it, for the layers that are one parameter of all experts."""
    block, _, _ = pieces[0].layer.partition(".experts.")
    names = dict.fromkeys(piece.layer.rpartition(".")[2] for piece in pieces)
    return rf"re:{re.escape(block)}\.experts\.\d+\.({'|'.join(names)})"
