"""Attention on Hopper as the backend `gluon`, for heads of 64 and 128: a forward and a backward of our own.

Rows may hold packed documents, as training has them, where attention is causal. Where a configuration says so, whole rows
without documents go forward or backward by cuDNN. Either forward also answers the logarithm of every row's sum, which is
kept for the backward where a gradient is wanted; either backward takes it from either forward.

`gluon` adds up dQ in whatever order; `gluon_ordered` in one, for those who want the same bits in every run.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestack import ops
from tilestack.contract import Extras, implements
from tilestack.contract.repeat import straight_line
from tilestack.kernels.attention.aten import HALVES, straight
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.hopper.attention_backward import QUERIES, gradients
from tilestack.kernels.hopper.attention_forward import ROWS, Forward, attention_and_lse
from tilestack.ops.attention import scale_or_usual


class Config(NamedTuple):
    """How heads of 64 and of 128 go forward, None being by cuDNN; whether they go backward by our kernels, and dQ is
    added up in one order there."""

    of_64: Forward | None = None
    of_128: Forward | None = None
    own_backward: bool = True
    ordered: bool = False

    def forward(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> Forward | None:
        own = self.of_64 if q.shape[3] == 64 else self.of_128
        return own if own or cudnn_takes(q, k, cu_seqlens) else Forward()

    def goes_back_by_cudnn(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> bool:
        return not self.own_backward and cudnn_takes(q, k, cu_seqlens)

    def lender(self, q: Tensor, k: Tensor, cu_seqlens: Tensor | None, direction: str) -> str:
        """Whose kernel runs, where it is not ours; for the laboratory, which counts no wins with it."""
        borrowed = {
            "forward": self.forward(q, k, cu_seqlens) is None,
            "backward": self.goes_back_by_cudnn(q, k, cu_seqlens),
        }
        return "cuDNN" if borrowed.get(direction) else ""


def cudnn_takes(q: Tensor, k: Tensor, cu_seqlens: Tensor | None) -> bool:
    """Not documents, not more keys than queries or fewer, since it aligns rows at their beginnings, and not one alone, whose
    backward crashes in cuDNN 9.19."""
    return q.shape[1] == k.shape[1] > 1 and cu_seqlens is None


CONFIGS = {
    "own": Config(Forward(slots=3, ping_pong=True), Forward()),
    "cudnn": Config(),
    "cudnn_backward": Config(Forward(slots=3, ping_pong=True), Forward(), own_backward=False),
}
ORDERED = {name: config._replace(ordered=True) for name, config in CONFIGS.items() if config.own_backward}


def takes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> bool | str:
    if q.shape[3] not in QUERIES or v.shape[3] != q.shape[3]:
        return f"its heads have {' or '.join(map(str, QUERIES))} dimensions, those of values as many"
    if q.shape[1] < min(ROWS, k.shape[1]):
        return f"it has {ROWS} queries at a time, and few of them at the end of more keys are for a kernel that splits keys"
    if (cu_seqlens is not None and not causal) or window is not None or softcap is not None:
        return "it has no documents that are not causal, no window and no softcap"
    if scale is not None and scale <= 0:
        return "it finds the largest score before it scales them, so its scale is positive"
    return (q.numel() > 0 and k.numel() > 0) or "it needs at least one query and one key"


def attention_and_sums(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    window: None,
    scale: float | None,
    softcap: None,
    *,
    config: Config,
    wanted: bool = True,
) -> tuple[Tensor, Tensor]:
    """The result and the logarithm of each row's sum, [batch, heads, queries, 1]; cuDNN makes it only if it is wanted."""
    if own := config.forward(q, k, cu_seqlens):
        bounds = document_bounds(cu_seqlens, *q.shape[:2])
        out, lse = attention_and_lse(q, k, v, causal, scale_or_usual(scale, q), own, bounds)
        return out, lse[..., None]
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        *heads_first(q, k, v), None, wanted, 0.0, causal, False, scale=scale
    )
    return out.transpose(1, 2), lse


def heads_first(*tensors: Tensor) -> list[Tensor]:
    """[batch, heads, tokens, dim], as cuDNN takes them."""
    return [straight(x).transpose(1, 2) for x in tensors]


def empty_sums(q: Tensor) -> Tensor:
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, heads, queries, 1), dtype=torch.float32)


def backward_from_sums(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    out: Tensor,
    lse: Tensor,
    config: Config,
) -> tuple[Tensor | None, ...]:
    if config.goes_back_by_cudnn(q, k, cu_seqlens):
        return *gradients_by_cudnn(grad, q, k, v, out, lse, causal, scale), None
    lse, bounds = lse.view(q.shape[0], q.shape[2], q.shape[1]), document_bounds(cu_seqlens, *q.shape[:2])
    return *gradients(grad, q, k, v, out, lse, causal, scale_or_usual(scale, q), bounds, config.ordered), None


def gradients_by_cudnn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool, scale: float | None
) -> list[Tensor]:
    chance = q.new_empty((), dtype=torch.int64)  # the state of dropout, of which there is none
    made = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        *heads_first(grad, q, k, v, out), lse, chance, chance, None, None, None, q.shape[1], k.shape[1], 0.0, causal, scale=scale
    )  # fmt: skip
    return [x.transpose(1, 2) for x in made]


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor | None,
    causal: bool,
    scale: float | None,
    out: Tensor,
    config: Config,
) -> tuple[Tensor | None, ...]:
    _, lse = attention_and_sums(q, k, v, cu_seqlens, causal, None, scale, None, config=config)
    return backward_from_sums(grad, q, k, v, cu_seqlens, causal, scale, out, lse, config)


on_hopper = functools.partial(
    implements,
    ops.attention,
    backward=backward,
    extras=Extras(attention_and_sums, backward_from_sums, when=lambda q: True, fake=empty_sums),
    repeat=straight_line,
    when=takes,
    dtypes=HALVES,
)


@on_hopper(backend="gluon", deterministic=False, configs=CONFIGS)
@on_hopper(backend="gluon_ordered", configs=ORDERED)
def attention(*arguments: Any, config: Config) -> Tensor:
    return attention_and_sums(*arguments, config=config, wanted=False)[0]
