"""Rotary embedding against transformers: the frequencies of every scaling, and the rotation itself."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

from tilestack import contract, kernels, ops
from tilestack.ops.rope import frequencies, tables

transformers = pytest.importorskip("transformers", reason="parity with transformers needs tilestack[hf]")
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: E402
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb  # noqa: E402

HEAD_DIM, BASE, TRAINED = 64, 500000.0, 2048
SCALINGS = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=2.0),
    "yarn": dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=TRAINED),
    "yarn with its own ramp": dict(
        rope_type="yarn", factor=8.0, original_max_position_embeddings=TRAINED, beta_fast=16, beta_slow=2, mscale=0.7,
        mscale_all_dim=1.2, truncate=False,
    ),
    "yarn with its own factor": dict(
        rope_type="yarn", factor=4.0, original_max_position_embeddings=TRAINED, attention_factor=1.7,
    ),
    "llama3": dict(
        rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
        original_max_position_embeddings=TRAINED,
    ),
    "longrope": dict(
        rope_type="longrope", short_factor=[1 + i / 40 for i in range(32)], long_factor=[1.0 + i for i in range(32)],
        original_max_position_embeddings=TRAINED // 2,
    ),
}  # fmt: skip
SCALINGS["longrope with a length of its own"] = SCALINGS["longrope"] | dict(factor=8.0)
SCALINGS["longrope with its own factor"] = SCALINGS["longrope"] | dict(factor=8.0, attention_factor=1.3)


@pytest.mark.parametrize("length", [None, TRAINED // 2, TRAINED // 2 + 1, TRAINED + 1, 3 * TRAINED])
@pytest.mark.parametrize("name", SCALINGS)
def test_frequencies_are_transformers(name, length):
    config = transformers.LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        head_dim=HEAD_DIM,
        max_position_embeddings=TRAINED,
        rope_parameters=SCALINGS[name] | dict(rope_theta=BASE),
    )
    theirs, their_scale = ROPE_INIT_FUNCTIONS[SCALINGS[name]["rope_type"]](config, torch.device("cpu"), seq_len=length)
    scaling = SCALINGS[name] | dict(max_position_embeddings=TRAINED)
    ours, scale = frequencies(HEAD_DIM, BASE, scaling, sequence_length=length)
    # A handful of float32 operations on each side, in another order.
    torch.testing.assert_close(ours, theirs, rtol=8 * torch.finfo(torch.float32).eps, atol=0)
    assert scale == pytest.approx(their_scale, rel=1e-12)


def test_unknown_scaling_is_named():
    with pytest.raises(ValueError, match="not 'cubic'"):
        frequencies(64, scaling=dict(rope_type="cubic"))


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_rotation_is_transformers(backend):
    q, k = torch.randn(2, 7, 4, 16, dtype=torch.float64), torch.randn(2, 7, 2, 16, dtype=torch.float64)
    positions = torch.randint(20, (2, 7))
    cos, sin = tables(frequencies(16)[0], 20, dtype=torch.float64)
    doubled = [torch.cat((table[positions],) * 2, -1) for table in (cos, sin)]
    theirs = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), *doubled)
    with contract.backend(backend):
        ours = ops.rope(q, k, cos, sin, positions)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.transpose(1, 2), rtol=0, atol=8 * torch.finfo(torch.float64).eps)


def arguments(interleaved):
    fused = torch.randn(2, 5, 6, 12)
    cos, sin = tables(frequencies(8)[0], 9)
    return fused[:, :, :4], fused[:, :, 4:], cos, sin, torch.randint(9, (2, 5)), interleaved


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_in_place_writes_what_the_operator_returns(backend, interleaved):
    q, k, *rest = arguments(interleaved)
    with contract.backend(backend):
        expected = ops.rope(q, k, *rest)
        places = q.data_ptr(), k.data_ptr()
        assert ops.rope_(q, k, *rest) is None
    assert (q.data_ptr(), k.data_ptr()) == places
    assert torch.equal(q, expected[0])
    assert torch.equal(k, expected[1])


def test_in_place_has_no_gradient():
    q, k, *rest = arguments(False)
    with pytest.raises(RuntimeError, match="rope_ writes into q, k and has no gradient"):
        ops.rope_(q.clone().requires_grad_(), k, *rest)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_position_outside_the_tables_gives_nan(backend):
    q, k, cos, sin, positions, _ = arguments(False)
    positions[0, 2], positions[1, 3] = 9, -1
    with contract.backend(backend):
        turned, _ = ops.rope(q, k, cos, sin, positions)
    outside = (positions < 0) | (positions > 8)
    assert torch.equal(turned[..., :8].isnan().all(-1).all(-1), outside)
    assert torch.equal(turned[..., 8:], q[..., 8:])


def test_wrong_shapes_are_explained():
    q, k, cos, sin, positions, _ = arguments(False)
    with pytest.raises(ValueError, match="differing in heads alone"):
        ops.rope(q, k[:, :3], cos, sin, positions)
    with pytest.raises(ValueError, match="at most 6 pairs"):
        ops.rope(q, k, *tables(frequencies(16)[0], 9), positions)
    with pytest.raises(ValueError, match="too few for a sequence of 5"):
        ops.rope(q, k, cos[:3], sin[:3])


@pytest.mark.parametrize("weights", [(None, None), (torch.ones(12), torch.ones(12))], ids=["plain", "norm"])
def test_wrong_shapes_are_explained_of_heads_in_one_piece_too(weights):
    """With norms or without: a kernel would read beyond the tables, and write beyond the heads."""
    cos, sin = tables(frequencies(12)[0], 9)
    heads, pages = torch.randn(2, 5, 4, 12), (torch.zeros(4, 4, 1, 12), torch.zeros(4, 4, 1, 12))
    place = torch.arange(5)
    for turn, positions, message in [
        ((cos[:3], sin[:3]), None, "too few for a sequence of 5"),
        (tables(frequencies(16)[0], 9), None, "at most 6 pairs"),
        ((cos, sin[:, :3]), None, "cos and sin must be alike"),
        ((cos, sin), place[:3], "positions must be integers of shape"),
        ((cos, sin), place.float(), "positions must be integers of shape"),
    ]:
        with pytest.raises(ValueError, match=message):
            ops.qkv_rope(heads, *weights, *turn, positions, 2, 1)
        if positions is not None or "pairs" in message:
            positions = place if positions is None else positions
            with pytest.raises(ValueError, match=message):
                ops.qkv_rope_write(heads[0], *weights, *turn, positions, place, *pages, 2)


LAYOUTS = {
    "dense": lambda *shape: torch.randn(shape, dtype=torch.float64),
    "heads before tokens": lambda b, t, h, d: torch.randn(b, h, t, d, dtype=torch.float64).transpose(1, 2),
    "tokens before batch": lambda b, t, h, d: torch.randn(t, b, h, d, dtype=torch.float64).transpose(0, 1),
    "elements apart": lambda b, t, h, d: torch.randn(b, t, h, 2 * d, dtype=torch.float64)[..., ::2],
}


@pytest.mark.parametrize("elements", [32, 128], ids=["a token a tile", "tokens share a tile"])
@pytest.mark.parametrize(
    "blocks", [1, 2, 4], ids=["a block a program", "q and k share a program", "all heads a program"]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tiles_of_any_size_over_any_layout(layout, blocks, elements, monkeypatch):
    """With fewer programs than tiles, tokens that fill no tile, and no eps to make up for rows that do not exist."""
    for module, name, value in (
        (kernels.attention.rope, "ELEMENTS", elements),
        (kernels.attention.rope, "MOST_BLOCKS", blocks),
        (kernels.attention.rope, "PROGRAMS", 0),
        (kernels.attention.qk_norm_rope, "BACK_ELEMENTS", elements),
        (kernels.attention.qk_norm_rope, "BACK_PROGRAMS", 1),
    ):
        monkeypatch.setattr(module, name, value)
    q, k = (LAYOUTS[layout](2, 5, heads, 16).requires_grad_() for heads in (6, 2))
    weights = [torch.randn(16, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    cos, sin = tables(frequencies(16)[0], 9, dtype=torch.float64)
    for positions in (None, torch.arange(5, 10) % 9, torch.arange(10).view(2, 5) % 9):
        found = []
        for backend in ("triton", "torch"):
            with contract.backend(backend):
                turned = (
                    *ops.rope(q, k, cos, sin, positions),
                    *ops.qk_norm_rope(q, k, *weights, cos, sin, positions, eps=0.0),
                )
            if layout != "elements apart":
                over_q, over_k = (x.detach().clone() for x in (q, k))
                with contract.backend(backend):
                    ops.rope_(over_q, over_k, cos, sin, positions)
                assert torch.equal(over_q, turned[0])
                assert torch.equal(over_k, turned[1])
            loss = sum((x * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).view_as(x)).sum() for x in turned)
            found.append([*turned, *torch.autograd.grad(loss, (q, k, *weights))])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e3 * torch.finfo(torch.float64).eps)


@pytest.mark.parametrize("of_k", [name for name in LAYOUTS if name != "elements apart"])
@pytest.mark.parametrize("of_q", [name for name in LAYOUTS if name != "elements apart"])
def test_queries_and_keys_that_each_lie_in_a_way_of_their_own(of_q, of_k, monkeypatch):
    """What is found by the strides of the other is seen."""
    monkeypatch.setattr(kernels.attention.rope, "ELEMENTS", 128)
    q, k = LAYOUTS[of_q](2, 5, 6, 16), LAYOUTS[of_k](2, 5, 4, 16)  # three blocks and two
    cos, sin = tables(frequencies(16)[0], 10, dtype=torch.float64)
    positions = torch.arange(10).view(2, 5)
    expected = ops.rope(q, k, cos, sin, positions)
    with contract.backend("triton"):
        turned = ops.rope(q, k, cos, sin, positions)
        ops.rope_(q, k, cos, sin, positions)
    for found in (turned, (q, k)):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-14)
