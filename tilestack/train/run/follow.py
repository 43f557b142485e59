"""A recipe followed from beginning to end, whatever its objective: the model made, trained, and left as others open it."""

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tilestack import configure_backend, data, models
from tilestack.contract.registry import refuse_unknown_backends
from tilestack.device import pick_device
from tilestack.files import whole_folder
from tilestack.models.adapters import save_adapters
from tilestack.models.checkpoints import code_formats
from tilestack.models.shapes import shapes_alone
from tilestack.nn.lora import add_lora, lora_layers, merge_lora
from tilestack.parallel.experts import expert_cuts, refuse_experts
from tilestack.parallel.mesh import Mesh
from tilestack.parallel.placement import Placement
from tilestack.parallel.processes import joined
from tilestack.parallel.sequence import refuse_sharing
from tilestack.parallel.stages import refuse_stages
from tilestack.parallel.tensor import refuse_split
from tilestack.train import checkpoint, execution, flops
from tilestack.train.errors import AFTER_A_LOSS, Interrupted
from tilestack.train.loop import Trainer
from tilestack.train.metrics import Progress, load_trackers, plot_run
from tilestack.train.objective import Objective
from tilestack.train.recipe import Recipe
from tilestack.train.run.feasible import (
    Needs,
    least_needs,
    refuse_beyond_disk,
    refuse_beyond_memory,
    refuse_beyond_positions,
    refuse_prompts,
)
from tilestack.train.run.folder import RunFolder
from tilestack.train.run.provenance import changes
from tilestack.train.settings import RecipeError

# Of the model as the run finds it, placed among the processes of the run, and its device.
MakeObjective = Callable[[Placement, torch.device], Objective]
PrepareData = Callable[[Console, Mesh], tuple[data.Tokenizer, MakeObjective]]


def follow(
    recipe: Recipe,
    folder: Path,
    prepare: PrepareData,
    *,
    command: str = "train",
    fresh: bool = False,
    profile: int = 0,
    row: int | None = None,
    provenance: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Follow a recipe in a folder, from where it stands to the end or from nothing if it is to be `fresh`, and leave the
    model in `folder/model`. A run that is asked to stop saves and raises `Interrupted`.

    `prepare` reads the data and says how the objective is made; it is not called for a folder that holds another run, and on
    other processes than the first when that has returned. `row` is how many tokens a row of a batch has at least,
    data.sequence where it is not said.

    Where torchrun has started several processes, each calls this, and they train as one. The first holds the folder, and is
    the only one that prints and writes; the others read what it has prepared.
    """
    sides = recipe.parallel
    grid = dict(tensor=sides.tensor, context=sides.context, pipeline=sides.pipeline, expert=sides.expert)
    with joined(recipe.run.device, **grid, advice=AFTER_A_LOSS) as mesh:
        console = (console or Console(stderr=True)) if mesh.first else Console(quiet=True)
        if not mesh.first:
            mesh.wait_for_all()  # until the folder and the data are ready
        place = RunFolder(folder, command)
        refuse_own_output(recipe, folder)
        with place.held() if mesh.first else nullcontext():
            with place.starting_over() if fresh and mesh.first else nullcontext():
                trainer, tokenizer = make_trainer(
                    recipe, place, prepare, row or recipe.data.sequence, profile, provenance or {}, console, mesh
                )
            figures = trainer.run()
            if trainer.finished:
                leave_model(trainer, tokenizer)
    if not trainer.finished:
        raise Interrupted(folder, trainer.step, trainer.interrupted)
    return figures


def refuse_own_output(recipe: Recipe, folder: Path) -> None:
    """Refuse to read from the folder that the run writes to: the model it starts from would be replaced."""
    read = {
        "model.path": [recipe.model.path],
        "data.tokenizer": [recipe.data.tokenizer],
        "data.files": recipe.data.files,
        "data.validation_files": recipe.data.validation_files,
    }
    for key, paths in read.items():
        for path in filter(None, paths):
            if Path(path).resolve().is_relative_to(folder.resolve()) and Path(path).exists():
                raise RecipeError(
                    f"{key} names {path}, which lies in the run's own folder {folder}; use another --folder"
                )


def make_trainer(
    recipe: Recipe,
    place: RunFolder,
    prepare: PrepareData,
    row: int,
    profile: int,
    provenance: Mapping[str, Any],
    console: Console,
    mesh: Mesh,
) -> tuple[Trainer, data.Tokenizer]:
    """The model and the objective of a recipe, ready to train, and the tokenizer; what can be wrong is found here."""
    if checkpoint.Checkpoints(place.checkpoints, 1).steps():
        changes(place.path, recipe)
    load_trackers(recipe.run.trackers)
    if recipe.run.backend:
        refuse_unknown_backends(recipe.run.backend)
        configure_backend(recipe.run.backend)
    device = pick_device(recipe.run.device, "run.device")
    if recipe.model.path:
        if code_formats(recipe.model.path):
            raise RecipeError(
                f"model.path: the weights of {recipe.model.path} are codes, which do not learn; start from the model that "
                "they were made from"
            )
    else:
        with shapes_alone():  # what it would take, before anything is tokenised or allocated
            described = new_model(recipe, {"vocab_size": recipe.data.vocabulary})
        refuse_impossible(recipe, described, least_needs(recipe, described, row), place.path, device, mesh)
    tokenizer, make_objective = prepare(console, mesh)
    if mesh.first:
        mesh.wait_for_all()  # the others come in
    model = build_model(recipe, tokenizer).to(dtype=execution.DTYPES[recipe.precision.parameters])
    if not recipe.parallel.divides:  # else it goes there in parts
        model.to(device)
    refuse_impossible(
        recipe,
        model,
        least_needs(recipe, model, row),
        place.path,
        device,
        mesh,
        has_weights=not recipe.parallel.divides,
    )
    refuse_prompts(recipe, tokenizer, model.config.positions)
    if recipe.lora.rank:
        lora = recipe.lora
        torch.manual_seed(recipe.run.seed)  # what adapters begin with is the same when the run resumes
        add_lora(model, lora.targets, lora.rank, lora.alpha, lora.dropout)
    work = flops.per_token(model, recipe.data.sequence), flops.peak(device, recipe.precision) * mesh.world
    placement = Placement(model, mesh, recipe.parallel.shard, device, recipe.parallel.schedule)
    execution.set_precision(model, recipe.precision, device)  # before a reference is asked, or copied
    objective = make_objective(placement, device)
    progress = Progress(recipe, console, *work)
    draw = lambda: plot_run(place.path, recipe.run.name) if mesh.first else None
    trainer = Trainer(
        recipe,
        model,
        objective,
        place,
        placement=placement,
        provenance=provenance,
        progress=progress,
        after_evaluation=draw,
        profile=profile,
    )
    return trainer, tokenizer


def leave_model(trainer: Trainer, tokenizer: data.Tokenizer) -> None:
    """Write the trained model into the run's folder, as others open it; with adapters, these too."""
    trainer.steps.release()  # an average or merged adapters need memory beside the model
    with trainer.as_evaluated():
        model: Any = trainer.placement.whole_model()
        if not trainer.mesh.first:
            return
        if lora_layers(model):
            save_adapters(model, trainer.folder / "adapter", trainer.recipe.model.path)
            merge_lora(model)
        export(model, tokenizer, trainer.folder / "model")


def build_model(recipe: Recipe, tokenizer: data.Tokenizer) -> Any:
    """The model a recipe starts from: loaded, or new with weights drawn from the run's seed."""
    if recipe.model.path:
        model = models.load(recipe.model.path)
    else:
        torch.manual_seed(recipe.run.seed)
        ends = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
        model = new_model(recipe, {"vocab_size": tokenizer.vocabulary, **ends})
    tokenizer.check_against(model.config.vocabulary)
    if recipe.data.tokenizer and recipe.model.path:
        refuse_other_ids(tokenizer, recipe)
    return model


def new_model(recipe: Recipe, about: Mapping[str, Any]) -> models.Decoder:
    """A model as the recipe describes it; `about` is what it need not say."""
    if not recipe.model.config:
        raise RecipeError(
            "the recipe has no model: set model.path to start from one, or describe one in [model.config]"
        )
    return models.Decoder(models.ModelConfig.from_hf({**about, **recipe.model.config}, strict=True))


def refuse_impossible(
    recipe: Recipe,
    model: Any,
    needs: Needs,
    folder: Path,
    device: torch.device,
    mesh: Mesh,
    has_weights: bool = False,
) -> None:
    """Refuse a run that cannot be; where it `has_weights`, they take no memory beyond what they have."""
    if mesh.size("tensor") > 1:
        refuse_split(model.config, mesh.size("tensor"))
    if mesh.size("expert") > 1:
        refuse_experts(model.config, mesh.size("expert"))
    if (processes := mesh.size("pipeline")) > 1:
        refuse_stages(model.config, processes, recipe.parallel.schedule, recipe.data.accumulate)
    if (context := mesh.size("context")) > 1:
        refuse_sharing(model.config, recipe.data.sequence, recipe.parallel.context_by, context, mesh.size("tensor"))
    refuse_beyond_positions(recipe, model.config.positions)
    here = needs.divided(parts_of_model(model, recipe, mesh))
    refuse_beyond_memory(dataclasses.replace(here, weights=0) if has_weights else here, recipe, device)
    if mesh.first:
        refuse_beyond_disk(needs, folder)


def parts_of_model(model: Any, recipe: Recipe, mesh: Mesh) -> float:
    """How many parts as large as that of a process a model has."""
    alike = mesh.size("pipeline") * mesh.size("tensor")
    shares = mesh.size("replicas") if recipe.parallel.shard else 1
    if mesh.size("expert") == 1:
        return alike * shares
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    of_experts = sum(sizes[name] for name in expert_cuts(model)) / sum(sizes.values())
    return alike / (of_experts / mesh.size("expert") + (1 - of_experts) / shares)


def refuse_other_ids(tokenizer: data.Tokenizer, recipe: Recipe) -> None:
    """Refuse a tokenizer whose ids mean other tokens than the model has learned; a model without one takes any that fits."""
    try:
        own = data.Tokenizer.load(recipe.model.path)
    except FileNotFoundError:
        return
    if not tokenizer.same_ids(own):
        raise RecipeError(
            f"data.tokenizer = {recipe.data.tokenizer!r} gives other ids than the tokenizer of {recipe.model.path}, by which "
            "the model has learned; leave data.tokenizer out"
        )


def export(model: Any, tokenizer: data.Tokenizer, folder: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, which appears when it is complete."""
    with whole_folder(folder) as hidden:
        models.save(model, hidden)
        tokenizer.save(hidden)
