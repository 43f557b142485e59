"""Deltas from the engine's thread to a loop: all of them, in order, and no wake but for who waits."""

import asyncio
import random
import threading
import time

import pytest

from tilestack.engine import Delta
from tilestack.engine.delta_queue import DeltaQueue

SECONDS = 60  # after which nobody waits any more for what should have come


def numbered(first, end):
    return [Delta(0, (number,)) for number in range(first, end)]


def test_what_came_is_taken_at_once_and_nothing_after_the_end():
    async def take():
        queue = DeltaQueue(asyncio.get_running_loop())
        for delta in numbered(0, 3):
            queue.put(delta)
        first = await queue.take()
        queue.put(Delta(0, finish="stop"))
        queue.end()
        return first, await queue.take(), await queue.take(), await queue.take()

    assert asyncio.run(take()) == (numbered(0, 3), [Delta(0, finish="stop")], [], [])


def test_only_a_reader_that_waits_for_what_is_there_is_woken():
    async def read():
        queue = DeltaQueue(asyncio.get_running_loop())
        queue.put(Delta(0, (1,)))
        nobody = queue.wakes
        await queue.take()
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        nothing = queue.wakes
        queue.put(Delta(0, (2,)))
        waited_for = queue.wakes
        queue.wake()
        woken = queue.wakes
        await taking
        rest = queue.news(patient=True)
        queue.put(Delta(0, (3,)))
        patient = queue.wakes
        queue.end()
        ended = queue.wakes
        queue.wake()
        return nobody, nothing, waited_for, woken, patient, ended, rest.done()

    assert asyncio.run(read()) == (False, False, True, False, False, True, True)


@pytest.mark.parametrize("patient", [False, True])
def test_news_that_is_there_already_is_not_waited_for(patient):
    async def read():
        queue = DeltaQueue(asyncio.get_running_loop())
        queue.put(Delta(0, (1,)))
        before = queue.news(patient).done()
        queue.wake()
        queue.end()
        return before, queue.news(patient).done()

    assert asyncio.run(read()) == (not patient, True)


def test_a_reader_that_left_is_not_woken_and_another_may_come():
    async def read():
        queue = DeltaQueue(asyncio.get_running_loop())
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait([taking])
        queue.put(Delta(0, (1,)))
        wakes = queue.wakes
        queue.wake()  # the call may be on its way when a reader leaves
        return wakes, await queue.take()

    assert asyncio.run(read()) == (False, [Delta(0, (1,))])


def test_a_second_reader_at_once_is_refused_and_takes_nothing_from_the_first():
    """Only one is woken: the other would wait forever."""

    async def read():
        queue = DeltaQueue(asyncio.get_running_loop())
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="only one at a time"):
            await queue.take()
        queue.put(Delta(0, (1,)))
        queue.wake()
        return await asyncio.wait_for(taking, SECONDS)

    assert asyncio.run(read()) == [Delta(0, (1,))]


@pytest.mark.parametrize("rests", [False, True])
def test_nothing_is_lost_between_a_thread_that_puts_and_a_loop_that_takes(rests):
    """The thread puts while the reader is anywhere between waiting and taking; a wake that is lost would be waited for."""
    count, dice = 30_000, random.Random(0)
    pauses = [dice.random() < 0.001 for _ in range(count)]

    async def read():
        loop = asyncio.get_running_loop()
        queue, found = DeltaQueue(loop), []

        def put():
            for delta, pause in zip(numbered(0, count), pauses, strict=True):
                queue.put(delta)
                if queue.wakes:
                    loop.call_soon_threadsafe(queue.wake)
                if pause:
                    time.sleep(0.0005)
            queue.end()
            if queue.wakes:
                loop.call_soon_threadsafe(queue.wake)

        thread = threading.Thread(target=put)
        thread.start()
        while ready := await asyncio.wait_for(queue.take(), SECONDS):
            found += ready
            if rests and not queue.ended:
                await asyncio.wait([rest := queue.news(patient=True)], timeout=0.001)
                rest.cancel()
        thread.join()
        return found

    assert asyncio.run(read()) == numbered(0, count)
