"""The decoder: embedding, layers of attention and feed-forward, norm, head. What families differ in is configuration.

A layer's norm and the residual sum before it are one operator, so layers hand on two tensors: what the last block
added (`x`) and the sum up to it (`residual`).

Shapes: B batch, T tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tilestack import ops
from tilestack.models.attention import Attention, Places
from tilestack.models.config import ModelConfig
from tilestack.models.context import Context, Documents
from tilestack.models.mla import LatentAttention
from tilestack.models.norm import Norm, add_norm
from tilestack.models.rotary import Rotary
from tilestack.nn import MLP, Balance, Linear, MoE
from tilestack.nn.autocast import lowered
from tilestack.nn.lora import LoRALinear


class Layer(torch.nn.Module):
    def __init__(self, config: ModelConfig, layer: int):
        super().__init__()
        norm = lambda wanted: Norm(config.hidden, config) if wanted else None
        self.residual_scale = config.residual_scale
        self.attention_norm = norm(config.pre_norms)
        self.attention = LatentAttention(config, layer) if config.kv_rank else Attention(config, layer)
        self.attention_post_norm = norm(config.post_norms)
        self.mlp_norm = norm(config.pre_norms)
        self.mlp = experts(config) if config.sparse(layer) else feed_forward(config)
        self.mlp_post_norm = norm(config.post_norms)

    def forward(self, x: Tensor, residual: Tensor | None, places: Places, context: Context) -> tuple[Tensor, Tensor]:
        normal, residual = add_norm(x, residual, self.attention_norm)  # [B, T, H] each
        x = self.added(self.attention(normal, places, context), self.attention_post_norm)
        normal, residual = add_norm(x, residual, self.mlp_norm)
        return self.added(self.mlp(normal), self.mlp_post_norm), residual

    def added(self, x: Tensor, norm: Norm | None) -> Tensor:
        """What a block adds to the residual stream: normalised and scaled, in the families that do."""
        x = x if norm is None else norm(x)
        return x if self.residual_scale == 1 else x * self.residual_scale


class Decoder(torch.nn.Module):
    """Token ids to logits. With `checkpointing`, layers keep only what enters them and compute the rest again."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.checkpointing = False
        self.embedding = torch.nn.Embedding(config.vocabulary, config.hidden)
        self.layers = torch.nn.ModuleList(Layer(config, layer) for layer in range(config.layers))
        self.norm = Norm(config.hidden, config)
        self.head = None if config.tied else Linear(config.hidden, config.vocabulary, bias=False)
        self.rotary = Rotary(config)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Normal weights; those that write into the residual stream smaller, as 2 · layers of them add up in it."""
        std = self.config.initial_std
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0 - self.config.norm_offset)
            else:
                writes = name.endswith(("output.weight", "down.weight", "mlp.down"))
                parameter.normal_(0.0, std / (2 * self.config.layers) ** 0.5 if writes else std)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of the token after each of ids [B, T]; see `hidden` for the rest."""
        return self.logits(self.hidden(ids, positions, cu_seqlens, context))

    def hidden(
        self,
        ids: Tensor,
        positions: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """The normed hidden states [B, T, H] that the head reads; [T, H] for ids [T].

        `positions`, [B, T] or [T], are each token's place in its text; without them texts begin with the row, or go on
        where the `context` ends, which keeps the tokens before these and these too from now on. `cu_seqlens` are the
        offsets of documents packed into rows that are read at once.
        """
        if ids.ndim == 1:
            return self.hidden(ids[None], positions, cu_seqlens, context)[0]
        if context is not None and cu_seqlens is not None:
            raise ValueError("cu_seqlens are of rows that are read at once; a context goes on where it ended")
        context = Documents(cu_seqlens) if context is None else context
        places = places_of(self.rotary, ids.shape, positions, context)
        x, residual = run_layers(self.layers, self.embedded(ids), None, places, context, self.checkpointing)
        return self.normed(x, residual)

    def embedded(self, ids: Tensor) -> Tensor:
        x = ops.embedding(ids, self.embedding.weight)
        if self.config.embedding_scale == 1:
            return x
        return x * torch.tensor(self.config.embedding_scale, dtype=x.dtype)  # rounded as Gemma was trained with it

    def normed(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """What the head reads of what the last layer hands on."""
        normal = add_norm(x, residual, self.norm)[0]
        return normal if self.config.logit_divisor == 1 else normal / self.config.logit_divisor

    def logits(self, hidden: Tensor) -> Tensor:
        """The head's scores [..., V] of hidden states [..., H]."""
        scores = ops.linear(*lowered(hidden, self.head_weight, None)) if self.head is None else self.head(hidden)
        return ops.softcap(scores, self.logit_softcap) if self.logit_softcap else scores

    def head_loss(self, hidden: Tensor, weight: Tensor, labels: Tensor, softcap: float) -> Tensor:
        """The sum of -log p over labels [B, T] of hidden states [B, T, H], by a head's weight; the logits are never in memory
        where a kernel spares them. Training may replace it, where the head is in fp8 or divided."""
        hidden, weight, _ = lowered(hidden, weight, None)
        return ops.linear_cross_entropy(hidden, weight, labels, softcap=softcap, reduction="sum")

    @property
    def logit_softcap(self) -> float:
        """c where the head's scores are bounded as c · tanh(score / c), as losses on hidden states have to know; or 0."""
        return self.config.logit_softcap or 0.0

    @property
    def rotates_by_length(self) -> bool:
        """Whether texts longer than some length are rotated by other frequencies (dynamic, longrope)."""
        return self.rotary.most > 0

    @property
    def head_weight(self) -> Tensor:
        """[V, H]: the head's weight, the embedding's where they are tied; with its adapter, where there is one."""
        if self.head is None:
            return self.embedding.weight
        return self.head.adapted_weight if isinstance(self.head, LoRALinear) else self.head.weight

    def balances(self) -> list[Balance]:
        """How the last forward loaded the experts of each mixture, first layer first."""
        found = (layer.mlp.balance for layer in self.layers if isinstance(layer.mlp, MoE))
        return [balance for balance in found if balance is not None]


def places_of(rotary: Rotary, shape: torch.Size, positions: Tensor | None, context: Context) -> Places:
    """Where new tokens, [B, T], stand."""
    following = context.start(*shape)
    whole, local = rotary(context.longest or shape[1], None if context.longest else positions)
    return Places(following if positions is None else positions, whole, local)


def run_layers(
    layers: Iterable[torch.nn.Module],
    x: Tensor,
    residual: Tensor | None,
    places: Places,
    context: Context,
    checkpointing: bool,
) -> tuple[Tensor, Tensor | None]:
    """What layers, one after another, hand on."""
    for layer in layers:
        if checkpointing and torch.is_grad_enabled():
            x, residual = checkpoint(layer, x, residual, places, context, use_reentrant=False)
        else:
            x, residual = layer(x, residual, places, context)
    return x, residual


def feed_forward(config: ModelConfig) -> MLP:
    return MLP(config.hidden, config.intermediate, config.mlp_bias, config.activation)


def experts(config: ModelConfig) -> MoE:
    return MoE(
        config.hidden,
        config.expert_intermediate,
        config.experts,
        config.top_k,
        normalise=config.normalise,
        scale=config.expert_scale,
        groups=config.groups,
        top_groups=config.top_groups,
        shared_intermediate=config.shared_intermediate,
    )
