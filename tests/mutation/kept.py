"""What the mutation suite found, on disk: by file and kind of mutant how many were caught, and every survivor by name."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tilestack.lab import results
from tilestack.lab.mutants import KINDS
from tilestack.lab.mutation import Outcome, kernel_modules, operators_behind
from tilestack.lab.source import KERNELS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "mutation.json"
REASONS = Path(__file__).with_name("survivors.json")  # why each survivor lives
EQUIVALENT = "equivalent"  # how a reason begins that says that nothing is wrong with it
WANTED = 0.95


def modules_with_operators() -> list[str]:
    return [module for module in kernel_modules() if operators_behind(module)]


def load() -> dict:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {"files": {}}


def reasons() -> dict[str, str]:
    return json.loads(REASONS.read_text())


def keep(outcomes: Sequence[Outcome], claims: int, mutants: int, commit: str) -> None:
    """Put what became of a file's mutants in the place of what was kept of it."""
    found = load()
    file = outcomes[0].mutant.module.removeprefix(f"{KERNELS}.")
    of_kind = {kind: [outcome for outcome in outcomes if outcome.mutant.kind == kind] for kind in KINDS}
    found["files"][file] = dict(
        commit=commit,
        claims=claims,
        mutants=mutants,
        tried=len(outcomes),
        caught={kind: [sum(o.caught for o in mine), len(mine)] for kind, mine in of_kind.items() if mine},
        survivors=[outcome.mutant.name for outcome in outcomes if not outcome.caught],
    )
    results.save(RESULTS, found)


def report(console: Console) -> int:
    """The catch rate of all that is kept, and every survivor with its reason; 1 where that is not enough."""
    files, known = load()["files"], reasons()
    table = Table("file", *KINDS, "caught", "of", "equivalent", title="Mutants caught, of those tried")
    total = caught = equivalent = 0
    for file, found in sorted(files.items()):
        counts = [found["caught"].get(kind) for kind in KINDS]
        excused = sum(known.get(name, "").startswith(EQUIVALENT) for name in found["survivors"])
        mine = sum(count[0] for count in counts if count)
        total, caught, equivalent = total + found["tried"], caught + mine, equivalent + excused
        shares = [f"{count[0]}/{count[1]}" if count else "" for count in counts]
        table.add_row(file, *shares, str(mine), str(found["tried"]), str(excused))
    console.print(table)
    unexplained = [name for found in files.values() for name in found["survivors"] if name not in known]
    for found in files.values():
        for name in found["survivors"]:
            console.print(f"survived: {name}: {known.get(name, '[red]no reason known[/red]')}", highlight=False)
    share = caught / max(total - equivalent, 1)
    console.print(f"{caught} of {total} caught, {equivalent} equivalent: {share:.1%} of those that could be")
    return int(share < WANTED or bool(unexplained))
