import copy
import io
import os
import subprocess
import sys

import pytest
import torch
from torch.nn.utils import parametrizations

import tilestack
from tilestack import nn


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(24, 32),
        torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.Dropout(0.5)),
        torch.nn.Linear(32, 32, bias=False),
        torch.nn.ReLU(inplace=True),
        torch.nn.RMSNorm(32),
        torch.nn.SiLU(),
        torch.nn.Softmax(-1),
    )


EVERYTHING = dict(linear=2, layer_norm=1, gelu=1, relu=1, rms_norm=1, silu=1, softmax=1)


def classes(model):
    return [type(module) for module in model.modules()]


def test_everything_is_swapped_and_comes_back(as_good_as):
    model, x = network().eval(), torch.randn(5, 24)
    before, classes_before, truth = model(x), classes(model), copy.deepcopy(model).double()(x.double())
    parameters = {name: id(parameter) for name, parameter in model.named_parameters()}
    state = {name: value.clone() for name, value in model.state_dict().items()}

    report = tilestack.patch(model)
    assert report.counts == EVERYTHING
    assert report.left == {}
    as_good_as(model(x), before, truth)
    assert isinstance(model[0], nn.Linear)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == parameters
    assert all(torch.equal(model.state_dict()[name], value) for name, value in state.items())

    assert tilestack.unpatch(model) == len(report.swapped)
    assert classes(model) == classes_before
    assert torch.equal(model(x), before)
    assert tilestack.unpatch(model) == 0


def test_a_model_that_is_one_module_is_swapped():
    model = torch.nn.Linear(4, 4)
    assert tilestack.patch(model).swapped == {"": "linear"}
    assert isinstance(model, nn.Linear)
    tilestack.unpatch(model)
    assert type(model) is torch.nn.Linear


def test_hooks_mode_and_random_state_stay():
    model, seen = network(), []
    model[0].register_forward_hook(lambda *_: seen.append("hook"))
    model[1].eval()
    random_state = torch.get_rng_state()
    tilestack.patch(model)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert model.training
    assert not model[1][0].training
    model(torch.randn(2, 24))
    assert seen == ["hook"]


def test_a_training_step_is_as_good_as_pytorchs(as_good_as):
    x = torch.randn(5, 24)
    models = [network().eval(), network().eval(), network().eval().double()]
    tilestack.patch(models[0])
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x.to(model[0].weight.dtype)).square().sum().backward()
        optimizer.step()
    for ours, theirs, truth in zip(*(model.parameters() for model in models), strict=True):
        as_good_as(ours.grad, theirs.grad, truth.grad)
        as_good_as(ours.detach(), theirs.detach(), truth.detach())


def test_tied_weights_stay_tied():
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), torch.nn.Linear(8, 16, bias=False))
    model[1].weight = model[0].weight
    tilestack.patch(model)
    copied = copy.deepcopy(model)
    assert model[1].weight is model[0].weight
    assert copied[1].weight is copied[0].weight


def test_copies_and_pickles_are_patched_too():
    model, x, file = network().eval(), torch.randn(5, 24), io.BytesIO()
    tilestack.patch(model)
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert classes(twin) == classes(model)
        assert torch.equal(twin(x), model(x))
        assert tilestack.unpatch(twin) == sum(EVERYTHING.values())
        assert classes(twin) == classes(network())
    assert isinstance(model[0], nn.Linear)


def test_weights_are_exchanged_with_an_unpatched_model():
    model, other = network(), network()
    torch.nn.init.normal_(other[0].weight)
    tilestack.patch(model)
    model.load_state_dict(other.state_dict())
    other.load_state_dict(model.state_dict())
    assert torch.equal(model[0].weight, other[0].weight)


def test_only_and_skip_choose_by_operator_and_by_path():
    assert tilestack.patch(network(), only="linear").swapped == {"0": "linear", "2": "linear"}
    assert tilestack.patch(network(), only=["1", "s*"]).counts == dict(layer_norm=1, gelu=1, silu=1, softmax=1)
    assert "linear" not in tilestack.patch(network(), skip=["linear"]).counts
    model = network()
    report = tilestack.patch(model, only=["linear", "rms_norm"], skip="2")
    assert report.swapped == {"0": "linear", "4": "rms_norm"}
    assert report.left["2"] == "`skip` names it"
    assert report.left["1.1"] == "`only` does not name it"
    assert tilestack.patch(model).swapped.keys().isdisjoint({"0", "4"})
    assert tilestack.unpatch(model) == sum(EVERYTHING.values())
    with pytest.raises(ValueError, match="'rmsnorm' is neither the path of a module in this model nor one of conv2d"):
        tilestack.patch(model, skip="rmsnorm")


def test_the_report_reads_well():
    model = torch.nn.ModuleDict(dict(a=Doubled(4, 4), b=Doubled(4, 4), c=torch.nn.Linear(4, 4)))
    assert repr(tilestack.patch(model)) == (
        "1 module runs on tilestack: 1 linear\nleft alone: a and 1 more, it overrides the forward of torch.nn.Linear"
    )
    assert repr(tilestack.patch(model)) == (
        "0 modules run on tilestack\nleft alone: a and 1 more, it overrides the forward of torch.nn.Linear"
    )


class Doubled(torch.nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Labelled(torch.nn.Linear):
    label = "kept"


def test_subclasses_are_swapped_only_if_they_keep_the_forward():
    model = torch.nn.Sequential(Doubled(4, 4), Labelled(4, 4))
    report = tilestack.patch(model)
    assert report.swapped == {"1": "linear"}
    assert isinstance(model[1], Labelled)
    assert isinstance(model[1], nn.Linear)
    assert type(model[0]) is Doubled
    tilestack.unpatch(model)
    assert type(model[1]) is Labelled


def test_our_own_modules_stay_as_they_were_built():
    model = torch.nn.Sequential(nn.Linear(4, 4), torch.nn.Linear(4, 4))
    assert tilestack.patch(model).swapped == {"1": "linear"}
    assert tilestack.unpatch(model) == 1
    assert classes(model)[1:] == [nn.Linear, torch.nn.Linear]


class Strange(torch.Tensor):
    """A tensor that keeps its numbers in its own way, as quantised and sharded ones do."""


def with_strange_weight():
    module = torch.nn.Linear(4, 4)
    module.weight = torch.nn.Parameter(torch.randn(4, 4).as_subclass(Strange))
    return module


def with_forward_on_instance():
    module = torch.nn.Linear(4, 4)
    module.forward = lambda x: x
    return module


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (with_strange_weight, "its weight is a Strange, not a plain tensor"),
        (with_forward_on_instance, "its forward has been replaced on the instance"),
        (lambda: parametrizations.weight_norm(torch.nn.Linear(4, 4)), "it is parametrised"),
        (lambda: torch.nn.LazyLinear(4), "its weight is a UninitializedParameter, not a plain tensor"),
    ],
)
def test_modules_that_do_not_run_as_their_class_says_are_left_alone(build, reason):
    module = build()
    kind = type(module)
    assert tilestack.patch(module).left == {"": reason}
    assert type(module) is kind


def test_scripted_modules_are_left_alone():
    model = torch.nn.Sequential(torch.jit.trace(torch.nn.Linear(4, 4), torch.randn(2, 4)), torch.nn.Linear(4, 4))
    assert tilestack.patch(model).swapped == {"1": "linear"}


def test_models_without_memory_are_patched():
    with torch.device("meta"):
        model = network()
        assert tilestack.patch(model).counts == EVERYTHING
        assert model(torch.randn(5, 24)).shape == (5, 32)


def test_an_encoder_layer_is_as_good_as_pytorchs(as_good_as):
    torch.manual_seed(0)
    layer, x = torch.nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0), torch.randn(7, 2, 32)
    before, truth = layer(x), copy.deepcopy(layer).double()(x.double())
    report = tilestack.patch(layer)
    assert report.counts == dict(linear=2, layer_norm=2)
    assert list(report.left) == ["self_attn.out_proj"]
    as_good_as(layer(x), before, truth)
    tilestack.unpatch(layer)
    assert torch.equal(layer(x), before)


def test_a_patched_model_compiles_into_one_graph(as_good_as):
    model, x = network().eval(), torch.randn(5, 24)
    before, truth = model(x), copy.deepcopy(model).double()(x.double())
    tilestack.patch(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    as_good_as(compiled(x), before, truth)
    compiled(x).square().sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def test_wrapping_a_patched_model_keeps_it_patched_and_unpatch_says_so(as_good_as):
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        model, x = network().eval(), torch.randn(5, 24)
        before, truth = model(x), copy.deepcopy(model).double()(x.double())
        tilestack.patch(model)
        fully_shard(model[0], mesh=mesh)
        assert isinstance(model[0], nn.Linear)
        as_good_as(model(x), before, truth)
        with pytest.raises(RuntimeError, match="0 was wrapped, as FSDPLinear, after it was patched; unwrap it first"):
            tilestack.unpatch(model)
        assert isinstance(model[2], nn.Linear)
    finally:
        torch.distributed.destroy_process_group()


def test_unpatch_does_not_pretend_under_a_forward_set_later():
    model = torch.nn.Linear(4, 4)
    tilestack.patch(model)
    model.forward = model.forward
    with pytest.raises(RuntimeError, match="the model was wrapped"):
        tilestack.unpatch(model)


def test_what_is_no_model_is_refused():
    with pytest.raises(TypeError, match=r"a model is a torch\.nn\.Module, not dict"):
        tilestack.patch({})


def test_triton_kernels_run_inside_a_patched_model():
    program = """
import copy, torch, tilestack
from triton.runtime.interpreter import GridExecutor

kernels, run = set(), GridExecutor.__call__
GridExecutor.__call__ = lambda self, *a, **k: (kernels.add(self.fn.__name__), run(self, *a, **k))[1]

torch.manual_seed(0)
model = torch.nn.Sequential(
    torch.nn.Linear(24, 32), torch.nn.LayerNorm(32), torch.nn.GELU(), torch.nn.RMSNorm(32), torch.nn.Softmax(-1)
)
plain, exact, x = copy.deepcopy(model), copy.deepcopy(model).double(), torch.randn(5, 24)
tilestack.patch(model)
with tilestack.backend("triton"):
    out = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), out)
out[:, 0].sum().backward()
plain(x)[:, 0].sum().backward()
exact(x.double())[:, 0].sum().backward()
for ours, theirs, truth in zip(model.parameters(), plain.parameters(), exact.parameters()):
    error, own = ((g.grad.double() - truth.grad).abs().max() for g in (ours, theirs))
    assert error <= 2 * own + truth.grad.abs().max() * torch.finfo(torch.float32).eps, (error, own)
print(*sorted(kernels))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    families = {"matmul", "norm", "activation", "softmax"}
    assert families <= {kernel.split("_")[0] for kernel in done.stdout.split()}
    assert {"norm_bwd_kernel", "activation_bwd_kernel", "softmax_bwd_kernel"} <= set(done.stdout.split())
