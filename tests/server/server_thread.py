"""A server in a thread, over real HTTP on a free port; and a tokenizer for engines that need one."""

import socket
import threading
from contextlib import contextmanager

import uvicorn

from tilestack.data import Tokenizer
from tilestack.data.chat import CHATML
from tilestack.engine.host import EngineHost
from tilestack.engine.messages import read_message
from tilestack.engine.remote import RemoteEngine
from tilestack.server.app import create_app
from tilestack.server.listening import address_of, listen
from tilestack.server.settings import ServerSettings

TEXT = "the cat sat on the mat, 0123456789 and the dog sat too. Hello world! <tool_call> " * 20


def small_tokenizer():
    made = Tokenizer.train([TEXT], 400)
    made.template = CHATML
    return made


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
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def hosted(engine):
    """An engine behind a socket, as between two processes: its host, and the connection of who asks."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        host = EngineHost(engine, "tiny", ours)
        thread = threading.Thread(target=host.serve, daemon=True)
        thread.start()
        try:
            yield host, theirs
        finally:
            host.ask_to_end()
            theirs.close()
            thread.join(60)
            assert not thread.is_alive()


def remote(connection):
    """The other end of it."""
    what, about, _ = read_message(connection)
    assert what == "hello"
    return RemoteEngine(connection, about)


@contextmanager
def served_apart(engine, settings=None):
    """The same server, of an engine that it reaches over a socket alone."""
    with hosted(engine) as (_, connection), served(remote(connection), settings) as address:
        yield address
