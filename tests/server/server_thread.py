"""A server in a thread, over real HTTP on a free port; and a tokenizer for engines that need one."""

import threading
from contextlib import contextmanager

import uvicorn

from tilestack.data import Tokenizer
from tilestack.data.chat import CHATML
from tilestack.server.app import create_app
from tilestack.server.process import address_of, listen
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
