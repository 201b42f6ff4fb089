"""Ports for processes that have to be told one."""

import contextlib
import socket
from collections.abc import Iterator


@contextlib.contextmanager
def kept_port() -> Iterator[int]:
    """A free port that nobody is given by chance meanwhile: this socket holds its number and does not listen, beside
    which one that may share the address, as that of a store, can."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
