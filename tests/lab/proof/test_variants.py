"""Awkward layouts keep what a case says of memory: which dimension lies inside which, and every value."""

import pytest
import torch

from tilestack.lab.proof import variants


def image_with_channels_together():
    return torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("variant", ["plain", "padded", "ragged", "offset"])
def test_an_image_whose_channels_lie_together_stays_one(variant):
    x = image_with_channels_together()
    laid_out = variants.vary(dict(x=x), variant)["x"]
    arriving = variants.vary_gradients([x], variant, 1)[0]
    for each in (laid_out, arriving):
        assert torch.equal(each, x)
        assert sorted(range(4), key=each.stride, reverse=True) == [0, 2, 3, 1]
        assert each.stride(1) == 1


def test_what_lies_in_rows_is_laid_out_as_ever():
    x = torch.randn(4, 5)
    assert variants.vary(dict(x=x), "plain")["x"].stride() == (5, 1)
    assert variants.vary(dict(x=x), "transposed")["x"].stride() == (1, 4)
    assert variants.vary(dict(x=x[:1].expand(4, 5)), "plain")["x"].stride() == (5, 1)


def test_the_nan_lies_in_the_middle_in_any_order_of_memory():
    x = image_with_channels_together()
    for given in (x, x.contiguous()):
        found = variants.with_nan(dict(x=given))["x"]
        assert found.isnan().flatten().nonzero().tolist() == [[x.numel() // 2]]
        assert found.stride() == given.stride()


@pytest.mark.parametrize("x", [torch.randn(4, 5), image_with_channels_together()], ids=["rows", "an image"])
def test_expanded_arguments_and_gradients_repeat_one_line_of_memory(x):
    """In the dimension that lies outermost in memory."""
    given = variants.vary(dict(x=x, ids=torch.arange(4)), "expanded")
    arriving = variants.vary_gradients([x], "expanded", 1)[0]
    for each in (given["x"], arriving):
        assert each.shape == x.shape
        assert each.stride(0) == 0
        assert torch.equal(each, x[:1].expand(x.shape))
    assert given["ids"].tolist() == [0, 1, 2, 3], "numbers that choose are left"
    assert variants.vary(dict(x=x), "expanded", written=["x"])["x"].stride(0) > 0, (
        "what is written has memory of its own"
    )
