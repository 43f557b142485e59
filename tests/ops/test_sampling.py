"""Sampling as a distribution: the right frequencies, only allowed tokens, and a row's token whatever its neighbours."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tilestack import contract, ops
from tilestack.kernels.sampling import candidates, keys
from tilestack.kernels.sampling.noise import log2_exponential
from tilestack.lab.proof.memory_guards import guarded_memory
from tilestack.ops.sampling import exponential


def settings(rows, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0):
    each = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype)
    return dict(
        seeds=torch.arange(rows) + seed,
        temperature=each(temperature),
        top_k=each(top_k, torch.int32),
        top_p=each(top_p),
        min_p=each(min_p),
    )


def chi_square_fits(ids, probabilities):
    """Pearson's statistic of a right sampler has mean m and variance about 2m: five deviations are never seen."""
    expected = probabilities * len(ids)
    assert expected[probabilities > 0].min() > 5
    counts = torch.bincount(ids, minlength=len(probabilities)).double()
    assert counts[probabilities == 0].sum() == 0
    seen = probabilities > 0
    statistic = ((counts - expected)[seen].square() / expected[seen]).sum()
    freedom = int(seen.sum()) - 1
    assert statistic <= freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_tokens_come_as_often_as_softmax_says(temperature):
    logits = torch.randn(30, generator=torch.Generator().manual_seed(0))
    ids = ops.sample(logits.expand(10000, 30), **settings(10000, temperature))
    chi_square_fits(ids, torch.softmax(logits.double() / temperature, 0))


LIKELY = torch.tensor([0.4, 0.2, 0.15, 0.1, 0.1, 0.05])
FILTERED = (  # and how many of these tokens stay
    (dict(top_k=3), 3),
    (dict(top_p=0.7), 3),
    (dict(min_p=0.3), 3),
    (dict(top_k=4), 5),  # the fourth and fifth are equal
    (dict(top_k=3, top_p=0.75), 2),  # two are 0.6 of all, but 0.8 of what top_k left
    (dict(top_p=0.0), 1),
)


def test_filters_keep_their_tokens_and_the_proportions_among_them():
    likely = LIKELY
    for filters, kept in FILTERED:
        probabilities = torch.where(torch.arange(6) < kept, likely, 0).double()
        ids = ops.sample(likely.log().expand(2000, 6), **settings(2000, **filters))
        chi_square_fits(ids, probabilities / probabilities.sum())


@pytest.mark.parametrize("filters", [{}, *(filters for filters, _ in FILTERED)], ids=str)
def test_the_kernel_draws_what_the_definition_draws(filters):
    logits, chosen = LIKELY.log().expand(8, 6), settings(8, **filters)
    with contract.backend("triton"):
        assert torch.equal(ops.sample(logits, **chosen), ops.sample.definition(logits, **chosen))


def at_the_border(rows=16):
    """Logits of two tokens in each row, how likely the second is, and which rows float32 holds without rounding."""
    second = -torch.linspace(0.05, 0.6, 4000)
    likelihood = torch.exp(second)
    p = 1 / (1 + likelihood)
    exact = (1 + likelihood - likelihood == 1) & (p * (1 + likelihood) == 1)
    exact &= likelihood == torch.from_numpy(np.exp(second.numpy()))  # as the interpreter has it
    chosen = exact.nonzero()[:rows, 0]
    assert len(chosen) == rows
    return torch.stack([torch.zeros(rows), second[chosen]], 1), likelihood[chosen], p[chosen]


def test_a_token_right_at_the_border_of_min_p_stays():
    logits, likelihood, _ = at_the_border()
    chosen = settings(len(logits), top_k=2) | dict(min_p=likelihood)
    wanted = ops.sample.definition(logits, **chosen)
    assert 0 < wanted.sum() < len(wanted)
    for k in (2, 0):  # decided over the row, and in its span
        with contract.backend("triton"):
            assert torch.equal(ops.sample(logits, **chosen | dict(top_k=torch.full_like(chosen["top_k"], k))), wanted)


def test_a_token_right_at_the_border_of_top_p_goes():
    """Those before it have just the share that was asked for, and are enough."""
    logits, _, p = at_the_border()
    chosen = settings(len(logits)) | dict(top_p=p)
    assert ops.sample.definition(logits, **settings(len(logits))).any()  # the seeds do draw it
    with contract.backend("triton"):
        assert not ops.sample(logits, **chosen).any()
    assert not ops.sample.definition(logits, **chosen).any()


def test_top_p_is_a_share_of_all_top_k_keeps_whatever_min_p_drops():
    likely = torch.tensor([1.0, *3 * [0.95], *10 * [0.5], *10 * [0.01]])
    filters = settings(16, top_k=14, top_p=0.2, min_p=0.9)
    with contract.backend("triton"):
        ids = ops.sample(likely.log().expand(16, -1), **filters)
    assert torch.equal(ids, ops.sample.definition(likely.log().expand(16, -1), **filters))
    assert set(ids.tolist()) == {0, 1, 2, 3}


def test_noise_is_fine_where_the_race_is_won():
    """Tokens win with small exponentials: there words that float32 tells apart give others, right to a few units in the last place."""
    words = torch.tensor([0, 1, 2, 1000, 10**6, 42949600, 42949900, 429496600, 429496900, 2**30])
    drawn = exponential(words, torch.float32)
    truth = -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
    unit = torch.finfo(torch.float32).eps
    # 1 - u is rounded to half a unit of 1, which counts 1 / E times where the series ends at E = 0.1.
    torch.testing.assert_close(drawn.double(), truth, rtol=unit / 2 / 0.1 + 4 * unit, atol=0)
    assert (drawn.diff() > 0).all()
    assert exponential(torch.tensor([2**32 - 1]), torch.float32).isfinite()


@triton.jit
def noise_kernel(words_ptr, out_ptr, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out_ptr + lane, log2_exponential(tl.load(words_ptr + lane).to(tl.uint32)))


@pytest.mark.parametrize(("low", "high"), [(0.01, 0.1), (0.1, 0.5)], ids=["series", "logarithm"])
def test_the_kernels_noise_is_as_good_as_the_definitions(low, high, as_good_as):
    """A term of the series that is a hundredth off moves a score by 15 units in the last place, and seldom a token."""
    words = torch.linspace(low * 2**32, high * 2**32, 4096, dtype=torch.float64).long()
    out = torch.empty(4096)
    noise_kernel[(1,)](words, out, N=4096)
    truth = -torch.log1p(-(words.double() + 0.5) * 2.0**-32)
    as_good_as(out, exponential(words, torch.float32).log2(), truth.log2())


@pytest.mark.parametrize("filters", [{}, dict(top_k=7), dict(top_p=0.8), dict(top_k=7, top_p=0.8, min_p=0.05)])
def test_a_row_gives_its_token_whatever_the_batch(filters):
    logits, chosen = torch.randn(3, 4500) * 3, settings(3, 0.9, **filters)
    with contract.backend("triton"):
        together = ops.sample(logits, **chosen)
        alone = [ops.sample(logits[i : i + 1], **{name: v[i : i + 1] for name, v in chosen.items()}) for i in range(3)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, ops.sample.definition(logits, **chosen))


@pytest.mark.parametrize("filters", [dict(top_k=5), dict(top_p=0.5), dict(top_k=5000, top_p=0.999), dict(top_k=3000)])
def test_logits_that_defeat_the_bound(filters):
    """All equal, or so nearly that thousands are candidates: more than a tile of them."""
    for logits in (torch.zeros(1, 5000), torch.arange(5000)[None] * 1e-4):
        with contract.backend("triton"):
            assert torch.equal(
                ops.sample(logits, **settings(1, **filters)), ops.sample.definition(logits, **settings(1, **filters))
            )


@pytest.mark.parametrize(("temperature", "offset"), [(0.05, 0.0), (0.8, -300.0), (1.0, 3e5)])
def test_a_nucleus_is_whole_wherever_logits_lie(temperature, offset):
    """The bound drops none of its tokens. Large logits leave depths no digits, and none are used then."""
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(1)) * 3 + offset
    logits[:, 4500] = offset + 12  # the likeliest is in the second span
    chosen = settings(4, temperature) | dict(top_p=torch.tensor([0.05, 0.6, 0.95, 0.9999]))
    with contract.backend("triton"):
        ids = ops.sample(logits, **chosen)
    assert torch.equal(ids, ops.sample.definition(logits, **chosen))


@pytest.mark.parametrize("span", [0, 1, 2])
def test_a_nucleus_lies_mostly_in_a_span_far_below_the_likeliest(span):
    """Depths are counted below the largest of each span, and that of the likeliest token's has little else."""
    logits = torch.full((8, 9000), -40.0)
    logits[:, 4096 * span + 7] = 0
    logits[:, 4096 * (span != 1) + 99 :][:, :2000] = -5 - 3 * torch.rand(
        2000, generator=torch.Generator().manual_seed(4)
    )
    chosen = settings(8, top_p=0.97)
    wanted = ops.sample.definition(logits, **chosen)
    assert len(set(wanted.tolist())) > 4
    with contract.backend("triton"):
        assert torch.equal(ops.sample(logits, **chosen), wanted)


def test_a_nucleus_of_hundreds_is_listed_and_not_searched_in_the_logits(monkeypatch):
    """A slow path that finds the same token would not be seen: here it finds none."""
    logits, chosen = torch.randn(2, 8192, generator=torch.Generator().manual_seed(2)) * 3, settings(2, 0.8, top_p=0.95)
    wanted = ops.sample.definition(logits, **chosen)
    monkeypatch.setattr(candidates, "TILE", 0)
    with contract.backend("triton"):
        assert torch.equal(ops.sample(logits, **chosen), wanted)


def test_temperature_next_to_nothing_is_greedy():
    logits = torch.randn(4, 5000, generator=torch.Generator().manual_seed(3))
    for filters in ({}, dict(top_p=0.9), dict(top_k=3)):
        with contract.backend("triton"):
            assert torch.equal(ops.sample(logits, **settings(4, 1e-30, **filters)), logits.argmax(1))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rows_without_a_finite_largest_give_minus_one(backend):
    logits = torch.randn(4, 10)
    logits[0, 3], logits[1, 4], logits[2] = torch.nan, torch.inf, -torch.inf
    for filters in ({}, dict(top_k=2), dict(temperature=0.0)):
        with contract.backend(backend):
            ids = ops.sample(logits, **settings(4, **filters))
        assert ids[:3].tolist() == [-1, -1, -1]
        assert 0 <= ids[3] < 10


@pytest.mark.parametrize(
    "filters", [{}, dict(top_k=2), dict(top_p=0.5), dict(min_p=0.1), dict(temperature=0.0)], ids=str
)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_of_nothing_finite_are_read_no_further_than_they_go(value, filters):
    """Three spans in tiles of four."""
    logits = torch.full((2, 9000), value)
    with contract.backend("triton"), guarded_memory(logits.device):
        assert ops.sample(logits, **settings(2, **filters)).tolist() == [-1, -1]


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_masked_tokens_are_never_drawn(backend):
    logits = torch.full((8, 40), -torch.inf)
    logits[:, 11] = logits[:, 35] = 0
    with contract.backend(backend):
        ids = ops.sample(logits, **settings(8))
    assert set(ids.tolist()) <= {11, 35}


def test_first_of_equals_and_nan_largest():
    logits = torch.tensor([[1.0, 5, 5, 2], [-0.0, 0, -1, -2], [3, torch.nan, torch.inf, 1]])
    with contract.backend("triton"):
        assert ops.argmax(logits).tolist() == [1, 0, 1]
        values, indices = ops.topk(logits, 3)
    assert indices.tolist() == [[1, 2, 3], [0, 1, 2], [1, 2, 0]]
    assert torch.equal(values.nan_to_num(9), logits.gather(1, indices).nan_to_num(9))


def test_candidates_of_every_span_are_packed_one_after_the_other():
    """Three spans with three tokens each, all nearly as likely: a lost one is missed among so many draws."""
    logits, tokens = torch.full((48, 9000), -50.0), torch.tensor([0, 7, 4095, 4096, 5000, 8191, 8192, 8500, 8999])
    logits[:, tokens] = torch.linspace(0, 0.2, 9)
    wanted = ops.sample.definition(logits, **settings(48, min_p=0.5))
    assert set(wanted.tolist()) == set(tokens.tolist())
    with contract.backend("triton"):
        assert torch.equal(ops.sample(logits, **settings(48, min_p=0.5)), wanted)
        assert torch.equal(ops.topk(logits[:1], 9)[1][0], tokens.flip(0))


def test_temperature_0_takes_the_first_of_equals_wherever_they_lie():
    """In one slab, in several of a lane, and in several spans."""
    logits = torch.zeros(3, 9000)
    logits[1, [2000, 3024, 8000]] = logits[2, [5000, 5001, 8192]] = 1
    with contract.backend("triton"):
        assert ops.sample(logits, **settings(3, temperature=0.0)).tolist() == [0, 2000, 5000]


def test_topk_of_equals_beyond_a_tile():
    with contract.backend("triton"):
        assert ops.topk(torch.zeros(1, 4200), 5)[1].tolist() == [[0, 1, 2, 3, 4]]


def test_gradients_are_refused_and_mistakes_explained():
    with contract.backend("triton"), pytest.raises(contract.BackendError, match="no backward"):
        ops.topk(torch.randn(2, 9, requires_grad=True), 2)
    with pytest.raises(ValueError, match="between 1 and 9"):
        ops.topk(torch.randn(2, 9), 10)
    with pytest.raises(ValueError, match="one value per row"):
        ops.sample(torch.randn(3, 9), **settings(2))


@triton.jit
def there_and_back_kernel(x_ptr, out_ptr, count, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count).to(tl.float32)
    tl.store(out_ptr + at, keys.value_of(keys.key_of(x, SHIFT), SHIFT), mask=at < count)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_16_bits_comes_back_from_its_key(dtype):
    """Minus infinity too, which as a bound keeps every token and as NaN would keep none."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    x = every[(every.float().abs() >= 2.0**-126) | (every == 0)]  # the interpreter takes what is smaller for zero
    back = torch.empty(len(x))
    there_and_back_kernel[(triton.cdiv(len(x), 4096),)](x, back, len(x), SHIFT=keys.SHIFTS[dtype], BLOCK=4096)
    assert torch.equal(back, x.float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_more_of_the_largest_than_a_survey_has_groups(dtype):
    logits = torch.randn(3, 500, generator=torch.Generator().manual_seed(0)).to(dtype)
    with contract.backend("triton"):
        values, _ = ops.topk(logits, 200)
        drawn = [ops.sample(logits, **settings(3, top_k=200, seed=seed)) for seed in range(8)]
    assert torch.equal(values, logits.sort(descending=True).values[:, :200])
    assert [tokens.tolist() for tokens in drawn] == [
        ops.sample.definition(logits, **settings(3, top_k=200, seed=seed)).tolist() for seed in range(8)
    ]
