"""Conversations are tokenised by all cores and once: what follows from the same is read from the disk, to the bit."""

import os

import pytest

from tilestack.data import ChatCache, Conversation, DataError, chat_process, corpora
from tilestack.data import tokenizer as tokenizers
from tilestack.data.chat import CHATML, render_answers

FORGETFUL = (  # it writes the last answer otherwise than those before it
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}"
    "{{ message.content + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def conversations():
    return [Conversation(messages) for messages in corpora.conversations(40)]


@pytest.fixture
def rendered(monkeypatch):
    """How often conversations were rendered."""
    calls = []

    def counting(*args, **kwargs):
        calls.append(args)
        return render_answers(*args, **kwargs)

    monkeypatch.setattr(tokenizers, "render_answers", counting)
    return calls


def test_many_conversations_are_shared_among_processes_and_come_back_in_order(monkeypatch, conversations):
    alone = render_answers(CHATML, conversations)
    monkeypatch.setattr(chat_process, "cores", lambda: 3)
    monkeypatch.setattr(chat_process, "PART", 1)  # each is asked about alone
    chat_process._processes.cache_clear()
    try:
        assert render_answers(CHATML, conversations) == alone
        free = chat_process._processes(os.getpid())
        assert sum(process.worker is not None for process in free.queue) > 1
        with pytest.raises(DataError, match="conversation 0: "):
            render_answers("{{ raise_exception('no') }}", conversations)
        assert free.qsize() == 3  # none is lost on the way
        assert render_answers(CHATML, conversations) == alone
        assert render_answers(CHATML, []) == []
    finally:
        while not free.empty():
            free.get().stop()
        chat_process._processes.cache_clear()


def test_what_was_tokenised_is_kept(tmp_path, tokenizer, conversations, rendered):
    chat, again = tokenizer.for_chat(), tokenizer.for_chat()
    plain = [chat.chat_ids(conversations), chat.chat_ids(conversations, last_only=True)]
    for times in (2, 0):
        rendered.clear()
        again.chat_cache = ChatCache(tmp_path)
        assert [again.chat_ids(conversations), again.chat_ids(conversations, last_only=True)] == plain
        assert len(rendered) == times
    assert len(list(tmp_path.iterdir())) == 2


def test_sequences_of_one_conversation_stay_together(tmp_path, tokenizer, conversations):
    chat = tokenizer.for_chat(FORGETFUL)
    plain = chat.chat_ids(conversations)
    assert {len(sequences) for sequences in plain} == {1, 2, 3}
    chat.chat_cache = ChatCache(tmp_path)
    assert chat.chat_ids(conversations) == plain
    assert chat.chat_ids(conversations) == plain


def test_what_follows_from_something_else_is_made_anew_and_the_rest_swept(tmp_path, tokenizer, conversations, rendered):
    def start(template=None, found=conversations):
        chat = tokenizer.for_chat(template)
        chat.chat_cache = ChatCache(tmp_path)
        rendered.clear()
        made = chat.chat_ids(found)
        chat.chat_cache.sweep()
        return made, len(rendered)

    first, times = start()
    assert times == 1
    (kept,) = tmp_path.iterdir()
    kept.write_bytes(kept.read_bytes()[:-7])  # damaged
    assert start() == (first, 1)
    assert start() == (first, 0)
    assert start(template=FORGETFUL)[1] == 1
    assert len(list(tmp_path.iterdir())) == 1
    assert start()[1] == 1
    assert start(found=conversations[1:]) == (first[1:], 1)
