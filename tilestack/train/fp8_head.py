"""The head of a language model and its loss with its three products in fp8, a chunk of rows at a time.

    logits = x wᵀ        losses, dlogits        dx = dlogits w        dw += dlogitsᵀ x

Logits are rounded to bfloat16 once, as they are without fp8, and the loss is that of `ops.cross_entropy`. Its gradient is
coded like any other: 128 words of a row share a scale, so that the words which a row gives next to no probability keep
theirs beside the one that it should have given all. What arrives from above at a sum is one number, so the gradients are
made in the forward, where the logits of a chunk are, and the backward scales them.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tilestack import ops
from tilestack.kernels.loss.linear_cross_entropy import rows_per_chunk
from tilestack.train.fp8 import gradient_of_weight, product


def head_loss(x: Tensor, weight: Tensor, labels: Tensor, softcap: float = 0.0) -> Tensor:
    """The sum of -log softmax(x @ weight.T)[label] over the rows not ignored, in fp8."""
    return HeadLoss.apply(x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), softcap)


class HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, labels: Tensor, softcap: float) -> Tensor:  # type: ignore[override]
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dx = torch.zeros_like(x) if needs_x else None
        dweight = torch.zeros_like(weight) if needs_weight else None
        total = x.new_zeros((), dtype=torch.float32)
        weight8, weight_scale, turned, turned_scale = ops.fp8_tiles(weight, "blocks", "blocks")
        size = rows_per_chunk(len(x), weight8)  # a multiple of 128, which share scales
        for start in range(0, len(x), size):
            part = slice(start, start + size)
            x8, x_scale, *x_turned = ops.fp8_tiles(x[part].to(torch.bfloat16), "rows", "blocks")
            logits = product(x8, x_scale, weight8, weight_scale, None)
            with torch.set_grad_enabled(needs_x or needs_weight):
                loss = ops.cross_entropy(
                    logits.requires_grad_(needs_x or needs_weight), labels[part], softcap=softcap, reduction="sum"
                )
            total += loss.detach()
            if not loss.requires_grad:
                continue
            (dlogits,) = torch.autograd.grad(loss, logits)
            coded, scale, *coded_turned = ops.fp8_tiles(dlogits, "rows", "rows")
            if dx is not None:
                dx[part] = product(coded, scale, turned, turned_scale, None)
            if dweight is not None:
                dweight += gradient_of_weight(coded_turned, x_turned, None)
        ctx.save_for_backward(dx, dweight)
        return total

    @staticmethod
    @once_differentiable  # its gradient is made of codes, which have none of their own
    def backward(ctx, grad: Tensor):  # type: ignore[override]
        scaled = (None if made is None else made * grad.to(made.dtype) for made in ctx.saved_tensors)
        return *scaled, None, None
