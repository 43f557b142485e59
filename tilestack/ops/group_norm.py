"""GroupNorm: each image's channels in groups, each group normalised together."""

import math

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.norm import first_objection, like_weight, mixed
from tilestack.ops.numerics import wide


def group_case(make, groups, *size):
    affine = dict(weight=make.normal(size[1], mean=1), bias=make.normal(size[1]))
    return dict(x=make.normal(*size, scale=3, mean=0.5), groups=groups) | affine


def unbiased_case(make, groups, *size):
    return {name: value for name, value in group_case(make, groups, *size).items() if name != "bias"}


def plain_case(make, groups, *size):
    return dict(x=make.normal(*size, scale=3, mean=0.5), groups=groups)


def fits_channels(x: Tensor, groups: int, weight: Tensor | None) -> bool | str:
    if x.ndim < 2:
        return f"x needs a batch and a channel dimension, [N, C, ...], but its shape is {tuple(x.shape)}"
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        return f"groups must divide the {channels} channels of x, and {groups} does not"
    return (
        weight is None
        or weight.shape == (channels,)
        or f"weight must have shape ({channels},), the channels of x, not {tuple(weight.shape)}"
    )


# (groups, images, channels, sizes …)
CHECKS = [
    (1, 2, 3, 5),
    (2, 3, 4),
    (4, 2, 4, 33),
    (3, 2, 6, 7, 7),
    (2, 1, 20, 3, 5, 2),
    (1, 2, 7, 130),
    (2, 2, 4, 5000),
    (1, 1, 9, 1000),
    (2, 1, 2, 9000),
    (2, 0, 4, 5),
    (2, 3, 4, 0),
]
BENCHES = [(32, 64, 256, 64, 64), (32, 32, 512, 64, 64), (32, 16, 320, 128, 128), (32, 256, 512, 7, 7)]


@operator(
    cases=[
        *cases(group_case, check=CHECKS, bench=BENCHES),
        *cases(mixed(group_case), check=[(2, 2, 6, 35)]),
        *cases(unbiased_case, check=[(2, 2, 6, 34)]),
        *cases(plain_case, check=[(2, 2, 6, 33)]),
    ],
    cost=lambda x, weight: Cost(flops=7 * x.numel(), backward_flops=12 * x.numel(), backward_read=[x, weight]),
    check=lambda x, groups, weight, bias: first_objection(like_weight(weight, bias), fits_channels(x, groups, weight)),
)
def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """(x - mean) / std over each group of channels of [N, C, ...], then * weight + bias, one of each per channel."""
    images, channels, *sizes = x.shape
    rows = wide(x).reshape(images, groups, channels // groups * math.prod(sizes))
    centred = rows - rows.mean(-1, keepdim=True)
    normal = (centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)).reshape(x.shape)
    if weight is None:
        return normal.to(x.dtype)
    per_channel = (channels, *(1 for _ in sizes))
    scaled = normal * wide(weight).view(per_channel)
    result = scaled if bias is None else scaled + wide(bias).view(per_channel)
    return result.to(torch.promote_types(x.dtype, weight.dtype))
