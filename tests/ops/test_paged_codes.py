"""Attention over pages of codes with queries as codes: exact sums, what is taken off keys, what is lost, and what is refused."""

import random

import pytest
import torch
from test_paged_attention import batch_of, in_codes

from tilestack import BackendError, ops
from tilestack.contract import backend
from tilestack.contract.cases import Make
from tilestack.kernels.attention import paged as kernels
from tilestack.lab.bench.quality import quality_of
from tilestack.ops.quantised import quantised

INT8, E4M3 = torch.int8, torch.float8_e4m3fn
PAGE, KV_HEADS, GROUP, DIM = 16, 2, 4, 64
each_backend = pytest.mark.parametrize("chosen", ["torch", "triton"])


def written(tokens, dtype, offset):
    """(queries, keys, values, the arguments of their pages): keys with far channels, of which the mean is taken off or not."""
    make = Make(torch.float32)
    away = make.normal(1, KV_HEADS, DIM) * (1 + 7 * (torch.arange(DIM) % 8 == 3))
    k, v = make.normal(tokens, KV_HEADS, DIM) + away, make.normal(tokens, KV_HEADS, DIM)
    q = make.normal(tokens, KV_HEADS * GROUP, DIM)
    blocks = -(-tokens // PAGE)
    table = torch.tensor(random.Random(0).sample(range(blocks), blocks))
    room = lambda kind, *last: torch.zeros(blocks, PAGE, KV_HEADS, *last, dtype=kind)
    pages = dict(keys=room(dtype, DIM), values=room(dtype, DIM))
    scales = dict(key_scale=room(torch.float32), value_scale=room(torch.float32))
    slots = table.repeat_interleave(PAGE)[:tokens] * PAGE + torch.arange(tokens) % PAGE
    ops.kv_write(k, v, slots, **pages, **scales, key_offset=k.mean(0) if offset else None)
    where = dict(block_tables=table[None], lengths=torch.tensor([tokens]), cu_queries=torch.tensor([0, tokens]))
    return q, k, v, pages | scales | where | dict(most_queries=tokens)


def test_sums_of_int8_products_are_those_of_integers():
    q, _, _, pages = written(40, INT8, offset=True)
    found = ops.paged_attention_codes(q.double(), **pages)
    q_codes, q_scale = quantised(q, INT8)
    rows = lambda name: pages[name][pages["block_tables"][0]].flatten(0, 1)[:40].repeat_interleave(GROUP, 1)
    sums = torch.einsum("qhd,khd->hqk", q_codes.long(), rows("keys").long())
    unit = q_scale.double().T[:, :, None] * rows("key_scale").double().T[:, None, :]
    scores = (sums * unit * DIM**-0.5).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    numbers = rows("values").double() * rows("value_scale").double()[..., None]
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), numbers)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@each_backend
@pytest.mark.parametrize(("dtype", "enough"), [(INT8, 0.999), (E4M3, 0.997)])
def test_what_codes_cost_on_keys_with_far_channels(chosen, dtype, enough):
    """Written less their mean, keys lose little; as they are, more, and those of int8 several times as much."""
    qualities = {}
    for offset in (True, False):
        q, k, v, pages = written(150, dtype, offset)
        exact = ops.attention(q[None].double(), k[None].double(), v[None].double())[0]
        with backend(chosen):
            qualities[offset] = quality_of(ops.paged_attention_codes(q.bfloat16(), **pages), exact)
    assert qualities[True].cosine >= enough
    assert qualities[False].relative_error > (3 if dtype == INT8 else 1) * qualities[True].relative_error


def test_any_offset_leaves_attention_what_it_is():
    """Even one that is far from any key costs only digits."""
    q, k, v, pages = written(70, INT8, offset=False)
    exact = ops.attention(q[None].double(), k[None].double(), v[None].double())[0]
    slots = pages["block_tables"][0].repeat_interleave(PAGE)[:70] * PAGE + torch.arange(70) % PAGE
    room = {name: pages[name] for name in ("keys", "values", "key_scale", "value_scale")}
    errors = []
    for offset in (k.mean(0), k.mean(0) + 3, k.mean(0) - 20):
        ops.kv_write(k, v, slots, **room, key_offset=offset)
        for operator in (ops.paged_attention, ops.paged_attention_codes):
            errors.append(quality_of(operator(q, **pages), exact).relative_error)
    assert errors[0] < errors[2] < errors[4] < 0.3
    assert errors[1] < errors[3] < errors[5] < 0.3


@pytest.mark.parametrize("dtype", [INT8, E4M3])
@pytest.mark.parametrize("config", kernels.MANY_ROWS)
def test_every_tile_of_many_rows_gives_the_same(dtype, config, monkeypatch, as_good_as):
    seen, noted = [], kernels.paged_tile
    monkeypatch.setattr(kernels, "paged_tile", lambda *given: seen.append(noted(*given)) or seen[-1])
    q, _, _, pages = written(90, dtype, offset=True)
    arguments = pages | dict(q=q.bfloat16())
    with backend(paged_attention_codes=f"triton:{config}"):
        found = ops.paged_attention_codes(**arguments)
    assert [tile[:1] + tile[2:5] for tile in seen] == [kernels.MANY_ROWS[config]]
    truth = ops.paged_attention_codes.definition(**arguments | dict(q=arguments["q"].double()))
    as_good_as(found, ops.paged_attention_codes.definition(**arguments), truth)


def test_queries_of_half_precision_are_nearer_than_their_codes():
    q, _, _, pages = written(100, INT8, offset=True)
    truth = ops.paged_attention(q.double(), **pages)
    own, coded = (
        quality_of(op(q, **pages), truth).relative_error for op in (ops.paged_attention, ops.paged_attention_codes)
    )
    assert own < 1e-5 < coded < 0.02


@pytest.mark.parametrize(
    ("chosen", "error"), [("auto", "has no gradient; call it under torch.no_grad()"), ("triton", "it has no backward")]
)
def test_a_gradient_is_refused_by_name(chosen, error):
    arguments, _ = batch_of([(2, 5), (1, 9)])
    arguments |= in_codes(arguments, INT8) | dict(q=arguments["q"].bfloat16().requires_grad_())
    with (
        backend(chosen),
        pytest.raises((RuntimeError, BackendError), match=error.replace("(", r"\(").replace(")", r"\)")),
    ):
        ops.paged_attention_codes(**arguments)
    with torch.no_grad():
        assert not ops.paged_attention_codes(**arguments).requires_grad


def test_pages_without_codes_are_refused():
    arguments, _ = batch_of([(2, 5), (1, 9)])
    with pytest.raises(
        ValueError, match=r"it multiplies codes, and these pages hold torch\.float32; paged_attention takes"
    ):
        ops.paged_attention_codes(**arguments)
    wide = torch.zeros(4, 8, 1, 1100, dtype=INT8)
    changed = dict(keys=wide, values=wide, key_scale=torch.zeros(4, 8, 1), value_scale=torch.zeros(4, 8, 1))
    with pytest.raises(ValueError, match="up to 1040 dimensions"):
        ops.paged_attention_codes(**arguments | changed | dict(q=torch.zeros(3, 1, 1100)))


def test_an_offset_is_for_keys_that_become_codes():
    k, slots, offset = torch.ones(2, 1, 8), torch.tensor([0, 3]), torch.zeros(1, 8)
    plain, codes = torch.zeros(1, 4, 1, 8), torch.zeros(1, 4, 1, 8, dtype=INT8)
    scales = torch.zeros(1, 4, 1), torch.zeros(1, 4, 1)
    with pytest.raises(ValueError, match=r"these of torch\.float32 are kept as they are"):
        ops.kv_write(k, k, slots, plain, plain, key_offset=offset)
    with pytest.raises(ValueError, match="which are values too, are kept"):
        ops.kv_write(k, None, slots, codes, None, scales[0], None, offset)
    with pytest.raises(ValueError, match=r"must be float32 of shape \(1, 8\)"):
        ops.kv_write(k, k, slots, codes, codes.clone(), *scales, offset.double())
