"""The whole mutation suite: `python -m tests.mutation [FILE ...]` tries mutants of files of kernels, `norm.rows` and so on.

What becomes of each file is kept in results/mutation.json as soon as it is done, in place of what was there of it. The
exit code is 1 when fewer than 95% of all that the file knows are caught, or a survivor has no reason.
"""

import argparse
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import warnings

import torch
from rich.console import Console
from rich.progress import track

from tests.mutation import kept
from tilestack import ops
from tilestack.lab import machine, mutation
from tilestack.lab.source import KERNELS

console = Console()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "files", nargs="*", help="files of kernels, as `norm.rows`; all that an operator runs when left out"
    )
    parser.add_argument("--most", type=int, help="so many mutants of each file, drawn at random; all when left out")
    parser.add_argument("--claims", type=int, default=250, help="drawn at random, that each mutant is held against")
    parser.add_argument("--seconds", type=float, default=60, help="of proofs before a mutant counts as a survivor")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ops.operators()
    modules = [f"{KERNELS}.{file}" for file in chosen.files] or kept.modules_with_operators()
    for module in modules:
        suite = mutation.Suite(module, chosen.claims, chosen.seconds)
        drawn = suite.mutants(chosen.most)
        outcomes = [
            suite.outcome(mutant) for mutant in track(drawn, module, console=Console(stderr=True), transient=True)
        ]
        console.print(mutation.render(outcomes))
        kept.keep(outcomes, len(suite.claims), len(suite.mutants()), machine.commit())
    return kept.report(console)


if __name__ == "__main__":
    sys.exit(main())
