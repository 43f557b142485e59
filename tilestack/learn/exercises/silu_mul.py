"""Fusion, and computing again instead of keeping: the gated pair with its gradients.

    s = sigmoid(gate)
    forward     out   = gate · s · up                                torch.nn.functional.silu(gate) * up
    backward    dgate = grad · up · s · (1 + gate · (1 - s))
                dup   = grad · gate · s

As two operators, silu would write its result to memory and the product would read it back. In one kernel it never
leaves the registers. The backward would like to have s, and the forward could keep it: one more tensor written and
read. It is cheaper to compute it again from gate, which is kept anyway.

    memory       gate   up   grad          per block: three reads, two writes, and s for nothing
                   │     │     │
                ┌──▼─────▼─────▼──┐
                │ s = sigmoid(…)  │
                └──┬───────────┬──┘
    memory       dgate        dup

Compute in float32; a store rounds to the type of what it stores into.
"""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops


@triton.jit
def silu_mul_fwd_kernel(gate_ptr, up_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # begin: yours
    # | # Yours: gate · sigmoid(gate) · up.
    # | pass
    gate = tl.load(gate_ptr + offsets, mask=offsets < n).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=offsets < n).to(tl.float32)
    tl.store(out_ptr + offsets, gate * tl.sigmoid(gate) * up, mask=offsets < n)
    # end


@triton.jit
def silu_mul_bwd_kernel(grad_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    # begin: yours
    # | # Yours: both gradients from grad, gate and up.
    # | pass
    inside = offsets < n
    grad = tl.load(grad_ptr + offsets, mask=inside).to(tl.float32)
    gate = tl.load(gate_ptr + offsets, mask=inside).to(tl.float32)
    up = tl.load(up_ptr + offsets, mask=inside).to(tl.float32)
    s = tl.sigmoid(gate)
    tl.store(dgate_ptr + offsets, grad * up * s * (1 + gate * (1 - s)), mask=inside)
    tl.store(dup_ptr + offsets, grad * gate * s, mask=inside)
    # end


def silu_mul_backward(grad, gate, up):
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup, n = torch.empty_like(gate), torch.empty_like(up), gate.numel()
    if n:
        silu_mul_bwd_kernel[(triton.cdiv(n, 1024),)](grad, gate, up, dgate, dup, n, BLOCK=1024)
    return dgate, dup


@implements(
    ops.silu_mul, backend="mine", backward=silu_mul_backward, dtypes=[torch.float16, torch.bfloat16, torch.float32]
)
def silu_mul(gate, up):
    gate, up = gate.contiguous(), up.contiguous()
    out, n = torch.empty_like(gate), gate.numel()
    if n:
        silu_mul_fwd_kernel[(triton.cdiv(n, 1024),)](gate, up, out, n, BLOCK=1024)
    return out


# begin: tutor
HINTS = [
    "Load each operand with `.to(tl.float32)` behind it. `tl.sigmoid` is there, and a * b multiplies element by element.",
    "Forward: gate * tl.sigmoid(gate) * up. For the backward write s = tl.sigmoid(gate) once, and use it twice.",
    "dgate = grad * up * s * (1 + gate * (1 - s)), dup = grad * gate * s, with a masked store for each.",
]
MISTAKES = {
    "gate and up are exchanged": lambda gate, up: torch.nn.functional.silu(up) * gate,
    "it is sigmoid(gate) · up, without the factor gate": lambda gate, up: torch.sigmoid(gate) * up,
    "the derivative of sigmoid is forgotten, as if s did not depend on gate": (
        lambda gate, up: gate * torch.sigmoid(gate).detach() * up
    ),
}
# end
