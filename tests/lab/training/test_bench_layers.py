"""The benchmark of layers: every candidate computes the same layer, and one that does not has a note instead of figures."""

import json
from dataclasses import replace

import pytest
import torch
from tiny_work import TINY

from tilestack.cli import main
from tilestack.cli.bench_models import layer_works
from tilestack.lab import stale
from tilestack.lab.bench.roofs import Roofs
from tilestack.lab.training import bench_layers, layer_candidates
from tilestack.lab.training.bench_layers import cost, step, unlike_the_others, working_set
from tilestack.lab.training.layer_candidates import LAYERS, build
from tilestack.lab.training.train_steps import Work, write_weights

SHALLOW = TINY | {"num_hidden_layers": 1}
EXPERTS = dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, decoder_sparse_step=1, norm_topk_prob=True
)
MODELS = {
    "qwen3": SHALLOW,
    "llama": SHALLOW | {"model_type": "llama", "tie_word_embeddings": False, "rms_norm_eps": 0.1, "rope_theta": 5e5},
    "qwen3_moe": SHALLOW | {"model_type": "qwen3_moe", "mlp_only_layers": []} | EXPERTS,
}
WORK = Work("tiny", SHALLOW, 2, 16, "float32", "cpu")
PEERS = {"qwen3": ("plain", "transformers"), "llama": ("plain", "transformers"), "qwen3_moe": ("transformers",)}


@pytest.fixture(scope="module", params=MODELS)
def work(request, tmp_path_factory):
    return write_weights(
        replace(WORK, name=request.param, config=MODELS[request.param]), tmp_path_factory.mktemp("model")
    )


@pytest.mark.parametrize("layer", LAYERS)
def test_candidates_compute_the_same_results_and_gradients(work, layer):
    x = bench_layers.hidden_states(work, 0)
    built = build("tilestack", work, layer)
    out, of_x, *of_weights = step(built, "both", x.clone())
    assert [gradient.shape for gradient in of_weights] == [weight.shape for weight in built.weights]
    assert out.shape == (() if layer == "head" else x.shape)
    for name in PEERS[work.name]:
        their_out, their_of_x, *their_of_weights = step(build(name, work, layer), "both", x.clone())
        torch.testing.assert_close(out, their_out, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(of_x, their_of_x, rtol=1e-3, atol=1e-5)
        assert sum(map(torch.numel, of_weights)) == sum(map(torch.numel, their_of_weights))
        squares = lambda gradients: sum(float(gradient.double().square().sum()) for gradient in gradients)
        assert squares(of_weights) == pytest.approx(squares(their_of_weights), rel=1e-4)  # ours are fused otherwise


def test_a_layer_that_computes_something_else_has_a_note_and_no_figures(monkeypatch):
    def wrong(name, work, layer):
        built = build(name, work, layer)
        return built if name != "transformers" else layer_candidates.Built(lambda x: 1.1 * built.run(x), built.weights)

    monkeypatch.setattr(bench_layers, "build", wrong)
    (rows,) = bench_layers.bench_layers([WORK], ["mlp"], ["forward"], ["tilestack", "plain", "transformers"])
    found = {row["backend"]: row for row in rows}
    assert found["transformers"]["note"].startswith("not the same work: 10.0% from")
    assert found["transformers"]["time_us"] is None
    assert found["tilestack"]["time_us"] > 0
    assert found["tilestack"]["ratio_to_best_peer"] == found["plain"]["time_us"] / found["tilestack"]["time_us"]


def test_a_wrong_gradient_is_seen_too(work):
    built = build("tilestack", work, "mlp")
    halved = layer_candidates.Built(lambda x: built.run(x.detach() + 0.5 * (x - x.detach())), built.weights)
    candidates = {"tilestack": built, "halved": halved, "again": built}
    assert unlike_the_others(candidates, work, "forward") == {}
    assert list(unlike_the_others(candidates, work, "both")) == ["halved"]


def test_numbers_that_are_none_are_the_fault_of_the_candidate_that_makes_them(work):
    built = build("tilestack", work, "mlp")
    broken = layer_candidates.Built(
        lambda x: built.run(x) * torch.where(torch.arange(32) == 3, torch.nan, 1.0), built.weights
    )
    candidates = {"tilestack": built, "broken": broken, "again": built}
    for direction in ("forward", "both"):
        assert list(unlike_the_others(candidates, work, direction)) == ["broken"]


def test_rates_follow_from_what_is_counted(monkeypatch):
    monkeypatch.setattr(bench_layers, "measure_roofs", lambda device: Roofs(0.01, {"float32": 0.05}, 2.0))
    (rows,) = bench_layers.bench_layers([WORK], ["mlp"], ["both"], ["tilestack"])
    seconds, tokens, matrices = rows[0]["time_us"] * 1e-6, 32, 3 * 32 * 48
    flops, moved = 3 * 2 * tokens * matrices, 2 * 4 * (2 * tokens * 32 + matrices + 32)
    assert rows[0]["tflops"] == pytest.approx(flops / seconds / 1e12)
    assert rows[0]["tb_per_s"] == pytest.approx(moved / seconds / 1e12)
    assert rows[0]["roof_fraction"] == pytest.approx(max(moved / 0.01e12, flops / 0.05e12) / seconds)


@pytest.mark.parametrize("framework", ["plain", "transformers"])
def test_compiled_candidates_are_compiled_and_others_are_not(work, framework, monkeypatch):
    if framework not in PEERS[work.name]:
        pytest.skip("a model that it does not have")
    monkeypatch.setattr(torch, "compile", lambda run, **how: lambda x: ("compiled", how, run(x)))
    x = bench_layers.hidden_states(work, 0)
    for layer in LAYERS:
        plain = build(framework, work, layer).run(x)
        said, how, found = build(f"{framework}-compile", work, layer).run(x)
        assert (said, how) == ("compiled", {"dynamic": False})
        torch.testing.assert_close(found, plain)


def test_what_is_not_counted_has_no_share_of_the_roof():
    (rows,) = bench_layers.bench_layers([WORK], ["mlp"], ["forward"], ["plain"])
    assert rows[0]["time_us"] > 0
    assert [rows[0][figure] for figure in ("roof_fraction", "tflops", "tb_per_s")] == [None] * 3


def test_the_parts_of_a_layer_come_to_the_whole(tmp_path):
    """Also where a family normalises what a part adds."""
    gemma = SHALLOW | {"model_type": "gemma2", "query_pre_attn_scalar": 8, "sliding_window": 64}
    work = write_weights(replace(WORK, config=gemma), tmp_path)
    attention, mlp, block = (build("tilestack", work, layer) for layer in ("attention", "mlp", "block"))
    x = bench_layers.hidden_states(work, 0)
    torch.testing.assert_close(mlp.run(attention.run(x)), block.run(x))
    count = lambda built: sum(weight.numel() for weight in built.weights)
    assert count(attention) + count(mlp) == count(block)


def test_a_candidate_that_fails_is_a_row_with_its_reason():
    (rows,) = bench_layers.bench_layers(
        [replace(WORK, config=MODELS["qwen3_moe"])], ["mlp"], ["forward"], ["tilestack", "plain"]
    )
    assert [(row["backend"], bool(row["time_us"])) for row in rows] == [("tilestack", True), ("plain", False)]
    assert "no qwen3_moe in plain PyTorch" in rows[1]["note"]


def test_the_arithmetic_of_layers_is_counted_by_hand(tmp_path):
    work = write_weights(WORK, tmp_path)
    tokens, head, queries, keys = 32, 8, 4 * 8, 2 * 8
    matrices = {
        "attention": 32 * (queries + 2 * keys) + queries * 32,
        "mlp": 3 * 32 * 48,
        "head": 32 * 64,
    }
    norms = {"attention": 32 + 2 * head, "mlp": 32, "head": 32}
    matrices["block"], norms["block"] = matrices["attention"] + matrices["mlp"], norms["attention"] + norms["mlp"]
    for layer in LAYERS:
        seen = 4 * 8 * 16 if layer in ("attention", "block") else 0  # half a sequence on average, scores and values
        states = tokens * 32 * (1 if layer == "head" else 2)
        moved, flops = cost(build("tilestack", work, layer), work, layer, "forward")
        assert (moved, flops) == (4 * (states + matrices[layer] + norms[layer]), 2 * tokens * (matrices[layer] + seen))
        # x, the weights and what comes of them, and the gradient of each; a backward has two products for each of a forward.
        assert cost(build("tilestack", work, layer), work, layer, "both") == (2 * moved, 3 * flops)


def test_of_experts_those_that_a_token_meets_are_counted(tmp_path):
    work = write_weights(replace(WORK, config=MODELS["qwen3_moe"]), tmp_path)
    built = build("tilestack", work, "mlp")
    router, expert = 4 * 32, 3 * 32 * 16
    moved, flops = cost(built, work, "mlp", "forward")
    assert flops == 2 * work.tokens * (router + 2 * expert)
    assert moved == 4 * (2 * work.tokens * 32 + 32 + router + 4 * expert)  # all of them are read


def test_calls_have_inputs_of_their_own_and_a_forward_keeps_nothing(work):
    built = build("tilestack", work, "head")
    assert working_set(built, work) == 4 * (work.tokens * (32 + 64) + 32 * 64)
    made = bench_layers.layer_calls(built, work, "forward", 3)
    first, second, third = (float(out) for (out,) in (call() for call in made))
    assert len({first, second, third}) == 3
    assert not made[0]()[0].requires_grad


def test_kept_rows_of_the_present_source_are_not_measured_again():
    first = [row for rows in bench_layers.bench_layers([WORK], ["mlp"], candidates=["tilestack"]) for row in rows]
    assert [row["direction"] for row in first] == ["forward", "both"]
    assert list(bench_layers.bench_layers([WORK], ["mlp"], candidates=["tilestack"], kept=first)) == []
    older = [first[0] | {"source": "0" * 16}, first[1]]
    (again,) = bench_layers.bench_layers([WORK], ["mlp"], candidates=["tilestack"], kept=older)
    assert [row["direction"] for row in again] == ["forward"]
    others = [row | {"dtype": "bfloat16"} for row in first]
    assert len(list(bench_layers.bench_layers([WORK], ["mlp"], candidates=["tilestack"], kept=others))) == 2


def test_the_source_of_a_layer_follows_what_computes_it():
    files = {path.relative_to(stale.PACKAGE).as_posix() for path in stale.files_of_parts(stale.OF_A_LAYER)}
    assert {"models/attention.py", "kernels/norm/rows.py", "nn/mlp.py", "train/next_token.py"} <= files
    assert not any(file.startswith(("optim/", "train/loop", "engine/", "parallel/")) for file in files)


def test_the_command_saves_what_it_measures(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    asked = ["bench", "layers", "mlp", "--device", "cpu", "--recipe", "demo", "--micro-batch", "1", "--sequence", "16"]
    with pytest.raises(SystemExit) as left:
        main([*asked, "--backend", "tilestack,plain", "--direction", "forward", "--save"])
    assert left.value.code == 0
    (file,) = tmp_path.rglob("layers.json")
    rows = json.loads(file.read_text())["rows"]
    assert [(row["op"], row["backend"], row["direction"]) for row in rows] == [
        ("layer", "tilestack", "forward"), ("layer", "plain", "forward"),
    ]  # fmt: skip
    assert "layers of" in capsys.readouterr().out


def test_every_dtype_and_batch_is_a_work_of_its_own():
    made = layer_works(torch.device("cpu"), "demo", "1,2", 16, "float32,bfloat16")
    assert [(work.batch, work.dtype) for work in made] == [
        (1, "float32"), (1, "bfloat16"), (2, "float32"), (2, "bfloat16"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (["hed"], "no layer hed; there are attention, mlp, block, head"),
        (["--direction", "backward"], "no direction backward; there are forward, both"),
        (["--backend", "liger"], "no candidate liger; there are tilestack, plain"),
        (["--case", "x"], "bench layers does not read --case"),
        (["--dtype", "float8"], "no dtype float8; choose from float16"),
    ],
)
def test_the_command_names_what_there_is(asked, words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", "layers", "--device", "cpu", "--recipe", "demo", *asked])
    assert left.value.code == 1
    assert words in " ".join(capsys.readouterr().err.split())
