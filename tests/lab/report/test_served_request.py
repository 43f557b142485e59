"""One request to a server in a process of its own, and its place in the report."""

import sys

import pytest
import torch

from tilestack import data, models
from tilestack.lab.report import served_request
from tilestack.lab.report.served_request import Served, serve_once, served_section


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served") / "model"
    tokenizer = data.Tokenizer.train(["the cat sat on the mat, and the dog sat too. " * 20], 300)
    torch.manual_seed(0)
    decoder = models.Decoder(models.ModelConfig(tokenizer.vocabulary, 32, 64, layers=1, heads=2, kv_heads=1, head_dim=16, positions=64))  # fmt: skip
    with torch.no_grad():
        decoder.head.weight[list(tokenizer.stops)] = -1
    models.save(decoder, folder)
    tokenizer.save(folder)
    return folder


def test_a_server_answers_once_and_ends(folder):
    answered = serve_once(folder, "the cat", "cpu", max_tokens=9)
    assert 1 <= answered.tokens <= 9
    assert 0 < answered.first_ms <= 1e3 * answered.seconds


SLOW_TO_END = """#!{python}
import signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{{"event": "listening", "address": "http://here"}}', file=sys.stderr, flush=True)
time.sleep(600)
"""


def test_a_server_that_answered_and_is_slow_to_end_is_killed(tmp_path, monkeypatch):
    program = tmp_path / "python"
    program.write_text(SLOW_TO_END.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    monkeypatch.setattr(served_request, "END_SECONDS", 0.2)
    with served_request.server(tmp_path, "cpu") as address:
        assert address == "http://here"


def test_a_server_that_does_not_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"the server did not start: .*nothing"):
        serve_once(tmp_path / "nothing", "the cat", "cpu")


def test_the_section_shows_the_answer_as_text():
    section = served_section(Served("def main(", "<b>x</b>", 5, 10.0, 0.41))
    assert "&lt;b&gt;x" in section.body
    assert "<b>def main(</b>" in section.body
    assert "10 ms" in section.body
    assert ">10<" in section.body  # 4 tokens in 0.4 seconds
