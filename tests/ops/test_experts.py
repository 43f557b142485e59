"""Rows between tokens and experts, against lists sorted by Python, and what is no place."""

import pytest
import torch

from tilestack import backend, contract, ops
from tilestack.kernels.memory.experts import combined, dispatched

either = pytest.mark.parametrize("chosen_backend", ["torch", "triton"])


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def choices(tokens, experts, k):
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(tokens)).argsort(1)[:, :k]


@either
@pytest.mark.parametrize(("tokens", "experts", "k"), [(300, 5, 2), (70, 64, 8), (3, 9, 1)])
def test_copies_are_sorted_by_expert_then_token(chosen_backend, tokens, experts, k):
    """More choices than a block holds, and experts that nobody chose."""
    chosen = choices(tokens, experts, k)
    with backend(expert_places=chosen_backend):
        places, offsets = ops.expert_places(chosen, experts)
    flat = chosen.flatten().tolist()
    order = sorted(range(len(flat)), key=lambda copy: (flat[copy], copy))
    assert [order.index(copy) for copy in range(len(flat))] == places.flatten().tolist()
    assert offsets.tolist() == [sum(other <= expert for other in flat) for expert in range(experts)]
    assert offsets.dtype == torch.int32


@either
def test_there_and_back_is_the_weighted_sum(chosen_backend):
    x, weights = drawn(9, 40), drawn(9, 3, seed=1)
    with backend(expert_places=chosen_backend, dispatch_rows=chosen_backend, combine_rows=chosen_backend):
        places, _ = ops.expert_places(choices(9, 6, 3), 6)
        rows = ops.dispatch_rows(x, places)
        back = ops.combine_rows(rows, weights, places)
    for token in range(9):
        assert torch.equal(rows[places[token]], x[token].expand(3, -1))
    torch.testing.assert_close(back, x * weights.sum(1, keepdim=True))


def test_a_kernel_reads_and_writes_nothing_at_what_is_no_place():
    places = torch.tensor([[0, -1], [7, 2]])
    rows = dispatched(drawn(2, 8), places)
    assert torch.equal(rows[[0, 2]], drawn(2, 8))
    assert torch.equal(combined(drawn(4, 8), None, places), drawn(4, 8)[[0, 2]])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.expert_places(torch.tensor([[0, 3]]), 3), r"chosen\[0, 1\] is 3, which names none of 3 rows"),
        (lambda: ops.expert_places(torch.tensor([0, 1]), 3), r"chosen must be int64 \[tokens, K\]"),
        (lambda: ops.dispatch_rows(drawn(2, 4), torch.tensor([[0, 1], [1, 2]])), "must name each of 4 rows once"),
        (lambda: ops.dispatch_rows(drawn(3, 4), torch.tensor([[0, 1]])), r"x is \[tokens, columns\] and places"),
        (lambda: ops.combine_rows(drawn(3, 4), drawn(1, 2), torch.tensor([[0, 1]])), "a row for each of the 2 places"),
        (lambda: ops.combine_rows(drawn(2, 4), drawn(2, 1), torch.tensor([[0, 1]])), "a number for each of the places"),
    ],
)
def test_what_does_not_fit_is_said(call, message):
    contract.check_values(True)  # as on CPUs without the interpreter
    with pytest.raises((ValueError, IndexError), match=message):
        call()
