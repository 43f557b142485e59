"""`tilestack profile`: which kernels an operator, a layer or an engine's steps run, whose they are, and what each takes."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tilestack.cli.common import (
    Device,
    JsonFile,
    Load,
    console,
    kernel_device,
    load_files,
    pick_dtypes,
    refuse_ignored_options,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    import torch

WARM_UP = 3  # calls before those that are recorded
EVERYWHERE = ("device", "dtype", "most", "trace", "json", "load")
OF_OPERATORS = (*EVERYWHERE, "backend", "case", "direction", "calls")
# What is profiled besides operators, and the options that each reads.
PARTS = {
    "layers": (*EVERYWHERE, "recipe", "candidate", "direction", "batch", "prompt", "calls"),
    "serve": (*EVERYWHERE, "model", "batch", "prompt", "tokens"),
}


def add_to(app: typer.Typer) -> None:
    app.command("profile")(profile_command)


def profile_command(
    context: typer.Context,
    what: Annotated[list[str], typer.Argument(help="An operator's name, or: layers [NAME], serve.")],
    device: Device = None,
    backend: Annotated[str | None, typer.Option(help="Of an operator: its backend; default: what auto takes.", show_default=False)] = None,
    case: Annotated[str | None, typer.Option(help="Of an operator: a case that `tilestack ops NAME` lists; default: its first.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU; of serve, as the engine takes it.", show_default=False)] = None,
    direction: Annotated[str, typer.Option(help="Of operators and layers: forward or both.")] = "both",
    recipe: Annotated[str, typer.Option(help="Of layers: the recipe of the model.")] = "demo",
    candidate: Annotated[str, typer.Option(help="Of layers: tilestack, plain, transformers, or …-compile.")] = "tilestack",
    model: Annotated[str, typer.Option(help="Of serve: a model's folder, file or name.")] = "smollm2",
    batch: Annotated[int, typer.Option(min=1, help="Of layers and serve: sequences.")] = 8,
    prompt: Annotated[int, typer.Option(min=1, help="Of layers and serve: tokens of each sequence.")] = 256,
    tokens: Annotated[int, typer.Option(min=2, help="Of serve: tokens to decode.")] = 16,
    calls: Annotated[int, typer.Option(min=1, help="Of operators and layers: calls to record.")] = 5,
    most: Annotated[int, typer.Option(min=1, help="Show at most so many lines.")] = 15,
    trace: Annotated[Path | None, typer.Option(help="Also write a trace for https://ui.perfetto.dev to this file; of serve, of decoding.", callback=writable_file, show_default=False)] = None,
    json_: JsonFile = None,
    load: Load = None,
) -> None:  # fmt: skip
    """Profile an operator, a layer or serving: which kernels run, whose they are (tilestack, cuBLAS, cuDNN, PyTorch, …),
    how long each takes, and how busy the GPU is.

    [bold]tilestack profile rms_norm[/bold]; [bold]tilestack profile layers block --recipe qwen3-0.6b[/bold], also with
    --candidate transformers; [bold]tilestack profile serve --model smollm2[/bold] for prompts and decoding apart.

    For training steps, `tilestack train RECIPE --profile 5` does the same inside a run.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # or the profiler says on standard error that it starts and stops
    if what[0] == "train":
        raise ValueError("training steps are profiled inside a run: tilestack train RECIPE --profile 5")
    read, name = PARTS.get(what[0], OF_OPERATORS), what[0] if what[0] in PARTS else "of an operator"
    refuse_ignored_options(context, f"profile {name}", read)
    if direction not in ("forward", "both"):
        raise ValueError(f"--direction is forward or both, not {direction!r}")
    if len(pick_dtypes(dtype) or ()) > 1:
        raise ValueError(f"profile takes one --dtype at a time, not {dtype}")
    place = kernel_device(device)
    load_files(load)
    if what[0] == "serve":
        if len(what) > 1:
            raise ValueError(f"profile serve takes no names, and there is {what[1]}; the model is --model")
        recorded = profile_serving(place, model, dtype, batch, prompt, tokens, trace)
    elif what[0] == "layers":
        work = (recipe, batch, prompt, dtype)
        recorded = profile_layers(place, what[1:] or ["block"], work, candidate, direction, calls, trace)
    else:
        if len(what) > 1:
            raise ValueError("profile takes one operator at a time")
        recorded = profile_operator(place, what[0], backend, case, dtype, direction, calls, trace)
    from tilestack.lab.bench.profile import render_profile

    found = {}
    for title, profile in recorded:
        found[title] = profile.as_dict()
        if str(json_) != "-":
            console.print(render_profile(title, profile, most))
    write_json(json_, found)
    if trace is not None and str(json_) != "-":
        console.print(f"open {trace} at https://ui.perfetto.dev")


def recorded_call(place: "torch.device", title: str, call: Callable[[], Any], calls: int, trace: Path | None) -> Any:
    """The profile of a call under its title, after it was warmed up."""
    from tilestack.lab.bench.profile import record

    for _ in range(WARM_UP):
        call()
    return title, record(call, place, calls, trace)


def profile_operator(
    place: "torch.device",
    name: str,
    backend: str | None,
    case: str | None,
    dtype: str | None,
    direction: str,
    calls: int,
    trace: Path | None,
) -> Iterator[Any]:
    """An operator on one of its cases."""
    import torch

    from tilestack.cli.common import pick_operators
    from tilestack.contract import backend as using
    from tilestack.contract.cases import Make
    from tilestack.lab.bench.candidates import differentiable
    from tilestack.lab.bench.operators import cases_of

    (operator,) = pick_operators([name])
    kind = dtype or ("bfloat16" if place.type == "cuda" else "float32")
    cases = cases_of(operator, case or "bench", kind, place.type) or cases_of(
        operator, case or "check", kind, place.type
    )
    if not cases:
        raise ValueError(f"{name} has no case {case!r}; `tilestack ops {name}` lists them")
    made = operator.bind(**cases[0].build(Make(getattr(torch, kind), place)))
    leaves = {each: made[each].detach().requires_grad_() for each in differentiable(operator, made)}

    def call() -> Any:
        with using(backend or "auto"):
            if direction == "forward" or not leaves:
                with torch.no_grad():
                    return operator(**made)
            out = operator(**made | leaves)
            outs = [each for each in (out if isinstance(out, tuple) else (out,)) if each.requires_grad]
            return torch.autograd.grad(outs, list(leaves.values()), [torch.ones_like(each) for each in outs])

    way = direction if leaves else "forward"
    yield recorded_call(place, f"{name}, {cases[0].label}, {kind} {way}, {backend or 'auto'}", call, calls, trace)


def profile_layers(
    place: "torch.device",
    layers: list[str],
    work: tuple[str, int, int, str | None],
    candidate: str,
    direction: str,
    calls: int,
    trace: Path | None,
) -> Iterator[Any]:
    """Layers of a recipe's model, as `tilestack bench layers` times them."""
    import tempfile
    from dataclasses import replace

    from tilestack.cli.bench_models import layer_works
    from tilestack.lab.training import bench_layers
    from tilestack.lab.training.layer_candidates import build
    from tilestack.lab.training.train_steps import write_weights

    bench_layers.refuse_unknown_layers(layers, [direction], [candidate])
    if trace is not None and len(layers) > 1:
        raise ValueError("--trace is of one layer; name one")
    recipe, batch, sequence, dtype = work
    if "," in recipe:
        raise ValueError(f"profile takes one --recipe at a time, not {recipe}")
    (model,) = layer_works(place, recipe, str(batch), sequence, dtype)
    with tempfile.TemporaryDirectory() as folder:
        alone = write_weights(replace(model, config=model.config | {"num_hidden_layers": 1}), Path(folder))
        for layer in layers:
            built = build(candidate, alone, layer)
            (call,) = bench_layers.layer_calls(built, alone, direction, 1)
            title = f"{layer}, {model.case}, {model.dtype} {direction}, {candidate}"
            yield recorded_call(place, title, call, calls, trace)


def profile_serving(
    place: "torch.device", model: str, dtype: str | None, batch: int, prompt: int, tokens: int, trace: Path | None
) -> Iterator[Any]:
    """The engine's steps: reading prompts, then decoding."""
    from tilestack.cli.speaker import trust_engine
    from tilestack.engine import Engine, EngineSettings
    from tilestack.lab.bench.profile import record
    from tilestack.lab.serving.serve_steps import ServedSteps

    trust_engine()
    settings = EngineSettings(device=str(place), dtype=dtype, max_sequences=batch, prefix_caching=False)
    engine = Engine.load(model, settings)
    steps = ServedSteps(engine, batch, prompt, tokens)
    for read_or_decode in (steps.read_prompts, steps.decode):  # unrecorded
        read_or_decode()
    yield f"prompts of {model}, {batch} of {prompt} tokens", record(steps.read_prompts, place)
    profile = record(steps.decode, place, trace=trace)
    yield f"decoding {model}, {batch} sequences, {tokens - 1} tokens each after the first", profile
