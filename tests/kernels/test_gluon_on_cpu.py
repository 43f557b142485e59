"""Attention for Hopper proved on a CPU, by an emulation of Gluon: what it computes, and that its barriers let it."""

import gluon_emulation
import pytest
import torch
from gluon_emulation import Deadlock, emulate
from torch.utils._python_dispatch import TorchDispatchMode
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from tilestack import ops
from tilestack.contract.descriptors import Tile
from tilestack.contract.launch import launch
from tilestack.contract.repeat import ALLOCATIONS
from tilestack.kernels.attention.documents import document_bounds
from tilestack.kernels.hopper import attention_backward, attention_forward
from tilestack.kernels.hopper.attention import CONFIGS, attention_and_sums, backward, backward_from_sums
from tilestack.kernels.hopper.attention_forward import Forward, attention_and_lse
from tilestack.lab.proof.oracle import judge, own_error
from tilestack.ops.attention import attention_gradient, scale_or_usual

SHAPES = {  # batch, queries, keys, heads, kv_heads, dim, causal
    "one": (1, 1, 1, 1, 1, 64, True),
    "rest": (1, 200, 200, 2, 1, 64, True),
    "whole tiles": (1, 384, 384, 1, 1, 64, True),
    "full": (1, 256, 256, 2, 1, 64, False),
    "full and a rest": (2, 129, 129, 2, 1, 64, False),
    "more keys": (1, 100, 230, 4, 1, 64, True),
    "keys by whole tiles more": (1, 130, 386, 1, 1, 64, True),
    "all of a tile but its last key": (1, 130, 256, 1, 1, 64, True),
    "a key more, seen by the last query of a tile": (1, 130, 131, 1, 1, 64, True),
    "fewer keys": (1, 170, 90, 2, 1, 64, False),
    "queries before the first key": (1, 300, 70, 2, 1, 64, True),
    "one query before the first key": (2, 129, 128, 2, 2, 64, True),
    "groups of heads": (2, 70, 70, 6, 2, 64, True),
    "128": (1, 200, 200, 2, 1, 128, True),
    "128 and more keys": (1, 70, 300, 2, 1, 128, True),
    "128 and fewer keys": (1, 100, 70, 2, 2, 128, False),
    "128 and queries before the first key": (1, 260, 3, 2, 1, 128, True),
}
OWN = {
    (name, dim): of
    for name, config in CONFIGS.items()
    for dim, of in ((64, config.of_64), (128, config.of_128))
    if of and config.own_backward  # else its forward is another's too
}


@pytest.fixture(autouse=True)
def emulated(monkeypatch):
    """Gluon kernels run in the emulation, and Triton's, as ever, in the interpreter."""
    for module in (attention_forward, attention_backward):
        monkeypatch.setattr(
            module,
            "launch",
            lambda kernel, *rest, **named: (emulate if "Gluon" in type(kernel).__name__ else launch)(
                kernel, *rest, **named
            ),
        )
    torch.manual_seed(0)


DOCUMENTS = {  # where documents of flattened rows end, and batch, queries, heads, kv_heads, dim of these rows
    "one": ([200], (1, 200, 2, 1, 64)),
    "short ones": ([3, 4, 70, 71, 200], (1, 200, 2, 1, 64)),
    "a token each": (range(1, 151), (1, 150, 1, 1, 64)),
    "by tiles": ([128, 256, 384], (1, 384, 1, 1, 64)),
    "begin in one tile and end in another": ([40, 300, 390, 400], (1, 400, 2, 1, 64)),
    "all of a tile of keys is of documents before": ([270, 280, 500], (1, 500, 1, 1, 64)),
    "the end of a tile's first key's is a part's": ([64, 192, 256], (1, 256, 1, 1, 64)),
    "rows, and empty ones at the end": ([100, 130, 260, 300, 390, 390, 390], (3, 130, 4, 2, 64)),
    "a row whose documents begin late, and a whole one": ([300, 380, 390, 780], (2, 390, 1, 1, 64)),
    "a whole row, and one whose documents begin late": ([390, 690, 770, 780], (2, 390, 1, 1, 64)),
    "128": ([90, 100, 270, 300, 540, 600], (2, 300, 2, 1, 128)),
}


PARTS_OF_200 = [slice(0, 40), slice(40, 100), slice(100, 170), slice(170, 200)]


def rows_of_documents(ends, shape):
    batch, queries, heads, kv_heads, dim = shape
    q, k, v, _, *rest = inputs(batch, queries, queries, heads, kv_heads, dim, True)
    return q, k, v, torch.tensor([0, *ends], dtype=torch.int32), *rest


def inputs(batch, queries, keys, heads, kv_heads, dim, causal, scale=None):
    shapes = (batch, queries, heads, dim), (batch, keys, kv_heads, dim), (batch, keys, kv_heads, dim)
    q, k, v = (torch.randn(shape).half() for shape in shapes)
    return q, k, v, None, causal, None, scale, None


def inputs_of(*sizes):
    return (inputs, *sizes)


def wide(arguments):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in arguments]


def check_forward(arguments, config):
    q, k, v, cu_seqlens, causal, _, scale, _ = arguments
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    out, lse = attention_and_lse(q, k, v, causal, scale_or_usual(scale, q), config, bounds)
    reference, truth = ops.attention.definition(*arguments), ops.attention.definition(*wide(arguments))
    assert not (message := judge(out, reference, truth, own_error(reference, truth)).message), message
    _, sums = ops.flex_attention(q.double(), k.double(), v.double(), cu_seqlens, causal=causal, scale=scale)
    torch.testing.assert_close(lse.double(), sums, rtol=1e-6, atol=1e-5)
    return out, lse


def check_backward(arguments, out, lse, lay=torch.clone, ordered=False):
    q, k, v, cu_seqlens, causal, _, scale, _ = arguments
    grad = lay(torch.randn(out.shape).half())
    bounds = document_bounds(cu_seqlens, *q.shape[:2])
    found = attention_backward.gradients(
        grad, q, k, v, lay(out), lse, causal, scale_or_usual(scale, q), bounds, ordered
    )
    expected, truths = (
        attention_gradient(arriving, *given, ops.attention.definition(*given))[:3]
        for arriving, given in ((grad, arguments), (grad.double(), wide(arguments)))
    )
    for name, ours, reference, truth in zip("qkv", found, expected, truths, strict=True):
        assert not (message := judge(ours, reference, truth, own_error(reference, truth)).message), f"d{name} {message}"
    return found


@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_its_gradients(shape):
    arguments = inputs(*SHAPES[shape])
    check_backward(arguments, *check_forward(arguments, Forward()))


@pytest.mark.parametrize("documents", DOCUMENTS)
def test_packed_documents_and_their_gradients(documents):
    arguments = rows_of_documents(*DOCUMENTS[documents])
    check_backward(arguments, *check_forward(arguments, Forward()))


@pytest.fixture
def beside_each_other(monkeypatch):
    """Have programs of the ordered backward run so many at a time, and things happen in an order that a seed decides."""

    def set_to(at_most, seed):
        run = lambda kernel, *rest, **named: (
            emulate(kernel, *rest, at_most=at_most, seed=seed, **named)
            if "Gluon" in type(kernel).__name__
            else launch(kernel, *rest, **named)
        )
        monkeypatch.setattr(attention_backward, "launch", run)

    return set_to


IN_ORDER = {
    "causal": inputs_of(1, 390, 390, 2, 1, 64, True),
    "128": inputs_of(1, 300, 300, 2, 2, 128, True),
    "full": inputs_of(1, 140, 300, 1, 1, 64, False),
    "more keys": inputs_of(1, 130, 386, 1, 1, 128, True),
    "documents": (rows_of_documents, [40, 300, 390, 400], (1, 400, 2, 1, 64)),
    "documents of 128": (rows_of_documents, [3, 129, 130, 257, 300], (1, 300, 1, 1, 128)),
}


@pytest.mark.parametrize("case", IN_ORDER)
def test_dq_in_one_order_has_the_same_bits_however_programs_run(case, beside_each_other):
    make, *sizes = IN_ORDER[case]
    arguments = make(*sizes)
    given = arguments, *check_forward(arguments, Forward())
    dq = []
    for at_most, seed in (
        (1, 0),
        (2, 1),
        (3, 2),
        (100, 3),
        (100, 4),
        (100, 5),
    ):  # one at a time: none waits for a program that comes later
        beside_each_other(at_most, seed)
        torch.manual_seed(1)
        dq.append(check_backward(*given, ordered=True)[0])
    assert all(torch.equal(each, dq[0]) for each in dq)


@pytest.mark.parametrize("seed", range(4))
def test_documents_that_end_anywhere(seed):
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(1, 300, (6,), generator=generator).sort().values.tolist()
    arguments = rows_of_documents([*ends, 300], (1, 300, 2, 1, 64))
    check_backward(arguments, *check_forward(arguments, Forward()))


@pytest.mark.parametrize(("name", "dim"), OWN, ids=map(str, OWN))
def test_documents_in_every_configuration(name, dim, monkeypatch):
    monkeypatch.setattr(attention_forward, "multiprocessors", lambda device: 2)
    check_forward(rows_of_documents([40, 300, 390, 400], (1, 400, 3, 1, dim)), OWN[name, dim])


def test_the_backend_hands_documents_to_its_own_kernels_whatever_the_configuration():
    arguments = rows_of_documents([40, 100, 170, 200], (2, 100, 2, 1, 128))
    q, k, v, cu_seqlens, causal, _, scale, _ = arguments
    out, lse = attention_and_sums(*arguments, config=CONFIGS["cudnn"])
    alone = [ops.attention.definition(*(x.flatten(0, 1)[None, part] for x in (q, k, v))) for part in PARTS_OF_200]
    torch.testing.assert_close(out.flatten(0, 1)[None], torch.cat(alone, 1), rtol=2**-9, atol=2**-9)
    grad = torch.randn(out.shape).half()
    from_sums = [
        backward_from_sums(grad, q, k, v, cu_seqlens, causal, scale, out, lse, config) for config in CONFIGS.values()
    ]
    expected = attention_gradient(grad, *arguments, out)
    for found in (*from_sums, backward(grad, q, k, v, cu_seqlens, causal, scale, out, CONFIGS["own"])):
        for ours, theirs in zip(found[:3], expected[:3], strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_a_configuration_hands_the_sums_of_our_forward_to_cudnns_backward(causal, monkeypatch):
    """There is no cuDNN here: what it would be given is checked against its schema, and is enough for the gradients."""
    schema = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default._schema
    names, asked = [argument.name for argument in schema.arguments], []

    def cudnn(*given, scale):
        given = dict(zip(names, given, strict=False))
        asked.append(given)
        grad, q, k, v, out = (given[name].transpose(1, 2) for name in ("grad_out", "query", "key", "value", "out"))
        scores = torch.einsum("bqhd,bkhd->bhqk", q.double() * scale, k.double().repeat_interleave(2, 2))
        seen = torch.ones(scores.shape[-2:]).tril() if given["is_causal"] else torch.ones(scores.shape[-2:])
        weights = torch.where(seen.bool(), (scores - given["logsumexp"]).exp(), 0)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:3]).double(), rtol=1e-3, atol=1e-3)
        return [x.transpose(1, 2) for x in attention_gradient(grad, q, k, v, None, given["is_causal"], None, scale, None, out)[:3]]  # fmt: skip

    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", cudnn)
    arguments = inputs(2, 70, 70, 4, 2, 64, causal, 0.3)
    q, k, v, cu_seqlens, causal, _, scale, _ = arguments
    out, lse = attention_and_sums(*arguments, config=CONFIGS["cudnn_backward"])
    grad = torch.randn(out.shape).half()
    found = backward_from_sums(grad, q, k, v, cu_seqlens, causal, scale, out, lse, CONFIGS["cudnn_backward"])
    assert [(given["max_q"], given["max_k"], given["dropout_p"], given["attn_bias"]) for given in asked] == [(70, 70, 0.0, None)]  # fmt: skip
    for ours, theirs in zip(found[:3], attention_gradient(grad, *arguments, out)[:3], strict=True):
        torch.testing.assert_close(ours, theirs)
    assert found[3] is None


def test_more_keys_than_queries_go_back_by_our_kernels(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention_backward", None)
    q, k, v, cu_seqlens, causal, _, scale, _ = arguments = inputs(1, 100, 130, 2, 1, 64, True)
    out, lse = attention_and_sums(*arguments, config=CONFIGS["cudnn_backward"])
    grad = torch.randn(out.shape).half()
    ours = backward_from_sums(grad, q, k, v, cu_seqlens, causal, scale, out, lse, CONFIGS["own"])
    found = backward_from_sums(grad, q, k, v, cu_seqlens, causal, scale, out, lse, CONFIGS["cudnn_backward"])
    assert all(torch.equal(one, other) for one, other in zip(ours[:3], found[:3], strict=True))


def test_documents_whose_neighbours_would_outweigh_all():
    """Scores between documents are so much higher than those within that their weights would be infinite."""
    q, k, v, *rest = rows_of_documents([150, 300], (1, 300, 1, 1, 64))
    q[:, 150:], k[:, 150:], k[:, :150] = q[:, 150:].abs() * 20, -k[:, 150:].abs() * 20, k[:, :150].abs() * 20
    arguments = q, k, v, *rest
    check_backward(arguments, *check_forward(arguments, Forward()))


@pytest.mark.parametrize(("name", "dim"), OWN, ids=map(str, OWN))
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_configuration(name, dim, causal, monkeypatch):
    monkeypatch.setattr(attention_forward, "multiprocessors", lambda device: 2)
    check_forward(inputs(1, 250, 390, 3, 1, dim, causal), OWN[name, dim])


@pytest.mark.parametrize("seed", range(8))
def test_in_whatever_order_things_happen(seed, monkeypatch):
    monkeypatch.setattr(
        gluon_emulation.emulate, "__kwdefaults__", gluon_emulation.emulate.__kwdefaults__ | dict(seed=seed)
    )
    monkeypatch.setattr(attention_forward, "multiprocessors", lambda device: 1)
    config = Forward(slots=2 + seed % 2, ping_pong=seed % 4 < 2)
    arguments = inputs(1, 200, 200, 2, 1, 64, True)
    check_backward(arguments, *check_forward(arguments, config))


@pytest.mark.parametrize("dim", [64, 128])
def test_another_scale(dim):
    arguments = inputs(1, 70, 70, 1, 1, dim, True, 0.3)
    check_backward(arguments, *check_forward(arguments, Forward()))


def test_more_heads_than_share_the_cache(monkeypatch):
    """Three, two at a time: a band that is full, and a rest."""
    monkeypatch.setattr(attention_backward, "HEADS_AT_A_TIME", 2)
    arguments = inputs(1, 150, 150, 3, 3, 64, True)
    check_backward(arguments, *check_forward(arguments, Forward(heads_at_a_time=2)))


def beside_nan(x, dim):
    """x and as many NaN, in one piece of memory."""
    return torch.cat([x, torch.full_like(x, torch.nan)], dim).narrow(dim, 0, x.shape[dim])


READ_AS_THEY_LIE = {
    "heads before tokens": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "some heads before tokens": lambda x: beside_nan(x.transpose(1, 2), 1).transpose(1, 2),
    "tokens before rows": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "heads before rows": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "some of the heads": lambda x: beside_nan(x, 2),
    "some of the tokens": lambda x: beside_nan(x, 1),
    "beside keys and values": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], 2)[:, :, 0],
    "half of each head": lambda x: beside_nan(x, 3),
}
COPIED = {
    "every other element": lambda x: torch.stack([x, torch.full_like(x, torch.nan)], -1)[..., 0],
    "heads off 16 bytes": lambda x: torch.cat([x, x[..., :2]], 3)[..., : x.shape[3]],
}


@pytest.mark.parametrize("lie", READ_AS_THEY_LIE | COPIED)
def test_what_lies_apart_in_memory(lie):
    lay = (READ_AS_THEY_LIE | COPIED)[lie]
    q, k, v, *rest = inputs(2, 70, 70, 4, 2, 64, False)
    arguments = lay(q), lay(k), lay(v), *rest
    check_backward(arguments, *check_forward(arguments, Forward()), lay)


class Copies(TorchDispatchMode):
    """What PyTorch does with elements, which is more than allocating and viewing them."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in ALLOCATIONS and not any(found.alias_info for found in func._schema.returns):
            self.made.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("lie", READ_AS_THEY_LIE)
@pytest.mark.parametrize("dim", [64, 128])
def test_nothing_is_copied(lie, dim, monkeypatch):
    """Kernels are handed the memory they are given, forward and backward, and results lie as queries, keys and values do."""
    moved = []
    for module in (attention_forward, attention_backward):
        monkeypatch.setattr(
            module, "launch", lambda kernel, grid, *given, **named: moved.append(memory_of_tiles(given))
        )
    lay = READ_AS_THEY_LIE[lie]
    q, k, v, *_ = inputs(2, 130, 70, 4, 2, dim, False)
    q, k, v, grad = lay(q), lay(k), lay(v), lay(q.clone())
    with Copies() as copies:
        out, lse = attention_and_lse(q, k, v, False, 0.1, Forward())
        dq, dk, dv = attention_backward.gradients(grad, q, k, v, out, lse, False, 0.1)
    assert copies.made == []
    addresses = lambda *tensors: [x.data_ptr() for x in tensors]
    forward, _, backward, _ = moved
    assert forward == addresses(q, k, v, out)
    assert [*backward[:4], *backward[5:]] == addresses(q, k, v, grad, dk, dv)
    for result, given in ((out, q), (dq, q), (dk, k), (dv, v)):
        assert (result.stride(2) > result.stride(1)) == (given.stride(2) > given.stride(1))


def memory_of_tiles(arguments):
    return [tile.tensor.data_ptr() for tile in arguments if isinstance(tile, Tile)]


@pytest.mark.parametrize("shape", ["full and a rest", "rest", "128 and fewer keys"])
def test_scores_so_low_that_a_key_beyond_the_last_would_weigh_more_than_all(shape):
    q, k, v, *rest = inputs(*SHAPES[shape])
    arguments = q.abs() * 20, -k.abs() * 20, v, *rest
    check_backward(arguments, *check_forward(arguments, Forward()))


@gluon.jit
def bring_tiles(source_desc, out_desc, slot, result, full, free, TILES, FREES, WAITS):
    for tile in range(TILES):
        mbarrier.wait(free, (tile + 1) % 2)
        mbarrier.expect(full, source_desc.block_type.nbytes)
        tma.async_copy_global_to_shared(source_desc, [tile * 16, 0], full, slot)


@gluon.jit
def square_tiles(source_desc, out_desc, slot, result, full, free, TILES, FREES, WAITS):
    for tile in range(TILES):
        mbarrier.wait(full, tile % 2)
        total = warpgroup_mma(slot, slot, gl.zeros((16, 16), gl.float32, None), use_acc=False, is_async=True)
        if FREES == "too early":
            mbarrier.arrive(free, count=1)
        if WAITS:
            total = warpgroup_mma_wait(0, deps=(total,))
        if FREES == "in time":
            mbarrier.arrive(free, count=1)
        tma.store_wait(0)
        result.store(total)
        if not WAITS:
            warpgroup_mma_wait(0)
        tma.async_copy_shared_to_global(out_desc, [tile * 16, 0], result)
    tma.store_wait(0)


@gluon.jit
def squares_kernel(source_desc, out_desc, TILES: gl.constexpr, FREES: gl.constexpr, WAITS: gl.constexpr):
    """Square matrices, one after the other, through one slot of shared memory, rightly or not."""
    slot = gl.allocate_shared_memory(source_desc.dtype, source_desc.block_type.shape, source_desc.layout)
    result = gl.allocate_shared_memory(out_desc.dtype, out_desc.block_type.shape, out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    mbarrier.init(free, count=1)
    arguments = source_desc, out_desc, slot, result, full, free, TILES, FREES, WAITS
    gl.warp_specialize([(square_tiles, arguments), (bring_tiles, arguments)], [1], [24])


def squares(frees="in time", waits=True, seed=0):
    """(what the kernel above makes of six matrices, what it should)."""
    source, out = torch.randn(96, 16), torch.full((96, 16), torch.nan)
    tiles = Tile.of(source, (16, 16)), Tile.of(out, (16, 16))
    emulate(squares_kernel, (1,), *tiles, seed=seed, TILES=6, FREES=frees, WAITS=waits)
    return out, (source.view(6, 16, 16) @ source.view(6, 16, 16)).view(96, 16)


def test_the_emulation_finds_what_is_planted():
    torch.testing.assert_close(*squares())
    with pytest.raises(Deadlock, match="waits for phase"):
        squares(frees="never")
    wrong = [not torch.allclose(*squares(frees="too early", seed=seed)) for seed in range(10)]
    assert any(wrong)
    found, expected = squares(waits=False)
    assert not torch.allclose(found, expected)
