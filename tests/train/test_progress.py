"""What someone sees of a run while it lasts."""

import io

from rich.console import Console

from tilestack.train import Recipe
from tilestack.train.metrics import Progress


def shown(**figures):
    out = io.StringIO()
    with Progress(Recipe(), Console(file=out, width=200)) as progress:
        progress.update(3, figures, 0.0)
    return out.getvalue()


def test_practice_shows_its_rewards_beside_the_loss():
    assert "loss 0.5000  reward 0.2500  validation reward 0.7500" in shown(
        loss=0.5, reward=0.25, validation_reward=0.75, kl=1.0
    )


def test_what_a_run_does_not_have_is_not_shown():
    assert "reward" not in shown(loss=0.5, validation_loss=0.75)
