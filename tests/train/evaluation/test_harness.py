"""The adapter for lm-evaluation-harness, held against likelihoods written out, and its base class stood in for."""

import json
import sys
import types
from dataclasses import dataclass

import pytest
import tokenizers
import torch
from small import CPU, decoder, log_prob, tokenizer
from tokenizers import processors

from tilestack.data import Tokenizer
from tilestack.train.evaluation.evaluate import EvaluationError
from tilestack.train.evaluation.harness import Harness, harness_model

PAIRS = [("What is 1 + 2?", " 3"), ("", "What"), ("What is ", "1 + 2, or 4 - 1 then?")]


@dataclass
class Request:
    args: tuple


def harness(length=64, tokenizer=tokenizer):
    return Harness(decoder(), tokenizer(), CPU, length)


def that_begins_with(*tokens):
    """A tokenizer that puts these before a text, whatever it names for a beginning, as those of many chat models."""
    backend = tokenizers.Tokenizer.from_str(
        json.dumps(json.loads(tokenizer().backend.to_str()) | {"post_processor": None})
    )
    if tokens:
        special = [(token, backend.token_to_id(token)) for token in tokens]
        backend.post_processor = processors.TemplateProcessing(single=[*tokens, "$A"], special_tokens=special)
    return lambda: Tokenizer(backend, bos="<|im_start|>", eos="<|im_end|>")


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


@pytest.mark.parametrize("tokens", [(), ("<|endoftext|>",), ("<|im_end|>", "<|endoftext|>")])
def test_a_question_begins_as_the_tokenizer_begins_a_text(tokens):
    """After other tokens, which the model has not read there, likelihoods would not be those that others publish."""
    make = that_begins_with(*tokens)
    plain, ours = make(), harness(tokenizer=make)
    for (found, _), (context, text) in zip(ours.loglikelihood([Request(pair) for pair in PAIRS]), PAIRS, strict=True):
        ids = plain.encode(context + text) if context else [plain.bos, *plain.encode(text, bare=True)]
        asked = len(ids) - (len(plain.encode(context.rstrip())) if context else 1)
        mask = [0] * (len(ids) - asked) + [1] * asked
        assert found == pytest.approx(float(log_prob(decoder(), ids, mask)), rel=1e-4)
    assert ours.asked("0", "What is", {"max_gen_toks": 9}).prompt == plain.encode("What is")
    assert ours.asked("0", "", {"max_gen_toks": 9}).prompt == [plain.bos]


def test_an_answer_that_leaves_no_room_for_its_prompt_is_refused():
    """Else the model would be asked the last token of the question."""
    asked = [Request(("What is", {"max_gen_toks": 64}))]
    with pytest.raises(EvaluationError, match="answers of up to 64 tokens, and the model reads 64 with the prompt"):
        harness(length=64).generate_until(asked)
    (prompt,) = [harness(length=66).asked("0", "What is 1 + 2?", asked[0].args[1]).prompt]
    assert prompt == whole("What is 1 + 2?")[-2:]


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
    for samples, temperature in ((False, 0.0), (True, 0.7)):  # tasks name one where they want none
        asked = ours.asked("0", "What is", {"max_gen_toks": 3, "temperature": 0.7, "do_sample": samples})
        assert asked.params.temperature == temperature


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
