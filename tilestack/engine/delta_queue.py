"""What comes of a request, on its way from the engine's thread to whoever reads it in an asyncio loop.

A token costs the thread an append. The loop is woken only where somebody waits for it, since a wake for every token of every
stream would take the interpreter from the engine, which needs it to launch the next step:

    engine's thread   put, put, put, end ──▶ wakes? ── only then ──▶ call_soon_threadsafe(wake)
    the loop          take: all that has come    news: when something comes; with patience, when all has
"""

import asyncio
from collections import deque

from tilestack.engine.outputs import Delta


class DeltaQueue:
    """Deltas in the order they came. One thread puts, and one task of a loop takes."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self.loop = loop
        self.come: deque[Delta] = deque()
        self.ended = False  # nothing more will come
        self.reader: asyncio.Future[None] | None = None  # of the task that waits
        self.patient = False  # it waits for the end alone

    def put(self, delta: Delta) -> None:
        self.come.append(delta)

    def end(self) -> None:
        """Nothing more will come; called after the last delta was put."""
        self.ended = True

    @property
    def wakes(self) -> bool:
        """Whether a task waits for what is here now; any thread may ask. A task says that it waits before it looks, so that
        either it sees what was put or who put it sees the task."""
        reader = self.reader
        return reader is not None and not reader.done() and self.has_news

    @property
    def has_news(self) -> bool:
        return self.ended or (bool(self.come) and not self.patient)

    def wake(self) -> None:
        """Called in the loop."""
        if self.reader is not None and not self.reader.done():
            self.reader.set_result(None)

    def news(self, patient: bool = False) -> "asyncio.Future[None]":
        """What is done when something has come, or with patience when all has."""
        if self.reader is not None and not self.reader.done():
            raise RuntimeError("another task waits for this stream already; only one at a time can read it")
        self.patient = patient
        self.reader = waits = self.loop.create_future()
        if self.has_news:
            waits.set_result(None)
        return waits

    async def something(self) -> bool:
        """Wait until there is something to take; false once all was taken and no more will come."""
        while not self.come and not self.ended:
            await self.news()
        return bool(self.come)

    async def take(self) -> list[Delta]:
        """All that has come, waiting for something; nothing once all was taken and no more will come."""
        await self.something()
        return [self.come.popleft() for _ in range(len(self.come))]
