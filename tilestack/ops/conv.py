"""Convolution of images, in floating point and in int8."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.autocast import lower_when_traced, lowered
from tilestack.ops.numerics import wide
from tilestack.ops.quantised_linear import MOST_INNER

LAST = torch.channels_last


def output_size(size: int, taps: int, stride: int, padding: int, dilation: int) -> int:
    """How many places a filter of so many taps has along a side; below one where it does not fit."""
    return (size + 2 * padding - dilation * (taps - 1) - 1) // stride + 1


def channels_lie_together(image: Tensor) -> bool:
    """Whether an image lies in memory with its channels last; like PyTorch, by the strides of single pixels too."""
    _, channels, height, width = image.shape
    line = width * channels
    return not image.is_contiguous() and image.stride() == (height * line, 1, line, channels)


def in_order_of(x: Tensor, out: Tensor) -> Tensor:
    """A result with its channels last where those of x are; libraries do so in some dtypes."""
    return out.contiguous(memory_format=LAST) if channels_lie_together(x) else out


def conv_case(make, images, channels, side, filters, taps, stride=1, padding=0, dilation=1, groups=1, order="nchw"):
    height, width = (side, side + 1) if order == "nchw" else (side, side)
    x = make.normal(images, channels, height, width)
    weight = make.normal(filters, channels // groups, taps, taps, scale=(channels // groups * taps * taps) ** -0.5)
    if order == "nhwc":
        x, weight = x.contiguous(memory_format=LAST), weight.contiguous(memory_format=LAST)
    sides = dict(stride=(stride, stride), padding=(padding, padding), dilation=(dilation, dilation), groups=groups)
    return dict(x=x, weight=weight, bias=make.normal(filters)) | sides


def layer_case(make, images, channels, side, filters, taps, stride):
    """A layer of a network in NHWC: padded so that a stride of one keeps the sides, without a bias, which a norm follows."""
    made = conv_case(make, images, channels, side, filters, taps, stride, taps // 2, order="nhwc")
    return made | dict(bias=None)


def uneven_case(make, *order):
    """Another stride, padding, dilation and filter along each side; no bias."""
    x, weight = make.normal(1, 4, 5, 8), make.normal(6, 4, 3, 2, scale=0.2)
    return dict(x=x, weight=weight, stride=(2, 3), padding=(2, 1), dilation=(1, 2))


def thin_case(make, channels, width):
    """Channels last, and of one channel or one pixel wide: a side of one has a stride too, which means nothing."""
    last = lambda *sizes: make.normal(*sizes).permute(0, 3, 1, 2)
    return dict(x=last(2, 5, width, channels), weight=0.2 * last(4, 3, 3, channels), padding=(1, 1))


def int8_case(make, images, channels, side, filters, taps, stride=1, padding=0, groups=1):
    codes = dict(low=-127, high=128, dtype=torch.int8)
    return dict(
        x=make.integers(images, channels, side, side, **codes).contiguous(memory_format=LAST),
        weight=make.integers(filters, channels // groups, taps, taps, **codes).contiguous(memory_format=LAST),
        x_scale=make.uniform(low=0.01, high=0.02),
        weight_scale=make.uniform(filters, low=0.001, high=0.002),
        bias=make.normal(filters),
        stride=(stride, stride),
        padding=(padding, padding),
        groups=groups,
    )


def int8_layer_case(make, images, channels, side, filters, taps, stride):
    return int8_case(make, images, channels, side, filters, taps, stride, taps // 2) | dict(bias=None)


def are_two_numbers(pair: Any) -> bool:
    """Whether these are the two whole numbers of a height and a width, and not one for both or a word like `same`."""
    return hasattr(pair, "__len__") and len(pair) == 2 and all(hasattr(number, "__index__") for number in pair)


def filters_fit(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> bool | str:  # fmt: skip
    if x.ndim != 4 or weight.ndim != 4:
        return f"x is [N, C, H, W] and weight [K, C / groups, R, S], but they are {tuple(x.shape)} and {tuple(weight.shape)}"
    named = dict(stride=stride, padding=padding, dilation=dilation)
    for name, pair in named.items():
        if not are_two_numbers(pair) or min(pair) < (name != "padding"):
            return f"{name} must be two numbers, {'not negative' if name == 'padding' else 'positive'}, not {pair!r}"
    (filters, inner, *taps), channels = weight.shape, x.shape[1]
    if groups < 1 or channels % groups or filters % groups or channels // groups != inner:
        return f"{groups} groups of {inner} channels and {filters} filters do not fit x, which has {channels} channels"
    if 0 in (channels, filters, *taps):
        return (
            f"there must be a channel, a filter and a tap, but x is {tuple(x.shape)} and weight {tuple(weight.shape)}"
        )
    if min(output_size(*s) for s in zip(x.shape[2:], taps, stride, padding, dilation, strict=True)) < 1:
        return f"filters of {tuple(taps)} taps, {tuple(dilation)} apart, do not fit into {tuple(x.shape[2:])} with a padding of {tuple(padding)}"
    if bias is not None and bias.shape != (filters,):
        return f"bias must have shape ({filters},), not {tuple(bias.shape)}"
    return True


def one_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool | str:
    others = [tensor.dtype for tensor in (weight, bias) if tensor is not None]
    return all(dtype == x.dtype for dtype in others) or (
        f"x, weight and bias must have one dtype, but x is {x.dtype} and the others {', '.join(map(str, others))}"
    )


def fits_in_one_dtype(
    x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], groups: int,
) -> bool | str:  # fmt: skip
    found = filters_fit(x, weight, bias, stride, padding, dilation, groups)
    return one_dtype(x, weight, bias) if found is True else found


def scales_fit(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None, stride: Sequence[int],
    padding: Sequence[int], dilation: Sequence[int], groups: int, dtype: str,
) -> bool | str:  # fmt: skip
    if (found := filters_fit(x, weight, bias, stride, padding, dilation, groups)) is not True:
        return found
    if x_scale.numel() != 1 or weight_scale.shape != weight.shape[:1]:
        return f"x_scale is one number and weight_scale one a filter, but they are {tuple(x_scale.shape)} and {tuple(weight_scale.shape)}"
    products = weight.shape[1:].numel()
    if products > MOST_INNER[False]:
        return f"sums over {products} products may pass what int32 holds; at most {MOST_INNER[False]} do not"
    return (
        dtype in ("", "float16", "bfloat16", "float32")
        or f"dtype must be float16, bfloat16, float32 or '', not {dtype!r}"
    )


def conv_cost(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Cost:
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    places = x.shape[0] * torch.Size(output_size(*side) for side in sides).numel()
    return Cost(flops=2 * places * weight.numel(), backward_read=[x, weight])


# (images, channels, side, filters, taps, stride): the layers of a ResNet-50 that take its time, and its first.
RESNET = [
    (32, 3, 224, 64, 7, 2),
    (32, 256, 56, 64, 1, 1),
    (32, 64, 56, 64, 3, 1),
    (32, 64, 56, 256, 1, 1),
    (32, 256, 56, 512, 1, 2),
    (32, 128, 56, 128, 3, 2),
    (32, 128, 28, 128, 3, 1),
    (32, 128, 28, 512, 1, 1),
    (32, 256, 14, 256, 3, 1),
    (32, 1024, 14, 256, 1, 1),
    (32, 512, 7, 512, 3, 1),
    (32, 512, 7, 2048, 1, 1),
]


@operator(
    cases=cases(
        conv_case,
        check=[
            (1, 1, 1, 1, 1),
            (1, 3, 5, 5, 3, 1, 1),
            (1, 4, 5, 6, 2, 2, 1),
            (1, 6, 3, 4, 2, 1, 2, 2, 2),
            (1, 4, 3, 4, 2, 1, 1, 1, 4),
            (2, 3, 11, 5, 2, 2, 1),
            (1, 2, 6, 3, 2, 2, 3, 3),
            (1, 2, 6, 3, 3, 2, 1, 2),
            (3, 2, 1, 4, 1),
            (2, 33, 3, 40, 1, 2),
            (1, 3, 3, 5, 2, 1, 1, 1, 1, "nhwc"),
            (1, 16, 3, 36, 2, 1, 1, 1, 1, "nhwc"),
            (2, 20, 4, 17, 2, 2, 1, 1, 1, "nhwc"),
            (1, 64, 2, 128, 1, 1, 0, 1, 1, "nhwc"),
            (1, 48, 3, 80, 3, 2, 1, 1, 1, "nhwc"),
            (1, 3, 6, 36, 3, 2, 1, 1, 1, "nhwc"),
            (0, 4, 5, 4, 3),
        ],
        gpu=[
            (3, 64, 10, 128, 3, 1, 1, 1, 1, "nhwc"),
            (2, 128, 6, 192, 3, 2, 1, 1, 1, "nhwc"),
            (2, 64, 8, 64, 1, 2, 0, 1, 1, "nhwc"),
            (1, 64, 9, 64, 2, 1, 2, 3, 1, "nhwc"),
            (2, 8, 20, 40, 7, 2, 3, 1, 1, "nhwc"),
            (1, 3, 150, 16, 5, 2, 2),
        ],
    )
    + cases(uneven_case, check=[("uneven",)])
    + cases(thin_case, check=[(1, 6), (3, 1)])
    + cases(layer_case, check=[], bench=RESNET),
    cost=conv_cost,
    check=fits_in_one_dtype,
    tuning_key=lambda x, weight, stride, groups: (*x.shape, *weight.shape, *stride, groups),
)
def conv2d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0),
    dilation: Sequence[int] = (1, 1), groups: int = 1,
) -> Tensor:  # fmt: skip
    """torch.nn.functional.conv2d: x [N, C, H, W] with filters [K, C / groups, R, S], in any memory order. Of images whose
    channels lie together (channels_last) so do the result's. Under autocast all are in its dtype."""
    x, weight, bias = lowered(x, weight, bias)
    return in_order_of(x, F.conv2d(x, weight, bias, tuple(stride), tuple(padding), tuple(dilation), groups))


lower_when_traced(conv2d)


@operator(
    cases=cases(
        int8_case,
        check=[
            (1, 1, 1, 1, 1),
            (2, 5, 6, 7, 3, 1, 1),
            (1, 40, 5, 33, 1, 2),
            (2, 8, 6, 6, 3, 2, 1, 2),
            (1, 64, 2, 64, 1),
            (1, 48, 3, 80, 3, 2, 1),
            (0, 4, 5, 4, 3),
        ],
        gpu=[(3, 64, 10, 128, 3, 1, 1), (2, 192, 6, 192, 3, 2, 1), (2, 128, 8, 256, 1)],
    )
    + cases(int8_layer_case, check=[], bench=RESNET),
    cost=conv_cost,
    check=scales_fit,
    dtypes=dict(x=(torch.int8,), weight=(torch.int8,)),
    tuning_key=lambda x, weight, stride, groups: (*x.shape, *weight.shape, *stride, groups),
)
def conv2d_int8(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1), padding: Sequence[int] = (0, 0), dilation: Sequence[int] = (1, 1), groups: int = 1,
    dtype: str = "",
) -> Tensor:  # fmt: skip
    """conv2d of int8 codes, times x_scale, one for all of x, and weight_scale, one a filter; plus bias.

    Sums of codes are exact; they become numbers, in the dtype given or that of weight_scale, once. No gradients.
    """
    sums = F.conv2d(x.double(), weight.double(), None, tuple(stride), tuple(padding), tuple(dilation), groups)
    scaled = sums.to(wide(weight_scale).dtype) * (wide(x_scale).reshape(()) * wide(weight_scale))[:, None, None]
    out = scaled if bias is None else scaled + wide(bias)[:, None, None]
    return in_order_of(x, out.to(getattr(torch, dtype) if dtype else weight_scale.dtype))
