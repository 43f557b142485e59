"""LoRA: nothing changes at first, only adapters learn, and merging keeps what was learned."""

import copy

import pytest
import torch

from tilestack.nn import Linear, MoE
from tilestack.nn.lora import LoRALinear, add_lora, lora_layers, lora_parameters, merge_lora, without_lora


def make_model(dtype=torch.float64):
    torch.manual_seed(0)
    layers = [torch.nn.ModuleDict(dict(qkv=Linear(6, 12, bias=True), down=Linear(12, 6, bias=False))) for _ in range(2)]
    model = torch.nn.Sequential(*(Pair(layer) for layer in layers))
    return model.to(dtype)


class Pair(torch.nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.qkv, self.down = parts["qkv"], parts["down"]

    def forward(self, x):
        return x + self.down(torch.tanh(self.qkv(x)))


def trained(model, x):
    """A few steps of gradient descent on what can be trained."""
    for _ in range(3):
        model(x).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter -= 0.05 * parameter.grad
                    parameter.grad = None


def test_an_adapted_model_first_computes_exactly_what_the_model_did():
    model, x = make_model(), torch.randn(5, 6, dtype=torch.float64)
    before, names = model(x), set(model.state_dict())
    adapted = add_lora(model, ["*.qkv"], rank=2, alpha=4)
    assert torch.equal(model(x), before)
    assert list(adapted) == ["0.qkv", "1.qkv"]
    assert set(model.state_dict()) - names == {f"{n}.qkv.lora_{m}" for n in (0, 1) for m in "AB"}


def test_only_adapters_get_gradients():
    model, x = make_model(), torch.randn(5, 6, dtype=torch.float64)
    add_lora(model, ["*"], rank=2)
    trained(model, x)
    model(x).square().sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {name for name, _ in model.named_parameters() if "lora_" in name}
    assert all(parameter.grad.abs().sum() > 0 for parameter in model.parameters() if parameter.grad is not None)


def test_merging_keeps_what_was_learned_and_gives_plain_layers_back():
    model, x = make_model(), torch.randn(5, 6, dtype=torch.float64)
    before, names = model(x).detach(), set(model.state_dict())
    add_lora(model, ["*"], rank=3, alpha=6)
    trained(model, x)
    learned = model(x).detach()
    assert (learned - before).abs().max() > 1e-3
    layer = model[0].qkv
    with without_lora(model):
        torch.testing.assert_close(model(x), before, rtol=0, atol=0)
        assert layer.adapted_weight is layer.weight
    torch.testing.assert_close(model(x), learned, rtol=0, atol=0)
    assert not torch.equal(layer.adapted_weight, layer.weight)
    layer.base = layer.base  # as who computes it in another way does
    merge_lora(model)
    torch.testing.assert_close(model(x), learned, rtol=1e-12, atol=1e-12)
    assert set(model.state_dict()) == names
    assert all(type(layer.qkv) is Linear and "base" not in vars(layer.qkv) for layer in model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_a_model_without_its_adapter_stays_so_until_the_outermost_asks_no_more():
    model, x = make_model(), torch.randn(5, 6, dtype=torch.float64)
    before = model(x).detach()
    add_lora(model, ["*"], rank=3)
    trained(model, x)
    with without_lora(model):
        with without_lora(model):
            pass
        assert torch.equal(model(x), before)
    assert not torch.equal(model(x), before)


def test_the_adapter_is_the_formula():
    layer = torch.nn.Sequential(Linear(4, 3, bias=True).double())
    add_lora(layer, ["0"], rank=2, alpha=5)
    with torch.no_grad():
        layer[0].lora_B.normal_()
    x = torch.randn(7, 4, dtype=torch.float64)
    expected = x @ (layer[0].weight + 2.5 * layer[0].lora_B @ layer[0].lora_A).T + layer[0].bias
    torch.testing.assert_close(layer(x), expected)


def test_dropout_is_of_the_adapter_alone_and_only_in_training():
    model, x = make_model(), torch.randn(5, 6, dtype=torch.float64)
    before = model(x)
    add_lora(model, ["*"], rank=2, dropout=0.5)
    assert torch.equal(model(x), before)  # whatever is dropped, B is zero
    trained(model, x)
    assert not torch.equal(model(x), model(x))
    model.eval()
    assert torch.equal(model(x), model(x))


def test_half_precision_layers_have_wide_adapters():
    model = make_model(torch.bfloat16)
    add_lora(model, ["*"], rank=2)
    assert {parameter.dtype for parameter in model.parameters() if parameter.requires_grad} == {torch.float32}
    assert model(torch.randn(5, 6, dtype=torch.bfloat16)).dtype == torch.bfloat16


def test_autocast_reaches_the_adapter():
    model = make_model(torch.float32)
    add_lora(model, ["*.qkv"], rank=2)
    with torch.autocast("cpu", torch.bfloat16):
        out = model[0].qkv(torch.randn(5, 6))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert model[0].qkv.lora_B.grad.dtype == torch.float32


def test_a_copy_is_adapted_too():
    model, x = make_model(), torch.randn(5, 6, dtype=torch.float64)
    add_lora(model, ["*"], rank=2)
    trained(model, x)
    twin = copy.deepcopy(model)
    assert all(isinstance(layer, LoRALinear) for layer in lora_layers(twin).values())
    assert torch.equal(twin(x), model(x))


def test_dropout_of_experts_is_in_training_alone():
    model, x = mixture(), torch.randn(9, 6, dtype=torch.float64)
    add_lora(model, ["mlp.gate_up", "mlp.down"], rank=2, dropout=0.5)
    trained(model["mlp"], x)
    assert not torch.equal(model["mlp"](x), model["mlp"](x))
    model.eval()
    assert torch.equal(model["mlp"](x), model["mlp"](x))


def mixture(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.ModuleDict({"mlp": MoE(6, 5, experts=4, top_k=2, shared_intermediate=3)}).to(dtype)


def test_experts_are_adapted_each_by_its_own():
    model, x = mixture(), torch.randn(9, 6, dtype=torch.float64)
    before, names = model["mlp"](x), set(model.state_dict())
    adapters = add_lora(model, ["mlp.*"], rank=2, alpha=3)
    assert (
        set(adapters) == {"mlp.gate_up", "mlp.down", "mlp.shared.gate_up", "mlp.shared.down"} == set(lora_layers(model))
    )
    assert torch.equal(model["mlp"](x), before)
    spreads = torch.stack([adapters[f"mlp.{name}"].lora_A.std((1, 2)) for name in ("gate_up", "down")])
    assert spreads.min() > 0.1, "every expert's A is drawn"
    trained(model["mlp"], x)
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert with_gradient == {name for name, _ in lora_parameters(model)} == set(model.state_dict()) - names
    learned = model["mlp"](x)
    assert (learned - before).abs().max() > 1e-3
    with without_lora(model):
        assert torch.equal(model["mlp"](x), before)
    by_hand = copy.deepcopy(model)
    with without_lora(by_hand), torch.no_grad():
        for name in ("gate_up", "down"):
            adapter, weight = getattr(model["mlp"], f"{name}_lora"), getattr(by_hand["mlp"], name)
            for expert in range(4):
                weight[expert] += 3 / 2 * adapter.lora_B[expert] @ adapter.lora_A[expert]
            for part in (getattr(by_hand["mlp"].shared, name),):
                part.weight += 3 / 2 * part.lora_B @ part.lora_A
        torch.testing.assert_close(by_hand["mlp"](x), learned)
    merge_lora(model)
    torch.testing.assert_close(model["mlp"](x), learned)
    assert set(model.state_dict()) == names


def test_adapters_of_experts_learn_under_autocast_and_in_half_precision():
    model = mixture(torch.bfloat16)
    add_lora(model, ["mlp.gate_up", "mlp.down"], rank=2)
    assert {parameter.dtype for _, parameter in lora_parameters(model)} == {torch.float32}
    out = model["mlp"](torch.randn(9, 6, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    wide = mixture(torch.float32)
    add_lora(wide, ["mlp.down"], rank=2)
    with torch.autocast("cpu", torch.bfloat16):
        wide["mlp"](torch.randn(9, 6)).float().sum().backward()
    assert wide["mlp"].down_lora.lora_B.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(targets=["*.kqv"]), "no linear layer is named .*kqv; their names end in down, qkv"),
        (dict(targets=[]), "at least one pattern"),
        (dict(targets=["*"], rank=0), "rank ≥ 1, alpha > 0 and 0 ≤ dropout < 1, not 0, 16 and 0"),
        (dict(targets=["*"], dropout=1.0), "dropout < 1, not 8, 16 and 1"),
    ],
)
def test_bad_input_leaves_the_model_as_it_was(arguments, message):
    model = make_model()
    with pytest.raises(ValueError, match=message):
        add_lora(model, **arguments)
    assert not lora_layers(model)
    assert all(parameter.requires_grad for parameter in model.parameters())


def test_adapters_are_not_put_on_adapters():
    model = make_model()
    add_lora(model, ["*.qkv"])
    with pytest.raises(ValueError, match="merge_lora first"):
        add_lora(model, ["*.down"])
