"""Codes of gated pairs and of their gradients: against the pair itself, for sizes and strides of all kinds."""

import pytest
import torch

from tilestack import ops
from tilestack.kernels.quantised.fp8_made_tiles import code_gated
from tilestack.ops.fp8_tiles import codes_by

SIZES = [(130, 40), (64, 132), (144, 128), (131, 5), (160, 272)]


def pair(rows, columns):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=generator), torch.randn(rows, 2 * columns, generator=generator)


def apart(x):
    """The same rows, further apart."""
    return torch.cat([x, x[:, :7]], 1)[:, : x.shape[1]]


def turned(x):
    return x.T.contiguous().T


def check_int8(found, made, by, turned_by):
    """In int8, which the interpreter rounds to as a GPU does; the kernel is that of fp8."""
    for codes, scale, (wanted, wanted_scale) in (
        (*found[:2], codes_by(made, by, torch.int8)),
        (*found[2:], codes_by(made.mT, turned_by, torch.int8)),
    ):
        assert codes.is_contiguous()
        torch.testing.assert_close(scale, wanted_scale, equal_nan=True)
        assert (codes.int() - wanted.int()).abs().max() <= 1  # ties may fall to either side
        assert (codes != wanted).float().mean() < 0.002


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("by", "turned_by"), [("rows", "blocks"), ("blocks", "rows"), ("rows", "rows")])
@pytest.mark.parametrize("lies", [torch.Tensor.contiguous, apart, turned])
def test_a_pair_is_coded_both_ways(size, by, turned_by, lies):
    _, x = pair(*size)
    x[-1, -1] = torch.inf
    gate, up = x.chunk(2, 1)
    check_int8(code_gated(None, lies(x), by, turned_by, torch.int8), torch.nn.functional.silu(gate) * up, by, turned_by)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("by", "turned_by"), [("rows", "rows"), ("blocks", "blocks")])
@pytest.mark.parametrize("lies", [torch.Tensor.contiguous, apart, turned])
def test_the_gradient_of_a_pair_is_coded_both_ways(size, by, turned_by, lies):
    grad, x = pair(*size)
    grad[0, 0] = torch.inf
    x.requires_grad_()
    (made,) = torch.autograd.grad(ops.swiglu.definition(x), x, grad)
    check_int8(code_gated(lies(grad), lies(x.detach()), by, turned_by, torch.int8), made, by, turned_by)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_codes_of_what_they_stand_for(dtype):
    """In float32 exactly; in bfloat16 but for the rounding between, which may move a code to its neighbour."""
    grad, x = (tensor.to(dtype) for tensor in pair(160, 144))
    leaf = x.clone().requires_grad_()
    rounded = ops.swiglu.definition(leaf)
    (gradient,) = torch.autograd.grad(rounded, leaf, grad)
    for found, wanted in (
        (ops.swiglu_fp8_tiles(x, "rows", "blocks"), ops.fp8_tiles(rounded.detach(), "rows", "blocks")),
        (ops.swiglu_gradient_fp8_tiles(grad, x, "rows", "rows"), ops.fp8_tiles(gradient, "rows", "rows")),
    ):
        for made, truth in zip(found, wanted, strict=True):
            differ = (made.float() != truth.float()).float().mean()
            if made.dtype == torch.float8_e4m3fn:
                assert differ < (0.002 if dtype == torch.float32 else 0.1)
            torch.testing.assert_close(made.float(), truth.float(), rtol=2**-3, atol=2**-9)


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("swiglu_fp8_tiles", (torch.ones(2, 3),), "must hold two halves"),
        ("swiglu_fp8_tiles", (torch.ones(2, 2, 4),), r"must be a matrix, \[rows, gate and up\]"),
        ("swiglu_fp8_tiles", (torch.ones(0, 4),), "not empty"),
        ("swiglu_gradient_fp8_tiles", (torch.ones(2, 4), torch.ones(2, 4)), r"grad must be torch.float32 \(2, 2\)"),
        ("swiglu_gradient_fp8_tiles", (torch.ones(2, 2).half(), torch.ones(2, 4)), "not torch.float16"),
        ("swiglu_gradient_fp8_tiles", (torch.ones(2, 2), torch.ones(2, 4), "columns"), "shared by rows or blocks"),
    ],
)
def test_what_makes_no_sense_is_refused(name, given, message):
    with pytest.raises(ValueError, match=message):
        getattr(ops, name)(*given)
