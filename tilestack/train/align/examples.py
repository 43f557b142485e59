"""What alignment learns from: examples made by code or read from files, some of them held out.

Rows of files come in the formats of `tilestack.data.formats`; what is wrong with one is said with its file and line.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from tilestack.data import Conversation, DataError, corpora, located
from tilestack.data.formats import Row, user
from tilestack.train.recipe import Data, Recipe
from tilestack.train.settings import RecipeError, setting

T = TypeVar("T")
MADE = 5000  # examples that are made where nobody says how many


@dataclass(frozen=True)
class ExampleData(Data):
    """Examples rather than running text: how many of them, made or read."""

    examples: int = setting(0, "examples to take; 0 is all that files hold, and 5000 where code makes them", low=0)
    chat_template: str = setting("", "a file with the chat template; empty is the tokenizer's, or else ChatML")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.most_bytes:
            raise RecipeError("data.most_bytes is for running text; data.examples says how many examples to take")
        if self.tokens:
            raise RecipeError("data.tokens is for running text; conversations are kept in the run's own folder")


@dataclass(frozen=True)
class AlignmentRecipe(Recipe):
    """What recipes of alignment refuse of those of pretraining."""

    rows_can_be_shared: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for side, refused in (("context", not self.rows_can_be_shared), ("pipeline", True), ("expert", True)):
            if refused and (size := getattr(self.parallel, side)) > 1:
                others = "train and sft" if side == "context" else "train"
                raise RecipeError(
                    f"parallel.{side} = {size} is for {others}; here processes may have other examples each, with "
                    "parallel.shard a part of the model too, or share its layers (parallel.tensor)"
                )


@dataclass(frozen=True)
class ArithmeticData(ExampleData):
    """Examples that may be made of arithmetic."""

    difficulty: int = setting(1, "digits of the numbers in arithmetic", low=1, high=3)
    kinds: tuple[str, ...] = setting((), "kinds of arithmetic; empty is all")

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [kind for kind in self.kinds if kind not in corpora.ARITHMETIC]:
            raise RecipeError(f"data.kinds has no {', '.join(unknown)}; there are {', '.join(corpora.ARITHMETIC)}")


@dataclass(frozen=True)
class Examples(Generic[T]):
    """Examples to learn from, the number of the file that each is from, what files weigh, examples held out, how many are
    neither, since their prompt is held out, and how many were seen beyond those that data.examples takes: one, not to read
    all that files hold."""

    learned: list[T]
    sources: list[int]
    weights: tuple[float, ...]
    held: list[T]
    prompt_held_out: int = 0
    beyond: int = 0

    @property
    def left_out(self) -> dict[str, int]:
        """How many examples of the files have no part in the run, by reason, in words that follow a number."""
        return {"with a prompt held out": self.prompt_held_out, "or more left out by data.examples": self.beyond}


def gathered(
    settings: ExampleData,
    seed: int,
    read: Callable[[Row], Iterable[T]],
    make: Callable[[int], Iterable[T]],
    prompt: Callable[[T], Any],
) -> Examples[T]:
    """The examples that the settings name: rows of files as `read` makes them, or as many as are wanted of those that
    `make` makes. No prompt that is held out is among those to learn from."""
    beyond = 0
    if settings.corpus == "files":
        rows = from_files(settings.files, read)
        found = list(itertools.islice(rows, settings.examples or None))
        beyond = sum(1 for _ in itertools.islice(rows, 1))
    else:
        found = [(0, item) for item in make(settings.examples or MADE)]
    if settings.validation_files:
        held, others = [item for _, item in from_files(settings.validation_files, read)], found
    else:
        chosen = held_out(len(found), settings.validation, seed)
        held = [item for number, (_, item) in enumerate(found) if number in chosen]
        others = [pair for number, pair in enumerate(found) if number not in chosen]
    known = {repr(prompt(item)) for item in held}
    kept = [(source, item) for source, item in others if repr(prompt(item)) not in known]
    if others and not kept:
        raise RecipeError(
            f"the prompts of all {len(others):,} examples are held out too, which leaves none to learn from; "
            "set data.validation = 0 or hold out data.validation_files of other prompts"
        )
    learned, sources = [item for _, item in kept], [source for source, _ in kept]
    return Examples(learned, sources, settings.weights, held, len(others) - len(kept), beyond)


def from_files(files: Sequence[str], read: Callable[[Row], Iterable[T]]) -> Iterator[tuple[int, T]]:
    """The number of a file and what `read` makes of each of its rows. A file that holds none is refused."""
    for number, file in enumerate(files):
        rows = 0
        for where, row in located(file):
            rows += 1
            try:
                yield from ((number, item) for item in read(row))
            except DataError as problem:
                raise DataError(f"{where}: {problem}") from problem
        if not rows:
            raise DataError(f"there is nothing in {file}")


def held_out(count: int, share: float, seed: int) -> set[int]:
    """The numbers of examples that are held out of so many."""
    return set(np.random.default_rng([seed, count]).permutation(count)[: round(share * count)].tolist())


def arithmetic(settings: ArithmeticData, seed: int, count: int) -> list[corpora.Task]:
    """Built-in tasks of the kinds that the settings name; of all kinds when they name none."""
    return list(corpora.arithmetic(count, seed, settings.difficulty, settings.kinds))


def solved(task: corpora.Task) -> Conversation:
    """A task and its answer as a conversation, worded as the built-in conversations and preferences are."""
    return Conversation([user(task.prompt), {"role": "assistant", "content": f"The answer is {task.answer}."}])


def in_parts(items: Sequence[T], size: int = 1024) -> Iterator[Sequence[T]]:
    """Some items at a time, so that what is made of them on the way is never there of all."""
    return (items[first : first + size] for first in range(0, len(items), size))
