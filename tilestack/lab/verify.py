"""Proving implementations: every operator × backend × case × variant × dtype × direction in the registry.

Outputs are filled with NaN before a kernel writes them, so an element it leaves out is seen. Forward and every gradient
go through the public operator with the backend chosen, as a user would call it; both run twice and must give the same
bits. In float64, gradcheck compares the backward with finite differences of the forward.
"""

import functools
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from tilestack.contract.autograd import gradient_of_definition
from tilestack.contract.backends import AUTO, backend, chosen
from tilestack.contract.cases import Case, Make
from tilestack.contract.implementation import Implementation
from tilestack.contract.operator import Operator, as_tuple
from tilestack.lab import oracle, variants
from tilestack.lab.refuted import crash_line, refutations

REDRAWS = 16  # more draws of arguments with a small result, which the definition may get exact by luck
SMALL, LARGE = 1 << 14, 1 << 17  # elements of the smallest result, and of all, up to which to draw again
GRADCHECKED = 1 << 12  # elements beyond which gradcheck would take too long


@dataclass(frozen=True)
class Proof:
    """One claim and what became of it: ok True or False, or None when it could not be tried, with the reason."""

    op: str
    backend: str
    case: str
    variant: str
    dtype: str
    direction: str
    ok: bool | None
    error: float = 0.0
    bound: float = 0.0
    message: str = ""


@dataclass(frozen=True)
class Claim:
    """What is to be proved: that an implementation is right on a case's arguments, in one variant, dtype and direction."""

    operator: Operator
    implementation: Implementation
    case: Case
    variant: str
    dtype: torch.dtype
    direction: str
    device: torch.device

    def proof(self, ok: bool | None, error: float = 0.0, bound: float = 0.0, message: str = "") -> Proof:
        names = (
            self.operator.name,
            self.implementation.backend,
            self.case.name,
            self.variant,
            str(self.dtype).removeprefix("torch."),
            self.direction,
        )
        return Proof(*names, ok, error, bound, message)

    def arguments(self, seed: int = 0) -> dict[str, Any]:
        built = self.operator.bind(**self.case.build(Make(self.dtype, self.device, seed)))
        return variants.vary(built, self.variant)


def default_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """What can be tried on a device; Triton's interpreter computes bfloat16 wrongly, so it waits for a GPU."""
    halves = (torch.float16, torch.bfloat16) if device.type == "cuda" else (torch.float16,)
    return (*halves, torch.float32, torch.float64)


def claims(
    operators: Iterable[Operator],
    device: torch.device,
    *,
    only: Mapping[str, str] | None = None,
    dtypes: Iterable[torch.dtype] | None = None,
    kinds: Iterable[str] = ("check",),
    every_variant: bool = True,
) -> Iterator[Claim]:
    """All that can be claimed of the operators' implementations. Empty arguments have no variants.

    `only` narrows an operator, by name, to one backend.
    """
    for described in operators:
        asked = (only or {}).get(described.name)
        implementations = [i for name, i in described.implementations.items() if asked in (None, name)]
        for case in (c for c in described.cases if c.kind in kinds):
            sizes = [t.numel() for t in case.build(Make(device="meta")).values() if isinstance(t, Tensor)]
            tried = variants.ALL if every_variant and 0 not in sizes and case.kind == "check" else ["plain"]
            for dtype in dtypes or default_dtypes(device):
                small = dtype == torch.float64 and 0 not in sizes and sum(sizes) <= GRADCHECKED
                for direction in ("forward", "backward", *(["gradcheck"] if small else [])):
                    for variant in tried if direction != "gradcheck" else ["plain"]:
                        if variant == "nan" and direction == "backward" and not described.spreads_nan:
                            continue
                        # Innermost, so that all implementations are judged by one evaluation of the definition.
                        for implementation in implementations:
                            yield Claim(described, implementation, case, variant, dtype, direction, device)


def prove(claim: Claim) -> Proof:
    """Try a claim; any exception of the kernel under test is a refutation, with its first line."""
    implementation = claim.implementation
    if implementation.backend == "torch" and not proves_formula(claim):
        return claim.proof(None, message="the definition itself")
    arguments = claim.arguments()
    if reason := implementation.refuses(arguments, claim.device, claim.direction != "forward"):
        return claim.proof(None, message=reason)
    try:
        if claim.direction == "gradcheck":
            return check_gradient(claim, arguments)
        return compare(claim, arguments)
    except Exception as failure:
        return claim.proof(False, math.inf, message=crash_line(failure))


def proves_formula(claim: Claim) -> bool:
    """A declared gradient formula is itself a claim: in float64 it must be the derivative of the definition."""
    return claim.direction == "backward" and claim.dtype == torch.float64 and claim.operator.gradient is not None


def compare(claim: Claim, arguments: dict[str, Any]) -> Proof:
    """Judge every output, or every gradient, against the oracle."""
    # How arguments lie in memory changes nothing about their values, nor then about the definition's results.
    values = claim.variant if claim.variant in variants.VALUES else "plain"
    standards = standards_of(claim.operator, claim.case, values, claim.dtype, claim.direction, claim.device)
    evaluate = evaluations[claim.direction]
    with poisoned_memory():
        results = evaluate(_call(claim), claim.operator, arguments)
        again = evaluate(_call(claim), claim.operator, arguments) if claim.variant == "plain" else results
    worst = oracle.Verdict(0.0, 0.0)
    for name, result in results.items():
        verdict = oracle.judge(result, *standards[name])
        if not verdict.message and not same_bits(result, again[name]):
            verdict = oracle.Verdict(verdict.error, verdict.bound, "two runs on the same arguments differ")
        if verdict.message:
            return claim.proof(False, verdict.error, verdict.bound, f"{name}: {verdict.message}")
        if verdict.error * worst.bound >= worst.error * verdict.bound:
            worst = verdict
    return claim.proof(True, worst.error, worst.bound)


def same_bits(a: Tensor, b: Tensor) -> bool:
    dense = (t.clone(memory_format=torch.contiguous_format).view(-1) for t in (a, b))
    return torch.equal(*(t.view(torch.uint8) for t in dense))


@functools.lru_cache(maxsize=2)
def standards_of(
    described: Operator, case: Case, values: str, dtype: torch.dtype, direction: str, device: torch.device
) -> dict[str, tuple]:
    """By name of an output or gradient: the definition's result in the dtype, the truth, and the definition's own error.

    The definition may be exact by luck, so its error is the worst of several draws where a result is small, and of the
    unvaried arguments too where these are varied.
    """
    evaluate = evaluations[direction]
    declared = with_declared_gradient(described) if described.gradient is not None else described.definition

    def draw(variant: str, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        arguments = variants.vary(described.bind(**case.build(Make(dtype, device, seed))), variant)
        exact = {
            name: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for name, t in arguments.items()
        }
        return evaluate(declared, described, arguments), evaluate(described.definition, described, exact)

    reference, truth = draw(values, 0)
    own = {name: [oracle.own_error(reference[name], truth[name])] for name in reference}
    sizes = [t.numel() for t in truth.values() if t.is_floating_point()]
    small = min(sizes, default=LARGE) <= SMALL and sum(sizes) <= LARGE
    for variant, seed in [
        *((values, seed) for seed in range(1, 1 + REDRAWS * small)),
        *([("plain", 0)] if values != "plain" else []),
    ]:
        another, another_truth = draw(variant, seed)
        for name in own:
            own[name].append(oracle.own_error(another[name], another_truth[name]))
    return {name: (reference[name], truth[name], tuple(map(max, zip(*own[name], strict=True)))) for name in reference}


def check_gradient(claim: Claim, arguments: dict[str, Any]) -> Proof:
    """Finite differences of the forward against the backward, in float64 on small arguments."""
    # An argument that the definition detaches is a constant, and finite differences would not see that.
    leaves = {
        name: arguments[name].detach().requires_grad_()
        for name in differentiable_arguments(claim.operator.definition, arguments)
    }
    function = _call(claim)
    torch.autograd.gradcheck(
        lambda *tensors: function(**arguments | dict(zip(leaves, tensors, strict=True))),
        tuple(leaves.values()),
        fast_mode=True,
        nondet_tol=0.0,
    )
    return claim.proof(True)


def differentiable_arguments(function: Callable, arguments: dict[str, Any]) -> list[str]:
    """The arguments that a gradient of the function reaches."""
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in arguments.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    out = [t for t in as_tuple(function(**arguments | leaves)) if t.requires_grad]
    if not out:
        return []
    found = torch.autograd.grad(out, list(leaves.values()), [torch.ones_like(t) for t in out], allow_unused=True)
    return [name for name, gradient in zip(leaves, found, strict=True) if gradient is not None]


def forward_of(function: Callable, described: Operator, arguments: dict[str, Any]) -> dict[str, Tensor]:
    with torch.no_grad():
        return dict(zip(described.outputs, as_tuple(function(**arguments)), strict=True))


def gradients_of(function: Callable, described: Operator, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The gradient of every floating tensor argument, for a fixed random gradient arriving at each output."""
    leaves = {
        name: t.detach().requires_grad_()
        for name, t in arguments.items()
        if isinstance(t, Tensor) and t.is_floating_point()
    }
    out = [t for t in as_tuple(function(**arguments | leaves)) if t.is_floating_point()]
    make = Make(torch.float16, out[0].device, seed=1)  # values that every dtype holds exactly
    arriving = [make.normal(*t.shape).to(t.dtype) for t in out]
    found = torch.autograd.grad(out, list(leaves.values()), arriving, allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


evaluations = dict(forward=forward_of, backward=gradients_of)


def with_declared_gradient(described: Operator) -> Callable:
    return lambda **arguments: DeclaredGradient.apply(described, *arguments.values())


def _call(claim: Claim) -> Callable:
    """The operator on the claimed backend; for the definition, whose forward is the oracle, its gradient formula."""
    described, name = claim.operator, claim.implementation.backend
    if name == "torch":
        return with_declared_gradient(described)

    def call(**arguments: Any) -> Any:
        with backend("", **{described.name: name}):
            return described(**arguments)

    return call


class DeclaredGradient(torch.autograd.Function):
    """The definition with its declared gradient formula in place of the derived one."""

    @staticmethod
    def forward(ctx, described, *values):
        out = described.definition(*values)
        ctx.described, ctx.values, ctx.out = described, values, out
        return out

    @staticmethod
    def backward(ctx, *arriving):
        described = ctx.described
        available = dict(zip(described.parameters, ctx.values, strict=True)) | dict(
            zip(described.outputs, as_tuple(ctx.out), strict=True)
        )
        available |= dict(zip(described.grads, arriving, strict=True))
        available["needs"] = tuple(available[name] is not None for name in described.tensors)
        found = dict(zip(described.tensors, gradient_of_definition(described, available), strict=True))
        return None, *(found.get(name) for name in described.parameters)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Inside, new uninitialised tensors hold NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def chosen_backends(operators: Iterable[Operator], device: torch.device, name: str | None) -> dict[str, str]:
    """By operator, the only backend to prove: the named one, or the environment's choice. It must exist and run here."""
    asked = {described: name or chosen(described.name) for described in operators}
    explicit = {described: choice for described, choice in asked.items() if choice != AUTO}
    for described, choice in explicit.items():
        with backend("", **{described.name: choice}):
            described.resolve(described.bind(**described.cases[0].build(Make(torch.float32, device))))
    return {described.name: choice for described, choice in explicit.items()}


def render(proofs: list[Proof], device: torch.device) -> Group:
    """A line per operator and backend, then every refutation by name, then what could not be tried and why."""
    table = Table(
        "operator", "backend", "proved", "wrong", "not tried", "worst error / bound", title=f"Verification on {device}"
    )
    pairs = list(dict.fromkeys((p.op, p.backend) for p in proofs))
    for op, name in pairs:
        mine = [p for p in proofs if (p.op, p.backend) == (op, name)]
        wrong = sum(p.ok is False for p in mine)
        worst = max((p.error / p.bound for p in mine if p.ok and p.bound), default=0.0)
        table.add_row(
            op,
            name,
            str(sum(p.ok is True for p in mine)),
            f"[red]{wrong}[/red]" if wrong else "0",
            str(sum(p.ok is None for p in mine)),
            f"{worst:.2f}",
        )
    reasons = Counter((p.op, p.backend, p.message) for p in proofs if p.ok is None and p.backend != "torch")
    untried = [
        f"[dim]not tried: {op} {name}, {count}×: {escape(message)}[/dim]"
        for (op, name, message), count in reasons.items()
    ]
    return Group(table, *refutations(proofs), *untried)
