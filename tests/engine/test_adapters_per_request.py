"""Adapters side by side: each request gets what the model with its adapter alone would say."""

import pytest
import tiny_models as tiny
import torch
from engines import check_empty, greedy, make_engine, serve

from tilestack import models
from tilestack.engine import LLM, Engine, EngineSettings
from tilestack.models.adapters import AdapterError, load_adapters, save_adapters
from tilestack.nn.lora import add_lora, lora_parameters


def saved(folder, targets, rank, seed):
    model = tiny.ours("smollm2").double()
    add_lora(model, targets, rank, alpha=3.0 * rank / seed)  # each has a scale of its own
    torch.manual_seed(seed)
    for _, parameter in lora_parameters(model):
        torch.nn.init.normal_(parameter, std=0.3)
    save_adapters(model, folder)
    return folder


def model_with(folder):
    model = tiny.ours("smollm2").double()
    if folder:
        load_adapters(model, folder)
    return model


def alone_with(folder, prompt, count):
    steps = models.generate(model_with(folder), torch.tensor([prompt]), max_new_tokens=count)
    return [int(step[0]) for step in steps]


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("drafts", [None, "lookup", "the model without adapters"])
def test_requests_with_different_adapters_in_one_batch(drafts, graphs, tmp_path):
    """Whatever is guessed for them: a draft of the model without adapters is checked by the model with those of its request."""
    folders = {
        "a": saved(tmp_path / "a", ["*.qkv", "*.down"], 2, 1),
        "b": saved(tmp_path / "b", ["*.qkv", "*.output"], 3, 2),
    }
    engine = Engine(
        tiny.ours("smollm2").double(),
        None,
        EngineSettings(page=4, step_tokens=32, adapters=folders, kv_memory=1 << 20, speculate=drafts, graphs=graphs),
        draft=tiny.ours("smollm2").double() if drafts == "the model without adapters" else None,
    )
    assert engine.adapter_names == ("a", "b")
    prompt = [3, 5, 7, 11, 13, 3, 5, 7, 11]
    requests = []
    for number, name in enumerate(["a", None, "b", "a", None]):
        request = greedy(f"{number}", prompt[: 9 - number % 2], 10)
        request.adapter = name
        requests.append(request)
    found = serve(engine, requests)
    answers = [alone_with(folders.get(request.adapter), request.prompt, 10) for request in requests]
    assert [found[request.id] for request in requests] == [[answer] for answer in answers]
    assert len({tuple(answer) for answer in answers[:3]}) == 3
    check_empty(engine)
    for name in (None, "b"):
        last = model_with(folders.get(name)).hidden(torch.tensor(prompt)).float()[-1]
        vector = torch.tensor(LLM(engine).embed(prompt, "last", adapter=name))
        torch.testing.assert_close(vector, torch.nn.functional.normalize(last, dim=0))
    stats = engine.stats()
    assert (stats.drafted > 0) == (drafts is not None)
    assert stats.accepted <= stats.drafted
    if drafts == "the model without adapters":
        assert 0 < stats.accepted < stats.drafted  # right of the requests without adapters, and wrong of others


def test_steps_of_adapters_are_captured_apart_from_those_without(tmp_path, monkeypatch):
    """Who has none does not pay for those who have, and rows are given on to others."""
    settings = dict(page=4, step_tokens=16, kv_memory=1 << 20, max_sequences=2, graphs=True)
    adapters = {"a": saved(tmp_path / "a", ["*.qkv"], 2, 1)}
    engine = Engine(tiny.ours("smollm2").double(), None, EngineSettings(**settings, adapters=adapters))
    monkeypatch.setattr(engine.runner, "forward", None)  # all steps are captured ones
    asked = []
    for number, name in enumerate(["a", None, None, "a", None]):
        asked.append(greedy(f"{number}", [3, 5, 7 + number], 4))
        asked[-1].adapter = name
    launched = []
    for kind in engine.runner.captured:

        def noting(inputs, size, kind=kind, compute=kind.compute):
            assert size in kind.sizes()
            launched.append(size.adapted)
            return compute(inputs, size)

        monkeypatch.setattr(kind, "compute", noting)
    found = serve(engine, asked)
    for request in asked:
        assert found[request.id] == [alone_with(request.adapter and tmp_path / "a", request.prompt, 4)]
    assert set(launched) == {False, True}


def test_adapters_that_cannot_be_served_are_named(tmp_path):
    model = tiny.ours("qwen2", tie_word_embeddings=False)
    add_lora(model, ["head"], 2, 4.0)
    save_adapters(model, tmp_path / "head")
    with pytest.raises(AdapterError, match="adapters of head"):
        Engine(tiny.ours("qwen2", tie_word_embeddings=False), None, EngineSettings(adapters={"x": tmp_path / "head"}))
    with pytest.raises(AdapterError, match="holds no adapters"):
        make_engine(adapters={"x": tmp_path})


def test_a_matrix_that_attention_over_latents_takes_whole_has_no_adapter_per_token(tmp_path):
    model = tiny.ours("deepseek_v2_lite")
    add_lora(model, ["*.kv_up"], 2, 4.0)
    save_adapters(model, tmp_path / "up")
    with pytest.raises(AdapterError, match=r"adapters of layers\.0\.\S*kv_up"):
        Engine(tiny.ours("deepseek_v2_lite"), None, EngineSettings(adapters={"x": tmp_path / "up"}))
