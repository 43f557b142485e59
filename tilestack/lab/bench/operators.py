"""The benchmark: every backend of an operator and its peers, over its cases, dtypes and directions, against the roofs.

A row is one candidate (candidates.py) on one case (rows.py). What fails becomes a row with a note instead of figures.

Without a GPU the definitions and PyTorch's own functions are timed on the CPU, on the largest case of each operator that
is bearable there; Triton's interpreter is never timed.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

from tilestack.contract import Case, Operator
from tilestack.contract.cases import Make
from tilestack.contract.registry import load_kernels, operator_named
from tilestack.lab import results
from tilestack.lab.bench.candidates import candidates_of, differentiable, kernel_lender, names_asked, names_of
from tilestack.lab.bench.peers import COMPILED, is_peer, usual_code_tried
from tilestack.lab.bench.quality import WITHOUT_CODES, quality_of, truth_without_codes
from tilestack.lab.bench.roofs import Roofs, measure_roofs
from tilestack.lab.bench.run_ahead import run_ahead
from tilestack.lab.bench.timing import Candidate, Timing, in_one_line, measure
from tilestack.lab.bench.watch import Watch
from tilestack.lab.machine import stamp
from tilestack.lab.rows import Row, Stored, set_ratios
from tilestack.lab.stale import is_current, present_source

DIRECTIONS = ("forward", "backward", "both")
CPU_BYTES = 2**27  # what a case may move, and
CPU_FLOPS = 2e9  # compute, to be bearable on a CPU
SHARE_AHEAD = 0.4  # of a budget that may go into compiling before anything is timed


@dataclass(frozen=True)
class Subject:
    """What one comparison is about: an operator on one case in one dtype, in some directions."""

    operator: Operator
    case: Case
    dtype: str
    directions: Sequence[str]


def bench_operators(
    operators: Sequence[Operator],
    dtypes: Sequence[str] | None = None,
    directions: Sequence[str] = ("forward", "backward"),
    backends: Sequence[str] | None = None,
    cases: str = "bench",
    device: torch.device | str | None = None,
    save: Path | None = None,
    console: Console | None = None,
    stale: Sequence[Stored] | None = None,
    budget: float | None = None,
    jobs: int = 1,
    files: Sequence[Path] = (),
) -> list[Row]:
    """Measure operators. `backends` names backends and peers (all that can run when None), `cases` a kind or one case.

    dtypes default to bfloat16 on CUDA and float32 on a CPU. With `save`, rows are merged into that results file as they
    come, so that nothing measured is lost. Given the rows of a file as `stale`, only what they do not hold of the present
    source is measured. No case is begun that would probably end after `budget` seconds. With several `jobs`, as many
    processes, which run `files` first, compile everything before anything is timed. Progress is told on `console`.
    """
    load_kernels()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu")).type
    if unknown := [direction for direction in directions if direction not in DIRECTIONS]:
        raise ValueError(f"no direction is called {', '.join(unknown)}; there are {', '.join(DIRECTIONS)}")
    dtypes = dtypes or (("bfloat16",) if device == "cuda" else ("float32",))
    if unknown := [dtype for dtype in dtypes if not isinstance(getattr(torch, dtype, None), torch.dtype)]:
        raise ValueError(f"no dtype is called {', '.join(unknown)}; write bfloat16, float16 or float32")
    subjects = [
        Subject(operator, case, dtype, directions_of(operator, directions))
        for operator in operators
        for dtype in dtypes
        for case in cases_of(operator, cases, dtype, device)
    ]
    if not subjects:
        named = ", ".join(operator.name for operator in operators) or "no operator"
        raise ValueError(f"nothing to measure: {named} has no case {cases!r}; write bench, check or a case's name")
    if stale is not None:
        subjects = not_of_the_present(subjects, stale, device, with_peers=device == "cuda" and not backends)
    watch = Watch(len(subjects), budget, console)
    if not subjects:
        return []
    if jobs > 1:
        asked = [(s.operator.name, s.case.name, s.dtype, s.directions, backends, device) for s in subjects]
        done = run_ahead(compile_subject, asked, jobs, budget and SHARE_AHEAD * budget, files)
        watch.say(f"compiled {done.count(True)} of {len(subjects)} ahead")
    machine, roofs = stamp(device), measure_roofs(device)
    rows: list[Row] = []
    for name, group in groupby(subjects, key=lambda subject: subject.operator.name):
        for subject in group:
            if watch.is_over():
                return rows
            for found in compare_candidates(subject, backends, device, roofs):
                rows += found
                if save is not None:
                    results.merge(save, machine, roofs.as_dict(), [row.as_dict() for row in found])
            watch.done += 1
        watch.tell(name)
    return rows


def not_of_the_present(
    subjects: Sequence[Subject], rows: Sequence[Stored], device: str, with_peers: bool = False
) -> list[Subject]:
    """The subjects, and of each the directions, for which a backend of ours has no row of the present source, or, with
    peers, what people write was not tried.

    A backend that refuses a case has a row too, with its reason.
    """
    key = lambda row: (row["op"], row["case"], row["dtype"], row["direction"], row["backend"])
    current = {key(row) for row in rows if is_current(row)}
    beside: dict[tuple[str, ...], list[str]] = {}
    for *case, name in map(key, rows):
        beside.setdefault(tuple(case), []).append(name)
    found = []
    for subject in subjects:
        at = subject.operator.name, subject.case.name, subject.dtype
        ours = [name for name in names_of(subject.operator, device) if not is_peer(name)]
        missing = [
            direction
            for direction in subject.directions
            if any((*at, direction, name) not in current for name in ours)
            or (with_peers and not usual_code_tried(at[0], beside.get((*at, direction), ())))
            if has_direction(subject, direction)
        ]
        if missing:
            found.append(replace(subject, directions=missing))
    return found


def has_direction(subject: Subject, direction: str) -> bool:
    """Whether there is anything to time: every operator has a forward, but not every backward does something."""
    if direction == "forward":
        return True
    made = subject.case.build(Make(getattr(torch, subject.dtype), "meta"))
    return bool(differentiable(subject.operator, subject.operator.bind(**made)))


def directions_of(operator: Operator, wanted: Sequence[str]) -> list[str]:
    """Where gradients are made in the forward, a backward alone says nothing: both are timed together. What has no gradient on
    any backend but the definition is timed forward."""
    kernels = [found for name, found in operator.implementations.items() if name != "torch"]
    if kernels and all(found.backward is None for found in kernels):
        return [direction for direction in wanted if direction == "forward"]
    ahead = any(found.extras and found.extras.overwrites for found in operator.implementations.values())
    return list(dict.fromkeys("both" if ahead and direction == "backward" else direction for direction in wanted))


def cases_of(operator: Operator, wanted: str, dtype: str, device: str) -> list[Case]:
    """The cases of a kind or name; for the bench on a CPU, the largest case there that does not take minutes."""
    if wanted == "bench" and device == "cpu":
        costs = {}
        for case in operator.cases:
            flops, moved = operator.cost(operator.bind(**case.build(Make(getattr(torch, dtype), "meta"))))
            if flops <= CPU_FLOPS and moved <= CPU_BYTES:
                costs[case] = moved
        return [max(costs, key=costs.__getitem__)] if costs else []
    kinds = [case for case in operator.cases if case.kind == wanted]
    return kinds or [case for case in operator.cases if case.name == wanted]


def compare_candidates(
    subject: Subject, backends: Sequence[str] | None, device: str, roofs: Roofs
) -> Iterator[list[Row]]:
    """The rows of one subject, direction by direction, so that a peer compiles once for all of them."""
    operator, directions = subject.operator, subject.directions
    blank = functools.partial(Row, operator.name, subject.case.name, subject.dtype)
    try:
        arguments = operator.bind(**subject.case.build(Make(getattr(torch, subject.dtype), device)))
    except Exception as error:
        yield from ([blank(direction, "inputs", note=in_one_line(error))] for direction in directions)
        return
    names = names_asked(operator, backends, device)
    for direction in directions:
        candidates, refused = candidates_of(operator, names, arguments, direction, all_told=bool(backends))
        if not candidates and not refused:
            yield []
            continue
        flops, moved = operator.cost(arguments, direction)
        timings = measure(candidates, moved, device) | {name: Timing(note=text) for name, text in refused.items()}
        found = [
            figures(blank(direction, name), timings[name], flops, moved, roofs, multiplies_codes(operator, arguments))
            for name in timings
        ]
        for row in found:
            row.source = present_source(row.op, row.backend)
            row.lender = kernel_lender(operator, row.backend, arguments, direction)
        set_ratios(found)
        if direction == "forward":
            set_quality(found, operator, arguments, candidates)
        yield found
        if device == "cuda":
            torch.cuda.empty_cache()
    if set(COMPILED) & set(names):
        torch.compiler.reset()  # or every case would add to what the compiler keeps


def set_quality(
    rows: Sequence[Row], operator: Operator, arguments: dict[str, Any], candidates: dict[str, Candidate]
) -> None:
    """Fill in how far each timed candidate's result is from what an operator that quantises stands for."""
    if (truth := truth_without_codes(operator, arguments)) is None:
        return
    for row in rows:
        if row.time_us is not None:
            candidate = candidates[row.backend]
            with candidate.scope():
                row.cosine, row.relative_error = quality_of(candidate.prepare(1)[0](), truth)


def compile_subject(
    name: str, case_name: str, dtype: str, directions: Sequence[str], backends: Sequence[str] | None, device: str
) -> bool:
    """Call every candidate of a subject once, so that what it compiles is in the caches on disk; True when that is done."""
    load_kernels()
    operator = operator_named(name)
    case = next(case for case in operator.cases if case.name == case_name)
    arguments = operator.bind(**case.build(Make(getattr(torch, dtype), device)))
    names = names_asked(operator, backends, device)
    for direction in directions:
        found, _ = candidates_of(operator, names, arguments, direction, all_told=False)
        for candidate in found.values():
            with suppress(Exception), candidate.scope():
                candidate.prepare(1)[0]()
    return True


def multiplies_codes(operator: Operator, arguments: dict[str, Any]) -> bool:
    """Whether the operands of a product are codes of 8 bits, given or, as in attention of codes, made on the way."""
    if operator.name in WITHOUT_CODES:
        return True
    operands = [arguments[name] for name in operator.tensors[:2]]
    return len(operands) == 2 and all(isinstance(x, Tensor) and x.element_size() == 1 for x in operands)


def figures(row: Row, timing: Timing, flops: float, moved: float, roofs: Roofs, of_codes: bool = False) -> Row:
    """A row with what was measured and what follows from it, but for the ratio."""
    for name, value in vars(timing).items():
        setattr(row, name, value)
    if timing.time_us:
        row.set_rates(flops, moved, roofs.floor_us(flops, moved, row.dtype, of_codes))
        if timing.how == "cpu" and row.roof_fraction and row.roof_fraction > 1.005:
            row.note = "the inputs stay in cache"  # and are not copied there from memory, as the roof is
    return row
