"""GGUF files out, for llama.cpp, Ollama and LM Studio.

    header      how many keys and tensors
    metadata    the configuration (gguf_metadata) and the tokenizer (data.gguf_tokenizer)
    tensors     names, shapes, types and places of all
    data        one tensor after the other, each as llama.cpp keeps it

Names and orders are those that gguf.py reads, by its tables. A tensor is made, rounded and written some rows at a time, so that
beside the model there is never more than one in memory. The file appears whole or not at all.
"""

import importlib.util
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestack.extras import MissingExtra, install_command
from tilestack.files import whole_file
from tilestack.models.codes import pieces_of_codes
from tilestack.models.config import ModelConfig
from tilestack.models.decoder import Decoder
from tilestack.models.families import FAMILIES
from tilestack.models.gguf import EXPERTS, LAYER_NAMES, NAMES, NORM_NAMES, PAIRED, hf_name, is_of_experts, pairs
from tilestack.models.gguf_config import ENDS, ROPE_TENSORS, TOKENIZER
from tilestack.models.gguf_metadata import (
    HAS_HEAD,
    architecture_of,
    ends_of_config,
    metadata_of,
    refuse_what_is_lost,
    rope_tensors,
)
from tilestack.models.shapes import shapes_alone
from tilestack.models.weights import CheckpointError, layout, unfused

TYPES = ("f32", "f16", "bf16", "q8_0", "q4_0")
ROUTER = "ffn_gate_inp"
CHUNK = 1 << 24  # numbers that are rounded at once
PHI3_TOKENS = {"<s>", "</s>", "<unk>", "<|endoftext|>"}
VOCABULARY_MATRICES = ("token_embd.weight", "output.weight")

Progress = Callable[[int, int], None]  # tensors written, and how many there are


@dataclass(frozen=True)
class Part:
    """A tensor to write: its name, shape and type in the file, and how to get it."""

    name: str
    shape: tuple[int, ...]
    type: str
    make: Callable[[], Tensor]

    @property
    def bytes(self) -> int:
        from gguf.constants import GGML_QUANT_SIZES

        block, size = GGML_QUANT_SIZES[ggml_type(self.type)]
        return torch.Size(self.shape).numel() // block * size


@dataclass(frozen=True)
class Saved:
    """What was written: how many tensors of each type, and the bytes of the file."""

    tensors: dict[str, int]
    bytes: int


@torch.no_grad()
def save_gguf(
    decoder: Decoder,
    path: str | Path,
    *,
    type: str = "bf16",
    tokenizer: Mapping[str, Any] | None = None,
    name: str | None = None,
    progress: Progress | None = None,
) -> Saved:
    """Write a model as a GGUF file, with matrices of a type (f32, f16, bf16, q8_0 or q4_0) and all else in float32.

    `tokenizer` is its part of the metadata, as `Tokenizer.to_gguf` gives it; without one, programs can load the file and do
    nothing with text. Where it names no token that ends a text, the configuration's are written. `name` is how they show it, by default the file's. Layers of codes are written as the numbers that
    they stand for. A file that is there already is replaced once the new one is whole.
    """
    path, (metadata, parts) = Path(path), contents_of(decoder, type)
    from gguf import GGUFWriter

    metadata |= tokenizer or {"tokenizer.ggml.model": "no_vocab"}
    if not any(f"{TOKENIZER}.{key}" in metadata for key in ENDS):
        metadata |= ends_of_config(decoder.config)
    metadata |= general(shown_name(name or text_of(path), metadata), type)
    refuse_other_vocabulary(metadata, decoder.config)
    with whole_file(path) as hidden:
        writer: Any = GGUFWriter(hidden, metadata.pop("general.architecture"))
        try:
            write_head(writer, hidden, metadata, parts)
            for number, part in enumerate(parts, 1):
                write_data(writer.fout[0], part)
                if progress is not None:
                    progress(number, len(parts))
        finally:
            writer.close()
        written = hidden.stat().st_size
    return Saved(dict(Counter(part.type for part in parts)), written)


def refuse_unwritable(config: ModelConfig, type: str) -> None:
    """Raise for a model that `save_gguf` would refuse, before it is loaded."""
    with shapes_alone():
        decoder = Decoder(config)
    contents_of(decoder, type)


def contents_of(decoder: Decoder, type: str) -> tuple[dict[str, Any], list[Part]]:
    """What a file holds: its metadata but for the tokenizer, and its tensors."""
    if type not in TYPES:
        raise ValueError(f"GGUF files are written in {', '.join(TYPES)}, not in {type!r}")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtra(f"writing GGUF files needs gguf: {install_command('formats')}")
    metadata, parts = metadata_of(decoder.config), list(parts_of(decoder, type))
    refuse_what_is_lost(decoder.config, metadata, {part.name: part.shape for part in parts})
    return metadata, parts


def parts_of(decoder: Decoder, wanted: str) -> Iterator[Part]:
    """The tensors of a decoder, by llama.cpp's names; those of experts, one apart in a checkpoint, are one."""
    config, coded = decoder.config, pieces_of_codes(decoder)
    names, weights = gguf_names(config), dict(unfused(decoder))
    together: dict[str, list[str]] = {}
    for pieces in layout(config).values():
        for piece in pieces:
            if piece.name not in names:
                raise CheckpointError(f"GGUF has no name for {piece.name} of a {config.family} model")
            together.setdefault(names[piece.name], []).append(piece.name)
    if config.tied and architecture_of(config) in HAS_HEAD:
        together["output.weight"] = ["model.embed_tokens.weight"]
    for name, theirs in together.items():

        def make(name: str = name, theirs: Sequence[str] = theirs) -> Tensor:
            found = [coded[each][1].numbers() if each in coded else weights[each] for each in theirs]
            whole = torch.stack(found) if is_of_experts(name) else found[0]
            return as_llama_cpp_keeps(whole, theirs[0], config)

        shape = tuple(weights[theirs[0]].shape)
        shape = (len(theirs), *shape) if is_of_experts(name) else shape
        yield Part(name, shape, type_of(name, shape, wanted), make)
    for name, factors in rope_tensors(config).items():
        yield Part(name, tuple(factors.shape), "f32", lambda factors=factors: factors)  # type: ignore[misc]


def gguf_names(config: ModelConfig) -> dict[str, str]:
    """llama.cpp's name of every tensor by Hugging Face's, from the tables that files are read by."""
    tensors = FAMILIES[config.family].tensors
    parts = [f"blk.{layer}.{part}" for layer in range(config.layers) for part in (*LAYER_NAMES, *NORM_NAMES, ROUTER)]
    plain = [f"{stem}.{kind}" for stem in (*NAMES, *parts) for kind in ("weight", "bias")]
    found = {hf_name(name, tensors): name for name in plain}
    for name in [f"blk.{layer}.{part}.weight" for layer in range(config.layers) for part in EXPERTS]:
        found |= {hf_name(name, tensors, expert): name for expert in range(config.experts)}
    return found


def as_llama_cpp_keeps(weight: Tensor, name: str, config: ModelConfig) -> Tensor:
    """What `GGUF.read` makes undone: norms with the 1 that Gemma adds to them, rows of queries and keys in pairs."""
    if name.endswith("norm.weight"):
        return weight.float() + config.norm_offset
    heads = {"q_proj": config.heads, "k_proj": config.kv_heads}.get(name.split(".")[-2])
    return pairs(weight, heads) if heads and architecture_of(config) in PAIRED else weight


def type_of(name: str, shape: Sequence[int], wanted: str) -> str:
    """Vectors and what routes tokens are float32, as llama.cpp has them; rows that are no whole blocks are float16. Where
    all else has 4 bits the matrices of the vocabulary have 8: an error in them is an error of every token."""
    if len(shape) < 2 or f".{ROUTER}." in name or name in ROPE_TENSORS:
        return "f32"
    if wanted in ("q8_0", "q4_0") and shape[-1] % 32:
        return "f16"
    return "q8_0" if wanted == "q4_0" and name in VOCABULARY_MATRICES else wanted


def ggml_type(type: str) -> Any:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType[type.upper()]


def general(name: str, type: str) -> dict[str, Any]:
    from gguf.constants import GGML_QUANT_VERSION, LlamaFileType

    kind = LlamaFileType.ALL_F32 if type == "f32" else LlamaFileType[f"MOSTLY_{type.upper()}"]
    said: dict[str, Any] = {"general.type": "model", "general.name": name, "general.file_type": int(kind)}
    return said | ({"general.quantization_version": GGML_QUANT_VERSION} if type.startswith("q") else {})


def text_of(path: Path) -> str:
    """A file's name without its suffix; bytes in it that are no text are shown as such."""
    return os.fsencode(path.stem).decode(errors="replace")


def shown_name(name: str, metadata: Mapping[str, Any]) -> str:
    """llama.cpp knows by its name a model with Phi-3's tokens, after which spaces do not count: one without them would not
    load by such a name, and one that has them would keep the spaces by another."""
    named = re.search("phi-?3", name, re.IGNORECASE)
    has = PHI3_TOKENS.issubset(metadata.get("tokenizer.ggml.tokens", ()))
    if named and not has:
        return re.sub("(phi)-?(3)", r"\1 \2", name, flags=re.IGNORECASE)
    return f"{name} (Phi-3)" if has and not named and metadata["general.architecture"] == "phi3" else name


def refuse_other_vocabulary(metadata: Mapping[str, Any], config: ModelConfig) -> None:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) != config.vocabulary:
        raise CheckpointError(
            f"the tokenizer names {len(tokens)} tokens, the model knows {config.vocabulary}; "
            "a GGUF file names each of the model's once"
        )


def write_head(writer: Any, path: Path, metadata: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """Everything before the data."""
    import numpy as np

    for key, value in metadata.items():
        if value != []:  # which the format has no type for
            writer.add_key_value(key, value, *value_types(value))
    for part in parts:
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), part.bytes, raw_dtype=ggml_type(part.type))
    needed = sum(part.bytes for part in parts)
    if (free := shutil.disk_usage(path.parent).free) < needed:
        raise CheckpointError(
            f"{path.parent} has {free / 1e6:,.1f} MB left, and the file takes more than {needed / 1e6:,.1f} MB"
        )
    writer.write_header_to_file(path=path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(writer.fout[0], writer.fout[0].tell())


def value_types(value: Any) -> tuple[Any, ...]:
    """The type of a value in a file, and of a list that of what is in it."""
    from gguf import GGUFValueType as Type

    if isinstance(value, list):
        inner = value_types(value[0])[0]
        return Type.ARRAY, Type.INT32 if inner == Type.UINT32 else inner
    kinds = {bool: Type.BOOL, int: Type.UINT32, float: Type.FLOAT32, str: Type.STRING}
    return (kinds[value.__class__],)


def write_data(file: Any, part: Part) -> None:
    """A tensor, some of its rows at a time, and zeros up to where the next begins."""
    from gguf.constants import GGUF_DEFAULT_ALIGNMENT

    tensor = part.make()
    rows = tensor.reshape(1, -1) if tensor.ndim < 2 else tensor.flatten(0, -2)
    for some in rows.split(max(1, CHUNK // max(rows.shape[1], 1))):
        file.write(memoryview(rounded(some.cpu(), part)).cast("B"))
    file.write(bytes(-part.bytes % GGUF_DEFAULT_ALIGNMENT))


def rounded(rows: Tensor, part: Part) -> Any:
    """The bytes of some rows, as an array."""
    from gguf.quants import quantize

    if not torch.isfinite(rows).all():
        raise CheckpointError(f"{part.name} holds numbers that are not finite")
    if part.type == "bf16":
        return rows.bfloat16().contiguous().view(torch.int16).numpy()
    if part.type == "f16":
        half = rows.half().contiguous()
        if not torch.isfinite(half).all():
            raise CheckpointError(f"{part.name} holds numbers that float16 has not; choose bf16 or f32")
        return half.numpy()
    return quantize(rows.float().contiguous().numpy(), ggml_type(part.type))
