"""Servers for tests: the whole of it over real HTTP on a free port, around an engine that the test gives."""

import threading
from contextlib import ExitStack, contextmanager

import httpx2
import pytest
import torch
import uvicorn
from fake_engine import FakeEngine

from tilestack import models
from tilestack.data import Tokenizer
from tilestack.data.chat import CHATML
from tilestack.server.app import create_app
from tilestack.server.process import address_of, listen
from tilestack.server.settings import ServerSettings

TEXT = "the cat sat on the mat, 0123456789 and the dog sat too. Hello world! <tool_call> " * 20


@pytest.fixture(scope="session")
def tokenizer():
    made = Tokenizer.train([TEXT], 400)
    made.template = CHATML
    return made


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


@contextmanager
def served(engine, settings=None):
    """A server in a thread; answers its address. It ends as a process would, its lifespan included."""
    settings = settings or ServerSettings(port=0)
    listening = listen(settings)
    app = create_app(engine, settings)
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.01)
        yield address_of(listening)
    finally:
        server.should_exit = True
        thread.join(10)
        assert not thread.is_alive()


@pytest.fixture
def serve():
    """Starts servers that end with the test: serve(engine, api_key=…, limits=…)."""
    with ExitStack() as stack:
        yield lambda engine, **settings: stack.enter_context(served(engine, ServerSettings(port=0, **settings)))


@pytest.fixture
def client(serve, fake):
    """A client of a server with the fake engine."""
    with httpx2.Client(base_url=serve(fake), timeout=10) as made:
        yield made
