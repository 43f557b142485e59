"""The operator contract: what an operator is, and what an implementation of it promises.

An operator is declared once, by its definition in plain PyTorch:

    @operator(cost=lambda x: Cost(flops=4 * x.numel()), cases=rows)
    def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor: ...

and an implementation replaces it for a backend:

    @implements(rms_norm, backend="triton", backward=rms_norm_backward, when=lambda x: x.shape[-1] <= 65536 or "rows ...")
    def rms_norm(x, weight, eps): ...

Functions around an operator name what they look at, and get just that: a `cost`, a `check` or a `when` names some of
the arguments; a gradient or a `backward` names `grad` (what arrives from above; `grad_<output>` where there are
several outputs), any arguments, `out` (the output) and `needs` (which tensor arguments want a gradient). Only what the
operator's gradient names is kept alive between forward and backward, and only that may a `backward` or `when` name;
what an implementation makes to keep besides is its own affair (`Keeping`).
"""

import inspect
import typing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import Tensor

from tilestack.contract import registry
from tilestack.contract.backends import AUTO, entered
from tilestack.contract.cases import Case
from tilestack.contract.implementation import AUTOGRAD, FLOATS, Ahead, Implementation, Keeping, Repeat
from tilestack.contract.named import Reason, answer_of, call_named, parameters_of, refuse_unknown

P = ParamSpec("P")
R = TypeVar("R")

PLANS_KEPT = 1 << 16  # signatures remembered before an operator starts over, so that ever-changing shapes stay bounded


@dataclass(frozen=True)
class Cost:
    """The work an operator cannot avoid. Bytes default to each tensor argument read once and each output written once."""

    flops: float = 0
    backward_flops: float | None = None  # twice the forward's when silent
    read: Sequence[Tensor] | None = None
    write: Sequence[Tensor] | None = None
    backward_read: Sequence[Tensor] | None = None  # besides what arrives; all that is kept when silent
    backward_write: Sequence[Tensor] | None = None  # a gradient per floating argument when silent


class Operator(Generic[P, R]):
    """A public operator: call it like its definition; the rest of the stack reads its contract from the attributes."""

    def __init__(
        self,
        definition: Callable[P, R],
        cases: Sequence[Case],
        cost: Callable[..., Cost] | None,
        check: Callable[..., Reason] | None,
        gradient: Callable | None,
        outputs: Sequence[str],
        spreads_nan: bool,
        fake: Callable | None,
    ):
        self.definition = definition
        self.name = definition.__name__
        self.family = definition.__module__.rpartition(".")[2]
        self.signature = inspect.signature(definition)
        self.parameters = list(self.signature.parameters)
        annotations = typing.get_type_hints(definition)
        if unannotated := [name for name in self.parameters if name not in annotations]:
            raise TypeError(f"{self.name}: annotate {', '.join(unannotated)}; annotations are an operator's schema")
        self.schema = torch.library.infer_schema(definition, mutates_args=())
        self.tensors = [name for name in self.parameters if annotations[name] in (Tensor, Tensor | None)]
        self.optional = [name for name in self.tensors if annotations[name] == Tensor | None]
        self.outputs = list(outputs)
        self.cases = list(cases)
        self.describe_cost = cost
        self.check = check
        self.gradient = gradient
        self.spreads_nan = spreads_nan
        self.reads_values = fake is not None
        self.fake: Callable = fake or definition
        self.grads = ["grad"] if len(self.outputs) == 1 else [f"grad_{name}" for name in self.outputs]
        kept = parameters_of(gradient) if gradient else self.parameters
        self.saved = [name for name in kept if name not in (*self.grads, "needs")]
        refuse_unknown(f"the cost of {self.name}", cost, self.parameters)
        refuse_unknown(f"the check of {self.name}", check, self.parameters)
        refuse_unknown(
            f"the gradient of {self.name}", gradient, [*self.grads, *self.parameters, *self.outputs, "needs"]
        )
        self.implementations: dict[str, Implementation] = {}
        self.plans: dict[tuple, Callable] = {}
        self.traced: Callable = definition  # until the operator is known to torch.library
        self.__name__, self.__doc__, self.__module__, self.__wrapped__ = (
            self.name,
            definition.__doc__,
            definition.__module__,
            definition,
        )
        self.__signature__ = self.signature

    # Generated per operator by `_calling`, so that a call binds its arguments at the speed of Python.
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

    def device_of(self, arguments: dict[str, Any]) -> torch.device:
        placed = {name: arguments[name].device for name in self.tensors if isinstance(arguments.get(name), Tensor)}
        if len(set(placed.values())) > 1:
            raise ValueError(
                f"{self.name}: all tensors must be on one device, but "
                + ", ".join(f"{name} is on {device}" for name, device in placed.items())
            )
        return next(iter(placed.values()))

    def validate(self, arguments: dict[str, Any]) -> None:
        """Raise an error for people when the arguments make no sense for the operator, whatever the backend."""
        for name in self.tensors:
            value = arguments[name]
            if not isinstance(value, Tensor) and not (value is None and name in self.optional):
                raise TypeError(
                    f"{self.name}: {name} must be a tensor{' or None' if name in self.optional else ''}, not {type(value).__name__}"
                )
        self.device_of(arguments)
        if self.check is not None and (reason := answer_of(self.check, arguments)) is not True:
            raise ValueError(f"{self.name}: {reason}")

    def plan(self, key: tuple | None, values: tuple) -> Callable:
        """What runs calls of one signature: checked, resolved and, with a key, remembered."""
        arguments = dict(zip(self.parameters, values, strict=True))
        self.validate(arguments)
        given = [arguments[name] for name in self.tensors if arguments[name] is not None]
        with_gradient = torch.is_grad_enabled() and any(t.requires_grad for t in given)
        implementation = self.resolve(arguments, with_gradient)
        not_memory = any(type(t).__torch_dispatch__ is not Tensor.__torch_dispatch__ for t in given)
        if not_memory or (self.reads_values and given[0].is_meta):
            run = self.traced  # fake tensors and others without memory have their own way with an operator
        elif with_gradient and not implementation.differentiates_itself:
            from tilestack.contract.autograd import differentiable, differentiable_ahead

            ahead = implementation.ahead_of(arguments)
            keeping = implementation.keeping_of(arguments)
            run = differentiable_ahead(implementation, ahead) if ahead else differentiable(implementation, keeping)
        elif implementation.repeat and key is not None:
            run = implementation.repeat(implementation.forward, lambda faster: self.improve(key, run, faster))
        else:
            run = implementation.forward
        if key is not None:
            if len(self.plans) >= PLANS_KEPT:
                self.plans.clear()
            self.plans[key] = run
        return run

    def improve(self, key: tuple, run: Callable, faster: Callable) -> None:
        """Put a faster function in the place of a plan, unless plans were forgotten since."""
        if self.plans.get(key) is run:
            self.plans[key] = faster

    def cost(self, arguments: dict[str, Any], direction: str = "forward") -> tuple[float, float]:
        """Unavoidable (flops, bytes) of a call; the backward reads what arrives and what is kept, and writes the gradients."""
        declared = call_named(self.describe_cost, arguments) if self.describe_cost else Cost()
        inputs = [arguments[name] for name in self.tensors if arguments[name] is not None]
        meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in arguments.items()}
        outputs = as_tuple(self.fake(**meta))
        size = lambda tensors: sum(t.numel() * t.element_size() for t in tensors)
        if direction == "forward":
            return declared.flops, size(inputs if declared.read is None else declared.read) + size(
                outputs if declared.write is None else declared.write
            )
        kept = meta | dict(zip(self.outputs, outputs, strict=True))
        read = declared.backward_read
        if read is None:
            read = [kept[name] for name in self.saved if isinstance(kept[name], Tensor)]
        flops = 2 * declared.flops if declared.backward_flops is None else declared.backward_flops
        write = (
            [t for t in inputs if t.is_floating_point()] if declared.backward_write is None else declared.backward_write
        )
        return flops, size(outputs) + size(read) + size(write)


def as_tuple(value: Any) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)


def operator(
    *,
    cases: Iterable[Case],
    cost: Callable[..., Cost] | None = None,
    check: Callable[..., Reason] | None = None,
    gradient: Callable | None = None,
    outputs: Sequence[str] = ("out",),
    spreads_nan: bool = True,
    fake: Callable | None = None,
) -> Callable[[Callable[P, R]], Operator[P, R]]:
    """Turn a definition in plain PyTorch into an operator. Its annotations are the operator's schema.

    `check` answers True or what is wrong with the arguments, before any backend sees them. `gradient` is the gradient
    in plain PyTorch, worth writing when it keeps less than all arguments; without it, it is derived from the definition.
    `spreads_nan` is False where gradients are sums over much that counts for nothing: which zeros an implementation
    multiplies with a NaN, and which it skips, is then its own affair.
    `fake` makes results of the right shape where the definition cannot: it reads values of its arguments, and fake
    tensors have none. A compiler does not trace such a definition.
    """

    def declare(definition: Callable[P, R]) -> Operator[P, R]:
        from tilestack.contract.library import define

        described = type("Operator", (Operator,), {})(
            definition, list(cases), cost, check, gradient, outputs, spreads_nan, fake
        )
        registry.add_operator(described)
        described.implementations["torch"] = Implementation(described, "torch", definition, AUTOGRAD, None, FLOATS)
        described.traced = define(described)
        type(described).__call__ = _calling(described)
        return described

    return declare


def implements(
    described: Operator,
    *,
    backend: str,
    backward: Callable | str | None = None,
    when: Callable[..., Reason] | None = None,
    dtypes: Sequence[torch.dtype] = FLOATS,
    ahead: Ahead | None = None,
    keeping: Keeping | None = None,
    repeat: Repeat | None = None,
    deterministic: bool = True,
    compiled: bool = True,
) -> Callable[[Callable], Callable]:
    """Register a function as an operator's implementation on a backend, from inside or outside this package.

    `backward` is a function (see the top of this file), AUTOGRAD when the forward is made of differentiable PyTorch
    calls, or None when there is none. `when` answers True or the reason why not, looking only at metadata. `ahead` is
    the way of a loss: where it applies, the gradients are made in the forward and the backward only scales them.
    `keeping` is a second forward and backward that hand on something the operator's gradient does not know.
    `repeat(function, keep, strides_known)` makes of the forward or the backward a function for calls of one signature,
    which may later `keep(faster)`, another in its own place. A backward's signature says nothing of strides. What is not
    `deterministic`, the same bits in every run, `auto` leaves alone where PyTorch is to use deterministic algorithms, and
    what is not worth having `compiled`, under a compiler.
    """

    if backend in (AUTO, "torch") or not backend.isidentifier():
        raise ValueError(f"a backend of your own needs a name of its own, not {backend!r}")

    def register(forward: Callable) -> Callable:
        options = [name for name in described.parameters if name not in described.tensors]
        kept = list(dict.fromkeys([*described.grads, *described.saved, *options, "needs"]))
        refuse_unknown(f"the backward of {described.name} on {backend}", backward if callable(backward) else None, kept)
        # With a backward of its own, `when` is asked again where only what the gradient keeps is at hand.
        refuse_unknown(
            f"the when of {described.name} on {backend}", when, kept if callable(backward) else described.parameters
        )
        described.implementations[backend] = Implementation(
            described, backend, forward, backward, when, tuple(dtypes), ahead, keeping, repeat, deterministic, compiled
        )
        described.plans.clear()
        return forward

    return register


def _calling(described: Operator) -> Callable:
    """The `__call__` of one operator, written out so that a call costs its signature and one dictionary look-up.

    A signature is everything a choice of implementation may depend on: the chosen backend, whether bits are to repeat,
    whether a gradient is wanted, each tensor's class, shape, strides, dtype and device, and each argument that is not a float.
    """
    annotations = typing.get_type_hints(described.definition)
    parts, grads = [], []
    for name in described.parameters:
        described_tensor = f"{name}.__class__, {name}.shape, {name}.stride(), {name}.dtype, {name}.device"
        if name in described.optional:
            parts.append(f"None if {name} is None else ({described_tensor})")
            grads.append(f"{name} is not None and {name}.requires_grad")
        elif name in described.tensors:
            parts.append(described_tensor)
            grads.append(f"{name}.requires_grad")
        elif typing.get_origin(annotations[name]) in (list, Sequence):
            parts.append(f"tuple({name})")
        elif annotations[name] is not float:
            parts.append(name)
    names = ", ".join(described.parameters)
    declared = ", ".join(
        name if p.default is p.empty else f"{name}={name}_default" for name, p in described.signature.parameters.items()
    )
    # Underscores keep these names apart from the operator's arguments, which may well be called `key` or `plan`.
    source = f"""
def __call__(self, {declared}):
    if _compiling():
        return _traced({names})
    try:
        _key = (_entered(), _deterministic(), _grad_enabled() and ({" or ".join(grads)}), {", ".join(parts)})
        _run = _plans.get(_key)
    except (AttributeError, TypeError):  # no tensor where one belongs, or an argument without a hash, such as a list
        _key = _run = None
    if _run is None:
        _run = _plan(_key, ({names},))
    return _run({names})
"""
    scope = {f"{name}_default": p.default for name, p in described.signature.parameters.items()}
    scope |= dict(
        _compiling=torch.compiler.is_compiling,
        _traced=described.traced,
        _grad_enabled=torch.is_grad_enabled,
        _entered=entered,
        _deterministic=torch._C._get_deterministic_algorithms,
        _plans=described.plans,
        _plan=described.plan,
    )
    exec(source, scope)
    call: Callable = scope["__call__"]  # type: ignore[assignment]
    call.__doc__ = described.definition.__doc__
    return call
