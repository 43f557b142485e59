"""The `quantize` command: a model's weights as 8 or 4 bits, in a folder of its own, and what that costs in quality."""

import dataclasses
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from tilestack.cli.common import JsonFile, console, progress_bar, share_the_cores, writable_folder, write_json
from tilestack.cli.evaluate import without_nan

if TYPE_CHECKING:
    from tilestack.quant import Scheme

SAMPLES = {"cuda": 128, "cpu": 16}  # rows of calibration text, unless some are asked for
EVALUATED = {"cuda": 16384, "cpu": 4096}  # tokens of held-out text, at most


def add_to(app: typer.Typer) -> None:
    app.command("quantize")(quantize_command)


def quantize_command(
    model: Annotated[str, typer.Argument(help="A Hugging Face folder, a run's model, a .gguf file, or smollm2.")],
    out: Annotated[Path, typer.Argument(help="The folder to write: new, empty, or one that tilestack made.", callback=writable_folder)],
    scheme: Annotated[str, typer.Option(help="w4a16, w8a16, w8a8 or fp8: bits of weights, and of inputs where rows are many.")] = "w4a16",
    method: Annotated[str | None, typer.Option(help="nearest, clip, gptq, awq or smooth; default: gptq for w4a16, smooth for w8a8, nearest for the others.", show_default=False)] = None,
    group: Annotated[int | None, typer.Option(help="Numbers of a row that share a scale, 0 for the whole row; default: 128 of w4a16, else 0.", show_default=False)] = None,
    asymmetric: Annotated[bool, typer.Option("--asymmetric", help="Give each group a zero point; for w4a16 and w8a16.")] = False,
    calibrate: Annotated[list[str] | None, typer.Option(help="Texts to calibrate on: files or folders; may be given several times.", show_default="builtin")] = None,
    samples: Annotated[int | None, typer.Option(help="Rows of calibration text; default: 128, on a CPU 16.", min=1, show_default=False)] = None,
    length: Annotated[int, typer.Option(help="Tokens of a row; at most the model's maximum.", min=2)] = 512,
    evaluate: Annotated[list[str] | None, typer.Option(help=f"Texts to compare on, of which {EVALUATED['cuda']:,} tokens are read, on a CPU {EVALUATED['cpu']:,}; may be given several times.", show_default="builtin")] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="Keep the numbers of layers whose path fits, such as 'layers.0.*' or '*.mlp.down'; may be given several times.", show_default=False)] = None,
    seed: Annotated[int, typer.Option(help="Which rows of the calibration texts are drawn.")] = 0,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: the GPU if there is one.", show_default=False)] = None,
    json_: JsonFile = None,
) -> None:  # fmt: skip
    """Quantise a model's weights, and tell what it costs: size, bits per byte and perplexity of held-out text, and how far
    its predictions move.

    [bold]tilestack quantize smollm2 small --scheme w4a16[/bold] writes a folder that `tilestack generate --model small`,
    transformers and vLLM read (compressed-tensors). Weights become codes layer by layer, each calibrated on what the layers
    before it give. Without files, calibration and comparison read Python's own sources and manual, different parts of them;
    give texts like those that the model will see.
    """
    share_the_cores()
    wanted = scheme_of(scheme, group, asymmetric)
    from tilestack import data, models
    from tilestack.data.calibration import BUILTIN, calibration_ids, texts_of
    from tilestack.device import pick_device
    from tilestack.files import whole_folder
    from tilestack.lab.bench.quantised_models import held_out_windows, kept_dtype, quality_table, size_of_decoder
    from tilestack.models.checkpoints import GENERATION
    from tilestack.models.quantise import projections, quantise
    from tilestack.models.quantise_experts import FEWEST
    from tilestack.quant.methods import METHODS, default_method, refuse_method
    from tilestack.train.evaluation.comparison import compare, remember

    method = method or default_method(wanted)
    refuse_method(method, wanted)
    if METHODS[method].statistics is None and calibrate:
        raise ValueError(f"{method} reads no calibration texts; leave --calibrate out, or choose another --method")
    place, source = pick_device(device), models.locate(model)
    samples = samples or SAMPLES[place.type]
    refuse_output(out, source)
    tokenizer = data.Tokenizer.load(model)
    decoder = models.load(model, dtype=kept_dtype(model), device=place)
    tokenizer.check_against(decoder.config.vocabulary)
    projections(decoder, wanted, ignore or ())
    length = min(length, decoder.config.positions)
    windows = held_out_windows(evaluate or [BUILTIN], tokenizer, length, EVALUATED[place.type])
    ids = None
    if METHODS[method].statistics is not None:
        ids = calibration_ids(texts_of(calibrate or [BUILTIN]), tokenizer, samples, length, seed)
    with progress_bar() as progress:
        bar = progress.add_task("reading held-out text", total=len(decoder.layers))
        reference, before = remember(decoder, windows, place), size_of_decoder(decoder)
        progress.update(bar, description="quantising layers")
        with whole_folder(out) as hidden:
            experts = quantise(
                decoder,
                wanted,
                method,
                ids,
                ignore=ignore or (),
                progress=lambda done, _: progress.update(bar, completed=done),
            )
            models.save(decoder, hidden)
            tokenizer.save(hidden)
            if (source / GENERATION).is_file():
                shutil.copyfile(source / GENERATION, hidden / GENERATION)
        progress.update(bar, description="comparing on held-out text")  # the folder is there, whatever happens now
        found, after = compare(decoder, reference, place), size_of_decoder(decoder)
    made = dict(
        model=model, out=str(out), scheme=scheme, method=method, group=wanted.group, symmetric=wanted.symmetric,
        calibration=None if ids is None else dict(texts=calibrate or [BUILTIN], samples=samples, length=length, seed=seed),
        experts=dataclasses.asdict(experts) if experts.experts else None,
        size=dict(before=dataclasses.asdict(before), after=dataclasses.asdict(after)),
        quality=dataclasses.asdict(found),
    )  # fmt: skip
    write_json(json_, without_nan(made))
    if str(json_) != "-":
        console.print(quality_table(escape(f"{model} as {scheme} by {method}"), before, after, found))
        if experts.experts and not wanted.symmetric:
            console.print("transformers does not read zero points of experts; for it, leave --asymmetric out")
        if experts.nearest:
            console.print(
                f"{experts.nearest:,} of {experts.experts:,} experts had fewer than {FEWEST} tokens of the calibration texts "
                "and are rounded to the nearest; more --samples reach more of them"
            )
        attempt = f"tilestack generate --model {shlex.quote(str(out))} 'Hello'"
        console.print(escape(f"written to {out}; try: {attempt}"), soft_wrap=True, highlight=False)


def refuse_output(out: Path, source: Path) -> None:
    """Refuse a folder that is not ours to write: one that tilestack did not make, a run, or the one that the model is read from."""
    from tilestack.files import read_marker, refuse_foreign

    refuse_foreign(out)
    if command := read_marker(out).get("command"):
        raise ValueError(f"{out} is a run of `tilestack {command}`; choose another folder")
    if out.resolve() == source.resolve() or out.resolve() in source.resolve().parents:
        raise ValueError(f"{out} holds the model that is read; choose another folder")


def scheme_of(name: str, group: int | None, asymmetric: bool) -> "Scheme":
    """The scheme of a name, with groups and zero points of one's own where it has them."""
    from tilestack.ops.weight_only import PACKED
    from tilestack.quant import SCHEMES

    if name not in SCHEMES:
        raise ValueError(f"no scheme {name!r}; choose from {', '.join(SCHEMES)}")
    found = SCHEMES[name]
    if found.activations and (group or asymmetric):
        raise ValueError(
            f"{name} has a scale for each output and no zero points; --group and --asymmetric are for w4a16 and w8a16"
        )
    if group is not None and (group < 0 or group % PACKED):  # smaller groups: scales take up what codes save
        raise ValueError(f"--group must be 0, for whole rows, or a multiple of {PACKED}, not {group}")
    changes: dict[str, Any] = {} if group is None else {"group": group}
    return dataclasses.replace(found, symmetric=not asymmetric, **changes)
