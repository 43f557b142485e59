"""Whole runs on several processes: continued to the bit on the same layout, and within rounding on any other."""

import json

import pretraining
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from tilestack import models

MOVING = {"moving": [{"data": 2}, {}, {"tensor": 2}], "moving stages": [{"pipeline": 2}, {}, {"data": 2}]}
HALF = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of all runs; see `pretraining`."""
    folder = tmp_path_factory.mktemp("runs")
    texts = pretraining.write_texts(folder)
    for name in ("ranks", "more ranks"):
        (folder / name).mkdir()
    run_ranks(pretraining.interrupted_and_not, 2, folder / "ranks", texts, folder)
    for name in MOVING:
        pretraining.run(texts, folder / name, 4, 2)
    run_ranks(pretraining.continued, 2, folder / "more ranks", texts, folder)
    pretraining.run(texts, folder / "one", 6, 2)
    return folder


@pytest.mark.parametrize("layout", pretraining.LAYOUTS)
def test_a_run_is_continued_to_the_bit_on_the_same_layout(runs, layout):
    at_once, in_two = (runs / f"{layout} {how}" for how in ("at once", "in two"))
    for name in ("weights", "optimizer", "average", "rng"):
        file = f"checkpoints/step-000004/{name}.safetensors"
        assert (at_once / file).read_bytes() == (in_two / file).read_bytes()
    steps = lambda folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # Each part of a run looks at the model when it ends, so that the second has a look more.
    losses = lambda folder: [(row["step"], row["loss"]) for row in steps(folder) if "loss" in row]
    assert losses(at_once) == losses(in_two)
    assert [step for step, _ in losses(at_once)] == [1, 2, 3, 4]  # one set of metrics, though there were two processes


@pytest.mark.parametrize(
    "layout", [name for name, (optimizer, _) in pretraining.LAYOUTS.items() if optimizer == "adamw"]
)
def test_a_checkpoint_does_not_know_how_its_processes_were_laid_out(runs, layout):
    def contents(layout):
        folder = runs / f"{layout} at once" / "checkpoints" / "step-000004"
        files = {name: load_file(folder / f"{name}.safetensors") for name in ("weights", "optimizer", "average")}
        shapes = {(file, name): (x.shape, x.dtype) for file, group in files.items() for name, x in group.items()}
        return shapes, json.loads((folder / "state.json").read_text())["optimizer"]

    assert contents(layout) == contents("data")


@pytest.mark.parametrize(("name", "expected_sides"), MOVING.items())
def test_a_run_goes_on_with_other_processes_and_ends_as_if_it_had_not(runs, name, expected_sides):
    papers = json.loads((runs / name / "run.json").read_text())
    moving, one = (load_file(runs / each / "checkpoints/step-000006/weights.safetensors") for each in (name, "one"))
    start = load_file(runs / "one" / "checkpoints/step-000002/weights.safetensors")
    assert moving.keys() == one.keys()
    for name, x in one.items():
        # Six updates, of gradients that are sums of some thousand products in another order.
        assert (moving[name] - x).abs().max() <= 2**7 * HALF * x.abs().max(), name
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 0.01  # it has gone somewhere
    sides = [{side: n for side, n in entry.get("processes", {}).items() if n > 1} for entry in papers]
    assert sides == expected_sides


def test_the_model_of_a_divided_run_is_that_of_its_average(runs):
    """It was gathered from two processes; its words are those of one model, whole."""
    for layout in ("sharded", "tensor", "pipeline"):
        folder = runs / f"{layout} at once"
        model = models.load(folder / "model")
        kept = load_file(folder / "checkpoints/step-000004/average.safetensors")
        assert {name: x.shape for name, x in model.named_parameters()} == {name: x.shape for name, x in kept.items()}
        for name, x in model.named_parameters():
            assert torch.equal(x, kept[name])
