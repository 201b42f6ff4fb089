"""When each action of a timetable runs on ranks that share CPU cores.

Cores: while more ranks compute than there are cores, all of them compute more slowly. A rank that waits uses no core.

Wires: a message enters its wire when it is made and its receiver has asked for it. A receiver asks when it begins the
computation before the one that needs the message. Messages on one wire follow each other.

Lanes: replicas may send over the same wire. Then one of them is always second, and stays behind the other.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unisono.programs.pipeline import COMPUTE, Action, Placed, Timetable, needs


@dataclass(frozen=True, slots=True)
class SharedCosts:
    """Seconds, all per stage.

    forward, backward: (work on a core of its own, then waiting without a core).
    weight: the same of a weight gradient, in timetables that compute it apart.
    wire: how long a message to the next stage occupies its wire; each direction has its own.
    latency: from the end of that to the message's arrival.
    """

    forward: Sequence[tuple[float, float]]
    backward: Sequence[tuple[float, float]]
    wire: Sequence[float]
    latency: Sequence[float]
    weight: Sequence[tuple[float, float]] = ()


def play_shared(
    timetable: Timetable,
    costs: SharedCosts,
    each: int = 1,
    slow: Callable[[float], float] = lambda active: 1.0,
    lanes: int = 1,
) -> list[Placed]:
    """When each computation runs.

    each: ranks of one row, which do the same at the same time.
    slow(active): how many times longer work takes while `active` ranks work.
    lanes: pipelines beside each other on the same cores and wires. The one that ends last is returned.

    Raises ValueError if the timetable deadlocks.
    """
    game = _Game(timetable, costs, each, slow, lanes)
    while game.open():
        game.step()
    last = max(game.placed, key=lambda lane: max(p.stop for p in lane))
    return sorted(last, key=lambda p: p.start)


_Key = tuple[str, int, int, int]  # kind, stage, micro-batch, lane


@dataclass
class _Game:
    timetable: Timetable
    costs: SharedCosts
    each: int
    slow: Callable[[float], float]
    lanes: int
    now: float = 0.0
    here: dict[_Key, float] = field(default_factory=dict)  # when a result is where it is needed
    free: dict[tuple[str, int], float] = field(default_factory=dict)  # when a wire is free again
    offered: set[_Key] = field(default_factory=set)  # what is made and not yet asked for
    asked: set[_Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.rows = [[a for a in row if a.kind in COMPUTE] for row in self.timetable.rows] * self.lanes
        self.placed: list[list[Placed]] = [[] for _ in range(self.lanes)]
        count = len(self.rows)
        self.at, self.begun = [0] * count, [0.0] * count
        self.left = [-1.0] * count  # of work, while a row works
        self.until = [-1.0] * count  # the end of waiting, while a row waits

    def open(self) -> bool:
        return any(i < len(row) for i, row in zip(self.at, self.rows, strict=True))

    def step(self) -> None:
        """To the next moment at which something ends or arrives."""
        soonest = self._begin()
        working = [r for r, left in enumerate(self.left) if left >= 0.0]
        stretch = self.slow(self.each * len(working)) if working else 1.0
        ends = {r: self.now + self.left[r] * stretch for r in working}
        ends |= {r: until for r, until in enumerate(self.until) if until >= 0.0}
        then = min([soonest, *ends.values()])
        if then == math.inf:
            raise ValueError("the timetable deadlocks")
        for r, end in ends.items():
            if end <= then and self.left[r] >= 0.0:
                self.left[r], self.until[r] = -1.0, then + self._cost(r)[1]
            elif self.left[r] >= 0.0:
                self.left[r] = max(0.0, self.left[r] - (then - self.now) / stretch)
            if self.left[r] < 0.0 and self.until[r] <= then:
                self._end(r, then)
        self.now = then

    def _begin(self) -> float:
        """Rows that can, begin; the moment at which the next one could."""
        soonest = math.inf
        for r, row in enumerate(self.rows):
            if self.left[r] >= 0.0 or self.until[r] >= 0.0 or self.at[r] == len(row):
                continue
            lane = r // len(self.timetable.rows)
            self._ask(row[self.at[r]], lane)
            ready = self._ready(row[self.at[r]], lane)
            if ready <= self.now:
                self.begun[r], self.left[r] = self.now, self._cost(r)[0]
                if self.at[r] + 1 < len(row):
                    self._ask(row[self.at[r] + 1], lane)
            else:
                soonest = min(soonest, ready)
        return soonest

    def _cost(self, row: int) -> tuple[float, float]:
        action = self.rows[row][self.at[row]]
        kinds = {"F": self.costs.forward, "B": self.costs.backward, "W": self.costs.weight}
        return kinds[action.kind][action.stage]

    def _end(self, row: int, then: float) -> None:
        action = self.rows[row][self.at[row]]
        kind, stage, micro = action.kind, action.stage, action.micro
        lane, here = divmod(row, len(self.timetable.rows))
        self.placed[lane].append(Placed(here, action, self.begun[row], then))
        self.at[row], self.until[row] = self.at[row] + 1, -1.0
        self.here[f"own {kind}", stage, micro, lane] = then
        other, boundary = (stage + 1, stage) if kind == "F" else (stage - 1, stage - 1)
        ends = stage + 1 if kind == "F" else stage
        if kind == "W" or ends % self.timetable.length == 0:  # a chain's first stage, or its last
            return
        key = (kind, other, micro, lane)
        if self.timetable.placement[other] != here:
            if self.costs.wire[boundary]:
                if key in self.asked:
                    self._depart(key, boundary, then)
                else:
                    self.offered.add(key)
                return
            then += self.costs.latency[boundary]
        self.here[key] = then

    def _ask(self, action: Action, lane: int) -> None:
        """A row asks for what `action` needs: before that a large message does not leave, as Gloo and NCCL have it. To
        one that lies ready, the word takes as long as a message."""
        key = (action.kind, action.stage, action.micro, lane)
        self.asked.add(key)
        if key in self.offered:
            self.offered.remove(key)
            boundary = action.stage - 1 if action.kind == "F" else action.stage
            self._depart(key, boundary, self.now + self.costs.latency[boundary])

    def _depart(self, key: _Key, boundary: int, now: float) -> None:
        """A message enters its wire when those before it have left it."""
        departs = max(now, self.free.get((key[0], boundary), 0.0))
        self.free[key[0], boundary] = departs + self.costs.wire[boundary]
        self.here[key] = self.free[key[0], boundary] + self.costs.latency[boundary]

    def _ready(self, action: Action, lane: int) -> float:
        """When all is here that a computation needs; infinity while it is not known."""
        ready, here = 0.0, (action.stage, action.micro, lane)
        for kind, stage in needs(action, self.timetable.length, split=True):
            key = (f"own {kind}", *here) if stage == action.stage else (kind, *here)
            ready = max(ready, self.here.get(key, math.inf))
        return ready
