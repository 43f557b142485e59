"""The loop: what a step is, and what it does when a step goes wrong."""

import json
import math
import signal
import sys
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file
from tiny import Counting, TinyModel, recipe
from torch import nn

from tilestack import backend, configure_backend, optim
from tilestack.train import Loss, RecipeError, Trainer, fp8, metrics
from tilestack.train.errors import TrainingError
from tilestack.train.metrics import Progress
from tilestack.train.optimizers import AveragedWeights, is_hidden_matrix, make_optimizer
from tilestack.train.run.folder import RunFolder
from tilestack.train.run.provenance import ABOUT


def seeded(seed=0, **sizes):
    torch.manual_seed(seed)
    return TinyModel(**sizes)


class Rows(Counting):
    """Counting over given rows, some at a time; rows have different numbers of labels."""

    def __init__(self, rows, at_once):
        super().__init__()
        self.rows, self.at_once = rows, at_once

    def next_batch(self):
        start, self.drawn = self.drawn, self.drawn + self.at_once
        ids, labels = (x[start : start + self.at_once] for x in self.rows)
        return {"ids": ids, "labels": labels, "factor": torch.tensor(1.0)}


def test_accumulation_equals_a_larger_batch(tmp_path):
    ids = torch.randint(16, (24, 6))
    labels = torch.where(torch.rand(24, 6) < torch.linspace(0.05, 0.95, 24)[:, None], -100, (ids + 1) % 16)
    ends = []
    for accumulate, at_once in ((1, 8), (4, 2)):
        model = seeded()
        settings = recipe(run={"steps": 3}, data={"accumulate": accumulate})
        Trainer(settings, model, Rows((ids, labels), at_once), tmp_path / str(accumulate)).run()
        ends.append((model, [row["loss"] for row in metrics.rows(tmp_path / str(accumulate)) if "loss" in row]))
    assert ends[0][1] == pytest.approx(ends[1][1], rel=1e-6)
    for one, other in zip(ends[0][0].parameters(), ends[1][0].parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_gradients_are_those_of_the_mean_over_all_tokens(tmp_path, accumulate):
    """Adam would hide a wrong scale of the gradient from everything but the norm that clipping goes by."""
    settings = recipe(data={"accumulate": accumulate}, optimizer={"clip": 0})
    trainer = Trainer(settings, seeded(), Counting(noise=0), tmp_path)
    trainer.train_step()
    model, source = seeded(), Counting(noise=0)
    losses = [source.loss(model, source.next_batch()) for _ in range(accumulate)]
    (sum(loss.total for loss in losses) / sum(loss.count for loss in losses)).backward()
    expected = torch.cat([param.grad.flatten() for param in model.parameters()]).norm()
    assert float(trainer.pending[0].figure("grad_norm")) == pytest.approx(float(expected), rel=1e-5)


def test_the_loss_falls_and_every_step_is_written(tmp_path):
    settings = recipe(run={"steps": 150}, optimizer={"lr": 0.03}, evaluation={"every": 75}, checkpoint={"every": 0})
    figures = Trainer(settings, seeded(), Counting(), tmp_path).run()
    steps, losses = metrics.curve(tmp_path, "loss")
    assert steps == list(range(1, 151))
    assert losses[-1] < 0.5 < 2.5 < losses[0]
    assert figures["validation_loss"] == metrics.curve(tmp_path, "validation_loss")[1][-1] < 0.5
    assert [row["sample"] for row in metrics.rows(tmp_path) if "sample" in row] == ["4"]  # after 3
    (entry,) = json.loads((tmp_path / ABOUT).read_text())
    assert {"command", "started", "torch", "tilestack"} <= set(entry)


def test_an_evaluation_before_the_first_step_changes_nothing_else(tmp_path):
    rows = {}
    for at_start in (False, True):
        settings = recipe(evaluation={"every": 6, "at_start": at_start}, ema={"decay": 0.9})
        Trainer(settings, seeded(), Counting(), tmp_path / f"{at_start}").run()
        rows[at_start] = list(metrics.rows(tmp_path / f"{at_start}"))
    first, *others = rows[True]
    assert others == rows[False]
    assert first["step"] == 0
    with torch.no_grad():
        assert first["validation_loss"] == pytest.approx(Counting().evaluate(seeded())["validation_loss"])


def test_the_model_trains_in_steps_and_is_judged_in_between(tmp_path):
    modes = []

    class Watched(Counting):
        def loss(self, model, batch):
            modes.append(("step", model.training, torch.is_grad_enabled()))
            return super().loss(model, batch)

        def evaluate(self, model):
            modes.append(("look", model.training, torch.is_grad_enabled()))
            return super().evaluate(model)

    settings = recipe(run={"steps": 3}, evaluation={"every": 2, "at_start": True})
    Trainer(settings, seeded().eval(), Watched(), tmp_path).run()
    step, look = ("step", True, True), ("look", False, False)
    assert modes == [look, step, step, look, step, look]


@pytest.mark.parametrize(("optimizer", "kernels"), [("adamw", "torch"), ("adamw", "triton"), ("muon", "torch")])
def test_a_step_that_is_not_finite_stops_the_run_and_is_saved(tmp_path, optimizer, kernels, outside):
    configure_backend(f"torch,{optimizer}={kernels},clip_grad_norm={kernels}")
    settings = recipe(run={"steps": 20, "log_every": 8}, optimizer={"name": optimizer}, checkpoint={"every": 0})
    with pytest.raises(TrainingError, match=r"^step 11 has a loss of nan; stopped.*broken-step-000011"):
        Trainer(settings, seeded(), Counting(spoil=11), tmp_path).run()
    folder = tmp_path / "broken-step-000011"
    batch, weights = load_file(folder / "batch.safetensors"), load_file(folder / "weights.safetensors")
    assert batch["0.batch.factor"].isnan()
    assert json.loads((folder / "state.json").read_text())["figures"]["loss"] == "nan"

    # What a run of ten steps ends with is what step 11 began with.
    before = Trainer(settings, seeded(), Counting(), tmp_path / "ten")
    while before.step < 10:
        before.train_step()
    for name, value in before.model.state_dict().items():
        assert torch.equal(weights[name], value)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_broken_steps_are_passed_over_where_the_recipe_allows_it(tmp_path, kernels, outside):
    """The weights are those of a run that made every update but that one, whenever the host looks."""
    configure_backend(f"torch,adamw={kernels},clip_grad_norm={kernels}")

    def train(folder, log_every, spoil, **run):
        settings = recipe(run={"steps": 4, "log_every": log_every, **run}, schedule={"name": "constant"})
        trainer = Trainer(settings, seeded(), Counting(spoil=spoil), tmp_path / folder)
        trainer.run()
        return trainer

    often, seldom = (train(f"every {n}", n, 2, skip_broken=1) for n in (1, 4))
    assert all(map(torch.equal, often.model.state_dict().values(), seldom.model.state_dict().values()))
    _, losses = metrics.curve(tmp_path / "every 4", "loss")
    assert [math.isnan(loss) for loss in losses] == [False, True, False, False]
    assert [path.name for path in (tmp_path / "every 4").glob("broken-*")] == ["broken-step-000002"]

    class WithoutTwo(Counting):
        def next_batch(self):
            return super().next_batch() if self.drawn != 1 else (super().next_batch(), super().next_batch())[1]

    settings = recipe(run={"steps": 3}, schedule={"name": "constant"})
    spared = Trainer(settings, seeded(), WithoutTwo(), tmp_path / "three")
    spared.run()
    for one, other in zip(seldom.model.state_dict().values(), spared.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_gradient_that_is_not_finite_spoils_a_step_whose_loss_is(tmp_path, kernels, outside):
    configure_backend(f"torch,adamw={kernels},clip_grad_norm={kernels}")

    class Steep(Counting):
        def loss(self, model, batch):
            found = super().loss(model, batch)
            return Loss(found.total + (0 * model.head.weight).sum().sqrt(), found.count)

    trainer = Trainer(recipe(run={"skip_broken": 0}), model := seeded(), Steep(), tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    trainer.train_step()
    assert math.isfinite(trainer.pending[0].figure("loss"))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with pytest.raises(TrainingError, match=r"^step 1 has a grad norm of nan; stopped"):
        Trainer(recipe(), seeded(), Steep(), tmp_path / "whole").run()


def test_the_norm_that_is_told_is_that_of_all_gradients_whether_they_are_clipped_or_not(tmp_path):
    told = []
    for clip in (0, 1e9):
        trainer = Trainer(recipe(optimizer={"clip": clip}), seeded(), Counting(noise=0), tmp_path / str(clip))
        trainer.train_step()
        told.append(float(trainer.pending[0].figure("grad_norm")))
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_a_resumed_run_knows_how_many_steps_it_has_passed_over(tmp_path):
    """Else the device would pass over one more, and update weights that the host then keeps as those of before."""

    class TwiceSpoiled(Counting):
        stop = False

        def next_batch(self):
            if self.stop and self.drawn == 4:
                signal.raise_signal(signal.SIGTERM)
            batch = super().next_batch()
            return batch | {"factor": torch.tensor(torch.nan if self.drawn in (2, 6) else 1.0)}

    settings = recipe(run={"steps": 12, "log_every": 12, "skip_broken": 1}, checkpoint={"every": 12})
    for folder, stops in (("whole", [False]), ("resumed", [True, False])):
        for stop in stops:
            objective = TwiceSpoiled()
            objective.stop = stop
            trainer = Trainer(settings, seeded(), objective, tmp_path / folder)
            with nullcontext() if stop else pytest.raises(TrainingError, match="step 6 has a loss of nan; stopped"):
                trainer.run()
    kept = [load_file(tmp_path / name / "broken-step-000006/weights.safetensors") for name in ("whole", "resumed")]
    assert all(torch.equal(value, kept[1][name]) for name, value in kept[0].items())


def test_a_run_that_broke_goes_on_as_the_error_says(tmp_path):
    def train(**run):
        settings = recipe(run={"steps": 10, **run}, checkpoint={"every": 4})
        return Trainer(settings, seeded(), Counting(spoil=6), tmp_path).run()

    with pytest.raises(TrainingError, match=r"from step 4 with --set run\.skip_broken=1 to pass over it"):
        train()
    with pytest.raises(TrainingError, match="step 6"):
        train()  # exact, so it breaks again
    assert math.isfinite(train(skip_broken=1)["loss"])


def test_each_step_takes_the_rate_of_its_number_and_the_average_that_of_its_own(tmp_path):
    """By hand: a warm-up of 4 steps to 0.1, then down a line to 0.05; an average of decay min(0.9, (1 + n) / (10 + n))."""
    settings = recipe(
        run={"steps": 8}, optimizer={"lr": 0.1}, ema={"decay": 0.9}, checkpoint={"every": 3},
        schedule={"name": "linear", "warmup": 4, "final": 0.5},
    )  # fmt: skip
    rates, average = [], None
    for stop in (5, 8):  # the second half after a resume
        trainer = Trainer(settings, seeded(), Counting(), tmp_path)
        average = trainer.model.head.weight.detach().clone() if average is None else average
        step, optimizer = trainer.optimizer.step, trainer.optimizer

        def watched(step=step, optimizer=optimizer, trainer=trainer, stop=stop):
            nonlocal average
            rates.append(float(optimizer.param_groups[0]["lr"]))
            step()
            n = len(rates) - 1
            decay = min(0.9, (1 + n) / (10 + n))
            average = decay * average + (1 - decay) * trainer.model.head.weight.detach()
            if len(rates) == stop:
                trainer.interruption.number = 15

        trainer.optimizer.step = watched
        trainer.run()
    expected = [0.025, 0.05, 0.075, 0.1, 0.1, 0.1 - 0.05 / 3, 0.1 - 0.1 / 3, 0.05]
    assert rates == pytest.approx(expected)
    assert metrics.curve(tmp_path, "lr") == (list(range(1, 9)), pytest.approx(expected))
    torch.testing.assert_close(trainer.average.averages["head.weight"], average)


def test_metrics_are_means_over_the_same_count(tmp_path):
    class Constant(Counting):
        def loss(self, model, batch):
            found = super().loss(model, batch)
            return Loss(found.total, 10, {"twice": torch.tensor(20.0)}, 6)

    Trainer(recipe(run={"steps": 2}, data={"accumulate": 3}), seeded(), Constant(), tmp_path).run()
    assert metrics.curve(tmp_path, "twice")[1] == [2.0, 2.0]


def test_a_metric_with_a_weight_of_its_own_is_a_mean_over_that(tmp_path):
    class Uneven(Counting):
        def loss(self, model, batch):
            found, number = super().loss(model, batch), torch.tensor(float(self.drawn))
            return Loss(found.total, 10, {"number": number * number}, 6, weights={"number": number})

    Trainer(recipe(run={"steps": 2}, data={"accumulate": 3}), seeded(), Uneven(), tmp_path).run()
    assert metrics.curve(tmp_path, "number")[1] == pytest.approx([14 / 6, 77 / 15])


@pytest.mark.parametrize("graph", ["off", "on"])
def test_what_a_step_adds_up_is_its_own(tmp_path, graph):
    """An objective may hand out tensors that it goes on to use, such as a weight for a count and for a metric."""

    class Weighed(Counting):
        fixed_shapes = True

        def next_batch(self):
            return super().next_batch() | {"weight": torch.tensor(float(self.drawn))}

        def loss(self, model, batch):
            found = super().loss(model, batch)
            return Loss(found.total * batch["weight"], batch["weight"], {"weight": batch["weight"]}, 6)

    trainer = Trainer(recipe(run={"graph": graph}, data={"accumulate": 3}), seeded(), Weighed(), tmp_path)
    for _ in range(2):
        trainer.train_step()
    assert [[float(batch["weight"]) for batch in step.batches] for step in trainer.pending] == [[1, 2, 3], [4, 5, 6]]
    assert [float(step.figure("weight")) for step in trainer.pending] == [1, 1]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_without_a_label_learns_nothing_and_breaks_nothing(tmp_path, accumulate):
    class Masked(Counting):
        """By a mask, so that a division by no labels at all would reach the gradients."""

        def loss(self, model, batch):
            losses = nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten(), reduction="none")  # fmt: skip
            mask = batch["labels"].flatten() >= 0
            return Loss((losses * mask).sum(), mask.sum())

    made = recipe(data={"accumulate": accumulate}, optimizer={"weight_decay": 0.0})
    trainer = Trainer(made, model := seeded(), Masked(noise=2.0), tmp_path)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.train_step()
    assert [float(trainer.pending[0].figure(name)) for name in ("loss", "grad_norm")] == [0, 0]
    assert all(map(torch.equal, before, model.parameters()))


def test_the_average_follows_and_is_what_is_judged():
    model = seeded()
    average = AveragedWeights(dict(model.named_parameters()), 0.9)
    start = model.head.weight.detach().clone()
    with torch.no_grad():
        model.head.weight += 1
    average.begin(10**6)
    average.update()
    with average.applied():
        torch.testing.assert_close(model.head.weight, start + 0.1)
    torch.testing.assert_close(model.head.weight, start + 1)
    average.begin(0)  # early steps count for more
    average.update()
    torch.testing.assert_close(average.averages["head.weight"], start + 1 - 0.9 * 0.1)


def test_parameters_go_to_the_optimizer_that_suits_them():
    settings = recipe(optimizer={"name": "muon", "muon_lr": 0.5, "lr": 0.25, "weight_decay": 0.3})
    model = seeded()
    made = make_optimizer(model, settings.optimizer, settings.precision, 0)
    named = {id(param): name for name, param in model.named_parameters()}
    where = [
        ({named[id(p)] for p in group["params"]}, group["lr"], group["weight_decay"]) for group in made.param_groups
    ]
    matrices = {"layers.0.weight", "layers.1.weight"}
    assert where[0] == (matrices, 0.5, 0.3)
    assert where[1] == (set(named.values()) - matrices, 0.25, 0.0)
    assert isinstance(made, optim.Muon)
    router, experts = torch.empty(4, 8), torch.empty(4, 8, 8)
    assert not is_hidden_matrix("layers.0.mlp.router.weight", router)
    assert is_hidden_matrix("layers.0.mlp.gate_up", experts)


def test_adamw_is_ours_where_it_has_kernels_or_is_chosen():
    settings = recipe()
    make = lambda model: make_optimizer(model, settings.optimizer, settings.precision, 0)
    assert isinstance(make(seeded().to("meta")), optim.AdamW)
    assert not isinstance(make(seeded()), optim.AdamW)  # PyTorch's own is faster on a CPU
    with backend("torch"):
        assert isinstance(make(seeded()), optim.AdamW)


def test_decay_spares_what_is_no_matrix():
    settings = recipe()
    made = make_optimizer(seeded(), settings.optimizer, settings.precision, 0)
    assert [(len(group["params"]), group["weight_decay"]) for group in made.param_groups] == [(2, 0.1), (4, 0.0)]


def test_a_frozen_model_cannot_be_trained(tmp_path):
    with pytest.raises(ValueError, match="nothing to train"):
        Trainer(recipe(), seeded().requires_grad_(False), Counting(), tmp_path)


def test_bfloat16_under_autocast_learns_too(tmp_path):
    settings = recipe(run={"steps": 100}, optimizer={"lr": 0.03}, precision={"compute": "bfloat16"})
    assert Trainer(settings, seeded(), Counting(), tmp_path).run()["loss"] < 1
    assert seeded().head.weight.dtype == torch.float32


def test_fp8_products_are_as_close_as_the_format_allows():
    torch.manual_seed(0)
    layer, x = nn.Linear(64, 32), torch.randn(5, 7, 64, requires_grad=True)
    exact = layer(x)
    grad = torch.randn_like(exact)
    wanted = torch.autograd.grad(exact, [x, layer.weight, layer.bias], grad)
    made = fp8.linear(layer, x)
    found = torch.autograd.grad(made, [x, layer.weight, layer.bias], grad.to(made.dtype))
    apart = lambda a, b: ((a - b).norm() / b.norm()).item()
    assert apart(made, exact) < 2**-4  # e4m3 has 3 bits after the point, and errors average out
    assert max(apart(a, b) for a, b in zip(found, wanted, strict=True)) < 2**-3
    with pytest.raises(ValueError, match=r"precision\.fp8 needs a GPU of compute capability 8\.9"):
        fp8.use_fp8(seeded(), torch.device("cpu"))


def test_the_plot_is_one_page_with_both_curves(tmp_path):
    settings = recipe(run={"steps": 60}, evaluation={"every": 20}, checkpoint={"every": 0})
    Trainer(settings, seeded(), Counting(), tmp_path).run()
    page = metrics.plot_run(tmp_path, "counting").read_text(encoding="utf-8")
    assert "held out" in page
    assert "plotly.js v" in page
    assert metrics.smooth([1.0, 3.0, 5.0], 2) == [1.0, 2.0, 4.0]


def test_a_log_that_is_being_written_can_be_read(tmp_path):
    (tmp_path / metrics.METRICS).write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert metrics.curve(tmp_path, "loss") == ([1], [2.0])
    log = metrics.Log(tmp_path / "x.jsonl")
    log.write(step=1, loss=math.inf)
    assert log.flush() == len('{"step": 1, "loss": "inf"}\n')


def test_progress_is_lines_where_nobody_watches(tmp_path, capsys):
    Progress(recipe()).console.print("x")
    Trainer(recipe(), seeded(), Counting(), tmp_path).run()
    lines = capsys.readouterr().err.splitlines()
    assert any(line.startswith("step 12/12  loss ") and "tokens/s" in line for line in lines)


class Recorder:
    """Stands in for wandb and trackio: takes what both document, and nothing else."""

    def __init__(self):
        self.started, self.logged, self.finished = [], [], 0

    def init(self, *, project, name, config, resume, id="", dir=""):
        self.started.append((project, name, config["optimizer"]["lr"], resume, id, dir))
        return self

    def log(self, data, step):
        self.logged.append((step, data))

    def finish(self):
        self.finished += 1


class Board(Recorder):
    """Stands in for torch.utils.tensorboard."""

    def SummaryWriter(self, folder, purge_step):
        self.started.append((folder, purge_step))
        return self

    def add_scalar(self, name, value, step):
        self.logged.append((step, {name: value}))

    def close(self):
        self.finished += 1


def test_trackers_follow_a_run_and_its_continuation_under_one_name(tmp_path, monkeypatch):
    made = {"wandb": Recorder(), "trackio": Recorder(), "torch.utils.tensorboard": Board()}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    every = {"trackers": ["tensorboard", "wandb", "trackio"], "log_every": 1}
    for steps in (2, 4, 4):  # the last is finished and tells nobody
        Trainer(recipe(run={"steps": steps, **every}), seeded(), Counting(), tmp_path).run()
    for tracker in made.values():
        steps = [step for step, data in tracker.logged if "loss" in data]
        assert (steps, tracker.finished, len(tracker.started)) == ([1, 2, 3, 4], 2, 2)
        assert {"loss", "grad_norm", "lr", "validation_loss"} <= {name for _, data in tracker.logged for name in data}
    (project, name, rate, resume, identity, place), second = made["wandb"].started
    assert (project, name, rate, resume, place) == ("tilestack", "run", 0.001, "allow", str(tmp_path))
    assert (identity, identity == second[4]) == (second[4], True)
    assert made["trackio"].started[0][1] == f"run-{identity}"
    assert [step for _, step in made["torch.utils.tensorboard"].started] == [0, 2]
    with RunFolder(tmp_path).starting_over():
        pass
    Trainer(recipe(run={"steps": 2, **every}), seeded(), Counting(), tmp_path).run()
    assert made["wandb"].started[-1][4] != identity


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_a_tracker_that_is_not_installed_is_one_line_before_anything(tmp_path, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"^run\.trackers needs {name}: pip install {name}$"):
        Trainer(recipe(run={"trackers": [name]}), seeded(), Counting(), tmp_path)
    with pytest.raises(RecipeError, match=r"^run\.trackers has no mlflow; there are tensorboard, wandb, trackio$"):
        recipe(run={"trackers": ["mlflow"]})


def test_a_profile_is_a_trace_of_the_steps_after_the_first_four_and_changes_nothing(tmp_path, capsys):
    for folder, profile in (("plain", 0), ("traced", 3)):
        Trainer(recipe(), seeded(), Counting(), tmp_path / folder, profile=profile).run()
    assert (tmp_path / "plain/metrics.jsonl").read_bytes() == (tmp_path / "traced/metrics.jsonl").read_bytes()
    trace, shares = sorted((tmp_path / "traced/profile").iterdir())
    events = json.loads(trace.read_text())["traceEvents"]
    assert (trace.name, shares.name) == ("steps-to-000007.json", "steps-to-000007.txt")
    assert sum(event.get("name") == "aten::embedding" for event in events) == 3
    said = capsys.readouterr().err.replace("\n", " ")
    assert "a trace of 3 steps is in" in said
    assert "Most time went to:" in said
    header, *rows = shares.read_text().splitlines()
    assert sum(float(row.split("%")[0]) for row in rows) == pytest.approx(100, abs=0.05 * len(rows) + 0.1)
    times = [float(row.split()[1]) for row in rows]
    assert times == sorted(times, reverse=True)
    assert sum(times) == pytest.approx(float(header.split()[-2]), abs=0.001 * len(rows))
    (calls,) = {float(row.split()[2]) for row in rows if row.split()[3] == "aten::embedding"}
    assert calls == 1
    Trainer(recipe(run={"steps": 2}), seeded(), Counting(), tmp_path / "short", profile=3).run()
    assert "no trace" in capsys.readouterr().err
