"""Attention over pages in CUDA C++, for batches in which every sequence has one new token: who reads what of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.workspace import workspace
from tilestack.kernels.cuda.build import DTYPES, call, library
from tilestack.kernels.early import begins_early
from tilestack.kernels.matmul.products import HALVES
from tilestack.kernels.quantised.codes import reads_fp8
from tilestack.kernels.tiles import cdiv, multiprocessors

KEYS, LEAST_KEYS, MOST_GROUP, ALIGNMENT = 16, 128, 8, 16  # as in paged_decode.cu; the last in bytes
MOST_SPLITS = 32


class Config(NamedTuple):
    """Warps of a block, bytes of a warp's ring of keys and values, and for how many blocks to a multiprocessor texts are
    split where sequences are few."""

    warps: int
    ring: int
    blocks: int

    def slots(self, row_bytes: int) -> int:
        return max(self.ring // (2 * KEYS * row_bytes), 2)

    def splits(self, units: int, longest: int, multiprocessors: int) -> int:
        """A power of two, so that few kernels are compiled for graphs of many sizes."""
        wanted, most = self.blocks * multiprocessors // max(units, 1), min(cdiv(longest, LEAST_KEYS), MOST_SPLITS)
        return 1 << max(min(wanted, most), 1).bit_length() - 1


CONFIGS = {
    "4 warps": Config(4, 12 * 1024, blocks=1),
    "8 warps": Config(8, 12 * 1024, blocks=1),
    "2 warps": Config(2, 16 * 1024, blocks=4),
    "1 warp": Config(1, 24 * 1024, blocks=8),
}


def lies_in_pieces(x: Tensor) -> bool:
    apart = (x.data_ptr(), *(n * x.element_size() for n in x.stride()[:-1]))
    return x.stride(-1) == 1 and not any(n % ALIGNMENT for n in apart)


def takes(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    window: int | None,
    softcap: float | None,
) -> bool | str:
    if values is None or window is not None or softcap is not None:
        return "it has values beside the keys, no window and no softcap"
    if most_queries > 1:
        return "it is for one new token of every sequence"
    dim, page, group = keys.shape[3], keys.shape[1], q.shape[1] // max(keys.shape[2], 1)
    if values.shape[3] != dim or dim not in ((128,) if keys.dtype != q.dtype else (64, 128)):
        return "heads have 128 dimensions, or 64 where pages hold no codes, and those of values as many"
    if keys.dtype not in (q.dtype, torch.float8_e4m3fn):
        return f"pages hold numbers of the queries' dtype or float8_e4m3fn, not {keys.dtype}"
    if keys.dtype != q.dtype and (reason := reads_fp8(keys)) is not True:
        return reason
    if page % KEYS or not 0 < group <= MOST_GROUP:
        return f"pages have a multiple of {KEYS} tokens, and at most {MOST_GROUP} heads share keys"
    if not all(map(lies_in_pieces, (q, keys, values))):
        return f"queries, keys and values come in pieces of {ALIGNMENT} bytes, each of neighbours"
    if len({each.dtype for each in (block_tables, lengths, cu_queries)}) > 1:
        return "indices are all of one dtype"
    return True


@implements(
    ops.paged_attention,
    backend="cuda",
    dtypes=dict(q=HALVES),
    when=takes,
    configs=CONFIGS,
)
def paged_attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: None,
    window: None,
    scale: float | None,
    softcap: None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
    config: Config,
) -> Tensor:
    (tokens, heads, dim), (_, page, kv_heads, _) = q.shape, keys.shape
    sequences, blocks = block_tables.shape
    out = torch.empty((tokens, heads, dim), dtype=q.dtype, device=q.device)
    if not sequences or not tokens:
        return out.zero_()
    units, codes = sequences * kv_heads, keys.dtype != q.dtype
    splits = config.splits(units, blocks * page, multiprocessors(q.device))
    parts = sums = counts = None
    if splits > 1:
        group = heads // kv_heads
        parts, sums = (torch.empty((units, splits, group, last), device=q.device) for last in (dim, 2))
        counts = workspace("paged_decode", (units,), torch.int32, q.device)
    kernel = library(
        "paged_decode.cu", DIM=dim, GROUP=heads // kv_heads, PAGE=page, HALF=DTYPES[q.dtype], CODES=int(codes),
        LONG=int(block_tables.dtype == torch.int64), WARPS=config.warps, SLOTS=config.slots(dim * keys.element_size()),
    )  # fmt: skip
    scale_strides = lambda x: (0, 0, 0) if x is None else x.stride()
    call(
        kernel.paged_decode, q.device, q, keys, values, key_scale, value_scale, block_tables, lengths.contiguous(),
        cu_queries.contiguous(), out, parts, sums, counts, tokens, sequences, kv_heads, splits, *q.stride()[:2],
        *block_tables.stride(), *keys.stride()[:3], *values.stride()[:3], *scale_strides(key_scale),
        *scale_strides(value_scale), int(begins_early(q.device)), dim**-0.5 if scale is None else float(scale),
    )  # fmt: skip
    return out
