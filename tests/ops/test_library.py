"""Operators as PyTorch's compilers see them: opcheck, torch.compile, export and fake tensors, on torch and on Triton."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tilestack import ops
from tilestack.ops import backend
from tilestack.ops.autograd import gradient_of_definition
from tilestack.ops.cases import Make
from tilestack.ops.contract import as_tuple

NAMES = [described.name for described in ops.operators()]
each_operator = pytest.mark.parametrize("name", NAMES)
each_backend = pytest.mark.parametrize("chosen", ["torch", "triton"])


def check_cases(name):
    """The first, an odd and the last case: without gaps in what they cover, and quick."""
    found = [case for case in ops.operator_named(name).cases if case.kind == "check"]
    return [found[0], found[1], found[-1]]


def arguments_of(name, case, with_gradient):
    arguments = ops.operator_named(name).bind(**case.build(Make(torch.float32)))
    for value in arguments.values():
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_(with_gradient)
    return arguments


def results(function, arguments):
    """Outputs and gradients, for a fixed arriving gradient."""
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    out = function(*arguments.values())
    arriving = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    return [out.detach(), *torch.autograd.grad(out, leaves, arriving)]


@each_backend
@each_operator
def test_opcheck_accepts_every_operator_and_its_gradient(name, chosen):
    described = ops.operator_named(name)
    with backend(chosen):
        for case in check_cases(name):
            for with_gradient in (False, True):
                arguments = arguments_of(name, case, with_gradient)
                torch.library.opcheck(getattr(torch.ops.tilestack, name).default, tuple(arguments.values()))
        out = as_tuple(described.definition(**arguments))
        available = arguments | dict(zip(described.outputs, out, strict=True)) | dict(grad=torch.ones_like(out[0]))
        needs = [isinstance(arguments[tensor], torch.Tensor) for tensor in described.tensors]
        gradient = getattr(torch.ops.tilestack, f"{name}_backward").default
        wanted = [argument.name for argument in gradient._schema.arguments]
        values = [needs if key == "needs" else available[key] for key in wanted]
        torch.library.opcheck(gradient, [v.detach() if isinstance(v, torch.Tensor) else v for v in values])
        found = gradient(*values)
    expected = gradient_of_definition(described, available | dict(needs=needs))
    for ours, theirs, needed in zip(as_tuple(found), expected, needs, strict=True):
        assert ours.shape == (theirs.shape if needed else (0,))


@each_backend
@each_operator
def test_compiled_results_and_gradients_are_those_of_eager_mode(name, chosen):
    described = ops.operator_named(name)
    torch.compiler.reset()
    compiled = torch.compile(
        lambda *values: described(*values), fullgraph=True, dynamic=chosen == "triton", backend="aot_eager"
    )
    with backend(chosen):
        for case in check_cases(name)[1:]:
            arguments = arguments_of(name, case, with_gradient=True)
            for found, expected in zip(results(compiled, arguments), results(described, arguments), strict=True):
                assert torch.equal(found, expected)


def test_compiled_operators_keep_the_backend_they_were_compiled_with():
    compiled = torch.compile(lambda x: ops.softmax(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, 33)
    with backend("triton"):
        expected = compiled(x)
    with backend("torch"):
        assert not torch.equal(ops.softmax(x), expected) or torch.equal(compiled(x), expected)
        assert torch.equal(compiled(x), expected)


@each_backend
def test_inductor_compiles_a_block_of_operators(chosen):
    torch.compiler.reset()

    def block(x, weight):
        return ops.softmax(ops.linear(ops.rms_norm(x), weight)) + 1

    x, weight = torch.randn(4, 16), torch.randn(8, 16)
    with backend(chosen):
        found, expected = torch.compile(block, fullgraph=True)(x, weight), block(x, weight)
    torch.testing.assert_close(found, expected)


@each_backend
@each_operator
def test_fake_tensors_have_the_shapes_of_real_ones(name, chosen):
    described = ops.operator_named(name)
    for case in check_cases(name):
        arguments = arguments_of(name, case, with_gradient=False)
        with backend(chosen):
            real = described(**arguments)
            with FakeTensorMode() as mode:
                imagined = {k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}
                fake = described(**imagined)
            again = described(**arguments)
        assert (fake.shape, fake.dtype, fake.device) == (real.shape, real.dtype, real.device)
        assert torch.equal(again, real), "a fake call must leave no plan for real ones"


@each_backend
def test_a_module_exports_and_runs_from_the_export(chosen):
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.randn(8, 16))

        def forward(self, x):
            return ops.softmax(ops.silu(ops.linear(x, self.weight)))

    module, x = Block(), torch.randn(4, 16)
    with backend(chosen):
        exported = torch.export.export(module, (x,), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
        assert torch.equal(exported.module()(x[:3]), module(x[:3]))
    called = {str(node.target) for node in exported.graph.nodes if node.op == "call_function"}
    assert any(target.startswith("tilestack.softmax") for target in called) == (chosen == "triton")
