"""Pages with generated tables: what stands between two markers is rewritten in place, and a page that differs is stale. So
are the pictures that are drawn from results."""

import re
from pathlib import Path

from tilestack.lab.results import read_json
from tilestack.lab.tables.by_name import TableError, table
from tilestack.lab.tables.loss_figure import loss_figure

OPENING = re.compile(r"^<!-- table: (?P<name>[^\n]*?) -->$", re.MULTILINE)
CLOSING = "<!-- /table -->"
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def rewritten(text: str, root: Path, where: str) -> str:
    """A page with each of its tables generated anew; markers shown inside code fences are left alone."""
    fences = [match.span() for match in FENCE.finditer(text)]
    pieces, at = [], 0
    for opening in OPENING.finditer(text):
        if any(start <= opening.start() < end for start, end in fences):
            continue
        end = text.find(CLOSING, opening.end())
        following = OPENING.search(text, opening.end())
        if end < 0 or (following and following.start() < end):
            raise TableError(f"{where}: the table {opening['name']!r} is not closed by {CLOSING}")
        pieces += [text[at : opening.end()], "\n", table(opening["name"], root, where), "\n"]
        at = end
    return "".join(pieces) + text[at:]


def pages(root: Path) -> list[Path]:
    return [
        path for path in (*sorted(root.glob("README*.md")), *sorted((root / "docs").rglob("*.md"))) if path.exists()
    ]


def pictures(root: Path) -> dict[Path, str]:
    """The pictures of the guides that are drawn from results, as they should be."""
    curves = sorted((root / "results").glob("*/parity/fp8.json"))
    folder = root / "docs" / "figures"
    return {folder / f"fp8_loss_{path.parent.parent.name}.svg": loss_figure(read_json(path)) for path in curves}


def outdated(root: Path) -> dict[Path, str]:
    """The pages and pictures that are not what the results say, with the text they should have."""
    fresh = {
        path: rewritten(path.read_text(encoding="utf-8"), root, str(path.relative_to(root))) for path in pages(root)
    } | pictures(root)
    is_written = lambda path, text: path.exists() and path.read_text(encoding="utf-8") == text
    return {path: text for path, text in fresh.items() if not is_written(path, text)}


def stale_tables(root: Path) -> list[Path]:
    """The pages and pictures that `update_tables` would change."""
    return list(outdated(root))


def update_tables(root: Path) -> list[Path]:
    """Rewrite every generated table of README and docs, and every picture; returns the files that changed."""
    changed = outdated(root)
    for path, text in changed.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return list(changed)
