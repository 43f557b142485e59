"""Tokens that come faster than events may be sent share them; nothing is lost, reordered or held back for long."""

import asyncio
import time

import patient
from fake_engine import empty_soon

from tilestack.engine import Delta, TokenLogprob
from tilestack.server.pacing import Pace, merged, paced


class Queued:
    """A stream whose deltas are there already, or come when the test says."""

    def __init__(self):
        self.deltas = asyncio.Queue()


def test_deltas_of_an_answer_are_joined():
    told = TokenLogprob(1, -0.5)
    found = merged([Delta(0, (1,), "a", (told,)), Delta(1, (5,), "x"), Delta(0, (2, 3), "bc", (told, told)), Delta(0, finish="stop", stopped_by="d")])  # fmt: skip
    assert found == [Delta(0, (1, 2, 3), "abc", (told,) * 3, "stop", "d"), Delta(1, (5,), "x")]


def test_what_waits_goes_together_and_what_does_not_goes_at_once():
    async def read():
        stream, found = Queued(), []
        for text in "abc":
            stream.deltas.put_nowait(Delta(0, (1,), text))
        reading = asyncio.create_task(collect(paced(stream, Pace(lambda: 0.0)), found))
        await asyncio.sleep(0.01)
        stream.deltas.put_nowait(Delta(0, (1,), "d"))
        await asyncio.sleep(0.01)
        stream.deltas.put_nowait(Delta(0, (1,), "e"))
        stream.deltas.put_nowait(Delta(0, finish="length"))
        stream.deltas.put_nowait(None)
        await reading
        return [(delta.text, delta.finish) for delta in found]

    assert asyncio.run(read()) == [("abc", None), ("d", None), ("e", "length")]


def test_streams_wait_for_the_same_moment_and_one_that_leaves_takes_nobody_along():
    async def read():
        pace, intervals = Pace(lambda: intervals.append(0.03) or 0.03), []
        waiting = [asyncio.create_task(pace.wait()) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[2].cancel()
        done, _ = await asyncio.wait(waiting, timeout=60)
        return len(done), sum(task.cancelled() for task in waiting), len(intervals), pace.coming

    assert asyncio.run(read()) == (5, 1, 1, None)


async def collect(deltas, into):
    async for delta in deltas:
        into.append(delta)


def test_many_streams_send_fewer_events(serve, fake):
    fake.pace = 0.001
    ask = {"prompt": "a", "max_tokens": 100, "stream": True}
    events = lambda url: patient.post(url + "/v1/completions", json=ask).text.count("data: {")
    slow = serve(fake, events_per_second=2.0)
    began = time.monotonic()
    few = events(slow)
    assert few <= 3 + 2.0 * (time.monotonic() - began)  # the first and the last do not wait
    assert events(serve(fake)) > 50


def test_a_client_that_leaves_between_events_takes_its_request_along(serve, fake):
    fake.pace = 0.05
    url = serve(fake, events_per_second=0.01)  # a hundred seconds between events
    ask = {"prompt": "a", "max_tokens": 2000, "stream": True}
    with patient.stream("POST", url + "/v1/completions", json=ask) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert fake.live
    assert empty_soon(fake)
