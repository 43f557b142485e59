"""Learning rates over a run: functions of the step alone, so that a resumed run needs nothing saved to continue them."""

import math

from tilestack.train.recipe import Schedule


def share(schedule: Schedule, step: int, steps: int) -> float:
    """The learning rate of a step, the first being 0, as a share of the highest."""
    if step < schedule.warmup:
        return (step + 1) / schedule.warmup
    progress = (step - schedule.warmup) / max(1, steps - schedule.warmup - 1)  # 0 after the warm-up, 1 at the last step
    progress = min(progress, 1.0)
    if schedule.name == "constant":
        return 1.0
    if schedule.name == "cosine":
        fallen = (1 - math.cos(math.pi * progress)) / 2
    elif schedule.name == "linear":
        fallen = progress
    else:  # warm-up, stable, decay
        fallen = max(0.0, 1 - (1 - progress) / schedule.decay)
    return 1 - (1 - schedule.final) * fallen
