"""Evaluation against likelihoods written out: each token once, however windows and batches fall."""

import math
import re

import pytest
import tiny_models as tiny
import torch
from bigrams import Bigrams, Letters

from tilestack.train.evaluation.evaluate import (
    EvaluationError,
    Question,
    continuation,
    evaluate_choices,
    evaluate_texts,
    question_from,
    ratio_error,
    score,
    windows,
)
from tilestack.train.evaluation.log_probs import Scored

TEXTS = ["the cat sat on the mat.", "a dog", "one, two, three, four and five more words than before!"]


def encoded(text):
    return [0, *Letters().encode(text)]


@pytest.mark.parametrize(("length", "stride"), [(4, 4), (4, 2), (4, 1), (7, 3), (100, 50)])
@pytest.mark.parametrize("size", [0, 1, 2, 5, 9, 10, 23])
def test_windows_score_every_token_but_the_first_once(size, length, stride):
    ids, seen = list(range(size)), []
    for window in windows(ids, length, stride):
        assert 1 < len(window.ids) <= length + 1
        assert window.ids == ids[window.ids[0] : window.ids[-1] + 1]
        seen += [token for token, scored in zip(window.ids, window.mask, strict=True) if scored]
        if window.ids[0] > 0:  # later windows have at least the context that they overlap by
            assert window.mask.index(1) >= length + 1 - stride
    assert seen == ids[1:]


def test_a_stride_that_would_skip_tokens_is_refused():
    with pytest.raises(EvaluationError, match="between 1 and their length 4, not 5"):
        list(windows(range(9), 4, 5))


def test_perplexity_and_bits_per_byte_are_those_of_the_formula():
    model = Bigrams()
    documents = [(encoded(text), len(text.encode())) for text in TEXTS]
    found = evaluate_texts(model, documents, "cpu", length=8)
    nats = -sum(model.log_prob(ids) for ids, _ in documents)
    tokens, size = sum(len(text) for text in TEXTS), sum(len(text.encode()) for text in TEXTS)
    assert (found.documents, found.tokens, found.bytes) == (3, tokens, size)
    assert found.nats_per_token.value == pytest.approx(nats / tokens, rel=1e-5)
    assert found.perplexity.value == pytest.approx(math.exp(nats / tokens), rel=1e-5)
    assert found.bits_per_byte.value == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert found.perplexity.error == pytest.approx(found.perplexity.value * found.nats_per_token.error)


def test_one_document_has_the_spread_of_its_windows_and_none_has_no_figures():
    model = Bigrams()
    found = evaluate_texts(model, [(encoded(TEXTS[2]), 54)], "cpu", length=8)
    assert found.documents == 1
    assert 0 < found.nats_per_token.error < found.nats_per_token.value
    with pytest.raises(EvaluationError, match="every document is empty"):
        evaluate_texts(model, [([], 0), ([0], 0)], "cpu", length=8)


def test_the_standard_error_of_a_ratio_is_that_of_many_samples():
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 20, (400, 30), generator=generator).double()
    values = sizes * (2 + torch.randn(400, 30, generator=generator, dtype=torch.float64))
    ratios = values.sum(1) / sizes.sum(1)
    errors = [ratio_error(list(zip(v, s, strict=True))) for v, s in zip(values.tolist(), sizes.tolist(), strict=True)]
    assert sum(errors) / len(errors) == pytest.approx(ratios.std().item(), rel=0.1)
    assert math.isnan(ratio_error([(1.0, 2.0)]))


def test_scores_do_not_depend_on_the_company_of_a_sequence():
    model = Bigrams()
    sequences = [Scored.answer(encoded(text)[:3], encoded(text)[3:]) for text in TEXTS]
    together, alone = score(model, sequences, "cpu"), [score(model, [one], "cpu")[0] for one in sequences]
    one_by_one = score(model, sequences, "cpu", budget=1)
    for a, b, c, sequence in zip(together, alone, one_by_one, sequences, strict=True):
        assert a.tokens == b.tokens == c.tokens == sum(sequence.mask)
        assert a.log_prob == pytest.approx(model.log_prob(sequence.ids[2:]), rel=1e-5)
        assert a.log_prob == pytest.approx(b.log_prob, rel=1e-6)
        assert a.log_prob == pytest.approx(c.log_prob, rel=1e-6)


def test_multiple_choice_takes_the_likeliest_as_it_is_and_per_byte():
    model, letters = Bigrams(), Letters()
    questions = [
        Question("which? ", ("aa", "abcabcabc", "ba"), 0),
        Question("what is", (" it", " that thing over there"), 1),
        Question("", ("yes", "no"), 0),
    ]
    sums = [[model.log_prob([0, *letters.encode(q.prompt + c)]) - (model.log_prob([0, *letters.encode(q.prompt.rstrip())])) for c in q.choices] for q in questions]  # fmt: skip
    right = [max(range(len(s)), key=s.__getitem__) == q.answer for s, q in zip(sums, questions, strict=True)]
    per_byte = [
        [s / len(c) for s, c in zip(row, q.choices, strict=True)] for row, q in zip(sums, questions, strict=True)
    ]
    right_per_byte = [
        max(range(len(s)), key=s.__getitem__) == q.answer for s, q in zip(per_byte, questions, strict=True)
    ]
    found = evaluate_choices(model, letters, questions, "cpu", length=64)
    assert found.accuracy.value == pytest.approx(sum(right) / 3)
    assert found.accuracy_per_byte.value == pytest.approx(sum(right_per_byte) / 3)
    assert found.chance == pytest.approx((1 / 3 + 1 / 2 + 1 / 2) / 3)
    p = found.accuracy.value
    assert found.accuracy.error == pytest.approx(math.sqrt(p * (1 - p) / 2))


def test_of_a_question_longer_than_the_model_reads_the_end_is_read(monkeypatch):
    model, letters, read = Bigrams(), Letters(), []
    hidden = model.hidden
    monkeypatch.setattr(model, "hidden", lambda ids, *rest: (read.append(ids), hidden(ids, *rest))[1])
    long, short = (Question("what is this" * times, ("aa", "abc"), 0) for times in (9, 1))
    few = [evaluate_choices(model, letters, [question], "cpu", length=8) for question in (long, short)]
    assert few[0].accuracy.value == few[1].accuracy.value
    assert all(ids.shape[1] <= 16 for ids in read)  # filled up from 9
    assert torch.equal(read[0], read[1])
    with pytest.raises(EvaluationError, match="a text of 3 tokens is to be predicted at once, and the model reads 2"):
        evaluate_choices(model, letters, [short], "cpu", length=2)


def test_spaces_between_context_and_text_belong_to_the_text():
    letters = Letters()
    sequence = continuation(letters, "what is  ", "it")
    scored = [token for token, mask in zip(sequence.ids, sequence.mask, strict=True) if mask]
    assert letters.decode(scored) == "  it"
    assert letters.decode(sequence.ids) == "what is  it"


def test_a_text_without_a_context_follows_the_token_of_a_beginning():
    letters = Letters()
    assert continuation(letters, "", "it") == Scored([letters.eos, *letters.encode("it")], [0, 1, 1])


def test_a_text_that_shares_its_first_token_with_the_context_follows_the_token_of_a_beginning():
    """Nothing would be scored else, and no choice be as likely as that."""

    class Pairs(Letters):
        def encode(self, text, *, bare=False):
            return [60 if part == "ab" else self.known.index(part) for part in re.findall("ab|.", text)]

    model, pairs = Bigrams(), Pairs()
    assert continuation(pairs, "a", "b") == Scored([pairs.eos, 60], [0, 1])
    joined, apart = score(model, [continuation(pairs, "a", text) for text in "bc"], "cpu")
    assert (joined.tokens, apart.tokens) == (1, 1)
    assert joined.log_prob == pytest.approx(model.log_prob([pairs.eos, 60]), rel=1e-5)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (dict(choices=["a", "b"], answer=0), 'f.jsonl:3: a question needs "prompt"'),
        (dict(prompt="?", choices=["a"], answer=0), 'needs "choices", a list of two or more texts'),
        (dict(prompt="?", choices=["a", "b"], answer=2), "the number of the right choice, 0 to 1"),
        (dict(prompt="?", choices=["a", "b"], answer="a"), "the number of the right choice, 0 to 1"),
    ],
)
def test_a_question_that_is_none_is_named(row, message):
    with pytest.raises(EvaluationError, match=message):
        question_from(row, "f.jsonl:3")


@pytest.mark.parametrize("length", [32, 40])
def test_texts_of_models_that_rotate_by_length_are_as_long_as_they_are(length):
    """Up to 32 tokens this model rotates by some frequencies, and by others above: neither what fills a row nor a longer text
    beside it must count."""
    model = tiny.ours("phi4_mini").double()
    draw = torch.Generator().manual_seed(0)
    texts = [torch.randint(3, 90, (size,), generator=draw).tolist() for size in (length + 1, 45, 12)]
    found = score(model, [Scored(ids, [0] + [1] * (len(ids) - 1)) for ids in texts], "cpu")
    for ids, scored in zip(texts, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([ids[:-1]])).log_softmax(-1)[0]
        assert scored.log_prob == pytest.approx(float(logits[range(len(ids) - 1), ids[1:]].sum()), rel=1e-9)
