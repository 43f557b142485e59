"""Tokens that come faster than events may be sent share them; nothing is lost, reordered or held back for long."""

import asyncio
import time

import patient
from fake_engine import empty_soon

from tilestack.engine import Delta, TokenLogprob
from tilestack.engine.delta_queue import DeltaQueue
from tilestack.server.pacing import Pace, merged, paced


class Queued:
    """A stream whose deltas are there already, or come when the test says."""

    def __init__(self):
        self.deltas = DeltaQueue(asyncio.get_running_loop())

    def tell(self, *deltas, ended=False):
        for delta in deltas:
            self.deltas.put(delta)
        if ended:
            self.deltas.end()
        if self.deltas.wakes:
            self.deltas.wake()


def test_deltas_of_an_answer_are_joined():
    told = TokenLogprob(1, -0.5)
    found = merged([Delta(0, (1,), "a", (told,)), Delta(1, (5,), "x"), Delta(0, (2, 3), "bc", (told, told)), Delta(0, finish="stop", stopped_by="d")])  # fmt: skip
    assert found == [Delta(0, (1, 2, 3), "abc", (told,) * 3, "stop", "d"), Delta(1, (5,), "x")]


def test_what_waits_goes_together_and_what_does_not_goes_at_once():
    async def read():
        stream, found = Queued(), []
        stream.tell(*(Delta(0, (1,), text) for text in "abc"))
        reading = asyncio.create_task(collect(paced(stream, Pace(lambda: 0.0)), found))
        await asyncio.sleep(0.01)
        stream.tell(Delta(0, (1,), "d"))
        await asyncio.sleep(0.01)
        stream.tell(Delta(0, (1,), "e"), Delta(0, finish="length"), ended=True)
        await reading
        return [(delta.text, delta.finish) for delta in found]

    assert asyncio.run(read()) == [("abc", None), ("d", None), ("e", "length")]


def test_streams_wait_for_the_same_moment_and_one_that_leaves_takes_nobody_along():
    async def read():
        pace, intervals = Pace(lambda: intervals.append(0.03) or 0.03), []
        waiting = [asyncio.create_task(pace.wait(Queued().deltas)) for _ in range(5)]
        await asyncio.sleep(0)
        waiting[2].cancel()
        done, _ = await asyncio.wait(waiting, timeout=60)
        return len(done), sum(task.cancelled() for task in waiting), len(intervals), pace.resting

    assert asyncio.run(read()) == (5, 1, 1, [])


def test_the_end_of_an_answer_waits_for_no_moment_and_tokens_before_it_do():
    async def read():
        stream, found = Queued(), []
        stream.tell(Delta(0, (1,), "a"))
        reading = asyncio.create_task(collect(paced(stream, Pace(lambda: 1000.0)), found))
        await asyncio.sleep(0.01)
        stream.tell(Delta(0, (1,), "b"))
        await asyncio.sleep(0.05)
        before = [delta.text for delta in found]
        stream.tell(Delta(0, (1,), "c"), Delta(0, finish="stop"), ended=True)
        await asyncio.wait_for(reading, 60)
        return before, [(delta.text, delta.finish) for delta in found]

    assert asyncio.run(read()) == (["a"], [("a", None), ("bc", "stop")])


def test_an_end_that_was_not_waited_for_leaves_the_moment_to_the_others():
    async def read():
        pace, early, late = Pace(lambda: 0.05), Queued(), Queued()
        waiting = [asyncio.create_task(pace.wait(each.deltas)) for each in (early, late)]
        await asyncio.sleep(0)
        early.tell(ended=True)
        done, rest = await asyncio.wait(waiting, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        ended_first = (waiting[0] in done, waiting[1] in rest)
        await asyncio.wait_for(waiting[1], 60)
        return ended_first

    assert asyncio.run(read()) == (True, True)


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
