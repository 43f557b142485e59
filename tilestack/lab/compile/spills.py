"""Kernels that spill registers and are not yet cured: the most bytes by GPU, where, and why.

An entry allows no more than it says. One whose kernel spills no longer is found by the tests and must be struck off: each
names the call that spills most, which is always compiled. All this is of the newest Triton; an older one writes other code
for the same assembler, which spills a little here and there, and nothing there: its table only allows.
"""

from collections.abc import Collection
from dataclasses import dataclass

import triton


@dataclass(frozen=True)
class Owed:
    """What a kernel spills that is not yet cured."""

    most: dict[int, int]  # bytes, stores and loads together, by compute capability
    where: tuple[str, str, str]  # operator, case and dtype in which it spills most
    why: str


SPILLS_OWED = {
    "matmul_naive_kernel": Owed(
        {90: 16},
        ("linear", "16x40x304xplain", "float32"),
        "two sums beside each other, so that a long one loses no digits",
    ),
    "matmul_pipelined_kernel": Owed(
        {90: 16},
        ("fused_linear", "8192x4096x4096xbias+gelu_tanh", "float32"),
        "in rows that are not whole vectors: an address for each element of both tiles, and an epilogue behind them",
    ),
    "matmul_split_k_kernel": Owed(
        {100: 64},
        ("linear", "16x40x304xplain", "bfloat16"),
        "the assembler stops at 80 registers of 255; on sm_90 it takes 64 and spills none",
    ),
    "group_norm_fwd_kernel": Owed(
        {100: 56},
        ("group_norm", "2x2x4x5000", "bfloat16"),
        "the assembler stops at 64 registers of 255; on sm_90 it takes 80",
    ),
    "grouped_linear_fwd_kernel": Owed(
        {80: 1580, 90: 1864, 100: 3020},
        ("grouped_linear", "260x2x17x130xeven", "bfloat16"),
        "matrices of odd width give each element an address of its own",
    ),
    "paged_attention_kernel": Owed(
        {80: 184, 90: 224, 100: 288},
        ("paged_attention", "256x4096x16x32x8x128x128xint8", "bfloat16"),
        "codes by one warp, four heads to a group, which is faster all the same",
    ),
    "softmax_bwd_kernel": Owed(
        {90: 32},
        ("softmax", "4x5x6x1", "bfloat16"),
        "rows of odd length give each element an address of its own",
    ),
    "flash_bwd_queries_kernel": Owed(
        {90: 400},
        ("attention", "1x60x110x2x1x256x256xcapped", "float32"),
        "heads beyond 128 have queries and arriving gradients in registers",
    ),
    "attention_bwd_kernel": Owed(
        {90: 352},
        ("attention", "8x2048x2048x16x8x128x128xdocuments", "bfloat16"),
        "heads of 128: addresses that never change are fetched again in each step, beside two sums; with documents their ends",
    ),
    "attention_codes_kernel": Owed(
        {90: 88},
        ("attention_int8", "2x670x670x2x1x128x128xdocuments", "bfloat16"),
        "heads of 128 in tiles with a mask, of documents above all, whose beginnings are beside it; those seen whole have a loop of their own",
    ),
}

OLDER = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)
SPILLS_OF_OLDER = {  # where it spills more than that: the most bytes by GPU
    "count_choices_kernel": {90: 8},
    "flash_bwd_keys_kernel": {90: 8},
    "flash_fwd_kernel": {90: 8},
    "fused_hopper_kernel": {90: 20},
    "gather_rows_kernel": {90: 16, 100: 16},
    "grouped_outer_fp8_kernel": {90: 12},
    "norm_ragged_bwd_kernel": {90: 28},
    "norm_ragged_fwd_kernel": {90: 8},
    "paged_attention_kernel": {80: 264, 90: 288},
}


def spills_owed(kernel: str, capability: int) -> int:
    """The bytes that a kernel is known to spill on a GPU, 0 for one that must not."""
    owed = SPILLS_OWED[kernel].most.get(capability, 0) if kernel in SPILLS_OWED else 0
    return max(owed, SPILLS_OF_OLDER.get(kernel, {}).get(capability, 0)) if OLDER else owed


def spills_no_longer_owed(spilling: Collection[str], capability: int, walked: Collection[str]) -> list[str]:
    """The kernels that need their entry no longer on a GPU, given those that spill there in calls of the operators walked;
    what an older Triton compiles does not tell."""
    if OLDER:
        return []
    owing = [kernel for kernel, owed in SPILLS_OWED.items() if capability in owed.most and owed.where[0] in walked]
    return [kernel for kernel in owing if kernel not in spilling]
