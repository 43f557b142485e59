"""The cost model counts the bytes that cannot be avoided: each case here was counted by hand."""

import pytest
import torch

from tilestack import ops

HALF = 2  # bytes of a bfloat16


def empty(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


def bytes_of(operator, direction, **arguments):
    _, moved = operator.cost(operator.bind(**arguments), direction)
    return moved


R, C = 6, 40
x, y, w, b = empty(R, C), empty(R, C), empty(C), empty(C)
row, whole = C * HALF, R * C * HALF

# operator, arguments, bytes of the forward, bytes of the backward
COUNTED = {
    "axpy: dy is the arriving gradient itself": (ops.axpy, dict(x=x, y=y), 3 * whole, 2 * whole),
    "relu: the backward reads a bit an element": (ops.relu, dict(x=x), 2 * whole, 2 * whole + R * C // 8),
    "silu_mul: two in, one out; three in, two out": (ops.silu_mul, dict(gate=x, up=y), 3 * whole, 5 * whole),
    "softmax": (ops.softmax, dict(x=x), 2 * whole, 3 * whole),
    "rms_norm": (ops.rms_norm, dict(x=x, weight=w), 2 * whole + row, 3 * whole + 2 * row),
    "layer_norm: no gradient needs the bias": (
        ops.layer_norm, dict(x=x, weight=w, bias=b), 2 * whole + 2 * row, 3 * whole + 3 * row,
    ),
    "group_norm: as layer_norm": (
        ops.group_norm, dict(x=empty(2, 4, 9), groups=2, weight=empty(4), bias=empty(4)),
        2 * 72 * HALF + 8 * HALF, 3 * 72 * HALF + 12 * HALF,
    ),
    "add_rms_norm: x and the residual have one gradient": (
        ops.add_rms_norm, dict(x=x, residual=y, weight=w), 4 * whole + row, 4 * whole + 2 * row,
    ),
    "add_layer_norm: x and the residual have one gradient": (
        ops.add_layer_norm, dict(x=x, residual=y, weight=w, bias=b), 4 * whole + 2 * row, 4 * whole + 3 * row,
    ),
    "linear: no gradient needs the bias": (
        ops.linear, dict(x=empty(R, C), weight=empty(8, C), bias=empty(8)),
        (R * C + 8 * C + 8 + R * 8) * HALF, (R * 8 + R * C + 8 * C + R * C + 8 * C + 8) * HALF,
    ),
    "swiglu_linear: no gradient needs the bias": (
        ops.swiglu_linear, dict(x=empty(R, 2 * C), weight=empty(8, C), bias=empty(8)),
        (2 * R * C + 8 * C + 8 + R * 8) * HALF, (R * 8 + 2 * R * C + 8 * C + 2 * R * C + 8 * C + 8) * HALF,
    ),
    "rope: the angles have no gradient": (
        ops.rope, dict(q=empty(1, 5, 2, 8), k=empty(1, 5, 1, 8), cos=empty(5, 4), sin=empty(5, 4)),
        (2 * 120 + 2 * 20) * HALF, (2 * 120 + 2 * 20) * HALF,
    ),
    "rope_: written where it was read, and no backward of its own": (
        ops.rope_, dict(q=empty(1, 5, 2, 8), k=empty(1, 5, 1, 8), cos=empty(5, 4), sin=empty(5, 4)),
        (2 * 120 + 2 * 20) * HALF, None,
    ),
    "qk_norm_rope: q, k and their weights have one": (
        ops.qk_norm_rope,
        dict(q=empty(1, 5, 2, 8), k=empty(1, 5, 1, 8), q_weight=empty(8), k_weight=empty(8), cos=empty(5, 4), sin=empty(5, 4)),
        (2 * 120 + 16 + 2 * 20) * HALF, (3 * 120 + 2 * 16 + 2 * 20) * HALF,
    ),
    "causal_softmax: above the diagonal nothing is read, but zeros are written": (
        ops.causal_softmax, dict(x=empty(3, 4, 6)), 3 * (3 + 4 + 5 + 6) * HALF + 3 * 24 * HALF,
        2 * 3 * (3 + 4 + 5 + 6) * HALF + 3 * 24 * HALF,
    ),
    "cross_entropy: labels and logits in, logits' gradient out; a loss is a float32": (
        ops.cross_entropy, dict(logits=x, labels=empty(R, dtype=torch.int64)), whole + 8 * R + 4, 4 + 2 * whole + 8 * R,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("operator", "arguments", "forward", "backward"), COUNTED.values(), ids=COUNTED)
def test_bytes_are_those_counted_by_hand(operator, arguments, forward, backward):
    assert bytes_of(operator, "forward", **arguments) == forward
    if backward is not None:
        assert bytes_of(operator, "backward", **arguments) == backward


def test_a_row_that_is_looked_up_again_is_not_read_again():
    ids = torch.tensor([3, 3, 0, 3])
    arguments = dict(ids=ids, weight=torch.empty(100, C, dtype=torch.bfloat16))
    assert bytes_of(ops.embedding, "forward", **arguments) == 4 * 8 + 2 * row + 4 * row
    gathered = dict(x=arguments["weight"], index=ids)
    assert bytes_of(ops.gather_rows, "forward", **gathered) == 4 * 8 + 2 * row + 4 * row


def test_an_id_outside_the_vocabulary_reads_nothing():
    arguments = dict(ids=torch.tensor([-1, 5, 2]), weight=torch.empty(5, C, dtype=torch.bfloat16))
    assert bytes_of(ops.embedding, "forward", **arguments) == 3 * 8 + row + 3 * row


def test_without_values_every_row_may_be_another():
    arguments = dict(ids=empty(12, dtype=torch.int64), weight=empty(5, C))
    assert bytes_of(ops.embedding, "forward", **arguments) == 12 * 8 + 5 * row + 12 * row


def test_the_gradient_of_an_embedding_never_reads_its_weight():
    arguments = dict(ids=torch.tensor([3, 3, 0, 3]), weight=torch.empty(100, C, dtype=torch.bfloat16))
    assert bytes_of(ops.embedding, "backward", **arguments) == 4 * 8 + 4 * row + 100 * row


def test_rows_that_nothing_was_scattered_to_send_nothing_back():
    arguments = dict(x=torch.empty(3, C, dtype=torch.bfloat16), index=torch.tensor([7, 1, 7]), rows=50)
    assert bytes_of(ops.scatter_rows, "forward", **arguments) == 3 * row + 3 * 8 + 50 * row
    assert bytes_of(ops.scatter_rows, "backward", **arguments) == 2 * row + 3 * 8 + 3 * row


def test_both_directions_together_read_what_is_kept_once():
    logits, labels = empty(R, C), empty(R, dtype=torch.int64)
    # Logits and labels in, the loss out; a one arrives; the logits' gradient out.
    assert bytes_of(ops.cross_entropy, "both", logits=logits, labels=labels) == whole + 8 * R + 4 + 4 + whole
    forward, _ = ops.cross_entropy.cost(ops.cross_entropy.bind(logits, labels))
    backward, _ = ops.cross_entropy.cost(ops.cross_entropy.bind(logits, labels), "backward")
    assert ops.cross_entropy.cost(ops.cross_entropy.bind(logits, labels), "both")[0] == forward + backward
