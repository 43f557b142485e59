"""Rewards: functions of a task and an answer. Two are built in; others come from a Python file, `my_rewards.py:score`.

    def score(task, text):
        return float(task.answer in text)

`task` has `prompt`, `answer`, `messages` and `row`, all that its file says of it; `text` is the answer without special
tokens. What comes back is a finite number, the larger the better.
"""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from tilestack.data import corpora
from tilestack.train.settings import RecipeError

Reward = Callable[[corpora.Task, str], float]

REWARDS: dict[str, Reward] = {
    "number": corpora.reward,
    "exact": lambda task, text: float(text.strip() == task.answer.strip()),
}


def check_name(name: str) -> None:
    """Refuse what is neither built in nor a function of a file."""
    if name not in REWARDS and not is_in_file(name):
        raise RecipeError(f"grpo.reward must be {', '.join(REWARDS)}, or a function of a file as in rewards.py:score, not {name!r}")  # fmt: skip


def is_in_file(name: str) -> bool:
    path, colon, function = name.rpartition(":")
    return path.endswith(".py") and bool(colon) and function.isidentifier()


def find_reward(name: str) -> Reward:
    """The reward of a name; a function of a file is checked whenever it is asked."""
    if name in REWARDS:
        return REWARDS[name]
    function = loaded(name)

    def checked(task: corpora.Task, text: str) -> float:
        try:
            found = function(task, text)
        except (Exception, SystemExit) as problem:
            raise RecipeError(f"{name} failed on {text!r:.80}: {type(problem).__name__}: {problem}") from problem
        if isinstance(found, str) or not is_finite(found):
            raise RecipeError(f"{name} must return a finite number, not {found!r}")
        return float(found)

    return checked


def is_finite(value: object) -> bool:
    try:
        return math.isfinite(value)  # type: ignore[arg-type]
    except (TypeError, OverflowError):
        return False


def loaded(name: str) -> Reward:
    place, _, function = name.rpartition(":")
    path = Path(place)
    if not path.is_file():
        raise RecipeError(f"grpo.reward names {place}, and there is no such file")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as problem:  # a script that ends would end the run, as if it were done
        raise RecipeError(f"{path} cannot be run: {type(problem).__name__}: {problem}") from problem
    found = getattr(module, function, None)
    if not callable(found):
        raise RecipeError(f"{path} has no function {function}")
    return found
