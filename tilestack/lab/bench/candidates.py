"""What can be timed of an operator on its arguments: its backends and its peers in one direction, each as a `Candidate`; and
why the rest cannot.

Forward runs without gradients; backward is `torch.autograd.grad` on a kept forward, for ours and the peers alike; `both` is a
training step's forward and backward, for operators that do some of one in the other.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tilestack.contract import Operator, backend
from tilestack.contract.autograd import gradient_of_definition
from tilestack.contract.backends import family_of, interpreting, usable
from tilestack.contract.library import memory_of
from tilestack.contract.named import call_named
from tilestack.contract.operator import as_tuple
from tilestack.contract.registry import configuration
from tilestack.lab.bench.peers import LIBRARIES, Peer, is_peer, peers_of
from tilestack.lab.bench.timing import Call, Candidate


def names_of(operator: Operator, device: str) -> list[str]:
    """The backends timed unless some are asked for: on a GPU all but the definition, which is no peer and is slow; on a
    CPU those that run there but for Triton, whose interpreter is for proofs."""
    if device == "cuda":
        return [name for name in operator.implementations if name != "torch"]
    here = torch.device(device)
    return [name for name in operator.implementations if family_of(name) != "triton" and usable(name, here) is True]


def names_asked(operator: Operator, backends: Sequence[str] | None, device: str) -> list[str]:
    """The backends and peers that are compared."""
    return list(backends or [*names_of(operator, device), *(peers_of(operator) if device == "cuda" else ())])


def candidates_of(
    operator: Operator, names: Sequence[str], arguments: dict[str, Any], direction: str, *, all_told: bool
) -> tuple[dict[str, Candidate], dict[str, str]]:
    """What can be timed of those named, and why the rest cannot; of peers that is told only where all of it shall be.
    Neither is anything where a backward does nothing."""
    wanted = differentiable(operator, arguments) if direction != "forward" else []
    if direction != "forward" and not wanted:
        return {}, {}
    peers = peers_of(operator)
    candidates: dict[str, Candidate] = {}
    refused: dict[str, str] = {}
    for name in names:
        if reason := refusal(operator, name, peers, arguments, direction):
            refused |= {name: reason} if all_told or not is_peer(name) else {}
        else:
            peer = peers.get(name) or Peer(operator, functools.partial(backend, name))
            candidates[name] = candidate_of(operator, peer, arguments, wanted, direction)
    return candidates, refused


def kernel_lender(operator: Operator, name: str, arguments: dict[str, Any], direction: str) -> str:
    """Whose kernel a backend runs where the configuration of the call says so; empty where it is its own."""
    implementation = operator.implementations.get(name)
    if implementation is None:
        return ""
    config = configuration(implementation, arguments, name, with_gradient=direction != "forward")
    lender = getattr(config, "lender", None)
    return call_named(lender, {**arguments, "direction": direction}) if lender else ""


def refusal(operator: Operator, name: str, peers: dict[str, Peer], arguments: dict[str, Any], direction: str) -> str:
    """Why a backend or peer cannot be timed on these arguments; empty when it can."""
    device = operator.device_of(arguments)
    if name in LIBRARIES and device.type != "cuda":
        return f"{name} needs a GPU"
    if name in peers:
        return ""
    if name not in operator.implementations:
        return f"{operator.name} has no backend or peer {name} here"
    if family_of(name) == "triton" and device.type == "cpu" and interpreting():
        return "Triton's interpreter is for proofs; its times mean nothing"
    return operator.implementations[name].refuses(arguments, device, direction != "forward")


def differentiable(operator: Operator, arguments: dict[str, Any]) -> list[str]:
    """The arguments whose gradients are worth timing: floating-point tensors, less those whose gradient is None.

    None at all where every gradient is a view of one that arrives, as for a transpose: its backward runs nothing. Nor
    has an operator a gradient that writes into its arguments.
    """
    if operator.mutates:
        return []
    floats = {name: isinstance(t := arguments[name], Tensor) and t.is_floating_point() for name in operator.tensors}
    if operator.gradient is None:
        return [name for name, is_float in floats.items() if is_float]
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
    outputs = as_tuple(operator.fake(**meta))
    arriving = [torch.empty_like(output) for output in outputs]
    available = meta | dict(zip(operator.outputs, outputs, strict=True)) | {"needs": tuple(floats.values())}
    found = gradient_of_definition(operator, available | dict(zip(operator.grads, arriving, strict=True)))
    gradients = {name: g for name, g in zip(floats, found, strict=True) if floats[name] and g is not None}
    passed_on = all(any(memory_of(gradient) == memory_of(grad) for grad in arriving) for gradient in gradients.values())
    return [] if passed_on else list(gradients)


def candidate_of(
    operator: Operator, peer: Peer, arguments: dict[str, Any], wanted: Sequence[str], direction: str
) -> Candidate:
    """A way to run an operator, as something to time in one direction."""
    run = peer.run

    @contextmanager
    def scope() -> Iterator[None]:
        with peer.scope(), torch.set_grad_enabled(direction != "forward"):
            yield

    def copy() -> dict[str, Any]:
        copied = {name: value.clone() if isinstance(value, Tensor) else value for name, value in arguments.items()}
        for name in wanted:
            copied[name].requires_grad_()
        return copied

    def prepare_one() -> Call:
        copied = copy()
        values = peer.setup(*copied.values())
        if direction == "forward":
            return functools.partial(run, *values)
        inputs = [copied[name] for name in wanted]
        outputs = differentiable_outputs(run(*values))
        # At a loss a one arrives, as `loss.backward()` sends it.
        arriving = [torch.randn_like(output) if output.ndim else torch.ones_like(output) for output in outputs]
        if direction == "backward":
            return functools.partial(
                torch.autograd.grad, outputs, inputs, arriving, retain_graph=True, allow_unused=True
            )
        return lambda: torch.autograd.grad(differentiable_outputs(run(*values)), inputs, arriving, allow_unused=True)

    return Candidate(lambda copies: [prepare_one() for _ in range(copies)], scope)


def differentiable_outputs(out: Any) -> list[Tensor]:
    return [output for output in as_tuple(out) if isinstance(output, Tensor) and output.requires_grad]
