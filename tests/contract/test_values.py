"""Arguments that make no sense: integers where numbers are computed, and indices that name nothing."""

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import backends

WHOLE = torch.tensor([[1, 2, 3]])


@pytest.fixture
def checked():
    contract.check_values(True)
    yield
    contract.check_values(None)


@pytest.mark.parametrize("name", ["auto", "triton"])
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.softmax(WHOLE), "softmax: x must be floating point, not int64"),
        (lambda: ops.gelu(WHOLE > 1), "gelu: x must be floating point, not bool"),
        (lambda: ops.rms_norm(torch.randn(2, 3), WHOLE[0]), "rms_norm: weight must be floating point, not int64"),
        (lambda: ops.cross_entropy(WHOLE, WHOLE[:, 0]), "cross_entropy: logits must be floating point, not int64"),
    ],
)
def test_integers_are_refused_where_they_make_no_sense(call, message, name):
    with contract.backend(name), pytest.raises(TypeError, match=message):
        call()


def test_what_only_moves_takes_integers():
    assert torch.equal(ops.transpose(WHOLE), WHOLE.T)
    assert torch.equal(ops.copy(WHOLE), WHOLE)
    assert torch.equal(ops.gather_rows(WHOLE.T, torch.tensor([2, 0])), WHOLE.T[[2, 0]])


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_an_index_that_names_nothing_is_said_by_its_place(name):
    logits, labels = torch.randn(3, 5, requires_grad=True), torch.tensor([0, -100, 4])
    with contract.backend(name):
        for _ in range(3):
            ops.cross_entropy(logits, labels).backward()
        with pytest.raises(IndexError, match=r"cross_entropy: labels\[2\] is 5, which names none of 5 rows"):
            ops.cross_entropy(logits, torch.tensor([0, -100, 5]))
        with pytest.raises(IndexError, match=r"embedding: ids\[0, 1\] is -1, which names none of 3 rows"):
            ops.embedding(torch.tensor([[2, -1]]), torch.randn(3, 4))


def test_values_are_looked_at_on_cpus_unless_kernels_are_interpreted(monkeypatch):
    monkeypatch.delenv("TILESTACK_CHECK_VALUES", raising=False)
    for interpreted, device, looked_at in (("0", "cpu", True), ("1", "cpu", False), ("0", "cuda", False)):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        assert backends.checks_values(torch.device(device)) is looked_at
    monkeypatch.setenv("TILESTACK_CHECK_VALUES", "1")
    assert backends.checks_values(torch.device("cuda"))
    monkeypatch.setenv("TILESTACK_CHECK_VALUES", "0")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert not backends.checks_values(torch.device("cpu"))


@pytest.mark.usefixtures("checked")
@pytest.mark.parametrize("attend", [ops.attention, ops.flex_attention])
def test_documents_follow_one_another_and_end_with_their_row(attend):
    q = torch.randn(2, 6, 1, 8)
    documents = lambda *ends: attend(q, q, q, torch.tensor(ends, dtype=torch.int32))
    documents(0, 2, 6, 6, 9, 12, 12)
    for ends in ((0, 6, 11), (1, 6, 12), (0, 6, 4, 12), ()):
        with pytest.raises(IndexError, match="must rise from 0 to the number of tokens, 12, but are"):
            documents(*ends)
    with pytest.raises(IndexError, match="a document crosses into another row: 6, where a row begins, is not in cu_s"):
        documents(0, 4, 8, 12)
