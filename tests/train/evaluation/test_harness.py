"""The adapter for lm-evaluation-harness, held against likelihoods written out, and its base class stood in for."""

import json
import sys
import types
from dataclasses import dataclass

import pytest
import tokenizers
import torch
from small import CPU, decoder, log_prob, tokenizer

from tilestack.data import Tokenizer
from tilestack.train.evaluation.harness import Harness, harness_model

PAIRS = [("What is 1 + 2?", " 3"), ("", "What"), ("What is ", "1 + 2, or 4 - 1 then?")]


@dataclass
class Request:
    args: tuple


def harness(length=64, tokenizer=tokenizer):
    return Harness(decoder(), tokenizer(), CPU, length)


def that_names_a_beginning_only():
    """A tokenizer that names a token for a beginning and puts none before a text, as those of many chat models."""
    backend = json.loads(tokenizer().backend.to_str()) | {"post_processor": None}
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(backend)), bos="<|im_start|>", eos="<|im_end|>")


def whole(*texts):
    return [tokenizer().bos, *tokenizer().encode("".join(texts), bare=True)]


def test_likelihoods_of_continuations():
    found = harness().loglikelihood([Request(pair) for pair in PAIRS])
    for (likelihood, greedy), (context, text) in zip(found, PAIRS, strict=True):
        ids = whole(context, text)
        begin = len(whole(context.rstrip()))
        mask = [0] * begin + [1] * (len(ids) - begin)
        assert likelihood == pytest.approx(float(log_prob(decoder(), ids, mask)), rel=1e-4)
        likeliest = decoder()(torch.tensor([ids]))[0].argmax(-1).tolist()
        assert greedy == (likeliest[begin - 1 : -1] == ids[begin:])


def test_a_question_begins_as_the_tokenizer_begins_a_text():
    """With a token before it that the model has not read there, likelihoods would not be those that others publish."""
    plain = that_names_a_beginning_only()
    likelihoods = harness(tokenizer=that_names_a_beginning_only).loglikelihood([Request(pair) for pair in PAIRS])
    for (found, _), (context, text) in zip(likelihoods, PAIRS, strict=True):
        before = [] if context else [plain.bos]
        ids = before + plain.encode(context + text)
        asked = len(ids) - len(before) - len(plain.encode(context.rstrip()))
        mask = [0] * (len(ids) - asked) + [1] * asked
        assert found == pytest.approx(float(log_prob(decoder(), ids, mask)), rel=1e-4)
    (answer,) = harness(tokenizer=that_names_a_beginning_only).generate_until(
        [Request(("What is", {"until": [], "max_gen_toks": 1}))]
    )
    likeliest = decoder()(torch.tensor([plain.encode("What is")]))[0, -1].argmax()
    assert answer == plain.decode([int(likeliest)])


def test_what_greedy_decoding_gives_is_greedy():
    ours = harness()
    text = ours.generate_until([Request(("What is", {"until": [], "max_gen_toks": 3}))])[0]
    ids = whole("What is")
    for _ in range(3):
        ids.append(int(decoder()(torch.tensor([ids]))[0, -1].argmax()))
    assert text == tokenizer().decode(ids[len(whole("What is")) :])
    last = text[-1]
    cut = ours.generate_until([Request(("What is", {"until": ["not there", last], "max_gen_toks": 3}))])[0]
    assert cut == text[: text.index(last)]
    assert ours.generate_until([Request(("What is", {"until": text[0], "max_gen_toks": 3}))]) == [""]


def test_the_likelihood_of_a_text_longer_than_the_context():
    text = "What is 1 + 2? Which is larger, 7 or 3?"
    ids = whole(text)
    (exact,) = harness(len(ids)).loglikelihood_rolling([Request((text,))])
    assert exact == pytest.approx(float(log_prob(decoder(), ids, [0] + [1] * (len(ids) - 1))), rel=1e-4)
    (windowed,) = harness(8).loglikelihood_rolling([Request((text,))])
    assert windowed < 0
    assert windowed != pytest.approx(exact, rel=1e-4)


def test_a_context_that_is_too_long_loses_its_beginning():
    long = "What is 1 + 2? " * 9
    (found,) = harness(10).loglikelihood([Request((long, "3"))])
    ids = whole(long, "3")
    scored = len(ids) - len(whole(long.rstrip()))
    kept = ids[-11:]
    expected = log_prob(decoder(), kept, [0] * (len(kept) - scored) + [1] * scored)
    assert found[0] == pytest.approx(float(expected), rel=1e-4)


def test_it_is_an_instance_of_lm_evals_own_class(monkeypatch):
    class LM:
        def __init__(self):
            self._rank, self._world_size = 0, 1

    modules = {name: types.ModuleType(name) for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model")}
    modules["lm_eval.api.model"].LM = LM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    made = harness_model(decoder(), tokenizer(), CPU, 64)
    assert isinstance(made, LM)
    assert made._world_size == 1
    assert len(made.loglikelihood([Request(PAIRS[0])])) == 1


def test_without_lm_eval_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ImportError, match=r"pip install -e '.\[evaluation\]'"):
        harness_model(decoder(), tokenizer(), CPU, 64)
