"""Whether the proofs bite: mutants of a file of kernels are put in its place, one at a time, and tried by the harness.

Each runs in a child of this process, which inherits the definition's results and may crash, hang or write over memory as
it likes. There the mutant, and every file of kernels that imports it, is executed again from a copy; the files themselves
are never touched. Claims are tried until one is refuted: each case plainly first, the others in an order drawn once.

    parent:  prove the original, keep the standards ──fork──▶  child:  execute the mutant, prove until refuted
                                                    ──fork──▶  child:  …
"""

import faulthandler
import functools
import importlib
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from tilestack.contract.operator import Operator
from tilestack.contract.registry import operators
from tilestack.lab.evaluate import compute_standards
from tilestack.lab.explain import elements
from tilestack.lab.labels import case_label
from tilestack.lab.mutants import KINDS, Mutant, mutants_of
from tilestack.lab.source import KERNELS, file_of_module, files_behind, imported_kernels
from tilestack.lab.verify import Claim, claims, prove

CPU = torch.device("cpu")
BACKEND = "triton"


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: caught, with what the harness said of it, or not."""

    mutant: Mutant
    caught: bool
    message: str

    def row(self) -> dict[str, Any]:
        """The outcome as JSON takes it."""
        return dict(mutant=self.mutant.name, kind=self.mutant.kind, line=self.mutant.line, caught=self.caught, message=self.message)  # fmt: skip


def kernel_modules() -> list[str]:
    return sorted(name for name in sys.modules if name.startswith(f"{KERNELS}.") and file_of_module(name))


def module_of(operator: Operator) -> str:
    """The file in which an operator's kernels lie, by the name of its module."""
    if BACKEND not in operator.implementations:
        raise ValueError(f"{operator.name} has no {BACKEND} backend to make mutants of")
    return operator.implementations[BACKEND].forward.__module__


def operators_behind(module: str) -> list[Operator]:
    """The operators that run a file of kernels."""
    path = file_of_module(module)
    return [op for op in operators() if BACKEND in op.implementations and path in files_of(op)]


def files_of(operator: Operator) -> set[Path]:
    implementation = operator.implementations[BACKEND]
    return files_behind(implementation.forward) | files_behind(implementation.backward)


class Suite:
    """The claims that a file's mutants are held against: all of them are true of the original, and its standards known."""

    def __init__(
        self,
        module: str,
        most_claims: int | None = None,
        seconds: float = 60.0,
        seed: int = 0,
        tried: Sequence[Operator] | None = None,
    ):
        self.module, self.seconds = module, seconds
        path = file_of_module(module)
        assert path is not None, f"{module} has no file"
        self.path = path
        self.standards = functools.cache(compute_standards)
        drawn = list(all_claims(operators_behind(module) if tried is None else tried))
        random.Random(seed).shuffle(drawn)
        # Operators of the file itself first, and of each every case once, so that no branch is left to chance.
        drawn.sort(key=lambda claim: (module_of(claim.operator) != module, not is_first_look(claim)))
        self.claims = [claim for claim in drawn[:most_claims] if prove(claim, self.standards).ok]

    def mutants(self, most: int | None = None, seed: int = 0) -> list[Mutant]:
        """All mutants of the file, or so many drawn from them."""
        found = mutants_of(self.module, self.path)
        return found if most is None or most >= len(found) else random.Random(seed).sample(found, most)

    def outcome(self, mutant: Mutant) -> Outcome:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            # Seen by the parent even where what follows never comes back.
            message = "it crashes"
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (int(self.seconds) + 30,) * 2)  # for a kernel that never ends
                silence()
                message = self.refutation(mutant)
            except BaseException as failure:
                message = f"{type(failure).__name__}: {failure}"[:200]
            finally:
                os.write(writing, b"=" + message.encode())
                os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            said = pipe.read().decode()
        _, status = os.waitpid(child, 0)
        if not said:
            ended = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else f"exit {status}"
            said = f"=it ends its process: {ended}"
        return Outcome(mutant, said != "=", said.removeprefix("="))

    def refutation(self, mutant: Mutant) -> str:
        """What the harness says of a mutant, in this process, which is spoilt by it; empty when it finds nothing."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / self.path.name
            copy.write_text(mutant.source)
            execute(self.module, copy)
            for name in dependents_of(self.module):
                path = file_of_module(name)
                assert path is not None
                execute(name, path)
            end = time.process_time() + self.seconds
            for claim in self.claims:
                now = Claim(
                    claim.operator,
                    claim.operator.implementations[BACKEND],
                    claim.case,
                    claim.variant,
                    claim.dtype,
                    claim.direction,
                    claim.device,
                )
                found = prove(now, self.standards)
                if found.ok is not True:
                    which = f"{case_label(found.op, found.case)}, {found.variant} {found.dtype} {found.direction}"
                    return f"{found.op} {which}: {found.message}"
                if time.process_time() > end:
                    break
        return ""


def all_claims(tried: Sequence[Operator]) -> Iterator[Claim]:
    return claims(tried, CPU, only={operator.name: BACKEND for operator in tried})


elements_of = functools.cache(elements)


def is_first_look(claim: Claim) -> bool:
    return claim.variant == "plain" and claim.dtype == torch.float32 and elements_of(claim.case) > 1


def execute(module: str, path: Path) -> None:
    """Execute a file as a module that is loaded already."""
    code = compile(path.read_text(), str(path), "exec")
    exec(code, importlib.import_module(module).__dict__)


def import_order() -> dict[str, tuple[str, ...]]:
    """Every file of kernels by the name of its module, with those that it imports, each after what it imports."""
    imports = {name: imported_kernels(path) for name in kernel_modules() if (path := file_of_module(name))}
    ordered: dict[str, tuple[str, ...]] = {}

    def visit(name: str) -> None:
        if name in imports and name not in ordered:
            for imported in imports[name]:
                visit(imported)
            ordered[name] = imports[name]

    for name in imports:
        visit(name)
    return ordered


def dependents_of(module: str) -> list[str]:
    """The files of kernels that import a module, directly or by way of others, each after what it imports."""
    changed = [module]
    for name, imported in import_order().items():
        if set(changed) & set(imported):
            changed.append(name)
    return changed[1:]


def silence() -> None:
    """Leave what a broken kernel prints, and Python of its end, unread."""
    faulthandler.disable()
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def render(outcomes: Sequence[Outcome]) -> Table:
    """How many mutants of each file and kind were caught, of how many."""
    table = Table("file", *KINDS, "caught", title="Mutants caught, of those tried")
    share = lambda of: f"{sum(o.caught for o in of)}/{len(of)}" if of else ""
    for module in dict.fromkeys(outcome.mutant.module for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.mutant.module == module]
        by_kind = [share([o for o in mine if o.mutant.kind == kind]) for kind in KINDS]
        table.add_row(module.removeprefix(f"{KERNELS}."), *by_kind, share(mine))
    table.add_row("all", *(share([o for o in outcomes if o.mutant.kind == kind]) for kind in KINDS), share(outcomes))
    return table
