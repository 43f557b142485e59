"""What a request asks for: how its tokens are drawn, when it ends, and what is told about them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = ("json", "json_schema", "regex", "grammar")


class RequestError(ValueError):
    """A request that cannot be served as it is; the message says what was given and what is accepted, and `param` is the
    name of what is at fault, where it is one thing."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


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
        for name, low, high in (("top_k", 0, 2**31 - 1), ("n", 1, 1024), ("min_tokens", 0, 2**31 - 1)):
            check_whole(name, getattr(self, name), low, high)
        for name, low, high in (
            ("best_of", self.n, 1024),
            ("max_tokens", 1, 2**31 - 1),
            ("logprobs", 0, 128),
            ("prompt_logprobs", 0, 128),
            ("seed", -(2**63), 2**64 - 1),
        ):
            if (value := getattr(self, name)) is not None:
                check_whole(name, value, low, high)
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map tokens to numbers, not {brief(self.logit_bias)}", "logit_bias")
        for token, bias in self.logit_bias.items():
            check_between("logit_bias", bias, -1000, 1000, f"logit_bias of token {brief(token)}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens is {self.min_tokens} and max_tokens only {self.max_tokens}", "min_tokens")
        check_tuple("stop", self.stop, str, "texts")
        check_tuple("stop_ids", self.stop_ids, int, "token ids")
        if not all(self.stop):
            raise RequestError("a stop text must not be empty", "stop")
        if not isinstance(self.structure, Structure | None):
            raise RequestError(f"structure must be a Structure, not {brief(self.structure)}", "structure")

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


def check_between(name: str, value: Any, low: float, high: float, called: str | None = None) -> None:
    """Refuse a number outside its range, or what is no number."""
    whole = isinstance(value, int) and not isinstance(value, bool)  # of any size, which a float is not
    if not whole and (not isinstance(value, float) or math.isnan(value)):
        raise RequestError(f"{called or name} must be a number, not {brief(value)}", name)
    if not low <= value <= high:
        raise RequestError(f"{called or name} must lie between {low} and {high}, not {brief(value)}", name)


def check_whole(name: str, value: Any, low: int, high: int) -> None:
    """The same for what is counted."""
    if isinstance(value, float):
        raise RequestError(f"{name} must be a whole number, not {value!r}", name)
    check_between(name, value, low, high)


def check_tuple(name: str, value: Any, kind: type, called: str) -> None:
    listed = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    if not listed or not all(isinstance(each, kind) for each in value):
        raise RequestError(f"{name} must be a tuple of {called}, not {brief(value)}", name)


def brief(value: Any) -> str:
    """A value as messages show it, cut short; of a whole number of many digits only the size, since Python may refuse to
    write it out."""
    if isinstance(value, int) and value.bit_length() > 128:
        return f"a number of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"
