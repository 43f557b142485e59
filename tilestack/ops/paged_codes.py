"""Attention over pages of codes, with queries as codes too, for inference: products in 8 bits, as in `attention_int8`.

    codes of q, one scale for each query and head          pages as they are: codes, and a scale for each token and head
    scores = (codes of q · codes of k) · both scales · scale          out = softmax(scores) (codes of v · its scales)

A prompt that is read in chunks over a long cache multiplies more than it reads, and its keys need no conversion here. Weights
and values are multiplied in half precision.

Keys lose what they have in common when they are written: `kv_write` takes a `key_offset` off every key before it becomes
codes. All scores of a query are then less by the same number, and softmax does not see that, whatever the offset is and
however the cache grows. So nothing here knows of it; only with a cap, which is not linear, must there be none.

Codes of queries are the same bits whoever makes them, as in quantised_attention.py, and sums of int8 products are exact.
"""

import torch
from torch import Tensor

from tilestack.contract.cases import cases
from tilestack.contract.operator import operator
from tilestack.ops.numerics import wide
from tilestack.ops.paged import (
    CODES,
    paged_attention,
    paged_case,
    paged_cost,
    paged_key,
    paged_result,
    paged_takes,
    paged_values_hold,
)
from tilestack.ops.quantised import quantised
from tilestack.ops.quantised_attention import MOST_DIM, numbers_to_code, refuse_gradient


def paged_codes_take(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: int | None,
    window: int | None,
    softcap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> bool | str:
    if keys.dtype not in CODES:
        return f"it multiplies codes, and these pages hold {keys.dtype}; paged_attention takes them"
    if keys.ndim == 4 and keys.shape[3] > MOST_DIM:
        return f"heads have up to {MOST_DIM} dimensions, but keys are {tuple(keys.shape)}"
    return paged_takes(
        q, keys, values, block_tables, lengths, cu_queries, most_queries, value_dim, window, softcap, key_scale, value_scale
    )  # fmt: skip


def queries_of_codes(q: Tensor, keys: Tensor) -> Tensor:
    """What the codes of queries stand for, each query and head with a scale of its own; of the dtype that keys are of, which
    for an oracle may be float64 in the place of float8_e4m3fn."""
    codes = torch.float8_e4m3fn if keys.is_floating_point() else torch.int8
    made, scale = quantised(numbers_to_code(q, codes), codes)
    precise = wide(q).dtype
    return made.to(precise) * scale.to(precise)[..., None]


@operator(
    cases=cases(
        paged_case,
        check=[  # the batch, page, heads, kv_heads, dim, dim of v, what pages hold, what is seen
            ("decode", 16, 4, 2, 16, 16, "int8"),
            ("decode", 16, 4, 2, 16, 16, "float8_e4m3fn"),
            ("mixed", 16, 6, 2, 16, 24, "int8", "long"),
            ("mixed", 4, 2, 2, 24, 24, "int8", "window"),
            ("mixed", 32, 8, 1, 40, 64, "float8_e4m3fn"),
            ("decode", 64, 3, 1, 80, 80, "float8_e4m3fn", "window"),
            ("mixed", 16, 5, 1, 40, 32, "int8", "latent"),
            ("decode", 16, 20, 1, 288, 264, "int8", "latent"),
            ("prompt", 256, 2, 1, 96, 96, "int8", "capped"),
            ("chunk", 16, 8, 1, 32, 32, "int8", "scaled"),
            ("chunk", 16, 4, 1, 32, 32, "float8_e4m3fn"),
            ("uneven", 16, 2, 1, 16, 16, "int8"),
            ("nothing", 16, 2, 1, 16, 16, "int8"),
        ],
        gpu=[
            ("many", 16, 16, 8, 128, 128, "int8"),
            ("many", 16, 32, 8, 64, 128, "float8_e4m3fn"),
            ("several", 16, 16, 4, 128, 128, "int8"),
            ("several", 16, 16, 4, 128, 128, "float8_e4m3fn"),
            ("several", 16, 8, 2, 64, 64, "int8", "window"),
            ("several", 64, 16, 1, 192, 128, "int8"),
            ("several", 64, 16, 1, 576, 512, "int8", "latent"),
            ("decode", 64, 128, 1, 576, 512, "float8_e4m3fn", "latent"),
        ],
        bench=[
            ("reading", 16, 32, 8, 128, 128, "int8"),
            ("reading", 16, 32, 8, 128, 128, "float8_e4m3fn"),
            ("256x4096", 16, 32, 8, 128, 128, "int8"),
        ],
    ),
    cost=paged_cost,
    check=paged_codes_take,
    check_values=paged_values_hold,
    dtypes=dict(keys=(), values=()),
    fake=paged_result,
    tuning_key=paged_key,
)
def paged_attention_codes(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    most_queries: int,
    value_dim: int | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    key_scale: Tensor | None = None,
    value_scale: Tensor | None = None,
) -> Tensor:
    """`paged_attention` of codes of q, with a scale for each query and head, and of pages of codes of the same dtype.

    Sums of int8 products are exact; the softmax is in float32, weights and values are numbers again. There is no gradient.
    """
    refuse_gradient("paged_attention_codes", q)
    return paged_attention.definition(
        queries_of_codes(q, keys), keys, values, block_tables, lengths, cu_queries, most_queries, value_dim, window,
        scale, softcap, key_scale, value_scale,
    ).to(q.dtype)  # fmt: skip
