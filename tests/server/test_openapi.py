"""schemathesis against the server's own schema: whatever it thinks of, no answer is a 5xx, and errors have one shape."""

import hypothesis
import pytest
import schemathesis
from fake_engine import FakeEngine
from hypothesis import HealthCheck
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from server_thread import served

PLAIN = [
    "GET /",
    "GET /health",
    "GET /metrics",
    "GET /tokenizer_info",
    "GET /v1/models",
]  # they take nothing that could be wrong
NAMED = [
    "DELETE /v1/responses/{id}",
    "GET /v1/models/{name}",
    "GET /v1/responses/{id}",
]  # by any text, so none is wrong
OTHERS = [
    "GET /v1/responses/{id}/input_items", "POST /detokenize", "POST /tokenize", "POST /v1/chat/completions",
    "POST /v1/completions", "POST /v1/embeddings", "POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses",
]  # fmt: skip
RIGHT, WRONG = GenerationMode.POSITIVE, GenerationMode.NEGATIVE


@pytest.fixture(scope="module")
def operations(tokenizer):
    with served(FakeEngine(tokenizer)) as url:
        schema = schemathesis.openapi.from_url(url + "/openapi.json")
        yield {found.ok().label: found.ok() for found in schema.get_all_operations()}


def test_all_operations_are_in_the_schema(operations):
    assert sorted(operations) == sorted(PLAIN + NAMED + OTHERS)


@pytest.mark.parametrize(
    ("label", "mode"), [(label, RIGHT) for label in PLAIN + NAMED + OTHERS] + [(label, WRONG) for label in OTHERS]
)
def test_no_answer_is_a_server_error(operations, label, mode):
    statuses = set()

    @hypothesis.settings(
        max_examples=40 if label.startswith("POST") else 5,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @hypothesis.given(case=operations[label].as_strategy(generation_mode=mode))
    def ask(case):
        response = case.call()
        case.validate_response(response, checks=[not_a_server_error])
        statuses.add(response.status_code)
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    ask()
    assert mode == WRONG or "{" in label or 200 in statuses  # nobody guesses a name
