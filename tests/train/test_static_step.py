"""Steps over buffers that stay in place, as CUDA graphs run them: to the bit the steps that are run one by one."""

import json
import signal
from contextlib import nullcontext

import pytest
import torch
from test_balancing import mixtures
from tiny import Counting, TinyModel, recipe

from tilestack import configure_backend
from tilestack.data import NO_LABEL, Batch, pack
from tilestack.train import RecipeError, Trainer, static_step
from tilestack.train.static_step import StaticStep, fill, map_tensors, why_not_static
from tilestack.train.step import Step


class FixedCounting(Counting):
    """Asks to stop within a step, if told so."""

    fixed_shapes = True

    def __init__(self, stop=-1, **options):
        super().__init__(**options)
        self.stop = stop

    def next_batch(self):
        if self.drawn == self.stop:
            signal.raise_signal(signal.SIGTERM)
        return super().next_batch()


def train(folder, graph, stop=-1, spoil=-1, model=TinyModel, **sections):
    settings = {
        "run": {"steps": 20, "log_every": 3, "skip_broken": 1, "graph": graph},
        "data": {"accumulate": 3},
        "optimizer": {"lr": 0.05, "clip": 0.5},
        "schedule": {"warmup": 5},
        "checkpoint": {"every": 7, "keep": 1},
        "ema": {"decay": 0.9},
    }
    torch.manual_seed(3)
    made = recipe(**{name: settings.get(name, {}) | sections.get(name, {}) for name in settings | sections})
    trainer = Trainer(made, model(), FixedCounting(stop=stop, spoil=spoil), folder)
    trainer.run()
    return trainer


def everything(folder):
    (last,) = (folder / "checkpoints").glob("step-*")
    names = [path for path in sorted(last.iterdir()) if path.suffix == ".safetensors"]
    return {path.name: path.read_bytes() for path in [folder / "metrics.jsonl", *names]}


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    ("optimizer", "kernels", "steps"),
    [("adamw", "aten", 20), ("adamw", "triton", 5), ("sgd", "torch", 20), ("muon", "torch", 20)],
)
def test_the_steps_are_those_of_the_plain_loop(tmp_path, accumulate, optimizer, kernels, steps, outside):
    """With accumulation, clipping, a schedule, an average and a batch whose loss is NaN; resumed in the middle too."""
    if kernels != "aten":  # PyTorch's own AdamW, the default on a CPU, is no backend
        configure_backend(f"torch,{optimizer}={kernels},clip_grad_norm={kernels}")
    changed = {
        "run": {"steps": steps},
        "optimizer": {"name": optimizer},
        "data": {"accumulate": accumulate},
        "schedule": {"warmup": 2},
        "checkpoint": {"every": 0},
        "spoil": accumulate * (steps - 2),
    }
    plain = train(tmp_path / "plain", "off", **changed)
    static = train(tmp_path / "static", "on", **changed)
    stopped = train(tmp_path / "resumed", "on", stop=accumulate * steps // 2, **changed)
    train(tmp_path / "resumed", "on", **changed)
    assert (type(plain.steps), type(static.steps), stopped.finished) == (Step, StaticStep, False)
    assert everything(tmp_path / "plain") == everything(tmp_path / "static") == everything(tmp_path / "resumed")
    rows = [json.loads(line) for line in (tmp_path / "plain/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("loss") == "nan"] == [steps - 2]
    assert all(row["grad_norm"] > 0.5 for row in rows[:2])  # clipped


def test_a_run_may_go_on_in_another_way_than_it_began(tmp_path):
    train(tmp_path / "plain", "off")
    train(tmp_path / "mixed", "on", stop=30)
    train(tmp_path / "mixed", "off")
    assert everything(tmp_path / "plain") == everything(tmp_path / "mixed")


def test_mixtures_of_experts_add_up_their_loads_in_place(tmp_path):
    settings = dict(model=lambda: mixtures(scoring="sigmoid", bias_balancing=True), run={"steps": 8})
    train(tmp_path / "plain", "off", **settings)
    train(tmp_path / "static", "on", stop=12, **settings)
    train(tmp_path / "static", "on", **settings)
    assert everything(tmp_path / "plain") == everything(tmp_path / "static")
    assert "loads.safetensors" in everything(tmp_path / "plain")


def test_what_cannot_be_static_says_why(tmp_path):
    with pytest.raises(RecipeError, match=r'run\.graph = "on" cannot be: batches of Counting differ in shape; set it'):
        Trainer(recipe(run={"graph": "on"}), TinyModel(), Counting(), tmp_path)
    trainer = Trainer(recipe(), TinyModel(), FixedCounting(), tmp_path)  # auto, and there is no GPU to capture for
    assert isinstance(trainer.steps, Step)
    why = lambda device, **run: why_not_static(
        recipe(run=run), FixedCounting(), trainer.optimizer, torch.device(device)
    )
    assert why("cpu", compile="default") == 'run.compile = "default" has ways of its own'
    assert "looks at random states" in why("cuda", activation_checkpointing=True)
    assert why("cuda") == "the optimizer runs without kernels, and waits for the device"
    assert why("cpu") == ""


def test_a_buffer_takes_the_contents_and_refuses_other_shapes():
    batch = lambda start: pack([([start, 2, 3], [2, 3, NO_LABEL])], 4, 1)[0]
    buffer = map_tensors({"pairs": [batch(1), torch.ones(2)]}, torch.clone)
    places = [tensor.data_ptr() for tensor in (buffer["pairs"][0].ids, buffer["pairs"][1])]
    fill(buffer, {"pairs": [batch(9), torch.zeros(2)]})
    assert isinstance(buffer["pairs"][0], Batch)
    assert buffer["pairs"][0].ids.tolist() == [[9, 2, 3, 0]]
    assert [tensor.data_ptr() for tensor in (buffer["pairs"][0].ids, buffer["pairs"][1])] == places
    with pytest.raises(ValueError, match=r"of shape \[3\] comes after one of \[2\]"):
        fill(buffer, {"pairs": [batch(9), torch.zeros(3)]})


@pytest.fixture
def pretended_graphs(monkeypatch):
    """A GPU for StaticStep that is none: a capture runs nothing, and a replay makes the call. Gives what was captured."""
    captured = []

    class Graph:
        def __init__(self, call, keep):
            self.call, self.keep = call, keep

        def replay(self):
            self.keep(self.call())

    def capture(self, name, call):
        captured.append(name)
        self.graphs[name] = Graph(call, lambda result: setattr(self, "figures", result) if name == "update" else None)

    make = StaticStep.__init__
    monkeypatch.setattr(StaticStep, "__init__", lambda self, *a, **k: (make(self, *a, **k), setattr(self, "given_up", False))[0])  # fmt: skip
    monkeypatch.setattr(StaticStep, "_capture", capture)
    monkeypatch.setattr(StaticStep, "_watched", lambda self: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(static_step, "clear_up_after_capture", lambda *_: None)
    return captured


@pytest.mark.parametrize("accumulate", [1, 3])
def test_parts_are_captured_once_and_replayed_from_then_on(tmp_path, accumulate, pretended_graphs):
    settings = dict(data={"accumulate": accumulate}, spoil=accumulate * 15)
    train(tmp_path / "plain", "off", **settings)
    train(tmp_path / "graphs", "on", **settings)
    assert pretended_graphs == (["first", "update"] if accumulate == 1 else ["first", "more", "update"])
    assert everything(tmp_path / "plain") == everything(tmp_path / "graphs")


@pytest.mark.parametrize("fails", ["first", "more", "update"])
def test_a_capture_that_fails_costs_nothing_but_the_graphs(tmp_path, fails, pretended_graphs, monkeypatch):
    """What was added up while it was captured is dropped, and the step runs as the others do."""
    capture = StaticStep._capture

    def failing(self, name, call):
        call() if name != "update" else None  # here a capture computes, so that what it leaves behind would show
        if name == fails:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        capture(self, name, call)

    monkeypatch.setattr(StaticStep, "_capture", failing)
    experts = lambda: mixtures(bias_balancing=True)
    train(tmp_path / "plain", "off", model=experts)
    with pytest.raises(RecipeError, match=r'run\.graph = "on" cannot be: RuntimeError, operation not permitted when'):
        train(tmp_path / "on", "on")
    monkeypatch.setattr(static_step, "StaticStep", lambda step, must, say: StaticStep(step, say=say))
    trainer = train(tmp_path / "graphs", "on", model=experts)
    assert everything(tmp_path / "plain") == everything(tmp_path / "graphs")
    assert trainer.steps.graphs == {}
