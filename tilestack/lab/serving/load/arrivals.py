"""When requests are sent: at random times of a given rate (open loop), or each when another has ended (closed loop).

Independent people come as a Poisson process: the times between them are exponential, whatever the server does. A closed
loop keeps a fixed number under way, and so asks less of a slow server.
"""

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext

from tilestack.lab.serving.load.client import Outcome, Target, send
from tilestack.lab.serving.load.workload import Ask


def arrival_times(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the start; all at once without a rate."""
    if rate is None:
        return [0.0] * count
    dice, at, times = random.Random(seed), 0.0, []
    for _ in range(count):
        times.append(at)
        at += dice.expovariate(rate)
    return times


async def run_load(
    target: Target,
    asks: Sequence[Ask],
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    seed: int = 0,
    api_key: str | None = None,
    timeout: float = 600.0,
    ended: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Send all requests and answer what came of them, in their order; `ended` is told of each."""
    import httpx2

    turns = asyncio.Semaphore(concurrency) if concurrency else nullcontext()
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx2.AsyncClient(base_url=target.url, headers=headers, timeout=timeout, limits=limits) as client:
        origin = time.perf_counter()

        async def one(ask: Ask, at: float) -> Outcome:
            await asyncio.sleep(at - (time.perf_counter() - origin))
            async with turns:
                outcome = await send(client, target, ask, origin)
            ended(outcome)
            return outcome

        times = arrival_times(len(asks), rate, seed)
        return list(await asyncio.gather(*(one(ask, at) for ask, at in zip(asks, times, strict=True))))


async def first_model(url: str, api_key: str | None, timeout: float = 30.0) -> str:
    """The model that an endpoint lists first."""
    import httpx2

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with httpx2.AsyncClient(base_url=url, headers=headers, timeout=timeout) as client:
        try:
            response = await client.get("/v1/models")
        except httpx2.HTTPError as problem:
            raise ValueError(f"{url} does not tell its models: {problem}. Is a server there?") from None
    if response.status_code == 401:
        given = "takes another API key" if api_key else "asks for an API key"
        raise ValueError(f"{url} {given}; give it by --api-key or TILESTACK_API_KEY")
    try:
        return str(response.json()["data"][0]["id"])
    except (LookupError, ValueError, TypeError):
        told = f"{url} does not tell its models: it answers {response.status_code}, {response.text[:80]!r}"
        raise ValueError(f"{told}. Name one by --model") from None
