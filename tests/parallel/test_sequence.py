"""Ranks that share a sequence compute what one process does: attention, losses, and every gradient, in float64."""

from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks
from tiny_models import config_of, ours

from tilestack import models, ops
from tilestack.data.packing import NO_LABEL, collate
from tilestack.parallel.heads import attention_by_heads
from tilestack.parallel.ring import RingContext, ring_attention, zigzag_of
from tilestack.parallel.sequence import METHODS, SequenceParallel, cut_batch, refuse_sharing
from tilestack.train.next_token import next_token_loss

ROWS, TOKENS = 2, 32
# Documents that end inside chunks and between them, one that crosses several, one of a whole row, empty ones as padding.
PACKED = [0, 3, 16, 17, 30, 32, 64, 64, 64]
ATTENTION = {  # heads, heads of keys, dim, dim of values, options
    "causal": (8, 8, 8, 8, {}),
    "grouped": (8, 4, 8, 8, {}),
    "one key head": (4, 1, 8, 8, {}),
    "uneven key heads": (12, 6, 8, 8, {}),
    "other values": (4, 2, 12, 8, dict(scale=0.4)),
    "capped": (4, 2, 8, 8, dict(softcap=1.5)),
    "documents": (4, 2, 8, 8, dict(cu_seqlens=torch.tensor(PACKED, dtype=torch.int32))),
    "window": (4, 2, 8, 8, dict(window=5)),
    "documents in a window": (4, 2, 8, 8, dict(window=3, cu_seqlens=torch.tensor(PACKED, dtype=torch.int32))),
}
FAMILIES = {"heads": ("qwen3", "gemma2", "llama_dynamic"), "ring": ("qwen3", "deepseek_v2_lite")}


def cases(method):
    return {name: case for name, case in ATTENTION.items() if method == "heads" or "window" not in case[4]}


def inputs(heads, kv_heads, dim, value_dim):
    """q, k, v and the gradient of the result."""
    numbers = torch.Generator().manual_seed(heads + value_dim)
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim)
    return [torch.randn(ROWS, TOKENS, *shape, generator=numbers, dtype=torch.float64) for shape in shapes]


def packed_batch():
    numbers = torch.Generator().manual_seed(3)
    draw = lambda size: torch.randint(97, (size + 1,), generator=numbers).tolist()
    documents = [[draw(size) for size in row] for row in ((3, 13, 1, 13), (29,))]  # both rows end in padding
    return collate([[(text[:-1], text[1:]) for text in row] for row in documents], TOKENS, 5)


def model_of(family):
    return ours(family).double().train()


def gradients(model):
    return {f"{name}.grad": parameter.grad for name, parameter in model.named_parameters()}


def shared_work(group, method):
    """The results and gradients of this rank's tokens in every case, and the loss and gradients of whole models."""
    rank, ranks = group.rank(), group.size()
    places, found = METHODS[method].places(TOKENS, rank, ranks), {}
    for name, (*sizes, options) in cases(method).items():
        *leaves, arriving = (x[:, places].requires_grad_() for x in inputs(*sizes))
        if method == "heads":
            out = attention_by_heads(*leaves, group, **options)
        else:
            others = dict(options)
            zigzag = zigzag_of(rank, ranks, ROWS, len(places), others.pop("cu_seqlens", None))
            out = ring_attention(*leaves, group, zigzag, **others)
        grads = torch.autograd.grad(out, leaves, arriving.detach())
        found |= {f"{name}/{part}": x for part, x in zip("oqkv", (out, *grads), strict=True)}
    whole = packed_batch()
    for family in FAMILIES[method]:
        model = model_of(family)
        batch = cut_batch(whole, method, rank, ranks)
        model.checkpointing = family == "qwen3"  # attention is computed again, with its messages
        loss = next_token_loss(SequenceParallel(model, group, method), batch)
        loss.backward()
        sums = {"loss": loss.detach(), "count": batch.valid.double(), **gradients(model)}
        found |= {f"{family}/{name}": x for name, x in sums.items()}
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("method", METHODS)
def test_ranks_that_share_a_sequence_compute_what_one_does(method, ranks, tmp_path):
    got = run_ranks(shared_work, ranks, tmp_path, method)
    order = torch.cat([METHODS[method].places(TOKENS, rank, ranks) for rank in range(ranks)]).argsort()
    assert order.sort().values.tolist() == list(range(TOKENS))
    for name, (*sizes, options) in cases(method).items():
        *leaves, arriving = (x.requires_grad_() for x in inputs(*sizes))
        out = ops.attention(*leaves, **options)
        grads = torch.autograd.grad(out, leaves, arriving.detach())
        for part, expected in zip("oqkv", (out, *grads), strict=True):
            joined = torch.cat([each[f"{name}/{part}"] for each in got], 1)[:, order]
            torch.testing.assert_close(joined, expected, rtol=1e-10, atol=1e-12, msg=lambda m: f"{name}/{part}: {m}")
    whole = packed_batch()
    for family in FAMILIES[method]:
        model = model_of(family)
        loss = next_token_loss(model, whole)
        loss.backward()
        for name, expected in {"loss": loss.detach(), "count": whole.valid.double(), **gradients(model)}.items():
            total = sum(each[f"{family}/{name}"] for each in got)
            torch.testing.assert_close(total, expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{family}/{name}: {m}")


def without_positions(group, method):
    model = model_of("qwen3")
    batch = cut_batch(packed_batch(), method, group.rank(), group.size())
    return {"logits": SequenceParallel(model, group, method)(batch.ids)}


def in_half_precision(group, method):
    """Ranks that share rows of bfloat16, the gradient of keys first."""
    rank, ranks = group.rank(), group.size()
    places = METHODS[method].places(TOKENS, rank, ranks)
    *leaves, arriving = (x[:, places].bfloat16().requires_grad_() for x in inputs(4, 2, 8, 8))
    out = ring_attention(*leaves, group, zigzag_of(rank, ranks, ROWS, len(places), None))
    grads = torch.autograd.grad(out, leaves, arriving.detach())
    return {f"{part}": x for part, x in zip("oqkv", (out, *grads), strict=True)}


def test_tokens_stand_where_the_row_has_them(tmp_path):
    """Without positions, a rank's tokens do not begin at 0."""
    got = run_ranks(without_positions, 2, tmp_path, "ring")
    order = torch.cat([METHODS["ring"].places(TOKENS, rank, 2) for rank in range(2)]).argsort()
    expected = model_of("qwen3")(packed_batch().ids)
    torch.testing.assert_close(torch.cat([each["logits"] for each in got], 1)[:, order], expected)


def test_a_ring_in_half_precision_is_as_good_as_one_process(tmp_path, as_good_as):
    got = run_ranks(in_half_precision, 2, tmp_path, "ring")
    order = torch.cat([METHODS["ring"].places(TOKENS, rank, 2) for rank in range(2)]).argsort()

    def alone(dtype):
        *leaves, arriving = (x.bfloat16().to(dtype).requires_grad_() for x in inputs(4, 2, 8, 8))
        out = ops.attention(*leaves)
        return out, *torch.autograd.grad(out, leaves, arriving.detach())

    for part, theirs, truth in zip("oqkv", alone(torch.bfloat16), alone(torch.float64), strict=True):
        as_good_as(torch.cat([each[part] for each in got], 1)[:, order], theirs, truth)


def test_zigzag_order_is_even_work():
    """Each rank has as many pairs of query and key as every other."""
    pairs = [int((METHODS["ring"].places(TOKENS, rank, 4) + 1).sum()) for rank in range(4)]
    assert len(set(pairs)) == 1


def test_a_cut_batch_has_the_labels_of_its_tokens():
    batch = packed_batch()
    for method in METHODS:
        parts = [cut_batch(batch, method, rank, 4) for rank in range(4)]
        assert sum(int(part.valid) for part in parts) == int(batch.valid)
        for rank, part in enumerate(parts):
            places = METHODS[method].places(TOKENS, rank, 4)
            assert torch.equal(part.labels, batch.labels[:, places])
            assert torch.equal(part.positions, batch.positions[:, places])
            assert int(part.valid) == int((part.labels != NO_LABEL).sum())
            assert torch.equal(part.cu_seqlens, batch.cu_seqlens)


@pytest.mark.parametrize(
    ("family", "row", "method", "ranks", "said"),
    [
        ("qwen3", 32, "heads", 3, "rows of 32 tokens cannot be cut into 3 parts"),
        ("qwen3", 32, "heads", 8, "4 heads of queries cannot be dealt to 8 ranks"),
        ("qwen3", 36, "ring", 4, "a multiple of 8"),
        ("gemma2", 32, "ring", 4, "the model has one of 5 tokens; set parallel.context_by"),
        ("phi4_mini_long", 32, "heads", 2, "at most 16 tokens, not 32"),
        ("qwen3", 32, "rings", 2, "'rings' to share a sequence; choose from heads, ring"),
    ],
)
def test_what_cannot_be_shared_is_refused_by_its_numbers(family, row, method, ranks, said):
    config = models.ModelConfig.from_hf(config_of(family))
    with pytest.raises(ValueError, match=said):
        refuse_sharing(config, row, method, ranks)


def test_heads_that_tensor_has_divided_are_fewer_to_deal():
    config = models.ModelConfig.from_hf(config_of("qwen3"))
    refuse_sharing(config, 32, "heads", 2, tensor=2)
    with pytest.raises(ValueError, match="2 heads of queries cannot be dealt to 4 ranks"):
        refuse_sharing(config, 32, "heads", 4, tensor=2)


def test_a_ring_refuses_a_window_that_is_shorter_than_the_row_though_not_than_its_part():
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    context = RingContext(group, METHODS["ring"].places(TOKENS, 0, 2))
    q = torch.zeros(ROWS, TOKENS // 2, 4, 8)
    with pytest.raises(ValueError, match="the model has one of 20 tokens"):
        context.attend(SimpleNamespace(window=20, scale=None, softcap=None), q, q, q)


def test_what_can_be_shared_is_not_refused():
    """A window as long as the row is none, and rows as long as the model was trained on are short."""
    for family, row, method, ranks, changes in (
        ("qwen3", 32, "heads", 4, {}),
        ("gemma2", 32, "heads", 2, {}),
        ("gemma2", 4, "ring", 2, {}),
        ("gemma2", 8, "ring", 2, {"sliding_window": 8}),
        ("phi4_mini_long", 16, "heads", 2, {}),
    ):
        refuse_sharing(models.ModelConfig.from_hf(config_of(family) | changes), row, method, ranks)
