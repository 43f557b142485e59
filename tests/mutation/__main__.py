"""The whole mutation suite: `python -m tests.mutation [FILE ...]` tries mutants of files of kernels, `norm.rows` and so on.

What becomes of each mutant is kept in results/mutation.json at once, and the same command goes on where it was stopped; a
file whose code has changed begins again. What outlives every claim is tried on the tests of beside.py. The exit code is 1
when fewer than 95% of what is known of a family are caught, or a survivor has no reason.
"""

import argparse
import gc
import os
import sys
from dataclasses import replace

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import warnings

import torch
from rich.console import Console
from rich.progress import track

from tests.mutation.beside import BESIDE, SECONDS, first_failure
from tilestack import ops
from tilestack.kernels.quantised import codes
from tilestack.lab import machine
from tilestack.lab.mutation import record
from tilestack.lab.mutation import suite as mutation
from tilestack.lab.mutation.mutants import Mutant
from tilestack.lab.source import KERNELS

console = Console()
passing: set[str] = set()  # files whose tests pass on the original


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument(
        "files", nargs="*", help="files of kernels, as `norm.rows`; all that an operator runs when left out"
    )
    parser.add_argument("--most", type=int, help="so many mutants of each file, drawn at random; all when left out")
    parser.add_argument("--seconds", type=float, default=6, help="of proofs of each sort before a mutant has survived")
    parser.add_argument(
        "--operators", nargs="+", metavar="OP", help="try on claims of these alone; what they catch is caught"
    )
    parser.add_argument("--survivors", action="store_true", help="try only those again that have survived")
    parser.add_argument("--report", action="store_true", help="try nothing, show what is kept")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ops.operators()
    # What writes fp8 asks for a GPU, yet the interpreter rounds to it as GPUs do (kernels/interpreter.py). All names of the
    # function are one object, those in files that are executed again too.
    codes.writes_fp8.__code__ = codes.reads_fp8.__code__
    original, commit = mutation.Original(), machine.commit()
    for file in [] if chosen.report else chosen.files or files_with_operators():
        tried = [ops.operator_named(name) for name in chosen.operators] if chosen.operators else None
        suite = mutation.Suite(f"{KERNELS}.{file}", original=original, tried=tried, seconds=chosen.seconds)
        try_file(file, suite, chosen.most, chosen.survivors, commit)
    return record.report(console)


def files_with_operators() -> list[str]:
    modules = [module for module in mutation.kernel_modules() if mutation.operators_behind(module)]
    return [module.removeprefix(f"{KERNELS}.") for module in modules]


def try_file(file: str, suite: mutation.Suite, most: int | None, again: bool, commit: str) -> None:
    """Go on with a file from where it was left, or try its survivors again."""
    every = suite.mutants()
    source = record.code_hash(file)
    found = record.load_tried().get(file)
    if found is None or found.source != source:
        found = record.Tried(source, len(every))
    survived = lambda mutant: mutant.name in found.survivors
    chosen: list[Mutant] = list(filter(survived, every)) if again else every[found.tried : most]
    if chosen and not suite.looks:
        console.print(f"{file}: nothing that runs on a CPU reaches it")
        chosen = []
    gc.freeze()  # so that a child which collects garbage copies nothing
    for mutant in track(chosen, file, console=Console(stderr=True), transient=True):
        outcome = suite.outcome(mutant)
        by_test = not outcome.caught and file in BESIDE
        found.add(tried_on_tests(file, suite, outcome) if by_test else outcome, by_test)
        found.commit = commit
        record.save_tried(file, found)
    if not found.tried:
        record.save_tried(file, found)


def tried_on_tests(file: str, suite: mutation.Suite, outlived: mutation.Outcome) -> mutation.Outcome:
    """Try a mutant that has outlived every claim on the tests beside them, which the original must pass."""
    on_tests = lambda mutant: suite.tried_on(
        lambda: first_failure(BESIDE[file]), mutant, outlived.claims, seconds=SECONDS
    )
    if file not in passing:
        original = on_tests(replace(outlived.mutant, source=suite.path.read_text()))
        assert not original.caught, f"the original does not pass {original.message}"
        passing.add(file)
    return on_tests(outlived.mutant)


if __name__ == "__main__":
    sys.exit(main())
