"""The head of a language model and its loss with its three products in fp8, a chunk of rows at a time.

    logits = x wᵀ        losses        codes of dlogits        dx = dlogits w        dw += dlogitsᵀ x

Logits are rounded to bfloat16 once, as they are without fp8, and the loss is that of `ops.cross_entropy`. Its gradient is
coded like any other: 128 words of a row share a scale, so that the words which a row gives next to no probability keep
theirs beside the one that it should have given all. It is made of the logits and of each row's loss on the way to its codes
and is never written as it is. What arrives from above at a sum is one number, so the gradients are made in the forward,
where the logits of a chunk are, and the backward scales them.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.kernels.loss.linear_cross_entropy import rows_per_chunk
from tilestack.train.fp8_product import gradient_of_weight, product
from tilestack.train.fp8_weights import WeightCodes, codes_of_weight

IGNORED = -100


def head_loss(
    x: Tensor, weight: Tensor, labels: Tensor, softcap: float = 0.0, weights: WeightCodes | None = None
) -> Tensor:
    """The sum of -log softmax(x @ weight.T)[label] over the rows not ignored, in fp8."""
    codes = codes_of_weight(weight, weights)
    return HeadLoss.apply(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), softcap, *codes)


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, labels, softcap, weight8, weight_scale, turned, turned_scale):  # type: ignore[override]
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        dweight = None
        total = x.new_zeros((), dtype=torch.float32)
        size = rows_per_chunk(len(x), weight8)  # a multiple of 128, which share scales
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            x8, x_scale, *x_turned = ops.fp8_tiles(x[part].to(torch.bfloat16), "rows", "blocks")
            logits = product(x8, x_scale, weight8, weight_scale, None)
            losses = ops.cross_entropy(logits, labels[part], IGNORED, softcap=softcap, reduction="none")
            total += losses.sum()
            if not (needs_x or needs_weight):
                continue
            coded, scale, *coded_turned = codes_of_gradient(logits, labels[part], losses, softcap)
            if dx is not None:
                dx[part] = product(coded, scale, turned, turned_scale, None)
            if needs_weight:
                of_part = gradient_of_weight(coded_turned, x_turned, None).to(weight.dtype)
                dweight = of_part if dweight is None else dweight.add_(of_part)
        if needs_weight and dweight is None:
            dweight = torch.zeros_like(weight)
        ctx.save_for_backward(dx, dweight)
        return total

    @staticmethod
    @once_differentiable  # its gradient is made of codes, which have none of their own
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        # A tensor without dimensions would be rounded to bfloat16 before the product, 1 / count and so all gradients with
        # it; one of one dimension is not.
        scaled = (
            None if made is None else torch.mul(made, grad[None], out=torch.empty_like(made))
            for made in ctx.saved_tensors
        )
        return *scaled, *(None for _ in range(6))


def codes_of_gradient(logits: Tensor, labels: Tensor, losses: Tensor, softcap: float) -> tuple[Tensor, ...]:
    """The gradient of a sum of losses by the logits, as codes and scales both ways."""
    if softcap:
        with torch.enable_grad():
            leaf = logits.detach().requires_grad_()
            loss = ops.cross_entropy(leaf, labels, IGNORED, softcap=softcap, reduction="sum")
            (dlogits,) = torch.autograd.grad(loss, leaf)
        return ops.fp8_tiles(dlogits, "rows", "rows")
    target = logits.gather(1, labels.clamp(0, logits.shape[1] - 1).long()[:, None])[:, 0]
    return ops.cross_entropy_gradient_fp8_tiles(logits, losses + target.float(), labels, IGNORED, "rows", "rows")
