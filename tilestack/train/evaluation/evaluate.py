"""How good is a model? Perplexity and bits per byte of texts, and multiple choice by likelihood, with standard errors.

A text is scored in windows, each token exactly once. Windows may overlap: tokens that were scored already then serve as
context for those that were not.

    text      t0 t1 t2 t3 t4 t5 t6 t7 t8 t9
    window 1  ▪  ■  ■  ■  ■                       ■ scored, ▪ context
    window 2        ▪  ▪  ▪  ■  ■                 length 4, stride 2
    window 3              ▪  ▪  ▪  ■  ■

A standard error is that of the mean over documents, which are independent, not over tokens, which are not.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tilestack.train.evaluation.log_probs import Rows, Scored, in_rows, log_probs

BUDGET = 16384  # tokens in a batch, filling included


class EvaluationError(ValueError):
    """What was given to evaluate cannot be; the message says why."""


@dataclass(frozen=True)
class Estimate:
    """A figure and the standard error of it, NaN where one observation says nothing about the spread."""

    value: float
    error: float


@dataclass(frozen=True)
class Score:
    """What a model says of a sequence: the log-probability in nats of its scored tokens, and how many those are."""

    log_prob: float
    tokens: int


@torch.no_grad()
def score(model: Any, sequences: Sequence[Scored], device: torch.device | str, budget: int = BUDGET) -> list[Score]:
    """The scores of sequences, in their order."""
    scores: list[Score | None] = [None] * len(sequences)
    for numbers, rows in batches(model, sequences, budget):
        rows = rows.to(device)
        sums, tokens = log_probs(model, rows).double().sum(-1).tolist(), rows.tokens.tolist()
        for number, log_prob, count in zip(numbers, sums, tokens, strict=True):
            scores[number] = Score(log_prob, count)
    return [found for found in scores if found is not None]


def batches(model: Any, sequences: Sequence[Scored], budget: int = BUDGET) -> Iterator[tuple[list[int], Rows]]:
    """Sequences as rows, with their numbers; those of like length share a batch of at most `budget` tokens. A model whose
    rotation depends on the length of a text reads them one by one, without filling and without what predicts nothing."""
    alone = getattr(model, "rotates_by_length", False)
    for numbers in batched_by_length([len(sequence.ids) for sequence in sequences], 0 if alone else budget):
        chosen = [sequences[number] for number in numbers]
        yield numbers, in_rows(chosen, multiple=1).without_last() if alone else in_rows(chosen)


def batched_by_length(lengths: Sequence[int], budget: int) -> Iterator[list[int]]:
    """Numbers of sequences, longest first, so that a memory too small is noticed at once."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch and (len(batch) + 1) * lengths[batch[0]] > budget:
            yield batch
            batch = []
        batch.append(number)
    if batch:
        yield batch


def windows(ids: Sequence[int], length: int, stride: int) -> Iterator[Scored]:
    """Windows of at most `length` predicted tokens that score every token but the first exactly once."""
    if not 1 <= stride <= length:
        raise EvaluationError(f"the stride of windows must lie between 1 and their length {length}, not {stride}")
    scored = 1
    while scored < len(ids):
        end = min(scored + (length if scored == 1 else stride), len(ids))
        begin = max(end - length - 1, 0)
        yield Scored(list(ids[begin:end]), [0] * (scored - begin) + [1] * (end - scored))
        scored = end


@dataclass(frozen=True)
class TextFigures:
    """How well texts are predicted: perplexity per token, and bits per byte, which no tokenizer can flatter."""

    perplexity: Estimate
    bits_per_byte: Estimate
    nats_per_token: Estimate
    documents: int
    tokens: int
    bytes: int


def evaluate_texts(
    model: Any,
    documents: Iterable[tuple[Sequence[int], int]],
    device: torch.device | str,
    length: int,
    stride: int | None = None,
) -> TextFigures:
    """Figures over documents given as (token ids, bytes of text); a document's first id is context alone.

    Begin documents with a token that marks a beginning, if the model knows one, so that their first word counts too.
    """
    found: list[list[float]] = []  # nats, tokens, bytes of each document
    pieces: list[list[float]] = []  # and of each window, for the spread where there is but one document
    for group in gathered(documents, length, stride or length):
        scores = score(model, [window for _, window, _ in group], device)
        for (document, _, size), part in zip(group, scores, strict=True):
            if document == len(found):
                found.append([0.0, 0, 0])
            pieces.append([-part.log_prob, part.tokens, size])
            found[document] = [total + more for total, more in zip(found[document], pieces[-1], strict=True)]
    return text_figures(found, pieces)


def text_figures(found: Sequence[Sequence[float]], pieces: Sequence[Sequence[float]]) -> TextFigures:
    """Figures from the nats, tokens and bytes of each document; those of windows tell the spread of a single document."""
    if not found:
        raise EvaluationError("there is no text to evaluate: every document is empty")
    units = found if len(found) > 1 else pieces
    all_nats, all_tokens, all_bytes = (sum(column) for column in zip(*found, strict=True))
    per_token = all_nats / all_tokens
    spread = ratio_error([(nats, tokens) for nats, tokens, _ in units])
    perplexity = math.exp(per_token) if per_token < 700 else math.inf
    per_byte = all_nats / math.log(2) / all_bytes if all_bytes else math.nan
    byte_spread = ratio_error([(nats / math.log(2), size) for nats, _, size in units]) if all_bytes else math.nan
    return TextFigures(
        Estimate(perplexity, perplexity * spread),
        Estimate(per_byte, byte_spread),
        Estimate(per_token, spread),
        len(found),
        int(all_tokens),
        round(all_bytes),
    )


def gathered(
    documents: Iterable[tuple[Sequence[int], int]], length: int, stride: int
) -> Iterator[list[tuple[int, Scored, float]]]:
    """Windows of documents, some batches' worth at a time: the document's number, the window, its share of the bytes."""
    group: list[tuple[int, Scored, float]] = []
    held = number = 0
    for ids, size in documents:
        for window in windows(ids, length, stride):
            group.append((number, window, size * sum(window.mask) / (len(ids) - 1)))
            held += len(window.ids)
            if held >= 8 * BUDGET:
                yield group
                group, held = [], 0
        number += len(ids) > 1
    if group:
        yield group


def ratio_error(observations: Sequence[tuple[float, float]]) -> float:
    """The standard error of Σ value / Σ size over independent observations of different sizes."""
    n, total = len(observations), sum(size for _, size in observations)
    if n < 2 or not total:
        return math.nan
    ratio = sum(value for value, _ in observations) / total
    residual = sum((value - ratio * size) ** 2 for value, size in observations)
    return math.sqrt(residual * n / (n - 1)) / total


@dataclass(frozen=True)
class Question:
    """A text and ways to go on, of which the one numbered `answer`, from 0, is right."""

    prompt: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True)
class ChoiceFigures:
    """How often the right choice is the likeliest, as it is and per byte, so that long choices are not at a loss."""

    accuracy: Estimate
    accuracy_per_byte: Estimate
    chance: float
    questions: int


def question_from(row: dict[str, Any], where: str) -> Question:
    """A question from a row of a file: {"prompt": …, "choices": [...], "answer": 0}."""
    prompt, choices, answer = (row.get(key) for key in ("prompt", "choices", "answer"))
    if not isinstance(prompt, str):
        raise EvaluationError(f'{where}: a question needs "prompt", a text')
    if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
        raise EvaluationError(f'{where}: a question needs "choices", a list of two or more texts')
    if type(answer) is not int or not 0 <= answer < len(choices):
        raise EvaluationError(f'{where}: "answer" must be the number of the right choice, 0 to {len(choices) - 1}')
    return Question(prompt, tuple(choices), answer)


def evaluate_choices(
    model: Any, tokenizer: Any, questions: Sequence[Question], device: torch.device | str, length: int
) -> ChoiceFigures:
    """Figures over questions; of a prompt that is longer than `length` tokens with a choice, the end is read."""
    if not questions:
        raise EvaluationError("there are no questions to evaluate")
    sequences = [
        last_tokens(continuation(tokenizer, q.prompt, choice), length) for q in questions for choice in q.choices
    ]
    scores = iter(score(model, sequences, device))
    right, right_per_byte = [], []
    for question in questions:
        found = [next(scores).log_prob for _ in question.choices]
        per_byte = [log_prob / len(choice.encode()) for log_prob, choice in zip(found, question.choices, strict=True)]
        right.append(found.index(max(found)) == question.answer)
        right_per_byte.append(per_byte.index(max(per_byte)) == question.answer)
    chance = sum(1 / len(question.choices) for question in questions) / len(questions)
    return ChoiceFigures(share(right), share(right_per_byte), chance, len(questions))


def share(outcomes: Sequence[bool]) -> Estimate:
    n, p = len(outcomes), sum(outcomes) / len(outcomes)
    return Estimate(p, math.sqrt(p * (1 - p) / (n - 1)) if n > 1 else math.nan)


def continuation(tokenizer: Any, context: str, text: str) -> Scored:
    """A text after its context, as tokens of which those of the text are scored. Before them stands what the tokenizer puts
    before every text. Where the text begins with the first token, without a context or with one that is a part of it, that is
    the token of a beginning: it has to follow something.

    Spaces at the end of the context belong to the text's first token, as tokenizers of today join them. Where the two
    share a token, the first that differs from the context alone begins the text.
    """
    stripped = context.rstrip()
    text = context[len(stripped) :] + text
    whole = tokenizer.encode(stripped + text, bare=True)
    alone = tokenizer.encode(stripped, bare=True)
    same = next((n for n, (a, b) in enumerate(zip(whole, alone, strict=False)) if a != b), min(len(whole), len(alone)))
    begin = min(same, len(whole) - 1)
    start = opening(tokenizer) if begin else beginning(tokenizer)
    return Scored([*start, *whole], [0] * (len(start) + begin) + [1] * (len(whole) - begin))


def last_tokens(sequence: Scored, length: int) -> Scored:
    """The last tokens of a sequence, of which a model reads `length` and predicts as many; what is cut off is context."""
    if (asked := sum(sequence.mask)) > length:
        raise EvaluationError(f"a text of {asked} tokens is to be predicted at once, and the model reads {length}")
    return Scored(sequence.ids[-length - 1 :], sequence.mask[-length - 1 :])


def opening(tokenizer: Any) -> list[int]:
    """The tokens that a tokenizer itself puts before every text. Many put none there, though they name one for a beginning: a
    model has not read questions after it."""
    (first, *_) = tokenizer.encode("a", bare=True)
    whole = tokenizer.encode("a")
    return whole[: whole.index(first)]


def beginning(tokenizer: Any) -> list[int]:
    """The token that stands before a text: that of a beginning, or of an end, which is what came before in training."""
    token = tokenizer.bos if tokenizer.bos is not None else tokenizer.eos
    return [] if token is None else [token]


def whole_document(tokenizer: Any, ids: list[int]) -> list[int]:
    """A document's tokens to score: with a beginning, so that its first token is predicted too, as its bytes are counted; and
    without the end token that training puts behind it, which is no part of it."""
    start, ids = beginning(tokenizer), ids[:-1] if ids[-1:] == [tokenizer.eos] else ids
    return ids if ids[:1] == start else start + ids
