"""A solution to each exercise of docs/learn.md, as short as a reader's own may be: for `verify --load`, not to be fast."""

import torch
import triton
import triton.language as tl

from tilestack import implements, ops

HALVES_AND_FLOAT = [torch.float16, torch.bfloat16, torch.float32]


@triton.jit
def relu_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets, mask=offsets < n)
    tl.store(out_ptr + offsets, tl.where(x < 0, 0.0, x), mask=offsets < n)


@triton.jit
def relu_gradient_kernel(grad_ptr, out_ptr, dx_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    grad = tl.load(grad_ptr + offsets, mask=offsets < n)
    out = tl.load(out_ptr + offsets, mask=offsets < n)
    tl.store(dx_ptr + offsets, tl.where(out <= 0, 0.0, grad), mask=offsets < n)


def relu_backward(grad, out):
    grad, out = grad.contiguous(), out.contiguous()
    dx, n = torch.empty_like(grad), grad.numel()
    if n:
        relu_gradient_kernel[(triton.cdiv(n, 1024),)](grad, out, dx, n, BLOCK=1024)
    return dx


@implements(ops.relu, backend="mine", backward=relu_backward)
def relu(x):
    x = x.contiguous()
    out, n = torch.empty_like(x), x.numel()
    if n:
        relu_kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)
    return out


@triton.jit
def transpose_kernel(x_ptr, out_ptr, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    matrix = tl.program_id(2).to(tl.int64) * rows * columns
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tile = tl.load(x_ptr + matrix + row[:, None] * columns + column[None, :], mask=inside)
    tl.store(out_ptr + matrix + column[:, None] * rows + row[None, :], tl.trans(tile), mask=tl.trans(inside))


@implements(ops.transpose, backend="mine")
def transpose(x):
    x = x.contiguous()
    *batch, rows, columns = x.shape
    out = x.new_empty(*batch, columns, rows)
    if x.numel():
        grid = (triton.cdiv(rows, 32), triton.cdiv(columns, 32), x.numel() // (rows * columns))
        transpose_kernel[grid](x, out, rows, columns, TILE=32)
    return out


@triton.jit
def softmax_kernel(x_ptr, out_ptr, columns, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, WIDTH)
    x = tl.load(x_ptr + row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
    raised = tl.exp(x - tl.max(x, 0))
    tl.store(out_ptr + row + column, raised / tl.sum(raised, 0), mask=column < columns)


@triton.jit
def long_softmax_kernel(x_ptr, out_ptr, columns, CHUNK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * columns
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row + column, mask=column < columns, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(x - higher), 0)
        top = higher
    for start in range(0, columns, CHUNK):
        column = start + tl.arange(0, CHUNK)
        x = tl.load(x_ptr + row + column, mask=column < columns, other=0.0).to(tl.float32)
        tl.store(out_ptr + row + column, tl.exp(x - top) / total, mask=column < columns)


def along_the_last(kernel, x, dim, constants):
    """Rows of x moved to the end, a program each, and moved back."""
    rows = x.movedim(dim, -1).contiguous()
    out, columns = torch.empty_like(rows), rows.shape[-1]
    if rows.numel():
        kernel[(rows.numel() // columns,)](rows, out, columns, **constants(columns))
    return out.movedim(-1, dim).contiguous()


@implements(ops.softmax, backend="mine", dtypes=HALVES_AND_FLOAT)
def softmax(x, dim):
    return along_the_last(softmax_kernel, x, dim, lambda columns: dict(WIDTH=triton.next_power_of_2(columns)))


@implements(ops.softmax, backend="mine_long", dtypes=HALVES_AND_FLOAT)
def long_softmax(x, dim):
    return along_the_last(long_softmax_kernel, x, dim, lambda columns: dict(CHUNK=256))


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, bias_ptr, out_ptr, M, N, K, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr
):
    m = tl.program_id(0) * TILE + tl.arange(0, TILE)
    n = tl.program_id(1) * TILE + tl.arange(0, TILE)
    total = tl.zeros((TILE, TILE), tl.float32)
    for start in range(0, K, STEP):
        k = start + tl.arange(0, STEP)
        x = tl.load(x_ptr + m[:, None] * K + k[None, :], mask=(m[:, None] < M) & (k[None, :] < K), other=0.0)
        weight = tl.load(weight_ptr + n[None, :] * K + k[:, None], mask=(n[None, :] < N) & (k[:, None] < K), other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(bias_ptr + n, mask=n < N, other=0.0)[None, :].to(tl.float32)
    tl.store(out_ptr + m[:, None] * N + n[None, :], total, mask=(m[:, None] < M) & (n[None, :] < N))


@implements(ops.linear, backend="mine", dtypes=HALVES_AND_FLOAT)
def linear(x, weight, bias):
    x, weight = x.contiguous(), weight.contiguous()
    bias = bias if bias is None else bias.contiguous()
    N, K = weight.shape
    out = x.new_empty(*x.shape[:-1], N)
    if out.numel():
        M = out.numel() // N
        grid = (triton.cdiv(M, 32), triton.cdiv(N, 32))
        linear_kernel[grid](x, weight, bias, out, M, N, K, HAS_BIAS=bias is not None, TILE=32, STEP=32)
    return out


@triton.jit
def attention_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, scale, queries, keys, heads, kv_heads,
    DIM: tl.constexpr, CAUSAL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1).to(tl.int64) // heads, tl.program_id(1) % heads
    kv_head = head // (heads // kv_heads)
    query, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
    place = ((batch * queries + query[:, None]) * heads + head) * DIM + d[None, :]
    q = tl.load(q_ptr + place, mask=query[:, None] < queries, other=0.0).to(tl.float32) * scale
    top = tl.full((TILE,), -float("inf"), tl.float32)
    total = tl.zeros((TILE,), tl.float32)
    weighted = tl.zeros((TILE, DIM), tl.float32)
    for start in range(0, keys, TILE):
        key = start + tl.arange(0, TILE)
        there = ((batch * keys + key[:, None]) * kv_heads + kv_head) * DIM + d[None, :]
        k = tl.load(k_ptr + there, mask=key[:, None] < keys, other=0.0).to(tl.float32)
        v = tl.load(v_ptr + there, mask=key[:, None] < keys, other=0.0).to(tl.float32)
        seen = key[None, :] < keys
        if CAUSAL:
            seen = seen & (key[None, :] <= query[:, None] + keys - queries)
        scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee"), -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(weights, 1)
        weighted = weighted * shrink[:, None] + tl.dot(weights, v, input_precision="ieee")
        top = higher
    tl.store(out_ptr + place, weighted / total[:, None], mask=query[:, None] < queries)


def plain_attention(q, k, v, cu_seqlens, causal, window, scale, softcap):
    """True, or what the exercise leaves out."""
    if cu_seqlens is not None or window is not None or softcap is not None:
        return "no documents, windows or caps yet"
    dim = q.shape[3]
    return (v.shape[3] == dim and dim >= 16 and dim & (dim - 1) == 0) or f"heads of 16, 32, 64, …, not {dim}"


@implements(ops.attention, backend="mine", when=plain_attention, dtypes=HALVES_AND_FLOAT)
def attention(q, k, v, cu_seqlens, causal, window, scale, softcap):
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    batch, queries, heads, dim = q.shape
    out = torch.empty_like(q)
    if q.numel():
        grid = (triton.cdiv(queries, 16), batch * heads)
        attention_kernel[grid](
            q, k, v, out, dim**-0.5 if scale is None else scale, queries, k.shape[1], heads, k.shape[2],
            DIM=dim, CAUSAL=causal, TILE=16,
        )  # fmt: skip
    return out
