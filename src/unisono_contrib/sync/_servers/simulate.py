"""Staleness by an event list: what a trace of delays gives under each rule, written without the sequencer.

A trace has, of each replica, the durations of its steps. No clock is read: times are sums of these. `staleness_*` are
the oracles, from the definitions; `play` has the sequencer itself play a trace. Both give the same numbers to the unit.
"""

import heapq
import random
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from unisono_contrib.sync._servers.rules import Rule
from unisono_contrib.sync._servers.sequencer import Entry, Sequencer, UpdateSchedule

Trace = Sequence[Sequence[float]]
"""[replicas][steps], durations. A replica that skips steps uses fewer."""


def random_trace(
    replicas: int, steps: int, seed: int, slow: Sequence[float] = (), turns: float = 1.0
) -> list[list[float]]:
    """Durations around 1, no two equal. slow: factors of the first replicas. turns: factor of one replica in each step,
    another one each time."""
    draw = random.Random(seed)
    factors = [*slow, *[1.0] * (replicas - len(slow))]
    trace = [[factor * draw.uniform(0.8, 1.2) for _ in range(steps)] for factor in factors]
    for step in range(steps):
        trace[step % replicas][step] *= turns
    return trace


@dataclass(frozen=True, slots=True)
class Simulated:
    """staleness: gradients by their staleness. seconds: when the last step ends. steps: updates."""

    staleness: Counter[int]
    seconds: float
    steps: int


def staleness_bounded(trace: Trace, bound: int) -> Simulated:
    """A replica begins clock c when it has ended c - 1 and all have ended c - bound - 1. Version v is there when all
    have ended clock v - 1."""
    ends: list[list[float]] = [[] for _ in trace]
    versions: list[float] = []  # when version v + 1 is there
    counts: Counter[int] = Counter()
    starts: list[list[float]] = [[] for _ in trace]
    steps = len(trace[0])
    for clock in range(steps):
        waited = versions[clock - bound - 1] if clock > bound else 0.0
        for worker, durations in enumerate(trace):
            starts[worker].append(max(ends[worker][-1] if clock else 0.0, waited))
            ends[worker].append(starts[worker][-1] + durations[clock])
        versions.append(max(each[clock] for each in ends))
    for begins in starts:
        counts.update(clock - min(clock, bisect_right(versions, begin)) for clock, begin in enumerate(begins))
    return Simulated(counts, versions[-1], steps)


def staleness_unbounded(trace: Trace) -> Simulated:
    """Each end of a step is a version, and a replica reads when it has ended the step before."""
    spans = []
    for durations in trace:
        now = 0.0
        for duration in durations:
            spans.append((now, now + duration))
            now += duration
    ends = sorted(end for _, end in spans)
    counts = Counter(bisect_right(ends, end) - 1 - bisect_right(ends, start) for start, end in spans)
    return Simulated(counts, ends[-1], len(ends))


def staleness_quorum(trace: Trace, k: int, patience: int, steps: int) -> Simulated:
    """Step by step: who is free begins; who is still at an older step begins when that is over. The update is made when
    k have ended it, and all whom it waits for; the last one when all have."""
    free, late = [0.0] * len(trace), [0] * len(trace)
    turns, at = [0] * len(trace), [-1] * len(trace)  # steps begun; the step under way, -1 for none
    counts: Counter[int] = Counter()
    now = 0.0
    for step in range(steps):
        ended, awaited = set[int](), set[int]()

        def begin(worker: int, time: float, step: int = step, awaited: set[int] = awaited) -> None:
            at[worker], free[worker] = step, time + trace[worker][turns[worker]]
            turns[worker] += 1
            if patience and late[worker] >= patience:
                awaited.add(worker)

        for worker in range(len(trace)):
            if at[worker] == -1:
                begin(worker, now)
        need = len(trace) if step == steps - 1 else k
        while len(ended) < len(trace) and (len(ended) < need or not awaited <= ended):
            worker = min((w for w in range(len(trace)) if w not in ended), key=lambda w: free[w])
            now = free[worker]
            counts[step - at[worker]] += 1
            if at[worker] == step:
                ended.add(worker)
                late[worker] = 0
            else:
                late[worker] += 1
                begin(worker, now)
        for worker in ended:
            at[worker] = -1
    return Simulated(counts, now, steps)


def play(rule: Rule, trace: Trace, steps: int) -> Simulated:
    """The sequencer plays a trace on a logical clock, with one shard that has every gradient at once."""
    sequencer = Sequencer(
        rule, UpdateSchedule(lambda step: 1.0, steps=steps), range(len(trace)), 1, speaker=-1
    )
    ends: list[tuple[float, int, int]] = []
    turns, now = [0] * len(trace), 0.0

    def follow(entries: Sequence[Entry]) -> None:
        for entry in entries:
            worker = entry.get("worker", -1)
            if entry["op"] == "read":
                heapq.heappush(ends, (now + trace[worker][turns[worker]], worker, reading[worker]))
                turns[worker] += 1
            elif entry["op"] == "took" and entry["next"] < steps:
                reading[worker] = entry["next"]
                follow(sequencer.ready(worker, entry["next"]))

    reading = dict.fromkeys(range(len(trace)), 0)
    sequencer.filled(0)
    for worker in range(len(trace)):
        sequencer.begin(worker, 0)
    for worker in range(len(trace)):
        follow(sequencer.ready(worker, 0))
    while ends:
        now, worker, step = heapq.heappop(ends)
        follow([*sequencer.have(0, worker, step), *sequencer.announce(worker, step, 1.0)])
    return Simulated(sequencer.tally.staleness, now, sequencer.version)
