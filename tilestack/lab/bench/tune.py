"""`tilestack tune`: the laboratory's own proofs and clock, for the search in `tuning/search.py`.

A subject is an operator on one of its bench cases in one dtype. Its candidates are all backends but the definition, each
in all its configurations. A candidate is proved on that very case, forward and backward, then timed in turns with the
others, and ranked by both directions together.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from tilestack.contract import BackendError, Case, Operator, backend
from tilestack.contract.cases import Make
from tilestack.contract.registry import load_kernels, operator_named
from tilestack.lab.bench.candidates import candidate_of, differentiable
from tilestack.lab.bench.operators import SHARE_AHEAD, cases_of, directions_of
from tilestack.lab.bench.peers import Peer
from tilestack.lab.bench.run_ahead import run_ahead
from tilestack.lab.bench.timing import measure
from tilestack.lab.bench.watch import Watch
from tilestack.lab.labels import case_label, dtype_name
from tilestack.lab.proof.claims import Claim
from tilestack.lab.proof.verify import prove
from tilestack.tuning.model import Gpu
from tilestack.tuning.preferences import key_of
from tilestack.tuning.search import KEPT, Trial, most_promising, search

DIRECTIONS = ("forward", "backward")


@dataclass(frozen=True)
class Tuned:
    """What a search found for one case, fastest first."""

    operator: Operator
    case: Case
    dtype: torch.dtype
    times: Mapping[tuple[str, str], float]  # by candidate and direction, µs
    trials: Sequence[Trial]
    forward_only: bool = False  # of an operator that has a backward too

    def rows(self) -> list[dict[str, Any]]:
        """As tables of preferences are made of them."""
        about: dict[str, Any] = dict(op=self.operator.name, case=self.case.name, dtype=dtype_name(self.dtype))
        names = ((*name.partition(":")[::2], direction, us) for (name, direction), us in self.times.items())
        about |= dict(forward_only=True) if self.forward_only else {}
        return [about | dict(backend=b, config=c or None, direction=d, time_us=us) for b, c, d, us in names]


def needs_gpu() -> None:
    """Raise where there is nothing to time."""
    if not torch.cuda.is_available():
        raise BackendError(
            "tune times kernels, and there is no CUDA GPU here; on one, it finds the fastest backend and configuration of "
            "each case and keeps them for `auto`. What was measured elsewhere is shipped in tilestack/tuning/tables"
        )


def tune(
    operators: Sequence[Operator],
    dtypes: Sequence[torch.dtype],
    cases: str = "bench",
    kept: int = KEPT,
    backends: Sequence[str] = (),
    forward: bool = False,
    budget: float | None = None,
    console: Console | None = None,
    jobs: int = 1,
    files: Sequence[Path] = (),
) -> Iterator[Tuned]:
    """Search for the fastest way through every case, of some backends or all; of its `forward` alone, or both directions.
    None is begun that would probably end after `budget` seconds. With several `jobs`, as many processes, which run `files`
    first, compile and prove what is then timed."""
    load_kernels()
    known = sorted({name for operator in operators for name in operator.implementations})
    if unknown := [name for name in backends if name not in known]:
        raise ValueError(f"no backend of what is tuned is named {', '.join(unknown)}; there are {', '.join(known)}")
    device = torch.device("cuda", torch.cuda.current_device())
    subjects = [
        (operator, case, dtype)
        for operator in operators
        for dtype in dtypes
        for case in cases_of(operator, cases, dtype_name(dtype), device.type)
    ]
    if not subjects:
        named = ", ".join(operator.name for operator in operators) or "no operator"
        raise ValueError(f"nothing to tune: {named} has no case {cases!r}; write bench or a case's name")
    watch = Watch(len(subjects), budget, console)
    right: list[list[str] | None] = [None] * len(subjects)
    if jobs > 1:
        asked = [(o.name, case.name, dtype, device, backends, forward, kept) for o, case, dtype in subjects]
        right = run_ahead(prove_subject, asked, jobs, budget and SHARE_AHEAD * budget, files)
        watch.say(f"proved {len(subjects) - right.count(None)} of {len(subjects)} ahead")
    for (operator, case, dtype), proved in zip(subjects, right, strict=True):
        if watch.is_over():
            return
        over = lambda: budget is not None and watch.elapsed() > budget
        yield Search(operator, case, dtype, device, backends, forward, proved or ()).run(kept, over)
        watch.done += 1
        watch.tell(f"{operator.name} {case.name}")


def prove_subject(
    name: str,
    case_name: str,
    dtype: torch.dtype,
    device: torch.device,
    backends: Sequence[str],
    forward: bool,
    kept: int,
) -> list[str]:
    """The candidates of a subject that are worth timing and right; what they compile is in the caches on disk then."""
    load_kernels()
    operator = operator_named(name)
    case = next(case for case in operator.cases if case.name == case_name)
    found = Search(operator, case, dtype, device, backends, forward)
    promising = most_promising({each: found.predict(each) for each in found.candidates()}, kept)
    return [each for each in promising if not found.verify(each)]


class Search:
    """The search for one subject: its candidates, and what predicting, verifying and timing one means. Those that were
    `proved` elsewhere, on this very subject, are not proved again."""

    def __init__(
        self,
        operator: Operator,
        case: Case,
        dtype: torch.dtype,
        device: torch.device,
        backends: Sequence[str] = (),
        forward: bool = False,
        proved: Sequence[str] = (),
    ):
        self.operator, self.case, self.dtype, self.device = operator, case, dtype, device
        self.backends, self.forward, self.proved = backends, forward, proved
        self.arguments = operator.bind(**case.build(Make(dtype, device)))
        self.times: dict[tuple[str, str], float] = {}

    def run(self, kept: int, over: Any) -> Tuned:
        trials = search(self.candidates(), self.predict, self.verify, self.time, kept, over)
        return Tuned(self.operator, self.case, self.dtype, self.times, trials, self.forward)

    @functools.cached_property
    def directions(self) -> list[str]:
        both = not self.forward and differentiable(self.operator, self.arguments)
        wanted = DIRECTIONS if both else DIRECTIONS[:1]
        return directions_of(self.operator, wanted)

    def candidates(self) -> list[str]:
        """`triton`, or `triton:tall` for each configuration, of every backend that takes the call."""
        found = []
        for name, way in self.operator.implementations.items():
            asked = name in self.backends if self.backends else name != "torch"
            if asked and not way.refuses(self.arguments, self.device, with_gradient=False):
                found += [f"{name}:{config}" for config in way.configs] or [name]
        return found

    def predict(self, name: str) -> float | None:
        """By the configuration's own `model_us`, where it has one."""
        backend_name, _, config = name.partition(":")
        model = getattr(self.operator.implementations[backend_name].configs.get(config), "model_us", None)
        key = key_of(self.operator, self.arguments)
        if model is None or key is None:
            return None
        processors = torch.cuda.get_device_properties(self.device).multi_processor_count
        sizes = [part for part in key if not isinstance(part, str)]
        return model(*sizes, gpu=Gpu(multiprocessors=processors))

    def verify(self, name: str) -> str:
        if name in self.proved:
            return ""
        backend_name, _, config = name.partition(":")
        way = self.operator.implementations[backend_name]
        for direction in self.directions:
            if direction != "forward" and way.backward is None:
                continue
            claim = Claim(self.operator, way, self.case, "plain", self.dtype, direction, self.device, config)
            if (proof := prove(claim)).ok is False:
                return f"{direction}: {proof.message or f'{proof.error} where {proof.bound} is allowed'}"
        return ""

    def time(self, names: Sequence[str]) -> dict[str, float | str]:
        """Both directions added up; a reason for what has but one of them."""
        found: dict[str, float | str] = dict.fromkeys(names, 0.0)
        for direction in self.directions:
            wanted = differentiable(self.operator, self.arguments) if direction != "forward" else []
            ways = {
                name: candidate_of(
                    self.operator, Peer(self.operator, functools.partial(backend, name)), self.arguments, wanted, direction
                )
                for name in names
            }  # fmt: skip
            _, moved = self.operator.cost(self.arguments, direction)
            for name, timing in measure(ways, moved, self.device).items():
                total = found[name]
                if timing.time_us is None:
                    found[name] = timing.note or f"it has no {direction}"
                elif not isinstance(total, str):
                    self.times[name, direction] = timing.time_us
                    found[name] = total + timing.time_us
        return found


def render_tuned(tuned: Sequence[Tuned]) -> Table:
    """A line per case: the fastest, how much slower the next backend and PyTorch's own are, and what was left out."""
    table = Table("operator", "case", "dtype", "fastest", "time", "next backend", "aten", "left out", title="Tuned")
    for found in tuned:
        timed = [trial for trial in found.trials if trial.time_us is not None]
        if not timed:
            table.add_row(found.operator.name, found.case.name, "", "nothing", "", "", "", f"{len(found.trials)}")
            continue
        best = timed[0]
        other = next((trial for trial in timed if trial.backend != best.backend), None)
        aten = next((trial for trial in timed if trial.backend == "aten"), None)
        slower = lambda trial: f"{trial.name} {trial.time_us / best.time_us:.2f}×" if trial else "–"
        table.add_row(
            found.operator.name,
            case_label(found.operator.name, found.case.name),
            dtype_name(found.dtype),
            best.name,
            f"{best.time_us:.1f} µs",
            slower(other),
            slower(aten),
            f"{len(found.trials) - len(timed)}",
        )
    return table
