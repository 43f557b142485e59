"""Attention in plain Triton as the backend `triton`: flash.py forward, flash_backward.py backward, on any GPU.

It takes all that the operator can say: grouped heads, causal or not, windows, documents, a cap, any lengths and strides, head
sizes up to 256. Where a gradient is wanted, the forward hands on each row's largest score and the
share of its sum.
"""

from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.attention.flash import flash_forward
from tilestack.kernels.attention.flash_backward import flash_gradients
from tilestack.kernels.attention.scores import WIDEST_HEAD, Rules
from tilestack.kernels.tiles import widened
from tilestack.ops.attention import scale_or_usual

MOST_HEADS = 65_535  # of a whole batch, which lie along the second side of a grid


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool | str:
    if q.shape[0] * q.shape[2] > MOST_HEADS:
        return f"a grid has room for {MOST_HEADS:,} heads of a batch, not for {q.shape[0]:,} · {q.shape[2]}"
    if max(q.shape[3], v.shape[3]) > WIDEST_HEAD:
        return f"its heads have up to {WIDEST_HEAD} dimensions"
    return bool(k.shape[1] and q.shape[3] and v.shape[3]) or "it needs a key, and heads of some dimension"


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    keep_stats: bool,
) -> tuple[Tensor, Tensor | None]:
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    rules = Rules(scale_or_usual(scale, q), softcap, window, causal)
    return flash_forward(q, k, v, bounds, rules, keep_stats=keep_stats)


def attention_and_stats(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor | None]:
    return forward(q, k, v, cu_seqlens, causal, window, scale, softcap, True)


def empty_stats(q: Tensor) -> Tensor:
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, heads, queries, 2), dtype=widened(q.dtype))


def backward_from_stats(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    out: Tensor,
    stats: Tensor,
) -> tuple[Tensor, Tensor, Tensor, None]:
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    rules = Rules(scale_or_usual(scale, q), softcap, window, causal)
    return *flash_gradients(grad, None, q, k, v, bounds, out, stats, rules)[:3], None


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    out: Tensor,
) -> tuple[Tensor, Tensor, Tensor, None]:
    """Where no sums were handed on: they are made again."""
    given = q, k, v, cu_seqlens, causal, window, scale, softcap
    _, stats = attention_and_stats(*given)
    assert stats is not None
    return backward_from_stats(grad, *given, out, stats)


@implements(
    ops.attention,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=backward,
    extras=Extras(attention_and_stats, backward_from_stats, when=lambda q: True, fake=empty_stats),
    when=takes,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> Tensor:
    return forward(q, k, v, cu_seqlens, causal, window, scale, softcap, False)[0]
