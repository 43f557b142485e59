"""Tables in Markdown, and the dagger on what was measured on an older source."""

from collections.abc import Iterable
from typing import Any

from tilestack.lab.stale import is_current

OLD = "†"
OLDER = "measured on an older source than the present one, not to be trusted until measured again; at commit"


def markdown(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table whose first `left` columns are words and the others numbers."""
    rules = ["---"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rules, *rows))


def older_rows(rows: Iterable[dict[str, Any]], name: str) -> str:
    """The line that says what daggers beside rows mean: at which commit each was measured, by what one of its fields says."""
    return daggers((row["commit"], row[name]) for row in rows if not is_current(row))


def daggers(stale: Iterable[tuple[str, str]]) -> str:
    """The line for what is stale: pairs of a commit and what was measured there."""
    commits: dict[str, dict[str, None]] = {}
    for commit, name in stale:
        commits.setdefault(commit, {})[name] = None
    if not commits:
        return ""
    at = "; ".join(f"{commit} {', '.join(names)}" for commit, names in commits.items())
    return f"\n\n_{OLD} {OLDER} {at}._"
