"""No option is read and forgotten: each one that is given reaches what it is for."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import typer

from tilestack import cli
from tilestack.cli.recipes import find_recipe
from tilestack.cli.speaker import Speaker
from tilestack.cli.train import TrainingArguments
from tilestack.engine import EngineSettings
from tilestack.lab.serving.load import Outcome, Target
from tilestack.lab.serving.load.workload import Prefixes
from tilestack.server.settings import Limits, ServerSettings


@pytest.fixture
def ran(capsys, monkeypatch):
    """Runs a command with options by name; refuses those that a test forgets, but for some that others look after."""
    monkeypatch.delenv("TILESTACK_API_KEY", raising=False)

    def run(name, options, *arguments, elsewhere=()):
        command = typer.main.get_command(cli.app).commands[name]
        first = {
            name.lstrip("-"): param.opts[0].lstrip("-")
            for param in command.params
            if param.param_type_name == "option"
            for name in (*param.opts, *param.secondary_opts)
        }
        assert {*first.values()} == {first[each] for each in (*options, *elsewhere)}
        words = []
        for each, value in options.items():
            several = value if isinstance(value, list) else [value]
            words += [f"--{each}"] if value is True else [word for one in several for word in (f"--{each}", str(one))]
        with pytest.raises(SystemExit) as ended:
            cli.main([name, *words, *arguments])
        assert ended.value.code == 0, capsys.readouterr().err

    return run


def test_of_serve(ran, monkeypatch, tmp_path):
    asked = []
    load = lambda model, settings: asked.append((model, settings)) or SimpleNamespace()
    run = lambda engine, settings, *_: asked.append(settings)
    monkeypatch.setattr("tilestack.engine.Engine.load", load)
    monkeypatch.setattr("tilestack.server.process.run_server", run)
    monkeypatch.setattr(
        "tilestack.server.process.listen", lambda settings: asked.append(settings) or SimpleNamespace(close=list)
    )
    monkeypatch.setattr("tilestack.server.request_log.log_to_stderr", lambda: None)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    limits = {"max-body": 11, "max-prompt-tokens": 12, "max-output-tokens": 13, "max-choices": 14, "max-stops": 15,
              "max-stored": 16, "max-stored-bytes": 17, "timeout": 18.0}  # fmt: skip
    engine = {"device": "cpu", "dtype": "float32", "weights": "int8", "context": 21, "max-sequences": 22, "step-tokens": 23,
              "kv-memory": 0.25, "kv-dtype": "int8", "swap-memory": 0.5, "no-prefix-caching": True, "overlap": True,
              "decode": "operators", "speculate": "lookup", "draft-tokens": 24, "queue": 25, "adapter": ["a=x", "b=y"]}  # fmt: skip
    server = {"host": "0.0.0.0", "port": 31, "name": "n", "api-key": "k", "cors": ["http://a", "http://b"],
              "allow-host": ["c", "d"], "drain": 32.0, "events-per-second": 33.0, "split-reasoning": True}  # fmt: skip
    others = {"model": tmp_path, "generation-config": "model", "no-warm-up": True, "tensor": 1, "one-process": True}
    ran("serve", limits | engine | server | others, elsewhere=["chat-template"])
    expected = ServerSettings(
        host="0.0.0.0", port=31, name="n", api_key="k", cors=("http://a", "http://b"), hosts=("c", "d"), drain=32.0,
        events_per_second=33.0, split_reasoning=True, sampling={"temperature": 0.6},
        limits=Limits(body_bytes=11, prompt_tokens=12, output_tokens=13, choices=14, stops=15, stored=16, stored_bytes=17,
                      request_seconds=18.0),
    )  # fmt: skip
    settings = EngineSettings(
        device="cpu", dtype="float32", weights="int8", context=21, max_sequences=22, step_tokens=23, kv_memory=1 << 28,
        kv_dtype="int8", swap_memory=1 << 29, prefix_caching=False, overlap=True, decode="operators", speculate="lookup",
        draft_tokens=24, queue=25, adapters={"a": asked[1][1].adapters["a"], "b": asked[1][1].adapters["b"]},
    )  # fmt: skip
    assert asked == [expected, (str(tmp_path), settings), expected]
    assert [str(folder) for folder in settings.adapters.values()] == ["x", "y"]


@pytest.mark.parametrize("eos", [True, False])
def test_of_load(ran, monkeypatch, tmp_path, eos):
    asked = {}
    made = lambda count, read, answered, **others: asked.update(others, count=count, read=read, answered=answered) or list(range(count))  # fmt: skip

    async def run(target, asks, *, ended, **how):
        asked.setdefault("runs", []).append((target, asks, how))
        return [Outcome(0.0, 0.1, [], 0.1, 1, 1)] * len(asks)

    monkeypatch.setattr("tilestack.lab.serving.load.make_workload", made)
    monkeypatch.setattr("tilestack.lab.serving.load.workload.parse_length", lambda text, what: (text, what))
    monkeypatch.setattr("tilestack.lab.serving.load.run_load", run)
    (tmp_path / "text").write_text("some words")
    options = {"model": "m", "api-key": "k", "requests": 3, "rate": 4.0, "concurrency": 5, "warmup": 2, "timeout": 6.0,
               "input": "7", "output": "8", "prefix": 9, "prefixes": 10, "text": tmp_path / "text", "vocabulary": 11,
               "chat": True, "temperature": 0.5, "ignore-eos" if eos else "no-ignore-eos": True, "seed": 12,
               "goodput": ["ttft:1", "e2el:2"]}  # fmt: skip
    ran("load", options, "http://here/v1/", elsewhere=["json", "plot"])
    target = Target("http://here", "m", True, {"temperature": 0.5} | ({"ignore_eos": True} if eos else {}))
    how = dict(api_key="k", timeout=6.0)
    # What warms up is asked once, lest a server remember it.
    runs = [
        (target, [3, 4], dict(concurrency=1) | how),
        (target, [0, 1, 2], dict(rate=4.0, concurrency=5, seed=12) | how),
    ]
    assert asked.pop("runs") == runs
    assert asked == dict(count=5, read=("7", "input"), answered=("8", "output"), prefixes=Prefixes(9, 10), text="some words", vocabulary=11, seed=12)  # fmt: skip


@pytest.mark.parametrize("name", ["train", "sft"])
def test_of_training_in_one_process_and_in_each_of_several(ran, monkeypatch, name):
    asked = []
    monkeypatch.setattr("tilestack.cli.train.follow_recipe", lambda kind, train, given: asked.append(given))
    options = {"set": ["a.b=1", "c.d=two"], "folder": "there", "fresh": True, "profile": 3}
    ran(name, options, "demo", elsewhere=["processes"])
    expected = TrainingArguments(find_recipe(Path("demo")), ["a.b=1", "c.d=two"], Path("there"), True, 3, 1)
    with pytest.raises(SystemExit):
        cli.main([name, *asked[0].as_words()])
    assert asked == [expected, expected]


def test_of_training_as_it_begins(ran, monkeypatch):
    asked = []
    kind = SimpleNamespace(load=lambda path, settings: SimpleNamespace(run=SimpleNamespace(name="n"), said=settings))
    train = lambda recipe, *where, fresh, profile, **_: asked.append((recipe.said, *where, fresh, profile)) or {}
    monkeypatch.setattr("tilestack.cli.train.kind_and_trainer", lambda name: (kind, train))
    options = {"set": ["a.b=1"], "folder": "there", "fresh": True, "profile": 3}
    ran("train", options, "demo", elsewhere=["processes"])
    ran("train", {}, "demo", elsewhere=["processes", *options])
    assert asked == [(["a.b=1"], Path("there"), True, 3), ([], Path("runs/n"), False, 0)]


class Silent:
    """A model that says nothing, and notes what it was asked."""

    chats, defaults, defaults_line, device = True, {"top_k": 99}, None, SimpleNamespace(type="cpu")
    engine = SimpleNamespace(context=100)
    tokenizer = SimpleNamespace(encode=lambda text: text.split())
    sampling = Speaker.sampling

    def __init__(self, *made):
        self.asked.append(made)

    def chat_ids(self, messages):
        return [(message["role"], message["content"]) for message in messages]

    def room(self, ids):
        return 50

    def speak(self, *what, **sampling):
        self.asked.append((what, sampling))
        return type("Speech", (list,), dict(made=[], finish="stop", seconds=0.0, figures=lambda self: ""))()


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setattr(Silent, "asked", [], raising=False)
    monkeypatch.setattr("tilestack.cli.generate.Speaker", Silent)
    monkeypatch.setattr("tilestack.cli.chat.Speaker", Silent)
    return Silent.asked


SPOKEN = {"model": "m", "max-tokens": 7, "temperature": 0.5, "top-k": 3, "top-p": 0.4, "min-p": 0.1, "seed": 9,
          "device": "cpu", "dtype": "float32", "weights": "int8"}  # fmt: skip
SAMPLING = dict(temperature=0.5, top_k=3, top_p=0.4, min_p=0.1, seed=9)


@pytest.mark.parametrize("raw", [True, False])
def test_of_generate(ran, asked, raw):
    options = SPOKEN | {"stop": ["a", "b"]} | ({"raw": True} if raw else {})
    ran("generate", options, "hello there", elsewhere=["json", "raw"])
    ids = ["hello", "there"] if raw else [("user", "hello there")]
    assert asked == [("m", "cpu", "float32", "int8"), ((ids, 7, ["a", "b"]), SAMPLING)]


def test_of_chat(ran, asked, monkeypatch, tmp_path):
    said = iter(["hello", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(said))
    ran("chat", SPOKEN | {"system": "be brief", "chat-template": tmp_path})
    assert asked == [
        ("m", "cpu", "float32", "int8", tmp_path),
        (([("system", "be brief"), ("user", "hello")], 7), SAMPLING),
    ]
