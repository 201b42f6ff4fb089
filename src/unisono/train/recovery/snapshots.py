"""When a run's ranks put snapshots into their buffers: beside the step, and seldom enough to cost little.

Each rank writes its own part, every N steps, the same steps on all. A thread writes while the next step computes, from
the end of one update to the beginning of the next: an update that comes sooner waits. Of what changes in between
(running statistics, what a policy keeps) the thread gets a copy.

Without a wish, snapshots are kept where one rank alone holds a part of the run (`dp=1`), or the ranks of one host of
several do, and the host's memory has room for them. Then N follows what a snapshot was measured to take of a rank's
time, on the slowest rank: `SHARE` of the steps between two. On several hosts each snapshot is copied to another one
(`replicas`), for at most `LINKS` of the time.
"""

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.observe.memory import available
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.build.build import Place
from unisono.train.recovery.replication import Replication, SnapshotReplicas
from unisono.train.recovery.snapshot_buffer import SnapshotBuffer
from unisono.train.state.checkpoint.boxes import Box
from unisono.train.state.checkpoint.read import AVERAGE
from unisono.train.state.run_state import kept_of, pieces_of
from unisono.train.step.overlap import unflushed
from unisono.train.step.run import Run

SHARE = 0.005
"""Of a step's time, what snapshots may take where nobody says how often: with guard and watchdog it stays under 2 %."""
ROOM = 0.5
"""Of the memory that is free, what two snapshots of all ranks may fill where nobody asked for them."""
LINKS = 0.1
"""Of the time, for how much of it copies may be on their way to other hosts where nobody says how often."""
_PARTED = 1.0
"""Seconds for copies to end when ranks meet anew."""
_TRIED = 3
"""Snapshots before the first measurement counts: two make the files, and memory that is new takes longer."""

Agree = Callable[[Any], list[Any]]
"""What one rank says → what all say, in their order. Every rank calls it."""


def among(store: Any, rank: int, world: int) -> Agree:
    """Words over a torch Store of this meeting: no collective, which would count as the run's."""
    rounds = iter(range(1 << 62))

    def agree(said: Any) -> list[Any]:
        at = f"snapshots/{next(rounds)}"
        store.set(f"{at}/{rank}", json.dumps(said))
        return [json.loads(store.get(f"{at}/{other}")) for other in range(world)]

    return agree


class Snapshots:
    """Snapshots of a run under way. Every rank makes one, and calls it after the same steps. What is in the buffer of
    later steps than the run's is forgotten: it goes another way from here.

    place: this rank's. buffer: None where nobody keeps anything for this rank. every: steps between two, 0: none, None:
    as above. tell: what is to be said. replicas, store: for copies on other hosts. Raises UsageError L09, on all ranks,
    where snapshots are asked for and cannot be kept.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        place: Place,
        buffer: SnapshotBuffer | None,
        every: int | None,
        agree: Agree,
        tell: Callable[[str], None],
        replicas: SnapshotReplicas | None = None,
        store: Any = None,
    ) -> None:
        self.run, self._buffer, self._agree, self._tell, self._replicas = run, buffer, agree, tell, replicas
        self._beside = (
            plan.dp == 1 and plan.offload == "none"
        )  # no policy, and no home, that writes in between
        self._measured = every is None
        self._copies: Replication | None = None
        self.turned_back()
        self.every, hosts = _first(run, plan, place.host, buffer, every, self._beside, agree)
        if self.every and replicas is not None and len(set(hosts)) > 1:
            self._copies = replicas.copies(place, store, hosts)
        self.stall = 0.0
        """Seconds that updates waited, since `take_stall`."""
        self._count, self._due = 0, _TRIED
        self._steps: list[float] = []
        self._costs: list[float] = []
        self._cost = 0.0  # of the one under way
        self._thread: threading.Thread | None = None
        self._failed: OSError | None = None
        if self.every:
            run.update.optimizer.register_step_pre_hook(lambda *_: self.settle())

    def stepped(self, seconds: float, state: Mapping[str, Any]) -> None:
        """A step that took so many seconds has ended. state: JSON values to keep beside."""
        if not self.every:
            return
        self.settle()
        self._steps.append(seconds)
        if self._measured and self._count == self._due:
            self._weigh()
        if self.run.step - self._last >= self.every:
            self._last = self.run.step
            if self._copies is None or self._copied(self._copies):
                self._count += 1
                self._take(state)

    def settle(self) -> None:
        """Wait for the snapshot under way, if there is one: weights are about to change."""
        if self._thread is None:
            return
        begun = time.perf_counter()
        self._thread.join()
        waited, self._thread = time.perf_counter() - begun, None
        self.stall += waited
        if self._count >= _TRIED:
            self._costs.append(self._cost + waited)
        if self._failed is not None and self._buffer is not None:
            self._tell(f"no snapshots from now on: {self._failed}")
            self._buffer = None

    def end(self) -> None:
        """Nothing more is put aside: the ranks are about to meet anew, which ends copies too."""
        self.settle()
        if self._copies is not None:
            self._copies.end(_PARTED)

    def turned_back(self) -> None:
        """The run goes on from an earlier step: what is kept of later ones is forgotten."""
        self._last = self.run.step
        if self._copies is not None:  # one under way would lie there afterwards
            self._copies.settle()
        for place in (self._buffer, self._replicas):
            if place is not None:
                place.drop(after=self._last)

    def _copied(self, copies: Replication) -> bool:
        """Whether all ranks have their copies of what was put aside last, so that it may be replaced: else this time
        is left out. Every rank calls it."""
        begun = time.perf_counter()
        said = self._agree([copies.ready(), copies.failed or ("" if self._buffer else "no snapshots")])
        if any(failed for _, failed in said):
            first = next(rank for rank, (_, failed) in enumerate(said) if failed)
            self._copies = None
            if self.run.mesh.rank == 0:
                self._tell(
                    f"no copies of snapshots on other hosts from now on: rank {first}: {said[first][1]}"
                )
            return True
        if self._count >= _TRIED:
            self._costs.append(time.perf_counter() - begun)
        return all(ready for ready, _ in said)

    def take_stall(self) -> dict[str, float]:
        """For the metrics of a step: what it waited."""
        stall, self.stall = self.stall, 0.0
        return {"snapshot_stall": round(stall, 6)} if stall else {}

    def _take(self, state: Mapping[str, Any]) -> None:
        if self._buffer is None:  # the others go on
            return
        begun = time.perf_counter()
        boxes = _boxes_of(self.run, self._beside)
        before = time.perf_counter() - begun
        self._thread = threading.Thread(
            target=self._put, args=(self._buffer, self.run.step, dict(state), boxes, before), name="unisono-snapshot",
            daemon=True,
        )  # fmt: skip
        self._thread.start()

    def _put(
        self, buffer: SnapshotBuffer, step: int, state: dict[str, Any], boxes: Sequence[Box], before: float
    ) -> None:
        begun = time.thread_time()  # cores may be taken: what counts is what it takes of one
        try:
            buffer.put(step, state, boxes)
        except OSError as error:
            self._failed = error
        self._cost = before + time.thread_time() - begun
        if self._copies is not None:
            self._copies.begin()

    def _weigh(self) -> None:
        """How many steps between two snapshots, by the rank that they cost most. Again after twice as many."""
        step = max(statistics.median(self._steps), 1e-9)
        cost = statistics.median(self._costs or [0.0]) / step / SHARE
        if self._copies is not None and self._copies.seconds:
            cost = max(cost, statistics.median(self._copies.seconds) / step / LINKS)
            self._copies.seconds.clear()
        self.every = max(1, math.ceil(max(self._agree(cost))))
        self._due, self._steps, self._costs = 2 * self._count, [], []


def _first(
    run: Run,
    plan: Plan,
    host: int,
    buffer: SnapshotBuffer | None,
    every: int | None,
    beside: bool,
    agree: Agree,
) -> tuple[int, list[int]]:
    """Steps between two snapshots, for the beginning, and the host of each rank."""
    why = likely = ""
    if buffer is None:
        why = "nobody outlives the ranks here who could keep them"
        likely = "torchrun or the like started the ranks, or launch.recover is false"
    if unflushed(plan) is not None or run.update.by_parts:
        why = f"under {plan} parts of the model are updated at different times"
    if not run.sync.keeps_weights:
        why = f"under {plan} weights and optimiser lie with servers"
    if run.sync.one_copy:
        why = f"under {plan} replicas change the same weights at any time"
    if every and why:
        fix = "leave launch.snapshot_every out; train.save_every keeps checkpoints"
        what = f"launch.snapshot_every={every}: {why}"
        raise UsageError(what, where="launch.snapshot_every", likely=likely, fix=fix, code="L09")
    if every == 0 or why:
        return 0, []
    nbytes = sum(
        box.tensor.numel() * box.tensor.element_size() for box in _boxes_of(run, beside, whole=False)
    )
    part = [at for axis, at in sorted(run.mesh.at.items()) if axis != "dp"]
    said = [Holding(*numbers) for numbers in agree([nbytes, available(), host, part])]
    hosts = [numbers.host for numbers in said]
    if every is not None:
        return every, hosts
    return int(plan.offload == "none" and lonely(said) and fits(said)), hosts


@dataclass(frozen=True, slots=True)
class Holding:
    """What a rank says of itself: bytes of a snapshot, bytes of memory that are free, its host, its place on all axes
    but that of replicas."""

    nbytes: int
    free: float
    host: int
    part: list[int]


def lonely(ranks: Sequence[Holding]) -> bool:
    """Whether one rank, or the ranks of one host of several, hold a part of the run that nobody else holds."""
    several = len({holding.host for holding in ranks}) > 1
    holders = [[other.host for other in ranks if other.part == holding.part] for holding in ranks]
    return any(len(hosts) == 1 or (several and len(set(hosts)) == 1) for hosts in holders)


def fits(ranks: Sequence[Holding]) -> bool:
    """Whether there is room on every host for two snapshots of each of its ranks, and on several hosts for two copies
    of each of the host before."""
    hosts = sorted({holding.host for holding in ranks})
    needs = {host: 2 * sum(holding.nbytes for holding in ranks if holding.host == host) for host in hosts}
    before = dict(zip(hosts, [hosts[-1], *hosts], strict=False))
    copies = {host: needs[before[host]] if len(hosts) > 1 else 0 for host in hosts}
    return all(needs[rank.host] + copies[rank.host] <= ROOM * rank.free for rank in ranks)


def _boxes_of(run: Run, beside: bool, whole: bool = True) -> list[Box]:
    """What this rank alone is to keep, so that ranks together keep everything once. beside: tensors that only the
    optimiser writes may be read until it does; of all else, a copy, unless just its size is asked for."""
    slots = run.local.slots
    steady = {f"model/{run.local.owners.get(slot.name, slot.name)}" for slot in slots}
    boxes = []
    for box in [*pieces_of(run), *kept_of(run)]:
        if box.saved and box.tensor.numel():
            calm = beside and (box.name in steady or box.name.startswith(("optim/", AVERAGE)))
            boxes.append(box if calm or not whole else replace(box, tensor=box.tensor.detach().clone()))
    return boxes
