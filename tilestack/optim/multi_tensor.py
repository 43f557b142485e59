"""What the optimizers share: which backend steps, the tables of the multi-tensor launches, loss scaling, clipping, states.

Each optimizer derives from torch's of the same name, so that arguments, parameter groups, schedulers and checkpoints are
torch's own; only the step is ours. It looks at nothing on the device: step counts, a loss scale, a found infinity and
the clipping coefficient stay there, and a tensor learning rate does too. A CUDA graph may capture it after one step.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from itertools import chain, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestack.contract import BackendError
from tilestack.contract.backends import AUTO, chosen, usable


def takes_kernels(optimizer: str, device: torch.device) -> bool:
    """Whether kernels run the step there: what was chosen, and under `auto` on CUDA. Raises where a choice cannot run."""
    choice = chosen(optimizer)
    if choice == AUTO:
        return device.type == "cuda"
    if choice not in ("torch", "triton"):
        raise BackendError(f"{optimizer} has no {choice} backend; it has torch, triton")
    if choice == "triton" and (reason := usable("triton", device)) is not True:
        raise BackendError(f"{optimizer} cannot run on triton: {reason}; torch can")
    return choice == "triton"


def walkable(x: Tensor) -> Tensor:
    """x, or a copy of it where its elements do not fill their memory without gaps."""
    if x.is_contiguous() or torch.empty_like(x, device="meta").stride() == x.stride():
        return x
    return torch.empty_like(x).copy_(x)


def gradient(param: Tensor, walked: Tensor) -> Tensor:
    """The gradient of a parameter, or a copy of it where its elements lie in another order than those walked with it."""
    grad = param.grad
    assert grad is not None
    if (grad.is_contiguous() and walked.is_contiguous()) or grad.stride() == walked.stride():
        return grad
    return torch.empty_like(walked, dtype=grad.dtype).copy_(grad)


class Factors(NamedTuple):
    """What a step divides and multiplies its gradients by, and what skips it; on the device, each may be missing."""

    scale: Tensor | None
    clip: Tensor | None
    found_inf: Tensor | None


class KeptTables:
    """The tables of the tensors that are walked together, kept from step to step; a graph under capture gets its own."""

    def __init__(self, owner: str):
        self.owner = owner
        self.kept: dict[tuple, Any] = {}
        self.captured: dict[tuple, list] = defaultdict(list)  # what graphs read, which must never change

    def forget(self) -> None:
        self.kept.clear()

    def unmoved(self, key: tuple, walked: list[Tensor]) -> bool:
        """Whether these parameters are where they were when their table was last used."""
        from tilestack.kernels.optim.steps import PARAM

        table: Any = self.kept.get(key)
        return table is not None and table.addresses[PARAM.value] == [param.data_ptr() for param in walked]

    def find(self, key: tuple, params: list[Tensor], columns: list[list[Tensor]], block: int, record: int = 0) -> Any:
        """The table of these tensors, whose rows name those of the columns."""
        from tilestack.kernels.optim.multi_tensor import Table

        lengths = [param.numel() for param in params]
        table: Any = self.kept.get(key)
        fits = table is not None and table.lengths == lengths and len(table.addresses) == len(columns) + 1
        if params[0].is_cuda and torch.cuda.is_current_stream_capturing():
            for captured in self.captured[key]:
                if captured.names(*columns):
                    return captured
            if not fits:
                raise RuntimeError(
                    f"{self.owner}: run one step with the same gradients before capturing one in a CUDA graph"
                )
            # A graph takes the table over, or gets a copy that names its own tensors.
            table = self.kept.pop(key) if table.names(*columns) else table.for_capture()
            self.captured[key].append(table)
        elif not fits:
            table = self.kept[key] = Table(lengths, len(columns), block, params[0].device, record)
        table.point(*columns)
        return table


class MultiTensor(torch.optim.Optimizer):
    """An optimizer that steps all tensors of a group at once. `clip_norm` clips by the global norm inside the step,
    without touching the gradients; the norm is then `grad_norm`."""

    name: str  # by which a backend is chosen: backend(adamw="torch")
    options: tuple[str, ...] = ("clip_norm",)  # attributes of ours that a copy keeps
    _step_supports_amp_scaling = True  # GradScaler leaves grad_scale and found_inf to the step, and never waits

    def __init__(self, params: Any, *args: Any, clip_norm: float | None = None, **kwargs: Any):
        if kwargs.get("differentiable"):
            raise ValueError(f"{type(self).__name__} cannot be differentiated through; use torch.optim's for that")
        if clip_norm is not None and clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive or None, not {clip_norm}")
        self._tables = KeptTables(type(self).__name__)
        super().__init__(params, *args, **kwargs)
        self.clip_norm = clip_norm
        self.grad_norm: Tensor | None = None
        self._forget()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        params = self.param_groups[-1]["params"]
        if len(set(map(id, params))) < len(params):
            self.param_groups.pop()
            raise ValueError(
                "a parameter is twice in a group, whose parameters are stepped at once; name it once, as by dict.fromkeys()"
            )

    def _forget(self) -> None:
        self._tables.forget()

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {name: getattr(self, name) for name in self.options}  # type: ignore[misc]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.grad_norm = None
        self.__dict__.setdefault("_tables", KeptTables(type(self).__name__))
        self._forget()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is evaluated first, and what it returns is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        buckets = [self._buckets(group) for group in self.param_groups]
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        clip = None
        if self.clip_norm is not None:
            self.grad_norm, clip = self._clipping(
                list(chain.from_iterable(chain(*(b.values() for b in buckets)))), scale
            )
        for number, group in enumerate(self.param_groups):
            for key, params in buckets[number].items():
                device = key[0]
                if takes_kernels(self.name, device):
                    there = (None if x is None else x.to(device, non_blocking=True) for x in (scale, clip, found_inf))
                    walked = [self._walked(group, param) for param in params]
                    grads = [gradient(param, walk) for param, walk in zip(params, walked, strict=True)]
                    self._launch(group, (number, *key), params, [walked, grads], Factors(*there))
                    torch.autograd.graph.increment_version(params)  # which autograd has not seen to be written
                    for param, walk in zip(params, walked, strict=True):
                        if walk is not param:
                            param.copy_(walk)
                elif found_inf is None or not found_inf.item():
                    factor = (-1 if group["maximize"] else 1) * (1 if clip is None else float(clip)) / float(scale or 1)
                    for ordinal, param in enumerate(params):
                        self._define(group, param, ordinal, factor)
        return loss

    def _buckets(self, group: dict[str, Any]) -> dict[tuple, list[Tensor]]:
        """The parameters with gradients, by what one launch must share."""
        buckets = defaultdict(list)
        for param in group["params"]:
            grad = param.grad
            if grad is None:
                continue
            if grad.layout != torch.strided:
                raise RuntimeError(
                    f"{type(self).__name__} takes dense gradients only, and one is {grad.layout}; use torch.optim.SparseAdam or torch.optim.SGD, or a dense embedding gradient"
                )
            if not param.is_floating_point():
                raise TypeError(f"{type(self).__name__} takes real floating-point parameters, and one is {param.dtype}")
            buckets[(param.device, param.dtype, grad.dtype, *self._kind(param))].append(param)
        return buckets

    def _kind(self, param: Tensor) -> tuple:
        """What else parallel parameters must share."""
        return ()

    def _walked(self, group: dict[str, Any], param: Tensor) -> Tensor:
        """A parameter as kernels walk over it, itself where they can; what is written to a copy is copied back."""
        return walkable(param)

    def _define(self, group: dict[str, Any], param: Tensor, ordinal: int, factor: float) -> None:
        """Step one parameter in plain PyTorch."""
        raise NotImplementedError

    def _launch(
        self, group: dict[str, Any], key: tuple, params: list[Tensor], walked: list[list[Tensor]], factors: Factors
    ) -> None:
        """Step some parameters with kernels. `walked` are they and their gradients, as the kernels walk over them."""
        raise NotImplementedError

    def _table(self, key: tuple, params: list[Tensor], columns: list[list[Tensor]], block: int, record: int = 0) -> Any:
        return self._tables.find(key, params, columns, block, record)

    def _clipping(self, params: list[Tensor], scale: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        """(norm of the gradients, what to multiply them by), both on the device."""
        from tilestack.optim.clip import coefficient_of, total_norm

        assert self.clip_norm is not None
        grads = [param.grad for param in params if param.grad is not None]
        if not grads:
            return None, None
        if len({grad.device for grad in grads}) > 1 or not takes_kernels(self.name, grads[0].device):
            norm = total_norm(grads) / (1 if scale is None else scale)
            return norm, coefficient_of(norm, self.clip_norm)
        from tilestack.kernels.optim.grad_norm import BLOCK, gradient_norm

        by_dtype = defaultdict(list)
        for grad in grads:
            by_dtype[grad.dtype].append(walkable(grad))
        tables = [(self._table(("clip", dtype), group, [group], BLOCK), dtype) for dtype, group in by_dtype.items()]
        return gradient_norm(tables, self.clip_norm, scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of torch's of the same name."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        ours = chain.from_iterable(group["params"] for group in self.param_groups)
        for number, param in zip(saved, ours, strict=True):
            state, loaded = self.state[param], {}
            for name, value in state_dict["state"].get(number, {}).items():
                if name == "step" and not isinstance(value, Tensor):
                    loaded[name] = torch.tensor(float(value))
                elif isinstance(value, Tensor):
                    # torch has cast every state to the parameter's dtype; what had another is taken from the source
                    loaded[name] = state[name] if value.dtype == param.dtype else value
            kept = self._readable(param, loaded)
            for name in loaded.keys() - kept.keys():
                del state[name]
            for name, value in kept.items():
                state[name] = self._adopt(param, name, value)

    def _readable(self, param: Tensor, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """Of the states in a checkpoint those that this optimizer keeps."""
        return loaded

    def _adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        """A state in the device, dtype and memory order the kernels expect."""
        if name == "step":
            return value.to(param.device, torch.float32, copy=True)
        return self._laid_like(param, name, value, self._state_dtype(param, name))

    def _laid_like(self, param: Tensor, name: str, value: Tensor, dtype: torch.dtype) -> Tensor:
        if value.shape != param.shape:
            raise ValueError(
                f"{type(self).__name__} has {name} of the shape {tuple(value.shape)} for a parameter of {tuple(param.shape)}; "
                "it is of another model, or the parameter has changed its shape since"
            )
        return torch.empty_like(param, dtype=dtype).copy_(value)

    def _refit(self, key: tuple, params: list[Tensor], walked: list[Tensor], names: Iterable[str]) -> None:
        """Where parameters have moved since the last launch, cast or lay out anew the states that kernels would misread:
        `model.to()` changes a parameter's dtype or memory order and leaves them as they are."""
        if self._tables.unmoved(key, walked):
            return
        for param, name in product(params, names):
            value, dtype = self.state[param][name], self._state_dtype(param, name)
            like = torch.empty_like(param, dtype=dtype, device="meta")
            if (value.shape, value.stride(), value.dtype) != (like.shape, like.stride(), dtype):
                self.state[param][name] = self._adopt(param, name, self._in_full(param, name))
                self._tables.forget()  # where this parameter was before, its states are no longer as they were

    def _in_full(self, param: Tensor, name: str) -> Tensor:
        """The values of a state."""
        return self.state[param][name]

    def _state_dtype(self, param: Tensor, name: str) -> torch.dtype:
        return param.dtype
