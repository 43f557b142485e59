"""Corpora that need no download: Python's own sources, and tasks, conversations and preferences made by code.

Everything made is determined by its seed: the first hundred of a thousand are the hundred one gets by asking for those.
"""

import hashlib
import importlib.util
import os
import random
import re
import sysconfig
import tokenize
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from tilestack.data.chat import Message

# Installed packages, tests, and modules generated from tables of data.
LEFT_OUT = {
    "site-packages", "dist-packages", "test", "tests", "idle_test", "testing", "benchmarks", "encodings", "pydoc_data",
    "__pycache__",
}  # fmt: skip
LIBRARIES = ("torch", "numpy", "sympy", "networkx", "mpmath", "triton")  # which are there wherever tilestack runs
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")
NAMES = ("Ada", "Alan", "Barbara", "Donald", "Edsger", "Grace", "Ken", "Margaret")
THINGS = ("apples", "books", "coins", "marbles", "pencils", "tickets")
WORDS = ("tile", "kernel", "warp", "block", "stack", "tensor", "cache", "token", "layer", "batch", "epoch", "grid")


@dataclass(frozen=True)
class Document:
    name: str
    text: str


@dataclass(frozen=True)
class Task:
    """A question whose answer can be checked."""

    prompt: str
    answer: str
    kind: str
    messages: tuple[Message, ...] = ()  # the conversation that asks it, where that is more than the prompt
    row: dict[str, Any] = field(default_factory=dict)  # what else its file says of it


@dataclass(frozen=True)
class Preference:
    """A conversation that awaits an answer, a good one, and a worse one."""

    messages: list[Message]
    chosen: str
    rejected: str
    tools: list[dict[str, Any]] | None = None


def python_sources(most_bytes: int | None = None, libraries: bool = False) -> Iterator[Document]:
    """The standard library of the running interpreter, without its tests and tables, file by file in order of name; with
    `libraries`, PyTorch and what it stands on too. `most_bytes` keeps a sample of about that size, spread over all."""
    for name, path in python_files(most_bytes, libraries).items():
        try:
            with tokenize.open(path) as file:  # heeds the encoding the file declares
                text = file.read()
        except (SyntaxError, UnicodeDecodeError):
            continue
        if text.strip():
            yield Document(name, text)


def python_files(most_bytes: int | None = None, libraries: bool = False) -> dict[str, Path]:
    """The files that `python_sources` reads, by name and in its order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = {path.relative_to(root).as_posix(): path for path in _sources_below(root)}
    for spec in map(importlib.util.find_spec, LIBRARIES if libraries else ()):
        for place in (spec and spec.submodule_search_locations) or ():
            above = Path(place).parent
            found |= {path.relative_to(above).as_posix(): path for path in _sources_below(Path(place))}
    if most_bytes is not None:
        found = _sample(found, most_bytes)
    return dict(sorted(found.items()))


def python_manual() -> Iterator[Document]:
    """The manual that comes with the running interpreter, as `help()` shows it: a topic each, English prose."""
    from pydoc_data.topics import topics

    yield from (Document(f"manual/{name}", text) for name, text in sorted(topics.items()) if text.strip())


def _sources_below(root: Path) -> Iterator[Path]:
    for folder, inner, names in os.walk(root):
        inner[:] = [name for name in inner if name not in LEFT_OUT]
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def _sample(files: dict[str, Path], most_bytes: int) -> dict[str, Path]:
    kept = {}
    for name in sorted(files, key=lambda name: hashlib.blake2b(name.encode()).digest()):
        size = files[name].stat().st_size
        if size <= most_bytes:
            kept[name] = files[name]
            most_bytes -= size
    return kept


def arithmetic(count: int, seed: int = 0, difficulty: int = 1, kinds: Sequence[str] = ()) -> Iterator[Task]:
    """Tasks of one or two steps, of these kinds or of all; difficulty 1 to 3 is how many digits the numbers have."""
    if difficulty not in (1, 2, 3):
        raise ValueError(f"difficulty must be 1, 2 or 3, not {difficulty}")
    if unknown := [kind for kind in kinds if kind not in ARITHMETIC]:
        raise ValueError(f"no kind of task {', '.join(unknown)}; there are {', '.join(ARITHMETIC)}")
    return _arithmetic(count, seed, difficulty, list(kinds or ARITHMETIC))


def _arithmetic(count: int, seed: int, difficulty: int, kinds: list[str]) -> Iterator[Task]:
    for number in range(count):
        draw = random.Random(f"arithmetic {seed} {difficulty} {number}")
        kind = draw.choice(kinds)
        prompt, answer = ARITHMETIC[kind](draw, 10**difficulty - 1)
        yield Task(prompt, str(answer), kind)


def reward(task: Task, text: str) -> float:
    """1 if the last number in the text is the answer, else 0. Thinking aloud before it costs nothing."""
    numbers = NUMBER.findall(text)
    try:
        return float(bool(numbers) and Decimal(numbers[-1].replace(",", "")) == Decimal(task.answer))
    except InvalidOperation:
        return 0.0


def _sum(draw: random.Random, top: int) -> tuple[str, int]:
    a, b = draw.randint(0, top), draw.randint(0, top)
    return f"What is {a} + {b}?", a + b


def _difference(draw: random.Random, top: int) -> tuple[str, int]:
    a, b = draw.randint(0, top), draw.randint(0, top)
    return f"What is {a} - {b}?", a - b


def _product(draw: random.Random, top: int) -> tuple[str, int]:
    a, b = draw.randint(0, top), draw.randint(0, 9)
    return f"What is {a} * {b}?", a * b


def _remainder(draw: random.Random, top: int) -> tuple[str, int]:
    a, b = draw.randint(0, top), draw.randint(2, 9)
    return f"What is the remainder of {a} divided by {b}?", a % b


def _larger(draw: random.Random, top: int) -> tuple[str, int]:
    a, b = draw.sample(range(top + 1), 2)
    return f"Which is larger, {a} or {b}?", max(a, b)


def _two_steps(draw: random.Random, top: int) -> tuple[str, int]:
    a, b, c = draw.randint(0, top), draw.randint(0, top), draw.randint(1, 9)
    return f"What is ({a} + {b}) * {c}?", (a + b) * c


def _story(draw: random.Random, top: int) -> tuple[str, int]:
    name, thing = draw.choice(NAMES), draw.choice(THINGS)
    a, b = draw.randint(1, top), draw.randint(1, top)
    c = draw.randint(0, min(a + b, top))
    return f"{name} has {a} {thing}, gets {b} more and gives {c} away. How many {thing} are left?", a + b - c


ARITHMETIC: dict[str, Callable[[random.Random, int], tuple[str, int]]] = {
    "sum": _sum,
    "difference": _difference,
    "product": _product,
    "remainder": _remainder,
    "larger": _larger,
    "two steps": _two_steps,
    "story": _story,
}


def conversations(count: int, seed: int = 0) -> Iterator[list[Message]]:
    """Conversations of one to three turns about numbers, lists and words, for SFT."""
    for number in range(count):
        draw = random.Random(f"conversation {seed} {number}")
        messages: list[Message] = []
        if draw.random() < 0.25:
            messages.append({"role": "system", "content": "Answer briefly and exactly."})
        for _ in range(draw.randint(1, 3)):
            question, answer = draw.choice([_numbers_turn, _sorting_turn, _word_turn])(draw)
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        yield messages


def _numbers_turn(draw: random.Random) -> tuple[str, str]:
    question, answer = ARITHMETIC[draw.choice(list(ARITHMETIC))](draw, 99)
    return question, f"The answer is {answer}."


def _sorting_turn(draw: random.Random) -> tuple[str, str]:
    words = draw.sample(WORDS, draw.randint(3, 5))
    return f"Sort these words: {', '.join(words)}", ", ".join(sorted(words))


def _word_turn(draw: random.Random) -> tuple[str, str]:
    word = draw.choice(WORDS)
    return draw.choice(
        [
            (f"Spell the word {word!r} backwards.", word[::-1]),
            (f"How many letters has the word {word!r}?", str(len(word))),
            (f"Write {word!r} in capitals.", word.upper()),
            (f"What is the last letter of {word!r}?", word[-1]),
        ]
    )


def preferences(count: int, seed: int = 0) -> Iterator[Preference]:
    """Pairs under one rule: a right answer is better than a wrong one, and of two right ones the one without padding."""
    for number, task in enumerate(arithmetic(count, seed, difficulty=2)):
        draw = random.Random(f"preference {seed} {number}")
        right = f"The answer is {task.answer}."
        if draw.random() < 0.5:
            worse = f"The answer is {int(task.answer) + draw.choice([-10, -2, -1, 1, 2, 10])}."
        else:
            worse = f"That is a very good question! Let me think about it. You asked: {task.prompt} {right}"
        yield Preference([{"role": "user", "content": task.prompt}], right, worse)
