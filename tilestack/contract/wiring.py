"""What a gradient keeps of a call and gets back: worked out once for an implementation, by names.

wiring_of(implementation, extras) ──▶ autograd.py writes a torch.autograd.Function of it, in Python
                                  ──▶ native/node.cpp follows it by places, where that is built
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tilestack.contract.implementation import Extras, Implementation
from tilestack.contract.named import parameters_of


@dataclass(frozen=True)
class Wiring:
    """The names of an operator's arguments, results and gradients, and what becomes of them."""

    name: str
    parameters: list[str]
    tensors: list[str]
    outputs: list[str]
    grads: list[str]  # that arrive, one for each output
    extras: list[str]  # that the forward hands on behind its result
    kept: list[str]  # tensors that are kept: arguments, outputs and extras
    options: list[str]  # other arguments that are
    named: list[str]  # what the backward names, in its order: of grads, kept, options, and `needs`
    overwritten: list[str]  # extras that the backward writes over
    unlinked: list[str]  # tensors whose second derivative could not be refused later
    asks_needs: bool  # whether the forward names `needs` too

    def source_of_kept(self, name: str) -> tuple[str, int]:
        """From where a kept tensor is taken: an argument, a result or an extra, and which."""
        places = dict(argument=self.parameters, result=self.outputs, extra=self.extras)
        return next((kind, names.index(name)) for kind, names in places.items() if name in names)

    def source_of_named(self, name: str) -> tuple[str, int]:
        """From where the backward gets what it names."""
        if name == "needs":
            return "needs", 0
        places = dict(grad=self.grads, kept=self.kept, option=self.options)
        return next((kind, names.index(name)) for kind, names in places.items() if name in names)

    def in_places(self, native: ModuleType, once: Callable, miscounted: Callable) -> Any:
        """The same for C++, which knows no names."""
        return native.Wiring(
            name=self.name,
            parameters=len(self.parameters),
            results=len(self.outputs),
            extras=len(self.extras),
            tensors=[self.parameters.index(name) for name in self.tensors],
            options=[self.parameters.index(name) for name in self.options],
            kept=[self.source_of_kept(name) for name in self.kept],
            named=[self.source_of_named(name) for name in self.named],
            overwritten=[self.kept.index(name) for name in self.overwritten],
            asks_needs=self.asks_needs,
            once=once,
            miscounted=miscounted,
        )


def wiring_of(implementation: Implementation, extras: Extras | None) -> Wiring:
    op = implementation.operator
    backward = extras.backward if extras else implementation.own_backward
    named = [name for name in parameters_of(backward) if name != "config"]
    handed = extras.names(op) if extras else []
    kept = [name for name in (named if extras else op.saved) if name in (*op.tensors, *op.outputs, *handed)]
    # Extras are made from arguments: of one that is not kept besides, a second derivative could not even be refused later.
    linked = not handed or any(name in kept for name in op.outputs)
    return Wiring(
        name=f"{op.name}_{implementation.backend}",
        parameters=list(op.parameters),
        tensors=list(op.tensors),
        outputs=list(op.outputs),
        grads=list(op.grads),
        extras=handed,
        kept=kept,
        options=[name for name in named if name in op.parameters and name not in op.tensors],
        named=named,
        overwritten=[name for name in handed if extras and name in extras.overwrites],
        unlinked=[name for name in op.tensors if not linked and name not in kept],
        asks_needs=extras is not None and extras.asks_needs,
    )
