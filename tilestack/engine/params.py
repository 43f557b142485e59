"""What a request asks for: how its tokens are drawn, when it ends, and what is told about them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("json", "json_schema", "regex", "grammar")


class RequestError(ValueError):
    """A request that cannot be served as it is; the message says what was given and what is accepted."""


@dataclass(frozen=True)
class Structure:
    """A form that the answer must have: any JSON, JSON by a schema, a regular expression, or a Lark grammar."""

    kind: str
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"no structure {self.kind!r}; choose from {', '.join(KINDS)}")


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt. The defaults draw from the model's own distribution until it ends its text.

    The same seed gives the same text, whatever else is served at the time; None takes a new one for every request.
    """

    temperature: float = 1.0  # 0 takes the likeliest token each time
    top_k: int = 0  # draw from the k likeliest; 0 for all
    top_p: float = 1.0  # from the likeliest that have this share together
    min_p: float = 0.0  # without those less likely than this fraction of the likeliest
    repetition_penalty: float = 1.0  # divides the logits of tokens that were there, prompt included
    presence_penalty: float = 0.0  # taken from the logits of tokens that were drawn
    frequency_penalty: float = 0.0  # taken as often as they were
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1  # answers to give
    best_of: int | None = None  # answers to draw, of which the n likeliest are given
    max_tokens: int | None = None  # None: as many as the model has room for
    min_tokens: int = 0  # nothing ends the text before this many
    stop: tuple[str, ...] = ()  # texts before which it ends
    stop_ids: tuple[int, ...] = ()  # tokens with which it ends
    ignore_eos: bool = False
    keep_stop: bool = False  # whether the stop text is part of the answer
    logprobs: int | None = None  # tell each token's log-probability and those of this many likeliest
    prompt_logprobs: int | None = None  # the same for the prompt
    structure: Structure | None = None

    def __post_init__(self) -> None:
        for name, low, high in (
            ("temperature", 0, 100),
            ("top_p", 0, 1),
            ("min_p", 0, 1),
            ("repetition_penalty", 0.01, 100),
            ("presence_penalty", -100, 100),
            ("frequency_penalty", -100, 100),
        ):
            check_between(name, getattr(self, name), low, high)
        for name, low, high in (
            ("top_k", 0, 2**31 - 1),
            ("n", 1, 1024),
            ("min_tokens", 0, 2**31 - 1),
            ("best_of", self.n, 1024),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, 128),
            ("prompt_logprobs", 0, 128),
            ("seed", -(2**63), 2**64 - 1),
        ):
            check_whole(name, getattr(self, name), low, high)
        for token, bias in self.logit_bias.items():
            check_between(f"logit_bias of token {token}", bias, -1000, 1000)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens} and max_tokens only {self.max_tokens}")
        if isinstance(self.stop, str) or not all(isinstance(text, str) for text in self.stop):
            raise RequestError(f"stop must be a tuple of texts, not {self.stop!r}")
        if not all(self.stop):
            raise RequestError("a stop text must not be empty")

    @property
    def drawn(self) -> int:
        """How many answers are drawn."""
        return self.n if self.best_of is None else self.best_of

    @property
    def penalises(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def filters(self) -> bool:
        return (self.top_k, self.top_p, self.min_p) != (0, 1.0, 0.0)


def check_between(name: str, value: Any, low: float, high: float) -> None:
    """Refuse a number outside its range, or what is no number; None was not asked for."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise RequestError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high:
        raise RequestError(f"{name} must lie between {low} and {high}, not {value}")


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """The same for what is counted."""
    if isinstance(value, float):
        raise RequestError(f"{name} must be a whole number, not {value!r}")
    check_between(name, value, low, high)
