"""Clipping gradients by their global norm, for any optimizer. Ours also clip inside their step: `clip_norm=`."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from tilestack.optim.exact_scale import scale_exactly_
from tilestack.optim.multi_tensor import KeptTables, takes_kernels, walkable


def total_norm(grads: list[Tensor]) -> Tensor:
    """The norm of all gradients as one vector, at least in float32."""
    squares = [torch.linalg.vector_norm(grad, dtype=torch.promote_types(grad.dtype, torch.float32)) for grad in grads]
    return torch.linalg.vector_norm(torch.stack([norm.to(squares[0].device) for norm in squares]))


def coefficient_of(norm: Tensor, max_norm: float) -> Tensor:
    return (max_norm / (norm + 1e-6)).clamp(max=1)


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    tables: KeptTables | None = None,
) -> Tensor:
    """Scale the gradients in place so that their global norm is at most max_norm, and return what it was, as
    torch.nn.utils.clip_grad_norm_ does; the norm of half-precision gradients comes in float32. The host never waits,
    unless error_if_nonfinite asks it to. Tables that the caller keeps from step to step are not made anew, and with them a
    CUDA graph can capture it."""
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    grads = [param.grad for param in parameters if param.grad is not None]
    if not grads or norm_type != 2 or len({grad.device for grad in grads}) > 1:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite)
    device = grads[0].device
    if not takes_kernels("clip_grad_norm", device):
        norm = total_norm(grads)
        refuse_nonfinite(norm, error_if_nonfinite)
        scale_exactly_(grads, coefficient_of(norm, max_norm))
        return norm

    from tilestack.kernels.optim.grad_norm import BLOCK, gradient_norm, scale_gradients

    kept = tables or KeptTables("clip_grad_norm_")
    by_dtype = defaultdict(list)
    for grad in grads:
        by_dtype[grad.dtype].append((grad, walkable(grad)))
    by_table = []
    for dtype, pairs in by_dtype.items():
        walks = [walked for _, walked in pairs]
        by_table.append((kept.find((dtype,), walks, [walks], BLOCK), dtype))
    norm, coefficient = gradient_norm(by_table, max_norm, None)
    refuse_nonfinite(norm, error_if_nonfinite)
    for table, dtype in by_table:
        scale_gradients(table, dtype, coefficient)
    for grad, walked in (pair for pairs in by_dtype.values() for pair in pairs):
        if walked is not grad:
            grad.copy_(walked)
    torch.autograd.graph.increment_version(grads)
    return norm


def refuse_nonfinite(norm: Tensor, wanted: bool) -> None:
    if wanted and not bool(norm.isfinite()):
        raise RuntimeError(
            f"the gradients have the norm {float(norm)} and cannot be clipped; error_if_nonfinite=False scales them anyway"
        )
