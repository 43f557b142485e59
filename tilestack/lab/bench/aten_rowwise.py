"""PyTorch's grouped product of fp8 as a peer where scales are of blocks, for which it has none.

`torch._scaled_grouped_mm` has a scale for each row of both operands, and in a gradient of weights for each line of each
group. What a user of it would have is made here, once and untimed: the same numbers in codes of such scales. The product is
as large and reads as many bytes; only its digits are fewer, for a large number makes all of its row coarser. Where the
operator's scales are of rows themselves, the backend `aten` is the peer, on the same codes.

In a gradient of weights groups lie side by side along the rows that are added up, and TMA wants each to begin on 16 bytes:
they are padded with zeros, as users pad theirs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack.ops.grouped import sizes_of
from tilestack.ops.quantised import quantised
from tilestack.ops.quantised_linear import E4M3, result_dtype, spread_over_blocks

ALIGNMENT = 16  # codes

Operands = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]  # left, right, their scales, where groups end


def refuse_where_it_is_missing(device: torch.device, scale: Tensor, dtype: str) -> None:
    from tilestack.kernels.quantised.aten import has_grouped_fp8  # whoever asks for the names of peers needs no kernels

    if (reason := has_grouped_fp8(device)) is not True:
        raise NotImplementedError(reason)
    if result_dtype(scale, dtype) != torch.bfloat16:
        raise NotImplementedError("PyTorch's own grouped product of fp8 gives bfloat16")


def linear_operands(
    x: Tensor, weight: Tensor, x_scale: Tensor, weight_scale: Tensor, offsets: Tensor, dtype: str
) -> Operands:
    refuse_where_it_is_missing(x.device, weight_scale, dtype)
    if weight_scale.ndim == 2:
        raise NotImplementedError("the scales are of rows: aten is the peer")
    x, x_scale = quantised(x.float() * spread_over_blocks(x_scale.float(), x.shape[1]), E4M3)
    weight, weight_scale = quantised(weight.float() * spread_over_blocks(weight_scale.float(), *weight.shape[1:]), E4M3)
    return x, weight.mT, x_scale, weight_scale, offsets


def outer_operands(
    left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor, dtype: str
) -> Operands:
    refuse_where_it_is_missing(left.device, right_scale, dtype)
    *sizes, _ = sizes_of(offsets, left.shape[1])
    lefts = left.float() * spread_over_blocks(left_scale.float(), left.shape[1])
    rights = right.float() * spread_over_blocks(right_scale.float(), *right.shape)
    left, left_scale = padded_groups(lefts, sizes)
    right, right_scale = padded_groups(rights, sizes)
    padded = torch.tensor([size + -size % ALIGNMENT for size in sizes], device=offsets.device)
    return left, right.T, left_scale, right_scale, padded.cumsum(0).int()


def padded_groups(lines: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    """Codes of each group's part of each line, with zeros up to the next 16, and a scale of each: groups times lines."""
    coded = []
    for part in lines[:, : sum(sizes)].split(sizes, 1):
        filled = F.pad(part, (0, -part.shape[1] % ALIGNMENT))
        coded.append(quantised(filled, E4M3) if part.shape[1] else (filled.to(E4M3), torch.ones_like(lines[:, 0])))
    codes, scales = zip(*coded, strict=True)
    return torch.cat([c.view(torch.uint8) for c in codes], 1).view(E4M3), torch.cat(scales)


def grouped_product(left: Tensor, right: Tensor, left_scale: Tensor, right_scale: Tensor, offsets: Tensor) -> Tensor:
    return torch._scaled_grouped_mm(left, right, left_scale, right_scale, offs=offsets, out_dtype=torch.bfloat16)
