"""The alignment losses against formulas written out by hand, and the signs of their gradients."""

import math

import pytest
import torch

from tilestack.train.align.losses import (
    group_advantages,
    k3,
    kto_losses,
    policy_losses,
    preference_losses,
    simpo_losses,
    weighted_k3,
)

PAIRS = [(-3.0, -5.0, -4.0, -4.5), (-7.0, -2.0, -6.0, -2.5), (-1.0, -1.0, -1.0, -1.0)]


def log_sigmoid(x):
    return -math.log1p(math.exp(-x))


def pairs():
    return [torch.tensor(column, dtype=torch.float64) for column in zip(*PAIRS, strict=True)]


@pytest.mark.parametrize(("beta", "smoothing"), [(0.1, 0.0), (0.5, 0.0), (0.5, 0.2)])
def test_sigmoid_loss_is_dpos(beta, smoothing):
    found = preference_losses(*pairs(), beta=beta, label_smoothing=smoothing)
    for loss, chosen, rejected, (c, r, rc, rr) in zip(found.losses, found.chosen, found.rejected, PAIRS, strict=True):
        h = (c - rc) - (r - rr)
        assert loss.item() == pytest.approx(
            -(1 - smoothing) * log_sigmoid(beta * h) - smoothing * log_sigmoid(-beta * h)
        )
        assert (chosen.item(), rejected.item()) == pytest.approx((beta * (c - rc), beta * (r - rr)))


def test_ipo_pulls_to_a_finite_distance():
    found = preference_losses(*pairs(), beta=0.25, kind="ipo")
    expected = [((c - rc) - (r - rr) - 2.0) ** 2 for c, r, rc, rr in PAIRS]
    assert found.losses.tolist() == pytest.approx(expected)
    chosen = torch.tensor([5.0], requires_grad=True)
    preference_losses(chosen, torch.zeros(1), torch.zeros(1), torch.zeros(1), beta=0.25, kind="ipo").losses.backward()
    assert chosen.grad.item() == pytest.approx(6.0)  # beyond 1/2β = 2 it pulls back, where the sigmoid would push on


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_descent_raises_the_chosen_and_lowers_the_rejected(kind):
    chosen, rejected, *reference = pairs()
    chosen.requires_grad_()
    rejected.requires_grad_()
    preference_losses(chosen, rejected, *reference, kind=kind).losses.sum().backward()
    assert (chosen.grad < 0).all()
    assert torch.equal(rejected.grad, -chosen.grad)


def test_the_gradient_is_larger_for_pairs_ranked_wrong():
    chosen = torch.tensor([-5.0, 0.0, 5.0], dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(3, dtype=torch.float64)
    preference_losses(chosen, zero, zero, zero, beta=0.3).losses.sum().backward()
    expected = [-0.3 / (1 + math.exp(0.3 * h)) for h in (-5.0, 0.0, 5.0)]  # −β σ(−βh)
    assert chosen.grad.tolist() == pytest.approx(expected)


def test_simpo_compares_the_policys_answers_alone():
    chosen, rejected, *_ = pairs()
    found = simpo_losses(chosen, rejected, beta=2.5, gamma=0.8)
    expected = [-log_sigmoid(2.5 * c - 2.5 * r - 0.8) for c, r, _, _ in PAIRS]
    assert found.losses.tolist() == pytest.approx(expected)
    assert found.chosen.tolist() == pytest.approx([2.5 * c for c, *_ in PAIRS])
    assert found.rejected.tolist() == pytest.approx([2.5 * r for _, r, *_ in PAIRS])


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("gained", [0.4, -0.4, 7.0])
def test_kto_holds_answers_against_what_was_gained_on_strangers(gained):
    policy, reference, *_ = pairs()
    policy.requires_grad_()
    told = torch.tensor(gained, requires_grad=True)
    good = torch.tensor([True, False, False])
    found = kto_losses(policy, reference, good, told, 0.3, 1.5, 0.5)
    z = max(gained, 0)  # a divergence is never negative
    for number, (p, r, *_) in enumerate(PAIRS):
        sign, weight = (1, 1.5) if good[number] else (-1, 0.5)
        assert found.losses[number].item() == pytest.approx(weight * (1 - sigmoid(0.3 * sign * (p - r - z))))
        assert found.rewards[number].item() == pytest.approx(0.3 * (p - r))
    assert found.divergence.item() == pytest.approx(z)
    found.losses.sum().backward()
    assert (policy.grad.sign() == torch.where(good, -1, 1)).all()  # descent raises good answers and lowers bad ones
    assert told.grad is None


def test_an_unknown_loss_is_named():
    with pytest.raises(ValueError, match="one of sigmoid, ipo, not 'hinge'"):
        preference_losses(*pairs(), kind="hinge")


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [0.5, 0.5, 0.5, 0.5], [3.0, 0.0, 0.0, 0.0]])
    plain = group_advantages(rewards, divide_by_std=False)
    assert plain.tolist() == [[0.5, -0.5, -0.5, 0.5], [0.0] * 4, [2.25, -0.75, -0.75, -0.75]]
    divided = group_advantages(rewards)
    assert divided[1].tolist() == [0.0] * 4
    assert divided[0].tolist() == pytest.approx([v / (math.sqrt(1 / 3) + 1e-4) for v in plain[0].tolist()])
    assert divided[2].std().item() == pytest.approx(1, abs=1e-3)


def test_k3_is_the_divergence_in_the_mean():
    torch.manual_seed(0)
    policy, reference = (torch.randn(6, dtype=torch.float64).log_softmax(-1) for _ in range(2))
    truth = (policy.exp() * (policy - reference)).sum()
    estimates = k3(policy, reference)
    assert (estimates >= 0).all()
    torch.testing.assert_close((policy.exp() * estimates).sum(), truth)  # the mean over tokens drawn from the policy
    assert k3(policy, policy).abs().max() == 0


def test_the_gradient_of_the_divergence_is_its_own_only_where_it_is_weighted():
    """In the mean over tokens drawn from the policy, by hand: KL(policy ‖ reference) with weights, the other way round without."""
    torch.manual_seed(0)
    scores, reference = torch.randn(6, dtype=torch.float64), torch.randn(6, dtype=torch.float64).log_softmax(-1)

    def gradient(of):
        given = scores.clone().requires_grad_()
        policy = given.log_softmax(-1)
        (found,) = torch.autograd.grad(of(policy, policy.detach()), given)
        return found

    weighted = gradient(lambda policy, old: (old.exp() * weighted_k3(policy, old, reference)).sum())
    torch.testing.assert_close(weighted, gradient(lambda policy, _: (policy.exp() * (policy - reference)).sum()))
    alone = gradient(lambda policy, old: (old.exp() * k3(policy, reference)).sum())
    torch.testing.assert_close(alone, gradient(lambda policy, _: (reference.exp() * (reference - policy)).sum()))
    assert not torch.allclose(weighted, alone, rtol=0.1)


def test_weighted_it_is_right_in_the_mean_over_what_an_older_policy_drew():
    torch.manual_seed(0)
    policy, old, reference = (torch.randn(6, dtype=torch.float64).log_softmax(-1) for _ in range(3))
    truth = (policy.exp() * (policy - reference)).sum()
    torch.testing.assert_close((old.exp() * weighted_k3(policy, old, reference)).sum(), truth)


def test_an_answer_can_have_one_ratio_for_all_of_its_tokens():
    log_probs = torch.tensor([[0.3, -0.1, 9.0], [0.2, 0.4, 0.6]], dtype=torch.float64).requires_grad_()
    answers = torch.tensor([[True, True, False], [True, True, True]])
    advantages = torch.tensor([2.0, 3.0], dtype=torch.float64)
    found = policy_losses(log_probs, torch.zeros_like(log_probs), advantages, 0.2, 0.3, answers)
    assert found.ratio[:, 0].tolist() == pytest.approx([math.exp(0.1), math.exp(0.4)])
    assert found.clipped.tolist() == [[False] * 3, [True] * 3]
    found.losses[:, 0].sum().backward()
    expected = [[-2 * math.exp(0.1) / 2] * 2 + [0.0], [0.0] * 3]
    torch.testing.assert_close(log_probs.grad, torch.tensor(expected, dtype=torch.float64))


def test_the_surrogate_is_clipped_only_where_that_is_worse():
    ratio = torch.tensor([[0.5, 1.0, 1.5]] * 2, dtype=torch.float64)
    log_probs = ratio.log().requires_grad_()
    found = policy_losses(log_probs, torch.zeros_like(ratio), torch.tensor([2.0, -1.0], dtype=torch.float64), 0.2, 0.3)
    assert found.losses[0].tolist() == pytest.approx([-1.0, -2.0, -2.6])
    assert found.losses[1].tolist() == pytest.approx([0.8, 1.0, 1.5])
    assert found.clipped.tolist() == [[False, False, True], [True, False, False]]
    found.losses.sum().backward()
    assert log_probs.grad[0].tolist() == pytest.approx([-1.0, -2.0, 0.0])
    assert log_probs.grad[1].tolist() == pytest.approx([0.0, 1.0, 1.5])


def test_on_policy_the_gradient_is_that_of_reinforce():
    log_probs = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([0.7, -1.3], dtype=torch.float64)
    found = policy_losses(log_probs, log_probs.detach(), advantages)
    assert torch.equal(found.ratio, torch.ones_like(found.ratio))
    found.losses.sum().backward()
    torch.testing.assert_close(log_probs.grad, -advantages[:, None].expand(2, 3))
