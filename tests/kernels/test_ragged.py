"""Rows that start off 16 bytes: every shift, program after program striding over rows, and neighbours left alone."""

import pytest
import torch
from torch import Tensor

from tilestack.kernels.norm import ragged as norm_ragged
from tilestack.kernels.norm.granules import granule_of, programs_that_stride
from tilestack.kernels.norm.rows import norm_backward, norm_forward

ROWS = 37  # more than there are programs in the interpreter, and of no shift equally many


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0])).to(dtype)


@pytest.fixture
def one_by_one(monkeypatch):
    """Runs a function with the rows' elements moved one by one."""

    def run(function, *arguments):
        with monkeypatch.context() as patched:
            patched.setattr(norm_ragged, "NARROWEST_RAGGED", 1 << 30)
            return function(*arguments)

    return run


@pytest.mark.parametrize(
    ("columns", "dtype", "parameters"),
    [(1025, torch.float16, torch.float16), (1032, torch.float16, torch.float32), (1030, torch.float32, torch.float32)],
)
def test_both_ways_to_move_a_row_agree(one_by_one, columns, dtype, parameters):
    x, residual, grad, more = (random(ROWS + n, columns, dtype=dtype)[:ROWS] for n in range(4))
    weight, bias = random(columns, dtype=parameters), random(columns, dtype=parameters) + 1
    grad = grad.to(torch.promote_types(dtype, parameters))
    calls = [
        (norm_forward, x, weight, bias, 1e-5, True, residual),
        (norm_forward, x, None, None, 1e-5, False),
        (norm_forward, x, weight, None, 1e-5, False, None, torch.int8),
        (norm_backward, grad, x, weight, True, 1e-5, True, more),
        (norm_backward, grad, x, weight, False, 1e-5, False),
    ]
    for function, *arguments in calls:
        for ours, theirs in zip(function(*arguments), one_by_one(function, *arguments), strict=True):
            if ours is None or ours.dtype == torch.int8:
                assert ours is theirs or ((ours.int() - theirs.int()).abs() > 1).sum() == 0
            else:  # only the order of sums differs
                torch.testing.assert_close(ours, theirs, atol=1e-5 if ours.dtype == torch.float32 else 2e-3, rtol=2e-3)


def test_a_row_sees_nothing_of_its_neighbours():
    x = random(ROWS, 1025, dtype=torch.float16)
    clean = norm_forward(x, None, None, 1e-5, True)[0]
    x[5] = float("nan")
    x[20] = float("inf")
    y = norm_forward(x, None, None, 1e-5, True)[0]
    others = [row for row in range(ROWS) if row not in (5, 20)]
    assert y[[5, 20]].isnan().all()
    assert torch.equal(y[others], clean[others])


def test_rows_apart_are_read_where_they_start_alike():
    padded = random(ROWS, 1025 + 24, dtype=torch.float16)
    x = padded[:, :1025]
    assert granule_of(1025, 2, x) == 8
    assert torch.equal(
        norm_forward(x, None, None, 1e-5, False)[0], norm_forward(x.contiguous(), None, None, 1e-5, False)[0]
    )


def test_each_matrix_has_its_rows_as_far_apart_as_it_likes():
    def spread(matrix, more):
        padded = torch.full((ROWS, 1025 + more), torch.nan, dtype=matrix.dtype)
        padded[:, :1025] = matrix
        return padded[:, :1025]

    x, residual, grad, more = (random(ROWS + n, 1025, dtype=torch.float16)[:ROWS] for n in range(4))
    weight = random(1025, dtype=torch.float16)
    far_x, far_residual, far_grad, far_more = (
        spread(each, 8 * n + 8) for n, each in enumerate((x, residual, grad, more))
    )
    assert granule_of(1025, 2, far_x, far_residual, far_grad, far_more) == 8
    for found, expected in (
        (
            norm_forward(far_x, weight, weight, 1e-5, True, far_residual),
            norm_forward(x, weight, weight, 1e-5, True, residual),
        ),
        (
            norm_backward(far_grad, far_x, weight, True, 1e-5, True, far_more),
            norm_backward(grad, x, weight, True, 1e-5, True, more),
        ),
    ):
        for ours, theirs in zip(found, expected, strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "x",
    [
        torch.empty(4, 1040, dtype=torch.float16),  # aligned: there is nothing to gain
        torch.empty(4, 1032, dtype=torch.float16)[:, :1025],  # its rows start on 16 bytes, those of a result do not
        torch.empty(4 * 1025 + 1, dtype=torch.float16)[1:].view(4, 1025),
    ],
)
def test_rows_that_do_not_start_alike_are_refused(x):
    assert granule_of(x.shape[1], 2, x) == 0


@pytest.mark.parametrize(
    ("rows", "most", "granule"), [(1, 132, 8), (37, 132, 8), (4096, 132, 8), (4096, 4, 16), (9, 264, 4)]
)
def test_programs_are_a_multiple_of_the_granule(rows, most, granule):
    programs = programs_that_stride(rows, most, granule)
    assert programs % granule == 0
    assert programs <= max(most, granule)
    assert programs < rows + granule


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("centred", [False, True])
def test_a_rows_bits_are_its_own(dtype, centred):
    """Equal rows, however they start, have equal results, and so has each of them alone."""
    x = random(1, 1029, dtype=dtype).repeat(17, 1)
    weight = random(1029, dtype=dtype) + 1
    out, residual = norm_forward(x, weight, weight, 1e-5, centred, x)
    codes, scale = norm_forward(x, weight, None, 1e-5, centred, None, torch.int8)
    for one in range(17):
        alone = slice(one, one + 1)
        assert torch.equal(norm_forward(x[alone], weight, weight, 1e-5, centred, x[alone])[0], out[:1])
    for result in (out, residual, codes, scale):
        assert torch.equal(result, result[:1].expand_as(result))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("centred", [False, True])
def test_the_bits_of_a_rows_gradient_are_its_own(dtype, centred):
    """In the invariant mode equal rows, however they start, have equal gradients, and so has each of them alone."""
    x, grad, more = (random(1 + n, 1029, dtype=dtype)[:1].repeat(17, 1) for n in range(3))
    weight = random(1029, dtype=dtype) + 1
    dx = norm_backward(grad, x, weight, centred, 1e-5, centred, more, invariant=True)[0]
    assert torch.equal(dx, dx[:1].expand_as(dx))
    for one in range(17):
        alone = slice(one, one + 1)
        found = norm_backward(grad[alone], x[alone], weight, centred, 1e-5, centred, more[alone], invariant=True)[0]
        assert torch.equal(found, dx[:1])


@pytest.mark.parametrize(("dtype", "worst"), [(torch.float16, 2**-11), (torch.float32, 2e-6)])
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("outlier", [1.0, 3e3])
@pytest.mark.parametrize("scale", [1e-3, 1.0])
def test_integers_add_up_as_well_as_floats(dtype, worst, centred, outlier, scale):
    """Also where one element is far larger than the rest, whose squares have few bits above the last of its own."""
    x = torch.randn(3, 2001, generator=torch.Generator().manual_seed(0)) + 0.5
    x[1, 7], x[2] = outlier, x[2] * 1e-3 + 1
    x = (x * scale).to(dtype)
    right = x.double() - x.double().mean(1, keepdim=True) * centred
    right = right * torch.rsqrt((right * right).mean(1, keepdim=True) + 1e-9)
    found = norm_forward(x, None, None, 1e-9, centred)[0].double()
    spread = 1e3 if centred else 1  # of the third row: what its mean is rounded to, in its deviations
    allowed = worst * right.abs() + torch.tensor([worst, worst, spread * worst])[:, None]
    assert ((found - right).abs() <= allowed).all(), ((found - right).abs() / allowed).amax(1)


def test_equal_squares_beside_a_large_one_are_not_all_rounded_alike():
    """In float16 whatever they lose would add up to more than a result is rounded to."""
    x = torch.full((2, 4097), 0.4899, dtype=torch.float16)
    x[:, 0] = 1024
    right = x.double() * torch.rsqrt((x.double() ** 2).mean(1, keepdim=True) + 1e-9)
    found = norm_forward(x, None, None, 1e-9, False)[0].double()
    assert ((found - right).abs() <= 0.6 * 2**-11 * right.abs() + 2**-25).all()


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 1e38])
def test_what_has_no_sum_is_not_hidden(value):
    x = random(3, 1029, dtype=torch.float32)
    x[1, 5] = value
    y = norm_forward(x, None, None, 1e-5, False)[0]
    others = torch.arange(1029) != 5
    assert y[[0, 2]].isfinite().all()
    assert y[1].isnan().all() if value != value else (y[1, others] == 0).all()


def test_integers_know_no_order():
    x = random(3, 2001, dtype=torch.float32) * torch.logspace(-6, 6, 2001)
    expected = norm_forward(x, None, None, 1e-5, False)[0]
    order = torch.randperm(2001, generator=torch.Generator().manual_seed(0))
    mixed = norm_forward(x[:, order].contiguous(), None, None, 1e-5, False)[0]
    assert torch.equal(mixed, expected[:, order])


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_an_element_farther_from_the_mean_than_from_zero(dtype):
    """Deviations twice as large as any element, whose squares need two bits more; wherever it is, in the body or its ends."""
    for place in (0, 500, 1028):
        x = torch.full((9, 1029), -1.0, dtype=dtype)
        x[:, place] = 1
        right = x.double() - x.double().mean(1, keepdim=True)
        right = right * torch.rsqrt(right.square().mean(1, keepdim=True) + 1e-9)
        found = norm_forward(x, None, None, 1e-9, True)[0].double()
        torch.testing.assert_close(found, right, rtol=2e-3, atol=1e-6)
