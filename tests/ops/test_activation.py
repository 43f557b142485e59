"""What the registry's proof cannot see of the activations: digits near zero, and that the fused ones are the plain ones."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract.backends import usable
from tilestack.kernels.elementwise.gated import RAGGED_TILE, TILE, tiles_over
from tilestack.ops.gated import halves

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.skipif(usable("triton", DEVICE) is not True, reason=str(usable("triton", DEVICE))),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter's, for arithmetic with infinities
]


def normal(*shape, dtype=torch.float32, seed=0):
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (2 * drawn).to(DEVICE, dtype)


@pytest.mark.parametrize(
    ("curve", "exact"),
    [(ops.tanh, torch.tanh), (lambda x: ops.softcap(x, 3.0), lambda x: 3 * torch.tanh(x / 3))],
    ids=["tanh", "softcap"],
)
def test_digits_are_kept_near_zero_and_far_from_it(curve, exact):
    x = torch.logspace(-30, 1.5, 3000, dtype=torch.float64).float().to(DEVICE)
    x = torch.cat([x, -x])
    with contract.backend("triton"):
        y = curve(x)
    truth = exact(x.double())
    # Two quotients, an exponential and a few sums, each good to about a unit in the last place.
    assert float(((y.double() - truth) / truth).abs().max()) < 8 * torch.finfo(torch.float32).eps


def test_tanh_of_zeros_and_infinities():
    x = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan], device=DEVICE)
    with contract.backend("triton"):
        y = ops.tanh(x)
    torch.testing.assert_close(y, torch.tanh(x), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(y[:2].signbit().cpu(), torch.tensor([False, True]))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("approximate", [None, "none", "tanh"])
def test_halves_of_one_tensor_are_as_two_tensors(interleaved, approximate):
    x = normal(3, 5, 66).requires_grad_()
    gate, up = (half.contiguous() for half in halves(x, interleaved))
    grad = normal(3, 5, 33, seed=1)
    with contract.backend("triton"):
        if approximate is None:
            in_one, in_two = ops.swiglu(x, interleaved), ops.silu_mul(gate, up)
        else:
            in_one, in_two = ops.geglu(x, approximate, interleaved), ops.gelu_mul(gate, up, approximate)
        assert torch.equal(in_one, in_two)
        assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (in_one, in_two)))


def test_halves_are_read_where_they_are(monkeypatch):
    """The usual call on a fused projection, `silu_mul(*x.chunk(2, -1))`, copies nothing."""
    gate, up = normal(6, 64).chunk(2, -1)
    assert not gate.is_contiguous()
    expected = ops.silu_mul.definition(gate, up)
    monkeypatch.setattr(torch.Tensor, "contiguous", lambda *_: pytest.fail("an argument was copied"))
    with contract.backend("triton"):
        torch.testing.assert_close(ops.silu_mul(gate, up), expected)


WITH_BITS = "triton,gated_dropout=triton_bits"


@pytest.mark.parametrize("backend", ["torch", "triton", WITH_BITS])
def test_fused_dropout_drops_what_dropout_does(backend):
    seed, gate, up = torch.tensor(7, device=DEVICE), normal(3, 2000), normal(3, 2000, seed=1)
    with contract.backend(backend):
        alone = ops.dropout(ops.silu_mul(gate, up), seed, 0.3)
        torch.testing.assert_close(ops.gated_dropout(gate, up, seed, 0.3, "silu"), alone)
        torch.testing.assert_close(
            ops.activation_dropout(gate, seed, 0.3, "gelu"), ops.dropout(ops.gelu(gate), seed, 0.3)
        )
    assert 0.25 < float((alone == 0).float().mean()) < 0.35


def test_quantised_rows_are_the_product_to_half_a_step():
    gate, up = normal(4, 200), normal(4, 200, seed=1)
    gate[2] = 0
    gate[3, 5] = torch.nan
    with contract.backend("triton"):
        codes, scale = ops.silu_mul_int8(gate, up)
    exact = ops.silu_mul.definition(gate.double(), up.double())[:3]
    assert codes.dtype == torch.int8
    assert scale.shape == (4,)
    assert bool(scale[3].isnan())
    off = (codes[:3] * scale[:3, None].double() - exact).abs()
    # The value that is rounded is off by some units in the last place itself.
    assert bool((off <= 0.5 * scale[:3, None] * (1 + 1e-4)).all())
    assert bool((codes[:2].abs().amax(-1) == 127).all())
    assert not bool(codes[2].any())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.softcap(normal(3), 0.0), "cap must be positive, not 0.0"),
        (lambda: ops.swiglu(normal(2, 3)), "must hold two halves"),
        (lambda: ops.silu_mul(normal(2, 3), normal(3)), "one shape and dtype"),
        (lambda: ops.silu_mul_int8(normal(2, 0), normal(2, 0)), "no scale"),
        (
            lambda: ops.activation_dropout(normal(3), torch.tensor(1, device=DEVICE), 0.5, "tanh"),
            "kind must be one of relu",
        ),
    ],
)
def test_wrong_arguments_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize("p", [0.5, 1.0])
@pytest.mark.parametrize("backend", ["torch", "triton", WITH_BITS])
def test_dropped_elements_have_no_gradient_whatever_they_are(backend, p):
    seed = torch.tensor(7, device=DEVICE)
    gate, up = (torch.full((64,), torch.nan, device=DEVICE, requires_grad=True) for _ in range(2))
    with contract.backend(backend):
        out = ops.gated_dropout(gate, up, seed, p, "silu")
        dropped = ops.dropout(torch.ones_like(gate), seed, p) == 0
    dgate, dup = torch.autograd.grad(out, (gate, up), torch.ones_like(out))
    assert bool(dropped.any())
    for result in (out, dgate, dup):
        assert torch.equal(result.isnan(), ~dropped)


def test_a_backward_by_bits_asks_neither_for_the_seed_nor_for_the_random_words():
    """What was kept in the forward counts, whatever has been written over the seed, in a graph that is replayed, since."""
    gate, up = (normal(2, 3000, seed=i).requires_grad_() for i in range(2))
    seed = torch.tensor(7, device=DEVICE)
    gradients = []
    for chosen in ("triton", WITH_BITS):
        with contract.backend(chosen):
            out = ops.gated_dropout(gate, up, seed.clone(), 0.3, "silu")
        gradients.append(torch.autograd.grad(out, (gate, up), torch.ones_like(out)))
    with contract.backend(WITH_BITS):
        out = ops.gated_dropout(gate, up, seed, 0.3, "silu")
    seed.data.add_(1)
    gradients.append(torch.autograd.grad(out, (gate, up), torch.ones_like(out)))
    for found in gradients[1:]:
        for ours, truth in zip(found, gradients[0], strict=True):
            assert torch.equal(ours, truth)


@pytest.mark.parametrize("one", range(3))
def test_one_matrix_whose_rows_begin_off_16_bytes_makes_tiles_smaller(one):
    strides = [4096, 8192, 8192]
    assert tiles_over(64, 4096, *strides) == ((64 * 4096 // TILE,), dict(ROWS=1, COLS=TILE))
    strides[one] += 8
    assert tiles_over(64, 4096, *strides) == ((64 * 4096 // RAGGED_TILE,), dict(ROWS=1, COLS=RAGGED_TILE))
