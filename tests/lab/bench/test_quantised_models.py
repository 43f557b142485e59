"""The table of quantised models: measured way by way, kept, gone on with, and written into the documentation."""

import json

import pytest
import torch

from tilestack import cli, data, models
from tilestack.lab import results
from tilestack.lab.bench import quantised_models
from tilestack.lab.tables.by_name import table


@pytest.fixture
def folder(tmp_path):
    tokenizer = data.Tokenizer.train(["the cat sat on the mat, and the dog sat too. " * 20], 300)
    config = models.ModelConfig(tokenizer.vocabulary, 64, 96, layers=1, heads=2, kv_heads=1, head_dim=32, positions=64)
    models.save(models.Decoder(config), tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    return tmp_path / "model"


def test_every_way_is_measured_once_and_shown(folder, monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(quantised_models, "LENGTH", 32)
    monkeypatch.setattr(quantised_models, "EVALUATED", 256)
    assert "not measured yet: `tilestack bench quantize --save`" in table("quantised cpu", tmp_path)
    given = ["bench", "quantize", "--device", "cpu", "--model", str(folder), "--save", "--json", "found.json"]
    monkeypatch.setattr(quantised_models, "schemes_and_methods", lambda: [("w4a16", "gptq"), ("w8a8", "smooth")])
    for ways in (2, 0):  # the second time all of it is there
        with pytest.raises(SystemExit) as ended:
            cli.main([*given, *(["--stale"] if not ways else [])])
        assert ended.value.code == 0, capsys.readouterr().err
        assert len(json.loads((tmp_path / "found.json").read_text())) == 2
    path = tmp_path / "results" / "cpu" / "quantise.json"
    kept = results.read_json(path)
    assert [run["method"] for run in kept["runs"]] == ["gptq", "smooth"]
    written = table("quantised cpu", tmp_path)
    assert "| `w4a16` | **gptq** | 4.60 |" in written
    assert "compared on 2" in written
    assert kept["runs"][0]["quality"]["kl"]["value"] > kept["runs"][1]["quality"]["kl"]["value"]

    asked = []
    monkeypatch.setattr(quantised_models, "measure_quality", lambda chosen, *_: iter(asked.append(chosen) or ()))
    results.save(path, kept | {"runs": [kept["runs"][0] | {"source": "older"}, kept["runs"][1]]})
    assert "| `w4a16` † | **gptq** |" in table("quantised cpu", tmp_path)
    with pytest.raises(SystemExit):
        cli.main([*given, "--stale"])
    assert asked == [[("w4a16", "gptq")]]


def test_the_ways_are_every_scheme_by_every_method_that_does_something():
    ways = quantised_models.schemes_and_methods()
    assert ways[0] == ("w4a16", "gptq")
    assert len(ways) == len(set(ways)) == 4 * 4 + 2
    assert ("w4a16", "smooth") not in ways


def test_what_stays_is_bfloat16_unless_the_model_is_float16(folder):
    assert quantised_models.kept_dtype(str(folder)) == torch.bfloat16
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float16"}))
    assert quantised_models.kept_dtype(str(folder)) == torch.float16


@pytest.mark.parametrize("begins", [True, False])  # texts by itself, as some tokenizers do
def test_texts_are_compared_from_their_first_token_on_and_without_their_end(folder, tmp_path, begins):
    said = json.loads((folder / "tokenizer.json").read_text())
    assert said["post_processor"]
    (folder / "tokenizer.json").write_text(json.dumps(said if begins else said | {"post_processor": None}))
    tokenizer = data.Tokenizer.load(folder)
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}))
    (window,) = quantised_models.held_out_windows([str(tmp_path / "text.jsonl")], tokenizer, 64, 100)
    ids = tokenizer.encode("the cat sat on the mat", bare=True)
    start = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    assert window.scored.ids == [start, *ids]
    assert window.scored.mask == [0] + [1] * len(ids)
    assert window.bytes == len("the cat sat on the mat")
