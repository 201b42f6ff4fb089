"""The ranks of a run on its hosts: who sits where, and how they meet anew when some are lost or come. No torch."""

import contextlib
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.launch.hosts import RankHost
from unisono.launch.recovery import Recovery
from unisono.launch.seats import Seat, ends
from unisono.launch.spread import Choice, Place, RunSpread, among_host, places
from unisono.launch.switchboard import Switchboard
from unisono.spec.rendezvous import RankMeeting


@dataclass
class Crew:
    """terms, argument: what each helper is told of the run. threads: of a rank; its share of the cores of its host if
    None. leads: the address by which other hosts reach this one, "" where it is alone. choice: how to go on with
    room for so many ranks. hosts: by number, this one's own is 0. seats: of the ranks that train, in their order.
    leaving: of those that only hand over what they hold. settled: of the argument, what ranks agreed on at their start.
    advised: by room, what turned out to be better."""

    board: Switchboard
    spread: RunSpread
    terms: dict[str, Any]
    argument: dict[str, Any]
    hosts: dict[int, RankHost]
    threads: int | None = None
    leads: str = ""
    choice: Choice | None = None
    advised: dict[int, RunSpread] = field(default_factory=dict)
    seats: list[Seat] = field(default_factory=list)
    leaving: list[Seat] = field(default_factory=list)
    settled: dict[str, Any] = field(default_factory=dict)
    stopped: bool = False
    _count: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)

    @property
    def room(self) -> dict[int, int]:
        """How many ranks each host takes, by its number."""
        return {number: host.room for number, host in self.hosts.items()}

    def number_of(self, name: str) -> int:
        """Of a host of this name, as before if it has been here; from 1 on."""
        return self._numbers.setdefault(name, len(self._numbers) + 1)

    def everyone(self) -> list[Seat]:
        """Of all that may live."""
        return [*self.seats, *self.leaving]

    def by_rank(self) -> dict[int, Seat]:
        """Those that train."""
        return {seat.rank: seat for seat in self.seats}

    def seat(self, number: int) -> Seat | None:
        """Of a number; None where it has been given up."""
        return next((seat for seat in self.everyone() if seat.number == number), None)

    def prepare(self, host: RankHost) -> None:
        """Let a host read the run's data, before ranks are asked of it. Raises ConnectionError."""
        threads = self.threads or max(1, host.cores // max(1, host.room))
        terms = {**self.terms, "threads": threads, "room": host.room, "leads": self.leads}
        host.order({"op": "run", "argument": self.argument, **terms})

    def begin(self, epoch: int) -> None:
        """The first ranks take their seats. epoch: how often ranks of this run have met. Raises ConnectionError."""
        chosen = places(self.room, self.spread.ranks)
        for rank in range(self.spread.ranks):
            self.seats.append(self._seated(chosen, rank, epoch, joins=False, present=len(chosen)))

    def alive(self) -> list[Seat]:
        """Of those that live and have more to do."""
        return [seat for seat in self.everyone() if seat.status is None and not seat.reported()]

    def next_spread(self) -> RunSpread | None:
        """How to go on with the hosts that are there; None where that is not known."""
        room = sum(self.room.values())
        if room in self.advised:
            return self.advised[room]
        if self.choice is None:
            return self.spread if room >= self.spread.ranks else None
        return self.choice(room, self.settled.get("plan", ""))

    def is_advised(self, spread: RunSpread) -> bool:
        """Whether it is one that turned out to be better, so that nobody has to think about it again."""
        return replace(spread, why="") in self.advised.values()

    def about(self) -> dict[str, Any]:
        """What is there, for who looks for a better spread: room, hosts, the most ranks of one, the slowest link."""
        used = [seat.host for seat in self.seats]
        hosts = {id(host): host for host in used}.values()
        rates = [host.rate for host in hosts if host.rate]
        return {
            "room": sum(self.room.values()), "hosts": len(hosts), "per_host": max(map(used.count, hosts), default=1),
            "rate": min(rates, default=0.0), "delay": max((host.delay for host in hosts), default=0.0),
        }  # fmt: skip

    def meet_anew(
        self, recovery: Recovery, spread: RunSpread, joins: bool, planned: bool, lost: Sequence[int] = ()
    ) -> list[int]:
        """New processes take the seats that are empty, and all ranks meet. joins: those that live keep their processes;
        else all are started anew. lost: the ranks that are. Returns the ranks that are new."""
        epoch = recovery.change(spread.ranks, not joins, planned, lost)
        self.board.store.meet()
        if not joins:
            for seat in self.seats:
                seat.kill()
        by_place = {self._place(seat): seat for seat in self.alive()} if joins else {}
        chosen = places(self.room, spread.ranks, list(by_place))
        gone = [seat for place, seat in by_place.items() if place not in chosen]
        staying = {seat.number for seat in by_place.values()}
        for seat in [seat for seat in self.everyone() if seat.number not in staying]:
            self._give_up(seat)
        self.spread, before = spread, self.seats
        self.leaving, present = gone, spread.ranks + len(gone)
        self.seats, born = [], list[int]()
        for rank, place in enumerate(chosen):
            if (seat := by_place.get(place)) is not None:
                self.seats.append(seat)
                self._call(seat, self._meeting(chosen, rank, epoch, present))
        for index, seat in enumerate(gone):
            meeting = RankMeeting(epoch, spread.ranks + index, spread.ranks, present, 0, 1, spread.as_json())
            self._call(seat, meeting)
        for rank, place in enumerate(chosen):
            if place in by_place:
                continue
            with contextlib.suppress(OSError):  # the helper has gone: that is found where it is heard
                seat = self._seated(chosen, rank, epoch, joins, present)
                self.seats.insert(rank, seat)
                born.append(rank)
        if len(self.seats) < spread.ranks:  # so that all places are taken, if by one that is gone
            present_ones = {seat.number for seat in self.seats}
            self.seats += [seat for seat in before if seat.number not in present_ones]
        return born

    def _call(self, seat: Seat, meeting: RankMeeting) -> None:
        seat.rank = meeting.rank
        seat.tell("regroup", **meeting.as_json())

    def _give_up(self, seat: Seat) -> None:
        """A seat whose process is gone, or is to go."""
        if seat.status is None:
            seat.kill()
        self.board.leave(seat)

    def _place(self, seat: Seat) -> Place:
        number = next((number for number, host in self.hosts.items() if host is seat.host), -1)
        return number, seat.index

    def _meeting(self, chosen: Sequence[Place], rank: int, epoch: int, present: int) -> RankMeeting:
        local = among_host(chosen, rank)
        spread = self.spread.as_json() if epoch else {}
        return RankMeeting(epoch, rank, len(chosen), present, *local, spread)

    def _seated(self, chosen: Sequence[Place], rank: int, epoch: int, joins: bool, present: int) -> Seat:
        """A seat for a rank that is new, whose ends go to the helper of its host with the order to fork it."""
        host, index = self.hosts[chosen[rank][0]], chosen[rank][1]
        self._count += 1
        ours, theirs = ends()
        seat = Seat(self._count, rank, host, index, *ours, heard=time.monotonic())
        changed: Mapping[str, Any] = {**self.settled, **self.spread.as_json()} if epoch else {}
        order = {"op": "seat", "seat": seat.number, "index": index, "joins": joins, "settled": changed}
        try:
            host.order({**self._meeting(chosen, rank, epoch, present).as_json(), **order}, theirs)
        except OSError:
            seat.close()
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        self.board.join(seat)
        if self.stopped:
            seat.tell("stop")
        return seat

    def host_gone(self, number: int) -> list[Seat]:
        """A host and all ranks there are lost; returns those that were not known to be gone."""
        host = self.hosts.pop(number)
        lost = [seat for seat in self.everyone() if seat.host is host and seat.status is None]
        for seat in lost:
            seat.status = -signal.SIGKILL
        return lost
