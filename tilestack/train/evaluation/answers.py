"""Answers of the model itself to many prompts, sampled or greedy: for rollouts, for exams, for samples to read."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from tilestack.data import Message, Tokenizer
from tilestack.models import generate
from tilestack.train.recipe import Evaluation

ROWS = 256  # answered at a time


def prompt_ids(tokenizer: Tokenizer, messages: Sequence[Message]) -> list[int]:
    """A conversation up to where the assistant's answer begins."""
    return tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=True), bare=True)


@torch.no_grad()
def answers(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> list[list[int]]:
    """Token ids that follow each prompt, the one it stopped at included; one that did not stop lacks it.

    Prompts of one length are answered together, so nothing is filled up on the left. What is drawn depends on the seed
    and on the prompts, not on what was drawn before.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for number, rows in enumerate(alike(prompts)):
        ids = torch.tensor([list(prompts[row]) for row in rows], device=device)
        steps = generate(
            model,
            ids,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=(seed * 1_000_003 + number) % 2**62,
            stop=tuple(stop),
        )
        for row, tokens in zip(rows, torch.stack(list(steps), 1).tolist(), strict=True):
            found[row] = until(tokens, stop)
    return found


def alike(prompts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """Numbers of prompts that have one length, some rows' worth at a time."""
    lengths = defaultdict(list)
    for number, prompt in enumerate(prompts):
        lengths[len(prompt)].append(number)
    for numbers in lengths.values():
        for first in range(0, len(numbers), ROWS):
            yield numbers[first : first + ROWS]


def until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    """Tokens up to the first that stops, with it."""
    return tokens[: next((n for n, token in enumerate(tokens) if token in stop), len(tokens)) + 1]


def shown_answers(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], settings: Evaluation, device: torch.device | str
) -> list[str]:
    """Prompts with their likeliest answers, as people read them."""
    found = answers(model, prompts, max_new_tokens=settings.sample_tokens, stop=tokenizer.stops, device=device)
    return [
        f"{tokenizer.decode(prompt).strip()} → {tokenizer.decode(answer).strip()}"
        for prompt, answer in zip(prompts, found, strict=True)
    ]
