"""Proving what is claimed of implementations (claims.py).

Forward and every gradient go through the public operator with the backend chosen, as a user would call it, several times
over and each time on other memory: the bits must be the same, for from some call of a signature on, a GPU is handed a
repetition of what was noted earlier. Outputs are filled with NaN before a kernel writes them, so that an element it
leaves out is seen; inputs, and what lies around inputs and outputs, must stay as they were. In float64, gradcheck compares
the backward with finite differences of the forward.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from rich.console import Group
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from tilestack.contract.autograd import differentiable
from tilestack.contract.backends import backend, batch_invariant
from tilestack.contract.implementation import Implementation
from tilestack.contract.operator import Operator, as_tuple
from tilestack.contract.registry import configuration
from tilestack.lab.proof import invariance, oracle
from tilestack.lab.proof.claims import HANDING_ON, SAYS_NOTHING, WITHOUT_EXTRAS, Claim, Proof
from tilestack.lab.proof.evaluate import (
    EVALUATE,
    Results,
    Standard,
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
    claimed = [name for name in results if not name.endswith(HANDING_ON)]
    silent = {name: reason for name in claimed if (reason := oracle.silent(*standards[name][:2]))}
    said = ", ".join(f"{name}, {reason}" for name, reason in silent.items())
    if len(silent) == len(claimed):
        return claim.proof(None, message=f"{SAYS_NOTHING}: {said}")
    return claim.proof(True, worst.error, worst.bound, f"{SAYS_NOTHING} of {said}" if said else "")


def evaluations(claim: Claim) -> Iterator[Results]:
    """The results of each call in turn, each on memory of its own; what earlier ones were given is overwritten.

    On a CPU, what is not initialised is NaN in one call and zero in the next.
    """
    evaluate = EVALUATE[claim.direction]
    kept = []  # so that no later call is given the same addresses
    for number in range(claim.calls):
        arguments, outputs = claim.arguments(), Results()
        function = noting(implementation_of(claim), claim.operator, outputs)
        with workspaces_left_as_zeros(), poisoned_memory(), guarded_memory(claim.device, zeros=number % 2 > 0):
            results = evaluate(function, claim.operator, arguments, claim.variant, watched=True)
        if claim.hands_on:
            results |= outputs
        kept.append(arguments)
        handed_on = {result.untyped_storage().data_ptr() for result in results.values()}
        for tensor in (value for value in arguments.values() if isinstance(value, Tensor)):
            if tensor.untyped_storage().data_ptr() not in handed_on:
                whole_memory(tensor).fill_(255)  # NaN, and -1
        yield results


def noting(function: Callable, operator: Operator, outputs: Results) -> Callable:
    """A function that also notes its results, by the names they have where a gradient is wanted."""

    def call(**arguments: Any) -> Any:
        returned = function(**arguments)
        named = zip(operator.outputs, as_tuple(returned), strict=True)
        outputs.update({f"{name} {HANDING_ON}": result.detach() for name, result in named})
        return returned

    return call


def unpromised_strides(claim: Claim, name: str, result: Tensor) -> str:
    """What is wrong with how an output lies in memory: it is contiguous, or lies as the definition's own does."""
    is_output = claim.direction == "forward" or name.endswith(HANDING_ON)
    if not is_output or result.is_contiguous() or not result.numel():
        return ""
    named = EVALUATE["forward"](claim.operator.definition, claim.operator, claim.arguments())
    definitions = named[name.removesuffix(f" {HANDING_ON}")]
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
