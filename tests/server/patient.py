"""Questions to servers with minutes for their answers, where httpx2 gives five seconds: a busy machine is no fault of theirs."""

from functools import partial

import httpx2

LONG = 120.0  # seconds that nothing here takes unless something is wrong

get, post, options, stream = (
    partial(function, timeout=LONG) for function in (httpx2.get, httpx2.post, httpx2.options, httpx2.stream)
)
