"""Offsets beyond 2³¹ elements: rows so far apart that a place in them does not fit in 32 bits, in memory that is never touched.

Between the rows nothing is written or read, so that the operating system gives no pages for it.
"""

import pytest
import torch
import triton
import triton.language as tl

from tilestack import backend, ops
from tilestack.contract.backends import usable
from tilestack.kernels.norm.group import elements_of_group

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(usable("triton", CPU) is not True, reason=str(usable("triton", CPU)))

APART = 2**30 + 16  # elements: the third row begins beyond 2³¹


@pytest.fixture(scope="module")
def memory():
    """Room for tensors of three rows that far apart; float16 of it is 4.3 GB of addresses, and a few pages of memory."""
    return torch.empty(2 * APART + 2**16, dtype=torch.float16)


@pytest.fixture
def spread(memory):
    """Copies a matrix of three rows (or columns) to rows far apart; several of them side by side."""
    used = 0

    def put(x):
        nonlocal used
        lies_down = x.shape[0] != 3
        size, strides = x.shape, (1, APART) if lies_down else (APART, 1)
        far = memory.data.as_strided(size, strides, used).copy_(x)  # of which autograd counts versions apart
        used += 16 * (-(-max(size) // 16))
        return far

    return put


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).half()


LABELS = torch.tensor([1, 5, 2])
WEIGHT = drawn(40, seed=7)
ONE_TENSOR = {
    "rms_norm": lambda x: ops.rms_norm(x, WEIGHT),
    "layer_norm": lambda x: ops.layer_norm(x, WEIGHT, WEIGHT),
    "softmax": lambda x: ops.softmax(x),
    "logsumexp": lambda x: ops.logsumexp(x),
    "causal_softmax": lambda x: ops.causal_softmax(x, 0.5),
    "cross_entropy": lambda x: ops.cross_entropy(x, LABELS, reduction="none"),
    "swiglu": lambda x: ops.swiglu(x),
    "copy": lambda x: ops.copy(x),
    "transpose": lambda x: ops.transpose(x),
    "strided_copy": lambda x: ops.strided_copy(x, 4),
    "gather_rows": lambda x: ops.gather_rows(x, LABELS[[0, 2, 2]]),
    "scatter_rows": lambda x: ops.scatter_rows(x, LABELS, 6),
    "reduce_rows": lambda x: ops.reduce_sum(x, -1),
    "reduce_columns": lambda x: ops.reduce_sum(x, 0),
    "embedding": lambda x: ops.embedding(LABELS[[0, 2]], x),
    "grouped_linear": lambda x: ops.grouped_linear(x, drawn(2, 8, 40), torch.tensor([1, 3], dtype=torch.int32)),
    "bmm": lambda x: ops.bmm(x[:, None], drawn(3, 40, 8)),
}
NO_GRADIENT = {
    "argmax": lambda x: ops.argmax(x),
    "topk": lambda x: ops.topk(x, 3)[0],
    "rms_norm_int8": lambda x: ops.rms_norm_int8(x, WEIGHT)[0],
    "silu_mul_int8": lambda x: ops.silu_mul_int8(x, x)[0],
}


@pytest.mark.parametrize("run", (ONE_TENSOR | NO_GRADIENT).values(), ids=ONE_TENSOR | NO_GRADIENT)
def test_rows_far_apart_give_what_rows_together_give(spread, run):
    x = drawn(3, 40)
    with backend("triton"):
        assert torch.equal(run(spread(x)), run(x))


@pytest.mark.parametrize("run", ONE_TENSOR.values(), ids=ONE_TENSOR)
def test_gradients_too(spread, run):
    """What is kept lies far apart and, where it has three rows, what arrives as well."""
    x, found = drawn(3, 40), []
    for place in (spread, torch.clone):
        given = place(x).requires_grad_()
        with backend("triton"):
            out = run(given)
            grad = drawn(*out.shape, seed=1)
            grad = place(grad) if grad.ndim == 2 and 3 in grad.shape else grad
            found.append(torch.autograd.grad(out, given, grad)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize("shapes", [((3, 40), (8, 40)), ((8, 40), (3, 40)), ((8, 3), (16, 3))], ids=str)
def test_products_of_matrices_far_apart(spread, shapes):
    x, weight = (drawn(*shape, seed=n) for n, shape in enumerate(shapes))
    found = []
    for place in (lambda t: spread(t) if 3 in t.shape else t, torch.clone):
        a, b = place(x).requires_grad_(), place(weight).requires_grad_()
        with backend("triton"):
            out = ops.linear(a, b)
            found.append((out, *torch.autograd.grad(out, (a, b), torch.ones_like(out))))
    assert all(torch.equal(far, near) for far, near in zip(*found, strict=True))


def heads_far_apart(memory, start, heads=3, length=16, dim=16):
    """[1, length, heads, dim], each head's tokens together and the third head beyond 2³¹ elements."""
    return memory.data.as_strided((1, length, heads, dim), (heads * APART, dim, APART, 1), start)


@pytest.mark.parametrize("name", ["triton", "triton_blocked", "triton_standard"])
def test_attention_of_heads_far_apart(memory, name):
    """As heads come that were made before tokens, [batch, heads, tokens, dim]."""
    given = [drawn(1, 16, 3, 16, seed=n) for n in range(4)]
    far = [heads_far_apart(memory, 512 * n).copy_(x) for n, x in enumerate(given)]
    found = []
    for q, k, v, grad in (far, given):
        leaves = [x.detach().requires_grad_(name == "triton") for x in (q, k, v)]
        with backend(name):
            out = ops.attention(*leaves)
        found.append([out, *(torch.autograd.grad(out, leaves, grad) if name == "triton" else ())])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


def test_attention_with_a_bias_of_heads_far_apart(memory):
    """A bias of 16 heads has them so far apart from 11,586 tokens on."""
    q, k, v = (drawn(1, 16, 3, 16, seed=n).requires_grad_() for n in range(3))
    near, found = drawn(1, 3, 16, 16, seed=3), []
    for bias in (heads_far_apart(memory, 0).transpose(1, 2).copy_(near), near):
        leaves = q, k, v, bias.detach().requires_grad_()
        with backend("triton"):
            out, lse = ops.flex_attention(q, k, v, bias=leaves[3], causal=False)
            found.append([out, lse, *torch.autograd.grad(out, leaves, torch.ones_like(out))])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@triton.jit
def count_kernel(out_ptr, channels, size):
    tl.store(out_ptr, elements_of_group(channels, size))


@pytest.mark.parametrize("sizes", [(512, 2048**2), (1, 2**31 - 1), (3, 5), (1, 1)])
def test_a_group_may_have_more_elements_than_32_bits_count(sizes):
    out = torch.zeros(1, dtype=torch.int64)
    count_kernel[(1,)](out, *sizes)
    assert out.item() == sizes[0] * sizes[1]
