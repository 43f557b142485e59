"""The embedding's edges: ids outside the vocabulary, the padding row, and runs longer than a tile."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch
import torch.nn.functional as F

from tilestack import contract, ops
from tilestack.kernels.memory import embedding as lookup
from tilestack.kernels.memory.embedding import OTHERS, TILE


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_id_outside_the_vocabulary_is_a_row_of_nan_without_gradient(backend):
    ids, weight = torch.tensor([[2, -1, 5], [4, 0, 2**40]]), torch.randn(5, 6, requires_grad=True)
    with contract.backend(backend):
        out = ops.embedding(ids, weight)
        out.nan_to_num().sum().backward()
    assert torch.equal(out.isnan().all(-1), (ids < 0) | (ids >= 5))
    assert torch.equal(weight.grad, torch.tensor([1.0, 0, 1, 0, 1])[:, None].expand(5, 6))


@pytest.mark.parametrize("run", [1, TILE - 1, TILE, 2 * TILE - 2, 5 * TILE + 3])
@pytest.mark.parametrize("before", [0, 1, TILE - 1])
def test_runs_of_any_length_and_start_are_summed_exactly(run, before):
    """Small integers add up exactly in float32, so every order of summation gives PyTorch's gradient."""
    ids = torch.cat((torch.full((before,), 1), torch.full((run,), 2), torch.full((3,), 4)))
    ids = ids[torch.randperm(len(ids))]
    grad, weight = torch.randint(-8, 9, (len(ids), 3)).float(), torch.zeros(6, 3, requires_grad=True)
    with contract.backend("triton"):
        ops.embedding(ids, weight, padding_idx=4).backward(grad)
    (expected,) = torch.autograd.grad(F.embedding(ids, weight, padding_idx=4), weight, grad)
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("counted", [lookup.COUNTED, 0], ids=["counted", "sorted"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_tokens_are_sorted_by_id_and_then_by_place(monkeypatch, counted, dtype):
    monkeypatch.setattr(lookup, "COUNTED", counted)
    ids = torch.randint(-3, 9, (2, OTHERS + 20), dtype=dtype)  # three blocks of others, the last not full
    ordered, order, dweight = lookup.sorted_and_zeros(ids, torch.ones(6, 3))
    expected = torch.sort(ids.flatten().clamp(-1, 6), stable=True)
    assert torch.equal(ordered, expected.values.int())
    assert torch.equal(order, expected.indices.to(order.dtype))
    assert torch.equal(dweight, torch.zeros(6, 3))


def test_wrong_arguments_are_explained():
    with pytest.raises(ValueError, match="int32 or int64"):
        ops.embedding(torch.zeros(3), torch.zeros(4, 2))
    with pytest.raises(ValueError, match="0 to 3, not 7"):
        ops.embedding(torch.zeros(3, dtype=torch.int64), torch.zeros(4, 2), padding_idx=7)
