"""Leaves by measured speed: a replica that computes slowly gets fewer micro-batches, and nobody waits for it as long.

Each rank measures the seconds that it computes for a leaf, waits left out. Every so many steps all ranks gather these
numbers, so all of them come to the same assignment. It is taken up if it would have ended the steps since the last look
clearly sooner, and if the look before said the same of the same replica: what passes changes nothing. Leaves, their
weights and their randomness belong to the step, so a step remains what it was; only the order of sums may change.
"""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from unisono.comm.device import is_apart, mark, seconds_between
from unisono.comm.members import stretches_of
from unisono.observe.span import Recorder
from unisono.train.step.assigner import Assigner
from unisono.train.step.join import take_leaves
from unisono.train.step.run import Run

WORTH = 0.9
"""Of the seconds that the last replica computes: another assignment has to be below."""
WARM = 2
"""Steps after a start that are not measured: they compile, and make memory."""


class BySpeed(Assigner):
    """Assigns leaves anew by measured speed. every: steps between two looks. stretches: of leaves, as they are assigned
    at the start. branches: see `comm.members.assign`. Every rank of a run makes one."""

    def __init__(self, run: Run, every: int, stretches: Sequence[range], branches: bool) -> None:
        super().__init__([len(stretch) for stretch in stretches])
        self._run, self._every, self._branches = run, every, branches
        self._seconds = list[float]()  # of a leaf, in each step since the last look
        self._marks: tuple[Any, Any] | None = None
        self._cold, self._slow, self._note = WARM, -1, ""
        self._idle: float | None = None

    @contextmanager
    def computing(self) -> Iterator[None]:
        run = self._run
        begun = mark(run.local.device) if is_apart(run.local.device) else _computed(run.recorder)
        yield
        if is_apart(run.local.device):
            self._marks = begun, mark(run.local.device)
        else:
            self._took(_computed(run.recorder) - begun)

    def stepped(self) -> None:
        if self._marks is not None:
            marks, self._marks = self._marks, None
            self._took(seconds_between(*marks))
        if self._cold:
            self._cold -= 1
            self._seconds.clear()
        if len(self._seconds) >= self._every:
            costs = self._gathered(statistics.median(self._seconds))
            self._seconds.clear()
            self._look(costs)

    def metrics(self) -> Mapping[str, Any]:
        idle, self._idle = self._idle, None
        return {"leaves": self.counts} | ({} if idle is None else {"idle_share": round(idle, 4)})

    def take_note(self) -> str:
        note, self._note = self._note, ""
        return note

    def _took(self, seconds: float) -> None:
        self._seconds.append(seconds / len(self._run.leaves))

    def _gathered(self, seconds: float) -> list[float]:
        """Seconds that each replica computes for a leaf, those of its slowest rank; the same on all ranks."""
        run = self._run
        here = torch.tensor([[run.mesh.at["dp"], seconds]], dtype=torch.float64, device=run.local.device)
        costs = [1e-9] * run.mesh.dp.size
        for replica, cost in run.mesh.world.all_gather(here).tolist():
            costs[int(replica)] = max(costs[int(replica)], cost)
        return costs

    def _look(self, costs: Sequence[float]) -> None:
        run, ends = self._run, _ends(self.counts, costs)
        self._idle = 1.0 - statistics.fmean(ends) / max(ends)
        shape, speeds = run.mesh.shape, [1.0 / cost for cost in costs]
        stretches = stretches_of(run.of_leaves, shape.dp, shape.shard, speeds, self._branches)
        counts = [len(stretch) for stretch in stretches]
        slow, before = ends.index(max(ends)), self._slow
        self._slow = slow if max(_ends(counts, costs)) <= WORTH * max(ends) else -1
        if self._slow < 0 or self._slow != before:
            return
        self._slow, self.counts = -1, counts
        take_leaves(run, stretches)
        times = costs[slow] / min(costs)
        said = f"replica {slow} ends last, at {times:.1f} times the quickest one's seconds a micro-batch"
        self._note = f"micro-batches of each replica from now on: {'/'.join(map(str, counts))}; {said}"


def _ends(counts: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Seconds that each replica computes in a step."""
    return [count * cost for count, cost in zip(counts, costs, strict=True)]


def _computed(recorder: Recorder) -> float:
    """Seconds that this rank has computed so far, in forwards and backwards."""
    totals = recorder.totals()
    return totals.get("forward", 0.0) + totals.get("backward", 0.0)
