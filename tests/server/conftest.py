"""Servers for tests, around engines that they give."""

from contextlib import ExitStack

import httpx2
import pytest
import torch
from fake_engine import FakeEngine
from patient import LONG
from server_thread import served, small_tokenizer

from tilestack import models
from tilestack.server.settings import ServerSettings


@pytest.fixture(scope="session")
def tokenizer():
    return small_tokenizer()


@pytest.fixture(scope="session")
def folder(tokenizer, tmp_path_factory):
    """A tiny random model that goes on until it is told to stop."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    torch.manual_seed(0)
    shape = dict(layers=1, heads=2, kv_heads=1, head_dim=16, positions=4096)
    decoder = models.Decoder(models.ModelConfig(tokenizer.vocabulary, 32, 64, **shape))
    with torch.no_grad():
        decoder.head.weight[list(tokenizer.stops)] = 0  # never the likeliest
    models.save(decoder, folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture
def fake(tokenizer):
    return FakeEngine(tokenizer)


@pytest.fixture
def serve():
    """Starts servers that end with the test: serve(engine, api_key=…, limits=…)."""
    with ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(served(engine, ServerSettings(port=0, **settings)))


@pytest.fixture
def client(serve, fake):
    """A client of a server with the fake engine."""
    with httpx2.Client(base_url=serve(fake), timeout=LONG) as made:
        yield made
