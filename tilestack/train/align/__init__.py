"""Alignment: from answers to imitate (SFT), from preferences (DPO), from judgements
(KTO), from rewards (GRPO); see docs/alignment.md."""

from tilestack.train.align.kinds import KINDS, align

__all__ = ["KINDS", "align"]
