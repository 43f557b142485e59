"""What the tests of data share: a small tokenizer, trained once."""

import pytest

from tilestack.data import Tokenizer, corpora

MESSAGES = [
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "It is 4. 🙂"},
    {"role": "user", "content": "And 3 + 3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture(scope="session")
def sources():
    return [document.text for document in corpora.python_sources(120_000)]


@pytest.fixture(scope="session")
def tokenizer(sources):
    return Tokenizer.train(sources, 600)


@pytest.fixture
def messages():
    return [dict(message) for message in MESSAGES]
