"""The layers of a decoder as each candidate of `tilestack bench layers` computes them: ours, plain PyTorch's, transformers'.

    attention   x + attention(norm(x)): norm, projection, norms and rotation of queries and keys, attention, projection
    mlp         x + mlp(norm(x)); where the model has experts, the router and the experts
    block       one after the other
    head        norm, scores of the vocabulary, and the mean cross entropy of the next tokens

x is [B, T, H]. All candidates have the weights of one folder, which holds a decoder of one block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack.lab.training.train_steps import Work

LAYERS = ("attention", "mlp", "block", "head")


@dataclass(frozen=True)
class Built:
    """One candidate's layer: hidden states to its result, and the weights whose gradients a training step takes."""

    run: Callable[[Tensor], Tensor]
    weights: Sequence[Tensor]


def weights_of(*parts: torch.nn.Module) -> list[Tensor]:
    return [weight for part in parts for weight in part.parameters()]


def compiled(built: Built, way: str) -> Built:
    return Built(torch.compile(built.run, dynamic=False), built.weights) if way == "compile" else built


def ours(work: Work, layer: str, way: str) -> Built:
    """As the decoder computes it: the sum with the residual is the next norm's, so a layer alone adds it last."""
    from tilestack import configure_backend, models
    from tilestack.models.context import Documents
    from tilestack.models.decoder import places_of
    from tilestack.models.norm import add_norm
    from tilestack.train.next_token import loss_of_labels

    configure_backend(work.backend)
    model = models.load(work.weights, device=work.device).requires_grad_()
    block: Any = model.layers[0]
    context = Documents()
    places = places_of(model.rotary, torch.Size((work.batch, work.sequence)), None, context)
    labels, count = next_labels(work)

    def attention(x: Tensor) -> Tensor:
        normal, residual = add_norm(x, None, block.attention_norm)
        return residual + block.added(block.attention(normal, places, context), block.attention_post_norm)

    def mlp(x: Tensor) -> Tensor:
        normal, residual = add_norm(x, None, block.mlp_norm)
        return residual + block.added(block.mlp(normal), block.mlp_post_norm)

    def whole(x: Tensor) -> Tensor:
        added, residual = block(x, None, places, context)
        return residual + added

    def head(x: Tensor) -> Tensor:
        return loss_of_labels(model, model.normed(x, None), labels) / count

    norms = lambda *found: [norm for norm in found if norm is not None]  # which families have before, behind or both
    attention_parts = (*norms(block.attention_norm, block.attention_post_norm), block.attention)
    return {
        "attention": Built(attention, weights_of(*attention_parts)),
        "mlp": Built(mlp, weights_of(*norms(block.mlp_norm, block.mlp_post_norm), block.mlp)),
        "block": Built(whole, weights_of(block)),
        "head": Built(head, [*weights_of(model.norm), model.head_weight]),
    }[layer]


def plain(work: Work, layer: str, way: str) -> Built:
    from tilestack.lab.training.plain_model import PlainDecoder

    model = PlainDecoder.load(Path(work.weights)).to(work.device, getattr(torch, work.dtype))
    block: Any = model.layers[0]
    cos, sin = model.angles(work.sequence, torch.device(work.device), getattr(torch, work.dtype))
    labels, _ = next_labels(work)

    def head(x: Tensor) -> Tensor:
        return F.cross_entropy(model.head(model.norm(x)).flatten(0, 1), labels.flatten())

    built = {
        "attention": Built(lambda x: block.attend(x, cos, sin), weights_of(block.attention_norm, block.attention)),
        "mlp": Built(block.feed_forward, weights_of(block.mlp_norm, block.gate, block.up, block.down)),
        "block": Built(lambda x: block(x, cos, sin), weights_of(block)),
        "head": Built(head, weights_of(model.norm, model.head)),
    }[layer]
    return compiled(built, way)


def theirs(work: Work, layer: str, way: str) -> Built:
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        work.weights, attn_implementation="sdpa", dtype=getattr(torch, work.dtype)
    )
    model.to(work.device).train()
    block = model.model.layers[0]
    positions = torch.arange(work.sequence, device=work.device)[None]
    with torch.no_grad():
        angles = model.model.rotary_emb(model.model.embed_tokens.weight[:1], positions)
    first = lambda out: out[0] if isinstance(out, tuple) else out
    ids = work.ids()

    def attention(x: Tensor) -> Tensor:
        return x + first(
            block.self_attn(block.input_layernorm(x), position_embeddings=angles, attention_mask=None)
        )  # without a mask it is causal

    def mlp(x: Tensor) -> Tensor:
        return x + first(block.mlp(block.post_attention_layernorm(x)))

    def whole(x: Tensor) -> Tensor:
        return first(block(x, position_embeddings=angles, attention_mask=None, position_ids=positions))

    def head(x: Tensor) -> Tensor:
        return model.loss_function(model.lm_head(model.model.norm(x)), ids, vocab_size=model.config.vocab_size)

    built = {
        "attention": Built(attention, weights_of(block.input_layernorm, block.self_attn)),
        "mlp": Built(mlp, weights_of(block.post_attention_layernorm, block.mlp)),
        "block": Built(whole, weights_of(block)),
        "head": Built(head, weights_of(model.model.norm, model.lm_head)),
    }[layer]
    return compiled(built, way)


def next_labels(work: Work) -> tuple[Tensor, int]:
    """The token after each, and how many there are: a row's last has none."""
    from tilestack.data import NO_LABEL

    ids = work.ids()
    labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], NO_LABEL)], 1)
    return labels, work.batch * (work.sequence - 1)


def build(candidate: str, work: Work, layer: str) -> Built:
    framework, _, way = candidate.partition("-")
    return {"tilestack": ours, "plain": plain, "transformers": theirs}[framework](work, layer, way)
