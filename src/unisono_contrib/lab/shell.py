"""What `ssh` is on real hosts: `python -m unisono_contrib.lab.shell HOST COMMAND` runs a command on another host.

The lab listens at a socket whose path SOCKET names. What is connected to it asks for one command, whose input and
output are the caller's own; it hears how it ends, and ends it by leaving.
"""

import json
import os
import selectors
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

from unisono.launch import wire

SOCKET = "UNISONO__LAB"
"""A name that no recipe's key has."""
UNKNOWN = 255
"""The exit code for a host that is none, as ssh's own."""


@dataclass
class Shells:
    """The lab's end. selector: the lab's, which calls the data of what is ready. start(host, number, message, files):
    starts a command there. hosts: their names."""

    selector: selectors.BaseSelector
    hosts: Sequence[str]
    start: Callable[[int, int, dict[str, Any], list[int]], None]
    _calls: dict[int, socket.socket] = field(default_factory=dict)
    _count: int = 1 << 20  # commands of the lab's own have small numbers

    def __enter__(self) -> Self:
        self._folder = TemporaryDirectory(prefix="unisono-lab-")
        self.path = str(Path(self._folder.name) / "shell")
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self.selector.register(self._listener, selectors.EVENT_READ, self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        for sock in [*self._calls.values(), self._listener]:
            sock.close()
        self._folder.cleanup()

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        self.selector.register(sock, selectors.EVENT_READ, partial(self._ask, sock))

    def _ask(self, sock: socket.socket) -> None:
        self.selector.unregister(sock)
        with suppress(OSError, ValueError, KeyError, TypeError):
            if (request := wire.read_message(sock)) is not None:
                message, files = request
                if message["host"] not in self.hosts:
                    wire.send_message(
                        sock, {"status": UNKNOWN, "why": f"no host of the lab: {message['host']}"}
                    )
                else:
                    self._count += 1
                    self._calls[self._count] = sock
                    self.start(self.hosts.index(message["host"]), self._count, message, files)
                for file in files:
                    os.close(file)
                if self._count in self._calls:
                    return
        sock.close()

    def ended(self, number: int, status: int) -> bool:
        """A command has ended. Returns whether it was one of a shell's."""
        sock = self._calls.pop(number, None)
        if sock is None:
            return number >= 1 << 20
        with suppress(OSError), sock:
            wire.send_message(sock, {"status": status})
        return True


def main() -> int:
    """The caller's end."""
    path = os.environ.get(SOCKET, "")
    if len(sys.argv) < 3 or not path:
        print(
            f"python -m unisono_contrib.lab.shell HOST COMMAND, where a lab has set {SOCKET}", file=sys.stderr
        )
        return UNKNOWN
    host, *command = sys.argv[1:]
    order = {
        "host": host,
        "argv": ["sh", "-c", " ".join(command)],
        "environ": dict(os.environ),
        "folder": os.getcwd(),
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.connect(path)
        wire.send_message(sock, order, [0, 1, 2])
        answer = wire.read_message(sock)
    result = answer[0] if answer is not None else {"status": UNKNOWN, "why": "the lab has gone"}
    if "why" in result:
        print(json.dumps(result["why"]), file=sys.stderr)
    status = int(result["status"])
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
