"""Attention on Hopper as the backend `gluon`: cuDNN's forward, which is hard to beat, and a backward of our own.

The forward also answers the logarithm of every row's sum, which is kept for the backward where a gradient is wanted.
"""

from typing import Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.aten import HALVES, straight
from tilestack.kernels.hopper.attention_backward import DIM, gradients
from tilestack.ops.attention import scale_or_usual


def takes(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor | None, window: int | None, softcap: float | None
) -> bool | str:
    if q.shape[3] != DIM or v.shape[3] != DIM:
        return f"its heads have {DIM} dimensions"
    if q.shape[1] != k.shape[1]:
        return "it has as many queries as keys"
    if cu_seqlens is not None or window is not None or softcap is not None:
        return "it has no documents, window or softcap"
    return q.numel() > 0 or "it needs at least one query"


def attention_and_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: None,
    causal: bool,
    window: None,
    scale: float | None,
    softcap: None,
    *,
    wanted: bool = True,
) -> tuple[Tensor, Tensor]:
    """cuDNN's result and, if wanted, the logarithm of each row's sum, for each batch, head and query."""
    rows = (straight(x).transpose(1, 2) for x in (q, k, v))
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *rows, None, wanted, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse


def empty_sums(q: Tensor) -> Tensor:
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, heads, queries, 1), dtype=torch.float32)


def backward_from_sums(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    lse = lse.view(q.shape[0], q.shape[2], q.shape[1])
    return *gradients(grad, q, k, v, out, lse, causal, scale_or_usual(scale, q)), None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, out: Tensor
) -> tuple[Tensor, Tensor, Tensor, None]:
    _, lse = attention_and_sums(q, k, v, None, causal, None, scale, None)
    return backward_from_sums(grad, q, k, v, causal, scale, out, lse)


@implements(
    ops.attention,
    backend="gluon",
    backward=backward,
    extras=Extras(attention_and_sums, backward_from_sums, when=lambda q: True, fake=empty_sums),
    repeat=straight_line,
    when=takes,
    dtypes=HALVES,
    deterministic=False,
)
def attention(*arguments: Any) -> Tensor:
    return attention_and_sums(*arguments, wanted=False)[0]
