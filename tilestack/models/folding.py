"""Which layers of a decoder can take a scale from the one behind them, and how.

A linear layer stays what it is when its inputs are divided by some numbers and the columns of its weight multiplied with
them. Whatever makes those inputs must then make them smaller, which it can where it is linear in its last weights:

    norm       ──►  qkv         the norm's weight; Gemma's is stored less one
    v of qkv   ──►  output      v's rows and biases: what attention gives is a mean of values. With grouped queries, the
                                heads that share a value share its scales
    norm       ──►  gate_up     the norm's weight
    up of it   ──►  down        up's rows and biases: the activation multiplies up, and is of gate alone
    q_norm     ──►  q_up        of MLA's latents, the norms' weights
    kv_norm    ──►  kv_up

The last holds in the feed-forward layer that all tokens of a mixture go through, too, and in each of its experts, which
`quantise_experts` sees to.

Left out: the norm before a mixture, which the router and all experts read; the values of MLA, which kv_up makes; families without a norm before (OLMo 2), whose q, k, gate are read from the residual stream; and the last
norm and the head, as the head keeps its numbers. Norms of queries and keys, and norms of what a block adds, change nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from tilestack.models.decoder import Layer
from tilestack.models.mla import LatentAttention
from tilestack.nn import MLP, Linear, RMSNorm
from tilestack.ops.numerics import wide


@dataclass(frozen=True)
class Fold:
    """`reader` reads what `maker` makes: a norm, or the rows of a linear layer from `first` on, `rows` of them.

    Each of the maker's outputs is read `copies` times: heads of queries by `width`, neighbours share a value.
    """

    name: str  # of the reader, in its layer
    maker: RMSNorm | Linear
    reader: Linear
    first: int = 0
    rows: int = 0
    copies: int = 1
    width: int = 1

    @property
    def behind_norm(self) -> bool:
        return isinstance(self.maker, RMSNorm)

    def by_copy(self, of_inputs: Tensor) -> Tensor:
        """Numbers of the reader's inputs, [in], as [groups, copies, width]."""
        return of_inputs.unflatten(0, (-1, self.copies, self.width))

    def shared(self, of_inputs: Tensor) -> Tensor:
        """The same with the mean of all copies in the place of each."""
        grouped = self.by_copy(of_inputs)
        return grouped.mean(1, keepdim=True).expand_as(grouped).flatten()

    @torch.no_grad()
    def apply(self, scale: Tensor) -> Tensor:
        """Divide what is read by scale, [in], equal for copies, and multiply the reader's weight with it. Gives what was
        divided by in the end: of a norm, its new weight is rounded, and the reader's takes up the rest."""
        if isinstance(self.maker, RMSNorm):
            scale = divide_norm(self.maker, scale)
        else:
            divide_rows(self.maker, self.by_copy(scale)[:, 0].flatten(), self.first, self.rows)
        weight = self.reader.weight
        weight.copy_(wide(weight) * scale)
        return scale


def divide_norm(norm: RMSNorm, scale: Tensor) -> Tensor:
    """Divide what a norm gives; gives what it was divided by. A number of its weight that would become zero or infinite in
    its dtype stays: near -1, as Gemma stores small ones, bfloat16 is coarse."""
    weight, offset = norm.weight, getattr(norm, "offset", 0.0)
    before = wide(weight) + offset
    divided = (before / scale - offset).to(weight.dtype)
    after = wide(divided) + offset
    holds = torch.isfinite(after) & (after != 0)
    weight.copy_(torch.where(holds, divided, weight))
    return torch.where(holds, before / after, 1.0)


def divide_rows(layer: Linear, scale: Tensor, first: int, rows: int) -> None:
    for parameter in (layer.weight, layer.bias):
        if parameter is not None:
            part = parameter[first : first + rows]
            part.copy_(wide(part) / (scale[:, None] if part.ndim > 1 else scale))


def folds_of(layer: Layer) -> list[Fold]:
    """All of a decoder's layer."""
    attention, mlp = layer.attention, layer.mlp
    found = []
    if layer.attention_norm is not None:
        found.append(Fold("attention.qkv", layer.attention_norm, attention.qkv))
    if isinstance(attention, LatentAttention):
        if attention.q_norm is not None and attention.q_up is not None:
            found.append(Fold("attention.q_up", attention.q_norm, attention.q_up))
        found.append(Fold("attention.kv_up", attention.kv_norm, attention.kv_up))
    else:
        config = attention.config
        width, values = config.head_dim, config.kv_heads * config.head_dim
        first = attention.qkv.out_features - values
        copies = config.heads // config.kv_heads
        found.append(Fold("attention.output", attention.qkv, attention.output, first, values, copies, width))
    if isinstance(mlp, MLP) and layer.mlp_norm is not None:
        found.append(Fold("mlp.gate_up", layer.mlp_norm, mlp.gate_up))
    name, dense = ("mlp", mlp) if isinstance(mlp, MLP) else ("mlp.shared", mlp.shared)
    if dense is not None:
        found.append(Fold(f"{name}.down", dense.gate_up, dense.down, dense.down.in_features, dense.down.in_features))
    return found
