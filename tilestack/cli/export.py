"""The `export` command: a model as one GGUF file, for llama.cpp, Ollama and LM Studio."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tilestack.cli.common import JsonFile, console, progress_bar, share_the_cores, writable_file, write_json

if TYPE_CHECKING:
    from tilestack.models import Decoder, ModelConfig

SUFFIX = ".gguf"


def add_to(app: typer.Typer) -> None:
    app.command("export")(export_command)


def gguf_file(path: Path) -> Path:
    if path.suffix != SUFFIX:
        raise ValueError(f"{path}: programs know GGUF files by their ending; name one that ends in {SUFFIX}")
    return writable_file(path)


def export_command(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a run's model, a .gguf file, or smollm2.")],
    out: Annotated[Path, typer.Argument(metavar="OUT.gguf", help="The file to write.", callback=gguf_file)],
    type_: Annotated[str | None, typer.Option("--type", help="Of matrices: f32, f16, bf16, q8_0 (8 bits) or q4_0 (4 bits); all else is float32. Default: bf16, or f16 where the model is float16.", show_default=False)] = None,
    adapter: Annotated[Path | None, typer.Option(help="A folder with a LoRA adapter of the model, which becomes part of it.", show_default=False)] = None,
    pre: Annotated[str | None, typer.Option(help="llama.cpp's name of a pre-tokenizer, where none is known to cut texts as the model's does; then ids may differ.", show_default=False)] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file if it is there.")] = False,
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """Write a model and its tokenizer as a GGUF file, for llama.cpp, Ollama and LM Studio.

    [bold]tilestack export runs/chat/model chat.gguf --type q8_0[/bold] writes what `llama-server -m chat.gguf` and a Modelfile
    with the line FROM ./chat.gguf take. Families: Llama, Mistral, Mixtral, Qwen 2 and 3 (Qwen3-MoE too), Gemma 2 and 3, Phi-3
    and 4, OLMo 2, Granite, GLM-4. What GGUF or llama.cpp cannot say of a model or its tokenizer is an error that names it.
    For 4 bits with less loss, export bf16 and let llama.cpp's llama-quantize make a q4_K_M of it.
    """
    share_the_cores()
    if out.exists() and not overwrite:
        raise ValueError(f"{out} is there already; choose another name, or --overwrite to replace it")
    from tilestack import models
    from tilestack.models.checkpoints import config_of
    from tilestack.models.gguf_writer import TYPES, refuse_unwritable

    if type_ is not None and type_ not in TYPES:
        raise ValueError(f"--type is one of {', '.join(TYPES)}, not {type_!r}")
    source, config = models.locate(model), config_of(model)
    if out.exists() and out.samefile(source):
        raise ValueError(f"{out} holds the model that is read; choose another file")
    refuse_unwritable(config, type_ or "bf16")
    tokenizer, notes = tokenizer_of(source, config, pre)
    decoder, more = loaded(model, adapter)
    notes += more
    kind = type_ or default_type(decoder)
    with progress_bar() as progress:
        bar = progress.add_task("writing tensors", total=None)
        saved = models.save_gguf(
            decoder,
            out,
            type=kind,
            tokenizer=tokenizer,
            progress=lambda done, total: progress.update(bar, completed=done, total=total),
        )
    made_of = dict(model=model, out=str(out), type=kind, adapter=adapter and str(adapter), notes=notes)
    write_json(json_, made_of | dataclasses.asdict(saved))
    if str(json_) != "-":
        tensors = ", ".join(f"{count} {type}" for type, count in saved.tensors.items())
        said = [*(f"note: {note}" for note in notes), f"written to {out}: {saved.bytes / 1e6:,.1f} MB ({tensors})"]
        for line in said:
            console.print(escape(line), soft_wrap=True, highlight=False)


def tokenizer_of(source: Path, config: "ModelConfig", pre: str | None) -> tuple[dict[str, Any], list[str]]:
    """The tokenizer's part of the metadata, that of a GGUF file as it is; and what to know of it or of such a file."""
    from tilestack import data, models

    if source.suffix != SUFFIX:
        made = data.Tokenizer.load(source).to_gguf(config.vocabulary, config.eos, pre)
        return made.metadata, made.notes
    if pre is not None:
        raise ValueError(f"--pre is for tokenizers of folders; that of {source} is written as it is")
    file = models.gguf.GGUF(source)
    codes = sorted({tensor.tensor_type.name for tensor in file.stored.values()} - {"F32", "F16", "BF16"})
    notes = [f"weights of {', '.join(codes)} are written as the numbers that they stand for"] if codes else []
    return {key: value for key, value in file.metadata.items() if key.startswith("tokenizer.")}, notes


def loaded(model: str, adapter: Path | None) -> tuple["Decoder", list[str]]:
    """The model, with its adapter as part of it, and what became of its weights on the way."""
    import torch

    from tilestack import models
    from tilestack.models.adapters import load_adapters, read
    from tilestack.models.codes import dequantise
    from tilestack.nn.lora import merge_lora
    from tilestack.quant import QuantisedLinear

    if adapter is not None:
        read(adapter)  # which says what is wrong with it before the model is loaded
    # Sums of weights and adapters are rounded once, when they are written.
    decoder = models.load(model, dtype=None if adapter is None else torch.float32)
    coded = sum(isinstance(layer, QuantisedLinear) for layer in decoder.modules())
    notes = [f"{coded} layers of codes are written as the numbers that they stand for"] if coded else []
    if adapter is not None:
        dequantise(decoder)
        load_adapters(decoder, adapter)
        with torch.no_grad():
            merge_lora(decoder)
    return decoder, notes


def default_type(decoder: "Decoder") -> str:
    import torch

    return "f16" if decoder.embedding.weight.dtype == torch.float16 else "bf16"
