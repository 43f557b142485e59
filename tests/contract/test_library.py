"""Operators as PyTorch's compilers see them: opcheck, torch.compile, export and fake tensors, on torch and on Triton."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from tilestack import contract, ops
from tilestack.contract import backend
from tilestack.contract.autograd import gradient_of_definition
from tilestack.contract.cases import Make
from tilestack.contract.library import define_with_extras
from tilestack.contract.operator import as_tuple

NAMES = ["add", "axpy", "relu", "silu", "gelu", "softmax", "rms_norm", "layer_norm", "linear", "grouped_linear"]
WITH_KERNELS = [described for described in ops.operators() if "triton" in described.implementations]
OTHERS = [described.name for described in WITH_KERNELS if described.name not in NAMES]
DERIVED = [name for name in OTHERS if callable(ops.operator_named(name).implementations["triton"].backward)]
SMALL = 20_000  # elements of arguments
takes_imagined_extras = lambda described: (extras := described.implementations["triton"].extras) and extras.fake
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
    """Outputs and gradients, for fixed arriving gradients."""
    leaves = [value for value in arguments.values() if isinstance(value, torch.Tensor) and value.requires_grad]
    outputs = as_tuple(function(*arguments.values()))
    differentiable = [out for out in outputs if out.requires_grad]
    arriving = [torch.randn(out.shape, generator=torch.Generator().manual_seed(0)) for out in differentiable]
    found = torch.autograd.grad(differentiable, leaves, arriving, allow_unused=True) if differentiable else ()
    return [*(out.detach() for out in outputs), *(gradient for gradient in found if gradient is not None)]


@each_backend
@each_operator
def test_opcheck_accepts_every_operator(name, chosen):
    with backend(chosen):
        for case in check_cases(name):
            for with_gradient in (False, True):
                arguments = arguments_of(name, case, with_gradient)
                torch.library.opcheck(getattr(torch.ops.tilestack, name).default, tuple(arguments.values()))


@each_operator
def test_opcheck_accepts_every_gradient(name):
    described = ops.operator_named(name)
    arguments = arguments_of(name, check_cases(name)[1], with_gradient=False)
    out = as_tuple(described.definition(**arguments))
    tensors = [arguments[tensor] for tensor in described.tensors]
    needs = [isinstance(tensor, torch.Tensor) and tensor.is_floating_point() for tensor in tensors]
    available = (
        arguments | dict(zip(described.outputs, out, strict=True)) | dict(grad=torch.ones_like(out[0]), needs=needs)
    )
    gradient = getattr(torch.ops.tilestack, f"{name}_backward").default
    values = tuple(available[argument.name] for argument in gradient._schema.arguments if not argument.kwarg_only)
    with backend("triton"):
        torch.library.opcheck(gradient, values)
        found = as_tuple(gradient(*values))
    expected = gradient_of_definition(described, available)
    assert [g.shape for g in found] == [
        theirs.shape if needed else (0,) for theirs, needed in zip(expected, needs, strict=True)
    ]


def small_case(name):
    """The smallest check that is not empty."""
    described = ops.operator_named(name)

    def elements(case):
        arguments = described.bind(**case.build(Make(torch.float32)))
        return min(t.numel() for t in arguments.values() if isinstance(t, torch.Tensor)), case

    return min((e for c in described.cases if c.kind == "check" if (e := elements(c))[0]), key=lambda e: e[0])[1]


@pytest.mark.parametrize("name", OTHERS)
def test_every_other_operator_is_registered_as_it_behaves(name):
    operator = getattr(torch.ops.tilestack, name).default
    values = tuple(arguments_of(name, small_case(name), with_gradient=False).values())
    checks = ["test_schema", "test_autograd_registration", "test_faketensor"]
    if any(isinstance(value, torch.Tensor) and value.dtype == torch.float8_e4m3fn for value in values):
        checks.remove("test_schema")  # which multiplies what it is given, and PyTorch multiplies no fp8 on a CPU
    with backend("torch"):
        torch.library.opcheck(operator, values, test_utils=checks)


@pytest.mark.parametrize("name", [described.name for described in WITH_KERNELS if takes_imagined_extras(described)])
def test_a_gradient_that_takes_extras_is_imagined_as_it_is(name):
    """In every case that is small: of some arguments, such as slopes, there is a gradient in none."""
    described = ops.operator_named(name)
    implementation = described.implementations["triton"]
    tried = 0
    for case in (case for case in described.cases if case.kind == "check"):
        arguments = arguments_of(name, case, with_gradient=False)
        given = [value for value in arguments.values() if isinstance(value, torch.Tensor)]
        extras = implementation.extras_of(arguments)
        if extras is None or not 0 < sum(map(torch.numel, given)) < SMALL or 0 in map(torch.numel, given):
            continue
        needs = [isinstance(t := arguments[key], torch.Tensor) and t.is_floating_point() for key in described.tensors]
        forward = define_with_extras(described, "triton", extras)
        outputs = dict(
            zip(
                (*described.outputs, *extras.names(described)),
                as_tuple(forward(*arguments.values(), needs)),
                strict=True,
            )
        )
        available = arguments | {f"{key}_like": value for key, value in arguments.items()} | outputs | {"needs": needs}
        available |= {
            key: torch.ones_like(outputs[out]) for key, out in zip(described.grads, described.outputs, strict=True)
        }
        gradient = getattr(torch.ops.tilestack, f"{forward.__name__}_backward").default
        values = [available[argument.name] for argument in gradient._schema.arguments if not argument.kwarg_only]
        found = as_tuple(gradient(*values, backend="triton"))
        with FakeTensorMode() as mode:
            fakes = [mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in values]
            imagined = as_tuple(gradient(*fakes, backend="triton"))
        assert [(g.shape, g.dtype) for g in found] == [(g.shape, g.dtype) for g in imagined], case.name
        tried += 1
    assert tried


@pytest.mark.parametrize("name", DERIVED)
def test_every_other_gradient_is_imagined_as_it_is(name):
    """What a compiler is told of a gradient, on fake tensors, is what the definition's and the kernel's turn out to be."""
    described, gradient = ops.operator_named(name), getattr(torch.ops.tilestack, f"{name}_backward").default
    arguments = arguments_of(name, small_case(name), with_gradient=False)
    out = as_tuple(described.definition(**arguments))
    tensors = [arguments[tensor] for tensor in described.tensors]
    available = arguments | dict(zip(described.outputs, out, strict=True))
    available |= {name: torch.ones_like(o) for name, o in zip(described.grads, out, strict=True)}
    available["needs"] = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in tensors]
    values = [available[argument.name] for argument in gradient._schema.arguments if not argument.kwarg_only]
    found = []
    for chosen in ("torch", "triton"):
        with backend(chosen):
            found.append(as_tuple(gradient(*values)))
    with FakeTensorMode() as mode:
        found.append(as_tuple(gradient(*(mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in values))))
    seen = [[(g.shape, g.dtype, g.stride()) for g in gradients] for gradients in found]
    assert seen[0] == seen[1] == seen[2]


@pytest.mark.parametrize(("chosen", "dynamic"), [("torch", True), ("triton", False), ("triton", True)])
@each_operator
def test_compiled_results_and_gradients_are_those_of_eager_mode(name, chosen, dynamic):
    described = ops.operator_named(name)
    torch.compiler.reset()
    with backend(chosen):
        for case in check_cases(name)[1:]:
            arguments = arguments_of(name, case, with_gradient=True)
            options = {key: value for key, value in arguments.items() if not isinstance(value, torch.Tensor)}
            tensors = {key: value for key, value in arguments.items() if key not in options}
            call = lambda *values: described(**dict(zip(tensors, values, strict=True)), **options)
            compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="aot_eager")
            for found, expected in zip(results(compiled, tensors), results(call, tensors), strict=True):
                assert torch.equal(found, expected)


@pytest.mark.parametrize("chosen", ["torch", "triton"])
def test_a_float_tensor_without_gradient_has_none_when_compiled(chosen):
    described = ops.operator_named("rope")
    case = next(c for c in described.cases if c.kind == "check")
    arguments = described.bind(**case.build(Make(torch.float32)))
    tensors = {k: v.requires_grad_(v.is_floating_point()) for k, v in arguments.items() if isinstance(v, torch.Tensor)}
    options = {k: v for k, v in arguments.items() if k not in tensors}
    call = lambda *values: described(**dict(zip(tensors, values, strict=True)), **options)
    torch.compiler.reset()
    with backend(chosen):
        compiled = results(torch.compile(call, fullgraph=True, backend="aot_eager"), tensors)
        eager = results(call, tensors)
    assert len(compiled) == len(eager)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(compiled, eager, strict=True))


@pytest.mark.usefixtures("outside")
def test_limits_hold_for_symbolic_shapes():
    narrow = lambda x: x.shape[-1] <= 64 or "rows of at most 64"
    contract.implements(ops.silu, backend="mine", backward=lambda grad, x: grad, when=narrow)(torch.nn.functional.silu)
    torch.compiler.reset()
    compiled = torch.compile(lambda x: ops.silu(x), fullgraph=True, dynamic=True, backend="aot_eager")
    with backend("mine"):
        x = torch.randn(3, 33)
        assert torch.equal(compiled(x), torch.nn.functional.silu(x))
        with pytest.raises(Exception, match="silu cannot run on mine: rows of at most 64"):
            compiled(torch.randn(3, 65))


@pytest.mark.usefixtures("outside")
def test_a_compiled_function_keeps_the_backend_it_was_traced_on_for_its_gradient_too():
    ran = []
    contract.implements(
        ops.relu, backend="mine", backward=lambda grad, out: ran.append("backward") or grad * (out > 0)
    )(lambda x: ran.append("forward") or torch.relu(x))
    torch.compiler.reset()
    compiled = torch.compile(lambda x: ops.relu(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(3, requires_grad=True)
    with backend("mine"):
        out = compiled(x)
    out.sum().backward()  # outside, where another backend would be chosen
    assert ran == ["forward", "backward"]
    with backend("triton"):
        compiled(x).sum().backward()
    assert ran == ["forward", "backward"] * 2


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


@pytest.mark.parametrize("compiled", [False, True])
def test_a_gradient_that_is_a_view_stays_one(compiled):
    operator = torch.compile(ops.transpose, backend="aot_eager", fullgraph=True) if compiled else torch.ops.tilestack.transpose  # fmt: skip
    x, grad = torch.randn(3, 4, requires_grad=True), torch.randn(4, 3)
    with backend("triton"):
        (found,) = torch.autograd.grad(operator(x), x, grad)
    assert torch.equal(found, grad.mT)
    assert found.data_ptr() == grad.data_ptr()
