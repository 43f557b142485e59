"""The norms of a decoder: RMSNorm, alone or together with the residual sum before it."""

from torch import Tensor

from tilestack import ops
from tilestack.models.config import ModelConfig
from tilestack.nn import RMSNorm
from tilestack.ops.numerics import wide


class Norm(RMSNorm):
    """RMSNorm whose weights may be stored less an offset: Gemma's are zero where they change nothing."""

    def __init__(self, size: int, config: ModelConfig):
        super().__init__(size, eps=config.norm_eps)
        self.epsilon, self.offset = config.norm_eps, config.norm_offset

    @property
    def scale(self) -> Tensor:
        """What normalised elements are multiplied by; an offset is added in float32, as 1 + w has few of the bits of w."""
        return wide(self.weight) + self.offset if self.offset else self.weight

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.scale, self.epsilon).to(x.dtype) if self.offset else super().forward(x)


def add_norm(x: Tensor, residual: Tensor | None, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """(the norm of x + residual, x + residual); the residual stream keeps its dtype under autocast."""
    if residual is None:
        return x if norm is None else norm(x), x
    x = x.to(residual.dtype)
    if norm is None:
        summed = x + residual
        return summed, summed
    normal, summed = ops.add_rms_norm(x, residual, norm.scale, norm.epsilon)
    return normal.to(summed.dtype) if norm.offset else normal, summed
