"""Experts and the head in fp8: the three products of each, beside adapters, under a compiler, recomputed and in chunks."""

from types import SimpleNamespace

import pytest
import torch
from small import decoder, recipe
from torch.utils.checkpoint import checkpoint

from tilestack import models, nn, ops
from tilestack.kernels.loss import linear_cross_entropy
from tilestack.nn.lora import ExpertLoRA, add_lora, lora_parameters
from tilestack.train import RecipeError, fp8, fp8_head
from tilestack.train.align.dpo import DPORecipe
from tilestack.train.align.kinds import align
from tilestack.train.next_token import next_token_loss
from tilestack.train.recipe import Precision


class Model(torch.nn.Module):
    def __init__(self, intermediate=48):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList([nn.MoE(32, intermediate, experts=4, top_k=2, shared_intermediate=16)])

    def forward(self, x):
        return self.layers[0](x)


def in_fp8(**sizes):
    model = Model(**sizes)
    fp8.compute_in_fp8(model)
    return model


def tokens():
    return torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)


def gradients(model, x, run=None):
    out = model(x) if run is None else run(x)
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(out, [x, *wanted], torch.ones_like(out), allow_unused=True)
    return [out, *grads]


def apart(a, b):
    return ((a.float() - b.float()).norm() / b.float().norm()).item()


def test_experts_follow_their_layer_as_closely_as_the_format_allows():
    exact, coded = gradients(Model(), tokens()), gradients(in_fp8(), tokens())
    assert all(found.dtype == truth.dtype for found, truth in zip(coded[1:], exact[1:], strict=True))
    differences = [apart(found, truth) for found, truth in zip(coded, exact, strict=True)]
    assert 0 < max(differences) < 2**-3  # e4m3 has 3 bits after the point, and errors average out
    assert not torch.equal(coded[0].float(), exact[0])


def test_rounding_to_codes_adds_noise_and_takes_nothing_away():
    """All three products are as long as the exact ones along these, so training is neither slowed nor sped up. Nearly: what
    is rounded to nearest loses the square of its error."""
    torch.manual_seed(0)
    x, weight = torch.randn(384, 256, requires_grad=True), torch.randn(256, 256, requires_grad=True)
    arriving = torch.randn(384, 256) * torch.rand(384, 1).square()  # rows of all sizes, as a loss sends them
    exact, coded = (
        [out, *torch.autograd.grad(out, (x, weight), arriving.to(out.dtype))]
        for out in (x @ weight.T, fp8.in_fp8(x, weight))
    )
    for found, truth in zip(coded, exact, strict=True):
        along = (found.double() * truth.double()).sum() / truth.double().square().sum()
        assert 0.01 < apart(found, truth) < 2**-4
        assert abs(along.item() - 1) < 2 * apart(found, truth) ** 2


def test_experts_beside_an_adapter_are_frozen_and_it_learns():
    model = Model()
    add_lora(model, ["layers.*.gate_up", "layers.*.down"], rank=4)
    fp8.compute_in_fp8(model)
    assert sum(isinstance(module, ExpertLoRA) for module in model.modules()) == 2
    model(tokens()).square().sum().backward()
    assert model.layers[0].gate_up.grad is None
    assert all(parameter.grad is not None for _, parameter in lora_parameters(model))


@pytest.mark.parametrize(
    "around",
    [
        lambda model: torch.compile(model, backend="aot_eager", fullgraph=True),
        lambda model: lambda x: checkpoint(model, x, use_reentrant=False),
    ],
    ids=["compiled", "recomputed"],
)
def test_compiled_and_recomputed_experts_are_the_same(around):
    model = in_fp8()
    plain, found = gradients(model, tokens()), gradients(model, tokens(), around(model))
    for a, b in zip(found, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_sizes_that_tensor_cores_do_not_take_stay_as_they_are():
    model = in_fp8(intermediate=40)  # two of 40 are a multiple of 16, one is not
    assert "base_product" not in vars(model.layers[0])
    assert "forward" in vars(model.layers[0].shared.down)


@pytest.mark.parametrize("softcap", [0.0, 5.0])
@pytest.mark.parametrize("rows", [130, 300])
def test_the_head_and_its_loss_are_close_in_any_number_of_chunks(monkeypatch, softcap, rows):
    monkeypatch.setattr(linear_cross_entropy, "CHUNK_BYTES", 48 * 128)  # 128 rows
    torch.manual_seed(0)
    x, weight = torch.randn(2, rows // 2, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    labels = torch.randint(48, (2, rows // 2))
    labels[0, :40] = -100
    exact = ops.linear_cross_entropy(x, weight, labels, softcap=softcap, reduction="sum")
    found = fp8_head.head_loss(x, weight, labels, softcap)
    assert found.dtype == torch.float32
    assert 0 < abs(found.item() / exact.item() - 1) < 0.02
    wanted = torch.autograd.grad(exact / 7, [x, weight])
    for made, truth in zip(torch.autograd.grad(found / 7, [x, weight]), wanted, strict=True):
        assert made.shape == truth.shape
        assert 0 < apart(made, truth) < 2**-3
    assert not torch.autograd.grad(fp8_head.head_loss(x, weight, labels), x)[0][0, :40].any()


def test_the_scalar_that_arrives_at_the_head_is_not_rounded_to_its_dtype():
    """1 / 60000 is 0.2% off in bfloat16, and every gradient of a run was with it."""
    torch.manual_seed(0)
    x, weight = (torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((40, 32), (48, 32)))
    labels, count = torch.randint(48, (40,)), torch.tensor(60000.0)
    ones = torch.autograd.grad(fp8_head.head_loss(x, weight, labels), [x, weight])
    scaled = torch.autograd.grad(fp8_head.head_loss(x, weight, labels) / count, [x, weight])
    for one, found in zip(ones, scaled, strict=True):
        assert torch.equal(found, (one.float() * (1 / count)).bfloat16())


def test_a_frozen_head_and_no_gradient_at_all():
    x, weight, labels = torch.randn(3, 32, requires_grad=True), torch.randn(48, 32), torch.tensor([1, 2, 47])
    fp8_head.head_loss(x, weight, labels).backward()
    assert x.grad.abs().sum() > 0
    with torch.no_grad():
        assert fp8_head.head_loss(x, weight, labels).item() > 0


def test_a_head_over_no_rows_has_no_loss_and_gradients_of_zero():
    x, weight = torch.randn(0, 32, requires_grad=True), torch.randn(48, 32, requires_grad=True)
    loss = fp8_head.head_loss(x, weight, torch.zeros(0, dtype=torch.int64))
    loss.backward()
    assert loss.item() == 0
    assert x.grad.shape == (0, 32)
    assert torch.equal(weight.grad, torch.zeros(48, 32))


def test_the_head_is_taken_where_it_is_asked_for_and_its_sizes_are_named():
    model = decoder()
    fp8.compute_in_fp8(model)
    assert "head_loss" not in vars(model)
    with pytest.raises(ValueError, match=r"multiples of 16, not \(280, 16\); set precision\.fp8_head = false"):
        fp8.compute_in_fp8(model, head=True)
    with pytest.raises(RecipeError, match=r"precision\.fp8_head is for runs with precision\.fp8"):
        Precision(fp8_head=True)


def test_a_comparison_of_log_probabilities_refuses_the_head(tmp_path):
    settings = recipe(DPORecipe, precision={"compute": "bfloat16", "fp8": True, "fp8_head": True})
    with pytest.raises(RecipeError, match=r"precision\.fp8_head is for train and sft: dpo compares log-probabilities"):
        align("dpo", settings, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_pretraining_takes_the_head_in_fp8():
    torch.manual_seed(0)
    model = models.Decoder(models.ModelConfig(96, 16, 32, layers=1, heads=2, kv_heads=1, head_dim=16))
    ids = torch.randint(96, (1, 12))
    batch = SimpleNamespace(ids=ids, positions=None, cu_seqlens=None, labels=ids)
    exact = next_token_loss(model, batch).item()
    fp8.compute_in_fp8(model, head=True)
    found = next_token_loss(model, batch)
    found.backward()
    assert 0 < abs(found.item() / exact - 1) < 0.05
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_no_tokens_are_no_error():
    assert in_fp8()(torch.empty(0, 32)).shape == (0, 32)


@pytest.mark.parametrize("head", [False, True])
def test_a_second_derivative_is_refused(head):
    """It was that of the codes' definitions, or zero, and silently so."""
    x, weight = torch.randn(8, 32, requires_grad=True), torch.randn(16, 32, requires_grad=True)
    out = fp8_head.head_loss(x, weight, torch.arange(8)) if head else fp8.in_fp8(x, weight).float()
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice a function that was marked with @once_differentiable"):
        gradient.square().sum().backward()
