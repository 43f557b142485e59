"""Muon: momentum made orthogonal, for the matrices inside a network; AdamW for all that is not one.

    optimizer = optim.Muon(model.named_parameters(), lr=0.02, adamw=dict(lr=3e-4))

A hidden matrix moves as far in every direction that its gradient names: its momentum's singular values are brought near
one by Newton–Schulz (`ops.newton_schulz`). Matrices of equal shape take their step together, in the same few launches.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.ops.gram import EPS, A, B, C
from tilestack.optim.adam import AdamStep
from tilestack.optim.definitions import muon_step
from tilestack.optim.multi_tensor import Factors

# In the names of parameters that are no hidden matrices; attention of many heads is no head.
OUTSIDE = re.compile("embed|(?<!multi)(?<!multi_)head|router", re.IGNORECASE)
RULES = ("original", "match_rms_adamw")
NS_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ADAMW = dict(lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)
ELEMENTS_TOGETHER = 1 << 26  # of the matrices that one launch takes: enough to fill a GPU, and bounded in memory


def is_hidden_matrix(name: str, param: Tensor) -> bool:
    """Whether a parameter is one that Muon steps. An embedding's rows are looked up rather than multiplied through, and a
    router's few rows must not be made equally loud."""
    return param.ndim >= 2 and not OUTSIDE.search(name)


def matrices(x: Tensor, rows: Sequence[int] | None = None) -> Sequence[Tensor]:
    """The matrices that a contiguous parameter is made of, as views: `rows` of each, one below the other. Without them, each
    of a stack in three dimensions; the filters of a convolution, in four or more, are the rows of one matrix."""
    if rows is not None:
        return x.flatten(0, -2).split(list(rows))
    return x.unbind() if x.ndim == 3 else (x.flatten(1) if x.ndim > 3 else x,)


def rate_ratio(rule: str | None, rows: int, columns: int) -> float:
    """What the learning rate of a matrix is multiplied by."""
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    return math.sqrt(max(1, rows / max(columns, 1)))


def refuse_muon_settings(settings: Mapping[str, Any]) -> None:
    """Raise where a group of matrices could not take a step, or would take another than it says."""
    for name in ("lr", "weight_decay", "momentum"):
        if not float(settings[name]) >= 0:
            raise ValueError(f"{name} must not be negative, and is {settings[name]}")
    if settings["adjust_lr_fn"] not in (None, *RULES):
        raise ValueError(f"adjust_lr_fn must be {' or '.join(RULES)}, not {settings['adjust_lr_fn']!r}")
    if not 1 <= settings["ns_steps"] < 100:
        raise ValueError(f"ns_steps must be 1 to 99, not {settings['ns_steps']}")
    if len(settings["ns_coefficients"]) != 3:
        raise ValueError(f"ns_coefficients must be three numbers, not {settings['ns_coefficients']!r}")


def refuse_adamw_settings(settings: Mapping[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not float(settings[name]) >= 0:
            raise ValueError(f"{name} of adamw must not be negative, and is {settings[name]}")
    if len(settings["betas"]) != 2 or not all(0 <= float(beta) < 1 for beta in settings["betas"]):
        raise ValueError(f"betas of adamw must be two numbers from 0 to below 1, not {settings['betas']!r}")


class Muon(AdamStep):
    """torch.optim.Muon with its arguments and checkpoints, for any parameters.

    Hidden matrices, in two dimensions or stacked, are Muon's; vectors, and what is called an embedding, a head or a router
    where `params` come with names, AdamW's, with the options in `adamw`. Each group given becomes one of each kind, and
    what it sets itself is Muon's; a group with `use_muon` is taken as it is. `splits` are, by a given parameter's name, the
    rows of the matrices that lie one below the other in it, as in a fused qkv: each is made orthogonal by itself.

    `ns_dtype` is what Newton–Schulz runs in. `clip_norm` and `master_weights` are those of `tilestack.optim.AdamW`.
    """

    name = "muon"
    options = ("clip_norm", "stochastic_rounding", "master_weights", "seed", "adamw", "splits", "ns_dtype")

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (A, B, C),
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        adamw: Mapping[str, Any] | None = None,
        splits: Mapping[str, Sequence[int]] | None = None,
        ns_dtype: torch.dtype = torch.bfloat16,
        clip_norm: float | None = None,
        master_weights: bool = False,
    ):
        if unknown := set(adamw or ()) - set(ADAMW):
            raise ValueError(f"adamw takes {', '.join(ADAMW)}, not {', '.join(sorted(unknown))}")
        if ns_dtype not in NS_DTYPES:
            raise ValueError(f"ns_dtype must be {', '.join(map(str, NS_DTYPES))}, not {ns_dtype!r}")
        self.adamw, self.splits, self.ns_dtype = ADAMW | dict(adamw or {}), dict(splits or {}), ns_dtype
        refuse_adamw_settings(self.adamw)
        defaults = dict(
            lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov, ns_coefficients=ns_coefficients,
            eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn, maximize=False,
        )  # fmt: skip
        refuse_muon_settings(defaults)
        super().__init__(params, defaults, clip_norm=clip_norm, master_weights=master_weights)
        called = {name for group in self.param_groups for name in group.get("param_names", ())}
        if strangers := [name for name in self.splits if name not in called]:
            raise ValueError(
                f"splits names {strangers[0]!r}, "
                + (
                    "which no parameter given is called"
                    if called
                    else "and params come without names; give named_parameters()"
                )
            )

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters: as Muon's or AdamW's where the group says `use_muon`, else each to the one that suits it."""
        given = param_group["params"]
        if isinstance(given, set):
            return super().add_param_group(param_group)  # which refuses it
        entries = [given] if isinstance(given, Tensor) else list(given)
        named = [entry if isinstance(entry, tuple) else ("", entry) for entry in entries]
        if "use_muon" in param_group:
            return self._add_group(param_group | {"params": entries}, named)
        kinds = [isinstance(param, Tensor) and is_hidden_matrix(name, param) for name, param in named]
        for muon, settings in ((True, param_group), (False, {})):
            mine = [place for place, kind in enumerate(kinds) if kind == muon]
            group = settings | {"params": [entries[place] for place in mine], "use_muon": muon}
            if mine:
                self._add_group(group, [named[place] for place in mine])

    def _add_group(self, group: dict[str, Any], named: Sequence[tuple[str, Tensor]]) -> None:
        if group["use_muon"]:
            refuse_muon_settings(self.defaults | group)
            self._refuse_parts(named)
        else:
            group = self.adamw | dict(amsgrad=False, decoupled_weight_decay=True) | group
            refuse_adamw_settings(group)
        super().add_param_group(group)
        self._forget()

    def _refuse_parts(self, named: Sequence[tuple[str, Tensor]]) -> None:
        """Raise where a parameter is no matrix, or not of the rows that it is split into."""
        for name, param in named:
            if param.ndim < 2:
                raise ValueError(f"a group with use_muon is of matrices, and one has the shape {tuple(param.shape)}")
            rows, there = self.splits.get(name), math.prod(param.shape[:-1])
            if rows is not None and (sum(rows) != there or min(rows) < 0):
                raise ValueError(f"splits[{name!r}] are {list(rows)} rows, and the parameter has {there}")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # torch's own is for nothing but matrices, and has no word for it
            group.setdefault("use_muon", True)
            group.setdefault("maximize", False)

    def _forget(self) -> None:
        super()._forget()
        self._rows_of: dict[Tensor, Sequence[int]] | None = None

    def _matrices(self, param: Tensor, x: Tensor) -> Sequence[Tensor]:
        """x, which lies like a parameter, as the matrices that this is made of."""
        if self._rows_of is None:
            named = (zip(group["params"], group.get("param_names", ()), strict=False) for group in self.param_groups)
            self._rows_of = {p: self.splits[name] for pairs in named for p, name in pairs if name in self.splits}
        return matrices(x, self._rows_of.get(param))

    def _walked(self, group: dict[str, Any], param: Tensor) -> Tensor:
        return param.contiguous() if group["use_muon"] else super()._walked(group, param)

    def _state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        if not group["use_muon"]:
            return super()._state(group, param)
        state = self.state[param]
        if "momentum_buffer" not in state:
            dtype = self._state_dtype(param, "momentum_buffer")
            state["momentum_buffer"] = torch.zeros(param.shape, dtype=dtype, device=param.device)
        elif state["momentum_buffer"].dtype != self._state_dtype(param, "momentum_buffer"):
            state["momentum_buffer"] = self._adopt(param, "momentum_buffer", state["momentum_buffer"])
        if not self._has_master(param):
            state.pop("master_param", None)
        elif "master_param" not in state:
            state["master_param"] = param.detach().to(torch.float32, memory_format=torch.contiguous_format)
        return state

    def _adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        adopted = super()._adopt(param, name, value)
        return adopted.contiguous() if "momentum_buffer" in self.state[param] else adopted

    def _define(self, group: dict[str, Any], param: Tensor, ordinal: int, factor: float) -> None:
        if not group["use_muon"]:
            return super()._define(group, param, ordinal, factor)
        assert param.grad is not None
        parts = lambda x: self._matrices(param, x)
        ratio = lambda matrix: rate_ratio(group["adjust_lr_fn"], *matrix.shape)
        muon_step(group, param, param.grad, self._state(group, param), factor, parts, ratio, self.ns_dtype)

    def _launch(
        self, group: dict[str, Any], key: tuple, params: list[Tensor], walked: list[list[Tensor]], factors: Factors
    ) -> None:
        if not group["use_muon"]:
            return super()._launch(group, key, params, walked, factors)
        from tilestack.kernels.optim.muon import step_muon
        from tilestack.kernels.optim.steps import block_for

        master = self._has_master(params[0])
        states = [self._state(group, param) for param in params]
        names = ("momentum_buffer", "master_param")[: 1 + master]
        columns = [*walked, *([state[name] for state in states] for name in names)]
        dtypes = params[0].dtype, columns[1][0].dtype, columns[2][0].dtype, self.ns_dtype
        alike: dict[tuple[int, int], list[tuple[Tensor, ...]]] = defaultdict(list)
        for param, *tensors in zip(params, *columns, strict=True):
            for pieces in zip(*(self._matrices(param, tensor) for tensor in tensors), strict=True):
                rows, width = pieces[0].shape
                if rows and width:
                    alike[rows, width].append(pieces)
        for shape, together in alike.items():
            ratio = rate_ratio(group["adjust_lr_fn"], *shape)
            for start, some in in_turns(together, max(1, ELEMENTS_TOGETHER // math.prod(shape))):
                lists = [list(column) for column in zip(*some, strict=True)]
                table = self._table((*key, shape, start), lists[0], lists, block_for(*dtypes))
                step_muon(table, shape, dtypes, group, ratio, master, *factors)


def in_turns(items: Sequence[Any], size: int) -> Iterable[tuple[int, Sequence[Any]]]:
    return ((start, items[start : start + size]) for start in range(0, len(items), size))
