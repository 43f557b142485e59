"""Proving implementations: every operator × backend × case × variant × dtype × direction in the registry.

Forward and every gradient go through the public operator with the backend chosen, as a user would call it, several times
over and each time on other memory: the bits must be the same, for from some call of a signature on, a GPU is handed a
repetition of what was noted earlier. Outputs are filled with NaN before a kernel writes them, so that an element it
leaves out is seen; inputs, and what lies around inputs and outputs, must stay as they were. In float64, gradcheck compares
the backward with finite differences of the forward.
"""

import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from tilestack.contract.autograd import differentiable
from tilestack.contract.backends import AUTO, BackendError, backend, batch_invariant, chosen
from tilestack.contract.cases import Case, Make
from tilestack.contract.implementation import Implementation
from tilestack.contract.named import parameters_of
from tilestack.contract.operator import Operator, as_tuple
from tilestack.contract.registry import configuration
from tilestack.lab.proof import invariance, oracle, variants
from tilestack.lab.proof.evaluate import (
    EVALUATE,
    Results,
    Standard,
    arguments_of,
    as_declared,
    differentiable_arguments,
    float_leaves,
    further_draws,
    standards_of,
)
from tilestack.lab.proof.memory_guards import (
    guarded_memory,
    poisoned_memory,
    same_bits,
    whole_memory,
    workspaces_left_as_zeros,
)
from tilestack.lab.proof.refuted import crash_line, refutations

GRADCHECKED = 1 << 12  # elements beyond which gradcheck would take too long
CALLS_ON_GPU = 4  # of one signature: the third is the first that a repetition may answer
SAYS_NOTHING = "says nothing"
OF_CONFIGS = ("plain", "strided")  # in which every configuration is tried, the first in all others too
WITHOUT_EXTRAS = "without extras"  # the backward that gets none, which is what torch.ops and some compiled graphs run


@dataclass(frozen=True)
class Proof:
    """One claim and what became of it: ok True or False, or None when it could not be tried, or says nothing, with the reason."""

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

    @property
    def says_nothing(self) -> bool:
        """Whether it was tried and found right, on results that nothing can be said of."""
        return self.ok is None and self.message.startswith(SAYS_NOTHING)


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
    config: str = ""  # the configuration by name, the implementation's first where it is empty

    def proof(self, ok: bool | None, error: float = 0.0, bound: float = 0.0, message: str = "") -> Proof:
        names = (
            self.operator.name,
            self.implementation.backend,
            self.case.name,
            self.variant_and_config,
            str(self.dtype).removeprefix("torch."),
            self.direction,
        )
        return Proof(*names, ok, error, bound, message)

    @property
    def variant_and_config(self) -> str:
        """What is not as in any call, in words."""
        if not self.config:
            return self.variant
        return self.config if self.variant == "plain" else f"{self.config} {self.variant}"

    def arguments(self) -> dict[str, Any]:
        return arguments_of(self.operator, self.case, self.variant, self.dtype, self.device)

    @property
    def values(self) -> str:
        """The variant of values. How arguments lie in memory changes nothing about these, nor about the definition's results."""
        return self.variant if self.variant in variants.VALUES else "plain"

    def standards(self, find: Callable[..., dict[str, Standard]], many_draws: bool = False) -> dict[str, Standard]:
        return find(self.operator, self.case, self.values, self.dtype, self.direction, self.device, many_draws)

    @property
    def calls(self) -> int:
        """How often to call: on a GPU until a repetition answers, elsewhere twice where it tells something."""
        if self.device.type == "cuda":
            return 1 if self.variant in ("large", "nan") else CALLS_ON_GPU
        return 1 + (self.variant == "plain" and self.dtype == torch.float32)


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
    case_names: Container[str] | None = None,
) -> Iterator[Claim]:
    """All that can be claimed of the operators' implementations. Empty arguments have no variants.

    `only` narrows an operator, by name, to one backend, and `case_names` them all to some cases. Configurations but the
    first are tried in plain variants and where no stride is one, since each may go through memory in a way of its own. On a
    GPU, its own cases are checked like the others.
    """
    kinds = {*kinds, "gpu"} if device.type == "cuda" and "check" in kinds else set(kinds)
    for operator in operators:
        asked = (only or {}).get(operator.name)
        implementations = [i for name, i in operator.implementations.items() if asked in (None, name)]
        for case in (c for c in operator.cases if c.kind in kinds and (case_names is None or c.name in case_names)):
            sizes = [t.numel() for t in case.build(Make(device="meta")).values() if isinstance(t, Tensor)]
            tried = variants.ALL if every_variant and 0 not in sizes and case.kind != "bench" else ["plain"]
            for dtype in dtypes or default_dtypes(device):
                small = dtype == torch.float64 and 0 not in sizes and sum(sizes) <= GRADCHECKED
                directions = ["forward", "backward", *(["gradcheck"] if small else [])]
                for direction in directions if not operator.mutates else ["forward"]:  # what is written has no gradient
                    for variant in tried if direction != "gradcheck" else ["plain"]:
                        if variant == "nan" and direction == "backward" and not operator.spreads_nan:
                            continue
                        # Innermost, so that all implementations are judged by one evaluation of the definition.
                        for implementation in implementations:
                            claim = Claim(operator, implementation, case, variant, dtype, direction, device)
                            yield claim
                            if variant in OF_CONFIGS and depends_on_config(implementation, direction):
                                yield from (replace(claim, config=name) for name in list(implementation.configs)[1:])
                    for implementation in implementations if direction != "gradcheck" and 0 not in sizes else ():
                        if implementation.invariant:
                            yield Claim(operator, implementation, case, invariance.ALONE, dtype, direction, device)
                        if direction == "backward" and implementation.extras and callable(implementation.backward):
                            yield Claim(operator, implementation, case, WITHOUT_EXTRAS, dtype, direction, device)


def depends_on_config(implementation: Implementation, direction: str) -> bool:
    """Whether another configuration is another claim: a backward that names none is the same in all of them."""
    backward = implementation.backward
    return direction == "forward" or (
        direction == "backward" and callable(backward) and "config" in parameters_of(backward)
    )


def prove(claim: Claim, find_standards: Callable[..., dict[str, Standard]] = standards_of) -> Proof:
    """Try a claim; any exception of the kernel under test is a refutation, with its first line.

    What is refuted by the definition's error in one draw may be so by chance: it is judged once more by the worst of many,
    which only ever allows more, so that nothing is lost by trying the one first.
    """
    implementation = claim.implementation
    if implementation.backend == "torch" and not proves_formula(claim):
        return claim.proof(None, message="the definition itself")
    if reason := implementation.refuses(claim.arguments(), claim.device, claim.direction != "forward"):
        return claim.proof(None, message=reason)
    if claim.variant == WITHOUT_EXTRAS and implementation.extras_of(claim.arguments()) is None:
        return claim.proof(None, message="its forward hands nothing on here")
    try:
        if claim.direction == "gradcheck":
            return check_gradient(claim)
        if claim.variant == invariance.ALONE:
            return prove_alone(claim)
        try:
            standards = claim.standards(find_standards)
        except torch.OutOfMemoryError:
            return claim.proof(None, message="the definition needs more memory than there is")
        evaluated = list(evaluations(claim))
        proof = judge_claim(claim, evaluated, standards)
        if proof.ok is False and further_draws(claim.values, (truth for _, truth, _ in standards.values())):
            proof = judge_claim(claim, evaluated, claim.standards(find_standards, many_draws=True))
        return proof
    except Exception as failure:
        return claim.proof(False, math.inf, message=crash_line(failure))


def proves_formula(claim: Claim) -> bool:
    """A declared gradient formula is itself a claim: in float64 it must be the derivative of the definition."""
    return claim.direction == "backward" and claim.dtype == torch.float64 and claim.operator.gradient is not None


def judge_claim(claim: Claim, evaluated: list[Results], standards: dict[str, Standard]) -> Proof:
    """Judge every output, or every gradient, of the first call against the oracle, and the later calls by its bits."""
    results, *later = evaluated
    worst = oracle.Verdict(0.0, 0.0)
    for name, result in results.items():
        reference, truth, own = standards[name]
        verdict = oracle.judge(result, reference, truth, own)
        message = verdict.message
        if not message and claim.implementation.deterministic:
            differing = [number for number, again in enumerate(later, 2) if not same_bits(result, again[name])]
            message = f"call {differing[0]} on the same arguments differs from the first" if differing else ""
        message = message or unpromised_strides(claim, name, result)
        if message:
            return claim.proof(False, verdict.error, verdict.bound, f"{name}: {message}")
        if verdict.error * worst.bound >= worst.error * verdict.bound:
            worst = verdict
    silent = {name: reason for name in results if (reason := oracle.silent(*standards[name][:2]))}
    said = ", ".join(f"{name}, {reason}" for name, reason in silent.items())
    if len(silent) == len(results):
        return claim.proof(None, message=f"{SAYS_NOTHING}: {said}")
    return claim.proof(True, worst.error, worst.bound, f"{SAYS_NOTHING} of {said}" if said else "")


def evaluations(claim: Claim) -> Iterator[Results]:
    """The results of each call in turn, each on memory of its own; what earlier ones were given is overwritten.

    On a CPU, what is not initialised is NaN in one call and zero in the next.
    """
    evaluate = EVALUATE[claim.direction]
    kept = []  # so that no later call is given the same addresses
    for number in range(claim.calls):
        arguments = claim.arguments()
        with workspaces_left_as_zeros(), poisoned_memory(), guarded_memory(claim.device, zeros=number % 2 > 0):
            results = evaluate(implementation_of(claim), claim.operator, arguments, claim.variant, watched=True)
        kept.append(arguments)
        handed_on = {result.untyped_storage().data_ptr() for result in results.values()}
        for tensor in (value for value in arguments.values() if isinstance(value, Tensor)):
            if tensor.untyped_storage().data_ptr() not in handed_on:
                whole_memory(tensor).fill_(255)  # NaN, and -1
        yield results


def unpromised_strides(claim: Claim, name: str, result: Tensor) -> str:
    """What is wrong with how an output lies in memory: it is contiguous, or lies as the definition's own does."""
    if claim.direction != "forward" or result.is_contiguous() or not result.numel():
        return ""
    definitions = EVALUATE["forward"](claim.operator.definition, claim.operator, claim.arguments())[name]
    strides_that_count = lambda t: [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]
    if strides_that_count(result) == strides_that_count(definitions):
        return ""
    return f"strides {result.stride()}, neither contiguous nor the definition's {definitions.stride()}"


def prove_alone(claim: Claim) -> Proof:
    """Whether every row alone has the bits that it has among the others."""
    rows = invariance.rows_of_case(claim.operator, claim.case, claim.dtype, claim.device)
    if rows is None:
        return claim.proof(None, message="its rows are not independent of each other")
    if claim.direction == "backward" and not rows.has_gradients:
        return claim.proof(None, message="none of its gradients has rows")
    with poisoned_memory(), batch_invariant():
        message = invariance.difference(implementation_of(claim), claim.operator, rows, claim.direction)
    return claim.proof(not message, message=message)


def check_gradient(claim: Claim) -> Proof:
    """Finite differences of the forward against the backward, in float64 on small arguments."""
    arguments = claim.arguments()
    results = as_tuple(claim.operator.definition(**arguments))
    if any(result.is_floating_point() and not result.isfinite().all() for result in results):
        return claim.proof(None, message=f"{SAYS_NOTHING}: there are no differences of what is not finite")
    # An argument that the definition detaches is a constant, and finite differences would not see that.
    named = differentiable_arguments(claim.operator, arguments)
    leaves = {name: leaf for name, leaf in float_leaves(claim.operator, arguments).items() if name in named}
    function = implementation_of(claim)
    with guarded_memory(claim.device):
        torch.autograd.gradcheck(
            lambda *tensors: function(**arguments | dict(zip(leaves, tensors, strict=True))),
            tuple(leaves.values()),
            fast_mode=True,
            nondet_tol=0.0 if claim.implementation.deterministic else math.inf,
        )
    return claim.proof(True)


def implementation_of(claim: Claim) -> Callable:
    """The operator on the claimed backend; for the definition, whose forward is the oracle, its gradient formula."""
    operator, name = claim.operator, claim.implementation.backend
    if name == "torch":
        return as_declared(operator)
    if claim.variant == WITHOUT_EXTRAS:
        return without_extras(claim.implementation)
    if claim.config:
        name = f"{name}:{claim.config}"

    def call(**arguments: Any) -> Any:
        with backend("", **{operator.name: name}):
            return operator(**arguments)

    return call


def without_extras(implementation: Implementation) -> Callable:
    """An implementation with the backward that is given nothing but what the operator keeps."""

    def call(**arguments: Any) -> Any:
        config = configuration(implementation, arguments)
        forward = functools.partial(implementation.forward, **({} if config is None else {"config": config}))
        return differentiable(implementation, None, forward, config)(*arguments.values())

    return call


def chosen_backends(operators: Iterable[Operator], device: torch.device, name: str | None) -> dict[str, str]:
    """By operator, the only backend to prove: the named one, or the environment's choice. It must exist and run here."""
    asked = {operator: name or chosen(operator.name) for operator in operators}
    explicit = {operator: choice for operator, choice in asked.items() if choice != AUTO}
    for operator, choice in explicit.items():
        with backend("", **{operator.name: choice}):
            refuse_what_takes_nothing(operator, device)
    return {operator.name: choice for operator, choice in explicit.items()}


def refuse_what_takes_nothing(operator: Operator, device: torch.device) -> None:
    """Raise what the chosen backend says to the first case, unless it takes another, be it in half precision."""
    refused: BackendError | None = None
    for case, dtype in itertools.product(operator.cases, (torch.float32, torch.bfloat16, torch.float16)):
        try:
            if case.kind != "bench":
                operator.resolve(operator.bind(**case.build(Make(dtype, device))))
                return
        except BackendError as reason:
            refused = refused or reason
    if refused is not None:
        raise refused


def render_proofs(proofs: list[Proof], device: torch.device) -> Group:
    """A line per operator and backend, then every refutation by name, then what could not be tried and why."""
    table = Table(
        "operator", "backend", "proved", "wrong", "says nothing", "not tried", "worst error / bound",
        title=f"Verification on {device}",
    )  # fmt: skip
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
            str(sum(p.says_nothing for p in mine)),
            str(sum(p.ok is None and not p.says_nothing for p in mine)),
            f"{worst:.2f}",
        )
    untried_proofs = [p for p in proofs if p.ok is None and not p.says_nothing and p.backend != "torch"]
    reasons = Counter((p.op, p.backend, p.message) for p in untried_proofs)
    untried = [
        f"[dim]not tried: {op} {name}, {count}×: {escape(message)}[/dim]"
        for (op, name, message), count in reasons.items()
    ]
    return Group(table, *refutations(proofs), *untried)
