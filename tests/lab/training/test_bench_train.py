"""The benchmark of training steps: every candidate does the same work, and a failure is a row with a note."""

import functools
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_work import TINY, WORK

from tilestack import models, ops
from tilestack.cli import main
from tilestack.cli.bench_models import training_works
from tilestack.cli.recipes import find_recipe
from tilestack.lab.bench.peers import IN_FP8
from tilestack.lab.contests import Contest, Result
from tilestack.lab.rows import Row
from tilestack.lab.training import bench_train
from tilestack.lab.training.bench_train import measure_steps
from tilestack.lab.training.train_steps import step_of, write_weights
from tilestack.train import Trainer, fp8, next_token, static_step
from tilestack.train.static_step import StaticStep
from tilestack.train.step import Step


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    return write_weights(WORK, tmp_path_factory.mktemp("tiny"))


def test_the_candidates_do_the_same_work(work):
    found = {name: measure_steps(name, work) for name in ("tilestack", "tilestack-graph", "plain", "transformers")}
    for figures in found.values():
        assert figures["seconds"] > 0
        assert figures["peak_mib"] is None
        assert figures["first_loss"] == pytest.approx(found["plain"]["first_loss"], rel=1e-5)
        assert figures["last_loss"] == pytest.approx(found["plain"]["last_loss"], rel=1e-5)
    assert found["plain"]["last_loss"] < found["plain"]["first_loss"]


def test_a_llama_is_the_same_work_with_its_own_epsilon(tmp_path):
    config = TINY | {"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 0.1}
    llama = write_weights(replace(WORK, config=config), tmp_path)
    found = {name: measure_steps(name, llama) for name in ("tilestack", "plain", "transformers")}
    for figures in found.values():
        assert figures["first_loss"] == pytest.approx(found["plain"]["first_loss"], rel=1e-5)
        assert figures["last_loss"] == pytest.approx(found["plain"]["last_loss"], rel=1e-5)


def test_nothing_is_waited_for_between_timed_steps(monkeypatch):
    happened = []

    class Loss:
        def item(self):
            happened.append("read")
            return 1.0

    monkeypatch.setattr(bench_train, "step_of", lambda *_: lambda: happened.append("step") or Loss())
    measure_steps("plain", replace(WORK, warmup=2, steps=3))
    assert happened == ["step"] * 5 + ["read"] * 2


def test_on_a_gpu_steps_are_timed_by_events_and_waited_for_once(monkeypatch):
    happened = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            happened.append("event")
            self.at = len(happened)

        def elapsed_time(self, end):
            return 1000.0 * (end.at - self.at)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: happened.append("wait"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    clock = bench_train.OnGpu()
    clock.start()
    for _ in range(3):
        happened.append("step")
        clock.lap()
    assert clock.laps() == [2.0, 2.0, 2.0]
    assert happened == ["wait", "event", *["step", "event"] * 3, "wait"]


def test_other_work_is_refused(monkeypatch):
    losses = {"tilestack": 4.1, "plain": 4.1001, "transformers": 4.3}
    take_turns(monkeypatch, lambda name, work: made(1.0, losses[name]))
    rows = {row["backend"]: row for row in bench_train.bench_train(WORK, list(losses))}
    assert rows["transformers"]["note"] == "not the same work: its first loss is 4.3000, of the others 4.1001"
    assert rows["transformers"]["time_us"] is None
    assert rows["tilestack"]["time_us"] == rows["plain"]["time_us"] == 1e6
    assert rows["tilestack"]["verdict"] == "equal"


def take_turns(monkeypatch, figures_of):
    """What the processes of candidates answer, without processes."""
    monkeypatch.setattr(
        bench_train, "in_turn", lambda names, work, timeout: {name: figures_of(name, work) for name in names}
    )


def made(seconds, loss=4.0):
    return {"seconds": seconds, "spread": 0.0, "peak_mib": 2048.0, "first_loss": loss, "last_loss": loss - 1}


def test_rows_compare_with_the_fastest_peer_and_keep_failures(monkeypatch):
    seconds = {"tilestack": 0.5, "plain": 1.0, "transformers": 2.0}
    out_of_memory = {"note": "out of memory"}
    take_turns(monkeypatch, lambda name, work: made(seconds[name]) if name in seconds else out_of_memory)
    rows = bench_train.bench_train(WORK, [*seconds, "transformers-compile"])
    by_name = {row["backend"]: row for row in rows}
    assert by_name["tilestack"]["ratio_to_best_peer"] == 2.0
    assert by_name["tilestack"]["tokens_per_s"] == 64.0
    assert by_name["plain"]["ratio_to_best_peer"] == 2.0  # against the other peer
    assert (by_name["transformers-compile"]["note"], by_name["transformers-compile"]["tokens_per_s"]) == (
        "out of memory",
        None,
    )
    contest = Contest("train", "tiny", "float32", "step", rows, Result({}, {}, rows))
    assert (contest.ours["backend"], contest.peer["backend"], contest.ratio) == ("tilestack", "plain", 2.0)
    assert bench_train.render_training_steps(rows).row_count == 4
    assert all(row["tried"] == [*seconds, "transformers-compile"] for row in rows)
    assert (by_name["plain"]["first_loss"], by_name["plain"]["last_loss"]) == (4.0, 3.0)


def test_rows_carry_the_source_of_ours_and_stale_works_are_those_of_another(monkeypatch):
    take_turns(monkeypatch, lambda name, work: made(1.0))
    rows = bench_train.bench_train(WORK, ["tilestack", "plain"])
    assert [bool(row["source"]) for row in rows] == [True, False]
    others = [replace(WORK, batch=4), replace(WORK, dtype="bfloat16")]
    assert bench_train.stale_works([WORK, *others], rows) == others
    assert bench_train.stale_works([WORK], [rows[0] | {"source": "older"}, rows[1]]) == [WORK]
    assert bench_train.stale_works([WORK], rows, ["tilestack", "transformers"]) == []
    assert bench_train.stale_works([WORK], rows, ["tilestack", "tilestack-fp8"]) == [WORK]
    in_fp8 = rows[0] | {"backend": "tilestack-fp8", "source": "older"}
    assert bench_train.stale_works([WORK], [*rows, in_fp8]) == [WORK], "of each of ours that has a row"


def test_a_process_of_its_own_tells_what_went_wrong(work):
    found = bench_train.apart("tilestack", replace(work, device="nowhere"), 100)
    assert found["note"].startswith("RuntimeError: Expected one of cpu, cuda")


def test_steps_as_graphs_are_a_candidate_where_there_is_a_gpu(monkeypatch, work):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    assert "tilestack-graph" in bench_train.step_candidates(None, replace(WORK, device="cuda"))
    assert "tilestack-graph" not in bench_train.step_candidates(None, WORK)
    made_of = []
    monkeypatch.setattr(Trainer, "train_step", lambda trainer: made_of.append(type(trainer.steps)))
    for name in ("tilestack-graph", "tilestack"):
        with pytest.raises(IndexError):  # nothing was computed
            step_of(name, work)()
    assert made_of == [StaticStep, Step]


@pytest.fixture
def has_fp8(monkeypatch):
    """The CPU taken for a GPU that has fp8; the definitions compute it."""
    monkeypatch.setattr(fp8, "lacks_fp8", lambda device: "")


def test_steps_in_fp8_are_those_of_training_with_the_head_where_it_is_asked_for(has_fp8, work):
    exact, layers, head = (measure_steps(name, work) for name in ("tilestack", *IN_FP8))
    first = exact["first_loss"]
    assert 0 < abs(layers["first_loss"] - first) < bench_train.SAME_LOSS * first
    assert 0 < abs(head["first_loss"] - first) < bench_train.SAME_LOSS * first
    assert head["first_loss"] != layers["first_loss"]
    assert max(layers["last_loss"], head["last_loss"]) < first


def test_steps_in_fp8_are_captured_where_a_run_would_capture_them(monkeypatch, has_fp8, work):
    asked = []
    monkeypatch.setattr(static_step, "why_not_by_default", lambda *_: asked.append("auto") or "no GPU")
    for name in ("tilestack", *IN_FP8):
        step_of(name, work)
    assert asked == ["auto", "auto"]


@pytest.mark.parametrize(
    ("config", "capability", "found"),
    [
        ({}, (9, 0), list(IN_FP8)),
        ({}, (8, 0), []),
        ({"vocab_size": 60}, (9, 0), ["tilestack-fp8"]),
        ({"hidden_size": 36}, (9, 0), []),
    ],
)  # fmt: skip
def test_fp8_is_a_candidate_where_the_gpu_and_the_sizes_allow_it(monkeypatch, config, capability, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    names = bench_train.step_candidates(None, replace(WORK, config=TINY | config, device="cuda"))
    assert [name for name in names if name in IN_FP8] == found
    assert not set(IN_FP8) & set(bench_train.step_candidates(None, WORK)), "a CPU has none"


def test_a_step_in_fp8_says_why_it_cannot_be_had_here(work):
    found = bench_train.apart("tilestack-fp8", work, 100)
    assert found["note"].startswith("ValueError: precision.fp8 needs a GPU of compute capability 8.9 or newer")


def test_the_head_of_a_model_that_caps_its_logits_is_capped(monkeypatch):
    """The loss is that of training, which knows the model's cap."""
    seen = []
    head_loss = functools.partial(models.Decoder.head_loss, None)
    model = SimpleNamespace(head_weight=torch.eye(4), logit_softcap=2.0, head_loss=head_loss)
    monkeypatch.setattr(ops, "linear_cross_entropy", lambda *_, softcap, reduction: seen.append(softcap))
    next_token.loss_of_labels(model, torch.ones(1, 3, 4), torch.ones(1, 3, dtype=torch.long))
    assert seen == [2.0]


def test_fp8_wins_nothing_against_peers_in_another_precision():
    rows = [made_row(name, time) for name, time in (("tilestack-fp8", 1.0), ("tilestack", 2.0), ("plain", 3.0))]
    contest = lambda rows: Contest("train", "tiny", "bfloat16", "step", rows, Result({}, {}, rows))
    assert (contest(rows).ours["backend"], contest(rows).ratio) == ("tilestack", 1.5)
    assert contest([rows[0], rows[2]]).ours["backend"] == "tilestack-fp8"  # that alone was timed


def made_row(name, seconds):
    return Row("train", "tiny", "bfloat16", "step", name, seconds * 1e6).as_dict()


def test_on_a_gpu_each_candidate_has_it_to_itself(monkeypatch):
    asked = []
    monkeypatch.setattr(bench_train, "write_weights", lambda work, folder: work)
    monkeypatch.setattr(bench_train, "apart", lambda name, work, timeout: asked.append(name) or made(1.0))
    rows = bench_train.bench_train(replace(WORK, device="cuda"), ["tilestack", "plain"])
    assert asked == ["tilestack", "plain"]
    assert rows[0]["how"] == "time of whole steps, queued one after another"


def test_the_command_reads_its_work_from_recipes(monkeypatch, tmp_path, capsys, outside):
    asked = []
    take_turns(monkeypatch, lambda name, work: asked.append((name, work)) or made(1.0))
    arguments = [
        "bench",
        "train",
        "--device",
        "cpu",
        "--recipe",
        "demo",
        "--micro-batch",
        "2,4",
        "--backend",
        "tilestack,plain",
    ]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json", str(tmp_path / "rows.json")])
    assert ended.value.code == 0
    assert [(name, work.batch) for name, work in asked] == [(c, b) for b in (2, 4) for c in ("tilestack", "plain")]
    assert all(work.config["model_type"] == "qwen3" and work.dtype == "float32" for _, work in asked)
    assert [row["tokens_per_s"] for row in json.loads((tmp_path / "rows.json").read_text())] == [512, 512, 1024, 1024]
    with pytest.raises(SystemExit):
        main([*arguments[:-1], "tilestak"])
    assert "no candidate tilestak; there are tilestack" in capsys.readouterr().err


def test_the_plain_model_does_not_pretend_to_be_a_mixture(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"model_type": "qwen3_moe"}))
    with pytest.raises(ValueError, match="there is no qwen3_moe in plain PyTorch here"):
        measure_steps("plain", replace(WORK, weights=str(tmp_path)))


def test_llama_1b_is_the_shape_that_is_measured():
    gpu = torch.device("cuda")
    (work,) = training_works(gpu, "llama-1b", "8", 4096, None)
    assert work.case == "llama-1b, 8x4096"
    (default,) = training_works(gpu, "llama-1b", None, None, None)
    assert default == work
    with torch.device("meta"):
        model = models.Decoder(models.ModelConfig.from_hf(work.config))
    per_layer = 2048 * (2048 + 2 * 512) + 2048 * 2048 + 3 * 2048 * 8192 + 2 * 2048
    assert sum(p.numel() for p in model.parameters()) == 128256 * 2048 + 16 * per_layer + 2048


def test_what_is_published_are_recipes():
    for name in bench_train.PUBLISHED:
        assert find_recipe(Path(name)).exists()
