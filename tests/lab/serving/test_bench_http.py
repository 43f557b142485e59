"""`bench http`: the same requests both ways, through a real server and a client of its own, and what is made of their times."""

import pytest

from tilestack.engine.host import EngineHost
from tilestack.lab.serving import bench_http


def test_both_ways_answer_the_same_requests_a_few_at_a_time(monkeypatch, capfd):
    monkeypatch.setattr(bench_http, "STREAMS", 3)
    texts, at_once = {}, []
    run = bench_http.LLM.run

    def noted(self, requests):
        texts["asked"] = [(request.prompt, request.params.max_tokens) for request in requests]
        return run(self, requests)

    monkeypatch.setattr(bench_http.LLM, "run", noted)
    begin = EngineHost.begin

    def begun(self, number, request):
        texts.setdefault("http", []).append((request.prompt, request.params.max_tokens))
        at_once.append(len(self.streams) + 1)
        return begin(self, number, request)

    monkeypatch.setattr(EngineHost, "begin", begun)
    rows = bench_http.bench_http("cpu", prompt=3, answer=4, turns=1)
    assert [row["backend"] for row in rows] == ["offline", "http"]
    assert all(row["figure"] > 0 and row["cpu_us"] > 0 for row in rows)
    assert bench_http.is_kept(rows, None)
    assert not bench_http.is_kept(rows[:1], None), "one way alone is no comparison"
    assert not bench_http.is_kept(rows, "smollm2")
    assert not bench_http.is_kept([rows[0], rows[1] | {"source": "older"}], None)
    asked, warming_up = texts["asked"], len(texts["asked"])
    assert warming_up == 3 * bench_http.IN_A_ROW
    assert len({most for _, most in asked}) > 1
    assert sorted(texts["http"][warming_up:]) == sorted(asked)
    assert max(at_once) <= 3, "a stream asks when its last answer has ended"
    assert "to warm up" in capfd.readouterr().out


def test_the_best_turn_of_the_clock_need_not_be_that_of_the_processor():
    Turn = bench_http.Turn
    assert bench_http.fastest(Turn(1.0, 5.0), Turn(2.0, 3.0)) == Turn(1.0, 3.0)


def test_what_is_lost_is_told_of_the_rate_and_of_the_work():
    row = lambda case, backend, figure, cpu: dict(case=case, backend=backend, figure=figure, cpu_us=cpu)
    rows = [row("a", "offline", 200.0, 50.0), row("a", "http", 150.0, 55.0), row("b", "offline", 1, 1), row("b", "http", 1, 1)]  # fmt: skip
    assert bench_http.costs(rows) == {"a": (0.25, pytest.approx(0.1)), "b": (0.0, 0.0)}
    assert list(bench_http.render_http(rows).columns[-1].cells)[:2] == ["–", "25.0% of the rate, 10.0% more CPU"]


def test_figures_are_of_each_token():
    asks = [bench_http.Ask([1], 4), bench_http.Ask([1], 6)]
    assert bench_http.of_each_token(20.0, 5.0, 10, asks) == bench_http.Turn(2.0, 0.5)


def test_fewer_tokens_than_were_asked_for_are_no_figure():
    with pytest.raises(RuntimeError, match="3 tokens were made, not 4"):
        bench_http.of_each_token(1.0, 1.0, 3, [bench_http.Ask([1], 4)])
