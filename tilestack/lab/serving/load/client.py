"""One request to an OpenAI endpoint, streamed, with the time of everything that came."""

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import httpx2

    from tilestack.lab.serving.load.workload import Ask

NOT_OPENAI = (ValueError, TypeError, AttributeError, LookupError)  # what comes of reading JSON of another shape


@dataclass(frozen=True)
class Target:
    """Whom to ask, and how."""

    url: str
    model: str
    chat: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # temperature, ignore_eos, …

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def body(self, ask: "Ask") -> dict[str, Any]:
        what = {"messages": [{"role": "user", "content": ask.prompt}]} if self.chat else {"prompt": ask.prompt}
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        return {"model": self.model, **what, "max_tokens": ask.output, **streamed, **self.options}


@dataclass
class Outcome:
    """What came of a request; times in seconds, from its start but for `start` itself."""

    start: float
    ttft: float = 0.0
    itl: list[float] = field(default_factory=list)  # between the pieces of the answer
    latency: float = 0.0
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None

    @property
    def tpot(self) -> float:
        """Time for a token after the first."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


async def send(client: "httpx2.AsyncClient", target: Target, ask: "Ask", origin: float) -> Outcome:
    """Ask, and note when each piece of the answer came. Whatever goes wrong is in the outcome."""
    import httpx2

    began = last = time.perf_counter()
    outcome, pieces, usage = Outcome(began - origin), 0, None
    try:
        async with client.stream("POST", target.path, json=target.body(ask)) as response:
            if response.status_code != 200:
                outcome.error = f"{response.status_code}: {(await response.aread()).decode(errors='replace')[:300]}"
                return outcome
            held = b""
            async for received in response.aiter_raw():
                now = time.perf_counter()
                *lines, held = (held + received).split(b"\n")
                for line in lines:
                    told = read_event(line)
                    if told is None:
                        continue
                    if problem := told.get("error"):
                        outcome.error = str(problem.get("message", problem) if isinstance(problem, dict) else problem)
                        return outcome
                    usage = told.get("usage") or usage
                    if not any(
                        has_text(choice) or (ends(choice) and not pieces) for choice in told.get("choices") or ()
                    ):
                        continue
                    pieces += 1
                    if pieces == 1:
                        outcome.ttft = now - began
                    else:
                        outcome.itl.append(now - last)
                    last = now
        outcome.latency = last - began
        outcome.input_tokens = usage["prompt_tokens"] if usage else len(ask.prompt)
        outcome.output_tokens = usage["completion_tokens"] if usage else pieces
    except httpx2.HTTPError as problem:
        outcome.error = f"{type(problem).__name__}: {problem}".removesuffix(": ")  # many say no more than what they are
    except NOT_OPENAI as problem:
        outcome.error = f"the answer is not OpenAI's: {type(problem).__name__}: {problem}"
    if not pieces and outcome.error is None:
        outcome.error = "the answer was empty"
    return outcome


def read_event(line: bytes) -> dict[str, Any] | None:
    """The JSON in a line of server-sent events, which may end in either way; None for comments and the mark of the end."""
    data = line.removeprefix(b"data:").strip()
    return json.loads(data) if data.startswith(b"{") else None


def ends(choice: dict[str, Any]) -> bool:
    """Tokens need not be text: of an answer without any, the end tells when it was there."""
    return choice.get("finish_reason") is not None


def has_text(choice: dict[str, Any]) -> bool:
    """Thoughts count, which servers tell under one of two names: their tokens are in the usage too."""
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(map(delta.get, ("content", "reasoning_content", "reasoning"))))
