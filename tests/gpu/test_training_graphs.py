"""Whole training steps as CUDA graphs: to the bit those that are run kernel by kernel, also after a resume."""

import gc
import signal

import pytest
import torch

from tilestack import models
from tilestack.data import NO_LABEL
from tilestack.data.packing import collate
from tilestack.nn.lora import add_lora
from tilestack.train import Loss, Recipe, RecipeError, Trainer
from tilestack.train.next_token import next_token_loss
from tilestack.train.settings import read
from tilestack.train.static_step import StaticStep

STEPS = 20
DENSE = dict(
    model_type="qwen3", vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=64, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
LONG = DENSE | dict(max_position_embeddings=1024)
EXPERTS = DENSE | dict(
    model_type="qwen3_moe", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128, decoder_sparse_step=1
)


class Documents:
    """Random texts of 20 to `longest` tokens, packed two to a row; the batch of number `spoil` has a loss of NaN, before that
    of number `stop` comes a SIGTERM."""

    fixed_shapes = True

    def __init__(self, spoil=-1, stop=-1, rows=4, longest=120):
        self.drawn, self.spoil, self.stop, self.rows, self.longest = 0, spoil, stop, rows, longest

    def next_batch(self):
        if self.drawn == self.stop:
            signal.raise_signal(signal.SIGTERM)
        source = torch.Generator().manual_seed(self.drawn)
        rows = []
        for _ in range(self.rows):
            sizes = torch.randint(20, self.longest, (2,), generator=source).tolist()
            texts = [torch.randint(64, (size,), generator=source).tolist() for size in sizes]
            rows.append([(ids, [*ids[1:], NO_LABEL]) for ids in texts])
        self.drawn += 1
        factor = torch.tensor(torch.nan if self.drawn == self.spoil else 1.0, device="cuda")
        return {"batch": collate(rows, 2 * self.longest + 16, 8).to("cuda"), "factor": factor}

    def loss(self, model, batch):
        total = next_token_loss(model, batch["batch"]) * batch["factor"]
        return Loss(total, batch["batch"].valid, tokens=batch["batch"].ids.numel())

    def evaluate(self, model):
        return {"validation_loss": float(self.loss(model, Documents().next_batch()).total)}

    def sample(self, model):
        return []

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


def train(folder, graph, objective=None, config=DENSE, lora=0, say=None, **sections):
    """A run under `run.graph`, or that says nothing of it where `graph` is empty."""
    settings = {
        "run": {"steps": STEPS, "device": "cuda", "log_every": 5, "skip_broken": 1}
        | ({"graph": graph} if graph else {}),
        "data": {"accumulate": 1},
        "precision": {"compute": "bfloat16"},
        "optimizer": {"clip": 0.5},
        "schedule": {"warmup": 5},
        "evaluation": {"every": 6},
        "checkpoint": {"every": 0, "keep": 1},
        "ema": {"decay": 0.9},
    }
    made = read(Recipe, {name: settings.get(name, {}) | sections.get(name, {}) for name in settings | sections})
    torch.manual_seed(0)
    model = models.Decoder(models.ModelConfig.from_hf(config, strict=True))
    if lora:
        add_lora(model.cuda(), ["layers.*"], lora, dropout=0.1)
    trainer = Trainer(made, model, objective or Documents(), folder)
    if say is not None:
        trainer.progress.say = trainer.steps.say = say.append
    trainer.run()
    return trainer


def everything(folder):
    (last,) = (folder / "checkpoints").glob("step-*")
    files = [folder / "metrics.jsonl", *sorted(last.glob("*.safetensors"))]
    return {path.name: path.read_bytes() for path in files}


KINDS = {
    "adamw": {},
    "accumulation": dict(data={"accumulate": 3}),
    "no clipping": dict(optimizer={"clip": 0}),
    "muon": dict(optimizer={"name": "muon"}),
    "sgd": dict(optimizer={"name": "sgd", "lr": 0.1}),
    "8 bits": dict(optimizer={"name": "adamw8bit"}),
    "float32": dict(precision={"compute": "float32"}),
    "bfloat16": dict(precision={"parameters": "bfloat16"}),
    "fp8": dict(precision={"fp8": True}),
    "fp8, accumulated": dict(data={"accumulate": 3}, precision={"fp8": True, "fp8_head": True}),
    "head in fp8": dict(precision={"fp8": True, "fp8_head": True}),
    "experts in fp8": dict(config=EXPERTS, precision={"fp8": True}),
    "adapters with dropout": dict(lora=8),
    "experts": dict(config=EXPERTS, data={"accumulate": 2}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_repeat_the_plain_steps_to_the_bit(tmp_path, kind):
    plain = train(tmp_path / "plain", "off", **KINDS[kind])
    graphs = train(tmp_path / "graphs", "on", **KINDS[kind])
    assert isinstance(graphs.steps, StaticStep)
    wanted = {"first", "more", "update"} if plain.recipe.data.accumulate > 1 else {"first", "update"}
    assert set(graphs.steps.graphs) == wanted
    assert everything(tmp_path / "plain") == everything(tmp_path / "graphs")


def test_graphs_are_the_default(tmp_path):
    """With checkpoints and evaluations between replays, of the model itself and not of an average of it."""
    said = []
    settings = dict(data={"accumulate": 2}, checkpoint={"every": 7}, ema={"decay": 0.0}, config=EXPERTS)
    train(tmp_path / "plain", "off", **settings)
    trainer = train(tmp_path / "auto", "", say=said, **settings)
    assert set(trainer.steps.graphs) == {"first", "more", "update"}
    assert everything(tmp_path / "plain") == everything(tmp_path / "auto")
    assert not any("CUDA graphs" in text for text in said)


def test_long_documents_have_the_same_bits_in_every_run_and_in_graphs(tmp_path):
    """Gradients of their queries are sums over many blocks of keys, which PyTorch's attention adds up in any order unless
    it is told strictly not to."""
    for name, graph in (("plain", "off"), ("again", "off"), ("graphs", "on")):
        train(tmp_path / name, graph, Documents(rows=16, longest=504), config=LONG)
    assert everything(tmp_path / "plain") == everything(tmp_path / "again") == everything(tmp_path / "graphs")


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_broken_step_and_a_resume_in_the_middle(tmp_path, accumulate):
    """The NaN comes within a replay; the resumed run captures anew, at other steps."""
    settings = dict(data={"accumulate": accumulate})
    spoiled = accumulate * 15
    train(tmp_path / "plain", "off", Documents(spoiled), **settings)
    train(tmp_path / "graphs", "on", Documents(spoiled), **settings)
    stopped = train(tmp_path / "resumed", "on", Documents(spoiled, stop=accumulate * 9), **settings)
    assert (stopped.step, stopped.finished) == (10, False)
    train(tmp_path / "resumed", "on", Documents(spoiled), **settings)
    assert everything(tmp_path / "plain") == everything(tmp_path / "graphs") == everything(tmp_path / "resumed")
    assert '"loss": "nan"' in (tmp_path / "graphs/metrics.jsonl").read_text()
    assert (tmp_path / "graphs/broken-step-000015").is_dir()


class Waiting(Documents):
    def loss(self, model, batch):
        float(batch["factor"])
        return super().loss(model, batch)


class Refusing(Documents):
    def loss(self, model, batch):
        torch.cuda.synchronize()  # which PyTorch does not warn of, and no capture allows
        return super().loss(model, batch)


@pytest.mark.parametrize("kind", [Waiting, Refusing])
def test_what_cannot_be_captured_runs_on_and_says_why(tmp_path, kind):
    """Dropout is on, whose chance a failed capture must not disturb."""
    said = []
    train(tmp_path / "plain", "off", lora=4)
    trainer = train(tmp_path / "auto", "auto", kind(), lora=4, say=said)
    assert everything(tmp_path / "plain") == everything(tmp_path / "auto")
    assert trainer.steps.graphs == {}
    assert any("steps are not captured in CUDA graphs" in text for text in said)
    with pytest.raises(RecipeError, match=r'run\.graph = "on" cannot be'):
        train(tmp_path / "on", "on", kind())


class RefusingLate(Documents):
    def loss(self, model, batch):
        made = super().loss(model, batch)
        torch.cuda.synchronize()
        return made


def test_a_capture_that_fails_gives_its_memory_back(tmp_path):
    held, steps = {}, {}
    for way, kind in (("off", Documents), ("auto", RefusingLate)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings = dict(evaluation={"every": 0}, ema={"decay": 0.0}, run={"steps": 6})
        trainer = train(tmp_path / way, way, kind(rows=128), **settings)
        gc.collect()
        torch.cuda.empty_cache()
        held[way] = torch.cuda.memory_reserved()
        steps[way] = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        del trainer
    assert steps["off"] > 2**26
    assert held["auto"] < held["off"] + steps["off"] / 2


class Crowded(Documents):
    """Has no memory for its first evaluation, when steps are captured."""

    evaluated = 0

    def evaluate(self, model):
        self.evaluated += 1
        if self.evaluated == 1:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return super().evaluate(model)


def test_an_evaluation_that_lacks_the_memory_of_the_graphs_gets_it(tmp_path):
    """The steps that follow run kernel by kernel over what replays have left; dropout is on."""
    said = []
    train(tmp_path / "plain", "off", lora=4)
    trainer = train(tmp_path / "auto", "auto", Crowded(), lora=4, say=said)
    assert everything(tmp_path / "plain") == everything(tmp_path / "auto")
    assert trainer.steps.graphs == {}
    assert any("an evaluation ran out of memory beside them" in text for text in said)
    with pytest.raises(torch.OutOfMemoryError):
        train(tmp_path / "on", "on", Crowded())


def test_memory_does_not_grow_with_steps_and_is_not_held_twice(tmp_path):
    """What is allocated stays the same to the byte. So does what the allocator holds, in segments of 2 MiB and more, once
    steps have followed each other that keep as much for the host as these do."""

    def take_steps(trainer, count):
        for _ in range(count):
            trainer.train_step()
            trainer.pending.clear()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    peaks, steps = {}, {}
    for way in ("off", "on"):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        settings = dict(evaluation={"every": 0}, ema={"decay": 0.0}, run={"steps": 6})
        trainer = train(tmp_path / way, way, Documents(rows=128), **settings)
        allocated, held = take_steps(trainer, 5)
        assert take_steps(trainer, 10) == (allocated, held)
        peaks[way], steps[way] = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated() - allocated
        del trainer
    assert steps["off"] > 2**26  # far above a segment, so that a second copy of what a step needs would show
    assert peaks["on"] < peaks["off"] + steps["off"] / 2
