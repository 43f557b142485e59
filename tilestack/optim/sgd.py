"""SGD: torch's, with the step in one launch for all tensors of a group."""

from typing import Any

import torch
from torch import Tensor

from tilestack.optim.definitions import sgd_step
from tilestack.optim.multi_tensor import Factors, MultiTensor


class SGD(MultiTensor, torch.optim.SGD):
    """torch.optim.SGD with its arguments and checkpoints, plus `clip_norm`. `foreach` and `fused` change nothing."""

    name = "sgd"

    def _forget(self) -> None:
        super()._forget()
        # Which momentum buffers wait for their first gradient; on the device, for a step may be skipped there.
        self._empty: dict[Tensor, Tensor] = {}

    def _buffer(self, param: Tensor) -> Tensor:
        state = self.state[param]
        if state.get("momentum_buffer") is None:
            state["momentum_buffer"] = torch.zeros_like(param)
            self._empty[param] = torch.ones((), dtype=torch.int32, device=param.device)
        elif param not in self._empty:
            self._empty[param] = torch.zeros((), dtype=torch.int32, device=param.device)
        return state["momentum_buffer"]

    def _define(self, group: dict[str, Any], param: Tensor, ordinal: int, factor: float) -> None:
        assert param.grad is not None
        if group["momentum"] == 0:
            sgd_step(group, param, param.grad, None, False, factor)
        else:
            buffer, empty = self._buffer(param), self._empty[param]
            sgd_step(group, param, param.grad, buffer, bool(empty), factor)
            empty.zero_()

    def _launch(
        self, group: dict[str, Any], key: tuple, params: list[Tensor], walked: list[list[Tensor]], factors: Factors
    ) -> None:
        from tilestack.kernels.optim import steps as kernels

        if group["momentum"] == 0:
            columns = [walked[0], *walked]
        else:
            for param in params:
                self._buffer(param)
            self._refit(key, params, walked[0], ["momentum_buffer"])
            columns = [[self._empty[param] for param in params], *walked, [self._buffer(param) for param in params]]
        dtypes = params[0].dtype, walked[1][0].dtype
        table = self._table(key, params, columns, kernels.block_for(*dtypes), kernels.SGD_RECORD.value)
        kernels.step_sgd(table, dtypes, group, *factors)
