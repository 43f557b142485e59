"""`bench http`: the same requests both ways, through a real server and a client of its own, and what is made of their times."""

import pytest

from tilestack.lab.serving import bench_http


def test_both_ways_answer_the_same_requests(monkeypatch, capfd):
    monkeypatch.setattr(bench_http, "STREAMS", 3)
    texts = {}
    run = bench_http.LLM.run

    def noted(self, requests):
        texts["asked"] = [request.prompt for request in requests]
        return run(self, requests)

    monkeypatch.setattr(bench_http.LLM, "run", noted)
    submit = bench_http.AsyncEngine.submit

    def submitted(self, prompt, params, **named):
        texts.setdefault("http", []).append(prompt)
        return submit(self, prompt, params, **named)

    monkeypatch.setattr(bench_http.AsyncEngine, "submit", submitted)
    rows = bench_http.bench_http("cpu", prompt=3, answer=4, turns=1)
    assert [row["backend"] for row in rows] == ["offline", "http"]
    assert all(row["figure"] > 0 and row["cpu_us"] > 0 and row["answered"] == 12 for row in rows)
    assert bench_http.is_kept(rows, None)
    assert not bench_http.is_kept(rows[:1], None), "one way alone is no comparison"
    assert not bench_http.is_kept(rows, "smollm2")
    assert not bench_http.is_kept([rows[0], rows[1] | {"source": "older"}], None)
    assert sorted(texts["http"][3:]) == sorted(texts["asked"])  # of the second turn, after the one that warms up
    assert "to warm up" in capfd.readouterr().out


def test_the_best_turn_of_the_clock_need_not_be_that_of_the_processor():
    Turn = bench_http.Turn
    assert bench_http.fastest(Turn(1.0, 5.0), Turn(2.0, 3.0)) == Turn(1.0, 3.0)


def test_what_is_lost_is_told_of_the_rate_and_of_the_work():
    row = lambda case, backend, figure, cpu: dict(case=case, backend=backend, figure=figure, cpu_us=cpu)
    rows = [row("a", "offline", 200.0, 50.0), row("a", "http", 150.0, 55.0), row("b", "offline", 1, 1), row("b", "http", 1, 1)]  # fmt: skip
    assert bench_http.costs(rows) == {"a": (0.25, pytest.approx(0.1)), "b": (0.0, 0.0)}
    assert list(bench_http.render_http(rows).columns[-1].cells)[:2] == ["–", "25.0% of the rate, 10.0% more CPU"]


def test_fewer_tokens_than_were_asked_for_are_no_figure():
    with pytest.raises(RuntimeError, match="3 tokens were made, not 4"):
        bench_http.check_made(3, [bench_http.Ask([1], 4)])
