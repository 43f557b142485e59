"""Tables of what is proved: backends on a GPU, and how many mutants of the kernels the proofs catch."""

from pathlib import Path

from tilestack.lab.mutation import record
from tilestack.lab.proof.proofs import COMMAND
from tilestack.lab.proof.proved import standings
from tilestack.lab.tables.markdown import OLD, commits_in_words, markdown
from tilestack.lab.units import percent


def proofs(folder: Path, slug: str) -> str:
    """A line per backend of ours: what is proved of it on a GPU, and whether of the present source."""
    found = standings(folder, slug)
    if not any(each.claims for each in found):
        return f"_no proofs were kept yet: `{COMMAND}` on a machine with the GPU `{slug}` fills this table._"
    listed = lambda words: ", ".join(words) or "–"
    rows = [
        [f"`{each.op}`", each.backend, each.status, listed(each.dtypes), listed(each.directions), f"{each.claims:,}", percent(each.worst)]
        for each in found
    ]  # fmt: skip
    header = ["operator", "backend", f"proved on the {slug.upper()}", "dtypes", "directions", "claims", "largest error, of what is allowed"]  # fmt: skip
    return markdown(header, rows, left=5)


def mutation(folder: Path) -> str:
    """A line per family of kernels: how many mutants of its files were tried, and how many the proofs caught."""
    found = record.families(folder)
    if not found:
        return f"_nothing was tried yet: `{record.COMMAND}` fills this table._"
    rows = [
        [f"{family.name} {OLD}" if family.stale else family.name, *(f"{count:,}" for count in (len(family.files), family.mutants, family.tried, family.caught, family.by_tests, family.equivalent, family.gpu_only, family.holes)), f"{family.share:.1%}" if family.tried else "–"]
        for family in (*found, record.total(found))
    ]  # fmt: skip
    header = ["family", "files", "mutants", "tried", "caught", "of these by a test beside the proofs", "equivalent", "seen on a GPU only", "holes", "caught, of all but the equivalent"]  # fmt: skip
    stale = [file for family in found for file in family.stale]
    unreached = [file for family in found for file in family.unreached]
    commits = commits_in_words(tried.commit for family in found for tried in family.files.values())
    named = lambda files: ", ".join(f"`{file}`" for file in files)
    note = f" Not reachable in the interpreter, so not tried: {named(unreached)}." if unreached else ""
    older = f"\n\n_{OLD} partly of an older version of the code: {named(stale)}._" if stale else ""
    return markdown(header, rows) + f"\n\n_Tried in Triton's interpreter at {commits}.{note}_" + older


def survivors(folder: Path) -> str:
    """Every mutant that lives, and why."""
    known, found = record.reasons(folder), record.load_tried(folder)
    rows = [
        [f"`{file}`", f"`{name.partition(' ')[2]}`".replace("|", "\\|"), known.get(name, "**not known yet**")]
        for file, tried in found.items()
        for name in tried.survivors
    ]
    return markdown(["file", "function and change", "why it lives"], rows, left=3) if rows else "_none_"
