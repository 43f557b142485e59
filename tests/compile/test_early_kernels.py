"""Kernels that begin before the one in front has ended: what they do until then, and which weights they ask for."""

import pytest
import torch

from tilestack.kernels import early
from tilestack.kernels.early import pieces_of

CHAIN = {
    "norm_fwd_kernel", "gemv_kernel", "matmul_split_k_kernel", "linear_swiglu_split_k_kernel", "qkv_rope_write_kernel",
    "paged_attention_kernel", "argmax_spans_kernel", "argmax_rows_kernel", "survey_kernel", "bound_kernel", "gather_kernel",
    "decide_kernel",
}  # fmt: skip
READ_WEIGHTS = {"gemv_kernel", "matmul_split_k_kernel", "linear_swiglu_split_k_kernel"}


def test_every_kernel_of_a_step_waits_and_only_fetches_weights_before(uninterpreted):
    kernels = uninterpreted("tests/compile/early_kernels.py")
    assert {kernel["kernel"] for kernel in kernels} == CHAIN
    for kernel in kernels:
        hopper = kernel["capability"] == 90
        assert kernel["failures"] == []
        assert (kernel["waits"], kernel["lets_next"]) == (hopper, hopper)
        assert bool(kernel["fetches"]) == (hopper and kernel["kernel"] in READ_WEIGHTS)


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(early, "begins_early", lambda device: True)


def weight(rows, columns, dtype=torch.bfloat16):
    return torch.zeros(rows, columns, dtype=dtype)


@pytest.mark.parametrize("rows", [1, 2, 32, 64, 128, 256])
@pytest.mark.parametrize("length", [8, 24, 256, 1024, 3072])
def test_pieces_cover_each_row_once(on_hopper, rows, length):
    pieces, size = pieces_of(weight(300, 3072), rows, length, warps=4)
    assert pieces * size == 2 * length
    assert size % 16 == 0
    assert 1 <= pieces <= max(128 // rows, 1)
    assert pieces & (pieces - 1) == 0  # as a range in a kernel has it


def test_what_does_not_begin_on_16_bytes_is_not_fetched(on_hopper):
    assert pieces_of(weight(8, 64), 4, 64, 4) != (0, 0)
    assert pieces_of(weight(8, 68), 4, 64, 4) == (0, 0)  # every other row is off
    assert pieces_of(weight(8, 64), 4, 60, 4) == (0, 0)
    assert pieces_of(weight(8, 72)[:, 4:68], 4, 64, 4) == (0, 0)
    assert pieces_of(weight(64, 64).T, 4, 64, 4) == (0, 0)  # elements lie apart
    assert pieces_of(weight(8, 64), 4, 0, 4) == (0, 0)  # where parts differ


def test_on_a_cpu_kernels_begin_one_after_the_other():
    assert early.early(weight(1, 1)) == dict(EARLY=False)
    assert pieces_of(weight(8, 64), 4, 64, 4) == (0, 0)
