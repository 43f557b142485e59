"""The mathematics of alignment: functions of log-probabilities that know nothing of models or data.

Preferences (DPO, arXiv:2305.18290; IPO, arXiv:2310.12036; SimPO, arXiv:2405.14734). With π the policy, ρ the frozen
reference, c the chosen answer, r the rejected one and |c|, |r| their tokens,

    h = [log π(c) − log ρ(c)] − [log π(r) − log ρ(r)]
    sigmoid   −(1−ε) log σ(βh) − ε log σ(−βh)       ε: the share of pairs that are labelled the wrong way round
    ipo       (h − 1/2β)²                           pulls h to a finite distance instead of to infinity
    simpo     −log σ(β [log π(c)/|c| − log π(r)/|r|] − γ)      without a reference

Answers judged one by one (KTO, arXiv:2402.01306). With h = log π(y) − log ρ(y) and z ≥ 0 an estimate of KL(π ‖ ρ),

    good      λ_good · (1 − σ(β (h − z)))
    bad       λ_bad · (1 − σ(β (z − h)))

Groups of sampled answers (GRPO, arXiv:2402.03300). An answer's advantage is its reward less its group's mean, and with
ratio = π/π_old of each token,

    −min(ratio · A, clip(ratio, 1−ε_low, 1+ε_high) · A) + β · KL(π ‖ ρ)

Or an answer has one ratio, the geometric mean of its tokens' (GSPO, arXiv:2507.18071).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PREFERENCE_LOSSES = ("sigmoid", "ipo", "simpo")


@dataclass(frozen=True)
class Preferences:
    """What comes of pairs, each [pairs]: their losses, and the implicit rewards β · log(π/ρ) of both answers."""

    losses: Tensor
    chosen: Tensor
    rejected: Tensor


def preference_losses(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    beta: float = 0.1,
    kind: str = "sigmoid",
    label_smoothing: float = 0.0,
) -> Preferences:
    """DPO's and IPO's losses from the log-probabilities [pairs] of both answers; for IPO those are means per token."""
    log_chosen, log_rejected = chosen - reference_chosen, rejected - reference_rejected
    h = log_chosen - log_rejected
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)
    elif kind == "ipo":
        losses = (h - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"a preference loss with a reference is one of sigmoid, ipo, not {kind!r}")
    return Preferences(losses, (beta * log_chosen).detach(), (beta * log_rejected).detach())


def simpo_losses(chosen: Tensor, rejected: Tensor, beta: float = 2.0, gamma: float = 1.0) -> Preferences:
    """SimPO's losses from mean log-probabilities per token [pairs]; a margin of gamma is asked for."""
    losses = -F.logsigmoid(beta * (chosen - rejected) - gamma)
    return Preferences(losses, (beta * chosen).detach(), (beta * rejected).detach())


@dataclass(frozen=True)
class Judgements:
    """What comes of judged answers: their losses [answers], their implicit rewards, and the divergence they share."""

    losses: Tensor
    rewards: Tensor
    divergence: Tensor


def kto_losses(
    log_probs: Tensor,
    reference: Tensor,
    good: Tensor,
    gained: Tensor,
    beta: float = 0.1,
    weight_good: float = 1.0,
    weight_bad: float = 1.0,
) -> Judgements:
    """KTO's losses from the log-probabilities [answers] of answers. What the policy has `gained` on answers to other prompts,
    in the mean over a batch, is taken for its divergence from the reference. No gradient flows through it."""
    divergence = gained.clamp(min=0).detach()
    h = log_probs - reference
    towards = torch.where(good, h - divergence, divergence - h)
    weights = torch.where(good, weight_good, weight_bad)
    return Judgements(weights * (1 - torch.sigmoid(beta * towards)), (beta * h).detach(), divergence)


def group_advantages(rewards: Tensor, divide_by_std: bool = True) -> Tensor:
    """Rewards [groups, size] less the mean of their group, and divided by its standard deviation where asked.

    A group whose answers all earn the same says nothing: its advantages are zero. Dividing makes groups count alike; not
    dividing (Dr. GRPO, arXiv:2503.20783) leaves out the bias towards tasks that are nearly always or never solved.
    """
    advantages = rewards - rewards.mean(-1, keepdim=True)
    return advantages / (rewards.std(-1, keepdim=True) + 1e-4) if divide_by_std else advantages


def k3(log_probs: Tensor, reference: Tensor) -> Tensor:
    """An estimate of KL(π ‖ ρ) from tokens drawn from π: unbiased, never negative, of low variance (Schulman's k3)."""
    log_ratio = reference - log_probs
    return log_ratio.exp() - log_ratio - 1


def weighted_k3(log_probs: Tensor, old: Tensor, reference: Tensor) -> Tensor:
    """k3 times the ratio π/π_old (DeepSeek-V3.2, arXiv:2512.02556). Of tokens drawn from π_old it is right in the mean, and so is
    its gradient. That of k3 alone is, in the mean, the gradient of the other divergence, KL(ρ ‖ π)."""
    return (log_probs - old).exp() * k3(log_probs, reference)


@dataclass(frozen=True)
class PolicyLoss:
    """Per token: the loss, the ratio to the policy that answered, whether clipping took its gradient away."""

    losses: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_losses(
    log_probs: Tensor,
    old: Tensor,
    advantages: Tensor,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    answers: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate, per token and to be minimised; log_probs and old are [rows, length], advantages [rows]. Given
    which tokens are of the `answers` [rows, length], all tokens of an answer have the ratio of the whole."""
    log_ratio = log_probs - old
    if answers is not None:
        means = (log_ratio * answers).sum(-1, keepdim=True) / answers.sum(-1, keepdim=True).clamp(min=1)
        log_ratio = means.expand_as(log_probs)
    ratio = log_ratio.exp()
    advantages = advantages[:, None]
    free, held = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(free, held), ratio.detach(), (held < free).detach())
