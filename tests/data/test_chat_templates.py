"""Chat templates: what transformers renders, and answers found where they are, whatever the template does with history."""

from itertools import pairwise

import pytest

from tilestack.data import ChatCache, Conversation, DataError, answer_labels, chat
from tilestack.data.chat import render, render_answers

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
# As Qwen3 writes it, without tools: thoughts of answers before the last question are dropped, the others are shown.
QWEN3 = r"""
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}{%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\n' + content + '<|im_end|>' + '\n' }}
    {%- elif message.role == "assistant" %}
        {%- set reasoning_content = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning_content)) %}
            {{- '<|im_start|>' + message.role + '\n<think>\n' + reasoning_content.strip('\n') + '\n</think>\n\n' + content.lstrip('\n') }}
        {%- else %}{{- '<|im_start|>' + message.role + '\n' + content }}{%- endif %}
        {{- '<|im_end|>\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\n<tool_response>\n' + content + '\n</tool_response><|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\n\n</think>\n\n' }}{%- endif %}
{%- endif %}
"""
GENERATION = (
    "{% for message in messages %}{% if message.role == 'assistant' %}<a>{% generation %}{{ message.content }}</a>"
    "{% endgeneration %}{% else %}<u>{{ message.content }}</u>{% endif %}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
THOUGHTFUL = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "<think>\ntwo twos\n</think>\n\n4"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "<think>\nasking\n</think>\n\nlook it up"},
    {"role": "tool", "content": "six"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "Thanks"},
]


def learned(template, messages, given=0, **variables):
    """The answers in each of the texts that a conversation gives."""
    (sequences,) = render_answers(template, [Conversation(messages, given=given)], **variables)
    return [[sequence.text[start:end] for start, end in sequence.answers] for sequence in sequences]


def masked(tokenizer, messages, **how):
    (((ids, mask),),) = tokenizer.chat_ids([Conversation(messages)], **how)
    return ids, mask, tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if wanted], special=True)


@pytest.mark.parametrize("template", [chat.CHATML, SMOLLM2])
def test_answers_are_found_with_their_end(template, messages):
    assert learned(template, messages) == [["It is 4. 🙂<|im_end|>", "6<|im_end|>"]]


def test_answers_are_found_in_templates_of_other_shapes(messages):
    assert learned(MISTRAL, messages, bos_token="<s>", eos_token="</s>") == [[" It is 4. 🙂</s>", " 6</s>"]]


def test_a_repeated_answer_is_not_mistaken_for_another(tokenizer):
    turns = [{"role": role, "content": "6"} for role in ("system", "user", "assistant", "user", "assistant")]
    assert masked(tokenizer, turns)[2] == "6<|im_end|>6<|im_end|>"


def test_the_mask_covers_answers_and_nothing_else(tokenizer, messages):
    ids, mask, _ = masked(tokenizer, messages)
    assert tokenizer.decode(ids, special=True) == tokenizer.chat(messages)
    asked = tokenizer.decode([token for token, wanted in zip(ids, mask, strict=True) if not wanted], special=True)
    assert "4" not in asked
    assert asked.endswith("<|im_start|>assistant\n\n")
    labels = answer_labels(ids, mask)
    assert [label for label in labels if label != -100] == [i for i, wanted in zip(ids, mask, strict=True) if wanted]
    assert all(label in (-100, following) for label, following in zip(labels, ids[1:], strict=False))


def test_the_last_answer_alone(tokenizer, messages):
    ids, _, answer = masked(tokenizer, [*messages, {"role": "user", "content": "Bye"}], last_only=True)
    assert answer == "6<|im_end|>"
    assert tokenizer.decode(ids, special=True) == tokenizer.chat(messages)


def test_a_prompt_is_what_the_answer_follows(tokenizer, messages):
    prompt = tokenizer.chat(messages[:3], add_generation_prompt=True)
    assert tokenizer.chat(messages) == prompt + "6<|im_end|>\n"


def test_where_history_is_rewritten_each_answer_is_learned_as_it_will_be_asked_for():
    """Qwen3 shows the thoughts of an answer while it is given, and drops them from the next question on."""
    (sequences,) = render_answers(QWEN3, [Conversation(THOUGHTFUL)])
    assert learned(QWEN3, THOUGHTFUL) == [
        ["<think>\ntwo twos\n</think>\n\n4<|im_end|>"],
        ["<think>\nasking\n</think>\n\nlook it up<|im_end|>", "<think>\n\n</think>\n\n6<|im_end|>"],
    ]
    for number, sequence in ((1, sequences[0]), (5, sequences[1])):
        assert sequence.text == render(QWEN3, THOUGHTFUL[: number + 1])
        assert sequence.text.startswith(render(QWEN3, THOUGHTFUL[:number], add_generation_prompt=True))
    assert "two twos" not in sequences[1].text


def test_the_last_answer_is_found_whatever_becomes_of_history():
    (((text, answer),),) = [
        [(each.text, each.text[slice(*each.answers[0])]) for each in sequences]
        for sequences in render_answers(QWEN3, [Conversation(THOUGHTFUL[:4])], last_only=True)
    ]
    assert answer == "<think>\nasking\n</think>\n\nlook it up<|im_end|>"
    assert text == render(QWEN3, THOUGHTFUL[:4])


def test_marks_of_a_template_say_what_is_learned(messages):
    assert learned(GENERATION, messages) == [["It is 4. 🙂</a>", "6</a>"]]
    assert "\ufdd0" not in render(GENERATION, messages)
    dashed = GENERATION.replace("{% generation %}", "{%- generation -%}")
    assert learned(dashed, messages) == [["It is 4. 🙂</a>", "6</a>"]]
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    (text,), (spans,) = utilities.render_jinja_template(
        [messages], chat_template=GENERATION, return_assistant_tokens_mask=True
    )
    (sequences,) = render_answers(GENERATION, [Conversation(messages)])
    assert sequences[0].text == text
    assert [tuple(span) for span in sequences[0].answers] == [tuple(span) for span in spans]


def test_a_word_that_is_a_token_with_the_space_before_it_is_learned_with_that_space(tokenizer):
    """Where the prompt ends with a space, as in `ASSISTANT: `; else an answer of one word would not be learned at all."""
    spaced = tokenizer.for_chat(
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    turns = [{"role": "user", "content": "which"}, {"role": "assistant", "content": "return"}]
    assert len(tokenizer.encode(" return", bare=True)) == 1
    assert masked(spaced, turns)[2] == " return<|im_end|>"


@pytest.mark.parametrize(("template", "answer"), [(chat.CHATML, "6<|im_end|>"), (GENERATION, "6</a>")])
def test_answers_in_a_prompt_are_not_learned(template, answer, messages):
    prompt = len(messages) - 1
    assert messages[prompt - 2]["role"] == "assistant"
    assert learned(template, messages, given=prompt) == [[answer]]
    assert len(learned(template, messages, given=prompt - 2)[0]) == 2
    assert learned(QWEN3, THOUGHTFUL, given=2) == [learned(QWEN3, THOUGHTFUL)[1]]


@pytest.mark.parametrize(("template", "answer"), [(chat.CHATML, "6<|im_end|>"), (GENERATION, "6</a>")])
def test_answers_of_weight_0_are_not_learned(template, answer, messages):
    weighed = [message | {"weight": 0} if message["content"].startswith("It is") else message for message in messages]
    assert learned(template, weighed) == [[answer]]


def test_where_marks_are_not_of_one_message_each_those_not_to_learn_are_refused(messages):
    whole = "{% generation %}{% for message in messages %}{{ message.content }}{% endfor %}{% endgeneration %}"
    assert len(learned(whole, messages)[0]) == 1
    with pytest.raises(DataError, match=r"marks 1 texts .* and 2 messages are the assistant's"):
        learned(whole, messages, given=3)


def test_the_same_messages_with_another_prompt_are_tokenised_anew(tokenizer, messages, tmp_path):
    cached = tokenizer.for_chat()
    cached.chat_cache = ChatCache(tmp_path)
    for given, answers in ((0, 2), (len(messages) - 1, 1)):
        (((_, mask),),) = cached.chat_ids([Conversation(messages, given=given)])
        assert sum(after > before for before, after in pairwise(mask)) == answers


def test_an_answer_that_is_asked_for_otherwise_than_written_is_refused(messages):
    template = chat.CHATML.replace(
        "'<|im_start|>assistant\\n' }}{%- endif", "'<|im_start|>assistant\\n<think>' }}{%- endif"
    )
    assert template != chat.CHATML
    with pytest.raises(DataError, match=r"where the answer in message 3 begins.*\{% generation %\}"):
        render_answers(template, [Conversation(messages)])


def test_tools_and_their_calls_are_written(messages):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 3, "b": 3}}}
    turns = [
        {"role": "system", "content": "Be brief."},
        *messages[2:3],
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    (sequences,) = render_answers(chat.CHATML, [Conversation(turns, tools)])
    assert learned(chat.CHATML, turns) == [
        ['<tool_call>\n{"name": "add", "arguments": {"a": 3, "b": 3}}\n</tool_call><|im_end|>']
    ]
    assert sequences[0].text.count("Be brief.") == 1
    assert (
        sequences[0].text.index("Be brief.")
        < sequences[0].text.index('{"type": "function"')
        < sequences[0].text.index("And 3")
    )


CALLS = [
    {"role": "user", "content": "3 + 3?"},
    {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]},
]


@pytest.mark.parametrize("template", [SMOLLM2, GENERATION])
@pytest.mark.parametrize("last_only", [True, False])
def test_calls_that_a_template_does_not_write_are_refused_and_not_learned_as_silence(template, last_only):
    with pytest.raises(DataError, match="writes no calls of tools"):
        render_answers(template, [Conversation(CALLS)], last_only=last_only)
    writes = template.replace("message['content']", "message['content'] + message.tool_calls | string").replace(
        "{{ message.content }}</a>", "{{ message.tool_calls }}</a>"
    )
    ((found,),) = render_answers(writes, [Conversation(CALLS)], last_only=last_only)
    assert "'name': 'add'" in found.text[slice(*found.answers[0])]


def test_tools_that_a_template_does_not_read_are_refused_and_not_lost(tokenizer, messages):
    tools = [{"type": "function", "function": {"name": "add"}}]
    deaf = tokenizer.for_chat(SMOLLM2)
    with pytest.raises(DataError, match="the chat template takes no tools"):
        deaf.chat_ids([Conversation(messages, tools)])
    with pytest.raises(DataError, match="the chat template takes no tools"):
        deaf.chat(messages, tools=tools)
    assert deaf.chat(messages, tools=[]) == deaf.chat(messages)
    assert "add" in tokenizer.chat(messages, tools=tools)


def test_many_conversations_are_asked_about_together_and_a_bad_one_is_numbered(messages):
    many = [Conversation([{"role": "user", "content": f"{n}" * 500}, *messages[1:2]]) for n in range(2000)]
    found = render_answers(chat.CHATML, many)
    assert [sequences[0].text.split("\n")[1][:4] for sequences in found[:12]] == [
        f"{n}" * 4 if n < 10 else f"{n}" * 2 for n in range(12)
    ]
    with pytest.raises(DataError, match=r"conversation 2: .*cannot begin with the assistant"):
        render_answers(chat.CHATML, [*many[:2], Conversation(messages[1:])])


@pytest.mark.parametrize("template", [chat.CHATML, SMOLLM2])
def test_transformers_renders_the_same(template, messages):
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    tools = [{"name": "add", "note": "a < b & 'c' – ü"}]
    template += "{% if documents is not none %}never{% endif %}{% if tools %}{{ tools | tojson }}{{ tools | tojson(indent=2) }}{% endif %}{% generation %}x{% endgeneration %}"
    (theirs,), _ = utilities.render_jinja_template([messages], tools=tools, chat_template=template)
    assert render(template, messages, tools=tools) == theirs


@pytest.mark.parametrize("conversation", [[], "Hi", ["Hi"], [{"role": "user"}], [{"content": "Hi"}]])
def test_what_is_no_conversation_is_refused(tokenizer, conversation):
    with pytest.raises(DataError, match="message"):
        tokenizer.chat(conversation)


def test_an_assistant_cannot_begin(tokenizer, messages):
    with pytest.raises(DataError, match="cannot begin with the assistant"):
        tokenizer.chat_ids([Conversation(messages[1:])])
