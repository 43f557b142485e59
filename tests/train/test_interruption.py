"""Ctrl-C once saves and says how to go on; twice ends the program, wherever it is."""

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tilestack.cli import main
from tilestack.train.pretrain import Pretraining
from tilestack.train.run import interruption
from tilestack.train.run.interruption import ASKING, Interruption

STUCK = """
import hashlib, importlib.util, sys, time
spec = importlib.util.spec_from_file_location("interruption", sys.argv[2])  # alone: all of tilestack takes seconds
spec.loader.exec_module(interruption := importlib.util.module_from_spec(spec))
with interruption.Interruption(lambda words: print(words, flush=True)):
    print("ready", flush=True)
    if sys.argv[1] == "python":
        while True:
            time.sleep(0.01)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # many minutes in C: no handler of Python's runs until it returns
"""


def compute_on(process, seconds):
    """Until a process has had the processor for so many seconds more, however long that takes."""
    had = lambda: sum(map(int, Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    until = had() + seconds * os.sysconf("SC_CLK_TCK")
    while had() < until:
        time.sleep(0.01)


@pytest.mark.parametrize("where", ["python", "C"])
def test_the_second_signal_ends_the_program_at_once(where):
    process = subprocess.Popen([sys.executable, "-c", STUCK, where, interruption.__file__], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    if where == "C":
        compute_on(process, 0.3)  # until it is stuck
    process.send_signal(signal.SIGINT)
    assert b"once more ends it" in process.stdout.readline()
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=60) == 128 + signal.SIGTERM
    assert process.stdout.read() == b""


def test_nothing_is_said_in_the_middle_of_what_the_program_does():
    """A handler that printed would fail where it interrupts a print, or an import that printing needs."""
    speakers = queue.SimpleQueue()
    with Interruption(lambda words: speakers.put((threading.current_thread(), words))):
        signal.raise_signal(signal.SIGINT)
        speaker, words = speakers.get(timeout=60)
    assert speaker is not threading.main_thread()
    assert "once more ends it at once" in words


def test_handlers_are_put_back():
    before = [signal.getsignal(number) for number in ASKING]
    with Interruption() as asked:
        signal.raise_signal(signal.SIGTERM)
        assert asked.number == signal.SIGTERM
    assert [signal.getsignal(number) for number in ASKING] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("among", [False, True])
def test_who_fails_among_others_can_say_why_before_the_launcher_ends_it(among):
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(RuntimeError, match="the other is gone"), Interruption(among=among):
            raise RuntimeError("the other is gone")
        assert signal.getsignal(signal.SIGTERM) == (signal.SIG_IGN if among else before)
        with Interruption(among=among):
            pass  # who ends well is ended as before
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)
    with Interruption(among=True):
        pass
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_that_was_asked_to_stop_ends_with_the_signals_code(tmp_path, number, capsys, monkeypatch, outside):
    (tmp_path / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": f"def add_{n}(x): return x"}) for n in range(40))
    )
    (tmp_path / "r.toml").write_text(
        f"""
[run]
name = "r"
steps = 6
device = "cpu"
[model.config]
model_type = "llama"
hidden_size = 16
intermediate_size = 32
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 64
[data]
corpus = "files"
files = ["{tmp_path}/text.jsonl"]
vocabulary = 300
validation = 0.2
sequence = 16
batch = 2
"""
    )
    drawn = Pretraining.next_batch

    def asking(self):
        asking.calls += 1
        if asking.calls == 3:
            os.kill(os.getpid(), number)
        return drawn(self)

    asking.calls = 0
    monkeypatch.setattr(Pretraining, "next_batch", asking)
    command = ["train", str(tmp_path / "r.toml"), "--folder", str(tmp_path / "run")]
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 128 + number
    said = capsys.readouterr().err
    assert "after step 3: saved in" in said
    assert "run the same command again to continue" in said
    assert not (tmp_path / "run" / "model").exists()
    with pytest.raises(SystemExit) as ended:
        main(command)
    assert ended.value.code == 0
    assert (tmp_path / "run" / "model" / "config.json").exists()
