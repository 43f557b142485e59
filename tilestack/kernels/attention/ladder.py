"""Attention in plain Triton as the backend `triton`: flash.py forward, flash_backward.py backward, on any GPU.

It takes all that the operator can say: grouped heads, causal or not, windows, documents, a cap, any lengths and strides, head
sizes up to 256. Where a gradient is wanted, the forward hands on the logarithms of its sums.
"""

from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.flash import WIDEST_HEAD, Rules, document_bounds, flash_forward
from tilestack.kernels.attention.flash_backward import flash_gradients
from tilestack.kernels.tiles import widened
from tilestack.ops.attention import scale_or_usual


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool | str:
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
    keep_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    return flash_forward(q, k, v, bounds, Rules(scale_or_usual(scale, q), softcap, window, causal), keep_lse)


def attention_and_lse(
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


def empty_lse(q: Tensor) -> Tensor:
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, heads, queries, 2), dtype=widened(q.dtype))


def backward_from_lse(
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
    lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, None]:
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    rules = Rules(scale_or_usual(scale, q), softcap, window, causal)
    return *flash_gradients(grad, q, k, v, bounds, out, lse, rules), None


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
    _, lse = attention_and_lse(*given)
    assert lse is not None
    return backward_from_lse(grad, *given, out, lse)


@implements(
    ops.attention,
    backend="triton",
    invariant=True,
    repeat=straight_line,
    backward=backward,
    extras=Extras(attention_and_lse, backward_from_lse, when=lambda q: True, fake=empty_lse),
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
