"""One model served by several processes: they answer as one does, drop out together, and end when they are asked to."""

import json
import zlib
from array import array
from dataclasses import fields
from types import SimpleNamespace

import pytest
import shared_serving
import tiny_models as tiny
import torch
from ranks import run_ranks

from tilestack import models
from tilestack.ahead.pool import JOBS_VARIABLE
from tilestack.engine import EngineSettings, SamplingParams
from tilestack.engine.messages import request_as_words, request_from_words
from tilestack.parallel import serving
from tilestack.parallel.serving import refuse_model, refuse_settings
from tilestack.parallel.tensor import CannotSplit


@pytest.mark.parametrize(
    ("family", "pages", "changed"),
    [
        ("smollm2", 64, {}),
        ("llama_biased", 17, dict(swap_memory=1 << 20)),
        ("gemma3", 17, {}),
        ("qwen3", 17, dict(speculate="lookup", overlap=False)),
    ],
    ids=str,
)
def test_together_they_answer_as_one(family, pages, changed, tmp_path):
    """Texts end, give way to others, share prefixes and are cancelled, at the same steps on all."""
    leading, following = run_ranks(shared_serving.serves, 2, tmp_path, family, 14, ("r3", "r9"), pages, changed)
    expected, stats = shared_serving.by_one(family, 14, ("r3", "r9"), pages, **changed)
    assert torch.equal(leading["answers"], expected)
    assert torch.equal(leading["seen"], following["seen"])
    assert torch.equal(leading["stats"], following["stats"])
    preemptions, steps, cached, accepted, used = leading["stats"].tolist()
    assert (steps, cached, accepted, used) == (stats.steps, stats.cached_tokens, stats.accepted, 0)
    assert cached > 0
    assert (preemptions > 0) == (pages < 64)


def test_who_gives_no_seed_is_answered_alike_by_all(tmp_path):
    leading, following = run_ranks(shared_serving.draws_freely, 2, tmp_path)
    assert leading["seen"] == following["seen"] != 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_step_that_fails_on_one_ends_all(rank, tmp_path):
    leading, following = run_ranks(shared_serving.loses_a_step, 2, tmp_path, rank)
    assert leading["lost"].tolist() == [1, 2]  # which is known, and it takes nothing more
    assert leading["errors"] == sum(request.params.n for request in shared_serving.requests(6))
    assert leading["left"] == 0
    said = bytes(following["problem"].tolist()).decode()
    assert "out of memory" in said if rank == 1 else "gloo" in said


def test_who_waits_hears_of_it_when_the_others_are_gone(tmp_path):
    leading, _ = run_ranks(shared_serving.finds_nobody, 2, tmp_path)
    assert leading["errors"] == sum(request.params.n for request in shared_serving.requests(6))


def test_after_an_interrupted_step_nothing_more_is_taken(tmp_path):
    run_ranks(shared_serving.is_interrupted, 2, tmp_path)


def test_a_check_sum_is_of_all_tokens_that_were_read(monkeypatch):
    """So that who has once read another token is never again of one mind with the others."""
    monkeypatch.setattr(serving.Engine, "read", lambda engine, step: [])
    engine = serving.SharedEngine.__new__(serving.SharedEngine)
    engine.seen = 0
    for tokens in ([7, 2**40], [], [3]):
        engine.read(SimpleNamespace(read=lambda tokens=tokens: tokens))
    assert engine.seen == zlib.crc32(array("q", [7, 2**40, 3]).tobytes())


@pytest.mark.parametrize("how", ["token", "end"])
def test_who_goes_another_way_says_so(how, tmp_path):
    _, following = run_ranks(shared_serving.goes_another_way, 2, tmp_path, how)
    assert "other tokens" in bytes(following["problem"].tolist()).decode()


@pytest.mark.parametrize(
    ("device", "named", "dtype"), [("cpu", None, "float32"), ("cuda", None, "bfloat16"), ("cpu", "float16", "float16")]
)
def test_a_share_is_of_the_dtype_of_its_device_unless_one_is_named(monkeypatch, tmp_path, device, named, dtype):
    def load(model, **how):
        raise InterruptedError(f"{how['dtype']} on {how['device']}")

    (tmp_path / "config.json").write_text(json.dumps(tiny.config_of("qwen3")))
    monkeypatch.setattr(serving.models, "load", load)
    mesh = SimpleNamespace(size=lambda side: 2, index=lambda side: 0)
    with pytest.raises(InterruptedError, match=f"torch.{dtype} on {device}"):
        serving.load_shared(tmp_path, EngineSettings(dtype=named), mesh, torch.device(device))


def test_all_processes_have_as_many_pages_as_the_one_with_least_memory(monkeypatch):
    """Of one whose GPU has 250 bytes left for them, and another's 100."""
    monkeypatch.setenv(JOBS_VARIABLE, "")
    monkeypatch.setattr(serving, "memory_for_pages", lambda decoder, tokens: 250)
    monkeypatch.setattr(serving, "LeadingEngine", lambda decoder, tokenizer, settings: settings)
    mesh = SimpleNamespace(first=True, largest=lambda number: max(number, -100))
    on_gpu = SimpleNamespace(embedding=SimpleNamespace(weight=SimpleNamespace(is_cuda=True)))
    assert serving.shared_engine(on_gpu, None, EngineSettings(), mesh).kv_memory == 100
    assert serving.shared_engine(on_gpu, None, EngineSettings(kv_memory=7), mesh).kv_memory == 7


def test_orders_of_any_length_arrive(tmp_path):
    _, following = run_ranks(shared_serving.says_much, 2, tmp_path)
    assert following["right"].all()


def test_a_request_arrives_as_it_was():
    request = shared_serving.every_word()
    arrived = request_from_words(json.loads(json.dumps(request_as_words(request))))
    assert arrived.params == request.params
    left_out = {field.name for field in fields(SamplingParams) if getattr(request.params, field.name) == field.default}
    assert not left_out, f"every_word says nothing of {left_out}"
    told = ("id", "prompt", "priority", "adapter", "salt", "pooling")
    assert [getattr(arrived, name) for name in told] == [getattr(request, name) for name in told]


@pytest.mark.parametrize(
    ("family", "ranks", "words"),
    [
        ("qwen3_moe", 2, "a mixture of experts"),
        ("deepseek_v2", 2, "latent attention"),
        ("qwen3", 3, "3 processes do not divide the num_attention_heads, 4, of .*; 2 would"),
    ],
)
def test_what_cannot_be_shared_is_refused(family, ranks, words, tmp_path):
    config = models.ModelConfig.from_hf(tiny.config_of(family))
    (tmp_path / "config.json").write_text(json.dumps(tiny.config_of(family)))
    with pytest.raises(CannotSplit, match=words):
        refuse_model(tmp_path, config, ranks)


@pytest.mark.parametrize(
    "given",
    [
        dict(weights="int8"),
        dict(adapters={"a": "b"}),
        dict(speculate="model"),
        dict(batch_invariant=True),
        dict(decode="persistent"),
    ],
    ids=str,
)
def test_what_a_shared_engine_has_not_is_refused(given):
    with pytest.raises(ValueError, match=f"{'model' if 'speculate' in given else next(iter(given))}.*leave that out"):
        refuse_settings(EngineSettings(**given))
