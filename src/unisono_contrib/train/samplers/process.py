"""A sampler: a process beside the trainers that holds a version of the weights and draws samples when it is asked.

It keeps no position of the run. Messages come over one connection, from the first trainer, and are done in the order in
which they came: what is asked for after weights were sent is drawn from those weights.
"""

import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from unisono.config import Recipe
from unisono.spec.finder import sister
from unisono.train.data.dataset import Corpus
from unisono_contrib.sync._servers import wire
from unisono_contrib.train.samplers.door import announce
from unisono_contrib.train.samplers.weights import Compute, WeightHolder, holder_of

Draws = Callable[[Compute, Mapping[str, Any], Sequence[Tensor]], Sequence[Tensor]]
"""Samples of one request: (the model, what is said of them, tensors) → tensors."""


class SamplerPlace(Protocol):
    """A sampler's place in a run, as `launch.context.RankContext` is one. rank: from `world` on."""

    @property
    def rank(self) -> int: ...

    @property
    def world(self) -> int: ...

    @property
    def store(self) -> Any: ...

    @property
    def channel(self) -> Any: ...

    @property
    def run_token(self) -> str: ...


BEAT = 1.0
"""Seconds between two signs of life."""
_LOOK = 0.2  # seconds between two looks for the end


def main(
    ctx: SamplerPlace, recipe: Recipe, corpus: Corpus, dtype: torch.dtype, run_dir: Path
) -> dict[str, Any]:
    """Be a sampler of a run until that is over. The live part of a section of the recipe says how samples are drawn:
    `draws(section, recipe, corpus, log)`, with a file in the run's folder that is this sampler's. dtype: in which ranks
    compute. Raises LookupError where none does."""
    log = run_dir / "samplers" / f"sampler{ctx.rank - ctx.world}.jsonl"
    live = ((section, sister(f"unisono.train.build.{section.name}")) for section in recipe.sections())
    live_draws = (
        (section, module.draws) for section, module in live if module is not None and hasattr(module, "draws")
    )
    how = next((draws(section, recipe, corpus, log) for section, draws in live_draws), None)
    if how is None:
        raise LookupError("no section of the recipe says how samples are drawn")
    return serve(ctx, holder_of(recipe, corpus, dtype), how)


def serve(ctx: SamplerPlace, holder: WeightHolder, draws: Draws) -> dict[str, Any]:
    """Serve whoever proves to be of the run, the newest one alone, until the supervisor says that the run is over. A
    rank that meets the others anew calls anew, and may not know of the connection that it had."""
    callers = SimpleQueue[Connection]()
    served = _Served(holder, draws, ctx.channel.stop_requested)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        key = ctx.run_token.encode()
        threading.Thread(
            target=_accept, args=(listener, key, callers), name="unisono-door", daemon=True
        ).start()
        announce(ctx.store.across(), ctx.rank - ctx.world, listener.getsockname()[1])
        while not ctx.channel.stop_requested():
            with suppress(Empty), callers.get(timeout=_LOOK) as connection:
                served.all_of(connection, callers)
    return {"sampler": ctx.rank - ctx.world, "requests": served.requests, "version": holder.version}


def _accept(listener: socket.socket, key: bytes, callers: "SimpleQueue[Connection]") -> None:
    """Until the listener is closed."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        with suppress(OSError, EOFError, AuthenticationError, ValueError):
            callers.put(wire.answer(sock, key)[0])


@dataclass
class _Served:
    """requests: that were answered. over(): whether the run is."""

    holder: WeightHolder
    draws: Draws
    over: Callable[[], bool]
    requests: int = 0
    _sending: threading.Lock = field(default_factory=threading.Lock)

    def all_of(self, connection: Connection, callers: "SimpleQueue[Connection]") -> None:
        """Do what comes over a connection, until it ends, the run does, or somebody newer calls."""
        queue, ended = SimpleQueue[wire.Message | None](), threading.Event()
        beside = [
            threading.Thread(target=_read, args=(connection, queue), name="unisono-hear", daemon=True),
            threading.Thread(target=self._beat, args=(connection, ended), name="unisono-beat", daemon=True),
        ]
        for thread in beside:
            thread.start()
        try:
            self._say(connection, {"welcome": True})
            while not self.over() and callers.empty():
                with suppress(Empty):
                    if (message := queue.get(timeout=_LOOK)) is None:
                        return
                    self._do(connection, *message)
        except OSError:  # the trainer has gone; another one calls
            return
        finally:
            ended.set()
            wire.hang_up(connection)
            for thread in beside:  # else one may read what comes over the next connection, in the same place
                thread.join()

    def _do(self, connection: Connection, said: Mapping[str, Any], tensors: Sequence[Tensor | None]) -> None:
        whole = [x for x in tensors if x is not None]
        if "names" in said:
            self.holder.put(said["version"], dict(zip(said["names"], whole, strict=True)))
            held = self.holder.held()
            answer = {"holds": held.version, "digests": dict(held.digests), "logits": held.logits}
            self._say(connection, answer)
            return
        drawn = self.draws(self.holder.compute, said["request"], whole)
        self.requests += 1
        self._say(connection, {"number": said["number"], "version": self.holder.version}, drawn)

    def _say(self, connection: Connection, said: dict[str, Any], tensors: Sequence[Tensor] = ()) -> None:
        with self._sending:
            connection.send_bytes(wire.packed(said, tensors))

    def _beat(self, connection: Connection, ended: threading.Event) -> None:
        with suppress(OSError):
            while not ended.wait(BEAT):
                self._say(connection, {"beat": True})


def _read(connection: Connection, queue: "SimpleQueue[wire.Message | None]") -> None:
    """Messages lie here while samples are drawn, so that a trainer that sends does not wait for that."""
    with suppress(OSError, EOFError, ValueError):
        while True:
            queue.put(wire.unpacked(connection.recv_bytes()))
    queue.put(None)
