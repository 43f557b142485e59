"""What comes of a request: pieces while it runs, and completions when it is done."""

from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model, before penalties and filters, and the likeliest in its place."""

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Delta(NamedTuple):
    """What was added to one answer of a request. The last of an answer says why it ended: "stop" (the model, a stop text
    or token, or the end of a text that becomes a vector), "length", "cancelled", "error", or "refused": it cannot go on as it
    was asked for.

    A tuple, since a step of many sequences makes one for each."""

    choice: int
    ids: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    stopped_by: str | int | None = None  # the stop text or token of the request that ended it
    error: str | None = None
    vector: tuple[float, ...] = ()  # of a request that asks for one, with its only delta


@dataclass
class Completion:
    """One whole answer."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: str | None = None
    stopped_by: str | int | None = None
    error: str | None = None
    vector: tuple[float, ...] = ()

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.ids += delta.ids
        self.logprobs += delta.logprobs
        self.finish, self.stopped_by, self.error = delta.finish, delta.stopped_by, delta.error
        self.vector = delta.vector


@dataclass(frozen=True)
class Usage:
    """What a request cost, in tokens; `cached` of the prompt's were remembered from before."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


@dataclass
class RequestOutput:
    """All that came of a prompt: its answers, likeliest first where best_of chose them."""

    id: str
    prompt: list[int]
    completions: list[Completion]
    usage: Usage
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        return self.completions[0].text
