"""What `tilestack bench` measures of models: their layers, training steps, engines, what HTTP costs and what quantising does."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

if TYPE_CHECKING:
    import torch

    from tilestack.cli.bench import Asked
    from tilestack.lab.training.train_steps import Work


def training_works(
    place: "torch.device", recipes: str | None, micro_batches: str | None, sequence: int | None, dtype: str | None
) -> list["Work"]:
    """What `bench train` does: the models of some recipes, at some micro-batches."""
    from tilestack.lab.training.bench_train import PUBLISHED

    return works_of_recipes(place, recipes, micro_batches, sequence, dtype, PUBLISHED)


def layer_works(
    place: "torch.device", recipes: str | None, micro_batches: str | None, sequence: int | None, dtype: str | None
) -> list["Work"]:
    """What `bench layers` does: the layers of some recipes' models."""
    from tilestack.lab.training.bench_layers import PUBLISHED

    return works_of_recipes(place, recipes, micro_batches, sequence, dtype, PUBLISHED)


def works_of_recipes(
    place: "torch.device",
    recipes: str | None,
    micro_batches: str | None,
    sequence: int | None,
    dtype: str | None,
    published: Mapping[str, Sequence[int]],
) -> list["Work"]:
    """The models of some recipes at some micro-batches; where nothing is asked for, those that are `published`."""
    from tilestack.cli.common import pick_dtypes
    from tilestack.cli.recipes import find_recipe
    from tilestack.lab.training.train_steps import Work
    from tilestack.train import Recipe

    pick_dtypes(dtype)  # or refuse it
    sizes = micro_batches.split(",") if micro_batches else []
    if not all(size.strip().isdigit() and int(size) > 0 for size in sizes):
        raise ValueError(f"micro-batches are positive numbers separated by commas, not {micro_batches!r}")
    on_gpu = place.type == "cuda"
    dtypes = (dtype or ("bfloat16" if on_gpu else "float32")).split(",")
    works = []
    for name in recipes.split(",") if recipes else published if on_gpu else ["demo"]:
        read = Recipe.load(find_recipe(Path(name)))
        work = Work(
            read.run.name,
            {"vocab_size": read.data.vocabulary, **read.model.config},
            read.data.batch,
            sequence or read.data.sequence,
            dtypes[0],
            place.type,
            read.run.backend,
            steps=10 if on_gpu else 30,  # a CPU has other things to do in between
            seconds=60,
        )
        usual = published.get(name, ()) if recipes is None else ()
        batches = [int(size) for size in sizes or usual] or [work.batch]
        works += [replace(work, batch=batch, dtype=each) for batch in batches for each in dtypes]
    return works


def bench_decoder_layers(
    asked: "Asked",
    works: list["Work"],
    layers: Sequence[str],
    directions: list[str] | None,
    candidates: list[str] | None,
) -> None:
    """The layers of decoders, each alone, all candidates in this process."""
    from tilestack.lab.training import bench_layers

    if asked.is_over():
        return
    kept = asked.kept_rows("layers") if asked.stale else []
    measured = bench_layers.bench_layers(
        works, layers, directions or bench_layers.DIRECTIONS, candidates, Console(stderr=True).print, kept
    )
    asked.measure("layers", bench_layers.render_layers, measured)


def bench_training(asked: "Asked", works: list["Work"], candidates: list[str] | None) -> None:
    """Whole training steps, each candidate in a process of its own."""
    from tilestack.lab.training import bench_train

    if asked.stale:
        works = bench_train.stale_works(works, asked.kept_rows("train"), candidates)
    measured = (bench_train.bench_train(work, candidates, Console(stderr=True).print) for work in works)
    asked.measure("train", bench_train.render_training_steps, measured)


def bench_serving(asked: "Asked", model: str | None, candidates: list[str] | None, only: list[str] | None) -> None:
    """Engines on the same workloads, each in a process of its own."""
    from tilestack.lab import results
    from tilestack.lab.bench.roofs import measure_roofs
    from tilestack.lab.serving import bench_serve

    if asked.is_over():
        return
    target = asked.results_file("serve")
    kept = asked.kept_rows("serve") if asked.stale else []
    with asked.measured_rows(target, bench_serve.render_engines) as rows:
        for row in bench_serve.bench_serve(asked.place.type, model, candidates, only, Console(stderr=True).print, kept):
            rows.append(row)
            if asked.save:  # at once: the next may fail
                results.merge(target, asked.stamp, measure_roofs(asked.place.type).as_dict(), [row])


def bench_over_http(asked: "Asked", model: str | None) -> None:
    """What HTTP costs of the engine's throughput."""
    from tilestack.cli.speaker import trust_engine
    from tilestack.data.errors import needs
    from tilestack.lab import results
    from tilestack.lab.bench.roofs import measure_roofs
    from tilestack.lab.serving import bench_http

    if asked.is_over() or (asked.stale and bench_http.is_kept(asked.kept_rows("http"), model)):
        return
    for package in ("fastapi", "uvicorn", "prometheus_client", "httpx2"):
        needs(package, "tilestack bench http", "server")
    trust_engine()
    target = asked.results_file("http")
    with asked.measured_rows(target, bench_http.render_http) as rows:
        measured, failed = bench_http.bench_http(asked.place.type, model, tell=Console(stderr=True).print)
        rows += measured
        if asked.save:
            results.merge(target, asked.stamp, measure_roofs(asked.place.type).as_dict(), rows)
    if failed:  # told when the others are kept
        raise RuntimeError("\n".join(f"{way} could not be measured: {problem}" for way, problem in failed.items()))


def bench_quality(asked: "Asked", model: str | None) -> None:
    """What each scheme and method of quantising costs in quality."""
    from tilestack.lab.bench import quantised_models
    from tilestack.lab.stale import run_is_current

    model = model or quantised_models.MODEL
    target = asked.results_file(quantised_models.RESULTS)
    kept = quantised_models.kept_runs(target) if asked.stale else []
    done = {quantised_models.way_of(run) for run in kept if run_is_current(run)}
    chosen = [way for way in quantised_models.schemes_and_methods() if (model, *way) not in done]
    if not chosen or asked.is_over():
        return
    with asked.measured_rows(target, quantised_models.render_quantised) as runs:
        for run in quantised_models.measure_quality(chosen, asked.place, Console(stderr=True).print, model):
            runs.append(run)
            if asked.save:
                quantised_models.keep(target, asked.stamp, run)
            if asked.is_over():
                return
