"""`bench serve`: workloads as they are described, bytes counted by hand, and a run of the engine on one of them."""

import json
import random
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from tilestack import __version__, cli, models
from tilestack.lab.serving import bench_serve, serve_candidates
from tilestack.lab.serving.serve_workloads import Workload, workloads
from tilestack.lab.stale import is_current, present_source

CONFIG = models.ModelConfig.from_hf(bench_serve.QWEN3)


def test_the_throughput_workload_is_the_one_engines_are_compared_by():
    found = {each.name: each for each in workloads(CONFIG)}
    work = found["throughput"]
    assert len(work.prompts) == 256
    assert all(100 <= size <= 1024 for size in [*map(len, work.prompts), *work.answers])
    draw = random.Random(0)  # as nano-vllm's benchmark draws it
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(100, 1024))] for _ in range(256)]
    assert work.prompts == prompts
    assert work.answers == [draw.randint(100, 1024) for _ in range(256)]
    assert work.answered == 133_966
    assert set(found) == {"throughput", "batch 1", "batch 8", "batch 64", "first token", "prefix", "long", "copying"}
    assert len({tuple(prompt[:1024]) for prompt in found["prefix"].prompts}) == 1


def test_bytes_that_cannot_be_avoided_by_hand():
    work = Workload("two", [[1, 2], [3]], [3, 2])
    numbers = 28 * 2 * 8 * 128
    tokens = (2 + 3 + 4) + (1 + 2)  # kept tokens that each step of each answer reads
    assert work.moved(CONFIG, 1000, 2) == 3 * 1000 + 2 * numbers * tokens


def test_weights_are_counted_as_they_lie():
    shape = bench_serve.SMALL | dict(num_hidden_layers=1, vocab_size=128)
    decoder = models.Decoder(models.ModelConfig.from_hf(shape)).bfloat16()
    outside = 128 * 256 + 256  # the embedding, which is the head too, and the last norm
    inside = 256 * 512 + 256 * 256 + 3 * 256 * 768 + 2 * 256 + 2 * 64
    assert serve_candidates.bytes_of_weights(decoder, None) == 2 * (outside + inside)
    assert serve_candidates.bytes_of_weights(decoder, "int8") == outside + inside
    assert serve_candidates.bytes_of_weights(decoder, "fp8") == 2 * outside + inside


def test_a_workload_that_the_model_cannot_read_is_left_out():
    short = models.ModelConfig.from_hf(bench_serve.SMALL | {"max_position_embeddings": 96})
    assert {each.name for each in workloads(short, 32)} < {each.name for each in workloads(CONFIG)} | {"batch 2"}


def test_the_engine_answers_a_workload_and_the_figure_is_its_rate(monkeypatch):
    asked = dict(
        device="cpu",
        model=None,
        shape=bench_serve.SMALL | dict(num_hidden_layers=1, vocab_size=128),
        scale=32,
        only=["throughput", "batch 1"],
        current=[],
    )
    rows = list(serve_candidates.results(["tilestack", "tilestack int8"], asked))
    assert [(row["case"], row["backend"]) for row in rows] == [
        (case, name) for case in ("throughput", "batch 1") for name in ("tilestack", "tilestack int8")
    ]
    assert rows[0]["figure"] == pytest.approx(rows[0]["answered"] / rows[0]["seconds"], rel=1e-3)
    assert rows[2]["unit"] == "ms/step"
    assert rows[0]["moved"] > rows[1]["moved"]
    assert all(map(is_current, rows))
    assert all(row["versions"]["tilestack"] == __version__ for row in rows)
    assert all(row["versions"]["torch"] == torch.__version__ for row in rows)


def test_another_s_engine_says_its_version_itself_and_stands_while_it_is_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(__version__="0.99.1"))
    versions = serve_candidates.versions_of("vllm")
    assert versions["vllm"] == "0.99.1"
    source = present_source("serve", "vllm", "cuda")
    row = dict(op="serve", backend="vllm", device="cuda", model="random weights", source=source, versions=versions)
    for installed, expected in [("0.99.1", True), ("", True), ("1.0.0", False)]:
        monkeypatch.setattr(bench_serve.machine, "version_of", lambda package: installed)
        assert bench_serve.stands(row, None) is expected
    assert not bench_serve.stands(row, "smollm2")


def test_the_roof_is_measured_before_any_engine_runs(monkeypatch):
    done = []
    monkeypatch.setattr(bench_serve, "memory_rate", lambda device: done.append("roof") or 1e12)
    row = dict(case="batch 1", backend="tilestack", figure=1.0, unit="ms/step", seconds=2.0, moved=1e12)
    monkeypatch.setattr(bench_serve, "results_of", lambda *_: done.append("engine") or [row])
    (found,) = bench_serve.bench_serve("cpu", None, ["tilestack"], None, lambda _: None)
    assert done == ["roof", "engine"]
    assert found["roof"] == 0.5


def test_what_is_kept_of_the_present_source_is_not_measured_again(monkeypatch):
    """Engines that take turns are all measured where one is not current; a row of another model is none of this one."""
    row = lambda case, name, **others: dict(op="serve", case=case, backend=name, device="cpu", model="random weights",
                                            source=present_source("serve", name, "cpu"), versions={}) | others  # fmt: skip
    kept = [row("throughput", "tilestack"), row("throughput", "tilestack int8"), row("batch 1", "tilestack"), row("batch 8", "tilestack"), row("batch 8", "tilestack int8", source="older")]  # fmt: skip
    kept += [row("prefix", name, model="another") for name in ("tilestack", "tilestack int8")]
    monkeypatch.setattr(serve_candidates, "measure", lambda serves, work, *_: dict.fromkeys(serves, (1.0, 1.0)))
    monkeypatch.setattr(bench_serve, "is_installed", lambda module: False)  # so that weights are drawn
    monkeypatch.setattr(bench_serve, "memory_rate", lambda device: 1e12)

    def in_this_process(command, *_):
        asked = json.loads(Path(command[3]).read_text()) | {"shape": bench_serve.SMALL | dict(num_hidden_layers=1)}
        return serve_candidates.results(command[4:], asked)

    monkeypatch.setattr(bench_serve, "results_of", in_this_process)
    ours, only = ["tilestack", "tilestack int8"], ["throughput", "batch 1", "batch 8", "prefix"]
    run = lambda kept, only: list(bench_serve.bench_serve("cpu", None, ours, only, lambda _: None, kept))
    found = run(kept, only)
    assert [(row["case"], row["backend"]) for row in found] == [(case, name) for case in only[1:] for name in ours]
    assert run([*kept, *found], only) == []
    monkeypatch.setattr(bench_serve, "results_of", lambda *_: [])
    with pytest.raises(ValueError, match="nothing was measured"):
        run([], only)


def test_engines_of_other_weights_answer_too(monkeypatch):
    shape = bench_serve.SMALL | dict(num_hidden_layers=1, vocab_size=128)
    asked = dict(device="cpu", model=None, shape=shape, scale=32, only=None, current=[])
    (name,) = names = ["tilestack fp8 weights"]
    rows = {row["case"]: row for row in serve_candidates.results(names, asked)}
    assert set(rows) == {"throughput", "batch 1"}  # and of 64, which this scale has not
    assert all(row["backend"] == name and row["figure"] > 0 for row in rows.values())


def test_random_weights_are_made_to_repeat_the_last_token_and_are_then_as_before():
    torch.manual_seed(0)
    wide = dict(
        num_hidden_layers=4, initializer_range=0.1
    )  # layers that say something else, as those of a large model do
    shape = bench_serve.SMALL | dict(vocab_size=128, tie_word_embeddings=True) | wide
    decoder = models.Decoder(models.ModelConfig.from_hf(shape)).eval()
    before = decoder.embedding.weight.detach().clone()
    ids = torch.arange(40).view(1, -1)
    with serve_candidates.repeating_itself(decoder):
        assert decoder(ids).argmax(-1).equal(ids)
    assert decoder.embedding.weight.equal(before)
    assert not decoder(ids).argmax(-1).equal(ids)


def test_engines_take_turns_and_the_best_of_each_counts(monkeypatch):
    turns = []

    def timed(serve, workload, answers, shift, top):
        turns.append(serve)
        return {"a": 1.0, "b": 2.0}[serve] + shift % 3

    monkeypatch.setattr(serve_candidates, "timed", timed)
    work = Workload("w", [[1]], [8])
    found = serve_candidates.measure(dict(ours="a", theirs="b"), work, 10, 3)
    assert turns == ["a", "b"] * 4
    assert found == dict(ours=(8 / 1.0, 1.0), theirs=(8 / 2.0, 2.0))


def test_candidates_are_for_devices():
    assert [name for name in bench_serve.CANDIDATES if bench_serve.runs_on(name, "cpu")] == [
        "tilestack", "tilestack int8", "tilestack lookup", "transformers"
    ]  # fmt: skip
    assert not bench_serve.runs_on("tilestack int8", "cuda")


def test_engines_that_are_not_there_are_named(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--device", "cpu", "--backend", "nope"])
    assert "no engine nope; choose from tilestack" in capsys.readouterr().err


def test_rows_are_shown_beside_the_best_other():
    row = lambda backend, seconds: dict(
        case="throughput", backend=backend, figure=1 / seconds, unit="tokens/s", seconds=seconds, roof=0.5
    )
    table = bench_serve.render_engines([row("tilestack", 1.0), row("tilestack lookup", 0.5), row("vllm", 2.0)])
    assert list(table.columns[-1].cells) == ["2.00×", "4.00×", "0.25×"]


def test_packages_beside_the_checkout_come_first_for_the_engine_that_brings_them_alone(monkeypatch, tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("")
    monkeypatch.setattr(bench_serve, "PEER_PACKAGES", tmp_path)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    code = "import json, sys, importlib.util as u; print('RESULT ' + json.dumps([sys.path, bool(u.find_spec('vllm'))]))"
    found = lambda name: next(
        bench_serve.results_of([sys.executable, "-c", code], name, print, bench_serve.environment_of(name))
    )
    assert bench_serve.engine_is_importable("vllm")
    path, there = found("vllm")
    assert there
    assert path.index(str(tmp_path)) < min(place for place, each in enumerate(path) if each.endswith("elsewhere"))
    for ours in ("tilestack", "tilestack fp8 kv"):
        assert str(tmp_path) not in found(ours)[0]


def test_results_come_one_by_one_and_a_failure_is_told():
    told = []
    code = "print('RESULT {\"case\": 1}', flush=True); print('chatter'); raise SystemExit(3)"
    rows = bench_serve.results_of([sys.executable, "-c", code], "ours", told.append)
    assert list(rows) == [{"case": 1}]
    assert told == ["ours ended with exit code 3 after 1 workloads"]


def test_the_process_ends_with_whoever_listens():
    code = "import time; print('RESULT {}', flush=True); time.sleep(600)"
    rows = bench_serve.results_of([sys.executable, "-c", code], "ours", print)
    began = time.monotonic()
    assert next(rows) == {}
    rows.close()
    assert time.monotonic() - began < 300


def test_where_nothing_is_measured_the_reason_is_told_without_a_traceback(capfd):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serve", "--device", "cpu", "--backend", "tilestack", "--model", "no-such-folder"])
    assert ended.value.code == 1
    told = capfd.readouterr().err
    assert "error: no model at no-such-folder; give a folder" in told
    assert "error: nothing was measured" in told
    assert "Traceback" not in told


def test_workloads_that_are_not_there_are_named():
    asked = dict(device="cpu", model=None, shape=bench_serve.SMALL, scale=32, only=["batch 1", "nope"], current=[])
    with pytest.raises(ValueError, match="no workload is called nope; choose from throughput, batch 1"):
        next(serve_candidates.results(["tilestack"], asked))


def test_the_memory_of_a_cpu_is_held_to_what_it_gives_to_readers(monkeypatch):
    monkeypatch.setattr(bench_serve, "CPU_READ", 1000)
    monkeypatch.setattr(bench_serve.timeit, "repeat", lambda call, number, repeat: [call() and 4.0, 2.0, 3.0])
    assert bench_serve.memory_rate("cpu") == 4000 / 2
