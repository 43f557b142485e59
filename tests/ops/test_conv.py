"""conv2d against PyTorch's own over geometries the cases leave out, and conv2d_int8 against sums of whole numbers."""

import pytest
import torch
import torch.nn.functional as F

from tilestack import backend, nn, ops, patch
from tilestack.contract import BackendError
from tilestack.kernels.conv import weight_gradient
from tilestack.kernels.conv.configs import CONFIGS
from tilestack.kernels.conv.implicit_gemm import Geometry
from tilestack.kernels.conv.lines import lines_of_taps, pixels_of_lines

LAST = torch.channels_last


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


GEOMETRIES = [
    ((1, 1), (0, 0), (1, 1), (1, 1), 1), ((2, 1), (1, 0), (1, 2), (2, 3), 1), ((3, 2), (2, 2), (2, 1), (3, 2), 2),
    ((1, 3), (3, 1), (1, 1), (2, 2), 4), ((2, 2), (3, 4), (3, 3), (2, 3), 1), ((2, 4), (1, 3), (2, 2), (2, 3), 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("chosen", "stride", "padding", "dilation", "taps", "groups"),
    [
        *(("triton", *geometry) for geometry in GEOMETRIES),
        *(("triton_lines", *geometry) for geometry in GEOMETRIES if geometry[-1] == 1),
        ("triton_lines", (2, 2), (3, 3), (1, 1), (7, 7), 1),
        ("triton_lines", (1, 3), (0, 2), (2, 1), (1, 9), 1),
    ],
)
@pytest.mark.parametrize("order", [torch.contiguous_format, LAST])
def test_every_geometry_and_its_gradients(chosen, stride, padding, dilation, taps, groups, order):
    x = drawn(2, 4, 6, 7).contiguous(memory_format=order).requires_grad_()
    weight = drawn(8, 4 // groups, *taps, seed=1).contiguous(memory_format=order).requires_grad_()
    bias = drawn(8, seed=2).requires_grad_()
    expected = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
    with backend(chosen):
        out = ops.conv2d(x, weight, bias, stride, padding, dilation, groups)
    torch.testing.assert_close(out, expected)
    assert out.stride() == expected.stride()
    arriving = drawn(*out.shape, seed=3)
    for found, truth in zip(
        *(torch.autograd.grad(y, (x, weight, bias), arriving) for y in (out, expected)), strict=True
    ):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize(
    ("channels", "stride", "padding", "dilation", "width"),
    [
        (1, 1, 0, 1, 14), (3, 2, 3, 1, 14), (2, 3, 4, 2, 14), (5, 4, 1, 6, 14), (3, 9, 0, 1, 14),
        (20, 1, 2, 1, 70), (20, 3, 2, 2, 70),  # of several tiles
    ],
)  # fmt: skip
def test_lines_are_the_taps_of_each_place_and_their_transpose_puts_them_back(
    channels, stride, padding, dilation, width
):
    """Against PyTorch's unfold, whose taps are numbered within channels, and by <lines of x, y> = <x, pixels of y>."""
    taps = 3
    x = drawn(2, channels, 5, width)
    places = (width + 2 * padding - dilation * (taps - 1) - 1) // stride + 1
    lines = lines_of_taps(x, taps, places, stride, padding, dilation)
    unfolded = F.unfold(x, (1, taps), (1, dilation), (0, padding), (1, stride)).view(2, channels, taps, 5, places)
    used = channels * taps
    assert torch.equal(lines[:, :used], unfolded.transpose(1, 2).flatten(1, 2))
    assert not lines[:, used:].any()
    y = torch.empty_like(lines).copy_(drawn(*lines.shape, seed=1))
    pixels = pixels_of_lines(y, torch.full_like(x, torch.nan), taps, stride, padding, dilation)
    torch.testing.assert_close((pixels * x).sum(), (lines * y).sum())


def test_the_gradient_of_lines_is_rounded_once_it_has_been_added_up():
    """Each tap over a pixel has 2049, which float16 would make 2048 of; three of them are 6147, which is nearer to 6148."""
    x, weight = torch.zeros(1, 1, 1, 5).half().requires_grad_(), torch.ones(2, 1, 1, 3).half()
    weight[0] = 2048
    with backend("triton_lines"):
        out = ops.conv2d(x, weight)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert dx.flatten().tolist() == [2048, 4096, 6148, 4096, 2048]


def test_images_that_gain_nothing_by_lines_are_refused_with_the_reason():
    for shape, weight, groups, reason in [
        ((1, 4, 3, 3), (4, 2, 2, 2), 2, "without groups"),
        ((1, 32, 3, 3), (4, 32, 2, 2), 1, "fewer than 32 channels, not 32"),
        ((1, 2, 3, 40), (4, 2, 2, 33), 1, "at most 32 taps along a line, not 33"),
    ]:
        with backend("triton_lines"), pytest.raises(BackendError, match=reason):
            ops.conv2d(drawn(*shape), drawn(*weight), groups=groups)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_sums_of_codes_are_exact(chosen):
    """The largest codes there are, over as many as 600 terms: with scales of one, whole numbers come out whole."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-128, 128, (1, 150, 3, 3), generator=generator, dtype=torch.int8)
    x[0, :, 0, 0] = -128
    weight = torch.randint(-128, 128, (3, 150, 2, 2), generator=generator, dtype=torch.int8)
    weight[0] = -128
    expected = F.conv2d(x.long(), weight.long(), padding=1)
    one, ones = torch.ones((), dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    with backend(chosen):
        assert torch.equal(ops.conv2d_int8(x, weight, one, ones, padding=(1, 1)).long(), expected)
        scale = torch.tensor([0.5, 0.25, 2.0], dtype=torch.float64)
        out = ops.conv2d_int8(x, weight, one * 4, scale, torch.tensor([1.0, 2.0, 3.0]).double(), padding=(1, 1))
        half = ops.conv2d_int8(x, weight, one.float(), ones.float() / 1024, padding=(1, 1), dtype="float16")
    assert torch.equal(out, expected * (4 * scale)[:, None, None] + torch.tensor([1.0, 2.0, 3.0])[:, None, None])
    assert torch.equal(half, (expected / 1024).half())


def test_a_partial_sum_for_each_part_of_many_places(monkeypatch):
    monkeypatch.setattr("tilestack.kernels.conv.weight_gradient.PLACES_EACH", 32)
    x, weight = drawn(2, 4, 7, 8), drawn(6, 2, 2, 2, seed=1).requires_grad_()
    expected = F.conv2d(x, weight, groups=2)
    with backend("triton"):
        out = ops.conv2d(x, weight, groups=2)
    arriving = drawn(*out.shape, seed=2)
    torch.testing.assert_close(*(torch.autograd.grad(y, weight, arriving)[0] for y in (out, expected)))


def test_sums_that_int32_does_not_hold_are_refused():
    """Of 131,073 products of -128 with itself the kernel's sum was negative."""
    codes = torch.full((1, 131073, 1, 1), -128, dtype=torch.int8)
    with pytest.raises(ValueError, match="sums over 131073 products may pass what int32 holds; at most 131071 do not"):
        ops.conv2d_int8(codes, codes, torch.ones(()), torch.ones(1))
    most = codes[:, :131071].contiguous()
    with backend("triton"):
        assert ops.conv2d_int8(most, most, torch.ones(()), torch.ones(1)).item() == 131071 * 128**2


def test_the_weight_gradient_of_many_groups_fits_into_a_grid(monkeypatch):
    """CUDA takes 65,535 programs along all dimensions but the first; 1,400 channels of 7 × 7 taps have 68,600."""
    grids = []
    monkeypatch.setattr(weight_gradient, "launch", lambda kernel, grid, *arguments, **constants: grids.append(grid))
    x, weight = torch.randn(1, 1400, 7, 7), torch.randn(1400, 1, 7, 7)
    geometry = Geometry((1, 1), (3, 3), (1, 1), groups=1400)
    weight_gradient.weight_gradient(torch.randn_like(x), x, weight, geometry, CONFIGS["128x128"])
    ((most, *others),) = grids
    assert most == 1400 * 49
    assert all(size <= 65535 for size in others)


def test_refusals_say_what_does_not_fit():
    x, weight = torch.randn(1, 4, 5, 5), torch.randn(6, 4, 3, 3)
    for arguments, message in {
        (x[0], weight): r"x is \[N, C, H, W\]",
        (x, weight, None, (0, 1)): "stride must be two numbers, positive",
        (x, weight, None, 2): "stride must be two numbers, positive, not 2",
        (x, weight, None, (1.5, 1)): r"stride must be two numbers, positive, not \(1.5, 1\)",
        (x, weight, None, (1, 1), "same"): "padding must be two numbers, not negative, not 'same'",
        (x, weight, None, (1, 1), (-1, 0)): "padding must be two numbers, not negative",
        (x, weight, None, (1, 1), (0, 0), (1, 1), 2): "2 groups of 4 channels and 6 filters do not fit x",
        (x, torch.randn(6, 4, 7, 3)): r"filters of \(7, 3\) taps.*do not fit into \(5, 5\)",
        (x, weight, torch.randn(5)): r"bias must have shape \(6,\)",
        (x, weight.double()): "must have one dtype",
    }.items():
        with pytest.raises(ValueError, match=message):
            ops.conv2d(*arguments)


def test_patch_knows_convolutions_and_leaves_those_that_compute_something_else():
    class Standardised(torch.nn.Conv2d):
        def _conv_forward(self, input, weight, bias):
            return super()._conv_forward(input, weight - weight.mean(), bias)

    model = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3), Standardised(3, 3, 1))
    x = torch.randn(1, 2, 5, 5)
    before = model(x)
    report = patch(model)
    assert report.swapped == {"0": "conv2d"}
    assert "overrides the forward" in report.left["1"]
    assert isinstance(model[0], nn.Conv2d)
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("sizes", [(2, 1, 5, 6), (2, 3, 5, 1), (2, 3, 1, 5)])
def test_sides_of_one_have_strides_that_mean_nothing(sizes):
    """Of channels that lie together PyTorch may write any stride where there is one channel, or one pixel. Whole numbers, so
    that sums are exact."""
    drawn = lambda *shape: torch.randint(-3, 4, shape).float()
    last = lambda images, channels, height, width: drawn(images, height, width, channels).permute(0, 3, 1, 2)
    x, weight = last(*sizes), last(4, sizes[1], 3, 3)
    found = []
    for name in ("torch", "triton"):
        leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
        with backend(conv2d=name):
            out = ops.conv2d(*leaves, None, (1, 1), (1, 1))
        arriving = torch.arange(out.numel()).view_as(out) % 7
        found.append([out.detach(), *torch.autograd.grad(out, leaves, arriving.float())])
    assert all(ours.equal(theirs) for ours, theirs in zip(found[1], found[0], strict=True))


def gradients(chosen, x, weight, padding=(1, 1)):
    """The result and both gradients on a backend, for whole numbers that arrive."""
    leaves = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    with backend(conv2d=chosen):
        out = ops.conv2d(*leaves, None, (1, 1), padding)
    arriving = torch.arange(out.numel()).view_as(out) % 7
    return [out.detach(), *torch.autograd.grad(out, leaves, arriving.to(x.dtype))]


@pytest.mark.parametrize("part", ["channels of an image", "taps of a filter", "channels of a filter"])
def test_a_part_of_what_lies_side_by_side_does_not(part):
    """Taps of few channels are taken for one where they lie one after the other, in the image and in the filter."""
    numbers = lambda *shape: torch.randint(-3, 4, shape).double().permute(0, 3, 1, 2)
    x, weight = numbers(2, 5, 3, 3), numbers(4, 3, 2, 3)
    if part == "channels of an image":
        x = numbers(2, 5, 3, 5)[:, :3]
    else:
        weight = numbers(4, 3, 3, 3)[:, :, :, ::2] if part == "taps of a filter" else numbers(4, 3, 2, 5)[:, :3]
    found = zip(gradients("triton", x, weight), gradients("torch", x, weight), strict=True)
    assert all(ours.equal(theirs) for ours, theirs in found)


def test_images_of_one_line_are_not_taken_for_one_image():
    """In the order of their dimensions the places of several images do not lie one after the other, however short."""
    x, weight = torch.randint(-3, 4, (3, 2, 1, 5)).double(), torch.randint(-3, 4, (4, 2, 1, 3)).double()
    found = zip(gradients("triton", x, weight, (0, 1)), gradients("torch", x, weight, (0, 1)), strict=True)
    assert all(ours.equal(theirs) for ours, theirs in found)


def test_codes_have_the_dtype_of_their_filters_scale():
    x, weight = torch.ones((1, 2, 2, 2), dtype=torch.int8), torch.ones((3, 2, 1, 1), dtype=torch.int8)
    with backend("triton"):
        out = ops.conv2d_int8(x, weight, torch.ones((), dtype=torch.float64), torch.arange(6).half()[::2])
    assert out.dtype == torch.float16
    assert out.eq(torch.tensor([0, 4, 8])[:, None, None]).all()
