import copy
import inspect

import pytest
import torch

from tilestack import nn

NAMES = ["Conv2d", "GELU", "GroupNorm", "LayerNorm", "Linear", "RMSNorm", "ReLU", "SiLU", "Sigmoid", "Softmax", "Tanh"]
CASES = [
    ("Conv2d", dict(in_channels=4, out_channels=6, kernel_size=3, padding=1), (2, 4, 5, 6)),
    ("Conv2d", dict(in_channels=4, out_channels=6, kernel_size=(1, 2), stride=(2, 1), groups=2, bias=False), (4, 5, 6)),
    ("Conv2d", dict(in_channels=2, out_channels=3, kernel_size=2, padding="same", dilation=3), (1, 2, 5, 6)),
    ("Conv2d", dict(in_channels=2, out_channels=3, kernel_size=3, padding=1, padding_mode="circular"), (1, 2, 4, 4)),
    ("Linear", dict(in_features=24, out_features=17), (2, 3, 24)),
    ("Linear", dict(in_features=24, out_features=17, bias=False), (24,)),
    ("RMSNorm", dict(normalized_shape=24), (5, 24)),
    ("RMSNorm", dict(normalized_shape=(3, 8), eps=1e-3), (5, 3, 8)),
    ("RMSNorm", dict(normalized_shape=[24], elementwise_affine=False), (2, 5, 24)),
    ("LayerNorm", dict(normalized_shape=24), (5, 24)),
    ("LayerNorm", dict(normalized_shape=(3, 8), eps=1e-3), (5, 3, 8)),
    ("LayerNorm", dict(normalized_shape=24, bias=False), (2, 5, 24)),
    ("LayerNorm", dict(normalized_shape=(3, 8), elementwise_affine=False), (3, 8)),
    ("GroupNorm", dict(num_groups=3, num_channels=6), (5, 6, 4, 7)),
    ("GroupNorm", dict(num_groups=2, num_channels=24, eps=1e-3), (5, 24)),
    ("GroupNorm", dict(num_groups=1, num_channels=6, affine=False), (2, 6, 9)),
    ("Softmax", dict(dim=-1), (5, 24)),
    ("Softmax", dict(dim=1), (2, 5, 3)),
    ("Softmax", dict(), (24,)),
    ("Softmax", dict(), (5, 24)),
    ("Softmax", dict(), (5, 2, 3)),
    ("ReLU", dict(), (5, 24)),
    ("ReLU", dict(inplace=True), (5, 24)),
    ("GELU", dict(), (5, 24)),
    ("GELU", dict(approximate="tanh"), (5, 24)),
    ("SiLU", dict(), (5, 24)),
    ("SiLU", dict(inplace=True), (5, 24)),
    ("Tanh", dict(), (5, 24)),
    ("Sigmoid", dict(), (5, 24)),
]
each_case = pytest.mark.parametrize(
    ("name", "options", "shape"), CASES, ids=[f"{name}-{options}-{shape}" for name, options, shape in CASES]
)
pytestmark = pytest.mark.filterwarnings("ignore:Implicit dimension choice")


def pair(name, options, dtype=torch.float32):
    """PyTorch's module and ours with the same random parameters."""
    torch.manual_seed(0)
    theirs = getattr(torch.nn, name)(**options).to(dtype)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, mean=0.5)
    ours = getattr(nn, name)(**options).to(dtype)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(module, x, grad):
    """The output and all gradients; x goes through a copy that the module may overwrite."""
    x = x.clone().requires_grad_()
    out = module(x * 1)
    out.backward(grad)
    return [out.detach(), x.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("name", NAMES)
def test_constructors_are_pytorchs(name):
    ours, theirs = getattr(nn, name), getattr(torch.nn, name)
    assert issubclass(ours, theirs)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert inspect.signature(ours.forward).parameters.keys() == inspect.signature(theirs.forward).parameters.keys()


@each_case
def test_state_dicts_go_both_ways(name, options, shape):
    theirs, ours = pair(name, options)
    assert repr(ours) == repr(theirs)
    back = getattr(torch.nn, name)(**options)
    back.load_state_dict(ours.state_dict())
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert all(torch.equal(back.state_dict()[key], value) for key, value in theirs.state_dict().items())


@each_case
def test_outputs_and_gradients_are_as_good_as_pytorchs(name, options, shape, as_good_as):
    theirs, ours = pair(name, options)
    exact = copy.deepcopy(theirs).double()
    x, grad = torch.randn(shape) * 2, torch.randn(theirs(torch.randn(shape)).shape)
    truths = run(exact, x.double(), grad.double())
    for found, reference, truth in zip(run(ours, x, grad), run(theirs, x, grad), truths, strict=True):
        as_good_as(found, reference, truth)


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
@each_case
def test_results_have_pytorchs_dtype(name, options, shape, autocast, weight_dtype, x_dtype):
    theirs, ours = pair(name, options, weight_dtype)
    x = torch.randn(shape, dtype=x_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        try:
            expected = theirs(x.clone())
        except RuntimeError:
            pytest.skip("PyTorch itself refuses this mixture of dtypes")
        assert ours(x.clone()).dtype == expected.dtype


def test_linear_trains_under_autocast(as_good_as):
    theirs, ours = pair("Linear", dict(in_features=24, out_features=17))
    exact = copy.deepcopy(theirs).double()
    x = torch.randn(5, 24)
    for module, enabled in ((theirs, True), (ours, True), (exact, False)):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            out = module(x.to(module.weight.dtype))
        out.square().mean().backward()
    as_good_as(ours.weight.grad, theirs.weight.grad, exact.weight.grad)


@pytest.mark.parametrize("name", ["ReLU", "SiLU"])
def test_in_place_activations_overwrite_their_input(name):
    x = torch.randn(5, 24)
    expected = getattr(nn, name)()(x)
    assert getattr(nn, name)(inplace=True)(x) is x
    assert torch.equal(x, expected)


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm"])
def test_norms_refuse_other_shapes(name):
    with pytest.raises(ValueError, match=r"normalized_shape \(8,\), but its shape is \(2, 7\)"):
        getattr(nn, name)(8, elementwise_affine=False)(torch.randn(2, 7))
