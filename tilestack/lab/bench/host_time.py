"""What a call costs on the host: every operator on small tensors, beside the least any PyTorch call costs there.

The floor is an in-place addition of one, which allocates nothing and launches one kernel. Calls are timed twenty at a time
with the GPU idle before, so that no queue fills; of many such batches, the floor's in turn with them, the fastest counts,
which nothing else on the machine has held up.

    no_grad     the operator without a gradient; all there is of operators that write into their arguments
    grad        its forward where one is wanted, which also builds the node for autograd
    both        that and its backward, by torch.autograd.grad

Each beside PyTorch's own function (`aten`), or the definition where there is none. What a call costs follows the contract,
which finds and repeats it, as much as the kernel's file, so a row carries a hash of both; and whether gradients went
through C++, which is there once `tilestack doctor --build` has made it.
"""

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Group
from rich.table import Table

from tilestack import ops
from tilestack.contract import BackendError, Operator, backend, configure_backend
from tilestack.contract.cases import Make
from tilestack.contract.native.build import native_node
from tilestack.contract.operator import as_tuple
from tilestack.contract.registry import operator_named
from tilestack.lab.bench.run_ahead import run_ahead
from tilestack.lab.bench.timing import average_seconds
from tilestack.lab.stale import hash_of_parts, present_source

CALLS, BATCHES, WARM = 20, 40, 3
SMALL = 1 << 20  # elements, which a GPU is done with before the host has asked for more
SAME = (
    "op",
    "dtype",
    "direction",
    "backend",
)  # rows of which the latest stands: an operator's case is its smallest at the time
FEWEST, LONGEST = 3, 0.3  # batches, and seconds after which they suffice: a definition may take milliseconds


def bench_host(
    device: str = "cuda", without: Collection[str] = (), jobs: int = 1, files: Sequence[Path] = ()
) -> Iterator[list[dict[str, Any]]]:
    """An operator's rows at a time, one for each way of calling and backend: microseconds on the host, and those of the floor
    beside it. `without` are those that need not be measured. With several `jobs`, as many processes, which run `files` first,
    compile everything before anything is timed."""
    names = [op.name for op in ops.operators() if "triton" in op.implementations and op.name not in without]
    if jobs > 1 and device == "cuda":
        run_ahead(call_all_ways, [(name, device) for name in names], jobs, files=files)
    for name in names:
        yield of_operator(operator_named(name), device)


def call_all_ways(name: str, device: str) -> None:
    """Call an operator once in every way that is timed, so that what it compiles is in the caches on disk."""
    op = operator_named(name)
    for each in compared(op):
        ways_to_call(op, smallest(op), each, device)


def host_source(op: str, backend: str) -> str:
    """The hash of what a call runs on the host."""
    mine = present_source(op, backend)
    return f"{mine}-{hash_of_parts(('contract',))}" if mine else ""


def current_operators(rows: Iterable[dict[str, Any]]) -> set[str]:
    """Those that were measured on the present source, in the case that would be taken now."""
    ours = [row for row in rows if row["backend"] == "triton"]
    known = {op.name: op for op in ops.operators()}
    source = lambda row: host_source(row["op"], row["backend"])
    current = lambda row: (
        row["op"] in known and row.get("source") == source(row) and smallest(known[row["op"]]).name == row["case"]
    )
    return {row["op"] for row in ours} - {row["op"] for row in ours if not current(row)}


def of_operator(op: Operator, device: str) -> list[dict[str, Any]]:
    calls: dict[tuple[str, str], Callable[[], Any]] = {}
    case = smallest(op)
    for name in compared(op):
        for way, call in ways_to_call(op, case, name, device).items():
            calls[way, name] = call
    return [
        dict(
            op=op.name,
            case=case.name,
            dtype="bfloat16",
            direction=way,
            backend=name,
            host_us=ours,
            floor_us=floor,
            node="C++" if native_node() else "Python",
            source=host_source(op.name, name),
        )
        for (way, name), (ours, floor) in measure_all(calls, device).items()
    ]


def compared(op: Operator) -> tuple[str, str]:
    """Our backend, and PyTorch's own function or, where there is none, the definition."""
    return "triton", "aten" if "aten" in op.implementations else "torch"


def smallest(op: Operator) -> Any:
    """The smallest case without an empty tensor whose rows are whole 16 bytes, as real ones are, where there is a small one."""

    def order(case: Any) -> tuple[bool, bool, int]:
        tensors = list(op.given_tensors(op.bind(**case.build(Make(torch.bfloat16, "meta")))).values())
        odd = any(t.ndim and t.shape[-1] % 8 for t in tensors if t.is_floating_point())
        size = sum(t.numel() for t in tensors)
        return size > SMALL, odd, size

    whole = [
        c
        for c in op.cases
        if all(t.numel() for t in op.given_tensors(op.bind(**c.build(Make(device="meta")))).values())
    ]
    return min(whole, key=order)


def ways_to_call(op: Operator, case: Any, name: str, device: str) -> dict[str, Callable[[], Any]]:
    """How an operator is called on a backend: those ways that it takes there, each called once."""
    arguments = list(op.bind(**case.build(Make(torch.bfloat16, device))).values())
    wanted = [v.detach().requires_grad_() if is_float(v) else v for v in arguments]
    leaves = [v for v in wanted if is_float(v)]

    def no_grad() -> Any:  # of tensors that want none
        return op(*arguments)

    def grad() -> Any:
        return op(*wanted)

    def both() -> Any:
        outputs = [out for out in as_tuple(op(*wanted)) if out.requires_grad]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(out) for out in outputs], allow_unused=True)

    found: dict[str, Callable[[], Any]] = {}
    with_gradients = [("grad", grad), ("both", both)] if leaves and not op.mutates else []
    for way, call in [("no_grad", no_grad), *with_gradients]:
        try:
            with backend(name):
                call()
        except (BackendError, RuntimeError, NotImplementedError):
            continue
        found[way] = call
    return found


def is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def measure_all(
    calls: dict[tuple[str, str], Callable[[], Any]], device: str
) -> dict[tuple[str, str], tuple[float, float]]:
    """Microseconds of each call and of the floor's in turn with it, each the fastest batch: a host's clock wanders, and
    others disturb it.

    Backends are chosen as a recipe does it, so that no `with` is timed.
    """
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    x = torch.ones(16, device=device)
    found = {}
    for (way, name), call in calls.items():
        configure_backend(name)
        samples: tuple[list[float], list[float]] = ([], [])
        until = time.perf_counter() + LONGEST
        for batch in range(WARM + BATCHES):
            if len(samples[1]) >= FEWEST and time.perf_counter() > until:
                break
            for run, kept in zip((call, lambda: x.add_(1)), samples, strict=True):
                wait()
                took = average_seconds(run, CALLS, time.perf_counter)
                if batch >= WARM:
                    kept.append(took)
        ours, floor = (round(1e6 * min(kept), 3) for kept in samples)
        found[way, name] = ours, floor
    configure_backend("")
    return found


def render_host_times(rows: list[dict[str, Any]]) -> Table:
    """What each operator adds to the floor, ours beside PyTorch's."""
    table = Table("operator", "floor", "no gradient", "PyTorch", "with gradient", "PyTorch", "and backward", "PyTorch", title="Host, µs a call")  # fmt: skip
    by = {(row["op"], row["direction"], row["backend"] == "triton"): row for row in rows}
    for name in dict.fromkeys(row["op"] for row in rows):
        cell = lambda way, ours, name=name: f"{by[name, way, ours]['host_us']:.1f}" if (name, way, ours) in by else "–"
        floor = next(row["floor_us"] for row in rows if row["op"] == name)
        table.add_row(
            name, f"{floor:.1f}", *(cell(way, ours) for way in ("no_grad", "grad", "both") for ours in (True, False))
        )
    return table


def render_host_times_with_summary(rows: list[dict[str, Any]]) -> Group:
    return Group(render_host_times(rows), summary_of_host_times(rows))


def summary_of_host_times(rows: list[dict[str, Any]]) -> str:
    """The medians over operators of what ours adds to the floor, and of the backward's share beside PyTorch's own."""
    ours = [row for row in rows if row["backend"] == "triton"]
    added = lambda way: [row["host_us"] - row["floor_us"] for row in ours if row["direction"] == way]
    parts = [f"{way} +{statistics.median(found):.2f} µs" for way in ("no_grad", "grad") if (found := added(way))]
    through = "".join(f", gradients through {node}" for node in sorted({row.get("node", "") for row in ours} - {""}))
    told = f"median over {len({row['op'] for row in ours})} operators{through}: {', '.join(parts)} over the floor"
    mine, theirs = (backward_shares(rows, name) for name in ("triton", "aten"))
    if not (both := mine.keys() & theirs.keys()):
        return told
    share = lambda found: f"{statistics.median(found[op] for op in both):.2f} µs"
    return f"{told}; backward {share(mine)}, PyTorch's own {share(theirs)}, over the {len(both)} operators that it has"


def backward_shares(rows: list[dict[str, Any]], backend: str) -> dict[str, float]:
    """Of each operator what its backward adds to a forward that wants a gradient, in microseconds."""
    found = {(row["op"], row["direction"]): row["host_us"] for row in rows if row["backend"] == backend}
    return {op: us - found[op, "grad"] for (op, way), us in found.items() if way == "both" and (op, "grad") in found}
