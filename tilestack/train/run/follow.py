"""A recipe followed from beginning to end, whatever its objective: the model made, trained, and left as others open it."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from tilestack import configure_backend, data, models
from tilestack.device import pick_device
from tilestack.files import whole_folder
from tilestack.models.adapters import save_adapters
from tilestack.nn.lora import add_lora, lora_layers, merge_lora
from tilestack.train import checkpoint, execution, flops
from tilestack.train.loop import Trainer
from tilestack.train.metrics import Progress, plot_run
from tilestack.train.objective import Objective
from tilestack.train.recipe import Recipe
from tilestack.train.run.provenance import refuse_another
from tilestack.train.settings import RecipeError

MakeObjective = Callable[[Any, torch.device], Objective]  # of the model as the run finds it, and its device


def follow(
    recipe: Recipe,
    folder: Path,
    prepare: Callable[[Console], tuple[data.Tokenizer, MakeObjective]],
    *,
    provenance: Mapping[str, Any] | None = None,
    console: Console | None = None,
) -> dict[str, float]:
    """Follow a recipe in a folder, from where it stands to the end, and leave the model in `folder/model`.

    `prepare` reads the data and says how the objective is made; it is not called for a folder that holds another run.
    """
    console = console or Console(stderr=True)
    if checkpoint.Checkpoints(folder / "checkpoints", 1).steps():
        refuse_another(folder, recipe)
    if recipe.run.backend:
        configure_backend(recipe.run.backend)
    device = pick_device(recipe.run.device, "run.device")
    tokenizer, make_objective = prepare(console)
    model = build_model(recipe, tokenizer).to(device, execution.DTYPES[recipe.precision.parameters])
    if recipe.lora.rank:
        lora = recipe.lora
        torch.manual_seed(recipe.run.seed)  # what adapters begin with is the same when the run resumes
        add_lora(model, lora.targets, lora.rank, lora.alpha, lora.dropout)
    objective = make_objective(model, device)
    work = flops.per_token(model, recipe.data.sequence), flops.peak(device, recipe.precision)
    progress = Progress(recipe, console, *work)
    draw = lambda: plot_run(folder, recipe.run.name)
    trainer = Trainer(
        recipe, model, objective, folder, provenance=provenance, progress=progress, after_evaluation=draw
    )  # fmt: skip
    figures = trainer.run()
    if trainer.finished:
        with trainer.as_evaluated():
            if lora_layers(model):
                save_adapters(model, folder / "adapter", recipe.model.path)
                merge_lora(model)
            export(model, tokenizer, folder / "model")
    return figures


def build_model(recipe: Recipe, tokenizer: data.Tokenizer) -> Any:
    """The model a recipe starts from: loaded, or new with weights drawn from the run's seed."""
    if recipe.model.path:
        model = models.load(recipe.model.path)
    elif recipe.model.config:
        torch.manual_seed(recipe.run.seed)
        ends = {"bos_token_id": tokenizer.bos, "eos_token_id": tokenizer.eos, "pad_token_id": tokenizer.pad}
        about = {"vocab_size": tokenizer.vocabulary, **ends, **recipe.model.config}
        model = models.Decoder(models.ModelConfig.from_hf(about, strict=True))
    else:
        raise RecipeError(
            "the recipe has no model: set model.path to start from one, or describe one in [model.config]"
        )
    tokenizer.check_against(model.config.vocabulary)
    return model


def export(model: Any, tokenizer: data.Tokenizer, folder: Path) -> None:
    """Write a model and its tokenizer as a Hugging Face folder, which appears when it is complete."""
    with whole_folder(folder) as hidden:
        models.save(model, hidden)
        tokenizer.save(hidden)
