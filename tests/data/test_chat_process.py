"""Hostile templates: kept in a process of their own, held to its memory and time, and refused in one line."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tilestack.data import DataError, chat_process
from tilestack.data.chat import CHATML, render

MESSAGES = [{"role": "user", "content": "Hi"}]


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", r"malformed: .*line 1"),
        ("{{ raise_exception('roles must alternate') }}", "refused: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ 10 ** 10 ** 10 }}", "too large"),
        ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", "more than 16,777,216 characters"),
        ("{% for i in range(999999999) %}{% endfor %}", "failed|refused"),
        ("{{ messages[0]['content'] + 1 }}", "failed on these messages"),
        ("{{ raise_exception('one\n\ntwo ' + 'x' * 5000) }}", r"refused: one two x{491,493}$"),
        ("{% for m in messages %}" * 30 + "{% endfor %}" * 30, "failed on these messages"),  # more than Python nests
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "failed on these messages"),
    ],
)
def test_bad_templates_end_in_one_line(template, said):
    with pytest.raises(DataError, match=said) as caught:
        render(template, MESSAGES)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "template",
    [
        "{{ 'a' * 999999999 }}",
        "{{ ('%1000000000d' % 1)|length }}",
        "{{ '{:>1000000000}'.format(1)|length }}",
        "{{ ('a'|center(1000000000))|length }}",
        "{{ ('a' * 100000).replace('a', 'b' * 10000)|length }}",
        "{% set n = namespace(x='a' * 16000000) %}{% for i in range(6) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x|length }}",
    ],
)
def test_no_template_takes_more_memory_than_it_may(template):
    with pytest.raises(DataError, match="the chat template takes more memory than it may have"):
        render(template, MESSAGES)
    assert render("{{ messages[0].content }}", MESSAGES) == "Hi"
    worker = chat_process._processes(os.getpid()).queue[-1].worker
    with open(f"/proc/{worker.pid}/status") as status:
        (peak,) = [int(line.split()[1]) for line in status if line.startswith("VmPeak")]
    assert peak <= chat_process.MEMORY // 1024


def test_a_template_that_does_not_end_is_stopped(monkeypatch):
    render("x", MESSAGES)
    stopped = chat_process._processes(os.getpid()).queue[-1].worker
    monkeypatch.setattr(chat_process, "SECONDS", 0.5)
    loop = "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"took more than 0.5 seconds for a conversation"):
        render(loop, MESSAGES)
    assert stopped.returncode == -signal.SIGPROF
    monkeypatch.undo()
    assert render("x", MESSAGES) == "x"


def test_what_a_template_waits_for_the_processor_is_not_its_time(monkeypatch):
    """As on a machine that is busy with other things: its process stands still for longer than it may compute."""
    render("x", MESSAGES)
    worker = chat_process._processes(os.getpid()).queue[-1].worker
    monkeypatch.setattr(chat_process, "SECONDS", 0.3)
    worker.send_signal(signal.SIGSTOP)
    going_on = threading.Timer(1.0, worker.send_signal, [signal.SIGCONT])
    going_on.start()
    assert render("{{ messages[0].content }}", MESSAGES) == "Hi"
    going_on.join()
    assert chat_process._processes(os.getpid()).queue[-1].worker is worker


def test_the_start_of_a_process_is_not_a_templates_time(monkeypatch, tmp_path):
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import runpy, time\n"
        "until = time.process_time() + 1\n"
        "while time.process_time() < until: pass\n"
        f"runpy.run_path({str(chat_process.PROGRAM)!r}, run_name='__main__')"
    )
    monkeypatch.setattr(chat_process, "PROGRAM", slow)
    monkeypatch.setattr(chat_process, "SECONDS", 0.5)
    process = chat_process.ChatProcess()
    try:
        assert process.ask("{{ messages[0].content }}", "text", [json.dumps({"messages": MESSAGES})]) == [
            {"text": "Hi"}
        ]
    finally:
        process.stop()


def test_a_process_that_never_answers_is_not_waited_for_without_end(monkeypatch):
    render("x", MESSAGES)
    worker = chat_process._processes(os.getpid()).queue[-1].worker
    worker.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(chat_process, "PATIENCE", 0.2)
    with pytest.raises(DataError, match=r"did not answer within 0.2 seconds; is this machine too busy\?"):
        render("x", MESSAGES)
    assert worker.returncode == -signal.SIGKILL
    monkeypatch.undo()
    assert render("x", MESSAGES) == "x"


def test_a_process_that_died_is_said_and_started_anew():
    render("x", MESSAGES)
    worker = chat_process._processes(os.getpid()).queue[-1].worker
    worker.kill()
    worker.wait()
    assert render("x", MESSAGES) == "x"
    assert chat_process._processes(os.getpid()).queue[-1].worker is not worker


def test_one_process_serves_all_and_leaves_with_whoever_asked():
    render(CHATML, MESSAGES)
    worker = chat_process._processes(os.getpid()).queue[-1].worker
    render(CHATML, MESSAGES)
    assert chat_process._processes(os.getpid()).queue[-1].worker is worker
    code = (
        "import os; from tilestack.data.chat_process import _processes; from tilestack.data.chat import render\n"
        "render('x', [{'role': 'user', 'content': 'Hi'}]); worker = _processes(os.getpid()).queue[-1].worker\n"
        "if os.fork() == 0: raise SystemExit\n"  # which ends as programs do, and leaves the worker alone
        "os.wait(); assert worker.poll() is None; print(worker.pid)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not os.path.exists(f"/proc/{int(done.stdout)}")


def test_threads_and_forked_processes_are_served_alike():
    import concurrent.futures
    import multiprocessing

    asked = [[{"role": "user", "content": f"{number}"}] for number in range(200)]
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda messages: render("{{ messages[0].content }}", messages), asked))
    assert found == [f"{number}" for number in range(200)]
    reading, writing = multiprocessing.get_context("fork").Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=lambda: writing.send(render("forked", MESSAGES)))
    child.start()
    assert render("parent", MESSAGES) == "parent"
    assert reading.poll(120)
    assert reading.recv() == "forked"
    child.join()
    assert render("parent", MESSAGES) == "parent"


def test_what_json_cannot_hold_is_refused():
    with pytest.raises(DataError, match="a conversation must be what JSON can hold"):
        render("x", [{"role": "user", "content": object()}])
