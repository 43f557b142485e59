"""SGD and Adam over all tensors of a group in one launch (see multi_tensor.py for how a program finds its block).

A step is two launches. A small one, one lane per tensor, advances the step count on the device and turns the
hyperparameters into a record of float64 scalars per tensor: bias corrections, the factor gradients are multiplied by
(sign, loss scale, clipping). Then one program per block reads its record and walks its block once:

    Adam    g = factor · grad                       read  p g m v    4 · 4 bytes in float32
            m = m + (1 - β1) (g - m)                write p m v      3 · 4 bytes
            v = β2 v + (1 - β2) g²
            p = p · (1 - lr · decay) - lr / (1 - β1ᵗ) · m / (√v / √(1 - β2ᵗ) + ε)

Nothing on the host depends on the step, so that a CUDA graph can replay it; a found infinity makes both return at once.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilestack.contract.launch import launch
from tilestack.kernels.optim.multi_tensor import Table, address, fetch, place, put, triton_dtype
from tilestack.kernels.optim.rounding import random_bits, round_stochastically
from tilestack.kernels.tiles import accumulator, cdiv

WARPS = 8
LANES = 128  # tensors per program of the preparing kernels

# Rows of the table. LAST and the one after it hold max_exp_avg_sq and the master copy, in that order, where there are any.
STEP, PARAM, GRAD, FIRST, SECOND, LAST = (tl.constexpr(row) for row in range(1, 7))
ADAM_RECORD = tl.constexpr(9)  # factor, decay, 1 - β1, β2, 1 - β2, step size, 1 / √(1 - β2ᵗ), ε, step
SGD_RECORD = tl.constexpr(6)  # factor, decay, lr, share of the momentum kept, share of the gradient added, momentum


@triton.jit
def is_skipped(found_inf_ptr):
    skipped = False
    if found_inf_ptr is not None:
        skipped = tl.load(found_inf_ptr) != 0
    return skipped


@triton.jit
def gradient_factor(scale_ptr, clip_ptr, MAXIMIZE: tl.constexpr, LANES: tl.constexpr):
    factor = tl.full([LANES], -1.0 if MAXIMIZE else 1.0, tl.float64)
    if scale_ptr is not None:
        factor = factor / tl.load(scale_ptr).to(tl.float64)
    if clip_ptr is not None:
        factor = factor * tl.load(clip_ptr).to(tl.float64)
    return factor


@triton.jit
def one_minus_power(log_base, exponent):
    """1 - base^exponent without cancellation: exp(y) - 1 = (u - 1) · y / log(u) for u = exp(y) rounded."""
    y = log_base * exponent
    u = tl.exp(y)
    exact = (1 - u) * (y / tl.log(tl.where((u == 1) | (u < 1e-17), 0.5, u)))
    return tl.where(u == 1, -y, tl.where(u < 1e-17, 1.0, exact))


@triton.jit
def adam_prepare_kernel(
    table_ptr, records_ptr, lr_ptr, scale_ptr, clip_ptr, found_inf_ptr,
    tensors, lr: tl.float64, beta1: tl.float64, beta2: tl.float64, log_beta1: tl.float64, log_beta2: tl.float64, eps: tl.float64,
    weight_decay: tl.float64,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    tensor = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = tensor < tensors
    one = tl.full([LANES], 1.0, tl.float64)
    if lr_ptr is not None:
        rate = one * tl.load(lr_ptr).to(tl.float64)
    else:
        rate = one * lr
    step_ptr = tl.load(table_ptr + STEP * tensors + tensor, mask=inside, other=0).to(tl.pointer_type(tl.float32))
    step = tl.load(step_ptr, mask=inside, other=0) + 1
    tl.store(step_ptr, step, mask=inside)
    step = step.to(tl.float64)
    record = records_ptr + tensor * ADAM_RECORD
    tl.store(record, gradient_factor(scale_ptr, clip_ptr, MAXIMIZE, LANES), mask=inside)
    if DECOUPLED:
        tl.store(record + 1, 1 - rate * weight_decay, mask=inside)
    else:
        tl.store(record + 1, one * weight_decay, mask=inside)
    tl.store(record + 2, one - beta1, mask=inside)
    tl.store(record + 3, one * beta2, mask=inside)
    tl.store(record + 4, one - beta2, mask=inside)
    tl.store(record + 5, rate / one_minus_power(log_beta1, step), mask=inside)
    tl.store(record + 6, 1 / tl.sqrt(one_minus_power(log_beta2, step)), mask=inside)
    tl.store(record + 7, one * eps, mask=inside)
    tl.store(record + 8, step, mask=inside)


@triton.jit
def root(x):
    if x.dtype == tl.float64:
        y = tl.sqrt(x)
    else:
        y = tl.sqrt_rn(x)
    return y


@triton.jit
def ratio(x, y):
    if x.dtype == tl.float64:
        z = x / y
    else:
        z = tl.div_rn(x, y)
    return z


@triton.jit
def item(record, i, ACC: tl.constexpr):
    return tl.load(record + i).to(ACC)


@triton.jit
def moments(record, p, g, m, v, DECOUPLED: tl.constexpr, ACC: tl.constexpr):
    """The parameter after its decay, and both moments after this gradient."""
    g = g * item(record, 0, ACC)
    if DECOUPLED:
        p = p * item(record, 1, ACC)
    else:
        g = g + p * item(record, 1, ACC)
    m = m + (g - m) * item(record, 2, ACC)
    return p, m, v * item(record, 3, ACC) + g * g * item(record, 4, ACC)


@triton.jit
def adam_block(
    table_ptr, record, seed, tensors, tensor, start, length,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, ACC: tl.constexpr,
    DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    p_at = address(table_ptr, tensors, tensor, PARAM)
    m_at = address(table_ptr, tensors, tensor, FIRST)
    v_at = address(table_ptr, tensors, tensor, SECOND)
    if MASTER:
        master_at = address(table_ptr, tensors, tensor, LAST + AMSGRAD)
        p = fetch(master_at, start, lane, length, STATE_TYPE, WHOLE)
    else:
        p = fetch(p_at, start, lane, length, PARAM_TYPE, WHOLE)
    g = fetch(address(table_ptr, tensors, tensor, GRAD), start, lane, length, GRAD_TYPE, WHOLE)
    m = fetch(m_at, start, lane, length, STATE_TYPE, WHOLE)
    v = fetch(v_at, start, lane, length, STATE_TYPE, WHOLE)
    if AMSGRAD:
        largest_at = address(table_ptr, tensors, tensor, LAST)
        largest = fetch(largest_at, start, lane, length, STATE_TYPE, WHOLE).to(ACC)
    p, m, v = moments(record, p.to(ACC), g.to(ACC), m.to(ACC), v.to(ACC), DECOUPLED, ACC)
    if AMSGRAD:
        largest = tl.where(v <= largest, largest, v)  # this way round a NaN is kept, as by torch.maximum
        second = largest
    else:
        second = v
    p = p - ratio(item(record, 5, ACC) * m, root(second) * item(record, 6, ACC) + item(record, 7, ACC))
    if MASTER:
        put(master_at, start, lane, length, p, STATE_TYPE, WHOLE)
    if STOCHASTIC:
        bits, more = random_bits(seed, item(record, 8, tl.float64).to(tl.int64), tensor, start + lane)
        p = round_stochastically(p, bits)
        m = round_stochastically(m, bits >> 16)
        v = round_stochastically(v, more)
        if AMSGRAD:
            largest = round_stochastically(largest, more >> 16)
    put(p_at, start, lane, length, p, PARAM_TYPE, WHOLE)
    put(m_at, start, lane, length, m, STATE_TYPE, WHOLE)
    put(v_at, start, lane, length, v, STATE_TYPE, WHOLE)
    if AMSGRAD:
        put(largest_at, start, lane, length, largest, STATE_TYPE, WHOLE)


@triton.jit
def aligned(table_ptr, tensors, tensor, FROM: tl.constexpr, TO: tl.constexpr):
    """Whether all tensors a block touches start on 16 bytes."""
    joined = address(table_ptr, tensors, tensor, FROM)
    for row in tl.static_range(FROM + 1, TO):
        joined = joined | address(table_ptr, tensors, tensor, row)
    return (joined & 15) == 0


@triton.jit
def adam_kernel(
    table_ptr, blocks_ptr, records_ptr, found_inf_ptr,
    seed, tensors, blocks,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, STATE_TYPE: tl.constexpr, ACC: tl.constexpr,
    DECOUPLED: tl.constexpr, AMSGRAD: tl.constexpr, MASTER: tl.constexpr, STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, BLOCK)
    record = records_ptr + tensor * ADAM_RECORD
    if (start + BLOCK <= length) & aligned(table_ptr, tensors, tensor, PARAM, LAST + AMSGRAD + MASTER):
        adam_block(
            table_ptr, record, seed, tensors, tensor, start, length, PARAM_TYPE, GRAD_TYPE, STATE_TYPE, ACC, DECOUPLED,
            AMSGRAD, MASTER, STOCHASTIC, BLOCK, True,
        )  # fmt: skip
    else:
        # In halves, for the registers that a masked block holds its addresses in would be taken from the whole ones, too.
        for half in range(2):
            if start + half * (BLOCK // 2) < length:
                adam_block(
                    table_ptr, record, seed, tensors, tensor, start + half * (BLOCK // 2), length, PARAM_TYPE, GRAD_TYPE,
                    STATE_TYPE, ACC, DECOUPLED, AMSGRAD, MASTER, STOCHASTIC, BLOCK // 2, False,
                )  # fmt: skip


@triton.jit
def sgd_prepare_kernel(
    table_ptr, records_ptr, lr_ptr, scale_ptr, clip_ptr, found_inf_ptr,
    tensors, lr: tl.float64, momentum: tl.float64, dampening: tl.float64, weight_decay: tl.float64,
    MAXIMIZE: tl.constexpr, MOMENTUM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """The step row holds flags that say which momentum buffers are still empty: those take their first gradient whole."""
    if is_skipped(found_inf_ptr):
        return
    tensor = tl.program_id(0) * LANES + tl.arange(0, LANES)
    inside = tensor < tensors
    one = tl.full([LANES], 1.0, tl.float64)
    if lr_ptr is not None:
        rate = one * tl.load(lr_ptr).to(tl.float64)
    else:
        rate = one * lr
    record = records_ptr + tensor * SGD_RECORD
    tl.store(record, gradient_factor(scale_ptr, clip_ptr, MAXIMIZE, LANES), mask=inside)
    tl.store(record + 1, one * weight_decay, mask=inside)
    tl.store(record + 2, rate, mask=inside)
    if MOMENTUM:
        empty_ptr = tl.load(table_ptr + STEP * tensors + tensor, mask=inside, other=0).to(tl.pointer_type(tl.int32))
        empty = tl.load(empty_ptr, mask=inside, other=0) != 0
        tl.store(empty_ptr, tl.zeros([LANES], tl.int32), mask=inside)
        tl.store(record + 3, tl.where(empty, 0.0, one * momentum), mask=inside)
        tl.store(record + 4, tl.where(empty, 1.0, one - dampening), mask=inside)
        tl.store(record + 5, one * momentum, mask=inside)


@triton.jit
def sgd_block(
    table_ptr, record, tensors, tensor, start, length,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ACC: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    lane = tl.arange(0, BLOCK)
    p_at = address(table_ptr, tensors, tensor, PARAM)
    p = fetch(p_at, start, lane, length, PARAM_TYPE, WHOLE).to(ACC)
    g = fetch(address(table_ptr, tensors, tensor, GRAD), start, lane, length, GRAD_TYPE, WHOLE).to(ACC)
    g = g * item(record, 0, ACC) + p * item(record, 1, ACC)
    if MOMENTUM:
        m_at = address(table_ptr, tensors, tensor, FIRST)
        m = fetch(m_at, start, lane, length, PARAM_TYPE, WHOLE).to(ACC)
        m = m * item(record, 3, ACC) + g * item(record, 4, ACC)
        put(m_at, start, lane, length, m, PARAM_TYPE, WHOLE)
        if NESTEROV:
            g = g + m * item(record, 5, ACC)
        else:
            g = m
    put(p_at, start, lane, length, p - g * item(record, 2, ACC), PARAM_TYPE, WHOLE)


@triton.jit
def sgd_kernel(
    table_ptr, blocks_ptr, records_ptr, found_inf_ptr,
    tensors, blocks,
    PARAM_TYPE: tl.constexpr, GRAD_TYPE: tl.constexpr, ACC: tl.constexpr, MOMENTUM: tl.constexpr,
    NESTEROV: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if is_skipped(found_inf_ptr):
        return
    tensor, start, length = place(table_ptr, blocks_ptr, tl.program_id(0), blocks, BLOCK)
    record = records_ptr + tensor * SGD_RECORD
    if (start + BLOCK <= length) & aligned(table_ptr, tensors, tensor, PARAM, FIRST + MOMENTUM):
        sgd_block(
            table_ptr, record, tensors, tensor, start, length, PARAM_TYPE, GRAD_TYPE, ACC, MOMENTUM, NESTEROV,
            BLOCK, True,
        )  # fmt: skip
    else:
        sgd_block(
            table_ptr, record, tensors, tensor, start, length, PARAM_TYPE, GRAD_TYPE, ACC, MOMENTUM, NESTEROV,
            BLOCK, False,
        )  # fmt: skip


def block_for(*dtypes: torch.dtype) -> int:
    """Elements per program: a thread holds 16 bytes of the widest tensor, which keeps enough programs resident."""
    return WARPS * 32 * 16 // max(dtype.itemsize for dtype in dtypes)


def rate_of(lr: float | Tensor, device: torch.device) -> tuple[float, Tensor | None]:
    """A learning rate as the preparing kernels take it: a number, or a tensor on the device that overrules it."""
    if isinstance(lr, Tensor) and lr.device == device:
        return 0.0, lr
    return float(lr), None


def log(x: float) -> float:
    return math.log(x) if x > 0 else -math.inf


def prepare_adam(
    table: Table, group: dict[str, Any], scale: Tensor | None, clip: Tensor | None,
    found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Advance the step counts and write the record of each tensor."""
    lr, lr_tensor = rate_of(group["lr"], table.entries.device)
    beta1, beta2 = (float(beta) for beta in group["betas"])
    launch(
        adam_prepare_kernel, (cdiv(table.tensors, LANES),), table.entries, table.records, lr_tensor, scale, clip,
        found_inf, table.tensors, lr, beta1, beta2, log(beta1), log(beta2), float(group["eps"]),
        float(group["weight_decay"]), MAXIMIZE=group["maximize"], DECOUPLED=group["decoupled_weight_decay"],
        LANES=LANES, num_warps=4,
    )  # fmt: skip


def step_adam(
    table: Table, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype], found_inf: Tensor | None, seed: int,
    decoupled: bool, amsgrad: bool, master: bool, stochastic: bool,
) -> None:  # fmt: skip
    """Update all tensors of a table whose rows are step, param, grad, exp_avg, exp_avg_sq[, max_exp_avg_sq][, master];
    `dtypes` are those of params, grads and states."""
    param, grad, state = dtypes
    launch(
        adam_kernel, (table.programs,), table.entries, table.blocks, table.records, found_inf, seed, table.tensors,
        table.programs, PARAM_TYPE=triton_dtype(param), GRAD_TYPE=triton_dtype(grad), STATE_TYPE=triton_dtype(state),
        ACC=accumulator(param), DECOUPLED=decoupled, AMSGRAD=amsgrad, MASTER=master, STOCHASTIC=stochastic,
        BLOCK=table.block, num_warps=WARPS,
    )  # fmt: skip


def step_sgd(
    table: Table, dtypes: tuple[torch.dtype, torch.dtype], group: dict[str, Any], scale: Tensor | None,
    clip: Tensor | None, found_inf: Tensor | None,
) -> None:  # fmt: skip
    """Update all tensors of a table whose rows are empty flags, param, grad[, momentum_buffer]."""
    lr, lr_tensor = rate_of(group["lr"], table.entries.device)
    momentum = float(group["momentum"])
    launch(
        sgd_prepare_kernel, (cdiv(table.tensors, LANES),), table.entries, table.records, lr_tensor, scale, clip,
        found_inf, table.tensors, lr, momentum, float(group["dampening"]), float(group["weight_decay"]),
        MAXIMIZE=group["maximize"], MOMENTUM=momentum != 0, LANES=LANES, num_warps=4,
    )  # fmt: skip
    param, grad = dtypes
    launch(
        sgd_kernel, (table.programs,), table.entries, table.blocks, table.records, found_inf, table.tensors,
        table.programs, PARAM_TYPE=triton_dtype(param), GRAD_TYPE=triton_dtype(grad), ACC=accumulator(param),
        MOMENTUM=momentum != 0, NESTEROV=group["nesterov"], BLOCK=table.block, num_warps=WARPS,
    )  # fmt: skip
