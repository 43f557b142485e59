"""What cannot fit is refused before the first step, and what is refused could not have run."""

import shutil
from types import SimpleNamespace

import pytest
import torch
from small import decoder

from tilestack.parallel.mesh import Mesh
from tilestack.train import Recipe, RecipeError
from tilestack.train.run import feasible
from tilestack.train.run.follow import refuse_impossible
from tilestack.train.settings import read


def needs_of(model, **sections):
    return feasible.least_needs(read(Recipe, {"data": {"sequence": 16, "batch": 2}, **sections}), model, 16)


@pytest.mark.parametrize(("optimizer", "states"), [("adamw", 8), ("adamw8bit", 2), ("sgd", 4), ("muon", 4)])
def test_a_checkpoint_is_what_learns_and_the_states_of_it(optimizer, states):
    model = decoder()
    size = sum(param.numel() for param in model.parameters())
    assert needs_of(model, optimizer={"name": optimizer}).checkpoint == size * (4 + states)
    assert needs_of(model, lora={"rank": 4}).checkpoint == 0  # adapters alone, which are not counted


def test_processes_with_a_part_of_the_model_need_a_part_of_its_memory_and_their_whole_batch():
    whole = needs_of(decoder())
    part = whole.divided(4)
    assert (part.weights, part.gradients, part.states) == (whole.weights // 4, whole.gradients // 4, whole.states // 4)
    assert part.batch == whole.batch


@pytest.mark.parametrize("known", [True, False])
def test_a_checkpoint_that_would_fill_the_disk_is_refused_with_the_way_out(known, tmp_path, monkeypatch):
    """Also where the weights are in memory already, as those of a model that is fine-tuned."""
    model, recipe = decoder(), read(Recipe, {"data": {"sequence": 16, "batch": 2}})
    needs = needs_of(model)
    free = SimpleNamespace(free=needs.checkpoint - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free if folder == tmp_path else None)
    check = lambda: refuse_impossible(recipe, model, needs, tmp_path, torch.device("cpu"), Mesh(), has_weights=known)
    with pytest.raises(RecipeError, match=r"a checkpoint takes [\d.]*[1-9]\d* MiB, and .* are free where .*--folder"):
        check()
    free.free += 1
    check()


def test_a_disk_is_asked_before_anything_is_read_or_made(tmp_path, monkeypatch, capsys):
    from tilestack.cli import main

    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    with pytest.raises(SystemExit) as ended:
        main(["train", "demo", "--folder", str(tmp_path / "run")])
    assert (ended.value.code, "a checkpoint takes" in capsys.readouterr().err) == (1, True)
    assert not (tmp_path / "run" / "data").exists()
