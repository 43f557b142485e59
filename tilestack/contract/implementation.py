"""One way to run an operator: its forward and backward, their limits, and what they promise."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilestack.contract.backends import AUTO, usable, wants_invariance
from tilestack.contract.named import (
    Reason,
    answer_of,
    call_named,
    parameters_of,
    refuse_bare_dtypes,
    refuse_unknown,
    refuse_words,
)

if TYPE_CHECKING:
    from tilestack.contract.operator import Operator

# Of a function and the way to put another in its place, one that runs calls of a single signature; see `implements`.
Repeat = Callable[..., Callable]
Dtypes = Sequence[torch.dtype] | Mapping[str, Sequence[torch.dtype]]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
AUTOGRAD = "autograd"  # the `backward` of an implementation that PyTorch differentiates by itself


@dataclass(frozen=True)
class Extras:
    """A second forward and backward, for calls that want a gradient: the one hands extras to the other.

    `forward(*arguments)` answers the result, then the extras (None for one that is not made), the result alone where the
    backward names none and only keeps less; where it names `needs`, it
    gets that too. `backward` names what any backward may, and the extras by names of their own, in that order; of the
    rest only what it names is kept. A mask a forward has at hand, sums it need not make again, or, for a loss, the
    gradients themselves, which the backward then only scales.
    """

    forward: Callable
    backward: Callable
    when: Callable[..., bool]  # names arguments, as that of `implements`; where False, the ordinary pair does the work
    fake: Callable | None = (
        None  # names arguments and `needs`; the extras' shapes for a compiler, which else does without
    )
    overwrites: tuple[str, ...] = ()  # extras the backward writes over; it gets copies where the graph is kept

    def names(self, op: "Operator") -> list[str]:
        """The extras, by the names the backward has for them."""
        known = *op.grads, *op.parameters, *op.outputs, "needs", "config"
        return [name for name in parameters_of(self.backward) if name not in known]

    @property
    def asks_needs(self) -> bool:
        return "needs" in parameters_of(self.forward)


@dataclass
class Implementation:
    """One way to run an operator: a forward, a backward (a function, AUTOGRAD or none) and the limits of both."""

    operator: "Operator"
    backend: str
    forward: Callable
    backward: Callable | str | None
    when: Callable[..., Reason] | None = None
    dtypes: Dtypes = FLOATS
    extras: Extras | None = None
    repeat: Repeat | None = None
    deterministic: bool = True  # whether it gives the same bits in every run
    invariant: bool = False  # whether row i alone has the bits it has in any batch
    configs: Mapping[str, Any] = field(
        default_factory=dict
    )  # launch configurations by name, the first when none is known
    functions: dict[tuple, Any] = field(
        default_factory=dict
    )  # what autograd.py made, by extras or none and C++ or Python

    def refuses(self, arguments: dict[str, Any], device: torch.device, with_gradient: bool = False) -> str:
        """Why this implementation cannot run the call; empty when it can. Arguments may lack what a gradient drops."""
        if (reason := usable(self.backend, device)) is not True:
            return str(reason)
        if wants_invariance() and not self.invariant:
            return "it is not batch-invariant"
        for name in self.operator.tensors:
            value = arguments.get(name)
            if isinstance(value, Tensor) and (accepted := self.accepted(name, value)) and value.dtype not in accepted:
                return f"{name} is {short(value.dtype)}, it takes {', '.join(map(short, accepted))}"
        if with_gradient and self.backward is None:
            return "it has no backward; call it under torch.no_grad()"
        if self.when is not None and (reason := answer_of(self.when, arguments)) is not True:
            return str(reason) if reason else "its `when` refuses these arguments"
        return ""

    def accepted(self, name: str, value: Tensor) -> Sequence[torch.dtype]:
        """The dtypes an argument may have here; none where any will do."""
        if isinstance(self.dtypes, Mapping):
            return self.dtypes.get(name, ())
        return self.dtypes if value.is_floating_point() or value.is_complex() else ()

    def extras_of(self, arguments: dict[str, Any]) -> Extras | None:
        """How a call that wants gradients hands extras to its backward, None where it does not."""
        return self.extras if self.extras is not None and call_named(self.extras.when, arguments) else None

    @property
    def own_backward(self) -> Callable:
        assert callable(self.backward), f"{self.operator.name} on {self.backend} has no backward function"
        return self.backward

    @property
    def differentiates_itself(self) -> bool:
        return self.backward == AUTOGRAD


def refuse_other_arguments(where: str, forward: Callable, parameters: Sequence[str], **config: Any) -> None:
    """Raise when a forward cannot be called with an operator's arguments."""
    try:
        signature = inspect.signature(forward)
    except ValueError:  # written in C
        return
    try:
        signature.bind(*parameters, **config)
    except TypeError as error:
        asked = f"{', '.join(parameters)}{' by position, and config by name' if config else ' by position'}"
        raise TypeError(
            f"the forward of {where} takes {signature}, but is given {asked}: {error}"
            + ("" if config else "; a `config` comes with `configs`")
        ) from None


def short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def implements(
    op: "Operator",
    *,
    backend: str,
    backward: Callable | str | None = None,
    when: Callable[..., Reason] | None = None,
    dtypes: Dtypes = FLOATS,
    extras: Extras | None = None,
    repeat: Repeat | None = None,
    deterministic: bool = True,
    invariant: bool = False,
    configs: Mapping[str, Any] | None = None,
) -> Callable[[Callable], Callable]:
    """Register a function as an operator's implementation on a backend, from inside or outside this package.

    `backward` is a function (see `contract/operator.py`), AUTOGRAD when the forward is made of differentiable PyTorch
    calls, or None when there is none. `when` answers True or the reason why not, looking only at metadata and options.
    `dtypes` are those its floating tensors may have, or by argument those of each. `extras` are a second forward and
    backward that hand on something the operator's gradient does not know. `repeat` is `straight_line` where all that
    forward and backward do follows from the signature: allocate, view and `launch`. What is not `deterministic`, the same
    bits in every run, `auto` leaves alone where PyTorch is to use deterministic algorithms; what is not `invariant`, the
    same bits for a row whatever stands beside it, where those are wanted. `configs` are launch configurations by name: the forward, and a backward that names it, get the one that
    measured fastest for the call's `tuning_key` as `config`.
    """

    if backend in (AUTO, "torch") or not backend.isidentifier():
        raise ValueError(f"a backend of your own needs a name of its own, not {backend!r}")

    if not hasattr(op, "implementations"):
        raise TypeError(f"implements takes an operator, such as ops.softmax, not {op!r}")
    where = f"{op.name} on {backend}"
    if not (backward is None or backward == AUTOGRAD or callable(backward)):
        raise TypeError(f"the backward of {where} is a function, AUTOGRAD or None, not {backward!r}")
    if configs is not None and not (isinstance(configs, Mapping) and configs):
        raise TypeError(f"the configs of {where} map names to configurations, the first being the default: {configs!r}")
    if wrong := [name for name in configs or () if set(name) & set(",:=")]:
        raise TypeError(f"the config {wrong[0]!r} of {where} cannot be chosen by name: no comma, colon or = in it")
    refuse_bare_dtypes(where, dtypes)
    if isinstance(dtypes, Mapping) and (unknown := [n for n in dtypes if n not in (*op.tensors, *op.lists)]):
        raise TypeError(f"the dtypes of {where} name {', '.join(unknown)}; its tensors are {', '.join(op.tensors)}")
    if extras is not None:
        refuse_words(where, overwrites=extras.overwrites)
        refuse_unknown(f"the extras' when of {where}", extras.when, op.parameters)
        refuse_unknown(f"the extras' fake of {where}", extras.fake, [*op.parameters, "needs"])
        if unknown := [name for name in extras.overwrites if name not in extras.names(op)]:
            raise TypeError(f"the extras of {where} overwrite {', '.join(unknown)}; they are {extras.names(op)}")

    def register(forward: Callable) -> Callable:
        refuse_other_arguments(where, forward, op.parameters, **({"config": None} if configs else {}))
        options = [name for name in op.parameters if name not in op.tensors]
        kept = list(dict.fromkeys([*op.grads, *op.saved, *options, "needs"]))
        named = [*kept, "config"] if configs else kept
        refuse_unknown(f"the backward of {op.name} on {backend}", backward if callable(backward) else None, named)
        # With a backward of its own, `when` is asked again where only what the gradient keeps is at hand.
        refuse_unknown(f"the when of {op.name} on {backend}", when, kept if callable(backward) else op.parameters)
        op.implementations[backend] = Implementation(
            op,
            backend,
            forward,
            backward,
            when,
            dtypes,
            extras,
            repeat,
            deterministic,
            invariant,
            configs or {},
        )
        op.plans.clear()
        return forward

    return register
