"""Tokens that come together go out together.

An event costs the server some 40 µs, and a token of a small model on a GPU less than that: sent one by one, tokens would come
faster than Python writes them, and where the engine is in the same process, writing them would hold it up. So a stream
waits a little between events, the longer the more streams there are, and then sends all that has come. The end of an answer
does not wait: whoever asked may have another question.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tilestack.engine.delta_queue import DeltaQueue
from tilestack.engine.outputs import Delta

SHORTEST = 0.001  # seconds; less than that is not worth a timer


class Pace:
    """Moments that all streams wait for together, as many seconds apart as `interval` says at the time: one timer for all."""

    def __init__(self, interval: Callable[[], float]):
        self.interval = interval
        self.resting: list[asyncio.Future[None]] = []  # until the next moment; empty where none is to come

    async def wait(self, deltas: DeltaQueue) -> None:
        """Until the next such moment, or the end of a stream."""
        if not self.resting:
            if (pause := self.interval()) < SHORTEST:
                return
            asyncio.get_running_loop().call_later(pause, self.wake_all)
        rest = deltas.news(patient=True)
        self.resting.append(rest)
        await rest

    def wake_all(self) -> None:
        resting, self.resting = self.resting, []
        for rest in resting:
            if not rest.done():  # by the end of its stream, or of who waited for it
                rest.set_result(None)


async def paced(stream: Any, pace: Pace) -> AsyncIterator[Delta]:
    """The deltas of an engine's stream; those that wait already are merged, and more are given time to come."""
    deltas: DeltaQueue = stream.deltas
    while ready := await deltas.take():
        for each in merged(ready):
            yield each
        if not deltas.ended:
            await pace.wait(deltas)


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta for each answer, with all that was added to it."""
    if len(deltas) < 2:
        return list(deltas)
    of_choice: dict[int, list[Delta]] = {}
    for delta in deltas:
        of_choice.setdefault(delta.choice, []).append(delta)
    return [joined(each) for each in of_choice.values()]


def joined(deltas: Sequence[Delta]) -> Delta:
    last = deltas[-1]
    return Delta(
        last.choice,
        tuple(token for delta in deltas for token in delta.ids),
        "".join(delta.text for delta in deltas),
        tuple(told for delta in deltas for told in delta.logprobs),
        last.finish,
        last.stopped_by,
        last.error,
        last.vector,
    )
