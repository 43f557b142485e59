"""What each optimizer's step is, in plain PyTorch, one tensor at a time: the reference, and what runs without a GPU.

Half-precision tensors are computed in float32 and rounded once, when they are stored. `factor` multiplies the gradient:
its sign when maximising, one over the loss scale, the clipping coefficient.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilestack.ops.gram import newton_schulz
from tilestack.ops.numerics import wide


def adam_step(
    group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], factor: Any, draw: Tensor | None = None
) -> None:
    """Adam or, where the group decouples its weight decay, AdamW. `draw` are the random words of stochastic rounding."""
    beta1, beta2 = (float(beta) for beta in group["betas"])
    lr, decay = float(group["lr"]), float(group["weight_decay"])
    step = float(state["step"].add_(1))
    master = state.get("master_param", param)
    p, m, v, g = wide(master), wide(state["exp_avg"]), wide(state["exp_avg_sq"]), wide(grad) * factor
    if group["decoupled_weight_decay"]:
        p = p * (1 - lr * decay)
    else:
        g = g + p * decay
    m = m + (g - m) * (1 - beta1)
    v = v * beta2 + g * g * (1 - beta2)
    second = torch.maximum(wide(state["max_exp_avg_sq"]), v) if group["amsgrad"] else v
    p = p - lr / (1 - beta1**step) * m / (second.sqrt() / (1 - beta2**step) ** 0.5 + group["eps"])
    if "master_param" in state:
        master.copy_(p)
    results = {"param": p, "exp_avg": m, "exp_avg_sq": v} | ({"max_exp_avg_sq": second} if group["amsgrad"] else {})
    for word, (name, value) in enumerate(results.items()):
        target = param if name == "param" else state[name]
        target.copy_(value if draw is None or word >= len(draw) else round_stochastically(value, draw[word]))


def sgd_step(
    group: dict[str, Any], param: Tensor, grad: Tensor, momentum_buffer: Tensor | None, empty: bool, factor: Any
) -> None:
    """SGD; an empty momentum buffer takes its first gradient whole."""
    p = wide(param)
    g = wide(grad) * factor + p * group["weight_decay"]
    if momentum_buffer is not None:
        m = g if empty else wide(momentum_buffer) * group["momentum"] + g * (1 - group["dampening"])
        momentum_buffer.copy_(m)
        g = g + m * group["momentum"] if group["nesterov"] else m
    param.copy_(p - g * float(group["lr"]))


def muon_step(
    group: dict[str, Any], param: Tensor, grad: Tensor, state: dict[str, Any], factor: Any,
    matrices: Callable[[Tensor], Sequence[Tensor]], ratio: Callable[[Tensor], float], dtype: torch.dtype,
) -> None:  # fmt: skip
    """Muon of each of the `matrices` that a parameter is made of; `ratio` is what its learning rate is multiplied by."""
    lr, momentum = float(group["lr"]), group["momentum"]
    a, b, c = group["ns_coefficients"]
    master = state.get("master_param", param)
    g, m = wide(grad) * factor, wide(state["momentum_buffer"])
    m = m + (g - m) * (1 - momentum)
    state["momentum_buffer"].copy_(m)
    update = g + (m - g) * momentum if group["nesterov"] else m
    p = (wide(master) * (1 - lr * group["weight_decay"])).contiguous()
    for target, direction in zip(matrices(p), matrices(update.contiguous()), strict=True):
        ortho = newton_schulz.definition(direction.to(dtype), group["ns_steps"], a, b, c, group["eps"])
        target.sub_(ortho.to(target.dtype), alpha=lr * ratio(target))
    if "master_param" in state:
        master.copy_(p)
    param.copy_(p)


def scramble(x: Tensor) -> Tensor:
    """A bijective hash of 32 bits, in int64."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D & 0xFFFFFFFF
    x = x ^ (x >> 15)
    x = x * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def random_words(seed: int, step: int, tensor: int, like: Tensor) -> Tensor:
    """Four words of 16 random bits for each element, from a hash of all four numbers; the kernels draw the same."""
    word = lambda x: x & 0xFFFFFFFF
    key = scramble(word(scramble(word(scramble(torch.tensor(step)) + seed)) + tensor)).to(like.device)
    flat = torch.arange(like.numel(), device=like.device)
    offsets = torch.empty_like(like, dtype=torch.int64)
    offsets.as_strided((like.numel(),), (1,)).copy_(flat)  # elements are numbered as they lie in memory
    first = scramble(word(key + offsets))
    second = scramble(word(first + 0x9E3779B9))
    return torch.stack([first & 0xFFFF, first >> 16, second & 0xFFFF, second >> 16])


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """x, a float32, rounded to what bfloat16 can hold: up with the probability of the fraction that is cut off."""
    raised = (x.view(torch.int32) + bits.int()) & -0x10000
    return torch.where(x.isnan(), x, raised.view(torch.float32))
