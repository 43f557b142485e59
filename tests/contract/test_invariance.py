"""The batch-invariant mode: only what promises the same bits for a row in any batch runs in it."""

import pytest
import torch

from tilestack import batch_invariant, contract, ops
from tilestack.contract import backend

X = torch.randn(5, 33)


def test_what_promises_it_gives_a_row_the_same_bits_alone_and_in_a_batch():
    with batch_invariant(), backend("triton"):
        together = ops.softmax(ops.rms_norm(X))
        alone = [ops.softmax(ops.rms_norm(row[None])) for row in X]
    assert torch.equal(together, torch.cat(alone))


def test_what_does_not_promise_it_is_refused_by_name():
    weight = torch.randn(7, 33)
    with batch_invariant():
        with (
            backend("triton_naive"),
            pytest.raises(contract.BackendError, match="linear cannot run on triton_naive: it is not batch-invariant"),
        ):
            ops.linear(X, weight)
        with pytest.raises(contract.BackendError, match="linear cannot run here: it is not batch-invariant"):
            ops.linear(X, weight)
    assert torch.equal(ops.linear(X, weight), ops.linear.definition(X, weight, None))


@pytest.mark.usefixtures("outside")
def test_auto_keeps_to_what_promises_it(monkeypatch):
    from tilestack.contract import registry

    contract.implements(ops.silu, backend="mine", backward=contract.AUTOGRAD, invariant=True)(torch.nn.functional.silu)
    monkeypatch.setattr(registry, "candidates", lambda op, *_: list(op.implementations.values()))
    arguments = ops.silu.bind(X)
    assert ops.silu.resolve(arguments).backend == "torch"
    with batch_invariant():
        assert ops.silu.implementations["torch"].refuses(arguments, X.device) == "it is not batch-invariant"
        assert ops.silu.resolve(arguments).invariant


def test_the_mode_is_part_of_a_signature_and_ends_with_its_block():
    seen = []
    with batch_invariant():
        seen.append(contract.backends.wants_invariance())
        with backend("triton"):
            seen.append(contract.backends.wants_invariance())
    seen.append(contract.backends.wants_invariance())
    assert seen == [True, True, False]
