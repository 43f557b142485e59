"""Linear layers whose weight alone is quantised: codes of 8 or 4 bits, with scales of groups along K. No gradients.

A number of the weight is (code - zero) · scale, where neighbours of a row share scale and zero point:

    int8           codes as they are, no zero point unless given
    float8_e4m3fn  codes as they are, no zero point
    uint8          two codes of 4 bits, 0 to 15, in a byte; the zero point is 8 unless given

Of 32 codes of 4 bits, the first 16 are the low halves of 16 bytes and the others their high halves. So what is unpacked from
neighbouring bytes meets neighbours of x.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import Cost, operator
from tilestack.ops.matmul import LAYERS
from tilestack.ops.numerics import wide
from tilestack.ops.quantised import LARGEST_CODE, SMALLEST_ROW

PACKED = 32  # codes of 4 bits that are packed together
CENTRE = 8  # the zero point of codes of 4 bits that have none
FORMATS = dict(int8=torch.int8, fp8=torch.float8_e4m3fn, int4=torch.uint8)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes 0 to 15, [N, K], as bytes [N, K / 2]; K is a multiple of 32."""
    low, high = codes.to(torch.uint8).unflatten(-1, (-1, 2, PACKED // 2)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_int4(packed: Tensor) -> Tensor:
    """Bytes [N, K / 2] as the codes [N, K] that they were packed from."""
    halves = packed.unflatten(-1, (-1, PACKED // 2))
    return torch.stack((halves & 15, halves >> 4), -2).flatten(-3)


def quantise_weight(
    weight: Tensor, format: str, group: int = 0, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(weight, scale, zero) of `linear_weight_only` for a weight [N, K]: `group` numbers of a row share a scale, all when 0.

    The codes and scales of a weight that learns have no gradient, and do not follow it. Symmetric codes have their group's largest magnitude on the largest code. Asymmetric ones, of integers, spread from the
    group's smallest number, or zero, to its largest, or zero.
    """
    if format not in FORMATS:
        raise ValueError(f"format must be {', '.join(FORMATS)}, not {format!r}")
    if not symmetric and format == "fp8":
        raise ValueError("fp8 has no zero points: quantise it symmetrically")
    if weight.ndim != 2 or weight.shape[1] == 0 or group < 0:
        raise ValueError(
            f"a weight is [N, K] with numbers along K, and a group some of them, not {tuple(weight.shape)} and {group}"
        )
    weight, inner = weight.detach(), weight.shape[1]
    group = group or inner
    if inner % group or (format == "int4" and (inner % PACKED or group % PACKED)):
        whole = f", which is a multiple of {PACKED} in int4" if format == "int4" else ""
        raise ValueError(f"rows of {inner} numbers are no whole groups of {group}{whole}")
    values = wide(weight).unflatten(1, (-1, group))
    limit = 7 if format == "int4" else LARGEST_CODE[FORMATS[format]]
    if symmetric:
        scale = values.abs().amax(-1, keepdim=True).clamp_min(SMALLEST_ROW) / limit
        codes, zero = values / scale, None
        if format == "fp8":
            return codes.flatten(1).to(FORMATS[format]), scale[..., 0], None
        codes = codes.round() + (CENTRE if format == "int4" else 0)
    else:
        least, most = (0, 15) if format == "int4" else (-128, 127)
        low, high = (getattr(values, end)(-1, keepdim=True) for end in ("amin", "amax"))
        scale = (high.clamp_min(0) - low.clamp_max(0)).clamp_min(SMALLEST_ROW) / (most - least)
        zero = (least - low.clamp_max(0) / scale).round()
        codes = (values / scale).round().add(zero).clamp(least, most)
        zero = zero[..., 0].to(torch.int8)
    flat = codes.flatten(1)
    return pack_int4(flat) if format == "int4" else flat.to(torch.int8), scale[..., 0], zero


def weight_only_case(make, rows, columns, inner, format="int4", group=0, parts="plain"):
    """`parts` names what there is: zero, bias, joined by +."""
    groups = max(inner, 1) // group if group else 1
    if format == "fp8":
        weight = make.normal(columns, inner, dtype=torch.float8_e4m3fn)
    elif format == "int8":
        weight = make.integers(columns, inner, low=-128, high=128, dtype=torch.int8)
    else:
        weight = make.integers(columns, inner // 2, high=256, dtype=torch.uint8)
    size = dict(fp8=1, int8=1 / 64, int4=1 / 4)[format] * max(inner, 1) ** -0.5
    made = dict(
        x=make.normal(rows, inner), weight=weight, scale=make.uniform(columns, groups, low=0.5, high=1.5) * size
    )
    if "zero" in parts:
        low, high = (0, 16) if format == "int4" else (-128, 128)
        made |= dict(zero=make.integers(columns, groups, low=low, high=high, dtype=torch.int8))
    return made | (dict(bias=make.normal(columns)) if "bias" in parts else {})


def codes_fit(x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None, bias: Tensor | None) -> bool | str:
    packed = weight.dtype == torch.uint8
    inner = weight.shape[-1] * (1 + packed)
    if x.ndim == 0 or weight.ndim != 2 or x.shape[-1] != inner:
        kept = "[N, K / 2] of two codes a byte" if packed else "[N, K]"
        return f"x ends in K and weight is {kept}, but x is {tuple(x.shape)} and weight {tuple(weight.shape)}"
    if scale.ndim != 2 or scale.shape[0] != weight.shape[0] or scale.shape[1] < 1 or inner % scale.shape[1]:
        return f"scale is [N, groups] with whole groups along K = {inner}, not {tuple(scale.shape)}"
    if packed and inner // scale.shape[1] % PACKED:
        return f"groups of 4-bit codes are multiples of {PACKED}, not {inner // scale.shape[1]}"
    if zero is not None and (zero.shape != scale.shape or weight.is_floating_point()):
        return f"zero is like scale, {tuple(scale.shape)}, and for integers, not {tuple(zero.shape)} for {weight.dtype}"
    return (
        bias is None
        or bias.shape == weight.shape[:1]
        or (f"bias must have shape {tuple(weight.shape[:1])}, not {tuple(bias.shape)}")
    )


@operator(
    cases=cases(
        weight_only_case,
        check=[
            (1, 1, 32),
            (5, 17, 64, "int4", 32, "zero+bias"),
            (20, 40, 384, "int4", 128),
            (3, 70, 256, "int4", 64, "zero"),
            (1, 1, 1, "int8"),
            (5, 17, 33, "int8", 0, "bias"),
            (17, 40, 128, "int8", 64, "zero"),
            (4, 24, 96, "fp8", 32, "bias"),
            (70, 33, 48, "fp8"),
            (0, 8, 32),
            (8, 0, 32, "int4", 32),
            (8, 16, 0, "int8", 0, "bias"),
        ],
        gpu=[
            (1, 300, 4096, "int4", 128, "bias"),
            (16, 520, 2080, "int4", 32, "zero+bias"),
            (9, 130, 2064, "int8", 16, "zero"),
            (13, 200, 2080, "fp8"),
        ],
        bench=[
            *((rows, *layer, "int4", 128) for layer in LAYERS[:2] for rows in (1, 4, 16, 512)),
            *((rows, *LAYERS[1], format) for rows in (1, 16) for format in ("int8", "fp8")),
        ],
    ),
    cost=lambda x, weight, scale: Cost(flops=2 * x.numel() * weight.shape[0]),
    check=codes_fit,
    dtypes=dict(weight=tuple(FORMATS.values()), zero=(torch.int8,)),
    tuning_key=lambda x, weight: (
        x.shape[:-1].numel(), *weight.shape, next(name for name, dtype in FORMATS.items() if dtype == weight.dtype)
    ),
)  # fmt: skip
def linear_weight_only(
    x: Tensor, weight: Tensor, scale: Tensor, zero: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x @ ((code - zero) · scale).T + bias for a weight of codes: int8 or float8_e4m3fn [out, in], or two of 4 bits in
    each byte of uint8 [out, in / 2]; scale, and zero where there is one, are [out, groups]. See `quantise_weight`."""
    precise = wide(x)
    packed = weight.dtype == torch.uint8
    codes = (unpack_int4(weight) if packed else weight).to(precise.dtype)
    groups = codes.unflatten(1, (scale.shape[1], -1)) if codes.shape[1] else codes[:, None]
    zeros = (CENTRE if packed else 0) if zero is None else zero.to(precise.dtype)[..., None]
    out = precise @ ((groups - zeros) * scale.to(precise.dtype)[..., None]).flatten(1).T
    return (out if bias is None else out + bias.to(precise.dtype)).to(x.dtype)
