"""The server in a process of its own, beside that of the engine, which started it.

    tilestack serve            the engine: loads the model, takes the steps, hears signals, prints where the server listens
      └─ this module as main   HTTP: all that is done for each event, in an interpreter of its own

They talk over a socket pair (engine/messages.py). When either is gone the other finds the connection closed, and ends.
Signals are for the engine's process alone, wherever they were sent, so that one Ctrl-C is one.
"""

import contextlib
import gc
import importlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

from tilestack.server.listening import listen
from tilestack.server.settings import Limits, ServerSettings

if TYPE_CHECKING:
    from tilestack.engine import Engine
    from tilestack.engine.host import EngineHost

ENDING = (signal.SIGINT, signal.SIGTERM)
SECONDS_TO_END = 10.0  # for a server whose connection is closed
START_AGAIN = "start the server again"
ONE_PROCESS = "--one-process serves without it"


class ServerLost(RuntimeError):
    """The process of the server ended, and nobody had asked for it."""


class ServerApart:
    """The server's process. It is started before a model is loaded, since both take their time; inside a `with` block, at
    whose end it is gone."""

    def __init__(self, settings: ServerSettings, log: int | None = None):
        """`log` is where its log goes: a file by its number, as `subprocess` has it; with the engine's."""
        self.settings = settings
        self.listened = self.asked = False  # whether it ever listened, and was to end
        self.connection, theirs = socket.socketpair()
        with theirs, listen(settings) as listening:
            self.process = start((theirs.fileno(), listening.fileno()), log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def host(self, engine: "Engine", name: str, greet: Callable[[str], None]) -> "EngineHost":
        from tilestack.engine.host import EngineHost

        def listening(address: str) -> None:
            self.listened = True
            greet(address)

        return EngineHost(engine, name, self.connection, asdict(self.settings), listening)

    def run(self, engine: "Engine", name: str, greet: Callable[[str], None]) -> None:
        """Serve until a signal comes, or either side is lost; `greet` is called with the address when requests are taken."""
        host = self.host(engine, name, greet)

        def ask_to_end() -> None:
            self.asked = True
            host.ask_to_end()

        with asked_by_signals(ask_to_end):
            host.serve()
            code = self.exit_code()
        if host.lost is None and (code or not (self.listened or self.asked)):
            raise ServerLost(f"{self.end_in_words()}; {START_AGAIN if self.listened else ONE_PROCESS}")

    def end_in_words(self) -> str:
        """How it ended, which it has or is about to."""
        when = "" if self.listened else " before it listened"
        return f"the process of the server {how_it_ended(self.exit_code())}{when}"

    def exit_code(self) -> int:
        try:
            return self.process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def start(inherited: tuple[int, int], log: int | None) -> "subprocess.Popen[bytes]":
    path = os.pathsep.join(place or os.getcwd() for place in sys.path)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)  # which the process inherits, from its first moment on
    try:
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "tilestack.server.apart", *map(str, inherited)],
            stdin=subprocess.DEVNULL,
            stderr=log,
            pass_fds=inherited,
            env=os.environ | dict(PYTHONPATH=path, CUDA_VISIBLE_DEVICES=""),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def asked_by_signals(ask: Callable[[], None]) -> Iterator[None]:
    """The first Ctrl-C or SIGTERM asks for an end, a second is one."""
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(128 + number)
        asked = True
        ask()

    before = {number: signal.signal(number, handle) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def how_it_ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def settings_from(words: dict[str, Any]) -> ServerSettings:
    """Settings that were JSON on their way."""
    listed = {name: tuple(words[name]) for name in ("cors", "hosts")}
    return ServerSettings(**words | listed | {"limits": Limits(**words["limits"])})


def main() -> None:
    connection, listening = (socket.socket(fileno=int(number)) for number in sys.argv[1:])
    for each in (connection, listening):
        each.set_inheritable(False)
    for module in ("tilestack.engine.remote", "tilestack.server.process"):
        importlib.import_module(module)  # while the engine loads its model
    gc.freeze()  # what came with them, which the collector would walk again and again
    sys.exit(serve(connection, listening))


def serve(connection: socket.socket, listening: socket.socket) -> int:
    """Answer on one socket by the engine at the other end of another, once it is loaded; 1 where it was lost."""
    from tilestack.engine.messages import read_message
    from tilestack.engine.remote import RemoteEngine
    from tilestack.server.process import run_server

    if (hello := read_message(connection)) is None:
        return 0  # the engine could not be loaded, and has said why
    what, about, settings = hello
    assert what == "hello", what
    engine = RemoteEngine(connection, about)
    run_server(engine, settings_from(settings), listening, lambda address: engine.tell("listening", address))
    return int(engine.lost is not None)


if __name__ == "__main__":
    main()
