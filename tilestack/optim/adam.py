"""Adam and AdamW: torch's, with the step in one launch for all tensors of a group.

Parameters in half precision lose small updates when they are rounded to nearest. Two ways out:
`master_weights=True` keeps a float32 copy of each, and its moments in float32; `stochastic_rounding=True` (bfloat16)
keeps everything in bfloat16 and rounds parameters and moments up or down at random, right on average.
"""

from typing import Any

import torch
from torch import Tensor

from tilestack.optim.definitions import adam_step, random_words
from tilestack.optim.dynamic_map import CODES, decoded_state
from tilestack.optim.multi_tensor import Factors, MultiTensor, walkable


class AdamStep(MultiTensor):
    """The step of Adam, for the classes below."""

    options: tuple[str, ...] = ("clip_norm", "stochastic_rounding", "master_weights", "seed")

    def __init__(
        self,
        params: Any,
        *args: Any,
        stochastic_rounding: bool = False,
        master_weights: bool = False,
        seed: int = 0,
        **kwargs: Any,
    ):
        if stochastic_rounding and master_weights:
            raise ValueError(
                "stochastic_rounding and master_weights exclude each other: a master copy is never rounded"
            )
        super().__init__(params, *args, **kwargs)
        self.stochastic_rounding, self.master_weights, self.seed = stochastic_rounding, master_weights, seed

    def _has_master(self, param: Tensor) -> bool:
        return self.master_weights and param.dtype in (torch.float16, torch.bfloat16)

    def _rounds_stochastically(self, param: Tensor) -> bool:
        return self.stochastic_rounding and param.dtype == torch.bfloat16

    def _state_dtype(self, param: Tensor, name: str) -> torch.dtype:
        return torch.float32 if self._has_master(param) else param.dtype

    def _state(self, group: dict[str, Any], param: Tensor) -> dict[str, Any]:
        state = self.state[param]
        if "step" not in state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        if not self._has_master(param):
            state.pop("master_param", None)  # of a checkpoint, or from before the parameter was cast
        elif "master_param" not in state:
            state["master_param"] = torch.empty_like(param, dtype=torch.float32).copy_(param)
        for name in self._moments(group, param):
            if name not in state:
                self._start(state, param, name)
        return state

    def _moments(self, group: dict[str, Any], param: Tensor) -> tuple[str, ...]:
        """The states that have the shape of the parameter, in the order of the kernel's table."""
        amsgrad, master = ("max_exp_avg_sq",) * group["amsgrad"], ("master_param",) * self._has_master(param)
        return ("exp_avg", "exp_avg_sq", *amsgrad, *master)

    def _readable(self, param: Tensor, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        """With moments in 8 bits decoded where this optimizer keeps them in full, or in blocks of other elements."""
        for name in (name for name in CODES if name in loaded and loaded[name].dtype == torch.uint8):
            if self._state_dtype(param, name) != torch.uint8 or not in_one_order(loaded[name], param):
                codes, scales = (loaded[each].to(param.device) for each in (name, CODES[name]))
                loaded[name] = decoded_state(walkable(codes), scales, name)
        return {name: value for name, value in loaded.items() if name not in CODES.values()}

    def _in_full(self, param: Tensor, name: str) -> Tensor:
        state, value = self.state[param], super()._in_full(param, name)
        return decoded_state(value, state.pop(CODES[name]), name) if value.dtype == torch.uint8 else value

    def _start(self, state: dict[str, Any], param: Tensor, name: str) -> None:
        state[name] = torch.zeros_like(param, dtype=self._state_dtype(param, name))

    def _draw(self, param: Tensor, ordinal: int) -> Tensor | None:
        if not self._rounds_stochastically(param):
            return None
        return random_words(self.seed, int(self.state[param]["step"]) + 1, ordinal, param)

    def _define(self, group: dict[str, Any], param: Tensor, ordinal: int, factor: float) -> None:
        state = self._state(group, param)
        assert param.grad is not None
        adam_step(group, param, param.grad, state, factor, self._draw(param, ordinal))

    def _columns(
        self, group: dict[str, Any], key: tuple, params: list[Tensor], walked: list[list[Tensor]]
    ) -> list[list[Tensor]]:
        """The rows of the kernel's table: step, param, grad and every state it reads."""
        states = [self._state(group, param) for param in params]
        self._refit(key, params, walked[0], self._moments(group, params[0]))
        column = lambda name: [state[name] for state in states]
        return [column("step"), *walked, *(column(name) for name in self._rows(group, params[0]))]

    def _rows(self, group: dict[str, Any], param: Tensor) -> tuple[str, ...]:
        return self._moments(group, param)

    def _launch(
        self, group: dict[str, Any], key: tuple, params: list[Tensor], walked: list[list[Tensor]], factors: Factors
    ) -> None:
        from tilestack.kernels.optim import steps as kernels

        columns = self._columns(group, key, params, walked)
        first = params[0]
        dtypes = first.dtype, columns[2][0].dtype, columns[3][0].dtype
        table = self._table(key, params, columns, kernels.block_for(*dtypes), kernels.ADAM_RECORD.value)
        kernels.prepare_adam(table, group, *factors)
        kernels.step_adam(
            table, dtypes, factors.found_inf, self.seed,
            decoupled=group["decoupled_weight_decay"], amsgrad=group["amsgrad"], master=self._has_master(first),
            stochastic=self._rounds_stochastically(first),
        )  # fmt: skip


class Adam(AdamStep, torch.optim.Adam):
    """torch.optim.Adam with its arguments and checkpoints, plus `clip_norm`, `stochastic_rounding`, `master_weights`,
    `seed` (of the rounding). `foreach`, `fused` and `capturable` are accepted and change nothing: a step is always one
    launch per group and dtype, and always capturable."""

    name = "adam"


class AdamW(AdamStep, torch.optim.AdamW):
    """torch.optim.AdamW with its arguments and checkpoints, plus those of `tilestack.optim.Adam`."""

    name = "adamw"


def in_one_order(x: Tensor, model: Tensor) -> bool:
    """Whether the elements of x lie in memory in the order of those of a state of the model."""
    like = torch.empty_like(model, device="meta")
    sides = zip(x.shape, x.stride(), like.stride(), strict=False)
    return x.shape == like.shape and all(one == other for size, one, other in sides if size > 1)
