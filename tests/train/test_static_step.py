"""Steps over buffers that stay in place, as CUDA graphs run them: to the bit the steps that are run one by one."""

import collections
import json
import signal
from contextlib import nullcontext

import pytest
import torch
from test_balancing import mixtures
from tiny import Counting, TinyModel, recipe
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tilestack import configure_backend, optim
from tilestack.data import NO_LABEL, Batch, pack
from tilestack.kernels.optim.multi_tensor import Table
from tilestack.train import Recipe, RecipeError, Trainer, static_step
from tilestack.train.batch_buffer import difference, fill, map_tensors, no_buffer_for
from tilestack.train.static_step import StaticStep, why_not_by_default, why_not_static
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


def train(folder, graph, stop=-1, spoil=-1, model=TinyModel, objective=FixedCounting, said=None, **sections):
    """A run under `run.graph`, or that says nothing of it where `graph` is None; what it tells goes to `said`."""
    settings = {
        "run": {"steps": 20, "log_every": 3, "skip_broken": 1} | ({} if graph is None else {"graph": graph}),
        "data": {"accumulate": 3},
        "optimizer": {"lr": 0.05, "clip": 0.5},
        "schedule": {"warmup": 5},
        "checkpoint": {"every": 7, "keep": 1},
        "ema": {"decay": 0.9},
    }
    torch.manual_seed(3)
    made = recipe(**{name: settings.get(name, {}) | sections.get(name, {}) for name in settings | sections})
    trainer = Trainer(made, model(), objective(stop=stop, spoil=spoil), folder)
    if said is not None:
        trainer.progress.say = said.append
        if isinstance(trainer.steps, StaticStep):
            trainer.steps.say = said.append
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
    trainer = Trainer(recipe(), TinyModel(), FixedCounting(), tmp_path)
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


def test_a_buffer_knows_what_it_cannot_take():
    """Anything that a captured step would not see: another shape or dtype, another number, another part."""
    Pair = collections.namedtuple("Pair", "ids weight")
    batch = lambda size=2, weight=0.5, dtype=torch.float32: {"pair": Pair(torch.ones(size, dtype=dtype), weight)}
    buffer = map_tensors(batch(), torch.clone)
    assert (type(buffer["pair"]), difference(buffer, batch())) == (Pair, "")
    assert difference(buffer, batch(3)) == "batch.pair.0 of float32[3] comes after one of float32[2]"
    assert difference(buffer, batch(dtype=torch.float64)) == "batch.pair.0 of float64[2] comes after one of float32[2]"
    assert difference(buffer, batch(weight=0.25)) == "batch.pair.1 is 0.25 after 0.5"
    assert difference(buffer, {**batch(), "more": 1}).startswith(
        "a batch of batch.pair.0, batch.pair.1, batch.more comes"
    )
    assert difference({"flag": True}, {"flag": 1}) == "batch.flag is 1 after True"
    assert no_buffer_for(batch()) == ""
    assert no_buffer_for({"rows": [object()]}) == "batch.rows.0 is a object, whose contents are not known"


def test_a_recipe_that_says_nothing_captures_what_can_be():
    assert Recipe().run.graph == "auto"


def test_without_a_gpu_a_run_says_why_it_captures_nothing_and_is_the_same_run(tmp_path):
    said, silent = [], []
    looks = dict(evaluation={"every": 4, "at_start": True}, spoil=30)
    trainer = train(tmp_path / "auto", None, said=said, **looks)
    train(tmp_path / "off", "off", said=silent, **looks)
    assert isinstance(trainer.steps, Step)
    assert everything(tmp_path / "auto") == everything(tmp_path / "off")
    about = [text for text in said if "CUDA graphs" in text]
    assert about == ["steps are not captured in CUDA graphs: the run is on a CPU"]
    assert not any("CUDA graphs" in text for text in silent)
    train(tmp_path / "auto", None, said=silent, **looks)  # it is finished: there is no step to say anything about
    assert not any("CUDA graphs" in text for text in silent)


def decided(objective=FixedCounting, optimizer=optim.AdamW, hook=None, device="cuda", **run):
    """Why a run would not be captured by default; empty where it would."""
    model = TinyModel()
    if hook:
        hook(model)
    return why_not_by_default(recipe(run=run), model, objective(), optimizer(model.parameters()), torch.device(device))


def test_auto_captures_where_everything_can_be(outside):
    assert decided() == ""
    assert decided(optimizer=optim.AdamW8bit) == decided(optimizer=optim.SGD) == ""
    configure_backend("adamw=triton")
    assert decided(device="cpu") == "the run is on a CPU"


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        (dict(objective=Counting), "batches of Counting differ in shape"),
        (dict(compile="default"), 'run.compile = "default" has ways of its own'),
        (dict(activation_checkpointing=True), "run.activation_checkpointing looks at random states on the host"),
        (dict(optimizer=torch.optim.AdamW), "the optimizer runs without kernels, and waits for the device"),
        (dict(hook=lambda model: model.layers[1].register_forward_hook(print)), "layers.1 has a hook, which"),
        (dict(hook=lambda model: model.register_forward_pre_hook(print)), "TinyModel has a hook, which"),
        (dict(hook=lambda model: model.head.register_full_backward_hook(print)), "head has a hook, which"),
        (dict(hook=lambda model: model.head.register_full_backward_pre_hook(print)), "head has a hook, which"),
        (dict(hook=lambda model: model.head.weight.register_hook(print)), "head.weight has a hook, which"),
        (
            dict(hook=lambda model: model.head.weight.register_post_accumulate_grad_hook(print)),
            "head.weight has a hook, which",
        ),
    ],
)
def test_auto_leaves_alone_what_a_graph_cannot_hold(changed, reason):
    assert decided(**changed).startswith(reason)


def test_auto_leaves_alone_what_was_told_to_run_otherwise(outside, monkeypatch):
    configure_backend("adamw=torch")
    assert decided() == "the optimizer runs without kernels, and waits for the device"
    configure_backend("")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert decided().startswith("torch.distributed is in use")


@pytest.mark.parametrize("before", ["off", "on", None])
def test_a_run_of_another_setting_goes_on_under_auto(tmp_path, before):
    """The folder of a run that began before the key was there has no such line."""
    train(tmp_path / "plain", "off")
    train(tmp_path / "run", before or "off", stop=30)
    if before is None:
        written = tmp_path / "run/recipe.toml"
        written.write_text("".join(line for line in written.open() if not line.startswith("graph = ")))
    train(tmp_path / "run", None)
    assert everything(tmp_path / "plain") == everything(tmp_path / "run")
    changed = json.loads((tmp_path / "run/run.json").read_text())[-1].get("changed", {})
    assert changed == ({"run.graph": [before, "auto"]} if before else {})


class Asked(TorchDispatchMode):
    """What PyTorch is asked to compute: operations, shapes, and every number that a graph would hold fast."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        shown = lambda leaf: tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else str(leaf)
        if func.namespace != "profiler":  # a note that an optimizer makes
            self.calls.append((str(func), [shown(leaf) for leaf in tree_leaves((args, kwargs))]))
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("model", [TinyModel, lambda: mixtures(scoring="sigmoid", bias_balancing=True)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_no_step_asks_for_anything_that_the_one_before_did_not(tmp_path, model, accumulate, outside, monkeypatch):
    """Rates, the average's weight, skipped steps, the order of batches: what differs from step to step lies in tensors. Where
    gradients come to lie is chance here and the same in every replay, so noting their addresses is not looked at."""
    write = Table._write

    def write_unseen(self, row, values):
        with _disable_current_modes():
            write(self, row, values)

    monkeypatch.setattr(Table, "_write", write_unseen)
    configure_backend("torch,adamw=triton,clip_grad_norm=triton,grouped_linear=triton")
    made = recipe(
        run={"steps": 12, "skip_broken": 2},
        data={"accumulate": accumulate},
        optimizer={"clip": 0.5},
        schedule={"warmup": 4},
        ema={"decay": 0.9},
        model={"bias_rate": 0.01} if model is not TinyModel else {},
    )
    trainer = Trainer(made, model(), FixedCounting(spoil=4 * accumulate), tmp_path)
    step, asked, rates = trainer.one_step, [], []
    for number in range(6):
        rates.append(step.begin(number))
        batches = [trainer.objective.next_batch() for _ in range(accumulate)]
        with Asked() as mode:
            for part, batch in enumerate(batches):
                step.micro_batch(batch, part == 0)
            step.update()
        asked.append(mode.calls)
    assert len(set(rates[2:])) == 3  # it rises, stays and falls
    assert len(asked[2]) > 100
    assert asked[2] == asked[3] == asked[4] == asked[5]


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


@pytest.fixture
def captures_by_default(pretended_graphs, monkeypatch):
    """Where all that `auto` asks for is there."""
    monkeypatch.setattr(static_step, "why_not_by_default", lambda *_: "")
    return pretended_graphs


def test_auto_captures_and_has_nothing_to_say(tmp_path, captures_by_default):
    said = []
    settings = dict(spoil=45, evaluation={"every": 3, "at_start": True})
    train(tmp_path / "plain", "off", **settings)
    trainer = train(tmp_path / "graphs", None, said=said, **settings)
    assert captures_by_default == ["first", "more", "update"]
    assert (type(trainer.steps), trainer.steps.must) == (StaticStep, False)
    assert everything(tmp_path / "plain") == everything(tmp_path / "graphs")
    assert not any("CUDA graphs" in text for text in said)


class Growing(FixedCounting):
    """Promises batches of one shape, and from a certain one on they are longer."""

    longer_from = 0

    def next_batch(self):
        self.length = 6 if self.drawn < self.longer_from else 7
        return super().next_batch()


@pytest.mark.parametrize("longer_from", [4, 6, 30])
def test_a_batch_of_another_shape_ends_the_graphs_and_not_the_run(
    tmp_path, longer_from, captures_by_default, monkeypatch
):
    """Before the capture, within a step or not, and at the beginning of a step after it."""
    said = []
    monkeypatch.setattr(Growing, "longer_from", longer_from)
    train(tmp_path / "plain", "off", objective=Growing)
    trainer = train(tmp_path / "auto", "auto", objective=Growing, said=said)
    assert everything(tmp_path / "plain") == everything(tmp_path / "auto")
    assert trainer.steps.graphs == {}
    told = "steps are not captured in CUDA graphs: batch.ids of int64[4, 7] comes after one of int64[4, 6], though Growing has fixed_shapes"
    assert [text for text in said if "CUDA graphs" in text] == [told]
    with pytest.raises(RecipeError, match=r'run\.graph = "on" cannot be: batch\.ids of int64\[4, 7\] comes'):
        train(tmp_path / "on", "on", objective=Growing)


def test_a_batch_of_another_shape_within_a_captured_step_is_an_error(tmp_path, captures_by_default, monkeypatch):
    monkeypatch.setattr(Growing, "longer_from", 31)
    with pytest.raises(ValueError, match=r'though Growing has fixed_shapes; set run\.graph to "off"'):
        train(tmp_path, "auto", objective=Growing)


class Boxed(FixedCounting):
    """Batches in a box of its own making, into which nobody else can look."""

    class Box:
        def __init__(self, batch):
            self.batch = batch

    def next_batch(self):
        return self.Box(super().next_batch())

    def loss(self, model, batch):
        return super().loss(model, batch.batch)


def test_batches_that_no_buffer_takes_are_learned_from_one_by_one(tmp_path, captures_by_default):
    said = []
    train(tmp_path / "plain", "off", objective=Boxed)
    train(tmp_path / "auto", "auto", objective=Boxed, said=said)
    assert everything(tmp_path / "plain") == everything(tmp_path / "auto")
    assert captures_by_default == []
    assert "batch is a Box, whose contents are not known, though Boxed has fixed_shapes" in "".join(said)


class Crowded(FixedCounting):
    """Has no memory left to evaluate with while a step is captured."""

    trainer = None

    def evaluate(self, model):
        if getattr(Crowded.trainer.steps, "graphs", None):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().evaluate(model)


def test_an_evaluation_that_lacks_the_memory_of_the_graphs_gets_it(tmp_path, captures_by_default, monkeypatch):
    said, begin = [], Trainer.run
    monkeypatch.setattr(Trainer, "run", lambda self: (setattr(Crowded, "trainer", self), begin(self))[1])
    settings = dict(objective=Crowded, evaluation={"every": 6})
    train(tmp_path / "plain", "off", **settings)
    trainer = train(tmp_path / "auto", "auto", said=said, **settings)
    assert everything(tmp_path / "plain") == everything(tmp_path / "auto")
    assert captures_by_default == ["first", "more", "update"]
    assert (trainer.steps.graphs, trainer.steps.release()) == ({}, False)
    told = ["steps are not captured in CUDA graphs: an evaluation ran out of memory beside them"]
    assert [text for text in said if "CUDA graphs" in text] == told
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "on", "on", **settings)


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
