"""Processes that share a model or its texts compute, step for step, what one process does that has all of it."""

import pytest
import torch
from ranks import run_ranks
from small_runs import alone, decoder, together

from tilestack.parallel.placement import Placement

DENSE = ["llama3", "qwen2", "qwen3", "llama_biased", "gemma2"]
MIXED = ["qwen3_moe"]
# What float64 may lose: a few thousand additions in another order, each off by half a unit in the last place at most.
SLACK = 2**12 * torch.finfo(torch.float64).eps


@pytest.mark.parametrize(
    ("world", "parallel", "accumulate", "checkpointing", "layers", "families"),
    [
        (2, {}, 1, False, 0, [*DENSE, *MIXED]),
        (2, {"shard": True}, 2, True, 0, [*DENSE, *MIXED]),
        (2, {"tensor": 2}, 2, False, 0, DENSE),
        (4, {"tensor": 2, "shard": True}, 1, True, 0, ["qwen3", "llama_biased"]),
        (4, {"tensor": 2}, 2, True, 0, ["qwen2"]),
        (2, {"pipeline": 2}, 3, False, 5, ["llama3", "llama_biased", "gemma2"]),
        (4, {"pipeline": 4, "schedule": "gpipe"}, 3, True, 5, ["gemma2"]),
        (2, {"pipeline": 2, "schedule": "interleaved"}, 4, True, 5, ["gemma2"]),
        (4, {"pipeline": 2, "shard": True}, 3, True, 5, ["gemma2"]),
        (4, {"pipeline": 2, "shard": True, "schedule": "gpipe"}, 3, False, 5, ["qwen3"]),
        (4, {"pipeline": 2}, 2, False, 5, ["gemma2"]),
        (4, {"pipeline": 2, "tensor": 2}, 3, False, 3, ["qwen3", "gemma2"]),
        (2, {"expert": 2}, 2, True, 0, [*MIXED, "deepseek_v2_lite"]),
        (4, {"expert": 2}, 1, False, 0, MIXED),
        (4, {"expert": 2, "shard": True}, 2, True, 0, MIXED),
    ],
    ids=[
        "data",
        "sharded",
        "tensor",
        "tensor and sharded",
        "tensor and data",
        "stages",
        "stages by gpipe",
        "stages interleaved",
        "stages and sharded",
        "stages by gpipe and sharded",
        "stages and data",
        "stages and tensor",
        "experts",
        "experts and data",
        "experts and sharded",
    ],
)
def test_processes_train_as_one(tmp_path, world, parallel, accumulate, checkpointing, layers, families):
    ranks = run_ranks(together, world, tmp_path, families, parallel, accumulate, checkpointing, layers)
    readers = world // parallel.get("tensor", 1) // parallel.get("pipeline", 1)
    for family in families:
        expected = alone(family, readers * accumulate, layers)
        found = {name.removeprefix(f"{family}: "): x for name, x in ranks[0].items() if name.startswith(f"{family}: ")}
        assert found.keys() == expected.keys()
        for name, x in expected.items():
            # Figures are kept in float32, and are sums of those of a few micro-batches.
            slack = SLACK if name != "figures" else 4 * torch.finfo(torch.float32).eps
            error = (found[name] - x).abs().max() / x.abs().max().clamp(min=1e-30)
            assert error < slack, f"{family}: {name} differs by {float(error):.3g}"
        assert float(expected["figures"][:, 0].std()) > 1e-3  # it has learned, or there would be nothing to compare
        for other in ranks[1:]:
            for name in ("figures", "logits"):
                assert torch.equal(other[f"{family}: {name}"], ranks[0][f"{family}: {name}"])


def test_a_norm_without_a_bound_changes_no_gradient_and_is_not_summed_in_half_precision():
    model = decoder("qwen3").bfloat16()
    numbers = torch.Generator().manual_seed(0)
    for param in model.parameters():
        param.grad = torch.randn(param.shape, generator=numbers).bfloat16()
    before = [param.grad.clone() for param in model.parameters()]
    norm = Placement(model).clip(0)
    exact = torch.cat([grad.flatten() for grad in before]).double().norm()
    assert norm.dtype == torch.float32
    assert float(norm) == pytest.approx(float(exact), rel=1e-5)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))
