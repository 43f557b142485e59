"""Answers of the model itself to many prompts, sampled or greedy: for rollouts, for exams, for samples to read."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from tilestack.data import Message, Tokenizer
from tilestack.models import generate
from tilestack.train.recipe import Evaluation

BUDGET = 1 << 17  # tokens answered at a time, prompts included


def prompt_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """A conversation up to where the assistant's answer begins."""
    return tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=True, tools=tools), bare=True)


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

    Prompts of like length are answered together, as many as BUDGET holds. What is drawn depends on the seed and on the
    prompts, not on what was drawn before.
    """
    found: list[list[int]] = [[] for _ in prompts]
    for number, rows in enumerate(batches(list(map(len, prompts)), max_new_tokens)):
        sizes = [len(prompts[row]) for row in rows]
        steps = generate(
            model,
            pad_sequence([torch.tensor(list(prompts[row]), device=device) for row in rows], batch_first=True),
            lengths=torch.tensor(sizes, device=device),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=(seed * 1_000_003 + number) % 2**62,
            stop=tuple(stop),
        )
        for row, size, tokens in zip(rows, sizes, torch.stack(list(steps), 1).tolist(), strict=True):
            own = tokens[size - min(sizes) :][:max_new_tokens]  # before it, the rest of the row's prompt
            found[row] = until(own, stop)
    return found


def batches(lengths: Sequence[int], new_tokens: int, budget: int | None = None) -> Iterator[list[int]]:
    """Numbers of prompts to be answered together, longest first. A prompt that is shorter than the longest of its batch
    answers that many steps earlier, so a difference beyond `new_tokens` would cost more than a batch of its own."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        longest = lengths[batch[0]] if batch else 0
        full = (len(batch) + 1) * (longest + new_tokens) > (budget or BUDGET)
        if batch and (full or longest - lengths[number] > new_tokens):
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


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
