"""The mathematics of alignment: functions of log-probabilities that know nothing of models or data.

Preferences (DPO, arXiv:2305.18290; IPO, arXiv:2310.12036). With π the policy, ρ the frozen reference, c the chosen
answer and r the rejected one,

    h = [log π(c) − log ρ(c)] − [log π(r) − log ρ(r)]
    sigmoid   −(1−ε) log σ(βh) − ε log σ(−βh)       ε: the share of pairs that are labelled the wrong way round
    ipo       (h − 1/2β)²                           pulls h to a finite distance instead of to infinity

Groups of sampled answers (GRPO, arXiv:2402.03300). An answer's advantage is its reward less its group's mean, and with
ratio = π/π_old of each token,

    −min(ratio · A, clip(ratio, 1−ε_low, 1+ε_high) · A) + β · KL(π ‖ ρ)
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

PREFERENCE_LOSSES = ("sigmoid", "ipo")


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
    """Losses of pairs from the log-probabilities [pairs] of both answers; for IPO those are means per token."""
    log_chosen, log_rejected = chosen - reference_chosen, rejected - reference_rejected
    h = log_chosen - log_rejected
    if kind == "sigmoid":
        losses = -(1 - label_smoothing) * F.logsigmoid(beta * h) - label_smoothing * F.logsigmoid(-beta * h)
    elif kind == "ipo":
        losses = (h - 1 / (2 * beta)).square()
    else:
        raise ValueError(f"a preference loss is one of {', '.join(PREFERENCE_LOSSES)}, not {kind!r}")
    return Preferences(losses, (beta * log_chosen).detach(), (beta * log_rejected).detach())


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


@dataclass(frozen=True)
class PolicyLoss:
    """Per token: the loss, the ratio to the policy that answered, whether clipping took its gradient away."""

    losses: Tensor
    ratio: Tensor
    clipped: Tensor


def policy_losses(
    log_probs: Tensor, old: Tensor, advantages: Tensor, clip_low: float = 0.2, clip_high: float = 0.2
) -> PolicyLoss:
    """The clipped surrogate, per token and to be minimised; log_probs and old are [rows, length], advantages [rows]."""
    ratio = (log_probs - old).exp()
    advantages = advantages[:, None]
    free, held = ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages
    return PolicyLoss(-torch.minimum(free, held), ratio.detach(), (held < free).detach())
