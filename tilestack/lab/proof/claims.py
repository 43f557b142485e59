"""What is claimed of implementations: every operator × backend × case × variant × dtype × direction in the registry, each a
`Claim`, which becomes a `Proof` when it is tried (verify.py).
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilestack.contract.backends import AUTO, BackendError, backend, chosen
from tilestack.contract.cases import Case, Make
from tilestack.contract.implementation import Implementation
from tilestack.contract.named import parameters_of
from tilestack.contract.operator import Operator
from tilestack.lab.labels import dtype_name
from tilestack.lab.proof import invariance, variants
from tilestack.lab.proof.evaluate import Standard, arguments_of

GRADCHECKED = 1 << 12  # elements beyond which gradcheck would take too long
CALLS_ON_GPU = 4  # of one signature: the third is the first that a repetition may answer
SAYS_NOTHING = "says nothing"
OF_CONFIGS = ("plain", "strided")  # in which every configuration is tried, the first in all others too
WITHOUT_EXTRAS = "without extras"  # the backward that gets none, which is what torch.ops and some compiled graphs run
HANDING_ON = "where a gradient is wanted"  # a forward with extras, which is another than the one without


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
            dtype_name(self.dtype),
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

    @property
    def hands_on(self) -> bool:
        """Whether the forward that comes before this backward is another than the one which claims of forwards try."""
        return self.direction == "backward" and self.variant != WITHOUT_EXTRAS and bool(self.implementation.extras)

    def standards(self, find: Callable[..., dict[str, Standard]], many_draws: bool = False) -> dict[str, Standard]:
        """What each result is held to; before a backward also those of a forward that hands something on."""
        found = lambda direction: find(
            self.operator, self.case, self.values, self.dtype, direction, self.device, many_draws
        )
        outputs = found("forward") if self.hands_on else {}
        return found(self.direction) | {f"{name} {HANDING_ON}": standard for name, standard in outputs.items()}

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
