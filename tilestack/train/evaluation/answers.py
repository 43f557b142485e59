"""Answers of the model itself to many prompts, sampled or greedy: for rollouts, for exams, for samples to read."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tilestack.data import Message, Tokenizer
from tilestack.engine import LLM, Engine, EngineSettings, Request, RequestOutput, SamplingParams
from tilestack.engine.settings import bytes_of_token
from tilestack.train.recipe import Evaluation

BUDGET = 1 << 17  # tokens whose keys and values are there at a time, prompts included
MOST_ANSWERS = 512  # at a time
PAGE = 16


def prompt_ids(
    tokenizer: Tokenizer, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None
) -> list[int]:
    """A conversation up to where the assistant's answer begins."""
    return tokenizer.encode(tokenizer.chat(messages, add_generation_prompt=True, tools=tools), bare=True)


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
    first: int = 0,
) -> list[list[int]]:
    """Token ids that follow each prompt, the one it stopped at included; one that did not stop lacks it.

    What is drawn for a prompt depends on the seed and its place among the prompts, not on what is drawn beside it; these are
    the prompts from the place `first` on.
    """
    params = SamplingParams(
        temperature=temperature, top_k=top_k, top_p=top_p, max_tokens=max_new_tokens, stop_ids=tuple(stop),
        ignore_eos=True,
    )  # fmt: skip
    return [output.completions[0].ids for output in answer_all(model, requests_of(prompts, params, seed, first))]


def answers_and_log_probs(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    stop: Sequence[int],
    seed: int = 0,
    first: int = 0,
) -> tuple[list[list[int]], list[list[float]]]:
    """`answers` at temperature 1 in the batch-invariant mode, and the log-probability of each of their tokens, which
    `invariant_log_probs` finds again to the bit."""
    params = SamplingParams(
        temperature=1.0, max_tokens=max_new_tokens, stop_ids=tuple(stop), ignore_eos=True, logprobs=0
    )
    outputs = answer_all(model, requests_of(prompts, params, seed, first), batch_invariant=True)
    found = [output.completions[0] for output in outputs]
    return [each.ids for each in found], [[told.logprob for told in each.logprobs] for each in found]


def requests_of(prompts: Sequence[Sequence[int]], params: SamplingParams, seed: int, first: int = 0) -> list[Request]:
    """A request for each prompt, each with a seed of its own."""
    seeded = lambda number: replace(params, seed=(seed * 1_000_003 + number) % 2**62)
    return [Request(f"{number}", list(prompt), seeded(number)) for number, prompt in enumerate(prompts, first)]


def answer_all(
    model: Any, requests: Sequence[Request], tokenizer: Tokenizer | None = None, **more: Any
) -> list[RequestOutput]:
    """What comes of requests to a model that is being trained or examined, with memory for them and no more; `more` are
    settings of the engine."""
    if not requests:
        return []
    longest = max(len(request.prompt) + (request.params.max_tokens or 0) for request in requests)
    tokens = min(BUDGET, len(requests) * (longest + PAGE))
    settings = EngineSettings(
        context=context_for(model, longest),
        max_sequences=min(len(requests), MOST_ANSWERS),
        kv_memory=max(tokens, longest + PAGE) * bytes_of_token(model.embedding.weight.dtype, model),
        page=PAGE,
        queue=None,
        **more,
    )
    return LLM(Engine(model, tokenizer, settings)).run(requests)


def context_for(model: Any, longest: int) -> int:
    """The context of an engine whose longest text has so many tokens."""
    return min(longest + 1, model.config.positions)


def shown_answers(
    model: Any, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], settings: Evaluation
) -> list[str]:
    """Prompts with their likeliest answers, as people read them; none for what is longer than the model reads."""
    prompts = [prompt for prompt in prompts if len(prompt) < model.config.positions]
    found = answers(model, prompts, max_new_tokens=settings.sample_tokens, stop=tokenizer.stops)
    return [
        f"{tokenizer.decode(prompt).strip()} → {tokenizer.decode(answer).strip()}"
        for prompt, answer in zip(prompts, found, strict=True)
    ]
