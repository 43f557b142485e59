"""How the oracle judges codes: nearest to the unrounded truth, and nothing else."""

import pytest
import torch

from tilestack.lab.proof import oracle
from tilestack.ops.quantised import LARGEST_CODE, quantised

each_format = pytest.mark.parametrize("dtype", LARGEST_CODE, ids=str)


@pytest.fixture
def values():
    return torch.randn(64, 257, generator=torch.Generator().manual_seed(0))


def verdict(codes, reference, truth):
    return oracle.judge(codes, reference, truth, oracle.own_error(reference, truth))


@each_format
def test_the_definition_is_within_half_a_step(values, dtype):
    codes, _ = quantised(values, dtype)
    truth, exact_scale = quantised(values.double(), dtype)
    assert truth.dtype == torch.float64
    torch.testing.assert_close(truth * exact_scale[:, None], values.double())
    assert codes.double().abs().amax(-1).eq(LARGEST_CODE[dtype]).all()
    assert not verdict(codes, codes, truth).message


def test_truncation_is_refused(values):
    codes, _ = quantised(values, torch.int8)
    truth, _ = quantised(values.double(), torch.int8)
    assert "codes are not the nearest" in verdict(truth.to(torch.int8), codes, truth).message


def test_one_wrong_fp8_code_is_refused(values):
    codes, _ = quantised(values, torch.float8_e4m3fn)
    truth, _ = quantised(values.double(), torch.float8_e4m3fn)
    bits = codes.view(torch.uint8).clone()
    bits[3, 5] += 1
    assert verdict(bits.view(torch.float8_e4m3fn), codes, truth).message.startswith("1 of ")


def test_either_neighbour_of_a_tie_is_right():
    truth = torch.tensor([[2.5, -7.5, 127.0]], dtype=torch.float64)
    up, down = torch.tensor([[3, -7, 127]], dtype=torch.int8), torch.tensor([[2, -8, 127]], dtype=torch.int8)
    assert not verdict(up, down, truth).message
    assert not verdict(down, up, truth).message
    assert verdict(up + torch.tensor([[1, 0, 0]], dtype=torch.int8), down, truth).message


@each_format
def test_zeros_have_a_scale_and_nan_has_none(dtype):
    codes, scale = quantised(torch.tensor([[0.0, 0.0], [1.0, torch.nan], [1.0, torch.inf]]), dtype)
    assert codes[0].float().eq(0).all()
    assert 0 < scale[0] < 1e-30
    assert scale[1:].isnan().all()
