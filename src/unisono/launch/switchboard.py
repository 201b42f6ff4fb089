"""The lines of a run: what ranks say, ask of the store and print comes in through one selector. No torch."""

import contextlib
import selectors
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from unisono.launch import wire
from unisono.launch.seats import Seat
from unisono.launch.store import StoreServer

AGAIN = 0.05
"""Seconds after which a rank that did not read what it was told is told again."""

STOPPED = 5.0
"""Seconds later than asked for, after which a turn comes out of a stop of the whole run (Ctrl-Z): ranks could say
nothing as long."""


class _File(Protocol):
    def fileno(self) -> int: ...


@dataclass
class Switchboard:
    """hear(seat, event): takes in what a rank says. show(seat, line): what it prints."""

    hear: Callable[[Seat, dict[str, Any]], None]
    show: Callable[[Seat, str], None]
    store: StoreServer = field(default_factory=StoreServer)
    _seats: dict[int, Seat] = field(default_factory=dict)
    _selector: selectors.BaseSelector = field(default_factory=selectors.DefaultSelector)

    def turn(self, patience: float | None) -> None:
        """Wait for what comes, so many seconds at most (None: for ever), and take it in."""
        if [
            seat for seat in self._seats.values() if seat.untold and seat.tell_on()
        ]:  # one that does not read now
            patience = AGAIN if patience is None else min(AGAIN, patience)
        begun = time.monotonic()
        ready = self._selector.select(patience)
        if patience is not None and time.monotonic() - begun > patience + STOPPED:
            for seat in self._seats.values():
                seat.heard = time.monotonic()
        for key, _ in ready:
            if self._is_watched(key):  # no earlier one of these has ended this line
                key.data()

    def _is_watched(self, key: selectors.SelectorKey) -> bool:
        with contextlib.suppress(KeyError, ValueError):
            return self._selector.get_key(key.fileobj).data is key.data
        return False

    def watch(self, file: "_File | int", do: Callable[[], object]) -> None:
        """Call `do` whenever the file can be read."""
        self._selector.register(file, selectors.EVENT_READ, do)

    def forget(self, file: "_File | int") -> None:
        """No longer; harmless when repeated."""
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(file)

    def join(self, seat: Seat) -> None:
        """A rank's lines are heard from now on."""
        self._seats[seat.number] = seat
        self.watch(seat.events, lambda: self.listen(seat))
        self.watch(seat.store, lambda: self._serve(seat))
        self.watch(seat.output, lambda: self._relay(seat))

    def leave(self, seat: Seat) -> None:
        """A rank's lines end here."""
        for file in (seat.events, seat.store, seat.output):
            self.forget(file)
        self.store.leave(seat.number)
        if self._seats.pop(seat.number, None) is not None:
            seat.close()

    def listen(self, seat: Seat) -> bool:
        """Take in some of what a rank says; False when nothing lies there."""
        events = seat.hear()
        for event in events or ():
            self.hear(seat, event)
        return events is not None

    def last_words(self, seat: Seat) -> None:
        """A rank is gone: what it has said may still lie in its lines."""
        while self.listen(seat):
            pass
        self._relay(seat, last=True)
        for sock in (seat.events, seat.store):
            self.forget(sock)

    def mind_the_time(self) -> None:
        """Answer the store's requests whose time is over."""
        self._reply(self.store.expire())

    def close(self) -> None:
        for seat in list(self._seats.values()):
            self.leave(seat)
        self._selector.close()

    def _serve(self, seat: Seat) -> None:
        for request in seat.asked():
            self._reply(self.store.handle(seat.number, request))
        self._push(seat)

    def _reply(self, answers: list[tuple[int, list[bytes]]]) -> None:
        for number, fields in answers:
            if (seat := self._seats.get(number)) is not None:
                seat.owed += wire.frame(wire.join(fields))
                self._push(seat)

    def _push(self, seat: Seat) -> None:
        """Send what the store owes a rank, as much as it takes; the rest when it reads on, so that nobody waits."""
        waits = selectors.EVENT_WRITE if seat.pay() else 0
        with contextlib.suppress(KeyError, ValueError):  # it is gone
            key = self._selector.get_key(seat.store)
            if key.events != selectors.EVENT_READ | waits:
                self._selector.modify(seat.store, selectors.EVENT_READ | waits, key.data)

    def _relay(self, seat: Seat, last: bool = False) -> None:
        lines, more = seat.printed(last)
        for line in lines:
            self.show(seat, line)
        if last or not more:
            self.forget(seat.output)
