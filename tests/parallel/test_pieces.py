"""The parts of parallel training: cuts and layouts, the divided head, buckets of gradients, and stopping together."""

import pieces
import pretraining
import pytest
import torch
from ranks import run_ranks
from tiny_models import config_of

from tilestack import models, ops
from tilestack.models.weights import layout
from tilestack.parallel.mesh import Layout, Mesh
from tilestack.parallel.processes import ProcessLost, said_already
from tilestack.parallel.tensor import CannotSplit, Cut, cuts, refuse_split
from tilestack.train.checkpoint import Checkpoints


def described(family: str, **changed) -> models.ModelConfig:
    return models.ModelConfig.from_hf(config_of(family) | changed)


def test_the_processes_that_other_sides_leave_are_data():
    assert Layout.fit(8, tensor=2) == Layout(data=4, tensor=2)
    assert Layout.fit(12, tensor=2, context=3, pipeline=2).sizes == (2, 1, 3, 2)
    assert Layout.fit(1).world == 1
    with pytest.raises(
        ValueError, match=r"parallel.tensor = 2 · parallel.context = 3 needs a multiple of 6 .* are 8; start 6"
    ):
        Layout.fit(8, tensor=2, context=3)


@pytest.mark.parametrize("items", [7, 6, 2])
def test_ranks_have_all_of_what_they_share(monkeypatch, items):
    mesh, parts = Mesh(), []
    monkeypatch.setattr(mesh, "size", lambda side: 3)
    for rank in range(3):
        monkeypatch.setattr(mesh, "index", lambda side, rank=rank: rank)
        parts.append(mesh.share(range(items), "data"))
    assert [item for part in parts for item in part] == list(range(items))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("family", ["llama_biased", "qwen2", "qwen3", "phi3", "gemma3"])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_parts_of_a_parameter_make_it_whole_again(family, ranks):
    config = described(family)
    shapes = {name: param.shape for name, param in models.Decoder(config).named_parameters()}
    found = cuts(config)
    for name, cut in found.items():
        whole = torch.arange(shapes[name].numel()).view(shapes[name])
        parts = [cut.part(whole, rank, ranks) for rank in range(ranks)]
        assert [part.shape for part in parts] == [cut.shape(whole.shape, rank, ranks) for rank in range(ranks)]
        assert torch.equal(cut.join(parts), whole)
    left = {name.rpartition(".")[0].rpartition(".")[2] for name in shapes.keys() - found.keys()}
    assert all("norm" in name or name in ("output", "down") for name in left)  # of the last two, biases


def test_a_rank_has_the_queries_keys_and_values_of_its_own_heads():
    config = described("qwen3")
    whole = torch.cat(
        [torch.full((piece.rows,), n) for n, piece in enumerate(layout(config)["layers.0.attention.qkv.weight"])]
    )
    for rank in range(2):
        part = Cut(0, cuts(config)["layers.0.attention.qkv.weight"].pieces).part(whole, rank, 2)
        assert part.bincount().tolist() == [2 * 24, 24, 24]


@pytest.mark.parametrize(
    ("family", "ranks", "words"),
    [
        ("qwen3_moe", 2, "a mixture of experts"),
        ("deepseek_v2", 2, "latent attention (MLA, kv_lora_rank)"),
        ("olmo2", 2, "norms over all queries of a token"),
        ("qwen3", 3, "parallel.tensor = 3 does not divide the model's num_attention_heads, 4; 2 would"),
        ("qwen3", 4, "parallel.tensor = 4 does not divide the model's num_key_value_heads, 2; 2 would"),
        ("qwen2", 2, ""),
    ],
)
def test_a_model_that_cannot_be_split_is_refused_by_its_numbers(family, ranks, words):
    if not words:
        refuse_split(described(family), ranks)
        return
    with pytest.raises(CannotSplit) as refused:
        refuse_split(described(family), ranks)
    assert words in str(refused.value)


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What two processes found, and where."""
    folder = tmp_path_factory.mktemp("pieces")
    (folder / "ranks").mkdir()
    return run_ranks(pieces.pieces, 2, folder / "ranks", pretraining.write_texts(folder), folder), folder


@pytest.mark.parametrize("dtype", pieces.DTYPES)
@pytest.mark.parametrize("cap", [0.0, 2.0])
def test_the_loss_of_a_divided_head_is_that_of_a_whole_one(two, dtype, cap):
    exact = [t.double().requires_grad_() if t.is_floating_point() else t for t in pieces.head(pieces.DTYPES[dtype])]
    loss = ops.linear_cross_entropy(*exact, softcap=cap, reduction="sum")
    (loss * 3).backward()
    summed, ranks = [x.grad for x in exact[:2]], two[0]
    losses = ops.linear_cross_entropy(*exact, softcap=cap, reduction="none")
    by_rows = torch.autograd.grad(losses, exact[:2], pieces.of_rows(losses))
    dweight = lambda name: torch.cat([rank[f"{dtype} {cap} {name}"] for rank in ranks])
    found = {
        "loss": (ranks[0][f"{dtype} {cap} loss"], loss),
        "dx": (ranks[1][f"{dtype} {cap} dx"], summed[0]),
        "dweight": (dweight("dweight"), summed[1]),
        "losses": (ranks[0][f"{dtype} {cap} losses"], losses),
        "dx by rows": (ranks[1][f"{dtype} {cap} dx by rows"], by_rows[0]),
        "dweight by rows": (dweight("dweight by rows"), by_rows[1]),
    }
    for name, (ours, true) in found.items():
        # Logits, their gradient and what is made of it are rounded, once each, and eight of them summed.
        assert (ours.double() - true).abs().max() <= 16 * torch.finfo(pieces.DTYPES[dtype]).eps * true.abs().max(), name


def test_shares_that_differ_by_a_word_take_the_same_rows_at_a_time(two):
    """Of logits whose exponentials are infinite."""
    x, weight, labels = pieces.many_rows()
    x, weight = x.requires_grad_(), weight.requires_grad_()
    assert (x @ weight.T).amax().exp().isinf()
    loss = ops.linear_cross_entropy(x, weight, labels, reduction="sum")
    loss.backward()
    ranks = two[0]
    for rank in ranks:
        torch.testing.assert_close(rank["uneven loss"], loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(rank["uneven dx"], x.grad, rtol=0, atol=1e-9)
    dweight = torch.cat([rank["uneven dweight"] for rank in ranks])
    torch.testing.assert_close(dweight, weight.grad, rtol=0, atol=1e-11 * float(weight.grad.abs().max()))


def test_the_scalar_that_arrives_at_a_divided_head_is_not_rounded_to_its_dtype(two):
    """1 / 60000 is 0.2% off in bfloat16, and with it every gradient of a run."""
    for rank in two[0]:
        for name in ("dx", "dweight"):
            one, found = rank[f"arriving 1 {name}"], rank[f"arriving 1 / 60000 {name}"]
            assert torch.equal(found, (one.float() * (1 / torch.tensor(60000.0))).bfloat16())


def test_a_placed_model_is_the_first_process_s_whatever_the_others_had(two):
    model = pieces.decoder("qwen2", seed=0)
    hidden, arriving = pieces.logits_and_gradient()
    (expected,) = torch.autograd.grad(model.logits(hidden), hidden, arriving)
    for rank in two[0]:
        assert torch.equal(rank["embedded"][0, [0, 1, 4]], model.embedding.weight[[0, 96, 48]])
        torch.testing.assert_close(rank["gradient by logits"], expected, rtol=1e-12, atol=1e-12)


def test_labels_and_words_that_do_not_exist_are_nan_as_in_one_process(two):
    for rank in two[0]:
        assert rank["unknown 0"].isnan()
        assert rank["unknown 1"].isnan()
        assert rank["embedded"].isnan().any(-1).tolist() == [[False, False, True, True, False]]


def test_gradients_are_summed_in_the_last_backward_also_where_a_rank_has_none(two):
    for number, rank in enumerate(two[0]):
        assert rank["before"].tolist() == [number + 1.0] * 3
        for n in range(4):
            assert rank[f"grad {n} of step 0"].tolist() == [2.0 if n == 2 else 6.0] * (3 + n)
            assert rank[f"grad {n} of step 1"].tolist() == [3.0] * (3 + n)
        assert rank["largest"] == 9
        assert bytes(rank["texts"].tolist()).decode() == "é\néé"
        assert int(rank["many"]) == 2**25 + 2  # which float32 does not hold


def test_others_come_when_the_first_process_has_left(two):
    assert all(rank["there"] for rank in two[0])


def test_what_is_summed_over_ranks_is_left_as_it_was(two):
    for rank in two[0]:
        assert rank["summed"].tolist() == [4.0] * 3
        assert rank["beside a sum"].tolist() == [6.0] * 3  # the sum, 4, and x, 2, as summed passes its gradient on
        assert rank["beside what entered"].tolist() == [3.0] * 3  # 2 ranks', and its own


def test_a_signal_to_one_process_stops_all_after_the_same_step(two):
    ranks, folder = two
    assert [int(rank["code"]) for rank in ranks] == [143, 143]
    assert Checkpoints(folder / "stopped" / "checkpoints", 9).steps() == [2, 3]


def test_processes_with_other_texts_have_other_chances(two):
    """For what is dropped at random."""
    first, second = (int(rank["seed"]) for rank in two[0])
    assert second == first + 1


def test_a_sharded_model_is_again_what_it_was_when_it_is_read_back(two):
    assert [int(rank[name]) for rank in two[0] for name in ("follows", "not as before")] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("changed", "ranks", "words"),
    [
        ({"intermediate_size": 95}, 2, "the model's intermediate_size, 95; set parallel.tensor=1"),
        ({"num_attention_heads": 8}, 8, "the model's num_key_value_heads, 2; 2 would"),
    ],
)
def test_the_sizes_that_would_split_are_those_that_divide_all(changed, ranks, words):
    with pytest.raises(CannotSplit, match=words):
        refuse_split(described("qwen3", **changed), ranks)


def test_one_process_says_what_several_have_to_say():
    store, other = torch.distributed.HashStore(), ValueError("no data")
    assert not said_already(store, ProcessLost("gone"))
    assert said_already(store, ProcessLost("gone"))
    assert not said_already(store, other)
    assert said_already(store, other)
    assert not said_already(store, ValueError("something else"))
    alone = torch.distributed.HashStore()
    assert not said_already(alone, other)
    assert said_already(alone, ProcessLost("gone"))  # whose end was explained


def test_a_mixture_in_half_precision_is_sharded_with_its_router_in_float32(two):
    for rank in two[0]:
        assert rank["mixture shared"].all()
        whole = {
            name.removeprefix("mixture False "): x for name, x in rank.items() if name.startswith("mixture False ")
        }
        assert {name for name, x in whole.items() if x.dtype == torch.float32} == {"layers.1.mlp.router.weight"}
        for name, x in whole.items():
            sharded = rank[f"mixture True {name}"]
            assert sharded.dtype == x.dtype
            # Two ranks' gradients, added in float32 and rounded, or added in bfloat16.
            assert (sharded - x).abs().max() <= torch.finfo(torch.bfloat16).eps * x.abs().max() > 0, name
