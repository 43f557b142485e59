"""Products for Hopper proved on a CPU, by an emulation of Gluon: plain, with an epilogue, of fp8 codes, and grouped."""

import gluon_emulation
import pytest
import torch
from gluon_emulation import emulate

from tilestack import ops
from tilestack.contract.launch import launch
from tilestack.kernels.hopper import fp8, fused, grouped_fp8, matmul
from tilestack.kernels.matmul.epilogue import Epilogue
from tilestack.lab.oracle import judge, own_error
from tilestack.ops.activation_dropout import KINDS

E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Gluon kernels run in the emulation, on two multiprocessors; activations in PyTorch."""
    run = lambda kernel, *rest, **named: (emulate if "Gluon" in type(kernel).__name__ else launch)(
        kernel, *rest, **named
    )
    for module in (fp8, fused, grouped_fp8, matmul):
        monkeypatch.setattr(module, "launch", run)
        monkeypatch.setattr(module, "multiprocessors", lambda device: 2)
    monkeypatch.setattr(fused, "activate", lambda x, kind, half: KINDS[kind](x.float()))
    torch.manual_seed(0)


def check(found, definition, *arguments):
    reference, truth = (definition(*given) for given in (arguments, [wider(x) for x in arguments]))
    assert not (message := judge(found, reference, truth, own_error(reference, truth)).message), message


def wider(x):
    return x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() and x.dtype != E4M3 else x


def ends(*at):
    return torch.tensor(at, dtype=torch.int32)


@pytest.mark.parametrize("config", fused.CONFIGS)
@pytest.mark.parametrize("parts", ["gelu", "silu+residual", "residual"])
def test_epilogues(config, parts):
    x, weight, bias = torch.randn(150, 200).half(), torch.randn(272, 200).half() / 14, torch.randn(272).half()
    residual = torch.randn(150, 272).half() if "residual" in parts else None
    activation = next((kind for kind in parts.split("+") if kind in KINDS), "none")
    pre = torch.full((150, 272), torch.nan).half()
    epilogue = Epilogue(activation, residual, None, 0.0, pre if activation != "none" else None)
    found = fused.fused_product(x, weight.T, bias, fused.CONFIGS[config], epilogue)
    check(found, ops.fused_linear.definition, x, weight, bias, residual, None, activation)
    if activation != "none":
        check(pre, ops.linear.definition, x, weight, bias)


def codes(*shape):
    return torch.randn(shape).to(E4M3)


@pytest.mark.parametrize("config", grouped_fp8.CONFIGS)
@pytest.mark.parametrize("by", ["rows", "blocks"])
@pytest.mark.parametrize("offsets", [(0, 70, 70, 200, 330), (330, 330, 330, 330, 330), (5, 128, 129, 257, 300)])
def test_grouped_products_of_codes(config, by, offsets):
    x, weight = codes(330, 144), codes(5, 160, 144)
    scales = ((330,), (5, 160)) if by == "rows" else ((330, 2), (5, 2, 2))
    x_scale, scale = ((0.5 + torch.rand(shape)).half() for shape in scales)
    arguments = x, weight, x_scale, scale / 8, ends(*offsets), ""
    check(
        grouped_fp8.grouped_linear_fp8(*arguments, grouped_fp8.CONFIGS[config]),
        ops.grouped_linear_fp8.definition,
        *arguments,
    )


@pytest.mark.parametrize("by", ["tensor", "rows", "blocks"])
def test_products_of_codes(by):
    x, weight, bias = codes(150, 272), codes(200, 272), torch.randn(200).half()
    shapes = dict(tensor=((), ()), rows=((150,), (200,)), blocks=((150, 3), (2, 3)))[by]
    x_scale, scale = ((0.5 + torch.rand(shape)).half() for shape in shapes)
    arguments = x, weight, x_scale, scale / 16, bias, ""
    check(fp8.linear_fp8(*arguments, fp8.CONFIGS["128x128"]), ops.linear_fp8.definition, *arguments)


@pytest.mark.parametrize("seed", range(4))
def test_in_whatever_order_things_happen(seed, monkeypatch):
    monkeypatch.setattr(gluon_emulation.emulate, "__kwdefaults__", dict(seed=seed, num_warps=4))
    test_epilogues("128x64", "silu+residual")
    test_grouped_products_of_codes("128x64", "blocks", (5, 128, 129, 257, 300))
