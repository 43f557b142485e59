"""Requests that stream into asyncio: together, cut off, over the limit, in a model that breaks, and when it closes."""

import asyncio
import functools
import threading

import pytest
import torch
from engines import alone, check_empty, decoder, make_engine, vector_alone

from tilestack.engine import AsyncEngine, EngineClosed, QueueFull, RequestError, SamplingParams
from tilestack.engine.sequence import Request

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def running(test):
    """Runs a test of one coroutine with a time limit."""

    @functools.wraps(test)
    def run(**fixtures):
        asyncio.run(asyncio.wait_for(test(**fixtures), 300))

    return run


async def whole(stream):
    deltas = [delta async for delta in stream]
    return [token for delta in deltas for token in delta.ids], deltas[-1]


async def quiet(engine):
    while engine.engine.busy or engine.streams or engine.entering:
        await asyncio.sleep(0.01)
    check_empty(engine.engine)


def serving(**settings):
    return AsyncEngine(make_engine(**settings), "tiny")


async def test_streams_side_by_side():
    async with serving() as engine:
        streams = [engine.submit([n + 1, 5], GREEDY) for n in range(12)]
        found = await asyncio.gather(*map(whole, streams))
        for n, (ids, last) in enumerate(found):
            assert ids == alone([n + 1, 5], 8)
            assert last.finish == "length"
        assert streams[0].usage.prompt == 2
        assert streams[0].usage.completion == 8
        await quiet(engine)


async def test_what_is_cut_off_leaves_nothing():
    async with serving(max_sequences=4) as engine:
        long = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        streams = [engine.submit([n % 90 + 1] * 3, long) for n in range(200)]
        await asyncio.sleep(0.1)
        for stream in streams:
            stream.cancel()
            stream.cancel()
        last = [(await whole(stream))[1] for stream in streams]
        assert {delta.finish for delta in last} <= {"cancelled", "length"}
        assert any(delta.finish == "cancelled" for delta in last)
        ids, _ = await whole(engine.submit([4, 5], GREEDY))
        assert ids == alone([4, 5], 8)
        await quiet(engine)


async def test_leaving_the_block_cancels():
    async with serving() as engine:
        async with engine.submit([1, 2], SamplingParams(max_tokens=50, ignore_eos=True)) as stream:
            async for _ in stream:
                break
        await quiet(engine)


async def test_who_stops_reading_and_goes_on_misses_nothing():
    async with serving() as engine:
        stream, ids = engine.submit([4, 5], GREEDY), []
        await quiet(engine)  # all of it waits
        while found := [delta async for delta in first_of(stream)]:
            ids += found[0].ids
        assert ids == alone([4, 5], 8)


async def first_of(stream):
    async for delta in stream:
        yield delta
        break


async def test_who_cancels_late_ends_nobody_who_came_after_under_the_same_id():
    async with serving() as engine:
        first = engine.submit([1, 2], GREEDY, id="same")
        await whole(first)
        await quiet(engine)
        second = engine.submit([4, 5], GREEDY, id="same")
        engine.cancel(first.request)
        ids, last = await whole(second)
        assert (ids, last.finish) == (alone([4, 5], 8), "length")


async def test_a_full_queue_and_bad_requests_are_refused_at_once():
    async with serving(max_sequences=1, queue=2) as engine:
        streams = [engine.submit([1, 2], SamplingParams(max_tokens=40, ignore_eos=True)) for _ in range(3)]
        with pytest.raises(QueueFull, match="at most 2"):
            streams += [engine.submit([1, 2], GREEDY) for _ in range(3)]
        with pytest.raises(RequestError, match="empty"):
            engine.submit([], GREEDY)
        with pytest.raises(RequestError, match="no adapter 'x'"):
            engine.submit([1], GREEDY, adapter="x")
        for stream in streams:
            stream.cancel()
        await quiet(engine)


async def test_what_was_accepted_is_served_even_if_others_took_its_place():
    """The thread moves sequences from one list to another while others ask how many wait; nobody is let in and then refused."""
    engine = serving(max_sequences=1, queue=1)
    streams = [engine.submit([1, 2], GREEDY) for _ in range(2)]
    engine.engine.add(Request("before", [3, 4], GREEDY))
    engine.engine.step()
    engine.engine.add(Request("between", [3, 4], GREEDY))
    with pytest.raises(QueueFull, match="at most 1"):
        engine.submit([1, 2], GREEDY)
    async with engine:
        assert [last.finish for _, last in await asyncio.gather(*map(whole, streams))] == ["length"] * 2


async def test_a_request_on_its_way_keeps_its_place_until_it_waits(monkeypatch):
    engine = serving(max_sequences=1, queue=1)
    accept, entering = engine.engine.accept, []

    def noting(request):
        entering.append(engine.entering)
        accept(request)

    monkeypatch.setattr(engine.engine, "accept", noting)
    streams = [engine.submit([1, 2], GREEDY) for _ in range(2)]
    async with engine:
        await asyncio.gather(*map(whole, streams))
        await quiet(engine)
    assert entering == [2, 1]


async def test_a_step_that_breaks_ends_its_requests_and_not_the_engine():
    engine = serving(overlap=True)
    forward, broken = engine.engine.runner.decoder.hidden, True

    def hidden(*given, **named):
        if broken:
            raise RuntimeError("the model fell over")
        return forward(*given, **named)

    engine.engine.runner.decoder = Wrapped(decoder(), hidden)
    async with engine:
        streams = [engine.submit([n + 1, 2], GREEDY) for n in range(3)]
        for _, last in await asyncio.gather(*map(whole, streams)):
            assert last.finish == "error"
            assert "fell over" in last.error
        broken = False
        ids, _ = await whole(engine.submit([4, 5], GREEDY))
        assert ids == alone([4, 5], 8)
        await quiet(engine)


class Wrapped:
    def __init__(self, decoder, hidden):
        self.decoder, self.hidden = decoder, hidden

    def __getattr__(self, name):
        return getattr(self.decoder, name)


async def test_logits_that_are_not_finite_are_an_error():
    engine = serving()
    engine.engine.runner.decoder = Wrapped(
        decoder(), lambda *given, **named: decoder().hidden(*given, **named) * torch.nan
    )
    async with engine:
        for params in (GREEDY, SamplingParams(max_tokens=3)):
            _, last = await whole(engine.submit([4, 5], params))
            assert last.finish == "error"
            assert "not finite" in last.error
        await quiet(engine)


async def test_closing_drains_and_then_cancels():
    engine = serving().start()
    short = engine.submit([1, 2], GREEDY)
    await engine.close(drain=300)
    assert (await whole(short))[1].finish == "length"
    with pytest.raises(EngineClosed):
        engine.submit([1, 2], GREEDY)

    engine = serving().start()
    stream = engine.submit([1, 2], SamplingParams(max_tokens=55, ignore_eos=True))
    await engine.close()
    assert (await whole(stream))[1].finish in ("cancelled", "length")


async def test_embeddings():
    async with serving() as engine:
        ids = [3, 5, 7]
        for pooling in ("mean", "last"):
            stream = engine.submit(ids, pooling=pooling)
            _, last = await whole(stream)
            assert last.vector == pytest.approx(vector_alone(ids, pooling), abs=1e-6)
            assert (stream.usage.prompt, stream.usage.completion) == (3, 0)
        with pytest.raises(RequestError, match="no pooling"):
            engine.submit(ids, pooling="middle")
        await quiet(engine)


async def test_a_request_that_cannot_be_added_ends_alone(monkeypatch):
    async with serving() as engine:
        accept = engine.engine.accept
        refuse = lambda request: accept(request) if request.id != "odd" else [].pop()
        monkeypatch.setattr(engine.engine, "accept", refuse)
        good = engine.submit([1, 2], SamplingParams(temperature=0, max_tokens=30, ignore_eos=True))
        odd = engine.submit([1, 2], GREEDY, id="odd")
        assert "pop from empty list" in (await whole(odd))[1].error
        assert (await whole(good))[0] == alone([1, 2], 30)
        await quiet(engine)


async def test_an_engine_that_never_ran_ends_its_streams_when_it_closes():
    engine = serving()
    streams = [engine.submit([1, 2], GREEDY), engine.submit([1, 2], SamplingParams(n=2))]
    await engine.close()
    for stream in streams:
        assert (await whole(stream))[1].finish == "cancelled"
    check_empty(engine.engine)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_streams_end_when_the_thread_dies(monkeypatch):
    class Panic(BaseException):
        pass

    engine = serving()

    def panic():
        raise Panic

    monkeypatch.setattr(engine.engine, "step", panic)
    engine.start()
    assert (await whole(engine.submit([1, 2], GREEDY)))[1].finish == "cancelled"
    with pytest.raises(EngineClosed):
        engine.submit([1, 2], GREEDY)
    await engine.close()


async def test_requests_of_a_loop_that_was_closed_are_cancelled(monkeypatch):
    async with serving() as engine:
        closed, step = threading.Event(), engine.engine.step
        monkeypatch.setattr(engine.engine, "step", lambda: step() if closed.wait(60) else [])

        async def leave():
            engine.submit([1, 2], SamplingParams(max_tokens=60, ignore_eos=True))
            await asyncio.sleep(0)

        await asyncio.get_running_loop().run_in_executor(None, asyncio.run, leave())
        closed.set()
        ids, _ = await whole(engine.submit([4, 5], GREEDY))
        assert ids == alone([4, 5], 8)
        await quiet(engine)
        assert engine.stats().completion_tokens < 8 + 8, "it was not answered to its end of 60"


async def test_many_threads_submit_and_cancel_at_once():
    async with serving(max_sequences=4) as engine:

        async def busy(seed):
            for n in range(12):
                stream = engine.submit([seed + 1, n + 1], SamplingParams(max_tokens=3, n=2, ignore_eos=True))
                if n % 3 == 0:
                    stream.cancel()
                assert (await whole(stream))[1].finish in ("length", "cancelled")

        loop = asyncio.get_running_loop()
        await asyncio.gather(*(loop.run_in_executor(None, asyncio.run, busy(seed)) for seed in range(4)))
        await quiet(engine)
        assert engine.entering == 0


for _name, _test in list(globals().items()):
    if _name.startswith("test_") and asyncio.iscoroutinefunction(_test):
        globals()[_name] = running(_test)
