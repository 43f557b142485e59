"""What people write in PyTorch for an operator whose definition is not that, or that has no function of its own.

A definition says exactly what an operator does, down to the bits of its random numbers and what a row without scores
gives; compiled, it can be far slower than the usual code. These are the usual code: peers run it eagerly and compiled.
Each names the operator's arguments it wants and answers NotImplemented for those it does not take.

Sparse and quantised operators have dense ones in half precision as their alternative. What these multiply is prepared once,
as its users have it, and not timed.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestack import ops


@dataclass(frozen=True)
class Prepared:
    """A function whose users prepare something once for many calls: `run(*setup(…))`, of which `run` alone is timed."""

    setup: Callable
    run: Callable


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "squared_relu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


def cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction):
    if z_loss or softcap:
        return NotImplemented
    return F.cross_entropy(
        logits.flatten(0, -2),
        labels.flatten(),
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        reduction=reduction,
    )


def linear_cross_entropy(x, weight, labels, ignore_index, label_smoothing, z_loss, softcap, reduction):
    logits = F.linear(x, weight)
    return cross_entropy(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction)


def causal_softmax(x, scale):
    rows, columns = x.shape[-2:]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=x.device).tril(columns - rows)
    return (scale * x).masked_fill(~seen, -torch.inf).softmax(-1)


def half_attention(q, k, v, cu_seqlens, causal, scale):
    """Attention of the tensors as they are, which is what codes have to be faster than."""
    if cu_seqlens is not None or (causal and q.shape[1] != k.shape[1]):
        return NotImplemented
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped).transpose(1, 2)


def rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def rope(q, k, cos, sin, positions, interleaved):
    """As transformers writes it, with the angles looked up."""
    if interleaved or 2 * cos.shape[1] != q.shape[3]:
        return NotImplemented
    at = (lambda table: table[: q.shape[1]]) if positions is None else (lambda table: table[positions])
    cos, sin = (torch.cat((at(table),) * 2, -1).unsqueeze(-2) for table in (cos, sin))
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def rope_(q, k, cos, sin, positions, interleaved):
    turned = rope(q, k, cos, sin, positions, interleaved)
    if turned is NotImplemented:
        return NotImplemented
    q.copy_(turned[0])
    k.copy_(turned[1])


def qk_norm_rope(q, k, q_weight, k_weight, cos, sin, positions, interleaved, eps):
    normal = lambda x, weight: F.rms_norm(x, weight.shape, weight, eps)
    return rope(normal(q, q_weight), normal(k, k_weight), cos, sin, positions, interleaved)


def sample(logits, temperature, top_k, top_p, min_p):
    """Filters on sorted logits, then a race of exponential numbers, as inference engines write it."""
    greedy = temperature <= 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature)[:, None]
    ordered, order = scaled.sort(-1)
    vocabulary = logits.shape[-1]
    smallest = vocabulary - torch.where(top_k > 0, top_k, vocabulary).long()
    ordered = ordered.masked_fill(ordered < ordered.gather(1, smallest[:, None]), -torch.inf)
    likely = ordered.softmax(-1)
    dropped = (likely.cumsum(-1) <= 1 - top_p[:, None]) | (likely < min_p[:, None] * likely[:, -1:])
    dropped[:, -1] = False
    kept = torch.empty_like(scaled).scatter_(1, order, ordered.masked_fill(dropped, -torch.inf))
    race = kept.softmax(-1) / torch.empty_like(kept).exponential_()
    return torch.where(greedy, logits.argmax(-1), race.argmax(-1))


def images_of_codes(x, weight, x_scale, weight_scale, bias, stride, padding, dilation, groups, dtype):
    """What a network that is not quantised has: images and filters in the dtype of the result."""
    made = getattr(torch, dtype) if dtype else weight_scale.dtype
    image, filters = x.float() * x_scale.float(), weight.float() * weight_scale.float()[:, None, None, None]
    bias = None if bias is None else bias.to(made)
    return image.to(made), filters.to(made), bias, tuple(stride), tuple(padding), tuple(dilation), groups


def dense_of(values, rows, columns, lines, width):
    side = values.shape[1]
    blocks = values.new_zeros(lines, width, side, side).index_put(
        (rows.long(), columns.long()), values, accumulate=True
    )
    return blocks.transpose(1, 2).reshape(lines * side, width * side)


def sampled_from_dense(a, b, rows, columns, side):
    blocks = (a @ b).unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
    return blocks[rows.long(), columns.long()]


def linear_of_codes(x, weight, scale, zero, bias):
    """What a layer that is not quantised has: the weight in the dtype of x."""
    every = torch.eye(x.shape[-1], dtype=torch.float32, device=x.device)
    numbers = ops.linear_weight_only.definition(every, weight, scale, zero).T
    return x, numbers.contiguous().to(x.dtype), None if bias is None else bias.to(x.dtype)


IDIOMS: dict[str, Callable | Prepared] = {
    "cross_entropy": cross_entropy,
    "linear_cross_entropy": linear_cross_entropy,
    "dropout": lambda x, p: F.dropout(x, p),
    "activation_dropout": lambda x, p, kind: F.dropout(ACTIVATIONS[kind](x), p),
    "gated_dropout": lambda gate, up, p, kind: F.dropout(ACTIVATIONS[kind](gate) * up, p),
    "embedding": lambda ids, weight, padding_idx: F.embedding(ids, weight, padding_idx),
    "masked_softmax": lambda x, mask: x.masked_fill(~mask, -torch.inf).softmax(-1),
    "causal_softmax": causal_softmax,
    "attention_int8": half_attention,
    "attention_fp8": half_attention,
    "rope": rope,
    "rope_": rope_,
    "qk_norm_rope": qk_norm_rope,
    "argmax": lambda logits: logits.argmax(-1),
    "topk": lambda logits, k: torch.topk(logits, k),
    "sample": sample,
    "conv2d_int8": Prepared(images_of_codes, F.conv2d),
    "block_sparse_dsd": Prepared(
        lambda values, rows, columns, x, lines: (
            dense_of(values, rows, columns, lines, x.shape[0] // values.shape[1]), x,
        ),
        torch.matmul,
    ),
    "block_sparse_dds": Prepared(
        lambda x, values, rows, columns, width: (
            x, dense_of(values, rows, columns, x.shape[1] // values.shape[1], width),
        ),
        torch.matmul,
    ),
    "block_sparse_sdd": sampled_from_dense,
    "linear_weight_only": Prepared(linear_of_codes, F.linear),
}  # fmt: skip
