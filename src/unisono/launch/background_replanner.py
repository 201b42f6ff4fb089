"""Asking for a better spread while a run goes on: when, with which measurements, in a thread beside. No torch.

After ranks have met under another world, and whenever some replicas turn out slower than others, `ask` is given what
was measured since; its answer comes back to the supervisor's loop, which moves the run or not.
"""

import os
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.local_host import WorkerHost
from unisono.launch.run import events
from unisono.launch.run.membership import RunSpread
from unisono.launch.run.state import Phase, RunState

SETTLED = 4
"""Steps after a meeting, from which on its pace is known."""
SECONDS = 1.5
"""Seconds after a meeting that have to pass too."""
AGAIN = 15.0
"""Seconds between two looks at whether some ranks are slower."""
WINDOW = 16


@dataclass(frozen=True, slots=True)
class Situation:
    """What is known of a run. room: for how many ranks. per_host: of the host with most. hosts: how many. step_s: of a
    step since the last meeting, in seconds. left: steps to come. move_s: seconds that the last meeting took. rate:
    bit/s between hosts, 0 where nobody has measured. delay: seconds from one to another. busy: seconds that each rank
    computes in a step, by its number. changed: whether the world is another than when this was asked last."""

    spread: RunSpread
    room: int
    per_host: int
    hosts: int
    step_s: float
    left: int
    move_s: float
    rate: float
    delay: float
    busy: Mapping[int, float]
    changed: bool


@dataclass(frozen=True, slots=True)
class Advice:
    """spread: how to go on; None to stay. says: why, in a sentence; "" where there is nothing to say."""

    spread: RunSpread | None
    says: str = ""


Ask = Callable[[Situation], Advice]


@dataclass
class BackgroundReplanner:
    """ask: may take seconds; it is called in a thread. `fileno` can be read when `answer` has something."""

    ask: Ask
    _met: float = 0.0
    _called: float = 0.0
    _move_s: float = 1.0
    _changed: bool = False
    _looked: float = 0.0
    _pace: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _busy: dict[int, deque[float]] = field(default_factory=lambda: defaultdict(lambda: deque(maxlen=WINDOW)))
    _steps: int = 0
    _answer: Advice | None = None
    _queried_epoch: int = -1
    _epoch: int = 0
    _thread: threading.Thread | None = None

    def __post_init__(self) -> None:
        self._reads, self._writes = os.pipe()
        os.set_blocking(self._reads, False)

    def fileno(self) -> int:
        return self._reads

    def heard(
        self, before: RunState, state: RunState, event: events.Event, hosts: Mapping[int, WorkerHost]
    ) -> None:
        """Take in what an event has made of a run's state, and ask if it is time to. hosts: by number."""
        now = time.monotonic()
        if state.epoch != before.epoch:  # ranks are to meet anew
            self._epoch, self._called, self._met = state.epoch, now, 0.0
            another = state.spread.ranks != before.spread.ranks and not state.is_advised(state.spread)
            self._changed = self._changed or another
            self._pace.clear()
            self._busy.clear()
        if state.phase is Phase.RUNNING and before.phase is Phase.MEETING:
            self._met = now
            if self._called:
                self._move_s = self._met - self._called
        if isinstance(event, events.Stepped) and event.worker in state.group:
            self._stepped(state.workers[event.worker].rank, event.event, now)
            self._ask_if_due(state, hosts, now)

    def _stepped(self, rank: int, event: Mapping[str, Any], now: float) -> None:
        times = event.get("times", {})
        self._busy[rank].append(times.get("forward", 0.0) + times.get("backward", 0.0))
        if rank == 0:
            self._pace.append((now, event["step"]))
            self._steps = event.get("steps", self._steps)

    def _ask_if_due(self, state: RunState, hosts: Mapping[int, WorkerHost], now: float) -> None:
        if not self._met or now - self._met < SECONDS or self._thread is not None or not self._pace:
            return
        (began, first), (ended, last) = self._pace[0], self._pace[-1]
        if last - first < SETTLED or not (self._changed or now - self._looked >= AGAIN):
            return
        places = [worker.host for worker in state.members()]
        used = [hosts[number] for number in set(places) if number in hosts]
        situation = Situation(
            state.spread, room=sum(state.room.values()), per_host=max(map(places.count, places)), hosts=len(used),
            step_s=(ended - began) / (last - first), left=max(0, self._steps - last), move_s=self._move_s,
            rate=min((host.rate for host in used if host.rate), default=0.0),
            delay=max((host.delay for host in used), default=0.0),
            busy={rank: statistics.median(seen) for rank, seen in self._busy.items() if seen},
            changed=self._changed,
        )  # fmt: skip
        self._changed, self._looked, self._queried_epoch = False, now, self._epoch
        self._thread = threading.Thread(
            target=self._think, args=(situation,), name="unisono-advice", daemon=True
        )
        self._thread.start()

    def _think(self, situation: Situation) -> None:
        try:
            self._answer = self.ask(situation)
        except Exception as error:  # a price is no reason to stop a run
            self._answer = Advice(None, f"no advice on another plan: {error!r}")
        os.write(self._writes, b".")

    def answer(self) -> Advice | None:
        """What was advised; None where the ranks have met again since, under what nobody has asked about."""
        os.read(self._reads, 16)
        advice, self._answer, self._thread = self._answer, None, None
        return advice if self._queried_epoch == self._epoch else None

    def close(self) -> None:
        """Whatever is thought of meanwhile, nobody hears it."""
        if self._thread is None:
            os.close(self._reads)
            os.close(self._writes)
