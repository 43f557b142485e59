"""`tilestack generate` on a tiny model and a tokenizer of its own."""

import json
import shutil
from types import SimpleNamespace

import pytest
import torch

from tilestack import cli, data, models
from tilestack.cli.speaker import Speech
from tilestack.data.chat import CHATML


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("generate") / "model"
    tokenizer = data.Tokenizer.train(["the cat sat on the mat, and the dog sat too. " * 20], 300)
    tokenizer.template = CHATML
    torch.manual_seed(0)
    config = models.ModelConfig(tokenizer.vocabulary, 32, 64, layers=1, heads=2, kv_heads=1, head_dim=16, positions=64)
    decoder = models.Decoder(config)
    with torch.no_grad():
        decoder.head.weight[list(tokenizer.stops)] = 0  # never the likeliest
    models.save(decoder, folder)
    tokenizer.save(folder)
    return folder


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        cli.main(["generate", *map(str, arguments)])
    said = capsys.readouterr()
    return ended.value.code, said.out, said.err


def test_the_text_comes_and_json_says_how(capsys, folder):
    common = ("--model", folder, "--device", "cpu", "--raw", "--max-tokens", 12, "the cat")
    code, text, figures = run(capsys, *common)
    assert code == 0
    assert figures.startswith("12 tokens, ")
    assert "tokens/s" in figures
    told = json.loads(run(capsys, *common, "--json")[1])
    assert text == told["text"] + "\n"
    assert told["tokens"] == 12
    assert told["finish"] == "length"
    assert told["chat"] is False
    other = json.loads(run(capsys, *common, "--json", "--temperature", 1, "--seed", 5)[1])
    assert other["text"] != told["text"]


def test_the_speed_is_of_the_tokens_after_the_first():
    speech = object.__new__(Speech)
    speech.request, speech.made = SimpleNamespace(prompt=[0] * 10, cached=2), [0] * 5
    speech.began, speech.first, speech.last = 1.0, 1.5, 9.5
    assert speech.figures() == "5 tokens, 0.5 tokens/s; 8 of the prompt read in 0.50 s, 2 known"


def test_without_standard_error_figures_do_not_end_up_in_the_text(capsys, folder, monkeypatch):
    common = ("--model", folder, "--device", "cpu", "--raw", "--max-tokens", 3, "the cat")
    text = run(capsys, *common)[1]
    monkeypatch.setattr("sys.stderr", None)
    assert run(capsys, *common)[:2] == (0, text)


def test_a_stop_ends_the_text_before_it(capsys, folder):
    common = ("--model", folder, "--device", "cpu", "--raw", "--json", "--max-tokens", 20, "the cat")
    whole = json.loads(run(capsys, *common)[1])["text"]
    stop = whole[5:7]
    told = json.loads(run(capsys, *common, "--stop", stop)[1])
    assert told["text"] == whole[: whole.index(stop)]
    assert told["finish"] == "stop"


def test_a_prompt_may_come_from_standard_input_and_through_the_template(capsys, folder, monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(" the cat \n\n"))
    told = json.loads(run(capsys, "--model", folder, "--device", "cpu", "--json", "--max-tokens", 1, "-")[1])
    assert told["prompt"] == " the cat \n"  # but for the last line break, which echo puts there
    assert told["chat"] is True
    assert told["prompt_tokens"] > len(data.Tokenizer.load(folder).encode("the cat"))


def test_the_models_own_sampling_is_taken_unless_told(capsys, folder, tmp_path):
    """Here one that draws, and from a single token, which is as the likeliest is."""
    own = shutil.copytree(folder, tmp_path / "own")
    (own / "generation_config.json").write_text('{"temperature": 50.0, "top_k": 1}')
    ask = lambda model, *more: run(capsys, "--model", model, "--device", "cpu", "--raw", "--max-tokens", 12, "the cat", *more)  # fmt: skip
    likeliest = ask(folder)[1]
    _, text, said = ask(own)
    assert text == likeliest
    assert "unless told otherwise: temperature 50, top_k 1" in said
    assert ask(own, "--top-k", 0)[1] != likeliest
    assert ask(own, "--top-k", 0, "--temperature", 0)[1] == likeliest
    assert "generation_config" not in ask(folder)[2]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--max-tokens", 0, "hello"), "--max-tokens must be at least 1"),
        (("--device", "tpu", "hello"), "--device must be cuda or cpu"),
        (("--top-p", 2, "hello"), "top_p must lie between"),
        (("--raw", "the cat sat " * 60), "tokens; this model takes 1 to 63"),
    ],
)
def test_bad_input_is_one_line(capsys, folder, arguments, line):
    code, _, error = run(capsys, "--model", folder, *arguments)
    assert code == 1
    assert line in error
    assert len(error.strip().splitlines()) == 1
