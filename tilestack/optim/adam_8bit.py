"""AdamW with its moments in 8 bits: a code per element and a float32 scale per block of 256 (see dynamic_map.py)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from tilestack.optim.adam import AdamW
from tilestack.optim.definitions import adam_step
from tilestack.optim.dynamic_map import BLOCK, CODES, decoded_state, encode, values_of_codes
from tilestack.optim.multi_tensor import Factors

MIN_8BIT_SIZE = 4096


class AdamW8bit(AdamW):
    """AdamW with 8-bit moments, for every parameter of at least `min_8bit_size` elements; smaller ones, which are mostly
    norms and biases, keep theirs as AdamW does. Blocks are runs of 256 elements as they lie in memory."""

    name = "adamw8bit"
    options = (*AdamW.options, "min_8bit_size")

    def __init__(self, params: Any, *args: Any, min_8bit_size: int = MIN_8BIT_SIZE, **kwargs: Any):
        super().__init__(params, *args, **kwargs)
        self.min_8bit_size = min_8bit_size

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        refuse_amsgrad([self.defaults | param_group])
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a checkpoint of this optimizer or of an AdamW, tilestack's or torch's, whose moments are then quantised."""
        refuse_amsgrad(state_dict["param_groups"])
        super().load_state_dict(state_dict)

    def _quantised(self, param: Tensor) -> bool:
        return param.numel() >= self.min_8bit_size and param.dtype != torch.float64

    def _kind(self, param: Tensor) -> tuple:
        return (self._quantised(param),)

    def _state_dtype(self, param: Tensor, name: str) -> torch.dtype:
        return torch.uint8 if self._quantised(param) and name in CODES else super()._state_dtype(param, name)

    def _start(self, state: dict[str, Any], param: Tensor, name: str) -> None:
        super()._start(state, param, name)
        if self._quantised(param):
            state[CODES[name]] = torch.zeros(-(-param.numel() // BLOCK), dtype=torch.float32, device=param.device)

    def _readable(self, param: Tensor, loaded: dict[str, Tensor]) -> dict[str, Tensor]:
        kept = super()._readable(param, loaded)
        coded = [name for name in CODES if name in kept and kept[name].dtype == torch.uint8]
        return kept | {CODES[name]: loaded[CODES[name]] for name in coded}

    def _adopt(self, param: Tensor, name: str, value: Tensor) -> Tensor:
        if name in CODES.values():
            if value.shape != (blocks := -(-param.numel() // BLOCK),):
                raise ValueError(
                    f"{name} has the shape {tuple(value.shape)}, and the parameter {blocks} blocks of {BLOCK}"
                )
            return value.to(param.device, torch.float32, copy=True)
        if name in CODES and self._quantised(param) and value.dtype != torch.uint8:
            codes, self.state[param][CODES[name]] = encode(
                in_memory_order(value.to(param.device, torch.float32), param), name == "exp_avg"
            )
            value = torch.empty_like(param, dtype=torch.uint8)
            value.as_strided((param.numel(),), (1,)).copy_(codes)
        return super()._adopt(param, name, value)

    def _define(self, group: dict[str, Any], param: Tensor, ordinal: int, factor: float) -> None:
        state = self._state(group, param)
        for name in CODES:  # the parameter may have been cast to float64, or from it
            if (state[name].dtype == torch.uint8) != self._quantised(param):
                state[name] = self._adopt(param, name, self._in_full(param, name))
        if not self._quantised(param):
            return super()._define(group, param, ordinal, factor)
        assert param.grad is not None
        words = self._draw(param, ordinal)
        unpacked = dict(state)
        for name, scales in CODES.items():
            unpacked[name] = decoded_state(state[name], state[scales], name)
        adam_step(group, param, param.grad, unpacked, factor, None if words is None else words[:1])
        for name, scales in CODES.items():
            flat = unpacked[name].as_strided((param.numel(),), (1,))
            codes, state[scales] = encode(flat, name == "exp_avg")
            state[name].as_strided((param.numel(),), (1,)).copy_(codes)

    def _rows(self, group: dict[str, Any], param: Tensor) -> tuple[str, ...]:
        if not self._quantised(param):
            return super()._rows(group, param)
        return ("exp_avg", "exp_avg_sq", *CODES.values(), *("master_param",) * self._has_master(param))

    def _launch(
        self, group: dict[str, Any], key: tuple, params: list[Tensor], walked: list[list[Tensor]], factors: Factors
    ) -> None:
        if not self._quantised(params[0]):
            return super()._launch(group, key, params, walked, factors)
        from tilestack.kernels.optim import eight_bit, steps

        columns = self._columns(group, key, params, walked)
        table = self._table(key, params, columns, eight_bit.BLOCK, steps.ADAM_RECORD.value)
        steps.prepare_adam(table, group, *factors)
        first = params[0]
        eight_bit.step_adam8(
            table,
            values_of_codes(first.device),
            (first.dtype, columns[2][0].dtype),
            factors.found_inf,
            self.seed,
            decoupled=group["decoupled_weight_decay"],
            master=self._has_master(first),
            stochastic=self._rounds_stochastically(first),
        )


def refuse_amsgrad(groups: Iterable[dict[str, Any]]) -> None:
    if any(group.get("amsgrad") for group in groups):
        raise ValueError("AdamW8bit has no amsgrad: a running maximum of quantised values would only ever grow")


def in_memory_order(x: Tensor, model: Tensor) -> Tensor:
    """The elements of x as a flat tensor, in the order in which those of the model lie in memory."""
    return torch.empty_like(model, dtype=x.dtype).copy_(x).as_strided((x.numel(),), (1,))
