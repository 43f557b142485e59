"""Whether the proofs bite: mutants of a file of kernels are put in its place, one at a time, and tried by the harness.

Each runs in a child of this process, which inherits the definition's results and may crash, hang or write over memory as
it likes. There the mutant, and every file of kernels that imports it, is executed again from a copy; the files themselves
are never touched.

    parent:  prove claims of the original, keep the standards ──fork──▶  child:  execute the mutant, prove until refuted
                                                              ──fork──▶  child:  …

A claim can only refute a mutant whose line it reaches, so nothing else is tried: first every case plainly, the quickest
first; then, for what outlives that, the other variants and dtypes of the cases that reach it, in an order drawn once. What
only a GPU reaches, because a kernel asks whether it is interpreted, is tried as if it were not.
"""

import faulthandler
import functools
import importlib
import itertools
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from rich.table import Table

from tilestack.contract.operator import Operator
from tilestack.contract.registry import operators
from tilestack.lab.compile.explain import elements
from tilestack.lab.labels import case_label
from tilestack.lab.mutation.mutants import KINDS, Mutant, mutants_of
from tilestack.lab.mutation.reach import Lines, forget_cached_results, reached_lines
from tilestack.lab.proof.claims import WITHOUT_EXTRAS, Claim, claims
from tilestack.lab.proof.evaluate import Standard, compute_standards
from tilestack.lab.proof.interpreted import SWITCH, branches_of_a_gpu
from tilestack.lab.proof.verify import prove
from tilestack.lab.source import KERNELS, file_of_module, files_run_by, functions_of, imported_kernels

CPU = torch.device("cpu")
BACKEND = "triton"  # and those whose names begin with it
IDENTITY = ("op", "backend", "case", "variant", "dtype", "direction")

T = TypeVar("T")
Inside = Callable[[ModuleType], AbstractContextManager[None]]


@dataclass(frozen=True)
class Outcome:
    """What became of a mutant: caught, with what the harness said of it, or not, with how hard it tried."""

    mutant: Mutant
    caught: bool
    message: str
    claims: int = 0  # that reach a survivor and are true of it

    def row(self) -> dict[str, Any]:
        """The outcome as JSON takes it."""
        return dict(mutant=self.mutant.name, kind=self.mutant.kind, line=self.mutant.line, caught=self.caught, message=self.message)  # fmt: skip


@dataclass(frozen=True)
class FirstLook:
    """A case tried plainly on the original: what it costs, and the lines that it reaches."""

    claim: Claim
    seconds: float
    lines: Lines

    def reaches(self, path: Path, lines: Iterable[int]) -> bool:
        return not self.lines.get(str(path), set()).isdisjoint(lines)


def kernel_modules() -> list[str]:
    return sorted(name for name in sys.modules if name.startswith(f"{KERNELS}.") and file_of_module(name))


def module_of(operator: Operator) -> str:
    """The file in which an operator's kernels lie, by the name of its module."""
    if BACKEND not in operator.implementations:
        raise ValueError(f"{operator.name} has no {BACKEND} backend to make mutants of")
    return operator.implementations[BACKEND].forward.__module__


def backends_of(operator: Operator) -> list[str]:
    """Those on Triton, and what else lies in their files."""
    ways = operator.implementations
    files = {way.forward.__module__ for name, way in ways.items() if name.startswith(BACKEND)}
    return [name for name, way in ways.items() if way.forward.__module__ in files]


def operators_behind(module: str) -> list[Operator]:
    """The operators that run a file of kernels."""
    path = file_of_module(module)
    return [operator for operator in operators() if path in files_of(operator)]


def files_of(operator: Operator) -> set[Path]:
    ways = [operator.implementations[name] for name in backends_of(operator)]
    return files_run_by(function for way in ways for function in functions_of(way))


class Original:
    """What is known of the kernels as they are, whichever file is mutated: true claims, their standards and their reach."""

    def __init__(self) -> None:
        self.standards = functools.cache(compute_standards)
        self.known: dict[tuple[str, ...], bool] = {}
        self.claims_of = functools.cache(all_claims)
        self.first_looks = functools.cache(lambda operator: self._looks(operator, is_first_look))
        self.wider_looks = functools.cache(lambda operator: self._looks(operator, is_wider_look))

    def holds(self, claim: Claim) -> bool:
        identity = tuple(getattr(claim.proof(None), name) for name in IDENTITY)
        if identity not in self.known:
            self.known[identity] = prove(claim, self.standards).ok is True
        return self.known[identity]

    def look_at(self, claim: Claim) -> FirstLook | None:
        """Try a claim and note the lines that it reaches; none where it is not true."""
        names = kernel_modules()
        forget_cached_results(sys.modules[name] for name in names)
        noted = reached_lines(str(file_of_module(name)) for name in names)
        of_the_definition = 0.0  # seconds, which no mutant takes again

        def find_standards(*what: Any) -> dict[str, Standard]:
            nonlocal of_the_definition
            start = time.process_time()
            with noted.paused():
                found = self.standards(*what)
            of_the_definition += time.process_time() - start
            return found

        start = time.process_time()
        with noted:
            holds = prove(claim, find_standards).ok is True
        seconds = time.process_time() - start - of_the_definition
        return FirstLook(claim, seconds, {file: mine for file, mine in noted.lines.items() if mine}) if holds else None

    def _looks(self, operator: Operator, wanted: Callable[[Claim], bool]) -> list[FirstLook]:
        return [look for claim in filter(wanted, self.claims_of(operator)) if (look := self.look_at(claim))]


class Suite:
    """The claims that mutants of a file are held against, all of them true of the original."""

    def __init__(
        self,
        module: str,
        *,
        original: Original | None = None,
        tried: Sequence[Operator] | None = None,
        seconds: float = 6.0,
        seed: int = 0,
    ):
        self.module, self.seconds, self.seed = module, seconds, seed
        path = file_of_module(module)
        assert path is not None, f"{module} has no file"
        self.path = path
        self.original = original or Original()
        self.operators = operators_behind(module) if tried is None else tried

    def mutants(self, most: int | None = None) -> list[Mutant]:
        """The mutants of the file in an order drawn once, or the first so many."""
        found = mutants_of(self.module, self.path)
        random.Random(self.seed).shuffle(found)
        return found[:most]

    @functools.cached_property
    def looks(self) -> list[FirstLook]:
        """The first looks that reach the file, in other dtypes where it takes no float32; none where nothing here reaches it."""
        mine = [look for operator in self.operators for look in self.original.first_looks(operator)]
        here = lambda looks: [look for look in looks if str(self.path) in look.lines]
        return here(mine) or here(self.wider_looks)

    @functools.cached_property
    def wider_looks(self) -> list[FirstLook]:
        """Those in other dtypes, which have branches of their own."""
        return [look for operator in self.operators for look in self.original.wider_looks(operator)]

    @functools.cached_property
    def looks_as_compiled(self) -> list[FirstLook]:
        """Those that reach a line which asks whether it is interpreted, as if it were not, where that can be interpreted."""
        asking = [number for number, line in enumerate(self.path.read_text().splitlines(), 1) if SWITCH in line]
        mine = [look.claim for look in self.looks if look.reaches(self.path, asking)]
        with branches_of_a_gpu(sys.modules[self.module]):
            return [look for claim in mine if (look := self.original.look_at(claim))]

    @functools.cached_property
    def dependents(self) -> list[str]:
        return dependents_of(self.module)

    def reaching(self, looks: Sequence[FirstLook], mutant: Mutant) -> list[FirstLook]:
        return [look for look in looks if look.reaches(self.path, mutant.statement)]

    def outcome(self, mutant: Mutant) -> Outcome:
        """Try a mutant plainly on every case that reaches it, then on their variants."""
        looks = self.reaching(self.looks, mutant) or self.reaching(self.wider_looks, mutant)
        if not looks and (compiled := self.reaching(self.looks_as_compiled, mutant)):
            return self.against(quickest_first(compiled), mutant, branches_of_a_gpu)
        looks = looks or self.looks  # a mutant that nothing reaches may have run at import
        first = quickest_first(looks)
        outcome = self.against(first, mutant)
        if outcome.caught:
            return outcome
        others = self.other_claims(looks)
        return replace(self.against(others, mutant), claims=len(first) + len(others))

    def other_claims(self, looks: Sequence[FirstLook]) -> list[Claim]:
        """Variants, configurations and dtypes of the cases of some first looks, for about as long as is given: of each kind the
        cheapest, then each kind in turn, as drawn."""
        costs = {(look.claim.operator.name, look.claim.implementation.backend, look.claim.case.name, look.claim.direction): look.seconds for look in looks}  # fmt: skip
        priced = []
        for operator in self.operators:
            for claim in itertools.filterfalse(is_first_look, self.original.claims_of(operator)):
                direction = "forward" if claim.direction == "forward" else "backward"
                cost = costs.get((operator.name, claim.implementation.backend, claim.case.name, direction))
                if cost is not None:
                    priced.append((claim, cost))
        random.Random(self.seed).shuffle(priced)
        kind = lambda claim: (claim.operator.name, claim.variant, claim.config, claim.direction)
        cheapest = {kind(claim): claim for claim, _ in sorted(priced, key=lambda pair: -pair[1])}
        priced.sort(key=lambda pair: pair[0] is not cheapest[kind(pair[0])])
        found, left = [], self.seconds
        for claim, cost in alternating(priced, lambda pair: kind(pair[0])):
            left -= cost
            if left < 0:
                break
            if self.original.holds(claim):
                found.append(claim)
        return found

    def against(self, held: Sequence[Claim], mutant: Mutant, inside: Inside = lambda module: nullcontext()) -> Outcome:
        """Try a mutant on some claims, in a child, inside a context that the module is given to."""
        return self.tried_on(lambda: self.first_refutation(held), mutant, len(held), inside)

    def tried_on(
        self,
        refute: Callable[[], str],
        mutant: Mutant,
        claims: int = 0,
        inside: Inside = lambda module: nullcontext(),
        seconds: int | None = None,
    ) -> Outcome:
        """Try a mutant, in a child, on what says what is wrong with it and nothing where nothing is; `seconds` is what a child
        may take before its kernel counts as one that never ends."""
        self.dependents  # noqa: B018  found once and here, not by every child
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reading)
            # Seen by the parent even where what follows never comes back.
            message = "it crashes"
            try:
                resource.setrlimit(resource.RLIMIT_CPU, (seconds or 2 * int(self.seconds) + 10,) * 2)
                silence()
                message = self.refutation(refute, mutant, inside)
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
        return Outcome(mutant, said != "=", said.removeprefix("="), claims)

    def refutation(self, refute: Callable[[], str], mutant: Mutant, inside: Inside) -> str:
        """What is said of a mutant, in this process, which is spoilt by it; empty when nothing is found."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / self.path.name
            copy.write_text(mutant.source)
            execute(self.module, copy)
            for name in self.dependents:
                path = file_of_module(name)
                assert path is not None
                execute(name, path)
            with inside(sys.modules[self.module]):
                return refute()

    def first_refutation(self, held: Sequence[Claim]) -> str:
        end = time.process_time() + self.seconds
        for claim in held:
            again = claim.operator.implementations[claim.implementation.backend]
            found = prove(replace(claim, implementation=again), self.original.standards)
            if found.ok is not True:
                which = f"{case_label(found.op, found.case)}, {found.variant} {found.dtype} {found.direction}"
                return f"{found.op} {which}: {found.message}"
            if time.process_time() > end:
                break
        return ""


def all_claims(operator: Operator) -> list[Claim]:
    """What is claimed of an operator's Triton backends on a CPU."""
    return [claim for name in backends_of(operator) for claim in claims([operator], CPU, only={operator.name: name})]


def quickest_first(looks: Sequence[FirstLook]) -> list[Claim]:
    """The claims of some looks, the quickest of each case and direction before any other of it."""
    ordered = sorted(looks, key=lambda look: look.seconds)
    return [look.claim for look in alternating(ordered, lambda look: (look.claim.case.name, look.claim.direction))]


def alternating(values: Iterable[T], group: Callable[[T], Hashable]) -> list[T]:
    """Values so that each group's first come first, then each group's second, and so on."""
    counts: dict[Hashable, itertools.count] = {}
    return sorted(values, key=lambda value: next(counts.setdefault(group(value), itertools.count())))


elements_of = functools.cache(elements)


def is_first_look(claim: Claim) -> bool:
    return claim.dtype == torch.float32 and is_plain(claim)


def is_wider_look(claim: Claim) -> bool:
    return claim.dtype != torch.float32 and is_plain(claim)


def is_plain(claim: Claim) -> bool:
    return (
        claim.variant in ("plain", WITHOUT_EXTRAS)
        and not claim.config
        and claim.direction != "gradcheck"
        and elements_of(claim.case) > 1
    )


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


def render_mutants(outcomes: Sequence[Outcome]) -> Table:
    """How many mutants of each file and kind were caught, of how many."""
    table = Table("file", *KINDS, "caught", title="Mutants caught, of those tried")
    share = lambda of: f"{sum(o.caught for o in of)}/{len(of)}" if of else ""
    for module in dict.fromkeys(outcome.mutant.module for outcome in outcomes):
        mine = [outcome for outcome in outcomes if outcome.mutant.module == module]
        by_kind = [share([o for o in mine if o.mutant.kind == kind]) for kind in KINDS]
        table.add_row(module.removeprefix(f"{KERNELS}."), *by_kind, share(mine))
    table.add_row("all", *(share([o for o in outcomes if o.mutant.kind == kind]) for kind in KINDS), share(outcomes))
    return table
