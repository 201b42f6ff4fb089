"""A depot that tries again where its store fails for a moment, and counts bytes."""

import time
from collections.abc import Callable
from typing import Any, BinaryIO, final

from unisono.spec.errors import UnisonoError, UsageError
from unisono_contrib.comm.depot import Depot, Moved

PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before each further try."""
_ANSWERS = (FileNotFoundError, FileExistsError, ValueError, ImportError, UnisonoError)
"""What is no failure of the store: a second try would say the same."""


@final
class SteadyDepot(Depot):
    """What `inner` does, tried up to seven times in half a minute. sent, received: bytes of what was written and read.

    Each operation may be made twice, since a store can do it and then fail to say so: a `create` that has succeeded
    unheard returns False. Raises UsageError (E02) where the store does not come back.
    """

    def __init__(self, inner: Depot, where: str, sleep: Callable[[float], None] = time.sleep) -> None:
        self._inner, self._where, self._sleep = inner, where, sleep
        self.sent = self.received = 0

    def names(self, folder: str) -> list[str]:
        return self._try(lambda: self._inner.names(folder))

    def put(self, source: BinaryIO, path: str, moved: Moved) -> None:
        begin = source.tell()

        def put() -> None:
            source.seek(begin)
            self._inner.put(source, path, moved)

        self._try(put)
        self.sent += source.tell() - begin

    def get(self, path: str, target: BinaryIO, limit: int, moved: Moved) -> None:
        begin = target.tell()

        def get() -> None:
            target.seek(begin)
            target.truncate()
            self._inner.get(path, target, limit, moved)

        self._try(get)
        self.received += target.tell() - begin

    def drop(self, path: str) -> None:
        self._inner.drop(path)

    def create(self, path: str, content: bytes) -> bool:
        created = self._try(lambda: self._inner.create(path, content))
        self.sent += len(content)
        return created

    def write(self, path: str, content: bytes) -> None:
        self._try(lambda: self._inner.write(path, content))
        self.sent += len(content)

    def read(self, path: str, limit: int) -> bytes:
        content = self._try(lambda: self._inner.read(path, limit))
        self.received += len(content)
        return content

    def _try(self, operation: Callable[[], Any]) -> Any:
        for pause in PAUSES:
            try:
                return operation()
            except _ANSWERS:
                raise
            except Exception:  # each store has its own
                self._sleep(pause)
        try:
            return operation()
        except _ANSWERS:
            raise
        except Exception as error:
            raise UsageError(
                f"the store does not answer: {error}",
                where=self._where,
                likely="no network, wrong credentials, or a full disk",
                fix="the same command again with --resume once the store is back",
                code="E02",
            ) from error
