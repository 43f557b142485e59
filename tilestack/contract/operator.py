"""What an operator is, declared once by its definition in plain PyTorch:

    @operator(cost=lambda x: Cost(flops=4 * x.numel()), cases=rows)
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor: ...

and an implementation replaces it for a backend:

    @implements(rms_norm, backend="triton", backward=rms_norm_backward, when=lambda x: x.shape[-1] <= 65536 or "rows ...")
    def rms_norm(x, weight, eps): ...

Functions around an operator name what they look at, and get just that: a `cost`, a `check` or a `when` names some of
the arguments; a gradient or a `backward` names `grad` (what arrives from above; `grad_<output>` where there are
several outputs), any arguments, `out` (the output) and `needs` (which tensor arguments want a gradient). Only what the
operator's gradient names is kept alive between forward and backward, and only that may a `backward` or `when` name;
what an implementation hands on besides is its own affair (`Extras`).
"""

import functools
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from tilestack.contract import registry
from tilestack.contract.call import warm_up, write_call
from tilestack.contract.cases import Case, Make
from tilestack.contract.implementation import AUTOGRAD, FLOATS, Implementation, short
from tilestack.contract.named import (
    Reason,
    answer_of,
    call_named,
    parameters_of,
    refuse_bare_dtypes,
    refuse_unknown,
    refuse_words,
)
from tilestack.contract.plan import Plans

TENSORS = (Tensor, Tensor | None, list[Tensor], Sequence[Tensor])  # what an argument made of tensors may be

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Cost:
    """The work an operator cannot avoid. Bytes default to each tensor argument read once and each output written once."""

    flops: float = 0
    backward_flops: float | None = None  # twice the forward's when silent
    read: Sequence[Tensor | None] | None = None
    write: Sequence[Tensor | None] | None = None
    backward_read: Sequence[Tensor | None] | None = None  # besides what arrives; all that is kept when silent
    backward_write: Sequence[Tensor | None] | None = None  # a gradient per floating argument when silent
    arriving: Sequence[Tensor | None] | None = None  # read of the arriving gradients; all of them when silent


class Operator(Generic[P, R]):
    """A public operator: call it like its definition; the rest of the stack reads its contract from the attributes."""

    def __init__(
        self,
        definition: Callable[P, R],
        cases: Sequence[Case],
        cost: Callable[..., Cost] | None,
        check: Callable[..., Reason] | None,
        gradient: Callable | None,
        outputs: Sequence[str] | None,
        spreads_nan: bool,
        fake: Callable | None,
        mutates: Sequence[str],
        consumes: Sequence[str],
        dtypes: Mapping[str, Sequence[torch.dtype]],
        tuning_key: Callable | None,
        check_values: Callable[..., Reason] | None,
        views: Mapping[str, str],
    ):
        self.definition = definition
        self.name = definition.__name__
        self.family = definition.__module__.rpartition(".")[2]
        self.signature = inspect.signature(definition)
        self.parameters = list(self.signature.parameters)
        self.annotations = typing.get_type_hints(definition)
        refuse_unclear(self.name, self.signature, self.annotations, outputs)
        refuse_words(self.name, outputs=outputs, mutates=mutates, consumes=consumes)
        of_type = lambda *types: [name for name in self.parameters if self.annotations[name] in types]
        self.tensors = of_type(Tensor, Tensor | None)
        self.optional = of_type(Tensor | None)
        self.lists = of_type(list[Tensor], Sequence[Tensor])
        returns = self.annotations.get("return")
        self.outputs = list(outputs if outputs is not None else () if returns in (None, type(None)) else ("out",))
        self.cases = list(cases)
        self.describe_cost = cost
        self.check = check
        self.gradient = gradient
        self.spreads_nan = spreads_nan
        self.reads_values = fake is not None
        self.fake: Callable = fake or definition
        self.mutates, self.consumes, self.dtypes = tuple(mutates), tuple(consumes), dict(dtypes)
        self.tuning_key = tuning_key
        self.check_values = check_values
        self.views = dict(views)
        self.grads = ["grad"] if len(self.outputs) == 1 else [f"grad_{name}" for name in self.outputs]
        kept = parameters_of(gradient) if gradient else self.parameters
        self.saved = [name for name in kept if name not in (*self.grads, "needs")]
        for role, names in (("mutates", self.mutates), ("consumes", self.consumes), ("dtypes", self.dtypes)):
            if unknown := [name for name in names if name not in (*self.tensors, *self.lists)]:
                raise TypeError(f"{self.name}: {role} names {', '.join(unknown)}, which is no tensor argument of it")
        taken = {"out", "backend", "config", "needs", "ctx", "self", *self.grads, *self.outputs}
        if reserved := taken & set(self.parameters):
            raise TypeError(
                f"{self.name}: an argument cannot be called {', '.join(sorted(reserved))}, which gradients, results or "
                "the call itself are called; give it another name"
            )
        refuse_bare_dtypes(self.name, dtypes)
        refuse_unknown(f"the cost of {self.name}", cost, self.parameters)
        refuse_unknown(f"the check of {self.name}", check, self.parameters)
        refuse_unknown(f"the tuning_key of {self.name}", tuning_key, self.parameters)
        refuse_unknown(f"the check_values of {self.name}", check_values, self.parameters)
        refuse_unknown(
            f"the gradient of {self.name}", gradient, [*self.grads, *self.parameters, *self.outputs, "needs"]
        )
        self.implementations: dict[str, Implementation] = {}
        self.plans = Plans()
        self.traced: Callable = definition  # until the operator is known to torch.library
        self.autocast_entry: Callable[[str], None] | None = None  # makes one of its torch.library operators lower
        self.lowered: Callable[[dict[str, Any]], dict[str, Any]] | None = None  # arguments as autocast has them
        # What calls it under autocast, of which its implementations know nothing; None where that is off for its arguments.
        self.under_autocast: Callable[[dict[str, Any]], Callable | None] = lambda arguments: None
        self.__name__, self.__doc__, self.__module__, self.__wrapped__ = (
            self.name,
            definition.__doc__,
            definition.__module__,
            definition,
        )
        self.__signature__ = self.signature

    # Written per operator by `write_call`, so that a call binds its arguments at the speed of Python.
    __call__: Callable[P, R]

    def __repr__(self) -> str:
        return f"<operator {self.name}{self.signature}, backends {', '.join(self.implementations)}>"

    def __reduce__(self):
        return registry.operator_named, (self.name,)

    def bind(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def resolve(self, arguments: dict[str, Any], with_gradient: bool = False) -> Implementation:
        """The implementation that runs a call with these arguments, or a BackendError that says why the chosen one cannot."""
        return registry.resolve(self, arguments, self.device_of(arguments), with_gradient)

    def given_tensors(self, arguments: dict[str, Any]) -> dict[str, Tensor]:
        """Every tensor among the arguments by its name; those in a list by name and place."""
        found = {name: arguments[name] for name in self.tensors if isinstance(arguments.get(name), Tensor)}
        for name in self.lists:
            found |= {f"{name}[{place}]": tensor for place, tensor in enumerate(arguments.get(name) or ())}
        return found

    def device_of(self, arguments: dict[str, Any]) -> torch.device:
        placed = {name: tensor.device for name, tensor in self.given_tensors(arguments).items()}
        if len(set(placed.values())) > 1:
            raise ValueError(
                f"{self.name}: all tensors must be on one device, but "
                + ", ".join(f"{name} is on {device}" for name, device in placed.items())
            )
        return next(iter(placed.values()), torch.device("cpu"))

    def validate(self, arguments: dict[str, Any]) -> None:
        """Raise an error for people when the arguments make no sense for the operator, whatever the backend."""
        for name in self.tensors:
            value = arguments[name]
            if not isinstance(value, Tensor) and not (value is None and name in self.optional):
                raise TypeError(
                    f"{self.name}: {name} must be a tensor{' or None' if name in self.optional else ''}, not {type(value).__name__}"
                )
        for name in self.lists:
            if not isinstance(arguments[name], list | tuple) or not all(isinstance(t, Tensor) for t in arguments[name]):
                raise TypeError(f"{self.name}: {name} must be a list of tensors")
        self.device_of(arguments)
        for name, tensor in self.given_tensors(arguments).items():
            argument = name.partition("[")[0]
            accepted = self.dtypes.get(argument)
            if accepted is None and argument in self.floating and not tensor.is_floating_point():
                raise TypeError(f"{self.name}: {name} must be floating point, not {short(tensor.dtype)}")
            if accepted and tensor.dtype not in accepted:
                raise TypeError(
                    f"{self.name}: {name} must be {' or '.join(map(short, accepted))}, not {short(tensor.dtype)}"
                )
        reason = True if self.check is None else answer_of(self.check, arguments)
        if self.check is not None and reason is not True and self.lowered is not None:
            reason = answer_of(self.check, self.lowered(arguments))  # operands of two dtypes may have one there
        if reason is not True:
            raise ValueError(f"{self.name}: {reason or 'its `check` refuses these arguments'}")

    @functools.cached_property
    def floating(self) -> set[str]:
        """The arguments that are floating point, as its cases make them. The first is small, and on `meta` PyTorch would load
        its compiler, a second's work; where one traces, there is no reading of values."""
        traced = _get_current_dispatch_mode() is not None
        made = self.cases[0].build(Make(torch.float32, "meta" if traced else "cpu")) if self.cases else {}
        return {name for name, value in made.items() if isinstance(value, Tensor) and value.is_floating_point()}

    def warm_up(self, *args: Any, **kwargs: Any) -> None:
        """Compile, choose and note all that calls with such arguments need, so that none of it happens in a captured or
        timed step. The arguments keep their values."""
        warm_up(self, self.bind(*args, **kwargs))

    def cost(self, arguments: dict[str, Any], direction: str = "forward") -> tuple[float, float]:
        """Unavoidable (flops, bytes) of a call; the backward reads what arrives and what is kept, and writes the gradients.

        `both` is a forward and its backward together, which need not read what is kept a second time.
        """
        declared = call_named(self.describe_cost, arguments) if self.describe_cost else Cost()
        inputs = list(self.given_tensors(arguments).values())
        meta = {name: on_meta(value) for name, value in arguments.items()}
        outputs = as_tuple(self.fake(**meta))
        size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors if t is not None)
        forward = size(inputs if declared.read is None else declared.read) + size(
            outputs if declared.write is None else declared.write
        )
        if direction == "forward":
            return declared.flops, forward
        kept = meta | dict(zip(self.outputs, outputs, strict=True))
        read = declared.backward_read
        if read is None:
            read = [kept[name] for name in self.saved if isinstance(kept[name], Tensor)]
        flops = 2 * declared.flops if declared.backward_flops is None else declared.backward_flops
        write = (
            [t for t in inputs if t.is_floating_point()] if declared.backward_write is None else declared.backward_write
        )
        backward = size(outputs if declared.arriving is None else declared.arriving) + size(write)
        return (declared.flops + flops, forward + backward) if direction == "both" else (flops, backward + size(read))


def refuse_unclear(name: str, signature: inspect.Signature, hints: dict[str, Any], outputs: Sequence | None) -> None:
    """Raise where a definition leaves open what its arguments and results are."""
    for argument, declared in signature.parameters.items():
        if declared.kind is not declared.POSITIONAL_OR_KEYWORD:
            raise TypeError(f"{name}: {argument} must be an ordinary argument, which implementations get by position")
        if argument not in hints:
            raise TypeError(f"{name}: annotate {argument}; annotations are an operator's schema")
        if "Tensor" in str(hints[argument]) and hints[argument] not in TENSORS:
            raise TypeError(
                f"{name}: {argument} is {hints[argument]}; tensors come as Tensor, Tensor | None or list[Tensor]"
            )
    several = typing.get_args(hints["return"]) if typing.get_origin(hints.get("return")) is tuple else ()
    if several and Ellipsis not in several and len(several) != len(outputs or ()):
        given = f"outputs names {len(outputs)}" if outputs else "outputs names none of them"
        raise TypeError(f"{name} returns {len(several)} results, but {given}; give each a name: outputs=(...)")


def as_tuple(value: Any) -> tuple:
    return () if value is None else tuple(value) if isinstance(value, tuple | list) else (value,)


def on_meta(value: Any) -> Any:
    """The argument without its values."""
    if isinstance(value, Tensor):
        return value.to("meta")
    return [on_meta(item) for item in value] if isinstance(value, list | tuple) else value


def operator(
    *,
    cases: Iterable[Case],
    cost: Callable[..., Cost] | None = None,
    check: Callable[..., Reason] | None = None,
    gradient: Callable | None = None,
    outputs: Sequence[str] | None = None,
    spreads_nan: bool = True,
    fake: Callable | None = None,
    mutates: Sequence[str] = (),
    consumes: Sequence[str] = (),
    dtypes: Mapping[str, Sequence[torch.dtype]] | None = None,
    tuning_key: Callable[..., tuple] | None = None,
    check_values: Callable[..., Reason] | None = None,
    views: Mapping[str, str] | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Turn a definition in plain PyTorch into an operator. Its annotations are the operator's schema.

    `check` answers True or what is wrong with the arguments, before any backend sees them. `gradient` is the gradient
    in plain PyTorch, worth writing when it keeps less than all arguments; without it, it is derived from the definition.
    `spreads_nan` is False where gradients are sums over much that counts for nothing: which zeros an implementation
    multiplies with a NaN, and which it skips, is then its own affair.
    `fake` makes results of the right shape where the definition cannot: it reads values of its arguments, and fake
    tensors have none. A compiler does not trace such a definition.
    `mutates` names the arguments that are written, `consumes` those whose memory a gradient may use up where the call
    says so; no other may be. `dtypes` says for an argument which dtypes make sense, whatever the backend, () for any;
    what cases make of floating point is taken in no other kind where it says nothing. `check_values` answers True or what
    is wrong with the values of arguments, such as an index that names no row; it is asked on CPUs, and elsewhere when
    people want it, for it waits for the device. `views` says of a result which argument it is a view of; all others are new
    memory, and under a compiler it is too. `tuning_key` names arguments and answers the numbers and words that speed depends on; configurations and backends are chosen by it.
    """

    def declare(definition: Callable[P, R]) -> Operator[P, R]:
        from tilestack.contract.library import define

        op = type("Operator", (Operator,), {})(
            definition, list(cases), cost, check, gradient, outputs, spreads_nan, fake, mutates, consumes, dtypes or {}, tuning_key, check_values, views or {}
        )  # fmt: skip
        registry.add_operator(op)
        try:
            op.traced = define(op)
        except Exception:
            registry.remove_operator(op)
            raise
        op.implementations["torch"] = Implementation(op, "torch", definition, AUTOGRAD, None, op.dtypes or FLOATS)
        type(op).__call__ = write_call(op)
        return op

    return declare
