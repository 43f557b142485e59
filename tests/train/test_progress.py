"""What someone sees of a run while it lasts."""

import errno
import io
import os

import pytest
from rich.console import Console
from tiny import Counting, TinyModel, recipe

from tilestack.train import Recipe, Trainer
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


class Gone(io.StringIO):
    """What is left of a pipe whose reader has ended, or of a terminal that was closed."""

    def __init__(self, number):
        super().__init__()
        self.number, self.tried = number, 0

    def write(self, text):
        self.tried += 1
        raise OSError(self.number, os.strerror(self.number))


@pytest.mark.parametrize("number", [errno.EPIPE, errno.EIO], ids=["pipe", "terminal"])
def test_a_run_goes_on_when_nobody_watches_any_more(tmp_path, monkeypatch, number):
    gone, settings = Gone(number), recipe(run={"log_every": 1})
    with monkeypatch.context() as patched:
        patched.setattr(os, "dup2", lambda *_: None)  # by which rich would close our standard output
        trainer = Trainer(settings, TinyModel(), Counting(), tmp_path, progress=Progress(settings, Console(file=gone)))
        trainer.run()
    assert gone.tried
    assert trainer.finished
    assert trainer.checkpoints.steps()[-1] == settings.run.steps
