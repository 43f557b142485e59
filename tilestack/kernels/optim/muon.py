"""Muon over matrices of one shape: what comes before Newton–Schulz and what comes after it, each in one launch.

    momentum   m = m + (1 - μ) (g - m)              read  g m, write m and, in 16 bits, the update of all matrices as one
               u = g + μ (m - g)  with Nesterov     stack [matrices, rows, columns], and per block its sum of squares
    iterate    O = Newton–Schulz of u               kernels/matmul/gram.py; the norm is that of the sums above
    apply      p = p · (1 - lr · decay) - lr' · O   read  p O, write p; lr' is lr times what the rule says for this shape

A matrix is some rows of a parameter, one below the other in memory, so that a table of addresses (multi_tensor.py) names
those of a fused projection apart. Nothing on the host depends on the step, and a found infinity makes both return at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.matmul.gram import iterate, norms_of
from tilestack.kernels.optim.multi_tensor import Table, address, fetch, place, put, triton_dtype
from tilestack.kernels.optim.steps import WARPS, aligned, is_skipped, rate_of
from tilestack.kernels.tiles import accumulator, widened

# Rows of the table. The last is there where parameters have a master copy.
PARAM, GRAD, MOMENTUM, MASTER_COPY = (tl.constexpr(row) for row in range(1, 5))


@triton.jit
def place_in_stack(stack_ptr, tensor, length):
    """The address of a matrix in a stack."""
    return stack_ptr.to(tl.int64) + tensor * length * (stack_ptr.dtype.element_ty.primitive_bitwidth // 8)


@triton.jit
def momentum_block(
    table_ptr, scale_ptr, clip_ptr, momentum, tensors, tensor, start, length, update_at,
    GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, UPDATE_TYPE: tl.constexpr, ACC: tl.constexpr,
    MAXIMIZE: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The sum of squares of this block's update, which is written, as the momentum is."""
    lane = tl.arange(0, BLOCK)
    m_at = address(table_ptr, tensors, tensor, MOMENTUM)
    g = fetch(address(table_ptr, tensors, tensor, GRAD), start, lane, length, GRAD_TYPE, WHOLE).to(ACC)
    m = fetch(m_at, start, lane, length, STATE_TYPE, WHOLE).to(ACC)
    if scale_ptr is not None:
        g = g / tl.load(scale_ptr).to(ACC)
    if clip_ptr is not None:
        g = g * tl.load(clip_ptr).to(ACC)
    if MAXIMIZE:
        g = -g
    kept = tl.full([], momentum, ACC)
    m = m + (g - m) * (1 - kept)
    put(m_at, start, lane, length, m, STATE_TYPE, WHOLE)
    if NESTEROV:
        m = g + (m - g) * kept
    update = m.to(UPDATE_TYPE)
    put(update_at, start, lane, length, update, UPDATE_TYPE, WHOLE)
    rounded = tl.where(lane < length - start, update.to(ACC), 0)
    return tl.sum(rounded * rounded, 0)


@triton.jit
def muon_momentum_kernel(
    table_ptr, blocks_ptr, scale_ptr, clip_ptr, found_inf_ptr, update_ptr, partial_ptr,
    tensors, blocks, momentum: tl.float64,
    GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, UPDATE_TYPE: tl.constexpr, ACC: tl.constexpr,
    MAXIMIZE: tl.constexpr, NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, BLOCK)
    update_at = place_in_stack(update_ptr, tensor, length)
    if (start + BLOCK <= length) & aligned(table_ptr, tensors, tensor, GRAD, MOMENTUM + 1) & ((update_at & 15) == 0):
        squares = momentum_block(
            table_ptr, scale_ptr, clip_ptr, momentum, tensors, tensor, start, length, update_at, GRAD_TYPE, STATE_TYPE,
            UPDATE_TYPE, ACC, MAXIMIZE, NESTEROV, BLOCK, True,
        )  # fmt: skip
    else:
        squares = momentum_block(
            table_ptr, scale_ptr, clip_ptr, momentum, tensors, tensor, start, length, update_at, GRAD_TYPE, STATE_TYPE,
            UPDATE_TYPE, ACC, MAXIMIZE, NESTEROV, BLOCK, False,
        )  # fmt: skip
    tl.store(partial_ptr + tl.program_id(0), squares)


@triton.jit
def apply_block(
    table_ptr, rate, decay, tensors, tensor, start, length, ortho_at, ratio,
    PARAM_TYPE: tl.constexpr, ORTHO_TYPE: tl.constexpr, ACC: tl.constexpr, MASTER: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    p_at = address(table_ptr, tensors, tensor, PARAM)
    if MASTER:
        master_at = address(table_ptr, tensors, tensor, MASTER_COPY)
        p = fetch(master_at, start, lane, length, tl.float32, WHOLE)
    else:
        p = fetch(p_at, start, lane, length, PARAM_TYPE, WHOLE).to(ACC)
    ortho = fetch(ortho_at, start, lane, length, ORTHO_TYPE, WHOLE).to(ACC)
    p = p * (1 - rate * decay).to(ACC) - (rate * ratio).to(ACC) * ortho
    if MASTER:
        put(master_at, start, lane, length, p, tl.float32, WHOLE)
    put(p_at, start, lane, length, p, PARAM_TYPE, WHOLE)


@triton.jit
def muon_apply_kernel(
    table_ptr, blocks_ptr, lr_ptr, found_inf_ptr, ortho_ptr,
    tensors, blocks, lr: tl.float64, decay: tl.float64, ratio: tl.float64,
    PARAM_TYPE: tl.constexpr, ORTHO_TYPE: tl.constexpr, ACC: tl.constexpr, MASTER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    if lr_ptr is not None:
        rate = tl.load(lr_ptr).to(tl.float64)
    else:
        rate = tl.full([], lr, tl.float64)
    tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, BLOCK)
    ortho_at = place_in_stack(ortho_ptr, tensor, length)
    if (
        (start + BLOCK <= length)
        & aligned(table_ptr, tensors, tensor, PARAM, MOMENTUM + 1 + MASTER)
        & ((ortho_at & 15) == 0)
    ):
        apply_block(
            table_ptr, rate, decay, tensors, tensor, start, length, ortho_at, ratio, PARAM_TYPE, ORTHO_TYPE, ACC, MASTER,
            BLOCK, True,
        )  # fmt: skip
    else:
        apply_block(
            table_ptr, rate, decay, tensors, tensor, start, length, ortho_at, ratio, PARAM_TYPE, ORTHO_TYPE, ACC, MASTER,
            BLOCK, False,
        )  # fmt: skip


def step_muon(
    table: Table, shape: tuple[int, int], dtypes: tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype],
    group: dict[str, Any], ratio: float, master: bool,
    scale: Tensor | None, clip: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Update all matrices of a table, each of this shape, whose rows are param, grad, momentum_buffer[, master];
    `dtypes` are those of params, grads, momenta and of Newton–Schulz, `ratio` what the learning rate is multiplied by."""
    param, grad, state, inner = dtypes
    device = table.entries.device
    acc = torch.promote_types(widened(param), widened(inner))
    update = torch.empty((table.tensors, *shape), dtype=inner, device=device)
    partial = torch.empty((table.tensors, table.programs // table.tensors), dtype=acc, device=device)
    launch(
        muon_momentum_kernel, (table.programs,), table.entries, table.blocks, scale, clip, found_inf, update, partial,
        table.tensors, table.programs, float(group["momentum"]), GRAD_TYPE=triton_dtype(grad),
        STATE_TYPE=triton_dtype(state), UPDATE_TYPE=triton_dtype(inner), ACC=accumulator(acc),
        MAXIMIZE=group["maximize"], NESTEROV=group["nesterov"], BLOCK=table.block, num_warps=WARPS,
    )  # fmt: skip
    norms = norms_of(partial, float(group["eps"]))
    ortho = iterate(update, norms, group["ns_steps"], *group["ns_coefficients"])
    lr, lr_tensor = rate_of(group["lr"], device)
    launch(
        muon_apply_kernel, (table.programs,), table.entries, table.blocks, lr_tensor, found_inf, ortho, table.tensors,
        table.programs, lr, float(group["weight_decay"]), ratio, PARAM_TYPE=triton_dtype(param),
        ORTHO_TYPE=triton_dtype(inner), ACC=accumulator(acc), MASTER=master, BLOCK=table.block, num_warps=WARPS,
    )  # fmt: skip
