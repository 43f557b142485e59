"""Whole runs on several processes: continued to the bit on the same layout, and within rounding on any other."""

import json

import pretraining
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file

from tilestack import models

HALF = torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folders of all runs; see `pretraining`."""
    folder = tmp_path_factory.mktemp("runs")
    texts = pretraining.write_texts(folder)
    for name in ("ranks", "more ranks"):
        (folder / name).mkdir()
    run_ranks(pretraining.interrupted_and_not, 2, folder / "ranks", texts, folder)
    pretraining.run(texts, folder / "moving", 4, 2)
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


def test_a_run_goes_on_with_other_processes_and_ends_as_if_it_had_not(runs):
    moving, one = (load_file(runs / name / "checkpoints/step-000006/weights.safetensors") for name in ("moving", "one"))
    start = load_file(runs / "one" / "checkpoints/step-000002/weights.safetensors")
    assert moving.keys() == one.keys()
    for name, x in one.items():
        # Six updates, of gradients that are sums of some thousand products in another order.
        assert (moving[name] - x).abs().max() <= 2**7 * HALF * x.abs().max(), name
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 0.01  # it has gone somewhere
    papers = json.loads((runs / "moving" / "run.json").read_text())
    assert [entry.get("processes", {}).get("data", 1) for entry in papers] == [2, 1, 1]
    assert papers[2]["processes"]["tensor"] == 2


def test_the_model_of_a_divided_run_is_that_of_its_average(runs):
    """It was gathered from two processes; its words are those of one model, whole."""
    for layout in ("sharded", "tensor"):
        folder = runs / f"{layout} at once"
        model = models.load(folder / "model")
        kept = load_file(folder / "checkpoints/step-000004/average.safetensors")
        assert {name: x.shape for name, x in model.named_parameters()} == {name: x.shape for name, x in kept.items()}
        for name, x in model.named_parameters():
            assert torch.equal(x, kept[name])
