"""What the registry's proof cannot see of the random operators: which numbers they are, and how often they drop."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import math

import pytest
import torch
import triton
import triton.language as tl

from tilestack import contract, ops
from tilestack.kernels.elementwise import dropout as kernels
from tilestack.ops.random import philox, random_words


@triton.jit
def words_kernel(out_ptr, seed_ptr, start, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out_ptr + lane, tl.randint(tl.load(seed_ptr), start + lane.to(tl.int64)).to(tl.int64))


@pytest.mark.parametrize(("seed", "start"), [(0, 0), (-5, 2**33 + 7), (2**62 + 12345, 2**32 - 10)])
def test_philox_is_tritons_bit_for_bit(seed, start):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, seed = torch.empty(64, dtype=torch.int64, device=device), torch.tensor(seed, device=device)
    words_kernel[(1,)](out, seed, start, N=64)
    assert torch.equal(philox(seed, start + torch.arange(64, device=device))[0], out & 0xFFFFFFFF)


@triton.jit
def all_words_kernel(out_ptr, seed_ptr, start, N: tl.constexpr):
    lane = tl.arange(0, N)
    a, b, c, d = kernels.random_words(tl.load(seed_ptr), start + lane.to(tl.int64))
    tl.store(out_ptr + lane, a.to(tl.int64))
    tl.store(out_ptr + N + lane, b.to(tl.int64))
    tl.store(out_ptr + 2 * N + lane, c.to(tl.int64))
    tl.store(out_ptr + 3 * N + lane, d.to(tl.int64))


@pytest.mark.parametrize("start", [0, 2**32 - 10, 2**33 + 7])
def test_the_kernels_words_are_the_definitions(start):
    """Of counters beyond 32 bits too, which dropout has in tensors of more elements than there is memory for here."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    out, seed = torch.empty(4, 64, dtype=torch.int64, device=device), torch.tensor(2**62 + 12345, device=device)
    all_words_kernel[(1,)](out, seed, start, N=64)
    assert torch.equal(out, torch.stack(philox(seed, start + torch.arange(64, device=device))))


def test_philox_known_answer():
    """The published test vector of Philox 4x32-10 for counter and key zero."""
    words = philox(torch.tensor(0), torch.tensor([0]))
    assert [int(word) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_elements_share_counters_a_slab_apart():
    seed, words = torch.tensor(9), random_words(torch.tensor(9), 10000)
    for element in (0, 1023, 1024, 4095, 4096, 9999):
        counter = element // 4096 * 1024 + element % 1024
        assert words[element] == philox(seed, torch.tensor(counter))[element // 1024 % 4]


@pytest.mark.parametrize("shape", [(7,), (5000,), (3, 1500)])
def test_mask_is_the_definitions_whatever_the_layout(shape):
    seed, x = torch.tensor(123), torch.ones(shape)
    layouts = [x, torch.ones(*shape, 2)[..., 0], x.mT.contiguous().mT if x.ndim > 1 else x]
    with contract.backend("triton"):
        for laid_out in layouts:
            assert torch.equal(ops.dropout(laid_out, seed, 0.3) != 0, ops.dropout.definition(x, seed, 0.3) != 0)


@pytest.mark.parametrize("slab", range(4))
def test_an_element_whose_word_is_the_first_that_keeps_is_kept(slab):
    """On both sides of it, for each of the four words of a counter; by chance it is met once in four billion."""
    seed, at = torch.tensor(123), slab * 1024 + 5
    x, word = torch.ones(4096), int(random_words(seed, 4096)[at])
    assert 0 < word < 2**32 - 1
    for name in ("torch", "triton"):
        with contract.backend(dropout=name):
            assert ops.dropout(x, seed, word / 2**32)[at] != 0
            assert ops.dropout(x, seed, (word + 1) / 2**32)[at] == 0


def test_keep_rate_is_binomial():
    n, p = 1 << 16, 0.1
    dropped = int((ops.dropout(torch.ones(n), torch.tensor(4), p) == 0).sum())
    assert abs(dropped - n * p) < 5 * math.sqrt(n * p * (1 - p))


def test_seeds_give_different_masks_that_agree_as_chance_has_it():
    n = 1 << 16
    one, other = (random_words(torch.tensor(seed), n) & 1 for seed in (1, 2))
    assert abs(int((one == other).sum()) - n / 2) < 5 * math.sqrt(n / 4)


def test_nothing_and_everything():
    x, seed = torch.randn(50), torch.tensor(0)
    assert torch.equal(ops.dropout(x, seed, 0.0), x)
    assert torch.equal(ops.dropout(x, seed, 1.0), torch.zeros(50))
    with pytest.raises(ValueError, match="p must lie between 0 and 1"):
        ops.dropout(x, seed, 1.5)
    with pytest.raises(ValueError, match="one int64 number"):
        ops.dropout(x, seed.int(), 0.5)
