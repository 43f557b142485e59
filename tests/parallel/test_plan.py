"""A plan counts what a run has: weights, gradients, states and activations to the byte, and communication by its formulas."""

import io
import json
import math
import re

import pytest
import torch
from rich.console import Console
from tiny_models import config_of

import tilestack
from tilestack import models
from tilestack.cli import main
from tilestack.cli.parallel import count_in_words, plan_table
from tilestack.lab.planning.plan import plan_of, plans
from tilestack.lab.planning.plan_costs import Cluster, Sharing, Workload, described_model, layer_bytes
from tilestack.shipped import shipped
from tilestack.train import Recipe
from tilestack.train.optimizers import make_optimizer
from tilestack.train.settings import read

MASTER = {"parameters": "bfloat16", "compute": "bfloat16", "updates": "master"}
STOCHASTIC = {"parameters": "bfloat16", "compute": "bfloat16"}
MODEL = config_of("qwen3") | {"num_hidden_layers": 4, "num_key_value_heads": 4, "intermediate_size": 96}
del MODEL["pad_token_id"]


def recipe_of(**sections):
    return read(Recipe, {"model": {"config": MODEL}, "data": {"sequence": 32, "batch": 2}} | sections)


def of_layout(recipe, **how):
    layout = Sharing(**how)
    gpus = layout.replicas * layout.tensor * layout.pipeline
    return plan_of(Workload(recipe), Cluster(gpus), layout)


@pytest.mark.parametrize(
    ("optimizer", "precision"),
    [
        ("adamw", {}),
        ("adamw", MASTER),
        ("adamw", STOCHASTIC),
        ("adamw8bit", {}),
        ("adamw8bit", MASTER),
        ("sgd", {}),
        ("muon", {}),
        ("muon", MASTER),
    ],
)
def test_weights_gradients_and_states_are_those_of_a_run(optimizer, precision):
    recipe = recipe_of(optimizer={"name": optimizer}, precision=precision)
    plan = of_layout(recipe)
    model = models.Decoder(models.ModelConfig.from_hf(MODEL)).to(getattr(torch, recipe.precision.parameters))
    stepping = make_optimizer(model, recipe.optimizer, recipe.precision, 0)
    model.hidden(torch.arange(8)[None]).float().mean().backward()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # the head's
    stepping.step()
    sizes = lambda tensors: sum(x.nbytes for x in tensors)
    assert plan.weights == sizes(model.parameters())
    assert plan.gradients == sizes(parameter.grad for parameter in model.parameters())
    states = [x for state in stepping.state.values() for x in state.values() if isinstance(x, torch.Tensor)]
    assert plan.optimizer == sizes(states)


def test_activations_of_a_layer_are_what_kernels_keep():
    """Of the second layer, all that autograd holds between forward and backward beside weights and tables."""

    def kept(layers):
        config = models.ModelConfig.from_hf(config_of("qwen3") | {"num_hidden_layers": layers, "head_dim": 16})
        model, found = models.Decoder(config).bfloat16(), {}
        known = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

        def keep(x):
            memory = x.untyped_storage()
            if memory.data_ptr() not in known:
                found[memory.data_ptr()] = memory
            return x

        ids = torch.arange(16)[None]
        documents = torch.tensor([0, 16], dtype=torch.int32)
        with tilestack.backend("triton"), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            hidden = model.hidden(ids, ids, documents)
        assert hidden.requires_grad
        return sum(memory.nbytes() for memory in found.values()), config

    one, _ = kept(1)
    two, config = kept(2)
    assert two - one == 16 * layer_bytes(config, 1, 2)


def test_shares_are_divided():
    recipe = recipe_of(precision=MASTER)
    alone = of_layout(recipe)
    sharded = of_layout(recipe, data=4, shard=True)
    assert (sharded.weights, sharded.gradients) == (alone.weights // 4, alone.gradients // 4)
    assert sharded.optimizer == math.ceil(alone.optimizer / 4)
    assert sharded.buffers > 0
    assert of_layout(recipe, data=4).buffers == alone.gradients
    assert sharded.activations == alone.activations
    model = described_model(recipe)
    matrices = sum(parameter.numel() for parameter in model.parameters() if parameter.ndim > 1)
    divided = of_layout(recipe, tensor=4)
    assert divided.weights == alone.weights - 2 * matrices * 3 // 4
    assert alone.activations // 4 < divided.activations < alone.activations
    shared = of_layout(recipe, context=2, method="ring")
    assert shared.weights == alone.weights
    assert 2 * shared.activations == alone.activations
    staged = of_layout(recipe, pipeline=4)
    head = 97 * 64 * 2
    assert (
        staged.weights == (alone.weights - 2 * head - 2 * 64) // 4 + head + 2 * 64
    )  # the last stage has norm and head
    assert alone.activations_checkpointed < alone.activations


@pytest.mark.parametrize(
    ("schedule", "kept", "wait"), [("1f1b", 2, 1 / 8), ("gpipe", 8, 1 / 8), ("interleaved", 2.5, 1 / 16)]
)
def test_a_schedule_says_what_stages_keep_and_how_long_they_wait(schedule, kept, wait):
    recipe = recipe_of(
        precision=MASTER, parallel={"schedule": schedule}, data={"sequence": 32, "batch": 2, "accumulate": 4}
    )
    alone, staged = of_layout(recipe), of_layout(recipe, pipeline=2)
    stream = 64 * 64 * 2  # tokens, hidden, bytes
    layer = (alone.activations - 4 * stream) // 4
    assert staged.activations == kept * (2 * layer + 4 * stream)
    assert staged.seconds["bubble"] == pytest.approx(wait * staged.seconds["arithmetic"])
    # The first process receives a gradient, the last a stream; of two stages each, both in one of them.
    messages = 3 if schedule == "interleaved" else 1
    assert staged.buffers == 8 * messages * stream
    sends = 2 if schedule == "interleaved" else 1
    assert staged.communication == {"pipeline": 8 * sends * 2 * stream}


def test_the_gradient_of_a_tied_weight_is_sent_between_stages():
    tied = recipe_of(model={"config": MODEL | {"tie_word_embeddings": True}})
    sent = lambda recipe, **how: of_layout(recipe, pipeline=2, **how).communication["pipeline"]
    assert sent(tied) - sent(recipe_of()) == 97 * 64 * 4


def test_communication_is_as_the_formulas_have_it():
    recipe = recipe_of(precision=MASTER, data={"sequence": 32, "batch": 2, "accumulate": 2})
    gradients = of_layout(recipe).gradients
    tokens, width, layers, hidden = 64, 2, 4, 64
    assert of_layout(recipe).communication == {}
    assert of_layout(recipe, data=4).communication == {"data": 2 * 3 * gradients // 4}
    assert of_layout(recipe, data=4, shard=True).communication == {"shard": 2 * 3 * (2 + 2) * gradients // 4}
    assert of_layout(recipe, tensor=2).communication == {"tensor": 4 * (4 * layers + 2) * tokens * hidden * width}
    heads = of_layout(recipe, context=2, method="heads").communication["heads"]
    assert heads == 2 * 4 * layers * tokens // 2 * width * (4 + 4 + 4 + 4) * 24 // 2
    ring = of_layout(recipe, context=2, method="ring").communication["ring"]
    assert ring == 4 * layers * tokens // 2 * (4 * 48) * (2 * width + 2 * 4)
    assert of_layout(recipe, pipeline=2).communication == {"pipeline": 4 * 2 * tokens * hidden * width}


def test_what_stages_and_shards_keep_beside_their_share():
    recipe = recipe_of(data={"sequence": 32, "batch": 2})
    alone, staged = of_layout(recipe), of_layout(recipe, pipeline=2)
    ends = 4 * 64 * 4 * 64  # embedding, last norm, what the head reads and its gradient: 64 tokens of 64 float32
    assert staged.activations == alone.activations + ends  # half of the layers, of two micro-batches
    tied = recipe_of(model={"config": MODEL | {"tie_word_embeddings": True}})
    one, last = of_layout(tied), of_layout(tied, pipeline=4)
    head = 97 * 64 * 4
    assert last.weights == (one.weights - head - 4 * 64) // 4 + head + 4 * 64  # the weight of embedding and head, again
    layer = sum(4 * parameter.numel() for parameter in described_model(recipe).layers[0].parameters())
    assert of_layout(recipe, data=4, shard=True).buffers == 2 * 2 * layer  # weights and gradients, of two
    adapted = of_layout(recipe_of(lora={"rank": 2}))
    assert (adapted.weights, adapted.gradients, adapted.optimizer) == (alone.weights, 0, 0)


def test_a_step_is_arithmetic_and_bubble_and_what_nothing_hides():
    work = Workload(recipe_of(data={"sequence": 32, "batch": 2, "accumulate": 2}))
    apart = Cluster(4, node=2)
    plan = plan_of(work, apart, Sharing(tensor=2, pipeline=2))
    assert plan.micro_batches == 8
    assert plan.seconds["bubble"] == pytest.approx(plan.seconds["arithmetic"] / 8)
    assert plan.seconds["tensor"] == pytest.approx(plan.communication["tensor"] / apart.bandwidth)
    assert plan.seconds["pipeline"] == pytest.approx(plan.communication["pipeline"] / apart.network)
    for layout in (Sharing(data=4), Sharing(data=4, shard=True)):
        quick = plan_of(work, Cluster(4, bandwidth=1e15), layout)
        ((_, sent),), arithmetic = quick.communication.items(), quick.seconds["arithmetic"]
        slow = plan_of(work, Cluster(4, bandwidth=sent / arithmetic / 3), layout)
        assert quick.seconds["not hidden"] == 0
        assert slow.seconds["not hidden"] == pytest.approx(2 * arithmetic)


def test_key_heads_are_sent_as_often_as_they_are_repeated():
    one_head = recipe_of(model={"config": MODEL | {"num_key_value_heads": 1}}, precision=MASTER)
    heads = of_layout(one_head, context=2, method="heads").communication["heads"]
    assert heads == 2 * 2 * 4 * 32 * 2 * (4 + 2 + 2 + 4) * 24 // 2


def test_what_fits_comes_before_what_is_faster():
    work = Workload(recipe_of())
    least = min(plan.memory for plan in plans(work, Cluster(8, memory=1)))
    found = plans(work, Cluster(8, memory=2 * least))
    fitting = [plan for plan in found if plan.fits]
    assert found[: len(fitting)] == fitting != found
    assert min(plan.step for plan in found[len(fitting) :]) < fitting[-1].step


def test_a_layout_that_does_not_fit_is_told_from_one_that_does_with_checkpointing():
    recipe = recipe_of(data={"sequence": 32, "batch": 64})
    work = Workload(recipe)
    (plan,) = plans(work, Cluster(1))
    assert (plan.fits, plan.checkpointing) == (True, False)
    least = plan.memory - plan.activations + plan.activations_checkpointed
    (tight,) = plans(work, Cluster(1, memory=least))
    assert (tight.fits, tight.checkpointing) == (True, True)
    assert tight.memory == least
    assert tight.seconds["arithmetic"] == pytest.approx(plan.seconds["arithmetic"] * 4 / 3)
    (full,) = plans(work, Cluster(1, memory=least - 1))
    assert not full.fits


def test_every_layout_uses_all_gpus_and_the_first_is_the_fastest():
    recipe = recipe_of()
    found = plans(Workload(recipe), Cluster(8))
    sizes = {(p.layout.data, p.layout.context, p.layout.tensor, p.layout.pipeline) for p in found}
    assert all(math.prod(each) == 8 for each in sizes)
    assert {(8, 1, 1, 1), (1, 8, 1, 1), (2, 1, 4, 1), (2, 1, 1, 4), (2, 1, 2, 2)} <= sizes
    assert not any(context > 1 and pipeline > 1 for _, context, _, pipeline in sizes)  # which a recipe refuses
    assert not any(tensor == 8 or pipeline == 8 for _, _, tensor, pipeline in sizes)  # 4 heads, 4 layers
    assert not any(p.layout.context == 8 and p.layout.method == "heads" for p in found)
    steps = [plan.step for plan in found]
    assert steps == sorted(steps)
    assert found[0].step == sum(found[0].seconds.values())


def test_what_the_recipe_cannot_say_is_not_planned():
    found = plans(Workload(recipe_of(optimizer={"name": "muon"})), Cluster(4))
    assert {(plan.layout.shard, plan.layout.tensor) for plan in found} == {(False, 1)}


def test_machines_that_are_slow_to_reach_are_counted():
    near, far = (plan_of(Workload(recipe_of()), Cluster(4, node=node), Sharing(tensor=4)) for node in (4, 2))
    assert far.seconds["tensor"] == pytest.approx(9 * near.seconds["tensor"])


def run_plan(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["plan", *map(str, arguments)])
    return ended.value.code, *capsys.readouterr()


def test_the_command_plans_for_recipes_and_for_folders(capsys, tmp_path):
    code, printed, _ = run_plan(capsys, "llama-1b", "--gpus", 2, "--json", "-")
    rows = json.loads(printed)
    assert code == 0
    assert {row["layout"]["data"] for row in rows} == {1, 2}
    assert rows[0]["memory"] > rows[0]["weights"] > 0
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    code, printed, _ = run_plan(capsys, tmp_path, "--gpus", 4, "--sequence", 64, "--batch", 3)
    assert code == 0
    assert "3 rows of 64 tokens" in " ".join(printed.split())
    assert "The step is an estimate" in " ".join(printed.split())


def test_numbers_are_whole_on_a_narrow_terminal():
    lines = io.StringIO()
    recipe = Recipe.load(shipped("recipes") / "qwen3-0.6b.toml")
    Console(file=lines, width=80).print(plan_table(plans(Workload(recipe), Cluster(8))))
    assert re.search(
        r"^data 8, shard +\d+ MB +[\d.]+ GB +[\d.]+ GB +yes +[\d.]+ GB +[\d.]+ s *$", lines.getvalue(), re.M
    )
    assert not re.search(r"^ +[GM]B", lines.getvalue(), re.M)


def test_the_command_plans_for_a_model_in_one_file(capsys, tmp_path):
    models.save_gguf(models.Decoder(models.ModelConfig.from_hf(MODEL)), tmp_path / "model.gguf")
    code, printed, problem = run_plan(capsys, tmp_path / "model.gguf", "--gpus", 2, "--sequence", 64)
    assert code == 0, problem
    assert "1 row of 64 tokens" in " ".join(printed.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("llama-1", "--gpus", 2), "Did you mean llama-1b?"),
        (("llama-1b", "--gpus", 0), "'--gpus'"),
        (("llama-1b", "--gpus", 2, "--memory", 0), "memory must be above 0, not 0"),
        (("llama-1b", "--gpus", 2, "--efficiency", "nan"), "efficiency must be above 0, not nan"),
        (("llama-1b", "--gpus", 2, "--efficiency", 40), "efficiency is a share of the peak, at most 1, not 40"),
        (("llama-1b", "--gpus", 2, "--set", "data.batches=2"), "data.batches"),
        (("llama-1b", "--gpus", 2, "--sequence", 10000), "more than the 8192 positions"),
        ((".", "--gpus", 2), "has no config.json, so it is no model"),
    ],
)
def test_wrong_arguments_are_refused_in_a_line(capsys, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    code, _, error = run_plan(capsys, *arguments)
    assert code == 1
    assert said in " ".join(error.split())


@pytest.mark.parametrize(
    ("count", "words"), [(231_000, "231.00 k"), (134_515_008, "134.52 M"), (1_236_000_000, "1.24 G")]
)
def test_a_small_model_has_more_than_0_00_g_parameters(count, words):
    assert count_in_words(count) == words
