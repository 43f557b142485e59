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


async def paced(stream: Any, interval: Callable[[], float]) -> AsyncIterator[Delta]:
    """The deltas of an engine's stream; those that wait already are merged, and more are given time to come."""
    ready: list[Delta] = []
    async for delta in stream:
        ready.append(delta)
        if not stream.deltas.empty():
            continue
        for each in merged(ready):
            yield each
        ready = []
        if (pause := interval()) >= SHORTEST:
            await asyncio.sleep(pause)
    for each in merged(ready):
        yield each


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
    )
