"""What alignment learns from: conversations, preferences and tasks, made by code or read from files.

    conversations   {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    preferences     {"prompt": "…" or messages, "chosen": "…", "rejected": "…"}
    tasks           {"prompt": "…", "answer": "…"}

One row each, in any file that `data.read` reads. What is wrong with a row is said with its file and line.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tilestack.data import DataError, Message, corpora, located
from tilestack.train.recipe import Data
from tilestack.train.settings import RecipeError, setting

T = TypeVar("T")


@dataclass(frozen=True)
class ExampleData(Data):
    """Examples rather than running text: how many of them, made or read."""

    examples: int = setting(5000, low=0)  # 0 takes all that files hold

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_bytes:
            raise RecipeError("data.most_bytes is for running text; data.examples says how many examples to take")
        if not self.examples and self.corpus != "files":
            raise RecipeError(f'data.examples must be at least 1 where data.corpus is "{self.corpus}"')


@dataclass(frozen=True)
class ArithmeticData(ExampleData):
    """Examples that may be made of arithmetic."""

    difficulty: int = setting(1, low=1, high=3)  # digits of its numbers
    kinds: tuple[str, ...] = ()  # empty is all

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [kind for kind in self.kinds if kind not in corpora.ARITHMETIC]:
            raise RecipeError(f"data.kinds has no {', '.join(unknown)}; there are {', '.join(corpora.ARITHMETIC)}")


def from_files(files: Sequence[str], read: Callable[[dict[str, Any]], T], most: int) -> list[T]:
    """Rows of files, each as `read` makes of it; at most so many, or all for 0."""
    found = []
    for where, row in itertools.islice((pair for file in files for pair in located(file)), most or None):
        try:
            found.append(read(row))
        except DataError as problem:
            raise DataError(f"{where}: {problem}") from problem
    if not found:
        raise DataError(f"there is nothing in {', '.join(files)}")
    return found


def conversation(row: dict[str, Any]) -> list[Message]:
    messages = messages_under("messages", row)
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError("a conversation to learn from needs an answer: a message of the assistant")
    return messages


def preference(row: dict[str, Any]) -> corpora.Preference:
    prompt = row.get("prompt")
    messages = [user(prompt)] if isinstance(prompt, str) and prompt else messages_under("prompt", row)
    if messages[-1]["role"] == "assistant":
        raise DataError('"prompt" must end before the answer, not with a message of the assistant')
    return corpora.Preference(messages, text_under("chosen", row), text_under("rejected", row))


def task(row: dict[str, Any]) -> corpora.Task:
    return corpora.Task(text_under("prompt", row), text_under("answer", row), "file")


def solved(task: corpora.Task) -> list[Message]:
    """A task and its answer as a conversation, worded as the built-in conversations and preferences are."""
    return [user(task.prompt), {"role": "assistant", "content": f"The answer is {task.answer}."}]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def text_under(key: str, row: dict[str, Any]) -> str:
    if not isinstance(row.get(key), str) or not row[key]:
        raise DataError(f'expected a text under "{key}"; this row has {", ".join(row) or "nothing"}')
    return row[key]


def messages_under(key: str, row: dict[str, Any]) -> list[Message]:
    messages = row.get(key)
    if not isinstance(messages, list) or not messages:
        raise DataError(f'expected a list of messages under "{key}"; this row has {", ".join(row) or "nothing"}')
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not all(isinstance(message.get(k), str) for k in ("role", "content")):
            raise DataError(f'message {number} under "{key}" needs texts under "role" and "content"')
    return messages


def arithmetic(settings: ArithmeticData, seed: int) -> list[corpora.Task]:
    """Built-in tasks of the kinds that the settings name; of all kinds when they name none."""
    kinds = settings.kinds or tuple(corpora.ARITHMETIC)
    enough = settings.examples * len(corpora.ARITHMETIC) * 4  # every kind is drawn alike
    made = corpora.arithmetic(enough, seed, settings.difficulty)
    return list(itertools.islice((task for task in made if task.kind in kinds), settings.examples))


def split(items: Iterable[T], prompt: Callable[[T], Any], share: float, seed: int) -> tuple[list[T], list[T]]:
    """Items to learn from, and a share held out, of which no prompt is among the former."""
    everything = list(items)
    held_out = set(np.random.default_rng([seed, len(everything)]).permutation(len(everything))[: round(share * len(everything))].tolist())  # fmt: skip
    held = [item for number, item in enumerate(everything) if number in held_out]
    known = {repr(prompt(item)) for item in held}
    return [item for item in everything if repr(prompt(item)) not in known], held
