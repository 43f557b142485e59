"""Settings as dataclasses, read strictly: a key that does not exist, a value of another type, a number out of range are
errors that name the key. What was read can be written back as TOML, complete, so that a run says what it was made of.
"""

import dataclasses
import difflib
import json
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class RecipeError(ValueError):
    """A recipe that cannot be followed; the message names the key and what it accepts."""


def setting(
    default: Any,
    means: str = "",
    *,
    low: float | None = None,
    above: float | None = None,
    high: float | None = None,
    choices: Sequence[str] = (),
    operational: bool = False,
) -> Any:
    """A field of a settings dataclass: its default (or the type of an empty one), what it means, and what it accepts: from
    `low` or above `above`, up to `high`, or some words. An `operational` one may change when a run is continued."""
    accepted = dict(means=means, low=low, above=above, high=high, choices=tuple(choices), operational=operational)
    if isinstance(default, type):
        return dataclasses.field(default_factory=default, metadata=accepted)
    return dataclasses.field(default=default, metadata=accepted)


def section(kind: type, *, operational: bool = False) -> Any:
    """A field that is a settings dataclass itself; `operational` says so of everything in it."""
    return dataclasses.field(default_factory=kind, metadata=dict(operational=operational))


@dataclass(frozen=True)
class Key:
    """A setting as people look it up."""

    name: str  # section.key
    kind: str  # what its value is, in words
    default: Any
    means: str
    operational: bool

    @property
    def leaf(self) -> str:
        return self.name.rpartition(".")[2]


def keys_of(kind: type, where: str = "", operational: bool = False) -> Iterator[Key]:
    """Every setting of a dataclass, those of its sections included."""
    hints = typing.get_type_hints(kind)
    made = kind()
    for field in dataclasses.fields(typing.cast(Any, kind)):
        name = f"{where}.{field.name}" if where else field.name
        free = operational or field.metadata.get("operational", False)
        if dataclasses.is_dataclass(hints[field.name]):
            yield from keys_of(typing.cast(type, hints[field.name]), name, free)
        else:
            default = getattr(made, field.name)
            yield Key(name, in_words(hints[field.name], field.metadata), default, field.metadata.get("means", ""), free)


def in_words(kind: Any, accepted: Mapping[str, Any]) -> str:
    """What a setting accepts."""
    if choices := accepted.get("choices"):
        return ", ".join(choices)
    word = WORDS[list if typing.get_origin(kind) is tuple else typing.get_origin(kind) or kind]
    return f"{word}{limits(accepted)}"


def nearest_keys(name: str, keys: Sequence[Key]) -> list[Key]:
    """The settings someone may have meant: of that very name in any section, or of names like it."""
    leaf = name.rpartition(".")[2]
    close = difflib.get_close_matches(leaf, [key.leaf for key in keys], 3, cutoff=0.75)
    words = [leaf] if any(key.leaf == leaf for key in keys) else list(dict.fromkeys(close))
    return [key for word in words for key in keys if key.leaf == word]


def read(kind: type[T], table: Mapping[str, Any], where: str = "", whole: type | None = None) -> T:
    """A settings dataclass from a table, as tomllib makes it; `where` is the key of that table in the `whole`."""
    hints = typing.get_type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(typing.cast(Any, kind))}
    values = {}
    for name, value in table.items():
        key = f"{where}.{name}" if where else name
        if name not in fields:
            raise RecipeError(f"no setting {key}{nearest(name, where, list(fields), whole or kind)}")
        accepted = fields[name].metadata
        values[name] = value if accepted.get("choices") else fit(hints[name], value, key, whole or kind)
        refuse_out_of_range(values[name], accepted, key)
    try:
        return kind(**values)
    except RecipeError:
        raise
    except (TypeError, ValueError) as problem:
        raise RecipeError(f"{where or 'the recipe'}: {problem}") from problem


def nearest(name: str, where: str, known: Sequence[str], whole: type) -> str:
    """What was meant by a name that does not exist: that of a setting elsewhere, or one like it, best in its section."""
    elsewhere = nearest_keys(name, list(keys_of(whole)))
    close = difflib.get_close_matches(name, known, 1)
    if close and not any(key.leaf == name for key in elsewhere):
        return f"; did you mean {where + '.' if where else ''}{close[0]}?"
    if elsewhere:
        return f"; did you mean {' or '.join(key.name for key in elsewhere[:3])}?"
    return f"; {where or 'a recipe'} has {', '.join(known)}"


def fit(kind: Any, value: Any, key: str, whole: type | None = None) -> Any:
    """The value as the type its field is declared with, or an error."""
    if isinstance(kind, types.UnionType):
        kind = next(option for option in typing.get_args(kind) if option is not type(None))
    if dataclasses.is_dataclass(kind):
        return read(typing.cast(type, kind), of_type(dict, value, key), key, whole)
    if typing.get_origin(kind) is tuple:
        inner = typing.get_args(kind)[0]
        return tuple(fit(inner, item, f"{key}[{index}]") for index, item in enumerate(of_type(list, value, key)))
    if kind is float and type(value) is int:
        return float(value)
    return of_type(typing.get_origin(kind) or kind, value, key)


WORDS = {
    bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes", list: "a list in brackets",
    dict: "a table",
}  # fmt: skip


def of_type(kind: type, value: Any, key: str) -> Any:
    if type(value) is tuple and kind is list:
        value = list(value)
    if type(value) is not kind:
        raise RecipeError(f"{key} must be {WORDS[kind]}, not {value!r}")
    return value


def refuse_out_of_range(value: Any, accepted: Mapping[str, Any], key: str) -> None:
    if (choices := accepted.get("choices")) and value not in choices:
        switch = {"True": "on", "False": "off"}.get(str(value))  # what TOML has for a switch
        close = [switch] if switch in choices else difflib.get_close_matches(str(value), choices, 1)
        raise RecipeError(
            f"{key} must be one of {', '.join(choices)}, not {value!r}"
            + (f"; did you mean {close[0]}?" if close else "")
        )
    if not isinstance(value, int | float) or isinstance(value, bool):
        return
    low, above, high = (accepted.get(name) for name in ("low", "above", "high"))
    wrong = not math.isfinite(value) or (low is not None and value < low) or (above is not None and value <= above)
    if wrong or (high is not None and value > high):
        raise RecipeError(f"{key} must be{limits(accepted) or ' finite'}, not {value}")


def limits(accepted: Mapping[str, Any]) -> str:
    """The range of a number in words, with a space before them."""
    words = [("at least", "low"), ("above", "above"), ("at most", "high")]
    found = [f"{word} {accepted[name]}" for word, name in words if accepted.get(name) is not None]
    return f" {' and '.join(found)}" if found else ""


def load_table(path: Path) -> dict[str, Any]:
    """The table in a TOML file."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise RecipeError(f"no recipe {path}") from None
    except IsADirectoryError:
        raise RecipeError(f"{path} is a folder, not a recipe") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise RecipeError(f"{path} is not TOML: {problem}") from problem


def override(table: dict[str, Any], assignment: str) -> None:
    """Apply `a.b=c` to a table. The value is read as TOML; what is none, such as a bare word, is a text."""
    key, equals, text = assignment.partition("=")
    names = key.strip().split(".")
    if not equals or not all(names):
        raise RecipeError(f"cannot read --set {assignment!r}: write section.key=value, such as optimizer.lr=1e-3")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for depth, name in enumerate(names[:-1], 1):
        table = table.setdefault(name, {})
        if not isinstance(table, dict):
            raise RecipeError(f"cannot set {key}: {'.'.join(names[:depth])} is not a table")
    table[names[-1]] = value


def as_table(settings: Any) -> dict[str, Any]:
    """Settings as a nested table of JSON and TOML types."""
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def as_toml(table: Mapping[str, Any], where: str = "") -> str:
    """A nested table as TOML; what is None is left out, as TOML has none."""
    plain = {name: value for name, value in table.items() if not isinstance(value, dict) and value is not None}
    lines = [f"{bare(name)} = {toml_value(value)}" for name, value in plain.items()]
    text = (f"[{where}]\n" if where and lines else "") + "".join(line + "\n" for line in lines)
    for name, value in table.items():
        if isinstance(value, dict) and value:
            inner = as_toml(value, f"{where}.{bare(name)}" if where else bare(name))
            text += ("\n" if text else "") + inner
    return text


def bare(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else json.dumps(name)


def toml_value(value: Any) -> str:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{bare(name)} = {toml_value(item)}" for name, item in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def differences(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """The keys in which two tables differ."""
    if not (isinstance(ours, dict) and isinstance(theirs, dict)):
        return [] if ours == theirs and type(ours) is type(theirs) else [where]
    found = []
    for name in dict.fromkeys([*ours, *theirs]):
        found += differences(ours.get(name), theirs.get(name), f"{where}.{name}" if where else name)
    return found


def value_at(table: Any, key: str) -> Any:
    """The value of a dotted key in a nested table; None where there is none."""
    for name in key.split("."):
        table = table.get(name) if isinstance(table, dict) else None
    return table
