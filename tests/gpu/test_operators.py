"""What only a GPU shows: the kernels as compiled, CUDA graphs, streams, devices, and the launcher's shortcut."""

import itertools
from pathlib import Path

import pytest
import torch

from tilestack import ops
from tilestack.contract import backend
from tilestack.contract import launch as launcher
from tilestack.contract.cases import Make
from tilestack.contract.operator import as_tuple
from tilestack.lab import machine
from tilestack.lab.bench.peers import our_backends
from tilestack.lab.proof.claims import claims
from tilestack.lab.proof.memory_guards import poisoned_memory, same_bits
from tilestack.lab.proof.proofs import NAME, load_proofs, unproved
from tilestack.lab.proof.verify import prove
from tilestack.lab.proof.workers import tasks_for
from tilestack.lab.results import path_of as results_of

DIRECTIONS = [
    (described.name, direction)
    for described in ops.operators()
    for direction in ("forward", "backward")
    if (triton := described.implementations.get("triton")) and (direction == "forward" or triton.backward is not None)
]
NAMES = [name for name, direction in DIRECTIONS if direction == "forward"]
CALLS_PYTORCH = ("scatter_rows", "expert_places")  # the one to sort, the other to add up: no straight line of launches
each_operator = pytest.mark.parametrize("name", NAMES)
each_direction = pytest.mark.parametrize(("name", "direction"), DIRECTIONS)


def arguments_of(described, direction="forward"):
    """The largest case that is checked and has no empty tensor, in bfloat16."""
    sizes = {}
    for case in (case for case in described.cases if case.kind == "check"):
        lengths = [t.numel() for t in case.build(Make(device="meta")).values() if isinstance(t, torch.Tensor)]
        sizes[case] = sum(lengths) * (0 not in lengths)
    arguments = described.bind(**max(sizes, key=sizes.__getitem__).build(Make(torch.bfloat16, "cuda")))
    for tensor in tensors_of(arguments):
        tensor.requires_grad_(direction == "backward")
    return arguments


def tensors_of(arguments):
    return [t for t in arguments.values() if isinstance(t, torch.Tensor) and t.is_floating_point()]


def results(function, arguments, direction):
    """Outputs (of an operator that writes, what it wrote) or, for gradients of one that arrive, the gradients of those
    arguments that have one."""
    found = function()
    outputs = tuple(t.clone() for t in tensors_of(arguments)) if found is None else as_tuple(found)
    if direction == "forward":
        return outputs
    differentiable = [out for out in outputs if out.requires_grad]  # indices are not
    arriving = [torch.ones_like(out) for out in differentiable]
    found = torch.autograd.grad(differentiable, tensors_of(arguments), arriving, allow_unused=True)
    return tuple(gradient for gradient in found if gradient is not None)


def same(found, expected):
    return [same_bits(ours, theirs) for ours, theirs in zip(found, expected, strict=True)] == [True] * len(expected)


@pytest.mark.parametrize("kind", ["check", "bench"])
@pytest.mark.parametrize("name", [described.name for described in ops.operators()])
def test_every_implementation_is_proved(name, kind):
    """What `tilestack verify --save` has proved of the present source is not proved again."""
    described, gpu = ops.operator_named(name), torch.device("cuda")
    stands = standing(described) if kind == "check" else set()
    dtypes = None if kind == "check" else [torch.bfloat16]
    asked = claims([described], gpu, kinds=(kind,), dtypes=dtypes)
    proofs = []
    for claim in asked:
        if claim.implementation.backend not in stands:
            proofs.append(prove(claim))
        if kind == "bench":
            torch.cuda.empty_cache()  # for others on the same GPU: a float64 definition takes tens of gigabytes
    wrong = [p for p in proofs if p.ok is False]
    assert not wrong, "\n".join(f"{p.backend} {p.case} {p.variant} {p.direction}: {p.message}" for p in wrong)
    assert {p.backend for p in proofs if p.ok} | stands >= {"triton"} & described.implementations.keys()


def standing(described):
    """The backends of which everything has a proof in this checkout's results for this GPU."""
    kept = load_proofs(results_of(machine.stamp("cuda")["slug"], NAME, Path(__file__).parents[2] / "results"))
    tasks = tasks_for([described], torch.device("cuda"), only={}, dtypes=None, kinds=("check",), every_variant=True)
    return set(our_backends(described)) - {task.backend for task in unproved(tasks, kept)}


@each_direction
def test_a_cuda_graph_replays_an_operator_on_new_values(name, direction):
    described = ops.operator_named(name)
    arguments = arguments_of(described, direction)
    step = lambda: results(lambda: described(**arguments), arguments, direction)
    with backend("triton"):
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        # positive, as a temperature must be; fp8 is drawn wider
        values = [torch.rand_like(tensor, dtype=torch.float32).to(tensor.dtype) for tensor in tensors_of(arguments)]

        def put_values():
            with torch.no_grad():
                for tensor, value in zip(tensors_of(arguments), values, strict=True):
                    tensor.copy_(value)

        put_values()
        graph.replay()
        put_values()  # again, for an operator that writes over them
        expected = step()
    assert expected
    assert same(captured, expected)


@each_direction
def test_inductor_gives_the_results_of_eager_mode(name, direction):
    described = ops.operator_named(name)
    arguments = arguments_of(described, direction)
    tensors = {key: value for key, value in arguments.items() if isinstance(value, torch.Tensor)}
    options = {key: value for key, value in arguments.items() if key not in tensors}
    call = lambda *values: described(**dict(zip(tensors, values, strict=True)), **options)
    torch.compiler.reset()
    with backend("triton"):
        compiled = torch.compile(call, fullgraph=True)
        fresh = copied(tensors) if described.mutates else tensors
        found = results(lambda: compiled(*fresh.values()), fresh, direction)
        expected = results(lambda: call(*tensors.values()), tensors, direction)
    assert expected
    assert same(found, expected)


@each_operator
def test_the_remembered_launch_gives_the_bits_of_the_first(name):
    described, arguments = ops.operator_named(name), arguments_of(ops.operator_named(name))
    launcher._compiled.clear()
    launcher._by_values.clear()
    described.plans.clear()
    with backend("triton"):
        found = [copied(arguments) for _ in range(2)]
        first = results(lambda: described(**found[0]), found[0], "forward")
        remembered = len(launcher._compiled)
        again = results(lambda: described(**found[1]), found[1], "forward")
    assert remembered > 0
    assert len(launcher._compiled) == remembered
    assert same(again, first)


@each_direction
def test_a_repeated_call_gives_the_bits_of_the_first(name, direction):
    described, arguments = ops.operator_named(name), arguments_of(ops.operator_named(name), direction)
    described.plans.clear()
    found, kept = [], []
    with backend("triton"), poisoned_memory():
        for _ in range(4):  # each time at other addresses
            kept.append({key: elsewhere(value) for key, value in arguments.items()})
            found.append(results(lambda: described(**kept[-1]), kept[-1], direction))
    assert all(same(other, found[0]) for other in found[1:])
    if direction == "forward" and described.implementations["triton"].repeat and name not in CALLS_PYTORCH:
        assert [run.__name__ for run in described.plans.recent.values()] == [
            "run_and_tell" if described.mutates else "repeat"
        ]


def copied(arguments):
    return {key: elsewhere(value) for key, value in arguments.items()}


def elsewhere(value):
    """A tensor's copy in other memory."""
    return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("shift", [1, 2, 8])
def test_misaligned_tensors_after_a_remembered_aligned_launch(shift):
    memory = torch.randn(4097 * 8, device="cuda").bfloat16()
    aligned, shifted = (memory[start : start + 4096 * 4].view(4, 4096) for start in (0, shift))
    with backend("triton"):
        for x in (aligned, aligned, aligned, shifted, shifted, aligned):
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
