"""`tilestack profile`: which kernels an operator, a layer, a training step or an engine's steps run, whose they are, and
what each takes."""

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
BATCH, PROMPT, MODEL, RECIPE = 8, 256, "smollm2", "demo"  # of layers and serve, where they are not given
EVERYWHERE = ("device", "dtype", "most", "trace", "json", "load")
OF_OPERATORS = (*EVERYWHERE, "backend", "case", "direction", "calls")
# What is profiled besides operators, and the options that each reads.
PARTS = {
    "layers": (*EVERYWHERE, "recipe", "candidate", "direction", "batch", "prompt", "calls"),
    "train": (*EVERYWHERE, "recipe", "candidate", "batch", "prompt", "calls", "save"),
    "serve": (*EVERYWHERE, "recipe", "model", "batch", "prompt", "tokens", "save"),
}


def add_to(app: typer.Typer) -> None:
    app.command("profile")(profile_command)


def profile_command(
    context: typer.Context,
    what: Annotated[list[str], typer.Argument(help="An operator's name, or: layers [NAME], train, serve.")],
    device: Device = None,
    backend: Annotated[str | None, typer.Option(help="Of an operator: its backend; default: what auto takes.", show_default=False)] = None,
    case: Annotated[str | None, typer.Option(help="Of an operator: a case that `tilestack ops NAME` lists; default: its first.", show_default=False)] = None,
    dtype: Annotated[str | None, typer.Option(help="Default: bfloat16 on a GPU, float32 on a CPU; of serve, as the engine takes it.", show_default=False)] = None,
    direction: Annotated[str, typer.Option(help="Of operators and layers: forward or both.")] = "both",
    recipe: Annotated[str | None, typer.Option(help="Of layers and train: the recipe of the model; default: demo. Of serve: instead of a model, random weights of a recipe's.", show_default=False)] = None,
    candidate: Annotated[str, typer.Option(help="Of layers: tilestack, plain, transformers, or …-compile; of train, what bench train has.")] = "tilestack",
    model: Annotated[str | None, typer.Option(help="Of serve: a model's folder, file or name; default: smollm2.", show_default=False)] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Of layers, train and serve: sequences; default: 8, of train the recipe's.", show_default=False)] = None,
    prompt: Annotated[int | None, typer.Option(min=1, help="Of layers, train and serve: tokens of each sequence; default: 256, of train the recipe's.", show_default=False)] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Of serve: tokens to decode.")] = 16,
    calls: Annotated[int, typer.Option(min=1, help="Of operators, layers and train: calls or steps to record.")] = 5,
    most: Annotated[int, typer.Option(min=1, help="Show at most so many lines.")] = 15,
    trace: Annotated[Path | None, typer.Option(help="Also write a trace for https://ui.perfetto.dev to this file; of serve, of decoding.", callback=writable_file, show_default=False)] = None,
    save: Annotated[bool, typer.Option("--save", help="Of train and serve: keep the profile in results/<machine>/, which tables of the documentation are made of.")] = False,
    json_: JsonFile = None,
    load: Load = None,
) -> None:  # fmt: skip
    """Profile an operator, a layer, a training step or serving: which kernels run, whose they are (tilestack, cuBLAS, cuDNN,
    PyTorch, …), how long each takes, and how busy the GPU is.

    [bold]tilestack profile rms_norm[/bold]; [bold]tilestack profile layers block --recipe qwen3-0.6b[/bold], also with
    --candidate transformers; [bold]tilestack profile train --recipe qwen3-0.6b --candidate tilestack-graph[/bold] for steps on
    random tokens, as `bench train` times them; [bold]tilestack profile serve --model smollm2[/bold] for prompts and decoding
    apart.

    For the steps of a run on its own data, `tilestack train RECIPE --profile 5` does the same inside it.
    """
    read, name = PARTS.get(what[0], OF_OPERATORS), what[0] if what[0] in PARTS else "of an operator"
    refuse_ignored_options(context, f"profile {name}", read)
    if direction not in ("forward", "both"):
        raise ValueError(f"--direction is forward or both, not {direction!r}")
    if len(pick_dtypes(dtype) or ()) > 1:
        raise ValueError(f"profile takes one --dtype at a time, not {dtype}")
    if "," in (recipe or ""):
        raise ValueError(f"profile takes one --recipe at a time, not {recipe}")
    place = kernel_device(device)
    load_files(load)
    keep = keeper(place) if save else lambda *profile: None
    if what[0] in ("train", "serve") and len(what) > 1:
        named = "--model" if what[0] == "serve" else "--recipe"
        raise ValueError(f"profile {what[0]} takes no names, and there is {what[1]}; the model is {named}")
    if what[0] == "serve":
        if model and recipe:
            raise ValueError("profile serve takes a --model or a --recipe, not both")
        asked = (batch or BATCH, prompt or PROMPT, tokens)
        recorded = profile_serving(place, model, recipe, dtype, asked, trace, keep)
    elif what[0] == "train":
        recorded = profile_training(place, (recipe or RECIPE, batch, prompt, dtype), candidate, calls, trace, keep)
    elif what[0] == "layers":
        work = (recipe or RECIPE, batch or BATCH, prompt or PROMPT, dtype)
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


def keeper(place: "torch.device") -> Callable[..., None]:
    """What keeps a profile in the results of this machine; a file that cannot take it is refused before anything runs."""
    from tilestack.lab import machine, results
    from tilestack.lab.bench import kept_profiles

    stamp = machine.stamp(place.type)
    path = results.path_of(stamp["slug"], kept_profiles.NAME)
    results.refuse_other_machine(writable_file(path), stamp)

    def keep(profile: Any, op: str, case: str, dtype: str, backend: str) -> None:
        kept_profiles.keep(path, stamp, kept_profiles.as_kept(profile, op, case, dtype, backend, place.type))

    return keep


def recorded_call(
    place: "torch.device", title: str, call: Callable[[], Any], calls: int, trace: Path | None, warm_up: int = WARM_UP
) -> Any:
    """The profile of a call under its title, after it was warmed up."""
    from tilestack.lab.bench.profile import record

    for _ in range(warm_up):
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
    (model,) = layer_works(place, recipe, str(batch), sequence, dtype)
    with tempfile.TemporaryDirectory() as folder:
        alone = write_weights(replace(model, config=model.config | {"num_hidden_layers": 1}), Path(folder))
        for layer in layers:
            built = build(candidate, alone, layer)
            (call,) = bench_layers.layer_calls(built, alone, direction, 1)
            title = f"{layer}, {model.case}, {model.dtype} {direction}, {candidate}"
            yield recorded_call(place, title, call, calls, trace)


def profile_training(
    place: "torch.device",
    work: tuple[str, int | None, int | None, str | None],
    candidate: str,
    calls: int,
    trace: Path | None,
    keep: Callable[..., None],
) -> Iterator[Any]:
    """Training steps of a recipe's model on random tokens, as `tilestack bench train` times them."""
    import tempfile

    from tilestack.cli.bench_models import training_works
    from tilestack.lab.stale import TRAINING
    from tilestack.lab.training.bench_train import step_candidates
    from tilestack.lab.training.train_steps import step_of, write_weights

    recipe, batch, sequence, dtype = work
    (model,) = training_works(place, recipe, str(batch) if batch else None, sequence, dtype)
    step_candidates([candidate], model)  # refuses one that there is not
    with tempfile.TemporaryDirectory() as folder:
        step = step_of(candidate, write_weights(model, Path(folder)))
        title = f"a training step of {model.case}, {model.dtype}, {candidate}"
        recorded = recorded_call(place, title, step, calls, trace, model.warmup)
        keep(recorded[1], TRAINING, model.case, model.dtype, candidate)
        yield recorded


def profile_serving(
    place: "torch.device",
    model: str | None,
    recipe: str | None,
    dtype: str | None,
    asked: tuple[int, int, int],
    trace: Path | None,
    keep: Callable[..., None],
) -> Iterator[Any]:
    """The engine's steps: reading prompts, then decoding."""
    from tilestack.cli.speaker import trust_engine
    from tilestack.engine import Engine, EngineSettings
    from tilestack.lab.bench.profile import record
    from tilestack.lab.serving.serve_steps import ServedSteps
    from tilestack.lab.stale import SERVING

    trust_engine()
    batch, prompt, tokens = asked
    settings = EngineSettings(device=str(place), dtype=dtype, max_sequences=batch, prefix_caching=False)
    name = recipe or model or MODEL
    engine = Engine(random_decoder(place, recipe, dtype), None, settings) if recipe else Engine.load(name, settings)
    steps = ServedSteps(engine, batch, prompt, tokens)
    for read_or_decode in (steps.read_prompts, steps.decode):  # unrecorded
        read_or_decode()
    kind = f"{engine.decoder.embedding.weight.dtype}".removeprefix("torch.")
    yield f"prompts of {name}, {batch} of {prompt} tokens", record(steps.read_prompts, place)
    case = f"decoding {name}, {batch} sequences, {tokens - 1} tokens each after the first"
    profile = record(steps.decode, place, trace=trace)
    keep(profile.divided(tokens - 1), SERVING, f"{name}, {batch} sequences of {prompt} tokens", kind, "tilestack")
    yield case, profile


def random_decoder(place: "torch.device", recipe: str, dtype: str | None) -> Any:
    """A recipe's model with random weights."""
    import torch

    from tilestack import models
    from tilestack.cli.bench_models import training_works

    (work,) = training_works(place, recipe, None, None, dtype)
    torch.manual_seed(0)
    with torch.device(place):
        decoder = models.Decoder(models.ModelConfig.from_hf(work.config))
    return decoder.to(getattr(torch, work.dtype)).eval()
