"""Markdown tables generated from results/: what README and docs claim is what was measured.

A table stands between two markers and is rewritten in place by `make docs`:

    <!-- table: summary h200 cpu softmax,linear -->   the README's: some operators, training and serving, a line per group
    <!-- table: headline h200 -->                     one line per operator, its best case; of some with their names
    <!-- table: operator h200 softmax,rms_norm -->    every case of some operators, both directions, and their means
    <!-- table: ladder h200 linear triton,aten -->    some backends of an operator side by side, a line per case
    <!-- table: layers h200 -->                       a decoder's layers alone, ours and every peer's
    <!-- table: training h200 -->                     whole training steps, ours and every peer's
    <!-- table: roofs h200 -->                        what the machine can do at best
    <!-- table: memory h200 stride -->                one sweep of `tilestack bench memory`, a line per setting
    <!-- table: parity h200 -->                       losses of training on kernels and on definitions
    <!-- table: serving h200 -->                      engines on the workloads of `tilestack bench serve`
    <!-- table: http cpu -->                          what HTTP costs of the engine's throughput, of `tilestack bench http`
    <!-- table: recipes cpu -->                       what `tilestack chain` came to, recipe by recipe
    <!-- table: alignment cpu -->                     what the recipes of alignment came to from a model of their own
    <!-- table: profiles h200 train -->               where the time of training steps, or of decoding (serve), goes
    <!-- table: quantised cpu -->                     the quality of quantised weights, of `tilestack bench quantize`
    <!-- table: proofs h200 -->                       which backends are proved there, of the present source
    <!-- table: mutation -->                          how many mutants of the kernels the proofs catch, by family
    <!-- table: survivors -->                         the mutants that they do not, each with the reason
    <!-- /table -->

A table without results says "not measured yet".
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tilestack.lab.bench.memory_sweeps import SWEEPS
from tilestack.lab.contests import Contest, contests, results_under
from tilestack.lab.tables.benchmark import headline, ladder, layers, operator, roofs, training
from tilestack.lab.tables.correctness import mutation, proofs, survivors
from tilestack.lab.tables.markdown import not_measured
from tilestack.lab.tables.profiles import KINDS as PROFILED
from tilestack.lab.tables.profiles import profiles
from tilestack.lab.tables.runs import alignment, fp8_parity, parity, quantised, recipes, sweep
from tilestack.lab.tables.serving import http, serving
from tilestack.lab.tables.summary import summary


class TableError(ValueError):
    """A marker that names no table; the message says where and what there is."""


@dataclass(frozen=True)
class Kind:
    """A kind of table: what makes it of the folder of results and the words behind its name, and these words, those that
    may be left out in brackets; `choices` are what the last can be, which may have spaces."""

    make: Callable[..., str]
    words: str = ""
    choices: Sequence[str] = ()

    def words_of(self, text: str) -> list[str] | None:
        """The words in a text; None where they are not such as make a table."""
        most = self.words.split()
        found = text.split(maxsplit=len(most) - 1) if self.choices else text.split()
        enough = sum("[" not in word for word in most) <= len(found) <= len(most)
        return found if enough and (not self.choices or found[-1] in self.choices) else None


def of_contests(make: Callable[..., str], part: str = "") -> Callable[..., str]:
    """A table of the contests on a GPU, which a part of the benchmark fills."""
    return functools.partial(table_of_contests, make, f"tilestack bench {part}--save")


def table_of_contests(make: Callable[..., str], command: str, folder: Path, slug: str, *names: str) -> str:
    found: list[Contest] = contests(run for run in results_under(folder) if run.slug == slug)
    return make(found, *names) or not_measured(command, gpu=slug)


KINDS = {
    "summary": Kind(summary, "GPU CPU NAME,NAME"),
    "headline": Kind(of_contests(headline), "GPU [NAME,NAME]"),
    "operator": Kind(of_contests(operator), "GPU NAME,NAME"),
    "ladder": Kind(of_contests(ladder), "GPU NAME BACKEND,BACKEND"),
    "layers": Kind(of_contests(layers, "layers "), "MACHINE"),
    "training": Kind(of_contests(training, "train "), "GPU"),
    "roofs": Kind(of_contests(roofs), "GPU"),
    "parity": Kind(parity, "GPU"),
    "fp8-parity": Kind(fp8_parity, "MACHINE"),
    "recipes": Kind(recipes, "MACHINE"),
    "alignment": Kind(alignment, "MACHINE"),
    "serving": Kind(serving, "GPU"),
    "http": Kind(http, "MACHINE"),
    "profiles": Kind(profiles, "MACHINE KIND", PROFILED),
    "quantised": Kind(quantised, "MACHINE"),
    "proofs": Kind(proofs, "GPU"),
    "memory": Kind(sweep, "GPU SWEEP", [each.name for each in SWEEPS]),
    "mutation": Kind(mutation),
    "survivors": Kind(survivors),
}


def table(name: str, root: Path, where: str = "") -> str:
    """The table a marker names, from the results under root."""
    known, _, text = name.partition(" ")
    kind = KINDS.get(known)
    if kind is None or (words := kind.words_of(text)) is None:
        uses = ", ".join(f"`{f'{kind} {each.words}'.strip()}`" for kind, each in KINDS.items())
        raise TableError(f"{f'{where}: ' if where else ''}no table is named {name!r}; there are {uses}")
    return kind.make(root / "results", *words)
