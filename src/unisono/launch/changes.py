"""How the ranks of a run change while it goes on: some are lost and replaced, hosts come, a better spread is found. No
torch.

`meet` makes a change. What leads to one is a loss, of which `Supervision` decides whether it can be made good, or a
move, for which all ranks first end the step that they are in, so that nothing is lost.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from unisono.launch import verdict
from unisono.launch.advice import Adviser
from unisono.launch.backend import GPUS
from unisono.launch.crew import Crew
from unisono.launch.recovery import Recovery
from unisono.launch.seats import Seat
from unisono.launch.spread import RunSpread

OnEvent = Callable[[int, dict[str, Any]], None]


@dataclass
class Changes:
    """recovery: what is known of past changes. adviser: whom to ask for a better spread. tell(event): for people and
    for the run's history."""

    crew: Crew
    recovery: Recovery
    tell: Callable[[dict[str, Any]], None]
    adviser: Adviser | None = None
    _moves: RunSpread | None = None
    _on_gpus: bool = False
    _hosts: dict[str, list[str]] = field(default_factory=lambda: {"gone": [], "joined": []})

    def possible(self) -> bool:
        """Whether one more change is worth a try, and there is room for it."""
        return self.recovery.may() and self.crew.next_spread() is not None

    def heard(self, seat: Seat, kind: str | None, event: Mapping[str, Any]) -> None:
        """Take in how far a rank is."""
        if kind == "start":
            self._on_gpus = event["backend"] == GPUS
        if kind == "step":
            self.recovery.stepped(event["step"])
            if self.adviser is not None and seat in self.crew.seats:
                self.adviser.stepped(seat.rank, event)
                self.adviser.begin(self.crew.about, self.crew.spread)
        if kind == "ready" and self.recovery.ready(seat.rank):
            if self.adviser is not None:
                self.adviser.met()
            if self.recovery.epoch:
                met = {"epoch": self.recovery.epoch, "met": event["step"], "ranks": self.recovery.ranks}
                self.tell({"kind": "members", **met, "plan": self.crew.spread.plan})

    def host(self, how: str, name: str) -> None:
        """A host is "gone", or has "joined"."""
        self._hosts[how].append(name)

    def grow(self) -> None:
        """More room than before lets more ranks train."""
        spread, room = self.crew.next_spread(), sum(self.crew.room.values())
        if spread is not None and spread.ranks > self.crew.spread.ranks:
            self.move(replace(spread, why=f"there is room for {room} ranks"))

    def advised(self) -> None:
        """Somebody has thought about a better spread."""
        advice, room = (
            self.adviser.answer() if self.adviser is not None else None,
            sum(self.crew.room.values()),
        )
        if advice is None:
            return
        if advice.says:
            self.tell({"kind": "note", "text": advice.says})
        if advice.spread is not None and advice.spread.ranks <= room:
            self.crew.advised[room] = replace(advice.spread, why="")
            self.move(advice.spread)

    def move(self, spread: RunSpread) -> None:
        """Let all ranks end the step that they are in, and go on spread otherwise."""
        if self.recovery.begun and not self.crew.stopped and self._moves is None:
            self._moves = spread
            for seat in self.crew.seats:
                seat.tell("move")

    def paused(self, seat: Seat, epoch: int) -> bool:
        """A rank has ended its step for a move. Returns whether all have."""
        if epoch == self.recovery.epoch:
            seat.paused = epoch
        return self._moves is not None and all(one.paused == self.recovery.epoch for one in self.crew.seats)

    def meet(self, lost: list[verdict.Failure], why: str = "") -> None:
        """New processes take the places of those that are lost, and all ranks meet anew. If the others cannot, since
        they have not begun or have ended, all ranks begin anew, from the newest checkpoint; so on GPUs, where a kernel
        of NCCL that waits for who is gone ends with its process alone. why: in words, if it is more than that ranks
        are gone. Where all have paused for a move, nothing is lost."""
        crew, recovery = self.crew, self.recovery
        moves = self._moves is not None and all(one.paused == recovery.epoch for one in crew.seats)
        spread, was = self._moves if moves else crew.next_spread(), crew.spread
        if spread is None:
            return
        free = moves or not self._on_gpus
        joins = recovery.begun and free and not any(seat.reported() for seat in crew.seats)
        self._moves = None
        born = crew.meet_anew(recovery, spread, joins, moves, [one.rank for one in lost])
        told = {"epoch": recovery.epoch, "born": born, "ranks": spread.ranks, "plan": spread.plan}
        event: dict[str, Any] = {"kind": "members", **told}
        if not moves:
            event["lost"] = {one.rank: why or verdict.how_died(one.status) for one in lost}
        if any(self._hosts.values()):
            event["hosts"], self._hosts = self._hosts, {"gone": [], "joined": []}
        if moves or (spread.plan, spread.speeds) != (was.plan, was.speeds):
            event["why"] = spread.why or why
        self.tell(event)
        if self.adviser is not None:
            self.adviser.called(recovery.epoch, spread.ranks != was.ranks and not crew.is_advised(spread))
