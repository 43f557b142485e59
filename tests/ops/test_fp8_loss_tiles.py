"""Codes of a cross-entropy's gradient: against the gradient itself, with rows that are ignored or name no class."""

import pytest
import torch

from tilestack import ops
from tilestack.kernels.quantised.fp8_made_tiles import code_loss
from tilestack.ops.fp8_tiles import codes_by

WAYS = pytest.mark.parametrize(("by", "turned_by"), [("rows", "rows"), ("blocks", "rows"), ("rows", "blocks")])


def drawn(rows, classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator) * 3
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[1::3] = -100
    return logits, labels


def gradient_of(logits, labels):
    leaf = logits.clone().requires_grad_()
    total = ops.cross_entropy.definition(leaf, labels, -100, 0.0, 0.0, 0.0, "sum", False)
    return torch.autograd.grad(total, leaf)[0]


@WAYS
@pytest.mark.parametrize("size", [(130, 40), (64, 260), (144, 272), (131, 5)])
@pytest.mark.parametrize("lies", [torch.Tensor.contiguous, lambda x: x.T.contiguous().T], ids=["rows", "columns"])
def test_the_gradient_is_coded_both_ways(size, by, turned_by, lies):
    """In int8, which the interpreter rounds to as a GPU does; the kernel is that of fp8."""
    logits, labels = drawn(*size)
    lse = logits.logsumexp(1)
    found = code_loss(lies(logits), lse, labels, -100, by, turned_by, torch.int8)
    made = (logits - lse[:, None]).exp() - (torch.arange(size[1]) == labels[:, None]).float()
    made[1::3] = 0
    for codes, scale, (wanted, wanted_scale) in (
        (*found[:2], codes_by(made, by, torch.int8)),
        (*found[2:], codes_by(made.mT, turned_by, torch.int8)),
    ):
        torch.testing.assert_close(scale, wanted_scale, rtol=1e-4, atol=1e-9)
        assert (codes.int() - wanted.int()).abs().max() <= 1  # ties may fall to either side
        assert (codes != wanted).float().mean() < 0.002
    assert not found[0][1::3].any()


def test_a_label_that_is_no_class_spoils_its_row():
    logits, labels = drawn(16, 32)
    labels[0], labels[2] = 32, -1
    found = code_loss(logits, logits.logsumexp(1), labels, -100, "rows", "rows", torch.int8)
    wanted = ops.cross_entropy_gradient_fp8_tiles(logits, logits.logsumexp(1), labels)
    for scale in (found[1], wanted[1]):
        assert scale[:, 0].isnan().nonzero()[:, 0].tolist() == [0, 2]


def test_it_is_the_codes_of_the_gradient():
    logits, labels = drawn(144, 160)
    found = ops.cross_entropy_gradient_fp8_tiles(logits, logits.logsumexp(1), labels, -100, "rows", "rows")
    wanted = ops.fp8_tiles(gradient_of(logits, labels), "rows", "rows")
    for made, truth in zip(found, wanted, strict=True):
        torch.testing.assert_close(made.float(), truth.float(), rtol=2**-3, atol=2**-9)
        if made.dtype == torch.float8_e4m3fn:
            assert (made.float() != truth.float()).float().mean() < 0.002


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(logits=torch.ones(2, 3, 4)), r"must be a matrix, \[rows, classes\]"),
        (dict(labels=torch.zeros(2)), "labels must be integers"),
        (dict(lse=torch.ones(3)), r"one number a row, shape \(2,\), not \(3,\)"),
        (dict(by="columns"), "shared by rows or blocks"),
    ],
)
def test_what_makes_no_sense_is_refused(change, message):
    given = dict(logits=torch.ones(2, 4), lse=torch.ones(2), labels=torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match=message):
        ops.cross_entropy_gradient_fp8_tiles(**given | change)
