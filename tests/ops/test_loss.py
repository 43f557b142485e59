"""What the registry's proofs cannot see of the losses: agreement with PyTorch, memory, products, and no waiting for the GPU."""

from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.testing import AotEagerAndRecordGraphs
from torch.utils._python_dispatch import TorchDispatchMode

from tilestack import contract, ops
from tilestack.contract.backends import usable
from tilestack.contract.library import define_with_extras
from tilestack.kernels.loss import linear_cross_entropy as head
from tilestack.lab.proof.oracle import judge, own_error

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(usable("triton", DEVICE) is not True, reason=str(usable("triton", DEVICE)))


def normal(*shape, dtype=torch.float32, seed=0, scale=4.0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (scale * torch.randn(shape, generator=generator, device=DEVICE)).to(dtype)


def some_labels(rows, classes):
    labels = torch.arange(rows, device=DEVICE) * 7 % classes
    labels[1::3] = -100
    return labels


def as_good_as_definition(described, arguments, wanted):
    """The kernel's loss and gradients, judged as the definition's own error in this dtype allows."""

    def evaluate(function, arguments):
        leaves = {name: arguments[name].detach().clone().requires_grad_() for name in wanted}
        out = function(**arguments | leaves)
        return out.detach(), *torch.autograd.grad(out.sum(), list(leaves.values()))

    wide = {k: v.double() if isinstance(v, torch.Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    with contract.backend("triton"):
        results = evaluate(described, arguments)
    for result, reference, truth in zip(
        results, evaluate(described.definition, arguments), evaluate(described.definition, wide), strict=True
    ):
        assert not (message := judge(result, reference, truth, own_error(reference, truth)).message), message


class Watched(TorchDispatchMode):
    """Keeps the name of every PyTorch operator called inside, and the most bytes any of their results lies in."""

    def __init__(self):
        super().__init__()
        self.called, self.largest = [], 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        self.called.append(function.overloadpacket.__name__)
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return out

    def products(self):
        return sum(name.rstrip("_") in ("mm", "addmm") for name in self.called)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignored", [slice(1, None, 3), slice(None)], ids=["some", "all"])
def test_definition_is_pytorchs(reduction, smoothing, ignored):
    logits, labels = normal(6, 33, dtype=torch.float64).requires_grad_(), torch.arange(6, device=DEVICE)
    labels[ignored] = -100
    ours = ops.cross_entropy.definition(logits, labels, label_smoothing=smoothing, reduction=reduction)
    theirs = F.cross_entropy(logits, labels, label_smoothing=smoothing, reduction=reduction)
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    torch.testing.assert_close(
        *(torch.autograd.grad(loss.sum(), logits, retain_graph=True) for loss in (ours, theirs)), equal_nan=True
    )


@pytest.mark.parametrize("label", [-1, 33, 1 << 40])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_label_that_is_no_class_makes_its_row_nan_and_no_other(label, backend):
    logits = normal(3, 33).requires_grad_()
    with contract.backend(backend):
        loss = ops.cross_entropy(logits, torch.tensor([4, label, -100], device=DEVICE), reduction="none")
    loss.sum().backward()
    assert loss.isnan().tolist() == [False, True, False]
    assert logits.grad.isnan().all(1).tolist() == [False, True, False]
    assert not logits.grad[[0, 2]].isnan().any()


def test_ignored_rows_are_not_looked_at():
    logits = normal(4, 33)
    logits[1] = torch.nan
    logits.requires_grad_()
    with contract.backend("triton"):
        loss = ops.cross_entropy(logits, some_labels(4, 33))
    loss.backward()
    assert loss.isfinite()
    assert not logits.grad[1].any()


@pytest.mark.parametrize("call", ["cross_entropy", "linear_cross_entropy"])
def test_what_arrives_scales_the_gradient_however_often(call):
    first = normal(5, 33) if call == "cross_entropy" else normal(5, 8)
    others = [some_labels(5, 33)] if call == "cross_entropy" else [normal(33, 8), some_labels(5, 33)]
    first.requires_grad_()
    with contract.backend("triton"):
        loss = getattr(ops, call)(first, *others)
    (once,) = torch.autograd.grad(loss, first, retain_graph=True)
    (thrice,) = torch.autograd.grad(3 * loss, first, retain_graph=True)
    (again,) = torch.autograd.grad(loss, first)
    torch.testing.assert_close(thrice, 3 * once)
    assert torch.equal(once, again)


@pytest.mark.parametrize("backend", ["triton", "aten"])
def test_the_scalar_that_arrives_is_not_rounded_to_the_dtype_of_what_it_scales(backend):
    """1 / 60000 is 0.2% off in bfloat16, and with it every gradient of a run."""
    leaves = [normal(*shape, dtype=torch.bfloat16).requires_grad_() for shape in ((9, 16), (21, 16))]
    labels, count = some_labels(9, 21), torch.tensor(60000.0, device=DEVICE)
    with contract.backend(backend):
        ones = torch.autograd.grad(ops.linear_cross_entropy(*leaves, labels, reduction="sum"), leaves)
        scaled = torch.autograd.grad(ops.linear_cross_entropy(*leaves, labels, reduction="sum") / count, leaves)
    for one, found in zip(ones, scaled, strict=True):
        assert torch.equal(found, (one.float() * (1 / count)).bfloat16())


def test_no_second_derivative():
    logits = normal(2, 33).requires_grad_()
    with contract.backend("triton"):
        loss = ops.cross_entropy(logits, some_labels(2, 33))
    with pytest.raises(NotImplementedError, match="cross_entropy has no second derivative on triton"):
        torch.autograd.grad(loss, logits, create_graph=True)


def test_loss_scaling_saves_small_gradients_in_float16():
    """Made before the large factor of loss scaling arrives, these gradients of 1e-8 would be zeros."""
    logits = torch.zeros(4, 8, dtype=torch.float16, device=DEVICE)
    logits[:, 0] = 17
    labels = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    (truth,) = torch.autograd.grad(F.cross_entropy(exact := logits.double().requires_grad_(), labels), exact)
    with contract.backend("triton"):
        (2.0**16 * ops.cross_entropy(logits.requires_grad_(), labels)).backward()
    assert not truth.half()[:, 1:].any()
    torch.testing.assert_close(
        logits.grad[:, 1:].double(), 2.0**16 * truth[:, 1:], rtol=torch.finfo(torch.float16).eps, atol=0
    )


class TestInPlace:
    def test_gradient_takes_the_memory_of_the_logits(self):
        scores = normal(5, 33).requires_grad_()
        logits = scores * 2
        with contract.backend("triton"):
            expected = torch.autograd.grad(ops.cross_entropy(logits, some_labels(5, 33)), logits, retain_graph=True)[0]
            loss = ops.cross_entropy(logits, some_labels(5, 33), inplace=True)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=False)
        assert gradient.data_ptr() == logits.data_ptr()
        assert torch.equal(gradient, expected)

    def test_logits_stay_where_no_gradient_is_wanted(self):
        logits = normal(5, 33)
        before = logits.clone()
        with contract.backend("triton"):
            ops.cross_entropy(logits, some_labels(5, 33), inplace=True)
        assert torch.equal(logits, before)

    def test_autograd_refuses_to_use_logits_that_were_lost(self):
        logits = torch.tanh(normal(5, 33).requires_grad_())  # whose gradient needs its result
        with contract.backend("triton"):
            loss = ops.cross_entropy(logits, some_labels(5, 33), inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@contextmanager
def chunks_of(rows, monkeypatch):
    """Logits in chunks of so many rows of 65 classes, in float32."""
    with monkeypatch.context() as patch:
        patch.setattr(head, "CHUNK_BYTES", rows * 65 * 4)
        patch.setattr(head, "ROW_MULTIPLE", 1)
        patch.setattr(head, "MANY", 64)
        yield


def head_arguments(rows=11, dtype=torch.float32):
    return dict(x=normal(rows, 8, dtype=dtype), weight=normal(65, 8, dtype=dtype, seed=1, scale=1.0), labels=some_labels(rows, 65))  # fmt: skip


class TestHead:
    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("rows", [1, 4, 11, 64])
    def test_any_chunk_gives_the_same(self, rows, dtype, reduction, monkeypatch):
        with chunks_of(rows, monkeypatch):
            as_good_as_definition(
                ops.linear_cross_entropy, head_arguments(dtype=dtype) | dict(reduction=reduction), ["x", "weight"]
            )

    def test_logits_are_never_whole(self, monkeypatch):
        arguments = head_arguments(rows=64)
        arguments["x"].requires_grad_()
        arguments["weight"].requires_grad_()
        with chunks_of(4, monkeypatch), contract.backend("triton"), Watched() as watched:
            ops.linear_cross_entropy(**arguments).backward()
        assert watched.largest == 65 * 8 * 4  # the weight's gradient; a chunk of logits is half as large

    def test_many_rows_get_few_large_chunks(self):
        weight = torch.empty(151936, 1024, dtype=torch.bfloat16, device="meta")
        assert [head.rows_per_chunk(rows, weight) for rows in (1, 8192, 8448, 16384, 65536)] == [
            640,
            640,
            1152,
            2048,
            8192,
        ]

    @pytest.mark.parametrize(("wanted", "products"), [([], 1), (["x"], 2), (["weight"], 2), (["x", "weight"], 3)])
    def test_only_what_is_wanted_is_computed(self, wanted, products):
        arguments = head_arguments()
        for name in wanted:
            arguments[name].requires_grad_()
        with contract.backend("triton"), Watched() as forward:
            loss = ops.linear_cross_entropy(**arguments)
        assert forward.products() == products
        if wanted:
            with Watched() as backward:
                loss.backward()
            assert backward.products() == 0

    def test_tied_weight_gets_the_gradients_of_both_ends(self):
        labels = some_labels(7, 65)
        ids = torch.arange(7, device=DEVICE) * 3

        def gradient(loss, dtype=torch.float32):
            weight = normal(65, 8, dtype=dtype, seed=1, scale=1.0).requires_grad_()
            loss(torch.tanh(F.embedding(ids, weight)), weight, labels).backward()
            return weight.grad

        with contract.backend("triton"):
            ours = gradient(ops.linear_cross_entropy)
        definition = ops.linear_cross_entropy.definition
        reference, truth = gradient(definition), gradient(definition, torch.float64)
        assert not (message := judge(ours, reference, truth, own_error(reference, truth)).message), message


WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "bincount"}


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_host_never_waits_for_the_device(reduction):
    arguments = head_arguments()
    logits = normal(11, 65).requires_grad_()
    arguments["x"].requires_grad_()
    with contract.backend("triton"), Watched() as watched:
        losses = (
            ops.cross_entropy(logits, arguments["labels"], reduction=reduction),
            ops.linear_cross_entropy(**arguments, reduction=reduction),
        )
        torch.autograd.backward(losses, [torch.ones_like(loss) for loss in losses])
    assert "mm" in watched.called
    assert not WAITS & set(watched.called)


class TestCompiled:
    @pytest.mark.parametrize("call", ["cross_entropy", "linear_cross_entropy"])
    @pytest.mark.parametrize("reduction", ["mean", "none"])
    def test_gradients_are_those_of_eager(self, call, reduction):
        torch.compiler.reset()
        arguments = head_arguments()
        names = ["x", "weight"]
        if call == "cross_entropy":
            arguments, names = dict(logits=normal(11, 65), labels=arguments["labels"]), ["logits"]

        def loss(*tensors):
            with_labels = (*tensors, arguments["labels"])
            return 2 * getattr(ops, call)(*with_labels, reduction=reduction).sum()

        results = []
        for function in (loss, torch.compile(loss, fullgraph=True, backend="aot_eager")):
            leaves = [arguments[name].clone().requires_grad_() for name in names]
            with contract.backend("triton"):
                out = function(*leaves)
                results.append([out.detach(), *torch.autograd.grad(out, leaves)])
        torch.testing.assert_close(*results)

    def test_head_makes_its_gradients_in_the_forward(self):
        torch.compiler.reset()
        arguments = head_arguments()
        arguments["x"].requires_grad_()
        graphs = AotEagerAndRecordGraphs()
        with contract.backend("triton"):
            torch.compile(ops.linear_cross_entropy, fullgraph=True, backend=graphs)(**arguments).backward()
        assert "linear_cross_entropy_with_extras_triton" in graphs.fw_graphs[0].code
        assert "linear_cross_entropy_with_extras_triton_backward" in graphs.bw_graphs[0].code  # which only scales
        assert "linear_cross_entropy_backward" not in graphs.bw_graphs[0].code

    @pytest.mark.parametrize("needs", [[True, True, False], [False, True, False]], ids=["both", "weight"])
    def test_operator_that_makes_gradients_is_well_made(self, needs):
        arguments = ops.linear_cross_entropy.bind(**head_arguments())
        arguments["x"].requires_grad_(needs[0])
        arguments["weight"].requires_grad_(needs[1])
        torch.library.opcheck(
            define_with_extras(
                ops.linear_cross_entropy, "triton", ops.linear_cross_entropy.implementations["triton"].extras
            ),
            (*arguments.values(), needs),
        )
