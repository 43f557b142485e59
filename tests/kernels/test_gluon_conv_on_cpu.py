"""Convolutions for Hopper proved on a CPU, by an emulation of Gluon: with one tap and several, strides, and gradients."""

import gluon_emulation
import pytest
import torch
import torch.nn.functional as F
from gluon_emulation import emulate

from tilestack import ops
from tilestack.contract.launch import launch
from tilestack.contract.named import call_named
from tilestack.kernels.hopper import conv, conv2d, matmul
from tilestack.lab.proof.oracle import judge, own_error

LAST = torch.channels_last


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Gluon kernels run in the emulation, on two multiprocessors; Triton's in its interpreter."""
    run = lambda kernel, *rest, **named: (emulate if "Gluon" in type(kernel).__name__ else launch)(
        kernel, *rest, **named
    )
    for module in (conv, matmul):
        monkeypatch.setattr(module, "launch", run)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    torch.manual_seed(0)


def drawn(*shape, scale=1.0):
    return (torch.randn(shape) * scale).half().contiguous(memory_format=LAST)


def check(found, reference, truth):
    assert not (message := judge(found, reference, truth, own_error(reference, truth)).message), message


def prove(x, weight, bias, stride, padding, dilation=(1, 1), config=conv.CONFIGS["128x128"]):
    """Forward and gradients against PyTorch's own, in half precision and in float64."""
    geometry = stride, padding, dilation, 1
    assert conv2d.takes(x, weight, *geometry) is True
    out = conv2d.conv2d(x, weight, bias, *geometry, config=config)
    assert out.is_contiguous(memory_format=LAST)
    grad = drawn(*out.shape)
    found = (
        out,
        *conv2d.conv2d_backward(grad, x, weight, bias, *geometry, needs=(True, True, bias is not None), config=config),
    )
    expected = []
    for dtype in (torch.half, torch.double):
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias) if t is not None]
        again = F.conv2d(*leaves, *(() if bias is not None else (None,)), *geometry)
        expected.append((again, *torch.autograd.grad(again, leaves, grad.to(dtype))))
    for ours, reference, truth in zip((t for t in found if t is not None), *expected, strict=True):
        check(ours, reference.detach(), truth.detach())


def filters(*shape):
    return drawn(*shape, scale=torch.Size(shape[1:]).numel() ** -0.5)


@pytest.mark.parametrize("config", conv.CONFIGS)
def test_several_taps(config):
    prove(
        drawn(3, 64, 6, 5), filters(128, 64, 3, 3), torch.randn(128).half(), (1, 1), (1, 1), config=conv.CONFIGS[config]
    )


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "dilation"),
    [
        ((2, 128, 5, 9), (64, 128, 2, 3), (1, 1), (0, 2), (2, 1)),
        ((3, 64, 6, 10), (64, 64, 3, 3), (2, 2), (1, 1), (1, 1)),
        ((2, 64, 8, 4), (128, 64, 4, 3), (2, 2), (2, 1), (1, 1)),
        ((2, 64, 8, 4), (64, 64, 1, 1), (2, 2), (0, 0), (1, 1)),  # of four pixels three meet no tap
        ((1, 64, 6, 9), (64, 64, 2, 2), (3, 3), (1, 0), (1, 1)),
        ((1, 64, 3, 3), (64, 64, 1, 1), (1, 1), (1, 1), (1, 1)),
    ],
)
def test_every_geometry(x, weight, stride, padding, dilation):
    prove(drawn(*x), filters(*weight), None, stride, padding, dilation)


def test_a_bias_that_lies_apart():
    prove(drawn(1, 64, 4, 4), filters(64, 64, 3, 3), torch.randn(128).half()[::2], (1, 1), (1, 1))


def test_images_off_16_bytes_are_copied():
    x = torch.empty(2 * 64 * 4 * 4 + 1).half()[1:].view(2, 4, 4, 64).permute(0, 3, 1, 2).copy_(drawn(2, 64, 4, 4))
    assert x.data_ptr() % 16
    prove(x, filters(64, 64, 3, 3), None, (1, 1), (1, 1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [(64, 128), (20, 12)])
def test_a_single_tap_is_a_product(channels, bias):
    inner, outer = channels
    prove(
        drawn(2, inner, 5, 7), filters(outer, inner, 1, 1), torch.randn(outer).half() if bias else None, (1, 1), (0, 0)
    )


@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_order_things_happen(seed, monkeypatch):
    monkeypatch.setattr(
        gluon_emulation.emulate, "__kwdefaults__", gluon_emulation.emulate.__kwdefaults__ | dict(seed=seed)
    )
    prove(
        drawn(5, 64, 6, 10),
        filters(128, 64, 3, 3),
        torch.randn(128).half(),
        (2, 2),
        (1, 1),
        config=conv.CONFIGS["128x64"],
    )


@pytest.mark.parametrize(
    ("images", "lines", "columns", "box"),
    [
        (32, 56, 56, (2, 8, 8)),
        (32, 28, 28, (8, 4, 4)),
        (32, 14, 14, (32, 2, 2)),
        (32, 7, 7, (16, 1, 8)),
        (1, 1, 300, (1, 1, 128)),
    ],
)
def test_the_fewest_boxes_cover_all_places(images, lines, columns, box):
    assert conv.box_of_places(images, lines, columns, 128) == box


@pytest.mark.parametrize(
    ("x", "weight", "named", "reason"),
    [
        (drawn(1, 64, 4, 4).contiguous(), (64, 64, 3, 3), {}, "channels lie together"),
        (drawn(1, 64, 4, 4), (64, 32, 3, 3), dict(groups=2), "no groups"),
        (drawn(0, 64, 4, 4), (64, 64, 3, 3), {}, "channels lie together"),
        (drawn(1, 48, 4, 4), (64, 48, 3, 3), {}, "multiples of 64 channels and filters, not 48 and 64"),
        (drawn(1, 64, 5, 4), (64, 64, 3, 3), dict(stride=(2, 2)), "which divides them"),
        (drawn(1, 64, 4, 5), (64, 64, 3, 3), dict(stride=(2, 2)), "which divides them"),
        (drawn(1, 64, 4, 4), (64, 64, 3, 3), dict(stride=(2, 1)), "one for both sides"),
        (drawn(1, 64, 4, 4), (64, 64, 2, 2), dict(stride=(2, 2), dilation=(2, 1)), "no dilation"),
        (drawn(1, 64, 4, 4), (64, 64, 2, 2), dict(stride=(2, 2), dilation=(1, 2)), "no dilation"),
    ],
)
def test_what_is_left_to_others(x, weight, named, reason):
    geometry = dict(stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1) | named
    assert reason in call_named(conv2d.takes, dict(x=x, weight=filters(*weight)) | geometry)


@pytest.mark.parametrize("config", conv.CODES_CONFIGS)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_codes(config, dtype):
    made = lambda *shape: torch.randint(-128, 128, shape, dtype=torch.int8).contiguous(memory_format=LAST)
    x, weight, bias = made(3, 64, 6, 4), made(128, 64, 3, 3), torch.randn(128).half()
    arguments = x, weight, torch.tensor(0.01).half(), torch.rand(128).half(), bias, (2, 2), (1, 1), (1, 1), 1, dtype
    reference = ops.conv2d_int8.definition(*arguments)
    truth = ops.conv2d_int8.definition(
        *(a.double() if getattr(a, "dtype", 0) == torch.half else a for a in arguments[:-1])
    )
    check(conv2d.conv2d_int8(*arguments, config=conv.CODES_CONFIGS[config]), reference, truth)
