"""One way to run an operator, and the special ways it may have to make a gradient."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilestack.contract.backends import usable
from tilestack.contract.named import Reason, answer_of, call_named, parameters_of

if TYPE_CHECKING:
    from tilestack.contract.operator import Operator

# Of a function and the way to put another in its place, one that runs calls of a single signature; see `implements`.
Repeat = Callable[..., Callable]

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
AUTOGRAD = "autograd"  # the `backward` of an implementation that PyTorch differentiates by itself


@dataclass(frozen=True)
class Ahead:
    """Gradients made in the forward: for a scalar result, whose gradients are fixed tensors times the scalar that arrives.

    `forward(*arguments, needs=...)` answers the result and those tensors, one or None per tensor argument; nothing else
    is kept. `scale(gradient, grad)` multiplies one of them by what arrives, in place.
    """

    forward: Callable
    scale: Callable[[Tensor, Tensor], Tensor]
    when: Callable[..., bool]  # names arguments, as that of `implements`; where False, the backward does its own work
    traced: bool  # whether also under a compiler, which scales into a new tensor


@dataclass(frozen=True)
class Keeping:
    """A way to keep something of one's own for the backward, such as a mask, made only when a gradient is wanted.

    `forward(*arguments)` answers the result, then what is made to be kept. `backward` names what any backward does, and
    what was made, in that order; of the rest only what it names is kept. Under a compiler, which knows only what the
    operator's gradient keeps, the implementation's own backward does the work.
    """

    forward: Callable
    backward: Callable
    when: Callable[..., bool]  # names arguments, as that of `implements`

    def made(self, described: "Operator") -> list[str]:
        """What is made to be kept, by the names the backward has for it."""
        known = *described.grads, *described.parameters, *described.outputs, "needs"
        return [name for name in parameters_of(self.backward) if name not in known]


@dataclass
class Implementation:
    """One way to run an operator: a forward, a backward (a function, AUTOGRAD or none) and the limits of both."""

    operator: "Operator"
    backend: str
    forward: Callable
    backward: Callable | str | None
    when: Callable[..., Reason] | None
    dtypes: tuple[torch.dtype, ...]
    ahead: Ahead | None = None
    keeping: Keeping | None = None
    repeat: Repeat | None = None
    deterministic: bool = True  # whether it gives the same bits in every run
    compiled: bool = True  # whether it is worth having under a compiler, where nothing of its own is kept

    def refuses(self, arguments: dict[str, Any], device: torch.device, with_gradient: bool = False) -> str:
        """Why this implementation cannot run the call; empty when it can. Arguments may lack what a gradient drops."""
        if (reason := usable(self.backend, device)) is not True:
            return str(reason)
        for name in self.operator.tensors:
            value = arguments.get(name)
            if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
                continue
            if value.dtype not in self.dtypes:
                return f"{name} is {str(value.dtype).removeprefix('torch.')}, it takes {', '.join(str(d).removeprefix('torch.') for d in self.dtypes)}"
        if with_gradient and self.backward is None:
            return "it has no backward; call it under torch.no_grad()"
        if self.when is not None and (reason := answer_of(self.when, arguments)) is not True:
            return str(reason) if reason else "its `when` refuses these arguments"
        return ""

    def ahead_of(self, arguments: dict[str, Any]) -> Ahead | None:
        """How a call that wants gradients has them made in the forward, None where its backward makes them."""
        return self.ahead if self.ahead is not None and call_named(self.ahead.when, arguments) else None

    def keeping_of(self, arguments: dict[str, Any]) -> Keeping | None:
        """How a call that wants gradients keeps something of its own, None where it does not."""
        return self.keeping if self.keeping is not None and call_named(self.keeping.when, arguments) else None

    @property
    def own_backward(self) -> Callable:
        assert callable(self.backward), f"{self.operator.name} on {self.backend} has no backward function"
        return self.backward

    @property
    def differentiates_itself(self) -> bool:
        return self.backward == AUTOGRAD
