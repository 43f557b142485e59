"""The mixture of experts: against one token at a time, against transformers' blocks, compiled, recomputed, balanced."""

import copy
import importlib
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tilestack.nn import MLP, LoadWindow, MoE, Router

HIDDEN, INTERMEDIATE = 12, 10
VARIANTS = {
    "softmax": dict(experts=6, top_k=2),
    "as scored": dict(experts=6, top_k=3, normalise=False, scale=2.5),
    "one expert": dict(experts=1, top_k=1),
    "all experts": dict(experts=4, top_k=4),
    "groups": dict(experts=8, top_k=3, groups=4, top_groups=2),
    "sigmoid": dict(experts=8, top_k=3, scoring="sigmoid", groups=2, top_groups=1, scale=1.5, bias_balancing=True),
    "shared": dict(experts=6, top_k=2, shared_intermediate=7, shared_gate=True),
}
each_variant = pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())


def mixture(dtype=torch.float64, **options):
    torch.manual_seed(0)
    moe = MoE(HIDDEN, INTERMEDIATE, **options).to(dtype)
    if moe.router.bias is not None:
        torch.nn.init.normal_(moe.router.bias, std=0.2)
    return moe


def tokens(*shape, dtype=torch.float64, seed=1):
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def feed_forward(x, gate_up, down):
    gate, up = F.linear(x, gate_up).chunk(2, -1)
    return F.linear(F.silu(gate) * up, down)


def token_by_token(moe, x):
    """The layer and the loads of its experts, with no sorting, no grouping and no batch."""
    router, rows, loads = moe.router, [], [0] * moe.router.experts
    for token in x.reshape(-1, HIDDEN):
        logits = router.weight @ token
        scores = logits.softmax(0) if router.scoring == "softmax" else logits.sigmoid()
        ranking = (scores if router.bias is None else scores + router.bias).tolist()
        size = router.experts // router.groups
        groups = [range(start, start + size) for start in range(0, router.experts, size)]
        counted = 1 if router.scoring == "softmax" else 2
        groups.sort(key=lambda group: -sum(sorted(ranking[e] for e in group)[-counted:]))
        open_experts = itertools.chain(*groups[: router.top_groups])
        chosen = sorted(open_experts, key=lambda expert: -ranking[expert])[: router.top_k]
        weights = scores[chosen] / (scores[chosen].sum() if router.normalise else 1) * router.scale
        row = sum(w * feed_forward(token, moe.gate_up[e], moe.down[e]) for e, w in zip(chosen, weights, strict=True))
        if moe.shared is not None:
            gate = torch.sigmoid(moe.shared_gate(token)) if moe.shared_gate is not None else 1
            row = row + gate * feed_forward(token, moe.shared.gate_up.weight, moe.shared.down.weight)
        rows.append(row)
        for expert in chosen:
            loads[expert] += 1
    return torch.stack(rows).view(x.shape), loads


def gradients(out, moe, x):
    return torch.autograd.grad(out.square().sum(), [x, *moe.parameters()])


@each_variant
def test_results_and_gradients_are_those_of_one_token_at_a_time(options):
    moe, x = mixture(**options), tokens(3, 7).requires_grad_()
    out = moe(x)
    expected, loads = token_by_token(moe, x)
    torch.testing.assert_close(out, expected)
    assert moe.balance.tokens_per_expert.tolist() == loads
    for found, truth in zip(gradients(out, moe, x), gradients(expected, moe, x), strict=True):
        torch.testing.assert_close(found, truth)


@pytest.mark.parametrize("variant", ["softmax", "sigmoid", "shared"])
def test_compiled_it_is_the_same(variant):
    moe, x = mixture(**VARIANTS[variant]), tokens(2, 5).requires_grad_()
    eager, losses = moe(x), moe.balance
    torch.compiler.reset()
    compiled = torch.compile(moe, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(compiled, eager)
    assert torch.equal(moe.balance.tokens_per_expert, losses.tokens_per_expert)
    total = lambda out, balance: out.square().sum() + balance.auxiliary_loss + balance.z_loss
    found, expected = (
        torch.autograd.grad(total(*made), list(moe.parameters())) for made in ((compiled, moe.balance), (eager, losses))
    )
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_recomputed_forward_leaves_its_balance_alone():
    moe, x = mixture(**VARIANTS["softmax"]), tokens(9).requires_grad_()
    out = checkpoint(moe, x, use_reentrant=False)
    balance = moe.balance
    (out.sum() + balance.auxiliary_loss).backward()
    assert moe.balance is balance
    recomputed = [parameter.grad for parameter in moe.parameters()]
    kept = torch.autograd.grad(moe(x).sum() + moe.balance.auxiliary_loss, list(moe.parameters()))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(recomputed, kept, strict=True))


def test_a_recomputed_forward_compiles():
    moe, x = mixture(**VARIANTS["softmax"]), tokens(9).requires_grad_()
    total = lambda out: out.sum() + moe.balance.auxiliary_loss
    expected = torch.autograd.grad(total(moe(x)), list(moe.parameters()))
    torch.compiler.reset()
    recomputed = torch.compile(lambda x: checkpoint(moe, x, use_reentrant=False), fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        found = torch.autograd.grad(total(recomputed(x)), list(moe.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_order_of_tokens_changes_nothing():
    moe, x = mixture(**VARIANTS["groups"]), tokens(20)
    order = torch.randperm(20, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(moe(x)[order], moe(x[order]))


@pytest.mark.parametrize("shape", [(0,), (2, 0)])
def test_no_tokens_are_no_trouble(shape):
    moe, x = mixture(**VARIANTS["shared"]), tokens(*shape).requires_grad_()
    out = moe(x)
    assert out.shape == x.shape
    assert moe.balance.tokens_per_expert.sum() == moe.balance.auxiliary_loss == moe.balance.z_loss == 0
    (out.sum() + moe.balance.auxiliary_loss).backward()
    assert moe.gate_up.grad.count_nonzero() == 0


def test_under_autocast_experts_compute_in_its_dtype_and_the_router_in_float32():
    moe, x = mixture(torch.float32, **VARIANTS["shared"]), tokens(9, dtype=torch.float32)
    chosen = moe.router(x)[0]
    with torch.autocast("cpu", torch.bfloat16):
        out = moe(x)
        assert torch.equal(moe.router(x)[0], chosen)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), moe(x), rtol=0.05, atol=0.02)


def test_the_bias_keeps_its_precision_when_the_model_loses_its_own():
    moe = mixture(torch.float32, **VARIANTS["sigmoid"])
    before = moe.router.bias.clone()
    moe.to(torch.bfloat16)
    assert moe.gate_up.dtype == torch.bfloat16
    assert torch.equal(moe.router.bias, before)


def test_a_copy_is_of_the_layer_and_not_of_its_last_forward():
    moe, x = mixture(**VARIANTS["shared"]), tokens(5)
    out = moe(x)
    copied = copy.deepcopy(moe)
    assert copied.balance is None
    assert moe.balance is not None
    assert torch.equal(copied(x), out)


def transformers_block(family, block, **config):
    pytest.importorskip("transformers")
    name = {"qwen3_moe": "Qwen3Moe", "qwen2_moe": "Qwen2Moe", "mixtral": "Mixtral", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}[family]  # fmt: skip
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    configuration = importlib.import_module(f"transformers.models.{family}.configuration_{family}")
    made = getattr(module, block)(
        getattr(configuration, f"{name}Config")(hidden_size=HIDDEN, num_attention_heads=1, **config)
    )
    torch.manual_seed(0)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return made


DEEPSEEK = dict(
    moe_intermediate_size=INTERMEDIATE, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
    n_shared_experts=2, routed_scaling_factor=1.7,
)  # fmt: skip
OURS_OF_DEEPSEEK = dict(experts=8, top_k=3, groups=4, top_groups=2, shared_intermediate=2 * INTERMEDIATE, scale=1.7)
BLOCKS = {
    "mixtral": (
        ("mixtral", "MixtralSparseMoeBlock"),
        dict(intermediate_size=INTERMEDIATE, num_local_experts=6, num_experts_per_tok=2),
        dict(experts=6, top_k=2),
    ),
    "qwen3": (
        ("qwen3_moe", "Qwen3MoeSparseMoeBlock"),
        dict(moe_intermediate_size=INTERMEDIATE, num_experts=6, num_experts_per_tok=3, norm_topk_prob=True),
        dict(experts=6, top_k=3),
    ),
    "qwen2": (
        ("qwen2_moe", "Qwen2MoeSparseMoeBlock"),
        dict(moe_intermediate_size=INTERMEDIATE, num_experts=6, num_experts_per_tok=3, norm_topk_prob=False, shared_expert_intermediate_size=7),
        dict(experts=6, top_k=3, normalise=False, shared_intermediate=7, shared_gate=True),
    ),
    "deepseek v2": (
        ("deepseek_v2", "DeepseekV2Moe"),
        dict(**DEEPSEEK, topk_method="group_limited_greedy"),
        dict(**OURS_OF_DEEPSEEK, normalise=False),
    ),
    "deepseek v3": (
        ("deepseek_v3", "DeepseekV3MoE"),
        DEEPSEEK,
        dict(**OURS_OF_DEEPSEEK, scoring="sigmoid", bias_balancing=True),
    ),
}  # fmt: skip


def weights_of(block):
    """A block of transformers' in our names."""
    state = dict(block.state_dict())
    renamed = {
        "router.weight": state["gate.weight"],
        "gate_up": state["experts.gate_up_proj"],
        "down": state["experts.down_proj"],
    }
    for name in ("shared_expert", "shared_experts"):
        if f"{name}.down_proj.weight" in state:
            halves = [state[f"{name}.gate_proj.weight"], state[f"{name}.up_proj.weight"]]
            renamed |= {
                "shared.gate_up.weight": torch.cat(halves),
                "shared.down.weight": state[f"{name}.down_proj.weight"],
            }
    if "shared_expert_gate.weight" in state:
        renamed["shared_gate.weight"] = state["shared_expert_gate.weight"]
    if "gate.e_score_correction_bias" in state:
        renamed["router.bias"] = state["gate.e_score_correction_bias"]
    return renamed


@pytest.mark.parametrize(("block", "config", "options"), BLOCKS.values(), ids=BLOCKS.keys())
def test_transformers_blocks_give_the_same(block, config, options):
    theirs = transformers_block(*block, **config)
    if options.get("bias_balancing"):
        torch.nn.init.normal_(theirs.gate.e_score_correction_bias, std=0.3)
    ours = MoE(HIDDEN, INTERMEDIATE, **options)
    ours.load_state_dict(weights_of(theirs))
    x = tokens(2, 16, dtype=torch.float32)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-4, atol=1e-5)


def test_the_auxiliary_loss_is_that_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    moe, x = mixture(torch.float32, experts=6, top_k=2), tokens(40, dtype=torch.float32)
    moe(x)
    logits = x @ moe.router.weight.T
    expected = mixtral.load_balancing_loss_func((logits,), num_experts=6, top_k=2)
    torch.testing.assert_close(moe.balance.auxiliary_loss, expected)
    torch.testing.assert_close(moe.balance.z_loss, logits.logsumexp(-1).square().mean())


def test_an_even_load_has_the_least_auxiliary_loss():
    router = Router(6, 6, 2)
    even = router.balance(torch.full((6,), 4), torch.full((12, 6), 1 / 6), torch.zeros(12, 6))
    assert (even.auxiliary_loss.item(), even.imbalance.item()) == (pytest.approx(2), 1)
    skewed = torch.eye(6)[[0] * 6 + [1] * 6]
    uneven = router.balance(torch.tensor([12, 12, 0, 0, 0, 0]), (skewed + skewed[:, [1, 0, 2, 3, 4, 5]]) / 2, skewed)
    assert (uneven.auxiliary_loss.item(), uneven.imbalance.item()) == (pytest.approx(6), 3)


def test_the_auxiliary_loss_of_sigmoids_is_of_shares():
    """Scores of any size: what counts is the part of their sum that an expert has."""
    router = Router(6, 6, 2, scoring="sigmoid")
    for scores in (torch.full((12, 6), 0.5), torch.full((12, 6), 0.01)):
        assert router.balance(torch.full((6,), 4), scores, torch.zeros(12, 6)).auxiliary_loss.item() == pytest.approx(2)


def skewed_router(**options):
    """A router that sends nearly all tokens to its first experts: the tokens have a mean, and it likes those more."""
    moe = mixture(torch.float32, experts=8, top_k=2, **options)
    x = tokens(256, dtype=torch.float32) * 0.5 + 1
    with torch.no_grad():
        moe.router.weight *= 0.3
        moe.router.weight[:2] += 0.2
    moe(x)
    assert moe.balance.imbalance > 2.5
    return moe, x


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_the_bias_evens_out_a_skewed_router(scoring):
    moe, x = skewed_router(scoring=scoring, bias_balancing=True)
    weights = moe.router(x)[2]
    for rate in (0.02, 0.005, 0.001):  # a step overshoots by as much as it is long
        for _ in range(25):
            moe(x)
            moe.update_bias(rate)
    moe(x)
    assert moe.balance.imbalance < 1.3
    assert torch.equal(moe.router(x)[2], weights), "the bias must have no say in scores"


def test_the_auxiliary_loss_evens_out_a_skewed_router():
    moe, x = skewed_router()
    optimizer = torch.optim.Adam(moe.router.parameters(), lr=0.01)
    for _ in range(100):
        moe(x)
        optimizer.zero_grad()
        moe.balance.auxiliary_loss.backward()
        optimizer.step()
    moe(x)
    assert moe.balance.imbalance < 1.3


def test_the_z_loss_makes_logits_small():
    moe, x = mixture(torch.float32, experts=8, top_k=2), 5 * tokens(64, dtype=torch.float32)
    optimizer = torch.optim.SGD(moe.router.parameters(), lr=1e-3)
    largest = []
    for _ in range(20):
        moe(x)
        largest.append((x @ moe.router.weight.T).abs().max().item())
        optimizer.zero_grad()
        moe.balance.z_loss.backward()
        optimizer.step()
    assert largest[-1] < 0.7 * largest[0]


def test_a_window_is_of_the_last_steps():
    window = LoadWindow(steps=3)
    for step in range(5):
        window.add(torch.eye(5, dtype=torch.int64)[step])
    assert window.total().tolist() == [0, 0, 1, 1, 1]


def test_an_expert_is_dead_once_a_whole_window_passed_it_by():
    window = LoadWindow(steps=2)
    with pytest.raises(ValueError, match="no loads yet"):
        window.dead()
    for load, dead, imbalance in [([2, 0, 0, 2], 2, 2), ([0, 4, 0, 0], 1, 2), ([0, 2, 0, 2], 2, 3)]:
        window.add(torch.tensor(load))
        assert (window.dead().item(), window.imbalance().item()) == (dead, imbalance)


def test_loads_of_several_forwards_move_the_bias_by_one_step():
    moe = mixture(torch.float32, experts=3, top_k=1, bias_balancing=True)
    moe.router.reset_parameters()
    moe.update_bias(0.1, torch.tensor([6, 0, 3]))
    torch.testing.assert_close(moe.router.bias, torch.tensor([-0.1, 0.1, 0.0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(experts=4, top_k=5), "top_k must be between 1 and 4, the experts to choose from, not 5"),
        (dict(experts=8, top_k=3, groups=4), "top_k must be between 1 and 2"),
        (dict(experts=8, top_k=2, groups=3), "groups must divide the 8 experts"),
        (dict(experts=8, top_k=2, groups=2, top_groups=3), "top_groups must be between 1 and 2"),
        (dict(experts=8, top_k=2, scoring="relu"), "scoring must be softmax or sigmoid, not 'relu'"),
        (dict(experts=8, top_k=2, shared_gate=True), "shared_gate needs shared experts"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        MoE(HIDDEN, INTERMEDIATE, **options)


def test_balancing_says_what_it_lacks():
    with pytest.raises(ValueError, match="no load to balance by yet"):
        mixture(experts=2, top_k=1, bias_balancing=True).update_bias(0.1)
    with pytest.raises(ValueError, match="no bias to balance with"):
        mixture(experts=2, top_k=1).update_bias(0.1, torch.ones(2))


def test_the_dense_layer_is_the_mixture_of_its_one_expert():
    dense, moe, x = (
        MLP(HIDDEN, INTERMEDIATE),
        mixture(torch.float32, experts=1, top_k=1),
        tokens(5, dtype=torch.float32),
    )
    dense.load_state_dict({"gate_up.weight": moe.gate_up.detach()[0], "down.weight": moe.down.detach()[0]})
    torch.testing.assert_close(dense(x), moe(x))


def test_a_router_keeps_its_float32_and_no_forward_casts_it():
    class Casts(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.of = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten._to_copy.default:
                self.of.append(args[0].data_ptr())
            return func(*args, **(kwargs or {}))

    moe = MoE(8, 16, 4, 2, bias_balancing=True)
    weight = moe.router.weight.detach().clone()
    moe.to(torch.bfloat16).half().to("cpu", torch.bfloat16)
    assert (moe.gate_up.dtype, moe.router.weight.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(moe.router.weight, weight)  # never rounded
    with torch.no_grad(), Casts() as casts:
        moe(torch.randn(3, 8, dtype=torch.bfloat16))
    assert casts.of
    assert moe.router.weight.data_ptr() not in casts.of
    assert moe.double().router.weight.dtype == torch.float64
