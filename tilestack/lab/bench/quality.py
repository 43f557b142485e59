"""How far a result in few bits is from what it stands for: of operators that quantise, beside their speed.

A proof says that a kernel does what its definition says, codes and all. What the codes cost is another question: results are
held here against the operator without codes, in float64. So are those of peers that have none: their roundings are the least
that there can be.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack import ops
from tilestack.contract import Operator
from tilestack.contract.named import call_named

QUERIES = 128  # the last of each row: float64 scores of all of them might fill a GPU


class Quality(NamedTuple):
    cosine: float  # of the angle between a result and the truth
    relative_error: float  # the norm of their difference over that of the truth


def attention_of_last(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, causal: bool, scale: float | None
) -> Tensor | None:
    if cu_seqlens is not None:
        return None
    return ops.attention.definition(q[:, -QUERIES:].double(), k.double(), v.double(), causal=causal, scale=scale)


def pages_of_last(
    q: Tensor,
    keys: Tensor,
    values: Tensor | None,
    block_tables: Tensor,
    lengths: Tensor,
    cu_queries: Tensor,
    value_dim: int | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    key_scale: Tensor | None,
    value_scale: Tensor | None,
) -> Tensor | None:
    """What the last queries of the last sequence see of the same pages; those of pages are not codes of this operator."""
    count = min(int(cu_queries[-1] - cu_queries[-2]), QUERIES)
    if not count or int(cu_queries[-1]) != q.shape[0]:
        return None
    ends = torch.tensor([0, count], device=q.device)
    return ops.paged_attention.definition(
        q[-count:].double(), keys, values, block_tables[-1:], lengths[-1:], ends, count, value_dim, window, scale, softcap,
        key_scale, value_scale,
    )  # fmt: skip


WITHOUT_CODES: dict[str, Callable[..., Tensor | None]] = dict(
    attention_int8=attention_of_last, attention_fp8=attention_of_last, paged_attention_codes=pages_of_last
)


@torch.no_grad()
def truth_without_codes(operator: Operator, arguments: dict[str, Any]) -> Tensor | None:
    """What an operator stands for, of the last of its rows' tokens; None where it stands for nothing but itself."""
    return call_named(found, arguments) if (found := WITHOUT_CODES.get(operator.name)) else None


def quality_of(result: Tensor, truth: Tensor) -> Quality:
    """Of results […, tokens, heads, dim], of which the truth has the last tokens."""
    found, exact = result[..., -truth.shape[-3] :, :, :].double().flatten(), truth.flatten()
    return Quality(float(F.cosine_similarity(found, exact, 0)), float((found - exact).norm() / exact.norm()))
