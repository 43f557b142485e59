"""`bench http`: the same requests each way, through real servers and a client of its own, and what is made of their times."""

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from tilestack import cli
from tilestack.engine import AsyncEngine
from tilestack.engine.host import EngineHost
from tilestack.engine.thread import EngineThread
from tilestack.lab.serving import bench_http
from tilestack.server import apart


def test_all_ways_answer_the_same_requests_a_few_at_a_time(monkeypatch, capfd):
    monkeypatch.setattr(bench_http, "STREAMS", 3)
    texts, at_once = {}, []
    run = bench_http.LLM.run

    def noted(self, requests):
        texts["asked"] = [(request.prompt, request.params.max_tokens) for request in requests]
        return run(self, requests)

    monkeypatch.setattr(bench_http.LLM, "run", noted)
    enter = EngineThread.enter

    def entered(self, request):
        texts.setdefault(type(self), []).append((request.prompt, request.params.max_tokens))
        at_once.append(len(self.streams))
        return enter(self, request)

    monkeypatch.setattr(EngineThread, "enter", entered)
    logger = logging.getLogger("tilestack")
    before = (logger.handlers, logger.propagate, logger.level)
    rows, failed = bench_http.bench_http("cpu", prompt=3, answer=4, turns=1)
    assert not failed
    assert [row["backend"] for row in rows] == ["offline", "http", "http, two processes"]
    assert all(row["figure"] > 0 for row in rows)
    assert all(row["cpu_us"] > 0 for row in rows if Path("/proc/self/stat").exists())
    assert bench_http.is_kept(rows, None)
    assert not bench_http.is_kept(rows[:2], None), "a way is missing"
    assert not bench_http.is_kept(rows, "smollm2")
    assert not bench_http.is_kept([*rows[:2], rows[2] | {"source": "older"}], None)
    asked, warming_up = texts["asked"], len(texts["asked"])
    assert warming_up == 3 * bench_http.IN_A_ROW
    assert len({most for _, most in asked}) > 1
    for way in (AsyncEngine, EngineHost):
        assert sorted(texts[way][warming_up:]) == sorted(asked)
    assert max(at_once) <= 3, "a stream asks when its last answer has ended"
    said = capfd.readouterr()
    assert "to warm up" in said.out
    assert '"event"' not in said.err, "a server's log is told where something fails"
    assert (logger.handlers, logger.propagate, logger.level) == before


def test_a_way_that_fails_leaves_the_others_and_says_what_its_server_said(monkeypatch):
    monkeypatch.setattr(bench_http, "STREAMS", 2)
    words = [sys.executable, "-c", "import sys; sys.exit('no such package')"]
    started = lambda inherited, log: subprocess.Popen(words, stderr=log, pass_fds=inherited)
    monkeypatch.setattr(apart, "start", started)
    told = []
    rows, failed = bench_http.bench_http("cpu", prompt=3, answer=4, turns=2, tell=told.append)
    assert [row["backend"] for row in rows] == ["offline", "http"]
    (problem,) = failed.values()
    assert list(failed) == ["http, two processes"]
    assert "the process of the server ended with exit code 1 before it listened" in problem
    assert problem.endswith("ends with\nno such package")
    assert told.count("http, two processes: failed") == 1, "and is not tried again"


def test_what_the_client_and_the_server_said_is_told_and_the_engine_can_go_on(monkeypatch):
    monkeypatch.setattr(bench_http, "STREAMS", 2)
    engine = bench_http.engine_of("cpu", None, 8)
    asked = bench_http.Workload(2, "30", "3", seed=0)  # longer than what the engine reads
    for serving in (bench_http.in_one_process, bench_http.in_two_processes):
        with pytest.raises(RuntimeError, match=r"ended with exit code 1:\n(?s:.)*2 of 2 requests failed"):
            bench_http.over_http(engine, asked, serving)
    assert bench_http.offline(engine, bench_http.Workload(2, "3", "3", seed=0)).seconds > 0


def test_the_command_saves_what_was_measured_and_fails_when_a_way_did(monkeypatch, tmp_path, capsys):
    row = dict(op="http", case="a", dtype="float32", direction="forward", backend="offline", unit="tokens/s", figure=2.0,
               device="cpu", source="x")  # fmt: skip
    monkeypatch.setattr(bench_http, "bench_http", lambda *_, **__: ([row], {"http": "it broke"}))
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "http", "--device", "cpu", "--json", str(tmp_path / "rows.json")])
    assert ended.value.code == 1
    assert "http could not be measured: it broke" in capsys.readouterr().err
    assert [kept["figure"] for kept in json.loads((tmp_path / "rows.json").read_text())] == [2.0]


def test_processor_time_that_the_system_does_not_tell_is_left_out(monkeypatch):
    Turn = bench_http.Turn
    assert bench_http.cpu_seconds_of(-1) is None
    assert bench_http.fastest(Turn(1.0, None), Turn(2.0, None)) == Turn(1.0, None)
    assert bench_http.fastest(Turn(1.0, None), Turn(2.0, 3.0)) == Turn(1.0, 3.0)
    assert bench_http.cpu_figure(Turn(1.0, None)) == {}
    monkeypatch.setattr(bench_http, "STREAMS", 2)
    monkeypatch.setattr(bench_http, "cpu_seconds_of", lambda process: None)
    engine = bench_http.engine_of("cpu", None, 8)
    took = bench_http.over_http(engine, bench_http.Workload(2, "3", "3", seed=0), bench_http.in_two_processes)
    assert took.seconds > 0
    assert took.cpu_seconds is None


def test_only_the_end_of_a_log_is_told_without_answered_requests():
    answered = '{"level": "info", "event": "request"}'
    said = "\n".join(["first", answered, *map(str, range(bench_http.TOLD))])
    assert bench_http.last_lines(said).splitlines() == [*map(str, range(bench_http.TOLD))]


def test_the_best_turn_of_the_clock_need_not_be_that_of_the_processor():
    Turn = bench_http.Turn
    assert bench_http.fastest(Turn(1.0, 5.0), Turn(2.0, 3.0)) == Turn(1.0, 3.0)


def test_what_is_lost_is_told_of_the_rate_and_of_the_work():
    row = lambda case, backend, figure, **cpu: dict(case=case, backend=backend, figure=figure, **cpu)
    rows = [
        row("a", "offline", 200.0, cpu_us=50.0), row("a", "http", 150.0, cpu_us=55.0), row("a", "http, two processes", 190.0),
        row("b", "offline", 1, cpu_us=1), row("b", "http", 1, cpu_us=1), row("c", "http", 1, cpu_us=1),
    ]  # fmt: skip
    costs = bench_http.costs(rows)
    assert costs == {
        ("a", "http"): (0.25, pytest.approx(0.1)),
        ("a", "http, two processes"): (pytest.approx(0.05), None),
        ("b", "http"): (0.0, 0.0),
    }
    told = list(bench_http.render_http(rows).columns[-1].cells)
    assert told[:3] == ["–", "25.0% of the rate, 10.0% more CPU", "5.0% of the rate"]


def test_figures_are_of_each_token():
    asks = [bench_http.Ask([1], 4), bench_http.Ask([1], 6)]
    assert bench_http.of_each_token(20.0, 5.0, 10, asks) == bench_http.Turn(2.0, 0.5)


def test_fewer_tokens_than_were_asked_for_are_no_figure():
    with pytest.raises(RuntimeError, match="3 tokens were made, not 4"):
        bench_http.of_each_token(1.0, 1.0, 3, [bench_http.Ask([1], 4)])
