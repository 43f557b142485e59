"""What only a GPU shows: the kernels as compiled, CUDA graphs, streams, devices, and the launcher's shortcut."""

import itertools

import pytest
import torch

from tilestack import ops
from tilestack.kernels import launch as launcher
from tilestack.lab.verify import claims, prove
from tilestack.ops import backend
from tilestack.ops.cases import Make

NAMES = [described.name for described in ops.operators()]
each_operator = pytest.mark.parametrize("name", NAMES)


def arguments_of(described, device="cuda", with_gradient=False):
    """The largest case that is checked, in bfloat16."""
    sizes = {}
    for case in (case for case in described.cases if case.kind == "check"):
        sizes[case] = sum(t.numel() for t in case.build(Make(device="meta")).values() if isinstance(t, torch.Tensor))
    arguments = described.bind(**max(sizes, key=sizes.__getitem__).build(Make(torch.bfloat16, device)))
    for tensor in tensors_of(arguments):
        tensor.requires_grad_(with_gradient)
    return arguments


def tensors_of(arguments):
    return [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]


@pytest.mark.parametrize("kind", ["check", "bench"])
@each_operator
def test_every_implementation_is_proved(name, kind):
    dtypes = None if kind == "check" else [torch.bfloat16]
    proofs = [prove(c) for c in claims([ops.operator_named(name)], torch.device("cuda"), kinds=(kind,), dtypes=dtypes)]
    assert not [p for p in proofs if p.ok is False]
    assert [p for p in proofs if p.ok and p.backend == "triton"]


@pytest.mark.parametrize("with_gradient", [False, True], ids=["forward", "backward"])
@each_operator
def test_a_cuda_graph_replays_an_operator_on_new_values(name, with_gradient):
    described = ops.operator_named(name)
    arguments = arguments_of(described, with_gradient=with_gradient)
    inputs = tensors_of(arguments)

    def step():
        out = described(**arguments)
        if not with_gradient:
            return [out]
        return torch.autograd.grad(out, inputs, torch.ones_like(out))

    with backend("triton"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        expected = step()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(captured, expected, strict=True))


@each_operator
def test_inductor_gives_the_results_and_gradients_of_eager_mode(name):
    described = ops.operator_named(name)
    arguments = arguments_of(described, with_gradient=True)
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {key: value for key, value in arguments.items() if key not in tensors}
    call = lambda *values: described(**dict(zip(tensors, values, strict=True)), **options)
    torch.compiler.reset()
    found = []
    with backend("triton"):
        for function in (call, torch.compile(call, fullgraph=True)):
            out = function(*tensors.values())
            found.append([out, *torch.autograd.grad(out, tensors_of(arguments), torch.ones_like(out))])
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))


@each_operator
def test_the_remembered_launch_gives_the_bits_of_the_first(name):
    described, arguments = ops.operator_named(name), arguments_of(ops.operator_named(name))
    launcher._compiled.clear()
    with backend("triton"):
        first = described(**arguments)
        remembered = len(launcher._compiled)
        again = described(**arguments)
    assert remembered > 0
    assert len(launcher._compiled) == remembered
    assert torch.equal(first, again)


@pytest.mark.parametrize("shift", [1, 2, 8])
def test_misaligned_tensors_after_a_remembered_aligned_launch(shift):
    memory = torch.randn(4097 * 8, device="cuda").bfloat16()
    aligned, shifted = (memory[start : start + 4096 * 4].view(4, 4096) for start in (0, shift))
    with backend("triton"):
        for x in (aligned, aligned, shifted, shifted, aligned):
            assert torch.equal(ops.relu(x), torch.relu(x))
            assert torch.equal(ops.add(x, aligned), x + aligned)


def test_each_stream_gets_its_own_launches():
    x = torch.randn(1024, 4096, device="cuda")
    with backend("triton"):
        expected = ops.softmax(x)
        torch.cuda.synchronize()
        streams, found = [torch.cuda.Stream() for _ in range(4)], []
        for stream, _ in itertools.product(streams, range(3)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1_000_000)  # a launch on another stream would read y before it is written
                y = x * 2
                found.append(ops.softmax(y / 2))
                y.record_stream(stream)
        torch.cuda.synchronize()
    assert all(torch.equal(result, expected) for result in found)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is only one GPU here")
def test_a_tensor_decides_the_gpu_its_kernel_runs_on():
    with backend("triton"):
        for device in ("cuda:1", "cuda:0", "cuda:1"):
            x = torch.randn(64, 128, device=device)
            out = ops.softmax(x)
            assert out.device == x.device
            torch.testing.assert_close(out, torch.softmax(x, -1))
