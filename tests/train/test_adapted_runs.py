"""Adapters beside what else a run may ask for: the head, fp8 and Muon."""

import pytest
import torch
from small import decoder, recipe

from tilestack import models
from tilestack.nn.lora import LoRALinear, add_lora, lora_parameters, merge_lora, without_lora
from tilestack.train import fp8
from tilestack.train.align.sft import SFTRecipe
from tilestack.train.evaluation.log_probs import Scored, in_rows, log_probs
from tilestack.train.optimizers import make_optimizer

IDS = torch.randint(200, (2, 16), generator=torch.Generator().manual_seed(0))


def untied():
    torch.manual_seed(0)
    return models.Decoder(models.ModelConfig(97, 16, 32, layers=2, heads=2, kv_heads=1, head_dim=16))


def test_an_adapter_of_the_head_has_a_say_in_logits_and_losses():
    model, ids = untied(), IDS % 97
    add_lora(model, ["head"], rank=2)
    with torch.no_grad():
        model.head.lora_B.normal_()
    rows = in_rows([Scored(row.tolist(), [1] * 16) for row in ids])
    logits, scores = model(ids), log_probs(model, rows)
    expected = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(scores[:, :15], expected)
    torch.testing.assert_close(logits, model.head(model.hidden(ids)))
    (-scores.sum()).backward()
    assert all(parameter.grad.abs().sum() > 0 for _, parameter in lora_parameters(model))
    with without_lora(model):
        assert not torch.allclose(model(ids), logits)
    merge_lora(model)
    torch.testing.assert_close(model(ids), logits)


def in_fp8(model, monkeypatch):
    """The CPU taken for a GPU that has fp8; its products are PyTorch's own."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    fp8.use_fp8(model, torch.device("cuda"))


def test_fp8_leaves_adapters_in_place(monkeypatch):
    wide, model = decoder(), decoder()
    for each in (wide, model):
        add_lora(each, ["layers.*"], rank=4)
        torch.manual_seed(1)
        with torch.no_grad():
            for _, parameter in lora_parameters(each):
                parameter.normal_(0, 0.3)
    in_fp8(model, monkeypatch)
    layers = [module for module in model.modules() if isinstance(module, LoRALinear)]
    assert all("base" in vars(layer) for layer in layers)
    x = torch.randn(3, layers[0].in_features)
    twin = next(module for module in wide.modules() if isinstance(module, LoRALinear))
    with without_lora(model), without_lora(wide):
        base, exact = layers[0](x).float(), twin(x)
    torch.testing.assert_close(base, exact, rtol=0.1, atol=0.1 * float(exact.abs().max()))
    assert not torch.equal(base, exact)  # it is fp8
    adapter = layers[0](x).float() - base
    torch.testing.assert_close(adapter, twin(x) - exact, rtol=0.05, atol=0.05 * float(adapter.detach().abs().max()))
    model(IDS).float().square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for _, parameter in lora_parameters(model))
    assert all(layer.weight.grad is None for layer in layers)
    merge_lora(model)
    assert not any("base" in vars(layer) for layer in layers)


@pytest.mark.parametrize("targets", [["layers.*"], []])
def test_muon_takes_adapters_alone_and_whole_models(targets):
    model = decoder()
    if targets:
        add_lora(model, targets, rank=2)
    settings = recipe(SFTRecipe, optimizer={"name": "muon"})
    optimizer = make_optimizer(model, settings.optimizer, settings.precision, 0)
    assert all(group["params"] for group in optimizer.param_groups)
    before = [parameter.clone() for parameter in model.parameters() if parameter.requires_grad]
    model(IDS).square().sum().backward()
    optimizer.step()
    after = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=True))
    optimizer.load_state_dict(optimizer.state_dict())
