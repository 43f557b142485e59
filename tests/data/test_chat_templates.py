"""Chat templates: what transformers renders, answers found where they are, and programs kept in their box."""

import pytest

from tilestack.data import DataError, answer_labels, chat
from tilestack.data.chat import answer_spans, render

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "{{ '[INST] ' + message['content'] + ' [/INST]' }}{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}"
    "{% endfor %}"
)
# Thoughts of all but the last answer are dropped, as reasoning models do.
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def answers(text, spans):
    return [text[start:end] for start, end in spans]


@pytest.mark.parametrize("template", [chat.CHATML, SMOLLM2])
def test_answers_are_found_with_their_end(template, messages):
    text, spans = answer_spans(template, messages)
    assert answers(text, spans) == ["It is 4. 🙂<|im_end|>", "6<|im_end|>"]


def test_answers_are_found_in_templates_of_other_shapes(messages):
    text, spans = answer_spans(MISTRAL, messages, bos_token="<s>", eos_token="</s>")
    assert answers(text, spans) == [" It is 4. 🙂</s>", " 6</s>"]


def test_a_repeated_answer_is_not_mistaken_for_another(tokenizer):
    turns = [{"role": role, "content": "6"} for role in ("system", "user", "assistant", "user", "assistant")]
    ids, mask = tokenizer.chat_ids(turns)
    assert tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted], special=True) == (
        "6<|im_end|>6<|im_end|>"
    )


def test_the_mask_covers_answers_and_nothing_else(tokenizer, messages):
    ids, mask = tokenizer.chat_ids(messages)
    assert tokenizer.decode(ids, special=True) == tokenizer.chat(messages)
    asked = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if not wanted], special=True)
    assert "4" not in asked
    assert asked.endswith("<|im_start|>assistant\n\n")
    labels = answer_labels(ids, mask)
    assert [label for label in labels if label != -100] == [i for i, wanted in zip(ids, mask, strict=True) if wanted]
    assert all(label in (-100, following) for label, following in zip(labels, ids[1:], strict=False))


def test_a_prompt_is_what_the_answer_follows(tokenizer, messages):
    prompt = tokenizer.chat(messages[:3], add_generation_prompt=True)
    assert tokenizer.chat(messages) == prompt + "6<|im_end|>\n"


def test_a_template_that_rewrites_history_is_refused(messages):
    with pytest.raises(DataError, match="answer in message 1 begins and ends"):
        answer_spans(FORGETFUL, messages)
    text, spans = answer_spans(FORGETFUL, messages[:2])
    assert answers(text, spans) == ["<think></think>It is 4. 🙂<|im_end|>"]


@pytest.mark.parametrize("template", [chat.CHATML, SMOLLM2])
def test_transformers_renders_the_same(template, messages):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"name": "add", "note": "a < b & 'c' – ü"}]
    template += "{% if documents is not none %}never{% endif %}{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}{% generation %}x{% endgeneration %}"
    (theirs,), _ = utilities.render_jinja_template([messages], tools=tools, chat_template=template)
    assert render(template, messages, tools=tools) == theirs


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{% if %}", "malformed: .*line 1"),
        ("{{ raise_exception('roles must alternate') }}", "refused: roles must alternate"),
        ("{{ messages.__class__.__mro__ }}", "refused"),
        ("{{ messages.append(1) }}", "refused"),
        ("{{ 'a' * 999999999 }}", "repeated too often"),
        ("{{ 10 ** 10 ** 10 }}", "too large"),
        ("{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}", "more than 16,777,216 characters"),
        ("{% for i in range(999999999) %}{% endfor %}", "failed|refused"),
        ("{{ messages[0]['content'] + 1 }}", "failed on these messages"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "failed on these messages"),
    ],
)
def test_bad_templates_end_in_one_line(template, said, messages):
    with pytest.raises(DataError, match=said):
        render(template, messages)


@pytest.mark.parametrize("conversation", [[], "Hi", ["Hi"], [{"role": "user"}], [{"content": "Hi"}]])
def test_what_is_no_conversation_is_refused(tokenizer, conversation):
    with pytest.raises(DataError, match="message"):
        tokenizer.chat(conversation)


def test_an_assistant_cannot_begin(tokenizer, messages):
    with pytest.raises(DataError, match="cannot begin with the assistant"):
        tokenizer.chat_ids(messages[1:])
