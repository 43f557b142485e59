"""What is asked: prompts and answers of fixed, uniform or conversation-like lengths, some with a beginning in common.

Prompts are random token ids, or pieces of a text. The same seed makes the same workload.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

IDS = (100, 10_000)  # random prompts are made of these: in the vocabulary of most models, above most special tokens
LONGEST = 1024  # tokens of a conversation-like prompt or answer; longer ones are left out of ShareGPT when it is measured with
SIGMA = 1.0  # of the logarithm: a tenth of the lengths are over twice the mean
SHAREGPT = {"input": 220, "output": 200}  # about the means of ShareGPT's turns, in tokens

Length = Callable[[random.Random], int]


@dataclass(frozen=True)
class Ask:
    """One request: a prompt, and how many tokens of an answer."""

    prompt: list[int] | str
    output: int


def parse_length(text: str, what: str) -> Length:
    """A length from 512, 100:1024 (uniform), lognormal:300 (by its mean), or sharegpt."""
    kind, _, value = text.partition(":")
    try:
        if kind in ("sharegpt", "lognormal"):
            mean = SHAREGPT[what] if kind == "sharegpt" and not value else int(value)
            check_length(mean)
            return lambda dice: conversation_length(dice, mean)
        low = check_length(int(kind))
        high = check_length(int(value)) if value else low
        if low > high:
            raise ValueError
    except ValueError:
        raise ValueError(
            f"--{what} takes a number of tokens (512), a range (100:1024), lognormal:MEAN or sharegpt, not {text!r}"
        ) from None
    return lambda dice: dice.randint(low, high)


def check_length(number: int) -> int:
    if number < 1:
        raise ValueError
    return number


def conversation_length(dice: random.Random, mean: float) -> int:
    """Many short ones and a few long ones, with this mean (before the longest are cut)."""
    drawn = dice.lognormvariate(math.log(mean) - SIGMA * SIGMA / 2, SIGMA)
    return min(max(round(drawn), 4), LONGEST)


@dataclass(frozen=True)
class Prefixes:
    """Beginnings that prompts have in common, as system prompts are: so many, of so many tokens."""

    tokens: int = 0
    count: int = 1


def make_workload(
    requests: int,
    input: Length,
    output: Length,
    *,
    prefixes: Prefixes | None = None,
    text: str | None = None,
    vocabulary: int = IDS[1],
    seed: int = 0,
) -> list[Ask]:
    """So many requests, of random ids below `vocabulary`. With a `text`, prompts are pieces of it, three words for every four
    tokens."""
    dice, shared = random.Random(seed), prefixes or Prefixes()
    words = text.split() if text is not None else None
    if words is not None and not words:
        raise ValueError("the text that prompts are to be made of is empty")
    ids = range(min(IDS[0], vocabulary // 2), vocabulary)
    begins = [make_prompt(dice, shared.tokens, words, ids) for _ in range(shared.count)]
    made = []
    for _ in range(requests):
        begin, rest, tokens = dice.choice(begins), make_prompt(dice, input(dice), words, ids), output(dice)
        made.append(Ask(begin + rest if words is None else " ".join([*begin, *rest]), tokens))  # type: ignore[list-item]
    return made


def make_prompt(dice: random.Random, tokens: int, words: list[str] | None, ids: range) -> list:
    if words is None:
        return [dice.choice(ids) for _ in range(tokens)]
    count = math.ceil(tokens * 3 / 4)
    first = dice.randrange(len(words))
    return [words[(first + place) % len(words)] for place in range(count)]
