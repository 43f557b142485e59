"""Tables in Markdown, and the dagger on what was measured on an older source."""

from collections.abc import Iterable
from typing import Any

from tilestack.lab.stale import is_current

OLD = "†"
OLDER = "measured on an older version of the code, outdated until measured again; "
MOST_COMMITS = 3  # named under a table; where there are more, the rows of results/ say which is whose


def markdown(header: list[str], rows: list[list[str]], left: int = 1) -> str:
    """A table whose first `left` columns are words and the others numbers."""
    rules = ["---"] * left + ["--:"] * (len(header) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rules, *rows))


def not_measured(command: str, *, gpu: str = "", machine: str = "") -> str:
    """What stands in for a table without results: the command that fills it, and where to run it."""
    where = f" on a machine with the GPU `{gpu}`" if gpu else f" on the machine `{machine}`" if machine else ""
    return f"_not measured yet: `{command}`{where} fills this table._"


def older_rows(rows: Iterable[dict[str, Any]], name: str) -> str:
    """The line that says what daggers beside rows mean: at which commit each was measured, by what one of its fields says."""
    return daggers((row["commit"], row[name]) for row in rows if not is_current(row))


def commits_in_words(commits: Iterable[str]) -> str:
    """The commits that figures come from, by name where they are few."""
    named = list(dict.fromkeys(commit for commit in commits if commit))
    return f"commit {', '.join(named)}" if len(named) <= MOST_COMMITS else f"{len(named)} commits, named in results/"


def daggers(stale: Iterable[tuple[str, str]]) -> str:
    """The line for what is stale: pairs of a commit and what was measured there."""
    commits: dict[str, dict[str, None]] = {}
    for commit, name in stale:
        commits.setdefault(commit, {})[name] = None
    if not commits:
        return ""
    if len(commits) > MOST_COMMITS:
        return f"\n\n_{OLD} {OLDER}{commits_in_words(commits)}._"
    at = "; ".join(f"{commit} {', '.join(names)}" for commit, names in commits.items())
    return f"\n\n_{OLD} {OLDER}at commit {at}._"
