"""Stages of a pipeline: the layers they have, what they keep and generate, what is refused. That they train as one process does
is in test_placement.py and test_runs.py."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from small_runs import ROWS, TOKENS, Dealt, after_steps, batch, decoder
from tiny_models import config_of

from tilestack import models
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.pipeline import Pipeline, micro_batches_kept, waiting_share
from tilestack.parallel.placement import Placement
from tilestack.parallel.stages import STAGES_EACH, deal_layers, layers_of_stages, owner_of, refuse_stages, split_stages
from tilestack.train.align.dpo import DPORecipe
from tilestack.train.align.grpo import GRPORecipe
from tilestack.train.align.kto import KTORecipe
from tilestack.train.align.sft import SFTRecipe
from tilestack.train.next_token import next_token_loss
from tilestack.train.optimizers import make_optimizer
from tilestack.train.recipe import Optimizer, Precision, Recipe
from tilestack.train.settings import RecipeError, read
from tilestack.train.static_step import why_not_static

FAMILY, LAYERS, MICRO_BATCHES, NEW = "gemma2", 5, 4, 5  # tied, and with windows
BATCHES = [batch(number) for number in range(MICRO_BATCHES)]


def pipeline_of(model, schedule: str, **how) -> Pipeline:
    sizes = dict(rows=ROWS, tokens=TOKENS, micro_batches=MICRO_BATCHES)
    return Pipeline(model, **sizes | how, schedule=schedule)


def continued(model) -> torch.Tensor:
    """Tokens that follow two rows; the first step reads several, later ones one."""
    return torch.stack(list(models.generate(model, batch(99).ids[:, :6], max_new_tokens=NEW, temperature=1.0)))


def piped(group) -> dict[str, torch.Tensor]:
    """By each schedule, what is generated, and how many micro-batches' activations this process had at most; the weight of both
    ends after steps that round at random; and losses in half precision."""
    found = {}
    for schedule, each in STAGES_EACH.items():
        model = decoder(FAMILY, LAYERS)
        split_stages(model, group, schedule)
        found[f"{schedule} tokens"] = continued(model)
        pipeline, kept = pipeline_of(model, schedule), Kept(model)
        pipeline.step(BATCHES)
        assert not kept.now
        found[f"{schedule} kept"] = torch.tensor(kept.most / each)
    found["tied"] = rounded_weight()
    return found | losses_in_half_precision(Mesh(Layout(pipeline=group.size())))


class Kept:
    """Counts the forwards of a model's stages whose backward is still to come."""

    def __init__(self, model):
        self.now = self.most = 0
        run_stage = model.run_stage

        def watched(*given):
            out = run_stage(*given)
            self.now += 1
            self.most = max(self.most, self.now)
            out.register_hook(self.drop)
            return out

        model.run_stage = watched

    def drop(self, grad: torch.Tensor) -> None:
        self.now -= 1


def rounded_weight() -> torch.Tensor:
    model = decoder(FAMILY, LAYERS).bfloat16()
    placement = Placement(model, Mesh(Layout(pipeline=dist.get_world_size())))
    precision = Precision(parameters="bfloat16", compute="bfloat16", updates="stochastic")
    optimizer = make_optimizer(model, Optimizer(), precision, 0, placement.parameters)
    pipeline = pipeline_of(model, "1f1b")
    for _ in range(2):
        pipeline.step(BATCHES)
        placement.finish_backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.embedding.weight


def losses_in_half_precision(mesh: Mesh) -> dict[str, torch.Tensor]:
    """Losses of steps that compute in bfloat16, of weights that are float32 and of such that are not, and one in evaluation."""
    found = {}
    for weights in (torch.float32, torch.bfloat16):
        model = decoder(FAMILY, LAYERS).to(weights)
        parallel = {"pipeline": mesh.size("pipeline")}
        data = {"accumulate": MICRO_BATCHES, "batch": ROWS, "sequence": TOKENS}
        recipe = read(Recipe, {"data": data, "parallel": parallel, "precision": {"compute": "bfloat16"}})
        placement = Placement(model, mesh)
        with torch.no_grad():
            found[f"evaluated of {weights}"] = next_token_loss(model, BATCHES[0])
        found[f"steps of {weights}"] = after_steps(recipe, placement, Dealt(mesh), range(1))["figures"][0, 0]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run_ranks(piped, 2, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("schedule", STAGES_EACH)
def test_a_process_keeps_activations_of_as_many_micro_batches_as_is_said(two, schedule):
    assert max(float(rank[f"{schedule} kept"]) for rank in two) == micro_batches_kept(schedule, 2, MICRO_BATCHES)


def test_what_schedules_keep_and_wait_for():
    assert [micro_batches_kept(schedule, 4, 8) for schedule in STAGES_EACH] == [4, 8, 5.5]
    assert [micro_batches_kept(schedule, 4, 2) for schedule in STAGES_EACH] == [2, 2, 2]
    assert [waiting_share(schedule, 4, 8) for schedule in STAGES_EACH] == [3 / 8, 3 / 8, 3 / 16]


@pytest.mark.parametrize("schedule", STAGES_EACH)
def test_stages_generate_what_one_process_does(two, schedule):
    expected = continued(decoder(FAMILY, LAYERS))
    assert len(expected.unique()) > 3
    for rank in two:
        assert torch.equal(rank[f"{schedule} tokens"], expected)


def test_both_ends_have_the_same_weight_though_it_is_rounded_at_random(two):
    assert torch.equal(two[0]["tied"], two[1]["tied"])
    assert not torch.equal(two[0]["tied"], decoder(FAMILY, LAYERS).bfloat16().embedding.weight)


def test_losses_of_stages_in_half_precision_are_those_of_one_process(two):
    """To the bit: computed in bfloat16 where one process does so, and told in float32."""
    expected = losses_in_half_precision(Mesh())
    for rank in two:
        for name, loss in expected.items():
            assert torch.equal(rank[name], loss), name
            assert not torch.equal(loss.bfloat16().to(loss), loss), name
    exact = torch.stack([next_token_loss(decoder(FAMILY, LAYERS), batch) for batch in BATCHES])
    assert (expected["steps of torch.float32"] - exact.sum() / sum(batch.valid for batch in BATCHES)).abs() > 1e-4


def test_layers_are_dealt_so_that_the_largest_stage_is_smallest():
    spans = lambda *given: [(part.start, part.stop) for part in deal_layers(*given)]
    assert spans([1] * 8, 0, 0, 4) == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert spans([1] * 6, 2, 2, 2) == [(0, 3), (3, 6)]
    assert spans([1] * 9, 0, 3, 2) == [(0, 6), (6, 9)]
    assert spans([1] * 4, 10, 10, 4) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert spans([1, 1, 9, 1], 1, 0, 2) == [(0, 2), (2, 4)]
    with pytest.raises(ValueError, match="2 layers cannot be dealt to 3 stages: take 1 to 2"):
        deal_layers([1, 1], 0, 0, 3)
    words = decoder("llama3", 8, vocab_size=4000)  # so many that embedding and head weigh as much as layers
    assert layers_of_stages(words, 2) == [range(4), range(4, 8)]


@pytest.mark.parametrize("schedule", STAGES_EACH)
@pytest.mark.parametrize("family", ["llama3", "gemma2"])
def test_a_process_keeps_its_layers_under_their_names(family, schedule):
    whole = decoder(family, LAYERS)
    stages = layers_of_stages(whole, 2, schedule)
    kept: dict[str, list[int]] = {}
    for rank in range(2):
        part = decoder(family, LAYERS)
        split_stages(part, SimpleNamespace(rank=lambda rank=rank: rank, size=lambda: 2), schedule)
        for name, _ in part.named_parameters():
            kept.setdefault(name, []).append(rank)
    assert kept.keys() == {name for name, _ in whole.named_parameters()}
    twice = {"embedding.weight"} if whole.config.tied else set()
    assert {name for name, ranks in kept.items() if len(ranks) > 1} == twice
    assert {name: ranks[0] for name, ranks in kept.items()} == {name: owner_of(name, stages, 2) for name in kept}


@pytest.mark.parametrize(
    ("family", "processes", "schedule", "micro_batches", "said"),
    [
        ("mixtral", 2, "1f1b", 4, r"takes dense models.*\(num_experts\)"),
        ("llama3", 4, "1f1b", 4, r"needs 4 layers or more, and the model has 2 \(num_hidden_layers\)"),
        ("llama3", 2, "interleaved", 4, r'parallel.pipeline = 2 by parallel.schedule = "interleaved" needs 4 layers'),
        ("llama3", 2, "1f1b", 1, r"as many micro-batches in a step, and data.accumulate is 1; set it to 2 or more"),
    ],
)
def test_what_cannot_be_staged_is_refused_by_its_numbers(family, processes, schedule, micro_batches, said):
    with pytest.raises(ValueError, match=said):
        refuse_stages(models.ModelConfig.from_hf(config_of(family)), processes, schedule, micro_batches)


def test_micro_batches_that_cannot_be_interleaved_are_refused_and_others_are_not():
    config = models.ModelConfig.from_hf(config_of("llama3") | {"num_hidden_layers": 8})
    for micro_batches in (1, 2, 3, 4, 6):
        refuse_stages(config, 2, "interleaved", micro_batches)
    with pytest.raises(
        ValueError, match=r"takes micro-batches 2 at a time, and data.accumulate is 5; set it to a multiple"
    ):
        refuse_stages(config, 2, "interleaved", 5)


@pytest.mark.parametrize("kind", [SFTRecipe, DPORecipe, KTORecipe, GRPORecipe])
def test_what_only_pretraining_has_is_refused_elsewhere(kind):
    with pytest.raises(RecipeError, match=r"parallel.pipeline = 2 is for train; "):
        read(kind, {"parallel": {"pipeline": 2}})


def test_steps_of_stages_are_not_captured():
    """One buffer for batches would have the last micro-batch in the place of all."""
    recipe, objective = read(Recipe, {"parallel": {"pipeline": 2}}), SimpleNamespace(fixed_shapes=True)
    assert "parallel.pipeline" in why_not_static(recipe, objective, None, torch.device("cpu"))


@pytest.fixture
def alone(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_steps_of_another_size_are_refused(alone):
    model = decoder(FAMILY)
    split_stages(model, alone, "1f1b")
    with pytest.raises(ValueError, match=r"are \(2, 11\), and one is \(2, 12\)"):
        pipeline_of(model, "1f1b", tokens=TOKENS - 1).step(BATCHES)
    with pytest.raises(ValueError, match="has 4 micro-batches, not 2"):
        pipeline_of(model, "1f1b").step(BATCHES[:2])
