"""Loss parity agrees for kernels that are right, and bites for one that is a little wrong."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.cli import main
from tilestack.contract import implements
from tilestack.lab.training.parity import Parity, allowed_differences, fp8_parity, new_model, nudged_weights, parity
from tilestack.train import Loss, Recipe, fp8_product
from tilestack.train.settings import read

TINY = {
    "model_type": "llama", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "tie_word_embeddings": True, "max_position_embeddings": 16,
}  # fmt: skip


class RandomTokens:
    device = torch.device("cpu")
    drawn = 0

    def next_batch(self):
        self.drawn += 1
        return torch.randint(40, (2, 8), generator=torch.Generator().manual_seed(self.drawn))

    def loss(self, model, ids):
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        total = ops.linear_cross_entropy(model.hidden(ids), model.head_weight, labels, reduction="sum")
        return Loss(total, 14)


def tiny(**precision):
    sections = {"run": {"device": "cpu", "steps": 100}, "model": {"config": TINY}, "optimizer": {"lr": 0.01}}
    return read(Recipe, sections | {"precision": precision})


def run(steps, name, swap=()):
    recipe = tiny()
    return parity(recipe, lambda: new_model(recipe, 40), RandomTokens(), steps, name, swap)


def run_fp8(steps, starts=1):
    recipe = tiny(compute="bfloat16")
    return fp8_parity(recipe, lambda: new_model(recipe, 40), RandomTokens(), steps, starts)


def test_fp8_follows_bfloat16():
    found = run_fp8(8)
    assert (found.name, found.against, found.broken_at) == ("fp8", "bfloat16", None)
    assert 0 < max(found.differences) < 0.05


def test_a_gradient_lost_in_fp8_is_caught(monkeypatch):
    monkeypatch.setattr(fp8_product, "gradient_of_weight", lambda grad, x, offsets: product_of(grad, x).neg())
    product_of = lambda grad, x: fp8_product.product(*grad, *x, None)
    assert run_fp8(8).broken_at is not None


def test_both_are_trained_from_each_start():
    one, several = run_fp8(2), run_fp8(2, starts=5)
    assert len(one.ends) == 1
    assert len(several.ends) == 5
    assert several.ends[0] == one.ends[0] == (one.reference[-1], one.candidate[-1])
    assert several.bound == one.bound  # more starts do not widen it
    assert len({end for pair in several.ends for end in pair}) == 10


def test_fp8_is_held_against_a_recipe_without_it():
    recipe = tiny(compute="bfloat16", fp8=True)
    with pytest.raises(ValueError, match=r"set precision\.fp8 = false"):
        fp8_parity(recipe, lambda: new_model(recipe, 40), RandomTokens(), 1)


def test_a_kernel_swapped_alone_follows_the_definitions():
    found = run(3, "triton", ["add_rms_norm", "rms_norm"])
    assert found.broken_at is None
    assert found.name == "add_rms_norm, rms_norm on triton"
    assert max(found.differences) < 1e-4 < abs(found.reference[0] - found.reference[2])


def test_a_gradient_that_is_a_little_wrong_is_caught(outside):
    def almost(x, residual, weight, eps):
        normal, total = ops.add_rms_norm.definition(x, residual, weight, eps)
        return normal + 0.001 * (normal.detach() - normal), total  # the values are right, the gradient is not

    implements(ops.add_rms_norm, backend="planted", backward=contract.AUTOGRAD)(almost)
    found = run(6, "planted", ["add_rms_norm"])
    assert found.differences[0] < found.bound[0]  # the first loss comes before any gradient
    assert found.broken_at is not None
    assert found.worst > 1


def test_an_operator_without_that_backend_is_named(outside):
    with pytest.raises(ValueError, match=r"rms_norm has no gluon backend; these have: .*attention"):
        run(1, "gluon", ["rms_norm"])
    with pytest.raises(ValueError, match="no operator has a nowhere backend"):
        run(1, "nowhere")


def test_the_bound_grows_with_what_equally_right_runs_differ_by():
    found = allowed_differences([1.0, 1.0, 1.0], [[1.0, 1.5, 1.25], [1.0, 0.75, 1.0]])
    assert found == pytest.approx([4 * torch.finfo(torch.float32).eps, 2.0, 2.0])
    assert Parity("x", [1.0, 1.0], [1.0, float("nan")], [1.0, 1.0]).broken_at == 2


def test_nudging_moves_every_weight_by_one_unit():
    weights = {"w": torch.tensor([1.0, -2.0, 8.0]), "n": torch.tensor([3])}
    moved = nudged_weights(weights, 2**-8, 0)
    assert torch.equal((moved["w"] / weights["w"] - 1).abs(), torch.full((3,), 2**-8))
    assert torch.equal(moved["n"], weights["n"])


def test_starts_are_for_fp8(capsys, outside):
    with pytest.raises(SystemExit) as ended:
        main(["parity", "--device", "cpu", "--starts", "2"])
    assert ended.value.code == 1
    assert "--starts is for --fp8" in capsys.readouterr().err


def test_the_command_draws_a_page_and_ends_with_the_verdict(tmp_path, capsys, outside):
    page = tmp_path / "parity.html"
    sizes = ["data.most_bytes=30000", "data.vocabulary=260", "model.config.num_hidden_layers=1"]
    arguments = ["parity", "--device", "cpu", "--steps", "1", "--swap", "swiglu", "--output", str(page)]
    with pytest.raises(SystemExit) as ended:
        main([*arguments, *(f"--set={size}" for size in sizes)])
    assert ended.value.code == 0
    assert "swiglu on triton: agrees over 1 steps" in capsys.readouterr().out
    assert "The curves agree" in page.read_text(encoding="utf-8")
