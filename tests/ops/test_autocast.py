"""Under torch.autocast our products do what PyTorch's own do, on every backend: operands in its dtype, gradients in theirs."""

import itertools

import pytest
import torch
import torch.nn.functional as F

from tilestack import backend, ops
from tilestack.contract.backends import usable
from tilestack.contract.cases import Make

CPU = torch.device("cpu")


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def gated(x):
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def attended(q, k, v):
    """Causal, by PyTorch's own, which takes heads first."""
    heads_first = [tensor.transpose(1, 2) for tensor in (q, k, v)]
    return F.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=True).transpose(1, 2)


QKV = (drawn(2, 5, 4, 16), drawn(2, 5, 2, 16, seed=1), drawn(2, 5, 2, 16, seed=2))
OFFSETS = torch.tensor([2, 6], dtype=torch.int32)
LABELS = torch.tensor([1, 4, 0, 2, 2, 3])
# An operator and PyTorch's way to say the same.
PAIRS = {
    "linear": (ops.linear, F.linear, (drawn(6, 16), drawn(8, 16, seed=1), drawn(8, seed=2))),
    "linear without bias": (ops.linear, F.linear, (drawn(6, 16), drawn(8, 16, seed=1))),
    "swiglu_linear": (
        ops.swiglu_linear,
        lambda x, weight, bias: F.linear(gated(x), weight, bias),
        (drawn(6, 32), drawn(8, 16, seed=1), drawn(8, seed=2)),
    ),
    "fused_linear": (
        lambda x, weight, bias, residual: ops.fused_linear(x, weight, bias, residual, activation="silu"),
        lambda x, weight, bias, residual: F.silu(F.linear(x, weight, bias)) + residual.half(),
        (drawn(6, 16), drawn(8, 16, seed=1), drawn(8, seed=2), drawn(6, 8, seed=3)),
    ),
    "linear_swiglu": (
        ops.linear_swiglu,
        lambda x, weight, bias: gated(F.linear(x, weight, bias)),
        (drawn(6, 16), drawn(8, 16, seed=1), drawn(8, seed=2)),
    ),
    "grouped_linear": (
        lambda x, weight: ops.grouped_linear(x, weight, OFFSETS),
        lambda x, weight: torch.cat([F.linear(x[:2], weight[0]), F.linear(x[2:], weight[1])]),
        (drawn(6, 16), drawn(2, 8, 16, seed=1)),
    ),
    "conv2d": (
        lambda *tensors: ops.conv2d(*tensors, (2, 1), (1, 0)),
        lambda *tensors: F.conv2d(*tensors, (2, 1), (1, 0)),
        (drawn(2, 4, 5, 6), drawn(8, 4, 3, 3, seed=1), drawn(8, seed=2)),
    ),
    "attention": (ops.attention, attended, QKV),
    "flex_attention": (lambda q, k, v: ops.flex_attention(q, k, v)[0], attended, QKV),
    "linear_cross_entropy": (
        lambda x, weight: ops.linear_cross_entropy(x, weight, LABELS),
        lambda x, weight: F.cross_entropy(F.linear(x, weight).float(), LABELS),
        (drawn(6, 16), drawn(5, 16, seed=1)),
    ),
    "linear_cross_entropy by row": (
        lambda x, weight: ops.linear_cross_entropy(x, weight, LABELS, reduction="none").sum(),
        lambda x, weight: F.cross_entropy(F.linear(x, weight).float(), LABELS, reduction="sum"),
        (drawn(6, 16), drawn(5, 16, seed=1)),
    ),
}


PRODUCTS = ("linear", "grouped_linear", "swiglu_linear", "fused_linear", "linear_swiglu", "attention")


def run(function, tensors):
    with torch.autocast("cpu", torch.float16):
        out = function(*tensors)
    return out, torch.autograd.grad(out.float().sum(), tensors)


@pytest.mark.parametrize(
    ("which", "name"), [*itertools.product(["torch", "aten", "triton", "auto"], PAIRS), ("triton_lines", "conv2d")]
)
def test_every_backend_lowers_as_pytorch_does(which, name):
    if which != "auto" and (reason := usable(which, CPU)) is not True:
        pytest.skip(str(reason))
    ours, theirs, tensors = PAIRS[name]
    expected, gradients = run(theirs, tensors)
    try:
        with backend(conv2d=which) if which == "triton_lines" else backend(which):
            out, found = run(ours, tensors)
    except Exception as refusal:
        if "cannot run" in str(refusal) or "has no aten" in str(refusal):
            pytest.skip(str(refusal))
        raise
    assert out.dtype == expected.dtype
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
    for mine, torchs in zip(found, gradients, strict=True):
        assert mine.dtype == torchs.dtype == torch.float32
        torch.testing.assert_close(mine, torchs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("which", "name"), [("aten", "linear"), *itertools.product(["torch", "triton"], PRODUCTS)])
def test_what_a_layer_before_has_lowered_meets_weights_that_are_not(which, name, compiled):
    ours, theirs, (x, *weights) = PAIRS[name]
    tensors = x.detach().half().requires_grad_(), *weights
    torch.compiler.reset()
    with backend(**{name: which}):
        out, found = run(torch.compile(ours, backend="aot_eager") if compiled else ours, tensors)
    expected, gradients = run(theirs, tensors)
    assert out.dtype == expected.dtype == torch.float16
    torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
    for mine, torchs in zip(found, gradients, strict=True):
        assert mine.dtype == torchs.dtype
        torch.testing.assert_close(mine, torchs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("which", ["torch", "triton"])
@pytest.mark.parametrize("name", [*PRODUCTS, "linear_cross_entropy"])
def test_compiled_calls_as_well(which, name):
    ours, _, tensors = PAIRS[name]
    torch.compiler.reset()  # a backend is chosen while tracing
    with backend(which):
        eager = run(ours, tensors)
        compiled = run(torch.compile(ours, backend="aot_eager", fullgraph=True), tensors)
    assert compiled[0].dtype == eager[0].dtype == (torch.float32 if name == "linear_cross_entropy" else torch.float16)
    assert torch.equal(compiled[0], eager[0])
    for mine, theirs in zip(compiled[1], eager[1], strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("which", ["torch", "aten", "triton"])
def test_a_loss_in_float16_is_made_with_the_scale_that_arrives(which):
    """Of a confident model the gradient of a mean underflows in float16, unless loss scaling comes before the rounding."""
    labels = torch.arange(4)
    x, weight = (18 * torch.eye(5)[labels]).requires_grad_(), torch.eye(5).requires_grad_()
    found = {}
    for name, loss in (
        ("ours", lambda: ops.linear_cross_entropy(x, weight, labels)),
        ("theirs", lambda: F.cross_entropy(F.linear(x, weight).float(), labels)),
    ):
        with backend(which), torch.autocast("cpu", torch.float16):
            scaled = loss() * 65536
        found[name] = torch.autograd.grad(scaled, (x, weight))
    for ours, theirs in zip(found["ours"], found["theirs"], strict=True):
        assert theirs.count_nonzero()
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize("which", ["torch", "triton"])
def test_what_attention_computes_within_is_not_lowered(which):
    """Scores and their log-sum-exp are float32, as without autocast on operands of half precision."""
    halves = [tensor.detach().half() for tensor in QKV]
    with backend(which):
        expected = ops.flex_attention(*halves)
        with torch.autocast("cpu", torch.float16):
            found = ops.flex_attention(*QKV)
            again = [ops.flex_attention(*(tensor + number for tensor in QKV))[0] for number in range(3)]
    assert [tensor.dtype for tensor in found] == [torch.float16, torch.float32]
    assert all(map(torch.equal, found, expected))
    assert not torch.equal(again[1], again[2])  # a plan that is kept computes with what it is given


def test_attention_keeps_its_dtype_where_autocast_is_of_another_device():
    with torch.autocast("cuda", torch.float16):
        assert ops.attention(*QKV).dtype == torch.float32


def test_float64_stays_as_in_pytorch():
    x, weight = drawn(3, 4).double(), drawn(2, 4).double()
    with torch.autocast("cpu", torch.float16):
        assert ops.linear(x, weight).dtype == F.linear(x, weight).dtype == torch.float64


@pytest.mark.parametrize("which", ["torch", "aten", "triton"])
def test_a_weight_in_float64_is_not_lowered_beside_others_that_are(which):
    """PyTorch refuses the product, for it lowers every operand but those."""
    (x, weight, bias), (q, k, v) = PAIRS["linear"][2], QKV
    with backend(which), torch.autocast("cpu", torch.float16):
        for function, tensors in ((ops.linear, (x, weight.double(), bias)), (ops.attention, (q, k.double(), v))):
            with pytest.raises(ValueError, match="one dtype"):
                function(*tensors)


@pytest.mark.parametrize("which", ["torch", "aten", "triton"])
@torch.no_grad()
def test_into_given_memory_attention_writes_what_it_returns(which):
    q, k, v = QKV
    with backend(which), torch.autocast("cpu", torch.float16):
        for operands in (QKV, (q.half(), k, v)):
            expected = ops.attention(*operands)
            for _ in range(3):  # the first compiles, the second is noted, the third is repeated
                assert torch.equal(ops.attention(*operands, out=torch.empty_like(expected)), expected)
        with pytest.raises(ValueError, match="the result is"):
            ops.attention(*QKV, out=torch.empty_like(q))


def not_lowered():
    return [op for op in ops.operators() if op.lowered is None and not op.mutates]


@pytest.mark.parametrize("op", not_lowered(), ids=lambda op: op.name)
@torch.no_grad()
def test_an_operator_that_lowers_nothing_computes_what_it_does_without_autocast(op):
    """On PyTorch too, whose products within a definition autocast would lower: sums of 8-bit codes overflow float16."""
    for case in op.cases[:8]:
        if sum(t.numel() for t in op.given_tensors(case.build(Make(torch.float32, "meta"))).values()) > 20_000:
            continue
        arguments = case.build(Make(torch.float32, "cpu"))
        with backend("torch"):
            expected = op(**arguments)
            with torch.autocast("cpu", torch.float16):
                found = op(**arguments)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
