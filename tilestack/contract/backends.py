"""Which backend runs an operator: the choices people make, and what each backend needs to run at all.

A choice is a default and exceptions by operator, written `triton` or `triton,softmax=torch`; `triton:tall` is triton in
its configuration `tall`, and `triton_naive` a variant of it, a backend that needs of a device what `triton` does. The innermost
`with backend(...)` wins over TILESTACK_BACKEND, that over `configure_backend(...)` (recipes use it), that over `auto`.
"""

import contextvars
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

ENVIRONMENT_VARIABLE = "TILESTACK_BACKEND"
CHECK_VARIABLE = "TILESTACK_CHECK_VALUES"  # 1 or 0; see `check_values`
AUTO = "auto"


class BackendError(RuntimeError):
    """An explicitly chosen backend cannot run the call; the message says why and what would."""


class Choice(NamedTuple):
    """A default backend (None leaves it to the next layer down), exceptions by operator name, and whether results must
    be batch-invariant.

    A tuple, for it is hashed with every call's signature.
    """

    default: str | None = None
    exceptions: tuple[tuple[str, str], ...] = ()
    invariant: bool = False

    @classmethod
    def parse(cls, text: str) -> "Choice":
        if not isinstance(text, str):
            raise BackendError(f"a backend is given by its name, such as `triton`, not by {text!r}")
        default, exceptions = None, []
        for part in filter(None, (part.strip() for part in text.split(","))):
            operator, equals, backend = (piece.strip() for piece in part.partition("="))
            if not equals and default is None:
                default = operator
            elif equals and operator and backend:
                exceptions.append((operator, backend))
            else:
                raise BackendError(f"cannot read the backend choice {text!r}: write `triton` or `triton,softmax=torch`")
        return cls(default, tuple(exceptions))

    def over(self, outer: "Choice") -> "Choice":
        """This choice laid over an outer one: a default replaces its backends, exceptions alone add to them."""
        invariant = self.invariant or outer.invariant
        if self.default is not None:
            return self._replace(invariant=invariant)
        return Choice(outer.default, tuple((dict(outer.exceptions) | dict(self.exceptions)).items()), invariant)

    def checked(self) -> "Choice":
        """The choice itself, or an error when an exception is for an operator that does not exist."""
        from tilestack.contract.registry import refuse_unknown_operator

        for operator, _ in self.exceptions:
            refuse_unknown_operator(operator)
        return self

    def of(self, operator: str) -> str | None:
        return dict(self.exceptions).get(operator, self.default)


_entered: contextvars.ContextVar[Choice | None] = contextvars.ContextVar("tilestack_backend", default=None)
entered = _entered.get  # the choice of the innermost `with backend(...)`; part of every call's signature
_configured = Choice()


def with_choice_of_now(function: Callable) -> Callable:
    """A function that runs under the choice in force now, whenever and in whichever thread it is called, and whatever has
    been configured since."""
    choice, configured = entered(), _configured

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        of_then = (choice or Choice()).over(_environment().over(configured.over(Choice(AUTO))))
        token = _entered.set(choice if configured == _configured else of_then)
        try:
            return function(*args, **kwargs)
        finally:
            _entered.reset(token)

    return run


def wants_invariance() -> bool:
    """Whether row i must have the bits it has in any batch; see `batch_invariant`."""
    choice = entered()
    return choice is not None and choice.invariant


@functools.cache
def _environment() -> Choice:
    return Choice.parse(os.environ.get(ENVIRONMENT_VARIABLE, "")).checked()


def chosen(operator: str) -> str:
    """The backend the layers of choice agree on for an operator, `auto` when none speaks."""
    for choice in (entered(), _environment(), _configured):
        if choice is not None and (name := choice.of(operator)) is not None:
            return name
    return AUTO


@contextmanager
def backend(choice: str = "", **exceptions: str) -> Iterator[None]:
    """Run the operators inside on a backend: `with backend("triton")`, `with backend("triton", softmax="torch")`.

    What runs inside keeps the choice for its gradient and for recomputation in the backward, whenever that comes. A
    function compiled by torch.compile keeps the choice it was traced under.
    """
    parsed = Choice.parse(choice)
    with _inside(Choice(parsed.default, (*parsed.exceptions, *exceptions.items())).checked()):
        yield


@contextmanager
def batch_invariant() -> Iterator[None]:
    """Run the operators inside so that a row's bits do not depend on the rows beside it: alone, in any batch, in any place.

    `auto` keeps to implementations that promise it; one chosen by name that does not is an error.
    """
    with _inside(Choice(invariant=True)):
        yield


@contextmanager
def _inside(choice: Choice) -> Iterator[None]:
    token = _entered.set(choice.over(entered() or Choice()))
    try:
        yield
    finally:
        _entered.reset(token)


def configure_backend(choice: str) -> None:
    """Set the process-wide choice of a recipe or configuration, below the environment and `with backend(...)`."""
    from tilestack.contract.registry import forget_plans

    global _configured
    _configured = Choice.parse(choice).checked()
    forget_plans()


_needs: dict[str, Callable[[torch.device], bool | str]] = {}


def register_backend(name: str, needs: Callable[[torch.device], bool | str]) -> None:
    """Say what a backend needs of a device: `needs(device)` answers True, or the reason why it cannot run there."""
    from tilestack.contract.registry import forget_plans

    _needs[name] = needs
    forget_plans()


def usable(name: str, device: torch.device) -> bool | str:
    """True when a backend can run on a device, otherwise the reason. A backend nobody described runs anywhere."""
    needs = _needs.get(name) or _needs.get(family_of(name))
    return needs(device) if needs else True


def family_of(name: str) -> str:
    """The backend whose needs a variant shares: `triton` for `triton_naive`, and for itself."""
    return name.partition("_")[0]


_values_checked: bool | None = None


def check_values(on: bool | None) -> None:
    """Whether operators look at the values of what they index with, and raise where PyTorch would: True in every call,
    which waits for the device; False never; None on CPUs, but not where kernels are interpreted to see what they do."""
    from tilestack.contract.registry import forget_plans

    global _values_checked
    _values_checked = on
    forget_plans()


def checks_values(device: torch.device) -> bool:
    wish = _values_checked
    if wish is None and (written := os.environ.get(CHECK_VARIABLE, "")):
        wish = written != "0"
    return (device.type == "cpu" and not interpreting()) if wish is None else wish


def interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def _triton_needs(device: torch.device) -> bool | str:
    return (
        device.type == "cuda"
        or (device.type == "cpu" and interpreting())
        or f"Triton kernels need a CUDA tensor, or TRITON_INTERPRET=1 for CPU tensors, not one on {device.type}"
    )


def _gluon_needs(device: torch.device) -> bool | str:
    if device.type != "cuda":
        return f"Gluon kernels need a CUDA tensor, not one on {device.type}"
    return (
        torch.cuda.get_device_capability(device) == (9, 0)
        or "Gluon kernels are written for compute capability 9.0 (H100, H200)"
    )


_needs.update(triton=_triton_needs, gluon=_gluon_needs)
