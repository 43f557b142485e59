"""Stages of a pipeline compute what one process does: the loss and every gradient of a step, in float64."""

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from tiny_models import ours

from tilestack.data.packing import collate
from tilestack.parallel.pipeline import SCHEDULES, Pipeline, deal_layers, keep_stage, layers_of_stages
from tilestack.train.next_token import loss_of_labels, next_token_loss

ROWS, TOKENS, MICRO_BATCHES = 2, 12, 4
MODELS = {"llama3": 3, "gemma2": 4}  # layers; the second is tied, has windows, and scales its embedding


def model_of(family):
    return ours(family, num_hidden_layers=MODELS[family]).double().train()


def micro_batches():
    """Packed rows, no two of which have the same documents."""
    numbers = torch.Generator().manual_seed(5)
    draw = lambda size: torch.randint(97, (size + 1,), generator=numbers).tolist()
    sizes = [[[3 + number, 4], [10 - number]] for number in range(MICRO_BATCHES)]
    made = [[[draw(size) for size in row] for row in batch] for batch in sizes]
    return [collate([[(text[:-1], text[1:]) for text in row] for row in batch], TOKENS, 3) for batch in made]


def piped(group, family, schedule):
    model = model_of(family)
    model.checkpointing = schedule == "gpipe"
    pipeline = Pipeline(
        model, group, loss_of_labels, rows=ROWS, tokens=TOKENS, micro_batches=MICRO_BATCHES, schedule=schedule
    )
    losses = {"first": pipeline.step(micro_batches())}
    model.zero_grad()
    losses |= {"second": pipeline.step(micro_batches())}
    return losses | {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(
    ("family", "schedule", "stages"), [("llama3", "1f1b", 3), ("gemma2", "1f1b", 2), ("gemma2", "gpipe", 2)]
)
def test_stages_compute_what_one_process_does(family, schedule, stages, tmp_path):
    found = run_ranks(piped, stages, tmp_path, family, schedule)
    model = model_of(family)
    losses = [next_token_loss(model, batch) for batch in micro_batches()]
    sum(losses).backward()
    for stage in found:
        for loss in (stage.pop("first"), stage.pop("second")):
            torch.testing.assert_close(loss, sum(losses).detach())
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert set().union(*found) == set(gradients)
    for stage in found:
        for name, grad in stage.items():
            torch.testing.assert_close(grad, gradients[name], rtol=1e-9, atol=1e-11, msg=lambda m: f"{name}: {m}")
    shared = [name for name in gradients if sum(name in stage for stage in found) > 1]
    assert shared == (["embedding.weight"] if model.config.tied else [])


def test_layers_are_dealt_so_that_the_largest_stage_is_smallest():
    spans = lambda *given: [(part.start, part.stop) for part in deal_layers(*given)]
    assert spans([1] * 8, 0, 0, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert spans([1] * 6, 2, 2, 2) == [(0, 3), (3, 6)]
    assert spans([1] * 9, 0, 3, 2) == [(0, 6), (6, 9)]
    assert spans([1] * 4, 10, 10, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert spans([1, 1, 9, 1], 1, 0, 2) == [(0, 2), (2, 4)]
    with pytest.raises(ValueError, match="2 layers cannot be dealt to 3 stages: take 1 to 2"):
        deal_layers([1, 1], 0, 0, 3)


def test_a_stage_keeps_its_layers_under_their_names():
    model = ours("llama3", num_hidden_layers=3)
    names = [name for name, _ in model.named_parameters()]
    kept = []
    for layers in layers_of_stages(model, 3):
        part = ours("llama3", num_hidden_layers=3)
        keep_stage(part, layers)
        kept += [name for name, _ in part.named_parameters()]
    assert kept == names


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_wrong_pipelines_are_refused_by_their_numbers(alone):
    make = lambda family="llama3", **how: Pipeline(
        ours(family), alone, loss_of_labels, **dict(rows=ROWS, tokens=TOKENS, micro_batches=4) | how
    )
    with pytest.raises(ValueError, match=f"no schedule 'zigzag'; choose from {', '.join(SCHEDULES)}"):
        make(schedule="zigzag")
    with pytest.raises(ValueError, match=r"set data\.accumulate = 1 or more"):
        make(micro_batches=0)
    with pytest.raises(ValueError, match="pipeline stages take dense models"):
        make("mixtral")
    pipeline = make(tokens=TOKENS - 1)
    with pytest.raises(ValueError, match=r"are \(2, 11\), and one is \(2, 12\)"):
        pipeline.step(micro_batches())
    with pytest.raises(ValueError, match="has 4 micro-batches, not 2"):
        make().step(micro_batches()[:2])
