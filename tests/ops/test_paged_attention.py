"""Attention over pages, against `attention` of each sequence alone; what fills the pages; and grids that know only shapes."""

import itertools
import random

import pytest
import torch

from tilestack import contract, ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.attention import paged as kernels
from tilestack.lab.proof.memory_guards import poisoned_memory
from tilestack.ops.quantised import quantised

each_backend = pytest.mark.parametrize("chosen", ["torch", "triton"])
PAGE, PAGES = 8, 64


def batch_of(spans, heads=4, kv_heads=2, dim=16, seed=0, pages=None):
    """Queries and a pool for sequences of (new tokens, tokens in all), and the keys and values of each by itself."""
    make = Make(torch.float32, seed=seed)
    order = random.Random(seed).sample(range(PAGES), PAGES)
    keys, values = (torch.full((PAGES, PAGE, kv_heads, dim), torch.nan) for _ in range(2))
    tables = torch.zeros(len(spans), max(-(-total // PAGE) for _, total in spans) + 1, dtype=torch.int64)
    alone = []
    for number, (_, total) in enumerate(spans):
        mine = [order.pop() for _ in range(-(-total // PAGE))]
        tables[number, : len(mine)] = torch.tensor(mine)
        k, v = make.normal(total, kv_heads, dim), make.normal(total, kv_heads, dim)
        slots = tables[number].repeat_interleave(PAGE)[:total] * PAGE + torch.arange(total) % PAGE
        ops.kv_write(k, v, slots, keys, values)
        alone.append((k, v))
    ends = torch.tensor([0, *itertools.accumulate(new for new, _ in spans)])
    arguments = dict(
        q=make.normal(int(ends[-1]), heads, dim),
        keys=keys,
        values=values,
        block_tables=tables,
        lengths=torch.tensor([total for _, total in spans]),
        cu_queries=ends,
        most_queries=max(new for new, _ in spans),
    )
    return arguments, alone


def in_codes(arguments, dtype):
    """The keys and values of a batch as codes and their scales."""
    codes = {}
    for name in ("key", "value"):
        codes[f"{name}s"], codes[f"{name}_scale"] = quantised(arguments[f"{name}s"], dtype)
    return codes


@each_backend
@pytest.mark.parametrize("options", [{}, dict(window=5), dict(softcap=1.5), dict(scale=0.1, window=30)], ids=str)
def test_a_batch_is_its_sequences_alone(chosen, options):
    spans = [(1, 19), (6, 6), (0, 3), (11, 44), (1, 1), (2, 9)]
    arguments, alone = batch_of(spans)
    with backend(chosen):
        found = ops.paged_attention(**arguments, **options).split([new for new, _ in spans])
    for number, (k, v) in enumerate(alone):
        q = arguments["q"].split([new for new, _ in spans])[number]
        if len(q):
            expected = ops.attention(q[None], k[None], v[None], **options)[0]
            torch.testing.assert_close(found[number], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("spans", [[(1, 300)], [(1, 290), (1, 1), (1, 130)], [(5, 300)]], ids=str)
def test_what_is_split_and_merged_is_the_whole(spans, monkeypatch):
    monkeypatch.setattr(kernels, "LEAST_SPAN", 16)
    monkeypatch.setattr(kernels, "PROGRAMS", 8)
    arguments, _ = batch_of(spans)
    expected = ops.paged_attention(**arguments)
    seen = []
    noted = kernels.paged_tile
    monkeypatch.setattr(kernels, "paged_tile", lambda *given: seen.append(noted(*given)) or seen[-1])
    with backend("triton"):
        for _ in range(2):  # the counters are left as they were found
            torch.testing.assert_close(ops.paged_attention(**arguments), expected, rtol=1e-5, atol=1e-5)
    assert seen[0].splits > 1


def test_rows_that_see_nothing_of_a_first_tile_keep_small_scores():
    """Scores far below zero, of keys that come after a tile in which a row sees nothing."""
    arguments, _ = batch_of([(20, 150)], heads=2, kv_heads=1)
    arguments["q"] = torch.ones_like(arguments["q"]) * 40
    arguments["keys"] = torch.where(arguments["keys"].isnan(), torch.nan, -1 - 0.001 * arguments["keys"])
    with backend("triton"):
        found = ops.paged_attention(**arguments, window=3)
    torch.testing.assert_close(found, ops.paged_attention(**arguments, window=3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@each_backend
def test_codes_in_pages_are_nearly_the_numbers(dtype, chosen):
    arguments, _ = batch_of([(1, 33), (4, 12)])
    exact = ops.paged_attention(**arguments)
    arguments |= in_codes(arguments, dtype)
    with backend(chosen):
        found = ops.paged_attention(**arguments)
    error = (found - exact).norm() / exact.norm()
    assert 1e-4 < error < (0.02 if dtype == torch.int8 else 0.06)


def batch_of_codes(dtype, query=torch.bfloat16, **options):
    arguments, _ = batch_of([(1, 33), (4, 12), (1, 70)], dim=32, **options)
    return arguments | in_codes(arguments, dtype) | dict(q=arguments["q"].to(query))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("query", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [1, 2], ids=["rows of odd length", "an odd beginning"])
def test_codes_read_two_at_a_time_are_those_read_one_by_one(dtype, query, more):
    arguments = batch_of_codes(dtype, query)
    values = arguments["values"]
    assert kernels.in_pairs(values)
    with backend("triton"):
        found = ops.paged_attention(**arguments)
        arguments["values"] = torch.cat((values[..., :1], values, values[..., 1:more]), -1)[..., 1:33]
        assert not kernels.in_pairs(arguments["values"])
        assert torch.equal(ops.paged_attention(**arguments), found)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [2.0**-100, 2.0**20, 2.0**100])
def test_queries_beyond_float16_meet_codes_unharmed(dtype, size):
    """Codes are multiplied in float16, which ends at 65,504: queries of any size are brought to it and back."""
    arguments = batch_of_codes(dtype)
    with backend("triton"):
        expected = ops.paged_attention(**arguments, scale=0.25)
        arguments["q"] = arguments["q"] * size
        assert torch.equal(ops.paged_attention(**arguments, scale=0.25 / size), expected)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-8])
def test_a_value_far_smaller_than_its_neighbours_is_not_lost(dtype, size, as_good_as):
    """Where a query sees it alone, though others lie beside it, as the first query of a prompt does."""
    arguments, _ = batch_of([(4, 4), (1, 40)], dim=32)
    for page in arguments["block_tables"][:, 0]:
        arguments["values"][page, 0] *= size
    arguments |= in_codes(arguments, dtype) | dict(q=arguments["q"].bfloat16())
    with backend("triton"):
        found = ops.paged_attention(**arguments)
    truth = ops.paged_attention.definition(**arguments | dict(q=arguments["q"].double()))
    as_good_as(found[0], ops.paged_attention.definition(**arguments)[0], truth[0])


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-8])
@pytest.mark.parametrize("latent", [False, True], ids=["values", "latent"])
def test_elements_of_a_query_far_smaller_than_its_largest_are_not_lost(dtype, size, latent, as_good_as):
    """Where keys have nothing at the place of the largest, they decide alone; it is the last, beyond the values of latents."""
    arguments, _ = batch_of([(1, 33), (4, 12)], dim=32)
    arguments["keys"][..., -1] = 0
    arguments["q"][..., -1] = 1 / size
    arguments |= in_codes(arguments, dtype) | dict(q=arguments["q"].bfloat16(), scale=1.0)
    if latent:
        arguments |= dict(values=None, value_scale=None, value_dim=16)
    with backend("triton"):
        found = ops.paged_attention(**arguments)
    truth = ops.paged_attention.definition(**arguments | dict(q=arguments["q"].double()))
    as_good_as(found, ops.paged_attention.definition(**arguments), truth)


@each_backend
def test_padding_is_zero_and_stored_nowhere(chosen):
    arguments, _ = batch_of([(2, 5), (1, 9)])
    arguments["q"] = torch.cat((arguments["q"], torch.full((3, 4, 16), torch.nan)))
    with backend(chosen):
        assert not ops.paged_attention(**arguments)[3:].any()
        pages = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
        ops.kv_write(torch.ones(4, 1, 8), torch.ones(4, 1, 8), torch.tensor([-1, 5, -1, 0]), *pages)
    for kept in pages:
        assert kept.flatten(0, 1)[:, 0, 0].tolist() == [1, 0, 0, 0, 0, 1, 0, 0]


@each_backend
def test_padding_is_zero_where_no_sequence_has_a_new_token(chosen):
    arguments, _ = batch_of([(0, 5), (0, 9)])
    arguments |= dict(q=torch.full((3, 4, 16), torch.nan), most_queries=0)
    with backend(chosen), poisoned_memory():
        assert not ops.paged_attention(**arguments).any()


@pytest.mark.parametrize(("kind", "largest"), [(torch.int8, 127), (torch.float8_e4m3fn, 448)])
def test_the_largest_of_a_head_is_on_the_largest_code(kind, largest):
    pages = torch.zeros(1, 4, 2, 8, dtype=kind), torch.zeros(1, 4, 2, 8, dtype=kind)
    scales = torch.zeros(1, 4, 2), torch.zeros(1, 4, 2)
    k = Make().normal(1, 2, 8)
    ops.kv_write(k, 3 * k, torch.tensor([2]), *pages, *scales)
    assert pages[0][0, 2].float().abs().amax(-1).tolist() == [largest] * 2
    torch.testing.assert_close(scales[1], 3 * scales[0])
    half_a_step = {torch.int8: 0.5 / 127, torch.float8_e4m3fn: 1 / 16}[kind]
    error = (pages[0].float() * scales[0][..., None])[0, 2] - k[0]
    assert (error.abs() <= half_a_step * k.abs().amax(-1)[0, :, None]).all()


def test_the_grid_knows_only_shapes():
    """On `meta` there is nothing to read; what cuts a batch is given no device tensor."""
    q, pages = torch.empty(96, 16, 128, dtype=torch.bfloat16), torch.empty(64, 16, 8, 128, dtype=torch.bfloat16)
    decode = kernels.paged_tile(q, pages, 1, 96, 4096, 128)
    assert (decode.rows, decode.each, decode.splits) == (16, 1, 1)
    assert decode.tiles == 96 + 96 * 2 // 16  # one for each sequence, and what may be padding
    mixed = kernels.paged_tile(q, pages, 64, 33, 4096, 128)
    assert (mixed.each, mixed.tiles) == (0, 96 * 2 // 64 + 33 + 1)
    alone = kernels.paged_tile(q[:1], pages, 1, 1, 8192, 128)
    assert alone.splits * alone.tiles * 8 >= 2 * 4  # the interpreter counts as four multiprocessors
    of_codes = kernels.paged_tile(q[:1], pages.to(torch.int8), 1, 1, 8192, 128)
    assert of_codes.splits == 4 * alone.splits  # programs of one warp, of which more are at work


@pytest.mark.parametrize(
    ("sequences", "heads", "kv_heads", "dtype", "expected"),
    [
        (1, 16, 8, torch.bfloat16, kernels.FEW_PROGRAMS),
        (1, 2, 1, torch.int8, kernels.FEW_PROGRAMS),
        (1, 32, 8, torch.int8, kernels.FEW_PROGRAMS),
        (3, 16, 8, torch.bfloat16, kernels.FEW_PROGRAMS),  # with one for padding, eight programs to a multiprocessor
        (4, 16, 8, torch.bfloat16, kernels.MANY_PROGRAMS),
        (64, 16, 8, torch.bfloat16, kernels.MANY_PROGRAMS),
        (1, 16, 8, torch.int8, kernels.OF_CODES),
        (64, 16, 8, torch.int8, kernels.OF_CODES),
        (64, 32, 8, torch.float8_e4m3fn, kernels.MANY_OF_WIDE_GROUPS),
    ],
)
def test_many_programs_are_small_ones(sequences, heads, kv_heads, dtype, expected):
    q, pages = torch.empty(sequences, heads, 128, dtype=torch.bfloat16), torch.empty(64, 16, kv_heads, 128, dtype=dtype)
    tile = kernels.paged_tile(q, pages, 1, sequences, 4096, 128)
    assert (tile.keys, tile.warps, tile.stages) == expected


@pytest.fixture
def values_checked():
    contract.check_values(True)
    yield
    contract.check_values(None)


def test_values_that_name_nothing_are_refused(values_checked):
    arguments, _ = batch_of([(2, 5), (1, 9)])
    for name, value, message in (
        ("lengths", torch.tensor([5, 90]), "its block table holds"),
        ("lengths", torch.tensor([1, 9]), "sequence 0 has 2 new tokens and 1 in all"),
        ("cu_queries", torch.tensor([0, 2, 9]), "at most the 3 tokens"),
        ("block_tables", torch.full((2, 3), 64), "names none of 64 pages"),
    ):
        with pytest.raises(IndexError, match=message):
            ops.paged_attention(**arguments | {name: value})
    pages = torch.zeros(2, 4, 1, 8), torch.zeros(2, 4, 1, 8)
    with pytest.raises(IndexError, match="same slot"):
        ops.kv_write(torch.ones(2, 1, 8), torch.ones(2, 1, 8), torch.tensor([3, 3]), *pages)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(q=torch.zeros(3, 3, 16)), "multiple of 2 heads"),
        (dict(values=None), "value_dim says"),
        (dict(keys=torch.zeros(4, 8, 2, 16, dtype=torch.int8)), "need a scale"),
        (dict(lengths=torch.zeros(3)), "int32 or int64"),
        (dict(window=0), "1 or more"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(changed, message):
    arguments, _ = batch_of([(2, 5), (1, 9)])
    with pytest.raises((ValueError, TypeError), match=message):
        ops.paged_attention(**arguments | changed)


def test_turned_and_stored_at_once_is_one_after_the_other():
    """Into pages of int8, whose codes may be one off where a turned key lies between two."""
    make = Make(torch.float32)
    heads, angles = make.normal(6, 8, 16), make.uniform(40, 8, high=6.0)
    weights, positions = (make.normal(16, mean=1), make.normal(16, mean=1)), torch.tensor([3, 0, 39, 7, 7, 1])
    slots = torch.tensor([5, -1, 0, 11, 3, 8])
    room = lambda: [torch.zeros(3, 4, 2, 16, dtype=torch.int8) for _ in "kv"] + [torch.zeros(3, 4, 2) for _ in "kv"]
    turning = angles.cos(), angles.sin(), positions
    expected, found = room(), room()
    q, k = ops.qk_norm_rope(heads[None, :, :4], heads[None, :, 4:6], *weights, *turning[:2], positions[None])
    ops.kv_write(k[0], heads[:, 6:], slots, *expected)
    with backend("triton"):
        turned = ops.qkv_rope_write(heads, *weights, *turning, slots, *found[:2], 4, False, 1e-6, *found[2:])
    torch.testing.assert_close(turned, q[0])
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours.float() - theirs.float()).abs().max() <= (1 if ours.dtype == torch.int8 else 1e-6)
    assert not found[0].flatten(0, 1)[1].any()
