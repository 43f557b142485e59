"""The benchmark of training steps: every candidate does the same work, and a failure is a row with a note."""

import json

import pytest
import torch

from tilestack import models
from tilestack.cli import main
from tilestack.lab import bench_train
from tilestack.lab.bench_train import Work, measure
from tilestack.lab.measured import Contest, Result
from tilestack.lab.plain_model import PlainDecoder

TINY = {
    "model_type": "qwen3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True,
}  # fmt: skip
WORK = Work("tiny", TINY, 2, 16, "float32", "cpu", warmup=1, steps=2)


@pytest.mark.parametrize("candidate", ["tilestack", "plain", "transformers"])
def test_each_candidate_takes_its_steps(candidate):
    found = measure(candidate, WORK)
    assert found["seconds"] > 0
    assert found["peak_mib"] is None


def test_the_plain_model_is_the_same_model():
    torch.manual_seed(0)
    plain, ours = PlainDecoder(TINY), models.Decoder(models.ModelConfig.from_hf(TINY | {"rope_theta": 10000.0}))
    state = {"embedding.weight": plain.embedding.weight, "norm.weight": plain.norm.weight}
    for number, layer in enumerate(plain.layers):
        a, at = layer.attention, f"layers.{number}"
        state |= {
            f"{at}.attention_norm.weight": layer.attention_norm.weight, f"{at}.mlp_norm.weight": layer.mlp_norm.weight,
            f"{at}.attention.qkv.weight": torch.cat([a.q.weight, a.k.weight, a.v.weight]),
            f"{at}.attention.output.weight": a.out.weight, f"{at}.attention.q_norm.weight": a.q_norm.weight,
            f"{at}.attention.k_norm.weight": a.k_norm.weight, f"{at}.mlp.down.weight": layer.down.weight,
            f"{at}.mlp.gate_up.weight": torch.cat([layer.gate.weight, layer.up.weight]),
        }  # fmt: skip
    ours.load_state_dict(state)
    torch.testing.assert_close(ours(WORK.ids()), plain(WORK.ids()), rtol=1e-4, atol=1e-5)


def test_rows_compare_with_the_fastest_peer_and_keep_failures(monkeypatch):
    seconds = {"tilestack": 0.5, "plain": 1.0, "transformers": 2.0}
    made = lambda name: {"seconds": seconds[name], "spread": 0.0, "peak_mib": 2048.0} if name in seconds else {"note": "out of memory"}  # fmt: skip
    monkeypatch.setattr(bench_train, "apart", lambda candidate, work, timeout: made(candidate))
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
    assert bench_train.render(rows).row_count == 4


def test_a_process_of_its_own_tells_what_went_wrong():
    found = bench_train.apart("tilestack", Work("tiny", TINY, device="nowhere"), 100)
    assert found["note"].startswith("RuntimeError: Expected one of cpu, cuda")


def test_the_command_reads_its_work_from_recipes(monkeypatch, tmp_path, capsys, outside):
    asked = []
    monkeypatch.setattr(bench_train, "apart", lambda candidate, work, timeout: asked.append((candidate, work)) or {"seconds": 1.0, "spread": 0.0, "peak_mib": None})  # fmt: skip
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


def test_the_plain_model_does_not_pretend_to_be_a_mixture():
    with pytest.raises(ValueError, match="there is no qwen3_moe in plain PyTorch here"):
        measure("plain", Work("tiny", TINY | {"model_type": "qwen3_moe"}))
