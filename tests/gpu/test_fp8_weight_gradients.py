"""Gradients of grouped weights from fp8 codes on Hopper: rows of other groups, which TMA brings along, do not get through,
and the two halves of a tile, which clear them away for each other, do not run ahead."""

import pytest
import torch

from tilestack import backend, ops
from tilestack.kernels.hopper.grouped_outer_fp8 import CONFIGS

NAN = 0x7F  # in e4m3
RUNS = 100
ROWS = 1600
ENDS = [70, 200, 200, 333, 900, 901, 1500]  # a group without rows, one of a single row, and rows of no group

each_config = pytest.mark.parametrize("config", CONFIGS)


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("Gluon's kernels are for Hopper, which this GPU is not")


def operands(columns=336, inner=272):
    torch.manual_seed(0)
    codes = [torch.randn(lines, ROWS, device="cuda").to(torch.float8_e4m3fn) for lines in (columns, inner)]
    blocks = ROWS // 128 + 1
    scales = [0.5 + torch.rand(lines, blocks, device="cuda") for lines in (columns, inner // 128 + 1)]
    return codes, scales, torch.tensor(ENDS, dtype=torch.int32, device="cuda")


@each_config
@pytest.mark.parametrize("group", [1, 3, 4, 5])
def test_a_group_is_right_where_all_other_rows_are_nan(config, group, as_good_as):
    codes, scales, offsets = operands()
    for operand in codes:
        operand.view(torch.uint8)[:, : ENDS[group - 1]] = NAN
        operand.view(torch.uint8)[:, ENDS[group] :] = NAN
    with backend(grouped_outer_fp8=f"gluon:{config}"):
        found = ops.grouped_outer_fp8(*codes, *scales, offsets, dtype="bfloat16")
    theirs = ops.grouped_outer_fp8.definition(*codes, *scales, offsets, "bfloat16")
    truth = ops.grouped_outer_fp8.definition(*codes, *(scale.double() for scale in scales), offsets, "")
    as_good_as(found[group], theirs[group], truth[group])
    assert found[0].isnan().all()
    assert not found[2].any()


@each_config
def test_every_run_has_the_bits_of_the_first(config):
    codes, scales, offsets = operands()
    others, disturbance = torch.cuda.Stream(), torch.empty(1 << 26, device="cuda")
    with backend(grouped_outer_fp8=f"gluon:{config}"):
        first = ops.grouped_outer_fp8(*codes, *scales, offsets, dtype="bfloat16")
        for _ in range(RUNS):
            with torch.cuda.stream(others):
                disturbance.add_(1)
            assert torch.equal(ops.grouped_outer_fp8(*codes, *scales, offsets, dtype="bfloat16"), first)
