"""What the kernels of an operator cost on a GPU, from the compiler alone: a row per kernel, and a table of them."""

from collections.abc import Iterable, Sequence
from itertools import islice, product
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from tilestack.contract import Case, Operator, operator_named, operators
from tilestack.contract.backends import family_of
from tilestack.contract.cases import Make
from tilestack.lab.compile.absent_gpu import (
    CAPABILITIES,
    INSTRUCTIONS,
    Call,
    KernelReport,
    compiled_kernels,
    gate,
    launches_of,
)
from tilestack.lab.labels import case_label

DTYPES = (torch.bfloat16, torch.float32)
VECTOR = 16  # a row length it divides lets Triton load whole vectors


def explain(
    names: Sequence[str] = (), capability: int = 90, dtypes: Sequence[torch.dtype] = DTYPES, every_bench: bool = True
) -> list[KernelReport]:
    """A report of each kernel that the named operators (all when none is named) launch, identical ones once.

    The cases are every bench case or, for a quick look, a few; see `telling_cases`.
    """
    chosen = [operator_named(name) for name in names] or operators()
    return compile_all(calls_of(chosen, capability, dtypes, every_bench))


def compile_all(calls: Iterable[Call]) -> list[KernelReport]:
    """A report of each kernel that these calls launch, identical ones once."""
    found: dict[str, KernelReport] = {}
    for call in calls:
        for report in compiled_kernels(call):
            found.setdefault(report.digest, report)
    return list(found.values())


def calls_of(
    chosen: Sequence[Operator], capability: int, dtypes: Sequence[torch.dtype], every_bench: bool
) -> list[Call]:
    """The calls to compile for: an implementation's first configuration in all cases, every other in the largest case that it
    takes."""
    calls = []
    for operator in chosen:
        ways = [
            way for name, way in operator.implementations.items() if capability in CAPABILITIES.get(family_of(name), ())
        ]
        cases = telling_cases(operator, every_bench)
        for way, case, dtype, direction in product(ways, cases, dtypes, ("forward", "backward")):
            calls.append(Call(operator, way, case, dtype, direction, capability))
        from_largest = sorted(cases, key=elements, reverse=True)
        for way, dtype, direction in product(ways, dtypes, ("forward", "backward")):
            for config in list(way.configs)[1:]:
                found = (Call(operator, way, case, dtype, direction, capability, config) for case in from_largest)
                calls += islice(filter(launches_of, found), 1)
    return calls


def telling_cases(operator: Operator, every_bench: bool = False) -> list[Case]:
    """The cases worth compiling: the largest of each set of options and integers, the largest odd one, the largest of each kind."""
    largest: dict[Any, Case] = {}
    for case in sorted(operator.cases, key=elements):
        arguments = operator.bind(**case.build(Make(device="meta")))
        tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
        kinds = {name: value.is_floating_point() or value.dtype for name, value in tensors.items()}
        options = tuple((name, kinds.get(name, value)) for name, value in arguments.items())
        traits: list[Any] = [options, case.name if every_bench and case.kind == "bench" else case.kind]
        if any(tensor.ndim and tensor.shape[-1] % VECTOR for tensor in tensors.values()):
            traits.append("odd")
        largest |= dict.fromkeys(traits, case)
    return [case for case in operator.cases if case in largest.values()]


def elements(case: Case) -> int:
    """How many elements a case's tensors have together."""
    return sum(value.numel() for value in case.build(Make(device="meta")).values() if isinstance(value, Tensor))


def render_explain(reports: Sequence[KernelReport]) -> Table:
    """Kernels as a table: what they are, what they use, and what is wrong with them."""
    capabilities = ", ".join(f"sm_{capability}" for capability in sorted({report.capability for report in reports}))
    table = Table(title=f"Kernels compiled for {capabilities}" if reports else "No kernels", title_justify="left")
    for column in ("operator", "case", "kernel"):
        table.add_column(column, overflow="fold")
    for column in ("warps", "registers", "spilled", "shared"):
        table.add_column(column, justify="right")
    table.add_column("instructions")
    table.add_column("verdict")
    for report in reports:
        failures = gate(report)
        table.add_row(
            f"{report.operator} {report.direction}",
            f"{case_label(report.operator, report.case)}, {report.dtype}",
            f"{report.kernel} {report.config}".rstrip(),
            f"{report.num_warps}",
            f"{report.registers}",
            f"{report.spill_bytes:,}",
            f"{report.shared_bytes:,}",
            " ".join(f"{name}×{report.instructions[name]}" for name in INSTRUCTIONS if report.instructions[name]),
            f"[red]{'; '.join(failures)}" if failures else "[green]ok",
        )
    return table
