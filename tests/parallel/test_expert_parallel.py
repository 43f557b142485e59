"""Processes that share the experts of a mixture compute what one process does that has all experts and all tokens."""

import json

import expert_steps
import pretraining
import pytest
import torch
from expert_steps import BIASED, EXPERTS, NO_LOSS, mixture, tokens_of
from ranks import run_ranks
from safetensors.torch import load_file, save_file
from small_runs import ROWS, TOKENS, train
from tiny_models import config_of

from tilestack import models
from tilestack.lab.planning.plan import plan_of, plans
from tilestack.lab.planning.plan_costs import Cluster, Sharing, Workload
from tilestack.parallel.experts import refuse_experts
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.train import Recipe
from tilestack.train.settings import read

# What float64 may lose: a few thousand additions in another order, each off by half a unit in the last place at most.
SLACK = 2**12 * torch.finfo(torch.float64).eps
FIGURES = 4 * torch.finfo(torch.float32).eps  # which are kept in float32


def assert_same(found, expected):
    """That tensors are those of one process, by name."""
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        error = (found[name] - x).abs().max() / x.abs().max().clamp(min=1e-30)
        assert error < (FIGURES if name == "figures" else SLACK), f"{name} differs by {float(error):.3g}"


def of(kind, found):
    return {name.removeprefix(f"{kind} "): x for name, x in found.items() if name.startswith(f"{kind} ")}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """What two processes found, and the folder of their runs."""
    folder = tmp_path_factory.mktemp("experts")
    (folder / "ranks").mkdir()
    texts = pretraining.write_texts(folder)
    found = run_ranks(expert_steps.pairs, 2, folder / "ranks", texts, folder)
    for name, steps in (("moving", 4), ("one", 4)):
        expert_steps.run(texts, folder / name, steps, accumulate=2)
    expert_steps.run(texts, folder / "one by muon", 4, accumulate=2, optimizer="muon")
    return found, folder


@pytest.mark.parametrize(("kind", "only"), [("even", None), ("one rank", 0)])
def test_a_layer_whose_experts_are_shared_is_the_layer_on_all_tokens(pairs, kind, only):
    """Also where one rank has no rows at all: all tokens choose experts of the other."""
    layer, batches = mixture(only), [tokens_of(rank) for rank in range(2)]
    outs, routers, loads = [], [], torch.zeros(EXPERTS)
    for x in batches:
        layer.router.weight.grad = None
        out = layer(x)
        (out.square().sum() + layer.balance.auxiliary_loss).backward()
        loads += layer.balance.tokens_per_expert
        outs.append(out.detach())
        routers.append(layer.router.weight.grad.clone())
    assert (loads[EXPERTS // 2 :] == 0).all() == (kind == "one rank")
    half = EXPERTS // 2
    for rank, found in enumerate(pairs[0]):
        own = slice(rank * half, (rank + 1) * half)
        expected = {
            "out": outs[rank], "dx": batches[rank].grad, "drouter": routers[rank],
            "dgate_up": layer.gate_up.grad[own], "ddown": layer.down.grad[own], "same tokens": outs[0],
            "eval": outs[rank], "no gradients": outs[rank],
        }  # fmt: skip
        assert_same(of(kind, found), expected)
        assert torch.equal(found[f"{kind} same tokens"], pairs[0][0][f"{kind} same tokens"])


@pytest.mark.parametrize(("kind", "settings", "batches"), [("lora", {"lora": 2}, 2), ("context", NO_LOSS, 1)])
def test_adapters_of_experts_and_parts_of_rows(pairs, kind, settings, batches):
    expected = train("qwen3_moe", Mesh(), {}, batches, **settings)
    assert_same(of(kind, pairs[0][0]), expected)
    assert float(expected["figures"][:, 0].std()) > 1e-4  # it has learned


def test_what_is_sent_is_what_a_plan_says(pairs):
    """Of tokens that all go to all experts, so that every process is sent as many."""
    config = config_of("qwen3_moe") | {"num_experts": 4, "num_experts_per_tok": 4}
    del config["pad_token_id"]
    data = {"batch": ROWS, "sequence": TOKENS, "accumulate": 2}
    recipe = read(Recipe, {"model": {"config": config}, "data": data})
    plan = plan_of(Workload(recipe), Cluster(2), Sharing(data=2, expert=2))
    # The run was in float64, whose rows are twice as long as those of the plan's float32; counts are as they were.
    counts = 2 * 4 * 4 // 2  # of a mixture: micro-batches, experts, bytes
    planned = 2 * (plan.communication["expert"] - counts) + counts
    # And a forward more without gradients, which sends nothing this way.
    assert [int(found["sent"]) for found in pairs[0]] == [planned] * 2
    for found in pairs[0]:
        assert found["rows in float32"] == 2 * found["rows in bfloat16"] > 0


@pytest.mark.parametrize("optimizer", ["", "adamw ", "muon "])
@pytest.mark.parametrize("file", ["weights", "optimizer", "average", "loads", "rng"])
def test_a_run_is_continued_to_the_bit(pairs, file, optimizer):
    at_once, in_two = (
        pairs[1] / f"{optimizer}{name}" / f"checkpoints/step-000004/{file}.safetensors"
        for name in ("at once", "in two")
    )
    assert at_once.read_bytes() == in_two.read_bytes()


def test_a_checkpoint_is_that_of_one_process_and_is_continued_by_one(pairs):
    folder = pairs[1]
    saved = lambda name, step: load_file(folder / name / f"checkpoints/step-00000{step}/weights.safetensors")
    one, moving, start = saved("one", 4), saved("moving", 4), saved("one", 2)
    assert {name: x.shape for name, x in saved("at once", 4).items()} == {name: x.shape for name, x in one.items()}
    for found in (moving, saved("at once", 4)):
        for name, x in one.items():
            # Four updates, of gradients that are sums of some thousand products in another order.
            assert (found[name] - x).abs().max() <= 2**7 * torch.finfo(torch.float32).eps * x.abs().max(), name
    assert max(float((one[name] - start[name]).abs().max()) for name in one) > 0.005  # it has gone somewhere
    processes = [
        entry.get("processes", {}).get("expert", 1) for entry in json.loads((folder / "moving/run.json").read_text())
    ]
    assert processes == [2, 1]
    exported = models.load(folder / "at once" / "model")
    average = load_file(folder / "at once" / "checkpoints/step-000004/average.safetensors")
    for name, x in exported.named_parameters():
        assert torch.equal(x, average[name])


def test_muon_turns_the_matrices_of_experts_that_are_here(pairs):
    """Each expert's gate, up and down by itself, as one process does that has all of them; also from a checkpoint."""
    together, one = (
        load_file(pairs[1] / name / "checkpoints/step-000004/weights.safetensors")
        for name in ("muon in two", "one by muon")
    )
    # Newton–Schulz makes the smallest directions of a gradient 3.4445 times larger five times over, and their rounding with them.
    slack = 3.4445**5 * torch.finfo(torch.float32).eps
    for name, x in one.items():
        assert (together[name] - x).abs().max() <= slack * x.abs().max(), name


def test_steps_go_on_under_another_layout(tmp_path):
    """Of four processes: two that share experts, twice; then all four, or sharded beside, or none. The router has a bias, which
    the loads of all processes move."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first = run_ranks(expert_steps.first_half, 4, tmp_path / "first")
    groups = ("data expert", "data copies", "data told", "tensor expert", "tensor copies", "tensor told")
    ranks_of = {name: [found.pop(name).tolist() for found in first] for name in groups}
    assert ranks_of["data expert"] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert ranks_of["data copies"] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert ranks_of["tensor expert"] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert ranks_of["tensor copies"] == [[0], [1], [2], [3]]
    assert ranks_of["data told"] == [[0, 1, 2, 3]] * 4
    assert ranks_of["tensor told"] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    alone = lambda steps, saved=None: train("qwen3_moe", Mesh(), {}, 4, steps=steps, saved=saved, **BIASED)
    expected = alone(range(4))
    assert_same(first[0], alone(range(2)))
    assert expected["weight layers.1.mlp.router.bias"].abs().max() > 0.05  # it was moved
    saved = tmp_path / "saved.safetensors"
    save_file(first[0], saved)
    second = run_ranks(expert_steps.second_half, 4, tmp_path / "second", saved)
    continued = {kind: of(f"{kind}:", second[0]) for kind in ("expert", "shard", "data")} | {
        "one": alone(range(2, 4), saved)
    }
    expected["figures"] = expected["figures"][2:]
    for found in continued.values():
        assert_same(found, expected)


def test_processes_that_share_no_whole_number_of_experts_are_refused():
    mixed, dense = (models.ModelConfig.from_hf(config_of(family)) for family in ("qwen3_moe", "qwen3"))
    refuse_experts(mixed, 4)
    with pytest.raises(
        ValueError, match=r"parallel.expert = 3 does not divide the model's experts, 8; take 2 or 4 or 8"
    ):
        refuse_experts(mixed, 3)
    with pytest.raises(
        ValueError, match=r"parallel.expert = 2 divides the experts of a mixture, and this qwen3 model has none"
    ):
        refuse_experts(dense, 2)
    assert Layout.fit(8, tensor=2, expert=4) == Layout(data=4, tensor=2, expert=4)
    assert Layout.fit(4, context=2, expert=4).copies == 1
    with pytest.raises(
        ValueError,
        match=r"parallel.expert = 4 needs a multiple of 4 processes that read other tokens, and there are 3; start 8",
    ):
        Layout.fit(6, tensor=2, expert=4)


def test_plans_divide_experts_and_only_those():
    config = config_of("qwen3_moe") | {"num_hidden_layers": 3}
    del config["pad_token_id"]
    recipe = read(Recipe, {"model": {"config": config}, "data": {"batch": 2, "sequence": 32}})
    work = Workload(recipe)
    experts = 4 * 2 * 8 * 3 * 24 * 64  # bytes: layers, experts, gate and up and down, width, hidden
    made = {
        name: plan_of(work, Cluster(8), Sharing(data=8, **how))
        for name, how in {
            "data": {},
            "two": {"expert": 2},
            "all": {"expert": 8},
            "shard": {"expert": 2, "shard": True},
        }.items()
    }
    whole = made["data"].weights
    assert made["two"].weights == whole - experts // 2
    assert made["all"].weights == whole - experts * 7 // 8
    assert made["shard"].weights == -(-(whole - experts) // 8) + experts // 2
    assert made["two"].communication["copies"] == 2 * 3 * experts // 2 // 4
    assert made["two"].communication["data"] == 2 * 7 * (whole - experts) // 8
    assert "copies" not in made["all"].communication
    assert made["all"].buffers == whole - experts  # gradients on their way
    assert made["all"].communication["expert"] == 2 * 7 * (4 * 64 * 2 * 64 * 4 + 4 * 8) // 8
    found = {plan.layout.expert for plan in plans(work, Cluster(8))}
    assert found == {1, 2, 4, 8}
    dense = Workload(read(Recipe, {"model": {"config": pretraining.MODEL}, "data": {"sequence": 32}}))
    assert {plan.layout.expert for plan in plans(dense, Cluster(4))} == {1}
