"""A gated layer in fp8 as one function, and codes of weights that are made once a step."""

import copy

import pytest
import torch
from tiny import Counting, TinyModel, recipe
from torch.utils.checkpoint import checkpoint

from tilestack import nn, ops
from tilestack.nn.lora import add_lora
from tilestack.train import Trainer, fp8, fp8_gated, fp8_weights
from tilestack.train.step import kept_codes


class Layers(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layers = torch.nn.ModuleList([layer])


def coded(layer):
    fp8.compute_in_fp8(Layers(layer))
    return layer


def mlp(**options):
    torch.manual_seed(0)
    return nn.MLP(32, 144, **options)


def mixture():
    torch.manual_seed(0)
    return nn.MoE(32, 48, experts=4, top_k=2)


def gradients(layer, run=None):
    x = torch.randn(150, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    out = layer(x) if run is None else run(x)
    arriving = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    wanted = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    return [out, *torch.autograd.grad(out, [x, *wanted], arriving, allow_unused=True)]


def in_two_passes(layer):
    """The same layer with its products apart, and the gated pair between them in bfloat16."""
    if isinstance(layer, nn.MoE):
        del layer.experts
    else:
        del layer.forward
    return layer


def apart(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


@pytest.mark.parametrize("make", [mlp, mixture])
def test_but_for_a_rounding_it_is_the_two_products_to_the_bit(make, monkeypatch):
    separate = gradients(in_two_passes(coded(make())))
    joint = gradients(coded(make()))
    assert all(found.dtype == wanted.dtype for found, wanted in zip(joint, separate, strict=True))
    assert 0 < max(apart(found, wanted) for found, wanted in zip(joint, separate, strict=True)) < 2**-5

    class Rounded:
        """The operators, with the pair and its gradient rounded to bfloat16 before they are coded."""

        def __getattr__(self, name):
            return getattr(ops, name)

        def swiglu_fp8_tiles(self, pair, *by):
            return ops.fp8_tiles(ops.swiglu(pair), *by)

        def swiglu_gradient_fp8_tiles(self, grad, pair, *by):
            with torch.enable_grad():
                leaf = pair.detach().requires_grad_()
                (gradient,) = torch.autograd.grad(ops.swiglu(leaf), leaf, grad)
            return ops.fp8_tiles(gradient, *by)

    monkeypatch.setattr(fp8_gated, "ops", Rounded())
    for found, wanted in zip(gradients(coded(make())), separate, strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("make", [mlp, mixture])
def test_it_follows_its_layer_as_closely_as_the_format_allows(make):
    for found, truth in zip(gradients(coded(make())), gradients(make()), strict=True):
        assert 0 < apart(found, truth) < 2**-3


@pytest.mark.parametrize(
    "around",
    [
        lambda layer: torch.compile(layer, backend="aot_eager", fullgraph=True),
        lambda layer: lambda x: checkpoint(layer, x, use_reentrant=False),
    ],
    ids=["compiled", "recomputed"],
)
def test_compiled_and_recomputed_it_is_the_same(around):
    layer = coded(mlp())
    for found, plain in zip(gradients(layer, around(layer)), gradients(layer), strict=True):
        torch.testing.assert_close(found, plain, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [["gate_up"], ["down"], ["gate_up", "down"]])
def test_what_is_frozen_gets_no_gradient_and_changes_no_other(frozen):
    layer, free = coded(mlp()), coded(mlp())
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    found, wanted = gradients(layer), gradients(free)
    kept = [0, 1] + [2 + number for number, name in enumerate(("gate_up", "down")) if name not in frozen]
    for a, b in zip(found, [wanted[number] for number in kept], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("options", [dict(bias=True), dict(activation="gelu_tanh")])
def test_other_layers_stay_two_products(options):
    layer = coded(mlp(**options))
    assert "forward" not in vars(layer)
    for found, truth in zip(gradients(layer), gradients(mlp(**options)), strict=True):
        assert 0 < apart(found, truth) < 2**-3


def test_a_hook_on_a_projection_is_called():
    layer, seen = coded(mlp()), []
    layer.down.register_forward_hook(lambda module, args, out: seen.append(args[0].shape))
    gradients(layer)
    assert seen == [(150, 144)]


@pytest.mark.parametrize("part", ["gate_up", "down"])
@pytest.mark.parametrize("kind", ["full_backward_hook", "full_backward_pre_hook", "forward_pre_hook"])
def test_hooks_of_any_kind_are_called(kind, part):
    layer, seen = coded(mlp()), []
    getattr(getattr(layer, part), f"register_{kind}")(lambda *given: seen.append(kind))
    gradients(layer)
    assert seen == [kind]


@pytest.mark.parametrize("targets", [["*.gate_up"], ["*.down"]])
@pytest.mark.parametrize("make", [mlp, mixture])
def test_beside_adapters_the_products_are_apart(make, targets, monkeypatch):
    model = Layers(make())
    add_lora(model, targets, rank=4)
    fp8.compute_in_fp8(model)
    monkeypatch.setattr(fp8_gated, "gated_in_fp8", lambda *_: pytest.fail("the adapter would have had no say"))
    gradients(model.layers[0])


def test_no_rows_are_no_error():
    assert coded(mlp())(torch.empty(2, 0, 32)).shape == (2, 0, 32)


class GatedModel(TinyModel):
    def __init__(self):
        super().__init__(hidden=16)
        self.layers = torch.nn.ModuleList([nn.MLP(16, 32), nn.Linear(16, 16, bias=False)])


def train(folder, monkeypatch, **sections):
    """What was coded in each step: the shapes of its weights."""
    made, original = [], fp8_weights.coded
    monkeypatch.setattr(fp8, "lacks_fp8", lambda device: "")
    monkeypatch.setattr(fp8_weights, "coded", lambda weight: made.append(tuple(weight.shape)) or original(weight))
    torch.manual_seed(3)
    run = dict(steps=3) | sections.pop("run", {})
    precision = dict(compute="bfloat16", fp8=True)
    trainer = Trainer(recipe(run=run, precision=precision, **sections), GatedModel(), Counting(), folder)
    trainer.run()
    return made, trainer


WEIGHTS = [(64, 16), (16, 32), (16, 16)]


def test_micro_batches_share_the_codes_of_weights(tmp_path, monkeypatch):
    made, trainer = train(tmp_path / "kept", monkeypatch, data=dict(accumulate=4))
    assert made[: 3 * len(WEIGHTS)] == 3 * WEIGHTS
    assert trainer.model.weight_codes.kept is None  # evaluation must see the weights as they are

    monkeypatch.setattr(fp8_weights.WeightCodes, "begin", lambda self: None)
    _, again = train(tmp_path / "again", monkeypatch, data=dict(accumulate=4))
    for kept, anew in zip(trainer.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(kept, anew)


def test_a_single_forward_keeps_nothing(tmp_path, monkeypatch):
    made, trainer = train(tmp_path, monkeypatch)
    assert made[: 3 * len(WEIGHTS)] == 3 * WEIGHTS
    assert trainer.model.weight_codes.kept is None


def test_a_repetition_takes_the_codes_of_its_forward(monkeypatch):
    made, original = [], fp8_weights.coded
    monkeypatch.setattr(fp8_weights, "coded", lambda weight: made.append(weight) or original(weight))
    model = Layers(mlp())
    fp8.compute_in_fp8(model)
    repeated = lambda x: checkpoint(model.layers[0], x, use_reentrant=False)
    anew = gradients(model.layers[0], repeated)
    assert len(made) == 4
    model.weight_codes.begin()
    for found, wanted in zip(gradients(model.layers[0], repeated), anew, strict=True):
        assert torch.equal(found, wanted)
    assert len(made) == 4 + 2


def test_codes_are_kept_where_they_are_asked_for_again():
    model = Layers(mlp())
    fp8.compute_in_fp8(model)
    kept = lambda **sections: kept_codes(recipe(**sections), model)
    assert kept() is None
    assert kept(data=dict(accumulate=2)) is kept(run=dict(activation_checkpointing=True)) is model.weight_codes
    assert kept(data=dict(accumulate=2), run=dict(compile="default")) is None


def test_a_weight_that_changed_is_coded_anew():
    weights, weight = fp8_weights.WeightCodes(), torch.nn.Parameter(torch.randn(16, 16))
    weights.begin()
    first = weights.of(weight)
    assert weights.of(weight) is first
    with torch.no_grad():
        weight.mul_(2)
    assert torch.equal(weights.of(weight)[1], 2 * first[1])
    weights.end()
    assert weights.of(weight) is not weights.of(weight)


def test_codes_made_for_inference_are_not_kept_for_training():
    """As where a loss asks a reference first, which has weights in common with the model."""
    model = Layers(mlp())
    fp8.compute_in_fp8(model)
    wanted = gradients(model.layers[0])
    model.weight_codes.begin()
    with torch.inference_mode():
        model.layers[0](torch.randn(3, 32))
    for found, plain in zip(gradients(model.layers[0]), wanted, strict=True):
        assert torch.equal(found, plain)


def test_a_copy_takes_the_codes_of_its_own_weights():
    """Of a copy's weight, which has got the number in memory that a weight of the original had."""
    weights, weight, other = fp8_weights.WeightCodes(), *(torch.nn.Parameter(torch.randn(16, 16)) for _ in range(2))
    weights.begin()
    weights.of(weight)
    copied = copy.deepcopy(weights)
    copied.kept[id(other)] = copied.kept.pop(id(weight))
    assert torch.equal(copied.of(other)[0].float(), fp8_weights.coded(other)[0].float())


class BreaksOff(Counting):
    def loss(self, model, batch):
        if self.drawn == 6:
            raise RuntimeError("broken off")
        return super().loss(model, batch)


def test_a_step_that_breaks_off_leaves_no_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(fp8, "lacks_fp8", lambda device: "")
    asked = recipe(run=dict(steps=3), precision=dict(compute="bfloat16", fp8=True), data=dict(accumulate=4))
    trainer = Trainer(asked, GatedModel(), BreaksOff(), tmp_path)
    with pytest.raises(RuntimeError, match="broken off"):
        trainer.run()
    assert trainer.model.weight_codes.kept is None
