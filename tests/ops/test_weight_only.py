"""Linear layers with a quantised weight: packing, quantising within half a step, exact products, errors for people."""

import pytest
import torch

from tilestack import backend, ops
from tilestack.kernels.quantised.weight_only import CONFIGS
from tilestack.ops.weight_only import FORMATS, pack_int4, quantise_weight, unpack_int4


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def codes(*shape, low=0, high=16, seed=0):
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def test_what_is_packed_is_unpacked():
    given = codes(3, 96)
    packed = pack_int4(given)
    assert packed.shape == (3, 48)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_int4(packed).long(), given)
    assert packed[0, 0] == given[0, 0] + 16 * given[0, 16]


@pytest.mark.parametrize("group", [0, 32, 64])
@pytest.mark.parametrize(
    ("format", "symmetric"), [("int8", True), ("int8", False), ("int4", True), ("int4", False), ("fp8", True)]
)
def test_a_number_is_within_half_a_step_of_its_code(format, symmetric, group):
    weight = drawn(5, 128) + 0.3
    weight[2] = 0
    packed, scale, zero = quantise_weight(weight, format, group, symmetric)
    back = ops.linear_weight_only(torch.eye(128), packed, scale, zero).T
    step = scale.repeat_interleave(group or 128, 1)
    if format == "fp8":  # three bits of mantissa: half a step is a sixteenth, or half of the smallest step there is
        step = torch.maximum(weight.abs() / 8, step * 2**-9)
    assert scale.shape == (5, 128 // (group or 128))
    assert packed.dtype == FORMATS[format]
    assert ((back - weight).abs() <= step * 0.5001).all()
    assert torch.equal(back[2], weight[2])


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("format", FORMATS)
def test_products_of_small_integers_are_exact(config, format):
    """Numbers whose sums float16 holds, with scales that are powers of two: any wrong code or place is seen."""
    inner, group = 192, 32
    x = codes(19, inner, low=-1, high=2).half() * (codes(19, inner, high=8, seed=1) == 0)
    numbers = codes(33, inner, low=-8, high=8, seed=2)
    scale = 2.0 ** codes(33, inner // group, low=-2, high=1, seed=3)
    zero = None if format == "fp8" else codes(33, inner // group, high=8, seed=4).to(torch.int8)
    stored = numbers if zero is None else numbers.clamp(-4, 4) + zero.repeat_interleave(group, 1)
    stored = stored.clamp(0, 15) if format == "int4" else stored
    meant = stored if zero is None else stored - zero.repeat_interleave(group, 1)
    weight = pack_int4(stored) if format == "int4" else stored.to(FORMATS[format])
    with backend(linear_weight_only=f"triton:{config}"):
        out = ops.linear_weight_only(x, weight, scale, zero)
    expected = x.double() @ (meant * scale.repeat_interleave(group, 1)).double().T
    assert expected.abs().max() < 512  # with two bits below the point, eleven in all
    assert torch.equal(out.double(), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight=torch.zeros(4, 16, dtype=torch.uint8)), r"weight is \[N, K / 2\] of two codes a byte"),
        (dict(scale=torch.ones(4, 3)), r"whole groups along K = 64, not \(4, 3\)"),
        (dict(scale=torch.ones(4, 4)), "groups of 4-bit codes are multiples of 32, not 16"),
        (dict(zero=torch.zeros(4, 1, dtype=torch.int8)), r"zero is like scale, \(4, 2\)"),
        (dict(bias=torch.ones(3)), r"bias must have shape \(4,\), not \(3,\)"),
    ],
)
def test_what_does_not_fit_is_said(change, message):
    given = dict(x=torch.ones(2, 64), weight=torch.zeros(4, 32, dtype=torch.uint8), scale=torch.ones(4, 2))
    with pytest.raises(ValueError, match=message):
        ops.linear_weight_only(**given | change)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("int3",), "format must be int8, fp8, int4, not 'int3'"),
        (("int4", 48), "rows of 96 numbers are no whole groups of 48, which is a multiple of 32 in int4"),
        (("int8", 40), "rows of 96 numbers are no whole groups of 40"),
        (("fp8", 0, False), "fp8 has no zero points"),
    ],
)
def test_weights_that_cannot_be_quantised_so(arguments, message):
    with pytest.raises(ValueError, match=message):
        quantise_weight(drawn(2, 96), *arguments)


@pytest.mark.parametrize(
    ("shape", "group", "message"),
    [
        ((96,), 0, r"not \(96,\) and 0"),
        ((1, 2, 96), 0, r"not \(1, 2, 96\) and 0"),  # came back as codes of other groups
        ((2, 0), 0, r"not \(2, 0\) and 0"),
        ((2, 96), -32, r"not \(2, 96\) and -32"),
    ],
)
def test_what_is_no_weight_is_refused(shape, group, message):
    with pytest.raises(ValueError, match=message):
        quantise_weight(drawn(*shape), "int8", group)


@pytest.mark.parametrize("symmetric", [True, False])
def test_a_quantised_parameter_asks_for_no_gradient(symmetric):
    """Else its scales ask for one in every product, which no kernel has."""
    weight, scale, _ = quantise_weight(torch.nn.Parameter(drawn(2, 96)), "int8", symmetric=symmetric)
    assert not ops.linear_weight_only(drawn(3, 96), weight, scale).requires_grad
