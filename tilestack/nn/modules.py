"""PyTorch's modules on our operators.

Each is a subclass of the module it replaces, so constructor, initialisation, representation, state dict and
`isinstance` are PyTorch's; only `forward` is ours. Results have the dtype PyTorch's would have, under torch.autocast
too.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack import ops
from tilestack.nn.autocast import lowered, raised


class Linear(torch.nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return ops.linear(*lowered(input, self.weight, self.bias))


class Conv2d(torch.nn.Conv2d):
    """Padding by "same", or by other values than zeros, is added to the image first, as PyTorch does."""

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        padding, sides = self.padding, self._reversed_padding_repeated_twice  # left, right, top, bottom
        if self.padding_mode != "zeros" or isinstance(padding, str):
            mode = "constant" if self.padding_mode == "zeros" else self.padding_mode
            input, padding = F.pad(input, sides, mode=mode), (0, 0)
        images = input if input.ndim == 4 else input[None]
        images, weight, bias = lowered(images, weight, bias)
        out = ops.conv2d(images, weight, bias, self.stride, padding, self.dilation, self.groups)
        return out if input.ndim == 4 else out[0]


class RMSNorm(torch.nn.RMSNorm):
    """Without an eps, the smallest step of the dtype computed in: float64 for float64, float32 for all others."""

    def forward(self, x: Tensor) -> Tensor:
        eps = torch.finfo(torch.promote_types(x.dtype, torch.float32)).eps if self.eps is None else self.eps
        return normalized(ops.rms_norm, raised(x, "rms_norm"), self.normalized_shape, self.weight, eps=eps)


class LayerNorm(torch.nn.LayerNorm):
    def forward(self, input: Tensor) -> Tensor:
        return normalized(
            ops.layer_norm, raised(input, "layer_norm"), self.normalized_shape, self.weight, self.bias, eps=self.eps
        )


class GroupNorm(torch.nn.GroupNorm):
    def forward(self, input: Tensor) -> Tensor:
        x = raised(input, "group_norm")
        return ops.group_norm(x, self.num_groups, self.weight, self.bias, self.eps).to(x.dtype)


class Softmax(torch.nn.Softmax):
    """Without a dim, the one PyTorch falls back to: the first of vectors and of three dimensions, else the second."""

    def forward(self, input: Tensor) -> Tensor:
        dim = (0 if input.ndim in (1, 3) else 1) if self.dim is None else self.dim
        return ops.softmax(raised(input, "softmax.int"), dim)


class ReLU(torch.nn.ReLU):
    def forward(self, input: Tensor) -> Tensor:
        # The gradient of relu needs only the output, so the input may be overwritten.
        return input.copy_(ops.relu(input)) if self.inplace else ops.relu(input)


class GELU(torch.nn.GELU):
    def forward(self, input: Tensor) -> Tensor:
        return ops.gelu(input, self.approximate)


class SiLU(torch.nn.SiLU):
    def forward(self, input: Tensor) -> Tensor:
        # The gradient of silu needs the input, so a copy of it has to outlive being overwritten.
        return input.copy_(ops.silu(input.clone())) if self.inplace else ops.silu(input)


class Tanh(torch.nn.Tanh):
    def forward(self, input: Tensor) -> Tensor:
        return ops.tanh(input)


class Sigmoid(torch.nn.Sigmoid):
    def forward(self, input: Tensor) -> Tensor:
        return ops.sigmoid(input)


def normalized(
    norm: Callable[..., Tensor], x: Tensor, normalized_shape: tuple[int, ...], *parameters: Tensor | None, eps: float
) -> Tensor:
    """A norm over the last dimensions of x, merged into one for the operator."""
    dimensions = len(normalized_shape)
    if x.shape[-dimensions:] != normalized_shape:
        raise ValueError(
            f"the input must end in normalized_shape {tuple(normalized_shape)}, but its shape is {tuple(x.shape)}"
        )
    if dimensions == 1:
        return norm(x, *parameters, eps=eps).to(x.dtype)
    flat = (None if parameter is None else parameter.flatten() for parameter in parameters)
    return norm(x.flatten(-dimensions), *flat, eps=eps).to(x.dtype).view(x.shape)
