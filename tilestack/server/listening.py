"""Where a server listens."""

import errno
import socket

from tilestack.server.settings import ServerSettings

BACKLOG = 2048  # connections that wait to be taken


def listen(settings: ServerSettings) -> socket.socket:
    """A socket at the server's address; taken before the model is loaded, since that may last. It listens at once: Linux
    gives an address twice as long as nobody does, and who comes early waits instead of being refused."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
        made.listen(BACKLOG)
    except (OSError, OverflowError) as problem:
        taken = "; give another --port, or 0 for a free one" if getattr(problem, "errno", 0) == errno.EADDRINUSE else ""
        raise ValueError(f"cannot listen on {settings.host} port {settings.port}: {problem}{taken}") from problem
    return made


def address_of(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def address_to_open(address: str) -> str:
    """Where a browser of this machine finds a server that listens on all interfaces, which is an address to nobody."""
    return address.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")
