"""`flex_attention` on Hopper as the backend `gluon`, where nothing changes the scores: attention that also answers the log-sum-exp.

The forward of attention makes each row's log-sum-exp anyway, for its backward. A gradient that arrives at it reaches the scores
by the softmax, d lse / d scores = P, so that of

    dS = P · (dP - delta) + P · d lse = P · (dP - (delta - d lse))

only delta is another: the kernel that makes it takes d lse off. All else is attention's own forward and backward.
"""

from torch import Tensor

from tilestack import ops
from tilestack.contract import implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.aten import HALVES
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.hopper import attention
from tilestack.kernels.hopper.attention_backward import gradients
from tilestack.kernels.hopper.attention_forward import attention_and_lse
from tilestack.ops.attention import scale_or_usual


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    sinks: Tensor | None,
    slopes: Tensor | None,
    bias: Tensor | None,
    blocks: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
) -> bool | str:
    if any(term is not None for term in (sinks, slopes, bias, blocks)) or dropout:
        return "it has no sinks, slopes, bias, blocks or dropout"
    return attention.takes(q, k, v, cu_seqlens, causal, window, scale, softcap)


def backward(
    grad_out: Tensor,
    grad_lse: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
) -> tuple[Tensor | None, ...]:
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    found = gradients(grad_out, q, k, v, out, lse, causal, scale_or_usual(scale, q), bounds, grad_lse=grad_lse)
    return *found, *(None,) * (len(ops.flex_attention.tensors) - len(found))


@implements(
    ops.flex_attention,
    backend="gluon",
    backward=backward,
    repeat=straight_line,
    when=takes,
    dtypes=HALVES,
    deterministic=False,
)
def flex_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    sinks: None,
    slopes: None,
    bias: None,
    blocks: None,
    tiles: None,
    seed: Tensor | None,
    causal: bool,
    window: None,
    scale: float | None,
    softcap: None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    forward = attention.CONFIGS["own"].forward(q, k, cu_seqlens)
    assert forward is not None
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    return attention_and_lse(q, k, v, causal, scale_or_usual(scale, q), forward, bounds)
