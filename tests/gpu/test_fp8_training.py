"""Dense layers in fp8: the three products of one, and a stack of them trained beside the same stack in bfloat16."""

import functools

import pytest
import torch

import tilestack
from tilestack.lab.training.parity import fp8_parity, new_model
from tilestack.train import Loss, Recipe, fp8
from tilestack.train.next_token import loss_of_labels
from tilestack.train.settings import read

STEPS, WORDS = 12, 256
SMALL = dict(
    model_type="qwen3", vocab_size=WORDS, hidden_size=256, intermediate_size=512, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64, max_position_embeddings=256, tie_word_embeddings=True,
)  # fmt: skip


class OneBatch:
    """The same random tokens in every step, which a model learns by heart."""

    def __init__(self, device):
        self.device = torch.device(device)
        self.ids = torch.randint(WORDS, (4, 65), generator=torch.Generator().manual_seed(0)).to(device)

    def next_batch(self):
        return self.ids

    def loss(self, model, ids):
        return Loss(loss_of_labels(model, model.hidden(ids[:, :-1]), ids[:, 1:]), ids[:, 1:].numel())


@pytest.fixture(params=["triton", "gluon"])
def product(request):
    """Products in fp8 by one backend."""
    capability = torch.cuda.get_device_capability()
    if capability < (8, 9) or (request.param == "gluon" and capability[0] != 9):
        pytest.skip(f"fp8 on {request.param} needs another GPU than one of compute capability {capability}")
    with tilestack.backend(linear_fp8=request.param):
        yield


def test_the_products_of_a_dense_layer_follow_it(product):
    torch.manual_seed(0)
    layer = torch.nn.Linear(384, 528, bias=False, device="cuda")
    x = torch.randn(5, 77, 384, device="cuda", requires_grad=True)
    arriving = torch.randn(5, 77, 528, device="cuda")
    exact, coded = (
        [out, *torch.autograd.grad(out, (x, layer.weight), arriving.to(out.dtype))]
        for out in (layer(x), fp8.linear(layer, x))
    )
    for found, truth in zip(coded, exact, strict=True):
        # Both operands of a product have 3 bits after the point, so each is off by 2⁻⁴ at most.
        assert 0 < (found.float() - truth).norm() / truth.norm() < 2**-3


def stack_beside_bfloat16(device):
    recipe = read(
        Recipe,
        {
            "run": {"device": device, "steps": STEPS}, "model": {"config": SMALL}, "optimizer": {"lr": 2e-3},
            "schedule": {"name": "constant"}, "precision": {"compute": "bfloat16"},
        },
    )  # fmt: skip
    return fp8_parity(recipe, functools.partial(new_model, recipe, WORDS), OneBatch(device), STEPS)


def test_a_stack_in_fp8_trains_like_one_in_bfloat16(product):
    """How far the losses may part is what runs in bfloat16 do whose weights start a unit of e4m3 off."""
    found = stack_beside_bfloat16("cuda")
    assert found.broken_at is None, f"{found.worst:.0%} of what is allowed"
    assert found.candidate != found.reference
    assert found.candidate[-1] < found.candidate[0] / 2
