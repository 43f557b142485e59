"""Layers of a decoder, each alone: ours beside the same layer in plain PyTorch and in transformers, eager and compiled.

Between a kernel and a training step: what a layer's fusions come to when its matrix products, which nobody makes much
faster, are counted too. Layers are timed like operators (timing.py): CUDA-graph replay, candidates taking turns; `forward`
without gradients, `both` a training step's forward and backward with the gradients of the input and of all weights. Before
they are timed, the candidates' results and input gradients are compared; one that computes something else has no figures.

Liger replaces functions of transformers for a whole process, so it is a peer of whole steps only (`tilestack bench train`).
"""

import functools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from tilestack.lab.bench.peers import importable, is_peer
from tilestack.lab.bench.roofs import Roofs, measure_roofs
from tilestack.lab.bench.timing import Call, Candidate, Timing, in_one_line, measure
from tilestack.lab.labels import case_label
from tilestack.lab.rows import Row, Stored, set_ratios
from tilestack.lab.stale import LAYER, is_current, present_source
from tilestack.lab.training.layer_candidates import LAYERS, Built, build
from tilestack.lab.training.train_steps import Work, write_weights
from tilestack.lab.units import microseconds, percent, times

OURS = "tilestack"
CANDIDATES = (OURS, "plain", "plain-compile", "transformers", "transformers-compile")
DIRECTIONS = ("forward", "both")
PUBLISHED = {
    "qwen3-0.6b": (8,),
    "llama-1b": (4,),
    "qwen3-1.7b": (8,),
    "qwen3-moe-8x": (8,),
}  # recipes and their batches
SAME_RESULT = 0.03  # of each other by their norms; roundings in bfloat16 are below, another layer far above


def bench_layers(
    works: Sequence[Work],
    layers: Sequence[str] = (),
    directions: Sequence[str] = DIRECTIONS,
    candidates: Sequence[str] | None = None,
    say: Callable[[str], Any] = lambda words: None,
    kept: Sequence[Stored] = (),
) -> Iterator[list[Stored]]:
    """The rows of every layer of every work in every direction, but for those that are `kept` of the present source."""
    refuse_unknown_layers(layers, directions, candidates)
    current = {(row["case"], row["dtype"], row["direction"]) for row in kept if row["op"] == LAYER and is_current(row)}
    for work in works:
        wanted = [
            (layer, direction)
            for layer in layers or LAYERS
            for direction in directions
            if (case_of(layer, work), work.dtype, direction) not in current
        ]
        if not wanted:
            continue
        with tempfile.TemporaryDirectory() as folder:
            alone = write_weights(replace(work, config=work.config | {"num_hidden_layers": 1}), Path(folder))
            for layer, direction in wanted:
                say(f"{layer}, {work.case}, {direction} …")
                yield [row.as_dict() for row in layer_contest(alone, layer, direction, candidates)]


def refuse_unknown_layers(layers: Sequence[str], directions: Sequence[str], candidates: Sequence[str] | None) -> None:
    """An error that says what there is, where a name is none."""
    for what, names, known in (
        ("layer", layers, LAYERS),
        ("direction", directions, DIRECTIONS),
        ("candidate", candidates or (), CANDIDATES),
    ):
        if unknown := [name for name in names if name not in known]:
            raise ValueError(f"no {what} {', '.join(unknown)}; there are {', '.join(known)}")


def layer_candidates() -> list[str]:
    return [name for name in CANDIDATES if not name.startswith("transformers") or importable("transformers")]


def case_of(layer: str, work: Work) -> str:
    return f"{layer}, {work.case}"


def layer_contest(work: Work, layer: str, direction: str, candidates: Sequence[str] | None) -> list[Row]:
    """The rows of one layer: every candidate that can be built and computes the same."""
    built: dict[str, Built] = {}
    failed: dict[str, Timing] = {}
    for name in candidates or layer_candidates():
        try:
            built[name] = build(name, work, layer)
        except Exception as error:
            failed[name] = Timing(note=in_one_line(error))
    failed |= {name: Timing(note=words) for name, words in unlike_the_others(built, work, direction).items()}
    timed = {
        name: Candidate(functools.partial(layer_calls, layer, work, direction))
        for name, layer in built.items()
        if name not in failed
    }
    moved, flops = cost(built[OURS], work, layer, direction) if OURS in built else (0.0, 0.0)
    timings = measure(timed, working_set(built.get(OURS), work), work.device) | failed
    roofs = measure_roofs(work.device)
    rows = [
        row_of_candidate(case_of(layer, work), work, direction, name, timings[name], flops, moved, roofs)
        for name in timings
    ]
    set_ratios(rows)
    torch.compiler.reset()
    if work.device == "cuda":
        torch.cuda.empty_cache()
    return rows


def row_of_candidate(
    case: str, work: Work, direction: str, name: str, timing: Timing, flops: float, moved: float, roofs: Roofs
) -> Row:
    row = Row(LAYER, case, work.dtype, direction, name, source=present_source(LAYER, name), **vars(timing))
    if timing.time_us and flops:  # whose weights are counted by ours, which may not have been asked for
        row.set_rates(flops, moved, roofs.floor_us(flops, moved, work.dtype))
    return row


def hidden_states(work: Work, number: int) -> Tensor:
    """Hidden states [B, T, H], the same for every candidate."""
    generator = torch.Generator().manual_seed(number)
    shape = (work.batch, work.sequence, work.config["hidden_size"])
    return torch.randn(shape, generator=generator).to(work.device, getattr(torch, work.dtype))


def layer_calls(built: Built, work: Work, direction: str, n: int) -> list[Call]:
    """n calls of a layer, on hidden states of their own."""
    return [functools.partial(step, built, direction, hidden_states(work, number)) for number in range(n)]


def step(built: Built, direction: str, x: Tensor) -> Sequence[Tensor]:
    """What a layer computes: its result, or with `both` its result and all gradients for one that arrives like x."""
    if direction == "forward":
        with torch.no_grad():
            return (built.run(x),)
    x = x.requires_grad_()
    out = built.run(x)
    arriving = x.detach() if out.ndim else torch.ones_like(out)
    return (out.detach(), *torch.autograd.grad(out, [x, *built.weights], arriving))


def unlike_the_others(built: dict[str, Built], work: Work, direction: str) -> dict[str, str]:
    """The candidates whose result, or gradient of x, is not what most compute; and those that fail, each with its note."""
    notes: dict[str, str] = {}
    found: dict[str, list[Tensor]] = {}
    for name, layer in built.items():
        try:
            found[name] = [part.float() for part in step(layer, direction, hidden_states(work, 0))[:2]]
        except Exception as error:
            notes[name] = in_one_line(error)
    for number in range(1 if direction == "forward" else 2):
        # Of numbers that are none the median is none; a candidate that makes some is not what most compute.
        usual = torch.stack([results[number] for results in found.values()]).nanmedian(0).values if found else None
        for name, results in found.items():
            assert usual is not None
            apart = float((results[number] - usual).norm() / usual.norm())
            if not apart <= SAME_RESULT:
                notes[name] = f"not the same work: {apart:.1%} from what the others compute"
    return notes


def cost(ours: Built, work: Work, layer: str, direction: str) -> tuple[float, float]:
    """Bytes that a layer cannot avoid to move, and its arithmetic. A backward calculates as much as two forwards; what it
    shares with its forward is read once, so that it adds the gradients: of the result in, of x and the weights out."""
    from tilestack.models import ModelConfig
    from tilestack.train.flops import attention_width

    config = ModelConfig.from_hf(work.config)
    met = sum(
        weight[0].numel() * (config.top_k or 1) if weight.ndim == 3 else weight.numel()
        for weight in ours.weights
        if weight.ndim > 1
    )
    attended = attention_width(config) * work.sequence if layer in ("attention", "block") else 0.0
    size = getattr(torch, work.dtype).itemsize
    states = work.tokens * config.hidden * (1 if layer == "head" else 2)
    moved = (states + sum(weight.numel() for weight in ours.weights)) * size
    flops = 2.0 * work.tokens * (met + attended)
    return (moved, flops) if direction == "forward" else (2 * moved, 3 * flops)


def working_set(ours: Built | None, work: Work) -> float:
    """Bytes that a forward passes through the cache: weights, and the numbers between its products."""
    weights = [] if ours is None else [weight for weight in ours.weights if weight.ndim > 1]
    between = work.tokens * sum(sum(weight.shape[-2:]) for weight in weights)
    return (between + sum(weight.numel() for weight in weights)) * getattr(torch, work.dtype).itemsize


COLUMNS: dict[str, Callable[[Stored], str]] = {
    "time": lambda row: microseconds(row["time_us"]),
    "of the roof": lambda row: percent(row["roof_fraction"]),
    "peak MiB": lambda row: f"{row['peak_mib']:,.0f}" if row["peak_mib"] else "–",
    "× best peer": lambda row: times(row["ratio_to_best_peer"]) + ("" if is_peer(row["backend"]) else f" {row['verdict']}"),
    "note": lambda row: escape(row["note"]),
}  # fmt: skip


def render_layers(rows: Sequence[Stored]) -> Group:
    """A table per model, a line per candidate; what is nothing in every line is left out."""
    model_of = lambda row: f"{case_label(LAYER, row['case']).partition(', ')[2]}, {row['dtype']}"
    return Group(
        *(
            table_of_layers(model, [row for row in rows if model_of(row) == model])
            for model in dict.fromkeys(map(model_of, rows))
        )
    )


def table_of_layers(model: str, rows: Sequence[Stored]) -> Table:
    table = Table(title=f"layers of {model}", title_justify="left")
    columns = {name: cell for name, cell in COLUMNS.items() if any(cell(row) not in ("–", "") for row in rows)}
    for heading in ("layer", "direction", "candidate", *columns):
        left = heading in ("layer", "direction", "candidate", "note")
        table.add_column(heading, justify="left" if left else "right", no_wrap=heading != "note")
    before = ""
    for row in rows:
        layer = row["case"].partition(",")[0]
        if f"{layer} {row['direction']}" != before and before:
            table.add_section()
        before = f"{layer} {row['direction']}"
        table.add_row(layer, row["direction"], row["backend"], *(cell(row) for cell in columns.values()))
    return table
