"""Waiting for what lies outside of a run, such as a store or other runs: long, and no hang."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from unisono.comm.group import Group

T = TypeVar("T")
_TURN = 1.0  # seconds
_OVER, _FAILED, _LEFT = 1.0, 2.0, 3.0


def _never() -> bool:
    return False


class OutsideWait:
    """A wait of all ranks of a run for work that the first of them does. Every turn, a second long, all meet, so that
    nobody waits for another rank for longer. turns: by which a watchdog sees that the wait goes on."""

    def __init__(self, world: Group, device: torch.device) -> None:
        self._world, self._device = world, device
        self.turns = 0

    def until(self, work: Callable[[], T], leaves: Callable[[], bool] = _never) -> T | None:
        """On the first rank what `work`, on a thread of its own, returns, or the error that it raises; None on others.
        Where it raises, the others wait to be stopped. leaves(): whether the first rank gives up, a turn later at most;
        None there too then, and the thread is left to itself. Every rank calls it, or it hangs."""
        first, over = self._world.index == 0, threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def play() -> None:
            try:
                results.append(work())
            except BaseException as error:
                errors.append(error)
            finally:
                over.set()

        if first:
            threading.Thread(target=play, name="unisono-outside", daemon=True).start()
        state = 0.0
        while not state:
            if first and over.wait(_TURN):
                state = _FAILED if errors else _OVER
            elif first and leaves():
                state = _LEFT
            self.turns += 1
            if self._world.size > 1:
                said = torch.tensor([state], device=self._device)
                state = float(self._world.broadcast(said))
        if errors:
            raise errors[0]
        if state == _FAILED:
            self._world.barrier()  # the first rank has raised, and the supervisor stops the others here
        return results[0] if first and state == _OVER else None
