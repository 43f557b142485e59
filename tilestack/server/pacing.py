"""Tokens that come together go out together.

An event costs the server some 40 µs, and a token of a small model on a GPU less than that: sent one by one, tokens would come
faster than Python writes them, and writing them would hold up the engine, whose thread shares the interpreter. So a stream
waits a little between events, the longer the more streams there are, and then sends all that has come.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from tilestack.engine.outputs import Delta

SHORTEST = 0.001  # seconds; less than that is not worth a timer


class Pace:
    """Moments that all streams wait for together, as many seconds apart as `interval` says at the time: one timer for all."""

    def __init__(self, interval: Callable[[], float]):
        self.interval = interval
        self.coming: asyncio.Event | None = None

    async def wait(self) -> None:
        """Until the next such moment."""
        if self.coming is None:
            if (pause := self.interval()) < SHORTEST:
                return
            self.coming = asyncio.Event()
            asyncio.get_running_loop().call_later(pause, self.come)
        await self.coming.wait()

    def come(self) -> None:
        assert self.coming is not None
        self.coming.set()
        self.coming = None


async def paced(stream: Any, pace: Pace) -> AsyncIterator[Delta]:
    """The deltas of an engine's stream; those that wait already are merged, and more are given time to come."""
    queue: asyncio.Queue[Delta | None] = stream.deltas
    ended = False
    while not ended:
        ready = [await queue.get()]
        while not queue.empty():
            ready.append(queue.get_nowait())
        ended = ready[-1] is None
        for each in merged([delta for delta in ready if delta is not None]):
            yield each
        if not ended:
            await pace.wait()


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
