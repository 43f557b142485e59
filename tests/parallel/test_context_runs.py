"""Runs whose rows are shared by processes train what one process does, whatever else they share."""

import json
from types import SimpleNamespace

import pretraining
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from tilestack import models
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.placement import Placement
from tilestack.train.run.feasible import least_needs
from tilestack.train.run.follow import refuse_impossible

LAYOUTS = {  # what four processes do
    "ring": {"context": 4, "context_by": "ring"},
    "heads and tensor": {"context": 2, "tensor": 2},
    "ring and sharded": {"context": 2, "context_by": "ring", "shard": True},  # and two with other rows
}
ROWS = 4  # of a step, in all layouts


class Halves(torch.nn.Module):
    """Four parameters in bfloat16, as a sharded model has them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))

    def hidden(self, x):
        return self.weight * x


def sum_of_halves():
    """The gradient of four ranks, of which one has 1 and the others, too little to change it alone, 2 ** -8 each."""
    model, mesh = Halves(), Mesh(Layout(data=4))
    placement = Placement(model, mesh, shard=True)
    arriving = torch.full((4,), 2**-8, dtype=torch.bfloat16)
    arriving[mesh.rank] = 1
    model.hidden(arriving).sum().backward()
    placement.finish_backward()
    return placement.whole("weight", placement.parameters["weight"].grad)


def shared(_, texts, folder):
    for name, parallel in LAYOUTS.items():
        others = 4 // parallel["context"] // parallel.get("tensor", 1)
        pretraining.run(texts, folder / name, 4, ROWS // others, **parallel)
    return {"sum of halves": sum_of_halves()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    (folder / "ranks").mkdir()
    texts = pretraining.write_texts(folder)
    found = run_ranks(shared, 4, folder / "ranks", texts, folder)
    pretraining.run(texts, folder / "one", 4, ROWS)
    return SimpleNamespace(folder=folder, found=found)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_processes_that_share_rows_train_as_one(runs, layout):
    runs = runs.folder
    weights = lambda name, step: load_file(runs / name / f"checkpoints/step-00000{step}/weights.safetensors")
    found, one, start = weights(layout, 4), weights("one", 4), weights("one", 2)
    assert found.keys() == one.keys()
    for name, x in one.items():
        # Four updates, of gradients that are sums of some thousand products in another order.
        assert (found[name] - x).abs().max() <= 2**7 * torch.finfo(torch.float32).eps * x.abs().max(), name
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 0.01  # it has gone somewhere
    rows = [json.loads(line) for line in (runs / layout / "metrics.jsonl").read_text().splitlines()]
    alone = [json.loads(line) for line in (runs / "one" / "metrics.jsonl").read_text().splitlines()]
    figures = lambda table: [row[name] for row in table for name in ("loss", "grad_norm") if name in row]
    assert figures(rows) == pytest.approx(figures(alone), rel=1e-5)


def test_gradients_of_half_precision_are_summed_in_float32_where_they_are_sharded(runs):
    for found in runs.found:
        assert found["sum of halves"].tolist() == [1 + 2**-6] * 4  # 1 + 3 · 2 ** -8, rounded once


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        ({"context": 2, "context_by": "rings"}, "heads, ring"),
        ({"context": 0}, "parallel.context"),
        ({"context": 2, "pipeline": 2}, "parallel.pipeline = 2 does not go together with parallel.context = 2"),
    ],
)
def test_what_a_recipe_cannot_say_is_refused(tmp_path, parallel, said):
    with pytest.raises(ValueError, match=said):
        pretraining.recipe(tmp_path, 1, 1, **parallel)


def test_rows_that_cannot_be_shared_are_refused_before_anything_is_read(tmp_path):
    recipe = pretraining.recipe(tmp_path / "none.jsonl", 1, 1, context=3)
    model = models.Decoder(models.ModelConfig.from_hf(pretraining.MODEL | {"vocab_size": 301}))
    mesh = SimpleNamespace(size=lambda side: {"context": 3, "replicas": 3}.get(side, 1), first=True)
    with pytest.raises(ValueError, match="4 heads of queries cannot be dealt to 3 ranks"):
        refuse_impossible(recipe, model, least_needs(recipe, model, 24), tmp_path, torch.device("cpu"), mesh)
