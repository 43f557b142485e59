"""Evaluating an operator for a proof: its results or its gradients, by the definition or by an implementation.

The definition's results in the dtype under test and in float64 are the standards that every implementation is held to.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.autograd import gradient_of_definition
from tilestack.contract.cases import Case, Make
from tilestack.contract.operator import Operator, as_tuple
from tilestack.lab.proof import oracle, variants
from tilestack.lab.proof.memory_guards import unchanged

REDRAWS = 16  # more draws of arguments, of which the definition may get one exact by luck
NUDGES = 8  # more roundings of the same arguments
LARGE = 1 << 17  # elements of a result that are enough in one draw

Results = dict[str, Tensor]
Standard = tuple[Tensor, Tensor, oracle.Own]  # the definition's result in the dtype, the truth, the definition's error


def arguments_of(
    operator: Operator, case: Case, variant: str, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> dict[str, Any]:
    built = operator.bind(**case.build(Make(dtype, device, seed)))
    return variants.vary(built, variant, operator.mutates)


def tensors_to_read(operator: Operator, arguments: dict[str, Any]) -> dict[str, Tensor]:
    written = operator.mutates
    return {name: t for name, t in arguments.items() if isinstance(t, Tensor) and name not in written}


def float_leaves(operator: Operator, arguments: dict[str, Any]) -> dict[str, Tensor]:
    """The floating tensors among the arguments, as leaves whose gradient can be asked for."""
    read = tensors_to_read(operator, arguments)
    return {name: t.detach().requires_grad_() for name, t in read.items() if t.is_floating_point()}


def forward_of(
    function: Callable, operator: Operator, arguments: dict[str, Any], variant: str = "plain", watched: bool = False
) -> Results:
    """Every result by name, and what became of the arguments that are written; `watched`, nothing else may be."""
    read = tensors_to_read(operator, arguments) if watched else {}
    with torch.no_grad(), unchanged(read.items()):
        results = dict(zip(operator.outputs, as_tuple(function(**arguments)), strict=True))
    written = [name for name in operator.mutates if arguments[name] is not None]
    return results | {f"{name} afterwards": arguments[name] for name in written}


def gradients_of(
    function: Callable, operator: Operator, arguments: dict[str, Any], variant: str = "plain", watched: bool = False
) -> Results:
    """The gradient of every floating tensor argument, for a fixed random gradient arriving at each output."""
    leaves = float_leaves(operator, arguments)
    out = [t for t in as_tuple(function(**arguments | leaves)) if t.is_floating_point()]
    make = Make(torch.float16, out[0].device, seed=1)  # values that every dtype holds exactly
    drawn = [torch.empty_like(t).copy_(make.normal(*t.shape)) for t in out]  # in memory as the output is
    arriving = variants.vary_gradients(drawn, variant, sum(isinstance(value, Tensor) for value in arguments.values()))
    read = [*tensors_to_read(operator, arguments).items(), *(("a gradient that arrives", t) for t in arriving)]
    with unchanged(read if watched else ()):
        found = torch.autograd.grad(out, list(leaves.values()), arriving, allow_unused=True)
    return {
        f"gradient of {name}": torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }


EVALUATE: dict[str, Callable[..., Results]] = dict(forward=forward_of, backward=gradients_of)


def compute_standards(
    operator: Operator,
    case: Case,
    values: str,
    dtype: torch.dtype,
    direction: str,
    device: torch.device,
    many_draws: bool = False,
) -> dict[str, Standard]:
    """By name of an output or gradient: the definition's result in the dtype, the truth, and the definition's own error.

    The definition may be exact by luck, so its error is the worst of several draws where `many_draws` are asked for.
    """
    evaluate = EVALUATE[direction]
    declared = as_declared(operator)

    def draw(variant: str, seed: int, nudge: int) -> tuple[Results, Results]:
        arguments = arguments_of(operator, case, variant, dtype, device, seed)
        if nudge:
            arguments = variants.nudged_arguments(arguments, nudge)
        exact = {name: in_float64(value) if isinstance(value, Tensor) else value for name, value in arguments.items()}
        return (
            evaluate(declared, operator, arguments, variant),
            evaluate(operator.definition, operator, exact, variant),
        )

    reference, truth = draw(values, 0, 0)
    own = {name: [oracle.own_error(reference[name], truth[name])] for name in reference}
    for further in further_draws(values, truth.values()) if many_draws else ():
        another, another_truth = draw(*further)
        for name in own:
            own[name].append(oracle.own_error(another[name], another_truth[name]))
    return {name: (reference[name], truth[name], worst_of(own[name])) for name in reference}


def further_draws(values: str, truths: Iterable[Tensor]) -> list[tuple[str, int, int]]:
    """What else the definition's error may be taken from, by variant, seed and nudge: where no result is large, other
    arguments and these rounded otherwise; and the unvaried ones where these are varied.

    Of large values, a few rows may be the hard ones (two scores a rounding apart), and other arguments have others.
    """
    sizes = [truth.numel() for truth in truths if truth.is_floating_point()]
    if not sizes:
        return []
    again = [("plain", 0, 0)] if values != "plain" else []
    if max(sizes) > LARGE:
        return again
    redrawn = [(values, seed, 0) for seed in range(1, 1 + REDRAWS)]
    return [*redrawn, *((values, 0, nudge) for nudge in range(1, 1 + NUDGES)), *again]


def in_float64(x: Tensor) -> Tensor:
    """A copy, since an operator may write its arguments, in float64 where x is floating."""
    return x.to(torch.float64 if x.is_floating_point() else x.dtype, copy=True)


standards_of = functools.lru_cache(maxsize=2)(compute_standards)


def worst_of(errors: list[oracle.Own]) -> oracle.Own:
    worst = tuple(map(max, zip(*errors, strict=True)))
    return worst[0], worst[1], worst[2], worst[3]


def as_declared(operator: Operator) -> Callable:
    """The definition with the gradient formula that goes with it, where there is one."""
    if operator.gradient is None:
        return operator.definition
    return lambda **arguments: DeclaredGradient.apply(operator, *arguments.values())


class DeclaredGradient(torch.autograd.Function):
    """The definition with its declared gradient formula in place of the derived one."""

    @staticmethod
    def forward(ctx, operator, *values):
        out = operator.definition(*values)
        ctx.operator, ctx.values, ctx.out = operator, values, out
        return out

    @staticmethod
    def backward(ctx, *arriving):
        operator = ctx.operator
        available = dict(zip(operator.parameters, ctx.values, strict=True)) | dict(
            zip(operator.outputs, as_tuple(ctx.out), strict=True)
        )
        available |= dict(zip(operator.grads, arriving, strict=True))
        available["needs"] = tuple(available[name] is not None for name in operator.tensors)
        found = dict(zip(operator.tensors, gradient_of_definition(operator, available), strict=True))
        return None, *(found.get(name) for name in operator.parameters)


def differentiable_arguments(operator: Operator, arguments: dict[str, Any]) -> list[str]:
    """The arguments that a gradient of the definition reaches."""
    leaves = float_leaves(operator, arguments)
    out = [t for t in as_tuple(operator.definition(**arguments | leaves)) if t.requires_grad]
    if not out:
        return []
    found = torch.autograd.grad(out, list(leaves.values()), [torch.ones_like(t) for t in out], allow_unused=True)
    return [name for name, gradient in zip(leaves, found, strict=True) if gradient is not None]
