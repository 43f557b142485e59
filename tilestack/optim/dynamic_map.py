"""The dynamic 8-bit map of optimizer states: small floats with a decimal exponent, after Dettmers' dynamic tree.

Within a block of 256 elements everything is a multiple of the block's largest magnitude, so values lie in [0, 1]. The
bits of a code read, from the top: a sign (first moment only), zeros that count decades down from 1, a one that ends
them, and all bits left over as a linear fraction within the decade. With f such bits the decade [0.1, 1] · 10^-e is cut
into 2^f equal parts, and the code stands for the middle of one:

    signed   1 0 0 1 0 1 1 0        - 10^-2 · (0.1 + 0.9 · (0b0110 + ½) / 2⁴)
             ± ─e─ ┴ ───f───

so that values near 1 get two digits and values near 10⁻⁶ are still not lost. Two codes are special: 0 is zero, and the
code that would be minus zero (signed), or 1 (unsigned), is exactly one, the largest element of a block.
"""

import functools

import torch
from torch import Tensor

BLOCK = 256
DECADES = 7
CODES = {"exp_avg": "exp_avg_scale", "exp_avg_sq": "exp_avg_sq_scale"}  # states in codes, and where their scales are


@functools.cache
def dynamic_map(signed: bool) -> Tensor:
    """The value of each of the 256 codes, in float32."""
    most = DECADES - 1 if signed else DECADES  # fraction bits of the uppermost decade
    values = torch.zeros(256, dtype=torch.float64)
    for decade in range(DECADES):
        parts = 2 ** (most - decade)
        middle = (torch.arange(parts, dtype=torch.float64) + 0.5) / parts
        values[parts : 2 * parts] = 10.0**-decade * (0.1 + 0.9 * middle)
    if signed:
        values[128:] = -values[:128]
    values[128 if signed else 1] = 1
    return values.float()


@functools.cache
def values_of_codes(device: torch.device) -> Tensor:
    """The values of all signed codes, then those of all unsigned ones, [2, 256], kept on a device for the kernels."""
    return torch.stack([dynamic_map(True), dynamic_map(False)]).to(device)


def decode(codes: Tensor, scales: Tensor, signed: bool) -> Tensor:
    """float32 of the codes' shape; `codes` are flat and `scales` one per block of 256."""
    return dynamic_map(signed).to(codes.device)[codes.long()] * scales.repeat_interleave(BLOCK)[: codes.numel()]


def decoded_state(codes: Tensor, scales: Tensor, name: str) -> Tensor:
    """float32 of a state that is a tensor of codes, in its memory order, of which the blocks are runs."""
    values = torch.empty_like(codes, dtype=torch.float32)
    flat = lambda x: x.as_strided((codes.numel(),), (1,))
    flat(values).copy_(decode(flat(codes), scales, name == "exp_avg"))
    return values


def encode(values: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a flat float32 tensor: the nearest code of each, but nothing unsigned and positive becomes zero,
    for a second moment that did would divide by zero."""
    padded = torch.nn.functional.pad(values, (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(1)
    scales = torch.where(scales < torch.finfo(torch.float32).tiny, 0, scales)
    padded = torch.where(scales[:, None] > 0, padded, 0)
    relative = (padded / torch.where(scales > 0, scales, 1)[:, None]).view(-1)[: values.numel()]
    ordered, codes = dynamic_map(signed).to(values.device).sort()
    nearest = torch.bucketize(relative, (ordered[1:] + ordered[:-1]) / 2)
    if not signed:
        nearest = torch.where(relative > 0, nearest.clamp_min(1), nearest)
    return codes[nearest].to(torch.uint8), scales
