"""Attention as models ask for it: with a mask or without, in PyTorch's module, and as transformers' `attn_implementation`.

attend                what the others call: `ops.attention`, or `ops.flex_attention` where scores or weights are changed
MultiheadAttention    PyTorch's module on it; `Attention`, a decoder's, is in rotary_attention.py
register_attention    transformers.AutoModelForCausalLM.from_pretrained(..., attn_implementation="tilestack") after it
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilestack import ops
from tilestack.extras import MissingExtra, install_command
from tilestack.nn.autocast import lowered
from tilestack.ops.block_mask import kept_blocks

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask  # it takes long to import


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: "Tensor | BlockMask | None" = None,
    *,
    cu_seqlens: Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """What queries [batch, queries, heads, dim] see of keys and values [batch, keys, kv_heads, dim].

    `mask` is True where a key is seen, or is added to the scores: [batch, heads, queries, keys], all but the last may be 1.
    It may be PyTorch's BlockMask of as many queries and keys, which is read once: what its mask_mod looks at must not change
    afterwards. Either comes on top of the other rules, of which `causal` aligns rows at their ends. Weights are dropped by a
    seed from PyTorch's generator. Under autocast, all is done in its dtype, as PyTorch's is.
    """
    q, k, v = lowered(q, k, v)
    if mask is None and sinks is None and not dropout:
        return ops.attention(q, k, v, cu_seqlens, causal=causal, window=window, scale=scale, softcap=softcap)
    bias, blocks = None, {}
    if isinstance(mask, Tensor):
        bias = added_to_scores(mask, q.dtype)
    elif mask is not None:
        blocks = blocks_of(mask, q, k)
    seed = torch.randint(2**62, (), device=q.device) if dropout else None
    out, _ = ops.flex_attention(
        q, k, v, cu_seqlens, sinks=sinks, bias=bias, seed=seed, **blocks,
        causal=causal, window=window, scale=scale, softcap=softcap, dropout=dropout,
    )  # fmt: skip
    return out


def blocks_of(mask: "BlockMask", q: Tensor, k: Tensor) -> dict[str, Tensor]:
    """PyTorch's block mask as arguments of `flex_attention`, where it is of these queries and keys."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(mask, BlockMask):
        raise TypeError(f"a mask is a tensor or a BlockMask, not {type(mask).__name__}")
    batch, queries, heads, keys = *q.shape[:3], k.shape[1]
    if mask.shape not in [(b, h, queries, keys) for b in (1, batch) for h in (1, heads)]:
        raise ValueError(
            f"the BlockMask is {tuple(mask.shape)}, but must be ({batch} or 1, {heads} or 1, {queries}, {keys}): "
            f"make it by create_block_mask(mask_mod, B, H, Q_LEN={queries}, KV_LEN={keys})"
        )
    return kept_blocks(mask)


def added_to_scores(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as numbers to add: zero where it is True and -inf elsewhere, or itself where it is numbers."""
    if mask.dtype != torch.bool:
        if not mask.is_floating_point():  # ones and zeros, which hide nothing where they are added
            raise TypeError(f"a mask is bool, or numbers to be added to the scores, not {mask.dtype}; make it bool")
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -torch.inf)


class MultiheadAttention(torch.nn.MultiheadAttention):
    """PyTorch's, for `need_weights=False`; the weights, and keys that are added to those given, are its own doing.

    Its masks are True where a key is hidden.
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if need_weights or self.bias_k is not None or self.add_zero_attn:
            return super().forward(
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        if is_causal and attn_mask is None:
            raise ValueError("is_causal says what attn_mask is: PyTorch's module wants both")
        batched = query.ndim == 3
        queries, keys, values = (x if batched else x[None] for x in (query, key, value))
        if batched and not self.batch_first:
            queries, keys, values = (x.transpose(0, 1) for x in (queries, keys, values))
        weights, biases = self.projections()
        q, k, v = (
            ops.linear(*lowered(x, weight, bias)).unflatten(-1, (self.num_heads, self.head_dim))
            for x, weight, bias in zip((queries, keys, values), weights, biases, strict=True)
        )
        # Where rows differ in length, the mask alone says whether they begin or end together.
        causal = is_causal and key_padding_mask is None and q.shape[1] == k.shape[1]
        mask = None if causal else self.merged_mask(attn_mask, key_padding_mask, q.dtype)
        dropout = self.dropout if self.training else 0.0
        out = attend(q, k, v, mask, causal=causal, dropout=dropout).flatten(2)
        out = ops.linear(*lowered(out, self.out_proj.weight, self.out_proj.bias))
        if not batched:
            return out[0], None
        return (out if self.batch_first else out.transpose(0, 1)), None

    def projections(self) -> tuple[list[Tensor], list[Tensor | None]]:
        """The weights and biases of queries, keys and values."""
        if self._qkv_same_embed_dim:
            assert self.in_proj_weight is not None
            weights = list(self.in_proj_weight.chunk(3))
        else:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        return weights, [None] * 3 if self.in_proj_bias is None else list(self.in_proj_bias.chunk(3))

    def merged_mask(self, attn_mask: Tensor | None, padding: Tensor | None, dtype: torch.dtype) -> Tensor | None:
        """Both masks as numbers to add, [batch or 1, heads or 1, queries or 1, keys]."""
        added: Tensor | None = None
        if attn_mask is not None:  # [queries, keys] or [batch · heads, queries, keys]
            attn_mask = attn_mask[None, None] if attn_mask.ndim == 2 else attn_mask.unflatten(0, (-1, self.num_heads))
            added = hidden_as_numbers(attn_mask, dtype)
        if padding is not None:  # [batch, keys], or [keys] unbatched
            rows = hidden_as_numbers(padding[None, None, None] if padding.ndim == 1 else padding[:, None, None], dtype)
            added = rows if added is None else added + rows
        return added


def hidden_as_numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return added_to_scores(~mask if mask.dtype == torch.bool else mask, dtype)


def transformers_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: "Tensor | BlockMask | None",
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    cache: Any = None,
    output_attentions: bool = False,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: heads before tokens in, tokens before heads out, and no weights.

    Windows come in the mask, which is left out only where causal says everything, of rows that begin together: a static
    cache has room behind the prompt, which no query of it sees. `s_aux` are sinks.
    """
    if cache is not None or output_attentions:
        what = "paged caches" if cache is not None else "attention weights"
        raise ValueError(f'attn_implementation="tilestack" has no {what}; "eager" has')
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    queries, mask = query.shape[2], attention_mask
    causal = queries > 1 and mask is None and causal  # a single query is the last, and sees all
    if position_bias is not None:
        if mask is not None and not isinstance(mask, Tensor):
            raise ValueError("a position bias comes with a mask that is a tensor, not with a BlockMask")
        mask = position_bias if mask is None else position_bias + added_to_scores(mask, position_bias.dtype)
    if causal:
        key, value = key[:, :, :queries], value[:, :, :queries]
        mask = mask[..., :queries] if isinstance(mask, Tensor) else mask
    out = attend(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        mask,
        causal=causal,
        scale=scaling,
        softcap=softcap,
        sinks=s_aux,
        dropout=dropout,
    )
    return out, None


def register_attention(name: str = "tilestack") -> None:
    """Let models of transformers take our attention by name: `attn_implementation="tilestack"`."""
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import sdpa_mask
    except ImportError as error:
        raise MissingExtra(f"this needs transformers: {install_command('hf')}") from error
    AttentionInterface.register(name, transformers_attention)
    AttentionMaskInterface.register(name, sdpa_mask)
